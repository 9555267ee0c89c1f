"""The resident values of a state cache: what is here, how large, and which changes the shelf does not have yet.

Owns the accounting: every resident value is in the pool (tenant `STATE_CACHE`) and in the task's key LRU with the
same bytes, from `install` to `discard`. Knows nothing of loading and saving.

Thread rule: none of its own; the cache calls it under its lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Generic

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InternalError
from tidegate.storage.index.entries import Tenant
from tidegate.storage.memory.key_lru import KeyLru
from tidegate.storage.memory.pool import WorkerMemoryPool
from tidegate.storage.runs.hashing import BinaryParts, hash_parts
from tidegate.storage.state.ports import StateCodec, Value

ENTRY_BYTES = 256  # what Python needs for a resident entry besides key and value
TOUCHES = 256  # touches handed to the key LRU at once
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
        """Take values out; their bytes, nothing for those that are not here."""
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
        """Take a value out and remember to take it from the shelf too."""
        self.discard([key])
        self.deleted[key] = None

    def hold(self, entry: Entry[Value]) -> None:
        entry.holders += 1
        if self._key_lru is not None:
            self._key_lru.begin_use(entry.hash)

    def unhold(self, entry: Entry[Value]) -> None:
        if entry.holders == 0:
            raise InternalError(f"a state value of task {self._task} is let go and nobody holds it")
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
        """The resident keys of these hashes that nobody holds."""
        keys = [key for each in hashes.tolist() for key in self._by_hash.get(each, ())]
        return [key for key in keys if self.entries[key].holders == 0]

    def touch(self, entry: Entry[Value]) -> None:
        """The value was used; the key LRU hears of it soon."""
        if self._key_lru is not None:
            self._touched.append(entry.hash)
            if len(self._touched) >= TOUCHES:
                self.settle()

    def settle(self) -> None:
        """Tell the key LRU of touches that were put off."""
        if self._touched and self._key_lru is not None:
            self._key_lru.touch(np.array(self._touched, np.uint64), in_order=True)
            self._touched.clear()

    def newer(self, keys: pa.BinaryArray) -> tuple[list[int], list[Entry[Value] | None]]:
        """Where the shelf is behind: places in `keys`, and the entry there, None when it was deleted."""
        known = [*among(keys, self.dirty), *among(keys, self.deleted)]
        return [place for place, _ in known], [self.entries.get(key) for _, key in known]

    def clear(self) -> None:
        """Forget everything, saved or not."""
        self.discard(list(self.entries))
        self.deleted.clear()
        self._touched.clear()

    def _size(self, key: bytes, value: Value) -> int:
        return max(0, self._codec.estimate(value)) + len(key) + ENTRY_BYTES


def among(keys: pa.BinaryArray, known: Mapping[bytes, object]) -> list[tuple[int, bytes]]:
    """(place, key) of each of `keys` that is known; Python sees those only, or all when they are the fewer."""
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
