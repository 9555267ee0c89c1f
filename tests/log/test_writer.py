"""Arrow in, batches in the log: placing, cutting, compressing, numbering, acknowledging."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.clock import ManualClock
from tidegate.errors import FencedError, InvalidError, TidegateError, UnavailableError
from tidegate.files import Effect, Files
from tidegate.log.format.batch import BatchHeader, iter_headers
from tidegate.log.log import Log
from tidegate.log.writer import partition_of_key
from tidegate.testing.faults import FailAt


def table(*values: bytes | None, **columns: object) -> pa.Table:
    return pa.table({"value": pa.array(values, pa.binary()), **columns})


def headers(log: Log, topic: str = "t", partition: int = 0) -> list[BatchHeader]:
    """The batch headers of a partition, from its files."""
    found = []
    for path in sorted((log.path / f"{topic}-{partition}").glob("*.log")):
        found += [header for _, header in iter_headers(path.read_bytes())]
    return found


@pytest.fixture
def log(tidegate_log: Log) -> Log:
    tidegate_log.create_topic("t")
    return tidegate_log


def test_rows_come_back_as_they_went_in(log: Log, manual_clock: ManualClock) -> None:
    written = log.writer("t").write(
        pa.table(
            {
                "key": pa.array([b"k", None, b""], pa.binary()),
                "value": pa.array([b"v", b"", None], pa.binary()),
                "timestamp": pa.array([5, None, 7], pa.int64()),
                "headers": pa.array(
                    [[("a", b"1"), ("a", None)], [], None],
                    pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
                ),
            }
        )
    )
    assert [(batch.partition, batch.first_offset, batch.last_offset, batch.records) for batch in written] == [
        (0, 0, 2, 3)
    ]
    read = log.reader("t").read_all()
    assert read.column("key").to_pylist() == [b"k", None, b""]
    assert read.column("value").to_pylist() == [b"v", b"", None]
    assert read.column("timestamp").cast(pa.int64()).to_pylist() == [5, manual_clock.now_ms(), 7]
    assert read.column("headers").to_pylist() == [
        [{"key": "a", "value": b"1"}, {"key": "a", "value": None}],
        [],
        [],
    ]


def test_keys_decide_the_partition_and_order_is_kept_within_it(tidegate_log: Log) -> None:
    tidegate_log.create_topic("many", 5)
    keys = [b"key-%d" % (number % 37) for number in range(1000)]
    values = [b"%d" % number for number in range(1000)]
    tidegate_log.writer("many").write(table(*values, key=pa.array(keys, pa.binary())))
    read = tidegate_log.reader("many").read_all().to_pylist()
    assert len(read) == 1000
    for row in read:
        assert row["partition"] == partition_of_key(row["key"], 5)
    for partition in range(5):
        numbers = [int(row["value"]) for row in read if row["partition"] == partition]
        assert numbers == sorted(numbers)


def test_a_partition_column_or_argument_decides_first(tidegate_log: Log) -> None:
    tidegate_log.create_topic("many", 3)
    writer = tidegate_log.writer("many")
    writer.write(table(b"a", b"b", partition=pa.array([2, 0], pa.int32())))
    writer.write(table(b"c", b"d"), partition=1)
    read = tidegate_log.reader("many").read_all()
    placed = dict(zip(read.column("value").to_pylist(), read.column("partition").to_pylist(), strict=True))
    assert placed == {b"a": 2, b"b": 0, b"c": 1, b"d": 1}
    with pytest.raises(InvalidError, match="no partition 3"):
        writer.write(table(b"x"), partition=3)


def test_batches_are_cut_by_records_and_by_bytes(log: Log) -> None:
    log.writer("t", batch_records=2).write(table(*[b"x"] * 5))
    assert [header.count for header in headers(log)] == [2, 2, 1]
    log.writer("t", batch_bytes="1KiB").write(table(*[b"y" * 300] * 7))
    sizes = [header.size for header in headers(log)[3:]]
    assert all(size <= 1024 for size in sizes)
    assert [header.count for header in headers(log)[3:]] == [3, 3, 1]


def test_one_record_above_batch_bytes_gets_a_batch_of_its_own(log: Log) -> None:
    log.writer("t", batch_bytes=200).write(table(b"a", b"b" * 5000, b"c"))
    assert [header.count for header in headers(log)] == [1, 1, 1]
    with pytest.raises(InvalidError) as refused:
        log.writer("t").write(table(b"z" * 2_000_000))
    assert refused.value.kafka_name == "MESSAGE_TOO_LARGE"
    assert log.reader("t").read_all().num_rows == 3


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_batches_are_compressed_as_asked(log: Log, codec: str) -> None:
    log.writer("t", compression=codec).write(table(*[b"a" * 100] * 50))
    assert headers(log)[0].codec.label == codec
    assert log.reader("t").read_all().column("value").to_pylist() == [b"a" * 100] * 50


def test_a_topic_that_insists_on_a_codec_wins(tidegate_log: Log) -> None:
    tidegate_log.create_topic("z", 1, {"compression.type": "zstd"})
    tidegate_log.create_topic("plain", 1, {"compression.type": "uncompressed"})
    for topic, codec in (("z", "zstd"), ("plain", "none")):
        tidegate_log.writer(topic, compression="gzip").write(table(b"x" * 500))
        assert headers(tidegate_log, topic)[0].codec.label == codec
        assert tidegate_log.reader(topic).read_all().column("value").to_pylist() == [b"x" * 500]


@pytest.mark.parametrize(
    "wrong",
    [
        {"compression": "lzma"},
        {"batch_records": 0},
        {"producer_id": -1},
        {"producer_id": 1, "producer_epoch": 40000},
        {"batch_bytes": "many"},
    ],
)
def test_wrong_settings_are_refused(log: Log, wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidError):
        log.writer("t", **wrong)


def test_nothing_written_is_nothing_written(log: Log) -> None:
    assert log.writer("t").write(table()) == []
    assert log.reader("t").read_all().num_rows == 0


# -- acknowledgement ---------------------------------------------------------------------------------


def syncs_of_logs(path: Path, durability: str) -> Counter[str]:
    """Which `.log` files one write() of many batches synced, and how often."""
    seen: Counter[str] = Counter()

    def watch(effect: Effect) -> None:
        if effect.kind == "sync" and effect.path.suffix == ".log":
            seen[effect.path.parent.name] += 1

    with Log(path, durability=durability, files=Files(watch)) as log:  # type: ignore[arg-type]
        log.create_topic("t", 2)
        writer = log.writer("t", batch_records=1)
        writer.write(table(b"warm", b"up", partition=pa.array([0, 1])))
        seen.clear()
        writer.write(table(*[b"x"] * 10, partition=pa.array([0, 1] * 5)))
        return Counter(seen)


def test_one_write_syncs_each_partition_once(tmp_path: Path) -> None:
    assert syncs_of_logs(tmp_path / "disk", "disk") == {"t-0": 1, "t-1": 1}
    assert syncs_of_logs(tmp_path / "os", "os") == {}


def test_a_failed_sync_is_not_acknowledged_and_nothing_is_shown(tmp_path: Path) -> None:
    with Log(tmp_path / "log") as log:
        log.create_topic("t")
        log.writer("t").write(table(b"before"))
    armed = []

    def watch(effect: Effect) -> None:
        if armed and effect.kind == "sync" and effect.path.suffix == ".log":
            raise OSError(5, "Input/output error")

    log = Log(tmp_path / "log", files=Files(watch))
    writer = log.writer("t")
    writer.write(table(b"good"))
    armed.append(True)
    with pytest.raises(UnavailableError):
        writer.write(table(b"lost"))
    assert log.reader("t").read_all().column("value").to_pylist() == [b"before", b"good"]
    with pytest.raises(TidegateError):
        writer.write(table(b"after"))
    armed.clear()
    try:
        log.close()
    except TidegateError:
        pass


def test_threads_share_a_writer(tmp_path: Path) -> None:
    with Log(tmp_path / "log") as log:
        log.create_topic("t", 3)
        writer = log.writer("t", producer_id=9)

        def work(name: int) -> None:
            for number in range(20):
                writer.write(table(b"%d-%d" % (name, number), key=pa.array([b"%d" % number])))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        values = log.reader("t").read_all().column("value").to_pylist()
        assert sorted(values) == sorted(
            b"%d-%d" % (name, number) for name in range(4) for number in range(20)
        )


# -- idempotence ---------------------------------------------------------------------------------


def test_sequences_go_on_from_write_to_write_and_over_a_restart(tmp_path: Path) -> None:
    for expected in (0, 7):
        with Log(tmp_path / "log", durability="os") as log:
            log.create_topic("t", if_not_exists=True)
            writer = log.writer("t", producer_id=42, producer_epoch=3, batch_records=2)
            writer.write(table(*[b"x"] * 3))
            writer.write(table(*[b"y"] * 4))
            last = headers(log)[-4:]
            assert {(header.producer_id, header.producer_epoch) for header in last} == {(42, 3)}
            assert [header.base_sequence for header in last] == [expected + n for n in (0, 2, 3, 5)]


def test_each_partition_counts_for_itself(tidegate_log: Log) -> None:
    tidegate_log.create_topic("t", 2)
    writer = tidegate_log.writer("t", producer_id=1)
    writer.write(table(b"a", b"b", b"c", partition=pa.array([0, 1, 1])))
    writer.write(table(b"d", b"e", partition=pa.array([0, 1])))
    assert [header.base_sequence for header in headers(tidegate_log, "t", 0)] == [0, 1]
    assert [header.base_sequence for header in headers(tidegate_log, "t", 1)] == [0, 2]


def test_a_repeated_write_gets_its_old_offsets(log: Log) -> None:
    writer = log.writer("t", producer_id=1)
    writer.write(table(b"a"))
    first = writer.write(table(b"b", b"c"))
    again = writer.write(table(b"b", b"c"), first_sequences={0: 1})
    assert [(batch.first_offset, batch.last_offset, batch.duplicate) for batch in again] == [(1, 2, True)]
    assert again[0].first_offset == first[0].first_offset
    assert log.reader("t").read_all().num_rows == 3
    writer.write(table(b"d"))
    assert headers(log)[-1].base_sequence == 3
    with pytest.raises(InvalidError) as gap:
        writer.write(table(b"x"), first_sequences={0: 9})
    assert gap.value.kafka_name == "OUT_OF_ORDER_SEQUENCE_NUMBER"


def test_a_new_epoch_starts_at_zero_and_fences_the_old_one(log: Log) -> None:
    old = log.writer("t", producer_id=1, producer_epoch=0)
    old.write(table(b"a", b"b"))
    new = log.writer("t", producer_id=1, producer_epoch=1)
    new.write(table(b"c"))
    assert headers(log)[-1].base_sequence == 0
    with pytest.raises(FencedError):
        old.write(table(b"late"))


def test_a_write_that_failed_half_way_can_be_repeated_without_doubling(tmp_path: Path) -> None:
    """More batches than the log itself remembers (five) arrive before the disk fails."""
    rows = table(*[b"%d" % number for number in range(12)])
    for failing in (2, 8, 12):
        path = tmp_path / f"log-{failing}"
        trouble: list[FailAt] = []

        def watch(effect: Effect, trouble: list[FailAt] = trouble) -> None:
            if trouble and effect.kind == "write" and effect.path.suffix == ".log":
                trouble[0](effect)

        with Log(path, durability="os", files=Files(watch)) as log:
            log.create_topic("t")
            writer = log.writer("t", producer_id=5, batch_records=1)
            writer.write(table(b"first"))
            trouble.append(FailAt(failing))
            with pytest.raises(UnavailableError):
                writer.write(rows)
            trouble.clear()
            again = writer.write(rows)
            assert [batch.duplicate for batch in again] == [number < failing - 1 for number in range(12)]
            assert [batch.first_offset for batch in again] == list(range(1, 13))
            values = log.reader("t").read_all().column("value").to_pylist()
            assert values == [b"first", *rows.column("value").to_pylist()]


def test_a_record_too_large_leaves_nothing_of_an_idempotent_write(log: Log) -> None:
    writer = log.writer("t", producer_id=5, batch_records=1)
    with pytest.raises(InvalidError, match="nothing was written"):
        writer.write(table(b"small", b"x" * 2_000_000))
    assert log.reader("t").read_all().num_rows == 0
    writer.write(table(b"small"))
    assert headers(log)[0].base_sequence == 0


def test_what_was_written_is_counted(log: Log) -> None:
    writer = log.writer("t", producer_id=1)
    writer.write(table(b"a", b"b"))
    writer.write(table(b"a", b"b"), first_sequences={0: 0})
    counter = log.metrics.counter("tidegate_records_total", "", ("topic", "partition", "verdict"))
    assert counter.value(topic="t", partition=0, verdict="written") == 2
    assert counter.value(topic="t", partition=0, verdict="duplicate") == 2


ROWS = st.lists(
    st.tuples(st.one_of(st.none(), st.binary(max_size=10)), st.one_of(st.none(), st.binary(max_size=30))),
    max_size=30,
)


@given(st.lists(ROWS, max_size=5), st.integers(1, 4), st.integers(1, 7), st.sampled_from(["none", "zstd"]))
@settings(max_examples=25, deadline=None)
def test_whatever_is_written_is_read_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    writes: list[list[tuple[bytes | None, bytes | None]]],
    partitions: int,
    batch_records: int,
    codec: str,
) -> None:
    with Log(tmp_path_factory.mktemp("log") / "log", durability="os", clock=ManualClock()) as log:
        log.create_topic("t", partitions, {"segment.bytes": "500"})
        writer = log.writer("t", batch_records=batch_records, compression=codec, batch_bytes=400)
        for rows in writes:
            keys, values = [key for key, _ in rows], [value for _, value in rows]
            writer.write(table(*values, key=pa.array(keys, pa.binary())))
        expected = Counter(row for rows in writes for row in rows)
        read = log.reader("t").read_all().to_pylist()
        assert Counter((row["key"], row["value"]) for row in read) == expected
        for partition in range(partitions):
            offsets = [row["offset"] for row in read if row["partition"] == partition]
            assert offsets == list(range(len(offsets)))
