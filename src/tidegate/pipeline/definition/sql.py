"""SQL expressions over a batch of columns, by DuckDB: an extra, loaded when the first one is met.

An expression is a function of one row. What is not is refused before anything runs, by looking at how DuckDB parses
it: aggregates, window functions, subqueries (their answers would depend on where a batch was cut), and functions
whose answer changes by itself, such as `now()` and `random()` (a round that is repeated must give the same rows
again).

Names are DuckDB's: upper and lower case are the same. Times are in UTC. Nothing is read from or written to the
machine.

Thread rule: every thread of every process has a connection of its own.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.pipeline.definition.inferring import unknown_column

_ROWS = "batch"
_DEEPEST_MACRO = 8
_TOKEN = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|--[^\n]*|[A-Za-z_][A-Za-z0-9_]*")
_IN_EXPRESSIONS = {
    "all", "and", "any", "array", "as", "between", "case", "cast", "collate", "distinct", "else", "end", "false",
    "for", "from", "in", "is", "like", "not", "null", "or", "then", "true", "when",
}  # fmt: skip
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
    """A checked expression and its type; definitions are looked at again and again, and this takes milliseconds.

    Tried on a row of nulls, too, so that constants which do not fit are refused: `amount > 'abc'` would fail with the
    first record.
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
    """One array, of the types the rest of the house uses."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # what has no chunk at all stays chunked
        array = pa.array([], array.type) if not array.num_chunks else pa.concat_arrays(array.chunks)
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
                "threads": 1,  # the rounds' tasks are the parallelism; and rows keep their order
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
    """The expression and its tree; columns that are words of SQL, such as `offset`, are quoted where that helps."""
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
    """How DuckDB parses the expression."""
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
    if kind == "WINDOW":
        raise InvalidError(
            f"{what}: {node.get('function_name', 'a function')}(…) OVER (…) looks at other rows, and its "
            "answer would depend on where a batch is cut; use .window(…).agg(…)"
        )
    if kind == "SUBQUERY":
        raise InvalidError(
            f"{what}: a subquery has no place in an expression over one row; use .lookup(…) for other tables"
        )
    if kind == "STAR":
        raise InvalidError(f"{what}: * is no expression; name the columns")
    if kind == "PARAMETER":
        raise InvalidError(f"{what}: parameters are not filled in here; write the value into the expression")
    if kind == "FUNCTION":
        reason = _why_not(str(node["function_name"]).casefold())
        if reason is not None:
            raise InvalidError(f"{what}: {reason}")


@cache
def _why_not(name: str, depth: int = 0) -> str | None:
    """Why a function cannot be used, or None."""
    found = (
        _connection()
        .execute(
            "SELECT function_type, stability, macro_definition FROM duckdb_functions() WHERE lower(function_name) "
            "= ?",
            [name],
        )
        .fetchall()
    )
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
    return None  # unknown: DuckDB says so itself, with the nearest names


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
    """Names that a lambda brings: no columns."""
    if node.get("class") == "LAMBDA":
        for inner in _nodes(node.get("lhs")):
            if inner.get("class") == "COLUMN_REF":
                yield inner["column_names"][0]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
