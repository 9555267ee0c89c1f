"""Find the rows of keys in captured buckets: load runs, search them, and merge by merge kind.

A `Span` has the buckets captured in one critical section, and a table with a line for every copy of a run (layout:
`kernels/run_lookup.py`). It keeps the hot runs alive whose addresses are in the table. `Found` has the rows of some
keys as stretches in reading order.

`find_keys` looks each of some thousand keys up in every run. `join_buckets` answers hundreds of thousands of keys,
most of which are in no run, in one pass over each run's directory; it copies the rows and holds nothing afterwards.
Partial hot copies are not joined: their stored runs have every key.

L1  a line's addresses are used only while `runs[line]` keeps the run alive.
L2  a needed stored run is loaded or the load fails: there is no partial answer (T20).
L3  packs were pinned when the buckets were captured; the scratch permit of a load is taken when the first stored run
    is read, and not before.

Thread rule: spans are shared values and never changed; a `RunLoader` and a `Found` belong to one load.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.run_lookup import (
    COMPLETE,
    DELETED,
    DELETED_OFFSET,
    HASHES,
    KEY_BOUNDS,
    KEY_BYTES,
    KEYS,
    MAX_TS,
    MIN_TS,
    PARTIAL,
    PATCH,
    ROLE,
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
    point_read,
    scatter_stretches,
    search_runs,
)
from tidegate.kernels.run_merge import BITS_A_KEY, leap_run, mark_hashes, stream_run
from tidegate.storage.index import Bucket, RunEntry, StoredRef
from tidegate.storage.pack import PackCache
from tidegate.storage.runs.columns import (
    BinaryParts,
    UInt64s,
    binary_parts,
    gather_keys,
    hash_parts,
    largest_window,
    picked_need,
)
from tidegate.storage.runs.columns import gather as gather_column
from tidegate.storage.runs.run import DIRECTORY, Int64s, Run
from tidegate.storage.scratch import ScratchLimiter
from tidegate.storage.spec import Merge, StoreSpec

# -- loading stored runs -----------------------------------------------------------------------------


# counts reads from the backend: task, runs, bytes, store, buckets of the store; no buckets for a scan
Loaded = Callable[[str, int, int, str, Collection[int]], None]


class RunLoader:
    """Reads the stored runs of one load."""

    __slots__ = ("_admit", "_is_sweep", "_packs", "_read", "_spec", "_task", "_told", "ahead", "scratch")

    def __init__(
        self,
        packs: PackCache,
        task: str,
        spec: StoreSpec,
        admit: Callable[[], None],
        told: Loaded,
        scratch: ScratchLimiter,
        *,
        is_sweep: bool,
    ) -> None:
        self.scratch = scratch
        self._is_sweep = is_sweep
        self._read: set[int] = set()  # buckets reported already: each counts once per load
        self._packs = packs
        self.ahead = packs.reads_at_once  # the number of buckets to prefetch; 1 for a local backend
        self._task = task
        self._spec = spec
        self._admit = admit
        self._told = told

    def all(self, entries: Sequence[RunEntry]) -> Iterator[Run]:
        """Load these runs, in this order; packs are opened concurrently where that helps."""
        places = [self._place(entry) for entry in entries]
        if places:
            self._admit()
            buckets = set() if self._is_sweep else {entry.bucket for entry in entries} - self._read
            self._read |= buckets
            nbytes = sum(place.nbytes for place in places)
            self._told(self._task, len(places), nbytes, self._spec.name, buckets)
        return self._packs.load_all(self._task, self._spec, places)

    def bring(self, entries: Iterable[RunEntry]) -> None:
        """Prefetch the packs of runs that are needed soon."""
        packs = [self._place(entry).pack for entry in entries]
        if packs:
            self._admit()
            self._packs.bring(packs)

    def _place(self, entry: RunEntry) -> StoredRef:
        if entry.stored is None:
            raise InvalidError(f"store {self._spec.name}, bucket {entry.bucket}: a run without any place")
        return entry.stored


# -- lookup ------------------------------------------------------------------------------------------

Int32s = npt.NDArray[np.int32]
KINDS = {Merge.APPEND: 0, Merge.LAST: 1, Merge.FOLD: 2}
MAX_CELLS = 1 << 22  # of key × line in one search: 32 MiB
FEW = 8  # initial capacity for stretches per key
POINT_ROOM = 64
FEW_STRETCHES = 32
LONG_STRETCHES = 64  # rows; slices of that length are faster to join than to gather
_BINARY = pa.binary()
_NO_BYTES = np.empty(0, np.uint8)
_64_BITS = (1 << 64) - 1
_EMPTY_DIRECTORY = pa.RecordBatch.from_pylist([], schema=DIRECTORY)
_ADDRESSES: WeakKeyDictionary[Run, Int64s] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Captured buckets as a lookup table; `runs[line]` is None where a stored copy is not loaded."""

    buckets: Sequence[Bucket]
    entries: Sequence[RunEntry]
    runs: Sequence[Run | None]
    table: Any
    flat: Int64s  # the same table, as kernels take it
    has_stored: bool


@dataclass(slots=True, eq=False)
class Found:
    """Rows of some keys, merged. Key k's stretches are [key_ends[k - 1], key_ends[k])."""

    runs: Sequence[Run | None]
    stretches: Int32s
    key_ends: Int64s | tuple[int, ...]
    key_rows: Int64s | tuple[int, ...]
    patch: Run | None = None  # rows that exist in no run: merged partial states

    def run_of(self, line: int) -> Run:
        run = self.patch if line == PATCH else self.runs[line]
        if run is None:
            raise LookupError(f"line {line} of a lookup has no run")
        return run

    def key_stretches(self, key: int) -> Int32s:
        return self.stretches[int(self.key_ends[key - 1]) if key else 0 : int(self.key_ends[key])]


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────


def addresses_of(run: Run) -> Int64s:
    """The part of a line that depends only on the run; cached on the run."""
    line = _ADDRESSES.get(run)
    if line is None:
        line = np.zeros(MIN_TS, np.int64)
        keys = run.keys
        _, bounds, content = keys.buffers()
        line[HASHES] = run.hashes.ctypes.data
        line[KEY_BOUNDS] = bounds.address + 4 * keys.offset
        line[KEY_BYTES] = 0 if content is None else content.address
        line[STARTS] = run.starts.ctypes.data
        line[TS], line[SEQ] = run.ts.ctypes.data, run.seq.ctypes.data
        line[KEYS], line[ROWS] = run.key_count, run.row_count
        marks = (
            run.rows.column(2) if run.rows.num_columns > 2 and run.rows.schema.names[2] == "deleted" else None
        )
        if marks is not None and marks.true_count:
            line[DELETED], line[DELETED_OFFSET] = marks.buffers()[1].address, marks.offset
        _ADDRESSES[run] = line
    return line


def span_of(buckets: Sequence[Bucket]) -> Span:
    """Build the table of these buckets, which ascend by start."""
    entries: list[RunEntry] = []
    runs: list[Run | None] = []
    roles: list[int] = []
    for bucket in buckets:
        for entry in bucket.runs:
            hot = entry.hot
            if hot is not None:
                entries.append(entry)
                runs.append(hot.run)
                roles.append(COMPLETE if hot.complete else PARTIAL)
            if hot is None or not hot.complete:
                entries.append(entry)
                runs.append(None)
                roles.append(STORED)
    table = np.zeros((len(runs), WIDTH), np.int64)
    for line, run in enumerate(runs):
        if run is not None:
            table[line, :MIN_TS] = addresses_of(run)
        else:
            table[line, KEYS] = -1
    # the entry's bounds, not the copy's: a partial copy's bounds are not those of the whole run
    table[:, MIN_TS:] = [
        (entry.min_ts, entry.max_ts, role, entry.bucket) for entry, role in zip(entries, roles, strict=True)
    ] or np.empty((0, WIDTH - MIN_TS))
    return Span(buckets, entries, runs, table, table.reshape(-1), STORED in roles)


# ── looking up ───────────────────────────────────────────────────────────────────────────────────────────────


def find_point(
    span: Span, spec: StoreSpec, key: bytes, first: int, last: int, scratch: ScratchLimiter
) -> tuple[Found | None, int]:
    """Find one key without the backend (None when a stored copy must be read), and return its hash."""
    if spec.merge is Merge.FOLD:
        return _find_folded(span, spec, key, first, last, scratch)
    kind, room = 0 if spec.merge is Merge.APPEND else 1, FEW
    while True:
        out = np.empty(3 * room, np.int32)
        count, rows, hashed = point_read(span.flat, key, first, last, kind, out)
        if count <= room:
            break
        room = count
    if count < 0:
        return None, hashed & _64_BITS
    return Found(span.runs, out[: 3 * count].reshape(count, 3), (count,), (rows,)), hashed & _64_BITS


def _find_folded(
    span: Span, spec: StoreSpec, key: bytes, first: int, last: int, scratch: ScratchLimiter
) -> tuple[Found | None, int]:
    hashed = np.empty(1, np.uint64)
    data = np.frombuffer(key, np.uint8) if key else _NO_BYTES
    room = tie_room = POINT_ROOM
    while True:
        stretches, ties = np.empty((room, 3), np.int32), np.empty((tie_room, 3), np.int32)
        count, tied, groups, rows = point_lookup(
            span.flat,
            data,
            _ZERO,
            0,
            first,
            last,
            KINDS[Merge.FOLD],
            hashed,
            stretches.reshape(-1),
            ties.reshape(-1),
        )
        if count < 0:
            return None, int(hashed[0])
        if count <= room and tied <= tie_room:
            break
        room, tie_room = max(room, count), max(tie_room, tied)
    found = Found(span.runs, stretches[:count], (count,), (rows,))
    if tied:
        found.patch = _merge_ties(spec, found, ties[:tied], groups, scratch)
    return found, int(hashed[0])


def find_keys(
    span: Span,
    spec: StoreSpec,
    keys: pa.Array,
    hashes: UInt64s | None,
    first: int,
    last: int,
    load: RunLoader,
) -> Iterator[tuple[int, Found]]:
    """Find many keys, in pieces of bounded size: (index of the piece's first key, its rows)."""
    if hashes is None:
        hashes = hash_parts(binary_parts(keys))
    loaded = _Loaded(span, load)
    step = max(1, MAX_CELLS // max(1, len(span.runs)))
    for start in range(0, len(keys), step):
        yield (
            start,
            _find_piece(loaded, spec, keys.slice(start, step), hashes[start : start + step], first, last),
        )


class _Loaded:
    """A span's lines, with the stored runs loaded so far."""

    def __init__(self, span: Span, load: RunLoader) -> None:
        self.span = span
        self.runs = list(span.runs) if span.has_stored else span.runs
        self.table = span.table.copy() if span.has_stored else span.table
        self._load = load
        self.scratch = load.scratch

    def need(self, low: Int32s, first: int, last: int) -> bool:
        """Load the stored runs that `low` leaves open; returns whether there were any."""
        table = self.table
        reach = (table[:, ROLE] == STORED) & (table[:, MAX_TS] >= first) & (table[:, MIN_TS] <= last)
        needed = [
            line
            for line in np.flatnonzero(reach).tolist()
            if not line or table[line - 1, ROLE] != PARTIAL or (low[:, line - 1] == UNKNOWN).any()
        ]
        absent = [line for line in needed if self.runs[line] is None]
        for line, run in zip(absent, self._load.all([self.span.entries[at] for at in absent]), strict=True):
            table[line, :MIN_TS] = addresses_of(run)
            self.runs[line] = run  # type: ignore[index]
        return bool(needed)


def _find_piece(
    loaded: _Loaded, spec: StoreSpec, keys: pa.Array, hashes: UInt64s, first: int, last: int
) -> Found:
    count, kind = len(keys), KINDS[spec.merge]
    parts = binary_parts(keys)
    turns = np.argsort(hashes)
    low = np.empty((count, len(loaded.runs)), np.int32)
    high = np.empty_like(low)
    flat = loaded.table.reshape(-1)
    search_runs(
        flat, parts.data, parts.bounds, hashes, turns, first, last, 0, low.reshape(-1), high.reshape(-1)
    )
    if loaded.span.has_stored and loaded.need(low, first, last):
        search_runs(
            flat, parts.data, parts.bounds, hashes, turns, first, last, 1, low.reshape(-1), high.reshape(-1)
        )
    if len(loaded.runs) == 1 and (kind != KINDS[Merge.LAST] or not loaded.table[0, DELETED]):
        return _found_in_one(loaded, low.reshape(-1), high.reshape(-1))
    most = int((high.astype(np.int64) - low).sum())
    if not most:
        none = np.zeros(count, np.int64)
        return Found(loaded.runs, np.empty((0, 3), np.int32), none, none)
    room = min(most, max(4096, 2 * int(np.count_nonzero(high > low))))
    tie_room = most if spec.merge is Merge.FOLD else 0
    key_starts, key_ends, key_rows = (np.empty(count, np.int64) for _ in range(3))
    while True:
        stretches, ties = np.empty((room, 3), np.int32), np.empty((tie_room, 3), np.int32)
        at = low.copy() if room < most else low
        total, tied, groups, _ = order_rows(
            flat,
            turns,
            at.reshape(-1),
            high.reshape(-1),
            kind,
            stretches.reshape(-1),
            ties.reshape(-1),
            key_starts,
            key_ends,
            key_rows,
        )
        if total <= room:
            break
        room = min(total, most)
    ordered = np.empty((total, 3), np.int32)
    lay_out(stretches.reshape(-1), key_starts, key_ends, ordered.reshape(-1))
    found = Found(loaded.runs, ordered, key_ends, key_rows)
    if tied:
        found.patch = _merge_ties(spec, found, ties[:tied], groups, loaded.scratch)
    return found


def _found_in_one(loaded: _Loaded, low: Int32s, high: Int32s) -> Found:
    """The rows found in a single run: one stretch per key, already in order."""
    there = high > low
    ends = np.cumsum(there, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    stretches = np.zeros((total, 3), np.int32)
    stretches[:, 1], stretches[:, 2] = (low, high) if total == len(low) else (low[there], high[there])
    return Found(loaded.runs, stretches, ends, (high - low).astype(np.int64))


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────


def gather(found: Found, stretches: Int32s, schema: pa.Schema, *, select: bool = True) -> pa.RecordBatch:
    """The rows of the stretches, in their order, as one batch; of `schema` columns, or (not `select`) of all."""
    names = schema.names if select else None
    if not len(stretches):
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
    if len(stretches) > FEW_STRETCHES:
        lengths = stretches[:, 2] - stretches[:, 1]
        total = int(lengths.sum(dtype=np.int64))
        if total < LONG_STRETCHES * len(stretches):
            return _take(found, stretches, lengths, total, names)
    pieces = [found.run_of(line).rows.slice(start, stop - start) for line, start, stop in stretches.tolist()]
    batch = pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)
    return batch if names is None else batch.select(names)


def cut(stretches: Int32s, ends: Sequence[int], start: int, stop: int) -> Int32s:
    """Rows [start, stop) of the stretches, of which the i-th ends at row `ends[i]`."""
    if start >= stop:
        return stretches[:0]
    first, last = bisect_right(ends, start), bisect_left(ends, stop)
    part = stretches[first : last + 1].copy()
    part[0, 1] = part[0, 2] - (ends[first] - start)
    part[-1, 2] -= ends[last] - stop
    return part


def stretch_ends(stretches: Int32s) -> list[int]:
    """The cumulative row count at the end of each stretch."""
    return np.cumsum(stretches[:, 2] - stretches[:, 1], dtype=np.int64).tolist()  # type: ignore[no-any-return]


def _take(
    found: Found, stretches: Int32s, lengths: Int32s, total: int, names: list[str] | None
) -> pa.RecordBatch:
    """Gather many short stretches: all rows of each run at once, then reordered."""
    lines = stretches[:, 0]
    if bool((lines == lines[0]).all()):
        rows_here = found.run_of(int(lines[0])).rows
        return _gather_rows(
            rows_here if names is None else rows_here.select(names), stretches, lengths, total
        )
    counts = np.bincount(stretches[:, 0] + 1, weights=lengths, minlength=len(found.runs) + 1).astype(np.int64)
    starts = np.zeros(len(counts), np.int64)
    np.cumsum(counts[:-1], out=starts[1:])
    rows, places = np.empty(total, np.int64), np.empty(total, np.int64)
    scatter_stretches(np.ascontiguousarray(stretches).reshape(-1), starts, rows, places)
    pieces = []
    for line in np.flatnonzero(counts).tolist():
        stop = int(starts[line])
        chosen = pa.array(rows[stop - int(counts[line]) : stop])
        rows_here = found.run_of(line - 1).rows
        pieces.append((rows_here if names is None else rows_here.select(names)).take(chosen))
    if len(pieces) == 1:
        return pieces[0]
    return pa.concat_batches(pieces).take(pa.array(places))


def _gather_rows(rows: pa.RecordBatch, stretches: Int32s, lengths: Int32s, total: int) -> pa.RecordBatch:
    """The rows of stretches of one run."""
    if total == len(stretches):
        chosen = np.ascontiguousarray(stretches[:, 1])
    else:
        moves = stretches[:, 1] - (np.cumsum(lengths, dtype=np.int32) - lengths)
        chosen = np.repeat(moves, lengths) + np.arange(total, dtype=np.int32)
    columns = [
        gather_keys(column, chosen)
        if column.type == _BINARY and not column.null_count
        else gather_column(column, chosen)
        for column in rows.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def _merge_ties(spec: StoreSpec, found: Found, ties: Int32s, groups: int, scratch: ScratchLimiter) -> Run:
    """One row for each group of rows with one identity: their states merged."""
    turns = np.argsort(ties[:, 0], kind="stable")
    ties = ties[turns]
    lines, firsts = np.unique(ties[:, 0], return_index=True)
    stops = [*firsts[1:].tolist(), len(ties)]
    chosen = [
        (found.run_of(line), ties[first:stop, 1])
        for line, first, stop in zip(lines.tolist(), firsts.tolist(), stops, strict=True)
    ]
    need = sum(picked_need(run, rows) for run, rows in chosen)
    with scratch.hold(need, lambda: f"store {spec.name}: " + largest_window(chosen)):
        rows = pa.concat_batches([run.rows.take(pa.array(picked)) for run, picked in chosen])
        members = np.ascontiguousarray(ties[:, 2])
        _, example = np.unique(members, return_index=True)
        columns = [rows.column(at).take(pa.array(example)) for at in (0, 1)]
        columns += spec.fold(rows.columns[2:], members, groups)
        return Run(0, _EMPTY_DIRECTORY, pa.RecordBatch.from_arrays(columns, schema=spec.rows))


_ZERO = np.uint64(0)


# -- joining very many keys --------------------------------------------------------------------------

LEAP_FROM = 16  # times as many keys in the run as asked for
FIRST_ROOM = 1 << 12


class Joined(NamedTuple):
    """Rows found: ascending by (number of the key, ts, seq), each identity once, tombstones hidden."""

    numbers: Int64s
    rows: pa.RecordBatch  # ts, seq, payload


class _Hits(NamedTuple):
    run: Run
    keys: Int32s
    rows: Int32s


class _Keys(NamedTuple):
    hashes: UInt64s
    parts: BinaryParts
    bits: npt.NDArray[np.uint8]
    shift: int


def join_buckets(
    spec: StoreSpec,
    schema: pa.Schema,
    buckets: Sequence[Bucket],
    keys: pa.BinaryArray,
    hashes: UInt64s,
    first: int,
    last: int,
    load: RunLoader,
) -> Joined:
    """The rows of these keys, which ascend by hash and come once each, with `first` ≤ ts ≤ `last`."""
    if spec.merge is Merge.FOLD:
        raise InvalidError(f"store {spec.name}: rows of a fold are merged when read; plan and load them")
    if len(hashes) != len(keys) or (len(hashes) > 1 and bool((hashes[1:] < hashes[:-1]).any())):
        raise InvalidError(f"store {spec.name}: keys to join need their hashes, and ascend by them")
    asked = _asked(keys, hashes)
    entries = [
        entry
        for bucket in buckets
        for entry in bucket.runs
        if len(keys) and entry.max_ts >= first and entry.min_ts <= last
    ]
    stored = load.all([entry for entry in entries if entry.hot_run is None])
    hits: list[_Hits] = []
    for entry in entries:
        run = entry.hot_run
        found = _join_run(asked, next(stored) if run is None else run, first, last)
        if len(found.keys):
            hits.append(found)
    return _gathered(spec, schema, hits)


def _asked(keys: pa.BinaryArray, hashes: UInt64s) -> _Keys:
    width = max(3, (BITS_A_KEY * len(hashes)).bit_length())
    bits = np.zeros(1 << (width - 3), np.uint8)
    mark_hashes(hashes, 64 - width, bits)
    return _Keys(hashes, binary_parts(keys), bits, 64 - width)


def _join_run(asked: _Keys, run: Run, first: int, last: int) -> _Hits:
    own = (run.hashes, *binary_parts(run.keys), run.starts, run.ts)
    room = FIRST_ROOM
    while True:
        keys, rows = np.empty(room, np.int32), np.empty(room, np.int32)
        if run.key_count > LEAP_FROM * len(asked.hashes):
            count = leap_run(asked.hashes, *asked.parts, *own, first, last, keys, rows)
        else:
            count = stream_run(
                asked.bits, asked.shift, asked.hashes, *asked.parts, *own, first, last, keys, rows
            )
        if count <= room:
            return _Hits(run, keys[:count], rows[:count])
        room = int(count)


def _gathered(spec: StoreSpec, schema: pa.Schema, hits: Sequence[_Hits]) -> Joined:
    """The found rows in order; of two with one identity, the later run's (T15)."""
    if not hits:
        empty = pa.RecordBatch.from_arrays([pa.array([], each.type) for each in schema], schema=schema)
        return Joined(np.empty(0, np.int64), empty)
    numbers = np.concatenate([each.keys for each in hits])
    order = np.argsort(numbers, kind="stable")
    in_order = numbers[order]
    if (
        in_order[1:] == in_order[:-1]
    ).any():  # a key with several rows: by their cursors, the latest run's last
        ts = np.concatenate([each.run.ts[each.rows] for each in hits])
        seq = np.concatenate([each.run.seq[each.rows] for each in hits])
        order = np.lexsort((seq, ts, numbers))
        if spec.merge is Merge.LAST:
            in_order, ts, seq = numbers[order], ts[order], seq[order]
            is_last = np.ones(len(order), np.bool_)
            is_last[:-1] = (in_order[1:] != in_order[:-1]) | (ts[1:] != ts[:-1]) | (seq[1:] != seq[:-1])
            order = order[is_last]
    rows = pa.concat_batches([each.run.rows.take(pa.array(each.rows)) for each in hits])
    if spec.merge is Merge.LAST:
        deleted = rows.column("deleted")
        if deleted.true_count:
            order = order[~deleted.to_numpy(zero_copy_only=False)[order]]
    return Joined(numbers[order].astype(np.int64), rows.select(schema.names).take(pa.array(order)))
