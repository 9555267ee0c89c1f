"""What a window keeps: the user's aggregates, and notes of the records that made them.

Columns of the user and of storage never meet: a user's column `x` comes in as `value.x` and the state of the
user's aggregate `a` is kept as `user.a`, so that `key`, `ts` or `count` are names like any other. Aggregates that
order records (first, last) find `event_ts`, `partition` and `offset` beside the user's columns; a user's column of
one of these names is then hidden from them.

Notes are kept of every window: how many records, their latest event time (the timestamp of a result), their lowest
and highest offset.

Thread rule: values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from tidegate.durations import format_moment
from tidegate.errors import InvalidError, TidegateError, is_transient
from tidegate.kernels.windows import note_in_order, note_records, rise_by_one
from tidegate.storage.runs.aggregates import Aggregate
from tidegate.storage.runs.assembling import int64_column, words
from tidegate.windows.aggregates.retractable import WEIGHT
from tidegate.windows.events import NO_TIME, EventBatch, Int64s, weights
from tidegate.windows.keys.binary_columns import Int32s

logger = logging.getLogger(__name__)
POSITION = ("event_ts", "partition", "offset")
_VALUE, _USER = "value.", "user."
_NO_NUMBERS = np.empty(0, np.int64)
_HIGHEST = np.iinfo(np.int64).max
NOTES = ("notes.count", "notes.max_ts", "notes.min_offset", "notes.max_offset")


@dataclass(frozen=True, slots=True)
class Notes:
    """Count, latest event time, lowest and highest offset of the records of a window.

    Of changes of a table's rows: how many rows are left, the latest timestamp and the offsets of all that was written.
    """

    retracts: bool = False
    name: str = "notes"

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("event_ts", "offset", "weight") if self.retracts else ("event_ts", "offset")

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return tuple(pa.field(name, pa.int64(), nullable=False) for name in NOTES)

    @property
    def result(self) -> pa.DataType:
        return pa.int64()

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        offsets = words(rows.column("offset"))
        times = words(rows.column("event_ts"))
        if self.retracts:
            return _weighed(words(rows.column("weight")), times, offsets, offsets, groups, count)
        return _noted(_NO_NUMBERS, times, offsets, offsets, groups, count)

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        counts, times, lows, highs = (words(column) for column in states)
        return (_weighed if self.retracts else _noted)(counts, times, lows, highs, groups, count)

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]

    def fingerprint(self) -> str:
        return "notes/1"


def _noted(
    ones: Int64s, times: Int64s, lows: Int64s, highs: Int64s, groups: Int32s, count: int
) -> list[pa.Array]:
    noted = [np.empty(count, np.int64) for _ in NOTES]
    if _is_whole_and_ascends(groups, count):
        note_in_order(ones, times, lows, highs, groups, *noted)
    else:
        note_records(ones, times, lows, highs, groups, np.zeros(4 * count, np.int64), *noted)
    return [int64_column(column) for column in noted]


def _weighed(
    weight: Int64s, times: Int64s, lows: Int64s, highs: Int64s, groups: Int32s, count: int
) -> list[pa.Array]:
    """Notes of rows that may be taken back: a count of nothing does not mean that nothing was written."""
    counts, latest = np.zeros(count, np.int64), np.full(count, NO_TIME, np.int64)
    low, high = np.full(count, _HIGHEST, np.int64), np.full(count, NO_TIME, np.int64)
    np.add.at(counts, groups, weight)
    np.maximum.at(latest, groups, times)
    np.minimum.at(low, groups, lows)
    np.maximum.at(high, groups, highs)
    return [int64_column(column) for column in (counts, latest, low, high)]


def _is_whole_and_ascends(groups: Int32s, count: int) -> bool:
    """Whether each of `count` groups has rows, one group's after the other's."""
    if len(groups) < count or not len(groups) or groups[0] != 0 or groups[-1] != count - 1:
        return False
    return bool(rise_by_one(groups))


@dataclass(frozen=True, slots=True)
class UserAggregate:
    """An aggregate over the user's columns, with names that storage's own cannot clash with."""

    inner: Aggregate

    @property
    def name(self) -> str:
        return _USER + self.inner.name

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(_inside(name) for name in self.inner.inputs)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return tuple(each.with_name(_USER + each.name) for each in self.inner.state)

    @property
    def result(self) -> pa.DataType:
        return self.inner.result

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        columns = [rows.column(_inside(name)) for name in self.inner.inputs]
        own = pa.RecordBatch.from_arrays(columns, names=list(self.inner.inputs)) if columns else rows
        return self.inner.partial(own, groups, count)

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        return self.inner.merge(states, groups, count)

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return self.inner.finish(states)

    def fingerprint(self) -> str:
        return self.inner.fingerprint()


def _inside(name: str) -> str:
    return name if name in POSITION else _VALUE + name


class Aggregates(Protocol):
    """The user's aggregates as an operator takes them: ready for storage, with what they want of events."""

    @property
    def storage(self) -> tuple[Aggregate, ...]: ...

    @property
    def result_schema(self) -> pa.Schema: ...

    def inputs(self, events: EventBatch) -> Mapping[str, pa.Array]:
        """The columns they read, by the names they read them under."""

    def finish(self, states: Mapping[str, pa.Array]) -> pa.RecordBatch:
        """The results of states, given by the names of their columns."""


class PlainAggregates:
    """Storage's own aggregates over columns of the user's values."""

    def __init__(self, aggregates: Sequence[Aggregate]) -> None:
        names = [each.name for each in aggregates]
        if len(set(names)) != len(names):
            raise InvalidError(f"aggregates {names}: give each its own name")
        self.storage: tuple[Aggregate, ...] = tuple(UserAggregate(each) for each in aggregates)
        self.result_schema = pa.schema([pa.field(each.name, each.result) for each in aggregates])
        self._wanted = tuple(dict.fromkeys(name for each in self.storage for name in each.inputs))

    def inputs(self, events: EventBatch) -> dict[str, pa.Array]:
        return {name: self._column(events, name) for name in self._wanted}

    def finish(self, states: Mapping[str, pa.Array]) -> pa.RecordBatch:
        columns = [each.finish([states[field.name] for field in each.state]) for each in self.storage]
        return pa.RecordBatch.from_arrays(columns, schema=self.result_schema)

    def _column(self, events: EventBatch, name: str) -> pa.Array:
        if name in POSITION:
            return _position(events, name)
        plain = name.removeprefix(_VALUE)
        place = events.values.schema.get_field_index(plain)
        if place < 0:
            raise InvalidError(f"no single column {plain!r} among the values {events.values.schema.names}")
        return events.values.column(place)


def _position(events: EventBatch, name: str) -> pa.Array:
    if name == "partition":
        return pa.array(events.partition)
    if name == "weight":
        return int64_column(np.ascontiguousarray(weights(events)))
    return int64_column(np.ascontiguousarray(events.ts if name == "event_ts" else events.offset))


class Folds:
    """The aggregates of one operator, with the notes beside them."""

    def __init__(self, aggregates: Aggregates | Sequence[Aggregate]) -> None:
        self._user: Aggregates = (
            PlainAggregates(aggregates) if isinstance(aggregates, Sequence) else aggregates
        )
        if not self._user.storage:
            raise InvalidError(
                "windows without an aggregate have no result: give at least one, such as a count"
            )
        self.results = self._user.result_schema
        self.retracts = any(WEIGHT in each.inputs for each in self._user.storage)
        """Whether rows can be taken back, so that a window may have none left."""
        self._notes = Notes(self.retracts)
        self.stored: tuple[Aggregate, ...] = (self._notes, *self._user.storage)
        self._names = [field.name for each in self.stored for field in each.state]
        self._asked = self.unfit = 0
        """How many results could not be made so far, and are null."""

    def inputs(self, events: EventBatch) -> dict[str, pa.Array]:
        """The columns storage wants of these events, beside key and cursor."""
        noted = {name: _position(events, name) for name in self._notes.inputs}
        if events.changes is not None:  # a row's event time may lie ahead; what was written does not
            noted["event_ts"] = int64_column(np.ascontiguousarray(events.changes.written))
        return {**self._user.inputs(events), **noted}

    def finish(
        self,
        states: Sequence[pa.Array],
        keys: pa.BinaryArray | None = None,
        starts: Int64s | None = None,
    ) -> tuple[list[Int64s], pa.RecordBatch]:
        """The four notes and the user's results of merged states; `keys` and `starts` say whose windows they are.

        A result that cannot be made, such as a sum that does not fit its type, is null, counted in `unfit` and told
        in the log; all others are as they are.
        """
        notes = [words(column) for column in states[: len(NOTES)]]
        by_name = dict(zip(self._names, states, strict=True))
        try:
            return notes, self._user.finish(by_name)
        except Exception as error:  # noqa: BLE001 - a reducer is the user's code: it may raise anything
            _require_results_fault(error)
        columns = []
        for field, each in zip(self.results, self._user.storage, strict=True):
            parts = [by_name[part.name] for part in each.state]
            failing = _failing(each, parts, 0)
            columns.append(_without(each, parts, failing))
            for row, failed in failing.items():
                self._tell(field.name, row, keys, starts, failed)
        return notes, pa.RecordBatch.from_arrays(columns, schema=self.results)

    def take_unfit(self) -> int:
        """How many results could not be made since this was asked last."""
        new, self._asked = self.unfit - self._asked, self.unfit
        return new

    def _tell(
        self, name: str, row: int, keys: pa.BinaryArray | None, starts: Int64s | None, error: Exception
    ) -> None:
        self.unfit += 1
        if self.unfit & (self.unfit - 1):  # only the first, second, fourth, eighth, … is told
            return
        window = (
            "a window" if starts is None else f"the window that starts at {format_moment(int(starts[row]))}"
        )
        key = "" if keys is None else f" of key {keys[row].as_py()!r}"
        logger.warning(
            "%s%s in %s has no result and is shown as null: %s (%d such results so far)",
            name, key, window, str(error).partition("\n")[0] or type(error).__name__, self.unfit,
        )  # fmt: skip

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        """States of many become states of `count` groups."""
        at, merged = 0, []
        for each in self.stored:
            width = len(each.state)
            merged += each.merge(states[at : at + width], groups, count)
            at += width
        return merged


def _require_results_fault(error: Exception) -> None:
    """Raise what has nothing to do with the states of one window."""
    if is_transient(error) or (isinstance(error, TidegateError) and not isinstance(error, InvalidError)):
        raise error


def _failing(aggregate: Aggregate, states: Sequence[pa.Array], start: int) -> dict[int, Exception]:
    """The states that have no result, found by halves, with the error of each; the first of `states` is row `start`."""
    count = len(states[0])
    try:
        aggregate.finish(states)
    except Exception as error:  # noqa: BLE001 - a reducer is the user's code: it may raise anything
        _require_results_fault(error)
        if count <= 1:
            return {start: error}
    else:
        return {}
    middle = count // 2
    found = _failing(aggregate, [each.slice(0, middle) for each in states], start)
    return found | _failing(aggregate, [each.slice(middle) for each in states], start + middle)


def _without(aggregate: Aggregate, states: Sequence[pa.Array], failing: Mapping[int, Exception]) -> pa.Array:
    """Results of states, null for those that have none."""
    if not failing:
        return aggregate.finish(states)
    count = len(states[0])
    is_good = np.ones(count, np.bool_)
    is_good[list(failing)] = False
    good = pa.array(np.flatnonzero(is_good))
    if not len(good):
        return pa.nulls(count, aggregate.result)
    results = aggregate.finish([each.take(good) for each in states])
    return results.take(pa.array(np.cumsum(is_good) - 1, mask=~is_good))
