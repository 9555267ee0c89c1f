"""Columns to JSON objects: numbers by a kernel, everything else as texts that Arrow makes, one pass over all rows.

Whole numbers and doubles are most of what results consist of, and the kernel writes them straight into the objects.
Doubles that it leaves alone (`kernels/json_rows`) and columns of other types come as texts.

Thread rule: pure functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.kernels import json_rows as kernel
from tidegate.windows.keys import Bytes, binary_column, make_binary, present_rows, room_for

Texts: TypeAlias = "Callable[[pa.Array, str], pa.StringArray]"
Int64s = npt.NDArray[np.int64]
_LEAST = -(2**63)


class _Fields:
    """What the kernel is given, put together field by field."""

    def __init__(self, rows: int, texts: Texts) -> None:
        self._rows, self._texts = rows, texts
        self.names: list[bytes] = []
        self.kinds: list[int] = []
        self.slots: list[int] = []
        self.cursors: list[int] = []
        self.numbers: list[Int64s] = []
        self.powers: list[Bytes] = []
        self.valid: list[Bytes] = []
        self.pieces: list[pa.StringArray] = []
        self.text_count = 0

    def add(self, name: str, column: pa.Array) -> None:
        opening = "{" if not self.names else ","
        self.names.append((opening + json.dumps(name, ensure_ascii=False) + ":").encode())
        self.valid.append(present_rows(column).view(np.uint8))
        if pa.types.is_integer(column.type) and column.type != pa.uint64():
            numbers = _filled(column.cast(pa.int64()), 0)
            if not len(numbers) or int(numbers.min()) > _LEAST:
                self._put(kernel.INTEGER, numbers, np.zeros(0, np.uint8), None)
                return
        elif pa.types.is_floating(column.type):
            self._add_doubles(name, column.cast(pa.float64()))
            return
        self._put(kernel.TEXTS, np.zeros(0, np.int64), np.zeros(0, np.uint8), self._texts(column, name))

    def _add_doubles(self, name: str, column: pa.Array) -> None:
        values = _filled(column, 0.0)
        numbers, powers = np.empty(self._rows, np.int64), np.empty(self._rows, np.uint8)
        texts = None
        if kernel.find_decimals(values, kernel.TENS, numbers, powers):
            rows = np.flatnonzero(powers == kernel.NO_POWER)
            texts = self._texts(column.take(pa.array(rows)), name)
        self._put(kernel.DECIMAL, numbers, powers, texts)

    def _put(self, kind: int, numbers: Int64s, powers: Bytes, texts: pa.StringArray | None) -> None:
        self.kinds.append(kind)
        self.slots.append(len(self.numbers))
        self.cursors.append(self.text_count)
        if kind != kernel.TEXTS:
            self.numbers.append(numbers)
            self.powers.append(powers if len(powers) else np.zeros(self._rows, np.uint8))
        if texts is not None:
            self.pieces.append(texts)
            self.text_count += len(texts)


def write_objects(batch: pa.RecordBatch, texts: Texts) -> pa.BinaryArray:
    """One object a row; `texts` makes the JSON texts of a column, and refuses what JSON cannot say."""
    rows, made = batch.num_rows, _Fields(batch.num_rows, texts)
    for field, column in zip(batch.schema, batch.columns, strict=True):
        made.add(field.name, column)
    column = binary_column(_joined(made.pieces))
    name_bytes = sum(map(len, made.names))
    numbers = sum(kind != kernel.TEXTS for kind in made.kinds)
    room = (
        rows * (name_bytes + 1 + 4 * len(made.names) + kernel.LONGEST_NUMBER * numbers) + column.total_bytes
    )
    ends = np.empty(rows + 1, np.int32)
    # From Arrow's pool, whose pages are reused: fresh ones cost as much as writing into them.
    content = np.frombuffer(pa.allocate_buffer(room_for(room, "a column of JSON")), np.uint8)
    size = kernel.write_json_objects(
        rows,
        np.frombuffer(b"".join(made.names), np.uint8),
        np.cumsum([0, *map(len, made.names)], dtype=np.int32),
        np.array(made.kinds, np.int32),
        np.array(made.slots, np.int32),
        _behind(made.numbers, np.int64),
        _behind(made.powers, np.uint8),
        _behind(made.valid, np.uint8),
        column.content,
        np.ascontiguousarray(column.bounds),
        kernel.NULL,
        np.array(made.cursors, np.int64),
        ends,
        content,
    )
    return make_binary(ends, content[:size], None)


def _joined(pieces: Sequence[pa.StringArray]) -> pa.StringArray:
    """The texts of all columns behind each other; the texts of a single column are not copied."""
    if len(pieces) == 1:
        return pieces[0]
    return pa.concat_arrays(pieces) if pieces else pa.array([], pa.string())


def _filled(column: pa.Array, instead: float) -> npt.NDArray[Any]:
    if column.null_count:
        column = pc.fill_null(column, instead)
    return np.ascontiguousarray(column.to_numpy(zero_copy_only=False))


def _behind(arrays: Sequence[npt.NDArray[Any]], kind: type[np.generic]) -> npt.NDArray[Any]:
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0])
    return np.concatenate(arrays) if arrays else np.zeros(0, kind)
