"""Calling functions of C by their address, inside kernels.

Arguments and results are 64-bit words: numbers, or addresses of what the caller keeps alive. A result that the function
declares narrower has its upper bits undefined, so whoever calls such a function looks at what it wrote instead. In
plain Python the same function is called through ctypes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numba
from llvmlite import ir

types: Any = numba.types
intrinsic: Any = numba.extending.intrinsic
overload: Any = numba.extending.overload
_WORD = ir.IntType(64)


def call(function: int, first: int) -> int:
    """`function(first)`."""
    return int(_plain(function, 1)(first))


def call_pair(function: int, first: int, second: int) -> int:
    """`function(first, second)`."""
    return int(_plain(function, 2)(first, second))


def call_three(function: int, first: int, second: int, third: int) -> int:
    """`function(first, second, third)`."""
    return int(_plain(function, 3)(first, second, third))


def call_five(function: int, first: int, second: int, third: int, fourth: int, fifth: int) -> int:
    """`function` of five words."""
    return int(_plain(function, 5)(first, second, third, fourth, fifth))


def _plain(function: int, words: int) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * words)(int(function))


def _generated(words: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD] * words)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return generate


@intrinsic
def _call(typing_context: Any, function: Any, first: Any) -> Any:
    return types.int64(types.int64, types.int64), _generated(1)


@intrinsic
def _call_pair(typing_context: Any, function: Any, first: Any, second: Any) -> Any:
    return types.int64(types.int64, types.int64, types.int64), _generated(2)


@intrinsic
def _call_three(typing_context: Any, function: Any, first: Any, second: Any, third: Any) -> Any:
    return types.int64(*[types.int64] * 4), _generated(3)


@intrinsic
def _call_five(
    typing_context: Any, function: Any, first: Any, second: Any, third: Any, fourth: Any, fifth: Any
) -> Any:
    return types.int64(*[types.int64] * 6), _generated(5)


@overload(call)
def _compile_call(function: Any, first: Any) -> Any:
    def compiled(function: Any, first: Any) -> Any:
        return _call(function, first)

    return compiled


@overload(call_pair)
def _compile_call_pair(function: Any, first: Any, second: Any) -> Any:
    def compiled(function: Any, first: Any, second: Any) -> Any:
        return _call_pair(function, first, second)

    return compiled


@overload(call_three)
def _compile_call_three(function: Any, first: Any, second: Any, third: Any) -> Any:
    def compiled(function: Any, first: Any, second: Any, third: Any) -> Any:
        return _call_three(function, first, second, third)

    return compiled


@overload(call_five)
def _compile_call_five(function: Any, first: Any, second: Any, third: Any, fourth: Any, fifth: Any) -> Any:
    def compiled(function: Any, first: Any, second: Any, third: Any, fourth: Any, fifth: Any) -> Any:
        return _call_five(function, first, second, third, fourth, fifth)

    return compiled
