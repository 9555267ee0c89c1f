"""Key fingerprints against the published vectors and a plain twin; the table against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels.hashing import fingerprint_keys, get_prints, move_prints, put_prints

WORD = (1 << 64) - 1
SECRET = (0x0706050403020100, 0x0F0E0D0C0B0A0908)


def siphash_128(data: bytes, secret: tuple[int, int]) -> tuple[int, int]:
    """SipHash-2-4 with 128 bits of output, in the words of its definition."""
    v = [
        secret[0] ^ 0x736F6D6570736575,
        secret[1] ^ 0x646F72616E646F6D ^ 0xEE,
        secret[0] ^ 0x6C7967656E657261,
        secret[1] ^ 0x7465646279746573,
    ]

    def rotate(word: int, bits: int) -> int:
        return ((word << bits) | (word >> (64 - bits))) & WORD

    def rounds(count: int) -> None:
        for _ in range(count):
            v[0] = (v[0] + v[1]) & WORD
            v[1] = rotate(v[1], 13) ^ v[0]
            v[0] = rotate(v[0], 32)
            v[2] = (v[2] + v[3]) & WORD
            v[3] = rotate(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & WORD
            v[3] = rotate(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & WORD
            v[1] = rotate(v[1], 17) ^ v[2]
            v[2] = rotate(v[2], 32)

    whole = len(data) // 8 * 8
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, whole, 8)]
    words.append(int.from_bytes(data[whole:], "little") | (len(data) & 0xFF) << 56)
    for word in words:
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return low, v[0] ^ v[1] ^ v[2] ^ v[3]


def fingerprints(keys: list[bytes | None], secret: tuple[int, int] = SECRET) -> np.ndarray:
    data, bounds, mask = columns(keys)
    prints = np.zeros((len(keys), 2), np.uint64)
    fingerprint_keys(data, bounds, mask, np.uint64(secret[0]), np.uint64(secret[1]), prints)
    return prints


def hashed(data: bytes, secret: tuple[int, int] = SECRET) -> tuple[int, int]:
    low, high = fingerprints([b"before", data, b"behind"], secret)[1]
    return int(low), int(high)


@pytest.mark.parametrize(
    ("length", "published"),
    [
        (0, "a3817f04ba25a8e66df67214c7550293"),
        (1, "da87c1d86b99af44347659119b22fc45"),
        (15, "5493e99933b0a8117e08ec0f97cfc3d9"),
    ],
)
def test_fingerprint_equals_the_published_siphash_vectors(length: int, published: str) -> None:
    low, high = hashed(bytes(range(length)))
    assert (low.to_bytes(8, "little") + high.to_bytes(8, "little")).hex() == published


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, WORD), st.integers(0, WORD))
def test_fingerprint_equals_its_plain_twin(data: bytes, secret0: int, secret1: int) -> None:
    assert hashed(data, (secret0, secret1)) == siphash_128(data, (secret0, secret1))


class Table:
    """The kernels' table driven the way the key map drives it."""

    def __init__(self, slots: int) -> None:
        self.rows = np.zeros((slots, 3), np.uint64)
        self.entries = 0

    def put(self, keys: list[bytes | None], first_offset: int, limit: int) -> int:
        mask = columns(keys)[2]
        offsets = np.arange(first_offset, first_offset + len(keys), dtype=np.int64)
        done, self.entries = put_prints(self.rows, self.entries, limit, fingerprints(keys), offsets, mask, 0)
        return int(done)

    def get(self, keys: list[bytes | None]) -> list[int]:
        found = np.empty(len(keys), np.int64)
        get_prints(self.rows, fingerprints(keys), columns(keys)[2], found)
        return [int(offset) for offset in found]


def columns(keys: list[bytes | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    data = np.frombuffer(b"".join(key or b"" for key in keys), np.uint8)
    bounds = np.cumsum([0] + [len(key or b"") for key in keys]).astype(np.int32)
    return data, bounds, np.array([key is not None for key in keys], bool)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.none() | st.binary(max_size=3), max_size=60), st.integers(1, 40))
def test_table_keeps_the_last_offset_of_each_key_and_stops_at_its_limit(
    keys: list[bytes | None], limit: int
) -> None:
    table = Table(slots=limit + 1)
    expected: dict[bytes, int] = {}
    expected_done = len(keys)
    for row, key in enumerate(keys):
        if key is None:
            continue
        if len(expected) >= limit:
            expected_done = row
            break
        expected[key] = 100 + row
    assert table.put(keys, 100, limit) == expected_done
    assert table.entries == len(expected)
    asked: list[bytes | None] = [*keys, b"never put"]
    assert table.get(asked) == [-1 if key is None else expected.get(key, -1) for key in asked]


def test_moving_to_a_larger_table_keeps_every_entry() -> None:
    small, large = Table(64), Table(1000)
    keys: list[bytes | None] = [b"%d" % i for i in range(63)]
    small.put(keys, 0, 63)
    move_prints(small.rows, large.rows)
    assert large.get(keys) == list(range(63))


def test_empty_key_is_a_key_of_its_own() -> None:
    table = Table(8)
    table.put([b"", None, b"a"], 5, 7)
    assert table.get([b"", None, b"a", b"b"]) == [5, -1, 7, -1]
