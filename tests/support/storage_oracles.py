"""A naive worker storage (a dict of rows per store) to compare with the real one, and a store laid out by hand.

`StoreOracle` knows nothing of runs, buckets held in memory or packs. Write the same batches to it and to the runtime,
and compare `contents` with what a reader returns (`rows_of`). One thing is deliberately inexact: a prune removes
whole runs, so the rows of the bucket that contains the cutoff depend on that bucket's layout. `StoreOracle.prune`
keeps those as *unsure*: they may be missing, and nothing else about them may be wrong. Rows of whole buckets below
the cutoff are gone exactly.

`LaidStore` wires the index, the caches, pins, packs and a reader as a worker does, without writer or maintenance, so
that a test of reading can put any run anywhere. Its rows go to a `StoreOracle` too.

Thread rule: none; one test, one thread.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.clock import Clock, SystemClock
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.backends.sealed import pack_name
from tidegate.storage.index import (
    AppendBatch,
    BucketIndex,
    BucketIndexState,
    HotCopy,
    PlainState,
    RunEntry,
    StoredRef,
    Tenant,
)
from tidegate.storage.maintenance.retirement import BatchPins
from tidegate.storage.memory.key_lru import KeyLru
from tidegate.storage.pack import NewPack, PackCache, write_packs
from tidegate.storage.ranges import keyed_schema
from tidegate.storage.reader import All, Bounds, RangeRequest, StorageReader
from tidegate.storage.runs.build import build_runs
from tidegate.storage.runs.columns import UInt64s, hash_keys
from tidegate.storage.runs.merge import merge_runs, select_keys
from tidegate.storage.runs.run import Run
from tidegate.storage.scratch import Scratch, ScratchLimiter
from tidegate.storage.spec import RESERVED, Merge, StoreSpec


class Identity(NamedTuple):
    """What makes a row itself."""

    key: bytes
    ts: int
    seq: int


Values = tuple[Any, ...]
Contents = dict[Identity, Values]


@dataclass(slots=True)
class Inputs:
    """Every input row ever folded into one identity, kept as it came."""

    rows: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass
class StoreOracle:
    """The rows of one store. For `fold`, aggregates are computed from all inputs, each time anew."""

    spec: StoreSpec
    next_seq: int = 0
    rows: dict[Identity, Any] = field(default_factory=dict)
    unsure: set[Identity] = field(default_factory=set)

    def append(self, batch: pa.RecordBatch) -> None:
        """Take a batch as the writer does: rows in their order, numbered when the kind is `append`."""
        for row in batch.to_pylist():
            if self.spec.merge is Merge.APPEND:
                identity = Identity(row["key"], row["ts"], self.next_seq)
                self.next_seq += 1
            else:
                identity = Identity(row["key"], row["ts"], row.get("seq") or 0)
            self._write(identity, row)

    def _write(self, identity: Identity, row: Mapping[str, Any]) -> None:
        if self.spec.merge is Merge.FOLD:
            self.rows.setdefault(identity, Inputs()).rows.append(row)
        elif self.spec.merge is Merge.LAST and row.get("deleted"):
            self.rows[identity] = None
        else:
            self.rows[identity] = tuple(row[name] for name in self.spec.payload.names)

    def prune(self, cutoff: int) -> None:
        """Everything in buckets below the cutoff's is gone; in its own bucket, what is older may be."""
        edge = self.spec.bucket_of(cutoff)
        self.rows = {identity: row for identity, row in self.rows.items() if identity.ts >= edge}
        self.unsure = {identity for identity in self.unsure if identity.ts >= edge}
        self.unsure |= {identity for identity in self.rows if identity.ts < cutoff}

    def contents(
        self, keys: Iterable[bytes] | None = None, start: int | None = None, end: int | None = None
    ) -> Contents:
        """What a reader must return for these keys and this time, both ends inclusive; unsure rows included."""
        wanted = None if keys is None else set(keys)
        return {
            identity: self._values(row)
            for identity, row in sorted(self.rows.items())
            if row is not None
            and (wanted is None or identity.key in wanted)
            and (start is None or identity.ts >= start)
            and (end is None or identity.ts <= end)
        }

    def _values(self, row: Any) -> Values:
        return fold(self.spec, row.rows) if isinstance(row, Inputs) else row

    def copy(self) -> StoreOracle:
        """As it is now, for a checkpoint."""
        return StoreOracle(self.spec, self.next_seq, copy.deepcopy(self.rows), set(self.unsure))

    def difference(self, found: Contents, expected: Contents) -> str | None:
        """What is wrong with what a reader returned, None when nothing is."""
        for identity, values in found.items():
            if identity not in expected:
                if identity in self.unsure:
                    continue  # a `last` row whose tombstone went with an older run
                return f"{identity} = {values} was returned and is not there"
            if values != expected[identity] and identity not in self.unsure:
                return f"{identity} is {values}, should be {expected[identity]}"
        for identity, values in expected.items():
            if identity not in found and identity not in self.unsure:
                return f"{identity} = {values} is missing"
        if self.spec.merge is Merge.APPEND:  # whole rows only: unsure ones are there as they were, or gone
            for identity, values in found.items():
                if values != expected.get(identity):
                    return f"{identity} is {values}, which was never written"
        return None


def fold(spec: StoreSpec, rows: Sequence[Mapping[str, Any]]) -> Values:
    """The aggregates of these input rows, by the book."""
    found = []
    for aggregate in spec.aggregates:
        kind = type(aggregate).__name__.lower()
        inputs = [tuple(row[name] for name in aggregate.inputs) for row in rows]
        found.append(PLAIN[kind](inputs))
    return tuple(found)


def _present(inputs: list[tuple[Any, ...]]) -> list[Any]:
    return [first for first, *_ in inputs if first is not None]


def _count(inputs: list[tuple[Any, ...]]) -> int:
    return sum(1 for row in inputs if not row or row[0] is not None)


def _sum(inputs: list[tuple[Any, ...]]) -> Any:
    values = _present(inputs)
    if not values:
        return None
    return math.fsum(values) if isinstance(values[0], float) else sum(values)


def _mean(inputs: list[tuple[Any, ...]]) -> Any:
    values = _present(inputs)
    return math.fsum(values) / len(values) if values else None


PLAIN: dict[str, Callable[[list[tuple[Any, ...]]], Any]] = {
    "count": _count,
    "sum": _sum,
    "mean": _mean,
    "min": lambda inputs: min(_present(inputs), default=None),
    "max": lambda inputs: max(_present(inputs), default=None),
}
_PRIME_1, _PRIME_2 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F
_PRIME_4, _PRIME_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MASK = (1 << 64) - 1


def keys_of_one_hash(count: int = 2) -> list[bytes]:
    """Different keys of sixteen bytes with the same XXH64 (seed 0).

    The hash takes a key eight bytes at a time, and every step can be undone: whatever the first eight are, there
    are second eight that lead to the state wanted.
    """
    wanted = _after(b"the same")
    keys = []
    for number in range(count):
        first = b"collide%d" % (number % 10) if number < 10 else number.to_bytes(8, "big")
        keys.append(first + _unmixed(_after(first) ^ wanted).to_bytes(8, "little"))
    return keys


def _after(lane: bytes) -> int:
    """The state after the first eight of sixteen bytes."""
    state = (_PRIME_5 + 16) & _MASK
    state ^= _mixed(int.from_bytes(lane, "little"))
    return (_turned(state, 27) * _PRIME_1 + _PRIME_4) & _MASK


def _mixed(lane: int) -> int:
    return _turned(lane * _PRIME_2 & _MASK, 31) * _PRIME_1 & _MASK


def _unmixed(mixed: int) -> int:
    turned = _turned(mixed * pow(_PRIME_1, -1, 1 << 64) & _MASK, 33)
    return turned * pow(_PRIME_2, -1, 1 << 64) & _MASK


def _turned(value: int, by: int) -> int:
    return (value << by | value >> (64 - by)) & _MASK


def batch_of(spec: StoreSpec, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Rows as dicts, in the form the writer takes: key, ts, seq and deleted where the kind has them."""
    columns: dict[str, pa.DataType] = {"key": pa.binary(), "ts": pa.int64()}
    if spec.merge is not Merge.APPEND:
        columns["seq"] = pa.int64()
    if spec.merge is Merge.LAST:
        columns["deleted"] = pa.bool_()
    if spec.merge is Merge.FOLD:
        for aggregate in spec.aggregates:
            columns |= dict.fromkeys(aggregate.inputs, getattr(aggregate, "type", pa.int64()))
    else:
        columns |= {column.name: column.type for column in spec.payload}
    defaults = {"seq": 0, "deleted": False}
    arrays = [
        pa.array([row.get(name, defaults.get(name)) for row in rows], kind) for name, kind in columns.items()
    ]
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))


def scan_all(
    reader: StorageReader,
    task: str,
    state: BucketIndexState,
    bounds: Bounds = All(),  # noqa: B008  (an immutable value)
) -> pa.Table:
    """Every key's rows inside the bounds, as one table."""
    schema = keyed_schema(state.index.spec.visible)
    with reader.scan(task, state, bounds) as batches:
        return pa.Table.from_batches(batches, schema=schema)


def rows_of(table: pa.Table | pa.RecordBatch, spec: StoreSpec) -> Contents:
    """What a reader returned, by identity; a fold's states are finished first.

    Raises `AssertionError` for a row that is there twice or out of order inside its key.
    """
    names = [name for name in table.column_names if name not in (*RESERVED, "request")]
    if spec.merge is Merge.FOLD:
        values = _finished(table, spec)
    else:
        values = list(zip(*(table.column(name).to_pylist() for name in names), strict=True))
        values = values if names else [()] * table.num_rows
    found: Contents = {}
    last: Identity | None = None
    for key, ts, seq, row in zip(
        table.column("key").to_pylist(),
        table.column("ts").to_pylist(),
        table.column("seq").to_pylist(),
        values,
        strict=True,
    ):
        identity = Identity(key, ts, seq)
        if identity in found:
            raise AssertionError(f"{identity} was returned twice")
        if last is not None and last.key == key and identity <= last:
            raise AssertionError(f"{identity} comes after {last}")
        found[identity], last = row, identity
    return found


def _finished(table: pa.Table | pa.RecordBatch, spec: StoreSpec) -> list[Values]:
    columns = []
    for aggregate in spec.aggregates:
        states = [table.column(column.name) for column in aggregate.state]
        flat = [each.combine_chunks() if isinstance(each, pa.ChunkedArray) else each for each in states]
        columns.append(aggregate.finish(flat).to_pylist())
    return list(zip(*columns, strict=True))


TASK = "app/op/0"
PLENTY = 2**31 - 1


def part_of(run: Run, hot: HotCopy) -> AppendBatch:
    """A run as a writer would hand it to the index."""
    return AppendBatch(run.bucket, hot, run.row_count, run.nbytes, run.nbytes, run.min_ts, run.max_ts)


def write_pack(
    backend: StorageBackend, task: str, spec: StoreSpec, segment: int, runs: Sequence[Run], name: str
) -> list[StoredRef]:
    """Put one pack; returns the reference of each run."""
    (refs,) = write_packs(backend, task, [NewPack(spec, segment, runs, name)])
    return refs


class LaidStore:
    """One store of one task, its reader, and an oracle beside it."""

    def __init__(
        self,
        spec: StoreSpec,
        backend: StorageBackend | None = None,
        *,
        clock: Clock | None = None,
        reader_slots: int = 4,
        scratch_timeout_ms: int = 5_000,
    ) -> None:
        self.spec = spec
        self.backend = MemoryBackend() if backend is None else backend
        self.index = BucketIndex(spec)
        self.state = PlainState(self.index)
        self.oracle = StoreOracle(spec)
        self.pins = BatchPins()
        self.packs = PackCache(self.backend)
        self.key_lru = KeyLru(TASK)
        self.scratch = ScratchLimiter(
            clock or SystemClock(),
            reader_slots=reader_slots,
            maintenance_slots=1,
            timeout_ms=scratch_timeout_ms,
        )
        self.reader = StorageReader(self.packs, self.pins, self.scratch, lambda task: self.key_lru)
        self._next_id = 1
        self._next_pack = 1

    def hot(self, run: Run, *, complete: bool = True) -> HotCopy:
        """A hot copy with an id of its own."""
        self._next_id += 1
        return HotCopy(Tenant.WRITE_BUFFER, self._next_id, run, complete)

    def append(
        self, rows: pa.RecordBatch, *, hashes: UInt64s | None = None, max_rows: int = PLENTY
    ) -> list[RunEntry]:
        """Accept a batch: new hot runs after all others."""
        first_seq = self.oracle.next_seq if self.spec.merge is Merge.APPEND else None
        runs = build_runs(self.spec, rows, first_seq=first_seq, max_rows=max_rows, hashes=hashes)
        self.oracle.append(rows)
        return self.index.insert([part_of(run, self.hot(run)) for run in runs])

    def entries(self) -> list[RunEntry]:
        return [run for bucket in self.index.query(-(2**63), 2**63) for run in bucket.runs]

    def dump(self, starts: Iterable[int] | None = None) -> None:
        """Give every run of these buckets that has none a stored place."""
        for start in self.index.unstored_buckets() if starts is None else starts:
            bucket = self.index.snapshot(start)
            waiting = [run for run in bucket.runs if run.stored is None] if bucket is not None else []
            if bucket is None or not waiting:
                continue
            name = pack_name(TASK, self.spec.name, self.spec.segment_of(start), str(self._next_pack))
            self._next_pack += 1
            runs = [run.hot.run for run in waiting if run.hot is not None]
            refs = write_pack(self.backend, TASK, self.spec, self.spec.segment_of(start), runs, name)
            pairs = [(run, replace(run, stored=ref)) for run, ref in zip(waiting, refs, strict=True)]
            if not self.index.set_places(bucket, pairs):
                raise RuntimeError("somebody else changed a store laid out by hand")

    def place(self, start: int, change: Callable[[RunEntry], RunEntry]) -> bool:
        """Change the places of every run of a bucket."""
        bucket = self.index.snapshot(start)
        if bucket is None:
            return False
        pairs = [(run, change(run)) for run in bucket.runs]
        return self.index.set_places(bucket, pairs)

    def evict(self, keys: Sequence[bytes] | None = None, starts: Iterable[int] | None = None) -> None:
        """Take hot copies away: all of them, or these keys' rows only. Whatever is not stored is stored first."""
        starts = self.index.hot_buckets() if starts is None else list(starts)
        self.dump(starts)
        chosen = None if keys is None else np.sort(hash_keys(pa.array(keys, pa.binary())))
        for start in starts:
            self.place(start, lambda run: replace(run, hot=self._left(run, chosen)))

    def _left(self, run: RunEntry, chosen: UInt64s | None) -> HotCopy | None:
        if run.hot is None or chosen is None:
            return None
        kept = select_keys(run.hot.run, chosen, keep=False)
        if kept is None:
            return None
        complete = run.hot.complete and kept.row_count == run.rows
        return run.hot if complete else self.hot(kept, complete=False)

    def run_of(self, entry: RunEntry) -> Run:
        """The whole run, from wherever it lies."""
        if entry.hot is not None and entry.hot.complete:
            return entry.hot.run
        if entry.stored is None:
            raise RuntimeError(f"a run of bucket {entry.bucket} is nowhere")
        return self.packs.load(TASK, self.spec, entry.stored)

    def compact(self, start: int) -> None:
        """Merge all runs of a bucket into one hot base."""
        bucket = self.index.snapshot(start)
        if bucket is None:
            return
        runs = [self.run_of(run) for run in bucket.runs]
        merged = merge_runs(self.spec, runs, max_rows=PLENTY, drop_tombstones=True, join=True)
        order = bucket.runs[-1].order
        new = [
            RunEntry(
                start, order, each.row_count, each.key_count, each.nbytes, each.nbytes, each.min_ts, each.max_ts,
                base=True, hot=self.hot(each),
            )
            for each in merged
        ]  # fmt: skip
        if not self.index.publish(bucket, bucket.runs, new):
            raise RuntimeError("somebody else changed a store laid out by hand")

    def table(self, *requests: RangeRequest) -> pa.Table:
        """What the reader answers."""
        with self.reader.load(self.reader.plan(TASK, self.state, list(requests))) as loaded:
            return loaded.to_table()

    def scan(self, bounds: Bounds = All()) -> pa.Table:  # noqa: B008  (an immutable value)
        """Every key's rows inside the bounds."""
        return scan_all(self.reader, TASK, self.state, bounds)

    def is_idle(self) -> bool:
        """Whether nothing is pinned, held or permitted any more."""
        permits = sum(self.scratch.in_use(kind) for kind in Scratch)
        return self.pins.open_leases() + permits == 0
