"""Move runs between memory and packs without changing them: dump, evict keys, rehydrate, repack, relieve.

All are generators (see `operations`): put → publish (compare-and-swap, bucket by bucket) → drop hot copies or retire
old places. A bucket that is busy or changed keeps its runs, and their slots in the new pack are abandoned (INV-7).

D1  an error in a put publishes nothing and retires everything written.
D2  eviction takes every hot row of the chosen keys, of all stores, and their state blobs together. A key's blob leaves
    memory only when all its rows are stored and published (INV-20); otherwise the key is tried again in the next round.
D3  a state value in use keeps its place in memory. Readers keep the runs they read alive, evicted or not.
D4  stored runs are never rewritten but by `repack`; content and backlog never change (INV-4, INV-14).
D5  rehydration never causes an eviction: it does nothing without room.
D6  a checkpoint that names a repacked pack holds it until it is released.
D7  relief frees nothing at or below the soft max. A round that frees nothing ends it: the writer continues (the limit
    is soft) and the shortfall is counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.kernels.run_merge import choose_lines
from tidegate.storage.backends.sealed import segment_of_pack, task_prefix
from tidegate.storage.index import Bucket, HotCopy, RunEntry, Tenant
from tidegate.storage.maintenance.operations import WAITING, Operation, Places, Work
from tidegate.storage.memory.key_lru import NO_HASHES, hot_keys
from tidegate.storage.parts import AttachedStore, StorageParts, TaskStorage
from tidegate.storage.runs.merge import select_keys
from tidegate.storage.runs.run import Int64s, Run
from tidegate.storage.spec import StoreSpec
from tidegate.storage.state import hot_state

# -- dump --------------------------------------------------------------------------------------------


def dump(
    task: TaskStorage,
    buckets: Sequence[tuple[AttachedStore, Sequence[int]]],
    *,
    evict: bool,
    wait: bool = False,
) -> Operation[int]:
    """Store the buckets' runs, and with `evict` drop their hot copies; returns how many buckets were published.

    One pack is written for each time segment of each store. Busy buckets are skipped unless `wait`.
    """
    with Work(task) as work:
        yield from work.permit()
        captured: list[tuple[AttachedStore, Bucket]] = []
        for store, start in [(store, start) for store, starts in buckets for start in starts]:
            while not (locked := work.lock(store, start)) and wait:
                yield WAITING
            bucket = store.state.index.snapshot(start) if locked else None
            if bucket and any(run.stored is None or (evict and run.hot) for run in bucket.runs):
                captured.append((store, bucket))
        if not captured:
            return 0
        yield "captured"
        runs = [(store, run) for store, bucket in captured for run in bucket.runs]
        places = yield from _store_runs(work, runs)
        published = 0
        for store, bucket in captured:
            pairs = []
            for run in bucket.runs:
                stored, hot = run.stored or places.get(id(run)), None if evict else run.hot
                if stored is not run.stored or hot is not run.hot:
                    pairs.append((run, replace(run, stored=stored, hot=hot)))
            published += work.place(store, bucket, pairs, "dump") is not None
            yield "published"
        return published


def _store_runs(work: Work, runs: Sequence[tuple[AttachedStore, RunEntry]]) -> Operation[Places]:
    """Write the runs without a stored copy, one pack per time segment of a store."""
    segments: dict[tuple[str, int], tuple[StoreSpec, int, list[RunEntry], list[Run]]] = {}
    for store, run in runs:
        if run.stored is None and run.hot is not None:
            spec, segment = store.spec, store.spec.segment_of(run.bucket)
            _, _, entries, hot = segments.setdefault((spec.name, segment), (spec, segment, [], []))
            entries.append(run)
            hot.append(run.hot.run)
    places = work.store(list(segments.values()))
    for _ in segments:
        yield "stored"
    return places


# -- evict keys --------------------------------------------------------------------------------------

Hashes = npt.NDArray[np.uint64]


class Chosen(NamedTuple):
    """A run with chosen keys in memory, and their lines in the hot copy's directory."""

    entry: RunEntry
    hot: HotCopy
    lines: Int64s


def evict_keys(task: TaskStorage, hashes: Hashes) -> Operation[tuple[int, int]]:
    """Move all rows and blobs of the keys (ascending hashes) to the backend; returns how many went, and their bytes."""
    parts = task.parts
    for cache in task.handles():
        cache.flush_hashes(hashes)
    yield "flushed"
    missed: list[Hashes] = []
    freed = 0
    for store in task.attached():
        freed += yield from _evict_store(store, hashes, missed)
    retried = np.unique(np.concatenate([NO_HASHES, *missed]))
    gone = np.setdiff1d(hashes, retried, assume_unique=True)
    freed += sum(handle.evict(gone) for handle in task.handles())
    parts.stats.count(
        task.task, evicted_keys=len(gone), evicted_bytes=max(0, freed), eviction_retries=len(retried)
    )
    return len(gone), freed


def _evict_store(store: AttachedStore, hashes: Hashes, missed: list[Hashes]) -> Operation[int]:
    """Evict the keys in one store; returns the bytes freed. Keys of buckets that were busy or changed are `missed`."""
    task = store.task
    index, freed = store.state.index, 0
    with Work(task) as work:
        yield from work.permit()
        captured: list[tuple[Bucket, list[Chosen]]] = []
        for start in index.hot_buckets():
            bucket = index.snapshot(start)
            chosen = [] if bucket is None else _chosen(bucket, hashes)
            if bucket and chosen and work.lock(store, start):
                captured.append((bucket, chosen))
            else:
                missed += [each.hot.run.hashes[each.lines] for each in chosen]
        if not captured:
            return 0
        yield "captured"
        entries = [(store, each.entry) for _, chosen in captured for each in chosen]
        places = yield from _store_runs(work, entries)
        for bucket, chosen in captured:
            pairs = [(entry, _without(task, entry, hot, hashes, places, work)) for entry, hot, _ in chosen]
            dropped = work.place(store, bucket, pairs, "evict")
            if dropped is None:
                missed += [each.hot.run.hashes[each.lines] for each in chosen]
            else:
                freed += dropped - sum(new.hot.run.nbytes for _, new in pairs if new.hot)
            yield "published"
    return freed


def _without(
    task: TaskStorage,
    entry: RunEntry,
    hot: HotCopy,
    hashes: Hashes,
    places: Places,
    work: Work,
) -> RunEntry:
    """The stored run, with a hot copy of the other keys only."""
    rest = select_keys(hot.run, hashes, keep=False)
    smaller = None
    if rest is not None:
        smaller = task.parts.cache_of(hot.tenant).shrink(task.task, hot, rest)
        work.undo[smaller] = partial(task.drop_hot, [smaller])
    return replace(entry, hot=smaller, stored=entry.stored or places[id(entry)])


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


def rehydrate(store: AttachedStore, bucket: int) -> Operation[bool]:
    """Load every run of the bucket into BaseRuns; returns whether anything was published."""
    task, parts = store.task, store.task.parts
    with Work(task) as work:
        if not (yield from work.claim(store, bucket)):
            return False
        captured = work.capture(store, bucket)
        cold = [run for run in captured.runs if not run.is_hot] if captured else []
        nbytes = sum(run.nbytes for run in cold)
        if captured is None or not cold or not parts.base_runs.has_room(task.task, nbytes):
            return False
        started = parts.clock.monotonic_ms()
        yield "captured"
        pairs: list[tuple[RunEntry, RunEntry]] = []
        for run, stored in zip(cold, task.load_all(store.spec, cold), strict=True):
            hot = parts.base_runs.put(task.task, _own_memory(stored, run.nbytes))
            work.undo[hot] = partial(task.drop_hot, [hot])
            pairs.append((run, replace(run, hot=hot)))
        yield "loaded"
        if work.place(store, captured, pairs, "rehydrate") is None:
            return False
        parts.stats.count(
            task.task,
            rehydrate_published=1,
            rehydrate_runs=len(cold),
            rehydrate_bytes=nbytes,
            rehydrate_seconds=parts.ms_since(started) / 1000,
        )
        return True


def _own_memory(run: Run, nbytes: int) -> Run:
    """Copy a stored run, a view of a mapped file, into its own memory; its logical size stays `nbytes`."""
    owned = Run(run.bucket, _copy(run.directory), _copy(run.rows))
    owned.__dict__["nbytes"] = (
        nbytes  # the index's number, so that the pool sees the same run at the same size
    )
    return owned


def _copy(batch: pa.RecordBatch) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


# -- repack ------------------------------------------------------------------------------------------


def measure(task: TaskStorage) -> Operation[None]:
    """List the sizes of restored packs, to compute their dead bytes: manifests name only live runs."""
    parts = task.parts
    if not task.is_measured:
        listed = parts.backend.list(f"{task_prefix(task.task)}/packs")
        parts.use.measure(task.task, {each.name: each.size for each in listed})
        task.is_measured = True
        yield "measured"


def sparse_segments(store: AttachedStore) -> dict[int, set[str]]:
    """The store's packs to rewrite, by time segment; segments still being written are skipped."""
    task, parts = store.task, store.task.parts
    newest = store.newest_buckets()
    found: dict[int, set[str]] = {}
    for pack in parts.use.sparse(task.task, parts.config.repack_live_permille):
        segment = segment_of_pack(pack, task.task, store.spec.name)
        if segment is not None and not (newest and segment + store.spec.segment_ms > newest[0]):
            found.setdefault(segment, set()).add(pack)
    return found


def repack(store: AttachedStore, segment: int, packs: Collection[str]) -> Operation[int]:
    """Move the live runs of these packs of one time segment to new packs; returns how many moved."""
    task, parts = store.task, store.task.parts
    spec = store.spec
    with Work(task) as work:
        yield from work.permit()
        captured: list[Bucket] = []
        for each in store.state.index.query(segment, segment + spec.segment_ms - 1):
            if _moving(each, packs) and work.lock(store, each.start):
                bucket = work.capture(store, each.start, everything=True)
                if bucket and _moving(bucket, packs):
                    captured.append(bucket)
        if not captured:
            return 0
        yield "captured"
        places: Places = {}
        for group in _groups([run for each in captured for run in _moving(each, packs)], parts):
            places |= work.store([(spec, segment, group, task.load_all(spec, group))])
            yield "stored"
        moved = 0
        for bucket in captured:
            pairs = [(run, replace(run, stored=places[id(run)])) for run in _moving(bucket, packs)]
            if work.place(store, bucket, pairs, "repack") is not None:
                moved += len(pairs)
                nbytes = sum(run.nbytes for run, _ in pairs)
                parts.stats.count(task.task, repack_runs=len(pairs), repack_bytes=nbytes)
            yield "published"
        return moved


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
    task: TaskStorage,
    floors: Mapping[Tenant, int] | None = None,
    *,
    incoming_bytes: int = 0,
) -> Operation[Relief]:
    """Bring every tenant of the task to its target: the low watermark if it is above its soft max (the write buffer:
    with what is about to come), or `floors`."""
    parts = task.parts
    needs = _needs(task, floors, incoming_bytes)
    result = Relief(needed_bytes=sum(needs.values()))
    if not result.needed_bytes:
        return result
    exact = floors is not None
    if floors is None:
        # Fix the target now: once below the soft max, a second look would compute no need.
        floors = {tenant: parts.pool.used(task.task, tenant) - need for tenant, need in needs.items() if need}
    while result.rounds < MAX_ROUNDS:
        needs = _needs(task, floors)
        if not any(needs.values()):
            break
        result.rounds += 1
        freed = yield from _drop_clean_bases(task, needs[Tenant.BASE_RUNS])
        needs = _needs(task, floors)
        rows, state = sum(needs[tenant] for tenant in ROWS), needs[Tenant.STATE_CACHE]
        hashes = _coldest(task, rows, exact=exact)
        if state:
            hashes = np.union1d(hashes, task.key_lru.coldest(hot_state(task.handles()), state))
        if len(hashes):
            keys, nbytes = yield from evict_keys(task, hashes)
            freed += nbytes
            result.keys += keys
        result.freed_bytes += freed
        yield "round"
        if not freed:
            break
    result.short_bytes = sum(_needs(task, floors).values())
    parts.stats.count(
        task.task,
        pressure_runs=1,
        pressure_needed_bytes=result.needed_bytes,
        pressure_freed_bytes=max(0, result.freed_bytes),
        pressure_short=int(result.short_bytes > 0),
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
    task: TaskStorage, floors: Mapping[Tenant, int] | None, incoming_bytes: int = 0
) -> dict[Tenant, int]:
    """The bytes to free per tenant."""
    parts = task.parts
    if floors is None:
        incoming = {Tenant.WRITE_BUFFER: incoming_bytes}
        return {
            tenant: parts.pool.relief_need(task.task, tenant, incoming.get(tenant, 0)) for tenant in Tenant
        }
    return {
        tenant: max(0, parts.pool.used(task.task, tenant) - floors[tenant]) if tenant in floors else 0
        for tenant in Tenant
    }


def _drop_clean_bases(task: TaskStorage, need: int) -> Operation[int]:
    """Drop hot base runs that are stored too, oldest buckets first, until `need` bytes are free."""
    freed = 0
    if need <= 0:
        return freed
    for store in task.attached():
        for start in store.state.index.hot_buckets():
            if freed >= need:
                return freed
            freed += _drop_clean(store, start)
            yield "dropped"
    return freed


def _drop_clean(store: AttachedStore, start: int) -> int:
    with Work(store.task) as work:
        bucket = store.state.index.snapshot(start) if work.lock(store, start) else None
        pairs = [
            (run, replace(run, hot=None)) for run in (bucket.runs if bucket else ()) if _is_clean_base(run)
        ]
        return (work.place(store, bucket, pairs, "evict") or 0) if bucket and pairs else 0


def _is_clean_base(run: RunEntry) -> bool:
    return run.stored is not None and run.hot is not None and run.hot.tenant is Tenant.BASE_RUNS
