"""Readers of a versioned table: they see one whole version, and follow swaps.

    with versioned_table("users", state="./data/state") as users:
        users.get("alice")

A result is of one version, and of each partition's last commit of it; a scan stays with its version to its end. Keys
and values are read with the serdes of that version. The record of versions is read before a query, at most ten times
a second; if another version is current, it is used from then on. If the files of a version are deleted while it is
read, a query without results so far is repeated on the current one, else `CommitGoneError` is raised.

Thread rule: that of `CommitFollower`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from msgspec.structs import replace

from tidegate.clock import Clock, SystemClock
from tidegate.durations import DurationLike, MomentLike
from tidegate.errors import InvalidError, UnavailableError, UnsupportedError
from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.tables.commits import TRIES, Commit, CommitFollower, load_commits
from tidegate.tables.dead_letters import LettersState
from tidegate.tables.options import Consumed, TableRules
from tidegate.tables.queries import StoredRows
from tidegate.tables.serdes.base import Serde
from tidegate.tables.serdes.json import stored_serde
from tidegate.tables.snapshot import PartitionState, Snapshot, TableSource, task_of
from tidegate.tables.table import Positions, Table
from tidegate.tables.versions.catalog import State, TableVersion, VersionList, Versions

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend

_TASK_BYTES: Final = 224 << 20


@dataclass(frozen=True, slots=True)
class VersionCommit:
    """One version with each partition at one commit."""

    version: TableVersion
    commits: tuple[Commit, ...]

    @property
    def tokens(self) -> dict[str, bytes]:
        return {task_of(self.version.shape(number)): each.token for number, each in enumerate(self.commits)}

    @property
    def commit(self) -> Commit:
        """All partitions' commits as one; its number is the version's."""
        positions = {number: at for commit in self.commits for number, at in commit.positions.items()}
        newest = max(commit.committed_ms for commit in self.commits)
        rows = sum(commit.rows for commit in self.commits)
        return Commit(self.version.number, positions, newest, rows, b"")


VersionSnapshot: TypeAlias = Snapshot[VersionCommit, TableSource]


def open_version(
    backend: StorageBackend, commit: VersionCommit, rules: TableRules, clock: Clock
) -> VersionSnapshot:
    version, tasks = commit.version, max(4, commit.version.partitions)
    config = StorageConfig(
        max_tasks=tasks,
        worker_total_bytes=tasks * _TASK_BYTES,
        memory_ceiling_bytes=tasks * _TASK_BYTES + (128 << 20),
        retained_checkpoints=2,
    )

    def attach(runtime: WorkerStorageRuntime) -> TableSource:
        states = [PartitionState(version.shape(number), number) for number in range(version.partitions)]
        for state in states:
            state.open(runtime.context(task_of(state.shape)))
        first = task_of(version.shape(0))
        return TableSource(runtime, first, states, LettersState(runtime.context(first)), rules)

    return Snapshot(backend, config, commit, commit.tokens, attach, clock=clock)


def version_rules(
    version: TableVersion, key: Serde[Any] | None = None, value: Serde[Any] | None = None
) -> TableRules:
    """Return the rules of a version, with the serdes of its push, unless others are given."""
    shape = replace(version.shape(0), name=version.name, partitions=tuple(range(version.partitions)))
    key, value = key or stored_serde(version.key_serde), value or stored_serde(version.value_serde)
    return TableRules(shape, key, value, Consumed(), "fail")


def view_version(
    backend: StorageBackend, version: TableVersion, *, clock: Clock | None = None
) -> VersionSnapshot:
    """Open one version that is ready, each partition as of its last commit."""
    if version.state is not State.READY:
        raise InvalidError(
            f"{version.name} is {version.state.value}; only a version that is ready can be read"
        )
    commit = VersionCommit(version, _last_commits(backend, version))
    return open_version(backend, commit, version_rules(version), clock or SystemClock())


def _last_commits(backend: StorageBackend, version: TableVersion) -> tuple[Commit, ...]:
    commits = []
    for partition in range(version.partitions):
        found = load_commits(backend, version.shape(partition).name)
        if found is None or not found[0].commits:
            raise UnavailableError(
                f"partition {partition} of {version.name} is not there any more; ask again, or push again"
            )
        commits.append(found[0].commits[-1])
    return tuple(commits)


class VersionCommits:
    """The current version of a table, or one given version, for a `CommitFollower`."""

    def __init__(
        self,
        versions: Versions,
        backend: StorageBackend,
        number: int | None,
        rules_of: Callable[[TableVersion], TableRules],
        clock: Clock,
    ) -> None:
        self.name = versions.table
        self._versions, self._backend, self._number = versions, backend, number
        self._rules_of, self._clock = rules_of, clock

    def newest(self) -> VersionCommit:
        for _ in range(TRIES):
            wanted = self._wanted(self._versions.require())
            try:
                return VersionCommit(wanted, _last_commits(self._backend, wanted))
            except UnavailableError:
                if self._wanted(self._versions.require()) == wanted:
                    raise
        raise UnavailableError(f"table {self.name} changes faster than it can be opened here; try again")

    def open(self, commit: VersionCommit) -> VersionSnapshot:
        return open_version(self._backend, commit, self._rules_of(commit.version), self._clock)

    def fits(self, view: VersionSnapshot, commit: VersionCommit) -> bool:
        return view.commit.version == commit.version

    def show(self, view: VersionSnapshot, commit: VersionCommit) -> None:
        view.show(commit, commit.tokens)

    def gone(self, commit: VersionCommit) -> str:
        try:
            version = self._ready(self._versions.require().get(commit.version.number))
            if _last_commits(self._backend, version) == commit.commits:
                return ""
        except (InvalidError, UnavailableError):
            pass
        return (
            f"{commit.version.name} was deleted while it was read; read the table again, and keep more versions if it "
            "comes again (`retain`)"
        )

    def _wanted(self, known: VersionList) -> TableVersion:
        if self._number is not None:
            return self._ready(known.get(self._number))
        current = known.current_version
        if current is None:
            raise UnavailableError(
                f"table {self.name} has no version to show yet; push one, or swap one in: "
                f"`tidegate table versions {self.name}` lists them"
            )
        return current

    def _ready(self, version: TableVersion) -> TableVersion:
        if version.state is not State.READY:
            raise UnavailableError(
                f"{version.name} is {version.state.value}; only a version that is ready can be read"
            )
        return version


class VersionedTable(Table):
    """The current version of a table; it follows swaps. Use it with `with`, or close it."""

    def __init__(
        self,
        backend: StorageBackend,
        table: str,
        *,
        number: int | None = None,
        key: Serde[Any] | None = None,
        value: Serde[Any] | None = None,
        clock: Clock | None = None,
        owns_backend: bool = False,
    ) -> None:
        clock = clock or SystemClock()
        self.versions = Versions(backend, table, clock=clock)
        self._backend, self._owns_backend, self._closed = backend, owns_backend, False
        rules_of = partial(version_rules, key=key, value=value)
        commits = VersionCommits(self.versions, backend, number, rules_of, clock)
        self._follower = CommitFollower(commits, clock)
        self.refresh()

    def __repr__(self) -> str:
        return f"VersionedTable({self.name!r}, version {self.version.number})"

    @property
    def name(self) -> str:
        return self.versions.table

    @property
    def _shown(self) -> VersionSnapshot:
        with self._follower.pinned() as shown:
            return shown

    @property
    def rules(self) -> TableRules:
        return self._shown.source.rules

    @property
    def version(self) -> TableVersion:
        """The version that serves queries."""
        return self._shown.commit.version

    @property
    def commit(self) -> Commit:
        return self._shown.commit.commit

    @property
    def source(self) -> TableSource:
        return self._shown.source

    @property
    def position(self) -> dict[int, int]:
        """The offset after the last record read, by partition of the version's topic."""
        return dict(self.commit.positions)

    def refresh(self) -> TableVersion:
        """Look for another version now; return the current one then."""
        self._follower.refresh()
        return self.version

    def to_spark(self, spark: Any, *, columns: Sequence[str] = ()) -> Any:
        """Return the current version as a Spark DataFrame; with `columns`, only they are read."""
        from tidegate.tables.export import spark_frame

        shown = self._shown
        frames = [
            spark_frame(
                spark,
                self._backend,
                dataclasses.replace(shown.source.rules, shape=shown.commit.version.shape(number)),
                commit.number,
                columns=columns,
            )
            for number, commit in enumerate(shown.commit.commits)
        ]
        return reduce(lambda one, other: one.unionAll(other), frames)

    def explain(self, key: Any, start: MomentLike | None = None, end: MomentLike | None = None) -> Any:
        raise UnsupportedError(
            f"a row of {self.name} is the one its push sent last for the key; see its records in topic "
            f"{self.version.topic}"
        )

    def close(self) -> None:
        """Close what is open; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._follower.close()
        if self._owns_backend:
            self._backend.close()

    @contextmanager
    def _pinned(
        self, at_least: Positions, timeout: int | DurationLike, *, is_retry: bool = False
    ) -> Iterator[StoredRows]:
        if at_least:
            raise UnsupportedError(
                f"table {self.name} is pushed in versions, whose topics differ; at_least is for tables that follow one"
            )
        with self._follower.pinned(refresh=is_retry) as shown:
            yield StoredRows(shown.source)


def versioned_table(
    table: str,
    *,
    state: str | Path,
    version: int | None = None,
    key: Serde[Any] | None = None,
    value: Serde[Any] | None = None,
) -> VersionedTable:
    """Open a pushed table, kept in the folder (or object store) `state`: the current version, or a given one."""
    from tidegate.storage import open_backend

    backend = open_backend(str(state), read_only=True)
    try:
        return VersionedTable(backend, table, number=version, key=key, value=value, owns_backend=True)
    except BaseException:
        backend.close()
        raise
