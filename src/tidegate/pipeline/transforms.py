"""Stateless steps over whole batches: filter, project, change the key, look up columns of a table.

A step is a function of one row. If it fails on a batch, the failing rows are found by bisection and the batch
continues without them. A transient error (`errors.is_transient`) is no fault of a record: it is raised as
`UnavailableError` with the step and the records, and the round is repeated. `Timings` measures the parts of a round.

Thread rule: one thread for each chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import CorruptError, InvalidError, TidegateError, UnavailableError, is_transient
from tidegate.pipeline.expressions import Mapped, Projection, shown
from tidegate.pipeline.lookup import LookupStage
from tidegate.pipeline.messages import BadRecord
from tidegate.pipeline.topology import Filter, KeyBy, Lookup, Map, Select, Step, Validate
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.serdes.base import Serde
from tidegate.windows.events import EventBatch, RowChanges


class Timings:
    """Milliseconds by name; parts that run several times add up."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.ms: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = self._clock.monotonic_ms()
        try:
            yield
        finally:
            self.ms[name] = self.ms.get(name, 0) + self._clock.monotonic_ms() - began

    def take(self, other: Timings) -> None:
        """Add the measurements of another one."""
        for name, ms in other.ms.items():
            self.ms[name] = self.ms.get(name, 0) + ms


Stage: TypeAlias = Callable[[EventBatch], EventBatch]


@dataclass(frozen=True)
class Around:
    """What a stage may need from its process."""

    backend: StorageBackend
    clock: Clock


class Stateless:
    """A chain of stateless steps; `schema` has the columns after them.

    Rows that a step fails on are left out and added to `bad`. With `only_first`, only the first failing row of each
    partition is searched for, and later rows of its partition are left out as well. `topic` is the source of the
    rows.
    """

    def __init__(
        self, stages: Sequence[tuple[str, Stage]], schema: pa.Schema, topic: str, *, only_first: bool = True
    ) -> None:
        self._stages, self._schema, self._only_first = tuple(stages), schema, only_first
        self._topic = topic

    def __call__(self, events: EventBatch, bad: list[BadRecord]) -> EventBatch:
        if events.changes is not None and self._stages:
            return self._changed(events, events.changes, bad)
        return self._through(events, bad)

    def _through(self, events: EventBatch, bad: list[BadRecord]) -> EventBatch:
        for name, stage in self._stages:
            if not len(events):
                break
            try:
                events = stage(events)
            except Exception as error:  # noqa: BLE001 - the user's code: it may raise anything
                found = FailedStep(name, stage, self._topic, self._only_first).bad_records(events, error)
                bad += found.values()
                events = _without(events, found, and_following=self._only_first)
                if len(events):
                    events = stage(events)
        return events

    def _changed(self, events: EventBatch, changes: RowChanges, bad: list[BadRecord]) -> EventBatch:
        """Apply the steps to changes of a table's rows: a row that a step leaves out counts as deleted for later
        steps."""
        count, there = len(events), np.flatnonzero(changes.weight > 0)
        made = replace(events, changes=replace(changes, weight=np.arange(count, dtype=np.int64))).take(there)
        made = self._through(made, bad)
        places = np.empty(0, np.int64)
        if len(made) and made.changes is not None:
            places = made.changes.weight  # the input row of each remaining row
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
        """Set the commits of lookup tables to read from now on."""
        for _, stage in self._stages:
            if isinstance(stage, LookupStage) and stage.table in commits:
                stage.at(commits[stage.table])

    def close(self) -> None:
        """Close the lookup tables."""
        for _, stage in self._stages:
            if isinstance(stage, LookupStage):
                stage.close()


@dataclass(frozen=True)
class FailedStep:
    """A step that failed on some events; finds the records that it fails on. `name` names the step."""

    name: str
    stage: Callable[[EventBatch], Any]
    topic: str
    only_first: bool

    def bad_records(self, events: EventBatch, error: Exception) -> dict[int, BadRecord]:
        """Return the rows that the stage fails on by themselves, after it failed on all with `error`.

        With `only_first` the first of each partition. Empty if all of them pass now: a failure may be transient.
        Errors that no record causes are raised again.
        """
        self.require_records_fault(error, events)
        found: dict[int, BadRecord] = {}
        rows = np.arange(len(events))
        while len(rows):
            here = self.failing(events.take(rows), 0)
            found |= {int(rows[row]): each for row, each in here.items()}
            if not here or not self.only_first:
                break
            rows = rows[events.partition[rows] != next(iter(here.values())).partition]
        if found:
            return found
        try:
            self.stage(events)
            return {}
        except Exception as again:  # noqa: BLE001 - the user's code: it may raise anything
            self.require_records_fault(again, events)
        raise InvalidError(
            f"{_reason(self.name, error)}. It fails on {len(events):,} records at once "
            f"({places_of(self.topic, events)}), and on none of them alone: a step must answer for each row by itself, "
            "whatever rows come with it"
        ) from error

    def failing(self, events: EventBatch, start: int) -> dict[int, BadRecord]:
        """Return the rows that the step fails on, found by bisection; the first of `events` is row `start`."""
        try:
            self.stage(events)
        except Exception as error:  # noqa: BLE001 - the user's code: it may raise anything
            self.require_records_fault(error, events)
            if len(events) == 1:
                kind = "unreadable" if isinstance(error, CorruptError) else "failed"
                place = int(events.partition[0]), int(events.offset[0])
                at = int(events.stream_time[0])
                return {start: BadRecord(*place, _reason(self.name, error), kind, at)}
        else:
            return {}
        middle = len(events) // 2
        found = self.failing(events.slice(0, middle), start)
        if found and self.only_first:
            return found
        return found | self.failing(events.slice(middle, len(events)), start + middle)

    def require_records_fault(self, error: Exception, events: EventBatch) -> None:
        """Raise errors that leaving a record out does not solve."""
        raise_if_transient(places_of(self.topic, events), self.name, error)
        if (
            isinstance(error, TidegateError)
            and not isinstance(error, InvalidError)
            and not (isinstance(error, CorruptError) and error.offset is not None)
        ):
            raise error


def raise_if_transient(where: str, what: str, error: BaseException) -> None:
    """Raise a transient error of a user's function as `UnavailableError`: the round is repeated."""
    if isinstance(error, Exception) and is_transient(error):
        raise UnavailableError(
            f"{where}: {_reason(what, error)}. No record is to blame for that, and none was set aside: run the app "
            "again when what the step needs is there"
        ) from error


def places_of(topic: str, events: EventBatch) -> str:
    """Describe the origin of events: a few partitions, each with its first and last offset."""
    said = []
    numbers = np.unique(events.partition)
    for number in numbers[:3].tolist():
        offsets = events.offset[events.partition == number]
        first, last = int(offsets.min()), int(offsets.max())
        said.append(f"{topic}-{number}, offset" + (f" {first}" if first == last else f"s {first} to {last}"))
    more = f"; and {len(numbers) - 3} more partitions" if len(numbers) > 3 else ""
    return "; ".join(said) + more


def _reason(name: str, error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, TidegateError) and lines:
        said = lines[0].removeprefix("row 0: ")  # of the one row that was tried
        return said if said.startswith(name.split()[0]) else f"{name}: {said}"
    return f"{name} failed with {type(error).__name__}" + (f": {lines[0]}" if lines else "")


def _without(events: EventBatch, bad: Mapping[int, BadRecord], *, and_following: bool) -> EventBatch:
    is_left = np.ones(len(events), np.bool_)
    is_left[list(bad)] = False
    if and_following:
        for row, each in bad.items():
            is_left[row:] &= events.partition[row:] != each.partition
    return events.take(is_left)


def step_name(step: Step) -> str:
    """The name of a step in messages."""
    match step:
        case Filter():
            return f"filter {shown(step.condition)}"
        case Map():
            return f"map {shown(step.function)}"
        case KeyBy():
            return f"key_by {shown(step.expression)}"
        case Lookup():
            return f"lookup {step.table}"
    return type(step).__name__.lower()


def can_fail(step: Step, schema: pa.Schema) -> bool:
    """Whether a step can fail on a record; a step that only names columns cannot."""
    if isinstance(step, Select):
        said = [expression for _, expression in step.columns]
    elif isinstance(step, Filter):
        said = [step.condition]
    else:
        return True
    return not all(isinstance(each, str) and each in schema.names for each in said)


def stage_of(step: Step, schema: pa.Schema, key: Serde[Any], around: Around) -> Stage | None:
    """Return the stage of a step for events with columns `schema` and keys that `key` reads; None: no stage here."""
    match step:
        case Validate():
            return None  # done where records are read
        case Filter():
            return partial(_filter, Projection([("condition", step.condition)], schema, key, what="filter"))
        case Select():
            return partial(_values, Projection(step.columns, schema, key, what="select"))
        case Map():
            return partial(_values, Mapped(step.function, step.schema, schema, key, what="map"))
        case KeyBy():
            expression = Projection([("key", step.expression)], schema, key, what="key_by")
            return partial(_key_by, expression, step.serde)
        case Lookup():
            return LookupStage(step, schema, key, around.backend, around.clock)
    raise InvalidError(f"a step {type(step).__name__} cannot be run here")


def _filter(condition: Projection, events: EventBatch) -> EventBatch:
    (mask,) = condition.arrays(events)
    if mask.null_count:
        mask = mask.fill_null(False)
    return events.take(mask.to_numpy(zero_copy_only=False))


def _values(columns: Projection | Mapped, events: EventBatch) -> EventBatch:
    return events.with_values(columns.batch(events))


def _key_by(expression: Projection, serde: Serde[Any], events: EventBatch) -> EventBatch:
    (column,) = expression.arrays(events)
    return replace(events, key=serde.encode_column(column))
