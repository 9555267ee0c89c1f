"""A column of JSON bytes to typed Arrow columns, as declared, with no Python object per record.

One kernel pass reads the rows it is sure about (`kernels/json_rows`). Rows it leaves alone are read one by one by
the standard library (`json_values`), which also says why a row is bad. Fields with types the kernel does not know
(decimal, timestamp, date, lists, structs) leave it as JSON text and are converted a column at a time by Arrow; if
Arrow refuses some row of the column, that column's rows are read one by one.

I1  every value is the one the text says: the nearest double, the whole number, the text; never a guess.
I2  a row that is not as declared is bad as a whole: its row number and the reason are given, its columns are null.
I3  a null value is no row: absent, with null columns, and neither good nor bad.

Thread rule: a decoder is a value; use it from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.kernels import json_rows as kernel
from tidegate.tables.serdes.json_fields import Declared, field_of, is_flat
from tidegate.tables.serdes.json_texts import convert_texts
from tidegate.tables.serdes.json_values import Refused, as_array, parse_row
from tidegate.windows.keys import BinaryColumn, Flags, binary_column, make_binary

Int64s = npt.NDArray[np.int64]
_KINDS: Final = {pa.float64(): kernel.DOUBLE, pa.bool_(): kernel.BOOLEAN, pa.string(): kernel.STRING}


@dataclass(frozen=True, eq=False)
class DecodedValues:
    """Columns with a row for every value given, which rows had none, and which are bad and why."""

    batch: pa.RecordBatch
    absent: Flags
    bad_rows: Int64s
    reasons: tuple[str, ...]

    @property
    def good(self) -> Flags:
        """Rows that have a value and are as declared."""
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
        batch = pa.record_batch(arrays, schema=_nullable(self.schema))
        if len(bad_rows):
            batch = _blank(batch, bad_rows)
        return DecodedValues(batch, ~column.present, bad_rows, tuple(bad[row] for row in bad_rows.tolist()))

    def _scan(self, column: BinaryColumn) -> tuple[list[pa.Array], npt.NDArray[np.uint8]]:
        """What the kernel is sure about, and its verdict of each row."""
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
        """The columns with these rows read by the standard library; bad ones are added to `bad`."""
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
    """A column of what the kernel wrote; integers are still 64 bits wide."""
    nulls = int(len(flags) - np.count_nonzero(flags))
    mask = pa.py_buffer(np.packbits(flags, bitorder="little")) if nulls else None
    if kind == pa.bool_():
        bits = pa.py_buffer(np.packbits(values.astype(np.bool_), bitorder="little"))
        return pa.Array.from_buffers(kind, len(values), [mask, bits], null_count=nulls)
    wide = pa.float64() if kind == pa.float64() else pa.int64()
    return pa.Array.from_buffers(wide, len(values), [mask, pa.py_buffer(values)], null_count=nulls)


def _narrow(numbers: pa.Int64Array, kind: pa.DataType) -> tuple[pa.Array, Int64s]:
    """The numbers in a narrower type, and the rows whose number does not fit it."""
    least = -(1 << (kind.bit_width - 1)) if pa.types.is_signed_integer(kind) else 0
    values = numbers.fill_null(0).to_numpy(zero_copy_only=False)
    outside = (values < least) | (values > least + (1 << kind.bit_width) - 1)
    rows = np.flatnonzero(outside)
    if len(rows):
        numbers = pc.if_else(pa.array(outside), pa.scalar(None, pa.int64()), numbers)
    return numbers.cast(kind), rows


def _nullable(schema: pa.Schema) -> pa.Schema:
    """Absent and bad rows are null in every column, whatever was declared."""
    return pa.schema([field.with_nullable(True) for field in schema])


def _blank(batch: pa.RecordBatch, rows: Int64s) -> pa.RecordBatch:
    take = np.arange(batch.num_rows)
    mask = np.zeros(batch.num_rows, np.bool_)
    mask[rows] = True
    return batch.take(pa.array(take, mask=mask))
