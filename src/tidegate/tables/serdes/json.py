"""JSON as a serde over whole columns, and serdes by their names.

One kernel pass reads the rows that it can read exactly (`kernels/json_rows`) into typed Arrow columns. Other rows are
read one by one (`json_values`), which also says why a row is bad. Types that the kernel does not know leave it as JSON
text and are converted a column at a time.

I1  every value is the one the text says: the nearest double, the whole number, the text; never a guess.
I2  a row that is not as declared is bad as a whole: its number and the reason are given, its columns are null. A null
    value is no row: absent, neither good nor bad.

Objects are written with exactly the declared fields, in their order, without blanks, and doubles with the fewest
digits that read back the same. What is stored of a serde is its `repr`, read as a constant expression and never run.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import CorruptError, InvalidError
from tidegate.kernels import json_rows as kernel
from tidegate.tables.serdes.base import Bytes, DecodedColumn, Double, Int, Long, Serde, String
from tidegate.tables.serdes.json_values import (
    Declared,
    Refused,
    as_array,
    convert_texts,
    field_of,
    is_flat,
    parse,
    parse_row,
    write_objects,
)
from tidegate.windows.keys import BinaryColumn, Flags, binary_column, make_binary, present_rows, room_for

# --- json columns

Int64s = npt.NDArray[np.int64]
_KINDS: Final = {pa.float64(): kernel.DOUBLE, pa.bool_(): kernel.BOOLEAN, pa.string(): kernel.STRING}


@dataclass(frozen=True, eq=False)
class DecodedValues:
    """Columns with a row for every value, the rows without a value, and the bad rows with their reasons."""

    batch: pa.RecordBatch
    absent: Flags
    bad_rows: Int64s
    reasons: tuple[str, ...]

    @property
    def good(self) -> Flags:
        """The rows that have a value and are as declared."""
        good: Flags = ~self.absent
        good[self.bad_rows] = False
        return good


class JsonDecoder:
    """Reads JSON objects into declared fields."""

    def __init__(self, fields: dict[str, Declared]) -> None:
        if not fields:
            raise InvalidError("declare at least one field of the JSON values, like order_id='string'")
        for name in fields:
            if not name or any(letter in '"\\' or letter < " " for letter in name):
                raise InvalidError(
                    f"{name!r} is no name for a field: quotes, backslashes and controls are not"
                )
        self.schema = pa.schema([field_of(name, declared) for name, declared in fields.items()])
        names = [name.encode() for name in fields]
        self._names = np.frombuffer(b"".join(names), np.uint8)
        self._name_bounds = np.cumsum([0, *map(len, names)], dtype=np.int32)
        # absent and bad rows are null in every column, whatever was declared
        self.nullable_schema = pa.schema([field.with_nullable(True) for field in self.schema])
        kinds = [self._kind(field.type) for field in self.schema]
        self._kinds = np.array(kinds, np.int32)
        is_text = self._kinds >= kernel.STRING
        self._slots = np.where(is_text, np.cumsum(is_text), np.cumsum(~is_text)).astype(np.int32) - 1
        self._required = np.array([not field.nullable for field in self.schema], np.int32)

    @staticmethod
    def _kind(kind: pa.DataType) -> int:
        if not is_flat(kind):
            return kernel.TEXT
        return _KINDS.get(kind, kernel.INTEGER)

    def decode(self, values: pa.Array | pa.ChunkedArray) -> DecodedValues:
        """Read a column of JSON values."""
        column = binary_column(values)
        arrays, verdicts = self._scan(column)
        slow = np.flatnonzero(verdicts == kernel.IRREGULAR)
        bad: dict[int, str] = {}
        for index, field in enumerate(self.schema):
            if self._kinds[index] == kernel.TEXT:
                arrays[index], refused = convert_texts(arrays[index], field)
                bad.update(refused)
            elif pa.types.is_integer(field.type) and field.type != pa.int64():
                arrays[index], out_of_range = _narrow(arrays[index], field.type)
                slow = np.union1d(slow, out_of_range)
        if len(slow):
            arrays = self._read_slowly(column, arrays, slow, bad)
        bad_rows = np.array(sorted(bad), np.int64)
        batch = pa.record_batch(arrays, schema=self.nullable_schema)
        if len(bad_rows):
            batch = _blank(batch, bad_rows)
        return DecodedValues(batch, ~column.present, bad_rows, tuple(bad[row] for row in bad_rows.tolist()))

    def _scan(self, column: BinaryColumn) -> tuple[list[pa.Array], npt.NDArray[np.uint8]]:
        """Return what the kernel read, and its verdict for each row."""
        rows, room, fields = len(column.present), column.total_bytes, len(self.schema)
        texts = int(np.count_nonzero(self._kinds >= kernel.STRING))
        numbers = np.empty((fields - texts) * rows, np.int64)
        ends, content = np.empty(texts * (rows + 1), np.int32), np.empty(texts * room, np.uint8)
        valid, verdicts = np.empty(fields * rows, np.uint8), np.empty(rows, np.uint8)
        kernel.read_json_rows(
            column.content, column.bounds, column.present, self._names, self._name_bounds, self._kinds, self._slots,
            self._required, room, numbers, ends, content, valid, verdicts, np.empty(fields, np.int64),
        )  # fmt: skip
        arrays = []
        for index, field in enumerate(self.schema):
            slot, flags = int(self._slots[index]), valid[index * rows : (index + 1) * rows].view(np.bool_)
            if self._kinds[index] >= kernel.STRING:
                own = ends[slot * (rows + 1) : (slot + 1) * (rows + 1)]
                arrays.append(
                    make_binary(own, content[slot * room : slot * room + own[-1]], flags, pa.string())
                )
            else:
                arrays.append(_numbers(numbers[slot * rows : (slot + 1) * rows], flags, field.type))
        return arrays, verdicts

    def _read_slowly(
        self, column: BinaryColumn, arrays: list[pa.Array], slow: Int64s, bad: dict[int, str]
    ) -> list[pa.Array]:
        """Return the columns with these rows read by the standard library; bad ones are added to `bad`."""
        read: list[list[Any]] = []
        places: list[int] = []
        for row in slow.tolist():
            raw = column.content[column.bounds[row] : column.bounds[row + 1]].tobytes()
            try:
                read.append(parse_row(raw, self.schema))
                places.append(row)
                bad.pop(row, None)
            except Refused as refused:
                bad[row] = str(refused)
        if not places:
            return arrays
        take = np.arange(len(column.present))
        take[places] = len(take) + np.arange(len(places))
        merged = []
        for index, field in enumerate(self.schema):
            found = as_array([row[index] for row in read], field.type)
            merged.append(pa.concat_arrays([arrays[index], found]).take(pa.array(take)))
        return merged


def _numbers(values: Int64s, flags: Flags, kind: pa.DataType) -> pa.Array:
    """Return a column of what the kernel wrote; integers are still 64 bits wide."""
    nulls = int(len(flags) - np.count_nonzero(flags))
    mask = pa.py_buffer(np.packbits(flags, bitorder="little")) if nulls else None
    if kind == pa.bool_():
        bits = pa.py_buffer(np.packbits(values.astype(np.bool_), bitorder="little"))
        return pa.Array.from_buffers(kind, len(values), [mask, bits], null_count=nulls)
    wide = pa.float64() if kind == pa.float64() else pa.int64()
    return pa.Array.from_buffers(wide, len(values), [mask, pa.py_buffer(values)], null_count=nulls)


def _narrow(numbers: pa.Int64Array, kind: pa.DataType) -> tuple[pa.Array, Int64s]:
    """Return the numbers in a narrower type, and the rows whose number does not fit it."""
    least = -(1 << (kind.bit_width - 1)) if pa.types.is_signed_integer(kind) else 0
    values = numbers.fill_null(0).to_numpy(zero_copy_only=False)
    outside = (values < least) | (values > least + (1 << kind.bit_width) - 1)
    rows = np.flatnonzero(outside)
    if len(rows):
        numbers = pc.if_else(pa.array(outside), pa.scalar(None, pa.int64()), numbers)
    return numbers.cast(kind), rows


def _blank(batch: pa.RecordBatch, rows: Int64s) -> pa.RecordBatch:
    take = np.arange(batch.num_rows)
    mask = np.zeros(batch.num_rows, np.bool_)
    mask[rows] = True
    return batch.take(pa.array(take, mask=mask))


# --- json serde

PIECE_VALUES: Final = 1 << 14  # of lists, held as Python objects at a time
_CONTROLS: Final = [chr(code) for code in range(32)]
_SHORT: Final = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


class Json:
    """JSON values, with or without declared fields."""

    name = "json"
    fixed_bytes: int | None = None

    def __init__(self, **fields: Declared) -> None:
        self.fields = dict(fields)
        self._decoder = JsonDecoder(self.fields) if fields else None
        self.arrow_type: pa.DataType = (
            pa.string() if self._decoder is None else pa.struct(list(self.decoder.schema))
        )

    @property
    def decoder(self) -> JsonDecoder:
        if self._decoder is None:
            raise InvalidError("this Json() declares no fields; declare them, like Json(order_id='string')")
        return self._decoder

    @property
    def schema(self) -> pa.Schema:
        """The declared columns."""
        return self.decoder.schema

    def encode(self, value: Any) -> bytes | None:
        if value is None:
            return None
        if self._decoder is not None:
            if not isinstance(value, dict):
                raise TypeError(
                    f"serde json with declared fields writes a dict, not a {type(value).__name__}"
                )
            unknown = value.keys() - self.fields.keys()
            if unknown:
                raise InvalidError(
                    f"fields {sorted(map(str, unknown))} are not declared; declared are {list(self.fields)}"
                )
            return bytes(encode_objects(_one_row(value, self.schema))[0].as_py())
        try:
            return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, UnicodeEncodeError) as error:
            raise InvalidError(f"not a JSON value: {error}") from None

    def decode(self, raw: bytes | None) -> Any:
        """Return a dict of the declared fields, or any JSON value if no field is declared."""
        if raw is None:
            return None
        try:
            if self._decoder is None:
                parse(raw)  # refuses what Python's parser would accept
                return json.loads(raw.decode())
            values = parse_row(raw, self.schema)
        except Refused as refused:
            raise CorruptError(str(refused), kafka_name=None) from None
        arrays = [as_array([value], field.type) for value, field in zip(values, self.schema, strict=True)]
        return {field.name: array[0].as_py() for field, array in zip(self.schema, arrays, strict=True)}

    def decode_values(self, raw: pa.Array | pa.ChunkedArray) -> DecodedValues:
        """Return the declared columns of a column of JSON, with bad rows and their reasons."""
        return self.decoder.decode(raw)

    def encode_column(self, values: pa.Array) -> pa.BinaryArray:
        if self._decoder is None:
            return String().encode_column(values)
        if not pa.types.is_struct(values.type):
            raise TypeError(f"serde json writes columns of {self.arrow_type}, not of {values.type}")
        batch = pa.RecordBatch.from_struct_array(values)
        written = encode_objects(batch.select(list(self.fields)).cast(self.decoder.nullable_schema))
        if values.null_count:
            written = pc.if_else(values.is_valid(), written, pa.scalar(None, pa.binary()))
        return written

    def decode_column(self, raw: pa.Array) -> DecodedColumn:
        if self._decoder is None:
            return String().decode_column(raw)
        decoded = self.decode_values(raw)
        good = decoded.good
        values = pa.StructArray.from_arrays(
            decoded.batch.columns, fields=list(self.decoder.nullable_schema), mask=pa.array(~good)
        )
        return DecodedColumn(values, decoded.bad_rows, decoded.reasons)

    def __repr__(self) -> str:
        return f"Json({', '.join(f'{name}={declared!r}' for name, declared in self.fields.items())})"


_IN_A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_FIRST_DAY, _LAST_DAY = -719_528, 2_932_896  # 0000-01-01 and 9999-12-31, in days since 1970


def encode_objects(batch: pa.RecordBatch) -> pa.BinaryArray:
    """Write one JSON object for each row, with the columns as fields, in their order."""
    if not batch.num_columns:
        return pa.array([b"{}"] * batch.num_rows, pa.binary())
    return write_objects(batch, _texts)


def _texts(column: pa.Array, name: str) -> pa.StringArray:
    """Return a column as JSON texts, null where it is null."""
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return column.cast(pa.string())
    if pa.types.is_floating(kind):
        finite = pc.is_finite(column).fill_null(True).to_numpy(zero_copy_only=False)
        if not finite.all():
            row = int(np.argmin(finite))
            raise InvalidError(f"row {row}: field {name!r} is {column[row].as_py()}, which JSON cannot say")
        return column.cast(pa.float64()).cast(pa.string())
    if pa.types.is_string(kind):
        return pc.binary_join_element_wise('"', _escaped(column), '"', "")
    if pa.types.is_decimal(kind):
        return _plain_decimals(column)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        _require_four_digit_years(column, name)
        written = _moments(column) if pa.types.is_timestamp(kind) else column.cast(pa.string())
        return pc.binary_join_element_wise('"', written, '"', "")
    try:
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            return _list_texts(column)
        nested = [None if one is None else _dumped(one) for one in column.to_pylist()]
    except InvalidError:  # too large a column
        raise
    except ValueError as error:
        raise InvalidError(f"field {name!r} has a value that JSON cannot say: {error}") from None
    return pa.array(nested, pa.string())


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=str)


def _list_texts(column: pa.ListArray | pa.LargeListArray) -> pa.StringArray:
    """Return each list as a JSON array, null where it is null.

    One list can be a whole window of `collect`, and as Python objects its values take three times the memory of the
    column. At most `PIECE_VALUES` values are therefore Python objects at a time.
    """
    bounds, present = np.asarray(column.offsets, np.int64), present_rows(column)
    content, ends = bytearray(), np.zeros(len(column) + 1, np.int32)
    for start, stop in _pieces(bounds):
        if stop == start + 1:
            if present[start]:
                _write_list(content, column.values, int(bounds[start]), int(bounds[stop]))
            ends[stop] = room_for(len(content), "a column of JSON")
            continue
        for row, values in enumerate(column.slice(start, stop - start).to_pylist(), start + 1):
            if values is not None:
                content += _dumped(values).encode()
            ends[row] = room_for(len(content), "a column of JSON")
    return make_binary(ends, np.frombuffer(content, np.uint8), present, pa.string())


def _pieces(bounds: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut rows of lists into ranges with at most `PIECE_VALUES` rows and values; a longer list is a range alone."""
    start, rows = 0, len(bounds) - 1
    while start < rows:
        fitting = int(np.searchsorted(bounds, bounds[start] + PIECE_VALUES, "right")) - 1
        stop = min(max(start + 1, fitting), start + PIECE_VALUES, rows)
        yield start, stop
        start = stop


def _write_list(content: bytearray, values: pa.Array, start: int, stop: int) -> None:
    """Append the values from `start` up to `stop` as one JSON array."""
    content += b"["
    for first in range(start, stop, PIECE_VALUES):
        if first > start:
            content += b","
        piece = values.slice(first, min(PIECE_VALUES, stop - first))
        content += _dumped(piece.to_pylist())[1:-1].encode()
    content += b"]"


def _require_four_digit_years(column: pa.Array, name: str) -> None:
    """Refuse times that ISO 8601 has no text for: before the year 0 and after 9999."""
    if pa.types.is_timestamp(column.type):
        in_a_day, days = _IN_A_DAY[column.type.unit], column.view(pa.int64())
    elif pa.types.is_date64(column.type):
        in_a_day, days = _IN_A_DAY["ms"], column.view(pa.int64())
    else:
        in_a_day, days = 1, column.view(pa.int32())
    bounds = pc.min_max(days).as_py()
    if bounds["min"] is None:
        return
    for number in (bounds["min"], bounds["max"]):
        if not _FIRST_DAY <= number // in_a_day <= _LAST_DAY:
            row = int(pc.index(days, number).as_py())
            raise InvalidError(
                f"row {row}: field {name!r} is {number} as a {column.type}, which lies outside of the years 0 to 9999"
            )


def _moments(column: pa.Array) -> pa.StringArray:
    zone = column.type.tz
    if zone is None:
        return pc.strftime(column, "%Y-%m-%dT%H:%M:%S")
    return pc.strftime(column.cast(pa.timestamp(column.type.unit, tz="UTC")), "%Y-%m-%dT%H:%M:%SZ")


def _plain_decimals(column: pa.Array) -> pa.StringArray:
    texts = column.cast(pa.string())
    if pc.any(pc.match_substring(texts, "E")).as_py():
        texts = pa.array([None if one is None else f"{one:f}" for one in column.to_pylist()], pa.string())
    return texts


def _escaped(column: pa.StringArray) -> pa.StringArray:
    """Escape texts for JSON; most columns need no change."""
    if not pc.any(pc.match_substring_regex(column, r'["\\\x00-\x1f]')).as_py():
        return column
    column = pc.replace_substring(column, "\\", "\\\\")
    column = pc.replace_substring(column, '"', '\\"')
    for control in _CONTROLS:
        if pc.any(pc.match_substring(column, control)).as_py():
            column = pc.replace_substring(column, control, _SHORT.get(control, f"\\u{ord(control):04x}"))
    return column


def _one_row(value: dict[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for field in schema:
        try:
            arrays.append(pa.array([value.get(field.name)], field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise InvalidError(f"field {field.name!r} is not {field.type}: {error}") from None
        if not field.nullable and value.get(field.name) is None:
            raise InvalidError(f"field {field.name!r} is null or absent, and must not be")
    return pa.record_batch(arrays, schema=schema)


# --- named

_ALL: tuple[Any, ...] = (Bytes(), String(), Int(), Long(), Double(), Json())
PLAIN_SERDES: dict[str, Serde[Any]] = {serde.name: serde for serde in _ALL}
SERDE_NAMES = tuple(PLAIN_SERDES)


def serde_from(written: str) -> Serde[Any] | None:
    """Return the serde that the text names; None if it names none."""
    text = written.strip()
    found = PLAIN_SERDES.get(text.lower())
    if found is not None:
        return found
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        return None
    if not call.keywords:
        return PLAIN_SERDES.get(call.func.id.lower())
    if call.func.id.lower() != "json":
        return None
    fields: dict[str, str] = {}
    for keyword in call.keywords:
        if (
            keyword.arg is None
            or not isinstance(keyword.value, ast.Constant)
            or not isinstance(keyword.value.value, str)
        ):
            return None
        fields[keyword.arg] = keyword.value.value
    return Json(**fields)


def stored_serde(written: str) -> Serde[Any]:
    """Return the serde that a stored table was made with; bytes if its name does not say which."""
    return serde_from(written) or PLAIN_SERDES["bytes"]


def require_serde(written: str, what: str) -> Serde[Any]:
    """Return the serde that the text names, or raise `InvalidError` with the syntax; `what` is the option it was
    given in."""
    found = serde_from(written)
    if found is None:
        raise InvalidError(
            f"{what}={written!r} is no serde: say one of {', '.join(SERDE_NAMES)}, or declare the fields of JSON, "
            "as in Json(amount='double', currency='string')"
        )
    return found
