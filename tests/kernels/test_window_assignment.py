"""Kernels of windows against plain twins: clocks, panes, late lines, windows of panes, notes, runs side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_lives import BOTH, alive
from storage_oracles import keys_of_one_hash
from tidegate.kernels.run_merge import match_runs
from tidegate.kernels.stream_time import FUTURE, GOOD, NEGATIVE, NO_KEY, advance_clocks
from tidegate.kernels.windows import admit_sizes, assign_panes, list_late, list_windows, note_records
from tidegate.storage.runs.aggregates import Count
from tidegate.storage.runs.build import build_runs
from tidegate.storage.runs.columns import binary_parts
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Merge, StoreSpec
from tidegate.windows.kinds import Hopping
from window_oracles import ms

NO_NUMBERS, NO_BYTES = np.empty(0, np.int64), np.empty(0, np.uint8)


@st.composite
def hopping(draw: st.DrawFn) -> Hopping:
    size = draw(st.integers(1, 40))
    return Hopping(ms(size), ms(draw(st.integers(1, size))), grace=ms(draw(st.integers(0, 30))))


# ── clocks ───────────────────────────────────────────────────────────────────────────────────────────────────


class PlainClocks:
    """Stream time as it is told, one record after the other."""

    def __init__(self, partitions: list[int], idle: list[bool]) -> None:
        self.times = dict.fromkeys(partitions, -1)
        self.idle = dict(zip(partitions, idle, strict=True))
        self.floor = -1

    def record(
        self, ts: int, partition: int, has_key: bool, stamped: int | None, latest: int, may_lead: bool
    ) -> tuple[int, int, int]:
        verdict = GOOD
        if not has_key:
            verdict = NO_KEY
        elif ts < 0:
            verdict = NEGATIVE
        elif ts > latest or (stamped is not None and ts > stamped and not may_lead):
            verdict = FUTURE
        else:
            self.idle[partition] = False
            self.times[partition] = max(self.times[partition], ts if stamped is None else stamped)
            moving = [time for name, time in self.times.items() if not self.idle[name]]
            self.floor = max(self.floor, min(moving))
        return self.times[partition], max(self.times[partition], self.floor), verdict


RECORDS = st.lists(
    st.tuples(st.integers(-3, 60), st.integers(0, 3), st.booleans(), st.integers(-1, 70)), max_size=40
)


@BOTH
@settings(max_examples=60, deadline=None)
@given(
    RECORDS, st.booleans(), st.booleans(), st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 5)
)
def test_clocks_run_record_by_record(
    life: str,
    records: list[tuple[int, int, bool, int]],
    trusted: bool,
    may_lead: bool,
    idle: list[bool],
    shift: int,
) -> None:
    plain = PlainClocks([0, 1, 2, 3], idle)
    expected = [
        plain.record(ts, at, has, stamp if trusted else None, 50, may_lead) for ts, at, has, stamp in records
    ]
    count = len(records)
    bits = np.packbits(
        np.array([False] * shift + [has for _, _, has, _ in records], np.bool_), bitorder="little"
    )
    out = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.uint8)
    clocks, floor, seen = np.full(4, -1, np.int64), np.full(1, -1, np.int64), np.zeros(4, np.uint8)
    done = alive(advance_clocks, life)(
        0,
        np.array([ts for ts, _, _, _ in records], np.int64),
        np.array([at for _, at, _, _ in records], np.int32),
        bits if count else NO_BYTES,
        shift,
        np.array([stamp for _, _, _, stamp in records], np.int64) if trusted else NO_NUMBERS,
        int(may_lead),
        50,
        np.arange(4, dtype=np.int32),
        clocks,
        np.array(idle, np.uint8),
        seen,
        floor,
        *out,
    )
    assert done == count
    assert list(zip(*(column.tolist() for column in out), strict=True)) == expected
    assert clocks.tolist() == list(plain.times.values())
    assert int(floor[0]) == plain.floor
    counted = {
        at for (_, at, _, _), (_, _, verdict) in zip(records, expected, strict=True) if verdict == GOOD
    }
    assert set(np.flatnonzero(seen).tolist()) == counted


def test_an_unknown_partition_stops_the_clocks_there() -> None:
    out = np.empty(3, np.int64), np.empty(3, np.int64), np.empty(3, np.uint8)
    done = advance_clocks(
        0, np.array([1, 2, 3]), np.array([7, 7, 9], np.int32), NO_BYTES, 0, NO_NUMBERS, 0, 50,
        np.array([7], np.int32), np.full(1, -1, np.int64), np.zeros(1, np.uint8), np.zeros(1, np.uint8),
        np.full(1, -1, np.int64), *out,
    )  # fmt: skip
    assert done == 2


# ── panes and late lines ─────────────────────────────────────────────────────────────────────────────────────


@BOTH
@settings(max_examples=60, deadline=None)
@given(
    hopping(), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(0, 3)), max_size=30)
)
def test_records_go_into_panes_and_closed_windows_are_listed(
    life: str, kind: Hopping, records: list[tuple[int, int, int]]
) -> None:
    count = len(records)
    ts = np.array([ts for ts, _, _ in records], np.int64)
    judged = np.array([max(ts, other) for ts, other, _ in records], np.int64)
    verdicts = np.array([verdict for _, _, verdict in records], np.uint8)
    taken, late = np.empty(count, np.uint8), np.empty(count, np.int32)
    panes, firsts = np.empty(count, np.int64), np.empty(count, np.int64)
    shape = (kind.size_ms, kind.advance_ms, kind.pane_ms, kind.grace_ms)
    totals = alive(assign_panes, life)(ts, judged, verdicts, FUTURE, *shape, taken, panes, firsts, late)
    lines: list[tuple[int, int, int]] = []
    accepted = partly = 0
    for row, (time, _, verdict) in enumerate(records):
        if verdict not in (GOOD, FUTURE):
            assert (taken[row], late[row]) == (0, 0)
            continue
        close = int(judged[row]) - kind.grace_ms
        open_starts = [start for start in kind.starts(time) if start + kind.size_ms > close]
        closed = [start for start in kind.starts(time) if start + kind.size_ms <= close]
        assert bool(taken[row]) == bool(open_starts)
        assert late[row] == len(closed)
        assert panes[row] == time // kind.pane_ms * kind.pane_ms
        if open_starts:
            assert firsts[row] == (open_starts[0] if closed else 0)
            accepted += 1
            partly += bool(closed)
        lines += [(row, start, close - start - kind.size_ms + 1) for start in closed]
    assert totals == (accepted, partly, len(lines))
    out = [np.empty(len(lines), np.int64) for _ in range(3)]
    alive(list_late, life)(ts, judged, late, kind.size_ms, kind.advance_ms, kind.grace_ms, *out)
    assert list(zip(*(column.tolist() for column in out), strict=True)) == lines


@BOTH
@settings(max_examples=60, deadline=None)
@given(
    hopping(),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=20),
    st.integers(0, 20),
    st.integers(0, 300),
)
def test_panes_belong_to_the_windows_over_them(
    life: str, kind: Hopping, panes: list[tuple[int, int]], low: int, high: int
) -> None:
    lowest, highest = low * kind.advance_ms, high
    starts = np.array([at * kind.pane_ms for at, _ in panes], np.int64)
    firsts = np.array([at * kind.advance_ms for _, at in panes], np.int64)
    expected = [
        (row, start)
        for row, (at, first) in enumerate(zip(starts.tolist(), firsts.tolist(), strict=True))
        for start in kind.starts(at)
        if lowest <= start <= highest and start >= first
    ]
    shape = (kind.size_ms, kind.advance_ms, lowest, highest)
    assert alive(list_windows, life)(starts, firsts, *shape, NO_NUMBERS, NO_NUMBERS) == len(expected)
    rows, windows = np.empty(len(expected), np.int64), np.empty(len(expected), np.int64)
    alive(list_windows, life)(starts, firsts, *shape, rows, windows)
    assert list(zip(rows.tolist(), windows.tolist(), strict=True)) == expected


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=20), st.integers(0, 100), st.integers(0, 200))
def test_sizes_are_admitted_while_they_fit(life: str, sizes: list[int], used: int, limit: int) -> None:
    admitted, expected, total = np.empty(len(sizes), np.uint8), [], used
    for size in sizes:
        expected.append(int(total + size <= limit))
        total += size * expected[-1]
    assert alive(admit_sizes, life)(np.array(sizes, np.int64), used, limit, admitted) == total
    assert admitted.tolist() == expected


@BOTH
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-5, 50), st.integers(0, 9)), min_size=1, max_size=30)
)
def test_notes_are_count_latest_time_and_range_of_offsets(
    life: str, records: list[tuple[int, int, int]]
) -> None:
    names = sorted({group for group, _, _ in records})
    groups = np.array([names.index(group) for group, _, _ in records], np.int32)
    times = np.array([time for _, time, _ in records], np.int64)
    offsets = np.array([offset for _, _, offset in records], np.int64)

    def note(ones: Any, lows: Any, highs: Any, given: Any, of: Any, count: int) -> list[Any]:
        out = [np.empty(count, np.int64) for _ in range(4)]
        alive(note_records, life)(ones, given, lows, highs, of, np.zeros(4 * count, np.int64), *out)
        return out

    found = note(NO_NUMBERS, offsets, offsets, times, groups, len(names))
    for at, name in enumerate(names):
        mine = [(time, offset) for group, time, offset in records if group == name]
        expected = [len(mine), max(time for time, _ in mine)]
        expected += [min(offset for _, offset in mine), max(offset for _, offset in mine)]
        assert [int(column[at]) for column in found] == expected
    counts, max_ts, lows, highs = found
    together = note(counts, lows, highs, max_ts, np.zeros(len(names), np.int32), 1)
    assert [int(column[0]) for column in together] == [
        len(records),
        times.max(),
        offsets.min(),
        offsets.max(),
    ]


SPEC = StoreSpec("panes", Merge.FOLD, aggregates=(Count("n"),), bucket_ms=1 << 40)
KEYS = [*keys_of_one_hash(3), b"", b"a", b"aa", b"\x00", *(b"key-%d" % number for number in range(30))]
ROWS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=60
)


def run_of(rows: list[tuple[bytes, int, int]]) -> Run:
    keys, ts, seq = zip(*rows, strict=True)
    batch = pa.record_batch(
        {"key": pa.array(keys, pa.binary()), "ts": pa.array(ts, pa.int64()), "seq": pa.array(seq, pa.int64())}
    )
    (run,) = build_runs(SPEC, batch, first_seq=None, max_rows=1000)
    return run


def identities(run: Run) -> list[tuple[bytes, int, int]]:
    return list(zip(run.row_keys().to_pylist(), run.ts.tolist(), run.seq.tolist(), strict=True))


@BOTH
@settings(max_examples=60, deadline=None)
@given(ROWS, ROWS)
def test_two_runs_meet_in_the_identities_they_share(
    life: str, left: list[tuple[bytes, int, int]], right: list[tuple[bytes, int, int]]
) -> None:
    one, other = run_of(left), run_of(right)
    room = min(one.row_count, other.row_count)
    rows, others = np.empty(room, np.int32), np.empty(room, np.int32)
    count = alive(match_runs, life)(
        one.hashes, *binary_parts(one.keys), one.starts, one.ts, one.seq,
        other.hashes, *binary_parts(other.keys), other.starts, other.ts, other.seq,
        rows, others,
    )  # fmt: skip
    mine, theirs = identities(one), identities(other)
    pairs = [
        (mine[a], theirs[b]) for a, b in zip(rows[:count].tolist(), others[:count].tolist(), strict=True)
    ]
    assert all(a == b for a, b in pairs)
    assert {a for a, _ in pairs} == set(mine) & set(theirs)
    assert len(pairs) == len(set(mine) & set(theirs))
