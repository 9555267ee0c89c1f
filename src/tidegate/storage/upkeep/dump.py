"""Dumping: runs that are only in memory get a stored copy; with `evict`, the hot copies of their buckets go.

One pack for each time segment of each store. A run keeps its identity: only its places change, so a dump can
neither lose nor repeat a row. What has a stored copy already is not written again.

D1  put → publish (compare-and-swap, bucket by bucket) → drop hot copies. A bucket that changed meanwhile
    keeps its runs as they were, and its slots in the new pack are given up (INV-7).
D2  an error in a put publishes nothing, and retires whatever was written; the packs of a round are put together.
D3  each new pack is counted as used and pinned until the last bucket is settled, so that nobody retires it
    while runs of it are about to go live.

A generator: phases `captured`, `stored` (one for each pack, all of them put by then), `published` (one for each
bucket).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from tidegate.storage.index.entries import Bucket, RunEntry, StoredRef
from tidegate.storage.memory.scratch import Scratch
from tidegate.storage.parts import StorageParts
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import StoreSpec
from tidegate.storage.tasks import AttachedStore, TaskStorage
from tidegate.storage.upkeep.operations import WAITING, Operation, Undo, undoing

Places = dict[int, StoredRef]  # by the identity of the run's entry


def dump(
    parts: StorageParts,
    task: TaskStorage,
    buckets: Sequence[tuple[AttachedStore, Sequence[int]]],
    *,
    evict: bool,
    wait: bool = False,
) -> Operation[int]:
    """Store the buckets' runs; how many buckets were published. Busy buckets are passed over unless `wait`."""
    with ExitStack() as held:
        undo = held.enter_context(undoing())
        while (permit := parts.scratch.try_permit(Scratch.MAINTENANCE)) is None:
            yield WAITING
        held.callback(permit.close)
        captured: list[tuple[AttachedStore, Bucket]] = []
        for store, start in [(store, start) for store, starts in buckets for start in starts]:
            while (unlock := parts.locks.try_lock(task.task, store.spec.name, start)) is None and wait:
                yield WAITING
            if unlock is None:
                continue
            held.callback(unlock)
            bucket = store.state.index.snapshot(start)
            if bucket is not None and any(_concerned(run, evict=evict) for run in bucket.runs):
                captured.append((store, bucket))
        if not captured:
            return 0
        yield "captured"
        runs = [(store, run) for store, bucket in captured for run in bucket.runs]
        places = yield from store_runs(parts, task, runs, undo, held)
        published = 0
        for store, bucket in captured:
            published += publish_places(parts, task, store, bucket, places, undo, evict=evict)
            yield "published"
        return published


def _concerned(run: RunEntry, *, evict: bool) -> bool:
    return run.stored is None or (evict and run.hot is not None)


def store_runs(
    parts: StorageParts,
    task: TaskStorage,
    runs: Iterable[tuple[AttachedStore, RunEntry]],
    undo: Undo,
    held: ExitStack,
) -> Operation[Places]:
    """Write those of these runs that have no stored copy, a pack for each time segment of a store, pinned (D3)."""
    specs: dict[str, StoreSpec] = {}
    segments: dict[tuple[str, int], list[tuple[RunEntry, Run]]] = {}
    for store, run in runs:
        if run.stored is None and run.hot is not None:
            specs[store.spec.name] = store.spec
            place = store.spec.name, store.spec.segment_of(run.bucket)
            segments.setdefault(place, []).append((run, run.hot.run))
    places: Places = {}
    packs = [(specs[name], segment, [hot for _, hot in each]) for (name, segment), each in segments.items()]
    stored = parts.store_all(task, packs)
    for members, refs in zip(segments.values(), stored, strict=True):
        for (entry, _), ref in zip(members, refs, strict=True):
            places[id(entry)] = ref
        # One undo for each run: those that were published are taken out again.
        for ref in refs:
            undo.push(partial(parts.retire, task, [ref]), name=ref)
        held.callback(parts.pins.pin(task.task, refs).close)
    for _ in segments:
        yield "stored"
    return places


def publish_places(
    parts: StorageParts,
    task: TaskStorage,
    store: AttachedStore,
    bucket: Bucket,
    places: Places,
    undo: Undo,
    *,
    evict: bool,
) -> bool:
    """Make the new places of one bucket known, and with `evict` let its hot copies go; False when it changed."""
    pairs = []
    for run in bucket.runs:
        stored = run.stored or places.get(id(run))
        hot = None if evict else run.hot
        if stored is not run.stored or hot is not run.hot:
            pairs.append((run, replace(run, stored=stored, hot=hot)))
    index = store.state.index
    if not index.set_places(bucket.start, bucket.data_version, bucket.layout_version, pairs):
        parts.stats.lost(task.task, "dump")
        return False
    for old, new in pairs:
        if old.stored is None and new.stored is not None:
            undo.withdraw(new.stored)
    parts.drop_hot(task, [old.hot for old, new in pairs if old.hot is not None and new.hot is None])
    return True
