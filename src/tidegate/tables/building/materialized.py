"""Where a table's rows are kept: a name, a kind of store, a retention, and optionally serdes of its own.

A table over windows is kept in a window store, one over sessions in a session store, one over plain keys in a
key-value store. Which supplier goes with which table is `shape`'s to judge.

Thread rule: values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import InvalidError
from tidegate.tables.serdes.plain import Serde
from tidegate.tables.serdes.windowed import require_raw


@dataclass(frozen=True, slots=True)
class WindowSupplier:
    """A window store; `window_size` is that of its windows."""

    name: str
    retention: DurationLike
    window_size: DurationLike
    retain_duplicates: bool = False

    kind = "window"

    @property
    def retention_ms(self) -> int:
        return duration_ms(self.retention)


@dataclass(frozen=True, slots=True)
class SessionSupplier:
    """A session store."""

    name: str
    retention: DurationLike

    kind = "session"

    @property
    def retention_ms(self) -> int:
        return duration_ms(self.retention)


@dataclass(frozen=True, slots=True)
class KeyValueSupplier:
    """A store of one value for each key, kept without end."""

    name: str

    kind = "key"

    @property
    def retention_ms(self) -> None:
        return None


Supplier: TypeAlias = "WindowSupplier | SessionSupplier | KeyValueSupplier"


@dataclass(frozen=True, slots=True)
class Materialized:
    """`Materialized("counts")`, or with a supplier: `Materialized(store=WindowSupplier("counts", "1d", "1m"))`."""

    name: str | None = None
    store: Supplier | None = None
    key: Serde[Any] | None = None
    value: Serde[Any] | None = None
    retention: DurationLike | None = None

    def __post_init__(self) -> None:
        for serde in (self.key, self.value):
            if serde is not None:
                require_raw(serde)
        if self.store is not None and not isinstance(
            self.store, WindowSupplier | SessionSupplier | KeyValueSupplier
        ):
            raise TypeError(f"{type(self.store).__name__} supplies no store; give a WindowSupplier or alike")
        if self.name is not None and self.store is not None and self.store.name != self.name:
            raise InvalidError(
                f"the table is named {self.name!r} and its store {self.store.name!r}: name it once"
            )

    @property
    def store_name(self) -> str | None:
        return self.name if self.store is None else self.store.name
