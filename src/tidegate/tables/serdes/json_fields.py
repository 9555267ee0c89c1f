"""What a JSON value is declared to hold: named fields with Arrow types, written the way people write them.

| written | Arrow type | JSON it is read from |
|---|---|---|
| `string` | string | a string |
| `int`, `long`, `int32`, `uint8`, … | that integer | a number in range, without fraction and exponent |
| `double`, `float64` | double | any number that a double can hold; the nearest double |
| `bool` | bool | true, false |
| `decimal(18,2)` | decimal128 | a number, or a string that is one; refused if it has more places |
| `timestamp`, `timestamp[us]` | in UTC | an ISO 8601 string with its offset, or a whole number in the type's unit |
| `date` | date32 | a string like 2026-01-31 |
| `list<…>`, `struct<a: …, b: …>` | list, struct | the same inside |
| an Arrow type or field, `field("double", optional=True)` | itself | as above |

ISO 8601 is read as Python, Java and JavaScript write it: `T` or a blank, seconds and fraction or none, `Z`, `+02:00`,
`+0200`, `+02`, and the name of a zone in brackets behind the offset, which changes nothing. Digits of a fraction beyond
the type's unit are cut off. A moment without an offset could be in any zone, and is refused; declared as
`pa.timestamp("ms")` it is taken for UTC. `timestamp` counts milliseconds.

`"string not null"`, or an Arrow field that is not nullable, refuses null and absent; everything else may be null.
Values only.
"""

from __future__ import annotations

import re
from typing import Final, TypeAlias

import pyarrow as pa

from tidegate.errors import InvalidError

Declared: TypeAlias = "str | pa.DataType | pa.Field"

_NAMED: Final = {
    "string": pa.string(), "str": pa.string(), "text": pa.string(),
    "int": pa.int64(), "long": pa.int64(), "bigint": pa.int64(),
    "int64": pa.int64(), "int32": pa.int32(), "int16": pa.int16(), "int8": pa.int8(),
    "uint32": pa.uint32(), "uint16": pa.uint16(), "uint8": pa.uint8(),
    "double": pa.float64(), "float64": pa.float64(),
    "bool": pa.bool_(), "boolean": pa.bool_(),
    "timestamp": pa.timestamp("ms", tz="UTC"), "date": pa.date32(), "date32": pa.date32(),
}  # fmt: skip
_NOT_NULL: Final = re.compile(r"\s+not\s+null\s*$", re.IGNORECASE)
_DECIMAL: Final = re.compile(r"decimal(?:128)?\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)$")
_TIMESTAMP: Final = re.compile(r"timestamp\[(s|ms|us|ns)\]$")
DEEPEST: Final = 16
OPTIONAL: Final = b"tidegate.optional"


def field(declared: str | pa.DataType, *, optional: bool = False) -> pa.Field:
    """One field of a value: `Json(amount=field("double", optional=True))`.

    A field that state depends on, and that no record of a sample has, stops an app's start: it is misspelt, most of the
    time. `optional` says that it may be missing in all of them.
    """
    made = field_of("optional", declared)
    return made.with_metadata({OPTIONAL: b"true"}) if optional else made


def is_optional(declared: pa.Field) -> bool:
    """Whether it was said that records may all be without this field."""
    return OPTIONAL in (declared.metadata or {})


def field_of(name: str, declared: Declared) -> pa.Field:
    """The Arrow field of one declaration."""
    if isinstance(declared, pa.Field):
        kind = _checked(name, declared.type, 0)
        return pa.field(name, kind, nullable=declared.nullable, metadata=declared.metadata)
    if isinstance(declared, pa.DataType):
        return pa.field(name, _checked(name, declared, 0))
    if not isinstance(declared, str):
        raise TypeError(f"field {name!r} is declared by a {type(declared).__name__}; write a type's name")
    written = _NOT_NULL.sub("", declared)
    return pa.field(name, _checked(name, parse_type(written, name), 0), nullable=written == declared)


def parse_type(written: str, name: str) -> pa.DataType:
    """The Arrow type that a text names."""
    text = written.strip()
    lower = text.lower()
    if lower in _NAMED:
        return _NAMED[lower]
    if found := _DECIMAL.match(lower):
        return pa.decimal128(int(found[1]), int(found[2]))
    if found := _TIMESTAMP.match(lower):
        return pa.timestamp(found[1], tz="UTC")
    if lower.startswith("list<") and text.endswith(">"):
        return pa.list_(parse_type(text[5:-1], name))
    if lower.startswith("struct<") and text.endswith(">"):
        parts = [_member(part, name) for part in _split(text[7:-1])]
        return pa.struct(parts)
    raise InvalidError(
        f"field {name!r} is declared {written!r}, which is no type known here; write one of"
        f" {', '.join(sorted(set(_NAMED)))}, decimal(18,2), timestamp[us], list<string>, struct<a: int>"
    )


def _member(part: str, name: str) -> tuple[str, pa.DataType]:
    inner, colon, written = part.partition(":")
    if not colon or not inner.strip():
        raise InvalidError(f"field {name!r}: {part!r} is no member of a struct; write `name: type`")
    return inner.strip(), parse_type(written, name)


def _split(text: str) -> list[str]:
    """The parts between commas that are in no brackets."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "<([") - (letter in ">)]")
        if letter == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _checked(name: str, kind: pa.DataType, depth: int) -> pa.DataType:
    """The type, if JSON can be read into it exactly."""
    if depth > DEEPEST:
        raise InvalidError(f"field {name!r} is nested deeper than {DEEPEST}")
    if pa.types.is_list(kind):
        _checked(name, kind.value_type, depth + 1)
    elif pa.types.is_struct(kind):
        for index in range(kind.num_fields):
            _checked(name, kind.field(index).type, depth + 1)
    elif pa.types.is_float32(kind) or pa.types.is_float16(kind):
        raise InvalidError(
            f"field {name!r}: numbers would be rounded twice on their way to {kind}; use double"
        )
    elif not (
        is_flat(kind) or pa.types.is_decimal128(kind) or pa.types.is_timestamp(kind) or kind == pa.date32()
    ):
        raise InvalidError(f"field {name!r}: JSON is not read into {kind}")
    return kind


def is_flat(kind: pa.DataType) -> bool:
    """Whether the kernel reads this type by itself."""
    whole = pa.types.is_integer(kind) and kind != pa.uint64()
    return bool(whole or kind in (pa.float64(), pa.bool_(), pa.string()))
