"""Buffers that need not be stored: whole numbers in even steps, which their first number and the step describe.

Counters, numbers that are all the same, offsets of values of one width: a slot says how to make them (`slots`). What is
made is never larger than what the columns beside it could be, and zeros take no memory at all.

Thread rule: pure, but for the shared zeros, which only ever grow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.kernels.sorting import halves_are_even, words_are_even

MAX_MADE_BYTES = 1 << 30


class BadSlot(ValueError):
    """The slot's content contradicts itself; the pack names the file and the place."""


def numbers_of(kind: pa.DataType, layout: str | None, *, large: bool) -> np.dtype[Any] | None:
    """What the second buffer of a plain column holds, if whole numbers: values, or where values begin."""
    if layout == "binary":
        return np.dtype(np.int64 if large else np.int32)
    return INTEGERS.get(kind.id) if layout == "fixed" else None


INTEGERS = {
    kind.id: np.dtype(kind.to_pandas_dtype())
    for kind in (
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.uint8(),
        pa.uint16(),
        pa.uint32(),
        pa.uint64(),
    )
}


def step_of(numbers: np.ndarray[Any, Any]) -> tuple[int, int] | None:
    """The first number and the step, if each is the one before it and the step."""
    count, value = len(numbers), numbers.item
    first: int = value(0)
    step: int = value(1) - first
    if value(count // 2) != first + step * (count // 2) or value(count - 1) != first + step * (count - 1):
        return None
    if numbers.dtype == np.int64 and numbers.flags.aligned and abs(step) < 1 << 62:
        same = words_are_even(numbers, step)
    elif numbers.dtype == np.int32 and numbers.flags.aligned:
        same = halves_are_even(numbers, step)
    else:
        same = bool((numbers[1:] - numbers[:-1] == step).all())
    return (first, step) if same else None


def made_of(first: int, step: int, numbers: np.dtype[Any], count: int) -> pa.Buffer:
    """The numbers that a step describes; zeros are shared, and take no memory however many there are."""
    info = np.iinfo(numbers)
    ends = (first, first + step * (count - 1))
    fits = all(info.min <= each <= info.max for each in (*ends, step))
    if count * numbers.itemsize > MAX_MADE_BYTES or not fits:
        raise BadSlot(f"a buffer of {count} numbers from {first} in steps of {step} cannot be")
    if first == step == 0:
        return _zeros(count * numbers.itemsize)
    if step == 0:
        return pa.py_buffer(np.full(count, first, numbers))
    return pa.py_buffer(np.arange(count, dtype=numbers) * numbers.type(step) + numbers.type(first))


_shared_zeros: list[pa.Buffer] = [pa.py_buffer(np.zeros(1 << 20, np.uint8))]


def _zeros(size: int) -> pa.Buffer:
    """So many zero bytes; never written to, so they are all one page of the operating system's."""
    shared = _shared_zeros[0]
    if shared.size < size:
        shared = _shared_zeros[0] = pa.py_buffer(np.zeros(1 << (size - 1).bit_length(), np.uint8))
    return shared.slice(0, size)
