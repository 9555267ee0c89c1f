"""What a worker knows of one task: its stores, its keys' clock, its state caches, its checkpoints, its failure.

Owned by the runtime, shared with the writer and maintenance. A task's stores are changed by its one operator
thread; maintenance only looks them up. `failure` is set once, by whichever maintenance operation failed, and from
then on every call for the task raises it until the task is restored.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidegate.errors import CorruptError, InternalError, InvalidError, UnavailableError
from tidegate.storage.index.state import BucketIndexState
from tidegate.storage.packs.manifest import ManifestChain, StoreState
from tidegate.storage.spec import Cursor, StoreSpec

if TYPE_CHECKING:
    from tidegate.storage.memory.key_clock import KeyClock

STATE_PREFIX = "state."


@dataclass(slots=True)
class AttachedStore:
    """One store of a task, with what the index does not know: the writer's next number."""

    state: BucketIndexState
    next_seq: int = 0
    hot_buckets: int = 2  # the newest buckets that periodic maintenance leaves alone

    @property
    def spec(self) -> StoreSpec:
        return self.state.index.spec


@dataclass(slots=True)
class TaskStorage:
    """One task of the worker."""

    task: str
    key_clock: KeyClock
    chain: ManifestChain
    stores: dict[str, AttachedStore] = field(default_factory=dict)
    restored: dict[str, StoreState] = field(default_factory=dict)  # of the last restore, not attached yet
    cursors: dict[str, Cursor | None] = field(default_factory=dict)  # the highest of each restored store
    number: int = 0  # of the last checkpoint
    retained: list[int] = field(default_factory=list)  # checkpoints whose objects are held, oldest first
    is_measured: bool = True  # whether the files of restored packs were looked at for what is dead in them
    failure: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Raise what stopped the task, if anything did."""
        failure = self.failure
        if failure is None:
            return
        message = (
            f"task {self.task} was stopped because maintenance failed: {failure}. "
            "Restore it from its last checkpoint (apply_checkpoint), or start it anew"
        )
        if isinstance(failure, CorruptError):
            raise CorruptError(message, path=failure.path, position=failure.position) from failure
        raise UnavailableError(message) from failure

    def fail(self, error: BaseException) -> None:
        """Stop the task; the first reason stays."""
        with self.lock:
            if self.failure is None:
                self.failure = error

    def store_of(self, state: BucketIndexState) -> AttachedStore:
        """The attached store of a state, or `InvalidError`."""
        spec = state.index.spec
        found = self.stores.get(spec.name)
        if found is None or found.state.index is not state.index:
            raise InvalidError(
                f"store {spec.name} of task {self.task} is not attached"
                + ("" if found is None else " with this state: another one has its name")
                + "; call runtime.attach(task, state) first"
            )
        return found

    def attached(self) -> list[AttachedStore]:
        """All stores, also those of state blobs, by name."""
        with self.lock:
            return [self.stores[name] for name in sorted(self.stores)]


class Tasks:
    """All tasks of the worker, by id. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskStorage] = {}

    def get(self, task: str) -> TaskStorage:
        found = self._tasks.get(task)
        if found is None:
            raise InvalidError(
                f"task {task!r} has no storage here: attach a state or apply a checkpoint first"
            )
        return found

    def find(self, task: str) -> TaskStorage | None:
        return self._tasks.get(task)

    def add(self, storage: TaskStorage) -> TaskStorage:
        """The task's storage: this one, or the one that was there already."""
        with self._lock:
            return self._tasks.setdefault(storage.task, storage)

    def remove(self, task: str) -> None:
        with self._lock:
            if self._tasks.pop(task, None) is None:
                raise InternalError(f"task {task} is removed twice")

    def all(self) -> list[TaskStorage]:
        with self._lock:
            return list(self._tasks.values())
