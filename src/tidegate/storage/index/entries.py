"""What the index knows of a run and of a bucket. Both are values: a change makes a new one.

A run is *one* logical thing with up to two places: a hot copy in memory and a stored copy in a pack. Dumping
gives it the second, evicting takes the first away, rehydrating brings it back; none of them changes the
content, so a row can never be counted twice. Compaction replaces several runs by one.

A hot copy may hold only some keys (`complete` is false after a per-key eviction): every key it lists is there
with all its rows, every other key of the run is read from the stored copy. A run without a stored copy always
has a complete hot copy.

`order` is the run's turn inside its bucket: for `last`, the higher order wins. A merged run takes the highest
order of its inputs, and inputs are always neighbours in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count

from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Cursor

_TICKS = count(1)


def next_tick() -> int:
    """A number that was never given before in this process, larger than all others: an id, and a moment."""
    return next(_TICKS)


class Tenant(StrEnum):
    """Who in a task holds pool memory."""

    WRITE_BUFFER = "write_buffer"
    BASE_RUNS = "base_runs"
    STATE_CACHE = "state_cache"


@dataclass(frozen=True, slots=True)
class StoredRef:
    """A run's place on the backend: slot `slot` of the pack named `pack`. `nbytes` is what the run weighs."""

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
    """One run as the index sees it. `charge` is what it holds of the backlog budget."""

    bucket: int
    order: int
    rows: int
    keys: int
    nbytes: int
    charge: int
    min_ts: int
    max_ts: int
    base: bool = False  # came out of a compaction; a delta otherwise
    hot: HotCopy | None = None
    stored: StoredRef | None = None

    @property
    def is_hot(self) -> bool:
        """Readable without the backend, whatever the key."""
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
    """One accepted run that the index does not know yet: what the writer hands the operator to insert."""

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
    """What left the index, for the caller to drop, retire and give back. A run counts once, wherever it lay."""

    hot: tuple[HotCopy, ...] = ()
    stored: tuple[StoredRef, ...] = ()
    charge: int = 0
    rows: int = 0
    nbytes: int = 0
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexExport:
    """What a manifest keeps of an index. `mark` goes back to `BucketIndex.exported` once that manifest is safe.

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
    """The entry as a manifest keeps it."""
    return entry if entry.hot is None else replace(entry, hot=None)
