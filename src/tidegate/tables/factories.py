"""Open a table over a topic: `table`, `windowed_table`, `sessioned_table`, as builder or as reader.

    read_only=True           always a reader of what another process commits
    lease free               this process builds: takes the lease, fences the previous builder, restores, continues
    lease held               a reader; once the builder is gone, a reader that follows the table or waits for it
                             (`catch_up`, `at_least`) becomes the builder; the table reports it in `role`

Invalid requests are refused before anything is created. The eight forms of KIP-300 are two functions: `consumed` and
`materialized` may each be left out. A window's end is not in a key's bytes, so the size of windows must be given;
sessions carry both ends. When sessions merge, the table shows the topic's state between the deletions and the merged
one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tidegate.clock import Clock, SystemClock
from tidegate.durations import DurationLike, format_duration, milliseconds
from tidegate.errors import InvalidError, TidegateWarning
from tidegate.files import Files
from tidegate.integrity.validator import require_new_names
from tidegate.log.catalog import check_topic_name
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.scheduling import Scheduler
from tidegate.storage import StorageConfig, open_backend
from tidegate.tables.commits import DEFAULT_TTL_MS
from tidegate.tables.ingest.materializer import Cadence, Claim
from tidegate.tables.options import Consumed, Materialized, TableRules, table_rules
from tidegate.tables.serdes.base import Serde, WindowedSerde
from tidegate.tables.topic_encoding import read_encoding
from tidegate.tables.topic_table import TopicTable

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend


# --- opening

AnyTable = TypeVar("AnyTable", bound=TopicTable)
logger = logging.getLogger(__name__)


def open_topic(
    kind: type[AnyTable],
    log: Any,
    topic: str,
    rules_of: Callable[[tuple[int, ...]], TableRules],
    state: str | Path | StorageBackend,
    **settings: Any,
) -> AnyTable:
    """Open the table that `rules_of` describes, given the topic's partitions.

    `log` is an open log or its address: a folder or `kafka://host:port`. A log given by address is opened for
    reading, and closed with the table.
    """
    check_topic_name(topic)
    old = {name: settings[name] for name in ("on_bad_key",) if name in settings}
    require_new_names("table(…, ", old, {"on_bad_key": "on_key_error"}, {"skip": "keep"})
    if not isinstance(log, str | Path):
        return open_table(
            kind, log, rules_of(tuple(log.describe(topic).partition_numbers)), state, **settings
        )
    from tidegate.log.log import is_kafka, open_log

    opened = open_log(str(log)) if is_kafka(str(log)) else open_log(str(log), read_only=True)
    try:
        rules = rules_of(tuple(opened.describe(topic).partition_numbers))
        return open_table(kind, opened, rules, state, owns_log=True, **settings)
    except BaseException:
        opened.close()
        raise


def open_table(
    kind: type[AnyTable],
    log: Any,
    rules: TableRules,
    state: str | Path | StorageBackend,
    *,
    read_only: bool = False,
    follow: bool = False,
    bootstrap: bool = True,
    cadence: Cadence | None = None,
    storage: StorageConfig | None = None,
    lease_ttl: int | DurationLike = DEFAULT_TTL_MS,
    files: Files | None = None,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
    scheduler: Scheduler | None = None,
    owns_log: bool = False,
) -> AnyTable:
    """Open the table in `state`: a folder, a backend's address, or a backend.

    `bootstrap` reads the topic up to its end before returning; `follow` keeps reading in the background, and takes
    over as builder when the building process is gone. `files`, `clock` and `randomness` default to the log's.
    """
    clock = clock or getattr(log, "clock", None) or SystemClock()
    randomness = randomness or getattr(log, "randomness", None) or SystemRandomness()
    owns = isinstance(state, str | Path)
    backend: Any = (
        open_backend(state, files=files, clock=clock, randomness=randomness)  # type: ignore[arg-type]
        if owns
        else state
    )
    try:
        _check_recorded(log, backend, rules)
        claim, builder = None, None
        if not read_only:
            claim = Claim(
                log,
                rules,
                backend,
                cadence=cadence or Cadence(),
                storage=storage,
                lease_ttl_ms=milliseconds(lease_ttl),
                clock=clock,
                randomness=randomness,
                scheduler=scheduler,
            )
            builder = claim.attempt()
            if claim.held is not None:
                logger.info(
                    "table %s is built by process %d on %s; reading it here",
                    rules.shape.name,
                    claim.held.pid,
                    claim.held.host,
                )
        table = kind(
            rules,
            backend,
            log,
            builder=builder,
            clock=clock,
            owns_backend=owns,
            owns_log=owns_log,
            claim=claim,
        )
    except BaseException:
        if owns:
            backend.close()
        raise
    try:
        if builder is not None:
            if bootstrap:
                table.catch_up()
            elif builder.commits.newest is None:
                builder.commit()  # so that readers find the table
        if follow:
            table.follow()
    except BaseException:
        table.close()
        raise
    return table


def _check_recorded(log: Any, backend: Any, rules: TableRules) -> None:
    """Refuse a window kind or size that differs from what the writing app recorded: the bytes do not contain them."""
    shape = rules.shape
    recorded = read_encoding(log, backend, shape.topic) if shape.is_windowed else None
    if recorded is None:
        return
    if recorded.window is None:
        raise InvalidError(f"{shape.topic} holds plain records: use table({shape.topic!r}, …)")
    if recorded.is_sessions != (shape.kind == "session"):
        holds, fitting = ("sessions", "sessioned") if recorded.is_sessions else ("time windows", "windowed")
        raise InvalidError(f"{shape.topic} holds {holds}: use {fitting}_table({shape.topic!r}, …)")
    size_ms = recorded.window_size_ms
    if shape.kind == "window" and size_ms is not None and size_ms != shape.size_ms:
        raise InvalidError(
            f"table {shape.name}: window_size is {format_duration(shape.size_ms)}, but {shape.topic} holds windows of "
            f"{format_duration(size_ms)}: give window_size={format_duration(size_ms)!r}"
        )


# --- key table


class KeyTable(TopicTable):
    """The last value of each key, kept up to date from a topic."""


def table(
    log: Any,
    topic: str,
    *,
    state: str | Path,
    consumed: Consumed | None = None,
    materialized: Materialized | None = None,
    windowed_key: Serde[Any] | None = None,
    on_key_error: Literal["fail", "drop", "keep"] = "fail",
    read_only: bool = False,
    follow: bool = False,
    **settings: Any,
) -> KeyTable:
    """Read a plain topic as a table, kept in the folder `state`.

    `log` is an open log or its address: a folder or `kafka://host:port`. `windowed_key` takes a windowed serde for
    the whole key, for lookups by key and window without a window end.
    """
    if windowed_key is not None and not isinstance(windowed_key, WindowedSerde):
        raise TypeError(f"{windowed_key!r} is not windowed; give plain key serdes in Consumed")

    def rules_of(partitions: tuple[int, ...]) -> TableRules:
        rules = table_rules(
            "key",
            topic,
            partitions,
            consumed=consumed,
            materialized=materialized,
            on_key_error=on_key_error,
        )
        return rules if windowed_key is None else replace(rules, key=windowed_key)

    found = open_topic(KeyTable, log, topic, rules_of, state, read_only=read_only, follow=follow, **settings)
    if windowed_key is not None:
        warnings.warn(
            f"table {found.name} keeps windows of {topic} by key, without an end; windowed_table and "
            "sessioned_table keep them for a retention",
            TidegateWarning,
            stacklevel=2,
        )
    return found


# --- windowed table


class WindowedTable(TopicTable):
    """Windows of time by key, kept up to date from a topic."""


def windowed_table(
    log: Any,
    topic: str,
    window_size: DurationLike,
    *,
    state: str | Path,
    consumed: Consumed | None = None,
    materialized: Materialized | None = None,
    key_format: Literal["changelog", "topic"] = "changelog",
    retention: DurationLike | None = None,
    on_key_error: Literal["fail", "drop", "keep"] = "fail",
    read_only: bool = False,
    follow: bool = False,
    **settings: Any,
) -> WindowedTable:
    """Read a topic of time windows as a table, kept in the folder `state`.

    `log` is an open log or its address: a folder or `kafka://host:port`.

    `retention` is how far behind the newest window others stay readable; by default a day, or the window size if
    that is more. Further settings are those of `open_table`.
    """
    rules_of = partial(
        table_rules,
        "window",
        topic,
        size=window_size,
        consumed=consumed,
        materialized=materialized,
        key_format=key_format,
        retention=retention,
        on_key_error=on_key_error,
    )
    return open_topic(
        WindowedTable, log, topic, rules_of, state, read_only=read_only, follow=follow, **settings
    )


# --- sessioned table


class SessionedTable(TopicTable):
    """Sessions by key, kept up to date from a topic."""


def sessioned_table(
    log: Any,
    topic: str,
    *,
    state: str | Path,
    consumed: Consumed | None = None,
    materialized: Materialized | None = None,
    retention: DurationLike | None = None,
    on_key_error: Literal["fail", "drop", "keep"] = "fail",
    read_only: bool = False,
    follow: bool = False,
    **settings: Any,
) -> SessionedTable:
    """Read a topic of sessions as a table, kept in the folder `state`.

    `log` is an open log or its address: a folder or `kafka://host:port`.

    `retention` is how far behind the newest session end others stay readable; by default a day.
    """
    if "window_size" in settings:
        raise TypeError("sessions carry both their ends: a sessioned table has no window_size")
    rules_of = partial(
        table_rules,
        "session",
        topic,
        consumed=consumed,
        materialized=materialized,
        retention=retention,
        on_key_error=on_key_error,
    )
    return open_topic(
        SessionedTable, log, topic, rules_of, state, read_only=read_only, follow=follow, **settings
    )
