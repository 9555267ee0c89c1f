"""One log segment: rows S1 to S15, and what keeps a failed append from leaving a trace."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tidegate.clock import ManualClock
from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.files import Files
from tidegate.log.checkpoints import LeaderEpochs
from tidegate.log.fetch import find_by_timestamp
from tidegate.log.format.batch import BatchHeader
from tidegate.log.format.partition_files import DELETED
from tidegate.log.indexes import AbortedTxn
from tidegate.log.producer_state import Origin, ProducerStates
from tidegate.log.recovery import recover_segment
from tidegate.log.segment import LogSegment
from tidegate.log.segment_roll import roll_reason
from tidegate.log.topic_config import TopicConfig
from tidegate.randomness import SeededRandomness
from tidegate.testing.batches import Rec, build_batch, end_transaction_batch
from tidegate.testing.faults import FailAt


class Bench:
    """Segments of one folder, and what recovering one needs."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self.folder = folder
        self.files = files or Files()
        self.clock = ManualClock(1_000_000)
        self.epochs = LeaderEpochs(folder / "leader-epoch-checkpoint", files=self.files)
        self.producers = self.fresh_producers()

    def fresh_producers(self) -> ProducerStates:
        return ProducerStates(self.folder, files=self.files)

    def make(self, base_offset: int, *, create: bool = True, **settings: Any) -> LogSegment:
        segment = LogSegment(
            self.folder,
            base_offset,
            TopicConfig(**settings),
            files=self.files,
            clock=self.clock,
            randomness=SeededRandomness(0),
        )
        return segment.create() if create else segment

    def recover(self, segment: LogSegment) -> int:
        return recover_segment(segment, self.producers, self.epochs)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def put(segment: LogSegment, offset: int, *values: bytes, timestamp: int = -1, **batch: Any) -> int:
    """Append one batch whose first record is at `offset`; its position."""
    content = build_batch(
        [Rec(None, value, timestamp) for value in values or (b"test",)], base_offset=offset, **batch
    )
    return segment.append(content, BatchHeader.parse(content))


def offsets(segment: LogSegment) -> list[int]:
    """Last offsets of all batches."""
    return [header.last_offset for _, header in segment.batches()]


def start_of_read(segment: LogSegment, offset: int) -> int | None:
    place = segment.locate(offset)
    return None if place is None else place.base_offset


@pytest.mark.parametrize(
    ("base", "offset"),
    [
        pytest.param(0, 2**31, id="LS-S1-above"),
        pytest.param(100, 99, id="LS-S1-below"),
        pytest.param(40, 40 + 2**31, id="LS-S1-above-base"),
    ],
)
def test_an_offset_that_does_not_fit_is_refused_and_nothing_is_written(
    bench: Bench, base: int, offset: int
) -> None:
    segment = bench.make(base)
    with pytest.raises(InvalidError, match="does not fit"):
        put(segment, offset)
    assert segment.size == 0


def test_the_largest_relative_offset_fits(bench: Bench) -> None:
    segment = bench.make(40)
    put(segment, 40 + 2**31 - 1)
    assert offsets(segment) == [40 + 2**31 - 1]


@pytest.mark.parametrize(
    "case", [pytest.param("empty", id="LS-S2-empty"), pytest.param("past", id="LS-S2-past")]
)
def test_reading_where_nothing_is_finds_nothing(bench: Bench, case: str) -> None:
    segment = bench.make(40)
    if case == "past":
        put(segment, 50, b"a", b"b")
    assert segment.locate(40 if case == "empty" else 52) is None


@pytest.mark.parametrize(
    ("offset", "found"), [(41, 50), (55, 60), (62, None)], ids=["LS-S3-41", "LS-S3-55", "LS-S3-62"]
)
def test_a_read_begins_at_the_batch_holding_the_offset_or_the_next_one(
    bench: Bench, offset: int, found: int | None
) -> None:
    segment = bench.make(40)
    put(segment, 50, b"hello", b"there")
    put(segment, 60, b"little", b"bee")
    assert start_of_read(segment, offset) == found


@pytest.mark.parametrize("rounds", [pytest.param(30, id="LS-S4")])
def test_cutting_at_the_second_batch_keeps_the_first_again_and_again(bench: Bench, rounds: int) -> None:
    segment = bench.make(40)
    offset = 40
    for _ in range(rounds):
        put(segment, offset, b"hello")
        put(segment, offset + 1, b"hello")
        assert start_of_read(segment, offset) == offset
        segment.truncate_to(offset + 1)
        assert start_of_read(segment, offset) == offset
        assert segment.locate(offset + 1) is None
        offset += 1


@pytest.mark.parametrize("cut", [pytest.param(41, id="LS-S5")])
def test_cutting_inside_a_gap_removes_the_batch_behind_it(bench: Bench, cut: int) -> None:
    segment = bench.make(40)
    put(segment, 40)
    put(segment, 43)
    segment.truncate_to(cut)
    assert offsets(segment) == [40]


@pytest.mark.parametrize(
    "reopened", [pytest.param(False, id="LS-S6"), pytest.param(True, id="LS-S6-reopened")]
)
def test_cutting_everything_makes_a_new_segment_of_it(bench: Bench, reopened: bool) -> None:
    segment = bench.make(40)
    put(segment, 40, b"hello", b"there")
    if reopened:
        segment.become_inactive()
        segment = bench.make(40, create=False)
    bench.clock.advance(500)
    segment.truncate_to(0)
    assert segment.created_ms == bench.clock.now_ms()
    assert segment.first_timestamp == -1
    assert not segment.is_offset_index_full
    assert not segment.is_time_index_full
    put(segment, 40, b"hello", b"there")
    assert offsets(segment) == [41]


@pytest.mark.parametrize(
    ("last_offset", "reason"), [(100, None), (2**31, "offset_overflow")], ids=["LS-S7", "LS-S7-overflow"]
)
def test_an_empty_reopened_segment_rolls_only_for_an_offset_that_does_not_fit(
    bench: Bench, last_offset: int, reason: str | None
) -> None:
    bench.make(0).become_inactive()
    segment = bench.make(0, create=False)
    segment.grow_indexes(10 << 20)
    bench.clock.advance(10_000)

    class Append:
        size = 1024

    Append.last_offset = last_offset  # type: ignore[attr-defined]
    Append.max_timestamp = -1  # type: ignore[attr-defined]
    config = TopicConfig(segment_ms=5000)
    assert roll_reason(segment, Append, config, bench.clock.now_ms()) == reason  # type: ignore[arg-type]


@pytest.mark.parametrize("appends", [pytest.param(30, id="LS-S8")])
def test_cutting_takes_the_time_index_back(bench: Bench, appends: int) -> None:
    size = len(build_batch([Rec(None, b"hello", 400)]))
    segment = bench.make(40, index_interval_bytes=2 * size - 1)
    for offset in range(40, 40 + appends):
        put(segment, offset, b"hello", timestamp=offset * 10)
    assert segment.times.entries == 14
    segment.truncate_to(41)
    assert segment.times.entries == 0
    assert segment.read_next_offset() == 41
    assert segment.largest == (400, 40)


SEARCHES = [(420, 42), (421, 43), (430, 43), (431, 44), (491, None), (401, 41), (399, 40)]


@pytest.mark.parametrize(("timestamp", "offset"), SEARCHES, ids=[f"LS-S9-{asked}" for asked, _ in SEARCHES])
def test_a_search_by_timestamp_finds_the_first_record_late_enough(
    bench: Bench, timestamp: int, offset: int | None
) -> None:
    size = len(build_batch([Rec(None, b"msg", 400)]))
    segment = bench.make(40, index_interval_bytes=size * 2 - 1)
    for at in range(40, 50):
        put(segment, at, b"msg", timestamp=at * 10)
    assert segment.read_next_offset() == 50
    found = find_by_timestamp(segment, timestamp, 40)
    assert (None if found is None else found.offset) == offset


@pytest.mark.parametrize(
    "kind", [pytest.param(".index", id="LS-S10-index"), pytest.param(".timeindex", id="LS-S10-time")]
)
def test_recovery_mends_a_corrupt_index(bench: Bench, kind: str) -> None:
    segment = bench.make(0, index_interval_bytes=100)
    for offset in range(100):
        put(segment, offset, timestamp=offset * 10)
    segment.become_inactive()
    path = segment.path.with_suffix(kind)
    path.write_bytes(random.Random(3).randbytes(path.stat().st_size))
    segment = bench.make(0, create=False, index_interval_bytes=100)
    assert bench.recover(segment) == 0
    for offset in range(100):
        assert start_of_read(segment, offset) == offset
        found = find_by_timestamp(segment, offset * 10, 0)
        assert found is not None
        assert found.offset == offset
        if offset < 99:
            found = find_by_timestamp(segment, offset * 10 + 1, 0)
            assert found is not None
            assert found.offset == offset + 1


@pytest.mark.parametrize("k", range(0, 20, 3), ids=[f"LS-S11-{k}" for k in range(0, 20, 3)])
def test_recovery_keeps_the_records_before_garbage(bench: Bench, k: int) -> None:
    segment = bench.make(0)
    positions = [put(segment, offset) for offset in range(20)]
    segment.close()
    start = positions[k] + random.Random(k).randrange(1, 72)
    kept = segment.path.read_bytes()[:start]
    segment.path.write_bytes(kept + random.Random(k).randbytes(20 * 72 - start))
    segment = bench.make(0, create=False)
    assert bench.recover(segment) == (20 - k) * 72
    assert offsets(segment) == list(range(k))
    assert segment.path.stat().st_size == k * 72


@pytest.mark.parametrize(
    "earlier", [pytest.param(None, id="LS-S12"), pytest.param(75, id="LS-S12-began-earlier")]
)
def test_recovery_rebuilds_the_transaction_index(bench: Bench, earlier: int | None) -> None:
    segment = bench.make(100)
    first, second = {"producer_id": 5, "producer_epoch": 0}, {"producer_id": 10, "producer_epoch": 0}
    put(segment, 100, b"a", b"b", transactional=True, base_sequence=0, **first)
    put(segment, 102, b"a", b"b", transactional=True, base_sequence=0, **second)
    put(segment, 104, b"a", b"b", base_sequence=0, producer_id=15, producer_epoch=0)
    for offset, kind, producer in ((106, "ABORT", second), (107, "COMMIT", first)):
        marker = end_transaction_batch(kind, base_offset=offset, **producer)  # type: ignore[arg-type]
        segment.append(marker, BatchHeader.parse(marker))
    segment.close()
    if earlier is not None:
        batch = build_batch(
            [Rec(b"k", b"v", 1)] * 6, base_offset=75, transactional=True, base_sequence=0, **second
        )
        bench.producers.update(bench.producers.check_data(BatchHeader.parse(batch), Origin.REPLICATION))
    segment = bench.make(100, create=False)
    bench.recover(segment)
    assert bench.producers.map_end_offset == 108
    assert list(segment.transactions) == [AbortedTxn(10, earlier or 102, 106, 100)]


@pytest.mark.parametrize("expected", [pytest.param([(0, 104), (1, 106), (2, 110)], id="LS-S13")])
def test_recovery_rebuilds_leader_epochs(bench: Bench, expected: list[tuple[int, int]]) -> None:
    segment = bench.make(100)
    for offset, epoch in ((104, 0), (106, 1), (108, 1), (110, 2)):
        put(segment, offset, b"a", b"b", leader_epoch=epoch)
    segment.close()
    bench.recover(bench.make(100, create=False))
    assert [tuple(entry) for entry in bench.epochs.entries] == expected


@pytest.mark.parametrize("size", [pytest.param(512 << 20, id="LS-S14")])
def test_a_preallocated_file_is_cut_to_its_content_on_close(bench: Bench, size: int) -> None:
    segment = bench.make(40, preallocate=True, segment_bytes=size)
    put(segment, 50, b"hello", b"there")
    put(segment, 60, b"alpha", b"beta")
    used = segment.size
    assert segment.path.stat().st_size == size
    assert start_of_read(segment, 55) == 60
    segment.become_inactive()
    assert segment.path.stat().st_size == used
    again = bench.make(40, create=False, preallocate=True, segment_bytes=size)
    assert (again.size, offsets(again)) == (used, [51, 61])


@pytest.mark.parametrize("suffix", [pytest.param(DELETED, id="LS-S15")])
def test_renaming_makes_no_index_files(bench: Bench, suffix: str) -> None:
    segment = bench.make(0)
    segment.change_suffix(suffix)
    names = bench.files.list(bench.folder)
    assert names == [f"{0:020d}.log{suffix}"]
    segment.delete()
    assert bench.files.list(bench.folder) == []


# -- beyond the table ----------------------------------------------------------------------------


def test_the_first_batch_is_never_indexed_and_the_interval_is_strict(bench: Bench) -> None:
    segment = bench.make(0, index_interval_bytes=144)
    for offset in range(8):
        put(segment, offset, timestamp=offset)
    # after an entry 72 then 144 bytes have passed, which is not more than 144; at 216 it is
    assert list(segment.offsets) == [(3, 216), (6, 432)]
    assert list(segment.times) == [(3, 3), (6, 6)]


def test_a_time_index_entry_names_the_earliest_batch_with_the_largest_timestamp(bench: Bench) -> None:
    segment = bench.make(0, index_interval_bytes=0)
    for offset, timestamp in enumerate((5, 9, 7, 9, 8)):
        put(segment, offset, timestamp=timestamp)
    assert list(segment.times) == [(9, 1)]
    segment.become_inactive()
    assert bench.make(0, create=False).largest == (9, 1)


def test_reopening_starts_the_interval_anew(bench: Bench) -> None:
    segment = bench.make(0, index_interval_bytes=72)
    for offset in range(2):
        put(segment, offset)
    segment.become_inactive()
    segment = bench.make(0, create=False, index_interval_bytes=72)
    segment.grow_indexes(1000)
    for offset in range(2, 5):
        put(segment, offset)
    assert [entry.offset for entry in segment.offsets] == [4]


def test_an_inactive_segment_holds_no_descriptor(bench: Bench) -> None:
    segment = bench.make(0, index_interval_bytes=0)
    for offset in range(5):
        put(segment, offset, timestamp=offset)
    segment.add_aborted(AbortedTxn(1, 0, 4, 5))
    segment.become_inactive()
    segment.sync()
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert not [name for name in open_files if name.startswith(str(bench.folder))]
    assert start_of_read(segment, 3) == 3


def _is_link(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.mark.parametrize("cut_fails", [False, True], ids=["cut works", "cut fails too"])
@pytest.mark.parametrize("torn_bytes", [0, 30])
@pytest.mark.parametrize("n", range(1, 8))
def test_a_failed_append_leaves_no_trace_and_the_next_one_works(
    tmp_path: Path, n: int, torn_bytes: int, cut_fails: bool
) -> None:
    """Every write of the appends (batch, offset entry, time entry) fails in turn."""
    kinds = {"write", "truncate"} if cut_fails else {"write"}
    fault = FailAt(10**9, errno.ENOSPC, kinds=kinds, torn_bytes=torn_bytes, persistent=cut_fails)
    bench = Bench(tmp_path, Files(watch=fault))
    segment = bench.make(0, index_interval_bytes=100)
    fill(segment, 0, 4)
    fault.n = fault._counter.count + n
    before, done = whole_state(segment), 4
    with pytest.raises(UnavailableError, match="disk is full"):
        while True:
            fill(segment, done, done + 1)
            before, done = whole_state(segment), done + 1
    assert whole_state(segment) == before
    assert offsets(segment) == list(range(done))
    fault.lift()
    fill(segment, done, 12)
    segment.become_inactive()
    twin = Bench(tmp_path).make(100, index_interval_bytes=100)
    fill(twin, 100, 112)
    twin.become_inactive()
    assert offsets(segment) == list(range(12))
    for kind in (".log", ".index", ".timeindex"):
        assert segment.path.with_suffix(kind).stat().st_size == twin.path.with_suffix(kind).stat().st_size
    assert segment.path.with_suffix(".index").read_bytes() == twin.path.with_suffix(".index").read_bytes()


def test_what_a_failed_append_left_behind_is_cut_off(tmp_path: Path) -> None:
    fault = FailAt(2, errno.ENOSPC, kinds={"write"}, torn_bytes=60)
    segment = Bench(tmp_path, Files(watch=fault)).make(0)
    put(segment, 0)
    with pytest.raises(UnavailableError):
        put(segment, 1, b"x" * 500)
    assert segment.path.stat().st_size == segment.size == 72


def test_what_could_not_be_cut_off_is_cut_before_the_next_append(tmp_path: Path) -> None:
    fault = FailAt(10**9, errno.ENOSPC, kinds={"write", "truncate"}, torn_bytes=400, persistent=True)
    segment = Bench(tmp_path, Files(watch=fault)).make(0)
    put(segment, 0)
    fault.n = 0
    with pytest.raises(UnavailableError):
        put(segment, 1, b"x" * 500)
    assert segment.path.stat().st_size == 72 + 400
    fault.lift()
    put(segment, 1)
    assert segment.path.stat().st_size == segment.size == 144


def fill(segment: LogSegment, start: int, stop: int) -> None:
    for offset in range(start, stop):
        put(segment, offset, timestamp=offset)


def whole_state(segment: LogSegment) -> tuple[object, ...]:
    return segment.size, segment.largest, list(segment.offsets), list(segment.times)


def test_an_index_that_lies_does_not_change_an_answer(bench: Bench) -> None:
    segment = bench.make(0, index_interval_bytes=100)
    for offset in range(40):
        put(segment, offset, timestamp=offset * 10)
    segment.become_inactive()
    path = segment.path.with_suffix(".index")
    honest = path.read_bytes()
    for position in range(len(honest)):
        for bit in (0x01, 0x80):
            lying = bytearray(honest)
            lying[position] ^= bit
            path.write_bytes(lying)
            reopened = bench.make(0, create=False, index_interval_bytes=100)
            for offset in (0, 1, 17, 20, 38, 39):
                assert start_of_read(reopened, offset) == offset
            assert reopened.locate(40) is None


def test_an_index_that_names_a_later_batch_does_not_hide_the_right_one(bench: Bench) -> None:
    segment = bench.make(0, index_interval_bytes=100)
    positions = [put(segment, offset) for offset in range(40)]
    segment.become_inactive()
    lie = (10).to_bytes(4) + positions[25].to_bytes(4)
    segment.path.with_suffix(".index").write_bytes(lie)
    reopened = bench.make(0, create=False, index_interval_bytes=100)
    assert [start_of_read(reopened, offset) for offset in (9, 10, 15, 24, 25, 30)] == [9, 10, 15, 24, 25, 30]


def test_a_file_cut_behind_our_back_is_named(bench: Bench) -> None:
    segment = bench.make(0)
    for offset in range(3):
        put(segment, offset)
    os.truncate(segment.path, 100)
    with pytest.raises(CorruptError, match="another program has cut it") as caught:
        offsets(segment)
    assert caught.value.path == segment.path


def test_a_random_look_up_reads_at_most_one_interval(bench: Bench) -> None:
    reads: list[int] = []
    bench.files = Files(
        watch=lambda effect: (
            reads.append(effect.length) if effect.kind == "read" and effect.path.suffix == ".log" else None
        )
    )
    segment = bench.make(0)
    for offset in range(2000):
        put(segment, offset, b"x" * 80)
    segment.become_inactive()
    for offset in (0, 1, 700, 1234, 1999):
        reads.clear()
        assert start_of_read(segment, offset) == offset
        assert sum(reads) <= 4096 + 200
