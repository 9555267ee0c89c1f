"""A naive worker storage: a dict of rows per store, to compare the real one with.

It owns the obvious answer and knows nothing of runs, buckets held in memory or packs. Operators' own tests may
use it too: write the same batches to a `StoreOracle` and to the runtime, and compare `contents` with what a
reader returns (`rows_of`).

One thing is not exact, on purpose: a prune removes whole runs, so which rows of the bucket that the cutoff lies
in are gone depends on how that bucket was laid out. `StoreOracle.prune` keeps those as *unsure*: they may be
missing, and nothing else about them may be wrong. Rows of whole buckets below the cutoff are gone exactly.

Thread rule: none; one test, one thread.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from tidegate.storage.index import BucketIndexState
from tidegate.storage.ranges import keyed_schema, result_schema
from tidegate.storage.reader import All, Bounds, StorageReader
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
    schema = keyed_schema(result_schema(state.index.spec))
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
