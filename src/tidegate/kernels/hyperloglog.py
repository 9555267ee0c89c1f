"""HyperLogLog sketches: made of hashes, merged, and read.

A sketch has 4096 registers of 0 to 53. Its bytes are

    01 | place and value of each register that is not 0, ascending: three bytes big-endian, place << 6 | value
    02 | all registers, a byte each

the first form while fewer than 1366 registers are set, the second from then on: one set, one sequence of bytes.

The register of a hash is chosen by its top 12 bits; it keeps the largest of (leading zeros of the other 52) + 1.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import BYTES, INT32S, INT64, READ_BYTES, READ_INT32S, READ_INT64S, kernel
from tidegate.kernels.key_bytes import int64
from tidegate.kernels.memory import keep, load, pointer, store
from tidegate.kernels.words import leading_zeros

BITS: Final = 12
REGISTERS: Final = 1 << BITS
REST: Final = 64 - BITS  # bits of a hash that are counted
SPARSE, DENSE = 1, 2
MOST_SPARSE: Final = (REGISTERS - 1) // 3  # registers set in the first form
LARGEST: Final = REGISTERS + 1  # bytes
FEW: Final = 48  # registers that are quicker sorted than looked for

READ_UINT64S = types.Array(types.uint64, 1, "C", readonly=True)
DOUBLES = types.Array(types.float64, 1, "C")

_BITS, _REST = np.uint64(BITS), np.uint64(REST)
_END = np.uint64(1 << (BITS - 1))  # stops the count at 53


@register_jitable
def _raise(registers: Any, places: Any, met: Any, place: Any, value: Any) -> Any:
    """Raise a register; how many are set, the first `FEW` of them named in `places` as they come."""
    before = load(registers, place)
    if before == 0:
        if met < FEW:
            places[met] = place
        met += 1
    if value > before:
        store(registers, place, value)
    return met


@register_jitable
def _put(content: Any, at: Any, place: Any, value: Any) -> Any:
    entry = (place << 6) | value
    store(content, at, entry >> 16)
    store(content, at + 1, (entry >> 8) & 255)
    store(content, at + 2, entry & 255)
    return at + 3


@register_jitable
def _write(registers: Any, places: Any, met: Any, content: Any, at: Any) -> Any:
    """Write the sketch and set the registers back to 0; where it ends."""
    if met > MOST_SPARSE:
        store(content, at, DENSE)
        for place in range(REGISTERS):
            store(content, at + 1 + place, load(registers, place))
            store(registers, place, 0)
        return at + LARGEST
    store(content, at, SPARSE)
    at += 1
    if met <= FEW:
        for turn in range(1, met):
            place = places[turn]
            hole = turn
            while hole > 0 and places[hole - 1] > place:
                places[hole] = places[hole - 1]
                hole -= 1
            places[hole] = place
        for turn in range(met):
            at = _put(content, at, int64(places[turn]), load(registers, int64(places[turn])))
            store(registers, int64(places[turn]), 0)
        return at
    for place in range(REGISTERS):
        value = load(registers, place)
        if value != 0:
            at = _put(content, at, place, value)
            store(registers, place, 0)
    return at


@kernel(types.void(READ_UINT64S, READ_INT64S, READ_INT64S, BYTES, INT32S, BYTES))
def sketch_hashes(hashes: Any, order: Any, starts: Any, scratch: Any, ends: Any, content: Any) -> None:
    """One sketch for each group: of the hashes order[starts[g]:starts[g + 1]]. `scratch` are 4096 zeros."""
    registers, target = pointer(scratch), pointer(content)
    places = np.empty(FEW, np.int64)
    at = int64(0)
    ends[0] = 0
    for group in range(starts.shape[0] - 1):
        met = int64(0)
        for turn in range(starts[group], starts[group + 1]):
            number = hashes[order[turn]]
            value = int64(leading_zeros((number << _BITS) | _END)) + 1
            met = _raise(registers, places, met, int64(number >> _REST), value)
        at = _write(registers, places, met, target, at)
        ends[group + 1] = at


@register_jitable
def _add(source: Any, first: Any, stop: Any, registers: Any, places: Any, met: Any) -> Any:
    """Raise the registers by a sketch: how many are set; -1 for bytes that are none."""
    if stop == first:
        return met
    form = load(source, first)
    if form == DENSE and stop - first == LARGEST:
        for place in range(REGISTERS):
            value = load(source, first + 1 + place)
            if value > REST + 1:
                return int64(-1)
            if value != 0:
                met = _raise(registers, places, met, place, value)
        return met
    if form != SPARSE or (stop - first - 1) % 3 != 0:
        return int64(-1)
    for at in range(first + 1, stop, 3):
        entry = (load(source, at) << 16) | (load(source, at + 1) << 8) | load(source, at + 2)
        place, value = entry >> 6, entry & 63
        if place >= REGISTERS or value == 0 or value > REST + 1:
            return int64(-1)
        met = _raise(registers, places, met, place, value)
    return met


@kernel(INT64(READ_BYTES, READ_INT32S, READ_INT64S, READ_INT64S, BYTES, INT32S, BYTES))
def merge_sketches(
    data: Any, bounds: Any, order: Any, starts: Any, scratch: Any, ends: Any, content: Any
) -> Any:
    """One sketch for each group: of the sketches order[starts[g]:starts[g + 1]]. The one that is none, or -1."""
    source, registers, target = pointer(data), pointer(scratch), pointer(content)
    places = np.empty(FEW, np.int64)
    at = int64(0)
    ends[0] = 0
    for group in range(starts.shape[0] - 1):
        met = int64(0)
        for turn in range(starts[group], starts[group + 1]):
            one = order[turn]
            met = _add(source, int64(bounds[one]), int64(bounds[one + 1]), registers, places, met)
            if met < 0:
                return one
        at = _write(registers, places, met, target, at)
        ends[group + 1] = at
    return int64(-1)


@register_jitable
def _sigma(share: Any) -> Any:
    """x + Σ x^(2^k) · 2^(k − 1)."""
    if share == 1.0:
        return np.inf
    total, power, before = share, 1.0, -1.0
    while total != before:
        share *= share
        before = total
        total += share * power
        power += power
    return total


@register_jitable
def _tau(share: Any) -> Any:
    """(1 − x − Σ (1 − x^(2^−k))² · 2^−k) / 3."""
    if share == 0.0 or share == 1.0:
        return 0.0
    total, power, before = 1.0 - share, 1.0, -1.0
    while total != before:
        share = np.sqrt(share)
        before = total
        power *= 0.5
        total -= (1.0 - share) ** 2 * power
    return total / 3.0


@kernel(INT64(READ_BYTES, READ_INT32S, DOUBLES))
def estimate_sketches(data: Any, bounds: Any, numbers: Any) -> Any:
    """How many different hashes each sketch has seen, about. The one that is none, or -1."""
    source = pointer(data)
    scratch = np.zeros(REGISTERS, np.uint8)
    registers = pointer(scratch)
    places = np.empty(FEW, np.int64)
    counts = np.zeros(REST + 2, np.int64)
    size = float(REGISTERS)
    for one in range(numbers.shape[0]):
        met = _add(source, int64(bounds[one]), int64(bounds[one + 1]), registers, places, int64(0))
        if met < 0:
            return int64(one)
        counts[:] = 0
        counts[0] = REGISTERS - met
        if met <= FEW:
            for turn in range(met):
                counts[load(registers, places[turn])] += 1
                store(registers, places[turn], 0)
        else:
            for place in range(REGISTERS):
                value = load(registers, place)
                if value != 0:
                    counts[value] += 1
                    store(registers, place, 0)
        total = size * _tau(1.0 - counts[REST + 1] / size)
        for value in range(REST, 0, -1):
            total = 0.5 * (total + counts[value])
        total += size * _sigma(counts[0] / size)
        numbers[one] = size * size / (2.0 * np.log(2.0)) / total
    keep(scratch)
    return int64(-1)
