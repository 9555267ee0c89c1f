"""XXH64 of each record's canonical bytes (which they are: `integrity/digests.py`).

The fields of a record lie in several Arrow buffers; they are put behind each other in `scratch`, which the caller has
made large enough for the largest record, and hashed there.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import BYTES, INT64, INT64S, READ_INT64S, kernel
from tidegate.kernels.encoding import RECORD_SOURCE, Column, RecordSource, column_of, length_at
from tidegate.kernels.memory import copy, load, pointer, store
from tidegate.kernels.xxh64 import UINT64S, xxh64

OFFSET, TIMESTAMP, KEY, VALUE, HEADERS = 1, 2, 4, 8, 16
FIXED_BYTES: Final = 28  # offset, timestamp, and the lengths of key, value and headers


@register_jitable
def put_number(target: Any, at: int, number: int, width: int) -> int:
    """Big-endian, in `width` bytes; the place behind it."""
    for place in range(width):
        store(target, at + place, (number >> (8 * (width - 1 - place))) & 0xFF)
    return at + width


@register_jitable
def put_field(target: Any, at: int, column: Column, row: int) -> int:
    length = length_at(column, row)
    at = put_number(target, at, length, 4)
    if length > 0:
        copy(target, at, column.content, load(column.ends, row), length)
        at += length
    return at


@kernel(types.void(RECORD_SOURCE, READ_INT64S, INT64, BYTES, UINT64S))
def hash_records(source: RecordSource, offsets: Any, parts: int, scratch: Any, hashes: Any) -> None:
    """The hash of each record over the `parts` chosen, in the order of their bits."""
    target, at_offsets, at_times = pointer(scratch), pointer(offsets), pointer(source.timestamp)
    key, value = column_of(source.key), column_of(source.value)
    name, content = column_of(source.header_key), column_of(source.header_value)
    ends, has_headers = pointer(source.header_ends), len(source.header_ends) > 0
    for row in range(len(hashes)):
        at = 0
        if parts & OFFSET:
            at = put_number(target, at, load(at_offsets, row), 8)
        if parts & TIMESTAMP:
            at = put_number(target, at, load(at_times, row), 8)
        if parts & KEY:
            at = put_field(target, at, key, row)
        if parts & VALUE:
            at = put_field(target, at, value, row)
        if parts & HEADERS:
            first, stop = 0, 0
            if has_headers:
                first, stop = load(ends, row), load(ends, row + 1)
            at = put_number(target, at, stop - first, 4)
            for header in range(first, stop):
                at = put_field(target, at, name, header)
                at = put_field(target, at, content, header)
        hashes[row] = xxh64(target, 0, at)


@kernel(types.void(types.Array(types.uint64, 1, "C", readonly=True), INT64S, UINT64S, UINT64S, UINT64S))
def sum_blocks(hashes: Any, edges: Any, sums: Any, squares: Any, ordered: Any) -> None:
    """Of each block of rows the sum, the sum of squares, and the sum weighted by 1, 3, 5, …, all modulo 2^64."""
    for block in range(len(sums)):
        total, squared, weighted = sums[block], squares[block], ordered[block]
        weight = np.uint64(1)
        for row in range(edges[block], edges[block + 1]):
            total += hashes[row]
            squared += hashes[row] * hashes[row]
            weighted += hashes[row] * weight
            weight += np.uint64(2)
        sums[block], squares[block], ordered[block] = total, squared, weighted
