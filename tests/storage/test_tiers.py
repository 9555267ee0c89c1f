"""The choice of neighbours to merge: pure, so its cost can be counted."""

from __future__ import annotations

import math
import random

import pytest

from tidegate.storage.index import HotCopy, RunEntry, Tenant
from tidegate.storage.maintenance.compaction import (
    MAX_TIERS,
    Tier,
    choose_window,
    hot_window,
    pays_to_compact,
    tiers_of,
)


def tier(nbytes: int, *, hot: bool = True) -> Tier:
    return Tier((), nbytes, hot)


def entry(order: int, *, hot: bool = True, complete: bool = True) -> RunEntry:
    copy = HotCopy(Tenant.WRITE_BUFFER, order, None, complete) if hot else None  # type: ignore[arg-type]
    return RunEntry(0, order, 1, 1, 10, 10, 0, 0, hot=copy)


def test_runs_of_one_order_are_one_tier() -> None:
    runs = [entry(1), entry(3), entry(3, hot=False), entry(4, complete=False)]
    tiers = tiers_of(runs)
    assert [len(each.runs) for each in tiers] == [1, 2, 1]
    assert [each.nbytes for each in tiers] == [10, 20, 10]
    assert [each.hot for each in tiers] == [True, False, False]


def test_two_equal_neighbours_are_merged_and_a_large_old_one_is_left_alone() -> None:
    assert choose_window([tier(1000), tier(10), tier(10)]) == (1, 3)
    assert choose_window([tier(1000), tier(20)]) is None
    assert choose_window([]) is None
    assert choose_window([tier(5)]) is None


def test_up_to_the_limit_stored_tiers_are_not_touched_and_beyond_they_are() -> None:
    few = [tier(10, hot=False), tier(10, hot=False), tier(10)]
    assert choose_window(few) is None
    many = [tier(10, hot=False)] * (MAX_TIERS + 1)
    assert choose_window(many) == (0, MAX_TIERS + 1)


def test_too_many_tiers_are_always_reduced_even_when_sizes_fall_steeply() -> None:
    steep = [tier(100**power) for power in range(MAX_TIERS + 1, 0, -1)]
    window = choose_window(steep)
    assert window is not None
    assert window[1] - window[0] >= 2
    assert window[1] == len(steep), "the small ones are the cheap ones"


def test_the_longest_stretch_in_memory_is_found() -> None:
    hot, cold = tier(1), tier(1, hot=False)
    assert hot_window([hot, hot, cold, hot, hot, hot]) == (3, 6)
    assert hot_window([cold, hot, cold]) is None
    assert hot_window([hot, hot]) == (0, 2)


def delta(order: int, low: int, high: int, *, rows: int = 1, base: bool = False) -> RunEntry:
    copy = HotCopy(Tenant.WRITE_BUFFER, order, None)  # type: ignore[arg-type]
    return RunEntry(0, order, rows, 1, 10 * rows, 10, low, high, base=base, hot=copy)


def test_deltas_that_overlap_or_are_many_pay_a_merge() -> None:
    runs = [delta(1, 0, 400), delta(2, 500, 600)]
    assert not pays_to_compact([], 8) and not pays_to_compact(runs[:1], 8)
    assert not pays_to_compact(runs, 8), "they do not overlap"
    assert pays_to_compact([*runs, delta(3, 600, 700)], 8)
    apart = [delta(order, order, order) for order in range(9)]
    assert not pays_to_compact(apart[:8], 8) and pays_to_compact(apart, 8)


def test_small_deltas_wait_beside_a_large_base() -> None:
    large, small = delta(1, 0, 999, rows=100, base=True), delta(2, 500, 500, rows=5)
    assert not pays_to_compact([large], 8), "there is no delta"
    assert not pays_to_compact([large, small], 8)
    assert pays_to_compact([large, small, delta(3, 500, 500, rows=20)], 8)


@pytest.mark.parametrize("shape", ["equal", "random", "growing", "one_big_then_small"])
def test_total_copying_is_n_log_n_whatever_the_sizes(shape: str) -> None:
    chance = random.Random(7)
    sizes = {
        "equal": [100] * 3000,
        "random": [chance.randrange(1, 1000) for _ in range(3000)],
        "growing": list(range(1, 3001)),
        "one_big_then_small": [1_000_000] + [100] * 3000,
    }[shape]
    tiers: list[Tier] = []
    copied = 0
    most = 0
    for size in sizes:
        tiers.append(tier(size))
        while (window := choose_window(tiers)) is not None:
            first, end = window
            total = sum(each.nbytes for each in tiers[first:end])
            copied += total
            tiers[first:end] = [tier(total)]
        most = max(most, len(tiers))
    total = sum(sizes)
    assert most <= MAX_TIERS
    assert copied <= 4 * total * math.log2(len(sizes)), f"{copied / total:.1f} copies of each byte"
