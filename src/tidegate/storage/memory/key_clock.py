"""Which keys of a task are in memory, how large they are there, and which were used longest ago.

One line of a flat table for each key hash with hot bytes (rows in the caches, state in the state cache); a line
vanishes with its last byte. Two keys that share a hash share a line: they are touched and chosen together.

K1  the bytes of a key are exactly what was added and not removed; below 0 raises.
K2  `coldest` never names a key in use (`hold`) and chooses by (last tick, bytes descending), in one pass of
    vector arithmetic: no sorting of all keys, no loop over keys in Python.
K3  a run that comes and goes without a choice in between costs nothing a key: arrivals and touches wait in a queue,
    and reach the table when somebody asks it something. A queued run is hot, so the queue holds no memory alive.
K4  the table's own memory is `nbytes`: at most 128 bytes a key (and one small table), given back when keys
    leave. Beyond `max_keys` the clock is `crowded`, and whoever relieves memory takes keys out.
K5  a run that goes leaves the queue alone, unless a run waits there whose keys are to keep their ticks (it was moved,
    not used): else every run that was brought into the table would bring in the next one, round by round for ever.

Safe from any thread: one lock, held for a kernel call or a vector pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidegate.errors import InternalError
from tidegate.kernels.key_clock import (
    BELOW_ZERO,
    ROWS,
    SLOT,
    STATE,
    add_bytes,
    drop,
    free_keys,
    look_up,
    rehash,
    touch,
)
from tidegate.storage.runs.run import Run

Hashes = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]

SMALLEST_SLOTS = 64
MOST_TOUCHES = 1024
MOST_TOUCHED_KEYS = 1 << 20
NO_HASHES: Hashes = np.empty(0, np.uint64)


class KeyTable:
    """Numbers by key hash, in a table that grows and shrinks. Not safe from several threads."""

    def __init__(self) -> None:
        self.count = 0
        self.slots = _slots(SMALLEST_SLOTS)
        self._progress = np.zeros(2, np.int64)

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes

    def add(self, hashes: Hashes, amounts: Int64s, column: int, tick: int) -> int:
        """Add amounts; −1 when all went well, else which one would go below 0: it and those behind it are not done."""
        keys, progress = _keys(hashes), self._progress
        progress[0] = 0
        while True:
            size = len(self.slots) // SLOT
            progress[1] = self.count
            status = add_bytes(self.slots, keys, amounts, column, tick, size * 3 // 4, progress)
            self.count = int(progress[1])
            if status == 0:
                self._fit()
                return -1
            at = int(progress[0])
            if status == BELOW_ZERO:
                return at
            while size * 3 // 4 < self.count + (len(keys) - at):  # all that are left may be new
                size *= 2
            self._resize(size)

    def touch(self, hashes: Hashes, tick: int) -> None:
        touch(self.slots, _keys(hashes), tick)

    def drop(self, hashes: Hashes) -> None:
        self.count -= int(drop(self.slots, _keys(hashes)))
        self._fit()

    def bytes_of(self, hashes: Hashes) -> Int64s:
        """Both byte counts of each key together, 0 for those that are not here."""
        found = np.empty(len(hashes), np.int64)
        look_up(self.slots, _keys(hashes), found)
        return found

    def total(self, column: int) -> int:
        return int(self.slots[column::SLOT].sum())

    def clear(self) -> None:
        self.count = 0
        self.slots = _slots(SMALLEST_SLOTS)

    def _fit(self) -> None:
        size = len(self.slots) // SLOT
        if size > SMALLEST_SLOTS and self.count * 4 < size:
            while size > SMALLEST_SLOTS and self.count * 4 < size:
                size //= 2
            self._resize(size)

    def _resize(self, size: int) -> None:
        other = _slots(size)
        rehash(self.slots, other)
        self.slots = other


@dataclass(slots=True)
class _Arrival:
    """Hot copies of one run that the table does not know yet."""

    run: Run
    weigh: Callable[[Run], Int64s]
    tick: int
    is_use: bool
    copies: int = 1


class KeyClock:
    """The keys of one task that have anything in memory."""

    def __init__(self, task: str, *, max_keys: int = 1 << 62) -> None:
        self.task = task
        self._max_keys = max_keys
        self._lock = threading.Lock()
        self._table = KeyTable()
        self._holds = KeyTable()
        self._single_holds: dict[int, int] = {}
        self._tick = 0
        self._settlers: list[Callable[[], None]] = []
        self._arrived: dict[int, _Arrival] = {}  # by the identity of the run
        self._arrived_keys = 0
        self._moved = 0  # arrivals that are no use: their keys keep the tick they have
        self._touched: list[tuple[Hashes, int]] = []
        self._touched_keys = 0
        self._groups: dict[int, Hashes] = {}  # arrays held as they are, by identity: mostly let go unseen
        self._used: dict[int, int] = {}  # keys touched one by one, and when: the table does not know it yet

    def settle_with(self, settle: Callable[[], None]) -> None:
        """Call `settle` before each choice, without locks: a cache that touches in batches hands them in."""
        self._settlers.append(settle)

    def tick(self) -> int:
        """Let time go on by one; the new tick."""
        with self._lock:
            self._tick += 1
            return self._tick

    def touch(self, hashes: Hashes, tick: int | None = None) -> None:
        """These keys were used, at `tick` (now). Keys without hot bytes are not remembered."""
        with self._lock:
            now = self._now(tick)
            if not self._arrived:
                self._table.touch(hashes, now)
                return
            self._touched.append((hashes, now))
            self._touched_keys += len(hashes)
            if len(self._touched) > MOST_TOUCHES or self._touched_keys > MOST_TOUCHED_KEYS:
                self._settle()

    def add_bytes(
        self, hashes: Hashes, nbytes: Int64s, tick: int | None = None, *, state: bool = False
    ) -> None:
        """These keys have so many more bytes in memory, of rows or of state; new ones were used at `tick`."""
        self._add(hashes, nbytes, tick, STATE if state else ROWS)

    def remove_bytes(self, hashes: Hashes, nbytes: Int64s, *, state: bool = False) -> None:
        """These keys have so many fewer; more than they have is an internal error."""
        self._add(hashes, -nbytes, None, STATE if state else ROWS)

    def add_run(
        self, run: Run, weigh: Callable[[Run], Int64s], tick: int | None = None, *, is_use: bool = False
    ) -> None:
        """A hot copy of the run came; `weigh` gives each key's bytes. `is_use`: its keys were used at `tick`."""
        with self._lock:
            now, known = self._now(tick), self._arrived.get(id(run))
            if known is not None:
                known.copies += 1
                self._moved -= is_use and not known.is_use
                known.tick, known.is_use = max(known.tick, now), known.is_use or is_use
                return
            self._arrived[id(run)] = _Arrival(run, weigh, now, is_use)
            self._arrived_keys += run.key_count
            self._moved += not is_use

    def remove_run(self, run: Run, weigh: Callable[[Run], Int64s]) -> None:
        """A hot copy of the run went: the very object that was added, or an equal one."""
        with self._lock:
            known = self._arrived.get(id(run))
            if known is not None:
                known.copies -= 1
                if known.copies == 0:
                    del self._arrived[id(run)]
                    self._arrived_keys -= run.key_count
                    self._moved -= not known.is_use
                return
            hashes, nbytes = run.hashes, -weigh(run)
            if not self._moved:  # K5
                at = self._table.add(hashes, np.ascontiguousarray(nbytes, np.int64), ROWS, self._tick)
                if at < 0:
                    return
                hashes, nbytes = hashes[at:], nbytes[at:]
        self._add(hashes, nbytes, None, ROWS)  # what is missing waits in the queue

    def drop(self, hashes: Hashes) -> None:
        """Forget keys, whatever they have."""
        with self._lock:
            self._settle()
            self._table.drop(hashes)

    def hold(self, hashes: Hashes) -> None:
        """These keys are in use until `unhold`; holds add up."""
        with self._lock:
            if len(hashes) == 1:  # a point read: a dict is several times faster than a kernel call
                key_hash = int(hashes[0])
                self._single_holds[key_hash] = self._single_holds.get(key_hash, 0) + 1
            elif id(hashes) in self._groups:
                self._holds.add(hashes, np.ones(len(hashes), np.int64), ROWS, 0)
            else:
                self._groups[id(hashes)] = hashes

    def unhold(self, hashes: Hashes) -> None:
        """End one hold of each key, however it was held: alone or with others.

        Quickest with the very array that was held: then nothing was ever looked up.
        """
        with self._lock:
            if self._groups.pop(id(hashes), None) is not None:
                return
            self._settle_groups()
            while len(hashes):
                if len(hashes) > 1 or int(hashes[0]) not in self._single_holds:
                    at = self._holds.add(hashes, np.full(len(hashes), -1, np.int64), ROWS, 0)
                    if at < 0:
                        return
                    hashes = hashes[at:]
                self._end_single(int(hashes[0]))
                hashes = hashes[1:]

    def begin_use(self, key_hash: int) -> None:
        """One key is touched now and in use until `end_use`: what a point read says, for a fifth of both calls."""
        with self._lock:
            holds = self._single_holds
            holds[key_hash] = holds.get(key_hash, 0) + 1
            self._used[key_hash] = self._tick
            if len(self._used) > MOST_TOUCHES:
                self._settle()

    def end_use(self, key_hash: int) -> None:
        """End what `begin_use` began."""
        with self._lock:
            self._end_single(key_hash)

    def is_held(self, key_hash: int) -> bool:
        with self._lock:
            self._settle_groups()
            in_group = self._holds.bytes_of(np.array([key_hash], np.uint64))[0]
            return bool(in_group) or key_hash in self._single_holds

    def coldest(
        self, need_bytes: int, in_use: Hashes = NO_HASHES, *, state: bool = False, need_keys: int = 0
    ) -> Hashes:
        """The keys to evict, ascending: the coldest that together have `need_bytes` of rows (or of state) and are
        at least `need_keys`; all there are when they have not so much. None of them is held or `in_use`."""
        for settle in self._settlers:
            settle()
        with self._lock:
            self._settle()
            self._settle_groups()
            lines = np.empty((3, self._table.count), np.int64)
            count = free_keys(
                self._table.slots,
                self._holds.slots,
                STATE if state else ROWS,
                0 if need_keys > 0 else 1,
                *lines,
            )
            alone = np.fromiter(self._single_holds, np.uint64, len(self._single_holds))
        keys, ticks, nbytes = lines[:, :count]
        hashes = keys.view(np.uint64)
        in_use = np.concatenate([in_use, alone])
        if len(in_use):
            kept = np.flatnonzero(~_is_in(hashes, in_use))
            hashes, ticks, nbytes = hashes[kept], ticks[kept], nbytes[kept]
        return np.sort(hashes[choose_coldest(ticks, nbytes, need_bytes, need_keys)])

    def bytes_of(self, hashes: Hashes) -> Int64s:
        """Bytes of rows and state of these keys, 0 for those that are not in memory."""
        with self._lock:
            self._settle()
            return self._table.bytes_of(hashes)

    def total_bytes(self, *, state: bool = False) -> int:
        """Bytes of rows (or of state) of all keys."""
        with self._lock:
            self._settle()
            return self._table.total(STATE if state else ROWS)

    @property
    def count(self) -> int:
        """Keys with anything in memory."""
        with self._lock:
            self._settle()
            return self._table.count

    @property
    def held(self) -> int:
        """Keys in use; one that is held both alone and with others counts twice."""
        with self._lock:
            self._settle_groups()
            return self._holds.count + len(self._single_holds)

    @property
    def nbytes(self) -> int:
        """The memory of the clock itself."""
        return self._table.nbytes + self._holds.nbytes

    @property
    def crowded(self) -> int:
        """How many keys too many are in memory, whatever room there is."""
        with self._lock:
            if self._table.count + self._arrived_keys > self._max_keys:  # or not: keys may be the same
                self._settle()
            return max(0, self._table.count - self._max_keys)

    def clear(self) -> None:
        """Forget all keys; holds stay, their holders end them."""
        with self._lock:
            self._table.clear()
            self._empty_queue()

    def _settle(self) -> None:
        """Bring the queue into the table; the lock is held."""
        for each in self._arrived.values():
            hashes = each.run.hashes
            self._table.add(hashes, each.copies * each.weigh(each.run), ROWS, each.tick)
            if each.is_use:
                self._table.touch(hashes, each.tick)
        for hashes, tick in self._touched:
            self._table.touch(hashes, tick)
        if self._used:
            used = np.fromiter(self._used, np.uint64, len(self._used))
            ticks = np.fromiter(self._used.values(), np.int64, len(self._used))
            for tick in np.unique(ticks).tolist():
                self._table.touch(used[ticks == tick], tick)
        self._empty_queue()

    def _settle_groups(self) -> None:
        """Look held arrays up after all: somebody asks for single keys of them. The lock is held."""
        while self._groups:
            _, hashes = self._groups.popitem()
            self._holds.add(hashes, np.ones(len(hashes), np.int64), ROWS, 0)

    def _empty_queue(self) -> None:
        self._used.clear()
        self._arrived.clear()
        self._touched.clear()
        self._arrived_keys = self._touched_keys = self._moved = 0

    def _add(self, hashes: Hashes, nbytes: Int64s, tick: int | None, column: int) -> None:
        with self._lock:
            if column == ROWS:
                self._settle()
            at = self._table.add(hashes, np.ascontiguousarray(nbytes, np.int64), column, self._now(tick))
        if at >= 0:
            what = "state" if column == STATE else "rows"
            raise InternalError(
                f"{-nbytes[at]} bytes of {what} leave memory for key hash {hashes[at]:016x} of task {self.task}, which "
                "has fewer; restart the worker from its last checkpoint"
            )

    def _end_single(self, key_hash: int) -> None:
        left = self._single_holds.pop(key_hash, 0) - 1
        if left > 0:
            self._single_holds[key_hash] = left
        elif left < 0:
            raise InternalError(
                f"key hash {key_hash:016x} of task {self.task} is released and nobody holds it"
            )

    def _now(self, tick: int | None) -> int:
        if tick is None:
            return self._tick
        self._tick = max(self._tick, tick)
        return tick


def choose_coldest(ticks: Int64s, nbytes: Int64s, need_bytes: int, need_keys: int) -> Int64s:
    """The places of the first keys by (tick, bytes descending) that cover both needs; all when nothing does."""
    if len(ticks) == 0 or (need_bytes <= 0 and need_keys <= 0):
        return np.empty(0, np.int64)
    steps, step_of = _steps(ticks)
    covered = np.cumsum(np.bincount(step_of, nbytes, steps).astype(np.int64)) >= need_bytes
    covered &= np.cumsum(np.bincount(step_of, minlength=steps)) >= need_keys
    last = int(np.argmax(covered)) if covered[-1] else steps
    older = np.flatnonzero(step_of < last)
    if last == steps:
        return older
    tied = np.flatnonzero(step_of == last)
    tied = tied[np.argsort(-nbytes[tied], kind="stable")]
    bytes_left = need_bytes - int(nbytes[older].sum())
    by_bytes = int(np.searchsorted(np.cumsum(nbytes[tied]), bytes_left)) + 1 if bytes_left > 0 else 0
    return np.concatenate([older, tied[: max(by_bytes, need_keys - len(older))]])


def _steps(ticks: Int64s) -> tuple[int, Int64s]:
    """Small numbers in the order of the ticks, from 0, and how many there are."""
    lowest = int(ticks.min())
    span = int(ticks.max()) - lowest + 1
    if span <= 4 * len(ticks) + 65_536:
        return span, ticks - lowest
    distinct, places = np.unique(ticks, return_inverse=True)
    return len(distinct), places


def _is_in(hashes: Hashes, wanted: Hashes) -> npt.NDArray[np.bool_]:
    ordered = np.sort(wanted)
    at = np.minimum(np.searchsorted(ordered, hashes), len(ordered) - 1)
    found: npt.NDArray[np.bool_] = ordered[at] == hashes
    return found


def _slots(size: int) -> Int64s:
    return np.zeros(SLOT * size, np.int64)


def _keys(hashes: npt.NDArray[np.uint64] | Int64s) -> Int64s:
    return np.ascontiguousarray(hashes).view(np.int64)
