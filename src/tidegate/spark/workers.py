"""Garbage collection in the Python processes that run Spark tasks.

Spark's worker runs a full collection after every task. Once numba and Arrow are loaded, that visits half a million
live objects and takes longer than a small round. Therefore each task collects its own garbage and then freezes all
remaining objects, so that Spark's collection has nothing to visit. At intervals everything is unfrozen and
collected.

Thread rule: one task at a time in a process, as in Spark.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Final

WHOLE_EVERY: Final = 256
"""Tasks after which everything is looked at, not only what the last one left."""
_tasks = count(1)


@cache
def freeze_once() -> None:
    """Freeze imported objects once, for tasks that leave no garbage (70 ms a task)."""
    gc.collect()
    gc.freeze()


@cache
def _set_imports_aside() -> None:
    """Freeze imported objects at the first task, not at import: the driver imports these modules, too."""
    gc.freeze()


@contextmanager
def own_garbage() -> Iterator[None]:
    """Collect a task's garbage, and freeze the remaining objects."""
    _set_imports_aside()
    try:
        yield
    finally:
        if next(_tasks) % WHOLE_EVERY == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
