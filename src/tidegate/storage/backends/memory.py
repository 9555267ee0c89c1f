"""A backend in this process's memory, for tests and for tasks whose state may be lost with the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pyarrow as pa

from tidegate.clock import Clock, SystemClock
from tidegate.errors import ConflictError, InvalidError
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.storage.backends.base import (
    MAX_PUBLISHED_BYTES,
    ObjectInfo,
    Part,
    check_name,
    check_prefix,
    joined,
    missing,
    same_bytes,
)


class MemoryBackend:
    """A backend over a dictionary. Closing keeps the objects, so that tests can reopen it."""

    kind = "memory"
    address = None
    is_remote = False

    def __init__(self, *, clock: Clock | None = None, randomness: Randomness | None = None) -> None:
        self.identity = (randomness or SystemRandomness()).uuid().hex
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[pa.Buffer, int]] = {}
        self._published: dict[str, tuple[bytes, str, int]] = {}
        self._versions = 0

    def put(self, name: str, parts: Sequence[Part]) -> None:
        check_name(name)
        stored = joined(parts)
        with self._lock:
            self._free_of_published(name)
            present = self._objects.setdefault(name, (stored, self._clock.now_ms()))[0]
        if present is not stored and not same_bytes(parts, present):
            raise ConflictError(f"{name} exists already with other bytes; take a fresh name")

    def read(self, name: str) -> pa.Buffer:
        check_name(name)
        with self._lock:
            found = self._objects.get(name)
        if found is None:
            raise missing(name, f"the memory backend {self.identity}")
        return found[0]

    def publish(self, name: str, data: bytes, *, expected: str | None) -> str:
        check_name(name)
        if len(data) > MAX_PUBLISHED_BYTES:
            raise InvalidError(f"{name}: {len(data)} bytes are too many to publish; put them as an object")
        with self._lock:
            if name in self._objects:
                raise ConflictError(f"{name} is an object; publish under another name")
            current = self._published[name][1] if name in self._published else None
            if current != expected:
                raise ConflictError(
                    f"{name} has version {current}, not {expected}; read it again, then decide"
                )
            self._versions += 1
            version = f"{self._versions}"
            self._published[name] = (bytes(data), version, self._clock.now_ms())
        return version

    def read_published(self, name: str) -> tuple[bytes, str] | None:
        check_name(name)
        with self._lock:
            found = self._published.get(name)
        return None if found is None else found[:2]

    def delete(self, name: str) -> None:
        check_name(name, temporary=True)
        with self._lock:
            self._objects.pop(name, None)
            self._published.pop(name, None)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix)
        start = folder + "/" if folder else ""
        with self._lock:
            found = [ObjectInfo(name, data.size, at) for name, (data, at) in self._objects.items()]
            found += [ObjectInfo(name, len(data), at) for name, (data, _, at) in self._published.items()]
        yield from (each for each in found if each.name.startswith(start))

    def forget(self, name: str) -> bool:
        return False

    def close(self) -> None:
        pass

    def _free_of_published(self, name: str) -> None:
        if name in self._published:
            raise ConflictError(f"{name} is published; put under another name")
