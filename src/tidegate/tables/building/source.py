"""Where queries read: the partitions of a table in a storage runtime, live or as a commit left them.

The live source is the builder's own: what was drained is visible at once, committed or not. A `Snapshot` is any
process's view of one commit: it restores metadata only, starts no maintenance and so never writes or deletes;
packs are read when a query asks for them. When the builder has gone on by more than the kept commits, its packs are
gone, and reading says so (`MissingObjectError`); whoever holds the snapshot then moves on to a newer commit.

Thread rule: reading from any thread; `Snapshot.show` and `close` by one at a time while nobody reads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from tidegate.clock import Clock
from tidegate.scheduling import NoScheduler
from tidegate.storage import BucketIndex, Merge, StorageConfig, StoreSpec, WorkerStorageRuntime
from tidegate.tables.building.commits import Commit
from tidegate.tables.building.partition_state import PartitionState
from tidegate.tables.building.shape import TableRules, TableShape
from tidegate.tables.serdes.dead_letters import DEAD_LETTER_SCHEMA

if TYPE_CHECKING:
    from tidegate.storage.backends.port import StorageBackend

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

    def encode_extra(self) -> bytes:
        return self.kept_bytes.to_bytes(8, "big")

    def restore_extra(self, data: bytes) -> None:
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


class Snapshot:
    """A table as one of its commits left it."""

    def __init__(self, backend: StorageBackend, rules: TableRules, commit: Commit, *, clock: Clock) -> None:
        self._rules = rules
        self.backend = backend
        self._runtime = WorkerStorageRuntime.open(
            StorageConfig(retained_checkpoints=2), kept_open(backend), clock=clock, scheduler=NoScheduler()
        )
        self._source: TableSource | None = None
        self.commit = commit
        self.show(commit)

    @property
    def source(self) -> TableSource:
        if self._source is None:
            raise RuntimeError("a snapshot shows a commit from its first line on")
        return self._source

    def show(self, commit: Commit) -> None:
        """Move to another commit; packs that are open stay open."""
        task = task_of(self._rules.shape)
        self._runtime.apply_checkpoint(task, commit.token)
        self.commit = commit
        if self._source is None:
            self._source = attach(self._runtime, self._rules)

    def close(self) -> None:
        self._runtime.close()


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
