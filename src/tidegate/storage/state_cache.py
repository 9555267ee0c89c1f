"""The state cache of one operator, one value per key: resident objects in front of a store of blobs.

`StateCache` loads, saves and evicts; `Residents` does the accounting: every resident value is in the pool (tenant
`STATE_CACHE`) and in the task's key LRU with the same bytes, from `install` to `discard`. Maintenance decides when keys
are evicted; a `BlobShelf` (the store of blobs, *shelf* below) stores them.

T1  a key that is not resident is *loaded*, never created while the shelf has it (INV-20); there is one load of a key
    at a time, and all callers get the same object.
T2  a value is dirty while its version is above the version the shelf has. The version is read before encoding,
    so a change during a flush leaves the value dirty.
T3  a value leaves memory only when it is clean and not held. A failed flush drops nothing.
T4  deletion is explicit, and is itself dirty until it is flushed.
T5  writes to the shelf are in order: one at a time (`_writes`). Eviction that finds a write under way leaves
    dirty values alone instead of waiting, so relief that is called from inside a write cannot deadlock.

Thread rule: any thread may call. Values are changed by the operator's thread only, between `hold` and `unhold`
or while no other thread runs maintenance. While the shelf works, and while values are encoded, decoded or made,
no lock is held but T5's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import Clock
from tidegate.errors import InternalError, InvalidError, OverloadError
from tidegate.storage.index import Tenant
from tidegate.storage.memory.key_lru import KeyLru
from tidegate.storage.memory.pool import WorkerMemoryPool
from tidegate.storage.runs.columns import BinaryParts, hash_parts

# -- codec and shelf ---------------------------------------------------------------------------------

Value = TypeVar("Value")


class StateCodec(Protocol[Value]):
    """Encodes and decodes an operator's state of one key. Blobs outlive the program: version them."""

    def encode(self, value: Value) -> bytes: ...

    def decode(self, blob: bytes) -> Value: ...

    def estimate(self, value: Value) -> int:
        """Estimate the bytes the value needs in memory."""
        ...


class BytesCodec:
    """State that is bytes already."""

    def encode(self, value: bytes) -> bytes:
        return value

    def decode(self, blob: bytes) -> bytes:
        return blob

    def estimate(self, value: bytes) -> int:
        return len(value)


class BlobShelf(Protocol):
    """The store of blobs behind the cache; takes and returns columns, without Python per key.

    What was written is read from then on, by any thread. Writes of one (task, namespace) never overlap; inside
    one write the later row of a key wins. A blob that is not there and a blob that could not be read are
    different things: the first is a False in the mask, the second an error (INV-24).
    """

    def write(
        self, task: str, namespace: str, keys: pa.BinaryArray, blobs: pa.BinaryArray, deleted: pa.BooleanArray
    ) -> None:
        """Set the blob of each key, or remove it where `deleted`; atomic."""
        ...

    def read(
        self, task: str, namespace: str, keys: pa.BinaryArray
    ) -> tuple[npt.NDArray[np.bool_], pa.BinaryArray]:
        """Return a mask of the keys with a blob, and the blobs, null where there is none."""
        ...


# -- resident values ---------------------------------------------------------------------------------

ENTRY_BYTES = 256  # Python's overhead of a resident entry besides key and value
TOUCHES = 256  # touches passed to the key LRU at once
TENANT = Tenant.STATE_CACHE


class Entry(Generic[Value]):
    """One resident value. It is dirty while its version is not the one the shelf has (`saved`)."""

    __slots__ = ("encoding", "hash", "holders", "nbytes", "saved", "value", "version")

    def __init__(self, value: Value, key_hash: int, version: int, nbytes: int) -> None:
        self.value = value
        self.hash = key_hash
        self.version = version
        self.saved = 0
        self.nbytes = nbytes
        self.holders = 0
        self.encoding = False

    @property
    def dirty(self) -> bool:
        return self.version != self.saved


class Residents(Generic[Value]):
    """Entries by key; `dirty` and `deleted` are the changes to save. Versions never repeat."""

    def __init__(
        self, task: str, codec: StateCodec[Value], pool: WorkerMemoryPool, key_lru: KeyLru | None
    ) -> None:
        self.entries: dict[bytes, Entry[Value]] = {}
        self.dirty: dict[bytes, None] = {}
        self.deleted: dict[bytes, None] = {}
        self._task = task
        self._codec = codec
        self._pool = pool
        self._key_lru = key_lru
        self._versions = count(1)
        self._by_hash: dict[int, tuple[bytes, ...]] = {}
        self._touched: list[int] = []

    def install(self, key: bytes, value: Value, *, clean: bool) -> Entry[Value]:
        """Make a value resident; `clean` when the shelf has it as it is."""
        key_hash, nbytes = hash_of(key), self._size(key, value)
        entry = Entry(value, key_hash, next(self._versions), nbytes)
        self._pool.reserve_over_limit(self._task, TENANT, nbytes)
        self.entries[key] = entry
        self.touch(entry)
        self._by_hash[key_hash] = (*self._by_hash.get(key_hash, ()), key)
        self.deleted.pop(key, None)
        if clean:
            entry.saved = entry.version
        else:
            self.dirty[key] = None
        return entry

    def renew(self, key: bytes, entry: Entry[Value], *, clean: bool = False) -> None:
        """The value changed: a new version, and its size estimated again."""
        entry.version = next(self._versions)
        if clean:
            entry.saved = entry.version
            self.dirty.pop(key, None)
        else:
            self.dirty[key] = None
        growth = self._size(key, entry.value) - entry.nbytes
        if growth > 0:
            self._pool.reserve_over_limit(self._task, TENANT, growth)
        elif growth < 0:
            self._pool.release(self._task, TENANT, -growth)
        entry.nbytes += growth
        self.touch(entry)

    def discard(self, keys: Iterable[bytes]) -> int:
        """Remove resident values; returns their bytes."""
        gone = [(key, entry) for key in keys if (entry := self.entries.pop(key, None)) is not None]
        if not gone:
            return 0
        for key, entry in gone:
            self.dirty.pop(key, None)
            others = tuple(each for each in self._by_hash.pop(entry.hash) if each != key)
            if others:
                self._by_hash[entry.hash] = others
        nbytes = sum(entry.nbytes for _, entry in gone)
        self._pool.release(self._task, TENANT, nbytes)
        return nbytes

    def delete(self, key: bytes) -> None:
        """Remove a value and record its deletion for the next flush."""
        self.discard([key])
        self.deleted[key] = None

    def hold(self, entry: Entry[Value]) -> None:
        entry.holders += 1
        if self._key_lru is not None:
            self._key_lru.begin_use(entry.hash)

    def unhold(self, entry: Entry[Value]) -> None:
        if entry.holders == 0:
            raise InternalError(f"a state value of task {self._task} is released, but nobody holds it")
        entry.holders -= 1
        if self._key_lru is not None:
            self._key_lru.end_use(entry.hash)

    def weights(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Hash and bytes of every value."""
        entries = list(self.entries.values())
        return (
            np.fromiter((entry.hash for entry in entries), np.uint64, len(entries)),
            np.fromiter((entry.nbytes for entry in entries), np.int64, len(entries)),
        )

    def idle(self, hashes: npt.NDArray[np.uint64]) -> list[bytes]:
        """The resident keys of these hashes that are not held."""
        keys = [key for each in hashes.tolist() for key in self._by_hash.get(each, ())]
        return [key for key in keys if self.entries[key].holders == 0]

    def touch(self, entry: Entry[Value]) -> None:
        """Record a use; it is passed to the key LRU in batches."""
        if self._key_lru is not None:
            self._touched.append(entry.hash)
            if len(self._touched) >= TOUCHES:
                self.settle()

    def settle(self) -> None:
        """Pass the pending touches to the key LRU."""
        if self._touched and self._key_lru is not None:
            self._key_lru.touch(np.array(self._touched, np.uint64), in_order=True)
            self._touched.clear()

    def newer(self, keys: pa.BinaryArray) -> tuple[list[int], list[Entry[Value] | None]]:
        """The unsaved changes among `keys`: their indices, and the entries (None: deleted)."""
        known = [*among(keys, self.dirty), *among(keys, self.deleted)]
        return [place for place, _ in known], [self.entries.get(key) for _, key in known]

    def clear(self) -> None:
        """Drop everything, saved or not."""
        self.discard(list(self.entries))
        self.deleted.clear()
        self._touched.clear()

    def _size(self, key: bytes, value: Value) -> int:
        return max(0, self._codec.estimate(value)) + len(key) + ENTRY_BYTES


def among(keys: pa.BinaryArray, known: Mapping[bytes, object]) -> list[tuple[int, bytes]]:
    """The (index, key) of each of `keys` that is in `known`, without Python per unknown key."""
    if not known:
        return []
    if len(keys) <= len(known):
        return [(place, key) for place, key in enumerate(keys.to_pylist()) if key in known]
    marks = pc.is_in(keys, value_set=pa.array(list(known), pa.binary()))
    places = np.flatnonzero(marks.to_numpy(zero_copy_only=False))
    return list(zip(places.tolist(), keys.take(pa.array(places)).to_pylist(), strict=True))


def hash_of(key: bytes) -> int:
    """The hash of one key."""
    return int(hash_parts(BinaryParts(np.frombuffer(key, np.uint8), np.array([0, len(key)], np.int32)))[0])


# -- cache -------------------------------------------------------------------------------------------


class _Flight:
    """One load under way; `stale` when the key changed meanwhile."""

    __slots__ = ("stale",)

    def __init__(self) -> None:
        self.stale = False


class StateCache(Generic[Value]):
    """The values of one (task, namespace)."""

    def __init__(
        self,
        task: str,
        namespace: str,
        codec: StateCodec[Value],
        shelf: BlobShelf,
        pool: WorkerMemoryPool,
        clock: Clock,
        *,
        key_lru: KeyLru | None = None,
        timeout_ms: int = 30_000,
        overloaded: Callable[[str, str | None], None] = lambda task, reason: None,
    ) -> None:
        self.task = task
        self.namespace = namespace
        self.codec = codec
        self.loads = 0
        self.flushed = 0
        self._shelf = shelf
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._overloaded = overloaded
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._writes = threading.Lock()
        self._here = Residents(task, codec, pool, key_lru)
        self._flights: dict[bytes, _Flight] = {}
        if key_lru is not None:
            key_lru.settle_with(self._settle)

    # one key

    def weights(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Hash and bytes of every resident value."""
        with self._lock:
            return self._here.weights()

    def peek(self, key: bytes) -> Value | None:
        """The value if it is resident; loads nothing and does not count as use."""
        with self._lock:
            entry = self._here.entries.get(key)
            return None if entry is None else entry.value

    def get(self, key: bytes) -> Value | None:
        """Return the value, loaded if not resident; None when there is none."""
        entry = self._entry(key, None, hold=False)
        return None if entry is None else entry.value

    def get_or_load(self, key: bytes, make: Callable[[], Value]) -> Value:
        """Return the value, loaded if not resident, created (and dirty) when there is none."""
        return self._made(key, make, hold=False).value

    def hold(self, key: bytes, make: Callable[[], Value]) -> Entry[Value]:
        """As `get_or_load`, and the key stays resident until `unhold`."""
        return self._made(key, make, hold=True)

    def unhold(self, entry: Entry[Value]) -> None:
        with self._lock:
            self._here.unhold(entry)

    def put(self, key: bytes, value: Value) -> None:
        """Set the value."""
        with self._lock:
            self._disturb(key)
            entry = self._here.entries.get(key)
            if entry is None:
                self._here.install(key, value, clean=False)
            else:
                entry.value = value
                self._here.renew(key, entry)

    def mark_dirty(self, key: bytes) -> None:
        """Mark the resident value as changed in place; its size is estimated again."""
        with self._lock:
            entry = self._here.entries.get(key)
            if entry is None:
                raise InvalidError(
                    f"state {self.namespace} of task {self.task}: key {key!r} is marked dirty and not resident, so "
                    "the change may be lost; change values inside `use`, or hand the value to `put`"
                )
            self._here.renew(key, entry)

    def delete(self, key: bytes) -> None:
        """Delete the value: from memory now, from the shelf with the next flush."""
        with self._lock:
            self._disturb(key)
            self._here.delete(key)

    # saving

    def flush(self, keys: Iterable[bytes] | None = None) -> int:
        """Write dirty values to the shelf, of all keys or of these; returns how many were written."""
        with self._writes:
            return self._flush(None if keys is None else list(keys), held=True)

    def flush_hashes(self, hashes: npt.NDArray[np.uint64]) -> int:
        """Save the dirty values of these key hashes that are not held; returns how many were written.

        Writes nothing while another write is under way (T5).
        """
        with self._lock:
            keys = [key for key in self._here.idle(hashes) if self._here.entries[key].dirty]
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
            idle = self._here.idle(hashes)
            return self._here.discard([key for key in idle if not self._here.entries[key].dirty])

    def clear(self) -> None:
        """Drop everything, saved or not, because the task is restored or leaves the worker."""
        with self._writes, self._lock:
            self._here.clear()
            for flight in self._flights.values():
                flight.stale = True

    # columns

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """The blobs of many keys, null where there is none; nothing becomes resident."""
        with self._lock:
            places, newer = self._here.newer(keys)
        blobs = [None if entry is None else self.codec.encode(entry.value) for entry in newer]
        _, found = self._shelf.read(self.task, self.namespace, keys)
        if not places:
            return found
        order = np.arange(len(keys))
        order[places] = len(keys) + np.arange(len(places))
        return pa.concat_arrays([found, pa.array(blobs, pa.binary())]).take(pa.array(order))

    def put_many(self, keys: pa.BinaryArray, blobs: pa.BinaryArray) -> None:
        """Write the blobs of many keys directly to the shelf; of one key given twice, the later wins."""
        if len(keys) != len(blobs) or keys.null_count or blobs.null_count:
            raise InvalidError(
                f"state {self.namespace} of task {self.task}: {len(keys)} keys and {len(blobs)} blobs, "
                f"{keys.null_count + blobs.null_count} of them null; give one of each a row, and delete with "
                "delete_many"
            )
        self._write_through(keys, blobs, deleted=False)

    def delete_many(self, keys: pa.BinaryArray) -> None:
        """Delete the blobs of many keys directly from the shelf."""
        if keys.null_count:
            raise InvalidError(f"state {self.namespace} of task {self.task}: a key to delete is null")
        self._write_through(keys, pa.nulls(len(keys), pa.binary()), deleted=True)

    # what others may know

    def __len__(self) -> int:
        """Resident values."""
        return len(self._here.entries)

    @property
    def dirty(self) -> int:
        """Changes the shelf does not have yet, deletions included."""
        return len(self._here.dirty) + len(self._here.deleted)

    # loading

    def _made(self, key: bytes, make: Callable[[], Value], *, hold: bool) -> Entry[Value]:
        entry = self._entry(key, make, hold=hold)
        if entry is None:  # unreachable: with `make` there is always a value
            raise InvalidError(f"state {self.namespace} of task {self.task}: no value for key {key!r}")
        return entry

    def _entry(self, key: bytes, make: Callable[[], Value] | None, *, hold: bool) -> Entry[Value] | None:
        deadline_ms = self._clock.monotonic_ms() + self._timeout_ms
        while True:
            with self._lock:
                entry = self._here.entries.get(key)
                if entry is not None and not (hold and entry.encoding):
                    return self._used(entry, hold=hold)
                if entry is not None or key in self._flights:
                    self._wait(key, deadline_ms)
                    continue
                gone = key in self._here.deleted
                if gone and make is None:
                    return None
                flight = self._flights[key] = _Flight()
            entry = self._fly(key, flight, make, gone=gone, hold=hold)
            if entry is not None or not flight.stale:
                return entry

    def _fly(
        self, key: bytes, flight: _Flight, make: Callable[[], Value] | None, *, gone: bool, hold: bool
    ) -> Entry[Value] | None:
        """Load or create a key's value as its only loader; None when there is none or the flight is stale."""
        try:
            blob = None if gone else self._load(key)
            if blob is not None:
                value = self.codec.decode(blob)
            elif make is not None:
                value = make()
            else:
                return None
            with self._lock:
                if flight.stale:
                    return None
                return self._used(self._here.install(key, value, clean=blob is not None), hold=hold)
        finally:
            with self._lock:
                del self._flights[key]
                self._changed.notify_all()

    def _load(self, key: bytes) -> bytes | None:
        found, blobs = self._shelf.read(self.task, self.namespace, pa.array([key], pa.binary()))
        with self._lock:
            self.loads += 1
        return blobs[0].as_py() if found[0] else None

    def _used(self, entry: Entry[Value], *, hold: bool) -> Entry[Value]:
        self._here.touch(entry)
        if hold:
            self._here.hold(entry)
        return entry

    def _wait(self, key: bytes, deadline_ms: int) -> None:
        """Wait until a load or an encoding ends."""
        left_ms = deadline_ms - self._clock.monotonic_ms()
        if left_ms <= 0:
            self._overloaded(self.task, "state_load")
            raise OverloadError(
                f"state {self.namespace} of task {self.task}: another thread's load of key {key!r} did not end in "
                f"{self._timeout_ms} ms. Retry; if it stays so, look at the backend, or raise load_timeout_ms",
                reason="state_load",
            )
        self._clock.wait_ms(self._changed, left_ms)

    def _disturb(self, key: bytes) -> None:
        flight = self._flights.get(key)
        if flight is not None:
            flight.stale = True

    def _settle(self) -> None:
        with self._lock:
            self._here.settle()

    # under `_writes`

    def _flush(self, keys: Sequence[bytes] | None, *, held: bool) -> int:
        with self._lock:
            wanted = (
                list(self._here.dirty) if keys is None else [key for key in keys if key in self._here.dirty]
            )
            entries = {key: self._here.entries[key] for key in wanted}
            entries = {key: entry for key, entry in entries.items() if held or entry.holders == 0}
            versions = {key: entry.version for key, entry in entries.items()}
            deleted = self._here.deleted
            gone = list(deleted) if keys is None else [key for key in keys if key in deleted]
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
            self._shelf.write(
                self.task,
                self.namespace,
                pa.array([*entries, *gone], pa.binary()),
                pa.array([*blobs, *([None] * len(gone))], pa.binary()),
                pa.array(np.arange(len(entries) + len(gone)) >= len(entries)),
            )
        with self._lock:
            for key, entry in entries.items():
                if self._here.entries.get(key) is entry and entry.version == versions[key]:
                    entry.saved = entry.version
                    del self._here.dirty[key]
            for key in gone:
                self._here.deleted.pop(key, None)
            self.flushed += len(entries) + len(gone)
        return len(entries) + len(gone)

    def _write_through(self, keys: pa.BinaryArray, blobs: pa.BinaryArray, *, deleted: bool) -> None:
        if not len(keys):
            return
        with self._writes:
            self._shelf.write(self.task, self.namespace, keys, blobs, pa.array(np.full(len(keys), deleted)))
            with self._lock:
                for flight in self._flights.values():
                    flight.stale = True
                resident = {key: place for place, key in among(keys, self._here.entries)}
                for _, key in among(keys, self._here.deleted):
                    self._here.deleted.pop(key, None)
                if deleted:
                    self._here.discard(resident)
            if not deleted:
                self._refresh(
                    {key: self.codec.decode(blobs[place].as_py()) for key, place in resident.items()}
                )
            with self._lock:
                self.flushed += len(keys)

    def _refresh(self, values: dict[bytes, Value]) -> None:
        """Update resident values to what was just written to the shelf."""
        with self._lock:
            for key, value in values.items():
                entry = self._here.entries.get(key)
                if entry is not None:
                    entry.value = value
                    self._here.renew(key, entry, clean=True)
