"""A stream meets a table: columns of the row that a table of plain keys has for each event.

A round looks into one commit of the table, which its plan names, so that a round that is repeated finds what it
found before. The table is built by another process or app, in the same state; it must keep that commit while the
round lasts (it keeps its last ten).

Vectorised: every different key of a batch is asked for once, in one plan.

Thread rule: one stage belongs to its task's thread.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import Clock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.pipeline.definition.expressions import Projection
from tidegate.pipeline.definition.inferring import key_serde_for
from tidegate.pipeline.definition.steps import Lookup
from tidegate.storage.backends.port import StorageBackend
from tidegate.tables.building.commits import CommitList, load_commits
from tidegate.tables.building.consumed import Consumed
from tidegate.tables.building.shape import TableRules
from tidegate.tables.building.source import Snapshot
from tidegate.tables.queries.reading import rows_of_keys
from tidegate.tables.serdes.plain import Bytes, Serde
from tidegate.windows.events import EventBatch


class LookupStage:
    """Adds a table's columns to events."""

    def __init__(
        self, step: Lookup, schema: pa.Schema, key: Serde[Any], backend: StorageBackend, clock: Clock
    ) -> None:
        self.table = step.table
        self._step, self._backend, self._clock = step, backend, clock
        self._expression: Projection | None = None
        if step.key is not None:
            self._expression = Projection([("key", step.key)], schema, key, what="lookup")
        self._columns = lookup_columns(step)
        self._schema = pa.schema([*schema, *self._columns])
        self._snapshot: Snapshot | None = None

    def at(self, commit: int) -> None:
        """Look into this commit of the table from now on."""
        if self._snapshot is not None and self._snapshot.commit.number == commit:
            return
        known = table_commits(self._backend, self.table)
        found = next((each for each in known.commits if each.number == commit), None)
        if found is None:
            raise UnavailableError(
                f"commit {commit} of table {self.table}, which this round looks into, is not kept any more; there are "
                f"{known.commits[0].number} to {known.commits[-1].number}. The app goes on when its round is planned "
                "anew: `tidegate app replay` from the round before"
            )
        if self._snapshot is not None:
            self._snapshot.show(found)
            return
        if known.shape.kind != "key":
            raise InvalidError(
                f"table {self.table} holds windows; a lookup needs a table of plain keys, like app.table(topic)"
            )
        rules = TableRules(known.shape, Bytes(), self._step.value, Consumed(), "fail")
        self._snapshot = Snapshot(self._backend, rules, found, clock=self._clock)

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
        if self._expression is None:
            return events.key
        (column,) = self._expression.arrays(events)
        return key_serde_for(column.type, "lookup").encode_column(column)


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
