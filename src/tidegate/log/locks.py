"""The locks of a log folder.

| lock | kind | held | excludes |
|---|---|---|---|
| `<log>/.lock` | POSIX record lock, shared | while any partition is open for writing | a Kafka broker |
| `<log>/tidegate.lock` | whole file, exclusive | briefly | other processes changing the folder's own files |
| `<partition>/tidegate.lock` | whole file, exclusive | while it is open for writing | a second writer |
| `<log>/tidegate.maintenance.lock` | whole file, shared | while a process runs maintenance | nobody (a hint) |

K1  only locks that are held briefly are waited for, and only for a bounded time.
K2  a lock belongs to the process that took it: a forked child must open the log again.
K3  the operating system releases a dead owner's locks, so none ever has to be removed by hand.

The partition lock's file names its holder, for error messages only; `tidegate.maintenance` says how often
maintenance runs and when it ran last: `{"interval_ms": …, "last_run_ms": … or null}`. Readers take no lock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidegate.clock import Clock
from tidegate.errors import ConflictError, InvalidError
from tidegate.file_locks import FileLock
from tidegate.files import Files

BROKER_LOCK_NAME = ".lock"
LOCK_NAME = "tidegate.lock"
_WAIT_MS = 10_000
_MAINTENANCE_WAIT_MS = 5000
_PAUSE_MS = 10
_OWNER_NOTE_BYTES = 128


def lock_against_brokers(files: Files, log_folder: Path) -> FileLock:
    """Take the shared lock that keeps brokers out; other Tidegate processes may share it."""
    path = log_folder / BROKER_LOCK_NAME
    try:
        return files.lock(path, shared=True, posix=True)
    except ConflictError:
        raise ConflictError(
            f"{log_folder} is in use by a Kafka broker (it holds {path.name}); stop the broker, or reach the "
            f"log through it with --log kafka://HOST:PORT"
        ) from None


def lock_partition(files: Files, partition_folder: Path, clock: Clock, *, briefly: bool = False) -> FileLock:
    """Lock a partition for writing, or fail at once with the name of its holder.

    Maintenance locks partitions `briefly`; only such a holder is waited for, and for a bounded time (K1).
    """
    path = partition_folder / LOCK_NAME
    deadline_ms = clock.monotonic_ms() + _MAINTENANCE_WAIT_MS
    while True:
        try:
            lock = files.lock(path)
            break
        except ConflictError:
            owner, is_brief = _read_owner(files, path)
            if is_brief and not briefly and clock.monotonic_ms() < deadline_ms:
                clock.sleep_ms(_PAUSE_MS)
                continue
            doing = "cleaned" if is_brief else "written"
            raise ConflictError(
                f"partition {partition_folder.name} is being {doing} by {owner}; close that one first "
                f"(reading needs no lock)"
            ) from None
    try:
        note_owner(files, partition_folder, briefly=briefly)
    except BaseException:
        lock.release()
        raise
    return lock


def note_owner(files: Files, partition_folder: Path, *, briefly: bool) -> None:
    """Write the holder's name into the lock file; only the holder may call it."""
    with files.open(partition_folder / LOCK_NAME, write=True) as note:
        said = f"pid {os.getpid()}{' briefly' if briefly else ''}"
        note.write_at(0, said.ljust(_OWNER_NOTE_BYTES).encode("ascii"))


@contextmanager
def changing_folder(
    files: Files, log_folder: Path, clock: Clock, *, wait_ms: int = _WAIT_MS
) -> Iterator[None]:
    """Hold the short lock around a change of the folder's own files: catalog, checkpoints, clean marker."""
    deadline_ms = clock.monotonic_ms() + wait_ms
    while True:
        try:
            lock = files.lock(log_folder / LOCK_NAME)
            break
        except ConflictError:
            if clock.monotonic_ms() >= deadline_ms:
                raise ConflictError(
                    f"{log_folder}: another process has been changing the log's catalog for over "
                    f"{wait_ms // 1000} s; see who holds {LOCK_NAME} there, then retry"
                ) from None
            clock.sleep_ms(_PAUSE_MS)
    with lock:
        yield


def check_still_owner(lock: FileLock, what: str) -> None:
    """Refuse work in a forked child and after close (K2)."""
    if not lock.held:
        raise ConflictError(
            f"{what} is not open in this process: it was closed, or opened before a fork; open it again here"
        )


def _read_owner(files: Files, path: Path) -> tuple[str, bool]:
    """Return the holder's name for a message, and whether it holds the lock only briefly."""
    try:
        note = files.read(path, limit=_OWNER_NOTE_BYTES).decode("ascii", "replace").split()
    except FileNotFoundError:
        note = []
    if len(note) < 2 or note[0] != "pid" or not note[1].isdigit():
        return "another owner", False
    owner = "this process" if int(note[1]) == os.getpid() else f"process {note[1]}"
    return owner, note[2:] == ["briefly"]


MAINTENANCE_LOCK_NAME = "tidegate.maintenance.lock"

STATUS_NAME = "tidegate.maintenance"

_STATUS_LIMIT_BYTES = 4096


class MaintenanceLock:
    """Lock held by the process that runs retention and compaction; a context manager."""

    def __init__(self, log_folder: Path, interval_ms: int, *, files: Files) -> None:
        self._folder = log_folder
        self._interval_ms = interval_ms
        self._files = files
        self._lock = files.lock(log_folder / MAINTENANCE_LOCK_NAME, shared=True)
        self.publish(last_run_ms=None)

    def publish(self, *, last_run_ms: int | None) -> None:
        """Publish the time of the last maintenance run."""
        status = {"interval_ms": self._interval_ms, "last_run_ms": last_run_ms}
        self._files.publish(self._folder / STATUS_NAME, json.dumps(status).encode("ascii"), sync=False)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> MaintenanceLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class OwnerStatus:
    """Whether a process maintains a log now, how often, and when retention last ran."""

    running: bool
    interval_ms: int
    last_run_ms: int | None


def owner_status(log_folder: Path, *, files: Files) -> OwnerStatus | None:
    """Return the maintenance status of a log, from any process; None when it was never maintained."""
    try:
        status = json.loads(files.read(log_folder / STATUS_NAME, limit=_STATUS_LIMIT_BYTES))
        interval_ms, last_run_ms = int(status["interval_ms"]), status["last_run_ms"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError, InvalidError):  # an unreadable hint
        interval_ms, last_run_ms = 0, None
    if last_run_ms is not None and not isinstance(last_run_ms, int):
        last_run_ms = None
    return OwnerStatus(_is_held(log_folder, files), interval_ms, last_run_ms)


def _is_held(log_folder: Path, files: Files) -> bool:
    try:
        with files.lock(log_folder / MAINTENANCE_LOCK_NAME, create=False):
            return False
    except FileNotFoundError:
        return False
    except ConflictError:
        return True
