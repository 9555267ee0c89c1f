"""Names and types: the columns a serde gives, the serde a type takes, the nearest name to one that is not there.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.pipeline.definition.steps import Source
from tidegate.tables.serdes.base import Bytes, Double, Int, Long, Serde, String
from tidegate.tables.serdes.json import Json

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
    """The columns of a source's events."""
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
    """What expressions see: the columns, then `key`, `ts`, `offset` and `partition` where no column has that name."""
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
    """` did you mean …?`, or nothing."""
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


def is_any_json(serde: Serde[Any] | None) -> bool:
    """JSON without declared fields."""
    return isinstance(serde, Json) and not serde.fields
