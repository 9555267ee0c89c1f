"""Move runs between memory and packs without changing them: dump, evict keys, rehydrate, repack, relieve.

Dump: runs that are only in memory get a stored copy, one pack for each time segment of each store; with `evict`,
their hot copies are dropped. Runs with a stored copy are not written again.

D1  put → publish (compare-and-swap, bucket by bucket) → drop hot copies or retire old places. A bucket that is busy or
    changed keeps its runs, and its slots in the new pack are abandoned (INV-7).
D2  an error in a put publishes nothing and retires everything written; the packs of a round are put together.
D3  each new pack is counted as used and pinned until the last bucket is done, so that it is not retired before its
    runs are published.

Evict keys: every hot row of the chosen keys, of all stores and buckets, and their state blobs leave memory together.
Blobs are flushed into the task's state store first; runs that hold one of the keys and have no stored copy are
written whole, and each hot copy is replaced by one without the keys, or dropped.

E1  a key's blob leaves memory only when all its rows are stored and every bucket was published (INV-20). A key
    with a bucket that was busy or changed meanwhile keeps its blob and is tried again in the next round.
E2  keys in use are never chosen; a key that came into use later keeps its blob.
E3  stored runs are never rewritten, and the backlog does not change (INV-14).

Rehydrate: runs that are only stored get hot copies in BaseRuns; the stored copies stay. It does nothing if the bucket
is in memory already or there is no room: it never causes an eviction.

Repack: the live runs of a pack move to a new pack when less than `repack_live_permille` of its bytes are live. Pruning
and compaction remove runs one by one, and a pack is deleted only when no live run is left.

K2  content, hot memory and backlog do not change (INV-4, INV-14).
K3  a checkpoint that names an old pack holds it until it is released. Packs are still rewritten: each checkpoint of a
    task names every live pack, so there is never a live pack without one.

Relieve: a task above a soft max frees memory down to its low watermark. First base runs that are also stored are
dropped, then the coldest keys (`key_lru`) are evicted. Called by the writer before it accepts rows (`incoming_bytes`),
by the compaction tick, and by the pool at the worker total (`floors`).

P1  nothing is freed at or below the soft max.
P2  a round that frees nothing ends the relief: the writer continues (the limit is soft) and the shortfall is counted.

All of these are generators (see `operations`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tidegate.kernels.run_merge import choose_lines
from tidegate.storage.backends.sealed import segment_of_pack, task_prefix
from tidegate.storage.index import Bucket, HotCopy, RunEntry, StoredRef, Tenant
from tidegate.storage.maintenance.operations import WAITING, Operation, Undo, undoing
from tidegate.storage.memory.key_lru import NO_HASHES, hot_keys
from tidegate.storage.memory.scratch import Scratch
from tidegate.storage.parts import AttachedStore, StorageParts, TaskStorage, own_memory
from tidegate.storage.runs.merge import select_keys
from tidegate.storage.runs.run import Int64s, Run
from tidegate.storage.spec import StoreSpec

# -- dump --------------------------------------------------------------------------------------------

Places = dict[int, StoredRef]  # by the identity of the run's entry


def dump(
    parts: StorageParts,
    task: TaskStorage,
    buckets: Sequence[tuple[AttachedStore, Sequence[int]]],
    *,
    evict: bool,
    wait: bool = False,
) -> Operation[int]:
    """Store the buckets' runs; returns how many buckets were published. Busy buckets are skipped unless `wait`."""
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
    """Write the runs without a stored copy, one pinned pack per time segment of a store (D3)."""
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
        # One undo per run, withdrawn when the run is published.
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
    """Publish the new places of one bucket, with `evict` dropping its hot copies; False when it changed."""
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


# -- evict keys --------------------------------------------------------------------------------------

Hashes = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Evicted:
    """The result of an eviction."""

    keys: int = 0
    freed_bytes: int = 0  # of rows
    state_bytes: int = 0
    retried: int = 0  # keys that keep their blob because a bucket of theirs was busy


class Chosen(NamedTuple):
    """A run with chosen keys in memory, and their lines in the hot copy's directory."""

    entry: RunEntry
    hot: HotCopy
    lines: Int64s

    @property
    def hashes(self) -> Hashes:
        return self.hot.run.hashes[self.lines]


def evict_keys(parts: StorageParts, task: TaskStorage, hashes: Hashes) -> Operation[Evicted]:
    """Move all rows and blobs of the keys (ascending hashes) from memory to the backend."""
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
    """Evict the keys in one store; returns the bytes freed, and the keys of buckets that could not be published."""
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
    """Remove the keys from one bucket's hot copies; returns the bytes freed, None when the bucket changed."""
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
    if len(known) * 16 < len(hashes):  # few against many: look them up; else merge-walk both
        at = np.minimum(np.searchsorted(hashes, known), len(hashes) - 1)
        return np.flatnonzero(hashes[at] == known)
    lines, starts = np.empty(len(known), np.int32), np.empty(len(known) + 1, np.int32)
    count, _ = choose_lines(known, run.starts, hashes, 1, lines, starts)
    return lines[:count].astype(np.int64)


# -- rehydrate ---------------------------------------------------------------------------------------


def rehydrate(parts: StorageParts, task: TaskStorage, store: AttachedStore, bucket: int) -> Operation[bool]:
    """Load every run of the bucket into memory; returns whether anything was published."""
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


# -- repack ------------------------------------------------------------------------------------------


def measure(parts: StorageParts, task: TaskStorage) -> Operation[None]:
    """List the sizes of restored packs, to compute their dead bytes: manifests name only live runs."""
    if not task.is_measured:
        listed = parts.backend.list(f"{task_prefix(task.task)}/packs")
        parts.use.measure(task.task, {each.name: each.size for each in listed})
        task.is_measured = True
        yield "measured"


def sparse_segments(parts: StorageParts, task: TaskStorage, store: AttachedStore) -> dict[int, set[str]]:
    """The store's packs to rewrite, by time segment; segments still being written are skipped."""
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
    """Move the live runs of these packs of one time segment; returns how many moved."""
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
            moved += _publish_moved(parts, task, store, bucket, places, undo)
            yield "published"
        return moved


def _publish_moved(
    parts: StorageParts,
    task: TaskStorage,
    store: AttachedStore,
    bucket: Bucket,
    places: dict[int, StoredRef],
    undo: Undo,
) -> int:
    """Publish the new places of one bucket's runs; returns how many, 0 when it changed."""
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


# -- relieve -----------------------------------------------------------------------------------------

MAX_ROUNDS = 8
MANY_KEYS = 4096
ROWS = (Tenant.WRITE_BUFFER, Tenant.BASE_RUNS)


@dataclass(slots=True)
class Relief:
    """The result of a relief."""

    needed_bytes: int = 0
    freed_bytes: int = 0
    keys: int = 0
    rounds: int = 0
    short_bytes: int = 0  # bytes still above the target


def relieve(
    parts: StorageParts,
    task: TaskStorage,
    floors: Mapping[Tenant, int] | None = None,
    *,
    incoming_bytes: int = 0,
) -> Operation[Relief]:
    """Bring every tenant of the task to its target: the low watermark if it is above its soft max (the write buffer:
    with what is about to come), or `floors`."""
    needs = _needs(parts, task, floors, incoming_bytes)
    result = Relief(needed_bytes=sum(needs.values()))
    if not result.needed_bytes:
        return result
    exact = floors is not None
    if floors is None:
        # Fix the target now: once below the soft max, a second look would compute no need.
        floors = {tenant: parts.pool.used(task.task, tenant) - need for tenant, need in needs.items() if need}
    while result.rounds < MAX_ROUNDS:
        needs = _needs(parts, task, floors)
        if not any(needs.values()):
            break
        result.rounds += 1
        freed = yield from _drop_clean_bases(parts, task, needs[Tenant.BASE_RUNS])
        needs = _needs(parts, task, floors)
        rows, state = sum(needs[tenant] for tenant in ROWS), needs[Tenant.STATE_CACHE]
        hashes = _coldest(task, rows, exact=exact)
        if state:
            hashes = np.union1d(hashes, task.key_lru.coldest(parts.states.hot_keys(task.task), state))
        if len(hashes):
            evicted = yield from evict_keys(parts, task, hashes)
            freed += evicted.freed_bytes + evicted.state_bytes
            result.keys += evicted.keys - evicted.retried
        result.freed_bytes += freed
        yield "round"
        if not freed:
            break
    result.short_bytes = sum(_needs(parts, task, floors).values())
    parts.stats.relieved(
        task.task, need=result.needed_bytes, freed=max(0, result.freed_bytes), short=result.short_bytes
    )
    return result


def _coldest(task: TaskStorage, rows: int, *, exact: bool) -> Hashes:
    """The keys to evict for `rows` bytes.

    For very many keys twice the need is chosen: the cost is in visiting every run and copying the remaining rows, not
    in the evicted keys, so fewer, larger evictions cost half as much. Otherwise an eighth more, because a key's bytes
    are an estimate and a second round would visit every run again. For `exact` needs never more, because a reserve is
    near.
    """
    if rows <= 0:
        return NO_HASHES
    keys = hot_keys(_hot_copies(task))
    if exact:
        return task.key_lru.coldest(keys, rows)
    if len(keys.hashes) >= MANY_KEYS:
        hashes = task.key_lru.coldest(keys, 2 * rows)
        if len(hashes) >= MANY_KEYS:
            return hashes
    return task.key_lru.coldest(keys, rows + rows // 8)


def _hot_copies(task: TaskStorage) -> Iterator[HotCopy]:
    for store in task.attached():
        index = store.state.index
        for start in index.hot_buckets():
            bucket = index.snapshot(start)
            yield from (run.hot for run in (bucket.runs if bucket else ()) if run.hot is not None)


def _needs(
    parts: StorageParts, task: TaskStorage, floors: Mapping[Tenant, int] | None, incoming_bytes: int = 0
) -> dict[Tenant, int]:
    """The bytes to free per tenant."""
    if floors is None:
        incoming = {Tenant.WRITE_BUFFER: incoming_bytes}
        return {
            tenant: parts.pool.relief_need(task.task, tenant, incoming.get(tenant, 0)) for tenant in Tenant
        }
    return {
        tenant: max(0, parts.pool.used(task.task, tenant) - floors[tenant]) if tenant in floors else 0
        for tenant in Tenant
    }


def _drop_clean_bases(parts: StorageParts, task: TaskStorage, need: int) -> Operation[int]:
    """Drop hot base runs that are stored too, oldest buckets first, until `need` bytes are free."""
    freed = 0
    if need <= 0:
        return freed
    for store in task.attached():
        for start in store.state.index.hot_buckets():
            if freed >= need:
                return freed
            freed += _drop_clean(parts, task, store, start)
            yield "dropped"
    return freed


def _drop_clean(parts: StorageParts, task: TaskStorage, store: AttachedStore, start: int) -> int:
    unlock = parts.locks.try_lock(task.task, store.spec.name, start)
    if unlock is None:
        return 0
    try:
        bucket = store.state.index.snapshot(start)
        clean = [] if bucket is None else [run for run in bucket.runs if _is_clean_base(run)]
        if bucket is None or not clean:
            return 0
        pairs = [(run, replace(run, hot=None)) for run in clean]
        index = store.state.index
        if not index.set_places(start, bucket.data_version, bucket.layout_version, pairs):
            return 0
        return parts.drop_hot(task, [run.hot for run in clean if run.hot is not None])
    finally:
        unlock()


def _is_clean_base(run: RunEntry) -> bool:
    return run.stored is not None and run.hot is not None and run.hot.tenant is Tenant.BASE_RUNS
