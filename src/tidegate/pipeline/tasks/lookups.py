"""A stream meets a table: columns of the row that a table of plain keys has for each event.

A round looks into one commit of the table, which its plan names, so that a round that is repeated finds what it
found before. The table is built by another process or app, in the same state; it must keep that commit while the
round lasts (it keeps its last ten).

Keys are written as the table's serde writes them: text for text or bytes, whole numbers of any width for `Int` and
`Long`, numbers that a double holds for `Double`. A number that the table's keys cannot hold has no row. Types that
cannot meet are refused (`require_key`).

Vectorised: every different key of a batch is asked for once, in one plan.

Thread rule: one stage belongs to its task's thread.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import Clock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.pipeline.definition.expressions import Projection, shown
from tidegate.pipeline.definition.inferring import key_serde_for
from tidegate.pipeline.definition.steps import Lookup
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.commits import CommitList, load_commits
from tidegate.tables.options import Consumed, TableRules
from tidegate.tables.queries import rows_of_keys
from tidegate.tables.serdes.base import Bytes, Serde
from tidegate.tables.serdes.json import serde_from
from tidegate.tables.snapshot import StoredSnapshot, stored_snapshot, task_of
from tidegate.windows.events import EventBatch

_PLAIN_KEYS: Final = frozenset({"bytes", "string", "int", "long", "double"})


class LookupStage:
    """Adds a table's columns to events."""

    def __init__(
        self, step: Lookup, schema: pa.Schema, key: Serde[Any], backend: StorageBackend, clock: Clock
    ) -> None:
        self.table = step.table
        self._step, self._backend, self._clock = step, backend, clock
        self._serde, self._key_kind = key, lookup_key(step, schema, key)
        self._stored: Serde[Any] | None = None
        self._expression: Projection | None = None
        if step.key is not None:
            self._expression = Projection([("key", step.key)], schema, key, what="lookup")
        self._columns = lookup_columns(step)
        self._schema = pa.schema([*schema, *self._columns])
        self._snapshot: StoredSnapshot | None = None

    def at(self, commit: int) -> None:
        """Look into this commit of the table from now on."""
        if self._snapshot is not None and self._snapshot.commit.number == commit:
            return
        known = table_commits(self._backend, self.table)
        found = next((each for each in known.commits if each.number == commit), None)
        if found is None:
            raise UnavailableError(
                f"commit {commit} of table {self.table}, which this round looks into, is not kept any more; there are "
                f"{known.commits[0].number} to {known.commits[-1].number}. Start the app again: it plans the round anew"
            )
        if self._snapshot is not None:
            self._snapshot.show(found, {task_of(known.shape): found.token})
            return
        if known.shape.kind != "key":
            raise InvalidError(
                f"table {self.table} holds windows; a lookup needs a table of plain keys, like app.table(topic)"
            )
        self._stored = require_key(self._step, self._key_kind, self._serde, known.shape.key_serde)
        rules = TableRules(known.shape, Bytes(), self._step.value, Consumed(), "fail")
        self._snapshot = stored_snapshot(self._backend, rules, found, clock=self._clock)

    def __call__(self, events: EventBatch) -> EventBatch:
        if self._snapshot is None:
            raise InvalidError(f"a round that looks into table {self.table} names no commit of it")
        keys = self._keys(events).dictionary_encode()
        found = pa.Table.from_batches(
            rows_of_keys(self._snapshot.source, keys.dictionary, 0, 0) or [_NO_ROWS]
        )
        place = pc.take(pc.index_in(keys.dictionary, found["key"].combine_chunks()), keys.indices)
        if self._step.required:
            kept = place.is_valid().to_numpy(zero_copy_only=False)
            events, place = events.take(kept), place.filter(pa.array(kept))
        decoded = self._step.value.decode_column(_one(found["value"])).require_good()
        columns = [*events.values.columns]
        for (wanted, _), field in zip(self._step.columns, self._columns, strict=True):
            column = pc.struct_field(decoded, wanted) if pa.types.is_struct(decoded.type) else decoded
            columns.append(column.take(place).cast(field.type))
        return events.with_values(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()

    def _keys(self, events: EventBatch) -> pa.Array:
        if self._expression is not None:
            (column,) = self._expression.arrays(events)
            return stored_keys(column, self._stored or key_serde_for(column.type, "lookup"))
        if self._stored is None:
            return events.key
        return stored_keys(self._serde.decode_column(events.key).require_good(), self._stored)


def lookup_key(step: Lookup, schema: pa.Schema, key: Serde[Any]) -> pa.DataType:
    """The type of what is looked up by; `InvalidError` where keys of it have no bytes of their own."""
    if step.key is None:
        return key.arrow_type
    kind = Projection([("key", step.key)], schema, key, what="lookup").schema.field("key").type
    key_serde_for(kind, f"lookup in {step.table}: key")
    return kind


def require_key(step: Lookup, kind: pa.DataType, key: Serde[Any], stored: str) -> Serde[Any] | None:
    """How keys of this type are written to find rows of the table; None: as the stream's own bytes are.

    `stored` says the table's key serde. `InvalidError` where keys of the two types are never the same.
    """
    there = serde_from(stored)
    if step.key is None and (stored == repr(key) or isinstance(key, Bytes) or isinstance(there, Bytes)):
        return None
    if there is not None and _meets(kind, there.arrow_type) and there.name in _PLAIN_KEYS:
        return there
    by = "the stream's key" if step.key is None else f"key {shown(step.key)}"
    raise InvalidError(
        f"lookup in {step.table}: {by} is {kind}, and the table has keys of {stored}, so no row would ever be found. "
        f'Cast it, like lookup({step.table!r}, …, key="CAST(… AS {_sql_type(there)})"), or build the table with the '
        "key serde that its topic has"
    )


def stored_keys(column: pa.Array, serde: Serde[Any]) -> pa.BinaryArray:
    """Keys as the table has them, null where the table's type cannot hold one: there is no such row."""
    wanted = serde.arrow_type
    if pa.types.is_integer(column.type) and pa.types.is_integer(wanted):
        here, there = np.iinfo(column.type.to_pandas_dtype()), np.iinfo(wanted.to_pandas_dtype())
        if here.max > there.max or here.min < there.min:
            fits = pc.and_(
                pc.less_equal(column, pa.scalar(min(here.max, there.max), column.type)),
                pc.greater_equal(column, pa.scalar(max(here.min, there.min), column.type)),
            )
            column = pc.if_else(fits, column, pa.scalar(None, column.type))
        return serde.encode_column(column.cast(wanted))
    if pa.types.is_floating(wanted):
        return serde.encode_column(column.cast(wanted))
    return column.cast(pa.string()).cast(pa.binary()) if _is_text(column.type) else column.cast(pa.binary())


def _meets(kind: pa.DataType, there: pa.DataType) -> bool:
    """Whether a value of one type can be the same as one of the other, without loss."""
    if _is_text(there) or _is_bytes(there):
        return _is_text(kind) or _is_bytes(kind)
    if pa.types.is_integer(there):
        return bool(pa.types.is_integer(kind))
    if pa.types.is_integer(kind):  # a double holds whole numbers of up to 53 bits
        return bool(kind.bit_width <= 32)
    return bool(pa.types.is_floating(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _sql_type(serde: Serde[Any] | None) -> str:
    names = {"int": "INTEGER", "long": "BIGINT", "double": "DOUBLE", "bytes": "BLOB"}
    return names.get("" if serde is None else serde.name, "VARCHAR")


def lookup_columns(step: Lookup) -> list[pa.Field]:
    """The columns a lookup adds, as they turn out: null where the table has no row."""
    kind = step.value.arrow_type
    if not pa.types.is_struct(kind):
        return [pa.field(name, kind) for _, name in step.columns]
    return [pa.field(name, kind.field(wanted).type) for wanted, name in step.columns]


def table_commits(backend: StorageBackend, table: str) -> CommitList:
    """The commits there are of a table; `UnavailableError` before the first."""
    found = load_commits(backend, table)
    if found is None or not found[0].commits:
        raise UnavailableError(
            f"there is no commit of table {table} to look into yet; build it first, in the state of this app: "
            f"app.table({table!r}, …)"
        )
    return found[0]


def newest_commits(backend: StorageBackend, tables: list[str]) -> dict[str, int]:
    """What a plan names for a round that looks into these tables."""
    return {table: table_commits(backend, table).commits[-1].number for table in tables}


_NO_ROWS = pa.record_batch({"key": pa.array([], pa.binary()), "value": pa.array([], pa.binary())})


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
