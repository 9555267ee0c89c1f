"""Reading: offsets, isolation, timestamps (rows U1, U8, U9, U16, U18, U19), and readers beside a writer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from log_partitions import Place, one_record, records
from tidegate.errors import CorruptError, InvalidError, OffsetOutOfRangeError
from tidegate.log.fetch import Fetched, Isolation
from tidegate.log.format.batch import iter_headers
from tidegate.log.indexes import AbortedTxn
from tidegate.log.partition import PartitionLog
from tidegate.log.producer_state import Origin
from tidegate.testing.batches import Rec, build_batch, end_transaction_batch

LOG_END, WATERMARK, COMMITTED = Isolation.LOG_END, Isolation.HIGH_WATERMARK, Isolation.TXN_COMMITTED


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def filled(place: Place, count: int, **settings: Any) -> PartitionLog:
    log = place.open(**settings)
    for offset in range(count):
        log.append(one_record(timestamp=offset))
    log.acknowledge(sync=False)
    return log


def read_offsets(fetched: Fetched) -> list[int]:
    return [header.base_offset for _, header in iter_headers(fetched.data)]


# -- high watermark ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step",
    [
        pytest.param("append", id="LS-U1-append"),
        pytest.param("clamp", id="LS-U1-clamp"),
        pytest.param("truncate", id="LS-U1-truncate"),
        pytest.param("restart", id="LS-U1-truncate-fully"),
    ],
)
def test_the_high_watermark_follows_its_rules(place: Place, step: str) -> None:
    log = place.open()
    for _ in range(10):
        log.append(one_record())
    assert log.high_watermark == 0
    if step == "clamp":
        assert log.update_high_watermark(20) == 10
        assert log.update_high_watermark(4) == 4
        assert log.update_high_watermark(-3) == 0
    if step == "truncate":
        log.update_high_watermark(8)
        log.truncate_to(9)
        assert log.high_watermark == 8
        log.truncate_to(6)
        assert log.high_watermark == 6
    if step == "restart":
        log.update_high_watermark(8)
        log.truncate_fully(4)
        assert (log.log_start_offset, log.log_end_offset, log.high_watermark) == (4, 4, 4)


def test_acknowledging_shows_what_was_appended(place: Place) -> None:
    log = place.open()
    log.append(records(3))
    assert read_offsets(log.fetch(0, max_bytes=1000)) == []
    assert log.acknowledge(sync=False) == 3
    assert read_offsets(log.fetch(0, max_bytes=1000)) == [0]
    assert log.acknowledge(sync=True) == 3
    assert log.recovery_point == 3


def test_the_high_watermark_starts_at_the_log_end_unless_told_otherwise(place: Place) -> None:
    log = filled(place, 5)
    log = place.reopen(log)
    assert log.high_watermark == 5
    log = place.reopen(log, high_watermark=3)
    assert log.high_watermark == 3


# -- by offset -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "outcome"),
    [
        pytest.param(10, "empty", id="LS-U8-end"),
        pytest.param(11, "out of range", id="LS-U8-beyond"),
        pytest.param(2, "out of range", id="LS-U8-before-start"),
        pytest.param(3, "found", id="LS-U8-start"),
    ],
)
def test_the_edges_of_the_log(place: Place, offset: int, outcome: str) -> None:
    log = filled(place, 10)
    log.delete_records_before(3)
    if outcome == "out of range":
        with pytest.raises(OffsetOutOfRangeError) as caught:
            log.fetch(offset, max_bytes=1000)
        assert (caught.value.first, caught.value.end, caught.value.offset) == (3, 10, offset)
        assert caught.value.kafka_name == "OFFSET_OUT_OF_RANGE"
    else:
        assert read_offsets(log.fetch(offset, max_bytes=1000)) == (
            [] if outcome == "empty" else list(range(3, 10))
        )


@pytest.mark.parametrize(
    ("max_bytes", "min_one", "size", "incomplete"),
    [
        pytest.param(1, True, 72, False, id="LS-U9-min-one"),
        pytest.param(1, False, 1, True, id="LS-U9-one-byte"),
        pytest.param(0, False, 0, True, id="LS-U9-zero"),
        pytest.param(72, False, 72, False, id="LS-U9-exact"),
        pytest.param(100, True, 100, False, id="LS-U9-partial-second"),
    ],
)
def test_how_many_bytes_come_back(
    place: Place, max_bytes: int, min_one: bool, size: int, incomplete: bool
) -> None:
    log = filled(place, 5)
    fetched = log.fetch(1, max_bytes=max_bytes, min_one=min_one)
    assert len(fetched.data) == size
    assert fetched.start_position == 72
    assert fetched.first_batch_incomplete == incomplete


def test_a_read_may_begin_inside_a_batch_and_gets_the_whole_batch(place: Place) -> None:
    log = place.open()
    for _ in range(3):
        log.append(records(5))
    log.acknowledge(sync=False)
    fetched = log.fetch(7, max_bytes=1000)
    assert read_offsets(fetched) == [5, 10]


def test_every_offset_is_found_across_segments_and_gaps(place: Place) -> None:
    log = place.open(segment_bytes=300, index_interval_bytes=80)
    expected = []
    for offset in range(0, 300, 7):
        log.append(one_record(base_offset=offset), origin=Origin.REPLICATION)
        expected.append(offset)
    assert len(log.segments) > 5
    log.acknowledge(sync=False)
    for offset in range(295):
        wanted = next((known for known in expected if known >= offset), None)
        assert read_offsets(log.fetch(offset, max_bytes=1)) == ([] if wanted is None else [wanted])


@pytest.mark.parametrize("isolation", [WATERMARK, LOG_END])
def test_a_read_stops_at_the_limit_of_its_isolation(place: Place, isolation: Isolation) -> None:
    log = place.open(segment_bytes=300)
    for _ in range(12):
        log.append(one_record())
    for watermark in range(13):
        log.update_high_watermark(watermark)
        seen: list[int] = []
        at = 0
        while batch := read_offsets(log.fetch(at, max_bytes=150, isolation=isolation)):
            seen += batch
            at = seen[-1] + 1
        assert seen == list(range(watermark if isolation is WATERMARK else 12))


def test_a_watermark_inside_a_batch_hides_the_whole_batch(place: Place) -> None:
    log = place.open()
    log.append(records(5))
    log.append(records(5))
    log.update_high_watermark(7)
    assert read_offsets(log.fetch(0, max_bytes=1000)) == [0]
    assert read_offsets(log.fetch(6, max_bytes=1000)) == []


@pytest.mark.parametrize("offset", [pytest.param(11, id="LS-U16")])
def test_the_log_cannot_start_beyond_the_high_watermark(place: Place, offset: int) -> None:
    log = filled(place, 10)
    log.append(one_record())
    with pytest.raises(OffsetOutOfRangeError):
        log.delete_records_before(offset)
    assert log.log_start_offset == 0
    assert log.delete_records_before(-1) == 10
    assert log.delete_records_before(4) == 10


# -- by timestamp --------------------------------------------------------------------------------


@pytest.mark.parametrize("stamps", [pytest.param((5, 6, 5), id="LS-U18")])
def test_the_largest_timestamp_is_found_at_its_first_record(place: Place, stamps: tuple[int, ...]) -> None:
    log = place.open()
    for stamp in stamps:
        log.append(one_record(timestamp=stamp))
    assert log.offset_for_timestamp(-3) == (6, 1)


def test_the_largest_timestamp_inside_a_batch_and_across_segments(place: Place) -> None:
    log = place.open(segment_bytes=200)
    log.append(build_batch([Rec(None, b"a", 5), Rec(None, b"b", 9), Rec(None, b"c", 9)]))
    log.append(one_record(timestamp=3))
    log.append(one_record(timestamp=8))
    assert len(log.segments) > 1
    assert log.offset_for_timestamp(-3) == (9, 1)
    assert place.reopen(log).offset_for_timestamp(-3) == (9, 1)


def test_special_timestamps(place: Place) -> None:
    log = filled(place, 6)
    log.delete_records_before(2)
    assert log.offset_for_timestamp(-1) == (-1, 6)
    assert log.offset_for_timestamp(-2) == (-1, 2)
    assert log.offset_for_timestamp(-4) == (-1, 2)
    assert place.open(segment_bytes=100).offset_for_timestamp(-3) is not None


def test_an_empty_log_has_no_largest_timestamp(place: Place) -> None:
    log = place.open()
    assert log.offset_for_timestamp(-3) is None
    assert log.offset_for_timestamp(-1) == (-1, 0)
    log.append(one_record())
    assert log.offset_for_timestamp(-3) is None


@pytest.mark.parametrize("reopened", [False, True])
def test_timestamps_out_of_order_find_the_first_record_late_enough(place: Place, reopened: bool) -> None:
    stamps = [50, 20, 70, 10, 70, 90, 30, 80, 95, 5] * 3
    log = place.open(segment_bytes=400, index_interval_bytes=80)
    for stamp in stamps:
        log.append(one_record(timestamp=stamp))
    if reopened:
        log = place.reopen(log, clean=False)
    for asked in range(0, 100, 3):
        first = next((offset for offset, stamp in enumerate(stamps) if stamp >= asked), None)
        found = log.offset_for_timestamp(asked)
        assert (None if found is None else found.offset) == first


def test_a_search_by_timestamp_respects_the_log_start(place: Place) -> None:
    log = filled(place, 10)
    log.delete_records_before(6)
    assert log.offset_for_timestamp(2) == (6, 6)


# -- transactions --------------------------------------------------------------------------------


class Txns:
    """Producers with transactions on one log, sequences kept."""

    def __init__(self, log: PartitionLog) -> None:
        self.log = log
        self.sequences: dict[int, int] = {}

    def data(self, producer: int, count: int) -> None:
        sequence = self.sequences.get(producer, 0)
        self.sequences[producer] = sequence + count
        self.log.append(
            records(
                count,
                timestamp=1,
                producer_id=producer,
                producer_epoch=0,
                base_sequence=sequence,
                transactional=True,
            )
        )

    def plain(self, count: int) -> None:
        self.log.append(records(count, timestamp=1))

    def end(self, kind: Literal["ABORT", "COMMIT"], producer: int) -> None:
        marker = end_transaction_batch(kind, producer_id=producer, producer_epoch=0, timestamp=1)
        self.log.append(marker, origin=Origin.COORDINATOR)


def mixed(log: PartitionLog) -> None:
    txns = Txns(log)
    txns.data(1, 5)  # 0-4
    txns.plain(3)  # 5-7
    txns.data(2, 2)  # 8-9
    txns.data(1, 4)  # 10-13
    txns.data(3, 3)  # 14-16
    txns.plain(2)  # 17-18
    txns.data(1, 10)  # 19-28
    txns.end("ABORT", 1)  # 29
    txns.data(2, 6)  # 30-35
    txns.data(4, 3)  # 36-38
    txns.plain(10)  # 39-48
    txns.data(3, 9)  # 49-57
    txns.end("COMMIT", 3)  # 58
    txns.data(4, 8)  # 59-66
    txns.data(2, 7)  # 67-73
    txns.end("ABORT", 2)  # 74
    txns.plain(10)  # 75-84
    txns.data(4, 4)  # 85-88
    txns.end("COMMIT", 4)  # 89


ABORTED = [AbortedTxn(1, 0, 29, 8), AbortedTxn(2, 8, 74, 36)]


@pytest.mark.parametrize("segment_bytes", [1 << 30, 700], ids=["LS-U19", "LS-U19-many-segments"])
@pytest.mark.parametrize("reopened", ["no", "clean", "crash"])
def test_aborted_transactions_and_the_last_stable_offset(
    place: Place, segment_bytes: int, reopened: str
) -> None:
    log = place.open(segment_bytes=segment_bytes)
    mixed(log)
    assert log.log_end_offset == 90
    if reopened != "no":
        log = place.reopen(log, clean=reopened == "clean", high_watermark=0, recovery_point=0)
    assert log.collect_aborted(0, 90) == ABORTED
    if reopened == "no":  # a loaded log knows nothing of transactions that ended before
        log.update_high_watermark(30)
        assert (log.view.first_unstable, log.last_stable_offset) == (8, 8)
        log.update_high_watermark(75)
        assert (log.view.first_unstable, log.last_stable_offset) == (36, 36)
        log.update_high_watermark(90)
        assert log.view.first_unstable is None
    log.update_high_watermark(90)
    assert log.last_stable_offset == 90


def test_committed_reads_stop_at_the_last_stable_offset_and_name_the_aborted(place: Place) -> None:
    log = place.open(index_interval_bytes=100)
    mixed(log)
    log.update_high_watermark(75)
    fetched = log.fetch(0, max_bytes=100_000, isolation=COMMITTED)
    assert read_offsets(fetched)[-1] == 30
    assert fetched.aborted == tuple(ABORTED)
    assert log.fetch(0, max_bytes=1, isolation=COMMITTED).aborted == (ABORTED[0],)
    assert log.fetch(0, max_bytes=100_000, isolation=WATERMARK).aborted == ()
    log.acknowledge(sync=False)
    everything = log.fetch(0, max_bytes=100_000, isolation=COMMITTED)
    assert read_offsets(everything)[-1] == 89
    assert everything.aborted == tuple(ABORTED)
    assert log.fetch(75, max_bytes=100_000, isolation=COMMITTED).aborted == ()


def test_an_open_transaction_holds_committed_readers_back(place: Place) -> None:
    log = place.open()
    txns = Txns(log)
    txns.plain(2)
    txns.data(7, 2)
    txns.plain(2)
    log.acknowledge(sync=False)
    assert log.last_stable_offset == 2
    assert read_offsets(log.fetch(0, max_bytes=1000, isolation=COMMITTED)) == [0]
    assert read_offsets(log.fetch(2, max_bytes=1000, isolation=COMMITTED)) == []
    txns.end("COMMIT", 7)
    assert log.last_stable_offset == 2
    log.acknowledge(sync=False)
    assert log.last_stable_offset == 7
    log.delete_records_before(5)
    assert log.last_stable_offset == 7


def test_the_start_of_the_log_bounds_the_last_stable_offset(place: Place) -> None:
    log = place.open()
    txns = Txns(log)
    txns.data(7, 2)
    txns.plain(5)
    log.acknowledge(sync=False)
    assert log.last_stable_offset == 0
    log.delete_records_before(4)
    assert log.last_stable_offset == 4


# -- readers beside a writer ---------------------------------------------------------------------


class Reader(threading.Thread):
    """Reads to the end of a log that is being written, noting whatever is not as it should be."""

    def __init__(self, log: PartitionLog, written: threading.Event) -> None:
        super().__init__()
        self.log, self.written = log, written
        self.batches = 0
        self.faults: list[str] = []

    def run(self) -> None:
        at = 0
        while not (self.written.is_set() and at >= self.log.high_watermark):
            try:
                got = read_offsets(self.log.fetch(at, max_bytes=700))
            except OffsetOutOfRangeError as error:
                at = error.first
                continue
            if not got:
                self.written.wait(0.001)
                continue
            if (
                got[0] < at
                or got != list(range(got[0], got[0] + len(got)))
                or got[-1] >= self.log.high_watermark
            ):
                self.faults.append(f"at {at}: {got}")
            at = got[-1] + 1
            self.batches += len(got)


def test_readers_see_only_whole_batches_in_order_while_the_log_rolls_and_ages(place: Place) -> None:
    log = place.open(segment_bytes=2000, index_interval_bytes=200, file_delete_delay_ms=0)
    written = threading.Event()
    readers = [Reader(log, written) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(600):
        log.append(one_record(timestamp=number))
        log.acknowledge(sync=False)
        if number % 100 == 99:
            log.delete_segments(log.segments[:-2], reason="test")
            place.scheduler.run_due()
    written.set()
    for reader in readers:
        reader.join(300)
        assert not reader.is_alive()
        assert reader.faults == []
        assert reader.batches > 0


def test_a_missing_segment_file_is_named(place: Place) -> None:
    log = filled(place, 3)
    (place.folder / f"{0:020d}.log").unlink()
    with pytest.raises(CorruptError, match="another program removed it"):
        log.fetch(0, max_bytes=100)


def test_a_closed_log_refuses_everything(place: Place) -> None:
    log = filled(place, 3)
    log.close()
    assert not log.close()
    uses: list[Callable[[], object]] = [
        lambda: log.fetch(0, max_bytes=1),
        lambda: log.append(one_record()),
        lambda: log.acknowledge(sync=True),
        lambda: log.offset_for_timestamp(-3),
        log.roll,
        log.flush,
    ]
    for use in uses:
        with pytest.raises(InvalidError, match="closed"):
            use()


def test_a_view_does_not_change_when_the_log_does(place: Place) -> None:
    log = filled(place, 3, segment_bytes=100)
    view = log.view
    for _ in range(5):
        log.append(one_record())
    log.acknowledge(sync=False)
    log.delete_records_before(4)
    assert (view.log_start, view.end.offset, view.high_watermark.offset, len(view.segments)) == (0, 3, 3, 3)
