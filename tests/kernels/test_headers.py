"""Finding batches: the kernels, the twin that unpacks with struct, and hostile bytes."""

import random
import struct
from typing import Any

import numpy as np
import pytest

from tidegate.kernels.record_batch import (
    BAD_LENGTH,
    BAD_MAGIC,
    HEADER_ROW,
    PARTIAL,
    WHOLE,
    choose_batches,
    count_batches,
    read_headers,
    refusal,
)
from tidegate.testing.batches import Rec, build_batch, canary_batch

FIELDS = ["base_offset", "length", "leader_epoch", "magic", "crc", "attributes", "last_offset_delta"]
FIELDS += ["base_timestamp", "max_timestamp", "producer_id", "producer_epoch", "base_sequence", "count"]


def twin_scan(buffer: bytes) -> tuple[list[dict[str, int]], int, int]:
    """The headers of whole batches, where they end, and why."""
    found: list[dict[str, int]] = []
    position = 0
    while position < len(buffer):
        if len(buffer) - position < 61:
            return found, position, PARTIAL
        header = dict(zip(FIELDS, struct.unpack_from(">qiibIhiqqqhii", buffer, position), strict=True))
        if header["length"] < 49:
            return found, position, BAD_LENGTH
        if header.pop("magic") != 2:
            return found, position, BAD_MAGIC
        if header["length"] + 12 > len(buffer) - position:
            return found, position, PARTIAL
        found.append({"position": position, **header})
        position += header["length"] + 12
    return found, position, WHOLE


def scan(buffer: bytes, *, compiled: bool = True) -> tuple[list[dict[str, int]], int, int]:
    count, read = (count_batches, read_headers) if compiled else (count_batches.py_func, read_headers.py_func)
    source = np.frombuffer(buffer, np.uint8)
    batches, end, why = count(source, 0, len(source))
    rows = np.zeros(batches, HEADER_ROW)
    read(source, 0, rows if compiled else rows.view(np.recarray))
    named = [dict(zip(HEADER_ROW.names or (), row.item(), strict=True)) for row in rows]
    return named, end, why


def log_of(seed: int) -> bytes:
    generator = random.Random(seed)
    return b"".join(
        build_batch(
            [Rec(b"k", generator.randbytes(generator.randrange(40)))] * generator.randrange(3),
            base_offset=generator.getrandbits(63),
            leader_epoch=generator.randrange(-1, 9),
            producer_id=generator.randrange(-1, 2**63),
            producer_epoch=generator.randrange(-1, 2**15),
            base_sequence=generator.randrange(-1, 2**31),
            transactional=generator.random() < 0.5,
            max_timestamp=generator.randrange(-1, 2**63),
        )
        for _ in range(generator.randrange(6))
    )


@pytest.mark.parametrize("seed", range(30))
def test_headers_are_the_twins(seed: int) -> None:
    log = log_of(seed)
    assert scan(log) == scan(log, compiled=False) == twin_scan(log)


def test_every_cut_of_a_log_ends_before_the_partial_batch() -> None:
    log = canary_batch(0) + canary_batch(1)
    for cut in range(len(log) + 1):
        assert scan(log[:cut]) == scan(log[:cut], compiled=False) == twin_scan(log[:cut])


def test_every_flipped_bit_of_two_headers_is_read_as_the_twin_reads_it() -> None:
    log = build_batch([Rec(b"k", b"v")]) + build_batch([Rec(b"k", b"v")], base_offset=1)
    for bit in range(8 * len(log)):
        flipped = bytearray(log)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        assert scan(bytes(flipped)) == twin_scan(bytes(flipped))


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 48, 49, 76, 77, 78, 2**31 - 13, 2**31 - 1])
def test_absurd_lengths_stop_the_walk_and_never_leave_the_buffer(length: int) -> None:
    log = bytearray(build_batch([Rec(value=b"v" * 20)]))
    log[8:12] = struct.pack(">i", length)
    assert scan(bytes(log)) == scan(bytes(log), compiled=False) == twin_scan(bytes(log))


def rows_of(*changes: dict[str, int]) -> Any:
    rows = np.zeros(len(changes), HEADER_ROW)
    for index, change in enumerate(changes):
        sound = {"base_offset": 10 * index, "last_offset_delta": 9, "count": 10}
        for name, value in {**sound, **change}.items():
            rows[index][name] = value
    return rows


def choose(rows: Any, start: int, stop: int) -> tuple[list[int], int, int]:
    chosen = np.full(len(rows), 7, np.uint8)
    count, index, rule = choose_batches(rows, start, stop, chosen)
    again = np.full(len(rows), 7, np.uint8)
    assert choose_batches.py_func(rows.view(np.recarray), start, stop, again) == (count, index, rule)
    assert chosen.tolist() == again.tolist()
    assert index >= 0 or sum(chosen) == count
    return chosen.tolist(), index, rule


def test_batches_that_overlap_the_range_are_chosen() -> None:
    rows = rows_of({}, {}, {}, {})
    assert choose(rows, 0, 40)[0] == [1, 1, 1, 1]
    assert choose(rows, 10, 30)[0] == [0, 1, 1, 0]
    assert choose(rows, 9, 31)[0] == [1, 1, 1, 1]
    assert choose(rows, 15, 16)[0] == [0, 1, 0, 0]
    assert choose(rows, 40, 99)[0] == [0, 0, 0, 0]
    assert choose(rows, -(2**63), 2**63 - 1)[0] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "change",
    [
        {"base_offset": -1},
        {"base_offset": 2**63 - 1},
        {"base_offset": 2**63 - 2**31},
        {"last_offset_delta": -1},
        {"count": -1},
        {"count": 11},
        {"count": 2**31 - 1, "last_offset_delta": 2**31 - 3},
        {"attributes": 5},
        {"attributes": 7},
    ],
)
def test_a_header_that_contradicts_itself_stops_the_choice(change: dict[str, int]) -> None:
    rows = rows_of({}, change, {})
    _, index, rule = choose(rows, -(2**63), 2**63 - 1)
    assert index == 1
    assert rule == refusal(rows.view(np.recarray)[1]) > 0


def test_the_largest_sound_header_passes() -> None:
    largest = {"base_offset": 2**63 - 1 - 2**31, "last_offset_delta": 2**31 - 1, "count": 2**31 - 1}
    assert choose(rows_of(largest), 2**63 - 3, 2**63 - 1) == ([1], -1, 0)
