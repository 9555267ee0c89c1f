"""Positions, bounds, shares and splits of the Spark source: pure arithmetic."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.spark.offset_ranges import (
    EARLIEST,
    LATEST,
    from_json_object,
    parse_bound,
    share,
    split,
    to_json_object,
)

TWO = [("orders", 0), ("orders", 1)]
places = st.tuples(st.sampled_from(["a", "b", "a-b"]), st.integers(0, 20))


def test_a_position_has_one_spelling_whatever_order_it_was_made_in() -> None:
    one = {("b", 10): 1, ("a", 2): 2, ("b", 9): 3}
    two = dict(reversed(one.items()))
    assert json.dumps(to_json_object(one)) == json.dumps(to_json_object(two))
    assert json.dumps(to_json_object(one)) == '{"a": {"2": 2}, "b": {"9": 3, "10": 1}}'


@given(st.dictionaries(places, st.integers(0, 2**62)))
@settings(max_examples=50)
def test_a_position_reads_back_as_itself(position: dict[tuple[str, int], int]) -> None:
    assert from_json_object(json.loads(json.dumps(to_json_object(position)))) == position


@pytest.mark.parametrize("foreign", [{"index": 3}, {"a": {"x": 1}}, {"a": {"0": None}}, {"a": [1]}])
def test_a_position_of_another_source_is_refused(foreign: dict[str, object]) -> None:
    with pytest.raises(InvalidError, match="another source"):
        from_json_object(foreign)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", {("orders", 0): EARLIEST, ("orders", 1): EARLIEST}),
        (" Latest ", {("orders", 0): LATEST, ("orders", 1): LATEST}),
        ('{"orders": {"0": 23, "1": -2}}', {("orders", 0): 23, ("orders", 1): EARLIEST}),
        ('{"0": 5, "1": -1}', {("orders", 0): 5, ("orders", 1): LATEST}),
        ('{"0": "earliest", "1": 7}', {("orders", 0): EARLIEST, ("orders", 1): 7}),
    ],
)
def test_bounds_as_users_write_them(text: str, expected: dict[tuple[str, int], int]) -> None:
    assert parse_bound(text, TWO, option="startingOffsets") == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("first", "neither earliest, latest nor JSON"),
        ("5", "neither earliest, latest nor JSON"),
        ('{"orders": 5}', "neither earliest, latest nor JSON"),
        ('{"orders": {"0": 1.5, "1": 2}}', "neither earliest, latest nor JSON"),
        ('{"orders": {"0": true, "1": 2}}', "neither earliest, latest nor JSON"),
        ('{"orders": {"0": -3, "1": 2}}', "the least is -2"),
        ('{"orders": {"0": 1}}', "leaves out orders-1"),
        ('{"orders": {"0": 1, "1": 1, "2": 1}}', "names orders-2"),
        ('{"other": {"0": 1, "1": 1}}', "names other-0"),
    ],
)
def test_wrong_bounds_are_named_with_the_option(text: str, complaint: str) -> None:
    with pytest.raises(InvalidError, match=complaint) as caught:
        parse_bound(text, TWO, option="startingOffsets")
    assert "startingOffsets" in str(caught.value)


@given(st.integers(1, 1000), st.dictionaries(places, st.integers(0, 10**6), min_size=1))
@settings(max_examples=200)
def test_shares_add_up_to_the_limit_and_never_exceed_a_backlog(
    limit: int, backlog: dict[tuple[str, int], int]
) -> None:
    shares = share(limit, backlog)
    assert sum(shares.values()) == min(limit, sum(backlog.values()))
    assert all(0 <= shares[place] <= backlog[place] for place in backlog)


def test_shares_are_in_proportion_to_what_is_left() -> None:
    assert share(100, {("a", 0): 900, ("a", 1): 100, ("a", 2): 0}) == {
        ("a", 0): 90,
        ("a", 1): 10,
        ("a", 2): 0,
    }


def test_repeated_admission_drains_every_partition() -> None:
    left = {("a", 0): 1000, ("a", 1): 3, ("a", 2): 1}
    rounds = 0
    while sum(left.values()):
        for place, admitted in share(7, left).items():
            left[place] -= admitted
        rounds += 1
    assert rounds == -(-1004 // 7)


def test_one_range_per_partition_with_something_to_read() -> None:
    ranges = split({("a", 0): 5, ("a", 1): 9}, {("a", 0): 8, ("a", 1): 9})
    assert [(r.topic, r.partition, r.start, r.end) for r in ranges] == [("a", 0, 5, 8)]


@given(
    st.dictionaries(places, st.tuples(st.integers(0, 100), st.integers(0, 5000)), min_size=1),
    st.integers(0, 30),
)
@settings(max_examples=200)
def test_pieces_cover_the_ranges_exactly_in_order(
    bounds: dict[tuple[str, int], tuple[int, int]], min_partitions: int
) -> None:
    start = {place: first for place, (first, _) in bounds.items()}
    end = {place: first + length for place, (first, length) in bounds.items()}
    ranges = split(start, end, min_partitions)
    for place in bounds:
        mine = [r for r in ranges if (r.topic, r.partition) == place]
        covered = [offset for r in mine for offset in (r.start, r.end)]
        if end[place] > start[place]:
            assert covered[0] == start[place] and covered[-1] == end[place]
            assert covered[1:-1:2] == covered[2::2]
            assert all(len(r) > 0 for r in mine)
        else:
            assert mine == []
    total = sum(end.values()) - sum(start.values())
    assert len(ranges) >= min(min_partitions, total) or total == 0 or len(ranges) >= min_partitions // 2
