"""Tables that applications share: serdes, windowed and sessioned tables, versions, queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.tables.versions.diff import diff_versions

__all__ = ["diff_versions"]


def __getattr__(name: str) -> Any:
    """Load `diff_versions` on first access: it loads Arrow."""
    if name != "diff_versions":
        raise AttributeError(f"module 'tidegate.tables' has no attribute {name!r}")
    from tidegate.tables.versions.diff import diff_versions

    return diff_versions
