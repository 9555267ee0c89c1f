"""The kernels of deduplication against plain twins, compiled and as checked Python."""

from __future__ import annotations

import struct
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.kernels import dedupe
from tidegate.kernels import dedupe as kernels

MASK = (1 << 64) - 1
FORMS = pytest.mark.parametrize("form", ["compiled", "checked"])


def run(form: str, kernel: Any, *arguments: Any) -> Any:
    with np.errstate(over="ignore"):
        return (kernel if form == "compiled" else kernel.py_func)(*arguments)


def siphash_128(key: bytes, message: bytes) -> bytes:
    """SipHash-2-4 with 128 bits of output, written from its definition."""
    k0, k1 = struct.unpack("<QQ", key)
    v = [
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D ^ 0xEE,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    ]

    def rotate(word: int, bits: int) -> int:
        return ((word << bits) | (word >> (64 - bits))) & MASK

    def rounds(count: int) -> None:
        for _ in range(count):
            v[0] = (v[0] + v[1]) & MASK
            v[2] = (v[2] + v[3]) & MASK
            v[1], v[3] = rotate(v[1], 13) ^ v[0], rotate(v[3], 16) ^ v[2]
            v[0] = (rotate(v[0], 32) + v[3]) & MASK
            v[2] = (v[2] + v[1]) & MASK
            v[3], v[1] = rotate(v[3], 21) ^ v[0], rotate(v[1], 17) ^ v[2]
            v[2] = rotate(v[2], 32)

    padded = message + bytes(-(len(message) + 1) % 8) + bytes([len(message) & 0xFF])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return struct.pack("<QQ", low, v[0] ^ v[1] ^ v[2] ^ v[3])


def message_of(key: bytes, identity: bytes) -> bytes:
    def filled(data: bytes) -> bytes:
        return data + bytes(-len(data) % 8)

    lengths = struct.pack("<I", len(key)) + struct.pack("<I", len(identity))[:3]
    return filled(key) + filled(identity) + lengths


def test_the_twin_is_siphash() -> None:
    """The first vectors of the reference implementation: key 00…0f, messages of 0, 1 and 8 bytes."""
    key = bytes(range(16))
    assert siphash_128(key, b"").hex() == "a3817f04ba25a8e66df67214c7550293"
    assert siphash_128(key, b"\0").hex() == "da87c1d86b99af44347659119b22fc45"
    assert siphash_128(key, bytes(range(8))).hex() == "3b62a9ba6258f5610f83e264f31497b4"


def column(values: list[bytes]) -> tuple[Any, Any]:
    bounds = np.cumsum([0, *map(len, values)], dtype=np.int32)
    return np.frombuffer(b"".join(values), np.uint8), bounds


@FORMS
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.binary(max_size=20),
            st.binary(max_size=40) | st.binary(min_size=100, max_size=150),
            st.booleans(),
        ),
        max_size=2 * dedupe.LANES,
    ),
    st.binary(min_size=16, max_size=16),
    st.booleans(),
)
def test_fingerprints_are_siphash_of_key_and_id(
    form: str, rows: list[tuple[bytes, bytes, bool]], secret: bytes, is_masked: bool
) -> None:
    keys, ids = column([row[0] for row in rows]), column([row[1] for row in rows])
    mask = np.array([row[2] for row in rows] if is_masked else [], np.bool_)
    prints, marks = np.zeros((len(rows), 2), np.uint64), np.empty(len(rows), np.uint64)
    words = np.frombuffer(secret, "<u8")
    found = run(form, dedupe.fingerprint_pairs, *keys, *ids, mask, *words, 7, prints, marks)
    wanted = [row for row in range(len(rows)) if rows[row][2] or not is_masked]
    texts = {row: siphash_128(secret, message_of(*rows[row][:2])) for row in wanted}
    assert [each.tobytes() for each in prints] == [texts.get(row, bytes(16)) for row in range(len(rows))]
    hashes = {row: xxhash.xxh64_intdigest(text) for row, text in texts.items()}
    assert marks[:found].tolist() == [hashes[row] >> 7 << 7 | row for row in wanted]


def test_no_two_pairs_are_one_message() -> None:
    parts = [b"", b"\0", b"a", b"a\0", b"a" * 8, b"a" * 9, b"\0" * 8, b"ab"]
    messages = {message_of(key, identity) for key in parts for identity in parts}
    assert len(messages) == len(parts) ** 2


@FORMS
@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 300, 1200])
@pytest.mark.parametrize("distinct", [1, 7, 10_000])
@pytest.mark.parametrize("row_bits", [12, 62])  # a mark with two bits of the hash leaves much to be settled
def test_rows_are_sorted_by_hash_and_fingerprint_and_grouped(
    form: str, count: int, distinct: int, row_bits: int
) -> None:
    if form == "checked" and count > 300:
        count = 100
    chance = np.random.default_rng(count * distinct)
    prints = chance.integers(0, 2**63, (distinct, 2), dtype=np.uint64)[chance.integers(0, distinct, count)]
    prints = np.ascontiguousarray(prints)
    chosen = np.flatnonzero(chance.random(count) < 0.9).tolist()
    texts = {row: prints[row].tobytes() for row in chosen}
    hashes = {row: xxhash.xxh64_intdigest(text) for row, text in texts.items()}
    marks = np.array(sorted(hashes[row] >> row_bits << row_bits | row for row in chosen), np.uint64)
    rows, starts = np.empty(len(chosen), np.int32), np.empty(len(chosen) + 1, np.int32)
    content = prints.reshape(-1).view(np.uint8)
    found = run(form, dedupe.arrange_rows, marks, row_bits, content, rows, starts)
    expected = sorted(chosen, key=lambda row: (hashes[row], texts[row], row))
    assert rows.tolist() == expected
    groups = [list(group) for _, group in groupby(expected, key=lambda row: texts[row])]
    assert starts[: found + 1].tolist() == np.cumsum([0, *map(len, groups)]).tolist()
    words, own = np.empty(2 * found, np.uint64), np.empty(found, np.uint64)
    run(form, dedupe.gather_prints, rows, starts, prints.reshape(-1), words, own)
    assert words.tobytes() == b"".join(texts[group[0]] for group in groups)
    assert own.tolist() == [hashes[group[0]] for group in groups]


@FORMS
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(
                st.tuples(st.integers(-5, 60), st.integers(0, 5), st.booleans()), min_size=1, max_size=8
            ),
            st.sets(st.integers(-5, 60), max_size=3),
        ),
        max_size=4,
    ),
    st.integers(1, 20),
    st.integers(0, 40),
    st.booleans(),
)
def test_verdicts_equal_those_of_a_plain_walk(
    form: str,
    groups: list[tuple[list[tuple[int, int, bool]], set[int]]],
    within: int,
    grace: int,
    refresh: bool,
) -> None:
    ts, offset, late, starts = [], [], [], [0]
    known: list[tuple[int, int]] = []
    known_starts = [0]
    for records, times in groups:
        for time, number, is_late in records:
            ts.append(time)
            offset.append(number)
            late.append(is_late)
        starts.append(len(ts))
        known += [(time, time % 7) for time in sorted(times)]
        known_starts.append(len(known))
    judged = np.array(
        [time + (grace + 3 if is_late else 0) for time, is_late in zip(ts, late, strict=True)], np.int64
    )
    expected, kept = _walk(
        ts, offset, late, starts, known, known_starts, within, within + grace, judged, refresh
    )
    count, room = len(ts), len(ts) + len(known) + 1
    verdicts = np.full(count, 9, np.uint8)
    numbers = [group for group, (_, times) in enumerate(groups) for _ in times]
    rows, bounds = np.arange(count, dtype=np.int32), np.array(starts, np.int32)
    run(
        form, kernels.decide, rows, bounds, np.arange(len(groups), dtype=np.int32),
        np.array(late if any(late) else [], np.bool_), np.array(ts, np.int64), judged, np.array(offset, np.int64),
        np.zeros(count, np.int32), np.array(numbers, np.int64), np.array([each[0] for each in known], np.int64),
        np.array([each[1] for each in known], np.int64), np.zeros(len(known), np.int32),
        within, within + grace, int(refresh),
        np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.int32), np.empty(room, np.int32),
        verdicts,
    )  # fmt: skip
    assert verdicts.tolist() == expected
    new_groups, new_rows = np.empty(count + 1, np.int32), np.empty(count + 1, np.int32)
    found = run(form, kernels.list_kept, rows, bounds, new_groups, new_rows)
    assert list(zip(new_groups[:found].tolist(), new_rows[:found].tolist(), strict=True)) == kept


def _walk(
    ts: list[int],
    offset: list[int],
    late: list[bool],
    starts: list[int],
    known: list[tuple[int, int]],
    known_starts: list[int],
    within: int,
    retention: int,
    judged: Any,
    refresh: bool,
) -> tuple[list[int], list[tuple[int, int]]]:
    verdicts, kept = [], []
    for group in range(len(starts) - 1):
        seen = dict(known[known_starts[group] : known_starts[group + 1]])
        new: dict[int, int] = {}
        for row in range(starts[group], starts[group + 1]):
            time = ts[row]
            own = seen.get(time) == offset[row]
            if late[row]:
                is_kept = own and time > judged[row] - retention
                verdicts.append(kernels.REPLAY if is_kept else kernels.LATE)
            elif own:
                verdicts.append(kernels.REPLAY)
            elif any(abs(time - other) < within for other in seen):
                verdicts.append(kernels.DUPLICATE)
                if refresh and time not in seen:
                    seen[time], new[time] = ~offset[row], -row - 1
            else:
                verdicts.append(kernels.NEW)
                seen[time], new[time] = offset[row], row
        kept += [(group, new[time]) for time in sorted(new)]
    return verdicts, kept


@FORMS
def test_times_at_both_ends_of_64_bits_are_far_apart(form: str) -> None:
    ts = np.array([2**63 - 1, -(2**63)], np.int64)
    verdicts, none, rows = np.zeros(2, np.uint8), np.empty(0, np.int64), np.arange(2, dtype=np.int32)
    run(
        form, kernels.decide, rows, np.array([0, 2], np.int32), np.zeros(1, np.int32), np.zeros(0, np.bool_), ts, ts,
        np.array([0, 1], np.int64), np.zeros(2, np.int32), none, none, none, none.astype(np.int32),
        2**62, 2**62, 0, np.empty(3, np.int64), np.empty(3, np.int64), np.empty(3, np.int32), np.empty(3, np.int32),
        verdicts,
    )  # fmt: skip
    assert verdicts.tolist() == [kernels.NEW, kernels.NEW]
    assert rows.tolist() == [1, 0], "kept by ascending time"


@FORMS
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.booleans()), max_size=30), st.booleans())
def test_groups_of_one_new_row_in_time_are_not_looked_at(
    form: str, groups: list[tuple[int, int, bool]], has_late: bool
) -> None:
    """Each group has so many rows, so many are known of it, and its first row may be late."""
    starts = np.cumsum([0, *(size for size, _, _ in groups)], dtype=np.int32)
    rows = np.random.default_rng(len(groups)).permutation(int(starts[-1])).astype(np.int32)
    known = np.repeat(np.arange(len(groups)), [number for _, number, _ in groups]).astype(np.int64)
    late = np.zeros(len(rows) if has_late else 0, np.bool_)
    if has_late:
        late[rows[starts[:-1]]] = [is_late for _, _, is_late in groups]
    chosen = np.empty(len(groups), np.int32)
    found, largest = run(form, kernels.list_chosen, rows, starts, known, late, chosen)
    expected = [
        number
        for number, (size, known_rows, is_late) in enumerate(groups)
        if size > 1 or known_rows or (has_late and is_late)
    ]
    assert chosen[:found].tolist() == expected
    assert largest == max((groups[number][0] for number in expected), default=0)
