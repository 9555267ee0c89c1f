"""Repacking: the live runs of packs that are mostly dead move to a new pack, so that the old ones can go.

Pruning and compaction take runs out of use one by one, and a pack is deleted only when none is left: a single
small run would keep a large file for ever. A pack with less than `repack_live_permille` of its bytes live is
worth copying that little. Runs keep their identity and their hot copies; only their stored places change.

K1  put → publish (compare-and-swap, bucket by bucket) → retire the old places. A bucket that is busy or changed
    keeps its runs where they were, and its slots in the new pack are given up; the next round tries again.
K2  content, hot memory and backlog do not move (INV-4, INV-14).
K3  a checkpoint that names an old pack holds it until it is released. Packs are rewritten all the same: each
    checkpoint of a task names every live pack, so waiting for one that no checkpoint names would be for ever.

A generator: phases `captured`, `stored` (one for each new pack), `published` (one for each bucket).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from tidegate.storage.index.entries import Bucket, RunEntry, StoredRef
from tidegate.storage.memory.scratch import Scratch
from tidegate.storage.packs.layout import segment_of_pack, task_prefix
from tidegate.storage.parts import StorageParts
from tidegate.storage.tasks import AttachedStore, TaskStorage
from tidegate.storage.upkeep.operations import WAITING, Operation, Undo, undoing


def measure(parts: StorageParts, task: TaskStorage) -> Operation[None]:
    """Learn from a listing what of restored packs is dead: manifests name live runs only."""
    if not task.is_measured:
        listed = parts.backend.list(f"{task_prefix(task.task)}/packs")
        parts.use.measure(task.task, {each.name: each.size for each in listed})
        task.is_measured = True
        yield "measured"


def sparse_segments(parts: StorageParts, task: TaskStorage, store: AttachedStore) -> dict[int, set[str]]:
    """The store's packs that are worth rewriting, by time segment; segments still being written are left alone."""
    newest = store.state.index.newest_buckets(store.hot_buckets)
    found: dict[int, set[str]] = {}
    for pack in parts.use.sparse(task.task, parts.config.repack_live_permille):
        segment = segment_of_pack(pack, task.task, store.spec.name)
        if segment is not None and not (newest and segment + store.spec.segment_ms > newest[0]):
            found.setdefault(segment, set()).add(pack)
    return found


def repack(
    parts: StorageParts, task: TaskStorage, store: AttachedStore, segment: int, packs: Collection[str]
) -> Operation[int]:
    """Move the live runs of these packs of one time segment; how many runs have moved."""
    index, spec = store.state.index, store.spec
    with ExitStack() as held:
        undo = held.enter_context(undoing())
        while (permit := parts.scratch.try_permit(Scratch.MAINTENANCE)) is None:
            yield WAITING
        held.callback(permit.close)
        captured: list[Bucket] = []
        for each in index.query(segment, segment + spec.segment_ms - 1):
            if not _moving(each, packs):
                continue
            unlock = parts.locks.try_lock(task.task, spec.name, each.start)
            if unlock is None:
                continue
            held.callback(unlock)
            buckets, lease = index.capture(
                each.start, each.start, lambda refs: parts.pins.pin(task.task, refs), everything=True
            )
            if lease is not None:
                held.callback(lease.close)
            captured += [bucket for bucket in buckets if _moving(bucket, packs)]
        if not captured:
            return 0
        yield "captured"
        places: dict[int, StoredRef] = {}  # by the identity of the run's entry
        for group in _groups([run for each in captured for run in _moving(each, packs)], parts):
            refs = parts.store(task, spec, segment, parts.load_all(task, spec, group))
            places.update((id(run), ref) for run, ref in zip(group, refs, strict=True))
            for ref in refs:
                undo.push(partial(parts.retire, task, [ref]), name=ref)
            held.callback(parts.pins.pin(task.task, refs).close)
            yield "stored"
        moved = 0
        for bucket in captured:
            moved += _publish(parts, task, store, bucket, places, undo)
            yield "published"
        return moved


def _publish(
    parts: StorageParts,
    task: TaskStorage,
    store: AttachedStore,
    bucket: Bucket,
    places: dict[int, StoredRef],
    undo: Undo,
) -> int:
    """Make the new places of one bucket's runs known; how many runs that are, none when it changed."""
    pairs = [(run, replace(run, stored=places[id(run)])) for run in bucket.runs if id(run) in places]
    index = store.state.index
    if not index.set_places(bucket.start, bucket.data_version, bucket.layout_version, pairs):
        parts.stats.lost(task.task, "repack")
        return 0
    for _, new in pairs:
        undo.withdraw(new.stored)
    parts.retire(task, [old.stored for old, _ in pairs if old.stored is not None])
    parts.stats.repacked(task.task, runs=len(pairs), nbytes=sum(old.nbytes for old, _ in pairs))
    return len(pairs)


def _moving(bucket: Bucket, packs: Collection[str]) -> list[RunEntry]:
    return [run for run in bucket.runs if run.stored is not None and run.stored.pack in packs]


def _groups(runs: Sequence[RunEntry], parts: StorageParts) -> Iterator[list[RunEntry]]:
    """The runs in groups of about `max_batch_bytes`, a pack each."""
    group: list[RunEntry] = []
    nbytes = 0
    for run in runs:
        if group and nbytes + run.nbytes > parts.config.max_batch_bytes:
            yield group
            group, nbytes = [], 0
        group.append(run)
        nbytes += run.nbytes
    if group:
        yield group
