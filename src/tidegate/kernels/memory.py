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

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed

# numba's own annotations do not describe what its decorators make of a function
types: Any = numba.types
type_callable: Any = numba.extending.type_callable
lower_builtin: Any = numba.extending.lower_builtin
memcpy: Any = cgutils.raw_memcpy
INTRINSICS: dict[Callable[..., Any], list[Callable[..., Any]]] = {}
"""What `lowered` compiles each function to: part of the stamp of every kernel that calls it."""
CHECKED = bool(numba.config.BOUNDSCHECK)  # type: ignore[attr-defined]


def lowered(function: Callable[..., Any], signature: Callable[..., Any]) -> Callable[[Any], Any]:
    """Compile calls of `function` to what the decorated generator emits, in place.

    `signature` gives numba's signature for the types of the arguments.
    """

    def register(generate: Any) -> Any:
        INTRINSICS.setdefault(function, []).extend((signature, generate))
        type_callable(function)(lambda context: signature)
        lower_builtin(function, types.VarArg(types.Any))(generate)
        return generate

    return register


def place(context: Any, builder: Any, kind: Any, value: Any, index: Any, length: Any = 1) -> Any:
    """The address of element `index` of a pointer, or of an array, which must have `length` elements from there on."""
    if isinstance(kind, types.Buffer):
        array = context.make_array(kind)(context, builder, value)
        word = ir.IntType(64)
        count = word(length) if isinstance(length, int) else length
        is_inside = builder.icmp_signed(
            "<=", index, builder.sub(builder.extract_value(array.shape, 0), count)
        )
        for number in (index, count):
            is_inside = builder.and_(is_inside, builder.icmp_signed(">=", number, word(0)))
        with cgutils.if_unlikely(builder, builder.not_(is_inside)):
            context.call_conv.return_user_exc(builder, IndexError, ("an index outside of its array",))
        value = array.data
    return builder.gep(value, [index])


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


@lowered(pointer, lambda array: (array if CHECKED else types.CPointer(array.dtype))(array))
def _pointer(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    if CHECKED:
        return impl_ret_borrowed(context, builder, signature.return_type, arguments[0])
    return context.make_array(signature.args[0])(context, builder, arguments[0]).data


@lowered(keep, lambda array: types.void(array))
def _keep(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return context.get_dummy_value()


@lowered(load, lambda source, index: types.int64(source, types.int64))
def _load(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    kind = signature.args[0]
    element = builder.load(place(context, builder, kind, *arguments))
    if element.type.width == 64:
        return element
    extend = builder.sext if kind.dtype.signed else builder.zext
    return extend(element, ir.IntType(64))


@lowered(store, lambda target, index, value: types.void(target, types.int64, types.int64))
def _store(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    target, index, value = arguments
    kind = signature.args[0]
    width = kind.dtype.bitwidth
    element = value if width == 64 else builder.trunc(value, ir.IntType(width))
    builder.store(element, place(context, builder, kind, target, index))
    return context.get_dummy_value()


@lowered(
    copy,
    lambda target, into, source, out_of, length: types.void(
        target, types.int64, source, types.int64, types.int64
    ),
)
def _copy(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    target, into, source, out_of, length = arguments
    destination = place(context, builder, signature.args[0], target, into, length)
    origin = place(context, builder, signature.args[2], source, out_of, length)
    memcpy(builder, destination, origin, length, 1)
    return context.get_dummy_value()


@lowered(prefetch, lambda array, index: types.void(array, types.int64))
def _prefetch(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    kind, start = signature.args[0], arguments[0]
    if isinstance(kind, types.Buffer):
        start = context.make_array(kind)(context, builder, start).data
    word = ir.IntType(32)
    where = builder.bitcast(builder.gep(start, [arguments[1]]), cgutils.voidptr_t)
    hint_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
    hint = builder.module.declare_intrinsic("llvm.prefetch", (cgutils.voidptr_t,), hint_type)
    builder.call(hint, [where, word(0), word(3), word(1)])  # to read (or write); into all caches; data
    return context.get_dummy_value()
