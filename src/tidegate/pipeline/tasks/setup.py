"""What a worker needs to know to do any work of an app: where things are and what the flows are.

It travels to Spark's Python workers inside the closure, so it holds definitions and places, never anything open.

Thread rule: a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tidegate.errors import InvalidError
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.tasks.names import storage_task
from tidegate.storage import StorageConfig, TenantLimits, state_key_id


@dataclass(frozen=True)
class WorkerSetup:
    """One app as its workers see it.

    `log` is a folder of an embedded log or `kafka://host:port,…`; `state` a folder or `s3://…`. `client` are
    settings of the Kafka client; there are passwords among them, so they are never shown. `partitions` are the numbers
    of partitions of every topic the app reads or writes, as they were when the app was made, and `max_batch_bytes` the
    largest batches that the topics it writes take. `key_id` is the key that
    signs state, empty where it is not signed: a worker that would sign with another one, or with none, is refused.
    """

    app: str
    flows: tuple[Flow, ...]
    log: str
    state: str
    storage: StorageConfig
    client: Mapping[str, str] = field(default_factory=dict, repr=False)
    partitions: Mapping[str, int] = field(default_factory=dict)
    max_batch_bytes: Mapping[str, int] = field(default_factory=dict)
    key_id: str = field(default_factory=state_key_id)

    def flow(self, name: str) -> Flow:
        """The flow of this name; `InvalidError` when the app has none."""
        for flow in self.flows:
            if flow.name == name:
                return flow
        have = ", ".join(flow.name for flow in self.flows)
        raise InvalidError(f"app {self.app!r} has no flow {name!r}; it has {have or 'none'}")

    def storage_task(self, flow: str, task: int) -> str:
        """The name under which storage knows one task's state."""
        return storage_task(self.app, flow, task)

    @property
    def runtime_config(self) -> StorageConfig:
        """The storage of one process, which may have all tasks of the app at once; only the master deletes.

        What tasks keep under pressure is their share of the memory there is, so more tasks keep less each.
        """
        tasks = sum(flow.tasks(self.partitions[flow.source.topic]) for flow in self.flows)
        config = replace(self.storage, deleted_by="master")
        if tasks <= config.max_tasks:
            return config
        limits = (config.write_buffer, config.base_runs, config.state_cache)
        wanted = tasks * sum(each.reserve_bytes for each in limits)
        share = min(1.0, config.worker_total_bytes / wanted) if wanted else 1.0
        write_buffer, base_runs, state_cache = (
            TenantLimits(int(each.reserve_bytes * share), each.soft_max_bytes) for each in limits
        )
        return replace(
            config, max_tasks=tasks, write_buffer=write_buffer, base_runs=base_runs, state_cache=state_cache
        )
