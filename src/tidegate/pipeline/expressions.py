"""Expressions over the columns of events, evaluated a column at a time.

| written | is | sees |
|---|---|---|
| `"amount"` | a column by its name | |
| `"amount * 2"` | SQL, evaluated by DuckDB (optional, loaded at first use) | the columns it names |
| `pc.field("amount") * 2` | an Arrow expression | every column |
| `lambda batch: …` | a function of a record batch that returns a column of the same length | every column |

`key` (as its serde reads it), `ts` (event time, UTC), `offset` and `partition` are available unless a column has that
name. Types are inferred on an empty batch before anything runs; a result of another type or length is refused at run
time. An SQL expression is a function of one row: aggregates, window functions, subqueries (they would depend on where
batches are cut) and volatile functions such as `now()` (a repeated round must give the same rows) are refused.

Thread rule: one thread at a time for each projection; it can be pickled. Each thread has its own DuckDB connection.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import acero

from tidegate.errors import CorruptError, InvalidError
from tidegate.pipeline.topology import ArrowFunction, Expression, Source
from tidegate.tables.serdes.base import Bytes, Double, Int, Long, Serde, String
from tidegate.windows.events import EventBatch

# -- inferring ------------------------------------------------------------------------------------

EVENT_TIME = pa.timestamp("ms", tz="UTC")
BOUNDS = ("window_start", "window_end")
VALUE = "value"


def value_schema(serde: Serde[Any] | None) -> pa.Schema:
    """The columns of values: those of an object or a record, else the one column `value`. All may be null."""
    if serde is None:
        return pa.schema([pa.field(VALUE, pa.binary())])
    kind = serde.arrow_type
    if pa.types.is_struct(kind):
        return pa.schema([pa.field(each.name, each.type) for each in kind])
    return pa.schema([pa.field(VALUE, kind)])


def source_schema(source: Source) -> pa.Schema:
    """Return the columns of the source's events."""
    values = value_schema(source.value)
    if source.windows is None:
        return values
    taken = [name for name in values.names if name in BOUNDS]
    if taken:
        raise InvalidError(
            f"topic {source.topic}: its values have a column {taken[0]!r} of their own, and a table's "
            "changes bring one; leave it out of the value's declared fields"
        )
    return pa.schema([*(pa.field(name, EVENT_TIME) for name in BOUNDS), *values])


def visible_schema(schema: pa.Schema, key: Serde[Any]) -> pa.Schema:
    """Return the schema that expressions see: the columns, then `key`, `ts`, `offset` and `partition`, if not taken."""
    extra = (
        ("key", key.arrow_type),
        ("ts", EVENT_TIME),
        ("offset", pa.int64()),
        ("partition", pa.int32()),
    )
    added = [pa.field(name, kind) for name, kind in extra if name not in schema.names]
    return pa.schema([*schema, *added])


def key_serde_for(kind: pa.DataType, what: str) -> Serde[Any]:
    """The serde that keys of this type are written with, when none was given."""
    serde: Any = None
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        serde = String()
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        serde = Bytes()
    elif pa.types.is_int64(kind) or pa.types.is_uint32(kind):
        serde = Long()
    elif pa.types.is_integer(kind) and not pa.types.is_uint64(kind):
        serde = Int()
    elif pa.types.is_floating(kind):
        serde = Double()
    if serde is not None:
        return serde  # type: ignore[no-any-return]
    raise InvalidError(
        f"{what} is {kind}, and keys of that type have no bytes of their own: cast it, like "
        'key_by("CAST(… AS VARCHAR)"), or give a serde= that writes it'
    )


def require_writable(serde: Serde[Any], kind: pa.DataType) -> None:
    """`InvalidError` or `TypeError` unless the serde writes columns of this type, whatever values they hold."""
    declared = serde.arrow_type
    if pa.types.is_integer(declared) and not pa.types.is_integer(kind):  # text would be cast, row by row
        raise TypeError(f"serde {serde.name} writes whole numbers, not {kind}")
    serde.encode_column(pa.array([], kind))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ` did you mean …?` with the nearest name, or an empty string."""
    names = list(known)
    folded = {each.casefold(): each for each in names}
    found = get_close_matches(name.casefold(), list(folded), 1)
    return f"; did you mean {folded[found[0]]}?" if found else ""


def unknown_column(what: str, name: str, schema: pa.Schema) -> InvalidError:
    listed = ", ".join(schema.names) if len(schema.names) else "none at all"
    hint = nearest(name, schema.names) or "."
    return InvalidError(f"{what}: there is no column {name!r}{hint} The columns are {listed}.")


def described(schema: pa.Schema) -> str:
    """`order_id string, amount double`."""
    return ", ".join(f"{each.name} {each.type}" for each in schema)


def is_object(serde: Serde[Any] | None) -> bool:
    """Whether values become several columns."""
    return serde is not None and pa.types.is_struct(serde.arrow_type)


# -- sql ------------------------------------------------------------------------------------------

_ROWS = "batch"
_DEEPEST_MACRO = 8
_TOKEN = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|[A-Za-z_][A-Za-z0-9_]*")
_IN_EXPRESSIONS = {
    "all", "and", "any", "array", "as", "between", "case", "cast", "collate", "distinct", "else", "end", "false",
    "for", "from", "in", "is", "like", "not", "null", "or", "then", "true", "when",
}  # fmt: skip
_REFUSED = {
    "WINDOW": "(…) OVER (…) looks at other rows, and its answer would depend on where a batch is cut; use "
    ".window(…).agg(…)",
    "SUBQUERY": "a subquery has no place in an expression over one row; use .lookup(…) for other tables",
    "STAR": "* is no expression; name the columns",
    "PARAMETER": "parameters are not filled in here; write the value into the expression",
}
_CLOCKS = {"current_timestamp", "current_date", "current_time", "localtimestamp", "localtime"}
_own = threading.local()


@dataclass(frozen=True)
class SqlExpression:
    """One checked expression: its text and the columns it reads, by their own names."""

    text: str
    reads: tuple[str, ...]


def parse(text: str, schema: pa.Schema, what: str) -> SqlExpression:
    """Check an expression against the columns there are; `InvalidError` says what to write instead."""
    if not text.strip():
        raise InvalidError(
            f"{what}: an empty expression; write SQL over the columns {', '.join(schema.names)}"
        )
    text, tree = _parsed(text, schema, what)
    for node in _nodes(tree):
        _refuse(node, what)
    by_folded: dict[str, list[str]] = {}
    for name in schema.names:
        by_folded.setdefault(name.casefold(), []).append(name)
    reads: dict[str, None] = {}
    bound = {name.casefold() for node in _nodes(tree) for name in _lambda_names(node)}
    for node in _nodes(tree):
        if node.get("class") != "COLUMN_REF":
            continue
        path = [name for name in node["column_names"] if name != _ROWS] or node["column_names"]
        if path[0].casefold() in bound:
            continue
        found = by_folded.get(path[0].casefold())
        if found is None and path[0].casefold() in _CLOCKS:
            raise InvalidError(f"{what}: {_changes_by_itself(path[0])}")
        if found is None:
            raise unknown_column(what, path[0], schema)
        if len(found) > 1:
            raise InvalidError(
                f"{what}: {path[0]} could be any of {', '.join(found)}; SQL does not tell upper from lower case, so "
                "rename one of them first, or use an Arrow expression"
            )
        reads[found[0]] = None
    return SqlExpression(text, tuple(reads))


def evaluate(
    expressions: Sequence[SqlExpression], columns: Mapping[str, pa.Array], rows: int, what: str
) -> list[pa.Array]:
    """A column for each expression, row by row."""
    duckdb = _duckdb()

    wanted = {name: columns[name] for each in expressions for name in each.reads}
    if not wanted:  # constants: a table needs some column to have rows
        wanted = {"": pa.nulls(rows, pa.int8())}
    connection = _connection()
    asked = ", ".join(f"({each.text}\n) AS c{place}" for place, each in enumerate(expressions))
    connection.register(_ROWS, pa.table(list(wanted.values()), names=list(wanted)))
    try:
        answer = connection.sql(f"SELECT {asked} FROM {_ROWS}").to_arrow_table()
    except duckdb.ConversionException as error:
        raise InvalidError(
            f"{what}: {_first_line(error)}; TRY_CAST(… AS …) gives null for what cannot be converted"
        ) from None
    except (duckdb.InvalidInputException, duckdb.OutOfRangeException) as error:
        said = _first_line(error).partition(". Use TRY")[0].rstrip("!.")
        raise InvalidError(f"{what}: {said}; TRY(…) gives null for what cannot be computed") from None
    except duckdb.Error as error:
        raise InvalidError(f"{what}: {_first_line(error)}") from None
    finally:
        connection.unregister(_ROWS)
    if answer.num_rows != rows:
        raise InvalidError(
            f"{what}: {answer.num_rows} values for {rows} rows; an expression gives one value for each row"
        )
    return [_plain(column) for column in answer.columns]


@lru_cache(maxsize=4096)
def typed(text: str, schema: pa.Schema, what: str) -> tuple[SqlExpression, pa.DataType]:
    """Check an expression and return it with its type; cached, because this takes milliseconds.

    It is also evaluated on a row of nulls, so that constants that do not fit are refused: `amount > 'abc'` would
    fail with the first record.
    """
    duckdb = _duckdb()

    expression = parse(text, schema, what)
    none = {each.name: pa.array([], each.type) for each in schema}
    (column,) = evaluate([expression], none, 0, what)
    try:
        evaluate([expression], {each.name: pa.nulls(1, each.type) for each in schema}, 1, what)
    except InvalidError as error:
        if isinstance(error.__context__, duckdb.ConversionException):
            raise
    return expression, column.type


def _plain(column: pa.ChunkedArray) -> pa.Array:
    """Return one array, of the types used everywhere else."""
    array = one_array(column)
    kind = array.type
    if pa.types.is_large_string(kind) or kind == pa.string_view():
        return array.cast(pa.string())
    if pa.types.is_large_binary(kind) or kind == pa.binary_view():
        return array.cast(pa.binary())
    return array


def _connection() -> Any:
    known, process = getattr(_own, "connection", None), getattr(_own, "process", None)
    if known is None or process != os.getpid():  # a forked worker must not touch its parent's
        _own.process = os.getpid()
        known = _own.connection = _duckdb().connect(
            ":memory:",
            config={
                "threads": 1,  # parallelism comes from the tasks; and rows keep their order
                "enable_external_access": "false",
                "autoinstall_known_extensions": "false",
                "preserve_insertion_order": "true",
            },
        )
        known.execute("SET TimeZone = 'UTC'")
    return known


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError:
        raise InvalidError(
            "SQL expressions need DuckDB: pip install 'tidegate[sql]', then try again; a column's name alone, Arrow "
            "expressions (pyarrow.compute.field(…)) and functions over Arrow batches work without it"
        ) from None
    return duckdb


# ── what an expression may hold ──────────────────────────────────────────────────────────────────────────────────


def _parsed(text: str, schema: pa.Schema, what: str) -> tuple[str, Any]:
    """Return the expression and its tree; columns that are SQL keywords, such as `offset`, are quoted if that helps."""
    try:
        return text, _tree(text, what)
    except InvalidError:
        quoted = _quote_reserved(text, frozenset(name.casefold() for name in schema.names))
        if quoted == text:
            raise
        return quoted, _tree(quoted, what)


def _quote_reserved(text: str, columns: frozenset[str]) -> str:
    wanted = columns & _reserved() - _IN_EXPRESSIONS

    def quote(match: re.Match[str]) -> str:
        word = match.group()
        return f'"{word}"' if word.casefold() in wanted else word

    return _TOKEN.sub(quote, text)


@cache
def _reserved() -> frozenset[str]:
    rows = _connection().execute(
        "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category = 'reserved'"
    )
    return frozenset(str(name) for (name,) in rows.fetchall())


def _tree(text: str, what: str) -> Any:
    """Return DuckDB's parse tree of the expression."""
    query = f"SELECT ({text}\n) AS c FROM {_ROWS}"
    answer = _connection().execute("SELECT json_serialize_sql(?::VARCHAR)", [query]).fetchall()[0]
    parsed = json.loads(answer[0])
    if parsed.get("error"):
        message = str(parsed.get("error_message", "it cannot be parsed")).splitlines()[0]
        raise InvalidError(f"{what}: {text!r} is no SQL expression: {message}")
    statements = parsed["statements"]
    if len(statements) != 1 or statements[0]["node"]["type"] != "SELECT_NODE":
        raise InvalidError(f"{what}: {text!r} is more than one expression; write one")
    selected = statements[0]["node"]["select_list"]
    if len(selected) != 1:
        raise InvalidError(f"{what}: {text!r} is {len(selected)} expressions; write one")
    return selected[0]


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every node of a parsed expression."""
    if isinstance(tree, dict):
        yield tree
        for value in tree.values():
            yield from _nodes(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _nodes(value)


def _refuse(node: Mapping[str, Any], what: str) -> None:
    kind = node.get("class")
    reason = _REFUSED.get(kind or "")
    if kind == "WINDOW":
        reason = f"{node.get('function_name', 'a function')}{reason}"
    elif kind == "FUNCTION":
        reason = _why_not(str(node["function_name"]).casefold())
    if reason is not None:
        raise InvalidError(f"{what}: {reason}")


@cache
def _why_not(name: str, depth: int = 0) -> str | None:
    """Why a function cannot be used; None: it can."""
    wanted = "SELECT function_type, stability, macro_definition FROM duckdb_functions() WHERE lower(function_name) = ?"
    found = _connection().execute(wanted, [name]).fetchall()
    kinds = {kind for kind, _, _ in found}
    if "scalar" in kinds:
        if any(kind == "scalar" and stability not in (None, "CONSISTENT") for kind, stability, _ in found):
            return _changes_by_itself(f"{name}()")
        return None
    if "macro" in kinds:
        return _why_not_macro(name, [text for kind, _, text in found if kind == "macro"], depth)
    if "aggregate" in kinds:
        return f"{name}() is an aggregate over many rows; use .window(…).agg(…)"
    if kinds:
        return f"{name}() makes rows of its own; an expression gives one value for each row"
    return None  # unknown: DuckDB reports it, with the nearest names


def _changes_by_itself(what: str) -> str:
    return (
        f"{what} answers something else each time, and a round that is repeated must give the same rows "
        "again; use the record's own time ts, or write a column when the record is produced"
    )


def _why_not_macro(name: str, definitions: Sequence[str | None], depth: int) -> str | None:
    if depth >= _DEEPEST_MACRO:
        return f"{name}() is defined by too many others to be looked through"
    for text in definitions:
        for node in _nodes(_tree(text or "NULL", name)):
            if node.get("class") in ("WINDOW", "SUBQUERY"):
                return f"{name}() looks at other rows; an expression is a function of one row"
            if node.get("class") == "FUNCTION":
                reason = _why_not(str(node["function_name"]).casefold(), depth + 1)
                if reason is not None:
                    return reason
    return None


def _lambda_names(node: Mapping[str, Any]) -> Iterator[str]:
    """Names bound by a lambda: not columns."""
    if node.get("class") == "LAMBDA":
        for inner in _nodes(node.get("lhs")):
            if inner.get("class") == "COLUMN_REF":
                yield inner["column_names"][0]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


_NO_FIELD = re.compile(r"No match for FieldRef\.Name\(([^)]*)\)")


class Projection:
    """Named expressions over the same columns, evaluated together; make it with the columns there are."""

    def __init__(
        self, columns: Sequence[tuple[str, Expression]], schema: pa.Schema, key: Serde[Any], *, what: str
    ) -> None:
        self._key, self._what = key, what
        self._visible = visible_schema(schema, key)
        self._plain: dict[int, str] = {}
        self._sql: dict[int, SqlExpression] = {}
        self._arrow: dict[int, pc.Expression] = {}
        self._functions: dict[int, ArrowFunction] = {}
        self._names = [name for name, _ in columns]
        self._types: list[pa.DataType | None] = [None] * len(columns)
        for place, (name, expression) in enumerate(columns):
            self._add(place, name, expression)
        self._reads = frozenset(self._plain.values()).union(*(each.reads for each in self._sql.values()))
        if self._arrow or self._functions:
            self._reads = frozenset(self._visible.names)
            none = [pa.array([], each.type) for each in self._visible]
            found = self._computed(pa.RecordBatch.from_arrays(none, schema=self._visible))
            for place, array in found.items():
                self._types[place] = self._fitting(place, array, 0).type
        for name, kind in zip(self._names, self._types, strict=True):
            if kind is None or pa.types.is_null(kind):
                raise InvalidError(
                    f"{self._what}: {name} has no type, only nulls; cast it, like CAST(NULL AS VARCHAR)"
                )

    @property
    def schema(self) -> pa.Schema:
        """The columns that the expressions give."""
        named = zip(self._names, self._types, strict=True)
        return pa.schema([pa.field(name, kind) for name, kind in named])

    def arrays(self, events: EventBatch) -> list[pa.Array]:
        """Return one column for each expression, in their order."""
        return self._evaluate(visible_columns(events, self._key, self._reads), len(events))

    def batch(self, events: EventBatch) -> pa.RecordBatch:
        """Return the columns as a batch, under their names."""
        return pa.RecordBatch.from_arrays(self.arrays(events), schema=self.schema)

    def _add(self, place: int, name: str, expression: Expression) -> None:
        if isinstance(expression, str):
            if expression in self._visible.names:
                self._plain[place] = expression
                self._types[place] = self._visible.field(expression).type
            elif expression.isidentifier() and expression.casefold() not in ("true", "false", "null"):
                raise unknown_column(self._what, expression, self._visible)
            else:
                self._sql[place], self._types[place] = typed(expression, self._visible, self._what)
        elif isinstance(expression, pc.Expression):
            self._arrow[place] = expression
        elif callable(expression):
            self._functions[place] = expression
        else:
            raise TypeError(
                f"{self._what}: {name} is a {type(expression).__name__}; an expression is SQL text, an Arrow "
                "expression or a function over a record batch"
            )

    def _evaluate(self, columns: Mapping[str, pa.Array], rows: int) -> list[pa.Array]:
        found: dict[int, pa.Array] = {place: columns[name] for place, name in self._plain.items()}
        if self._sql:
            found |= zip(
                self._sql, evaluate(list(self._sql.values()), columns, rows, self._what), strict=True
            )
        if self._arrow or self._functions:
            found |= self._computed(pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)))
        return [self._fitting(place, found[place], rows) for place in range(len(self._names))]

    def _computed(self, batch: pa.RecordBatch) -> dict[int, pa.Array]:
        """Evaluate Arrow expressions and functions on a batch with every column."""
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


class Mapped:
    """Applies a function to whole batches and checks the result against its schema."""

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
    """Call a user's function and return its result; if it fails on zero rows, the error says so."""
    if batch.num_rows:
        try:
            return function(batch)
        except SystemExit as end:  # it must not look like the end of the run that somebody asked for
            raise RuntimeError(f"it called sys.exit({end.code!r})") from end
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
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def shown(expression: Expression) -> str:
    """Return an expression as it is shown to users."""
    if isinstance(expression, str):
        return expression.strip()
    if isinstance(expression, pc.Expression):
        return str(expression)
    return f"{function_name(expression)}(…)"
