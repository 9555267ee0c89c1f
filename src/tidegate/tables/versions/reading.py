"""A versioned table as its readers hold it: the current version, whole, and the next one at the next look.

    with versioned_table("users", state="./data/state") as users:
        users.get("alice")

R1  an answer is of one version, and of each partition's last commit of it; never of half a version. Keys and values are
    read with the serdes of that version. A scan stays with its version to its end.
R2  the record of versions is looked at before a question is answered, at most ten times a second; when another version
    is current, it is shown from then on. What was being read before goes on with what it was opened on.
R3  a version whose files were deleted while it was read is told as `CommitGoneError`; a question that has given no
    answer yet begins again with the version that is current by then.

Thread rule: questions from any thread; `close` when nobody asks any more.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from tidegate.clock import Clock, SystemClock
from tidegate.durations import DurationLike
from tidegate.errors import CommitGoneError, CorruptError, InvalidError, UnavailableError
from tidegate.scheduling import NoScheduler
from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.tables.building.commits import Commit, load_commits
from tidegate.tables.building.consumed import Consumed
from tidegate.tables.building.partition_state import PartitionState
from tidegate.tables.building.shape import TableRules
from tidegate.tables.building.source import LettersState, TableSource, kept_open, task_of
from tidegate.tables.queries.forms import TRIES, KeyQueries, Positions
from tidegate.tables.serdes.named import serde_from
from tidegate.tables.serdes.plain import Bytes, Serde
from tidegate.tables.versions.catalog import Versions
from tidegate.tables.versions.record import State, TableVersion, VersionList

if TYPE_CHECKING:
    from tidegate.storage.backends.port import StorageBackend

LOOK_AGAIN_MS: Final = 100
_TASK_BYTES: Final = 224 << 20


class VersionView:
    """One version with each partition at one commit; closed when the last who reads it lets go."""

    def __init__(
        self,
        backend: StorageBackend,
        version: TableVersion,
        commits: Sequence[Commit],
        rules: TableRules,
        clock: Clock,
    ) -> None:
        self.version = version
        self.rules = rules
        self.commits = tuple(commits)
        tasks = max(4, version.partitions)
        runtime = WorkerStorageRuntime.open(
            StorageConfig(
                max_tasks=tasks,
                worker_total_bytes=tasks * _TASK_BYTES,
                memory_ceiling_bytes=tasks * _TASK_BYTES + (128 << 20),
                retained_checkpoints=2,
            ),
            kept_open(backend),
            clock=clock,
            scheduler=NoScheduler(),
        )
        try:
            states = []
            for partition, commit in enumerate(commits):
                shape = version.shape(partition)
                runtime.apply_checkpoint(task_of(shape), commit.token)
                states.append(PartitionState(shape, partition))
                runtime.attach(task_of(shape), states[-1])
            letters, first = LettersState(), task_of(version.shape(0))
            runtime.attach(first, letters)
            self.source = TableSource(runtime, first, states, letters, rules)
        except BaseException:
            runtime.close()
            raise
        self._closing = weakref.finalize(self.source, runtime.close)

    @property
    def marks(self) -> tuple[int, ...]:
        """What tells this view from another one of the same version."""
        return tuple(commit.number for commit in self.commits)

    @property
    def commit(self) -> Commit:
        """All partitions' commits as one; its number is the version's."""
        positions = {number: at for commit in self.commits for number, at in commit.positions.items()}
        newest = max(commit.committed_ms for commit in self.commits)
        rows = sum(commit.rows for commit in self.commits)
        return Commit(self.version.number, positions, newest, rows, b"")

    def close(self) -> None:
        self._closing()


def version_rules(
    version: TableVersion, key: Serde[Any] | None = None, value: Serde[Any] | None = None
) -> TableRules:
    """What a version is, with the serdes to read it with: those it was pushed with, unless others are given."""
    shape = replace(version.shape(0), name=version.name, partitions=tuple(range(version.partitions)))
    key = key or serde_from(version.key_serde) or Bytes()
    value = value or serde_from(version.value_serde) or Bytes()
    return TableRules(shape, key, value, Consumed(), "fail")


def view_version(
    backend: StorageBackend,
    version: TableVersion,
    *,
    key: Serde[Any] | None = None,
    value: Serde[Any] | None = None,
    clock: Clock | None = None,
) -> VersionView:
    """One version that is ready, each partition as its last commit left it."""
    if version.state is not State.READY:
        raise InvalidError(
            f"{version.name} is {version.state.value}; only a version that is ready can be read"
        )
    rules = version_rules(version, key, value)
    return VersionView(backend, version, _last_commits(backend, version), rules, clock or SystemClock())


def _last_commits(backend: StorageBackend, version: TableVersion) -> list[Commit]:
    commits = []
    for partition in range(version.partitions):
        found = load_commits(backend, version.shape(partition).name)
        if found is None or not found[0].commits:
            raise UnavailableError(
                f"partition {partition} of {version.name} is not there any more; ask again, or push again"
            )
        commits.append(found[0].commits[-1])
    return commits


class VersionedTable(KeyQueries):
    """The current version of a table, and whichever is current later. Use it with `with`, or close it."""

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
        self.versions = Versions(backend, table, clock=clock)
        self._backend = backend
        self._number = number
        self._serdes = (key, value)
        self._clock = clock or SystemClock()
        self._owns_backend = owns_backend
        self._lock = threading.RLock()
        self._shown: VersionView | None = None
        self._looked_ms: int | None = None
        self._closed = False
        self.refresh()

    def __enter__(self) -> VersionedTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"VersionedTable({self.name!r}, version {self.version.number})"

    @property
    def name(self) -> str:
        return self.versions.table

    @property
    def version(self) -> TableVersion:
        """The version that answers."""
        with self._lock:
            return self._look(force=False).version

    @property
    def commit(self) -> Commit:
        with self._lock:
            return self._look(force=False).commit

    @property
    def source(self) -> TableSource:
        with self._lock:
            return self._look(force=False).source

    @property
    def position(self) -> dict[int, int]:
        """The offset behind what is seen, by partition of the version's topic."""
        return dict(self.commit.positions)

    def refresh(self) -> TableVersion:
        """Look for another version now; the one that is shown then."""
        with self._lock:
            return self._look(force=True).version

    def close(self) -> None:
        """Let go; fine to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._shown is not None:
            self._shown.close()
        if self._owns_backend:
            self._backend.close()

    # -- inside ----------------------------------------------------------------------------------

    @contextmanager
    def _pinned(
        self, at_least: Positions, timeout: int | DurationLike, *, is_retry: bool = False
    ) -> Iterator[TableSource]:
        if at_least:
            raise InvalidError(
                f"table {self.name} is pushed in versions, whose topics differ; at_least is for tables that follow one"
            )
        with self._lock:
            shown = self._look(force=is_retry)
        try:
            yield shown.source
        except CorruptError as error:  # deleted under us, or damaged: another look tells which (R3)
            if self._is_kept(shown):
                raise
            raise CommitGoneError(
                f"{shown.version.name} was deleted while it was read; read the table again, and keep more versions "
                "if it comes again (`retain`)"
            ) from error

    def _is_kept(self, shown: VersionView) -> bool:
        try:
            version = self._ready(self.versions.require().get(shown.version.number))
            return _last_commits(self._backend, version) == list(shown.commits)
        except (InvalidError, UnavailableError):
            return False

    def _look(self, *, force: bool) -> VersionView:
        if self._closed:
            raise InvalidError(f"table {self.name} is closed")
        now_ms = self._clock.monotonic_ms()
        fresh = self._looked_ms is not None and now_ms - self._looked_ms < LOOK_AGAIN_MS
        if self._shown is not None and fresh and not force:
            return self._shown
        for _ in range(TRIES):
            wanted = self._wanted(self.versions.require())
            self._looked_ms = now_ms
            try:
                commits = _last_commits(self._backend, wanted)
                marks = tuple(commit.number for commit in commits)
                if self._shown is None or (self._shown.version.number, self._shown.marks) != (
                    wanted.number,
                    marks,
                ):
                    rules = version_rules(wanted, *self._serdes)
                    # The view before is not closed: who reads it still holds it (R2).
                    self._shown = VersionView(self._backend, wanted, commits, rules, self._clock)
                    self.rules = rules
            except (CorruptError, UnavailableError):
                if self._wanted(self.versions.require()) == wanted:
                    raise
                continue  # it went while it was opened
            return self._shown
        raise UnavailableError(f"table {self.name} changes faster than it can be opened here; try again")

    def _wanted(self, known: VersionList) -> TableVersion:
        if self._number is not None:
            return self._ready(known.get(self._number))
        current = known.current_version
        if current is None:
            raise UnavailableError(
                f"table {self.name} has no version to show yet; push one, or swap one in: "
                f"tidegate table versions {self.name}"
            )
        return current

    def _ready(self, version: TableVersion) -> TableVersion:
        if version.state is not State.READY:
            raise UnavailableError(
                f"{version.name} is {version.state.value}; only a version that is ready can be read"
            )
        return version


def versioned_table(
    table: str,
    *,
    state: str | Path,
    version: int | None = None,
    key: Serde[Any] | None = None,
    value: Serde[Any] | None = None,
) -> VersionedTable:
    """A table that is pushed, kept in the folder (or object store) `state`: the current version, or one certain one."""
    from tidegate.storage import open_backend

    backend = open_backend(str(state))
    try:
        return VersionedTable(backend, table, number=version, key=key, value=value, owns_backend=True)
    except BaseException:
        backend.close()
        raise
