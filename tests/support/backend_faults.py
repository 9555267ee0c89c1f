"""A storage backend that fails, dies or waits on purpose.

`WatchedBackend(inner, watch)` calls the watcher around every effect: `before` it happens and, for those that
change something, `after`. What the watcher raises is raised to the caller; raised before, the effect does not
happen. The watchers here number the effects that change something (put, publish, delete), from 1:

| watcher | what happens |
|---|---|
| `BackendRecorder` | nothing; writes down every effect |
| `DieAt(n)` | the process dies at the n-th moment: before the first effect, after it, before the second, … |
| `RefuseAt(n)` | the n-th effect fails with `UnavailableError`, once or from then on, between `arm` and `lift` |

A death is `SimulatedCrash`, and every effect after it raises it again. The inner backend is what the dead process
leaves behind: give it to the next runtime. Safe from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from tidegate.errors import UnavailableError
from tidegate.storage.backends.base import ObjectInfo, Part, StorageBackend
from tidegate.testing.faults import SimulatedCrash

CHANGES = frozenset({"put", "publish", "delete"})


class BackendEffect(NamedTuple):
    """One call of a backend, before or after it happened."""

    kind: str  # put, publish, delete, read, read_published, list
    name: str
    moment: str  # before, after

    @property
    def mutates(self) -> bool:
        return self.kind in CHANGES


BackendWatcher = Callable[[BackendEffect], None]


class WatchedBackend:
    """A backend, with somebody looking over its shoulder."""

    def __init__(self, inner: StorageBackend, watch: BackendWatcher) -> None:
        self.inner = inner
        self.watch = watch

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def identity(self) -> str:
        return self.inner.identity

    @property
    def address(self) -> str | None:
        return self.inner.address

    @property
    def is_remote(self) -> bool:
        return self.inner.is_remote

    def put(self, name: str, parts: Sequence[Part]) -> None:
        self.watch(BackendEffect("put", name, "before"))
        self.inner.put(name, parts)
        self.watch(BackendEffect("put", name, "after"))

    def publish(self, name: str, data: bytes, *, expected: str | None) -> str:
        self.watch(BackendEffect("publish", name, "before"))
        version = self.inner.publish(name, data, expected=expected)
        self.watch(BackendEffect("publish", name, "after"))
        return version

    def delete(self, name: str) -> None:
        self.watch(BackendEffect("delete", name, "before"))
        self.inner.delete(name)
        self.watch(BackendEffect("delete", name, "after"))

    def read(self, name: str) -> pa.Buffer:
        self.watch(BackendEffect("read", name, "before"))
        return self.inner.read(name)

    def read_published(self, name: str) -> tuple[bytes, str] | None:
        self.watch(BackendEffect("read_published", name, "before"))
        return self.inner.read_published(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.watch(BackendEffect("list", prefix, "before"))
        return self.inner.list(prefix)

    def forget(self, name: str) -> bool:
        return self.inner.forget(name)

    def close(self) -> None:
        """The inner one stays open: it outlives the process that died."""


class BackendRecorder:
    """Every effect, in order."""

    def __init__(self) -> None:
        self.effects: list[BackendEffect] = []
        self._lock = threading.Lock()

    def __call__(self, effect: BackendEffect) -> None:
        with self._lock:
            self.effects.append(effect)

    @property
    def moments(self) -> int:
        """How many moments `DieAt` can choose from."""
        return sum(effect.mutates for effect in self.effects)

    def of(self, kind: str) -> list[str]:
        """The names this kind of effect was about."""
        return [effect.name for effect in self.effects if effect.kind == kind and effect.moment == "before"]


class DieAt:
    """The process dies at the n-th moment, from 1; `died_at` says where that was."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.died_at: BackendEffect | None = None
        self._count = 0
        self._lock = threading.Lock()

    def __call__(self, effect: BackendEffect) -> None:
        with self._lock:
            if self.died_at is None and effect.mutates:
                self._count += 1
                if self._count == self.n:
                    self.died_at = effect
            dead = self.died_at
        if dead is not None:
            raise SimulatedCrash(f"dead since {dead.moment} {dead.kind} {dead.name}")


class RefuseAt:
    """The n-th effect of these kinds fails before it happens; `after=True`: the effect happens, the answer is lost."""

    def __init__(
        self,
        n: int,
        *,
        kinds: frozenset[str] = CHANGES,
        persistent: bool = False,
        after: bool = False,
        lifted: bool = False,
    ) -> None:
        self.n = n
        self.kinds = kinds
        self.persistent = persistent
        self.moment = "after" if after else "before"
        self.fired = 0
        self._count = 0
        self._lifted = lifted
        self._lock = threading.Lock()

    def arm(self) -> None:
        """From now on, counting from here."""
        self._count, self._lifted = 0, False

    def lift(self) -> None:
        """The backend is well again."""
        self._lifted = True

    def __call__(self, effect: BackendEffect) -> None:
        if self._lifted or effect.kind not in self.kinds or effect.moment != self.moment:
            return
        with self._lock:
            self._count += 1
            due = self._count == self.n or (self.persistent and self._count > self.n)
            self.fired += due
        if due:
            raise UnavailableError(f"could not {effect.kind} {effect.name}: refused on purpose; retry later")
