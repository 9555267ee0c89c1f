"""Who may build a table: a lease in the table's own storage, which ends by itself and is fenced.

The lease is a small published object, changed by compare-and-swap only: epoch, owner, host, process, end. Whoever
finds it free, ended or held by a process of this machine that is dead takes it with the next epoch.

L1  of any number of processes that try at once, one gets it.
L2  an owner that was away too long may find another in its place: `keep` and every commit then raise `FencedError`. No
    clock is trusted for that: commits carry the epoch and are compare-and-swapped too (`commits`).

Thread rule: the draining thread's.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Final

import msgspec

from tidegate.clock import Clock
from tidegate.errors import ConflictError, CorruptError, FencedError, SignatureError
from tidegate.randomness import Randomness

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend

DEFAULT_TTL_MS: Final = 10_000
_REMEDY: Final = "make sure that no process uses it, then delete it: the next one to start makes it again"


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who has it; an empty owner is nobody."""

    epoch: int
    owner: str
    host: str
    pid: int
    until_ms: int


class Lease:
    """One process's hold on a table."""

    def __init__(
        self,
        backend: StorageBackend,
        name: str,
        *,
        clock: Clock,
        randomness: Randomness,
        ttl_ms: int,
        duty: str = "builds this table",
        remedy: str = "close the table here and open it again to read it",
    ) -> None:
        self._backend = backend
        self._name = name
        self._clock = clock
        self._ttl_ms = ttl_ms
        self._owner = randomness.uuid().hex
        self._version: str | None = None
        self.epoch = 0
        self.was_left = False  # whether it was taken from an owner who had not given it up
        self._renew_at = 0
        self._duty, self._remedy = duty, remedy

    def acquire(self, *, at_least: int = 1) -> Held | None:
        """Take the lease, with an epoch of `at_least`; None when it is ours now, else who has it."""
        found = read_lease(self._backend, self._name)
        held, version = found if found is not None else (None, None)
        if held is not None and self.is_alive(held):
            return held
        self.epoch = max(at_least, 1 if held is None else held.epoch + 1)
        self.was_left = held is not None and bool(held.owner)
        try:
            self._publish(version)
        except ConflictError:
            again = read_lease(self._backend, self._name)
            if again is None:
                raise
            return again[0]
        return None

    def keep(self, *, force: bool = False) -> None:
        """Renew when a third of the time has passed; `FencedError` when another one has it."""
        if not force and self._clock.now_ms() < self._renew_at:
            return
        try:
            self._publish(self._version)
        except ConflictError as error:
            raise self.fenced() from error

    def release(self) -> None:
        """Give it up, so that the next one need not wait."""
        gone = Held(self.epoch, "", "", 0, 0)
        try:
            self._backend.publish(self._name, msgspec.msgpack.encode(gone), expected=self._version)
        except ConflictError:
            pass  # somebody else has it already: nothing to give up

    def fenced(self) -> FencedError:
        return FencedError(
            f"{self._name}: another process {self._duty} now (this one's epoch was {self.epoch}); {self._remedy}"
        )

    def _publish(self, expected: str | None) -> None:
        now_ms = self._clock.now_ms()
        held = Held(self.epoch, self._owner, socket.gethostname(), os.getpid(), now_ms + self._ttl_ms)
        self._version = self._backend.publish(self._name, msgspec.msgpack.encode(held), expected=expected)
        self._renew_at = now_ms + self._ttl_ms // 3

    def overdue_owner(self) -> Held | None:
        """Who did not renew in time, yet is a living process of this machine: stopped, or very busy; None: nobody."""
        found = read_lease(self._backend, self._name)
        if found is None or not found[0].owner or found[0].owner == self._owner:
            return None
        held = found[0]
        is_over = held.until_ms <= self._clock.now_ms()
        return held if is_over and held.host == socket.gethostname() and _runs(held.pid) else None

    def is_alive(self, held: Held) -> bool:
        """Whether whoever has it may still be at work."""
        if not held.owner or held.until_ms <= self._clock.now_ms():
            return False
        return held.host != socket.gethostname() or _runs(held.pid)


def read_lease(backend: StorageBackend, name: str) -> tuple[Held, str] | None:
    """Who has the lease, and its version; None when nobody ever had."""
    try:
        found = backend.read_published(name)
    except SignatureError:
        raise
    except CorruptError as error:
        raise CorruptError(f"{name} is damaged; {_REMEDY}", path=name, kafka_name=None) from error
    if found is None:
        return None
    data, version = found
    try:
        return msgspec.msgpack.decode(data, type=Held), version
    except msgspec.DecodeError as error:
        raise CorruptError(
            f"{name} cannot be read ({error}); {_REMEDY}", path=name, kafka_name=None
        ) from None


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
