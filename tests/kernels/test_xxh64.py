"""XXH64 against the reference implementation, for every length and both lives of the kernel."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels.hashing import hash_values
from tidegate.kernels.jit import are_equal, compare, load_word


def columns(values: list[bytes], before: bytes = b"") -> tuple[np.ndarray, np.ndarray]:
    bounds = len(before) + np.cumsum([0, *(len(value) for value in values)])
    return np.frombuffer(before + b"".join(values), np.uint8), bounds.astype(np.int32)


def hashed(values: list[bytes], kernel: object = hash_values, before: bytes = b"") -> list[int]:
    out = np.empty(len(values), np.uint64)
    kernel(*columns(values, before), out)  # type: ignore[operator]
    return [int(number) for number in out]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=130), max_size=20), st.binary(max_size=9))
def test_hashes_are_the_reference_ones(values: list[bytes], before: bytes) -> None:
    assert hashed(values, before=before) == [xxhash.xxh64_intdigest(value) for value in values]


@pytest.mark.parametrize("length", range(100))
def test_every_short_length_is_hashed_in_plain_python_too(length: int) -> None:
    value = bytes((7 * i + length) & 0xFF for i in range(length))
    with np.errstate(over="ignore"):
        assert hashed([value], hash_values.py_func, b"\x01") == [xxhash.xxh64_intdigest(value)]


def test_published_values_never_change() -> None:
    assert hashed([b"", b"a", b"abc"]) == [0xEF46DB3751D8E999, 0xD24EC4F1A98C6E5B, 0x44BC2CF5AD770999]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=20), st.binary(max_size=20), st.integers(0, 20))
def test_bytes_compare_as_python_compares_them(left: bytes, right: bytes, shared: int) -> None:
    right = left[:shared] + right
    a, b = np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)
    order = compare(a, 0, len(left), b, 0, len(right))
    assert (order > 0, order < 0) == (left > right, left < right)
    assert are_equal(a, 0, len(left), b, 0, len(right)) == (left == right)


def test_a_word_outside_its_bytes_is_refused_in_plain_python() -> None:
    with pytest.raises(IndexError):
        load_word(np.zeros(8, np.uint8), 1)
