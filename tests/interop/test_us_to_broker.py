"""We write, a broker opens: without a word about recovery, and an ordinary client reads all of it.

A broker knows topics by id and moves unknown ones aside, so it makes the topics first; then our files take
the place of its empty ones, everything but `partition.metadata`, our own plain files included.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa
import pytest
from comparing import partition_files
from consuming import consume, read
from java_dump import dumpable, java_dump
from kafka_broker import Broker, set_lines
from kafka_home import KafkaHome
from kafka_wire import RefusedError, Wire
from raw_batches import Row, batch, stored_batches
from workloads import CODECS, FOREVER, T0

from encoded_batches import end_txn_marker
from tidegate.clock import ManualClock
from tidegate.log.format.batch import ControlType
from tidegate.log.log import Log
from tidegate.log.producer_state import Origin

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]

SMALL = {
    "segment.bytes": "6000",
    "index.interval.bytes": "500",
    "segment.index.bytes": "1200",
    "retention.ms": "-1",
    "segment.ms": FOREVER,
}
MARKER = ".kafka_cleanshutdown"
CHECKPOINTS = ("recovery-point-offset-checkpoint", "log-start-offset-checkpoint", "cleaner-offset-checkpoint")


def table(count: int, seed: int = 0, first_ms: int = T0) -> pa.Table:
    """Records with and without keys, values and headers."""
    numbers = range(seed, seed + count)
    headers = pa.array(
        [
            [{"key": "n", "value": b"%d" % n}, {"key": "none", "value": None}] if n % 4 == 0 else []
            for n in numbers
        ],
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    )
    return pa.table(
        {
            "key": pa.array([None if n % 5 == 0 else b"key %d" % (n % 9) for n in numbers], pa.binary()),
            "value": pa.array(
                [None if n % 7 == 6 else b"value %d " % n * (n % 6) for n in numbers], pa.binary()
            ),
            "timestamp": pa.array([first_ms + 250 * n for n in numbers], pa.timestamp("ms", "UTC")),
            "headers": headers,
        }
    )


def write_codecs(log: Log, topic: str) -> None:
    for number, codec in enumerate(CODECS):
        log.writer(topic, compression=codec, batch_records=7).write(table(60, 100 * number))


def write_singly(log: Log, topic: str) -> None:
    log.writer(topic, batch_records=1).write(table(150))


def write_idempotently(log: Log, topic: str) -> None:
    now_ms = time.time_ns() // 1_000_000  # a broker forgets producers that were silent for a day
    log.writer(topic, producer_id=901, producer_epoch=2, batch_records=5).write(table(90, 0, now_ms))
    log.writer(topic, producer_id=902, batch_records=3).write(table(45, 0, now_ms))


def write_transactions(log: Log, topic: str) -> None:
    partition = log.partition(topic, 0)
    sequences = dict.fromkeys((911, 912), 0)
    for index in range(60):
        producer = 911 + index % 2
        rows = [Row(T0 + index, b"k%d" % index, b"transactional")] * 2
        sent = batch(
            rows,
            producer_id=producer,
            producer_epoch=0,
            base_sequence=sequences[producer],
            transactional=True,
        )
        partition.append(sent)
        sequences[producer] += 2
        if index % 7 == 6:
            marker = end_txn_marker(
                ControlType.COMMIT if index % 4 < 2 else ControlType.ABORT,
                producer_id=producer,
                producer_epoch=0,
                coordinator_epoch=0,
                timestamp=T0 + index,
            )
            partition.append(marker, origin=Origin.COORDINATOR)
        partition.acknowledge(sync=False)


def write_and_delete(log: Log, topic: str) -> None:
    write_singly(log, topic)
    log.partition(topic, 0).delete_records_before(70)


WRITERS: dict[str, Callable[[Log, str], None]] = {
    "ours-codecs": write_codecs,
    "ours-singly": write_singly,
    "ours-idempotent": write_idempotently,
    "ours-transactions": write_transactions,
    "ours-deleted": write_and_delete,
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log folder we wrote and closed."""
    folder = tmp_path_factory.mktemp("ours") / "log"
    with Log(folder, clock=ManualClock(T0 + 10**9)) as log:
        for topic, write in WRITERS.items():
            log.create_topic(topic, config=SMALL)
            write(log, topic)
    return folder


def put_in_place(broker: Broker, ours: Path) -> None:
    """Give the stopped broker our files for its own: partitions, checkpoints, marker, and what only we use."""
    swap_in(broker, ours, WRITERS)
    for path in [*ours.glob("tidegate.*"), *ours.glob("server.properties"), ours / MARKER]:
        if path.exists():
            shutil.copyfile(path, broker.data / path.name)


def swap_in(broker: Broker, ours: Path, topics: Iterable[str]) -> None:
    """Our partitions and checkpoint lines in the place of the broker's; the topic ids stay the broker's."""
    for topic in topics:
        target = broker.partition(topic)
        identity = (target / "partition.metadata").read_bytes()
        shutil.rmtree(target)
        shutil.copytree(ours / target.name, target)
        (target / "partition.metadata").write_bytes(identity)
        (target / f"{0:020d}.log.12.cut").write_bytes(b"what a recovery of ours once set aside")
        for name in CHECKPOINTS:
            known = read_checkpoint(ours / name)
            set_lines(broker.data / name, {(topic, 0): known.get(topic)})


def read_checkpoint(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text().splitlines()[2:]) if path.exists() else ()
    return {topic: int(offset) for topic, _, offset in rows}


def complaints(broker: Broker) -> list[str]:
    """What the broker said about our partitions that is not good news, and about recovering them."""
    words = ("orrupt", "runcat", "ecovering unflushed", "rphaned", "ould not find", "stray")
    return [
        line
        for line in broker.output().splitlines()
        if "partition=ours-" in line
        and (line.startswith(("WARN", "ERROR")) or any(word in line for word in words))
    ]


def kept_files(folder: Path) -> dict[str, bytes]:
    """What a recovery must not change: everything but snapshots, which show when they were taken."""
    return {name: data for name, data in partition_files(folder).items() if not name.endswith(".snapshot")}


@pytest.fixture(scope="module")
def opened(module_broker: Broker, ours: Path) -> Broker:
    """The broker, started on our folders, their indexes and the clean marker."""
    broker = module_broker
    broker.create_all(dict.fromkeys(WRITERS, SMALL))
    broker.stop()
    put_in_place(broker, ours)
    return broker.start()


def test_a_broker_opens_our_folders_without_a_word(opened: Broker, ours: Path) -> None:
    assert (ours / MARKER).exists()
    assert complaints(opened) == []
    assert not list(opened.data.glob("*-stray"))


@pytest.mark.parametrize("topic", WRITERS)
@pytest.mark.parametrize("committed", [False, True], ids=["uncommitted", "committed"])
def test_an_ordinary_client_reads_all_we_wrote(
    opened: Broker, ours: Path, topic: str, committed: bool
) -> None:
    theirs = consume(opened.address, topic, committed=committed)
    assert theirs == read(ours, topic, committed=committed)
    assert len(theirs) >= 40


def test_a_broker_finds_offsets_by_time_in_our_indexes(opened: Broker, ours: Path) -> None:
    with Wire(opened.address) as wire, Log(ours, read_only=True) as log:
        for topic in ("ours-singly", "ours-codecs"):
            records = read(ours, topic)
            for timestamp in range(T0 - 100, T0 + 130_000, 1777):
                wanted = next((seen.offset for seen in records if seen.timestamp >= timestamp), -1)
                assert wire.offset_for(topic, timestamp) == wanted, (topic, timestamp)
        assert log.topics() == sorted(WRITERS)


def test_a_broker_knows_our_producers(opened: Broker) -> None:
    """A batch sent again keeps its offset, a gap is refused, what follows ours is taken."""
    topic = "ours-idempotent"
    head, last = list(stored_batches(opened.partition(topic)))[-1]
    row = Row(T0, b"k", b"v")
    with Wire(opened.address) as wire:
        end = wire.offset_for(topic, -1)
        repeated = b"\0" * 8 + last[8:12] + b"\xff" * 4 + last[16:]
        assert wire.produce(topic, repeated) == head.base_offset
        with pytest.raises(RefusedError) as refused:
            wire.produce(topic, batch([row], producer_id=902, producer_epoch=0, base_sequence=99))
        assert refused.value.name == "OUT_OF_ORDER_SEQUENCE_NUMBER"
        following = batch([row], producer_id=902, producer_epoch=0, base_sequence=45)
        assert wire.produce(topic, following) == end


def test_there_and_back(broker: Broker, tmp_path: Path) -> None:
    """We write, a broker goes on, we go on after it; an ordinary client reads it all."""
    folder = tmp_path / "log"
    with Log(folder) as log:
        log.create_topic("ours-back", config=SMALL)
        log.writer("ours-back", batch_records=3).write(table(60))
    broker.create("ours-back", SMALL)
    broker.stop()
    swap_in(broker, folder, ["ours-back"])
    broker.start()
    with Wire(broker.address) as wire:
        for number in range(30):
            wire.produce("ours-back", batch([Row(T0, b"key", b"from the broker %d" % number)]))
    broker.stop()
    theirs, ours = broker.partition("ours-back"), folder / "ours-back-0"
    identity = (ours / "partition.metadata").read_bytes()
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    (ours / "partition.metadata").write_bytes(identity)
    with Log(folder) as log:
        written = log.writer("ours-back", batch_records=2).write(table(20, 500))
        assert written[0].first_offset == 90
    swap_in(broker, folder, ["ours-back"])
    broker.start()
    assert complaints(broker) == []
    records = consume(broker.address, "ours-back")
    assert records == read(folder, "ours-back")
    assert len(records) == 110


def test_a_broker_without_the_marker_rebuilds_exactly_what_we_wrote(
    broker: Broker, opened: Broker, ours: Path, kafka: KafkaHome
) -> None:
    broker.stop()
    put_in_place(broker, ours)
    (broker.data / MARKER).unlink()
    set_lines(broker.data / "recovery-point-offset-checkpoint", {(topic, 0): 0 for topic in WRITERS})
    broker.start()
    assert not [line for line in complaints(broker) if not line.startswith("INFO")]
    broker.stop()
    for topic in WRITERS:
        mine, rebuilt = kept_files(ours / f"{topic}-0"), kept_files(broker.partition(topic))
        if topic == "ours-deleted":  # the broker removed, at once, what lies before the log start
            mine = {name: data for name, data in mine.items() if name in rebuilt}
        assert rebuilt == mine
        dump = java_dump(kafka, broker.data, dumpable(broker.partition(topic)), "--deep-iteration")
        assert "isvalid: false" not in dump.out
        assert dump.err == ""
    broker.start()
