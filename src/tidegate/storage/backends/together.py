"""Putting several objects: the backend's own way if it has one, else put by put, several at once where that pays.

A folder writes one object while it syncs another, and syncs each folder once; a remote store answers many puts in
the time of one. Either way every object keeps the promises of `put`, and when this returns all of them are durable.
After an error some of them may be there and others not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from tidegate.storage.backends.overlap import overlap
from tidegate.storage.backends.port import Part, StorageBackend


@runtime_checkable
class PutsTogether(Protocol):
    """A backend that knows a quicker way for several objects."""

    def put_all(self, objects: Iterable[tuple[str, Sequence[Part]]]) -> None: ...


def put_all(
    backend: StorageBackend, objects: Iterable[tuple[str, Sequence[Part]]], *, at_once: int = 1
) -> None:
    """Put every (name, parts); a folder asks for the next when the one before it is written."""
    if isinstance(backend, PutsTogether):
        backend.put_all(objects)
    else:
        overlap(lambda each: backend.put(*each), list(objects), at_most=at_once)
