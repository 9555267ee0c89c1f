"""What a task's operators are given: their task's id and the storage facade, and nothing behind it.

The worker builds one `WorkerStorageRuntime` and one `RuntimeContext` for each task it hosts. An operator reads with
`reader`, writes with `writer`, keeps per-key state behind `state_handle`, and may start and stop the maintenance of
its own task (INV-1); pool, pins, caches and backend are out of its sight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidegate.storage.index.state import BucketIndexState
from tidegate.storage.reading.reader import StorageReader
from tidegate.storage.state.handle import StateHandle
from tidegate.storage.state.ports import StateCodec, Value
from tidegate.storage.writer import StorageWriter

if TYPE_CHECKING:
    from tidegate.storage.runtime import WorkerStorageRuntime


class RuntimeContext:
    """One task's way to its worker's storage."""

    def __init__(self, task: str, storage: WorkerStorageRuntime) -> None:
        self.task = task
        self._storage = storage

    def reader(self) -> StorageReader:
        return self._storage.reader()

    def writer(self) -> StorageWriter:
        return self._storage.writer()

    def state_handle(
        self, namespace: str, codec: StateCodec[Value], *, keyed: bool = True
    ) -> StateHandle[Value]:
        """The task's state of this name; the same values for every handle of it.

        With `keyed=False` it has named values only (`keep`).
        """
        return self._storage.state_handle(self.task, namespace, codec, keyed=keyed)

    def attach(self, state: BucketIndexState) -> None:
        """Give a state's rows to storage: maintained, checkpointed and restored from now on."""
        self._storage.attach(self.task, state)

    def start_maintenance(self) -> None:
        self._storage.start(self.task)

    def stop_maintenance(self) -> None:
        self._storage.stop(self.task)

    def maintain(self, budget_ms: int) -> bool:
        """Do maintenance here and now for about so long; True when nothing is left to do."""
        return self._storage.maintain(self.task, budget_ms)
