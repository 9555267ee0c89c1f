"""One suite over both kinds of log: a folder and a (mock) Kafka cluster behave alike for writers and readers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.errors import InvalidError, OffsetOutOfRangeError
from tidegate.log.access.connect import open_log
from tidegate.log.access.partitioner import partition_of_key
from tidegate.log.batches.records import RECORD_SCHEMA

PARTITIONS = 4  # what the mock cluster gives every topic


@pytest.fixture(params=["folder", "kafka"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """A log with an empty topic `t` of four partitions."""
    if request.param == "folder":
        with open_log(str(tmp_path / "log"), durability="os") as log:
            log.create_topic("t", PARTITIONS)
            yield log
        return
    confluent_kafka = pytest.importorskip("confluent_kafka")
    owner = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "replaced", "log_level": 0}
    )
    broker = next(iter(owner.list_topics(timeout=120).brokers.values()))
    owner.list_topics("t", timeout=120)  # asking for it makes it
    with open_log(f"kafka://127.0.0.1:{broker.port}") as log:
        yield log
    del owner


def rows(first: int, last: int, **columns: Any) -> pa.Table:
    return pa.table({"value": [b"%d" % number for number in range(first, last)], **columns})


def read(log: Any, *arguments: Any, **settings: Any) -> list[int]:
    with log.reader("t", *arguments, **settings) as reader:
        return [int(value) for batch in reader for value in batch.column("value").to_pylist()]


def test_topics_and_partitions(log: Any) -> None:
    assert log.topics() == ["t"]
    assert log.partition_counts() == {"t": PARTITIONS}


def test_what_is_written_is_read_in_order(log: Any) -> None:
    with log.writer("t") as writer:
        written = writer.write(rows(0, 100), partition=1)
    assert sum(batch.records for batch in written) == 100
    assert read(log, [1]) == list(range(100))
    assert read(log) == list(range(100))
    assert read(log, [0]) == []


def test_every_field_comes_back(log: Any) -> None:
    table = pa.table(
        {
            "key": pa.array([b"k", None, b""], pa.binary()),
            "value": pa.array([b"\x00\xff", None, b""], pa.binary()),
            "timestamp": [1_767_225_600_001, 1_767_225_600_002, 1_767_225_600_003],
            "partition": pa.array([2, 2, 2], pa.int32()),
            "headers": pa.array(
                [[("h", b"1"), ("n", None)], [], None],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        }
    )
    with log.writer("t", compression="gzip") as writer:
        writer.write(table)
    with log.reader("t", [2]) as reader:
        batches = list(reader)
    assert all(batch.schema == RECORD_SCHEMA for batch in batches)
    back = pa.Table.from_batches(batches, RECORD_SCHEMA)
    assert back.column("topic").to_pylist() == ["t"] * 3
    assert back.column("offset").to_pylist() == [0, 1, 2]
    for name in ("key", "value", "partition"):
        assert back.column(name).to_pylist() == table.column(name).to_pylist()
    assert back.column("timestamp").cast(pa.int64()).to_pylist() == table.column("timestamp").to_pylist()
    assert back.column("headers").to_pylist() == [
        [{"key": "h", "value": b"1"}, {"key": "n", "value": None}],
        [],
        [],
    ]


def test_keys_go_to_the_same_partitions(log: Any) -> None:
    keys = [b"key-%d" % number for number in range(40)]
    with log.writer("t") as writer:
        writer.write(rows(0, 40, key=keys))
    with log.reader("t") as reader:
        placed = {
            key: partition
            for batch in reader
            for key, partition in zip(
                batch.column("key").to_pylist(), batch.column("partition").to_pylist(), strict=True
            )
        }
    assert placed == {key: partition_of_key(key, PARTITIONS) for key in keys}


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        ("earliest", None, range(20)),
        ("latest", None, range(0)),
        (7, None, range(7, 20)),
        (20, None, range(0)),
        (-3, None, range(17, 20)),
        (5, 9, range(5, 9)),
        ("start", "end", range(20)),
        ({3: 18}, {3: 19}, range(18, 19)),
    ],
)
def test_start_and_stop(log: Any, start: Any, stop: Any, expected: range) -> None:
    with log.writer("t") as writer:
        writer.write(rows(0, 20), partition=3)
    assert read(log, [3], start=start, stop=stop) == list(expected)


def test_polling_positions_and_seeking(log: Any) -> None:
    with log.writer("t") as writer, log.reader("t", [0], start="latest") as reader:
        assert reader.poll() is None
        writer.write(rows(0, 5), partition=0)
        seen: list[int] = []
        while len(seen) < 5:
            batch = reader.poll("20s")
            assert batch is not None
            seen += [int(value) for value in batch.column("value").to_pylist()]
        assert seen == [0, 1, 2, 3, 4]
        assert reader.positions() == {0: 5}
        assert reader.end_offsets() == {0: 5}
        assert not reader.is_done
        reader.seek(0, 3)
        batch = reader.poll("20s")
        assert batch is not None
        assert batch.column("offset")[0].as_py() == 3


def test_offsets_that_are_not_there(log: Any) -> None:
    with pytest.raises(OffsetOutOfRangeError) as refused, log.reader("t", [0], start=99) as reader:
        for _ in range(20):
            reader.poll("1s")
    assert refused.value.kafka_name == "OFFSET_OUT_OF_RANGE"
    assert (refused.value.offset, refused.value.end) == (99, 0)


def test_what_does_not_exist_is_said_so(log: Any) -> None:
    for use in (lambda: log.reader("tt"), lambda: log.writer("tt")):
        with pytest.raises(InvalidError, match="did you mean t") as unknown:
            use()
        assert unknown.value.kafka_name == "UNKNOWN_TOPIC_OR_PARTITION"
    with pytest.raises(InvalidError, match="has no partition 9"):
        log.reader("t", [9])
