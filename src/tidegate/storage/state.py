"""Operator state: one value per key in a cache over a store, and a few named values in the task's manifest.

`StateHandle` is what an operator sees. Two handles of one task and namespace share one cache, so each sees the
other's writes at once; handles of other tasks or namespaces share nothing, also for equal keys.

Named values are an operator's progress (clocks, counters). The handle's `keep` registers a function that is called
inside a checkpoint's cut, so the value is consistent with the rows; a delta manifest holds a value only when its bytes
changed. In a manifest a value is the extra `state/<namespace>/<name>`. `NamedValues` holds the blobs of the checkpoint
the task last equalled; `ask` returns their present values.

N1  a value without a `keep` function stays as in the restored checkpoint, and is in the next checkpoint, too.
N2  the bytes of all values are charged to the memory pool (tenant `STATE_CACHE`). There is one value per operator, not
    one per key, so they are never evicted.

Thread rule: named values belong to the operator's thread; the rest is as `StateCache`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import InvalidError
from tidegate.storage.index import Tenant
from tidegate.storage.memory.key_lru import HotKeys, KeyLru, key_weights
from tidegate.storage.memory.pool import WorkerMemoryPool
from tidegate.storage.state_cache import BlobShelf, Entry, StateCache, StateCodec, Value

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
    """Blobs by `<namespace>/<name>`, and the functions that encode them."""

    def __init__(self, task: str, pool: WorkerMemoryPool) -> None:
        self._task = task
        self._pool = pool
        self._blobs: dict[str, bytes] = {}
        self._keepers: dict[str, Callable[[], bytes]] = {}

    def keep(self, name: str, encode: Callable[[], bytes]) -> None:
        """Register `encode` as the source of the value; this alone does not count as a change."""
        self._keepers[name] = encode
        self._set({**self._blobs, name: encode()})

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
        self._set(values)

    def load(self, extras: Mapping[str, bytes]) -> None:
        """Replace all values by those of a manifest; registered functions stay."""
        self._set(
            {name.removeprefix(_PREFIX): blob for name, blob in extras.items() if name.startswith(_PREFIX)}
        )

    def drop(self, name: str) -> None:
        """Remove a value and its function."""
        self._keepers.pop(name, None)
        self._set({other: blob for other, blob in self._blobs.items() if other != name})

    def _set(self, values: Mapping[str, bytes]) -> None:
        growth = _size(values) - _size(self._blobs)
        self._blobs = dict(values)
        if growth > 0:
            self._pool.reserve_over_limit(self._task, Tenant.STATE_CACHE, growth)
        elif growth < 0:
            self._pool.release(self._task, Tenant.STATE_CACHE, -growth)


def extras_of(values: Mapping[str, bytes]) -> dict[str, bytes]:
    """The values under their manifest keys."""
    return {_PREFIX + name: blob for name, blob in values.items()}


def _size(values: Mapping[str, bytes]) -> int:
    return sum(len(name) + len(blob) for name, blob in values.items())


# -- handles -----------------------------------------------------------------------------------------


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


class StateHandle(Generic[Value]):
    """An operator's durable state, which may exceed memory: one value per key, and a few named values."""

    def __init__(self, cache: StateCache[Value], named: NamedValues) -> None:
        self._cache = cache
        self._named = named

    @property
    def task(self) -> str:
        return self._cache.task

    @property
    def namespace(self) -> str:
        return self._cache.namespace

    def get(self, key: bytes) -> Value | None:
        """Return the value, loaded if not resident; None when there is none."""
        return self._cache.get(key)

    def get_or_load(self, key: bytes, make: Callable[[], Value]) -> Value:
        """Return the value, loaded if not resident, created by `make` when there is none."""
        return self._cache.get_or_load(key, make)

    get_or_insert = get_or_load  # a key that is only not resident must not be created anew

    @contextmanager
    def use(self, key: bytes, make: Callable[[], Value]) -> Iterator[Held[Value]]:
        """Keep the value in memory until the block ends, to change it in place."""
        entry = self._cache.hold(key, make)
        try:
            yield Held(self._cache, key, entry)
        finally:
            self._cache.unhold(entry)

    def put(self, key: bytes, value: Value) -> None:
        self._cache.put(key, value)

    def mark_dirty(self, key: bytes) -> None:
        """Mark a resident value as changed in place; `InvalidError` when it is no longer resident."""
        self._cache.mark_dirty(key)

    def delete(self, key: bytes) -> None:
        self._cache.delete(key)

    def flush(self, key: bytes) -> int:
        """Save one key, if it is dirty."""
        return self._cache.flush([key])

    def flush_all(self) -> int:
        """Save every dirty key; returns how many there were."""
        return self._cache.flush()

    def keep(self, name: str, value: Callable[[], Value]) -> None:
        """Store what `value` returns in every checkpoint; it is called inside the cut, on the operator's thread.

        For values per operator, such as its clocks; they are stored in the manifest and are never evicted.
        """
        encode = self._cache.codec.encode
        self._named.keep(f"{self.namespace}/{name}", lambda: encode(value()))

    def kept(self, name: str) -> Value | None:
        """The named value as of the last restore or checkpoint; None when there is none."""
        blob = self._named.get(f"{self.namespace}/{name}")
        return None if blob is None else self._cache.codec.decode(blob)

    def get_many(self, keys: pa.BinaryArray) -> pa.BinaryArray:
        """The blobs of many keys as one column, null where there is none."""
        return self._cache.get_many(keys)

    def put_many(self, keys: pa.BinaryArray, blobs: pa.BinaryArray) -> None:
        """Save the blobs of many keys at once; of one key given twice, the later wins."""
        self._cache.put_many(keys, blobs)

    def delete_many(self, keys: pa.BinaryArray) -> None:
        self._cache.delete_many(keys)


class StateCaches:
    """The caches of one worker."""

    def __init__(
        self,
        shelf: BlobShelf,
        pool: WorkerMemoryPool,
        clock: Clock,
        *,
        key_lru: Callable[[str], KeyLru | None] = lambda task: None,
        timeout_ms: int = 30_000,
        overloaded: Callable[[str, str | None], None] = lambda task, reason: None,
    ) -> None:
        self._shelf = shelf
        self._pool = pool
        self._clock = clock
        self._key_lru = key_lru
        self._timeout_ms = timeout_ms
        self._overloaded = overloaded
        self._lock = threading.Lock()
        self._caches: dict[tuple[str, str], StateCache[Any]] = {}

    def handle(
        self, task: str, namespace: str, codec: StateCodec[Value], named: NamedValues
    ) -> StateHandle[Value]:
        """A handle on the cache of the task and namespace, which the first call creates."""
        if not namespace or "/" in namespace:
            raise InvalidError(
                f"state namespace {namespace!r} of task {task}: use a non-empty name without '/'"
            )
        with self._lock:
            cache = self._caches.get((task, namespace))
            if cache is None:
                cache = self._caches[task, namespace] = StateCache(
                    task,
                    namespace,
                    codec,
                    self._shelf,
                    self._pool,
                    self._clock,
                    key_lru=self._key_lru(task),
                    timeout_ms=self._timeout_ms,
                    overloaded=self._overloaded,
                )
            elif type(cache.codec) is not type(codec):
                raise InvalidError(
                    f"state {namespace} of task {task} is open with {type(cache.codec).__name__} and asked for with "
                    f"{type(codec).__name__}: use one codec, or another namespace"
                )
            return StateHandle(cache, named)

    def of(self, task: str) -> list[StateCache[Any]]:
        """The caches of a task, by namespace."""
        with self._lock:
            return [cache for (owner, _), cache in sorted(self._caches.items()) if owner == task]

    def flush_all(self, task: str) -> int:
        """Save all dirty values of a task; returns how many there were."""
        return sum(cache.flush() for cache in self.of(task))

    def evict(self, task: str, hashes: npt.NDArray[np.uint64]) -> int:
        """Evict these keys' values, of all namespaces; returns the bytes freed."""
        return sum(cache.evict(hashes) for cache in self.of(task))

    def hot_keys(self, task: str) -> HotKeys:
        """The memory of each key of the task in its caches, over all namespaces."""
        found = [cache.weights() for cache in self.of(task)]
        return key_weights([hashes for hashes, _ in found], [nbytes for _, nbytes in found])

    def dirty(self, task: str) -> int:
        return sum(cache.dirty for cache in self.of(task))

    def clear(self, task: str) -> None:
        """Drop a task's resident values, saved or not; handles stay valid and load from the store."""
        for cache in self.of(task):
            cache.clear()

    def drop(self, tasks: Iterable[str]) -> None:
        """Drop the caches of tasks that leave the worker."""
        for task in tasks:
            self.clear(task)
            with self._lock:
                for key in [key for key in self._caches if key[0] == task]:
                    del self._caches[key]
