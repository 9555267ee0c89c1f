"""A user's function that fails, stalls, or kills its process when a file asks for it: for tests of what runs tasks.

A request is a file in a folder that all processes see, named `<step>.<action>`; whoever claims it (by renaming it)
acts, once. Steps are places in a task's round, actions what happens there:

| step | where |
|---|---|
| `records` | in the function itself, when records pass it |
| `parcel` | before what is to be published is written |
| `maintenance` | before storage's upkeep |
| `checkpoint`, `token` | before the checkpoint, and when its token is there |
| `put` | inside the checkpoint, when a pack has been stored |

Actions: `raise`, `stall` (for some seconds, or until Spark has another attempt at the same task under way), `worker`
(kill -9 of this process), `executor` (of the JVM that started it). Later steps are reached by wrapping what the worker
calls, in this process, when the function is first called.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

STEPS = ("records", "parcel", "maintenance", "checkpoint", "put", "token")
COLUMNS = ["order", "shop", "amount"]
_wrapped: set[Path] = set()
_acts = count()  # a process that only stalls acts again


class Meddling:
    """Passes batches on as they are."""

    def __init__(self, requests: Path, *, stall_s: float = 20.0) -> None:
        self.requests = requests
        self.stall_s = stall_s

    def ask(self, step: str, action: str) -> None:
        """Leave a request."""
        self.requests.mkdir(parents=True, exist_ok=True)
        (self.requests / f"{step}.{action}").touch()

    @property
    def done(self) -> list[str]:
        """What was acted on so far, in order of names."""
        return sorted(path.stem for path in self.requests.glob("*.done"))

    @property
    def overtaken(self) -> list[str]:
        """The tasks whose stalled attempt saw another one begin."""
        return sorted(path.name for path in self.requests.glob("overtaken.*"))

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows:
            self._wrap_once()
            if (task := _spark_task()) is not None and self.requests.is_dir():
                (self.requests / f"begun.{task[0]}.{task[1]}").touch()
            self.act("records")
        return batch.select(COLUMNS)

    def act(self, step: str) -> None:
        for request in sorted(self.requests.glob(f"{step}.*")):
            if request.suffix == ".done":
                continue
            try:
                request.rename(request.with_name(f"{request.name}.{os.getpid()}-{next(_acts)}.done"))
            except FileNotFoundError:
                continue  # somebody else claimed it
            self._do(request.suffix[1:])

    def _do(self, action: str) -> None:
        if action == "raise":
            raise RuntimeError("asked to fail")
        if action == "stall":
            self._stall()
        elif action == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "executor":
            executor = _parent(os.getppid())
            if Path(f"/proc/{executor}/comm").read_text().strip() != "java":
                raise RuntimeError(f"process {executor} is no executor: whoever started this one is gone")
            os.kill(executor, signal.SIGKILL)
            time.sleep(60)  # it takes us with it

    def _stall(self) -> None:
        deadline, task = time.monotonic() + self.stall_s, _spark_task()
        while time.monotonic() < deadline:
            if task is not None and len(list(self.requests.glob(f"begun.{task[0]}.*"))) > 1:
                (self.requests / f"overtaken.{task[0]}").touch()
                return
            time.sleep(0.05)

    def _wrap_once(self) -> None:
        from tidegate.pipeline.tasks import worker
        from tidegate.storage.backends.folder import FolderBackend
        from tidegate.storage.runtime import WorkerStorageRuntime

        if self.requests in _wrapped:
            return
        _wrapped.add(self.requests)
        module: Any = worker
        runtime: Any = WorkerStorageRuntime
        backend: Any = FolderBackend
        module.write_parcel = self._around(module.write_parcel, before="parcel")
        runtime.maintain = self._around(runtime.maintain, before="maintenance")
        runtime.checkpoint = self._around(runtime.checkpoint, before="checkpoint", after="token")
        backend.put_all = self._around(backend.put_all, after="put")

    def _around(
        self, inner: Callable[..., Any], *, before: str | None = None, after: str | None = None
    ) -> Callable[..., Any]:
        @wraps(inner)
        def call(*arguments: Any, **named: Any) -> Any:
            if before is not None:
                self.act(before)
            result = inner(*arguments, **named)
            if after is not None:
                self.act(after)
            return result

        return call


def _spark_task() -> tuple[str, int] | None:
    """Which task of Spark's this is, and which attempt at it; None where Spark does not run it."""
    spark = sys.modules.get("pyspark")
    context = None if spark is None else spark.TaskContext.get()
    if context is None:
        return None
    return f"{context.stageId()}-{context.partitionId()}", context.taskAttemptId()


def _parent(process: int) -> int:
    """The process that started another one."""
    text = Path(f"/proc/{process}/stat").read_text()
    return int(text.rsplit(")", 1)[1].split()[1])
