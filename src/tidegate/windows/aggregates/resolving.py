"""Definitions of aggregates held against the columns there are: what storage computes, or what is wrong.

Names of the user never meet those of storage. A user's column `x` comes in as `value:x`, a record's position as
`at:event_ts`, `at:partition`, `at:offset`, and aggregate number 0, called `total`, is kept as `0:total`; so a column
called `key` or an aggregate called `ts` is a name like any other.

Thread rule: values and pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage import Count, First, Last, Max, Mean, Min, Sum
from tidegate.storage.runs.aggregates import Aggregate, order_keys
from tidegate.storage.runs.columns import int64_column
from tidegate.windows.aggregates.definitions import AggregateDefinition
from tidegate.windows.aggregates.distinct import ApproxCountDistinct, CountDistinct
from tidegate.windows.aggregates.lists import Collect, TopK
from tidegate.windows.aggregates.reducing import reducer
from tidegate.windows.aggregates.retractable import (
    WEIGHT,
    RetractableCount,
    RetractableMean,
    RetractableSum,
)
from tidegate.windows.events import EventBatch, weights

POSITION = ("at:event_ts", "at:partition", "at:offset")
_VALUE = "value:"

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
        """The columns storage wants of these events, beside key and cursor."""
        return {name: _input(events, name) for name in self._wanted}

    def finish(self, states: Mapping[str, pa.Array] | pa.RecordBatch) -> pa.RecordBatch:
        """The results of states, given by the names of their columns; other columns are left alone."""
        column = states.column if isinstance(states, pa.RecordBatch) else states.__getitem__
        results = [each.finish([column(part.name) for part in each.state]) for each in self.storage]
        return pa.RecordBatch.from_arrays(results, schema=self.result_schema)


def resolve(definitions: Definitions, schema: pa.Schema, *, retractable: bool = False) -> ResolvedAggregates:
    """The storage aggregates of these definitions over these columns; `InvalidError` names what does not fit.

    A mapping gives names; in a sequence each has its own (`sum_amount`, or what `named` said). `retractable` ones take
    rows back as events say (`EventBatch.changes`), and refuse what cannot be undone.
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
    """What a builder is told: the aggregate's name in storage, its inputs' names there, and their types."""

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
    plain = name.removeprefix(_VALUE)
    place = events.values.schema.get_field_index(plain)
    if place < 0:
        raise InvalidError(f"no single column {plain!r} among the values {events.values.schema.names}")
    return events.values.column(place)


Builder: TypeAlias = Callable[[AggregateDefinition, _Columns], Aggregate]


def _count(definition: AggregateDefinition, columns: _Columns) -> Aggregate:
    return Count(columns.name, *columns.inputs)


def _ordered(kind: type[Min] | type[Max]) -> Builder:
    def build(definition: AggregateDefinition, columns: _Columns) -> Aggregate:
        order_keys(pa.array([], columns.types[0]))  # refuses what has no order
        return kind(*columns.only)

    return build


def _collect(definition: AggregateDefinition, columns: _Columns) -> Aggregate:
    return Collect(*columns.only, POSITION, dict(definition.options)["limit"])


def _top_k(definition: AggregateDefinition, columns: _Columns) -> Aggregate:
    return TopK(*columns.only, dict(definition.options)["k"])


def _reduce(definition: AggregateDefinition, columns: _Columns) -> Aggregate:
    made = dict(definition.options)["reducer"]
    return reducer(columns.name, definition.columns, columns.inputs, columns.types, made)


_BUILDERS: dict[str, Builder] = {
    "count": _count,
    "sum": lambda definition, columns: Sum(*columns.only),
    "mean": lambda definition, columns: Mean(*columns.only),
    "min": _ordered(Min),
    "max": _ordered(Max),
    "first": lambda definition, columns: First(*columns.only, POSITION),
    "last": lambda definition, columns: Last(*columns.only, POSITION),
    "count_distinct": lambda definition, columns: CountDistinct(*columns.only),
    "approx_count_distinct": lambda definition, columns: ApproxCountDistinct(*columns.only),
    "top_k": _top_k,
    "collect": _collect,
    "reduce": _reduce,
}
RETRACTABLE: dict[str, Builder] = {
    "count": lambda definition, columns: RetractableCount(columns.name, *columns.inputs),
    "sum": lambda definition, columns: RetractableSum(*columns.only),
    "mean": lambda definition, columns: RetractableMean(*columns.only),
}
