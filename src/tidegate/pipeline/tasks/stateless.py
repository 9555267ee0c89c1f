"""Steps that keep nothing: rows left out, other columns, another key, columns of a table; run over whole batches.

Thread rule: one chain, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import InvalidError
from tidegate.pipeline.definition.expressions import Mapped, Projection
from tidegate.pipeline.definition.steps import Filter, KeyBy, Lookup, Map, Select, Step, Validate
from tidegate.pipeline.tasks.lookups import LookupStage
from tidegate.storage.backends.port import StorageBackend
from tidegate.tables.serdes.plain import Serde
from tidegate.windows.events import EventBatch, RowChanges

Stage: TypeAlias = Callable[[EventBatch], EventBatch]


@runtime_checkable
class Looking(Protocol):
    """A stage that looks into a table's commit."""

    table: str

    def at(self, commit: int) -> None: ...

    def __call__(self, events: EventBatch) -> EventBatch: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Around:
    """What a stage may need of the process it runs in."""

    backend: StorageBackend
    clock: Clock


class Stateless:
    """Several such steps in a row; `schema` are the columns behind them."""

    def __init__(self, stages: Sequence[Stage], schema: pa.Schema) -> None:
        self._stages, self._schema = tuple(stages), schema

    def __call__(self, events: EventBatch) -> EventBatch:
        if events.changes is not None and self._stages:
            return self._changed(events, events.changes)
        for stage in self._stages:
            if not len(events):
                break
            events = stage(events)
        return events

    def _changed(self, events: EventBatch, changes: RowChanges) -> EventBatch:
        """Changes of a table's rows: a row that a step leaves out is gone for the steps behind it."""
        count, there = len(events), np.flatnonzero(changes.weight > 0)
        made = replace(events, changes=replace(changes, weight=np.arange(count, dtype=np.int64))).take(there)
        for stage in self._stages:
            if not len(made):
                break
            made = stage(made)
        places = np.empty(0, np.int64)
        if len(made) and made.changes is not None:
            places = made.changes.weight  # where each of those that are left stood
        if len(places) == count:
            return replace(made, changes=changes)
        indices = np.full(count, -1, np.int64)
        indices[places] = np.arange(len(places))
        is_left = indices >= 0
        chosen = pa.array(indices, mask=~is_left)
        if len(made):
            key, columns = made.key.take(chosen), [each.take(chosen) for each in made.values.columns]
        else:
            key, columns = pa.nulls(count, pa.binary()), [pa.nulls(count, each.type) for each in self._schema]
        return replace(
            events,
            key=key,
            values=pa.RecordBatch.from_arrays(columns, schema=self._schema),
            changes=replace(changes, weight=is_left.astype(np.int64)),
        )

    def look_up(self, commits: Mapping[str, int]) -> None:
        """Of tables that are looked into, the commits to look into from now on."""
        for stage in self._stages:
            if isinstance(stage, Looking) and stage.table in commits:
                stage.at(commits[stage.table])

    def close(self) -> None:
        """Let go of tables that were looked into."""
        for stage in self._stages:
            if isinstance(stage, Looking):
                stage.close()


def stage_of(step: Step, schema: pa.Schema, key: Serde[Any], around: Around) -> Stage | None:
    """What a step does to events with columns `schema` and keys that `key` reads; None: nothing here."""
    if isinstance(step, Validate):
        return None  # done where records are read
    if isinstance(step, Filter):
        return _filter(step, schema, key)
    if isinstance(step, Select):
        return _select(step, schema, key)
    if isinstance(step, Map):
        return _map(step, schema, key)
    if isinstance(step, KeyBy):
        return _key_by(step, schema, key)
    if isinstance(step, Lookup):
        return LookupStage(step, schema, key, around.backend, around.clock)
    raise InvalidError(f"a step {type(step).__name__} cannot be run here")


def _filter(step: Filter, schema: pa.Schema, key: Serde[Any]) -> Stage:
    condition = Projection([("condition", step.condition)], schema, key, what="filter")

    def run(events: EventBatch) -> EventBatch:
        (mask,) = condition.arrays(events)
        if mask.null_count:
            mask = mask.fill_null(False)
        return events.take(mask.to_numpy(zero_copy_only=False))

    return run


def _select(step: Select, schema: pa.Schema, key: Serde[Any]) -> Stage:
    columns = Projection(step.columns, schema, key, what="select")

    def run(events: EventBatch) -> EventBatch:
        return events.with_values(columns.batch(events))

    return run


def _map(step: Map, schema: pa.Schema, key: Serde[Any]) -> Stage:
    mapped = Mapped(step.function, step.schema, schema, key, what="map")

    def run(events: EventBatch) -> EventBatch:
        return events.with_values(mapped.batch(events))

    return run


def _key_by(step: KeyBy, schema: pa.Schema, key: Serde[Any]) -> Stage:
    expression = Projection([("key", step.expression)], schema, key, what="key_by")

    def run(events: EventBatch) -> EventBatch:
        (column,) = expression.arrays(events)
        return replace(events, key=step.serde.encode_column(column))

    return run
