"""Values added up or chosen from, group by group: `groups[row]` says which group a row belongs to.

    count_rows   rows of each group
    add_numbers  sums of int64
    add_wide     sums of whole numbers of one, two or four 64-bit words (decimals), in two or four words
    pick_rows    the row with the lowest or highest order key

Validity is a bitmap from bit `valid_start` on; no bytes means that all are valid. Sums of doubles: `exact_sum.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_BYTES,
    READ_INT32S,
    READ_INT64S,
    kernel,
)
from tidegate.kernels.exact_sum import is_valid

READ_UINT64S = types.Array(types.uint64, 1, "C", readonly=True)
UINT64S = types.Array(types.uint64, 1, "C")

_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
_U0, _U1 = np.uint64(0), np.uint64(1)
_SIGN = np.uint64(63)


@kernel(types.void(READ_BYTES, INT64, READ_INT32S, INT64S))
def count_rows(valid: Any, valid_start: int, groups: Any, counts: Any) -> None:
    """Add the valid rows of each group to `counts`."""
    if valid.shape[0] == 0:
        for row in range(groups.shape[0]):
            counts[groups[row]] += 1
    else:
        for row in range(groups.shape[0]):
            counts[groups[row]] += is_valid(valid, valid_start, row)


@kernel(types.void(READ_INT64S, READ_INT32S, INT64S))
def add_numbers(values: Any, groups: Any, sums: Any) -> None:
    """Add each value to its group's sum, modulo 2^64: for counts, which never come near."""
    for row in range(groups.shape[0]):
        sums[groups[row]] += values[row]


@kernel(types.void(READ_UINT64S, INT64, READ_BYTES, INT64, READ_INT32S, INT64, UINT64S, BYTES))
def add_wide(
    values: Any,
    value_words: int,
    valid: Any,
    valid_start: int,
    groups: Any,
    sum_words: int,
    sums: Any,
    seen: Any,
) -> None:
    """Add each value of `value_words` words to its group's sum of `sum_words`, lowest word first, signed.

    `seen` (a byte a group) is set for groups with a valid row.
    """
    for row in range(groups.shape[0]):
        if not is_valid(valid, valid_start, row):
            continue
        group = np.int64(groups[row])
        seen[group] = 1
        first, into = row * value_words, group * sum_words
        sign = _ONES if values[first + value_words - 1] >> _SIGN else _U0
        carry = _U0
        for word in range(sum_words):
            addend = values[first + word] if word < value_words else sign
            before = sums[into + word]
            total = before + addend
            with_carry = total + carry
            carry = _U1 if total < before or with_carry < total else _U0
            sums[into + word] = with_carry


@register_jitable
def _is_below(first: Any, second: Any, third: Any, left: Any, right: Any) -> bool:
    if first[left] != first[right] or second.shape[0] == 0:
        return bool(first[left] < first[right])
    if second[left] != second[right]:
        return bool(second[left] < second[right])
    return bool(third[left] < third[right])


@kernel(types.void(READ_INT64S, READ_INT64S, READ_INT64S, READ_BYTES, INT64, READ_INT32S, INT64, INT32S))
def pick_rows(
    first: Any, second: Any, third: Any, valid: Any, valid_start: int, groups: Any, highest: int, picked: Any
) -> None:
    """The valid row of each group with the lowest (`highest` 0) or highest (1) key, the earliest of equal ones.

    A key is (first, second, third), or `first` alone when the others have no elements. `picked` comes filled
    with -1, which stays for a group without a valid row.
    """
    for row in range(groups.shape[0]):
        if not is_valid(valid, valid_start, row):
            continue
        best = picked[groups[row]]
        if best < 0:
            is_better = True
        elif highest:
            is_better = _is_below(first, second, third, best, row)
        else:
            is_better = _is_below(first, second, third, row, best)
        if is_better:
            picked[groups[row]] = row
