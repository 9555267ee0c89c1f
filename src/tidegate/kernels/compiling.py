"""How a kernel is compiled and cached, and the names its signature is written in.

numba keeps a compiled kernel until the file that defines it changes, and ignores the functions that it calls. Here a
kernel is stamped by its own bytecode and that of everything it calls (`stamp_of`): an edited `read_varint` recompiles
`decode_records`, and nothing that does not call it. `kernel_cache` says where compiled kernels are kept. With
`NUMBA_BOUNDSCHECK=1` in the environment kernels are compiled with checks of every index (`memory`); `NUMBA_CACHE_DIR`
then keeps them apart from the others.

A kernel is loaded when it is called first, or when a kernel that calls it is compiled: whoever imports a room does not
wait for loops it never runs (5 ms and 0.3 MiB each; a command line runs a few of them, not a hundred).

Thread rule: any. Loading happens once, under numba's own lock, because a user's compiled function may be what asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, njit, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from tidegate.kernels import compile_progress, kernel_cache
from tidegate.kernels.memory import CHECKED, INTRINSICS

INT64 = types.int64
READ_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
BYTES = types.Array(types.uint8, 1, "C")
INT32S = types.Array(types.int32, 1, "C")
READ_INT32S = types.Array(types.int32, 1, "C", readonly=True)
INT64S = types.Array(types.int64, 1, "C")
READ_INT64S = types.Array(types.int64, 1, "C", readonly=True)

_COMPILERS = frozenset({"numba", "llvmlite", "numpy"})
_kernels: list[Any] = []  # of all modules that were imported


def rows_of(dtype: np.dtype[Any]) -> types.Array:
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
    """Have a module's kernels ready now rather than at their first calls."""
    for value in vars(module).values():
        if isinstance(value, Dispatcher) and hasattr(value, "load"):
            value.load()


def kernels_to_compile() -> list[list[tuple[str, str]]]:
    """The kernels that no cache has, as (module, name), in groups that call none of each other; largest first.

    A kernel is compiled with the kernels that it calls, so these are in its group: no two processes compile one twice.
    """
    missing = {each.py_func: each for each in _kernels if each.where() is None}
    groups: list[tuple[set[Any], int]] = []
    for function in missing:
        called: set[Any] = set()
        size = sum(map(len, _parts(function, called)))
        members = called & missing.keys()
        apart = []
        for others, their_size in groups:
            if members & others:
                members |= others
                size += their_size
            else:
                apart.append((others, their_size))
        groups = [*apart, (members, size)]
    groups.sort(key=lambda group: -group[1])
    return [[(each.__module__, each.__name__) for each in members] for members, _ in groups]


def compile_kernels(names: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Compile some kernels into the cache, silently; their names."""
    compile_progress.listen(lambda _: None)
    for module, name in names:
        getattr(import_module(module), name).load()
    return names


def all_kernels() -> list[Any]:
    """The kernels of all modules that were imported. `kernel.where()` is the folder that has it compiled, or None."""
    return _kernels


def _load_when_asked(dispatcher: Any, signature: Any) -> None:
    """Stand in for the two ways in which numba asks for a compiled version: a call, and a caller being compiled.

    Left to itself it would compile for the types it meets there, one version for each.
    """

    def loaded() -> None:
        with global_compiler_lock:
            if dispatcher._can_compile:
                _load(dispatcher, signature)
                dispatcher.disable_compile()
                del dispatcher._compile_for_args, dispatcher.get_call_template

    def called(*_: Any) -> Any:
        """What numba is to call with the same arguments: the kernel again, which now compares their types."""
        loaded()
        return dispatcher

    def compiled_into(types_of_arguments: Any, keywords: Any) -> Any:
        loaded()
        return dispatcher.get_call_template(types_of_arguments, keywords)

    dispatcher.load = loaded
    dispatcher._compile_for_args, dispatcher.get_call_template = called, compiled_into


def _load(dispatcher: Any, signature: Any) -> None:
    """Take a kernel from the cache; else compile it, and tell that before and after."""
    try:
        dispatcher.compile(signature)
    finally:
        if dispatcher._cache_misses:
            compile_progress.finish()


def _begin(dispatcher: Any, folder: Path | None) -> None:
    missing = sum(not each.signatures and each.where() is None for each in _kernels if each is not dispatcher)
    compile_progress.begin(dispatcher.__name__, missing=missing + 1, folder=folder)


def stamp_of(function: Callable[..., Any]) -> str:
    """A digest of all that a kernel's machine code is made from: its bytecode, and that of what it calls.

    Constants and functions are looked up by name in the globals of the function that mentions them, and followed to
    kernels, to jitted helpers and to what `lowered` emits for an intrinsic. Comments, names of lines and other
    functions of the same file do not count. The versions of Python and numba are in numba's own index.
    """
    digest = hashlib.sha256(b"checked" if CHECKED else b"")
    for part in _parts(function, set()):
        digest.update(part)
    return digest.hexdigest()


def _parts(function: Any, seen: set[Any]) -> Iterator[bytes]:
    """The bytecode of a function, then what its global names stand for, each function once."""
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
    """What a global that is no function adds to a stamp: content where it has any, else its name."""
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
