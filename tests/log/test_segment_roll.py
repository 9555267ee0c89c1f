"""The roll test, rule by rule, and how many records a log segment holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.log.segment_roll import MAX_RELATIVE_OFFSET, records_per_segment, roll_reason, waited_ms


@dataclass(frozen=True)
class State:
    base_offset: int = 100
    size: int = 1000
    first_timestamp: int = 5000
    created_ms: int = 9000
    roll_jitter_ms: int = 0
    is_offset_index_full: bool = False
    is_time_index_full: bool = False


@dataclass(frozen=True)
class Shape:
    size: int = 100
    last_offset: int = 110
    max_timestamp: int = 6000


@dataclass(frozen=True)
class Limits:
    segment_bytes: int = 2000
    max_segment_ms: int = 3600


STATE, SHAPE, LIMITS = State(), Shape(), Limits()


def reason(
    state: State = STATE, shape: Shape = SHAPE, limits: Limits = LIMITS, now_ms: int = 9000
) -> str | None:
    return roll_reason(state, shape, limits, now_ms)


def test_an_append_that_fits_in_every_way_does_not_roll() -> None:
    assert reason() is None


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        pytest.param(1900, None, id="exactly full"),
        pytest.param(1901, "size", id="one byte too many"),
    ],
)
def test_size_rolls_only_when_the_append_would_pass_the_limit(size: int, expected: str | None) -> None:
    assert reason(replace(STATE, size=size)) == expected


def test_an_append_as_large_as_a_segment_fits_an_empty_one() -> None:
    assert reason(State(size=0), Shape(size=2000)) is None
    assert reason(State(size=0), Shape(size=2001)) == "size"


@pytest.mark.parametrize(
    ("timestamp", "expected"),
    [
        pytest.param(5000 + 3600, None, id="exactly the age"),
        pytest.param(5000 + 3601, "time", id="one millisecond more"),
        pytest.param(100, None, id="older than the first"),
    ],
)
def test_time_goes_by_the_first_batch_when_it_has_a_timestamp(timestamp: int, expected: str | None) -> None:
    assert reason(shape=Shape(max_timestamp=timestamp), now_ms=10**12) == expected


@pytest.mark.parametrize(
    ("now_ms", "expected"), [(9000 + 3600, None), (9000 + 3601, "time")], ids=["at the age", "past it"]
)
def test_time_goes_by_the_wall_clock_when_the_first_batch_has_no_timestamp(
    now_ms: int, expected: str | None
) -> None:
    assert reason(replace(STATE, first_timestamp=-1), now_ms=now_ms) == expected


def test_an_empty_segment_never_rolls_by_time() -> None:
    assert reason(State(size=0, first_timestamp=-1), now_ms=10**12) is None


@pytest.mark.parametrize(
    ("timestamp", "expected"), [(5000 + 3500, None), (5000 + 3501, "time")], ids=["LS-U4-at", "LS-U4-past"]
)
def test_jitter_shortens_the_age(timestamp: int, expected: str | None) -> None:
    assert reason(replace(STATE, roll_jitter_ms=100), Shape(max_timestamp=timestamp)) == expected


def test_a_full_index_rolls_even_an_empty_segment() -> None:
    assert reason(State(size=0, is_offset_index_full=True)) == "index_full"
    assert reason(State(size=0, is_time_index_full=True)) == "time_index_full"


@pytest.mark.parametrize(
    ("last_offset", "expected"),
    [
        pytest.param(100 + MAX_RELATIVE_OFFSET, None, id="largest"),
        pytest.param(101 + MAX_RELATIVE_OFFSET, "offset_overflow", id="too large"),
        pytest.param(99, "offset_overflow", id="below the base"),
    ],
)
def test_an_offset_that_does_not_fit_the_indexes_rolls(last_offset: int, expected: str | None) -> None:
    assert reason(shape=Shape(last_offset=last_offset)) == expected


def test_the_first_rule_that_holds_is_the_reason() -> None:
    state = State(size=1950, is_offset_index_full=True, is_time_index_full=True)
    shape = Shape(max_timestamp=10**9, last_offset=2**40)
    assert reason(state, shape) == "size"
    assert reason(replace(state, size=10), shape) == "time"
    assert reason(replace(state, size=0), shape) == "index_full"
    assert reason(replace(state, size=0, is_offset_index_full=False), shape) == "time_index_full"
    both = replace(state, size=0, is_offset_index_full=False, is_time_index_full=False)
    assert reason(both, shape) == "offset_overflow"


def test_waited_is_event_time_or_wall_time() -> None:
    assert waited_ms(State(first_timestamp=0), 250, 10**9) == 250
    assert waited_ms(State(first_timestamp=-1, created_ms=40), 250, 100) == 60


SEED = {
    "record_bytes": 150,
    "interval_ms": 5000,
    "segment_bytes": 16384,
    "index_interval_bytes": 4096,
    "segment_index_bytes": 10 << 20,
    "segment_ms": 604_800_000,
}


@pytest.mark.parametrize(
    ("changes", "records", "why"),
    [
        pytest.param({}, 109, "size", id="the canary's segment"),
        pytest.param(
            {"index_interval_bytes": 150, "segment_index_bytes": 300},
            49,
            "time_index_full",
            id="small indexes",
        ),
        pytest.param({"segment_ms": 60_000}, 13, "time", id="a minute"),
        pytest.param({"segment_ms": 60_000, "jitter_ms": 10_000}, 11, "time", id="jitter"),
        pytest.param({"segment_index_bytes": 23}, 1, "time_index_full", id="no room for a time entry"),
        pytest.param({"interval_ms": 0, "segment_bytes": 2**31 - 1}, 14316557, "size", id="one timestamp"),
    ],
)
def test_capacity_of_a_segment(changes: dict[str, int], records: int, why: str) -> None:
    capacity = records_per_segment(**(SEED | changes))
    assert (capacity.records, capacity.reason) == (records, why)
    assert capacity.terms[why] == records == min(capacity.terms.values())


def test_a_record_larger_than_a_segment_has_no_capacity() -> None:
    with pytest.raises(InvalidError, match=r"segment\.bytes=16384"):
        records_per_segment(**(SEED | {"record_bytes": 16385}))
    with pytest.raises(InvalidError, match="negative"):
        records_per_segment(**(SEED | {"interval_ms": -1}))


@settings(max_examples=200)
@given(
    record_bytes=st.integers(61, 400),
    interval_ms=st.integers(0, 50),
    segment_bytes=st.integers(400, 6000),
    index_interval_bytes=st.integers(0, 900),
    segment_index_bytes=st.integers(12, 200),
    segment_ms=st.integers(1, 900),
)
def test_capacity_is_what_filling_a_segment_record_by_record_gives(**workload: int) -> None:
    assert records_per_segment(**workload).records == _filled(**workload)


def _filled(
    *,
    record_bytes: int,
    interval_ms: int,
    segment_bytes: int,
    index_interval_bytes: int,
    segment_index_bytes: int,
    segment_ms: int,
) -> int:
    """The slow twin: append records until the rules roll."""
    state = State(base_offset=0, size=0, first_timestamp=-1)
    limits = Limits(segment_bytes, segment_ms)
    since = offset_entries = time_entries = 0
    last_entry_ms = -1
    for number in range(1000):
        at_ms = 1000 + number * interval_ms
        if reason(state, Shape(record_bytes, number, at_ms), limits):
            return number
        if since > index_interval_bytes:
            offset_entries, since = offset_entries + 1, 0
            if at_ms > last_entry_ms:
                time_entries, last_entry_ms = time_entries + 1, at_ms
        since += record_bytes
        state = State(
            base_offset=0,
            size=state.size + record_bytes,
            first_timestamp=1000,
            is_offset_index_full=offset_entries >= segment_index_bytes // 8,
            is_time_index_full=time_entries >= segment_index_bytes // 12 - 1,
        )
    raise AssertionError("the segment never filled")
