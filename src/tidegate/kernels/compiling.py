"""How a kernel is compiled and cached, and the names its signature is written in.

numba keeps a compiled kernel until the file that defines it changes; it does not look at the files of the
functions that kernel calls. Here those count too, so an edited `varints.py` cannot leave an old
`decode_records` behind. A cache that cannot be read is compiled anew. With `NUMBA_BOUNDSCHECK=1` in the environment
kernels are compiled with checks of every index (`memory`); `NUMBA_CACHE_DIR` then keeps them apart from the others.

Thread rule: used at import time only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numba import from_dtype, njit, types

from tidegate.kernels.memory import CHECKED

INT64 = types.int64
READ_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
BYTES = types.Array(types.uint8, 1, "C")
INT32S = types.Array(types.int32, 1, "C")
READ_INT32S = types.Array(types.int32, 1, "C", readonly=True)
INT64S = types.Array(types.int64, 1, "C")
READ_INT64S = types.Array(types.int64, 1, "C", readonly=True)


def rows_of(dtype: np.dtype[Any]) -> types.Array:
    """The signature type of an array of such rows."""
    return types.Array(from_dtype(dtype), 1, "C")


def kernel(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for this one signature, or load it from the cache."""

    def compiled(function: Callable[..., Any]) -> Any:
        dispatcher: Any = njit(nogil=True, boundscheck=False, error_model="numpy")(function)
        dispatcher.enable_caching()
        _stamp_cache(dispatcher, _stamp(Path(function.__code__.co_filename)))
        dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return compiled


def _stamp_cache(dispatcher: Any, stamp: str) -> None:
    """Give the cache our stamp, and drop one that cannot be read.

    numba unpickles the index of a cache before it compares stamps. One written by other sources may name a class that
    is gone, one cut short is no pickle at all; either would make the import fail, for good.
    """
    try:
        cache = dispatcher._cache
        cache._cache_file._source_stamp = stamp
        try:
            cache._cache_file._load_index()
        except Exception:  # noqa: BLE001 - whatever a broken pickle raises, compiling anew is the answer
            cache.flush()
    except AttributeError:  # another numba keeps its cache elsewhere; its own rules then hold
        pass


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
