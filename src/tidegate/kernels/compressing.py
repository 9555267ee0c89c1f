"""Columns without the rows that are not wanted: what stays moves up, in the order it has.

`flags` has a byte for each row, not 0 where it stays. Few rows mostly go: bytes of values behind each other are copied
in one go.

Callers prove (K2): there is room for all that stays; bounds of values never fall and end inside their bytes.
"""

from __future__ import annotations

from typing import Any

from numba import types

from tidegate.kernels.compiling import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    kernel,
)
from tidegate.kernels.key_bytes import int64, load_word, store_word
from tidegate.kernels.memory import copy, load, pointer, store


@kernel(types.void(READ_BYTES, READ_INT64S, INT64S))
def compress_words(flags: Any, values: Any, into: Any) -> None:
    """The values of eight bytes that stay; `into` has room for one more."""
    source, target = pointer(values), pointer(into)
    place = int64(0)
    for row in range(flags.shape[0]):
        store(target, place, load(source, row))
        place += flags[row] != 0


@kernel(types.void(READ_BYTES, READ_INT32S, INT32S))
def compress_halves(flags: Any, values: Any, into: Any) -> None:
    """The values of four bytes that stay; `into` has room for one more."""
    source, target = pointer(values), pointer(into)
    place = int64(0)
    for row in range(flags.shape[0]):
        store(target, place, load(source, row))
        place += flags[row] != 0


@kernel(INT64(READ_BYTES, READ_INT32S, INT32S))
def compress_bounds(flags: Any, bounds: Any, into: Any) -> Any:
    """Where the values that stay begin once they have moved up, and where the last one ends, which is answered."""
    place, at = int64(0), int64(0)
    for row in range(flags.shape[0]):
        into[place] = at
        if flags[row] != 0:
            at += int64(bounds[row + 1]) - int64(bounds[row])
            place += 1
    into[place] = at
    return at


@kernel(types.void(READ_BYTES, READ_INT32S, READ_BYTES, BYTES))
def compress_bytes(flags: Any, bounds: Any, data: Any, into: Any) -> None:
    """The bytes of the values that stay."""
    source, target = pointer(data), pointer(into)
    row, at, rows = int64(0), int64(0), flags.shape[0]
    while row < rows:
        while row < rows and flags[row] == 0:
            row += 1
        first = row
        while row < rows and flags[row] != 0:
            row += 1
        start, length = int64(bounds[first]), int64(bounds[row]) - int64(bounds[first])
        copy(target, at, source, start, length)
        at += length


@kernel(types.void(READ_BYTES, READ_BYTES, INT64, INT64, BYTES))
def compress_even(flags: Any, data: Any, first: int, width: int, into: Any) -> None:
    """The bytes of values of one width, 8 to 16 bytes, of which row 0 has those at `first`; room for one more."""
    source, target, last = pointer(data), pointer(into), width - 8
    at = int64(0)
    for row in range(flags.shape[0]):
        start = first + width * row
        store_word(target, at, load_word(source, start))
        store_word(target, at + last, load_word(source, start + last))
        at += width if flags[row] != 0 else 0
