"""A task's part of a flow: the steps from the first that keeps state on, as operators on the worker's storage.

A flow is cut once. Stateless steps in front of the cut run where records are read; the steps behind it run in the
task that owns the keys. In a re-keyed flow the cut lies right after the `KeyBy`.

Operators use the stream times that events carry (`source`), whether or not the events were shuffled.

Thread rule: one task, one thread at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.dropped_records import warn_dropped
from tidegate.errors import InvalidError, TidegateError
from tidegate.pipeline.analyzer import ValueFormat
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.messages import BadRecord
from tidegate.pipeline.progress import NULL, SEEN
from tidegate.pipeline.sink import writing
from tidegate.pipeline.topology import Aggregate, Dedupe, Lookup, Step
from tidegate.pipeline.transforms import (
    Around,
    FailedStep,
    Stage,
    Stateless,
    Timings,
    can_fail,
    places_of,
    raise_if_transient,
    stage_of,
    step_name,
)
from tidegate.randomness import Randomness
from tidegate.storage import WorkerStorageRuntime
from tidegate.storage.runs.aggregates import Aggregate as StorageAggregate
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import NO_TIME, EventBatch
from tidegate.windows.kinds import LATEST, Hopping, Session, Sliding, Unlimited
from tidegate.windows.operators.base import Moment, Places, Rows, WindowRows
from tidegate.windows.operators.dedupe import DedupeOperator
from tidegate.windows.operators.layout import window_layout
from tidegate.windows.operators.retractions import Retractions
from tidegate.windows.operators.session import SessionOperator
from tidegate.windows.operators.sliding import SlidingOperator
from tidegate.windows.operators.windowed_operator import Emit
from tidegate.windows.operators.windows import WindowOperator

WHY: Final = {
    "late_records": "is late: its windows were final",
    "partly_late_records": "is late for some of its windows, which were final",
    "late": "is late: too old for drop_duplicates",
    "future": "lies too far ahead of the time",
    "no_key": "has no key and goes into no window",
    "negative_time": "has a time before 1970 and goes into no window",
    "before_start": "lies before the start of the window",
}
"""What warnings say about records, by the operator's counter."""
KEPT_LATE: Final = frozenset({"late_records", "partly_late_records", "late", "future"})
WindowOperators: TypeAlias = WindowOperator | SessionOperator | SlidingOperator
Link: TypeAlias = "DedupeOperator | WindowOperators | Stateless | Retractions"


def cut_of(flow: Flow) -> int:
    """Return how many of the flow's steps run where records are read."""
    if flow.rekey_at is not None:
        return flow.rekey_at + 1
    for place, step in enumerate(flow.steps):
        if isinstance(step, Dedupe | Aggregate | Lookup):
            return place
    return len(flow.steps)


def front_of(flow: Flow, around: Around) -> Stateless:
    """Return the steps in front of the cut."""
    return _stateless(flow, 0, cut_of(flow), around)


def checks_of(flow: Flow, around: Around) -> Stateless | None:
    """Return the checks to run where records are read, if tasks may process the records many rounds later; None: none.

    Events that were held back are behind their partition's position, so it cannot stop in front of them any more.
    Therefore a step behind the cut that fails on a record has to be found here. Behind a lookup this is not
    possible.
    """
    if not flow.is_ordered:
        return None
    stages: list[tuple[str, Stage]] = []
    place, last = cut_of(flow), 0
    while place < len(flow.steps) and not isinstance(flow.steps[place], Lookup):
        step, schema = flow.steps[place], flow.schemas[place]
        if isinstance(step, Aggregate):
            stages += _reducers(flow, place)
            last = len(stages)
        elif not isinstance(step, Dedupe):
            stage = stage_of(step, schema, flow.key_serdes[place], around)
            stages += [] if stage is None else [(step_name(step), stage)]
            last = len(stages) if can_fail(step, schema) else last
        place += 1
    if place == len(flow.steps) and flow.window is None:
        for sink in flow.topics:
            values = ValueFormat.of(sink, flow.result_schema, None)
            columns = values.columns if values.serde is not None else _not_always_json(flow.result_schema)
            stages += [(f"to {sink.topic}", writing(values, columns))] if columns else []
            last = len(stages) if columns else last
    if not last:
        return None
    return Stateless(
        stages[:last], flow.schemas[place], flow.source.topic, only_first=flow.source.on_error == "fail"
    )


def _not_always_json(schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns with values that JSON may be unable to encode: NaN, infinities, years beyond 9999."""
    kinds = (pa.types.is_floating, pa.types.is_nested, pa.types.is_temporal)
    return tuple(each.name for each in schema if any(is_kind(each.type) for is_kind in kinds))


def _reducers(flow: Flow, place: int) -> list[tuple[str, Stage]]:
    """Run the user's own aggregates on events as a check; the result is discarded."""
    step = flow.steps[place]
    if not isinstance(step, Aggregate) or flow.source.has_updates:
        return []
    wanted = resolve(step.aggregates, flow.schemas[place])

    def tried(aggregate: StorageAggregate) -> Stage:
        def run(events: EventBatch) -> EventBatch:
            inputs = wanted.inputs(events)
            rows = pa.RecordBatch.from_arrays(list(inputs.values()), names=list(inputs))
            aggregate.partial(rows, np.zeros(len(events), np.int32), 1)
            return events

        return run

    return [
        (f"aggregate {each.name}", tried(aggregate))
        for each, aggregate in zip(step.aggregates, wanted.storage, strict=True)
        if each.kind == "reduce"
    ]


def keyless(app: str, flow: Flow, partitions: int) -> str:
    """Return why the flow cannot take records without a key; empty where it can.

    Copies of a record without a key may be in any partition of the source, and a co-partitioned task sees one.
    """
    step = next((each for each in flow.steps if isinstance(each, Dedupe)), None)
    if step is None or flow.rekey_at is not None or partitions == 1:
        return ""
    ids = ", ".join(step.rule.columns)
    return (
        f"the record has no key. drop_duplicates finds copies by key and {ids} inside a partition, and copies of a "
        f"record without a key may be in any of the {partitions} partitions of {flow.source.topic}. Say .key_by"
        f"({step.rule.columns[0]!r}) before .drop_duplicates, or leave such records out with .filter('key IS NOT NULL')"
        f", and start over with `tidegate app reset {app}`"
    )


class TaskChain:
    """The operators of one task, attached to its storage."""

    def __init__(
        self,
        runtime: WorkerStorageRuntime,
        task: str,
        flow: Flow,
        partitions: Sequence[int],
        around: Around,
        *,
        randomness: Randomness,
        told_as: str | None = None,
    ) -> None:
        """`told_as` names the task in warnings about records that it drops; None: no warnings."""
        self._flow = flow
        self._told_as = told_as
        self.links: list[Link] = []
        self.bad: list[BadRecord] = []
        """Records that a step failed on; what the chain keeps is then not to be kept."""
        self._names: list[str] = []
        self._reducers = [each for place in range(len(flow.steps)) for each in _reducers(flow, place)]
        self._needed = {name: needed_columns(flow.steps[place]) for place, name in flow.operators.items()}
        place = cut_of(flow)
        while place < len(flow.steps):
            step = flow.steps[place]
            if isinstance(step, Dedupe | Aggregate):
                name = flow.operators[place]
                if isinstance(step, Aggregate) and flow.source.has_updates:
                    layout = step.layout or window_layout(step.kind)
                    self._add(Retractions(runtime, task, name, flow.schemas[place], layout), "changes")
                link = self._operator(runtime, task, name, place, partitions, randomness)
                self._add(link, name)
                place += 1
                continue
            stop = place
            while stop < len(flow.steps) and not isinstance(flow.steps[stop], Dedupe | Aggregate):
                stop += 1
            self._add(_stateless(flow, place, stop, around), "steps")
            place = stop

    @property
    def operators(self) -> list[DedupeOperator | WindowOperators]:
        """The operators that keep state, in order."""
        return [link for link in self.links if not isinstance(link, Stateless | Retractions)]

    @property
    def settled(self) -> int | None:
        """Windows that end at or before this get no update any more; None where windows are not sent on update."""
        window = self._flow.window
        if window is None or window.emit is not Emit.UPDATE or isinstance(window.kind, Unlimited):
            return None
        floor = self.operators[-1].clocks.floor
        # after the end of the input nothing is read, so the time is not needed
        if floor in (NO_TIME, LATEST):
            return NO_TIME
        # sliding windows include their end
        return max(NO_TIME, window.kind.close_time(floor) - isinstance(window.kind, Sliding))

    def look_up(self, commits: Mapping[str, int]) -> None:
        """Set the commits of lookup tables to read from now on."""
        for link in self.links:
            if isinstance(link, Stateless):
                link.look_up(commits)

    def close(self) -> None:
        """Close what is open; state belongs to storage."""
        for link in self.links:
            if isinstance(link, Stateless):
                link.close()

    def process(
        self, events: EventBatch, moment: Moment, counters: Counter[str], timings: Timings
    ) -> Rows | None:
        """Take events through all steps and return the results; None: nothing."""
        rows: Rows = events
        for link, name in zip(self.links, self._names, strict=True):
            if not isinstance(rows, EventBatch):
                raise InvalidError("windows are the last step of a flow")
            if not len(rows):
                return None
            with timings(name):
                if isinstance(link, Stateless):
                    rows = link(rows, self.bad)
                    continue
                if isinstance(link, Retractions):
                    rows = link.process(rows)
                    continue
                _count_nulls(counters, name, self._needed[name], rows)
                try:
                    output = link.process(rows, moment)
                except Exception as error:  # noqa: BLE001 - a reducer is the user's code: it may raise anything
                    self._find_bad(rows, error)
                    return None
            rows = output.rows
            _count(counters, name, output.counters)
            if output.places and self._told_as is not None:
                self._warn(self._told_as, link, output.places)
        return rows if len(rows) else None

    def _warn(
        self, who: str, operator: DedupeOperator | WindowOperators, places: Mapping[str, Places]
    ) -> None:
        """Log the records that an operator left out of some or all windows; its counters include them already."""
        is_kept = operator.late_table is not None
        for name, (partitions, offsets) in places.items():
            before = operator.counters.get(name, 0) - len(offsets)
            why = WHY[name] + ("; it is in the late table" if is_kept and name in KEPT_LATE else "")
            warn_dropped(who, why, self._flow.source.topic, partitions, offsets, before=before)

    def _find_bad(self, events: EventBatch, error: Exception) -> None:
        """Find the records that one of the user's own aggregates failed on; raise the error if there are none."""
        names = ", ".join(name for name, _ in self._reducers)
        if not isinstance(error, TidegateError):
            where = places_of(self._flow.source.topic, events)
            raise_if_transient(where, names or "a function of the flow", error)
        for name, stage in self._reducers:
            try:
                stage(events)
            except Exception as failed:  # noqa: BLE001 - the user's code: it may raise anything
                step = FailedStep(name, stage, self._flow.source.topic, self._flow.source.on_error == "fail")
                self.bad += step.bad_records(events, failed).values()
        if self.bad:
            return
        if self._reducers and not isinstance(error, TidegateError):
            raise InvalidError(
                f"{names}: a function of it failed with {type(error).__name__}: {error}. It does not fail on the "
                "columns of any record alone, so look at how it merges states"
            ) from error
        raise error

    def tick(self, moment: Moment, counters: Counter[str], timings: Timings) -> WindowRows | None:
        """Advance the time of every operator and return the windows that this made final."""
        closed: WindowRows | None = None
        for link, name in zip(self.links, self._names, strict=True):
            if isinstance(link, Stateless | Retractions):
                continue
            with timings(name):
                output = link.tick(moment)
            _count(counters, name, output.counters)
            if isinstance(output.rows, WindowRows) and len(output.rows):
                closed = output.rows
        self._forget_rows()
        return closed

    def _forget_rows(self) -> None:
        """Drop stored rows of tables whose changes no window accepts any more."""
        window = self._flow.window
        if window is None or not isinstance(window.kind, Hopping):
            return
        floor = min((operator.clocks.floor for operator in self.operators), default=NO_TIME)
        if floor in (NO_TIME, LATEST):
            return
        for link in self.links:
            if isinstance(link, Retractions):
                link.drop_before(floor - window.kind.grace_ms - window.kind.size_ms)

    def _add(self, link: Link, name: str) -> None:
        self.links.append(link)
        self._names.append(name)

    def _operator(
        self,
        runtime: WorkerStorageRuntime,
        task: str,
        name: str,
        place: int,
        partitions: Sequence[int],
        randomness: Randomness,
    ) -> DedupeOperator | WindowOperators:
        flow, step = self._flow, self._flow.steps[place]
        schema = flow.schemas[place]
        window = flow.window
        if isinstance(step, Dedupe):
            guard = None if window is None or flow.source.windows is not None else window.future
            return DedupeOperator(
                runtime, task, name, step.rule, schema,
                partitions=partitions, late_table=step.late, idle_close=_idle(flow, window), stamped=True,
                ahead_ms=None if guard is None else guard.ahead_ms, randomness=randomness,
                bucket_ms=None if step.layout is None else step.layout.bucket_ms,
            )  # fmt: skip
        if not isinstance(step, Aggregate):
            raise InvalidError(f"a step {type(step).__name__} keeps no state")
        wanted = resolve(step.aggregates, schema, retractable=flow.source.has_updates)
        settings = {
            "emit": step.emit,
            "partitions": partitions,
            "values": schema,
            "late": step.late,
            # In a changelog the source checks the records' own times: open windows end in the future.
            "future": step.future if flow.source.windows is None else None,
            "idle_close": _idle(flow, step),
            "stamped": True,
            "layout": step.layout,
            "compat": step.compat,
            "heard": bool(flow.topics),  # a table reads its windows from state
        }
        if isinstance(step.kind, Session):
            return SessionOperator(runtime, task, name, step.kind, wanted, **settings)
        if isinstance(step.kind, Sliding):
            return SlidingOperator(runtime, task, name, step.kind, wanted, **settings)
        return WindowOperator(runtime, task, name, step.kind, wanted, **settings)


def _idle(flow: Flow, step: Aggregate | None) -> int | None:
    """The time for which a silent source is waited for; in a re-keyed flow only the coordinator can detect silence."""
    return None if step is None or flow.rekey_at is not None else step.idle_close_ms


def _stateless(flow: Flow, start: int, stop: int, around: Around) -> Stateless:
    stages: list[tuple[str, Stage]] = []
    for place in range(start, stop):
        stage = stage_of(flow.steps[place], flow.schemas[place], flow.key_serdes[place], around)
        if stage is not None:
            stages.append((step_name(flow.steps[place]), stage))
    return Stateless(stages, flow.schemas[stop], flow.source.topic, only_first=flow.source.on_error == "fail")


def needed_columns(step: Step) -> tuple[str, ...]:
    """Return the columns that a step's state is computed from."""
    if isinstance(step, Dedupe):
        return step.rule.columns
    if isinstance(step, Aggregate):
        return tuple(dict.fromkeys(name for each in step.aggregates for name in each.columns))
    return ()


def _count_nulls(counters: Counter[str], name: str, needed: Sequence[str], events: EventBatch) -> None:
    """Count the events, and those of them that lack a column that state is computed from."""
    if not needed:
        return
    counters[f"{name}.{SEEN}"] += len(events)
    for column in needed:
        nulls = events.values.column(column).null_count
        if nulls:
            counters[f"{name}.{NULL}{column}"] += nulls


def _count(counters: Counter[str], name: str, found: Mapping[str, int]) -> None:
    for what, number in found.items():
        counters[f"{name}.{what}"] += number
