"""Which columns a DataFrame needs to become records of a topic. Light to import: planning checks them, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidegate.errors import InvalidError

COLUMNS: Final = ("key", "value", "headers", "timestamp", "partition")
_TAKEN = {
    "key": "binary or string",
    "value": "binary or string",
    "headers": "array of struct (key string, value binary)",
    "timestamp": "timestamp",
    "partition": "int",
}


def check_names(names: Sequence[str]) -> None:
    """The columns of a DataFrame are those of a record."""
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        hint = f"; leave them out: .drop({', '.join(map(repr, unknown))})"
        known = ", ".join(f"{name} ({kind})" for name, kind in _TAKEN.items())
        raise InvalidError(f"columns {', '.join(unknown)} are no part of a record, which has {known}{hint}")
    if "value" not in names:
        raise InvalidError("column value is missing: binary or string, null for a deletion")
