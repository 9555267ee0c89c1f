"""What a checkpoint keeps of a store beside its rows, positions, and iterators that outlive what they show."""

from __future__ import annotations

import numpy as np
import pytest

from tidegate.errors import CorruptError, InvalidError
from tidegate.storage import BucketIndexState, Merge, ProgressState, StoreSpec
from tidegate.windows.stores.segmented_store import Position, WindowsState
from tidegate.windows.stores.value_store import PAYLOAD
from tidegate.windows.stores.window_store import WindowStore
from workers import TASK, Worker

GOLDEN = "9601cd30390102cd0100" + "81a174" + "8203cd03e80005"
"""version 1, observed time 12345, sequences 1 and 2, 256 dropped, offset 1000 of partition 3 and 5 of 0 of t."""


def state(**changes: bool) -> WindowsState:
    return WindowsState(StoreSpec("w", Merge.LAST, PAYLOAD), **changes)


def filled() -> WindowsState:
    one = state()
    one.observed_time, one.sequence, one.logged_sequence, one.dropped_records = 12_345, 1, 2, 256
    one.position = Position({"t": {3: 1000, 0: 5}})
    return one


def test_it_is_a_state_that_storage_can_keep() -> None:
    kept: BucketIndexState = state()
    assert isinstance(kept, ProgressState)
    assert kept.index.spec.name == "w"


def test_the_bytes_in_a_checkpoint_stay_as_they_are() -> None:
    assert filled().encode_progress().hex() == GOLDEN


@pytest.mark.parametrize("forgets", [False, True])
def test_what_a_restore_brings_back(forgets: bool) -> None:
    calls: list[int] = []
    again = state(forgets_clocks=forgets)
    again.when_restored(lambda: calls.append(again.observed_time))
    again.restore_progress(bytes.fromhex(GOLDEN))
    clocks = (again.observed_time, again.sequence, again.logged_sequence)
    assert clocks == ((-1, 0, 0) if forgets else (12_345, 1, 2))
    assert (again.dropped_records, again.position) == (256, Position({"t": {0: 5, 3: 1000}}))
    assert calls == [again.observed_time]
    again.restore_progress(b"")
    assert (again.observed_time, again.position) == (-1, Position())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytes.fromhex(GOLDEN)[:-1], "cannot be read"),
        (b"\x93\x01\x02\x03", "cannot be read"),
        (bytes.fromhex("9602" + GOLDEN[4:]), "version 2"),
    ],
)
def test_damaged_or_newer_bytes_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(CorruptError, match=message):
        state().restore_progress(data)


def test_a_position_only_grows() -> None:
    position = Position()
    position.advance("t", 0, 7)
    position.advance("t", 0, 5)
    position.advance_batch("t", np.array([1, 0, 1, 2]), np.array([4, 9, 3, 0]))
    position.advance_batch("u", 3, np.array([2, 8, 1]))
    position.advance_batch("u", 3, np.array([], np.int64))
    assert position.to_dict() == {"t": {0: 9, 1: 4, 2: 0}, "u": {3: 8}}
    assert position.offset("t", 9) == position.offset("x", 0) == -1
    copy = Position(position.to_dict())
    position.advance("t", 0, 20)
    position.advance("v", 0, 0)
    assert copy.offset("t", 0) == 9
    assert position.covers(copy) and not copy.covers(position)
    assert position.covers(Position())
    with pytest.raises(InvalidError, match="2 partitions for 1 offsets"):
        position.advance_batch("t", np.array([1, 2]), np.array([1]))


def windows(worker: Worker, compat: str = "tidegate") -> WindowStore:
    context = worker.runtime.context(TASK)
    return WindowStore(context, "w", retention=120_000, segment_interval=60_000, window_size=1, compat=compat)


@pytest.mark.parametrize(("compat", "left"), [("tidegate", [2]), ("kafka-streams/memory", [0, 1, 2])])
def test_an_open_iterator_skips_time_segments_that_were_dropped(compat: str, left: list[int]) -> None:
    store = windows(Worker(), compat)
    store.put_all([b"k"] * 3, [1, 60_000, 119_000 + 1_000], [b"0", b"1", b"2"])
    opened = [store.fetch(b"k", 0, 500_000), store.backward_fetch(b"k", 0, 500_000)]
    scans = [store.all(), store.backward_all(), store.fetch_range(b"k", b"k", 0, 500_000)]
    store.put(b"k", b"far", 240_000)
    assert store.segments.ids == [2, 4]
    for rows in opened:
        assert sorted(start // 60_000 for start, _ in rows) == left
    for each in scans:
        assert sorted(windowed.window.start // 60_000 for windowed, _ in each) == left


def test_a_store_goes_back_to_a_checkpoint_in_place() -> None:
    worker = Worker()
    store = windows(worker)
    store.put(b"k", b"old", 60_000)
    token = worker.runtime.checkpoint(TASK)
    store.put(b"k", b"new", 600_000)
    assert store.segments.ids == [10]
    worker.runtime.apply_checkpoint(TASK, token)
    assert (store.observed_time, store.segments.ids) == (60_000, [1])
    assert list(store.fetch(b"k", 0, 600_000)) == [(60_000, b"old")]


def test_iterators_give_back_what_they_hold() -> None:
    worker = Worker()
    store = windows(worker)
    store.put_all([b"a", b"b"], [1, 60_001], [b"0", b"1"])
    for _ in worker.runtime.dumping(TASK, store.state, store.state.index.all_buckets(), evict=True):
        pass
    with store.all() as rows:
        next(rows)
        assert any(worker.runtime.leaks())
    assert not any(worker.runtime.leaks())
    assert next(rows, None) is None, "a closed one is at its end"
    backward = store.backward_all()
    next(backward)
    backward.close()
    assert len(list(store.backward_all())) == 2
    assert not any(worker.runtime.leaks())
