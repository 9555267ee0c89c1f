"""How a kernel is compiled and cached, and the names its signature is written in.

numba keeps a compiled kernel until the file that defines it changes; it does not look at the files of the
functions that kernel calls. Here those count too, so an edited `varints.py` cannot leave an old
`decode_records` behind. `kernel_cache` says where compiled kernels are kept. With `NUMBA_BOUNDSCHECK=1` in the
environment kernels are compiled with checks of every index (`memory`); `NUMBA_CACHE_DIR` then keeps them apart from
the others.

A kernel is loaded when it is called first, or when a kernel that calls it is compiled: whoever imports a room does not
wait for loops it never runs (5 ms and 0.3 MiB each; a command line runs a few of them, not a hundred).

Thread rule: any. Loading happens once, under numba's own lock, because a user's compiled function may be what asks.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numba import from_dtype, njit, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher

from tidegate.kernels import compile_progress, kernel_cache
from tidegate.kernels.memory import CHECKED

INT64 = types.int64
READ_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
BYTES = types.Array(types.uint8, 1, "C")
INT32S = types.Array(types.int32, 1, "C")
READ_INT32S = types.Array(types.int32, 1, "C", readonly=True)
INT64S = types.Array(types.int64, 1, "C")
READ_INT64S = types.Array(types.int64, 1, "C", readonly=True)

_kernels: list[Any] = []  # of all modules that were imported


def rows_of(dtype: np.dtype[Any]) -> types.Array:
    """The signature type of an array of such rows."""
    return types.Array(from_dtype(dtype), 1, "C")


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function compiled for this one signature, or taken from the cache, at its first call."""

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher: Any = njit(nogil=True, boundscheck=False, error_model="numpy")(function)
        stamp = _stamp(Path(function.__code__.co_filename))
        dispatcher._cache = kernel_cache.KernelCache(
            function, stamp, lambda folder: _begin(dispatcher, folder)
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


def compile_module(name: str) -> str:
    """Compile the kernels of one module into the cache, silently; its name."""
    compile_progress.listen(lambda _: None)
    load_kernels(import_module(name))
    return name


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


@cache
def _stamp(path: Path) -> str:
    digest = hashlib.sha256(b"checked" if CHECKED else b"")
    for source in sorted(set(_sources(path))):
        digest.update(source)
    return digest.hexdigest()


def _sources(path: Path) -> Iterator[bytes]:
    """The file, and the files of this package that it imports from, and theirs."""
    source = path.read_bytes()
    yield source
    for name in re.findall(rb"^from tidegate\.kernels\.(\w+) import", source, re.MULTILINE):
        yield from _sources(Path(__file__).with_name(f"{name.decode()}.py"))
