"""Tidegate: partitioned event logs in; verified, deduplicated, windowed tables out.

The public names, nothing else. Each is loaded when first touched, so that a log tool never pays for
Arrow, numba or Spark it does not use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tidegate.clock import ManualClock, SystemClock
    from tidegate.errors import (
        ConflictError,
        CorruptError,
        FencedError,
        IntegrityError,
        InvalidError,
        OffsetOutOfRangeError,
        OverloadError,
        TidegateError,
        UnavailableError,
        WindowedKeyFormatError,
    )
    from tidegate.log.access.embedded import Log
    from tidegate.log.topics.topics import TopicConfig

_HOMES = {
    "ConflictError": "tidegate.errors",
    "CorruptError": "tidegate.errors",
    "FencedError": "tidegate.errors",
    "IntegrityError": "tidegate.errors",
    "InvalidError": "tidegate.errors",
    "Log": "tidegate.log.access.embedded",
    "ManualClock": "tidegate.clock",
    "OffsetOutOfRangeError": "tidegate.errors",
    "OverloadError": "tidegate.errors",
    "SystemClock": "tidegate.clock",
    "TidegateError": "tidegate.errors",
    "TopicConfig": "tidegate.log.topics.topics",
    "UnavailableError": "tidegate.errors",
    "WindowedKeyFormatError": "tidegate.errors",
}

__all__ = [
    "ConflictError",
    "CorruptError",
    "FencedError",
    "IntegrityError",
    "InvalidError",
    "Log",
    "ManualClock",
    "OffsetOutOfRangeError",
    "OverloadError",
    "SystemClock",
    "TidegateError",
    "TopicConfig",
    "UnavailableError",
    "WindowedKeyFormatError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidegate' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
