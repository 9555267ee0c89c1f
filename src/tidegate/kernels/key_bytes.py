"""Whole words out of bytes, keys copied and compared, inside kernels.

Compiled, `load_word` and `store_word` are one access of any alignment without a check (a kernel proves its positions
first, K2); in plain Python they refuse to leave the array, as `memory` does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import register_jitable

from tidegate.kernels.memory import copy, load, lowered, place, store, types

int64: Any = np.int64  # an index in kernels, whatever its width in memory; annotated as `memory` takes it


def load_word(source: Any, index: int) -> Any:
    """The eight bytes from `index` on, little-endian, as an unsigned number."""
    if not 0 <= index <= len(source) - 8:
        raise IndexError(f"word at {index} of {len(source)} bytes")
    return np.uint64(int.from_bytes(bytes(source[index : index + 8]), "little"))


def store_word(target: Any, index: int, word: Any) -> None:
    """Write eight bytes from `index` on, little-endian."""
    if not 0 <= index <= len(target) - 8:
        raise IndexError(f"word at {index} of {len(target)} bytes")
    target[index : index + 8] = list(int(word).to_bytes(8, "little"))


def store_half(target: Any, index: int, number: int) -> None:
    """Write the low four bytes of a number from `index` on, little-endian."""
    if not 0 <= index <= len(target) - 4:
        raise IndexError(f"half a word at {index} of {len(target)} bytes")
    target[index : index + 4] = list((int(number) & 0xFFFFFFFF).to_bytes(4, "little"))


@lowered(load_word, lambda source, index: types.uint64(source, types.int64))
def _load_word(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    where = place(context, builder, signature.args[0], arguments[0], arguments[1], 8)
    return builder.load(builder.bitcast(where, ir.IntType(64).as_pointer()), align=1)


@lowered(store_word, lambda target, index, word: types.void(target, types.int64, types.uint64))
def _store_word(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    where = place(context, builder, signature.args[0], arguments[0], arguments[1], 8)
    builder.store(arguments[2], builder.bitcast(where, ir.IntType(64).as_pointer()), align=1)
    return context.get_dummy_value()


@lowered(store_half, lambda target, index, number: types.void(target, types.int64, types.int64))
def _store_half(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    half = ir.IntType(32)
    where = place(context, builder, signature.args[0], arguments[0], arguments[1], 4)
    builder.store(builder.trunc(arguments[2], half), builder.bitcast(where, half.as_pointer()), align=1)
    return context.get_dummy_value()


@register_jitable
def copy_key(target: Any, into: Any, source: Any, out_of: Any, length: Any) -> None:
    """Copy a key between two places that do not overlap: most are a few words, which no call is worth."""
    if length > 32:
        copy(target, into, source, out_of, length)
    elif length >= 8:
        last = length - 8  # words from both ends, which may meet
        if length > 16:
            store_word(target, into + 8, load_word(source, out_of + 8))
            store_word(target, into + last - 8, load_word(source, out_of + last - 8))
        store_word(target, into, load_word(source, out_of))
        store_word(target, into + last, load_word(source, out_of + last))
    else:
        for place in range(length):
            store(target, into + place, load(source, out_of + place))


@register_jitable
def are_equal(
    left: Any, left_start: Any, left_stop: Any, right: Any, right_start: Any, right_stop: Any
) -> bool:
    """Whether left[left_start:left_stop] and right[right_start:right_stop] are the same bytes."""
    length = left_stop - left_start
    if right_stop - right_start != length:
        return False
    at = 0
    while length - at >= 8:
        if load_word(left, left_start + at) != load_word(right, right_start + at):
            return False
        at += 8
    if at > 0:  # the last word, which the one before may reach into
        return bool(at == length or load_word(left, left_stop - 8) == load_word(right, right_stop - 8))
    while at < length:
        if load(left, left_start + at) != load(right, right_start + at):
            return False
        at += 1
    return True


@register_jitable
def compare(left: Any, left_start: Any, left_stop: Any, right: Any, right_start: Any, right_stop: Any) -> Any:
    """Below, at or above zero as the left bytes sort before, with or after the right ones; a prefix sorts first."""
    left_length, right_length = left_stop - left_start, right_stop - right_start
    shorter = min(left_length, right_length)
    at = 0
    while shorter - at >= 8 and load_word(left, left_start + at) == load_word(right, right_start + at):
        at += 8
    while at < shorter:
        difference = load(left, left_start + at) - load(right, right_start + at)
        if difference != 0:
            return difference
        at += 1
    return left_length - right_length
