"""Producer state over time: expiry, snapshots and reloading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from log_partitions import PID
from log_partitions import ProducerBench as Bench
from tidegate.errors import InvalidError, TidegateError, UnavailableError
from tidegate.files import Effect, Files
from tidegate.log.format.partition_files import SNAPSHOT, offset_file
from tidegate.log.producer_state import Origin

DAY_MS = 86_400_000


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def out_of_order(act: Callable[[], object]) -> None:
    refused(act, InvalidError, "OUT_OF_ORDER_SEQUENCE_NUMBER")


def refused(act: Callable[[], object], kind: type[TidegateError], name: str) -> None:
    with pytest.raises(kind) as caught:
        act()
    assert caught.value.kafka_name == name


# -- expiry -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("idle_ms", "expired"),
    [pytest.param(DAY_MS - 1, 0, id="LS-P8-before"), pytest.param(DAY_MS, 1, id="LS-P8-at")],
)
def test_an_idle_producer_expires_and_may_then_begin_anywhere(
    bench: Bench, idle_ms: int, expired: int
) -> None:
    bench.append(0, 1, epoch=5)
    bench.clock.advance(idle_ms)
    assert bench.states.remove_expired(bench.clock.now_ms()) == expired
    if expired:
        bench.append(17, 2, epoch=5)
        assert (bench.entry().last_sequence, bench.states.map_end_offset) == (17, 3)
    else:
        out_of_order(lambda: bench.append(17, 2, epoch=5))


@pytest.mark.parametrize(
    "days", [pytest.param(1, id="LS-P8-open"), pytest.param(1000, id="LS-P8-open-for-years")]
)
def test_an_open_transaction_never_expires(bench: Bench, days: int) -> None:
    bench.append(0, 99, epoch=5, txn=True)
    bench.clock.advance(days * DAY_MS)
    assert bench.states.remove_expired(bench.clock.now_ms()) == 0
    bench.states.take_snapshot()
    assert bench.reloaded(0, 100).states.first_undecided_offset == 99


@pytest.mark.parametrize(
    "origin",
    [
        pytest.param(Origin.CLIENT, id="LS-P8-reload-client"),
        pytest.param(Origin.REPLICATION, id="LS-P8-reload-replication"),
    ],
)
def test_producers_expire_when_a_snapshot_is_loaded(bench: Bench, origin: Origin) -> None:
    bench.append(0, 0, timestamp=0)
    bench.append(1, 1, timestamp=1)
    bench.append(5, 2, pid=2, timestamp=DAY_MS)
    bench.states.take_snapshot()
    again = bench.reloaded(0, 3, now_ms=DAY_MS + 1)
    assert set(again.states.active_producers) == {2}
    again.append(2, 3, timestamp=DAY_MS + 2, origin=origin)
    assert again.entry().last_sequence == 2


# -- snapshots --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_start", "log_end", "kept"),
    [
        pytest.param(1, 3, [2, 3], id="LS-P6"),
        pytest.param(0, 9, [1, 2, 3, 4, 5], id="LS-P6-all"),
        pytest.param(5, 9, [], id="LS-P6-none"),
    ],
)
def test_reloading_keeps_snapshots_inside_the_log(
    bench: Bench, log_start: int, log_end: int, kept: list[int]
) -> None:
    for n in range(5):
        bench.append(n, n)
        bench.states.take_snapshot()
    assert bench.files() == [1, 2, 3, 4, 5]
    bench.states.truncate_and_reload(log_start, log_end, bench.clock.now_ms())
    assert bench.files() == kept == list(bench.states.snapshots.offsets)
    assert bench.states.map_end_offset == (kept[-1] if kept else log_start)
    assert set(bench.states.active_producers) == ({PID} if kept else set())


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="LS-P7-emptied"),
        pytest.param(lambda data: data[: len(data) // 2], id="LS-P7-half"),
        pytest.param(lambda data: bytes(37) + data[37:], id="LS-P7-overwritten"),
        pytest.param(lambda data: b"\0\2" + data[2:], id="LS-P7-version-2"),
    ],
)
def test_a_damaged_snapshot_is_discarded_and_the_previous_one_used(
    bench: Bench, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(2):
        bench.append(n, n)
        bench.states.take_snapshot()
    latest = offset_file(bench.folder, 2, SNAPSHOT)
    latest.write_bytes(damage(latest.read_bytes()))
    again = bench.reloaded(0, 20)
    assert bench.files() == [1]
    assert (again.states.map_end_offset, again.entry().last_sequence) == (1, 0)
    assert str(latest) in caplog.text


def test_without_any_good_snapshot_the_log_start_is_where_replay_begins(bench: Bench) -> None:
    bench.append(0, 7)
    bench.states.take_snapshot()
    offset_file(bench.folder, 8, SNAPSHOT).write_bytes(b"junk")
    states = bench.reloaded(5, 20).states
    assert (states.map_end_offset, states.snapshots.offsets) == (5, ())
    assert states.is_empty


@pytest.mark.parametrize(
    ("bases", "kept"),
    [
        pytest.param([42], [42], id="LS-P10"),
        pytest.param([5], [5, 42], id="LS-P10-clean-close"),
        pytest.param([2, 5, 42], [2, 5, 42], id="LS-P10-none-stray"),
        pytest.param([0, 41], [42], id="LS-P10-largest"),
        pytest.param([], [42], id="LS-P10-no-segments"),
    ],
)
def test_stray_snapshots_are_removed_except_one_behind_the_last_base(
    bench: Bench, bases: list[int], kept: list[int]
) -> None:
    for offset in (2, 5, 42):
        offset_file(bench.folder, offset, SNAPSHOT).write_bytes(b"")
    bench.states.remove_stray_snapshots(bases)
    assert bench.files() == kept == list(bench.states.snapshots.offsets)


def test_a_snapshot_is_taken_only_when_the_log_moved_on(bench: Bench) -> None:
    assert bench.states.take_snapshot() is None
    bench.append(0, 0)
    assert bench.states.take_snapshot() == offset_file(bench.folder, 1, SNAPSHOT)
    assert bench.states.take_snapshot() is None
    assert bench.files() == [1]
    bench.states.update_map_end_offset(9)
    assert bench.states.take_snapshot(sync=False) == offset_file(bench.folder, 9, SNAPSHOT)
    assert bench.states.snapshots.offsets == (1, 9)


def test_a_failed_snapshot_is_not_taken_for_written(tmp_path: Path) -> None:
    broken = [True]

    def watch(effect: Effect) -> None:
        if effect.kind == "rename" and broken[0]:
            raise UnavailableError("no")

    bench = Bench(tmp_path, files=Files(watch))
    bench.append(0, 0)
    with pytest.raises(UnavailableError):
        bench.states.take_snapshot()
    assert (bench.files(), bench.states.snapshots.offsets) == ([], ())
    broken[0] = False
    assert bench.states.take_snapshot() is not None


@pytest.mark.parametrize("txn", [False, True])
def test_a_reloaded_producer_goes_on_where_it_was(bench: Bench, txn: bool) -> None:
    bench.append(0, 0, txn=txn)
    bench.append(1, 1, txn=txn)
    bench.states.take_snapshot()
    again = bench.reloaded(0, 3)
    entry = again.entry()
    assert (entry.first_sequence, entry.last_sequence, entry.first_offset) == (1, 1, 1), "the last batch only"
    assert entry.txn_first_offset == (0 if txn else None)
    assert again.states.duplicate_of(again.header(1, 9)) is not None
    assert again.states.duplicate_of(again.header(0, 9)) is None
    out_of_order(lambda: again.append(0, 2, txn=txn))
    again.append(2, 2, txn=txn)


def test_a_finished_transaction_stays_finished_after_reloading(bench: Bench) -> None:
    bench.append(0, 0, txn=True)
    bench.append(1, 1, txn=True)
    bench.marker(2, abort=True)
    bench.states.take_snapshot()
    entry = bench.reloaded(0, 3).entry()
    assert (entry.last_sequence, entry.last_offset, entry.txn_first_offset) == (1, 1, None)


def test_a_marker_alone_survives_with_its_time(bench: Bench) -> None:
    bench.marker(0, abort=True)
    bench.states.take_snapshot()
    entry = bench.reloaded(0, 1).entry()
    assert (entry.last_timestamp, entry.batches) == (bench.clock.now_ms(), ())


def test_reloading_to_the_same_end_keeps_what_is_known(bench: Bench) -> None:
    for n in range(4):
        bench.append(n, n)
    bench.states.take_snapshot()
    bench.states.truncate_and_reload(2, 4, bench.clock.now_ms())
    assert len(bench.entry().batches) == 4
    assert bench.states.take_snapshot() is None


def test_deleting_old_snapshots(bench: Bench) -> None:
    for n in range(3):
        bench.append(n, n)
        bench.states.take_snapshot()
    bench.states.truncate_and_reload(2, 3, bench.clock.now_ms())
    assert bench.files() == [3]
    assert (
        bench.states.snapshots.existing_path(3) is not None
        and bench.states.snapshots.existing_path(2) is None
    )
    deleted = bench.states.snapshots.mark_deleted(3)
    assert deleted is not None and deleted.name.endswith(".snapshot.deleted") and deleted.exists()
    assert bench.states.snapshots.latest is None


def test_starting_fully_anew_deletes_all_snapshots(bench: Bench) -> None:
    for n in range(3):
        bench.append(n, n)
        bench.states.take_snapshot()
    bench.states.truncate_fully_and_start_at(0)
    assert (bench.files(), bench.states.map_end_offset) == ([], 0)
    bench.append(0, 0)
    bench.states.take_snapshot()
    assert bench.files() == [1]


def test_a_raised_log_start_keeps_producers_but_not_replicated_transactions(bench: Bench) -> None:
    bench.append(0, 0, txn=True)
    bench.marker(5)
    bench.states.on_log_start_incremented(6)
    assert bench.states.first_unstable_offset is None
    assert bench.entry().last_sequence == 0
    bench.states.on_log_start_incremented(20)
    assert bench.states.map_end_offset == 20
    assert bench.states.take_snapshot() is None
