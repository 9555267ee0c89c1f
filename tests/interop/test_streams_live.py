"""The real Kafka Streams reads our bytes, writes what was recorded, and puts keys where we put them."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from kafka_broker import Broker
from kafka_home import KafkaHome
from streams_fixtures import NAMES, STREAMS
from streams_oracle import ask

import tidegate as tg
from tidegate.kernels.hashing import murmur2
from tidegate.log.log import open_log
from tidegate.windows.keys import (
    LATEST,
    LENIENT,
    KeyFormat,
    decode_keys,
    encode_keys,
    partitions_of_inner_keys,
)

pytestmark = pytest.mark.interop

SIZE = 60_000


def random_keys(count: int, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    short = [b"", b"\0", b"a", b"aa", b"\xff" * 9, "schlüssel".encode()]
    return [*short, *(chance.randbytes(chance.randrange(40)) for _ in range(count - len(short)))]


def test_the_recorded_topologies_are_what_kafka_streams_does(kafka: KafkaHome, tmp_path: Path) -> None:
    ask(kafka, "record", str(tmp_path))
    assert sorted(path.stem for path in tmp_path.iterdir()) == NAMES
    for name in NAMES:
        assert (tmp_path / f"{name}.jsonl").read_text() == (STREAMS / f"{name}.jsonl").read_text(), name


@pytest.mark.parametrize("key_format", list(KeyFormat))
def test_its_deserializers_read_our_keys(kafka: KafkaHome, key_format: KeyFormat) -> None:
    keys = random_keys(3000, seed=5)
    chance = np.random.default_rng(5)
    start = chance.integers(0, 2**42, len(keys))
    start[:3] = [0, 1, 2**63 - 1 - SIZE]
    end = start + chance.integers(0, SIZE, len(keys))
    is_session = key_format is KeyFormat.SESSION
    column = encode_keys(pa.array(keys, pa.binary()), start, key_format, end=end if is_session else None)
    answers = ask(
        kafka, "decode", lines=[f"{key_format.value} {SIZE} {raw.hex()}" for raw in column.to_pylist()]
    )
    ends = end if is_session else start + SIZE
    expected = [f"{key.hex()} {a} {b}" for key, a, b in zip(keys, start.tolist(), ends.tolist(), strict=True)]
    assert answers == expected


@pytest.mark.parametrize("key_format", list(KeyFormat))
def test_we_accept_what_its_deserializers_accept(kafka: KafkaHome, key_format: KeyFormat) -> None:
    """Any bytes: both refuse, or both read the same; sequences are the one thing only we look at."""
    keys = [key for key in random_keys(4000, seed=9) if key]
    size = None if key_format is KeyFormat.SESSION else SIZE
    decoded = decode_keys(pa.array(keys, pa.binary()), key_format, size_ms=size, checks=LENIENT)
    answers = ask(kafka, "decode", lines=[f"{key_format.value} {SIZE} {raw.hex()}" for raw in keys])
    inner = decoded.inner.to_pylist()
    read = 0
    for row, answer in enumerate(answers):
        if answer.startswith("error"):
            assert decoded.bad[row], keys[row].hex()
        elif decoded.bad[row]:
            assert "sequence" in decoded.reason(row), keys[row].hex()
        else:
            assert answer == f"{inner[row].hex()} {decoded.start[row]} {decoded.end[row]}"
            read += 1
    assert read > 200


def test_windowed_keys_go_where_kafka_puts_their_inner_key(kafka: KafkaHome) -> None:
    keys = [key for key in random_keys(20_000, seed=11) if key]
    column = pa.array(keys, pa.binary())
    counts = (1, 4, 10, 97)
    answers = ask(kafka, "partition", lines=[f"{count} {key.hex()}" for count in counts for key in keys])
    chosen = [partition for count in counts for partition in partitions_of_inner_keys(column, count).tolist()]
    assert chosen == [int(answer.split()[1]) for answer in answers]
    hashes = [int(np.int64(murmur2(np.frombuffer(key, np.uint8))).astype(np.int32)) for key in keys]
    assert hashes * len(counts) == [int(answer.split()[0]) for answer in answers]


def test_it_restores_every_session_that_an_app_wrote(
    kafka: KafkaHome, broker: Broker, tmp_path: Path
) -> None:
    """Nothing but sessions is in the topic: a control record would be read as one far ahead, and expire the others."""
    now = int(time.time()) // 60 * 60_000 - 3 * 3_600_000
    chance = random.Random(3)
    rows = sorted(
        (now + chance.randrange(2 * 3_600_000), f"customer-{chance.randrange(40)}") for _ in range(3000)
    )
    url = f"kafka://localhost:{broker.port}"
    with open_log(url) as log:
        for topic in ("restored-orders", "restoring-in"):
            log.create_topic(topic, 2)
        with log.writer("restored-orders") as writer:
            writer.write(
                pa.table(
                    {
                        "key": [key for _, key in rows],
                        "value": ["x"] * len(rows),
                        "timestamp": [at for at, _ in rows],
                    }
                )
            )
    app = tg.App("restored", log=url, state=tmp_path / "state")
    windows = app.stream("restored-orders").window(tg.Session("20s", grace="3h", retention="1d"))
    windows.agg(n=tg.count()).to_topic("restoring-visits-changelog", value=tg.Long())
    for _ in range(2):  # a graceful end, and on from there
        app.run("local", until="caught_up", round_records=500)
    expected = sessions_of(rows, 20_000)
    asked = sorted({key for _, key in rows})
    answers = ask(
        kafka, "restore", f"localhost:{broker.port}", "restoring", "visits", "restoring-in", str(tmp_path / "java"),
        "20000", str(86_400_000), lines=asked,
    )  # fmt: skip
    assert sorted(answers) == sorted(expected)
    with open_log(url) as log:
        for batch in log.reader("restoring-visits-changelog", control_records=True):
            decoded = decode_keys(batch.column("key"), KeyFormat.SESSION)
            assert decoded.bad_rows == 0 and b"" not in batch.column("value").to_pylist()


def sessions_of(rows: list[tuple[int, str]], gap: int) -> list[str]:
    """The naive way."""
    told = []
    for key in {key for _, key in rows}:
        times = sorted(at for at, each in rows if each == key)
        start = last = times[0]
        count = 1
        for at in [*times[1:], LATEST]:
            if at - last > gap:
                told.append(f"{key} {start} {last} {count}")
                start, count = at, 0
            last, count = at, count + 1
    return told
