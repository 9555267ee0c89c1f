"""Looking keys up in many runs: the compiled kernels against their plain selves and against the obvious."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels import run_lookup as kernels
from tidegate.kernels.jit import byte_at, half_at, unsigned_at, word_at
from tidegate.kernels.run_lookup import (
    COMPLETE,
    DELETED,
    DELETED_OFFSET,
    HASHES,
    KEY_BOUNDS,
    KEY_BYTES,
    KEYS,
    PARTIAL,
    PATCH,
    ROWS,
    SEQ,
    STARTS,
    STORED,
    TS,
    UNKNOWN,
    WIDTH,
    lay_out,
    order_rows,
    point_lookup,
    scatter_stretches,
    search_runs,
)

APPEND, LAST, FOLD = 0, 1, 2
FAR = 2**62


@dataclass
class Line:
    """A run as plain rows, and its columns kept alive."""

    rows: list[tuple[int, bytes, int, int, bool]]  # hash, key, ts, seq, deleted; ascending
    role: int
    bucket: int
    columns: tuple[Any, ...] = ()

    def cells(self) -> list[int]:
        keys = sorted({(hashed, key) for hashed, key, *_ in self.rows})
        hashes = np.array([hashed for hashed, _ in keys], np.uint64)
        names = pa.array([b"pad", *(key for _, key in keys)], pa.binary())[1:]
        starts = [[(row[0], row[1]) for row in self.rows].index(key) for key in keys]
        ends = np.array([*starts, len(self.rows)], np.int32)
        ts = np.array([row[2] for row in self.rows], np.int64)
        seq = np.array([row[3] for row in self.rows], np.int64)
        marks = pa.array([False, *(row[4] for row in self.rows)], pa.bool_())[1:]
        self.columns = (hashes, names, ends, ts, seq, marks)
        line = [0] * WIDTH
        line[HASHES], line[STARTS] = hashes.ctypes.data, ends.ctypes.data
        line[TS], line[SEQ] = ts.ctypes.data, seq.ctypes.data
        line[KEY_BOUNDS], line[KEY_BYTES] = names.buffers()[1].address + 4, names.buffers()[2].address
        line[KEYS], line[ROWS] = len(keys), len(self.rows)
        line[DELETED] = marks.buffers()[1].address if any(row[4] for row in self.rows) else 0
        line[DELETED_OFFSET] = 1
        line[10:] = [min(ts, default=0), max(ts, default=0), self.role, self.bucket]
        return line


def expected(
    lines: list[Line], key: tuple[int, bytes], first: int, last: int, kind: int
) -> list[tuple[int, int]]:
    """The cursors of the key's rows, by the book: the latest line wins, tombstones hide, each identity once."""
    found: dict[tuple[int, int], bool] = {}
    for line in lines:
        for hashed, name, ts, seq, deleted in line.rows:
            if (hashed, name) == key and first <= ts <= last:
                found[ts, seq] = deleted and kind == LAST
    return sorted(cursor for cursor, deleted in found.items() if not deleted)


def cursors(lines: list[Line], stretches: Any, ties: Any) -> list[tuple[int, int]]:
    found = []
    for line, first, stop in stretches.tolist():
        for row in range(first, stop):
            if line == PATCH:
                members = ties[ties[:, 2] == row]
                assert len(members) > 1
                where = {lines[at].rows[number][2:4] for at, number, _ in members.tolist()}
                assert len(where) == 1, "ties of one group are one identity"
                found.append(where.pop())
            else:
                found.append(lines[line].rows[row][2:4])
    return found


HASH = st.integers(0, 2**64 - 1)
KEY = st.sampled_from([(3, b"a"), (3, b"b"), (3, b""), (2**63, b"a"), (2**64 - 1, b"zz"), (9, b"a")])
ROW = st.tuples(KEY, st.integers(0, 9), st.integers(0, 2), st.booleans())
BUCKETS = st.lists(st.lists(st.lists(ROW, max_size=8), min_size=1, max_size=4), min_size=1, max_size=3)
ASKED = [
    (3, b"a"),
    (3, b"b"),
    (3, b""),
    (2**63, b"a"),
    (2**64 - 1, b"zz"),
    (9, b"a"),
    (3, b"c"),
    (0, b""),
    (10, b"q"),
]


def lines_of(buckets: list[Any], kind: int) -> list[Line]:
    lines = []
    for number, bucket in enumerate(buckets):
        for order, rows in enumerate(bucket):
            unique = {
                (hashed, key, number * 10 + ts, seq + (0 if kind != APPEND else 3 * order)): deleted
                and kind == LAST
                for (hashed, key), ts, seq, deleted in rows
            }
            lines.append(Line(sorted((*row, deleted) for row, deleted in unique.items()), COMPLETE, number))
    return lines


def search(lines: list[Line], table: Any, first: int, last: int, plain: bool = False, low: Any = None) -> Any:
    """Cells of every asked key and line; with `low` given, the second call over it."""
    data = np.frombuffer(b"?" + b"".join(key for _, key in ASKED), np.uint8)
    bounds = np.cumsum([1, *(len(key) for _, key in ASKED)]).astype(np.int32)
    hashes = np.array([hashed for hashed, _ in ASKED], np.uint64)
    turns = np.argsort(hashes, kind="stable")
    second = low is not None
    cells = low or tuple(np.full(len(ASKED) * len(lines), 77, np.int32) for _ in range(2))
    kernel = search_runs.py_func if plain else search_runs
    kernel(table, data, bounds, hashes, turns, first, last, int(second), *cells)
    return cells


@pytest.mark.parametrize("kind", [APPEND, LAST, FOLD])
@pytest.mark.parametrize("plain", [False, True], ids=["compiled", "plain"])
@settings(max_examples=60, deadline=None)
@given(buckets=BUCKETS, span=st.tuples(st.integers(-1, 30), st.integers(-1, 30)))
def test_every_key_reads_in_order_and_once(
    kind: int, plain: bool, buckets: list[Any], span: tuple[int, int]
) -> None:
    lines, (first, last) = lines_of(buckets, kind), span
    table = np.array([line.cells() for line in lines], np.int64).reshape(-1)
    low, high = search(lines, table, first, last, plain)
    room = 1000
    stretches, ties = np.zeros((room, 3), np.int32), np.zeros((room, 3), np.int32)
    starts, ends, rows = (np.zeros(len(ASKED), np.int64) for _ in range(3))
    turns = np.argsort(np.array([hashed for hashed, _ in ASKED], np.uint64), kind="stable")
    order = order_rows.py_func if plain else order_rows
    count, tied, _, total = order(
        table, turns, low, high, kind, stretches.reshape(-1), ties.reshape(-1), starts, ends, rows
    )
    laid = np.zeros((count, 3), np.int32)
    (lay_out.py_func if plain else lay_out)(stretches.reshape(-1), starts, ends, laid.reshape(-1))
    wanted = [expected(lines, key, first, last, kind) for key in ASKED]
    found = [cursors(lines, laid[a:b], ties[:tied]) for a, b in zip(starts, ends, strict=True)]
    assert found == wanted
    assert rows.tolist() == [len(each) for each in wanted]
    assert total == rows.sum()
    assert all(laid[:, 2] > laid[:, 1])
    for (hashed, key), cursors_wanted in zip(ASKED, wanted, strict=True):
        once, again = np.zeros((room, 3), np.int32), np.zeros((room, 3), np.int32)
        left = np.zeros(1, np.uint64)
        data = np.frombuffer(key, np.uint8) if key else np.empty(0, np.uint8)
        kernel = point_lookup.py_func if plain else point_lookup
        number, met, _, found_rows = kernel(
            table, data, np.uint64(hashed), 1, first, last, kind, left, once.reshape(-1), again.reshape(-1)
        )
        assert cursors(lines, once[:number], again[:met]) == cursors_wanted
        assert (found_rows, int(left[0])) == (len(cursors_wanted), hashed)


@settings(max_examples=100, deadline=None)
@given(buckets=BUCKETS, room=st.integers(0, 6), kind=st.sampled_from([APPEND, LAST, FOLD]))
def test_what_has_no_room_is_counted_and_fits_the_next_time(buckets: list[Any], room: int, kind: int) -> None:
    lines = lines_of(buckets, kind)
    table = np.array([line.cells() for line in lines], np.int64).reshape(-1)
    low, high = search(lines, table, -FAR, FAR)
    turns = np.arange(len(ASKED))
    outcomes = []
    for stretch_room, tie_room in ((room, room), (1000, 1000)):
        guard = np.full((stretch_room + 1, 3), -7, np.int32)
        tie_guard = np.full((tie_room + 1, 3), -7, np.int32)
        numbers = [np.zeros(len(ASKED), np.int64) for _ in range(3)]
        outcomes.append(
            order_rows(
                table,
                turns,
                low.copy(),
                high,
                kind,
                guard[:-1].reshape(-1),
                tie_guard[:-1].reshape(-1),
                *numbers,
            )
        )
        assert guard[-1].tolist() == tie_guard[-1].tolist() == [-7] * 3, "nothing is written beyond the room"
    assert outcomes[0][0] >= outcomes[1][0], "the first answer is enough room"
    assert outcomes[0][1:3] == outcomes[1][1:3]


def test_a_partial_copy_answers_for_its_keys_and_the_stored_one_for_the_others() -> None:
    whole = sorted(
        (hashed, key, ts, 0, False) for hashed, key in ((3, b"a"), (3, b"b"), (9, b"a")) for ts in (1, 5)
    )
    hot = [row for row in whole if row[1] == b"b"]
    lines = [Line(hot, PARTIAL, 0), Line(whole, STORED, 0), Line(whole, COMPLETE, 1)]
    table = np.array([line.cells() for line in lines], np.int64)
    loaded = table.copy()
    table[1, KEYS] = -1
    low, high = search(lines, table.reshape(-1), 0, 9)
    cells = low.reshape(-1, 3).tolist()
    assert cells[0] == [UNKNOWN, UNKNOWN, 0]
    assert cells[1] == [0, UNKNOWN, 2], "the partial copy has key b"
    assert cells[6] == [UNKNOWN, UNKNOWN, 0], "a key that is nowhere must be looked for in the stored copy"
    search(lines, loaded.reshape(-1), 0, 9, low=(low, high))
    lows, highs = low.reshape(-1, 3).tolist(), high.reshape(-1, 3).tolist()
    assert (lows[0][1], highs[0][1]) == (0, 2)
    assert (lows[1][1], highs[1][1]) == (0, 0), "found hot: not read again from the pack"
    assert (lows[6][1], highs[6][1]) == (0, 0)
    place = np.zeros((50, 3), np.int32), np.zeros((50, 3), np.int32), np.zeros(1, np.uint64)
    for key, needs in (((3, b"b"), False), ((3, b"a"), True), ((10, b"q"), True)):
        count, *_ = point_lookup(
            table.reshape(-1), np.frombuffer(key[1], np.uint8), np.uint64(key[0]), 1, 0, 9, 0,
            place[2], place[0].reshape(-1), place[1].reshape(-1),
        )  # fmt: skip
        assert (count == -1) == needs


@settings(max_examples=60, deadline=None)
@given(
    hashes=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=60),
    asked=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_the_first_hash_is_found_from_anywhere(hashes: list[int], asked: int, data: st.DataObject) -> None:
    values = np.sort(np.array(hashes, np.uint64))
    wanted = np.uint64(data.draw(st.sampled_from([asked, *hashes])))
    near = data.draw(st.integers(0, len(values)))
    address = values.ctypes.data
    assert kernels._first_hash(address, len(values), wanted, near) == np.searchsorted(values, wanted)
    assert 0 <= kernels._guess(address, len(values), wanted) < len(values)


@settings(max_examples=60, deadline=None)
@given(stretches=st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 9), st.integers(0, 4)), max_size=30))
def test_scattered_rows_come_back_in_order(stretches: list[tuple[int, int, int]]) -> None:
    cells = np.array([(line, first, first + count) for line, first, count in stretches], np.int32).reshape(
        -1, 3
    )
    wanted = [(line, row) for line, first, stop in cells.tolist() for row in range(first, stop)]
    counts = [sum(line == each for line, _ in wanted) for each in range(-1, 4)]
    begins = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    for kernel in (scatter_stretches, scatter_stretches.py_func):
        starts, rows, places = begins.copy(), np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.int64)
        kernel(cells.reshape(-1), starts, rows, places)
        lines = np.repeat(np.arange(-1, 4), counts)
        assert [(int(lines[at]), int(rows[at])) for at in places] == wanted
        assert starts.tolist() == (begins + counts).tolist()


def test_addresses_read_what_lies_there() -> None:
    words = (ctypes.c_int64 * 3)(-1, 2**62, 7)
    address = ctypes.addressof(words)
    assert [word_at(address, at) for at in range(3)] == [-1, 2**62, 7]
    assert unsigned_at(address, 0) == 2**64 - 1
    assert [half_at(address, at) for at in (0, 1, 4)] == [-1, -1, 7]
    assert [byte_at(address, at) for at in (0, 15, 16)] == [255, 64, 7]
