"""The kernels' CRC-32 against zlib, compiled and as plain Python, on both of its paths."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit, types

from tidegate.kernels import hashing
from tidegate.kernels.jit import INT64, READ_BYTES, pointer

ONES = hashing.ONES


@pytest.fixture(scope="module")
def folding() -> Any:
    @njit(types.int64(READ_BYTES, INT64, INT64, INT64))
    def fold(data: Any, start: int, stop: int, crc: int) -> Any:
        return hashing.fold_bytes(crc, pointer(data), start, stop)

    return fold


def array(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


def test_every_length_and_start_gives_zlibs_crc(folding: Any) -> None:
    data = bytes(np.random.default_rng(7).integers(0, 256, 400, dtype=np.uint8))
    for length in range(300):
        for start in (0, 1, 3, 7, 8, 15, 16, 17):
            got = folding(array(data), start, start + length, ONES) ^ ONES
            assert got == zlib.crc32(data[start : start + length]), (start, length)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=2000), st.integers(0, 2**32 - 1), st.data())
def test_a_crc_goes_on_from_where_it_was(data: bytes, before: int, draw: st.DataObject) -> None:
    cut = draw.draw(st.integers(0, len(data)))
    fold = hashing.fold_bytes  # as plain Python
    crc = fold(fold(before ^ ONES, array(data), 0, cut), array(data), cut, len(data)) ^ ONES
    assert crc == zlib.crc32(data, before)


@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**32 - 1))
def test_an_int_counts_as_its_four_big_endian_bytes(value: int, before: int) -> None:
    folded = hashing.fold_int32(np.int64(before ^ ONES), np.int64(value)) ^ ONES
    assert folded == zlib.crc32(value.to_bytes(4, "big", signed=True), before)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 1))
def test_a_long_counts_as_its_eight_big_endian_bytes(value: int, before: int) -> None:
    folded = hashing.fold_int64(np.int64(before ^ ONES), np.int64(value)) ^ ONES
    assert folded == zlib.crc32(value.to_bytes(8, "big", signed=True), before)


def test_the_plain_twin_refuses_to_leave_its_bytes() -> None:
    with pytest.raises(IndexError):
        hashing.fold_blocks(0, array(b"0" * 31), 0, 2)
    with pytest.raises(IndexError):
        hashing.fold_blocks(0, array(b"0" * 31), 0, 0)


WITHOUT_MULTIPLYING = """
import zlib, numpy as np
from numba import njit, types
from tidegate.kernels import hashing as crc32
from tidegate.kernels.jit import INT64, READ_BYTES
from tidegate.kernels.jit import pointer
assert not crc32.MULTIPLIES
@njit(types.int64(READ_BYTES, INT64, INT64, INT64))
def fold(data, start, stop, crc):
    return crc32.fold_bytes(crc, pointer(data), start, stop)
data = bytes(range(256)) * 2
array = np.frombuffer(data, np.uint8)
for length in range(512):
    assert fold(array, 0, length, crc32.ONES) ^ crc32.ONES == zlib.crc32(data[:length]), length
print("equal")
"""


def test_a_processor_that_cannot_multiply_without_carries_gets_the_same_crc() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MULTIPLYING],
        env={**os.environ, "NUMBA_CPU_NAME": "generic"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
