"""JSON values exactly: declared fields, single values, columns of texts, and columns written as objects.

| declared | Arrow type | JSON it is read from |
|---|---|---|
| `string`, `bool`, `int`, `int32`, `uint8`, … | that type | a string; true, false; a whole number in range |
| `double` | double | any number that a double can hold; the nearest double |
| `decimal(18,2)` | decimal128 | a number, or a string that is one; refused if it has more places |
| `timestamp`, `timestamp[us]` | in UTC | an ISO 8601 string with its offset, or a whole number in the type's unit |
| `date` | date32 | a string like 2026-01-31 |
| `list<…>`, `struct<a: …>`, an Arrow type or field | the same | the same inside |

Numbers stay text until the declared type is known, so nothing is rounded on the way. A time without an offset is
refused, except for `pa.timestamp("ms")`; digits beyond the unit are cut off. `NaN` is not JSON, half a surrogate pair
is no text, undeclared names are ignored; `"… not null"` refuses null and absent. `Refused` says why a row is bad.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as arrow_json

from tidegate.errors import InvalidError
from tidegate.kernels import json_rows as kernel
from tidegate.windows.keys import Bytes, binary_column, make_binary, present_rows, room_for

# --- json fields

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
    """Declare one field of a value: `Json(amount=field("double", optional=True))`.

    An app does not start if no sampled record has a field that state depends on: it is usually misspelt. `optional`
    says that all of them may lack it.
    """
    made = field_of("optional", declared)
    return made.with_metadata({OPTIONAL: b"true"}) if optional else made


def is_optional(declared: pa.Field) -> bool:
    """Whether all records may lack this field."""
    return OPTIONAL in (declared.metadata or {})


def field_of(name: str, declared: Declared) -> pa.Field:
    """Return the Arrow field of one declaration."""
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
    """Return the Arrow type that a text names."""
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
    """Split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "<([") - (letter in ">)]")
        if letter == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _checked(name: str, kind: pa.DataType, depth: int) -> pa.DataType:
    """Return the type if JSON can be read into it exactly."""
    if depth > DEEPEST:
        raise InvalidError(f"field {name!r} is nested deeper than {DEEPEST}")
    if pa.types.is_list(kind):
        _checked(name, kind.value_type, depth + 1)
    elif pa.types.is_struct(kind):
        for member in kind:
            _checked(name, member.type, depth + 1)
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
    """Whether the kernel reads this type itself."""
    whole = pa.types.is_integer(kind) and kind != pa.uint64()
    return bool(whole or kind in (pa.float64(), pa.bool_(), pa.string()))


# --- json values

SHOWN: Final = 40
ZONE_NAME: Final = r"\[[A-Za-z0-9_+/:-]+\]$"  # behind an offset, as Java's ZonedDateTime is written
_DIGITS: Final = {"s": 0, "ms": 3, "us": 6, "ns": 9}


class Refused(Exception):
    """Raised if a row is not as declared; says why."""


class Number(str):
    """A number as text."""

    __slots__ = ()

    @property
    def is_whole(self) -> bool:
        return not any(letter in ".eE" for letter in self)


def _no_constant(text: str) -> NoReturn:
    raise Refused(f"{text} is not JSON")


_DECODER: Final = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=_no_constant)


def parse(raw: bytes) -> Any:
    """Parse JSON text into a value, with numbers as `Number`."""
    try:
        return _DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Refused(f"not UTF-8 text: byte {error.start} is {raw[error.start]:#04x}") from None
    except json.JSONDecodeError as error:
        raise Refused(f"not JSON: {error.msg} at byte {error.pos}") from None
    except RecursionError:
        raise Refused("not read: nested too deep") from None


def parse_row(raw: bytes, schema: pa.Schema) -> list[Any]:
    """Return the declared fields of a row, as Python values that Arrow accepts."""
    found = parse(raw)
    if not isinstance(found, dict):
        raise Refused(f"{_show(found)} where an object is expected")
    return [convert(found.get(field.name), field, field.name) for field in schema]


def convert(value: Any, field: pa.Field, where: str) -> Any:
    """Convert a parsed value to a Python value of the declared type."""
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
    """Return a pattern of the fraction digits beyond the type's unit, and its replacement."""
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
    return {one.name: convert(value.get(one.name), one, f"{where}.{one.name}") for one in kind}


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
    """Return converted values as an Arrow column."""
    if is_flat(kind) or not _has_moment(kind):
        return pa.array(values, kind)
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if pa.types.is_date32(kind):
        return pa.array(values, pa.int32()).cast(kind)
    # Times are numbers by now; inside lists and structs they are passed as numbers, then cast to their type.
    return pa.array(values, _with_numbers(kind)).cast(kind)


def _has_moment(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return _has_moment(kind.value_type)
    if pa.types.is_struct(kind):
        return any(_has_moment(one.type) for one in kind)
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date32(kind))


def _with_numbers(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(_with_numbers(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, _with_numbers(one.type), one.nullable) for one in kind])
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


# --- json texts

# Arrow takes digits before a point only, and the point not last; a JSON number is always like that.
_NUMBER: Final = r"^-?[0-9]+(\.[0-9]+)?$"
_DATE: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
_MOMENT: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?"
    r"((Z|[+-][0-9]{2}(:?[0-9]{2})?)(\[[A-Za-z0-9_+/:-]+\])?)?$"
)
_INTEGER: Final = r"^-?(0|[1-9][0-9]{0,17})$"
_NESTED_LEAVES: Final = {pa.int64(), pa.string(), pa.bool_()}


def convert_texts(texts: pa.StringArray, field: pa.Field) -> tuple[pa.Array, dict[int, str]]:
    """Return the typed column, and the rows that are not as declared with their reasons."""
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), field.type), {}
    try:
        whole = _whole_column(texts, field.type)
    except pa.ArrowInvalid:
        whole = None
    return (whole, {}) if whole is not None else _row_by_row(texts, field)


def _whole_column(texts: pa.StringArray, kind: pa.DataType) -> pa.Array | None:
    """Return the column converted by Arrow, or None where Arrow's rules differ."""
    if pa.types.is_list(kind) or pa.types.is_struct(kind):
        return _nested(texts, kind) if _is_plain(kind) else None
    bare = pc.utf8_trim(texts, characters='"')
    is_quoted = pc.starts_with(texts, '"')
    if pa.types.is_decimal128(kind):
        return bare.cast(kind) if _all_match(bare, _NUMBER) else None
    if pc.all(is_quoted).as_py():
        if pa.types.is_date32(kind):
            return bare.cast(kind) if _all_match(bare, _DATE) else None
        return _moments(bare, kind) if _all_match(bare, _MOMENT) else None
    if pa.types.is_timestamp(kind) and _all_match(texts, _INTEGER):
        return texts.cast(pa.int64()).cast(kind)
    return None


def _moments(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """Parse times with Arrow; retry without what it does not accept: names of zones, digits beyond the unit."""
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        plain = pc.replace_substring_regex(texts, ZONE_NAME, "")
        return pc.replace_substring_regex(plain, *beyond_unit(kind)).cast(kind)


def _all_match(texts: pa.StringArray, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(texts, pattern)).as_py())


def _is_plain(kind: pa.DataType) -> bool:
    """Whether Arrow's JSON reader gives this type exactly what the text says, or refuses it."""
    if pa.types.is_list(kind):
        return kind.value_field.nullable and _is_plain(kind.value_type)
    if pa.types.is_struct(kind):
        return all(one.nullable and _is_plain(one.type) for one in kind)
    return kind in _NESTED_LEAVES


def _nested(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """Parse lists and structs with Arrow's reader of JSON lines; line breaks inside a value count as blanks."""
    filled = pc.replace_substring(texts.fill_null("null"), "\n", " ")
    lines = pc.binary_join_element_wise('{"v":', pc.replace_substring(filled, "\r", " "), "}\n", "")
    joined = lines.buffers()[2]
    table = arrow_json.read_json(
        pa.BufferReader(joined),
        read_options=arrow_json.ReadOptions(use_threads=False, block_size=max(1, joined.size)),
        parse_options=arrow_json.ParseOptions(
            explicit_schema=pa.schema([("v", kind)]), unexpected_field_behavior="ignore"
        ),
    )
    found = table["v"].combine_chunks()
    if len(found) != len(texts):
        raise pa.ArrowInvalid(f"{len(found)} values read from {len(texts)} texts")
    return found


def _row_by_row(texts: pa.StringArray, field: pa.Field) -> tuple[pa.Array, dict[int, str]]:
    values: list[Any] = [None] * len(texts)
    refused: dict[int, str] = {}
    for row in np.flatnonzero(texts.is_valid().to_numpy(zero_copy_only=False)).tolist():
        try:
            values[row] = convert(parse(texts[row].as_py().encode()), field, field.name)
        except Refused as reason:
            refused[row] = str(reason)
    return as_array(values, field.type), refused


# --- json objects

Texts: TypeAlias = "Callable[[pa.Array, str], pa.StringArray]"
Int64s = npt.NDArray[np.int64]
_LEAST = -(2**63)


class _Column(NamedTuple):
    """One column as the kernel takes it: `numbers` (with powers of ten), texts, or both."""

    kind: int
    valid: Bytes
    numbers: Int64s | None
    powers: Bytes | None
    texts: pa.StringArray | None


def _column(name: str, column: pa.Array, texts: Texts) -> _Column:
    valid = present_rows(column).view(np.uint8)
    if pa.types.is_integer(column.type) and column.type != pa.uint64():
        numbers = _filled(column.cast(pa.int64()), 0)
        if not len(numbers) or int(numbers.min()) > _LEAST:
            return _Column(kernel.INTEGER, valid, numbers, np.zeros(len(column), np.uint8), None)
    elif pa.types.is_floating(column.type):
        column = column.cast(pa.float64())
        numbers, powers = np.empty(len(column), np.int64), np.empty(len(column), np.uint8)
        others = None
        if kernel.find_decimals(_filled(column, 0.0), kernel.TENS, numbers, powers):
            others = texts(column.take(pa.array(np.flatnonzero(powers == kernel.NO_POWER))), name)
        return _Column(kernel.DECIMAL, valid, numbers, powers, others)
    return _Column(kernel.TEXTS, valid, None, None, texts(column, name))


def write_objects(batch: pa.RecordBatch, texts: Texts) -> pa.BinaryArray:
    """Write one object for each row; `texts` makes the JSON texts of a column, and refuses values without JSON."""
    rows, schema = batch.num_rows, batch.schema
    names = [f",{json.dumps(name, ensure_ascii=False)}:".encode() for name in schema.names]
    names[0] = b"{" + names[0][1:]
    made = [_column(*each, texts) for each in zip(schema.names, batch.columns, strict=True)]
    numeric = [each for each in made if each.numbers is not None]
    pieces = [each.texts for each in made if each.texts is not None]
    # the texts of a single column are not copied
    joined = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces or [pa.array([], pa.string())])
    text, name_bytes = binary_column(joined), sum(map(len, names))
    room = rows * (name_bytes + 1 + 4 * len(names) + kernel.LONGEST_NUMBER * len(numeric)) + text.total_bytes
    ends = np.empty(rows + 1, np.int32)
    # From Arrow's pool, whose pages are reused: new pages cost as much as writing into them.
    content = np.frombuffer(pa.allocate_buffer(room_for(room, "a column of JSON")), np.uint8)
    size = kernel.write_json_objects(
        rows,
        np.frombuffer(b"".join(names), np.uint8),
        np.cumsum([0, *map(len, names)], dtype=np.int32),
        np.array([each.kind for each in made], np.int32),
        _starts([int(each.numbers is not None) for each in made], np.int32),
        _behind([each.numbers for each in numeric], np.int64),
        _behind([each.powers for each in numeric], np.uint8),
        _behind([each.valid for each in made], np.uint8),
        text.content,
        np.ascontiguousarray(text.bounds),
        kernel.NULL,
        _starts([0 if each.texts is None else len(each.texts) for each in made], np.int64),
        ends,
        content,
    )
    return make_binary(ends, content[:size], None)


def _starts(sizes: Sequence[int], kind: type[np.generic]) -> npt.NDArray[Any]:
    """Return where each of consecutive parts begins."""
    return np.cumsum([0, *sizes[:-1]]).astype(kind)


def _filled(column: pa.Array, instead: float) -> npt.NDArray[Any]:
    if column.null_count:
        column = pc.fill_null(column, instead)
    return np.ascontiguousarray(column.to_numpy(zero_copy_only=False))


def _behind(arrays: Sequence[Any], kind: type[np.generic]) -> npt.NDArray[Any]:
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0])
    return np.concatenate(arrays) if arrays else np.zeros(0, kind)
