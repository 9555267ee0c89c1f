"""Where queries read: the partitions of a table in a storage runtime, live or as a commit left them.

The live source is the builder's own: what was drained is visible at once, committed or not. A `Snapshot` is any
process's view of one commit: it restores metadata only, starts no maintenance and so never writes or deletes;
packs are read when a query asks for them. When the builder has gone on by more than the kept commits, its packs are
gone, and reading says so (`MissingObjectError`); whoever holds the snapshot then moves on to a newer commit.

Thread rule: reading from any thread; `Snapshot.show` and `close` by one at a time while nobody reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar, cast

import pyarrow as pa

from tidegate.clock import Clock
from tidegate.scheduling import NoScheduler
from tidegate.storage import BucketIndex, Merge, StorageConfig, StoreSpec, WorkerStorageRuntime
from tidegate.tables.building.commits import KEPT, Commit, load_commits
from tidegate.tables.building.partition_state import PartitionState
from tidegate.tables.building.shape import TableRules, TableShape
from tidegate.tables.serdes.dead_letters import DEAD_LETTER_SCHEMA

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend

READERS: Final = 32  # loads at once: they mostly wait for files, and what they merge is bounded apart
At = TypeVar("At")
Source = TypeVar("Source")

LETTERS = StoreSpec(
    name="dead-letters",
    merge=Merge.LAST,
    payload=pa.schema(
        [
            pa.field("reason", pa.string()),
            pa.field("value", pa.binary()),
            pa.field("record_key", pa.binary()),
        ]
    ),
    bucket_ms=1 << 40,
)
"""Dead letters in storage: key = partition as 4 bytes, ts = 0, seq = offset."""


class LettersState:
    """The dead letters of a table; beside them in every checkpoint, how many bytes of them are kept."""

    def __init__(self) -> None:
        self._index = BucketIndex(LETTERS)
        self.kept_bytes = 0

    @property
    def index(self) -> BucketIndex:
        return self._index

    def encode_progress(self) -> bytes:
        return self.kept_bytes.to_bytes(8, "big")

    def restore_progress(self, data: bytes) -> None:
        self.kept_bytes = int.from_bytes(data, "big")


@dataclass(frozen=True)
class TableSource:
    """A table's partitions, ready to be read.

    `cut` is held while a piece of the topic becomes visible, and while a scan captures all partitions.
    """

    runtime: WorkerStorageRuntime
    task: str
    partitions: Sequence[PartitionState]
    letters: LettersState
    rules: TableRules
    cut: threading.Lock = field(default_factory=threading.Lock)

    def key(self, key: Any) -> bytes:
        """A key as this table stores it."""
        raw = self.rules.key.encode(key)
        if raw is None:
            raise TypeError("key must not be None")
        return raw

    @property
    def positions(self) -> dict[int, int]:
        """The offset after the last record that is seen here, by partition."""
        return {state.partition: state.next_offset for state in self.partitions}

    def dead_letters(self) -> pa.Table:
        """Records that were set aside, with where they came from and why."""
        pieces: list[pa.Table] = []
        with self.runtime.reader().scan(self.task, self.letters) as scan:
            for batch in scan:
                partition = [int.from_bytes(key, "big") for key in batch.column("key").to_pylist()]
                columns = {
                    "offset": batch.column("seq"),
                    "partition": pa.array(partition, pa.int32()),
                    "reason": batch.column("reason"),
                    "key": batch.column("record_key"),
                    "value": batch.column("value"),
                }
                pieces.append(pa.table(columns).cast(DEAD_LETTER_SCHEMA))
        found = pa.concat_tables(pieces) if pieces else DEAD_LETTER_SCHEMA.empty_table()
        return found.sort_by([("partition", "ascending"), ("offset", "ascending")])


def attach(runtime: WorkerStorageRuntime, rules: TableRules) -> TableSource:
    """Give the runtime the stores of the table; restored ones come with their content."""
    shape = rules.shape
    states = [PartitionState(shape, number) for number in shape.partitions]
    letters = LettersState()
    for state in states:
        runtime.attach(task_of(shape), state)
    runtime.attach(task_of(shape), letters)
    return TableSource(runtime, task_of(shape), states, letters, rules)


def task_of(shape: TableShape) -> str:
    return shape.name


class Snapshot(Generic[At, Source]):
    """A table as one commit left it: metadata restored from the tokens of its storage tasks, nothing ever written."""

    def __init__(
        self,
        backend: StorageBackend,
        config: StorageConfig,
        commit: At,
        tokens: Mapping[str, bytes],
        attach: Callable[[WorkerStorageRuntime], Source],
        *,
        clock: Clock,
    ) -> None:
        """`attach` gives the restored runtime the stores of the table; what it returns is what is read."""
        self.backend = backend
        config = replace(config, max_inflight_loads=READERS)
        self._runtime = WorkerStorageRuntime.open(
            config, kept_open(backend), clock=clock, scheduler=NoScheduler()
        )
        try:
            self.show(commit, tokens)
            self.source = attach(self._runtime)
        except BaseException:
            self._runtime.close()
            raise

    def show(self, commit: At, tokens: Mapping[str, bytes]) -> None:
        """Move to another commit of the same tasks; packs that are open stay open."""
        for task, token in tokens.items():
            self._runtime.apply_checkpoint(task, token or None)
        self.commit = commit

    def close(self) -> None:
        self._runtime.close()


def stored_snapshot(
    backend: StorageBackend, rules: TableRules, commit: Commit, *, clock: Clock
) -> StoredSnapshot:
    """A table that is built from a topic, as this commit left it."""
    tokens = {task_of(rules.shape): commit.token}
    config = StorageConfig(retained_checkpoints=2)
    return Snapshot(backend, config, commit, tokens, partial(attach, rules=rules), clock=clock)


StoredCommit: TypeAlias = tuple[TableShape, Commit]
StoredSnapshot: TypeAlias = "Snapshot[Commit, TableSource]"


class StoredCommits:
    """The commits of a table that is built from a topic, for a `CommitFollower`."""

    def __init__(
        self,
        backend: StorageBackend,
        name: str,
        rules_of: Callable[[TableShape], TableRules],
        *,
        clock: Clock,
        only: StoredCommit | None = None,
    ) -> None:
        """`rules_of` gives the rules to read a stored shape with; with `only` that commit is served, whatever comes."""
        self.name = name
        self._backend, self._rules_of, self._clock, self._only = backend, rules_of, clock, only

    def newest(self) -> StoredCommit | None:
        if self._only is not None:
            return self._only
        found = load_commits(self._backend, self.name)
        return None if found is None or not found[0].commits else (found[0].shape, found[0].commits[-1])

    def open(self, commit: StoredCommit) -> StoredSnapshot:
        return stored_snapshot(self._backend, self._rules_of(commit[0]), commit[1], clock=self._clock)

    def fits(self, view: StoredSnapshot, commit: StoredCommit) -> bool:
        return view.source.rules.shape == commit[0]

    def show(self, view: StoredSnapshot, commit: StoredCommit) -> None:
        view.show(commit[1], {task_of(commit[0]): commit[1].token})

    def gone(self, commit: StoredCommit) -> str:
        found = load_commits(self._backend, self.name)
        if found is not None and commit[1] in found[0].commits:
            return ""
        return (
            f"commit {commit[1].number} of table {self.name} is not kept any more: its builder has made more than "
            f"{KEPT} newer ones while it was read; read the table again"
        )


class _KeptOpen:
    """A backend that several runtimes share: all is the backend's own, but none of them closes it."""

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def close(self) -> None:
        """Whoever opened it closes it."""


def kept_open(backend: StorageBackend) -> StorageBackend:
    """The backend for one of several runtimes that share it."""
    shared: Any = _KeptOpen(backend)
    return cast("StorageBackend", shared)
