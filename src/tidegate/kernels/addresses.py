"""Reading and copying memory at an address, inside kernels.

Arrays that come and go in large, changing sets (the columns of many runs) cannot each be an argument of a
kernel. They are handed over as a table of addresses; whoever fills that table keeps the arrays alive beside it
until the kernel is done. Compiled, each function here is one load without any check. In plain Python the same
memory is read through ctypes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np
from llvmlite import ir

from tidegate.kernels.memory import memcpy, raw_pointer

types: Any = numba.types
intrinsic: Any = numba.extending.intrinsic
overload: Any = numba.extending.overload


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


def _reader(bits: int, result: Any, signed: bool) -> Any:
    @intrinsic
    def read(typing_context: Any, address: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            element = ir.IntType(bits)
            start = builder.inttoptr(arguments[0], element.as_pointer())
            value = builder.load(builder.gep(start, [arguments[1]]), align=1)
            if bits == 64:
                return value
            extend = builder.sext if signed else builder.zext
            return extend(value, ir.IntType(64))

        return result(types.int64, types.int64), generate

    return read


_word_at = _reader(64, types.int64, True)
_unsigned_at = _reader(64, types.uint64, False)
_half_at = _reader(32, types.int64, True)
_byte_at = _reader(8, types.int64, False)


@intrinsic
def _copy_at(typing_context: Any, target: Any, into: Any, address: Any, length: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        destination = builder.gep(arguments[0], [arguments[1]])
        memcpy(builder, destination, builder.inttoptr(arguments[2], destination.type), arguments[3], 1)
        return context.get_dummy_value()

    return types.void(target, types.int64, types.int64, types.int64), generate


@intrinsic
def _address_of(typing_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ptrtoint(
            context.make_array(array)(context, builder, arguments[0]).data, ir.IntType(64)
        )

    return types.int64(array), generate


@overload(address_of)
def _compile_address_of(array: Any) -> Any:
    def compiled(array: Any) -> Any:
        return _address_of(array)

    return compiled


@overload(word_at)
def _compile_word_at(address: Any, index: Any) -> Any:
    def compiled(address: Any, index: Any) -> Any:
        return _word_at(address, index)

    return compiled


@overload(unsigned_at)
def _compile_unsigned_at(address: Any, index: Any) -> Any:
    def compiled(address: Any, index: Any) -> Any:
        return _unsigned_at(address, index)

    return compiled


@overload(half_at)
def _compile_half_at(address: Any, index: Any) -> Any:
    def compiled(address: Any, index: Any) -> Any:
        return _half_at(address, index)

    return compiled


@overload(byte_at)
def _compile_byte_at(address: Any, index: Any) -> Any:
    def compiled(address: Any, index: Any) -> Any:
        return _byte_at(address, index)

    return compiled


@overload(copy_at)
def _compile_copy_at(target: Any, into: Any, address: Any, length: Any) -> Any:
    def compiled(target: Any, into: Any, address: Any, length: Any) -> Any:
        return _copy_at(target, into, address, length)

    def checked(target: Any, into: Any, address: Any, length: Any) -> Any:
        if length < 0 or into < 0 or into > len(target) - length:
            raise IndexError("a copy into what lies outside of its array")
        return _copy_at(raw_pointer(target), into, address, length)

    return checked if isinstance(target, types.Buffer) else compiled
