"""Arithmetic on whole 64-bit words inside kernels: counting zero bits, and products of 128 bits.

Words are unsigned numpy numbers, compiled or not. Compiled, each function is one machine operation; in plain
Python it computes with numbers of any size and cuts them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from tidegate.kernels.memory import lowered, types

_MASK = (1 << 64) - 1


def trailing_zeros(word: Any) -> int:
    """How many bits below the lowest one; 64 for no ones at all."""
    number = int(word)
    return (number & -number).bit_length() - 1 if number else 64


def leading_zeros(word: Any) -> int:
    """How many bits above the highest one; 64 for no ones at all."""
    return 64 - int(word).bit_length()


def multiply_high(left: Any, right: Any) -> Any:
    """The upper half of the product."""
    return np.uint64(int(left) * int(right) >> 64)


def multiply_low(left: Any, right: Any) -> Any:
    """The lower half of the product."""
    return np.uint64(int(left) * int(right) & _MASK)


def add_words(left: Any, right: Any) -> Any:
    """The sum, without what does not fit."""
    return np.uint64((int(left) + int(right)) & _MASK)


def subtract_words(left: Any, right: Any) -> Any:
    """The difference, beginning again from the top below zero."""
    return np.uint64((int(left) - int(right)) & _MASK)


def _counted(word: Any) -> Any:
    return types.int64(types.uint64)


def _combined(left: Any, right: Any) -> Any:
    return types.uint64(types.uint64, types.uint64)


@lowered(trailing_zeros, _counted)
def _trailing_zeros(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))


@lowered(leading_zeros, _counted)
def _leading_zeros(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))


@lowered(multiply_high, _combined)
def _multiply_high(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    wide = ir.IntType(128)
    product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
    return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))


@lowered(multiply_low, _combined)
def _multiply_low(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.mul(*arguments)


@lowered(add_words, _combined)
def _add_words(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.add(*arguments)


@lowered(subtract_words, _combined)
def _subtract_words(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.sub(*arguments)
