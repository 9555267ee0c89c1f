"""Whether numbers go up (or down) in even steps: one pass that ends soon after the first that does not.

Differences are taken as the processor takes them, so they may wrap around; callers compare the last number too, and
then none can have (K2).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import INT64, READ_INT32S, READ_INT64S, kernel
from tidegate.kernels.memory import load, pointer

BLOCK: Final = 2048  # numbers looked at together: without a way out, several are compared in one instruction


@register_jitable
def _in_steps(source: Any, count: Any, step: Any) -> Any:
    for first in range(1, count, BLOCK):
        wrong = np.int64(0)
        for at in range(first, min(first + BLOCK, count)):
            wrong |= (load(source, at) - load(source, at - 1)) ^ step
        if wrong != 0:
            return False
    return True


@kernel(types.boolean(READ_INT64S, INT64))
def words_in_steps(numbers: Any, step: Any) -> Any:
    """Whether each is the one before it and `step`."""
    return _in_steps(pointer(numbers), len(numbers), step)


@kernel(types.boolean(READ_INT32S, INT64))
def halves_in_steps(numbers: Any, step: Any) -> Any:
    """Whether each is the one before it and `step`."""
    return _in_steps(pointer(numbers), len(numbers), step)
