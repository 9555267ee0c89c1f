"""The partitions of a table in storage: live where it is built, or as of one commit.

Rows: key = inner key, ts = window start (session end; 0 for plain keys), seq = 0 (session start); payload = the
record's value, its timestamp (-1 for none) and its offset. Next offset, observed time, the drainer's validation state
and the cells of offsets are saved with exactly these rows (`Progress`), so a restart neither reads a record twice nor
leaves one out. A partition that stopped at a fault is *frozen*: its progress stays as it was saved last.

A `Snapshot` is any process's view of one commit: it restores metadata only and never writes; packs are read when a
query needs them. The live source is the builder's own: drained rows are visible at once, committed or not.

Thread rules: the draining thread changes states and cells; reading from any. `Snapshot.show` and `close` by one at a
time while there are no readers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import CorruptError
from tidegate.kernels.stream_time import note_cells
from tidegate.scheduling import NoScheduler
from tidegate.storage import (
    Merge,
    RuntimeContext,
    StorageConfig,
    StoreSpec,
    WorkerStorageRuntime,
)
from tidegate.tables.commits import KEPT, Commit, load_commits
from tidegate.tables.dead_letters import LettersState
from tidegate.tables.options import TableRules, TableShape
from tidegate.windows.stores.key_value_store import KeyValueStore
from tidegate.windows.stores.segmented_store import StoreState
from tidegate.windows.stores.segments import NOTHING_OBSERVED, Expiry, Int64s
from tidegate.windows.stores.session_store import SessionStore
from tidegate.windows.stores.window_store import WindowStore

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend


# --- cells

MOST_CELLS: Final = 1024
CELLS_OF_A_SEGMENT: Final = 256
MOST_AT_ONCE: Final = 1 << 15  # cells that a batch may span and still be counted in an array


class Cell(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The records of one cell."""

    count: int
    low: int
    high: int
    dropped_from: int = -1


class OffsetCells:
    """The cells of one partition."""

    def __init__(self, expiry: Expiry, size_ms: int) -> None:
        self._segment_ms = expiry.interval_ms
        self._per_segment = min(max(1, self._segment_ms // max(1, size_ms)), CELLS_OF_A_SEGMENT)
        self._width_ms = -(-self._segment_ms // self._per_segment)
        self.cells: dict[int, Cell] = {}

    def find(self, ts: int) -> Cell | None:
        """Return the cell of a window, if it is kept."""
        return self.cells.get(self._number(ts))

    def note(self, ts: Int64s, offsets: Int64s, dropped: Int64s, first_readable_ts: int) -> None:
        """Record these times at these ascending offsets; `dropped` are the rows that had expired."""
        if not len(ts):
            return
        first, last = self._number(int(ts.min())), self._number(int(ts.max()))
        if first == last:
            self._add(first, len(ts), int(offsets[0]), int(offsets[-1]))
        elif last - first < MOST_AT_ONCE:
            self._note_near(ts, offsets, first, last - first + 1)
        else:
            self._note_far(self._numbers(ts), offsets)
        for row in dropped[np.unique(self._numbers(ts[dropped]), return_index=True)[1]].tolist():
            number = self._number(int(ts[row]))
            cell = self.cells[number]
            if cell.dropped_from < 0:
                self.cells[number] = msgspec.structs.replace(cell, dropped_from=int(offsets[row]))
        if len(self.cells) > MOST_CELLS:
            self._forget(self._number(first_readable_ts))

    def _note_near(self, ts: Int64s, offsets: Int64s, first: int, span: int) -> None:
        counts, lows, highs = np.zeros((3, span), np.int64)
        note_cells(
            ts, offsets, self._segment_ms, self._per_segment, self._width_ms, first, counts, lows, highs
        )
        for at in np.flatnonzero(counts).tolist():
            self._add(first + at, int(counts[at]), int(lows[at]), int(highs[at]))

    def _note_far(self, numbers: Int64s, offsets: Int64s) -> None:
        """Record times that are too far apart for an array of counters."""
        cells, owners = np.unique(numbers, return_inverse=True)
        low, high = np.empty(len(cells), np.int64), np.empty(len(cells), np.int64)
        low[owners[::-1]] = offsets[::-1]  # of equal cells the last assignment counts
        high[owners] = offsets
        counts = np.bincount(owners)
        for noted in zip(cells.tolist(), counts.tolist(), low.tolist(), high.tolist(), strict=True):
            self._add(*noted)

    def _add(self, number: int, count: int, low: int, high: int) -> None:
        known = self.cells.get(number)
        if known is not None:
            count, low = known.count + count, known.low
        self.cells[number] = Cell(count, low, high, -1 if known is None else known.dropped_from)

    def _forget(self, first_readable: int) -> None:
        ranked = sorted(self.cells.items(), key=lambda each: (each[0] >= first_readable, each[1].high))
        for number, _ in ranked[: len(ranked) - MOST_CELLS]:
            del self.cells[number]

    def _number(self, ts: int) -> int:
        segment, rest = divmod(ts, self._segment_ms)
        return segment * self._per_segment + rest // self._width_ms

    def _numbers(self, ts: Int64s) -> Int64s:
        segments = ts // self._segment_ms
        if self._per_segment == 1:
            return segments
        return segments * self._per_segment + (ts - segments * self._segment_ms) // self._width_ms


# --- partition state

NEVER: Final = -1
EARLIEST: Final = -(2**63)
PAYLOAD: Final = pa.schema(
    [
        pa.field("value", pa.binary()),
        pa.field("value_ts", pa.int64(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
    ]
)
VERSION: Final = 2
KEY_BUCKET_MS: Final = 60_000


class Counts(msgspec.Struct):
    """Counters of a partition's records by outcome, since the table was created."""

    applied: int = 0
    deleted: int = 0
    null_keys: int = 0
    bad_keys: int = 0
    bad_values: int = 0
    expired: int = 0
    repeated: int = 0  # left out by validation as repeats
    skipped_offsets: int = 0  # aged out of the topic before they were read
    letters_not_kept: int = 0  # dead letters beyond the bytes that are kept of them
    fenced: int = 0  # left out because another leader had the partition by then
    faulty: int = 0  # left out by validation, because they are not what their producer sent

    def add(self, other: Counts) -> None:
        for outcome, number in msgspec.structs.asdict(other).items():
            setattr(self, outcome, getattr(self, outcome) + number)


class Progress(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The progress that a checkpoint stores with the rows."""

    version: int
    next_offset: int
    observed_ms: int
    newest_ms: int
    drainer: bytes
    counts: Counts
    cells: dict[int, Cell]
    live: bytes = b""
    verdicts: dict[str, int] | None = None


class PartitionState(StoreState):
    """A store's state with its progress; `open` opens the store."""

    store: WindowStore | SessionStore | KeyValueStore

    def __init__(self, shape: TableShape, partition: int) -> None:
        self.shape = shape
        self.partition = partition
        width = shape.segment_ms if shape.is_windowed else KEY_BUCKET_MS
        super().__init__(
            StoreSpec(
                name=f"partition-{partition}",
                merge=Merge.LAST,
                payload=PAYLOAD,
                bucket_ms=width,
                segment_ms=width,
            )
        )
        self.expiry = shape.expiry
        self.cells = OffsetCells(self.expiry, shape.size_ms)
        self.next_offset = 0
        self.observed_ms = NOTHING_OBSERVED
        self.newest_ms = NEVER
        self.counts = Counts()
        self.drainer = b""
        self.live = b""
        self.verdicts: dict[str, int] | None = None
        self.encode_drainer: Callable[[], bytes] | None = None
        self.encode_live: Callable[[], bytes] | None = None
        self._saved = b""
        self._is_frozen = False

    @property
    def stream_time(self) -> int:
        """The observed time: the largest window start (session end) of its records."""
        return self.observed_ms

    def open(self, context: RuntimeContext) -> None:
        """Attach the state to a task, and open the store through which its rows are put and fetched. That drops
        expired time segments, and so does every restore."""
        shape = self.shape
        if shape.kind == "key":
            self.store = KeyValueStore(context, self)
        elif shape.kind == "session":
            self.store = SessionStore(context, self, retention=shape.retention_ms)
        else:
            self.store = WindowStore(context, self, retention=shape.retention_ms)

    @property
    def readable_from(self) -> int:
        """The earliest ts that is not expired for readers."""
        if not self.shape.is_windowed:
            return EARLIEST
        return self.expiry.first_readable_ts(self.observed_ms)

    @property
    def live_from(self) -> int:
        """The start of the earliest live time segment: older segments are freed."""
        return self.expiry.first_live_ts(self.observed_ms)

    def freeze(self) -> None:
        """Save no new progress from now on."""
        self._is_frozen = True

    def encode_progress(self) -> bytes:
        if self._is_frozen:
            return self._saved
        if self.encode_drainer is not None:
            self.drainer = self.encode_drainer()
        if self.encode_live is not None:
            self.live = self.encode_live()
        self._saved = msgspec.msgpack.encode(
            Progress(
                VERSION,
                self.next_offset,
                self.observed_ms,
                self.newest_ms,
                self.drainer,
                self.counts,
                self.cells.cells,
                self.live,
                self.verdicts,
            )
        )
        return self._saved

    def restore_progress(self, data: bytes) -> None:
        if data:
            self._restore(data)
        self.restored()

    def _restore(self, data: bytes) -> None:
        try:
            found = msgspec.msgpack.decode(data, type=Progress)
        except msgspec.DecodeError as error:
            raise CorruptError(
                f"the progress of partition {self.partition} of table {self.shape.name} cannot be read ({error}); "
                "go back to an older commit, or build the table anew in another state folder"
            ) from None
        if found.version != VERSION:
            raise CorruptError(
                f"table {self.shape.name} was written by another release (progress version {found.version}, this one "
                f"reads {VERSION}); open it with that release, or build it anew in another state folder"
            )
        self._saved = bytes(data)
        self.next_offset, self.observed_ms = found.next_offset, found.observed_ms
        self.newest_ms, self.drainer, self.counts = found.newest_ms, found.drainer, found.counts
        self.cells.cells, self.live, self.verdicts = found.cells, found.live, found.verdicts


# --- source

READERS: Final = 32  # concurrent loads: they mostly wait for files, and merging is bounded separately
At = TypeVar("At")
Source = TypeVar("Source")


@dataclass(frozen=True)
class TableSource:
    """A table's partitions, ready for reading.

    `cut` is held while a piece of the topic becomes visible, and while a scan captures all partitions.
    """

    runtime: WorkerStorageRuntime
    task: str
    partitions: Sequence[PartitionState]
    letters: LettersState
    rules: TableRules
    cut: threading.Lock = field(default_factory=threading.Lock)

    def key(self, key: Any) -> bytes:
        """Return a key as this table stores it."""
        raw = self.rules.key.encode(key)
        if raw is None:
            raise TypeError("key must not be None")
        return raw

    @property
    def positions(self) -> dict[int, int]:
        """Partition → the offset after the last visible record."""
        return {state.partition: state.next_offset for state in self.partitions}


def attach(runtime: WorkerStorageRuntime, rules: TableRules) -> TableSource:
    """Open the stores of the table in the runtime; restored ones come with their content."""
    shape = rules.shape
    context = runtime.context(task_of(shape))
    states = [PartitionState(shape, number) for number in shape.partitions]
    for state in states:
        state.open(context)
    return TableSource(runtime, task_of(shape), states, LettersState(context), rules)


def task_of(shape: TableShape) -> str:
    return shape.name


class Snapshot(Generic[At, Source]):
    """A table as of one commit: metadata restored from the tokens of its storage tasks; it never writes."""

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
        """`attach` attaches the table's stores to the restored runtime; reads use what it returns."""
        self.backend = backend
        config = replace(config, max_inflight_loads=READERS, deleted_by="master")  # never by who only reads
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
    """Open a table that is built from a topic, as of this commit."""
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
        """`rules_of` gives the rules for reading a stored shape; with `only` that commit is served for good."""
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
    """A backend shared by several runtimes: their `close` does not close it."""

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def close(self) -> None:
        """Do nothing: the opener closes it."""


def kept_open(backend: StorageBackend) -> StorageBackend:
    """Return the backend for one of several runtimes that share it."""
    shared: Any = _KeptOpen(backend)
    return cast("StorageBackend", shared)
