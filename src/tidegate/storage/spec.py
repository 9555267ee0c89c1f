"""The shape of a store: its columns and merge kind, and the arithmetic of buckets and time segments.

A store is one operator's rows in one task. Every row has a key (bytes), a cursor (`ts` in milliseconds, `seq`)
and payload columns; (key, ts, seq) is its identity, whatever the kind of merge. The kinds differ only in what
happens when one identity is written twice:

    append   never happens: the writer gives each row its own number               (events)
    last     the later write wins; a tombstone is a write, too                   (upserts, dedupe ids, tables)
    fold     the two partial states are merged, aggregate by aggregate           (counts, sums, …)

`ts` is the event time for `append` and the window start (session end) for the others; `seq` is the writer's
number for `append`, and the caller's second half of the identity (0, a session start) for the others.

Buckets and time segments round down, also below zero: ts −1 is in the bucket that starts at −width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage.runs.aggregates import Aggregate
from tidegate.storage.runs.columns import Int32s

RESERVED = ("key", "ts", "seq", "deleted")


class Merge(StrEnum):
    """How two rows of one identity are merged."""

    APPEND = "append"
    LAST = "last"
    FOLD = "fold"


class Cursor(NamedTuple):
    """A row's position within its key; compares as a pair."""

    ts: int
    seq: int


EARLIEST = -(2**63)
LATEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class EarlierShape:
    """An earlier schema of the store that some of its packs have, and the conversion to the current one.

    Columns may only be appended, and a struct column may get more fields; `grow` adds them to earlier rows.
    """

    spec: StoreSpec
    grow: Callable[[pa.RecordBatch], pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """The shape of a store, which never changes; for a fold, `payload` is derived from the aggregates."""

    name: str
    merge: Merge
    payload: pa.Schema = field(default_factory=lambda: pa.schema([]))
    aggregates: tuple[Aggregate, ...] = ()
    bucket_ms: int = 60_000
    segment_ms: int = 0  # the time segment's interval; 0: one time segment is one bucket
    rows: pa.Schema = field(init=False, repr=False, compare=False)
    """The columns of a run's rows: cursor, tombstone mark (`last` only), payload."""
    visible: pa.Schema = field(init=False, repr=False, compare=False)
    """The columns returned to readers: cursor and payload; tombstones are never returned."""
    earlier: tuple[EarlierShape, ...] = field(default=(), init=False, repr=False, compare=False)
    """Shapes that packs of this store may still have; see `grown_from`."""
    fingerprint: str = field(init=False, repr=False, compare=False)
    """What must not change between writing a store and reading it: kind, columns, aggregates, widths."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise InvalidError(f"store name {self.name!r}: use a non-empty name without '/'")
        if self.bucket_ms <= 0:
            raise InvalidError(f"store {self.name}: bucket_ms is {self.bucket_ms}; it must be above 0")
        if self.segment_ms == 0:
            object.__setattr__(self, "segment_ms", self.bucket_ms)
        if self.segment_ms < self.bucket_ms or self.segment_ms % self.bucket_ms:
            raise InvalidError(
                f"store {self.name}: segment_ms {self.segment_ms} is not a multiple of bucket_ms {self.bucket_ms}"
            )
        if bool(self.aggregates) != (self.merge is Merge.FOLD):
            raise InvalidError(f"store {self.name}: a fold needs aggregates, and nothing else has them")
        if self.merge is Merge.FOLD:
            if len(self.payload.names):
                raise InvalidError(f"store {self.name}: a fold's payload follows from its aggregates")
            object.__setattr__(
                self, "payload", pa.schema([field for each in self.aggregates for field in each.state])
            )
        taken = [name for name in self.payload.names if name in RESERVED]
        if taken or len(set(self.payload.names)) != len(self.payload.names):
            raise InvalidError(f"store {self.name}: column names {taken or self.payload.names} clash")
        mark = [pa.field("deleted", pa.bool_(), nullable=False)] if self.merge is Merge.LAST else []
        cursor = [pa.field(name, pa.int64(), nullable=False) for name in ("ts", "seq")]
        object.__setattr__(self, "rows", pa.schema([*cursor, *mark, *list(self.payload)]))
        object.__setattr__(self, "visible", pa.schema([*cursor, *list(self.payload)]))
        object.__setattr__(self, "fingerprint", self._fingerprint())

    def _fingerprint(self) -> str:
        shape = [self.name, self.merge.value, str(self.bucket_ms), str(self.segment_ms)]
        shape += [f"{each.name}:{each.type}:{each.nullable}" for each in self.payload]
        shape += [each.fingerprint() for each in self.aggregates]
        return hashlib.blake2b("\0".join(shape).encode(), digest_size=16).hexdigest()

    def grown_from(self, shapes: Sequence[EarlierShape]) -> StoreSpec:
        """This spec, extended to read packs of these earlier shapes."""
        for shape in shapes:
            before = shape.spec
            same = (before.name, before.merge, before.bucket_ms, before.segment_ms) == (
                self.name, self.merge, self.bucket_ms, self.segment_ms
            )  # fmt: skip
            pairs = zip(before.rows, list(self.rows)[: len(before.rows)], strict=False)
            if (
                not same
                or len(before.rows) > len(self.rows)
                or not all(_grew_into(was, now) for was, now in pairs)
            ):
                raise InvalidError(
                    f"store {self.name}: an earlier shape may only lack columns at the end, or fields of structs; "
                    "its name, kind of merge "
                    "and widths are those of now"
                )
        grown = copy(self)
        object.__setattr__(grown, "earlier", tuple(shapes))
        return grown

    def reads(self, fingerprint: str) -> bool:
        """Whether a pack with this fingerprint has the current or an earlier shape of this store."""
        return fingerprint == self.fingerprint or self.shape_of(fingerprint) is not None

    def shape_of(self, fingerprint: str) -> EarlierShape | None:
        """The earlier shape with this fingerprint."""
        return next((each for each in self.earlier if each.spec.fingerprint == fingerprint), None)

    def fold(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        """Merge states, given column by column: one state for each of `count` groups, as `Aggregate.merge` does."""
        merged: list[pa.Array] = []
        at = 0
        for aggregate in self.aggregates:
            width = len(aggregate.state)
            merged += aggregate.merge(states[at : at + width], groups, count)
            at += width
        return merged

    def bucket_of(self, ts: int) -> int:
        """The start of the bucket of `ts`."""
        return ts // self.bucket_ms * self.bucket_ms

    def segment_of(self, ts: int) -> int:
        """The start of the time segment of `ts`."""
        return ts // self.segment_ms * self.segment_ms


def _grew_into(was: pa.Field, now: pa.Field) -> bool:
    """Whether a column's type is unchanged, or a struct with more fields."""
    if was == now:
        return True
    if was.name != now.name or not (pa.types.is_struct(was.type) and pa.types.is_struct(now.type)):
        return False
    fields = {now.type.field(place).name: now.type.field(place) for place in range(now.type.num_fields)}
    kept = [was.type.field(place) for place in range(was.type.num_fields)]
    return all(fields.get(each.name) == each for each in kept)
