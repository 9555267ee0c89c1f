"""Which functions of tidegate are called, by their qualified names, in this process or in those of a command.

`Calls()` records while its block runs, in this thread and in threads that are started meanwhile. `in_processes` gives
the environment with which a command, its Spark workers included, appends the names to a file.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FILE = "TIDEGATE_CALLS"
TIME_SEGMENTS = {
    "TimeSegments.get_or_create_segment_if_live",
    "TimeSegments.cleanup_expired_segments",
    "TimeSegments.open_existing",
}
STORAGE = {  # what any way in calls, from the writer to the packs and back
    "RuntimeContext.writer",
    "StorageWriter.append",
    "BucketIndex.insert",
    "WriteBuffer.put_all",
    "BaseRuns.__init__",
    "BacklogBudget.acquire",
    "WorkerStorageRuntime.checkpoint",
    "StorageReader.plan",
    "StorageReader.load",
    "StorageReader.scan",
    "BatchPins.pin",
    "ScratchLimiter.try_permit",
}
SITE = """
import os, sys, threading
def _install():
    out = os.open(os.environ["TIDEGATE_CALLS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    ours, seen = {}, set()
    def note(frame, event, argument):
        if event != "call":
            return
        code = frame.f_code
        is_ours = ours.get(code)
        if is_ours is None:
            is_ours = ours[code] = "/tidegate/" in code.co_filename
        if is_ours:
            owner = frame.f_locals.get("self")
            name = code.co_qualname if owner is None else type(owner).__name__ + "." + code.co_name
            if name not in seen:
                seen.add(name)
                os.write(out, (name + "\\n").encode())
    threading.setprofile(note)
    sys.setprofile(note)
if "TIDEGATE_CALLS" in os.environ:
    _install()
"""


class Calls:
    """The functions that were called, like `WindowStore.put_batch`: methods under the class of their object."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._ours: dict[CodeType, bool] = {}

    def __enter__(self) -> Calls:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        is_ours = self._ours.get(code)
        if is_ours is None:
            is_ours = self._ours[code] = "/tidegate/" in code.co_filename
        if is_ours:
            owner = frame.f_locals.get("self")
            self.names.add(code.co_qualname if owner is None else f"{type(owner).__name__}.{code.co_name}")


def in_processes(folder: Path) -> tuple[dict[str, str], Path]:
    """The environment of a command, and the file its processes append to."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE)
    names = folder / "calls"
    names.touch()
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), FILE: str(names)}, names
