"""Reading and copying memory at an address, inside kernels.

Arrays that come and go in large, changing sets (the columns of many runs) cannot each be an argument of a
kernel. They are handed over as a table of addresses; whoever fills that table keeps the arrays alive beside it
until the kernel is done. Compiled, each function here is one load without any check. In plain Python the same
memory is read through ctypes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir

from tidegate.kernels.memory import lowered, memcpy, place, types


def address_of(array: Any) -> int:
    """Where the elements of `array` lie; it must outlive whoever is told."""
    return int(array.ctypes.data)


def word_at(address: int, index: int) -> int:
    """The signed 64-bit number `index` of an array at `address`."""
    return ctypes.c_int64.from_address(int(address) + 8 * int(index)).value


def unsigned_at(address: int, index: int) -> Any:
    """The unsigned 64-bit number `index` of an array at `address`."""
    return np.uint64(ctypes.c_uint64.from_address(int(address) + 8 * int(index)).value)


def half_at(address: int, index: int) -> int:
    """The signed 32-bit number `index` of an array at `address`, as a 64-bit one."""
    return ctypes.c_int32.from_address(int(address) + 4 * int(index)).value


def byte_at(address: int, index: int) -> int:
    """The byte `index` of an array at `address`, as a 64-bit number."""
    return ctypes.c_uint8.from_address(int(address) + int(index)).value


def copy_at(target: Any, into: int, address: int, length: int) -> None:
    """Copy `length` bytes from `address` into `target` (a `pointer` of `memory`), from its byte `into` on."""
    if length < 0 or not 0 <= into <= len(target) - length:
        raise IndexError(f"copy of {length} bytes to {into} of {len(target)}")
    target[into : into + length] = np.frombuffer(ctypes.string_at(int(address), int(length)), np.uint8)


def _compile_reader(function: Any, bits: int, result: Any, *, signed: bool = False) -> None:
    @lowered(function, lambda address, index: result(types.int64, types.int64))
    def read(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
        value = builder.load(builder.gep(start, [arguments[1]]), align=1)
        if bits == 64:
            return value
        extend = builder.sext if signed else builder.zext
        return extend(value, ir.IntType(64))


_compile_reader(word_at, 64, types.int64)
_compile_reader(unsigned_at, 64, types.uint64)
_compile_reader(half_at, 32, types.int64, signed=True)
_compile_reader(byte_at, 8, types.int64)


@lowered(
    copy_at,
    lambda target, into, address, length: types.void(target, types.int64, types.int64, types.int64),
)
def _copy_at(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    target, into, address, length = arguments
    destination = place(context, builder, signature.args[0], target, into, length)
    memcpy(builder, destination, builder.inttoptr(address, destination.type), length, 1)
    return context.get_dummy_value()


@lowered(address_of, lambda array: types.int64(array))
def _address_of(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.ptrtoint(start, ir.IntType(64))
