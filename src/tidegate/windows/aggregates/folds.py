"""The stored state of a window: the user's aggregates, and notes about the records they were made of.

`resolve` checks definitions against the columns of the stream. It passes a user's column `x` as `value:x`, a record's
position as `at:event_ts`, `at:partition`, `at:offset`, and aggregate number 0, called `total`, is kept as `0:total`;
so a column called `key` or an aggregate called `ts` is a name like any other.

Retractable aggregates count each row `at:weight` times, and -1 takes back what a row added before. They are exact:
NaN and infinities are counted separately from the sum of the finite values. Others cannot be retracted, because they
do not keep the values that a row displaced.

Thread rule: values and pure functions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import format_moment
from tidegate.errors import InvalidError, TidegateError, is_transient
from tidegate.kernels.aggregates import add_numbers
from tidegate.kernels.windows import note_in_order, note_records, rise_by_one
from tidegate.storage import Count, First, Last, Max, Mean, Min, Sum
from tidegate.storage.runs.aggregates import Aggregate, input_column, order_keys
from tidegate.storage.runs.columns import int64_column, words
from tidegate.windows.aggregates.collections import ApproxCountDistinct, Collect, CountDistinct, TopK
from tidegate.windows.aggregates.definitions import AggregateDefinition, reducer
from tidegate.windows.events import NO_TIME, EventBatch, Int64s, only_column, weights
from tidegate.windows.keys import Int32s

# --- aggregates that can be retracted

WEIGHT: Final = "at:weight"
_INT64, _DOUBLE = pa.int64(), pa.float64()
_NOT_FINITE: Final = ("nan", "above", "below")  # NaN, infinity, minus infinity


@dataclass(frozen=True, slots=True)
class RetractableCount:
    """The number of remaining rows, or with `input`, of its values that are not null."""

    name: str
    input: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        return (WEIGHT,) if self.input is None else (self.input, WEIGHT)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, _INT64, nullable=False),)

    @property
    def result(self) -> pa.DataType:
        return _INT64

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        valid = None if self.input is None else input_column(rows, self.name, self.input, None).is_valid()
        return [_counted(rows, valid, groups, count)]

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        return [_added(words(states[0]), groups, count)]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[0]

    def fingerprint(self) -> str:
        return f"retractable-count/1({self.input or '*'})"


@dataclass(frozen=True, slots=True)
class RetractableSum:
    """The sum of a column over the remaining rows; null if none has a value."""

    name: str
    input: str
    type: pa.DataType = _DOUBLE

    def __post_init__(self) -> None:
        self._sum()  # refuses types that cannot be summed

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input, WEIGHT)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        counted = ("count", *_NOT_FINITE) if pa.types.is_floating(self.type) else ("count",)
        return (
            *self._sum().state,
            *(pa.field(f"{self.name}.{each}", _INT64, nullable=False) for each in counted),
        )

    @property
    def result(self) -> pa.DataType:
        return self._sum().result

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        column = input_column(rows, self.name, self.input, self.type)
        counted = [column.is_valid()]
        if pa.types.is_floating(self.type):
            is_infinite = pc.is_inf(column)
            counted += [
                pc.is_nan(column),
                pc.and_(is_infinite, pc.greater(column, 0.0)),
                pc.and_(is_infinite, pc.less(column, 0.0)),
            ]
            column = pc.if_else(pc.is_finite(column), column, pa.scalar(None, self.type))
        return [
            self._summed(column, words(rows.column(WEIGHT)), groups, count),
            *(_counted(rows, each, groups, count) for each in counted),
        ]

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        return [
            *self._sum().merge([states[0]], groups, count),
            *(_added(words(each), groups, count) for each in states[1:]),
        ]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return self._whole(states, self._sum().finish([states[0]]))

    def fingerprint(self) -> str:
        return f"retractable-sum/1({self.input}:{self.type})"

    def _sum(self) -> Sum:
        return Sum(f"{self.name}.sum", self.input, self.type)

    def _summed(
        self, column: pa.Array, weight: npt.NDArray[np.int64], groups: Int32s, count: int
    ) -> pa.Array:
        """Return the state of a sum in which values of retracted rows are subtracted."""

        def summed(values: pa.Array, of: Int32s) -> pa.Array:
            return self._sum().partial(pa.RecordBatch.from_arrays([values], [self.input]), of, count)[0]

        if not (weight < 0).any():
            return summed(column, groups)
        if pa.types.is_floating(column.type):
            return summed(pc.if_else(pa.array(weight < 0), pc.negate(column), column), groups)
        states = [
            summed(column.take(pa.array(chosen)), groups[chosen])
            for chosen in (np.flatnonzero(weight > 0), np.flatnonzero(weight < 0))
        ]
        both = np.concatenate([np.arange(count, dtype=np.int32)] * 2)
        return self._sum().merge([pa.concat_arrays([states[0], pc.negate(states[1])])], both, count)[0]

    def _whole(self, states: Sequence[pa.Array], finite: pa.Array) -> pa.Array:
        """Combine results of the finite values with the counts of the others; null where no value remains."""
        results = pc.fill_null(finite, pa.scalar(0).cast(finite.type)) if finite.null_count else finite
        if len(states) > 2:
            nan, above, below = (words(each) > 0 for each in states[2:])
            doubles = results.to_numpy(zero_copy_only=False).copy()
            doubles[above], doubles[below] = np.inf, -np.inf
            doubles[nan | (above & below)] = np.nan
            results = pa.array(doubles, finite.type)
        has_none = words(states[1]) <= 0
        return (
            pc.if_else(pa.array(has_none), pa.scalar(None, results.type), results)
            if has_none.any()
            else results
        )


class RetractableMean(RetractableSum):
    """The mean of a column over the remaining rows, as a double; null if none has a value."""

    __slots__ = ()

    @property
    def result(self) -> pa.DataType:
        return _DOUBLE

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        finite = Mean(self.name, self.input, self.type).finish([states[0], states[1]])
        return self._whole(states, finite)

    def fingerprint(self) -> str:
        return f"retractable-mean/1({self.input}:{self.type})"


def _counted(rows: pa.RecordBatch, is_counted: pa.Array | None, groups: Int32s, count: int) -> pa.Array:
    weight = words(rows.column(WEIGHT))
    if is_counted is not None:
        weight = np.where(pc.fill_null(is_counted, False).to_numpy(zero_copy_only=False), weight, 0)
    return _added(weight, groups, count)


def _added(numbers: npt.NDArray[np.int64], groups: Int32s, count: int) -> pa.Array:
    sums = np.zeros(count, np.int64)
    add_numbers(np.ascontiguousarray(numbers), groups, sums)
    return int64_column(sums)


# --- states and results of a window

logger = logging.getLogger(__name__)
_VALUE, OFFSET, NOTED_TS = "value:", "at:offset", "notes:ts"
POSITION = ("at:event_ts", "at:partition", OFFSET)
_NO_NUMBERS = np.empty(0, np.int64)
_HIGHEST = np.iinfo(np.int64).max
NOTES = ("notes.count", "notes.max_ts", "notes.min_offset", "notes.max_offset")


@dataclass(frozen=True, slots=True)
class Notes:
    """Count, latest event time, lowest and highest offset of the records of a window.

    For changes of a table's rows: the number of remaining rows, the latest timestamp and the offsets of all changes.
    """

    retracts: bool = False
    name: str = "notes"

    @property
    def inputs(self) -> tuple[str, ...]:
        return (NOTED_TS, OFFSET, WEIGHT) if self.retracts else (NOTED_TS, OFFSET)

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return tuple(pa.field(name, pa.int64(), nullable=False) for name in NOTES)

    @property
    def result(self) -> pa.DataType:
        return pa.int64()

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        offsets = words(rows.column(OFFSET))
        times = words(rows.column(NOTED_TS))
        if self.retracts:
            return _weighed(words(rows.column(WEIGHT)), times, offsets, offsets, groups, count)
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
    """Return the notes of retractable rows: a count of 0 does not mean that nothing was written."""
    counts, latest = np.zeros(count, np.int64), np.full(count, NO_TIME, np.int64)
    low, high = np.full(count, _HIGHEST, np.int64), np.full(count, NO_TIME, np.int64)
    np.add.at(counts, groups, weight)
    np.maximum.at(latest, groups, times)
    np.minimum.at(low, groups, lows)
    np.maximum.at(high, groups, highs)
    return [int64_column(column) for column in (counts, latest, low, high)]


def _is_whole_and_ascends(groups: Int32s, count: int) -> bool:
    """Whether each of `count` groups has rows, in ascending order of groups."""
    if len(groups) < count or not len(groups) or groups[0] != 0 or groups[-1] != count - 1:
        return False
    return bool(rise_by_one(groups))


class Folds:
    """The aggregates of one operator, and the notes."""

    def __init__(self, aggregates: ResolvedAggregates) -> None:
        self._user = aggregates
        self.results = self._user.result_schema
        self.retracts = any(WEIGHT in each.inputs for each in self._user.storage)
        """Whether rows can be taken back, so that a window may have none left."""
        self._notes = Notes(self.retracts)
        self.stored: tuple[Aggregate, ...] = (self._notes, *self._user.storage)
        self._names = [field.name for each in self.stored for field in each.state]
        self._asked = self.unfit = 0
        """How many results could not be made so far, and are null."""

    def inputs(self, events: EventBatch) -> dict[str, pa.Array]:
        """Return the columns that storage needs of these events, besides key and cursor."""
        # a row's event time may be in the future; the change's timestamp is not
        times = events.ts if events.changes is None else events.changes.written
        inputs = {**self._user.inputs(events), NOTED_TS: int64_column(np.ascontiguousarray(times))}
        return inputs | {name: _input(events, name) for name in self._notes.inputs[1:]}

    def finish(
        self,
        states: Sequence[pa.Array],
        keys: pa.BinaryArray | None = None,
        starts: Int64s | None = None,
    ) -> tuple[list[Int64s], pa.RecordBatch]:
        """Return the four notes and the user's results of merged states; `keys` and `starts` identify the windows.

        A result that cannot be made, such as a sum that does not fit its type, is null, counted in `unfit` and
        logged; the others are not affected.
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
        """Return how many results could not be made since the last call."""
        new, self._asked = self.unfit - self._asked, self.unfit
        return new

    def _tell(
        self, name: str, row: int, keys: pa.BinaryArray | None, starts: Int64s | None, error: Exception
    ) -> None:
        self.unfit += 1
        if self.unfit & (self.unfit - 1):  # log only the first, second, fourth, eighth, …
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
        """Merge states into states of `count` groups."""
        at, merged = 0, []
        for each in self.stored:
            width = len(each.state)
            merged += each.merge(states[at : at + width], groups, count)
            at += width
        return merged


def _require_results_fault(error: Exception) -> None:
    """Raise errors that are not caused by the states of one window."""
    if is_transient(error) or (isinstance(error, TidegateError) and not isinstance(error, InvalidError)):
        raise error


def _failing(aggregate: Aggregate, states: Sequence[pa.Array], start: int) -> dict[int, Exception]:
    """Return the states that have no result, found by bisection, with the error of each; the first of `states` is
    row `start`."""
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
    """Return results of states, null for those that have none."""
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


# --- definitions checked against columns

Definitions: TypeAlias = Mapping[str, AggregateDefinition] | Sequence[AggregateDefinition]


class ResolvedAggregates:
    """The user's aggregates, ready for storage; make it with `resolve`."""

    def __init__(self, storage: Sequence[Aggregate], names: Sequence[str]) -> None:
        self.storage = tuple(storage)
        self.result_schema = pa.schema(
            [pa.field(name, each.result) for name, each in zip(names, storage, strict=True)]
        )
        self._wanted = tuple(dict.fromkeys(name for each in storage for name in each.inputs))

    @property
    def state_schema(self) -> pa.Schema:
        """The columns of all states, in the order of `storage`."""
        return pa.schema([field for each in self.storage for field in each.state])

    def inputs(self, events: EventBatch) -> dict[str, pa.Array]:
        """Return the columns that storage needs of these events, besides key and cursor."""
        return {name: _input(events, name) for name in self._wanted}

    def finish(self, states: Mapping[str, pa.Array]) -> pa.RecordBatch:
        """Return the results of states, given by the names of their columns."""
        results = [each.finish([states[part.name] for part in each.state]) for each in self.storage]
        return pa.RecordBatch.from_arrays(results, schema=self.result_schema)


def resolve(definitions: Definitions, schema: pa.Schema, *, retractable: bool = False) -> ResolvedAggregates:
    """Return the storage aggregates of these definitions over these columns; `InvalidError` names what does not fit.

    A mapping gives names; in a sequence each has its own (`sum_amount`, or what `named` gave). `retractable` ones
    accept retractions (`EventBatch.changes`); aggregates that cannot be retracted are refused.
    """
    if isinstance(definitions, Mapping):
        given = [(name, each) for name, each in definitions.items()]
    else:
        given = [(each.name if isinstance(each, AggregateDefinition) else "", each) for each in definitions]
    if not given:
        raise InvalidError("a window without any aggregate has no result; ask for count() at least")
    for _, each in given:
        if not isinstance(each, AggregateDefinition):
            raise TypeError(f"{each!r} is no aggregate; write count(), sum('amount') and the like")
    names = [name for name, _ in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidError(f"aggregates {', '.join(twice)} come twice: give each its own name")
    builders = RETRACTABLE if retractable else _BUILDERS
    return ResolvedAggregates(
        [_resolve(number, each.named(name), schema, builders) for number, (name, each) in enumerate(given)],
        names,
    )


class _Columns(NamedTuple):
    """The arguments of a builder: the aggregate's name in storage, its inputs' names there, and their types."""

    name: str
    inputs: tuple[str, ...]
    types: tuple[pa.DataType, ...]

    @property
    def only(self) -> tuple[str, str, pa.DataType]:
        return self.name, self.inputs[0], self.types[0]


def _resolve(
    number: int, definition: AggregateDefinition, schema: pa.Schema, builders: Mapping[str, Builder]
) -> Aggregate:
    if definition.kind not in builders:
        raise InvalidError(f"{_shown(definition)}: it cannot be undone; {', '.join(builders)} can")
    types = tuple(_type_of(definition, column, schema) for column in definition.columns)
    inputs = tuple(_VALUE + column for column in definition.columns)
    try:
        return builders[definition.kind](definition, _Columns(f"{number}:{definition.name}", inputs, types))
    except InvalidError as error:
        described = ", ".join(f"{each.name} {each.type}" for each in schema)
        raise InvalidError(f"{_shown(definition)}: {error}; the columns are {described}") from None


def _type_of(definition: AggregateDefinition, column: str, schema: pa.Schema) -> pa.DataType:
    places = schema.get_all_field_indices(column)
    if len(places) != 1:
        near = get_close_matches(column, schema.names, 1)
        hint = f"; did you mean {near[0]}?" if near and not places else ""
        found = "no column" if not places else f"{len(places)} columns"
        raise InvalidError(f"{_shown(definition)}: there is {found} {column!r} among {schema.names}{hint}")
    return schema.field(places[0]).type


def _shown(definition: AggregateDefinition) -> str:
    options = [f"{name}={value}" for name, value in definition.options if isinstance(value, int)]
    return f"aggregate {definition.name} = {definition.kind}({', '.join([*definition.columns, *options])})"


def _input(events: EventBatch, name: str) -> pa.Array:
    if name == POSITION[0]:
        return int64_column(np.ascontiguousarray(events.ts))
    if name == POSITION[1]:
        return pa.array(events.partition)
    if name == POSITION[2]:
        return int64_column(np.ascontiguousarray(events.offset))
    if name == WEIGHT:
        return int64_column(np.ascontiguousarray(weights(events)))
    return only_column(events.values, name.removeprefix(_VALUE))


Builder: TypeAlias = Callable[[AggregateDefinition, _Columns], Aggregate]


def _ordered(kind: type[Min] | type[Max]) -> Builder:
    def build(definition: AggregateDefinition, columns: _Columns) -> Aggregate:
        order_keys(pa.array([], columns.types[0]))  # refuses types without an order
        return kind(*columns.only)

    return build


def _reduce(definition: AggregateDefinition, columns: _Columns) -> Aggregate:
    made = dict(definition.options)["reducer"]
    return reducer(columns.name, definition.columns, columns.inputs, columns.types, made)


_BUILDERS: dict[str, Builder] = {
    "count": lambda definition, columns: Count(columns.name, *columns.inputs),
    "sum": lambda definition, columns: Sum(*columns.only),
    "mean": lambda definition, columns: Mean(*columns.only),
    "min": _ordered(Min),
    "max": _ordered(Max),
    "first": lambda definition, columns: First(*columns.only, POSITION),
    "last": lambda definition, columns: Last(*columns.only, POSITION),
    "count_distinct": lambda definition, columns: CountDistinct(*columns.only),
    "approx_count_distinct": lambda definition, columns: ApproxCountDistinct(*columns.only),
    "top_k": lambda definition, columns: TopK(*columns.only, dict(definition.options)["k"]),
    "collect": lambda definition, columns: Collect(
        *columns.only, POSITION, dict(definition.options)["limit"]
    ),
    "reduce": _reduce,
}
RETRACTABLE: dict[str, Builder] = {
    "count": lambda definition, columns: RetractableCount(columns.name, *columns.inputs),
    "sum": lambda definition, columns: RetractableSum(*columns.only),
    "mean": lambda definition, columns: RetractableMean(*columns.only),
}
