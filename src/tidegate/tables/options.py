"""The options of a table: how its topic is read (`Consumed`), where its rows are kept (`Materialized`), and its shape.

Serdes here are those of the *raw* key and value; the table adds the window to the key itself. A table over windows is
kept in a window store, one over sessions in a session store, one over plain keys in a key-value store; `table_rules`
checks that all fits, and refuses what it can before anything is read. A plain topic read as windows cannot be detected
here, because raw serdes are right for both: its keys are refused when they are read. The table's commits carry its
`TableShape`, so that another process opens the same table or none.

Thread rule: immutable values.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias

import msgspec

from tidegate.durations import DurationLike, duration_ms, format_duration
from tidegate.errors import InvalidError
from tidegate.integrity.state import max_age_of
from tidegate.integrity.validator import OnError, policy_of, require_new_names
from tidegate.log.catalog import check_topic_name
from tidegate.storage.backends.base import check_state_name
from tidegate.tables.serdes.base import Bytes, Serde, require_raw
from tidegate.windows.keys import LATEST, KeyChecks, KeyFormat
from tidegate.windows.stores.segments import Expiry, default_interval_ms

# --- consumed


@dataclass(frozen=True, slots=True)
class Consumed:
    """The serdes and error policies of a table's topic: `Consumed(String(), Long())`.

    `on_value_error`: a value that its serde cannot read stops the table (`fail`), is left out and counted (`drop`)
    or becomes a dead letter (`keep`). `on_gap`: when records aged out of the topic before the table read them,
    continue at the earliest one, with a warning and a count (`earliest`), or stop (`fail`). `advance` is what every
    window start is a multiple of, if known: keys that violate it are refused. At most `dead_letter_bytes` of dead
    letters are kept; further ones are counted. `on_error`: a record that is not what its producer sent becomes a
    dead letter (`keep`), is left out (`drop`) or stops the table (`fail`), as in `Stream.validate`; before a push
    has ended every fault stops it. Producers silent for longer than `max_age` are forgotten, None for never.
    """

    key: Serde[Any] | None = None
    value: Serde[Any] | None = None
    isolation: Literal["read_uncommitted", "read_committed"] = "read_uncommitted"
    on_value_error: OnError | str = OnError.FAIL
    on_gap: Literal["earliest", "fail"] = "earliest"
    advance: int | None = None
    dead_letter_bytes: int = 64 << 20
    on_error: str | Mapping[str, str] = "keep"
    max_age: DurationLike | None = "7d"
    on_fault: InitVar[object] = None  # old names: refused with the new one
    on_bad_value: InitVar[object] = None

    def __post_init__(self, on_fault: object, on_bad_value: object) -> None:
        if on_fault is not None:
            require_new_names("Consumed(…, ", {"on_fault": on_fault}, {"on_fault": "on_error"})
        if on_bad_value is not None:
            given, new = {"on_bad_value": on_bad_value}, {"on_bad_value": "on_value_error"}
            require_new_names("Consumed(…, ", given, new, {"skip": "keep"})
        _require_raw(self)
        object.__setattr__(self, "on_value_error", OnError.of(self.on_value_error))
        if self.isolation not in ("read_uncommitted", "read_committed"):
            raise InvalidError(f"isolation={self.isolation!r}: choose 'read_uncommitted' or 'read_committed'")
        if self.on_gap not in ("earliest", "fail"):
            raise InvalidError(f"on_gap={self.on_gap!r}: choose 'earliest' or 'fail'")
        policy_of(self.on_error)
        max_age_of(self.max_age)
        if self.dead_letter_bytes < 0:
            raise InvalidError(f"dead_letter_bytes={self.dead_letter_bytes}: give 0 or more")


def _require_raw(given: Consumed | Materialized) -> None:
    for serde in (given.key, given.value):
        if serde is not None:
            require_raw(serde)


# --- materialized


@dataclass(frozen=True, slots=True)
class WindowSupplier:
    """A window store for windows of `window_size`."""

    name: str
    retention: DurationLike
    window_size: DurationLike
    retain_duplicates: bool = False


@dataclass(frozen=True, slots=True)
class SessionSupplier:
    """A session store."""

    name: str
    retention: DurationLike


@dataclass(frozen=True, slots=True)
class KeyValueSupplier:
    """A store of one value for each key, kept for ever."""

    name: str


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
        _require_raw(self)
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


# --- shape

Kind = Literal["window", "session", "key"]
DEFAULT_RETENTION_MS: Final = 86_400_000
_SUPPLIER_OF = {"window": WindowSupplier, "session": SessionSupplier, "key": KeyValueSupplier}
logger = logging.getLogger(__name__)


class TableShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The properties on which all processes that open a table must agree; 0 where one does not apply."""

    kind: Kind
    name: str
    topic: str
    partitions: tuple[int, ...]
    key_format: str
    size_ms: int
    retention_ms: int
    key_serde: str
    value_serde: str

    @property
    def segment_ms(self) -> int:
        """The interval of time segments."""
        return default_interval_ms(self.retention_ms)

    @property
    def expiry(self) -> Expiry:
        """When its windows may be written and read: the rules of all window stores."""
        return Expiry(self.retention_ms, self.segment_ms)

    @property
    def is_windowed(self) -> bool:
        return self.kind != "key"

    def check_same(self, other: TableShape) -> None:
        """Raise `InvalidError` if the stored table is another one than the one requested."""
        for field in self.__struct_fields__:
            mine, stored = getattr(self, field), getattr(other, field)
            if mine != stored:
                raise InvalidError(
                    f"table {self.name} exists with {field}={stored!r} and is opened with {field}={mine!r}: open it "
                    "as it is, or give the new table another name or state folder"
                )


@dataclass(frozen=True)
class TableRules:
    """A shape with the settings of the opening process: serdes and policies."""

    shape: TableShape
    key: Serde[Any]
    value: Serde[Any]
    consumed: Consumed
    on_key_error: str

    @property
    def key_format(self) -> KeyFormat:
        return KeyFormat(self.shape.key_format)

    @property
    def checks(self) -> KeyChecks:
        return KeyChecks(inner_bytes=self.key.fixed_bytes, advance_ms=self.consumed.advance)


def table_rules(
    kind: Kind,
    topic: str,
    partitions: tuple[int, ...],
    *,
    size: DurationLike | None = None,
    consumed: Consumed | None = None,
    materialized: Materialized | None = None,
    key_format: str = "changelog",
    retention: DurationLike | None = None,
    on_key_error: str = "fail",
) -> TableRules:
    """Return the rules of the requested table, or raise the error that says what is wrong with it."""
    consumed = Consumed() if consumed is None else consumed
    materialized = Materialized() if materialized is None else materialized
    if not isinstance(consumed, Consumed):
        raise TypeError(f"consumed is a {type(consumed).__name__}; give a Consumed")
    if not isinstance(materialized, Materialized):
        raise TypeError(f"materialized is a {type(materialized).__name__}; give a Materialized")
    check_topic_name(topic)
    size_ms = _window_size(size) if kind == "window" else 0
    _check_supplier(kind, materialized, size_ms)
    if on_key_error not in ("fail", "drop", "keep"):
        raise InvalidError(f"on_key_error={on_key_error!r}: choose 'fail', 'drop' or 'keep'")
    if key_format not in ("changelog", "topic"):
        raise InvalidError(f"key_format={key_format!r}: choose 'changelog' or 'topic'")
    retention_ms = 0 if kind == "key" else _retention(topic, size_ms, retention, materialized)
    key = materialized.key or consumed.key or Bytes()
    value = materialized.value or consumed.value or Bytes()
    shape = TableShape(
        kind=kind,
        name=check_state_name("table", materialized.store_name or topic),
        topic=topic,
        partitions=partitions,
        key_format={"session": "session", "key": ""}.get(kind, key_format),
        size_ms=size_ms,
        retention_ms=retention_ms,
        key_serde=repr(key),
        value_serde=repr(value),
    )
    if kind == "window" and topic.endswith("-changelog") != (key_format == "changelog"):
        other = "topic" if key_format == "changelog" else "changelog"
        logger.info(
            "topic %s is read with key_format=%r; if its keys are refused, try %r", topic, key_format, other
        )
    return TableRules(shape, key, value, consumed, on_key_error)


def _window_size(size: DurationLike | None) -> int:
    if size is None:
        raise TypeError("a windowed table needs window_size: its keys do not say where a window ends")
    if isinstance(size, timedelta) and size % timedelta(milliseconds=1):
        raise InvalidError(f"window_size={size!r} is not a whole number of milliseconds")
    size_ms = duration_ms(size)
    if not 0 < size_ms <= LATEST:
        raise InvalidError(f"window_size={size!r}: give 1 ms or more")
    return size_ms


def _check_supplier(kind: Kind, materialized: Materialized, size_ms: int) -> None:
    store = materialized.store
    if store is None:
        return
    if not isinstance(store, _SUPPLIER_OF[kind]):
        remedy = (
            "windows kept by key alone never expire; use a WindowSupplier or SessionSupplier"
            if isinstance(store, KeyValueSupplier)
            else f"use a {_SUPPLIER_OF[kind].__name__}"
        )
        raise TypeError(f"a {type(store).__name__} does not hold a table of kind {kind}: {remedy}")
    if isinstance(store, WindowSupplier):
        if duration_ms(store.window_size) != size_ms:
            raise InvalidError(
                f"the store is for windows of {duration_ms(store.window_size)} ms and the table has {size_ms} ms"
            )
        if store.retain_duplicates:
            raise InvalidError(
                "a table holds one value for each key and window; use a store without duplicates"
            )


def _retention(topic: str, size_ms: int, retention: DurationLike | None, materialized: Materialized) -> int:
    asked = [retention, materialized.retention]
    if isinstance(materialized.store, WindowSupplier | SessionSupplier):
        asked.append(materialized.store.retention)
    given = {duration_ms(each) for each in asked if each is not None}
    if len(given) > 1:
        raise InvalidError(f"the retention is given as {sorted(given)} ms: give it once")
    if given:
        (retention_ms,) = given
        if retention_ms < size_ms or retention_ms == 0:
            raise InvalidError(
                f"a retention of {retention_ms} ms is below the window size of {size_ms} ms: nothing could be read"
            )
        return retention_ms
    retention_ms = max(size_ms, DEFAULT_RETENTION_MS)
    logger.info("table over %s keeps windows for %s (the default)", topic, format_duration(retention_ms))
    return retention_ms
