"""XXH64 with seed 0 over the values of a binary column (the algorithm: xxHash specification 0.1.1, XXH64).

Values come as an Arrow binary column has them: one byte buffer and n + 1 int32 offsets, not starting at 0 for
a slice. The caller has compared the offsets with the buffer: they never fall and end inside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import READ_BYTES, READ_INT32S, kernel
from tidegate.kernels.key_bytes import int64, load_word
from tidegate.kernels.memory import load, pointer

UINT64S = types.Array(types.uint64, 1, "C")

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_START1 = np.uint64(0x60EA27EEADC0B5D6)  # P1 + P2, and P1 taken from zero
_START4 = np.uint64(0x61C8864E7A143579)
_U64, _HALF = np.uint64(64), np.uint64(32)
_U1, _U7, _U11, _U12, _U18, _U23, _U27, _U29, _U31, _U33 = (
    np.uint64(bits) for bits in (1, 7, 11, 12, 18, 23, 27, 29, 31, 33)
)


@register_jitable
def _rotate(word: Any, bits: Any) -> Any:
    return (word << bits) | (word >> (_U64 - bits))


@register_jitable
def _round(lane: Any, word: Any) -> Any:
    return _rotate(lane + word * _P2, _U31) * _P1


@register_jitable
def _merge_lane(digest: Any, lane: Any) -> Any:
    return (digest ^ _round(np.uint64(0), lane)) * _P1 + _P4


@register_jitable
def xxh64(data: Any, start: int, stop: int) -> Any:
    """XXH64, seed 0, of data[start:stop]; `data` is a pointer to bytes."""
    at = start
    if stop - start >= 32:
        lane1, lane2, lane3, lane4 = _START1, _P2, np.uint64(0), _START4
        while stop - at >= 32:
            lane1 = _round(lane1, load_word(data, at))
            lane2 = _round(lane2, load_word(data, at + 8))
            lane3 = _round(lane3, load_word(data, at + 16))
            lane4 = _round(lane4, load_word(data, at + 24))
            at += 32
        digest = _rotate(lane1, _U1) + _rotate(lane2, _U7) + _rotate(lane3, _U12) + _rotate(lane4, _U18)
        digest = _merge_lane(_merge_lane(digest, lane1), lane2)
        digest = _merge_lane(_merge_lane(digest, lane3), lane4)
    else:
        digest = _P5
    digest += np.uint64(stop - start)
    while stop - at >= 8:
        digest = _rotate(digest ^ _round(np.uint64(0), load_word(data, at)), _U27) * _P1 + _P4
        at += 8
    if stop - at >= 4:
        low = np.uint64(load(data, at)) | (np.uint64(load(data, at + 1)) << np.uint64(8))
        high = np.uint64(load(data, at + 2)) | (np.uint64(load(data, at + 3)) << np.uint64(8))
        digest = _rotate(digest ^ ((low | (high << np.uint64(16))) * _P1), _U23) * _P2 + _P3
        at += 4
    while at < stop:
        digest = _rotate(digest ^ (np.uint64(load(data, at)) * _P5), _U11) * _P1
        at += 1
    digest = (digest ^ (digest >> _U33)) * _P2
    digest = (digest ^ (digest >> _U29)) * _P3
    return digest ^ (digest >> _HALF)


@kernel(types.void(READ_BYTES, READ_INT32S, UINT64S))
def hash_values(data: Any, bounds: Any, hashes: Any) -> None:
    """The hash of each value; `hashes` has one place for each."""
    source = pointer(data)
    for row in range(hashes.shape[0]):
        hashes[row] = xxh64(source, int64(bounds[row]), int64(bounds[row + 1]))
