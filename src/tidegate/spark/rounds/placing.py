"""Which slot keeps which task, and what a process may use of a machine's memory: pure rules.

A slot is a Python process that is met again, round after round (`slots`). A task always goes to the same one, so its
state is found there warm. How many slots there are may change from run to run; nothing stored depends on it.

Thread rule: pure functions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tidegate.pipeline.tasks.setup import WorkerSetup
from tidegate.storage import StorageConfig, TenantLimits

HOME: Final = 0  # the slot that brings home what sources of re-keyed flows came to


def places(setup: WorkerSetup, slots: int) -> dict[tuple[str, int], int]:
    """(flow, task) → slot, for every task of the app: dealt out in turn, so that each flow uses all slots."""
    tasks = [
        (flow.name, task)
        for flow in setup.flows
        for task in range(flow.tasks(setup.partitions[flow.source.topic]))
    ]
    return {task: number % slots for number, task in enumerate(tasks)}


def share_of(config: StorageConfig, processes: int) -> StorageConfig:
    """The storage of one of several processes that share a machine's memory; the backlog is one of disk and stays."""
    if processes <= 1:
        return config
    total = max(1, config.worker_total_bytes // processes)
    ceiling = config.memory_ceiling_bytes // processes
    limits = (config.write_buffer, config.base_runs, config.state_cache)
    wanted = config.max_tasks * sum(each.reserve_bytes for each in limits)
    part = min(1.0, total / wanted) if wanted else 1.0
    write_buffer, base_runs, state_cache = (
        TenantLimits(int(each.reserve_bytes * part), max(1, min(each.soft_max_bytes, total)))
        for each in limits
    )
    return replace(
        config,
        worker_total_bytes=total,
        memory_ceiling_bytes=ceiling,
        max_batch_bytes=min(config.max_batch_bytes, ceiling - total),
        write_buffer=write_buffer,
        base_runs=base_runs,
        state_cache=state_cache,
    )
