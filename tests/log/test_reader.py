"""Records as Arrow batches: where to start and stop, isolation, following, damage, memory."""

from __future__ import annotations

import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import CorruptError, InvalidError, OffsetOutOfRangeError
from tidegate.files import Effect, Files
from tidegate.log.checkpoints import CLEANER_OFFSETS, write_offsets
from tidegate.log.format.batch import iter_headers
from tidegate.log.format.records import RECORD_SCHEMA
from tidegate.log.log import Log
from tidegate.log.producer_state import Origin
from tidegate.log.reader import Reader
from tidegate.testing.batches import Rec, build_batch, end_transaction_batch

START = 1_767_225_600_000


@pytest.fixture
def log(tidegate_log: Log) -> Log:
    """100 records in small log segments, a second apart, values 0 to 99."""
    tidegate_log.create_topic("t", 1, {"segment.bytes": "1KiB", "index.interval.bytes": "100"})
    write(tidegate_log, 0, 100)
    return tidegate_log


def write(log: Log, first: int, last: int, topic: str = "t") -> None:
    log.writer(topic, batch_records=3).write(
        pa.table(
            {
                "value": [b"%d" % number for number in range(first, last)],
                "timestamp": [START + 1000 * number for number in range(first, last)],
            }
        )
    )


def numbers(reader: Reader) -> list[int]:
    return [int(value) for batch in reader for value in batch.column("value").to_pylist()]


def test_everything_in_the_schema_of_records(log: Log) -> None:
    batches = list(log.reader("t", max_bytes=500))
    assert len(batches) >= 10
    assert all(batch.schema == RECORD_SCHEMA for batch in batches)
    table = pa.Table.from_batches(batches)
    assert table.column("value").to_pylist() == [b"%d" % number for number in range(100)]
    assert table.column("offset").to_pylist() == list(range(100))
    assert set(table.column("topic").to_pylist()) == {"t"}
    assert set(table.column("partition").to_pylist()) == {0}


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        ("earliest", None, range(100)),
        ("latest", None, range(0)),
        (0, None, range(100)),
        (1, None, range(1, 100)),  # in the middle of a batch
        (50, 60, range(50, 60)),
        (50, 50, range(0)),
        (60, 50, range(0)),
        (99, None, range(99, 100)),
        (100, None, range(0)),
        (-10, None, range(90, 100)),
        (-1000, None, range(100)),
        (-10, -5, range(90, 95)),
        (90, 1000, range(90, 100)),
        ("earliest", "latest", range(100)),
        (f"@{START}", None, range(100)),
        (f"@{START + 41_500}", None, range(42, 100)),
        (f"@{START + 42_000}", f"@{START + 44_000}", range(42, 44)),
        (f"@{START + 99_000}", None, range(99, 100)),
        (f"@{START + 99_001}", None, range(0)),
        ("@0", f"@{START + 10_000_000}", range(100)),
        (datetime(2026, 1, 1, 0, 1, tzinfo=UTC), None, range(60, 100)),
        ({0: 97}, {0: 99}, range(97, 99)),
    ],
)
def test_start_and_stop(log: Log, start: object, stop: object, expected: range) -> None:
    for max_bytes in (100, 1000, 1 << 20):
        reader = log.reader("t", start=start, stop=stop, max_bytes=max_bytes)  # type: ignore[arg-type]
        assert numbers(reader) == list(expected)


def test_every_offset_is_found(log: Log) -> None:
    for offset in range(101):
        assert numbers(log.reader("t", start=offset)) == list(range(offset, 100))


@pytest.mark.parametrize("offset", [101, 5000])
def test_an_offset_behind_the_end_is_refused_with_the_way_out(log: Log, offset: int) -> None:
    with pytest.raises(OffsetOutOfRangeError, match="the log ends at 100; start at 'latest'") as refused:
        log.reader("t", start=offset)
    assert (refused.value.offset, refused.value.first, refused.value.end) == (offset, 0, 100)


def test_offsets_that_aged_out_are_an_error_at_the_start_and_in_the_middle(log: Log) -> None:
    reading = log.reader("t", max_bytes=300)
    assert reading.poll() is not None
    log.partition("t", 0).delete_records_before(40)
    with pytest.raises(OffsetOutOfRangeError, match="moved the log's start to 40") as gone:
        numbers(reading)
    assert gone.value.first == 40
    with pytest.raises(OffsetOutOfRangeError, match=r"start at 'earliest' \(-o start\) or at 40"):
        log.reader("t", start=39)
    assert numbers(log.reader("t", start=40)) == list(range(40, 100))
    assert numbers(log.reader("t")) == list(range(40, 100))
    assert numbers(log.reader("t", start=f"@{START}")) == list(range(40, 100))


def test_partitions_take_turns_and_positions_tell_where_to_go_on(tidegate_log: Log) -> None:
    tidegate_log.create_topic("many", 3)
    for partition in range(3):
        values = [b"%d" % (partition * 100 + number) for number in range(50)]
        tidegate_log.writer("many", batch_records=5).write(pa.table({"value": values}), partition=partition)
    reader = tidegate_log.reader("many", max_bytes=200)
    first = [
        batch.column("partition")[0].as_py()
        for batch in (reader.poll(), reader.poll(), reader.poll())
        if batch
    ]
    assert sorted(first) == [0, 1, 2]
    positions = reader.positions()
    assert reader.lag() == 150 - sum(positions.values())
    seen = [
        int(value)
        for value in tidegate_log.reader("many", start=positions).read_all().column("value").to_pylist()
    ]
    assert sorted(seen) == sorted(
        partition * 100 + number for partition in range(3) for number in range(positions[partition], 50)
    )
    assert numbers(tidegate_log.reader("many", [1], start=45)) == [145, 146, 147, 148, 149]
    for wrong in ([3], [0, 0]):
        with pytest.raises(InvalidError):
            tidegate_log.reader("many", wrong)


def test_iterating_ends_where_the_log_ended_when_it_began(log: Log) -> None:
    reader = log.reader("t", max_bytes=300)
    batches = iter(reader)
    seen = [int(value) for value in next(batches).column("value").to_pylist()]
    write(log, 100, 130)
    seen += [int(value) for batch in batches for value in batch.column("value").to_pylist()]
    assert seen == list(range(100))
    assert numbers(reader) == list(range(100, 130))  # and goes on from there the next time


def test_polling_waits_for_what_comes(log: Log, manual_clock: ManualClock) -> None:
    reader = log.reader("t", start="latest")
    before = manual_clock.monotonic_ms()
    assert reader.poll("250ms") is None
    assert manual_clock.monotonic_ms() - before >= 250
    assert reader.poll() is None
    write(log, 100, 102)
    batch = reader.poll("1s")
    assert batch is not None
    assert batch.column("value").to_pylist() == [b"100", b"101"]
    assert not reader.is_done


def test_following_goes_on_to_its_stop(log: Log) -> None:
    reader = log.reader("t", start=95, stop=105, follow=True)
    batches = iter(reader)
    seen: list[int] = []
    while len(seen) < 5:
        seen += [int(value) for value in next(batches).column("value").to_pylist()]
    write(log, 100, 110)
    seen += [int(value) for batch in batches for value in batch.column("value").to_pylist()]
    assert seen == list(range(95, 105))
    assert reader.is_done


def test_seeking_reads_again(log: Log) -> None:
    reader = log.reader("t", max_bytes=400)
    reader.poll()
    reader.seek(0, 98)
    assert numbers(reader) == [98, 99]
    with pytest.raises(InvalidError):
        reader.seek(7, 0)


def test_appended_but_not_acknowledged_records_are_not_shown(log: Log) -> None:
    partition = log.partition("t", 0)
    partition.append(build_batch([Rec(value=b"100", timestamp=START)]))
    assert numbers(log.reader("t")) == list(range(100))
    with pytest.raises(OffsetOutOfRangeError):
        log.reader("t", start=101)
    partition.acknowledge(sync=False)
    assert numbers(log.reader("t"))[-1] == 100


# -- transactions --------------------------------------------------------------------------------


def transactional(value: bytes, producer: int, sequence: int) -> bytes:
    return build_batch(
        [Rec(value=value, timestamp=START)],
        producer_id=producer,
        producer_epoch=0,
        base_sequence=sequence,
        transactional=True,
    )


def test_committed_readers_see_neither_aborted_nor_open_transactions(tidegate_log: Log) -> None:
    tidegate_log.create_topic("t")
    partition = tidegate_log.partition("t", 0)

    def append(batch: bytes, origin: Origin = Origin.CLIENT) -> None:
        partition.append(batch, origin=origin)
        partition.acknowledge(sync=False)

    def end(kind: Literal["ABORT", "COMMIT"], producer: int) -> None:
        marker = end_transaction_batch(kind, producer_id=producer, producer_epoch=0, timestamp=START)
        append(marker, Origin.COORDINATOR)

    append(transactional(b"0", 1, 0))  # offset 0, to be aborted
    append(transactional(b"1", 2, 0))  # 1, to be committed
    append(build_batch([Rec(value=b"2", timestamp=START)]))
    end("ABORT", 1)  # 3
    append(transactional(b"4", 1, 1))  # to be committed
    end("COMMIT", 2)  # 5
    end("COMMIT", 1)  # 6
    append(build_batch([Rec(value=b"7", timestamp=START)]))
    append(transactional(b"8", 3, 0))  # stays open
    append(build_batch([Rec(value=b"9", timestamp=START)]))
    assert numbers(tidegate_log.reader("t")) == [0, 1, 2, 4, 7, 8, 9]
    for max_bytes in (1, 150, 1 << 20):
        committed = tidegate_log.reader("t", isolation="read_committed", max_bytes=max_bytes)
        assert numbers(committed) == [1, 2, 4, 7]
        assert committed.positions() == {0: 8}
        assert committed.end_offsets() == {0: 8}
    assert numbers(tidegate_log.reader("t", isolation="read_committed", start=-1)) == [7]
    reader = tidegate_log.reader("t", isolation="read_committed", start="latest")
    end("COMMIT", 3)  # 10
    assert [int(value) for value in reader.read_all().column("value").to_pylist()] == [8, 9]
    with pytest.raises(InvalidError):
        tidegate_log.reader("t", isolation="read_rumours")  # type: ignore[arg-type]


def test_a_foreign_folder_is_searched_for_open_transactions(tmp_path: Path) -> None:
    folder = tmp_path / "kafka" / "t-0"
    folder.mkdir(parents=True)
    batches = [
        build_batch([Rec(value=b"0", timestamp=1)], base_offset=0),
        build_batch(
            [Rec(value=b"1", timestamp=1)],
            base_offset=1,
            producer_id=5,
            producer_epoch=0,
            base_sequence=0,
            transactional=True,
        ),
        build_batch([Rec(value=b"2", timestamp=1)], base_offset=2),
    ]
    (folder / "00000000000000000000.log").write_bytes(b"".join(batches))
    with Log(tmp_path / "kafka") as log:
        assert numbers(log.reader("t")) == [0, 1, 2]
        assert numbers(log.reader("t", isolation="read_committed")) == [0]


# -- damage --------------------------------------------------------------------------------------


def damage(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("where", ["crc", "length", "magic", "body"])
def test_sound_records_before_damage_come_first_then_the_place_and_the_way_on(log: Log, where: str) -> None:
    log.close()
    path = sorted((log.path / "t-0").glob("*.log"))[1]
    found = list(iter_headers(path.read_bytes()))
    position, bad = found[2]
    damage(path, position + {"crc": 17, "length": 8, "magic": 16, "body": 70}[where])
    with Log(log.path, read_only=True) as again:
        seen: list[int] = []
        with pytest.raises(CorruptError, match="go on there") as corrupt:
            for batch in again.reader("t"):
                seen += [int(value) for value in batch.column("value").to_pylist()]
        assert seen == list(range(bad.base_offset))
        assert corrupt.value.offset == bad.base_offset
        resume = bad.next_offset
        assert f"-o {resume}" in str(corrupt.value)
        assert numbers(again.reader("t", start=resume)) == list(range(resume, 100))


def test_records_that_are_malformed_though_the_crc_is_right_are_damage_too(tidegate_log: Log) -> None:
    tidegate_log.create_topic("t")
    good = build_batch([Rec(value=b"0", timestamp=1)], base_offset=0)
    bad = build_batch([Rec(value=b"1", timestamp=1)], base_offset=1, count=7)
    (tidegate_log.path / "t-0" / "00000000000000000000.log").write_bytes(
        good + bad + build_batch([Rec(value=b"2", timestamp=1)], base_offset=2)
    )
    seen: list[int] = []
    with pytest.raises(CorruptError, match="-o 2") as corrupt:
        for batch in tidegate_log.reader("t"):
            seen += [int(value) for value in batch.column("value").to_pylist()]
    assert seen == [0]
    assert corrupt.value.offset == 1
    assert numbers(tidegate_log.reader("t", start=2)) == [2]


def test_a_missing_log_segment_is_not_skipped(log: Log) -> None:
    log.close()
    _, second, third, *_ = sorted((log.path / "t-0").glob("*.log"))
    second.unlink()
    first_missing, first_found = int(second.stem), int(third.stem)
    with Log(log.path, read_only=True) as again:
        seen: list[int] = []
        with pytest.raises(CorruptError, match=f"-o {first_found}") as gap:
            for batch in again.reader("t"):
                seen += [int(value) for value in batch.column("value").to_pylist()]
        assert seen == list(range(first_missing))
        assert gap.value.offset == first_missing
        assert numbers(again.reader("t", start=first_found)) == list(range(first_found, 100))
    # a gap that compaction explains is none
    write_offsets(log.path / CLEANER_OFFSETS, {("t", 0): first_found}, files=Files())
    with Log(log.path, read_only=True) as again:
        assert numbers(again.reader("t")) == [*range(first_missing), *range(first_found, 100)]


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
@pytest.mark.parametrize("how", ["missing", "zeros", "ones", "cut"])
def test_damaged_indexes_change_no_answer_by_offset(log: Log, suffix: str, how: str) -> None:
    log.close()
    for path in (log.path / "t-0").glob(f"*{suffix}"):
        content = path.read_bytes()
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(
                {"zeros": bytes(len(content)), "ones": b"\xff" * len(content), "cut": content[:5]}[how]
            )
    with Log(log.path, read_only=True) as again:
        for offset in range(0, 100, 7):
            assert numbers(again.reader("t", start=offset)) == list(range(offset, 100))


# -- memory ---------------------------------------------------------------------------------------


def test_memory_is_bounded_by_max_bytes_not_by_the_log(tmp_path: Path) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("big", 1, {"segment.bytes": "8MiB"})
        writer = log.writer("big", batch_bytes="64KiB")
        for _ in range(8):
            writer.write(pa.table({"value": [b"x" * 1000] * 4000}))
        for _ in log.reader("big", max_bytes="256KiB"):
            pass
        arrow_before = pa.total_allocated_bytes()
        tracemalloc.start()
        peak_arrow = 0
        for batch in log.reader("big", max_bytes="256KiB"):
            peak_arrow = max(peak_arrow, pa.total_allocated_bytes() - arrow_before)
            del batch
        _, peak_python = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak_python + peak_arrow < 4 << 20  # of 32 MiB


def test_compressed_records_come_in_pieces(tmp_path: Path) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("z")
        log.writer("z", compression="zstd").write(pa.table({"value": [b"x" * 1000] * 20_000}))
        sizes = [batch.nbytes for batch in log.reader("z", max_piece_bytes="1MiB")]
        assert sum(sizes) > 20_000_000
        assert max(sizes) < 3 << 20


def test_a_batch_larger_than_max_bytes_is_read_whole(log: Log, tidegate_log: Log) -> None:
    tidegate_log.create_topic("wide")
    tidegate_log.writer("wide").write(pa.table({"value": [b"x" * 500_000, b"y"]}))
    table = tidegate_log.reader("wide", max_bytes=10).read_all()
    assert [len(value) for value in table.column("value").to_pylist()] == [500_000, 1]


def test_a_look_up_reads_little(tmp_path: Path) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("t")
        log.writer("t", batch_bytes="1KiB").write(pa.table({"value": [b"x" * 100] * 100_000}))
    read: list[int] = []

    def watch(effect: Effect) -> None:
        if effect.kind == "read":
            read.append(effect.length)

    with Log(tmp_path / "log", files=Files(watch)) as log:
        batch = log.reader("t", start=77_777, max_bytes=1).poll()
        assert batch is not None
        assert batch.column("offset")[0].as_py() == 77_777
    assert sum(read) < 64 * 1024  # of 11 MB: an index search, one interval, one batch


def test_what_was_read_is_counted(log: Log) -> None:
    numbers(log.reader("t"))
    counter = log.metrics.counter("tidegate_records_total", "", ("topic", "partition", "verdict"))
    assert counter.value(topic="t", partition=0, verdict="read") == 100
