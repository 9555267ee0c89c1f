"""JSON as a serde: declared fields to and from typed columns, or any JSON value to and from Python.

`Json(order_id="string", amount="double")` reads columns as `json_columns` says and writes objects with exactly
these fields, in this order, without blanks; null fields are written as null. `Json()` declares nothing: one value
at a time it is any JSON value, and in columns it stays the text it is.

Columns are written with no Python object per record (`json_objects`); lists and structs are the exception. Doubles are
written with the fewest digits that read back as the same double; `NaN` and infinities have no JSON and are refused.

Values; use them from any thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import CorruptError, InvalidError
from tidegate.tables.serdes.json_columns import DecodedValues, JsonDecoder
from tidegate.tables.serdes.json_fields import Declared
from tidegate.tables.serdes.json_objects import write_objects
from tidegate.tables.serdes.json_values import Refused, as_array, parse, parse_row
from tidegate.tables.serdes.plain import DecodedColumn, String
from tidegate.windows.keys import make_binary, present_rows, room_for

PIECE_VALUES: Final = 1 << 14  # of lists, as Python objects at a time
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
        """A dict of the declared fields, or whatever the text holds when nothing is declared."""
        if raw is None:
            return None
        try:
            if self._decoder is None:
                parse(raw)  # refuses what Python's reader would let pass
                return json.loads(raw.decode())
            values = parse_row(raw, self.schema)
        except Refused as refused:
            raise CorruptError(str(refused), kafka_name=None) from None
        arrays = [as_array([value], field.type) for value, field in zip(values, self.schema, strict=True)]
        return {field.name: array[0].as_py() for field, array in zip(self.schema, arrays, strict=True)}

    def decode_values(self, raw: pa.Array | pa.ChunkedArray) -> DecodedValues:
        """The declared columns of a column of JSON, with bad rows and their reasons."""
        return self.decoder.decode(raw)

    def encode_column(self, values: pa.Array) -> pa.BinaryArray:
        if self._decoder is None:
            return String().encode_column(values)
        if not pa.types.is_struct(values.type):
            raise TypeError(f"serde json writes columns of {self.arrow_type}, not of {values.type}")
        batch = pa.RecordBatch.from_struct_array(values)
        written = encode_objects(batch.select(list(self.fields)).cast(self._nullable_schema()))
        if values.null_count:
            written = pc.if_else(values.is_valid(), written, pa.scalar(None, pa.binary()))
        return written

    def decode_column(self, raw: pa.Array) -> DecodedColumn:
        if self._decoder is None:
            return String().decode_column(raw)
        decoded = self.decode_values(raw)
        good = decoded.good
        values = pa.StructArray.from_arrays(
            decoded.batch.columns, fields=list(self._nullable_schema()), mask=pa.array(~good)
        )
        return DecodedColumn(values, decoded.bad_rows, decoded.reasons)

    def _nullable_schema(self) -> pa.Schema:
        return pa.schema([field.with_nullable(True) for field in self.schema])

    def __repr__(self) -> str:
        return f"Json({', '.join(f'{name}={declared!r}' for name, declared in self.fields.items())})"


_IN_A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_FIRST_DAY, _LAST_DAY = -719_528, 2_932_896  # 0000-01-01 and 9999-12-31, in days since 1970


def encode_objects(batch: pa.RecordBatch) -> pa.BinaryArray:
    """One JSON object a row, with the columns as fields, in their order."""
    if not batch.num_columns:
        return pa.array([b"{}"] * batch.num_rows, pa.binary())
    return write_objects(batch, _texts)


def _texts(column: pa.Array, name: str) -> pa.StringArray:
    """A column as JSON texts, null where it is null."""
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
    """Each list as a JSON array, null where it is null.

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
    """Refuse moments that ISO 8601 has no text for: before the year 0 and after 9999."""
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
    """Texts with what JSON wants escaped; most columns have nothing of the kind."""
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
