"""The index of a store: its runs by bucket, the places of each run, and versions.

A run is one logical unit with up to two copies: a hot copy in memory and a stored copy in a pack; no row counts
twice. A hot copy may hold only some keys (`complete` is false after a per-key eviction): each key it lists has all its
rows; every other key of the run is read from the stored copy. `order` is the run's position inside its bucket: for
`last`, the higher order wins. A merged run takes the highest order of its inputs, which are always adjacent in order.

`BucketIndex` is the only owner of the run lists. Buckets are immutable values; a change replaces a `Bucket` under one
short lock, without IO or waiting, so a reader of a `Bucket` has a consistent snapshot of it and of its hot runs. Stored
runs must be pinned; `capture` pins them in the same critical section, so that no run can be deleted in between.

X1  `data_version` of a bucket changes when rows are added or removed (insert, prune), `layout_version` when a publish
    or a change of places rearranges them. Both come from one counter of the index and never repeat.
X2  `publish` and `set_places` take effect only if the bucket is still the given one, in both versions, and then
    completely.
X3  Counts equal the entries: rows, bytes and charge change together with the entry.
X4  Every run is readable: it has a stored copy or a complete hot one.
X5  Work is proportional to the buckets touched, never to all buckets.

`last` and `fold` count rows as stored: overwritten rows and unmerged partials count until a compaction. A violated rule
is an error of the caller and raised before anything changes; a lost compare-and-swap is not an error.

Thread rule: any thread, any method. The lock is a leaf but for `pin` in `capture`, which may take its own.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any, Protocol, TypeVar, runtime_checkable

from tidegate.errors import InternalError, InvalidError
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Merge, StoreSpec

# -- runs and buckets --------------------------------------------------------------------------------

_TICKS = count(1)


def next_tick() -> int:
    """Return the next number of a process-wide counter, used as an id and as a logical time."""
    return next(_TICKS)


class Tenant(StrEnum):
    """The tenants of pool memory in a task."""

    WRITE_BUFFER = "write_buffer"
    BASE_RUNS = "base_runs"
    STATE_CACHE = "state_cache"


@dataclass(frozen=True, slots=True)
class StoredRef:
    """A run's place on the backend: slot `slot` of the pack named `pack`. `nbytes` is the run's logical size."""

    pack: str
    slot: int
    nbytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class HotCopy:
    """A run's place in memory. `id` is never used again in the process; a later copy has a larger one."""

    tenant: Tenant
    id: int
    run: Run
    complete: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class RunEntry:
    """A run in the index. `charge` is its share of the backlog budget."""

    bucket: int
    order: int
    rows: int
    keys: int
    nbytes: int
    charge: int
    min_ts: int
    max_ts: int
    base: bool = False  # output of a compaction; a delta otherwise
    hot: HotCopy | None = None
    stored: StoredRef | None = None

    @property
    def hot_run(self) -> Run | None:
        """The whole run, if it is in memory."""
        return self.hot.run if self.hot is not None and self.hot.complete else None

    @property
    def is_hot(self) -> bool:
        """Whether every key is readable without the backend."""
        return self.hot is not None and self.hot.complete


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """The runs of one time cell, ascending by order, and their versions (X1)."""

    start: int
    runs: tuple[RunEntry, ...]
    data_version: int
    layout_version: int


@dataclass(frozen=True, slots=True, eq=False)
class AppendBatch:
    """One accepted run that is not in the index yet; the writer returns it for the operator to insert."""

    bucket: int
    hot: HotCopy
    rows: int
    nbytes: int
    charge: int
    min_ts: int
    max_ts: int


@dataclass(frozen=True, slots=True)
class Pruned:
    """The content removed from the index, for the caller to drop, retire and release. A run counts once."""

    hot: tuple[HotCopy, ...] = ()
    stored: tuple[StoredRef, ...] = ()
    charge: int = 0
    rows: int = 0
    buckets: tuple[int, ...] = ()

    @classmethod
    def of(cls, runs: Sequence[RunEntry], emptied: Sequence[int]) -> Pruned:
        """The sums over these runs, each counted once."""
        return cls(
            hot=tuple(run.hot for run in runs if run.hot is not None),
            stored=tuple(run.stored for run in runs if run.stored is not None),
            charge=sum(run.charge for run in runs),
            rows=sum(run.rows for run in runs),
            buckets=tuple(emptied),
        )


# -- rules of changes --------------------------------------------------------------------------------


def check_parts(spec: StoreSpec, parts: Sequence[AppendBatch]) -> None:
    """Check that parts to insert lie in their buckets and are complete."""
    for part in parts:
        whole = part.rows > 0 and part.hot.complete and part.charge >= 0
        if not whole or {spec.bucket_of(part.min_ts), spec.bucket_of(part.max_ts)} != {part.bucket}:
            raise InvalidError(
                f"store {spec.name}: a part of bucket {part.bucket} with {part.rows} rows of ts {part.min_ts} to "
                f"{part.max_ts} cannot be inserted; parts come from StorageWriter.append as they are"
            )


def check_replacement(spec: StoreSpec, bucket: int, old: Sequence[RunEntry], new: Sequence[RunEntry]) -> None:
    """Check that `new` can replace `old`: same bucket, no added rows, orders within the old ones, readable."""
    where = f"store {spec.name}, bucket {bucket}"
    if not old:
        raise InvalidError(f"{where}: a publish replaces at least one run")
    if any(entry.bucket != bucket for entry in (*old, *new)):
        raise InvalidError(f"{where}: a publish may not move runs between buckets")
    before, after = sum(run.rows for run in old), sum(run.rows for run in new)
    if after > before or (spec.merge is Merge.APPEND and after != before):
        raise InvalidError(f"{where}: {before} rows became {after} in a merge")
    low, high = min(run.order for run in old), max(run.order for run in old)
    orders = [run.order for run in new]
    if orders != sorted(orders) or any(not low <= order <= high for order in orders):
        raise InvalidError(f"{where}: orders {orders} do not fit in the place of {low} to {high}")
    _check_readable(where, new)


def check_places(spec: StoreSpec, bucket: int, pairs: Sequence[tuple[RunEntry, RunEntry]]) -> None:
    """Check that the second of each pair is the first at other places."""
    where = f"store {spec.name}, bucket {bucket}"
    if any(_facts(old) != _facts(new) for old, new in pairs):
        raise InvalidError(f"{where}: a change of places changed the run itself")
    _check_readable(where, [new for _, new in pairs])


def stored_cells(
    spec: StoreSpec, entries: Iterable[RunEntry], next_order: int
) -> dict[int, tuple[RunEntry, ...]]:
    """A manifest's entries by ascending bucket, each bucket's by order."""
    cells: dict[int, list[RunEntry]] = {}
    for entry in entries:
        if entry.stored is None or entry.order >= next_order or entry.rows <= 0:
            raise InvalidError(
                f"store {spec.name}, bucket {entry.bucket}: a run of order {entry.order} (next is {next_order}) with "
                f"{entry.rows} rows at {entry.stored} cannot be loaded"
            )
        cells.setdefault(entry.bucket, []).append(entry)
    return {start: tuple(sorted(cells[start], key=lambda run: run.order)) for start in sorted(cells)}


def _check_readable(where: str, entries: Iterable[RunEntry]) -> None:
    for entry in entries:
        if entry.stored is None and not entry.is_hot:
            raise InvalidError(
                f"{where}: the run of order {entry.order} would be nowhere: without a stored copy the hot one "
                f"must be complete"
            )


def _facts(entry: RunEntry) -> tuple[object, ...]:
    sizes = (entry.rows, entry.keys, entry.nbytes, entry.charge)
    return (entry.bucket, entry.order, *sizes, entry.min_ts, entry.max_ts, entry.base)


# -- index -------------------------------------------------------------------------------------------

MAX_DERIVED = 16
Lease = TypeVar("Lease")


class BucketIndex:
    """The runs of a store by bucket, and their places."""

    def __init__(self, spec: StoreSpec) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self._buckets: dict[int, Bucket] = {}
        self._starts: list[int] = []
        self.version = 0  # increases with every change of any bucket
        self.data_version = 0  # the version at which rows were last added or removed, not merged or moved
        self._next_order = 0
        self.total_rows = self.total_bytes = 0
        self.total_charge = 0  # the backlog that all runs hold; a restore acquires it again
        self._unstored: set[int] = set()  # buckets with a run that is not stored
        self._hot: set[int] = set()  # with a hot copy
        self._crowded: set[int] = set()  # with more than one run
        # since the last manifest: the version of each bucket's last change
        self._changed: dict[int, int] = {}
        self._derived: dict[tuple[int, int], Any] = {}

    # ── looking ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_exported(self) -> bool:
        """Whether nothing changed since the last confirmed manifest, or the one this was loaded from."""
        return not self._changed and not self._unstored

    @property
    def bucket_count(self) -> int:
        return len(self._starts)

    def snapshot(self, bucket: int) -> Bucket | None:
        """The present bucket, None when it has no runs."""
        return self._buckets.get(bucket)

    def all_buckets(self) -> list[int]:
        with self._lock:
            return list(self._starts)

    def unstored_buckets(self) -> list[int]:
        """Ascending starts of buckets with a run that is not stored yet."""
        with self._lock:
            return sorted(self._unstored)

    def hot_buckets(self) -> list[int]:
        """Ascending starts of buckets with a hot copy, complete or not."""
        with self._lock:
            return sorted(self._hot)

    def crowded_buckets(self) -> list[int]:
        """Ascending starts of buckets with more than one run: the candidates of compaction."""
        with self._lock:
            return sorted(self._crowded)

    def query(self, start: int, end: int) -> list[Bucket]:
        """Buckets whose *starts* lie in start … end, both inclusive, ascending."""
        with self._lock:
            return [self._buckets[each] for each in self._between(start, end)]

    def buckets(self, start_ts: int, end_ts: int) -> list[Bucket]:
        """Buckets that may hold a row with start_ts ≤ ts ≤ end_ts, ascending."""
        return self.query(self.spec.bucket_of(start_ts), end_ts)

    def capture(
        self,
        start: int,
        end: int,
        pin: Callable[[list[StoredRef]], Lease] | None = None,
        *,
        everything: bool = False,
    ) -> tuple[list[Bucket], Lease | None]:
        """The buckets with starts in start … end (inclusive), and a lease on stored runs, in one critical section.

        Stored copies of runs with a complete hot copy are pinned only with `everything`.
        `pin` is called only when there is something to pin, and must not block. The caller closes the lease.
        """
        with self._lock:
            found = [self._buckets[each] for each in self._between(start, end)]
            if pin is None:
                return found, None
            wanted = [
                run.stored
                for bucket in found
                for run in bucket.runs
                if run.stored is not None and (everything or not run.is_hot)
            ]
            return found, pin(wanted) if wanted else None

    def recall(self, start: int, end: int) -> Any:
        """The value stored by `remember` for these buckets if nothing changed since, else None."""
        return self._derived.get((start, end))

    def remember(self, version: int, start: int, end: int, derived: Any) -> None:
        """Cache a value derived from the buckets start … end at `version`, until anything changes.

        It may keep hot runs alive: any change drops all of it, so that evicted runs leave memory.
        """
        with self._lock:
            if version == self.version:
                if len(self._derived) >= MAX_DERIVED:
                    self._derived.clear()
                self._derived[start, end] = derived

    # ── changing ─────────────────────────────────────────────────────────────────────────────────────────────

    def insert(self, parts: Sequence[AppendBatch]) -> list[RunEntry]:
        """Make accepted runs visible, all at once, each after every run its bucket already has."""
        check_parts(self.spec, parts)
        entries: list[RunEntry] = []
        with self._lock:
            for part in parts:
                entry = RunEntry(
                    bucket=part.bucket,
                    order=self._next_order,
                    rows=part.rows,
                    keys=part.hot.run.key_count,
                    nbytes=part.nbytes,
                    charge=part.charge,
                    min_ts=part.min_ts,
                    max_ts=part.max_ts,
                    hot=part.hot,
                )
                self._next_order += 1
                self.version += 1
                old = self._buckets.get(part.bucket)
                if old is None:
                    new = Bucket(part.bucket, (entry,), self.version, self.version)
                else:
                    new = Bucket(part.bucket, (*old.runs, entry), self.version, old.layout_version)
                self._put(new)
                self._count((entry,))
                entries.append(entry)
            self.data_version = self.version
        return entries

    def publish(self, found: Bucket, old: Sequence[RunEntry], new: Sequence[RunEntry]) -> bool:
        """Replace `old` by `new` if the bucket is still `found` (X2); False: nothing changed.

        `old` are adjacent entries of the bucket; `new` hold the same content. Several new entries may share one
        order: then they are disjoint pieces of one merge. `new` may be empty when only tombstones with nothing to
        hide were merged.
        """
        bucket = found.start
        check_replacement(self.spec, bucket, old, new)
        with self._lock:
            if self._buckets.get(bucket) is not found:
                return False
            first = next((at for at, run in enumerate(found.runs) if run is old[0]), -1)
            if (
                first < 0
                or any(run is not entry for run, entry in zip(found.runs[first:], old, strict=False))
                or first + len(old) > len(found.runs)
            ):
                raise InvalidError(
                    f"store {self.spec.name}, bucket {bucket}: the runs to replace do not stand side by side in it"
                )
            runs = (*found.runs[:first], *new, *found.runs[first + len(old) :])
            if not runs:
                self._remove(bucket)
                del self._starts[bisect_left(self._starts, bucket)]
                return True
            self.version += 1
            self._put(Bucket(bucket, runs, found.data_version, self.version))
            self._count(old, -1)
            self._count(new)
            return True

    def set_places(self, found: Bucket, pairs: Iterable[tuple[RunEntry, RunEntry]]) -> bool:
        """Replace each first entry by the second, which differs in `hot` and `stored` only; as `publish` does."""
        bucket = found.start
        wanted = list(pairs)
        check_places(self.spec, bucket, wanted)
        changes = {id(old): new for old, new in wanted}
        with self._lock:
            if self._buckets.get(bucket) is not found:
                return False
            if not changes:
                return True
            if changes.keys() - {id(run) for run in found.runs}:
                raise InvalidError(f"store {self.spec.name}, bucket {bucket}: the run to place is not in it")
            is_stored_anew = any(old.stored != new.stored for old, new in wanted)
            runs = tuple(changes.get(id(run), run) for run in found.runs)
            self.version += 1
            self._put(Bucket(bucket, runs, found.data_version, self.version), is_content=is_stored_anew)
            return True

    def prune(self, cutoff: int) -> Pruned:
        """Drop every run whose last ts lies before `cutoff`; a run that straddles it stays whole."""
        with self._lock:
            gone: list[RunEntry] = []
            emptied: list[int] = []
            boundary = self.spec.bucket_of(cutoff)
            for start in self._starts[: bisect_left(self._starts, boundary)]:
                gone += self._remove(start)
                emptied.append(start)
            straddled = self._buckets.get(boundary)
            if straddled is not None:
                dropped = [run for run in straddled.runs if run.max_ts < cutoff]
                if len(dropped) == len(straddled.runs):
                    self._remove(boundary)
                    emptied.append(boundary)
                elif dropped:
                    kept = tuple(run for run in straddled.runs if run.max_ts >= cutoff)
                    self.version += 1
                    self._put(Bucket(boundary, kept, self.version, straddled.layout_version))
                    self._count(dropped, -1)
                gone += dropped
            del self._starts[: len(emptied)]
            if gone:
                self.data_version = self.version
            return Pruned.of(gone, emptied)

    def drop_segments(self, before: int) -> Pruned:
        """Drop the time segments that end at or before `before`, whole."""
        return self.prune(self.spec.segment_of(before))

    # ── manifests ────────────────────────────────────────────────────────────────────────────────────────────

    def changes(self) -> set[int] | None:
        """The buckets changed or removed since the last confirmed manifest; None while a run is only in memory."""
        with self._lock:
            return None if self._unstored else set(self._changed)

    def exported(self, version: int) -> None:
        """Confirm a manifest of the changes up to this version: later ones omit them."""
        with self._lock:
            self._changed = {start: at for start, at in self._changed.items() if at > version}

    def load(self, entries: Iterable[RunEntry], *, next_order: int) -> Pruned:
        """Replace everything by the stored runs of a manifest; returns the previous content."""
        cells = stored_cells(self.spec, entries, next_order)
        with self._lock:
            gone = [run for bucket in self._buckets.values() for run in bucket.runs]
            emptied = self._starts
            self._buckets, self._starts = {}, []
            self._derived.clear()
            self._count(gone, -1)
            for noted in (self._unstored, self._hot, self._crowded):
                noted.clear()
            self.version += 1
            for start, runs in cells.items():
                self._put(Bucket(start, runs, self.version, self.version))
                self._count(runs)
            self._changed = {}
            self.data_version = self.version
            self._next_order = next_order
            return Pruned.of(gone, emptied)

    # ── inside the lock ──────────────────────────────────────────────────────────────────────────────────────

    def _between(self, start: int, end: int) -> list[int]:
        return self._starts[bisect_left(self._starts, start) : bisect_right(self._starts, end)]

    def _put(self, bucket: Bucket, *, is_content: bool = True) -> None:
        self._derived.clear()
        start = bucket.start
        if start not in self._buckets:
            if self._starts and start < self._starts[-1]:
                self._starts.insert(bisect_left(self._starts, start), start)
            else:
                self._starts.append(start)
        self._buckets[start] = bucket
        for noted, applies in (
            (self._unstored, any(run.stored is None for run in bucket.runs)),
            (self._hot, any(run.hot is not None for run in bucket.runs)),
            (self._crowded, len(bucket.runs) > 1),
        ):
            if applies:
                noted.add(start)
            else:
                noted.discard(start)
        if is_content:
            self._changed[start] = self.version

    def _remove(self, start: int) -> tuple[RunEntry, ...]:
        """Remove a bucket from everything but `_starts`, which the caller cuts at once."""
        self._derived.clear()
        runs = self._buckets.pop(start).runs
        for noted in (self._unstored, self._hot, self._crowded):
            noted.discard(start)
        self.version += 1
        self._changed[start] = self.version
        self._count(runs, -1)
        return runs

    def _count(self, runs: Sequence[RunEntry], sign: int = 1) -> None:
        for run in runs:
            self.total_rows += sign * run.rows
            self.total_charge += sign * run.charge
            self.total_bytes += sign * run.nbytes
        if min(self.total_rows, self.total_charge, self.total_bytes) < 0:
            raise InternalError(
                f"an index lost count: {self.total_rows} rows, {self.total_bytes} bytes, {self.total_charge} charged; "
                "restore the task from its last checkpoint and report this"
            )


# -- what an operator's state is ---------------------------------------------------------------------


class BucketIndexState(Protocol):
    """Anything that owns a `BucketIndex`."""

    @property
    def index(self) -> BucketIndex: ...


@runtime_checkable
class ProgressState(Protocol):
    """A state with its own progress: clocks, counters, positions.

    Storage keeps it as a named value of the task's `StateHandle` (namespace `progress`, named as the store).
    """

    def encode_progress(self) -> bytes:
        """Encode the present progress; called inside a checkpoint's cut, on the operator's thread."""

    def restore_progress(self, data: bytes) -> None:
        """Restore what `encode_progress` returned at the checkpoint; empty when there was none."""


class PlainState:
    """A minimal state: only an index."""

    def __init__(self, index: BucketIndex) -> None:
        self.index = index
