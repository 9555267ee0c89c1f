"""Records joined to sessions, against a plain list of sets; compiled and in plain Python (K4)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_lives import BOTH
from tidegate.kernels.windows import NONE, merge_sessions

Found = list[tuple[int, int]]  # start, end


class Answer(NamedTuple):
    """Changed sessions (key, start, end, members) and the elements that were late or are gone."""

    sessions: list[tuple[int, int, int, frozenset[str]]]
    late: dict[int, int]
    gone: set[int]


def run(
    life: str,
    records: list[tuple[int, int, int]],
    found: list[Found],
    gap: int,
    allowed: int,
    reach: int,
    stays_final: bool,
) -> Answer:
    """`records` are (key, time, judged)."""
    kernel = merge_sessions if life == "compiled" else merge_sessions.py_func
    keys = np.array([record[0] for record in records], np.int32)
    rows = np.argsort(keys, kind="stable").astype(np.int32)
    starts = np.searchsorted(keys[rows], np.arange(len(found) + 1)).astype(np.int32)
    flat = [session for sessions in found for session in sessions]
    bounds = np.cumsum([0, *map(len, found)]).astype(np.int32)
    room = len(records) + len(flat) + 1
    groups, gone = np.full(len(flat) + len(records), -7, np.int32), np.full(len(flat), 7, np.uint8)
    late_by = np.full(len(records), -7, np.int64)
    out_start, out_end, out_key = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int32)
    count = kernel(
        rows, starts, np.array([record[1] for record in records], np.int64),
        np.array([record[2] for record in records], np.int64), bounds,
        np.array([session[0] for session in flat], np.int64), np.array([session[1] for session in flat], np.int64),
        gap, allowed, reach, int(stays_final),
        np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int32),
        np.empty(len(flat) + len(records), np.int32), groups, gone, late_by, out_start, out_end, out_key,
    )  # fmt: skip
    names = [f"found {at}" for at in range(len(flat))] + [f"record {at}" for at in range(len(records))]
    members: list[set[str]] = [set() for _ in range(count)]
    for name, group in zip(names, groups.tolist(), strict=True):
        if group != NONE:
            members[group].add(name)
    sessions = [
        (int(out_key[at]), int(out_start[at]), int(out_end[at]), frozenset(members[at]))
        for at in range(count)
    ]
    late = {at: int(by) for at, by in enumerate(late_by) if by}
    return Answer(sessions, late, set(np.flatnonzero(gone).tolist()))


def naive(
    records: list[tuple[int, int, int]],
    found: list[Found],
    gap: int,
    allowed: int,
    reach: int,
    stays_final: bool,
) -> Answer:
    live: dict[int, list[tuple[int, int, frozenset[str]]]] = {}
    at = 0
    bounds: dict[str, tuple[int, int]] = {}
    for key, sessions in enumerate(found):
        for start, end in sessions:
            bounds[f"found {at}"] = (start, end)
            live.setdefault(key, []).append((start, end, frozenset([f"found {at}"])))
            at += 1
    late: dict[int, int] = {}
    for number, (key, time, judged) in enumerate(records):
        near = [
            each for each in live.get(key, [])
            if each[1] >= time - gap and each[0] <= time + gap and each[1] > judged - reach
        ]  # fmt: skip
        start, end = min([time, *(each[0] for each in near)]), max([time, *(each[1] for each in near)])
        close = judged - allowed
        final = [each[1] for each in near if each[1] < close]
        is_inside = any(each[0] <= time <= each[1] for each in near)
        if not stays_final and end < close:
            late[number] = close - end
        elif stays_final and time < close and (final or not is_inside):
            late[number] = close - time
        elif stays_final and final:
            late[number] = close - min(final)
        if number in late:
            continue
        members = frozenset([f"record {number}"]).union(*(each[2] for each in near))
        live[key] = [each for each in live.get(key, []) if each not in near] + [(start, end, members)]
    changed = [
        (key, *each)
        for key, sessions in live.items()
        for each in sessions
        if any(name.startswith("record") for name in each[2])
    ]
    gone = {
        int(name.split()[1])
        for _, start, end, members in changed
        for name in members
        if name.startswith("found") and bounds[name] != (start, end)
    }
    return Answer(sorted(changed, key=lambda each: (each[0], each[2])), late, gone)


@st.composite
def situations(draw: Any) -> tuple[Any, ...]:
    gap = draw(st.integers(1, 6))
    keys = draw(st.integers(1, 3))
    found: list[Found] = []
    for _ in range(keys):
        at, sessions = 0, []
        for _ in range(draw(st.integers(0, 4))):
            start = at + draw(st.integers(0, 9))
            end = start + draw(st.integers(0, 9))
            sessions.append((start, end))
            at = end + 1
        found.append(sessions)
    judged, records = 0, []
    for _ in range(draw(st.integers(1, 14))):
        time = draw(st.integers(0, 50))
        judged = max(judged, time)
        records.append((draw(st.integers(0, keys - 1)), time, judged - draw(st.sampled_from([0, 0, 0, 5]))))
    allowed = gap + draw(st.sampled_from([0, 3, 100]))
    reach = allowed + 1 + draw(st.sampled_from([0, 0, gap, 20]))
    return records, found, gap, allowed, reach, draw(st.booleans())


@BOTH
@settings(max_examples=300, deadline=None)
@given(situations())
def test_records_join_sessions_as_lists_would(life: str, situation: tuple[Any, ...]) -> None:
    assert run(life, *situation) == naive(*situation)


@BOTH
def test_the_end_of_time_is_no_place_to_turn_around(life: str) -> None:
    latest = 2**63 - 1
    found = run(life, [(0, latest, latest), (0, latest - 2, latest)], [[]], 10, 10, 11, False)
    assert found.sessions == [(0, latest - 2, latest, frozenset(["record 0", "record 1"]))]
