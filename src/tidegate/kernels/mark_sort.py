"""Marks in order: numbers whose upper bits are spread evenly (a hash, below the number of a bucket) and whose lowest
are the row, in which order they come.

A sort by digits, from the lowest of the bits that tell most marks apart up to the highest. Each pass reads from front
to back and writes to a few hundred places, so it costs the same however many marks there are. What is alike in
these bits stands in order of rows, and nearly always in order altogether; one more pass over neighbours settles the
rest. Whoever chooses keys whose hashes agree in these bits makes that pass long: it gives up, and the caller sorts
by comparing.

Callers prove (K2): both arrays are equally long.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import INT64, kernel
from tidegate.kernels.key_bytes import int64
from tidegate.kernels.memory import keep, load, pointer, store

UINT64S = types.Array(types.uint64, 1, "C")

DIGIT_BITS: Final = 8
DIGITS: Final = 1 << DIGIT_BITS
MOST_PASSES: Final = 5  # beyond that comparing is as quick
SPARE_BITS: Final = 3  # more than are needed to number the marks: few are alike then
FARTHEST: Final = 32  # places a mark may have to move in the last pass
UNSORTED: Final = -1
_WORD: Any = np.uint64


@register_jitable
def _settle(source: Any, count: Any) -> bool:
    """Bring marks that stand near their place there; False when one is far from it."""
    for place in range(1, count):
        mark = _WORD(load(source, place))
        if _WORD(load(source, place - 1)) <= mark:
            continue
        hole = int64(place)
        while hole > 0 and _WORD(load(source, hole - 1)) > mark:
            store(source, hole, load(source, hole - 1))
            hole -= 1
        store(source, hole, int64(mark))
        if place - hole > FARTHEST:
            return False
    return True


@register_jitable
def _by_digit(source: Any, target: Any, count: Any, shift: Any, places: Any) -> None:
    """Marks by the digit at `shift`, as they were where it is the same."""
    mask = _WORD(DIGITS - 1)
    for value in range(DIGITS):
        store(places, value, 0)
    for at in range(count):
        digit = int64((_WORD(load(source, at)) >> shift) & mask)
        store(places, digit, load(places, digit) + 1)
    filled = int64(0)
    for value in range(DIGITS):
        held = load(places, value)
        store(places, value, filled)
        filled += held
    for at in range(count):
        mark = load(source, at)
        digit = int64((_WORD(mark) >> shift) & mask)
        into = load(places, digit)
        store(places, digit, into + 1)
        store(target, into, mark)


@kernel(INT64(UINT64S, UINT64S, INT64))
def sort_marks(marks: Any, other: Any, telling_bits: int) -> int:
    """Sort `marks`, whose upper `telling_bits` tell most of them apart; 0 when they are sorted where they are, 1 when
    in `other`, `UNSORTED` when they are all in `marks` still, in some order."""
    count, passes = marks.shape[0], (telling_bits + DIGIT_BITS - 1) // DIGIT_BITS
    if passes > MOST_PASSES or count < DIGITS:
        return UNSORTED
    mine, others, room = pointer(marks), pointer(other), np.empty(DIGITS, np.int64)
    places = pointer(room)
    for number in range(passes):
        shift = _WORD(64 - DIGIT_BITS * (passes - number))
        if number & 1 == 0:
            _by_digit(mine, others, count, shift, places)
        else:
            _by_digit(others, mine, count, shift, places)
    keep(room)
    if passes & 1 == 1:
        if _settle(others, count):
            return 1
        for at in range(count):
            store(mine, at, load(others, at))
    elif _settle(mine, count):
        return 0
    return UNSORTED
