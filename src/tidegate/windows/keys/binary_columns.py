"""The buffers of Arrow binary columns as kernels want them, and columns made of what kernels filled.

Thread rule: pure functions; what a column hands out is not copied, so nobody writes into it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError

Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


class BinaryColumn(NamedTuple):
    """One byte buffer, the n + 1 places where values begin and end, and which rows are not null."""

    content: Bytes
    bounds: Int32s
    present: Flags

    @property
    def total_bytes(self) -> int:
        """Bytes between the first and the last bound; under null rows may lie some too."""
        return int(self.bounds[-1] - self.bounds[0])


def binary_column(array: pa.Array | pa.ChunkedArray) -> BinaryColumn:
    """The buffers of a binary or string column, where they lie; slices are fine."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type):
        array = array.cast(pa.binary())
    if not (pa.types.is_binary(array.type) or pa.types.is_string(array.type)):
        raise TypeError(f"a column of bytes is needed, not one of {array.type}")
    rows = len(array)
    _, offsets, content = array.buffers()
    bounds = np.zeros(1, np.int32)
    if offsets is not None and offsets.size:
        bounds = np.frombuffer(offsets, np.int32)[array.offset : array.offset + rows + 1]
    return BinaryColumn(np.frombuffer(content or b"", np.uint8), bounds, present_rows(array))


def present_rows(array: pa.Array) -> Flags:
    """Which rows are not null."""
    if array.null_count == 0:
        return np.ones(len(array), np.bool_)
    present: Flags = array.is_valid().to_numpy(zero_copy_only=False)
    return present


def make_binary(
    ends: Int32s, content: Bytes, present: Flags | None, kind: pa.DataType | None = None
) -> pa.Array:
    """A column of what a kernel filled; `present` None when no row is null."""
    mask, nulls = None, 0
    if present is not None:
        nulls = int(len(present) - np.count_nonzero(present))
        mask = pa.py_buffer(np.packbits(present, bitorder="little")) if nulls else None
    return pa.Array.from_buffers(
        kind if kind is not None else pa.binary(),
        len(ends) - 1,
        [mask, pa.py_buffer(ends), pa.py_buffer(content)],
        null_count=nulls,
    )


def room_for(total_bytes: int, what: str) -> int:
    """The size, once it is known to fit a column's 32-bit offsets."""
    if total_bytes > 2**31 - 1:
        raise InvalidError(f"{what} would take {total_bytes} bytes, above 2 GiB: give smaller batches")
    return total_bytes
