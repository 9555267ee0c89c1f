"""Whether anybody ages a log, for everybody to see.

An embedded log has no daemon: without somebody who runs its chores nothing in it ever ages. Two plain files in
the log folder tell whether somebody does: `tidegate.maintenance.lock` is held, shared, for as long as that lasts
(the operating system lets it go when the holder dies), and `tidegate.maintenance` says how often and when last,
as one JSON object `{"interval_ms": …, "last_run_ms": … or null}`. Both are hints; nothing is decided by them.

Thread rule: one attendance, one thread; `owner_status` may be asked anywhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tidegate.errors import ConflictError, InvalidError
from tidegate.files import Files

LOCK_NAME = "tidegate.maintenance.lock"
STATUS_NAME = "tidegate.maintenance"
_STATUS_LIMIT_BYTES = 4096


class Attendance:
    """Held while somebody ages the log; a context manager."""

    def __init__(self, log_folder: Path, interval_ms: int, *, files: Files) -> None:
        self._folder = log_folder
        self._interval_ms = interval_ms
        self._files = files
        self._lock = files.lock(log_folder / LOCK_NAME, shared=True)
        self.tell(last_run_ms=None)

    def tell(self, *, last_run_ms: int | None) -> None:
        """A pass was made then."""
        status = {"interval_ms": self._interval_ms, "last_run_ms": last_run_ms}
        self._files.publish(self._folder / STATUS_NAME, json.dumps(status).encode("ascii"), sync=False)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> Attendance:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class OwnerStatus:
    """Whether somebody ages a log now, how often, and when retention last ran there."""

    running: bool
    interval_ms: int
    last_run_ms: int | None


def owner_status(log_folder: Path, *, files: Files) -> OwnerStatus | None:
    """Who ages the log, asked from any process; None when nobody ever did."""
    try:
        status = json.loads(files.read(log_folder / STATUS_NAME, limit=_STATUS_LIMIT_BYTES))
        interval_ms, last_run_ms = int(status["interval_ms"]), status["last_run_ms"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError, InvalidError):  # a hint that says nothing
        interval_ms, last_run_ms = 0, None
    if last_run_ms is not None and not isinstance(last_run_ms, int):
        last_run_ms = None
    return OwnerStatus(_is_attended(log_folder, files), interval_ms, last_run_ms)


def _is_attended(log_folder: Path, files: Files) -> bool:
    try:
        with files.lock(log_folder / LOCK_NAME, create=False):
            return False
    except FileNotFoundError:
        return False
    except ConflictError:
        return True
