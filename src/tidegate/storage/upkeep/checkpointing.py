"""A checkpoint of a task: everything stored, one cut through all its stores, a manifest, a token.

Dirty state goes to the shelf and unstored runs into packs, again and again until, in one step in which nothing else
can happen to the task, every cache is clean and every run stored. That moment is the cut. It names its
runs and pins their packs in the same critical sections; the manifest is written from it while readers and
background maintenance go on.

C1  one consistent cut (INV-18): rows, state blobs, counters and extras are those of one moment.
C2  every pack it names is pinned from the cut until it is held for the checkpoint, and held until the checkpoint is
    released, or a later one is begun that finds enough newer ones retained (INV-10).
C3  incremental: runs that are stored already are named, not written.
C4  a bucket that does not come to rest fails the checkpoint with its name; none is left out.

Runs on the operator's thread. A generator: the phases of the dumps, `cut`, `written`.
"""

from __future__ import annotations

import struct
from contextlib import ExitStack
from dataclasses import dataclass

from tidegate.errors import ConflictError, InvalidError
from tidegate.storage.index.bucket_index import BucketIndex
from tidegate.storage.index.entries import RunEntry, without_hot
from tidegate.storage.index.state import ExtraState
from tidegate.storage.packs.manifest import Manifest, StoreState
from tidegate.storage.packs.token import Token
from tidegate.storage.parts import StorageParts
from tidegate.storage.spec import HIGHEST, LOWEST, Cursor
from tidegate.storage.tasks import AttachedStore, TaskStorage
from tidegate.storage.upkeep.dump import dump
from tidegate.storage.upkeep.operations import Operation

MAX_ATTEMPTS = 64
_CURSOR = struct.Struct("<qq")


@dataclass(slots=True)
class Cut:
    """One moment of a task: its stores as a manifest names them, and up to where each index had changed."""

    stores: dict[str, StoreState]
    cursors: dict[str, bytes]
    marks: list[tuple[AttachedStore, int]]
    touched: dict[str, set[int]]  # buckets that may differ from the last checkpoint's


def checkpoint(parts: StorageParts, task: TaskStorage) -> Operation[Token]:
    """Make the checkpoint; its token."""
    started = parts.clock.monotonic_ms()
    _let_old_ones_go(parts, task)
    with ExitStack() as pinned:
        cut = yield from _come_to_rest(parts, task, pinned)
        yield "cut"
        manifest = Manifest(task.task, task.number + 1, {**task.restored, **cut.stores}, cut.cursors)
        before = set(task.chain.names())
        touched = {name: cut.touched.get(name, set()) for name in manifest.stores}
        token = task.chain.write(manifest, parts.randomness.uuid().hex, touched=touched)
        task.number = manifest.number
        packs = manifest.packs()
        retain(parts, task, manifest.number, {*packs, *task.chain.names()})
        # Manifests that neither the next one builds on nor a retained checkpoint needs can go.
        parts.retirement.retire(task.task, before - set(task.chain.names()))
        for store, mark in cut.marks:
            store.state.index.exported(mark)
        yield "written"
    parts.stats.checkpointed(task.task, packs=len(packs), ms=parts.ms_since(started))
    return token


def retain(parts: StorageParts, task: TaskStorage, number: int, names: set[str]) -> None:
    """Hold all that a checkpoint needs until it is released."""
    parts.holds.hold(task.task, number, names)
    if number in task.retained:
        task.retained.remove(number)
    task.retained.append(number)


def _let_old_ones_go(parts: StorageParts, task: TaskStorage) -> None:
    """Before the next one: only now is it known that the last token arrived, and that it counts among the retained."""
    while len(task.retained) > parts.config.retained_checkpoints:
        parts.holds.release(task.task, task.retained.pop(0))


def cursor_of(manifest: Manifest, store: str) -> Cursor | None:
    """The highest cursor a store had seen at the checkpoint."""
    encoded = manifest.extras.get(_cursor_name(store))
    return None if encoded is None else Cursor(*_CURSOR.unpack(encoded))


def _come_to_rest(parts: StorageParts, task: TaskStorage, pinned: ExitStack) -> Operation[Cut]:
    unclean = ""
    for _ in range(MAX_ATTEMPTS):
        parts.states.flush_all(task.task)
        for store in task.attached():
            unstored = store.state.index.unstored_buckets()
            if unstored:
                yield from dump(parts, task, store, unstored, evict=False, wait=True)
        cut, unclean = _cut(parts, task, pinned)
        if cut is not None:
            return cut
        yield "unclean"
    raise ConflictError(
        f"checkpoint of task {task.task}: {unclean} did not come to rest in {MAX_ATTEMPTS} attempts because rows were "
        "appended or state was changed meanwhile; call checkpoint on the task's own thread, between batches"
    )


def _cut(parts: StorageParts, task: TaskStorage, pinned: ExitStack) -> tuple[Cut | None, str]:
    """The cut, if all is stored now; else None and what is not. No yield in here: nothing comes between (C1)."""
    for cache in parts.states.of(task.task):
        if cache.dirty:
            return None, f"state {cache.namespace}"
    cut = Cut({}, {}, [], {})
    with ExitStack() as leases:
        for store in task.attached():
            index, name = store.state.index, store.spec.name
            mark = index.version
            buckets, lease = index.capture(
                LOWEST.ts, HIGHEST.ts, lambda refs: parts.pins.pin(task.task, refs), everything=True
            )
            if lease is not None:
                leases.callback(lease.close)
            entries: list[RunEntry] = []
            for bucket in buckets:
                if any(run.stored is None for run in bucket.runs):
                    return None, f"bucket {bucket.start} of store {name}"
                entries += [without_hot(run) for run in bucket.runs]
            changed = _changed(index)
            if changed is None:
                return None, f"a bucket of store {name}"
            cut.touched[name] = changed
            cut.stores[name] = _store_state(store, entries)
            if index.max_cursor is not None:
                cut.cursors[_cursor_name(name)] = _CURSOR.pack(*index.max_cursor)
            cut.marks.append((store, mark))
        pinned.push(leases.pop_all())
    return cut, ""


def _changed(index: BucketIndex) -> set[int] | None:
    """Buckets that changed since the last checkpoint, asked after the capture so that none is missed.

    None when a merge was published since then, whose output is not stored yet.
    """
    try:
        export = index.export()
    except InvalidError:
        return None
    return {*export.changed, *export.removed}


def _store_state(store: AttachedStore, entries: list[RunEntry]) -> StoreState:
    state = store.state
    return StoreState(
        fingerprint=store.spec.fingerprint,
        next_seq=store.next_seq,
        next_order=1 + max((entry.order for entry in entries), default=-1),
        entries=entries,
        extra=state.encode_extra() if isinstance(state, ExtraState) else b"",
    )


def _cursor_name(store: str) -> str:
    return f"cursor/{store}"
