"""Zig-zag varints: golden bytes, the twin, and reads that never pass the end."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from tidegate.kernels.jit import pointer
from tidegate.kernels.record_batch import read_varint, read_varlong, varint_size, write_varint

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)

GOLDEN = {
    0: "00",
    -1: "01",
    1: "02",
    63: "7e",
    -64: "7f",
    64: "8001",
    -65: "8101",
    8191: "fe7f",
    8192: "808001",
    2**31 - 1: "feffffff0f",
    -(2**31): "ffffffff0f",
}
GOLDEN_LONG = {**GOLDEN, 2**63 - 1: "feffffffffffffffff01", -(2**63): "ffffffffffffffffff01"}


@njit
def compiled_varint(source: Any, position: int, end: int) -> Any:
    return read_varint(pointer(source), position, end)


@njit
def compiled_varlong(source: Any, position: int, end: int) -> Any:
    return read_varlong(pointer(source), position, end)


@njit
def compiled_write(target: Any, position: int, value: int) -> Any:
    return write_varint(pointer(target), position, value)


@njit
def compiled_size(value: int) -> Any:
    return varint_size(value)


def twin_write(value: int) -> bytes:
    """Zig-zag: 0, -1, 1, -2, … become 0, 1, 2, 3, …; then seven bits a byte, lowest first."""
    rest = 2 * value if value >= 0 else -2 * value - 1
    out = []
    while rest >= 128:
        out.append(rest % 128 + 128)
        rest //= 128
    return bytes([*out, rest])


def twin_read(content: bytes, position: int, end: int, bits: int) -> tuple[int, int]:
    """The number, or (0, end + 1) when the bytes stop, or go on too long."""
    number, places = 0, (bits + 6) // 7
    for place in range(places):
        if position + place >= end:
            return 0, end + 1
        byte = content[position + place]
        number += (byte % 128) * 128**place
        if byte < 128:
            number %= 2**bits
            return (number // 2 if number % 2 == 0 else -(number // 2) - 1), position + place + 1
    return 0, end + 1


def as_array(content: bytes) -> Any:
    return np.frombuffer(content, np.uint8)


@pytest.mark.parametrize(("value", "encoded"), GOLDEN_LONG.items())
def test_golden_bytes(value: int, encoded: str) -> None:
    content = bytes.fromhex(encoded)
    assert twin_write(value) == content
    assert compiled_varlong(as_array(content), 0, len(content)) == (value, len(content))
    if value in GOLDEN:
        assert compiled_varint(as_array(content), 0, len(content)) == (value, len(content))


@given(INT64)
@settings(max_examples=300, deadline=None)
def test_writing_and_sizing_agree_with_the_twin(value: int) -> None:
    target = np.zeros(12, np.uint8)
    wanted = twin_write(value)
    assert compiled_write(target, 1, value) == 1 + len(wanted)
    assert target.tobytes() == b"\0" + wanted + bytes(11 - len(wanted))
    assert compiled_size(value) == varint_size(value) == len(wanted)
    again = np.zeros(12, np.uint8)
    assert write_varint(again, 1, value) == 1 + len(wanted)
    assert again.tobytes() == target.tobytes()


@given(st.binary(max_size=14), st.integers(0, 16), st.integers(0, 14))
@settings(max_examples=500, deadline=None)
def test_reading_any_bytes_agrees_with_the_twin_and_stays_inside(
    content: bytes, position: int, end: int
) -> None:
    end = min(end, len(content))
    for bits, compiled, plain in ((32, compiled_varint, read_varint), (64, compiled_varlong, read_varlong)):
        wanted = twin_read(content, position, end, bits)
        assert compiled(as_array(content), position, end) == wanted
        assert plain(as_array(content)[:end], position, end) == wanted  # raises when it looks beyond


@given(INT32)
@settings(max_examples=100, deadline=None)
def test_every_int32_reads_back_as_both(value: int) -> None:
    content = twin_write(value)
    assert compiled_varint(as_array(content), 0, len(content)) == (value, len(content))
    assert compiled_varlong(as_array(content), 0, len(content)) == (value, len(content))


@pytest.mark.parametrize("_", [pytest.param(None, id="LS-B2-six-bytes")])
def test_a_sixth_byte_is_no_varint_and_an_eleventh_no_varlong(_: None) -> None:
    assert compiled_varint(as_array(b"\x80" * 5 + b"\0"), 0, 6) == (0, 7)
    assert compiled_varlong(as_array(b"\x80" * 5 + b"\0"), 0, 6) == (0, 6)
    assert compiled_varlong(as_array(b"\x80" * 10 + b"\0"), 0, 11) == (0, 12)
