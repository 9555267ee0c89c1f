"""Kafka's key hash: golden values of Kafka's own tests, an independent twin, and the column form."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels.hashing import murmur2, partitions_of_keys

GOLDEN = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def twin(key: bytes) -> int:
    """Murmur2 as its description says, one step at a time, unsigned."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(key)
    whole = len(key) // 4 * 4
    for at in range(0, whole, 4):
        k = int.from_bytes(key[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    if len(key) > whole:
        h = (h ^ int.from_bytes(key[whole:], "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def hashed(key: bytes) -> int:
    return int(murmur2(np.frombuffer(key, np.uint8)))


@pytest.mark.parametrize("key", GOLDEN)
def test_published_hashes(key: bytes) -> None:
    assert hashed(key) == GOLDEN[key] & 0xFFFFFFFF
    assert twin(key) == GOLDEN[key] & 0xFFFFFFFF


@given(st.binary(max_size=70))
@settings(max_examples=300)
def test_any_key_hashes_as_the_twin_does(key: bytes) -> None:
    assert hashed(key) == twin(key) == int(murmur2.py_func(np.frombuffer(key, np.uint8)))


@given(st.lists(st.one_of(st.none(), st.binary(max_size=20)), max_size=40), st.integers(1, 50))
@settings(max_examples=100)
def test_a_column_of_keys_is_placed_as_key_by_key(keys: list[bytes | None], partitions: int) -> None:
    array = pa.array(keys, pa.binary())
    data = np.frombuffer(array.buffers()[2] or b"", np.uint8)
    bounds = np.frombuffer(array.buffers()[1], np.int32)[: len(keys) + 1]
    has_key = np.array([key is not None for key in keys], np.bool_)
    chosen = np.full(len(keys), -7, np.int32)
    partitions_of_keys(data, bounds, has_key, partitions, chosen)
    assert chosen.tolist() == [-7 if key is None else (twin(key) & 0x7FFFFFFF) % partitions for key in keys]
