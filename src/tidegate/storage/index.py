"""The index of a store: its runs by bucket, the places of each run, and versions.

A run is one logical unit with up to two copies: a hot copy in memory and a stored copy in a pack. Dumping adds the
stored copy, evicting removes the hot one, rehydrating restores it. None of them changes the content, so a row is never
counted twice. Compaction replaces several runs by one. A hot copy may hold only some keys (`complete` is false after a
per-key eviction): each key it lists has all its rows; every other key of the run is read from the stored copy.

`order` is the run's position inside its bucket: for `last`, the higher order wins. A merged run takes the highest
order of its inputs, and inputs are always adjacent in order.

`BucketIndex` is the only owner of the run lists. Buckets are immutable values; a change replaces a `Bucket` under one
short lock, without IO or waiting. A reader of a `Bucket` therefore has a consistent snapshot of it and of its hot runs.
Stored runs must be pinned; `capture` pins them in the same critical section, so that no run can be deleted between
being found and being pinned.

X1  `data_version` of a bucket changes when rows are added or removed (insert, prune), `layout_version` when a publish
    or a change of places rearranges them. Both come from one counter of the index, so a bucket that was
    dropped and created again never repeats one.
X2  `publish` and `set_places` take effect only if both versions are the expected ones, and then completely.
X3  Counts equal the entries: rows, bytes and charge change together with the entry.
X4  Every run is readable: it has a stored copy or a complete hot one.
X5  Work is proportional to the buckets touched, never to all buckets (but for a full export).

`last` and `fold` count rows as stored: overwritten rows and unmerged partials count until a compaction. A violated rule
is an error of the caller and raised before anything changes; a lost compare-and-swap is not an error.

Thread rule: any thread, any method. The lock is a leaf but for `pin` in `capture`, which may take its own.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count, pairwise
from typing import Any, Protocol, TypeVar, runtime_checkable

from tidegate.errors import InternalError, InvalidError
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Cursor, Merge, StoreSpec

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
    def is_hot(self) -> bool:
        """Whether every key is readable without the backend."""
        return self.hot is not None and self.hot.complete


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """The runs of one time cell, ascending by order.

    `data_version` changes when the content does (append, prune), `layout_version` with every publish; both
    start at 1 and only grow, also across buckets that were dropped and made again (the index counts for all).
    """

    start: int
    runs: tuple[RunEntry, ...]
    data_version: int
    layout_version: int

    @property
    def row_count(self) -> int:
        """Rows as stored: for `fold` and `last`, partials and overwritten rows count until merged."""
        return sum(run.rows for run in self.runs)

    @property
    def max_ts(self) -> int:
        return max(run.max_ts for run in self.runs)


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
    min_cursor: Cursor
    max_cursor: Cursor


@dataclass(frozen=True, slots=True)
class Pruned:
    """The content removed from the index, for the caller to drop, retire and release. A run counts once."""

    hot: tuple[HotCopy, ...] = ()
    stored: tuple[StoredRef, ...] = ()
    charge: int = 0
    rows: int = 0
    nbytes: int = 0
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexExport:
    """The part of an index that a manifest stores. Pass `mark` to `BucketIndex.exported` once the manifest is durable.

    `changed` has every bucket that differs from the last confirmed export, with all its entries (no hot copies);
    `removed` the buckets that are gone since. A full export names every bucket and removes none.
    """

    mark: int
    next_order: int
    max_cursor: Cursor | None
    changed: dict[int, tuple[RunEntry, ...]]
    removed: tuple[int, ...]
    is_full: bool


def without_hot(entry: RunEntry) -> RunEntry:
    """The entry as a manifest stores it."""
    return entry if entry.hot is None else replace(entry, hot=None)


# -- rules of changes --------------------------------------------------------------------------------

MAX_DELTAS = 8
WORTH_MERGING = (
    4  # deltas below a quarter of their base wait: rewriting the base for them costs more than it saves
)


def pays_to_compact(bucket: Bucket, max_deltas: int = MAX_DELTAS) -> bool:
    """Whether merging the bucket's runs pays.

    Too many deltas always do. Fewer do when two hot runs overlap in time and the deltas together weigh
    enough beside the bases they would be merged into. Without deltas there is nothing to merge.
    """
    deltas = [run for run in bucket.runs if not run.base]
    if not deltas or len(bucket.runs) < 2:
        return False
    if len(deltas) > max_deltas:
        return True
    base_bytes = sum(run.nbytes for run in bucket.runs if run.base)
    if sum(run.nbytes for run in deltas) * WORTH_MERGING < base_bytes:
        return False
    spans = sorted((run.min_ts, run.max_ts) for run in bucket.runs if run.hot is not None)
    return any(after[0] <= before[1] for before, after in pairwise(spans))


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
        cells.setdefault(entry.bucket, []).append(without_hot(entry))
    return {start: tuple(sorted(cells[start], key=lambda run: run.order)) for start in sorted(cells)}


def pruned(runs: Sequence[RunEntry], emptied: Sequence[int]) -> Pruned:
    """The sums over these runs, each counted once."""
    return Pruned(
        hot=tuple(run.hot for run in runs if run.hot is not None),
        stored=tuple(run.stored for run in runs if run.stored is not None),
        charge=sum(run.charge for run in runs),
        rows=sum(run.rows for run in runs),
        nbytes=sum(run.nbytes for run in runs),
        buckets=tuple(emptied),
    )


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


# -- totals ------------------------------------------------------------------------------------------


class Totals:
    """Rows, bytes and charge of all runs; none ever falls below zero."""

    __slots__ = ("charge", "nbytes", "rows", "runs")

    def __init__(self) -> None:
        self.rows = self.charge = self.nbytes = self.runs = 0

    def add(self, runs: Sequence[RunEntry]) -> None:
        self._change(runs, 1)

    def take(self, runs: Sequence[RunEntry]) -> None:
        self._change(runs, -1)
        if min(self.rows, self.charge, self.nbytes, self.runs) < 0:
            raise InternalError(
                f"an index lost count: {self.runs} runs with {self.rows} rows, {self.nbytes} bytes, "
                f"{self.charge} charged; restore the task from its last checkpoint and report this"
            )

    def _change(self, runs: Sequence[RunEntry], sign: int) -> None:
        for run in runs:
            self.rows += sign * run.rows
            self.charge += sign * run.charge
            self.nbytes += sign * run.nbytes
        self.runs += sign * len(runs)


class Noted:
    """Buckets with a run that is not stored, with a hot copy, and with more than one run."""

    __slots__ = ("crowded", "hot", "unstored")

    def __init__(self) -> None:
        self.unstored: set[int] = set()
        self.hot: set[int] = set()
        self.crowded: set[int] = set()

    def note(self, bucket: Bucket) -> None:
        """Record the bucket's present content."""
        self.forget(bucket.start)
        if any(run.stored is None for run in bucket.runs):
            self.unstored.add(bucket.start)
        if any(run.hot is not None for run in bucket.runs):
            self.hot.add(bucket.start)
        if len(bucket.runs) > 1:
            self.crowded.add(bucket.start)

    def forget(self, start: int) -> None:
        """Remove the bucket."""
        for noted in (self.unstored, self.hot, self.crowded):
            noted.discard(start)


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
        self._version = self._data_version = 0
        self._next_order = 0
        self._max_cursor: Cursor | None = None
        self._totals = Totals()
        self._noted = Noted()
        self._changed: dict[
            int, int
        ] = {}  # buckets changed since the last manifest: the version of their last change
        self._derived: dict[tuple[int, int], Any] = {}

    # ── looking ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def version(self) -> int:
        """Increases with every change of any bucket."""
        return self._version

    @property
    def data_version(self) -> int:
        """Increases when rows are added or removed; merges and changes of places do not count."""
        return self._data_version

    @property
    def is_exported(self) -> bool:
        """Whether nothing changed since the last confirmed export, or the manifest this was loaded from."""
        return not self._changed and not self._noted.unstored

    @property
    def total_rows(self) -> int:
        return self._totals.rows

    @property
    def total_charge(self) -> int:
        """The backlog that all runs hold; a restore acquires it again."""
        return self._totals.charge

    @property
    def total_bytes(self) -> int:
        return self._totals.nbytes

    @property
    def run_count(self) -> int:
        return self._totals.runs

    @property
    def bucket_count(self) -> int:
        return len(self._starts)

    @property
    def max_cursor(self) -> Cursor | None:
        """The highest cursor ever inserted; pruning does not lower it."""
        return self._max_cursor

    def snapshot(self, bucket: int) -> Bucket | None:
        """The present bucket, None when it has no runs."""
        return self._buckets.get(bucket)

    def all_buckets(self) -> list[int]:
        with self._lock:
            return list(self._starts)

    def newest_buckets(self, count: int) -> list[int]:
        """Ascending starts of the newest `count` buckets."""
        with self._lock:
            return self._starts[-count:] if count > 0 else []

    def unstored_buckets(self) -> list[int]:
        """Ascending starts of buckets with a run that is not stored yet."""
        with self._lock:
            return sorted(self._noted.unstored)

    def hot_buckets(self) -> list[int]:
        """Ascending starts of buckets with a hot copy, complete or not."""
        with self._lock:
            return sorted(self._noted.hot)

    def crowded_buckets(self) -> list[int]:
        """Ascending starts of buckets with more than one run: the candidates of compaction."""
        with self._lock:
            return sorted(self._noted.crowded)

    def query(self, start: int, end: int) -> list[Bucket]:
        """Buckets whose *starts* lie in start … end, both inclusive, ascending."""
        with self._lock:
            return [self._buckets[each] for each in self._between(start, end)]

    def buckets(self, start_ts: int, end_ts: int) -> list[Bucket]:
        """Buckets that may hold a row with start_ts ≤ ts ≤ end_ts, ascending."""
        with self._lock:
            return [self._buckets[each] for each in self._between(self.spec.bucket_of(start_ts), end_ts)]

    def should_compact(self, bucket: int, *, max_deltas: int = MAX_DELTAS) -> bool:
        """Whether merging this bucket's runs pays: `pays_to_compact`."""
        found = self._buckets.get(bucket)
        return found is not None and pays_to_compact(found, max_deltas)

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
            if version == self._version:
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
                self._version += 1
                old = self._buckets.get(part.bucket)
                if old is None:
                    new = Bucket(part.bucket, (entry,), self._version, self._version)
                else:
                    new = Bucket(part.bucket, (*old.runs, entry), self._version, old.layout_version)
                self._put(new)
                self._totals.add((entry,))
                if self._max_cursor is None or part.max_cursor > self._max_cursor:
                    self._max_cursor = part.max_cursor
                entries.append(entry)
            self._data_version = self._version
        return entries

    def publish(
        self,
        bucket: int,
        data_version: int,
        layout_version: int,
        old: Sequence[RunEntry],
        new: Sequence[RunEntry],
    ) -> bool:
        """Replace `old` by `new` if the bucket still has these versions; False: nothing changed.

        `old` are adjacent entries of the bucket; `new` hold the same content. Several new entries may share one
        order: then they are disjoint pieces of one merge. `new` may be empty when only tombstones with nothing to
        hide were merged.
        """
        check_replacement(self.spec, bucket, old, new)
        with self._lock:
            found = self._buckets.get(bucket)
            if found is None or (found.data_version, found.layout_version) != (data_version, layout_version):
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
            self._version += 1
            self._put(Bucket(bucket, runs, found.data_version, self._version))
            self._totals.take(old)
            self._totals.add(new)
            return True

    def set_places(
        self, bucket: int, data_version: int, layout_version: int, pairs: Iterable[tuple[RunEntry, RunEntry]]
    ) -> bool:
        """Replace each first entry by the second, which differs in `hot` and `stored` only; as `publish` does."""
        wanted = list(pairs)
        check_places(self.spec, bucket, wanted)
        changes = {id(old): new for old, new in wanted}
        with self._lock:
            found = self._buckets.get(bucket)
            if found is None or (found.data_version, found.layout_version) != (data_version, layout_version):
                return False
            if not changes:
                return True
            if changes.keys() - {id(run) for run in found.runs}:
                raise InvalidError(f"store {self.spec.name}, bucket {bucket}: the run to place is not in it")
            is_stored_anew = any(old.stored != new.stored for old, new in wanted)
            runs = tuple(changes.get(id(run), run) for run in found.runs)
            self._version += 1
            self._put(Bucket(bucket, runs, found.data_version, self._version), is_content=is_stored_anew)
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
                    self._version += 1
                    self._put(Bucket(boundary, kept, self._version, straddled.layout_version))
                    self._totals.take(dropped)
                gone += dropped
            del self._starts[: len(emptied)]
            if gone:
                self._data_version = self._version
            return pruned(gone, emptied)

    def drop_segments(self, before: int) -> Pruned:
        """Drop the time segments that end at or before `before`, whole."""
        return self.prune(self.spec.segment_of(before))

    # ── manifests ────────────────────────────────────────────────────────────────────────────────────────────

    def export(self, *, full: bool = False) -> IndexExport:
        """The changes since the last confirmed export, or everything. Every run must be stored."""
        with self._lock:
            if self._noted.unstored:
                raise InvalidError(
                    f"store {self.spec.name}: {len(self._noted.unstored)} buckets hold runs that are only in memory; "
                    f"store them before exporting the index"
                )
            wanted = self._starts if full else sorted(self._changed)
            return IndexExport(
                mark=self._version,
                next_order=self._next_order,
                max_cursor=self._max_cursor,
                changed={
                    start: tuple(without_hot(run) for run in self._buckets[start].runs)
                    for start in wanted
                    if start in self._buckets
                },
                removed=() if full else tuple(start for start in wanted if start not in self._buckets),
                is_full=full,
            )

    def exported(self, mark: int) -> None:
        """Confirm the export with this mark: later exports omit its content."""
        with self._lock:
            self._changed = {start: at for start, at in self._changed.items() if at > mark}

    def load(self, entries: Iterable[RunEntry], *, next_order: int, max_cursor: Cursor | None) -> Pruned:
        """Replace everything by the stored runs of a manifest; returns the previous content."""
        cells = stored_cells(self.spec, entries, next_order)
        with self._lock:
            gone = [run for bucket in self._buckets.values() for run in bucket.runs]
            emptied = self._starts
            self._buckets, self._starts = {}, []
            self._derived.clear()
            self._totals, self._noted = Totals(), Noted()
            self._version += 1
            for start, runs in cells.items():
                self._put(Bucket(start, runs, self._version, self._version))
                self._totals.add(runs)
            self._changed = {}
            self._data_version = self._version
            self._next_order, self._max_cursor = next_order, max_cursor
            return pruned(gone, emptied)

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
        self._noted.note(bucket)
        if is_content:
            self._changed[start] = self._version

    def _remove(self, start: int) -> tuple[RunEntry, ...]:
        """Remove a bucket from everything but `_starts`, which the caller cuts at once."""
        self._derived.clear()
        runs = self._buckets.pop(start).runs
        self._noted.forget(start)
        self._version += 1
        self._changed[start] = self._version
        self._totals.take(runs)
        return runs


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
        self._index = index

    @property
    def index(self) -> BucketIndex:
        return self._index
