"""Malloc settings that keep memory freed by one batch for the next one.

A batch allocates and frees columns of some megabytes each. By default the C library returns such memory to the
operating system after a batch, and the next batch gets it back by page faults: a tenth of the time of a chain of
operators.

A1  at most `KEPT_BYTES` of free memory are kept at the end of the heap; what is freed beyond that goes back at once.
A2  columns of `MAPPED_BYTES` and more are never part of the heap: they go back when they are dropped.
A3  threads that begin later share the one heap. With heaps of their own each would keep what it freed from the others,
    and ask the system for more.
A4  it is a hint: where the C library has no such setting, nothing happens, and nothing depends on it.

For the whole process, once. Safe from any thread.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

KEPT_BYTES: Final = 128 << 20
GROWN_BYTES: Final = 16 << 20  # by which the heap grows, at least
MAPPED_BYTES: Final = 32 << 20  # as far as the C library would go by itself in time
HEAPS: Final = 1
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # numbers of glibc's malloc.h


@cache
def keep_freed_memory() -> bool:
    """Apply A1 to A3; returns whether the C library supports it."""
    settings = (
        (_MMAP_THRESHOLD, MAPPED_BYTES), (_TRIM_THRESHOLD, KEPT_BYTES), (_TOP_PAD, GROWN_BYTES), (_ARENA_MAX, HEAPS),
    )  # fmt: skip
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return all(set_option(number, nbytes) == 1 for number, nbytes in settings)
