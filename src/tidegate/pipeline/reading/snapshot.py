"""One flow as a commit of its app left it: the tasks' operators, restored and only read.

Restoring reads metadata; rows are read when a query asks for them. Nothing is written or deleted here, and no lock is
taken: commits are immutable, and the last ones stay readable. When a master has gone on by more than the kept commits,
packs of this one may be gone; reading then says so (`MissingObjectError`) and whoever holds the snapshot shows a newer
one.

Thread rule: `show` and `close` by one thread while nobody reads; reading from any.
"""

from __future__ import annotations

from tidegate.clock import Clock
from tidegate.errors import InternalError, InvalidError, UnavailableError
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.rounds.records import CommitRecord
from tidegate.pipeline.tasks.chain import TaskChain
from tidegate.pipeline.tasks.names import storage_task
from tidegate.pipeline.tasks.stateless import Around
from tidegate.randomness import SystemRandomness
from tidegate.scheduling import NoScheduler
from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.storage.backends.port import StorageBackend
from tidegate.tables.building.source import kept_open


class FlowSnapshot:
    """The tasks of one flow, as one commit has them."""

    def __init__(
        self, backend: StorageBackend, app: str, flow: Flow, commit: CommitRecord, *, clock: Clock
    ) -> None:
        self._app, self.flow = app, flow
        lines = [line for line in commit.tasks if line.flow == flow.name]
        config = StorageConfig(
            max_tasks=max(4, len(lines)), worker_total_bytes=max(4, len(lines)) * (256 << 20),
            memory_ceiling_bytes=max(4, len(lines)) * (512 << 20), deleted_by="master",
        )  # fmt: skip
        self._runtime = WorkerStorageRuntime.open(
            config, kept_open(backend), clock=clock, scheduler=NoScheduler()
        )
        self._around = Around(backend, clock)
        self._chains: dict[int, TaskChain] = {}
        self.commit = commit
        self.show(commit)

    def show(self, commit: CommitRecord) -> None:
        """Move to another commit; packs that are open stay open."""
        lines = [line for line in commit.tasks if line.flow == self.flow.name]
        if not lines and any(line.flow == self.flow.name for line in commit.sources):
            raise UnavailableError(
                f"app {self._app} has begun with flow {self.flow.name!r} and has no round of it yet; wait for its first"
            )
        if not lines:
            raise InvalidError(
                f"commit {commit.round} of app {self._app} knows no flow {self.flow.name!r}; run the app as it is "
                "defined now once, or read it with the definition it was run with"
            )
        sources = [line.partition for line in commit.sources if line.flow == self.flow.name]
        for line in lines:
            task = storage_task(self._app, self.flow.name, line.task)
            self._runtime.apply_checkpoint(task, line.token or None)
            if line.task not in self._chains:
                partitions = sources if self.flow.rekey_at is not None else [line.task]
                self._chains[line.task] = TaskChain(
                    self._runtime, task, self.flow, partitions, self._around, randomness=SystemRandomness()
                )
        self.commit = commit

    @property
    def chains(self) -> list[TaskChain]:
        """One for each task, in their order."""
        return [self._chains[number] for number in sorted(self._chains)]

    @property
    def tasks(self) -> list[int]:
        return sorted(self._chains)

    def chain(self, task: int) -> TaskChain:
        found = self._chains.get(task)
        if found is None:
            raise InternalError(f"flow {self.flow.name} has no task {task}")
        return found

    def close(self) -> None:
        self._runtime.close()
