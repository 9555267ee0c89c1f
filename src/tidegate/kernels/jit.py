"""Compilation and caching of kernels, and the intrinsics they use.

`pointer(array)` is called at the top of a kernel; it avoids reference counting, which would cost more than the work
itself. Compiled, each intrinsic is one machine operation without bounds checks (a kernel proves its positions first,
K2). In plain Python (`kernel.py_func`) a pointer is the array itself and each intrinsic checks bounds; so do kernels
compiled with `NUMBA_BOUNDSCHECK=1`.

A pointer does not keep its array alive. Arguments outlive the kernel; an array that the kernel allocates is freed after
its last use, so the kernel calls `keep` on it after the last use of the pointer (`tests/kernels/test_memory.py`).
Memory by address is for large, changing sets of arrays, such as the columns of many runs: the owner of the table of
addresses keeps them alive until the kernel returns. In plain Python, ctypes reads the same memory and makes the calls.

numba keeps a compiled kernel until the file that defines it changes, and ignores the functions that it calls. Here a
kernel is stamped by its own bytecode and that of everything it calls (`stamp_of`). `kernel_cache` says where compiled
kernels are kept. A kernel is loaded at its first call, or when a kernel that calls it is compiled, because loading
takes 5 ms and 0.3 MiB and a command runs few of them.

Thread rule: any. Loading happens once, under numba's own lock, because a user's compiled function may trigger it.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, overload

import numba
import numpy as np
from llvmlite import ir
from numba import from_dtype, njit
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.imputils import impl_ret_borrowed
from numba.extending import register_jitable

from tidegate.kernels import compile_progress, kernel_cache

# -- reading and writing memory through pointers ---------------------------------------------------

# numba's annotations do not describe the result of its decorators
types: Any = numba.types
type_callable: Any = numba.extending.type_callable
lower_builtin: Any = numba.extending.lower_builtin
memcpy: Any = cgutils.raw_memcpy
INTRINSICS: dict[Callable[..., Any], list[Callable[..., Any]]] = {}
"""What `lowered` compiles each function to: part of the stamp of every kernel that calls it."""
CHECKED = bool(numba.config.BOUNDSCHECK)  # type: ignore[attr-defined]


Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def helper(function: Function) -> Function: ...
@overload
def helper(*, forceinline: bool) -> Callable[[Function], Function]: ...
def helper(function: Any = None, **options: Any) -> Any:
    """Mark a function that kernels call: it is compiled with each of them, and callable from Python as it is."""
    mark = register_jitable(no_cfunc_wrapper=True, **options)
    return mark if function is None else mark(function)


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
    """The address of the elements of `array`."""
    return array


def keep(array: Any) -> None:
    """Keep an array that the kernel allocated alive up to this call, for pointers to it."""


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
    """Copy `length` bytes between ranges that do not overlap."""
    if length < 0 or not (0 <= into <= len(target) - length and 0 <= out_of <= len(source) - length):
        raise IndexError(f"copy of {length} bytes, from {out_of} of {len(source)} to {into} of {len(target)}")
    target[into : into + length] = source[out_of : out_of + length]


def prefetch(array: Any, index: int) -> None:
    """Prefetch element `index` into the cache. It may be out of bounds: a hint reads nothing and never fails."""


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


# -- arithmetic on 64-bit words --------------------------------------------------------------------


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


def _counted(word: Any) -> Any:
    return types.int64(types.uint64)


@lowered(trailing_zeros, _counted)
def _trailing_zeros(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))


@lowered(leading_zeros, _counted)
def _leading_zeros(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))


@lowered(multiply_high, lambda left, right: types.uint64(types.uint64, types.uint64))
def _multiply_high(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    wide = ir.IntType(128)
    product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
    return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))


# -- words and keys in byte arrays -----------------------------------------------------------------

int64: Any = np.int64  # an index in kernels, whatever its width in memory; annotated as `memory` takes it


def _number(bits: int, order: str, kind: Any = types.int64) -> tuple[Any, Any]:
    """Functions to load and store a number of so many bits, `little` or `big`-endian, at any byte."""
    size, number, signed = bits // 8, ir.IntType(bits), kind is types.int64

    def load_number(source: Any, index: int) -> Any:
        if not 0 <= index <= len(source) - size:
            raise IndexError(f"{size} bytes at {index} of {len(source)}")
        found = int.from_bytes(bytes(source[index : index + size]), order, signed=signed)  # type: ignore[arg-type]
        return found if signed else np.uint64(found)

    def store_number(target: Any, index: int, value: int) -> None:
        if not 0 <= index <= len(target) - size:
            raise IndexError(f"{size} bytes at {index} of {len(target)}")
        low = int(value) & ((1 << bits) - 1)
        target[index : index + size] = list(low.to_bytes(size, order))  # type: ignore[arg-type]

    def swapped(builder: Any, value: Any) -> Any:
        return builder.bswap(value) if order == "big" else value

    @lowered(load_number, lambda source, index: kind(source, types.int64))
    def generate_load(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = place(context, builder, signature.args[0], arguments[0], arguments[1], size)
        found = swapped(builder, builder.load(builder.bitcast(where, number.as_pointer()), align=1))
        return found if bits == 64 else builder.sext(found, ir.IntType(64))

    @lowered(store_number, lambda target, index, value: types.void(target, types.int64, kind))
    def generate_store(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = place(context, builder, signature.args[0], arguments[0], arguments[1], size)
        value = arguments[2] if bits == 64 else builder.trunc(arguments[2], number)
        builder.store(swapped(builder, value), builder.bitcast(where, number.as_pointer()), align=1)
        return context.get_dummy_value()

    return load_number, store_number


load_word, store_word = _number(64, "little", types.uint64)
_, store_half = _number(32, "little")
load_int16, _ = _number(16, "big")
load_int32, store_int32 = _number(32, "big")
load_int64, store_int64 = _number(64, "big")
load_uint64, _ = _number(64, "big", types.uint64)


@helper
def copy_key(target: Any, into: Any, source: Any, out_of: Any, length: Any) -> None:
    """Copy a key between ranges that do not overlap, inline, because most keys are a few words."""
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


@helper
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


@helper
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


# -- memory by address -----------------------------------------------------------------------------


def address_of(array: Any) -> int:
    """The address of the elements of `array`, which must outlive every use of the address."""
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


# -- calls of C functions --------------------------------------------------------------------------


def call(function: int, words: tuple[Any, ...]) -> int:
    """Call the C function at an address with 64-bit words: numbers, or addresses of memory that the caller keeps alive.

    The result is a word; that of a function with a narrower type has undefined upper bits.
    """
    plain = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * len(words))(int(function))
    return int(plain(*map(int, words)))


@lowered(call, lambda function, words: types.int64(types.int64, types.UniTuple(types.int64, len(words))))
def _call(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    word = ir.IntType(64)
    words = cgutils.unpack_tuple(builder, arguments[1])
    kind = ir.FunctionType(word, [word] * len(words))
    return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), words)


# -- compilation and caching -----------------------------------------------------------------------

INT64 = types.int64
READ_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
BYTES = types.Array(types.uint8, 1, "C")
INT32S = types.Array(types.int32, 1, "C")
READ_INT32S = types.Array(types.int32, 1, "C", readonly=True)
INT64S = types.Array(types.int64, 1, "C")
READ_INT64S = types.Array(types.int64, 1, "C", readonly=True)
UINT32S = types.Array(types.uint32, 1, "C")
UINT64S = types.Array(types.uint64, 1, "C")
READ_UINT64S = types.Array(types.uint64, 1, "C", readonly=True)
READ_FLAGS = types.Array(types.boolean, 1, "C", readonly=True)
_COMPILERS = frozenset({"numba", "llvmlite", "numpy"})
_kernels: list[Any] = []  # of all modules that were imported


def rows_of(dtype: np.dtype[Any]) -> Any:
    """The signature type of an array of such rows."""
    return types.Array(from_dtype(dtype), 1, "C")


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function compiled for this one signature, or taken from the cache, at its first call."""

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher: Any = njit(nogil=True, boundscheck=False, error_model="numpy")(function)
        dispatcher._cache = kernel_cache.KernelCache(
            function, stamp_of, lambda folder: _begin(dispatcher, folder)
        )
        dispatcher.where = lambda: dispatcher._cache.find(signature)
        _load_when_asked(dispatcher, signature)
        _kernels.append(dispatcher)
        return dispatcher

    return compiled


def load_kernels(module: ModuleType) -> None:
    """Load a module's kernels now instead of at their first calls."""
    for value in vars(module).values():
        if isinstance(value, Dispatcher) and hasattr(value, "load"):
            value.load()


def kernels_to_compile() -> list[list[tuple[str, str]]]:
    """The kernels missing in all caches, as (module, name), a list for each module; the one with most code first.

    The kernels of a module share helpers, and a process compiles each of those once.
    """
    missing: dict[str, list[Any]] = {}
    for each in _kernels:
        if each.where() is None:
            missing.setdefault(each.__module__, []).append(each.py_func)

    def size(functions: list[Any]) -> int:
        seen: set[Any] = set()
        return sum(len(part) for function in functions for part in _parts(function, seen))

    ordered = sorted(missing.values(), key=size, reverse=True)
    return [[(each.__module__, each.__name__) for each in functions] for functions in ordered]


def compile_kernels(names: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Compile kernels into the cache without output; returns their names."""
    compile_progress.listen(lambda _: None)
    for module, name in names:
        getattr(import_module(module), name).load()
    return names


def all_kernels() -> list[Any]:
    """The kernels of all modules that were imported. `kernel.where()` is the folder that has it compiled, or None."""
    return _kernels


def _load_when_asked(dispatcher: Any, signature: Any) -> None:
    """Intercept the two ways in which numba requests a compiled version: a call, and the compilation of a caller.

    By default numba would compile one version for each set of argument types.
    """

    def loaded() -> None:
        with global_compiler_lock:
            if dispatcher._can_compile:
                _load_kernel(dispatcher, signature)
                dispatcher.disable_compile()
                del dispatcher._compile_for_args, dispatcher.get_call_template

    def called(*_: Any) -> Any:
        """Return the kernel for numba to call with the same arguments; it now compares their types."""
        loaded()
        return dispatcher

    def compiled_into(types_of_arguments: Any, keywords: Any) -> Any:
        loaded()
        return dispatcher.get_call_template(types_of_arguments, keywords)

    dispatcher.load = loaded
    dispatcher._compile_for_args, dispatcher.get_call_template = called, compiled_into


def _load_kernel(dispatcher: Any, signature: Any) -> None:
    """Load a kernel from the cache; else compile it, and report before and after."""
    try:
        dispatcher.compile(signature)
    finally:
        if dispatcher._cache_misses:
            compile_progress.finish()


def _begin(dispatcher: Any, folder: Path | None) -> None:
    missing = sum(not each.signatures and each.where() is None for each in _kernels if each is not dispatcher)
    compile_progress.begin(dispatcher.__name__, missing=missing + 1, folder=folder)


def stamp_of(function: Callable[..., Any]) -> str:
    """A digest of the source of a kernel's machine code: its bytecode, and that of everything it calls.

    Constants and functions are looked up by name in the globals of the function that mentions them, and followed to
    kernels, to jitted helpers and to what `lowered` emits for an intrinsic. Comments, names of lines and other
    functions of the same file do not count. The versions of Python and numba are in numba's own index.
    """
    digest = hashlib.sha256(b"checked" if CHECKED else b"")
    for part in _parts(function, set()):
        digest.update(part)
    return digest.hexdigest()


def _parts(function: Any, seen: set[Any]) -> Iterator[bytes]:
    """Yield the bytecode of a function, then the values of its globals, each function once."""
    if function in seen:
        return
    seen.add(function)
    yield from _code_parts(function.__code__)
    yield repr((function.__defaults__, function.__kwdefaults__)).encode()
    mentioned = [(name, function.__globals__.get(name)) for name in _global_names(function.__code__)]
    enclosed = [("", cell.cell_contents) for cell in function.__closure__ or ()]
    lowered_to = [("", lowering) for lowering in INTRINSICS.get(function, ())]
    for name, value in mentioned + enclosed + lowered_to:
        called = getattr(value, "py_func", value)
        yield name.encode()
        if isinstance(called, FunctionType) and called.__module__.partition(".")[0] not in _COMPILERS:
            yield from _parts(called, seen)
        else:
            yield _constant(called)


def _code_parts(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    documented = code.co_consts[:1] if isinstance(code.co_consts[0], str) else ()
    for constant in code.co_consts[len(documented) :]:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        else:
            yield _constant(constant)


def _global_names(code: CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _global_names(constant)
    return names


def _constant(value: Any) -> bytes:
    """A non-function global's contribution to a stamp: its content if it has any, else its name."""
    if isinstance(value, np.ndarray):
        return repr((value.dtype, value.shape)).encode() + value.tobytes()
    if isinstance(value, frozenset):
        return repr(sorted(map(repr, value))).encode()
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return b"(" + b",".join(map(_constant, value)) + b")"
    if isinstance(value, type):
        return repr((value.__module__, value.__qualname__, getattr(value, "_fields", ()))).encode()
    if isinstance(value, types.Type | ir.Type):
        return str(value).encode()
    if isinstance(value, bool | int | float | complex | str | bytes | np.generic | np.dtype | None):
        return repr(value).encode()
    return repr((type(value).__qualname__, getattr(value, "__name__", ""))).encode()
