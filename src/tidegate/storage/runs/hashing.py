"""The hash of a key: XXH64, seed 0. A number kept on disk for ever, whose top ten bits are the key group.

Also how a binary or numeric column shows its buffers to a kernel, and numbers led by hashes in order.

Thread rule: pure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.hashing import hash_values
from tidegate.kernels.sorting import SPARE_BITS, UNSORTED, radix_sort

UInt64s = npt.NDArray[np.uint64]
Int32s = npt.NDArray[np.int32]

_NO_BYTES = np.empty(0, np.uint8)
_BINARY = pa.binary()


class BinaryParts(NamedTuple):
    """A binary column as kernels take it: value i is data[bounds[i]:bounds[i + 1]]."""

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
    """The same values where the processor likes them; a copy only for a buffer from an odd address."""
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
