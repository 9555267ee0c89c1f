"""Sliding windows found and listed, against plain loops; compiled and in plain Python (K4)."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_lives import BOTH
from tidegate.kernels.windows import find_windows, list_nodes

LATEST = 2**63 - 1
Event = tuple[int, int, int, bool]  # key, time, how much later than itself its first end is, whether new
Window = tuple[int, int, frozenset[int]]  # key, end, events


def windows_of(
    life: str, events: list[Event], width: int, *, every: tuple[int, int] | None, levels: int
) -> list[Window]:
    """What the kernels answer, with the nodes of the tree opened up to the events below them."""
    find, list_them = (each if life == "compiled" else each.py_func for each in (find_windows, list_nodes))
    keys = np.array([event[0] for event in events], np.int32)
    ts = np.array([event[1] for event in events], np.int64)
    first_end = np.array([max(event[1], width) + event[2] for event in events], np.int64)
    rows = np.lexsort((ts, keys)).astype(np.int32)
    starts = np.searchsorted(keys[rows], np.arange(4)).astype(np.int32)
    is_new = np.array([event[3] for event in events], np.uint8) if every is None else np.empty(0, np.uint8)
    count = len(events)
    new_before, away_before = np.empty(count + 1, np.int32), np.empty(count + 1, np.int32)
    key, end = np.empty(2 * count, np.int32), np.empty(2 * count, np.int64)
    low, high = np.empty(2 * count, np.int32), np.empty(2 * count, np.int32)
    made = find(
        rows, starts, ts, first_end, is_new, width, *(every or (0, LATEST)),
        new_before, away_before, key, end, low, high,
    )  # fmt: skip
    bases, below = [0], [{place: [int(rows[place])] for place in range(count)}]
    for _ in range(levels - 1):
        bases.append(bases[-1] + len(below[-1]))
        last = below[-1]
        below.append(
            {node: last[2 * node] + last.get(2 * node + 1, []) for node in range((len(last) + 1) // 2)}
        )
    arguments = (rows, end[:made], low[:made], high[:made], first_end, away_before, levels, np.array(bases))
    none = np.empty(0, np.int32)
    pairs = list_them(*arguments, none, none)
    nodes, owners = np.empty(pairs, np.int32), np.empty(pairs, np.int32)
    list_them(*arguments, nodes, owners)
    members: list[list[int]] = [[] for _ in range(made)]
    for node, owner in zip(nodes.tolist(), owners.tolist(), strict=True):
        level = max(at for at, base in enumerate(bases) if base <= node)
        members[owner] += below[level][node - bases[level]]
    places = {int(row): place for place, row in enumerate(rows)}
    listed = [[places[row] for row in each] for each in members]
    assert all(each == sorted(set(each)) for each in listed), "an event is listed once, in the order of time"
    return [(int(key[at]), int(end[at]), frozenset(members[at])) for at in range(made)]


def naive(events: list[tuple[int, Event]], width: int) -> dict[tuple[int, int], frozenset[int]]:
    """Every window there is, by key and end."""
    found = {}
    for owner in {event[0] for _, event in events}:
        mine = [(at, event[1], max(event[1], width) + event[2]) for at, event in events if event[0] == owner]
        ends = {time + 1 + width for _, time, _ in mine} | {
            max(time, width) for _, time, first in mine if first <= max(time, width)
        }
        for end in ends:
            inside = frozenset(at for at, time, first in mine if end - width <= time <= end and first <= end)
            if inside:
                found[owner, end] = inside
    return found


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 25), st.sampled_from([0, 0, 0, 1, 3]), st.booleans()),
    min_size=1, max_size=18,
)  # fmt: skip


@BOTH
@settings(max_examples=300, deadline=None)
@given(EVENTS, st.integers(1, 9), st.integers(1, 4), st.integers(0, 40), st.integers(0, 40))
def test_windows_that_end_in_a_stretch(
    life: str, events: list[Event], width: int, levels: int, first: int, last: int
) -> None:
    events = [(key, time, min(away, width), new) for key, time, away, new in events]
    expected = [
        (key, end, inside)
        for (key, end), inside in sorted(naive(list(enumerate(events)), width).items())
        if first <= end <= last
    ]
    assert windows_of(life, events, width, every=(first, last), levels=levels) == expected


@BOTH
@settings(max_examples=300, deadline=None)
@given(EVENTS, st.integers(1, 9), st.integers(1, 4))
def test_windows_that_new_events_changed(life: str, events: list[Event], width: int, levels: int) -> None:
    events = [(key, time, min(away, width), new) for key, time, away, new in events]
    numbered = list(enumerate(events))
    before = naive([(at, event) for at, event in numbered if not event[3]], width)
    after = naive(numbered, width)
    expected = [
        (key, end, inside) for (key, end), inside in sorted(after.items()) if before.get((key, end)) != inside
    ]
    assert windows_of(life, events, width, every=None, levels=levels) == expected
