"""A table over a topic, as users hold it: builder or reader, commits, changes, explanations; and stored tables.

The process that has the lease builds the table (`role` "builder") and reads its own rows as they arrive. Every other
process is a "reader": it serves the last commit and follows newer ones, without a lock and without reading the
topic. When the builder is gone, a reader that follows the table, or waits for more of it, becomes the builder; one
that was opened with `read_only=True` never does.

Stored tables are opened from a state folder as of a commit, without their log. This is for tools; an application
opens its table with the log it is built from.

Thread rule: queries from any thread; `catch_up`, `commit` and `close` from one at a time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from tidegate.clock import Clock
from tidegate.durations import DurationLike, MomentLike, milliseconds, moment_ms
from tidegate.errors import InvalidError, UnavailableError, UnsupportedError
from tidegate.tables.commits import (
    LOOK_AGAIN_MS,
    Commit,
    CommitFollower,
    PinnedCommit,
    Successor,
    load_commits,
    stored_tables,
)
from tidegate.tables.options import Consumed, TableRules, TableShape
from tidegate.tables.queries import StoredRows
from tidegate.tables.serdes.base import Serde
from tidegate.tables.serdes.json import stored_serde
from tidegate.tables.snapshot import Counts, StoredCommit, StoredCommits, StoredSnapshot, TableSource
from tidegate.tables.table import DEFAULT_TIMEOUT, Positions, Table

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend
    from tidegate.tables.changes import Subscription
    from tidegate.tables.explain import Explanation
    from tidegate.tables.ingest.materializer import Claim, Materialiser


# --- topic table

_EXPLAINED = {"window": (True, False), "session": (True, True), "key": (False, False)}
_SAID = {"window": ", start", "session": ", start, end", "key": ""}
logger = logging.getLogger(__name__)
Follower: TypeAlias = "CommitFollower[StoredCommit, StoredSnapshot] | PinnedCommit[StoredSnapshot]"


class TableAt(Table):
    """A table as of one of its last commits; close it, or its table."""

    def __init__(self, follower: Follower) -> None:
        """`follower` serves one commit only."""
        follower.refresh()
        self._follower = follower

    @property
    def _snapshot(self) -> StoredSnapshot:
        shown = self._follower.current
        if shown is None:
            raise InvalidError("this commit is closed; ask its table for it again")
        return shown

    @property
    def name(self) -> str:
        return self.rules.shape.name

    @property
    def is_open(self) -> bool:
        return self._follower.current is not None

    @property
    def rules(self) -> TableRules:
        return self.source.rules

    @property
    def commit(self) -> Commit:
        return self._snapshot.commit

    @property
    def position(self) -> dict[int, int]:
        return dict(self.commit.positions)

    @property
    def source(self) -> TableSource:
        return self._snapshot.source

    def to_spark(self, spark: Any, *, columns: Sequence[str] = ()) -> Any:
        """Return this commit as a Spark DataFrame; with `columns`, only they are read."""
        from tidegate.tables.export import spark_frame

        return spark_frame(spark, self._snapshot.backend, self.rules, self.commit.number, columns=columns)

    def close(self) -> None:
        self._follower.close()

    @contextmanager
    def _pinned(
        self, at_least: Positions, timeout: int | DurationLike, *, is_retry: bool = False
    ) -> Iterator[StoredRows]:
        if at_least and not _reached(self.position, at_least):
            raise UnavailableError(
                f"seen is {self.position}, asked for is {dict(at_least)}: this commit is fixed; ask the table itself"
            )
        with self._follower.pinned() as shown:
            yield StoredRows(shown.source)


class TopicTable(Table):
    """A table over a topic, built here or read; use it with `with`, or close it."""

    def __init__(
        self,
        rules: TableRules,
        backend: StorageBackend,
        log: Any,
        *,
        builder: Materialiser | None,
        clock: Clock,
        owns_backend: bool = True,
        owns_log: bool = False,
        claim: Claim | None = None,
    ) -> None:
        self.rules = rules
        self._backend = backend
        self._log = log
        self._builder = builder
        self._clock = clock
        self._owns_backend = owns_backend
        self._owns_log = owns_log
        self._claim = claim
        self._successor = None if claim is None else Successor(self._take_over, claim.retry_ms, clock)
        self._follows = False
        self._asked_ms: int | None = None
        self._lock = threading.RLock()
        self._commits = StoredCommits(backend, rules.shape.name, self._same_rules, clock=clock)
        self._follower = CommitFollower(self._commits, clock)
        self._past: list[TableAt] = []
        self._closed = False

    def __repr__(self) -> str:
        shape = self.rules.shape
        return f"{type(self).__name__}({shape.name!r} over {shape.topic!r}, {self.role})"

    def _repr_html_(self) -> str:
        from tidegate.tables.rows import table_html

        return table_html(self)

    def show(self) -> None:
        """Print the first rows: those of one batch of a scan."""
        from tidegate.tables.rows import rows_text, some_rows

        shown = some_rows(self)
        print(repr(self) if shown is None else rows_text(shown, None))

    @property
    def name(self) -> str:
        return self.rules.shape.name

    @property
    def role(self) -> str:
        return "builder" if self._builder is not None else "reader"

    @property
    def position(self) -> dict[int, int]:
        """The positions of the table: partition → the offset after the last record read. Usable as `at_least` in
        any process."""
        if self._builder is not None:
            return self._builder.source.positions
        if self._commits.newest() is None:
            return {}
        with self._follower.pinned(refresh=True) as shown:
            return dict(shown.commit.positions)

    @property
    def lag(self) -> int:
        """The number of offsets of the topic that the table has not read yet."""
        position = self.position
        with self._log.reader(self.rules.shape.topic, start="latest") as reader:
            ends: dict[int, int] = reader.end_offsets()
        return sum(max(0, end - position.get(number, 0)) for number, end in ends.items())

    @property
    def counts(self) -> Counts:
        """Counters of the records read so far, by outcome."""

        def summed(rows: Any) -> Counts:
            total = Counts()
            for state in rows.source.partitions:
                total.add(state.counts)
            return total

        return self._read(summed, timeout=0)

    # -- going on --------------------------------------------------------------------------------

    def follow(self) -> None:
        """Build in the background if the lease is free, else once it becomes free."""
        self._check_open()
        with self._lock:
            self._follows = True
            builder = self._builder
        if builder is not None:
            if not builder.is_running:
                builder.run()
        elif self._successor is not None:
            self._successor.start()

    def catch_up(self, timeout: int | DurationLike = "60s") -> dict[int, int]:
        """Read everything that is in the topic now; return the position then.

        A builder that does not follow reads here and commits, and stops when no record arrives for `timeout`; a
        builder that follows, and a reader, wait for it.
        """
        self._check_open()
        timeout_ms = milliseconds(timeout)
        with self._log.reader(
            self.rules.shape.topic, start="latest", isolation=self.rules.consumed.isolation
        ) as reader:
            targets = reader.end_offsets()
        self._wait(targets, timeout_ms)
        if self._builder is not None and not self._builder.is_running:
            self._builder.commit()
        return self.position

    def commit(self, timeout: int | DurationLike = DEFAULT_TIMEOUT) -> Commit:
        """Commit what is drained, so that other processes can read it and a restart begins there."""
        self._check_open()
        if self._builder is None:
            raise InvalidError(f"table {self.name} is built by another process, which commits it")
        if self._builder.is_running:
            self._builder.request_commit(milliseconds(timeout))
        else:
            self._builder.commit()
        newest = self._builder.commits.newest
        if newest is None:
            raise UnavailableError(f"table {self.name} has no commit")
        return newest

    def commits(self) -> tuple[Commit, ...]:
        """The commits that `as_of` can read, oldest first."""
        self._check_open()
        found = load_commits(self._backend, self.name)
        return () if found is None else found[0].commits

    def as_of(self, commit: Commit | int) -> TableAt:
        """Return the table as of this commit (or the one of this number), with the same queries."""
        self._check_open()
        number = commit.number if isinstance(commit, Commit) else commit
        known = {each.number: each for each in self.commits()}
        if number not in known:
            reach = f"{min(known)} to {max(known)}" if known else "none yet"
            raise InvalidError(f"commit {number} of table {self.name} is not kept; there are {reach}")
        only = (self.rules.shape, known[number])
        commits = StoredCommits(self._backend, self.name, self._same_rules, clock=self._clock, only=only)
        past = TableAt(CommitFollower(commits, self._clock))
        self._past = [*(each for each in self._past if each.is_open), past]
        return past

    def to_spark(self, spark: Any, *, columns: Sequence[str] = ()) -> Any:
        """Return the last commit, as of the time a query runs, as a Spark DataFrame; with `columns`, only they are
        read.

        Rows that this process has read and not committed are not in it: `commit()` first.
        """
        from tidegate.tables.export import spark_frame

        self._check_open()
        return spark_frame(spark, self._backend, self.rules, None, columns=columns)

    def changes(self, limit_rows: int = 1_000_000) -> Subscription:
        """Subscribe to the changes from now on, as `Change(new, old)`; only where the table is built."""
        self._check_open()
        if self._builder is None:
            raise UnsupportedError(
                f"table {self.name} is built by another process, and changes are told there; read the table, or its "
                "topic, instead"
            )
        return self._builder.changes.subscribe(limit_rows)

    def explain(
        self, key: Any, start: MomentLike | None = None, end: MomentLike | None = None
    ) -> Explanation:
        """Explain which records made the value of this key (window, session), which were left out and why, and
        which are not read yet."""
        from tidegate.tables.explain import explain

        kind = self.rules.shape.kind
        if _EXPLAINED[kind] != (start is not None, end is not None):
            raise TypeError(f"table {self.name} is of kind {kind}: explain(key{_SAID[kind]})")
        first, last = (0 if each is None else moment_ms(each) for each in (start, end))
        ts, seq = (last, first) if kind == "session" else (first, 0)
        return self._read(
            lambda rows: explain(rows.source, self._log, rows.source.key(key), ts, seq)  # type: ignore[attr-defined]
        )

    def close(self) -> None:
        """Commit what is drained, release the lease and close everything; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._successor is not None:
            self._successor.stop()
        try:
            if self._builder is not None:
                self._builder.close()
        finally:
            for past in self._past:
                past.close()
            self._follower.close()
            if self._builder is not None:
                self._builder.source.runtime.close()
            if self._owns_backend:
                self._backend.close()
            if self._owns_log:
                self._log.close()

    # -- inside ----------------------------------------------------------------------------------

    @contextmanager
    def _pinned(
        self, at_least: Positions, timeout: int | DurationLike, *, is_retry: bool = False
    ) -> Iterator[StoredRows]:
        self._check_open()
        if at_least:
            self._wait(at_least, milliseconds(timeout))
        if self._builder is not None:
            yield StoredRows(self._builder.source)
            return
        with self._follower.pinned(refresh=is_retry) as shown:
            yield StoredRows(shown.source)

    def _same_rules(self, stored: TableShape) -> TableRules:
        self.rules.shape.check_same(stored)
        return self.rules

    def _wait(self, targets: Mapping[int, int], timeout_ms: int) -> None:
        deadline = self._clock.monotonic_ms() + timeout_ms
        while not _reached(self.position, targets):
            left = deadline - self._clock.monotonic_ms()
            builder = self._builder or self._take_over_if_due()
            if builder is not None:
                go_on = builder.wait_for if builder.is_running else builder.advance_to
                if go_on(targets, max(0, left)):
                    return
            if left <= 0:
                raise UnavailableError(
                    f"table {self.name} has seen {self.position} and not yet {dict(targets)} after {timeout_ms} ms; "
                    "wait longer, or look whether the process that builds it runs"
                )
            self._clock.sleep_ms(10)

    def _take_over_if_due(self) -> Materialiser | None:
        """Take over a table without a builder, for a caller that waits for it; checked at intervals."""
        if self._successor is None:
            return None
        self._successor.check()
        now_ms = self._clock.monotonic_ms()
        if self._asked_ms is not None and now_ms - self._asked_ms < LOOK_AGAIN_MS:
            return None
        self._asked_ms = now_ms
        return self._take_over()

    def _take_over(self) -> Materialiser | None:
        """Become the builder if there is none; return the builder then."""
        with self._lock:
            if self._builder is None and self._claim is not None and not self._closed:
                self._builder = self._claim.attempt()
                if self._builder is not None:
                    logger.info(
                        "table %s has no builder any more; this process goes on building it", self.name
                    )
                    if self._follows:
                        self._builder.run()
            return self._builder

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidError(f"table {self.name} is closed; open it again")


def _reached(position: Mapping[int, int], targets: Mapping[int, int]) -> bool:
    return all(position.get(number, 0) >= offset for number, offset in targets.items())


# --- stored


def open_committed(
    backend: StorageBackend,
    name: str,
    *,
    clock: Clock,
    number: int | None = None,
    key: Serde[Any] | None = None,
    value: Serde[Any] | None = None,
) -> TableAt:
    """Open a stored table as of its last commit, or the one of this number; no log is needed."""
    found = load_commits(backend, name)
    if found is None:
        known = ", ".join(stored_tables(backend)) or "none"
        raise InvalidError(f"there is no table {name!r} here; there are {known}")
    shape, commits = found[0].shape, found[0].commits
    if not commits:
        raise UnavailableError(f"table {name} has no commit yet; try again when its builder has made one")
    chosen = next((each for each in reversed(commits) if number in (None, each.number)), None)
    if chosen is None:
        raise InvalidError(
            f"commit {number} of table {name} is not kept; there are {commits[0].number} to {commits[-1].number}"
        )
    rules_of = partial(stored_rules, key=key, value=value)
    only = StoredCommits(backend, name, rules_of, clock=clock, only=(shape, chosen))
    return TableAt(CommitFollower(only, clock))


def follow_stored(
    backend: StorageBackend, name: str, *, clock: Clock
) -> CommitFollower[StoredCommit, StoredSnapshot]:
    """Open a stored table at its newest commit; it is followed also if it is rebuilt as another kind of table."""
    return CommitFollower(StoredCommits(backend, name, stored_rules, clock=clock), clock)


def table_at(snapshot: StoredSnapshot) -> TableAt:
    """Return the queries of a pinned snapshot."""
    return TableAt(PinnedCommit(snapshot))


def stored_rules(
    shape: TableShape, *, key: Serde[Any] | None = None, value: Serde[Any] | None = None
) -> TableRules:
    """Return the rules for reading a table of which only the commit list is known."""
    key, value = key or stored_serde(shape.key_serde), value or stored_serde(shape.value_serde)
    return TableRules(shape, key, value, Consumed(), "fail")
