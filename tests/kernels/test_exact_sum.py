"""Exact sums against fractions: the written bytes, and the double they round to."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_lives import BOTH, alive
from tidegate.kernels import aggregates as kernels
from tidegate.kernels import aggregates as narrow
from tidegate.kernels.aggregates import NO_POSITION, UNITS

NO_BYTES = np.empty(0, np.uint8)

finite = st.floats(allow_nan=False, allow_infinity=False)
edges = st.sampled_from(
    [
        0.0,
        -0.0,
        5e-324,
        -5e-324,
        2.2250738585072014e-308,
        1.7976931348623157e308,
        -1.7976931348623157e308,
        2.0**53,
    ]
)
values = st.lists(finite | edges | st.floats(-1e6, 1e6), max_size=40)


def twin_bytes(numbers: list[float]) -> bytes | None:
    """The one way to write the sum of `numbers`, told by big integers."""
    if not numbers:
        return None
    flags = any(math.isnan(x) for x in numbers) * 4 + (math.inf in numbers) + 2 * (-math.inf in numbers)
    if flags:
        return bytes([flags, 0])
    units = sum(Fraction(x) for x in numbers) * 2**UNITS
    total, low = int(units), 0
    assert total == units
    if total == 0:
        return bytes(2)
    while total % 2**32 == 0:
        total, low = total >> 32, low + 1
    length = 4
    while not -(2 ** (8 * length - 1)) <= total < 2 ** (8 * length - 1):
        length += 4
    return bytes([0, low]) + total.to_bytes(length, "little", signed=True)


def nearest(numbers: list[float]) -> float:
    """The double nearest to the exact sum."""
    total = sum((Fraction(x) for x in numbers), Fraction(0))
    try:
        return float(total) + 0.0  # Fraction divides integers, which rounds once, to the even one of two
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def write(life: str, count: int, span: Any, add: Any) -> list[bytes | None]:
    lows, highs, flags = (
        np.full(count, NO_POSITION, np.uint8),
        np.zeros(count, np.uint8),
        np.zeros(count, np.uint8),
    )
    span(lows, highs, flags)
    places, bounds = np.empty(count + 1, np.int64), np.empty(count + 1, np.int32)
    limbs = np.zeros(alive(kernels.lay_out, life)(lows, highs, flags, places), np.int64)
    add(lows, places, limbs)
    size = alive(kernels.settle, life)(limbs, lows, flags, places, bounds)
    data, valid = np.empty(size, np.uint8), np.zeros((count + 7) // 8, np.uint8)
    alive(kernels.write_sums, life)(limbs, lows, flags, places, bounds, data, valid)
    written = [bytes(data[bounds[i] : bounds[i + 1]]) for i in range(count)]
    return [written[i] if valid[i >> 3] >> (i & 7) & 1 else None for i in range(count)]


def summed(life: str, numbers: list[float], groups: list[int], count: int) -> list[bytes | None]:
    bits, into = np.array(numbers, np.float64).view(np.int64), np.array(groups, np.int32)
    return write(
        life,
        count,
        lambda *arrays: alive(kernels.span_doubles, life)(bits, NO_BYTES, 0, into, *arrays),
        lambda *arrays: alive(kernels.add_doubles, life)(bits, NO_BYTES, 0, into, *arrays),
    )


def merged(life: str, sums: list[bytes | None], groups: list[int], count: int) -> list[bytes | None]:
    parts = columns(sums)
    into = np.array(groups, np.int32)
    assert alive(kernels.count_malformed, life)(*parts) == 0
    return write(
        life,
        count,
        lambda *arrays: alive(kernels.span_sums, life)(*parts, into, *arrays),
        lambda *arrays: alive(kernels.add_sums, life)(*parts, into, *arrays),
    )


def columns(sums: list[bytes | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    bounds = np.cumsum([0, *(len(each or b"") for each in sums)]).astype(np.int32)
    data = np.frombuffer(b"".join(each or b"" for each in sums), np.uint8)
    return data, bounds, np.packbits([each is not None for each in sums], bitorder="little"), 0


def rounded(life: str, sums: list[bytes | None]) -> list[float]:
    results = np.empty(len(sums), np.uint64)
    alive(kernels.round_sums, life)(*columns(sums), 0, results)
    return results.view(np.float64).tolist()


@BOTH
@settings(max_examples=150, deadline=None)
@given(values)
def test_a_sum_is_written_in_its_one_way_and_rounds_to_the_nearest(life: str, numbers: list[float]) -> None:
    with np.errstate(over="ignore"):
        written = summed(life, numbers, [0] * len(numbers), 1)
        assert written == [twin_bytes(numbers)]
        got = rounded(life, written)[0]
    assert struct.pack("d", got) == struct.pack("d", nearest(numbers))


@BOTH
@settings(max_examples=60, deadline=None)
@given(values, st.data())
def test_any_cut_merges_to_the_same_bytes(life: str, numbers: list[float], data: Any) -> None:
    groups = [data.draw(st.integers(0, 4)) for _ in numbers]
    with np.errstate(over="ignore"):
        parts = summed(life, numbers, groups, 5)
        assert merged(life, parts, [0] * 5, 1) == [twin_bytes(numbers)]


@BOTH
@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([1.0, math.inf], math.inf),
        ([-math.inf, 1e308], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
        ([math.nan, math.inf], math.nan),
        ([1e308] * 20, math.inf),
        ([1e308] * 20 + [-1e308] * 19, 1e308),
        ([-0.0], 0.0),
        ([1e300, 1.0, -1e300], 1.0),
        ([2.0**53, 1.0], 2.0**53),  # half way: to the even one
        ([2.0**53, 1.0, 2.0**-1000], 2.0**53 + 2),  # a breath above half way
    ],
)
def test_special_values_follow_the_rule(life: str, numbers: list[float], expected: float) -> None:
    with np.errstate(over="ignore"):
        written = summed(life, numbers, [0] * len(numbers), 1)
        assert written == [twin_bytes(numbers)]
        got = rounded(life, written)[0]
    assert struct.pack("d", got) == struct.pack("d", expected)


@BOTH
@pytest.mark.parametrize("wrong", [b"", b"\0", b"\0\0\1", b"\x08\0", b"\0\x80\1\0\0\0"])
def test_malformed_sums_are_counted(life: str, wrong: bytes) -> None:
    assert alive(kernels.count_malformed, life)(*columns([twin_bytes([1.5]), wrong, None])) == 1


near = (
    st.floats(-1e4, 1e4) | st.sampled_from([0.0, -0.0, 0.01, -0.01, 4096.5]) | st.integers(-3, 3).map(float)
)


@BOTH
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(near, st.integers(0, 4), st.booleans()), max_size=40), st.integers(-1074, 900))
def test_sums_of_values_near_each_other_are_written_the_same_way(
    life: str, rows: list[tuple[float, int, bool]], power: int
) -> None:
    numbers = [math.ldexp(round(number * 1024) / 1024, power) for number, _, _ in rows]
    into = np.array([group for _, group, _ in rows], np.int32)
    bits = np.array(numbers, np.float64).view(np.int64)
    valid = np.packbits([is_valid for _, _, is_valid in rows] or [True], bitorder="little")
    with np.errstate(over="ignore"):
        low, high = alive(narrow.span_exponents, life)(bits, valid, 0)
        assert high - low + 53 + 6 + 1 <= narrow.MOST_BITS
        sums = np.zeros(10, np.uint64)
        alive(narrow.add_narrow, life)(bits, valid, 0, into, low if high else 1, sums)
        bounds, data, known = np.empty(6, np.int32), np.empty(5 * 22, np.uint8), np.zeros(1, np.uint8)
        size = alive(narrow.write_narrow, life)(sums, low if high else 1, bounds, data, known)
    assert size == bounds[5]
    for group in range(5):
        own = [
            number
            for number, (_, other, is_valid) in zip(numbers, rows, strict=True)
            if is_valid and other == group
        ]
        written = bytes(data[bounds[group] : bounds[group + 1]])
        assert (written if known[0] >> group & 1 else None) == twin_bytes(own)
