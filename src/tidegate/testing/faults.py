"""Watchers for `Files(watch=…)` that make the file system fail on purpose.

Each is called before every effect. *Numbered* effects are the mutating ones (`Effect.mutates`), counted from 1, so that
a test can walk `n = 1, 2, …` over a script until it passes untouched:

    for n in range(1, count_effects(script) + 1):
        with dying_process(CrashAt(n)) as files:       # the process dies just before effect n
            script(files)
        reopen_and_check()

An injected error is an `OSError`, as from the operating system. A death is `SimulatedCrash`, which is not an
`Exception`: no `except Exception` may survive it, and every effect after it raises it again. `Recorder` and
`crash_states`, for power loss, are those of `crash_states`.

Thread rule: watchers may be called from several threads; the numbering is one sequence over all of them.
"""

from __future__ import annotations

import errno as codes
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from tidegate.file_locks import FileLock
from tidegate.files import Effect, Files
from tidegate.testing.crash_states import CrashState, Recorder, Recording, crash_states

__all__ = [
    "Chain",
    "CrashAt",
    "CrashState",
    "EffectCounter",
    "FailAt",
    "FailSync",
    "Recorder",
    "Recording",
    "ShortDisk",
    "SimulatedCrash",
    "Watcher",
    "count_effects",
    "crash_states",
    "dying_process",
]

Watcher = Callable[[Effect], None]
SYNCS = frozenset({"sync", "sync_folder"})


class SimulatedCrash(BaseException):
    """The process died here. Not an `Exception`, so that no handler of errors can go on living."""


class EffectCounter:
    """Numbers the mutating effects; `names` tells which they were (`write 00000000000000000000.log`)."""

    def __init__(self, kinds: Collection[str] | None = None) -> None:
        self.kinds = kinds
        self.names: list[str] = []
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        return len(self.names)

    def __call__(self, effect: Effect) -> None:
        self.number(effect)

    def number(self, effect: Effect) -> int:
        """The effect's number, 0 for one that is not counted."""
        counted = effect.mutates if self.kinds is None else effect.kind in self.kinds
        if not counted:
            return 0
        with self._lock:
            self.names.append(f"{effect.kind} {effect.path.name}")
            return len(self.names)


def count_effects(script: Callable[[Files], object], kinds: Collection[str] | None = None) -> int:
    """How many numbered effects the script has when nothing fails."""
    counter = EffectCounter(kinds)
    script(Files(watch=counter))
    return counter.count


class _LockingFiles(Files):
    """Remembers the locks that were taken through it."""

    def __init__(self, watch: Watcher) -> None:
        super().__init__(watch)
        self.locks: list[FileLock] = []

    def lock(self, path: Path, *, shared: bool = False, posix: bool = False, create: bool = True) -> FileLock:
        taken = super().lock(path, shared=shared, posix=posix, create=create)
        self.locks.append(taken)
        return taken


@contextmanager
def dying_process(watch: Watcher) -> Iterator[Files]:
    """Files for a script that may die: ends quietly at its death, with all its locks free again."""
    files = _LockingFiles(watch)
    try:
        yield files
    except SimulatedCrash:
        pass
    finally:
        for lock in files.locks:
            lock.release()


class FailAt:
    """Effect number `n` fails with `errno`; with `persistent=True` so does every numbered one after it.

    `kinds` restricts the numbering (and the failing) to some kinds of effect. `torn_bytes` lets a failing
    write leave that many of its bytes behind, as a full disk does. `lift()` ends a persistent fault.
    """

    def __init__(
        self,
        n: int,
        errno: int = codes.EIO,
        *,
        persistent: bool = False,
        kinds: Collection[str] | None = None,
        torn_bytes: int = 0,
    ) -> None:
        self.n = n
        self.errno = errno
        self.persistent = persistent
        self.torn_bytes = torn_bytes
        self.fired = 0
        self._counter = EffectCounter(kinds)
        self._lifted = False

    def lift(self) -> None:
        """The fault is gone: space was freed, the disk was replaced."""
        self._lifted = True

    def __call__(self, effect: Effect) -> None:
        number = self._counter.number(effect)
        if self._lifted or number == 0 or number < self.n or (number > self.n and not self.persistent):
            return
        self.fired += 1
        _write_prefix(effect, self.torn_bytes)
        raise OSError(self.errno, os.strerror(self.errno), str(effect.path))


class FailSync(FailAt):
    """The n-th sync of a file or folder fails; what reached the disk is then unknown."""

    def __init__(self, n: int, errno: int = codes.EIO, *, persistent: bool = False) -> None:
        super().__init__(n, errno, persistent=persistent, kinds=SYNCS)


class CrashAt:
    """The process dies just before effect number `n`, or `torn_bytes` into it when it is a write.

    Everything that was written before stays, as after SIGKILL: the kernel keeps what it was given. For power
    loss use `Recorder` and `crash_states`.
    """

    def __init__(self, n: int, *, torn_bytes: int = 0, kinds: Collection[str] | None = None) -> None:
        self.n = n
        self.torn_bytes = torn_bytes
        self.dead = False
        self.died_at: str | None = None
        self._counter = EffectCounter(kinds)

    def __call__(self, effect: Effect) -> None:
        if self.dead:
            raise SimulatedCrash(f"the process is dead since {self.died_at}")
        if self._counter.number(effect) != self.n:
            return
        self.dead = True
        self.died_at = f"effect {self.n}, {effect.kind} {effect.path}"
        _write_prefix(effect, self.torn_bytes)
        raise SimulatedCrash(self.died_at)


class ShortDisk:
    """A disk with `budget_bytes` left. A write that does not fit leaves what fits behind and raises ENOSPC.

    Counted is the growth of files by writing (a sparse extension costs nothing) and what unlinking, replacing
    and truncating gives back. `add` is somebody else freeing space.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.fired = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.budget_bytes += size

    def __call__(self, effect: Effect) -> None:
        match effect.kind:
            case "write":
                self._spend(effect)
            case "truncate":
                self.add(max(0, os.fstat(effect.fd).st_size - effect.length))
            case "unlink":
                self.add(_freed_by_removing(effect.path))
            case "rename" if effect.target is not None:
                self.add(_freed_by_removing(effect.target))

    def _spend(self, effect: Effect) -> None:
        size = os.fstat(effect.fd).st_size
        growth = max(0, effect.position + effect.length - max(size, effect.position))
        with self._lock:
            if growth <= self.budget_bytes:
                self.budget_bytes -= growth
                return
            fits, self.budget_bytes = self.budget_bytes, 0
            self.fired += 1
        _write_prefix(effect, effect.length - growth + fits)
        raise OSError(codes.ENOSPC, os.strerror(codes.ENOSPC), str(effect.path))


class Chain:
    """Several watchers as one, asked in order; the first that raises ends it. Put a `Recorder` last."""

    def __init__(self, *watchers: Watcher) -> None:
        self.watchers = watchers

    def __call__(self, effect: Effect) -> None:
        for watcher in self.watchers:
            watcher(effect)


def _write_prefix(effect: Effect, length: int) -> None:
    if effect.kind == "write" and effect.data is not None and length > 0:
        view = memoryview(effect.data).cast("B")[: min(length, effect.length)]
        os.pwrite(effect.fd, view, effect.position)


def _freed_by_removing(path: Path) -> int:
    try:
        info = path.lstat()
    except FileNotFoundError:
        return 0
    return info.st_size if info.st_nlink == 1 else 0
