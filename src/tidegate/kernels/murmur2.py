"""Which partition a key belongs to: murmur2 with Kafka's seed, over a whole column of keys at once.

Kafka's default partitioner hashes the key bytes to a signed 32-bit number, clears its sign bit and takes the
rest modulo the number of partitions; every client that shares a topic must agree on it.

Keys arrive as Arrow binary columns do: one byte buffer and n + 1 int32 offsets, with a mask of the rows that
have a key. Numbers are kept in 64 bits and cut to 32 after each step, so that the plain Python form of the
kernel computes the same.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import INT32S, INT64, READ_BYTES, READ_INT32S, kernel
from tidegate.kernels.memory import load, pointer, store

READ_FLAGS = types.Array(types.boolean, 1, "C", readonly=True)

_SEED = 0x9747B28C
_MULTIPLIER = 0x5BD1E995
_MASK = 0xFFFFFFFF


@register_jitable
def _murmur2(source: Any, start: Any, end: Any) -> Any:
    """The unsigned 32-bit hash of source[start:end]."""
    length = end - start
    h = _SEED ^ length
    position = start
    while position + 4 <= end:
        k = (
            load(source, position)
            | load(source, position + 1) << 8
            | load(source, position + 2) << 16
            | load(source, position + 3) << 24
        )
        k = (k * _MULTIPLIER) & _MASK
        k ^= k >> 24
        k = (k * _MULTIPLIER) & _MASK
        h = ((h * _MULTIPLIER) & _MASK) ^ k
        position += 4
    rest = end - position
    if rest >= 3:
        h ^= load(source, position + 2) << 16
    if rest >= 2:
        h ^= load(source, position + 1) << 8
    if rest >= 1:
        h ^= load(source, position)
        h = (h * _MULTIPLIER) & _MASK
    h ^= h >> 13
    h = (h * _MULTIPLIER) & _MASK
    return h ^ (h >> 15)


@kernel(INT64(READ_BYTES))
def murmur2(key: Any) -> Any:
    """Kafka's hash of one key, as an unsigned number."""
    return _murmur2(pointer(key), 0, key.shape[0])


@kernel(types.void(READ_BYTES, READ_INT32S, READ_FLAGS, INT64, INT32S))
def partitions_of_keys(data: Any, bounds: Any, has_key: Any, partitions: Any, chosen: Any) -> Any:
    """Fill `chosen` with each row's partition; rows without a key are left as they are."""
    source = pointer(data)
    limits = pointer(bounds)
    target = pointer(chosen)
    for row in range(has_key.shape[0]):
        if has_key[row]:
            positive = _murmur2(source, load(limits, row), load(limits, row + 1)) & 0x7FFFFFFF
            store(target, row, positive % partitions)
