"""JSON one row at a time: slow, and exact about everything the kernel leaves alone.

The standard library's parser reads the text; numbers stay the text they are until the declared type is known, so
nothing is rounded on the way. A field that occurs twice has its last value, as in every common parser; `NaN` and
`Infinity` are not JSON; half a surrogate pair is no text; a name that is not declared is ignored.

`Refused` carries why a row is bad, in words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NoReturn

import pyarrow as pa

from tidegate.tables.serdes.json_fields import is_flat

SHOWN: Final = 40
ZONE_NAME: Final = r"\[[A-Za-z0-9_+/:-]+\]$"  # behind an offset, as Java's ZonedDateTime is written
_DIGITS: Final = {"s": 0, "ms": 3, "us": 6, "ns": 9}


class Refused(Exception):
    """A row is not what was declared; says why."""


class Number(str):
    """A number as it is written."""

    __slots__ = ()

    @property
    def is_whole(self) -> bool:
        return not any(letter in ".eE" for letter in self)


def _no_constant(text: str) -> NoReturn:
    raise Refused(f"{text} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=_no_constant)


def parse(raw: bytes) -> Any:
    """The value in some JSON text, with numbers as `Number`."""
    try:
        return _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Refused(f"not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}") from None
    except json.JSONDecodeError as error:
        raise Refused(f"not JSON: {error.msg} at byte {error.pos}") from None
    except RecursionError:
        raise Refused("not read: nested too deep") from None


def parse_row(raw: bytes, schema: pa.Schema) -> list[Any]:
    """The declared fields of a row, as Python values that Arrow takes."""
    found = parse(raw)
    if not isinstance(found, dict):
        raise Refused(f"{_show(found)} where an object is expected")
    return [convert(found.get(field.name), field, field.name) for field in schema]


def convert(value: Any, field: pa.Field, where: str) -> Any:
    """A parsed value as a Python value of the declared type."""
    if value is None:
        if not field.nullable:
            raise Refused(f"field {where!r} is null or absent, and must not be")
        return None
    kind = field.type
    for fits, read in _READERS:
        if fits(kind):
            return read(value, kind, where)
    raise Refused(f"field {where!r}: {kind} is not read")  # pragma: no cover - declared types are checked


def _string(value: Any, kind: pa.DataType, where: str) -> str:
    if not isinstance(value, str) or isinstance(value, Number):
        raise _other(value, kind, where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refused(f"field {where!r} holds half a surrogate pair, which is no text") from None
    return value


def _whole(value: Any, kind: pa.DataType, where: str) -> int:
    if not isinstance(value, Number) or not value.is_whole:
        raise _other(value, kind, where)
    bits = kind.bit_width - (1 if pa.types.is_signed_integer(kind) else 0)
    least = -(1 << bits) if pa.types.is_signed_integer(kind) else 0
    number = int(value) if len(value) < 40 else 1 << 64
    if not least <= number < 1 << bits:
        raise Refused(f"field {where!r}: {_show(value)} does not fit {kind}")
    return number


def _double(value: Any, kind: pa.DataType, where: str) -> float:
    if not isinstance(value, Number):
        raise _other(value, kind, where)
    number = float(value)
    if number in (float("inf"), float("-inf")):
        raise Refused(f"field {where!r}: {_show(value)} is too large for a double")
    return number


def _boolean(value: Any, kind: pa.DataType, where: str) -> bool:
    if not isinstance(value, bool):
        raise _other(value, kind, where)
    return value


def _decimal(value: Any, kind: pa.DataType, where: str) -> Decimal:
    if not isinstance(value, str):
        raise _other(value, kind, where)
    try:
        number = Decimal(value)
        exact = number.is_finite() and abs(number.adjusted()) < 100
        if exact and value.isascii() and "_" not in value and value == value.strip():
            unscaled = number.scaleb(kind.scale)
            whole = unscaled.to_integral_value()
            if whole == unscaled and abs(whole) < 10**kind.precision:
                return number
    except InvalidOperation:
        pass
    raise Refused(f"field {where!r}: {_show(value)} is no {kind}")


def beyond_unit(kind: pa.DataType) -> tuple[str, str]:
    """What of a moment's fraction is more than the type's unit can say, as a pattern, and what stays of it."""
    digits = _DIGITS[kind.unit]
    return (rf"(\.[0-9]{{{digits}}})[0-9]+", r"\1") if digits else (r"\.[0-9]+", "")


def _moment(value: Any, kind: pa.DataType, where: str) -> Any:
    if isinstance(value, Number):
        if pa.types.is_date(kind):
            raise _other(value, kind, where)
        return _whole(value, pa.int64(), where)
    text = _string(value, kind, where)
    try:
        if pa.types.is_date(kind):
            return pa.scalar(text).cast(kind).cast(pa.int32()).as_py()
        plain = re.sub(*beyond_unit(kind), re.sub(ZONE_NAME, "", text))
        return pa.scalar(plain).cast(kind).cast(pa.int64()).as_py()
    except pa.ArrowInvalid:
        raise Refused(
            f"field {where!r}: {_show(text)} is no {kind}; write it like"
            f" {'2026-01-31' if pa.types.is_date(kind) else '2026-01-31T10:00:00Z, with its offset from UTC'}"
        ) from None


def _list(value: Any, kind: pa.DataType, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _other(value, kind, where)
    return [convert(one, kind.value_field, f"{where}[{index}]") for index, one in enumerate(value)]


def _struct(value: Any, kind: pa.DataType, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _other(value, kind, where)
    fields = [kind.field(index) for index in range(kind.num_fields)]
    return {one.name: convert(value.get(one.name), one, f"{where}.{one.name}") for one in fields}


_READERS: Final[list[tuple[Callable[[pa.DataType], bool], Callable[[Any, pa.DataType, str], Any]]]] = [
    (pa.types.is_string, _string),
    (pa.types.is_float64, _double),
    (pa.types.is_boolean, _boolean),
    (pa.types.is_integer, _whole),
    (pa.types.is_decimal128, _decimal),
    (pa.types.is_timestamp, _moment),
    (pa.types.is_date32, _moment),
    (pa.types.is_list, _list),
    (pa.types.is_struct, _struct),
]


def as_array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Converted values as an Arrow column."""
    if is_flat(kind) or not _has_moment(kind):
        return pa.array(values, kind)
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if pa.types.is_date32(kind):
        return pa.array(values, pa.int32()).cast(kind)
    # Moments are numbers by now; inside lists and structs they are given as such, then called by their type.
    return pa.array(values, _with_numbers(kind)).cast(kind)


def _has_moment(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return _has_moment(kind.value_type)
    if pa.types.is_struct(kind):
        return any(_has_moment(kind.field(index).type) for index in range(kind.num_fields))
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date32(kind))


def _with_numbers(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_with_numbers(kind.value_type))
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([pa.field(one.name, _with_numbers(one.type), one.nullable) for one in fields])
    if pa.types.is_timestamp(kind):
        return pa.int64()
    return pa.int32() if pa.types.is_date32(kind) else kind


def _other(value: Any, kind: pa.DataType, where: str) -> Refused:
    return Refused(f"field {where!r}: {_show(value)} where {kind} is expected")


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = str(value) if isinstance(value, Number) else json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({len(text)} characters)"
