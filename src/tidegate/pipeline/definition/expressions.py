"""Expressions over the columns of events: SQL, Arrow expressions, functions over Arrow batches; a column at a time.

| written | is | sees |
|---|---|---|
| `"amount"` | a column by its name, taken as it is | |
| `"amount * 2"` | SQL (see `sql`) | the columns it names |
| `pc.field("amount") * 2` | an Arrow expression | every column |
| `lambda batch: …` | a function over a record batch that answers a column of the same length | every column |

Beside the columns, `key` (as its serde reads it), `ts` (event time, UTC), `offset` and `partition` can be used
where no column has that name. The type of an expression is known before anything runs: it is worked out on a batch
without rows, and answers of another type or length are refused when they come.

Thread rule: a projection is used by one thread at a time; it can be pickled, and holds no connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import acero

from tidegate.errors import CorruptError, InvalidError
from tidegate.pipeline.definition import sql
from tidegate.pipeline.definition.inferring import EVENT_TIME, unknown_column, visible_schema
from tidegate.pipeline.definition.steps import ArrowFunction, Expression
from tidegate.tables.serdes.base import Serde, String
from tidegate.windows.events import EventBatch

_NO_FIELD = re.compile(r"No match for FieldRef\.Name\(([^)]*)\)")


class Projection:
    """Named expressions over the same columns, evaluated together; make it with the columns there are."""

    def __init__(
        self, columns: Sequence[tuple[str, Expression]], schema: pa.Schema, key: Serde[Any], *, what: str
    ) -> None:
        self._key, self._what = key, what
        self._visible = visible_schema(schema, key)
        self._plain: dict[int, str] = {}
        self._sql: dict[int, sql.SqlExpression] = {}
        self._arrow: dict[int, pc.Expression] = {}
        self._functions: dict[int, ArrowFunction] = {}
        self._names = [name for name, _ in columns]
        self._types: list[pa.DataType | None] = [None] * len(columns)
        for place, (name, expression) in enumerate(columns):
            self._add(place, name, expression)
        self._reads = self._columns_read()
        self._find_types()

    @property
    def schema(self) -> pa.Schema:
        """What the expressions turn out as."""
        named = zip(self._names, self._types, strict=True)
        return pa.schema([pa.field(name, kind) for name, kind in named])

    @property
    def reads_key(self) -> bool:
        """Whether the key is decoded for it."""
        return "key" in self._reads and self._visible.field("key").type == self._key.arrow_type

    def arrays(self, events: EventBatch) -> list[pa.Array]:
        """A column for each expression, in their order."""
        return self._evaluate(visible_columns(events, self._key, self._reads), len(events))

    def batch(self, events: EventBatch) -> pa.RecordBatch:
        """The same under their names."""
        return pa.RecordBatch.from_arrays(self.arrays(events), schema=self.schema)

    def _add(self, place: int, name: str, expression: Expression) -> None:
        if isinstance(expression, str):
            if expression in self._visible.names:
                self._plain[place] = expression
                self._types[place] = self._visible.field(expression).type
            elif is_name(expression) and not sql_keyword(expression):
                raise unknown_column(self._what, expression, self._visible)
            else:
                self._sql[place], self._types[place] = sql.typed(expression, self._visible, self._what)
        elif isinstance(expression, pc.Expression):
            self._arrow[place] = expression
        elif callable(expression):
            self._functions[place] = expression
        else:
            raise TypeError(
                f"{self._what}: {name} is a {type(expression).__name__}; an expression is SQL text, an Arrow "
                "expression or a function over a record batch"
            )

    def _find_types(self) -> None:
        if self._arrow or self._functions:
            none = [pa.array([], each.type) for each in self._visible]
            found = self._computed(pa.RecordBatch.from_arrays(none, schema=self._visible))
            for place, array in found.items():
                self._types[place] = self._fitting(place, array, 0).type
        for name, kind in zip(self._names, self._types, strict=True):
            if kind is None or pa.types.is_null(kind):
                raise InvalidError(
                    f"{self._what}: {name} has no type, only nulls; cast it, like CAST(NULL AS VARCHAR)"
                )

    def _columns_read(self) -> frozenset[str]:
        if self._arrow or self._functions:
            return frozenset(self._visible.names)
        return frozenset(self._plain.values()) | {name for each in self._sql.values() for name in each.reads}

    def _evaluate(self, columns: Mapping[str, pa.Array], rows: int) -> list[pa.Array]:
        found: dict[int, pa.Array] = {place: columns[name] for place, name in self._plain.items()}
        if self._sql:
            found |= zip(
                self._sql, sql.evaluate(list(self._sql.values()), columns, rows, self._what), strict=True
            )
        if self._arrow or self._functions:
            found |= self._computed(pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)))
        return [self._fitting(place, found[place], rows) for place in range(len(self._names))]

    def _computed(self, batch: pa.RecordBatch) -> dict[int, pa.Array]:
        """What Arrow expressions and functions make of a batch with every column."""
        answers = {place: self._call(each, batch) for place, each in self._functions.items()}
        return dict(zip(self._arrow, self._project(batch), strict=True)) | answers

    def _project(self, batch: pa.RecordBatch) -> list[pa.Array]:
        if not self._arrow:
            return []
        names = [f"c{place}" for place in self._arrow]
        plan = acero.Declaration.from_sequence(
            [
                acero.Declaration(
                    "table_source", acero.TableSourceNodeOptions(pa.Table.from_batches([batch]))
                ),
                acero.Declaration("project", acero.ProjectNodeOptions(list(self._arrow.values()), names)),
            ]
        )
        try:
            answer = plan.to_table(use_threads=False)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError, pa.ArrowTypeError) as error:
            absent = _NO_FIELD.search(str(error))
            if absent:
                raise unknown_column(self._what, absent[1], self._visible) from None
            raise InvalidError(f"{self._what}: {str(error).splitlines()[0]}") from None
        return [one_array(column) for column in answer.columns]

    def _call(self, function: ArrowFunction, batch: pa.RecordBatch) -> pa.Array:
        answer = called(function, batch, self._what)
        if isinstance(answer, np.ndarray):
            answer = pa.array(answer)
        if not isinstance(answer, pa.Array | pa.ChunkedArray):
            raise InvalidError(
                f"{self._what}: {function_name(function)} answered a {type(answer).__name__}; an Arrow array "
                "with a value for each row is due"
            )
        return one_array(answer)

    def _fitting(self, place: int, array: pa.Array, rows: int) -> pa.Array:
        name = self._names[place]
        if len(array) != rows:
            raise InvalidError(
                f"{self._what}: {name} has {len(array)} values for {rows} rows; one each is due"
            )
        if self._types[place] is None or array.type == self._types[place]:
            return array
        try:
            return array.cast(self._types[place])
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InvalidError(
                f"{self._what}: {name} was {self._types[place]} when the pipeline was defined and is "
                f"{array.type} for a batch of {rows} rows ({str(error).splitlines()[0]}); cast it to one type"
            ) from None


def evaluator(
    expression: Expression, schema: pa.Schema, key: Serde[Any] | None = None, *, what: str = "an expression"
) -> Callable[[EventBatch], pa.Array]:
    """One expression as a function from events to a column; `key` is how keys are read at this point."""
    projection = Projection([("it", expression)], schema, String() if key is None else key, what=what)
    return lambda events: projection.arrays(events)[0]


class Mapped:
    """A function over whole batches, held to its schema."""

    def __init__(
        self, function: ArrowFunction, schema: pa.Schema, given: pa.Schema, key: Serde[Any], *, what: str
    ):
        self._function, self._schema, self._key, self._what = function, schema, key, what
        self._visible = visible_schema(given, key)
        none = [pa.array([], each.type) for each in self._visible]
        self._apply(pa.RecordBatch.from_arrays(none, schema=self._visible))

    def batch(self, events: EventBatch) -> pa.RecordBatch:
        columns = visible_columns(events, self._key, frozenset(self._visible.names))
        return self._apply(
            pa.RecordBatch.from_arrays([columns[name] for name in self._visible.names], schema=self._visible)
        )

    def _apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        answer = called(self._function, batch, self._what)
        name = function_name(self._function)
        if isinstance(answer, pa.Table):
            answer = pa.RecordBatch.from_arrays(
                [one_array(column) for column in answer.columns], names=answer.column_names
            )
        if not isinstance(answer, pa.RecordBatch):
            raise InvalidError(
                f"{self._what}: {name} answered a {type(answer).__name__}; a record batch is due"
            )
        if answer.num_rows != batch.num_rows:
            raise InvalidError(
                f"{self._what}: {name} answered {answer.num_rows} rows for {batch.num_rows}; a map keeps "
                "rows and their order, use .filter(…) to leave rows out"
            )
        if answer.schema.names != self._schema.names:
            raise InvalidError(
                f"{self._what}: {name} answered columns {answer.schema.names}; declared are {self._schema.names}"
            )
        try:
            return answer.cast(self._schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
            raise InvalidError(
                f"{self._what}: {name} answered {[str(kind) for kind in answer.schema.types]}, declared are "
                f"{[str(kind) for kind in self._schema.types]}: {str(error).splitlines()[0]}"
            ) from None


def visible_columns(events: EventBatch, key: Serde[Any], wanted: frozenset[str]) -> dict[str, pa.Array]:
    """Columns of events by name, with key, time, offset and partition where no column has their names."""
    names = events.values.schema.names
    columns = {name: events.values.column(place) for place, name in enumerate(names) if name in wanted}
    for name in wanted.difference(names):
        if name == "key":
            columns[name] = _keys(events, key)
        elif name == "ts":
            columns[name] = pa.array(events.ts, pa.int64()).cast(EVENT_TIME)
        elif name == "offset":
            columns[name] = pa.array(events.offset, pa.int64())
        else:
            columns[name] = pa.array(events.partition, pa.int32())
    return columns


def _keys(events: EventBatch, key: Serde[Any]) -> pa.Array:
    decoded = key.decode_column(events.key)
    if len(decoded.bad_rows):
        row = int(decoded.bad_rows[0])
        raise CorruptError(
            f"the key of the record at partition {events.partition[row]}, offset {events.offset[row]} cannot "
            f"be read as {key.name}: {decoded.reasons[0]}; declare the keys as they are, like stream(…, "
            "key=Bytes())",
            offset=int(events.offset[row]),
            kafka_name=None,
        )
    return decoded.values


def called(function: ArrowFunction, batch: pa.RecordBatch, what: str) -> Any:
    """What a user's function answers; where it fails on no rows at all, the error says so."""
    if batch.num_rows:
        return function(batch)
    try:
        return function(batch)
    except Exception as error:  # the user's code, at the edge: it may raise anything
        raise InvalidError(
            f"{what}: {function_name(function)} failed on a batch without rows ({type(error).__name__}: "
            f"{error}), by which its type is found out before anything runs; make it answer an empty column "
            "of the right type"
        ) from error


def function_name(function: ArrowFunction) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def is_name(text: str) -> bool:
    """Whether a text could only be meant as a column's name."""
    return text.isidentifier()


def sql_keyword(text: str) -> bool:
    return text.casefold() in {"true", "false", "null"}


def shown(expression: Expression) -> str:
    """An expression as a person would recognise it."""
    if isinstance(expression, str):
        return expression.strip()
    if isinstance(expression, pc.Expression):
        return str(expression)
    return f"{function_name(expression)}(…)"
