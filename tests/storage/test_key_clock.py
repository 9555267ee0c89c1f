"""The clock of keys: exact bytes, the coldest keys as a plain sort would choose them, never one in use."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InternalError
from tidegate.storage.memory.key_clock import MOST_TOUCHES, SMALLEST_SLOTS, KeyClock, choose_coldest
from tidegate.storage.parts import bytes_by_key
from tidegate.storage.runs.building import build_runs
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Merge, StoreSpec
from tidegate.testing.storage import batch_of
from tidegate.testing.threads import Beside


def hashes_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def clock_of(lines: dict[int, tuple[int, int]]) -> KeyClock:
    """Keys with (tick, bytes)."""
    clock = KeyClock("t")
    for key, (tick, nbytes) in lines.items():
        clock.add_bytes(hashes_of(key), np.array([nbytes]), tick)
    return clock


def twin(lines: list[tuple[int, int]], need_bytes: int, need_keys: int) -> set[int]:
    """The coldest, one by one: by tick, the larger first, then as they stand."""
    if need_bytes <= 0 and need_keys <= 0:
        return set()
    chosen: set[int] = set()
    for place in sorted(range(len(lines)), key=lambda i: (lines[i][0], -lines[i][1])):
        if sum(lines[i][1] for i in chosen) >= need_bytes and len(chosen) >= need_keys:
            break
        chosen.add(place)
    return chosen


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6) | st.sampled_from([10**15, -5]), st.integers(1, 50)), max_size=40),
    st.integers(-1, 1200),
    st.integers(0, 45),
)
def test_the_choice_equals_a_plain_sort(
    lines: list[tuple[int, int]], need_bytes: int, need_keys: int
) -> None:
    ticks = np.array([tick for tick, _ in lines], np.int64)
    nbytes = np.array([size for _, size in lines], np.int64)
    chosen = choose_coldest(ticks, nbytes, need_bytes, need_keys)
    assert len(set(chosen.tolist())) == len(chosen)
    assert sorted(chosen.tolist()) == sorted(twin(lines, need_bytes, need_keys))


def test_the_oldest_goes_first_and_of_equals_the_largest() -> None:
    clock = clock_of({1: (5, 10), 2: (1, 10), 3: (1, 30), 4: (9, 100)})
    assert clock.coldest(1).tolist() == [3]
    assert clock.coldest(31).tolist() == [2, 3]
    assert clock.coldest(41).tolist() == [1, 2, 3]
    assert clock.coldest(10**9).tolist() == [1, 2, 3, 4]
    assert clock.coldest(0).tolist() == []
    clock.touch(hashes_of(3, 77), 10)
    assert clock.coldest(1).tolist() == [2]
    assert clock.count == 4, "touching a key without bytes does not bring it in"


def test_keys_in_use_are_never_chosen() -> None:
    """WS-T44, the choice: held keys are skipped and the next candidates taken."""
    clock = clock_of({key: (key, 10) for key in range(1, 7)})
    clock.hold(hashes_of(1, 2, 99))
    clock.hold(hashes_of(2))
    assert clock.coldest(15, hashes_of(3, 3)).tolist() == [4, 5]
    clock.unhold(hashes_of(1, 2))
    assert clock.coldest(25).tolist() == [1, 3, 4] and clock.is_held(2) and not clock.is_held(1)
    clock.unhold(hashes_of(2, 99))
    assert clock.held == 0 and clock.coldest(10**6, need_keys=1).tolist() == [1, 2, 3, 4, 5, 6]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 5), min_size=1, max_size=4)), max_size=30))
def test_holds_add_up_however_they_were_taken_and_ended(steps: list[tuple[bool, list[int]]]) -> None:
    clock, model = clock_of({key: (key, 10) for key in range(1, 6)}), Counter[int]()
    for takes, keys in steps:
        if takes:
            clock.hold(hashes_of(*keys))
            model.update(keys)
        elif Counter(keys) <= model:
            clock.unhold(hashes_of(*keys))
            model.subtract(keys)
        assert clock.coldest(10**6).tolist() == [key for key in range(1, 6) if not model[key]]
        assert [clock.is_held(key) for key in range(1, 6)] == [model[key] > 0 for key in range(1, 6)]
    for key, count in model.items():
        for _ in range(count):
            clock.unhold(hashes_of(key))
    assert clock.held == 0


def test_letting_go_of_what_nobody_holds_is_an_internal_error() -> None:
    clock = KeyClock("pipe/op/1")
    with pytest.raises(InternalError, match="task pipe/op/1"):
        clock.unhold(hashes_of(5))
    with pytest.raises(InternalError, match="task pipe/op/1"):
        clock.unhold(hashes_of(5, 6))


def test_rows_and_state_of_a_key_are_counted_apart_and_it_stays_until_both_are_gone() -> None:
    clock = clock_of({1: (1, 100), 2: (2, 50)})
    clock.add_bytes(hashes_of(2, 3), np.array([7, 9]), 3, state=True)
    assert clock.total_bytes() == 150 and clock.total_bytes(state=True) == 16
    assert clock.coldest(1, state=True).tolist() == [2] and clock.coldest(1).tolist() == [1]
    clock.remove_bytes(hashes_of(2), np.array([50]))
    assert clock.count == 3 and clock.coldest(10**6).tolist() == [1]
    clock.remove_bytes(hashes_of(2), np.array([7]), state=True)
    assert clock.count == 2 and clock.bytes_of(hashes_of(1, 2, 3)).tolist() == [100, 0, 9]


@pytest.mark.parametrize("state", [False, True])
def test_taking_more_than_a_key_has_is_an_internal_error(state: bool) -> None:
    clock = clock_of({1: (1, 100)})
    with pytest.raises(InternalError, match=r"101 bytes of .* of task t"):
        clock.remove_bytes(hashes_of(1), np.array([101]), state=state)
    assert clock.total_bytes() == 100


def test_the_table_grows_and_gives_its_memory_back() -> None:
    clock, generator = KeyClock("t", max_keys=30_000), np.random.default_rng(7)
    empty = clock.nbytes
    keys = np.unique(generator.integers(0, 2**64, 50_000, dtype=np.uint64))
    sizes = generator.integers(1, 1000, len(keys))
    clock.add_bytes(keys, sizes, 1)
    assert clock.count == len(keys) and clock.total_bytes() == sizes.sum()
    assert clock.nbytes <= 128 * len(keys) + empty
    assert clock.crowded == len(keys) - 30_000
    assert len(clock.coldest(0, need_keys=clock.crowded)) == clock.crowded
    clock.remove_bytes(keys[100:], sizes[100:])
    assert clock.count == 100 and clock.nbytes <= 128 * 100 + empty and clock.crowded == 0
    assert (clock.bytes_of(keys[:100]) == sizes[:100]).all()
    clock.drop(keys)
    assert clock.count == 0 and clock.nbytes == empty == 2 * 32 * SMALLEST_SLOTS


def runs_of(*keys: list[int]) -> list[Run]:
    """A run for each list of keys, a row a key."""
    spec = StoreSpec("events", Merge.APPEND, pa.schema([("value", pa.string())]))
    rows = [[{"key": b"k%d" % key, "ts": key, "value": "x" * key} for key in each] for each in keys]
    return [build_runs(spec, batch_of(spec, each), first_seq=0, max_rows=1000)[0] for each in rows]


def test_a_run_that_comes_and_goes_between_two_choices_never_reaches_the_table() -> None:
    stays, goes = runs_of([1, 2, 3], [2, 3, 4])
    weighed: list[Run] = []

    def weigh(run: Run) -> np.ndarray:
        weighed.append(run)
        return bytes_by_key(run)

    clock = KeyClock("t")
    clock.add_run(goes, weigh, 1)
    clock.add_run(stays, weigh, 2)
    clock.add_run(goes, weigh, 3)  # a second copy, as when a run moves from one cache to another
    clock.remove_run(goes, weigh)
    clock.remove_run(goes, weigh)
    assert weighed == []
    assert clock.count == 3 and clock.total_bytes() == bytes_by_key(stays).sum()
    assert weighed == [stays]
    clock.remove_run(stays, weigh)
    assert clock.count == clock.total_bytes() == 0


@pytest.mark.parametrize("settled", [False, True])
def test_queued_touches_count_in_the_order_of_their_ticks(settled: bool) -> None:
    (run,) = runs_of([1, 2, 3, 4])
    clock = KeyClock("t")
    clock.add_run(run, bytes_by_key, 1, is_use=True)
    if settled:
        assert clock.count == 4
    first, second = run.hashes[:1], run.hashes[1:2]
    clock.touch(first, 9)
    clock.touch(second, 5)
    clock.touch(first, 4)  # an older use does not make a key older
    order = [int(clock.coldest(0, need_keys=number).size) for number in (2, 3)]
    assert order == [2, 3]
    assert set(clock.coldest(0, need_keys=2)) == set(run.hashes[2:])
    assert set(clock.coldest(0, need_keys=3)) == set(run.hashes[1:])


def test_the_queue_of_touches_is_bounded() -> None:
    (run,) = runs_of([1, 2])
    clock = KeyClock("t")
    clock.add_run(run, bytes_by_key, 1)
    for tick in range(MOST_TOUCHES + 2):
        clock.touch(run.hashes[:1], tick + 2)
    assert len(clock._touched) <= MOST_TOUCHES
    assert clock.coldest(1).tolist() == run.hashes[1:].tolist()


def test_bytes_leave_that_are_still_queued() -> None:
    (run,) = runs_of([1, 2, 3])
    clock, shares = KeyClock("t"), bytes_by_key(run)
    clock.add_run(run, bytes_by_key)
    clock.remove_bytes(run.hashes[:2], shares[:2])
    assert clock.bytes_of(run.hashes).tolist() == [0, 0, shares[2]]


def test_a_run_that_goes_does_not_bring_those_into_the_table_that_came_after_it() -> None:
    first, *later = runs_of([1, 2, 3], [2, 3, 4], [1, 4, 5])
    weighed: list[Run] = []

    def weigh(run: Run) -> np.ndarray:
        weighed.append(run)
        return bytes_by_key(run)

    clock = KeyClock("t")
    clock.add_run(first, weigh, 1, is_use=True)
    assert clock.count == 3 and weighed == [first]
    for tick, (old, new) in enumerate(pairwise([first, *later]), 2):
        clock.add_run(new, weigh, tick, is_use=True)
        clock.remove_run(old, weigh)
    assert weighed == [first, first]
    assert clock.bytes_of(later[-1].hashes).tolist() == bytes_by_key(later[-1]).tolist()


def test_an_equal_run_goes_while_the_one_that_came_is_queued() -> None:
    shared, came, equal = runs_of([1, 2], [1, 2, 3], [1, 2, 3])
    clock = KeyClock("t")
    clock.add_run(shared, bytes_by_key, 1, is_use=True)
    assert clock.count == 2
    clock.add_run(came, bytes_by_key, 2, is_use=True)
    clock.remove_run(equal, bytes_by_key)
    assert clock.bytes_of(came.hashes).sum() == bytes_by_key(shared).sum() and clock.count == 2
    with pytest.raises(InternalError):
        clock.remove_run(equal, bytes_by_key)


def test_keys_of_a_run_that_was_moved_keep_their_tick() -> None:
    old, moved, other = runs_of([1, 2], [1, 2], [3])
    clock = KeyClock("t")
    clock.add_run(old, bytes_by_key, 1, is_use=True)
    clock.add_run(other, bytes_by_key, 2, is_use=True)
    assert clock.count == 3
    clock.add_run(moved, bytes_by_key, 3)
    clock.remove_run(old, bytes_by_key)
    assert clock.coldest(0, need_keys=2).tolist() == moved.hashes.tolist()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["come", "go", "touch", "ask"])), max_size=40))
def test_bytes_are_the_same_whenever_the_queue_reaches_the_table(steps: list[tuple[int, str]]) -> None:
    runs = runs_of([1, 2, 3], [2, 3, 4], [3, 5], [1, 5, 6], [2, 6])
    late, early, here = KeyClock("t"), KeyClock("t"), set[int]()
    for tick, (number, step) in enumerate(steps, 1):
        run = runs[number]
        for clock in (late, early):
            if step == "touch":
                clock.touch(run.hashes, tick)
            elif step == "come" and number not in here:
                clock.add_run(run, bytes_by_key, tick, is_use=True)
            elif step == "go" and number in here:
                clock.remove_run(run, bytes_by_key)
        here = here | {number} if step == "come" else here - {number} if step == "go" else here
        assert early.count == len({key for each in here for key in runs[each].hashes.tolist()})
        if step == "ask":
            assert late.count == early.count
    hashes = np.unique(np.concatenate([run.hashes for run in runs]))
    assert late.bytes_of(hashes).tolist() == early.bytes_of(hashes).tolist()


def test_keys_are_counted_before_they_are_called_too_many() -> None:
    same = runs_of([1, 2, 3], [1, 2, 3])
    clock = KeyClock("t", max_keys=3)
    for run in same:
        clock.add_run(run, bytes_by_key)
    assert clock.crowded == 0
    clock.add_run(runs_of([9])[0], bytes_by_key)
    assert clock.crowded == 1


def test_whoever_puts_touches_off_is_asked_before_a_choice() -> None:
    clock = clock_of({1: (1, 10), 2: (2, 10)})
    clock.settle_with(lambda: clock.touch(hashes_of(1), clock.tick()))
    assert clock.coldest(1).tolist() == [2]


def test_many_threads_leave_the_bytes_exact() -> None:
    clock = KeyClock("t")
    keys = np.arange(1000, dtype=np.uint64)

    def work(start: int) -> None:
        mine = keys[start % 7 :: 7]
        for number in range(1, 60):
            sizes = np.full(len(mine), number)
            clock.add_bytes(mine, sizes, number)
            clock.hold(mine)
            clock.touch(mine, number)
            clock.coldest(1000)
            clock.unhold(mine)
            clock.remove_bytes(mine, sizes - 1)

    for thread in [Beside(lambda start=start: work(start)) for start in range(8)]:
        thread.result()
    assert clock.held == 0 and clock.total_bytes() == sum(
        59 * len(keys[start % 7 :: 7]) for start in range(8)
    )


def test_keys_used_one_by_one_are_held_touched_and_the_last_to_go() -> None:
    clock = KeyClock("task")
    hashes = np.arange(1, 3001, dtype=np.uint64)
    clock.add_bytes(hashes, np.full(3000, 10, np.int64), clock.tick())
    later = clock.tick()
    for key in range(1, 2001):  # more than are kept waiting for the table
        clock.begin_use(key)
        if key % 2:
            clock.end_use(key)
    assert clock.held == 1000
    assert clock.coldest(10_000).tolist() == list(range(2001, 3001)), "those that were not used"
    assert set(clock.coldest(30_000).tolist()) == {*range(1, 2001, 2), *range(2001, 3001)}, (
        "none that is held"
    )
    clock.begin_use(2)
    clock.end_use(2)
    assert clock.is_held(2), "holds add up"
    for key in range(2, 2001, 2):
        clock.end_use(key)
    assert clock.held == 0
    with pytest.raises(InternalError, match="nobody holds it"):
        clock.end_use(2)
    clock.touch(hashes[2000:], later + 5)
    assert set(clock.coldest(20_000).tolist()) == set(range(1, 2001))
