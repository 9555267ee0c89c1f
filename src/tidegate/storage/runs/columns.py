"""Columns for kernels and runs: key hashes, zero-copy buffers, values gathered by row, runs of bounded size.

The hash of a key is XXH64, seed 0. It is part of the disk format, and its top ten bits are the key group. Every run has
its own buffers, so dropping one frees its memory, independently of other runs of the same batch.

Thread rule: pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.kernels.hashing import hash_values
from tidegate.kernels.run_merge import (
    copy_even_keys,
    copy_keys,
    count_key_bytes,
    gather_halves,
    gather_words,
    measure_keys,
    spread_keys,
)
from tidegate.kernels.sorting import SPARE_BITS, UNSORTED, radix_sort
from tidegate.storage.runs.run import DIRECTORY, Int64s, Run
from tidegate.storage.scratch import COPIES, SMALL_BYTES, SORT_BYTES

# -- hashes and buffers ------------------------------------------------------------------------------

UInt64s = npt.NDArray[np.uint64]
Int32s = npt.NDArray[np.int32]
_NO_BYTES = np.empty(0, np.uint8)
_BINARY = pa.binary()


class BinaryParts(NamedTuple):
    """A binary column for kernels: value i is data[bounds[i]:bounds[i + 1]]."""

    data: npt.NDArray[np.uint8]
    bounds: Int32s


def binary_parts(keys: pa.Array) -> BinaryParts:
    """The buffers of a binary column (a slice shows its own part), without a copy; text and large ones are cast."""
    if keys.type != _BINARY:
        keys = keys.cast(_BINARY)
    if not len(keys):
        return BinaryParts(_NO_BYTES, np.zeros(1, np.int32))
    _, bounds, data = keys.buffers()
    return BinaryParts(
        _NO_BYTES if data is None or not data.size else np.frombuffer(data, np.uint8),
        aligned(np.frombuffer(bounds, np.int32, len(keys) + 1, 4 * keys.offset)),
    )


def aligned(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same values at an aligned address; copied only if unaligned."""
    return values if values.flags.aligned else values.copy()


def hash_keys(keys: pa.Array) -> UInt64s:
    """XXH64 of every value of a binary column; a slice hashes as its own values, a null is refused."""
    if keys.null_count:
        raise InvalidError(
            f"{keys.null_count} of {len(keys)} keys are null; rows without a key cannot be stored"
        )
    return hash_parts(binary_parts(keys))


def hash_parts(parts: BinaryParts) -> UInt64s:
    """XXH64 of every value."""
    hashes = np.empty(len(parts.bounds) - 1, np.uint64)
    hash_values(parts.data, parts.bounds, hashes)
    return hashes


def sorted_marks(marks: UInt64s, leading_bits: int, row_bits: int) -> UInt64s:
    """Ascending: numbers of `leading_bits`, then bits of a hash, then the row, in whose order they come; used up."""
    other = np.empty(len(marks), np.uint64)
    where = radix_sort(marks, other, leading_bits + row_bits + SPARE_BITS)
    if where == UNSORTED:
        marks.sort()
    return other if where == 1 else marks


# -- gathering and cutting ---------------------------------------------------------------------------

_INT32, _INT64, _UINT64 = pa.int32(), pa.int64(), pa.uint64()
NO_NUMBERS = np.empty(0, np.int64)
MOST_BYTES = 2**31 - 1


class KeySource(NamedTuple):
    """The source of keys by line: their hashes, and a binary column's two buffers."""

    hashes: UInt64s
    data: npt.NDArray[np.uint8]
    bounds: Int32s
    width: int = 0
    """What all keys measure, if that is 8 to 16 bytes; else 0."""


def even_width(bounds: Int32s) -> int:
    """The width of keys that all have one of 8 to 16 bytes; else 0."""
    if len(bounds) < 2 or not 8 <= (width := int(bounds[1]) - int(bounds[0])) <= 16:
        return 0
    return width if bool((np.diff(bounds) == width).all()) else 0


def assemble(
    bucket: int,
    keys: KeySource,
    lines: Int32s,
    starts: Int32s,
    rows_between: Callable[[int, int], pa.RecordBatch],
    max_rows: int,
) -> list[Run]:
    """Build the runs of one bucket: line `lines[i]` of `keys` has the rows from starts[i] to starts[i + 1].

    `rows_between` returns the rows of a range; a run has at most `max_rows` of them.
    """
    first, end = int(starts[0]), int(starts[-1])
    if end - first <= max_rows:
        return [make_run(bucket, keys, lines, starts - np.int32(first), rows_between(first, end))]
    runs = []
    for start in range(first, end, max_rows):
        stop = min(start + max_rows, end)
        low, high = keys_between(starts, start, stop)
        part = np.clip(starts[low : high + 1] - np.int32(start), 0, stop - start)
        runs.append(make_run(bucket, keys, lines[low:high], part, rows_between(start, stop)))
    return runs


def keys_between(starts: Int32s, start: int, stop: int) -> tuple[int, int]:
    """The range of keys that have rows between two positions."""
    return int(np.searchsorted(starts, start, "right")) - 1, int(np.searchsorted(starts[:-1], stop, "left"))


def make_run(bucket: int, keys: KeySource, lines: Int32s, starts: Int32s, rows: pa.RecordBatch) -> Run:
    """A run of these lines of `keys`, whose rows begin at `starts` and end with the last of them.

    What a run derives from its columns when asked is at hand here, so it is handed over.
    """
    count = len(lines)
    hashes = np.empty(count, np.uint64)
    gather_words(keys.hashes.view(np.int64), lines, hashes.view(np.int64))
    if keys.width:
        content, bounds = _even_keys(keys.data, keys.bounds, keys.width, lines)
    else:
        bounds = np.empty(count + 1, np.int32)
        content = np.empty(measure_keys(lines, keys.bounds, bounds), np.uint8)
        copy_keys(lines, keys.data, keys.bounds, bounds, content)
    starts = starts.astype(np.int32, copy=False)
    directory = pa.RecordBatch.from_arrays(
        [
            numbers_column(_UINT64, hashes),
            pa.Array.from_buffers(_BINARY, count, [None, pa.py_buffer(bounds), pa.py_buffer(content)], 0),
            numbers_column(_INT32, starts[:-1]),
        ],
        schema=DIRECTORY,
    )
    columns = rows.columns
    run = Run(bucket, directory, rows)
    run.__dict__.update(
        hashes=hashes,
        starts=starts,
        ts=words(columns[0]),
        seq=words(columns[1]),
        # a hash, a start and an offset a key; Arrow does not count the offset after the last
        nbytes=(8 + 4 + 4) * count + content.nbytes + sum(map(_nbytes, columns)),
    )
    return run


def _even_keys(
    data: npt.NDArray[np.uint8], bounds: Int32s, width: int, lines: Int32s
) -> tuple[npt.NDArray[np.uint8], Int32s]:
    content = np.empty(width * len(lines), np.uint8)
    copy_even_keys(lines, data, int(bounds[0]), width, content)
    return content, np.arange(0, content.size + 1, width, dtype=np.int32)


def _nbytes(column: pa.Array) -> int:
    """`column.nbytes`, computed faster for plain columns; a bitmap without nulls counts too."""
    if is_word(column.type) and column.buffers()[0] is None:
        return 8 * len(column)
    return int(column.nbytes)


def list_bytes(columns: Iterable[pa.Array]) -> int:
    """The bytes of all lists in these columns, which grow with the records of a window."""
    return sum(int(column.nbytes) for column in columns if _is_list(column.type))


def merge_need(columns: Iterable[pa.Array]) -> int:
    """The memory to merge these columns' lists: copies, and sort keys of their values."""
    lists = [column for column in columns if _is_list(column.type)]
    return COPIES * list_bytes(lists) + SORT_BYTES * max(
        (len(column.flatten()) for column in lists), default=0
    )


def merge_needs(columns: Sequence[pa.Array]) -> Int64s:
    """About what each row has of `merge_need`: of every list its share of the values' bytes."""
    sizes, most = np.zeros(len(columns[0]) if columns else 0, np.int64), np.int64(0)
    for column in columns:
        if _is_list(column.type) and len(column.values):
            lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
            sizes += (lengths * (COPIES * column.values.nbytes / len(column.values))).astype(np.int64)
            most = np.maximum(most, lengths)
    return sizes + SORT_BYTES * most


def picked_need(run: Run, rows: Int32s) -> int:
    """An upper bound of the memory to merge these rows of a run; exact per row only for a large run."""
    whole = COPIES * run.nbytes
    if whole <= SMALL_BYTES:
        return whole
    lists = list_bytes(run.rows.columns)
    own = (whole - COPIES * lists) * len(rows) // max(1, run.row_count)
    return own + int(merge_needs(run.rows.columns)[rows].sum()) if lists else own


def _is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_))


def largest_window(chosen: Sequence[tuple[Run, Int32s]]) -> str:
    """The window with the most bytes to merge among these rows of runs, as text."""
    run, rows = max(chosen, key=lambda each: picked_need(*each))
    row = int(rows[np.argmax(merge_needs(run.rows.columns)[rows])])
    line = int(np.searchsorted(run.starts, row, side="right")) - 1
    return window_words(run.keys[line].as_py() if run.key_count else None, int(run.ts[row]))


def window_words(key: bytes | None, start_ms: int, end_ms: int | None = None) -> str:
    """A window's name in messages."""
    start = f"{start_ms} ms"
    with suppress(ArithmeticError, ValueError):  # a time outside the calendar stays a number
        start = str(np.datetime64(start_ms, "ms"))[:19] + "Z"
    return f"the window of key {key!r} from {start}" + (
        "" if end_ms is None else f", {end_ms - start_ms} ms long,"
    )


def numbers_column(type_: pa.DataType, values: npt.NDArray[Any]) -> pa.Array:
    """An Arrow column over a numpy array, without a copy and without nulls."""
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(values)], 0)


def int64_column(values: Int64s) -> pa.Array:
    return numbers_column(_INT64, values)


def words(column: pa.Array) -> Int64s:
    """The eight-byte values of a column as integers, without a copy; undefined where null."""
    if not len(column):
        return NO_NUMBERS
    return aligned(np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset))


def gather_numbers(values: Int64s, rows: Int32s) -> pa.Array:
    """An int64 column of the values at these rows."""
    into = np.empty(len(rows), np.int64)
    gather_words(values, rows, into)
    return numbers_column(_INT64, into)


def gather_places(values: Int32s, places: Int32s) -> Int32s:
    """The numbers at these places."""
    into = np.empty(len(places), np.int32)
    gather_halves(values, places, into)
    return into


def gather(column: pa.Array, rows: Int32s) -> pa.Array:
    """The values at these rows, in buffers of their own."""
    if is_word(column.type) and not column.null_count:
        into = np.empty(len(rows), np.int64)
        gather_words(words(column), rows, into)
        return numbers_column(column.type, into)
    if is_half(column.type) and not column.null_count and len(column):
        halves = np.empty(len(rows), np.int32)
        held = np.frombuffer(column.buffers()[1], np.int32, len(column), 4 * column.offset)
        gather_halves(aligned(held), rows, halves)
        return numbers_column(column.type, halves)
    return column.take(numbers_column(_INT32, rows))


def gather_keys(keys: pa.Array, rows: Int32s) -> pa.BinaryArray:
    """The keys at these rows, in buffers of their own."""
    source, count = binary_parts(keys), len(rows)
    width = even_width(source.bounds)
    if width and width * count <= MOST_BYTES:
        content, bounds = _even_keys(*source, width, rows)
    else:
        bounds = np.empty(count + 1, np.int32)
        size = measure_keys(rows, source.bounds, bounds)
        if size > MOST_BYTES:
            raise InvalidError(f"{count} keys are {size} bytes, above 2 GiB: give smaller batches")
        content = np.empty(size, np.uint8)
        copy_keys(rows, source.data, source.bounds, bounds, content)
    return pa.Array.from_buffers(_BINARY, count, [None, pa.py_buffer(bounds), pa.py_buffer(content)], 0)


@lru_cache(maxsize=256)
def is_word(type_: pa.DataType) -> bool:
    """Whether values of this type are eight plain bytes."""
    return bool(pa.types.is_primitive(type_) and type_.bit_width == 64)


@lru_cache(maxsize=256)
def is_half(type_: pa.DataType) -> bool:
    """Whether values of this type are four plain bytes."""
    return bool(pa.types.is_primitive(type_) and type_.bit_width == 32)


def own_slice(column: pa.Array, start: int, stop: int) -> pa.Array:
    """Values `start` to `stop`; the whole column as it is, a part of it in buffers of its own."""
    if start == 0 and stop == len(column):
        return column
    if not column.null_count and is_word(column.type):
        return numbers_column(column.type, words(column)[start:stop].copy())
    if not column.null_count and column.type == _BINARY:
        data, bounds = binary_parts(column)
        first = bounds[start]
        content = data[first : bounds[stop]].copy()
        buffers = [None, pa.py_buffer(bounds[start : stop + 1] - first), pa.py_buffer(content)]
        return pa.Array.from_buffers(_BINARY, stop - start, buffers, 0)
    return gather(column, np.arange(start, stop, dtype=np.int32))


# -- the key of every row ----------------------------------------------------------------------------


def row_keys(keys: pa.BinaryArray, starts: npt.NDArray[np.int32], first: int, stop: int) -> pa.BinaryArray:
    """The keys of rows first … stop, where those of key i are starts[i] … starts[i + 1]."""
    if first >= stop:
        return pa.array([], pa.binary())
    data, bounds = binary_parts(keys)
    line = int(starts.searchsorted(np.int32(first), "right")) - 1
    size = int(count_key_bytes(bounds, starts, line, first, stop))
    if size > MOST_BYTES:
        raise InvalidError(
            f"{stop - first} rows have {size} bytes of keys, more than one Arrow column holds; read them in smaller "
            "batches, or without their keys"
        )
    content, ends = pa.allocate_buffer(max(1, size)), np.empty(stop - first + 1, np.int32)
    spread_keys(data, bounds, starts, line, first, stop, np.frombuffer(content, np.uint8), ends)
    return pa.Array.from_buffers(pa.binary(), stop - first, [None, pa.py_buffer(ends), content], 0)
