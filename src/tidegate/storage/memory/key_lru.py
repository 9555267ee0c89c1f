"""The LRU order of a task's keys, and the buckets that are read from packs repeatedly.

Only recency is stored. A key's bytes are summed when relief chooses (`hot_keys`), from the hot runs it visits anyway.
Two keys that share a hash are touched and chosen together. A key's last use is its last read or write: a hot copy's id
gives the time of its creation, and ids and ticks come from one counter. Copies not made by a write (merged, rehydrated,
shrunk) do not count as a use of keys whose last use is known. A reader keeps the runs it reads alive by itself.

K1  `coldest` chooses by (last use, bytes descending), in vector passes: no loop over keys in Python.
K2  a touch costs an append to a list; touches are sorted when relief chooses. At most `MOST_TOUCHED_KEYS` are queued:
    beyond that the oldest are dropped, and those keys count as used when they were last written.

Safe from any thread: one lock each, held for a list operation or a vector pass.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidegate.storage.index import HotCopy, Tenant, next_tick
from tidegate.storage.runs.columns import sorted_marks
from tidegate.storage.runs.run import Run

# -- buckets read cold -------------------------------------------------------------------------------

OFTEN = 8  # cold loads of a bucket before it is rehydrated
MOST_BUCKETS = 4096


class ColdReads:
    """The cold reads of one store, by bucket: a load counts once for each bucket of which it read a stored run.

    Maintenance takes the candidates for rehydration. A rehydrated bucket is *kept*: periodic dumps skip its hot copies,
    until relief drops them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._kept: set[int] = set()

    def note(self, buckets: Iterable[int]) -> None:
        """Count a load that read stored runs of these buckets."""
        with self._lock:
            for bucket in buckets:
                if bucket in self._counts or len(self._counts) < MOST_BUCKETS:
                    self._counts[bucket] = self._counts.get(bucket, 0) + 1
                    self._fresh.add(bucket)

    def take(self) -> list[int]:
        """Return the buckets to rehydrate, most read first, and reset their counts; drop counts of unread buckets."""
        with self._lock:
            often = [bucket for bucket, count in self._counts.items() if count >= OFTEN]
            often.sort(key=lambda bucket: (-self._counts[bucket], bucket))
            self._counts = {
                bucket: count
                for bucket, count in self._counts.items()
                if bucket in self._fresh and count < OFTEN
            }
            self._fresh.clear()
            return often

    def keep(self, bucket: int) -> None:
        """Mark the bucket as rehydrated."""
        with self._lock:
            self._kept.add(bucket)

    def kept(self, hot: Collection[int]) -> frozenset[int]:
        """The rehydrated buckets among those with a hot copy; others lose their mark."""
        with self._lock:
            self._kept.intersection_update(hot)
            return frozenset(self._kept)

    def clear(self) -> None:
        """Reset, because the store was restored."""
        with self._lock:
            self._counts.clear()
            self._fresh.clear()
            self._kept.clear()


# -- keys by last use --------------------------------------------------------------------------------

Hashes = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
MOST_TOUCHED_KEYS = 1 << 20
MOST_SINGLE_USES = 1024
NO_HASHES: Hashes = np.empty(0, np.uint64)
NO_NUMBERS: Int64s = np.empty(0, np.int64)


class HotKeys(NamedTuple):
    """Keys in memory by ascending hash: their bytes, when they were last written, and when a copy was last made."""

    hashes: Hashes
    nbytes: Int64s
    written: Int64s
    made: Int64s


def hot_keys(copies: Iterable[HotCopy]) -> HotKeys:
    """The bytes and last ticks of each key in these hot copies."""
    hashes: list[Hashes] = []
    nbytes: list[Int64s] = []
    written: list[Int64s] = []
    made: list[Int64s] = []
    for hot in copies:
        count = hot.run.key_count
        hashes.append(hot.run.hashes)
        nbytes.append(bytes_by_key(hot.run))
        is_write = hot.tenant is Tenant.WRITE_BUFFER and hot.complete
        written.append(np.full(count, hot.id if is_write else 0, np.int64))
        made.append(np.full(count, hot.id, np.int64))
    return key_weights(hashes, nbytes, written, made)


def key_weights(
    hashes: list[Hashes],
    nbytes: list[Int64s],
    written: list[Int64s] | None = None,
    made: list[Int64s] | None = None,
) -> HotKeys:
    """Sum each key's bytes over all pieces; without ticks, only touches give a key's last use."""
    keys, starts, order = _grouped(np.concatenate([NO_HASHES, *hashes]))
    if not len(keys):
        return HotKeys(NO_HASHES, NO_NUMBERS, NO_NUMBERS, NO_NUMBERS)
    never = np.zeros(len(keys), np.int64)
    return HotKeys(
        keys,
        np.add.reduceat(np.concatenate(nbytes)[order], starts),
        never if written is None else np.maximum.reduceat(np.concatenate(written)[order], starts),
        never if made is None else np.maximum.reduceat(np.concatenate(made)[order], starts),
    )


def bytes_by_key(run: Run) -> Int64s:
    """The bytes of each key of a run: its rows' share of the run's bytes."""
    return np.diff(run.starts).astype(np.int64) * max(1, run.nbytes // max(1, run.row_count))


class KeyLru:
    """The keys of one task."""

    def __init__(self, task: str) -> None:
        self.task = task
        self._lock = threading.Lock()
        self._settlers: list[Callable[[], None]] = []
        self._known: tuple[Hashes, Int64s] = (NO_HASHES, NO_NUMBERS)  # last uses, as of the last choice
        self._touched: deque[tuple[Hashes, Int64s]] = deque()  # a tick for each key, or one for all
        self._touched_keys = 0
        self._used: dict[int, None] = {}  # keys used one by one, not among the touched yet

    def settle_with(self, settle: Callable[[], None]) -> None:
        """Register a callback that passes pending touches; called before each choice, without locks."""
        self._settlers.append(settle)

    def touch(self, hashes: Hashes, *, in_order: bool = False) -> None:
        """Record a use of these keys: at the same tick, or in order."""
        with self._lock:
            self._queue_used()  # those came before
            own = hashes if hashes.base is None else hashes.copy()  # a view keeps its whole array alive
            self._queue(own, in_order=in_order)

    def touch_one(self, key_hash: int) -> None:
        """Record a use of one key; for point reads."""
        with self._lock:
            self._used[key_hash] = None
            if len(self._used) > MOST_SINGLE_USES:
                self._queue_used()

    def coldest(self, keys: HotKeys, need_bytes: int) -> Hashes:
        """The keys to evict, ascending: the coldest that together have `need_bytes`; all if they have not so much."""
        for settle in self._settlers:
            settle()
        with self._lock:
            ticks = self._last_uses(keys)
        return np.sort(keys.hashes[choose_coldest(ticks, keys.nbytes, need_bytes)])

    def clear(self) -> None:
        """Drop all recorded uses."""
        with self._lock:
            self._known = (NO_HASHES, NO_NUMBERS)
            self._touched.clear()
            self._touched_keys = 0
            self._used.clear()

    def _queue_used(self) -> None:
        if self._used:
            self._queue(np.fromiter(self._used, np.uint64, len(self._used)))
            self._used.clear()

    def _queue(self, hashes: Hashes, *, in_order: bool = False) -> None:
        ticks = np.fromiter((next_tick() for _ in range(len(hashes) if in_order else 1)), np.int64)
        self._touched.append((hashes, ticks))
        self._touched_keys += len(hashes)
        while self._touched_keys > MOST_TOUCHED_KEYS and len(self._touched) > 1:
            self._touched_keys -= len(self._touched.popleft()[0])

    def _last_uses(self, keys: HotKeys) -> Int64s:
        """Each key's last use, cached for the next choice."""
        self._queue_used()
        recent, lately = _latest(
            [hashes for hashes, _ in self._touched],
            [np.broadcast_to(ticks, len(hashes)) for hashes, ticks in self._touched],
        )
        used = np.maximum(keys.written, _looked_up(keys.hashes, *self._known))
        used = np.maximum(used, _looked_up(keys.hashes, recent, lately))
        used = np.where(used > 0, used, keys.made)
        known, ticks = _latest([self._known[0], keys.hashes, recent], [self._known[1], used, lately])
        most = 2 * max(len(keys.hashes), MOST_TOUCHED_KEYS)
        if len(known) > most:  # includes keys no longer in memory: keep the most recently used
            newest = np.sort(np.argpartition(ticks, len(ticks) - most // 2)[len(ticks) - most // 2 :])
            known, ticks = known[newest], ticks[newest]
        self._known = known, ticks
        self._touched.clear()
        self._touched_keys = 0
        return used


def choose_coldest(ticks: Int64s, nbytes: Int64s, need_bytes: int) -> Int64s:
    """The indices of the first keys by (tick, bytes descending) that cover the need, or of all."""
    if len(ticks) == 0 or need_bytes <= 0:
        return NO_NUMBERS
    steps, step_of = _steps(ticks)
    covered = np.cumsum(np.bincount(step_of, nbytes, steps).astype(np.int64)) >= need_bytes
    if not covered[-1]:
        return np.arange(len(ticks))
    last = int(np.argmax(covered))
    older, tied = np.flatnonzero(step_of < last), np.flatnonzero(step_of == last)
    tied = tied[np.argsort(-nbytes[tied], kind="stable")]
    bytes_left = need_bytes - int(nbytes[older].sum())
    return np.concatenate([older, tied[: int(np.searchsorted(np.cumsum(nbytes[tied]), bytes_left)) + 1]])


def _steps(ticks: Int64s) -> tuple[int, Int64s]:
    """Small numbers in the order of the ticks, from 0, and how many there are."""
    lowest = int(ticks.min())
    span = int(ticks.max()) - lowest + 1
    if span <= 4 * len(ticks) + 65_536:
        return span, ticks - lowest
    distinct, places = np.unique(ticks, return_inverse=True)
    return len(distinct), places


def _grouped(hashes: Hashes) -> tuple[Hashes, Int64s, Int64s]:
    """Distinct hashes, ascending; where each begins in the order that sorts them; that order."""
    row_bits = max(1, (len(hashes) - 1).bit_length())
    rows = np.uint64((1 << row_bits) - 1)
    marks = sorted_marks((hashes & ~rows) | np.arange(len(hashes), dtype=np.uint64), 0, row_bits)
    order = (marks & rows).astype(np.int64)
    ordered = hashes[order]
    if np.any(ordered[1:] < ordered[:-1]):  # two keys that differ only in the bits of the row
        order = np.argsort(hashes, kind="stable")
        ordered = hashes[order]
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(is_first)
    return ordered[starts], starts, order


def _latest(hashes: list[Hashes], ticks: list[Int64s]) -> tuple[Hashes, Int64s]:
    """Distinct hashes, ascending, each with its highest tick."""
    known, starts, order = _grouped(np.concatenate([NO_HASHES, *hashes]))
    if not len(known):
        return NO_HASHES, NO_NUMBERS
    return known, np.maximum.reduceat(np.concatenate(ticks)[order], starts)


def _looked_up(hashes: Hashes, known: Hashes, numbers: Int64s) -> Int64s:
    """The number of each hash among those known, ascending; 0 for others."""
    if not len(known):
        return np.zeros(len(hashes), np.int64)
    at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return np.where(known[at] == hashes, numbers[at], 0)
