"""The maintenance operations of a runtime as generators, for tests that run them step by step."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.storage import BucketIndexState, WorkerStorageRuntime
from tidegate.storage.maintenance.compaction import compact
from tidegate.storage.maintenance.dump import Relief, dump, rehydrate, relieve
from tidegate.storage.maintenance.operations import Operation


def compacting(
    runtime: WorkerStorageRuntime, task: str, state: BucketIndexState, bucket: int, *, whole: bool = True
) -> Operation[bool]:
    """Merge runs of one bucket: all in memory, or (`whole=False`) those whose sizes make a merge worthwhile."""
    return compact(runtime._store(task, state), bucket, whole=whole)


def dumping(
    runtime: WorkerStorageRuntime, task: str, state: BucketIndexState, buckets: Sequence[int], *, evict: bool
) -> Operation[int]:
    """Store the runs of these buckets, keeping or evicting their hot copies."""
    store = runtime._store(task, state)
    return dump(store.task, [(store, buckets)], evict=evict)


def rehydrating(
    runtime: WorkerStorageRuntime, task: str, state: BucketIndexState, bucket: int
) -> Operation[bool]:
    """Load one bucket's runs back into memory."""
    return rehydrate(runtime._store(task, state), bucket)


def relieving(runtime: WorkerStorageRuntime, task: str) -> Operation[Relief]:
    """Bring the task's memory below its limits by evicting its coldest keys."""
    return relieve(runtime._parts.tasks.get(task))


def repacking(runtime: WorkerStorageRuntime, task: str) -> Operation[None]:
    """Rewrite the live runs of packs that are mostly dead."""
    return runtime.supervisor.repacking(runtime._parts.tasks.get(task))


def deleting(runtime: WorkerStorageRuntime, task: str) -> Operation[None]:
    """Delete retired packs without references."""
    return runtime.supervisor.deleting(runtime._parts.tasks.get(task))
