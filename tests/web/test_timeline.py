"""The time axis of log segments: all of them are on it, and it is never mostly empty."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tidegate.web.topics import SegmentLine, axis

NOW = 1_767_261_600_000
DAY = 86_400_000
PLAIN = SegmentLine(0, 0, 9, 10, 100, NOW - DAY, NOW - DAY, False, None, None, None, None, "", "", None)


def segment(first: int | None, newest: int, goes: int | None = None) -> SegmentLine:
    return msgspec.structs.replace(PLAIN, first_ms=first, newest_ms=newest, gone_latest_ms=goes)


def test_nothing_has_no_axis() -> None:
    assert axis([], NOW) == (None, None)


def test_it_reaches_from_the_first_record_to_when_the_last_can_go() -> None:
    found = axis([segment(NOW - 2 * DAY, NOW - DAY), segment(NOW - DAY, NOW, NOW + 7 * DAY)], NOW)
    assert found == (NOW - 2 * DAY, NOW + 7 * DAY)
    assert axis([segment(NOW - DAY, NOW - DAY)], NOW) == (NOW - DAY, NOW)


def test_an_old_log_does_not_shrink_beside_the_time_since() -> None:
    """All of it was over long ago: now is left of the axis, and it is told in words."""
    low, high = axis([segment(NOW - 300 * DAY, NOW - 299 * DAY, NOW - 290 * DAY)], NOW)
    assert (low, high) == (NOW - 300 * DAY, NOW - 289 * DAY)


def test_a_record_dated_years_ahead_ends_the_axis_in_a_month() -> None:
    ahead = segment(NOW, NOW + 3650 * DAY, NOW + 3657 * DAY)
    assert axis([segment(NOW - DAY, NOW), ahead], NOW) == (NOW - DAY, NOW + 30 * DAY)


@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(0, 400), st.none() | st.integers(0, 4000)), min_size=1
    ),
    st.integers(0, 4000),
)
def test_it_is_never_empty_and_begins_with_the_first_record(
    days: list[tuple[int, int, int | None]], now: int
) -> None:
    made = [
        segment(first * DAY, (first + wide) * DAY, None if goes is None else (first + goes) * DAY)
        for first, wide, goes in days
    ]
    low, high = axis(made, now * DAY)
    assert low == min(each.first_ms or 0 for each in made) and high is not None and high > low
