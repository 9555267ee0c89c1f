"""Relief: a task above a soft max gives memory back until it is at its low watermark.

First the copies that cost nothing to lose: base runs that are stored too. Then the coldest keys, weighed and chosen in
vector passes over the hot runs (`key_lru`), with all their rows and their state (`evict`). Relief is asked for by the
writer before it takes rows in (`incoming_bytes`), by the compaction tick, and by the pool when the worker total is
reached; then the needs are handed in, and reach only what lies above reserves.

P1  nothing is done at exactly the soft max, or below.
P2  a round that frees nothing ends the relief: the writer goes on (the limit is soft) and the shortfall is told.

A generator: the phases of what it runs, and `round` after each round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tidegate.storage.index.entries import HotCopy, RunEntry, Tenant
from tidegate.storage.memory.key_lru import NO_HASHES, hot_keys
from tidegate.storage.parts import StorageParts
from tidegate.storage.tasks import AttachedStore, TaskStorage
from tidegate.storage.upkeep.evict import Hashes, evict_keys
from tidegate.storage.upkeep.operations import Operation

MAX_ROUNDS = 8
MANY_KEYS = 4096
ROWS = (Tenant.WRITE_BUFFER, Tenant.BASE_RUNS)


@dataclass(slots=True)
class Relief:
    """What a relief did."""

    needed_bytes: int = 0
    freed_bytes: int = 0
    keys: int = 0
    rounds: int = 0
    short_bytes: int = 0  # what is still above the target


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
        # The target is fixed now: below the soft max a second look would say that nothing is needed.
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

    Where it takes very many keys, twice the need: the work lies in looking at every run and copying what stays,
    not in the keys that go, so deeper and fewer cuts cost half as much. Otherwise an eighth more, because a key's
    bytes are an estimate and a second round would look at every run again. Never more for `exact` needs: there
    somebody's reserve is near.
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
    """Bytes each tenant is to give back."""
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
    """Let go of hot base runs that are stored too, oldest buckets first, until `need` bytes are free."""
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
