"""What a Python process that runs Spark tasks does about garbage.

Spark's worker collects all garbage after every task. Once numba and Arrow are loaded that is half a million objects
which are none, and takes longer than a small round. So what a task leaves behind is collected by us, and then set aside
(frozen) together with all the rest, so that Spark's collection finds nothing to look at. Now and then everything is
looked at, so that nothing is kept for ever.

Thread rule: one task at a time in a process, as Spark does it.
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
    """For tasks that leave nothing behind: what was imported by now is no garbage (70 ms a task)."""
    gc.collect()
    gc.freeze()


@cache
def _set_imports_aside() -> None:
    """At the first task and not when modules are loaded: the driver loads them too, and its objects are its own."""
    gc.freeze()


@contextmanager
def own_garbage() -> Iterator[None]:
    """Collect what a task leaves, and set aside what is then there."""
    _set_imports_aside()
    try:
        yield
    finally:
        if next(_tasks) % WHOLE_EVERY == 0:
            gc.unfreeze()
        gc.collect()
        gc.freeze()
