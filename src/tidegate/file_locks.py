"""Locks on files: the two kinds the operating system has, made safe inside one process as well.

`lock_whole` (flock) belongs to the open file, so it also excludes other openers in this process.
`lock_record` (a POSIX record lock, what Java's `FileChannel.lock` takes) belongs to the process: a second
taker in the same process would "succeed", and closing *any* descriptor of the file would drop it; a table
of this process's holds makes both safe. Both answer at once: held, or `ConflictError`.

A forked child starts without any: record locks are not inherited, and the child's copies of whole-file locks
are closed at the fork, so that an orphan does not keep a dead parent's lock alive.

Does not cover waiting, leases or locks on object stores. Safe from any thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tidegate.errors import ConflictError


class FileLock:
    """A held lock; `release` gives it back. The lock file stays: unlinking it would race a new holder."""

    def __init__(self, path: Path, release: Callable[[], None]) -> None:
        self.path = path
        self._release: Callable[[], None] | None = release
        self._owner_pid = os.getpid()

    @property
    def held(self) -> bool:
        """False after release, and in a forked child: a lock belongs to the process that took it."""
        return self._release is not None and os.getpid() == self._owner_pid

    def release(self) -> None:
        release, self._release = self._release, None
        if release is not None and os.getpid() == self._owner_pid:
            release()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(slots=True)
class _PosixHold:
    """A record lock this process has, on the one descriptor of the file that it keeps."""

    fd: int
    shared: bool
    holders: int = 1


_posix_holds: dict[tuple[int, int], _PosixHold] = {}
_posix_guard = threading.Lock()
_whole_fds: set[int] = set()


def _forget_in_child() -> None:
    global _posix_guard
    _posix_guard = threading.Lock()  # another thread may have held it at the moment of the fork
    for fd in [*_whole_fds, *(hold.fd for hold in _posix_holds.values())]:
        os.close(fd)  # a copy: the parent's own descriptor, and so its lock, stays
    _whole_fds.clear()
    _posix_holds.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def lock_whole(path: Path, *, shared: bool, create: bool) -> FileLock:
    """Lock the file for this opener alone."""
    fd = _open(path, create)
    try:
        fcntl.flock(fd, _how(shared))
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise ConflictError(f"{path} is locked by another owner; close that one first") from None
        raise
    _whole_fds.add(fd)
    return FileLock(path, lambda: _release_whole(fd))


def lock_record(path: Path, *, shared: bool, create: bool) -> FileLock:
    """Lock the file for this process, as a Kafka broker does."""
    with _posix_guard:
        if (known := _known_hold(path)) is not None:
            if not (shared and known.shared):
                raise ConflictError(f"{path} is locked by another owner in this process; close it first")
            known.holders += 1
            return FileLock(path, lambda: _release_record(known))
        fd = _open(path, create)
        try:
            fcntl.lockf(fd, _how(shared))
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise ConflictError(f"{path} is locked by another process; stop that one first") from None
            raise
        hold = _PosixHold(fd, shared)
        info = os.fstat(fd)
        _posix_holds[info.st_dev, info.st_ino] = hold
        return FileLock(path, lambda: _release_record(hold))


def _known_hold(path: Path) -> _PosixHold | None:
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return None
    return _posix_holds.get((info.st_dev, info.st_ino))


def _release_whole(fd: int) -> None:
    _whole_fds.discard(fd)
    os.close(fd)


def _release_record(hold: _PosixHold) -> None:
    with _posix_guard:
        hold.holders -= 1
        if hold.holders == 0:
            for identity in [key for key, held in _posix_holds.items() if held is hold]:
                del _posix_holds[identity]
            os.close(hold.fd)


def _open(path: Path, create: bool) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    return os.open(path, flags, 0o644)


def _how(shared: bool) -> int:
    return (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
