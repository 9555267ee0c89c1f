"""Choosing what to clean and how to merge it: pure arithmetic over small values."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.log.compaction_plan import (
    MAX_RELATIVE_OFFSET,
    Cleanable,
    Limits,
    between,
    cleanable,
    dirtiest,
    first_dirty_offset,
    group_segments,
)

HOUR_MS = 3_600_000
NOW_MS = 100 * HOUR_MS


@dataclass(frozen=True)
class Shape:
    base_offset: int
    size: int = 100
    largest_timestamp: int = 0
    first_timestamp: int = -1
    offset_index_bytes: int = 0
    time_index_bytes: int = 0


def choose(
    segments: list[Shape],
    *,
    checkpoint: int | None = None,
    log_start: int = 0,
    log_end: int = 1000,
    last_stable: int | None = None,
    limits: Limits | None = None,
) -> Cleanable:
    return cleanable(
        segments,
        checkpoint=checkpoint,
        log_start=log_start,
        log_end=log_end,
        last_stable=log_end if last_stable is None else last_stable,
        limits=limits or Limits(),
        now_ms=NOW_MS,
    )


TEN = [Shape(base) for base in range(0, 100, 10)]


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        pytest.param(None, (5, False), id="absent"),
        pytest.param(5, (5, False), id="at-start"),
        pytest.param(70, (70, False), id="inside"),
        pytest.param(100, (100, False), id="at-end"),
        pytest.param(4, (5, True), id="LS-C7-below-start"),
        pytest.param(101, (5, True), id="LS-C7-above-end"),
    ],
)
def test_first_dirty_offset_trusts_only_a_checkpoint_inside_the_log(
    checkpoint: int | None, expected: tuple[int, bool]
) -> None:
    assert first_dirty_offset(checkpoint, 5, 100) == expected


def test_active_segment_is_never_cleaned() -> None:
    chosen = choose(TEN)
    assert (chosen.first_dirty, chosen.first_uncleanable, chosen.cleanable_bytes) == (0, 90, 900)
    assert chosen.ratio == 1.0


@pytest.mark.parametrize(
    ("last_stable", "uncleanable"),
    [
        pytest.param(45, 40, id="LS-C8-open-transaction-inside-a-segment"),
        pytest.param(40, 40, id="LS-C8-open-transaction-at-a-base"),
        pytest.param(3, 0, id="LS-C8-open-transaction-in-the-first-segment"),
        pytest.param(95, 90, id="LS-C8-open-transaction-in-the-active-segment"),
    ],
)
def test_open_transaction_blocks_the_segment_it_began_in(last_stable: int, uncleanable: int) -> None:
    chosen = choose(TEN, last_stable=last_stable)
    assert chosen.first_uncleanable == uncleanable
    assert chosen.cleanable_bytes == uncleanable * 10


def test_young_segment_blocks_itself_and_everything_after_it__LS_C8() -> None:
    old, young = NOW_MS - 2 * HOUR_MS, NOW_MS - HOUR_MS + 1
    segments = [Shape(0, largest_timestamp=old), Shape(10, largest_timestamp=young)]
    segments += [Shape(20, largest_timestamp=old), Shape(30)]
    chosen = choose(segments, limits=Limits(min_lag_ms=HOUR_MS))
    assert chosen.first_uncleanable == 10
    exactly_old_enough = [Shape(0, largest_timestamp=NOW_MS - HOUR_MS), Shape(10)]
    assert choose(exactly_old_enough, limits=Limits(min_lag_ms=HOUR_MS)).first_uncleanable == 10


def test_young_clean_segment_blocks_nothing() -> None:
    segments = [Shape(0, largest_timestamp=NOW_MS), Shape(10), Shape(20)]
    assert choose(segments, checkpoint=10, limits=Limits(min_lag_ms=HOUR_MS)).first_uncleanable == 20


def test_ratio_counts_a_half_cleaned_segment_on_both_sides() -> None:
    chosen = choose(TEN, checkpoint=45)
    assert (chosen.clean_bytes, chosen.cleanable_bytes) == (500, 500)
    assert choose(TEN, checkpoint=40).clean_bytes == 400


def test_cleaned_up_to_the_active_segment_leaves_nothing() -> None:
    chosen = choose(TEN, checkpoint=90)
    assert (chosen.first_uncleanable, chosen.cleanable_bytes, chosen.ratio) == (90, 0, 0.0)
    beyond = choose(TEN, checkpoint=95)
    assert (beyond.cleanable_bytes, beyond.eligible(0.0)) == (0, False)


def test_eligible_needs_more_than_the_ratio() -> None:
    half = Cleanable(10, 20, clean_bytes=50, cleanable_bytes=50, overdue_ms=0, checkpoint_reset=False)
    assert not half.eligible(0.5)
    assert half.eligible(0.49)


def test_overdue_partition_is_eligible_below_the_ratio_but_not_without_bytes() -> None:
    limits = Limits(max_lag_ms=HOUR_MS)
    first = NOW_MS - HOUR_MS - 7
    clean = [Shape(base) for base in range(0, 80, 10)]
    late = choose([*clean, Shape(80, first_timestamp=first), Shape(90)], checkpoint=80, limits=limits)
    assert late.overdue_ms == 7
    assert late.ratio < 0.5
    assert late.eligible(0.5)
    on_time = choose([*clean, Shape(80, first_timestamp=first + 7), Shape(90)], checkpoint=80, limits=limits)
    assert on_time.overdue_ms == 0
    assert not on_time.eligible(0.5)
    locked = choose(
        [*clean, Shape(80, first_timestamp=first), Shape(90)],
        checkpoint=80,
        last_stable=80,
        limits=limits,
    )
    assert locked.overdue_ms == 7
    assert not locked.eligible(0.5)


def test_dirtiest_partition_comes_first() -> None:
    candidates = [
        ("clean", Cleanable(0, 1, 90, 10, 0, False)),
        ("dirty", Cleanable(0, 1, 10, 90, 0, False)),
        ("middling", Cleanable(0, 1, 50, 50, 0, False)),
    ]
    found = dirtiest(candidates)
    assert found is not None
    assert found[0] == "dirty"
    assert dirtiest([]) is None


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 100, 10), (0, 0, 0), (15, 15, 0), (15, 16, 1), (15, 20, 1), (15, 21, 2), (-1, 30, 3), (95, 1000, 1)],
)
def test_between_starts_at_the_segment_that_holds_the_offset(start: int, stop: int, expected: int) -> None:
    assert len(between(TEN, start, stop)) == expected


# -- grouping ------------------------------------------------------------------------------------


def sizes(groups: list[list[Shape]]) -> list[int]:
    return [len(group) for group in groups]


@pytest.mark.parametrize(
    ("max_bytes", "max_index_bytes", "expected"),
    [
        pytest.param(1, 10**6, [1] * 10, id="LS-C9-singletons"),
        pytest.param(10**6, 1, [1] * 10, id="LS-C9-singletons-by-index"),
        pytest.param(10**6, 10**6, [10], id="LS-C9-one-group"),
        pytest.param(3 * 100 + 1, 10**6, [3, 3, 3, 1], id="LS-C9-triples"),
        pytest.param(10**6, 3 * 16 + 1, [3, 3, 3, 1], id="LS-C9-triples-by-index"),
        pytest.param(3 * 100, 10**6, [3, 3, 3, 1], id="LS-C9-exact-fit-joins"),
    ],
)
def test_groups_fit_the_size_limits(max_bytes: int, max_index_bytes: int, expected: list[int]) -> None:
    segments = [Shape(base, offset_index_bytes=16, time_index_bytes=12) for base in range(0, 100, 10)]
    groups = group_segments(
        segments, max_bytes=max_bytes, max_index_bytes=max_index_bytes, first_uncleanable=100
    )
    assert sizes(groups) == expected


def test_time_index_alone_can_end_a_group() -> None:
    segments = [Shape(base, time_index_bytes=24) for base in range(0, 40, 10)]
    assert sizes(group_segments(segments, max_bytes=10**6, max_index_bytes=48, first_uncleanable=40)) == [
        2,
        2,
    ]


def test_group_never_spans_more_offsets_than_an_index_entry_holds__LS_C9() -> None:
    segments = [Shape(0), Shape(10), Shape(MAX_RELATIVE_OFFSET - 5), Shape(MAX_RELATIVE_OFFSET + 20)]
    groups = group_segments(
        segments, max_bytes=10**6, max_index_bytes=10**6, first_uncleanable=MAX_RELATIVE_OFFSET + 30
    )
    assert [[s.base_offset for s in group] for group in groups] == [
        [0, 10],
        [MAX_RELATIVE_OFFSET - 5, MAX_RELATIVE_OFFSET + 20],
    ]


def test_empty_segment_joins_across_any_gap() -> None:
    segments = [Shape(0), Shape(3 * 2**31, size=0)]
    groups = group_segments(segments, max_bytes=10**6, max_index_bytes=10**6, first_uncleanable=4 * 2**31)
    assert sizes(groups) == [2]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 2**31), st.integers(0, 300), st.integers(0, 40), st.integers(0, 40)),
        min_size=1,
        max_size=12,
    )
)
def test_groups_keep_order_lose_nothing_and_respect_every_limit(
    drawn: list[tuple[int, int, int, int]],
) -> None:
    segments, base = [], 0
    for step, size, index, time_index in drawn:
        segments.append(Shape(base, size, offset_index_bytes=index, time_index_bytes=time_index))
        base += step
    groups = group_segments(segments, max_bytes=400, max_index_bytes=60, first_uncleanable=base)
    assert [segment for group in groups for segment in group] == segments
    for group in groups:
        if len(group) == 1:
            continue
        assert sum(segment.size for segment in group) <= 400
        assert sum(segment.offset_index_bytes for segment in group) <= 60
        assert sum(segment.time_index_bytes for segment in group) <= 60
        last = max((s for s in group if s.size), key=lambda s: s.base_offset, default=group[0])
        following = [s.base_offset for s in segments if s.base_offset > last.base_offset]
        end = min(following, default=base)
        assert last is group[0] or end - 1 - group[0].base_offset <= MAX_RELATIVE_OFFSET
