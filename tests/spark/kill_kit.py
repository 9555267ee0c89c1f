"""What a run that is killed, and the test that kills it, share: a wrong wall clock, and disks that fail when told to.

Imported by the driver's script and by Spark's workers, so that both sides of the test define the same app.
"""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.files import Effect, Files

ASKED = "TIDEGATE_TEST_FAULTS"  # set where faults are wanted
_installed: list[Path] = []


class JumpingClock(SystemClock):
    """A wall clock that is wrong by as many milliseconds as a file says."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def now_ms(self) -> int:
        try:
            return super().now_ms() + int(self._path.read_text() or 0)
        except FileNotFoundError:
            return super().now_ms()


class Failing:
    """Passes batches on; from the first one on, effects on files of its process fail as a file says: `EIO 0.02`."""

    def __init__(self, faults: Path) -> None:
        self.faults = faults

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if os.environ.get(ASKED):
            self.install()
        return batch.select(["order", "shop", "amount"])

    def install(self) -> None:
        if self.faults in _installed:
            return
        _installed.append(self.faults)
        plain, chance, path = Files.__init__, random.Random(os.getpid()), self.faults

        def fails(effect: Effect) -> None:
            if not effect.mutates:
                return
            try:
                name, share = path.read_text().split()
            except (FileNotFoundError, ValueError):
                return
            if chance.random() < float(share):
                with (path.parent / "failed").open("a") as told:
                    told.write(".")
                raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)))

        def watched(self: Any, watch: Any = None) -> None:
            plain(self, watch or fails)

        files: Any = Files
        files.__init__ = watched
