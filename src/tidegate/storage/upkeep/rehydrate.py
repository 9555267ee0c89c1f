"""Rehydration: runs that are only stored get their hot copies back, into BaseRuns. The stored copies stay.

A generator: phases `captured`, `loaded`. Nothing happens when the bucket is in memory already, or when the worker
has no room for it: rehydration is a favour to readers, never a reason to evict others.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from tidegate.storage.index.entries import RunEntry
from tidegate.storage.memory.scratch import Scratch
from tidegate.storage.parts import StorageParts, own_memory
from tidegate.storage.tasks import AttachedStore, TaskStorage
from tidegate.storage.upkeep.operations import WAITING, Operation, undoing


def rehydrate(parts: StorageParts, task: TaskStorage, store: AttachedStore, bucket: int) -> Operation[bool]:
    """Bring every run of the bucket into memory, whole; whether anything was published."""
    index = store.state.index
    with ExitStack() as held:
        while (permit := parts.scratch.try_permit(Scratch.MAINTENANCE)) is None:
            yield WAITING
        held.callback(permit.close)
        unlock = parts.locks.try_lock(task.task, store.spec.name, bucket)
        if unlock is None:
            return False
        held.callback(unlock)
        undo = held.enter_context(undoing())
        captured, lease = index.capture(bucket, bucket, lambda refs: parts.pins.pin(task.task, refs))
        if lease is not None:
            held.callback(lease.close)
        cold = [run for run in captured[0].runs if not run.is_hot] if captured else []
        if not cold or not parts.base_runs.has_room(task.task, sum(run.nbytes for run in cold)):
            return False
        started = parts.clock.monotonic_ms()
        yield "captured"
        pairs: list[tuple[RunEntry, RunEntry]] = []
        for run, stored in zip(cold, parts.load_all(task, store.spec, cold), strict=True):
            hot = parts.base_runs.put(task.task, own_memory(stored, run.nbytes))
            undo.push(partial(parts.drop_hot, task, [hot]))
            pairs.append((run, replace(run, hot=hot)))
        yield "loaded"
        found = captured[0]
        if not index.set_places(bucket, found.data_version, found.layout_version, pairs):
            parts.stats.lost(task.task, "rehydrate")
            return False
        undo.forget()
        parts.drop_hot(task, [run.hot for run in cold if run.hot is not None])
        nbytes = sum(run.nbytes for run in cold)
        parts.stats.rehydrated(task.task, runs=len(cold), nbytes=nbytes, ms=parts.ms_since(started))
        return True
