"""Encode and decode columns of windowed keys (layouts: `windows/keys.py`).

Columns are Arrow binary columns: one byte buffer, n + 1 int32 offsets, and a mask of the rows that are not null. The
caller allocates the output: a key grows or shrinks by the same number of bytes in every row, so the size is known
before. A row that violates a rule gets a verdict, and no inner key.
"""

from __future__ import annotations

from typing import Any, Final

from tidegate.kernels.jit import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_FLAGS,
    READ_INT32S,
    READ_INT64S,
    copy,
    helper,
    kernel,
    load,
    load_int32,
    load_int64,
    pointer,
    store,
    store_int32,
    store_int64,
)

TOPIC: Final = 0
CHANGELOG: Final = 1
SESSION: Final = 2

GOOD: Final = 0
ABSENT: Final = 1  # null, or empty
TOO_SHORT: Final = 2
NEGATIVE_START: Final = 3
END_BEFORE_START: Final = 4
NEGATIVE_SEQUENCE: Final = 5
SEQUENCE: Final = 6
LOW_HALF: Final = 7
INNER_BYTES: Final = 8
UNALIGNED: Final = 9
NO_END: Final = 10
BEYOND: Final = 11
LIKE_SESSION: Final = 12

LATEST: Final = 2**63 - 1
NO_CHECK: Final = -1
IMPLAUSIBLE: Final = 1 << 48
LONGEST_SESSION_MS: Final = 366 * 86_400_000
LOW: Final = 0xFFFFFFFF


@helper
def other_format(
    key_format: int, inner_bytes: int, source: Any, cut: int, length: int, start: int, end: int
) -> int:
    """The verdict for a key that looks like another format; the inner key ends at `cut`."""
    if (end if key_format == SESSION else start) >= IMPLAUSIBLE:
        return BEYOND
    if inner_bytes != NO_CHECK or start == 0:
        return GOOD
    low = start & LOW
    before = load_int32(source, cut - 4) if length >= 4 else -1
    if key_format == SESSION:
        if low == 0 and end & LOW < 1 << 16 and end >> 32 != start >> 32:
            return LOW_HALF
    elif key_format == CHANGELOG:
        if 0 < low < 1 << 16 and before == low:
            return LIKE_SESSION
    else:
        if low == 0 and 0 <= before < 1 << 16:
            return LOW_HALF
        last = load_int64(source, cut - 8) if length >= 8 else -1
        if start <= last <= start + LONGEST_SESSION_MS:
            return LIKE_SESSION
    return GOOD


@helper(forceinline=True)
def judge(
    key_format: int,
    strict: int,
    inner_bytes: int,
    advance: int,
    source: Any,
    cut: int,
    length: int,
    start: int,
    end: int,
    sequence: int,
) -> int:
    """The verdict of a key that is long enough; `GOOD` for a valid one."""
    if start < 0:
        return NEGATIVE_START
    if key_format == SESSION:
        if end < start:
            return END_BEFORE_START
    elif start == LATEST:
        return NO_END
    elif key_format == CHANGELOG:
        if sequence < 0:
            return NEGATIVE_SEQUENCE
        if strict and sequence != 0:
            return SEQUENCE
    if strict:
        verdict = other_format(key_format, inner_bytes, source, cut, length, start, end)
        if verdict != GOOD:
            return verdict
    if inner_bytes != NO_CHECK and length != inner_bytes:
        return INNER_BYTES
    if advance != NO_CHECK and key_format != SESSION and start % advance != 0:
        return UNALIGNED
    return GOOD


@kernel(
    INT64(
        READ_BYTES, READ_INT32S, READ_FLAGS, INT64, INT64, INT64, INT64, INT64,
        INT32S, BYTES, INT64S, INT64S, INT32S, BYTES,
    )
)  # fmt: skip
def decode_windowed_keys(
    data: Any, bounds: Any, present: Any, key_format: int, size: int, strict: int, inner_bytes: int, advance: int,
    inner_ends: Any, inner_content: Any, starts: Any, ends: Any, sequences: Any, verdicts: Any,
) -> int:  # fmt: skip
    """Decode every key; returns how many rows have a verdict other than good and absent.

    `inner_ends` has room for n + 1 numbers and `inner_content` for all bytes that can be left. Numbers of rows
    that are not good are 0.
    """
    source, limits = pointer(data), pointer(bounds)
    target_ends, target = pointer(inner_ends), pointer(inner_content)
    start_of, end_of, sequence_of, verdict_of = (
        pointer(starts),
        pointer(ends),
        pointer(sequences),
        pointer(verdicts),
    )
    suffix = 16 if key_format == SESSION else (12 if key_format == CHANGELOG else 8)
    filled, bad = 0, 0
    store(target_ends, 0, 0)
    for row in range(present.shape[0]):
        first, last = load(limits, row), load(limits, row + 1)
        verdict, start, end, sequence = ABSENT, 0, 0, 0
        cut = last - suffix
        if present[row] and last > first:
            if cut < first:
                verdict = TOO_SHORT
            else:
                if key_format == SESSION:
                    end, start = load_int64(source, cut), load_int64(source, cut + 8)
                else:
                    start = load_int64(source, cut)
                    end = start + size if start < LATEST - size else LATEST
                    if key_format == CHANGELOG:
                        sequence = load_int32(source, cut + 8)
                verdict = judge(
                    key_format, strict, inner_bytes, advance, source, cut, cut - first, start, end, sequence
                )
        if verdict == GOOD:
            copy(target, filled, source, first, cut - first)
            filled += cut - first
        else:
            start, end, sequence = 0, 0, 0
            bad += verdict != ABSENT
        store(target_ends, row + 1, filled)
        store(start_of, row, start)
        store(end_of, row, end)
        store(sequence_of, row, sequence)
        store(verdict_of, row, verdict)
    return bad


@kernel(
    INT64(
        READ_BYTES, READ_INT32S, READ_FLAGS, READ_INT64S, READ_INT64S, READ_INT32S, INT64, INT32S, BYTES,
    )
)  # fmt: skip
def encode_windowed_keys(
    data: Any, bounds: Any, present: Any, starts: Any, ends: Any, sequences: Any, key_format: int,
    key_ends: Any, key_content: Any,
) -> int:  # fmt: skip
    """Encode every key with its window; returns the first row with an invalid window, or -1.

    `ends` is read for sessions only, `sequences` for store keys only. Null keys stay null.
    """
    source, limits = pointer(data), pointer(bounds)
    start_of, end_of, sequence_of = pointer(starts), pointer(ends), pointer(sequences)
    target_ends, target = pointer(key_ends), pointer(key_content)
    filled = 0
    store(target_ends, 0, 0)
    for row in range(present.shape[0]):
        if present[row]:
            first, last = load(limits, row), load(limits, row + 1)
            start = load(start_of, row)
            copy(target, filled, source, first, last - first)
            filled += last - first
            if start < 0 or (start == LATEST and key_format != SESSION):
                return row
            if key_format == SESSION:
                end = load(end_of, row)
                if end < start:
                    return row
                store_int64(target, filled, end)
                store_int64(target, filled + 8, start)
                filled += 16
            else:
                store_int64(target, filled, start)
                filled += 8
                if key_format == CHANGELOG:
                    sequence = load(sequence_of, row)
                    if sequence < 0:
                        return row
                    store_int32(target, filled, sequence)
                    filled += 4
        store(target_ends, row + 1, filled)
    return -1
