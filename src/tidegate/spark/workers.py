"""What a Python process that runs Spark tasks does once."""

from __future__ import annotations

import gc
from functools import cache


@cache
def freeze_once() -> None:
    """Spark's worker collects garbage after every task; what was imported by now is none (70 ms a task)."""
    gc.collect()
    gc.freeze()
