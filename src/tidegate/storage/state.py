"""Operator state: one value per key in a cache over a store of blobs, and a few named values in the task's manifest.

`StateHandle` is what an operator sees: the `StateCache` of one task and namespace, plus named values. All callers of
one task and namespace get the same handle. Every resident value is in the pool (tenant `STATE_CACHE`); the task's key
LRU and maintenance decide when keys are evicted; the *shelf* (`StateStore`) has their blobs.

T1  a key that is not resident is *loaded*, never created while the shelf has it (INV-20); there is one load of a key
    at a time, and all callers get the same object.
T2  a value is dirty while its version is above the version the shelf has. The version is read before encoding, so a
    change during a flush leaves the value dirty.
T3  a value leaves memory only when it is clean and not held. A failed flush drops nothing. Deletion is explicit, and is
    itself dirty until it is flushed.
T4  writes to the shelf are in order: one at a time (`_writes`). Eviction that finds a write under way leaves dirty
    values alone instead of waiting, so relief that is called from inside a write cannot deadlock.
N1  a named value is an operator's progress. Its `keep` function is called inside a checkpoint's cut, so the value is
    consistent with the rows. Without a function it stays as in the restored checkpoint. It is charged to the pool, too.

Thread rule: any thread may use keys; values are changed by the operator's thread only, inside `use` or while no other
thread runs maintenance. While the shelf works, and while values are encoded, decoded or made, no lock is held but
`_writes`. Named values belong to the operator's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError, OverloadError
from tidegate.storage.index import Tenant
from tidegate.storage.memory.key_lru import HotKeys, key_weights
from tidegate.storage.memory.pool import WorkerMemoryPool
from tidegate.storage.runs.columns import BinaryParts, hash_parts

if TYPE_CHECKING:
    from tidegate.storage.parts import TaskStorage

# -- values by name ----------------------------------------------------------------------------------

PROGRESS = "progress"  # the namespace of operators' progress; the name is that of the operator's store
_PREFIX = "state/"


def progress_name(store: str) -> str:
    """The name of the progress value of a store's state."""
    return f"{PROGRESS}/{store}"


def extra_name(store: str) -> str:
    """The key of that value in a manifest."""
    return _PREFIX + progress_name(store)


class NamedValues:
    """Blobs by `<namespace>/<name>` as of the last checkpoint, and the functions that encode their present values."""

    def __init__(self, task: str, pool: WorkerMemoryPool) -> None:
        self._task = task
        self._pool = pool
        self._blobs: dict[str, bytes] = {}
        self._keepers: dict[str, Callable[[], bytes]] = {}

    def keep(self, name: str, encode: Callable[[], bytes]) -> None:
        """Register `encode` as the source of the value; this alone does not count as a change."""
        self._keepers[name] = encode
        self.saved({**self._blobs, name: encode()})

    def get(self, name: str) -> bytes | None:
        """The value as of the last checkpoint, restore or `keep`."""
        return self._blobs.get(name)

    def ask(self) -> dict[str, bytes]:
        """The present values."""
        return {**self._blobs, **{name: encode() for name, encode in self._keepers.items()}}

    def is_saved(self) -> bool:
        """Whether all values equal those of the last checkpoint."""
        return self.ask() == self._blobs

    def saved(self, values: Mapping[str, bytes]) -> None:
        """Record the values of a completed checkpoint."""
        growth = _size(values) - _size(self._blobs)
        self._blobs = dict(values)
        _charge(self._pool, self._task, growth)

    def load(self, extras: Mapping[str, bytes]) -> None:
        """Replace all values by those of a manifest; registered functions stay."""
        self.saved(
            {name.removeprefix(_PREFIX): blob for name, blob in extras.items() if name.startswith(_PREFIX)}
        )

    def drop(self, name: str) -> None:
        """Remove a value and its function."""
        self._keepers.pop(name, None)
        self.saved({other: blob for other, blob in self._blobs.items() if other != name})


def extras_of(values: Mapping[str, bytes]) -> dict[str, bytes]:
    """The values under their manifest keys."""
    return {_PREFIX + name: blob for name, blob in values.items()}


def _size(values: Mapping[str, bytes]) -> int:
    return sum(len(name) + len(blob) for name, blob in values.items())


def _charge(pool: WorkerMemoryPool, task: str, growth: int) -> None:
    if growth > 0:
        pool.reserve_over_limit(task, Tenant.STATE_CACHE, growth)
    elif growth < 0:
        pool.release(task, Tenant.STATE_CACHE, -growth)


# -- values by key -----------------------------------------------------------------------------------

Value = TypeVar("Value")
ENTRY_BYTES = 256  # Python's overhead of a resident entry besides key and value
TOUCHES = 256  # touches passed to the key LRU at once


class StateCodec(Protocol[Value]):
    """Encodes and decodes an operator's state of one key. Blobs outlive the program: version them."""

    def encode(self, value: Value) -> bytes: ...

    def decode(self, blob: bytes) -> Value: ...

    def estimate(self, value: Value) -> int:
        """Estimate the bytes the value needs in memory."""


class BytesCodec:
    """State that is bytes already."""

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, blob: bytes) -> bytes:
        return blob

    def estimate(self, value: bytes) -> int:
        return len(value)


class Entry(Generic[Value]):
    """One resident value. It is dirty while its version is not the one the shelf has (`saved`)."""

    __slots__ = ("encoding", "hash", "holders", "nbytes", "saved", "value", "version")

    def __init__(self, value: Value, key_hash: int) -> None:
        self.value = value
        self.hash = key_hash
        self.version = self.saved = self.nbytes = self.holders = 0
        self.encoding = False


class Held(Generic[Value]):
    """A value inside `use`: change it in place and call `changed`, or set another."""

    def __init__(self, cache: StateCache[Value], key: bytes, entry: Entry[Value]) -> None:
        self._cache = cache
        self._key = key
        self._entry = entry

    @property
    def value(self) -> Value:
        return self._entry.value

    def set(self, value: Value) -> None:
        self._cache.put(self._key, value)

    def changed(self) -> None:
        """Mark the value as changed in place."""
        self._cache.mark_dirty(self._key)


class StateCache(Generic[Value]):
    """The values of one (task, namespace): resident objects in front of a store of blobs."""

    def __init__(self, storage: TaskStorage, namespace: str, codec: StateCodec[Value]) -> None:
        self.task = storage.task
        self.namespace = namespace
        self.codec = codec
        self._storage, self._parts, self._key_lru = storage, storage.parts, storage.key_lru
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._writes = threading.Lock()
        self._entries: dict[bytes, Entry[Value]] = {}
        self._dirty: dict[bytes, None] = {}
        self._deleted: dict[bytes, None] = {}
        self._by_hash: dict[int, tuple[bytes, ...]] = {}
        self._touched: list[int] = []  # pending touches, passed to the key LRU in batches
        self._flights: dict[bytes, bool] = {}  # keys that are loaded now: whether one changed meanwhile
        self._versions = count(1)  # never repeat
        self._key_lru.settle_with(self._settle)

    # -- one key ---------------------------------------------------------------------------------

    def get(self, key: bytes) -> Value | None:
        """Return the value, loaded if not resident; None when there is none."""
        entry = self._entry(key, None, hold=False)
        return None if entry is None else entry.value

    def get_or_load(self, key: bytes, make: Callable[[], Value]) -> Value:
        """Return the value, loaded if not resident, created (and dirty) by `make` when there is none."""
        return cast("Entry[Value]", self._entry(key, make, hold=False)).value

    get_or_insert = get_or_load  # a key that is only not resident must not be created anew

    @contextmanager
    def use(self, key: bytes, make: Callable[[], Value]) -> Iterator[Held[Value]]:
        """As `get_or_load`; keep the value in memory until the block ends, to change it in place."""
        entry = cast("Entry[Value]", self._entry(key, make, hold=True))
        try:
            yield Held(self, key, entry)
        finally:
            with self._lock:
                entry.holders -= 1

    def put(self, key: bytes, value: Value) -> None:
        """Set the value."""
        with self._lock:
            self._disturb(key)
            entry = self._entries.get(key)
            if entry is None:
                self._install(key, value, clean=False)
            else:
                entry.value = value
                self._renew(key, entry)

    def mark_dirty(self, key: bytes) -> None:
        """Mark the resident value as changed in place; its size is estimated again."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                raise InvalidError(
                    f"state {self.namespace} of task {self.task}: key {key!r} is marked dirty and not resident, so "
                    "the change may be lost; change values inside `use`, or hand the value to `put`"
                )
            self._renew(key, entry)

    def delete(self, key: bytes) -> None:
        """Delete the value: from memory now, from the shelf with the next flush."""
        with self._lock:
            self._disturb(key)
            self._discard([key])
            self._deleted[key] = None

    # -- saving ----------------------------------------------------------------------------------

    def flush(self, key: bytes) -> int:
        """Save one key, if it is dirty; returns how many values were written."""
        with self._writes:
            return self._flush([key], held=True)

    def flush_all(self) -> int:
        """Save every dirty key; returns how many there were."""
        with self._writes:
            return self._flush(None, held=True)

    def flush_hashes(self, hashes: npt.NDArray[np.uint64]) -> int:
        """Save the dirty values of these key hashes that are not held; returns how many were written.

        Writes nothing while another write is under way (T4).
        """
        with self._lock:
            keys = [key for key in self._idle(hashes) if key in self._dirty]
        if not keys or not self._writes.acquire(blocking=False):
            return 0
        try:
            return self._flush(keys, held=False)
        finally:
            self._writes.release()

    def evict(self, hashes: npt.NDArray[np.uint64]) -> int:
        """Evict the values of these key hashes, saving dirty ones first; returns the bytes freed.

        Held values stay, and so do dirty ones while another write is under way.
        """
        self.flush_hashes(hashes)
        with self._lock:
            return self._discard([key for key in self._idle(hashes) if key not in self._dirty])

    def clear(self) -> None:
        """Drop everything, saved or not, because the task is restored or leaves the worker."""
        with self._writes, self._lock:
            self._discard(list(self._entries))
            self._deleted.clear()
            self._touched.clear()
            self._flights = dict.fromkeys(self._flights, True)

    # -- what others may know --------------------------------------------------------------------

    def __len__(self) -> int:
        """Resident values."""
        return len(self._entries)

    @property
    def dirty(self) -> int:
        """Changes the shelf does not have yet, deletions included."""
        return len(self._dirty) + len(self._deleted)

    def weights(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Hash and bytes of every resident value that is not held."""
        with self._lock:
            entries = [entry for entry in self._entries.values() if not entry.holders]
        return (
            np.fromiter((entry.hash for entry in entries), np.uint64, len(entries)),
            np.fromiter((entry.nbytes for entry in entries), np.int64, len(entries)),
        )

    # -- loading ---------------------------------------------------------------------------------

    def _entry(self, key: bytes, make: Callable[[], Value] | None, *, hold: bool) -> Entry[Value] | None:
        clock = self._parts.clock
        deadline_ms = clock.monotonic_ms() + self._parts.config.load_timeout_ms
        while True:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None and not (hold and entry.encoding):
                    return self._used(entry, hold=hold)
                if entry is not None or key in self._flights:
                    self._wait(key, deadline_ms - clock.monotonic_ms())
                    continue
                gone = key in self._deleted
                if gone and make is None:
                    return None
                self._flights[key] = False
            try:
                blob = None if gone else self._load(key)
                made: Any = make() if blob is None and make is not None else None
                value = made if blob is None else self.codec.decode(blob)
                with self._lock:
                    if self._flights[key]:
                        continue  # the key changed meanwhile
                    if blob is None and make is None:
                        return None
                    return self._used(self._install(key, value, clean=blob is not None), hold=hold)
            finally:
                with self._lock:
                    del self._flights[key]
                    self._changed.notify_all()

    def _load(self, key: bytes) -> bytes | None:
        found, blobs = self._parts.shelf.read(self.task, self.namespace, pa.array([key], pa.binary()))
        return blobs[0].as_py() if found[0] else None

    def _wait(self, key: bytes, left_ms: int) -> None:
        """Wait until a load or an encoding ends."""
        if left_ms <= 0:
            self._parts.stats.overloaded(self.task, "state_load")
            raise OverloadError(
                f"state {self.namespace} of task {self.task}: another thread's load of key {key!r} did not end in "
                f"{self._parts.config.load_timeout_ms} ms. Retry; if it stays so, look at the backend, or raise "
                "load_timeout_ms",
                reason="state_load",
            )
        self._parts.clock.wait_ms(self._changed, left_ms)

    # -- resident values; `_lock` is held --------------------------------------------------------

    def _used(self, entry: Entry[Value], *, hold: bool) -> Entry[Value]:
        self._touch(entry)
        entry.holders += hold
        return entry

    def _install(self, key: bytes, value: Value, *, clean: bool) -> Entry[Value]:
        """Make a value resident; `clean` when the shelf has it as it is."""
        entry = self._entries[key] = Entry(value, hash_of(key))
        self._by_hash[entry.hash] = (*self._by_hash.get(entry.hash, ()), key)
        self._deleted.pop(key, None)
        self._renew(key, entry, clean=clean)
        return entry

    def _renew(self, key: bytes, entry: Entry[Value], *, clean: bool = False) -> None:
        """The value is new: another version, and its size estimated again."""
        entry.version = next(self._versions)
        if clean:
            entry.saved = entry.version
        else:
            self._dirty[key] = None
        size = max(0, self.codec.estimate(entry.value)) + len(key) + ENTRY_BYTES
        _charge(self._parts.pool, self.task, size - entry.nbytes)
        entry.nbytes = size
        self._touch(entry)

    def _discard(self, keys: Iterable[bytes]) -> int:
        """Remove resident values; returns their bytes."""
        gone = [(key, entry) for key in keys if (entry := self._entries.pop(key, None)) is not None]
        for key, entry in gone:
            self._dirty.pop(key, None)
            others = tuple(each for each in self._by_hash.pop(entry.hash) if each != key)
            if others:
                self._by_hash[entry.hash] = others
        nbytes = sum(entry.nbytes for _, entry in gone)
        _charge(self._parts.pool, self.task, -nbytes)
        return nbytes

    def _idle(self, hashes: npt.NDArray[np.uint64]) -> list[bytes]:
        """The resident keys of these hashes that are not held."""
        keys = [key for each in hashes.tolist() for key in self._by_hash.get(each, ())]
        return [key for key in keys if self._entries[key].holders == 0]

    def _disturb(self, key: bytes) -> None:
        if key in self._flights:
            self._flights[key] = True

    def _touch(self, entry: Entry[Value]) -> None:
        self._touched.append(entry.hash)
        if len(self._touched) >= TOUCHES:
            self._pass_touches()

    def _settle(self) -> None:
        with self._lock:
            self._pass_touches()

    def _pass_touches(self) -> None:
        if self._touched:
            self._key_lru.touch(np.array(self._touched, np.uint64), in_order=True)
            self._touched.clear()

    # -- writing; `_writes` is held --------------------------------------------------------------

    def _flush(self, keys: Sequence[bytes] | None, *, held: bool) -> int:
        with self._lock:
            entries = {
                key: self._entries[key]
                for key in (self._dirty if keys is None else keys)
                if key in self._dirty
            }
            entries = {key: entry for key, entry in entries.items() if held or entry.holders == 0}
            versions = {key: entry.version for key, entry in entries.items()}
            gone = [key for key in (self._deleted if keys is None else keys) if key in self._deleted]
            for entry in entries.values():
                entry.encoding = True
        try:
            blobs = [self.codec.encode(entry.value) for entry in entries.values()]
        finally:
            with self._lock:
                for entry in entries.values():
                    entry.encoding = False
                self._changed.notify_all()
        if entries or gone:
            self._parts.shelf.write(
                self.task,
                self.namespace,
                pa.array([*entries, *gone], pa.binary()),
                pa.array([*blobs, *([None] * len(gone))], pa.binary()),
                pa.array(np.arange(len(entries) + len(gone)) >= len(entries)),
            )
        with self._lock:
            for key, entry in entries.items():
                if self._entries.get(key) is entry and entry.version == versions[key]:
                    entry.saved = entry.version
                    del self._dirty[key]
            for key in gone:
                self._deleted.pop(key, None)
        return len(entries) + len(gone)


def hash_of(key: bytes) -> int:
    """The hash of one key."""
    return int(hash_parts(BinaryParts(np.frombuffer(key, np.uint8), np.array([0, len(key)], np.int32)))[0])


class StateHandle(StateCache[Value]):
    """An operator's durable state, which may exceed memory: one value per key, and a few named values."""

    def keep(self, name: str, value: Callable[[], Value]) -> None:
        """Store what `value` returns in every checkpoint; it is called inside the cut, on the operator's thread.

        For values per operator, such as its clocks; they are stored in the manifest and are never evicted.
        """
        self._storage.named.keep(f"{self.namespace}/{name}", lambda: self.codec.encode(value()))

    def kept(self, name: str) -> Value | None:
        """The named value as of the last restore or checkpoint; None when there is none."""
        blob = self._storage.named.get(f"{self.namespace}/{name}")
        return None if blob is None else self.codec.decode(blob)


def hot_state(handles: Iterable[StateHandle[Any]]) -> HotKeys:
    """The memory of each key in these caches."""
    found = [handle.weights() for handle in handles]
    return key_weights([hashes for hashes, _ in found], [nbytes for _, nbytes in found])
