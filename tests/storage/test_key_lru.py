"""The last uses of keys: the coldest as a plain sort would choose them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage_oracles import batch_of
from threads import Beside
from tidegate.storage.index import HotCopy, Tenant, next_tick
from tidegate.storage.memory import key_lru
from tidegate.storage.memory.key_lru import (
    HotKeys,
    KeyLru,
    bytes_by_key,
    choose_coldest,
    hot_keys,
    key_weights,
)
from tidegate.storage.runs.build import build_runs
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Merge, StoreSpec

SPEC = StoreSpec("events", Merge.APPEND, pa.schema([("value", pa.int64())]))


@pytest.fixture(autouse=True)
def _later() -> None:
    """What happens in a test happens after the small ticks that it gives to writes."""
    while next_tick() < 10_000:
        pass


def hashes_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def keys_of(lines: dict[int, tuple[int, int]]) -> HotKeys:
    """Keys with (tick of the last write, bytes)."""
    columns = [np.array(each, np.int64) for each in zip(*lines.values(), strict=True)]
    return key_weights([hashes_of(*lines)], [columns[1]], [columns[0]], [columns[0]])


def run_of(*keys: bytes, rows: int = 3) -> Run:
    batch = batch_of(SPEC, [{"key": key, "ts": at, "value": at} for key in keys for at in range(rows)])
    return build_runs(SPEC, batch, first_seq=0, max_rows=1 << 20)[0]


def copy_of(run: Run, tenant: Tenant = Tenant.WRITE_BUFFER, *, complete: bool = True) -> HotCopy:
    return HotCopy(tenant, next_tick(), run, complete)


def twin(lines: list[tuple[int, int]], need_bytes: int) -> set[int]:
    """The coldest, one by one: by tick, the larger first, then as they stand."""
    chosen: set[int] = set()
    for place in sorted(range(len(lines)), key=lambda i: (lines[i][0], -lines[i][1])):
        if sum(lines[i][1] for i in chosen) >= need_bytes:
            break
        chosen.add(place)
    return chosen


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 6) | st.sampled_from([10**15, -5]), st.integers(1, 50)), max_size=40),
    st.integers(-1, 1200),
)
def test_the_choice_equals_a_plain_sort(lines: list[tuple[int, int]], need_bytes: int) -> None:
    ticks = np.array([tick for tick, _ in lines], np.int64)
    nbytes = np.array([size for _, size in lines], np.int64)
    chosen = choose_coldest(ticks, nbytes, need_bytes)
    assert len(set(chosen.tolist())) == len(chosen)
    assert sorted(chosen.tolist()) == sorted(twin(lines, need_bytes))


def test_the_oldest_goes_first_and_of_equals_the_largest() -> None:
    lru, keys = KeyLru("t"), keys_of({1: (5, 10), 2: (1, 10), 3: (1, 30), 4: (9, 100)})
    assert lru.coldest(keys, 1).tolist() == [3]
    assert lru.coldest(keys, 31).tolist() == [2, 3]
    assert lru.coldest(keys, 41).tolist() == [1, 2, 3]
    assert lru.coldest(keys, 10**9).tolist() == [1, 2, 3, 4]
    assert lru.coldest(keys, 0).tolist() == []
    lru.touch(hashes_of(3, 77))
    assert lru.coldest(keys, 1).tolist() == [2]
    lru.touch(hashes_of(2))
    assert lru.coldest(keys, 1).tolist() == [1], "remembered from choice to choice"
    lru.touch(hashes_of(4, 1), in_order=True)
    assert lru.coldest(keys, 121).tolist() == [2, 3, 4], "1 was used after 4"
    assert lru.coldest(HotKeys(*[each[:0] for each in keys]), 5).tolist() == []


def test_a_key_weighs_what_all_its_hot_copies_have_of_it() -> None:
    first, second = run_of(b"a", b"b"), run_of(b"b", b"c", rows=5)
    keys = hot_keys([copy_of(first), copy_of(second)])
    weights: dict[int, int] = {}
    for run in (first, second):
        for number, nbytes in zip(run.hashes.tolist(), bytes_by_key(run).tolist(), strict=True):
            weights[number] = weights.get(number, 0) + nbytes
    assert keys.hashes.tolist() == sorted(weights)
    assert dict(zip(keys.hashes.tolist(), keys.nbytes.tolist(), strict=True)) == weights
    assert abs(int(keys.nbytes.sum()) - first.nbytes - second.nbytes) <= 16


def test_a_merge_or_a_move_is_no_use_of_keys_whose_last_use_is_known() -> None:
    lru = KeyLru("t")
    old, new = copy_of(run_of(b"old")), copy_of(run_of(b"new"))
    (cold,) = old.run.hashes.tolist()
    assert lru.coldest(hot_keys([old, new]), 1).tolist() == [cold]
    lru.touch(new.run.hashes)
    moved = [copy_of(new.run, Tenant.BASE_RUNS), copy_of(old.run, Tenant.WRITE_BUFFER, complete=False)]
    assert lru.coldest(hot_keys(moved), 1).tolist() == [cold], "its copy is the newer one, its use the older"
    written = [*moved, copy_of(old.run)]
    assert lru.coldest(hot_keys(written), 1).tolist() != [cold], "a write is a use"


def test_touches_that_wait_are_bounded_and_the_latest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_lru, "MOST_TOUCHED_KEYS", 100)
    lru, keys = KeyLru("t"), keys_of({number: (1 + number, 10) for number in range(1000)})
    for start in range(0, 1000, 10):
        lru.touch(np.arange(start, start + 10, dtype=np.uint64))
    assert lru._touched_keys <= 100
    lru.touch(hashes_of(0))
    coldest = lru.coldest(keys, 10 * 900).tolist()
    assert 0 not in coldest and 999 not in coldest, "used last"
    assert coldest[:3] == [1, 2, 3]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_lru, "MOST_TOUCHED_KEYS", 50)
    lru = KeyLru("t")
    for start in range(0, 5000, 40):
        lru.coldest(keys_of(dict.fromkeys(range(start, start + 40), (1, 1))), 1)
    assert len(lru._known[0]) <= 100 and np.all(np.diff(lru._known[0].astype(np.int64)) > 0)


def test_keys_used_one_by_one_are_the_last_to_go() -> None:
    lru, keys = KeyLru("t"), keys_of(dict.fromkeys(range(5000), (1, 10)))
    for number in range(4000):
        lru.touch_one(number)
    assert lru.coldest(keys, 10 * 1000).tolist() == list(range(4000, 5000))
    lru.clear()
    assert lru.coldest(keys, 10).tolist() == [0]


def test_whoever_puts_touches_off_is_asked_before_a_choice() -> None:
    lru, keys = KeyLru("t"), keys_of({1: (1, 10), 2: (2, 10)})
    lru.settle_with(lambda: lru.touch(hashes_of(1)))
    assert lru.coldest(keys, 1).tolist() == [2]


def test_many_threads_touch_and_choose() -> None:
    lru, keys = KeyLru("t"), keys_of(dict.fromkeys(range(50), (1, 10)))

    def work() -> None:
        for number in range(300):
            lru.touch(np.arange(number % 40, number % 40 + 5, dtype=np.uint64))
            lru.touch_one(number % 7)
            assert len(lru.coldest(keys, 100)) == 10

    for thread in [Beside(work) for _ in range(4)]:
        thread.result()
    assert len(lru.coldest(keys, 10**6)) == 50
