"""Eviction of keys: every hot row of the chosen keys, of all stores and buckets, and their state, go together.

The keys were chosen (see `pressure`). Their state blobs are flushed into the task's state store first, so that
blobs are rows like others. Then every run that holds one of the keys in memory is looked at: those that have no
stored copy are written, whole, and each hot copy is replaced by one without the keys, or goes.

E1  a key's blob leaves memory only when all its rows are stored and every bucket was published (INV-20). A key
    with a bucket that was busy or changed meanwhile keeps its blob and is tried again by the next round.
E2  keys in use are never chosen; one that came into use since then keeps its blob.
E3  stored runs are never rewritten, and the backlog does not move (INV-14).

A generator: phases `flushed`, `captured`, `stored`, `published`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidegate.kernels.run_merge import choose_lines
from tidegate.storage.index.entries import Bucket, HotCopy, RunEntry
from tidegate.storage.memory.scratch import Scratch
from tidegate.storage.parts import StorageParts
from tidegate.storage.runs.merging import select_keys
from tidegate.storage.runs.run import Int64s, Run
from tidegate.storage.tasks import AttachedStore, TaskStorage
from tidegate.storage.upkeep.dump import Places, store_runs
from tidegate.storage.upkeep.operations import WAITING, Operation, Undo, undoing

Hashes = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Evicted:
    """What an eviction did."""

    keys: int = 0
    freed_bytes: int = 0  # of rows
    state_bytes: int = 0
    retried: int = 0  # keys that keep their blob because a bucket of theirs was busy


class Chosen(NamedTuple):
    """A run that holds chosen keys in memory, and on which lines of the hot copy's directory."""

    entry: RunEntry
    hot: HotCopy
    lines: Int64s

    @property
    def hashes(self) -> Hashes:
        return self.hot.run.hashes[self.lines]


def evict_keys(parts: StorageParts, task: TaskStorage, hashes: Hashes) -> Operation[Evicted]:
    """Move everything the keys (ascending hashes) have in memory to the backend."""
    for cache in parts.states.of(task.task):
        cache.flush_hashes(hashes)
    yield "flushed"
    kept: list[Hashes] = []
    result = Evicted(keys=len(hashes))
    for store in task.attached():
        freed, missed = yield from _evict_store(parts, task, store, hashes)
        result.freed_bytes += freed
        kept += missed
    missed_hashes = np.unique(np.concatenate(kept)) if kept else np.empty(0, np.uint64)
    result.retried = len(missed_hashes)
    gone = np.setdiff1d(hashes, missed_hashes, assume_unique=True)
    result.state_bytes = parts.states.evict(task.task, gone)
    freed = result.freed_bytes + result.state_bytes
    parts.stats.evicted(task.task, keys=len(gone), nbytes=max(0, freed), retried=result.retried)
    return result


def _evict_store(
    parts: StorageParts, task: TaskStorage, store: AttachedStore, hashes: Hashes
) -> Operation[tuple[int, list[Hashes]]]:
    """The bytes freed in one store, and the keys of buckets that could not be published."""
    index, missed, freed = store.state.index, [], 0
    with ExitStack() as held:
        undo = held.enter_context(undoing())
        while (permit := parts.scratch.try_permit(Scratch.MAINTENANCE)) is None:
            yield WAITING
        held.callback(permit.close)
        captured: list[tuple[Bucket, list[Chosen]]] = []
        for start in index.hot_buckets():
            unlock = parts.locks.try_lock(task.task, store.spec.name, start)
            bucket = index.snapshot(start)
            chosen = [] if bucket is None else _chosen(bucket, hashes)
            if unlock is not None:
                if chosen:
                    held.callback(unlock)
                else:
                    unlock()
            if bucket is None or not chosen:
                continue
            if unlock is None:
                missed += [each.hashes for each in chosen]
            else:
                captured.append((bucket, chosen))
        if not captured:
            return 0, missed
        yield "captured"
        entries = [(store, each.entry) for _, chosen in captured for each in chosen]
        places = yield from store_runs(parts, task, entries, undo, held)
        for bucket, chosen in captured:
            given_back = _publish(parts, task, store, bucket, chosen, places, hashes, undo)
            if given_back is None:
                missed += [each.hashes for each in chosen]
            else:
                freed += given_back
            yield "published"
    return freed, missed


def _publish(
    parts: StorageParts,
    task: TaskStorage,
    store: AttachedStore,
    bucket: Bucket,
    chosen: Sequence[Chosen],
    places: Places,
    hashes: Hashes,
    undo: Undo,
) -> int | None:
    """Take the keys out of one bucket's hot copies; the bytes freed, None when the bucket changed meanwhile."""
    pairs: list[tuple[RunEntry, RunEntry]] = []
    for each in chosen:
        rest = select_keys(each.hot.run, hashes, keep=False)
        smaller = None
        if rest is not None:
            smaller = parts.cache_of(each.hot.tenant).shrink(task.task, each.hot, rest)
            undo.push(partial(parts.cache_of(smaller.tenant).remove, task.task, smaller), name=smaller.id)
        stored = each.entry.stored or places[id(each.entry)]
        pairs.append((each.entry, replace(each.entry, hot=smaller, stored=stored)))
    index = store.state.index
    published = index.set_places(bucket.start, bucket.data_version, bucket.layout_version, pairs)
    freed = 0
    for each, (old, new) in zip(chosen, pairs, strict=True):
        if new.hot is not None:
            undo.withdraw(new.hot.id)
        if not published:
            if new.hot is not None:
                parts.cache_of(new.hot.tenant).remove(task.task, new.hot)
            continue
        if old.stored is None:
            undo.withdraw(new.stored)
        freed += parts.drop_hot(task, [each.hot]) - (0 if new.hot is None else new.hot.run.nbytes)
    if not published:
        parts.stats.lost(task.task, "evict")
        return None
    return freed


def _chosen(bucket: Bucket, hashes: Hashes) -> list[Chosen]:
    """The runs of a bucket that have rows of the keys in memory."""
    found = []
    for run in bucket.runs:
        if run.hot is not None:
            lines = common_lines(run.hot.run, hashes)
            if len(lines):
                found.append(Chosen(run, run.hot, lines))
    return found


def common_lines(run: Run, hashes: Hashes) -> Int64s:
    """Which lines of a run's directory have one of these ascending hashes."""
    known = run.hashes
    if not len(known) or not len(hashes):
        return np.empty(0, np.int64)
    if len(known) * 16 < len(hashes):  # a few in many: look them up; else walk both once
        at = np.minimum(np.searchsorted(hashes, known), len(hashes) - 1)
        return np.flatnonzero(hashes[at] == known)
    lines, starts = np.empty(len(known), np.int32), np.empty(len(known) + 1, np.int32)
    count, _ = choose_lines(known, run.starts, hashes, 1, lines, starts)
    return lines[:count].astype(np.int64)
