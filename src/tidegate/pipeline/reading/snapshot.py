"""One flow as a commit of its app left it: the tasks' operators, restored and only read.

Restoring reads metadata; rows are read when a query asks for them. Nothing is written or deleted here, and no lock is
taken: commits are immutable, and the last ones stay readable.

Thread rule: reading from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from tidegate.clock import Clock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.pipeline.definition.changes import as_recorded
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.rounds.records import KEPT, CommitRecord, Records, TaskLine
from tidegate.pipeline.tasks.chain import TaskChain, WindowOperators
from tidegate.pipeline.tasks.names import storage_task
from tidegate.pipeline.tasks.stateless import Around
from tidegate.randomness import SystemRandomness
from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.snapshot import Snapshot
from tidegate.windows.operators.dedupe import DedupeOperator


@dataclass(frozen=True)
class FlowSource:
    """What is read of a flow: the operators of its tasks."""

    flow: Flow
    chains: dict[int, TaskChain]

    @cached_property
    def windows(self) -> dict[int, WindowOperators]:
        """Task → its operator that makes the windows."""
        found: dict[int, WindowOperators] = {}
        for number in sorted(self.chains):
            operator = self.chains[number].operators[-1]
            if isinstance(operator, DedupeOperator):
                raise InvalidError(f"flow {self.flow.name} has no windows; read its topic instead")
            found[number] = operator
        return found


FlowSnapshot: TypeAlias = Snapshot[CommitRecord, FlowSource]


class AppCommits:
    """The commits of an app with what they hold of one flow, for a `CommitFollower`."""

    def __init__(
        self,
        backend: StorageBackend,
        app: str,
        flow: Flow,
        *,
        clock: Clock,
        round: int | None = None,
        storage: StorageConfig | None = None,
        tasks: frozenset[int] | None = None,
    ) -> None:
        """With `round` that commit is served, whatever comes; with `tasks`, only what these hold of it.

        `storage` is the app's: it bounds what reading merges.
        """
        self.name = flow.name
        self.records = Records(backend, app)
        self._backend, self._app, self._flow = backend, app, flow
        self._clock, self._storage, self._round = clock, storage, round
        self._only: CommitRecord | None = None
        self._wanted = tasks

    def newest(self) -> CommitRecord:
        if self._only is not None:
            return self._only
        number = self.records.newest() if self._round is None else self._round
        if number is None:
            raise UnavailableError(f"app {self._app} has no commit yet; run it, or wait for its first round")
        commit = self.records.read_commit(number)[0]
        self._only = None if self._round is None else commit
        return commit

    def open(self, commit: CommitRecord) -> FlowSnapshot:
        flow, tokens = self._as_recorded(commit), self._tokens(commit)
        tasks = max(4, len(tokens))
        config = StorageConfig(
            max_tasks=tasks, worker_total_bytes=tasks * (256 << 20), memory_ceiling_bytes=tasks * (512 << 20),
            deleted_by="master",
        )  # fmt: skip
        if self._storage is not None:
            ceiling = config.worker_total_bytes + self._storage.largest_append_bytes
            most = min(config.max_batch_bytes, self._storage.max_batch_bytes)
            config = replace(config, memory_ceiling_bytes=ceiling, max_batch_bytes=most)
        sources = [line.partition for line in commit.sources if line.flow == flow.name]
        around, randomness = Around(self._backend, self._clock), SystemRandomness()

        def attach(runtime: WorkerStorageRuntime) -> FlowSource:
            chains = {}
            for task, number in self._tasks(commit).items():
                partitions = sources if flow.rekey_at is not None else [number]
                chains[number] = TaskChain(runtime, task, flow, partitions, around, randomness=randomness)
            return FlowSource(flow, chains)

        return Snapshot(self._backend, config, commit, tokens, attach, clock=self._clock)

    def fits(self, view: FlowSnapshot, commit: CommitRecord) -> bool:
        return view.commit.definition == commit.definition and self._tasks(view.commit) == self._tasks(commit)

    def show(self, view: FlowSnapshot, commit: CommitRecord) -> None:
        view.show(commit, self._tokens(commit))

    def gone(self, commit: CommitRecord) -> str:
        if commit.round in self.records.rounds():
            return ""
        return (
            f"round {commit.round} of app {self._app} is not kept any more: the app has made more than {KEPT} newer "
            f"ones while table {self.name} was read; read it again"
        )

    def _tasks(self, commit: CommitRecord) -> dict[str, int]:
        """Storage task → its number in the flow."""
        return {storage_task(self._app, self.name, line.task): line.task for line in self._lines(commit)}

    def _tokens(self, commit: CommitRecord) -> dict[str, bytes]:
        lines = self._lines(commit)
        if not lines and any(line.flow == self.name for line in commit.sources):
            raise UnavailableError(
                f"app {self._app} has begun with flow {self.name!r} and has no round of it yet; wait for its first"
            )
        if not lines:
            raise InvalidError(
                f"commit {commit.round} of app {self._app} knows no flow {self.name!r}; run the app as it is "
                "defined now once, or read it with the definition it was run with"
            )
        return {storage_task(self._app, self.name, line.task): line.token for line in lines}

    def _lines(self, commit: CommitRecord) -> list[TaskLine]:
        found = [line for line in commit.tasks if line.flow == self.name]
        return [line for line in found if self._wanted is None or line.task in self._wanted]

    def _as_recorded(self, commit: CommitRecord) -> Flow:
        """The flow with its stores laid out as they were when the commit was made."""
        found = self.records.load_app()
        lines = () if found is None else found[0].definitions.get(commit.definition, ())
        line = next((each for each in lines if each.name == self.name), None)
        return self._flow if line is None else as_recorded(self._flow, line.description)
