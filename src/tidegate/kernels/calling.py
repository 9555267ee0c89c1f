"""Calling functions of C by their address, inside kernels.

Arguments and results are 64-bit words: numbers, or addresses of what the caller keeps alive. A result that the function
declares narrower has its upper bits undefined, so whoever calls such a function looks at what it wrote instead. In
plain Python the same function is called through ctypes.
"""

from __future__ import annotations

import ctypes
from typing import Any

from llvmlite import ir

from tidegate.kernels.memory import lowered, types

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


def _generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    kind = ir.FunctionType(_WORD, [_WORD] * (len(arguments) - 1))
    return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])


def _words(count: int) -> Any:
    return types.int64(*[types.int64] * count)


lowered(call, lambda function, first: _words(2))(_generate)
lowered(call_pair, lambda function, first, second: _words(3))(_generate)
lowered(call_three, lambda function, first, second, third: _words(4))(_generate)
lowered(call_five, lambda function, first, second, third, fourth, fifth: _words(6))(_generate)
