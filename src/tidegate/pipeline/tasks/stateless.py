"""Steps that keep nothing: rows left out, other columns, another key, columns of a table; run over whole batches.

Thread rule: one chain, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import InvalidError
from tidegate.pipeline.definition.expressions import Mapped, Projection
from tidegate.pipeline.definition.steps import Filter, KeyBy, Lookup, Map, Select, Step, Validate
from tidegate.pipeline.tasks.lookups import LookupStage
from tidegate.storage.backends.port import StorageBackend
from tidegate.tables.serdes.plain import Serde
from tidegate.windows.events import EventBatch

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
    """Several such steps in a row."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = tuple(stages)

    def __call__(self, events: EventBatch) -> EventBatch:
        for stage in self._stages:
            if not len(events):
                break
            events = stage(events)
        return events

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
