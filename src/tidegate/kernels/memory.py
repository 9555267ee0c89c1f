"""Reading, writing and copying inside kernels, through plain pointers.

`pointer(array)` is taken once, at the top of a kernel; from then on nothing counts references, which would
otherwise cost more than the work itself. Compiled, each function here is one machine operation without any
check (a kernel proves its positions first, K2). In plain Python, which is how `kernel.py_func` runs, a
pointer is the array itself and each function refuses to leave it. So it is in kernels compiled with
`NUMBA_BOUNDSCHECK=1`, which is how the whole of the tests can ask whether K2 holds.

A pointer holds nothing. Arguments outlive the kernel; an array that the kernel makes itself is let go behind its last
mention, and its memory is then anybody's, while a pointer to it goes on. So it is mentioned once more, by `keep`,
behind the last use of its pointer (`tests/kernels/test_memory.py` looks for it).
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils

# numba's own annotations do not describe what its decorators make of a function
types: Any = numba.types
intrinsic: Any = numba.extending.intrinsic
overload: Any = numba.extending.overload
memcpy: Any = cgutils.raw_memcpy
CHECKED = bool(numba.config.BOUNDSCHECK)  # type: ignore[attr-defined]


def pointer(array: Any) -> Any:
    """Where the elements of `array` lie."""
    return array


def keep(array: Any) -> None:
    """An array of the kernel's own is there until here, for whoever has a pointer to it."""


def load(source: Any, index: int) -> int:
    """Element `index`, as a 64-bit number."""
    if not 0 <= index < len(source):
        raise IndexError(f"load of element {index} of {len(source)}")
    return int(source[index])


def store(target: Any, index: int, value: int) -> None:
    """Write the low bits of `value` to element `index`."""
    if not 0 <= index < len(target):
        raise IndexError(f"store of element {index} of {len(target)}")
    width = target.itemsize
    low_bits = int(value) & ((1 << 8 * width) - 1)
    target[index : index + 1].view("u1")[:] = list(low_bits.to_bytes(width, "little"))


def copy(target: Any, into: int, source: Any, out_of: int, length: int) -> None:
    """Copy `length` bytes between two places that do not overlap."""
    if length < 0 or not (0 <= into <= len(target) - length and 0 <= out_of <= len(source) - length):
        raise IndexError(f"copy of {length} bytes, from {out_of} of {len(source)} to {into} of {len(target)}")
    target[into : into + length] = source[out_of : out_of + length]


def prefetch(array: Any, index: int) -> None:
    """Have element `index` brought into the cache. It may lie outside: a hint reads nothing, and never fails."""


@intrinsic
def raw_pointer(typing_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(array)(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), generate


@intrinsic
def _load(typing_context: Any, source: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = builder.load(builder.gep(arguments[0], [arguments[1]]))
        if element.type.width == 64:
            return element
        extend = builder.sext if source.dtype.signed else builder.zext
        return extend(element, ir.IntType(64))

    return types.int64(source, types.int64), generate


@intrinsic
def _store(typing_context: Any, target: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        width = target.dtype.bitwidth
        element = arguments[2] if width == 64 else builder.trunc(arguments[2], ir.IntType(width))
        builder.store(element, builder.gep(arguments[0], [arguments[1]]))
        return context.get_dummy_value()

    return types.void(target, types.int64, types.int64), generate


@intrinsic
def _copy(typing_context: Any, target: Any, into: Any, source: Any, out_of: Any, length: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        destination = builder.gep(arguments[0], [arguments[1]])
        origin = builder.gep(arguments[2], [arguments[3]])
        memcpy(builder, destination, origin, arguments[4], 1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), generate


@intrinsic
def _prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(32)
        where = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), cgutils.voidptr_t)
        hint_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        hint = builder.module.declare_intrinsic("llvm.prefetch", (cgutils.voidptr_t,), hint_type)
        builder.call(hint, [where, word(0), word(3), word(1)])  # to read (or write); into all caches; data
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@overload(pointer)
def _compile_pointer(array: Any) -> Any:
    def compiled(array: Any) -> Any:
        return raw_pointer(array)

    def checked(array: Any) -> Any:
        return array

    return checked if CHECKED else compiled


@intrinsic
def _keep(typing_context: Any, array: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_dummy_value()

    return types.void(array), generate


@overload(keep)
def _compile_keep(array: Any) -> Any:
    def compiled(array: Any) -> Any:
        return _keep(array)

    return compiled


@overload(load)
def _compile_load(source: Any, index: Any) -> Any:
    def compiled(source: Any, index: Any) -> Any:
        return _load(source, index)

    def checked(source: Any, index: Any) -> Any:
        if index < 0 or index >= len(source):
            raise IndexError("a load outside of its array")
        return _load(raw_pointer(source), index)

    return checked if isinstance(source, types.Buffer) else compiled


@overload(store)
def _compile_store(target: Any, index: Any, value: Any) -> Any:
    def compiled(target: Any, index: Any, value: Any) -> Any:
        return _store(target, index, value)

    def checked(target: Any, index: Any, value: Any) -> Any:
        if index < 0 or index >= len(target):
            raise IndexError("a store outside of its array")
        return _store(raw_pointer(target), index, value)

    return checked if isinstance(target, types.Buffer) else compiled


@overload(copy)
def _compile_copy(target: Any, into: Any, source: Any, out_of: Any, length: Any) -> Any:
    def compiled(target: Any, into: Any, source: Any, out_of: Any, length: Any) -> Any:
        return _copy(target, into, source, out_of, length)

    def checked(target: Any, into: Any, source: Any, out_of: Any, length: Any) -> Any:
        if length < 0 or into < 0 or into > len(target) - length:
            raise IndexError("a copy into what lies outside of its array")
        if out_of < 0 or out_of > len(source) - length:
            raise IndexError("a copy out of what lies outside of its array")
        return _copy(raw_pointer(target), into, raw_pointer(source), out_of, length)

    return checked if isinstance(target, types.Buffer) else compiled


@overload(prefetch)
def _compile_prefetch(array: Any, index: Any) -> Any:
    def compiled(array: Any, index: Any) -> Any:
        return _prefetch(array, index)

    def checked(array: Any, index: Any) -> Any:
        return _prefetch(raw_pointer(array), index)

    return checked if isinstance(array, types.Buffer) else compiled

