"""Checkpoint a task (one cut through all its stores, a manifest, a token) and restore a task from a token.

A checkpoint flushes dirty state and stores unstored runs until, in one step without any other change to the task, every
cache is clean and every run stored: the cut. The manifest is written from it while readers and background maintenance
continue. A restore replaces exactly that task's content, and reads only manifests.

C1  one consistent cut (INV-18): rows, state blobs, named values and counters are those of one moment.
C2  every pack it names is pinned from the cut until it is held for the checkpoint, and held until the checkpoint is
    released, or a later one is begun that finds enough newer ones retained (INV-10).
C3  incremental: runs that are stored already are named, not written. If nothing changed since the last checkpoint, its
    token is returned again.
C4  a bucket that changes in every attempt fails the checkpoint with its name; none is left out.
R1  all validation (a token of another backend or task, a damaged manifest, a store of another shape) happens before
    anything is changed.
R2  other tasks are not affected (INV-19). Open leases on the task's old runs stay valid until they are closed; older
    operations detect that their bucket changed, and stop.
R3  the backlog of the restored rows is acquired without waiting.
R4  packs used only after the restored checkpoint are left to garbage collection: another token may still name them.

Runs on the operator's thread. `checkpoint` is a generator: the phases of the dumps, `cut`, `written`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tidegate.errors import ConflictError, InvalidError
from tidegate.storage.index import ProgressState, StoredRef
from tidegate.storage.maintenance.dump import dump
from tidegate.storage.maintenance.operations import Operation
from tidegate.storage.manifest import Manifest, ManifestChain, StoreState, Token
from tidegate.storage.parts import AttachedStore, LastCheckpoint, Mark, TaskStorage, mark_of
from tidegate.storage.spec import EARLIEST, LATEST
from tidegate.storage.state import extras_of, progress_name

# -- checkpoint --------------------------------------------------------------------------------------

MAX_ATTEMPTS = 64


@dataclass(slots=True)
class Cut:
    """A consistent snapshot of a task: its stores as a manifest lists them, and the export mark of each index."""

    stores: dict[str, StoreState]
    marks: list[tuple[AttachedStore, int]]
    touched: dict[str, set[int]]  # buckets that may differ from the last checkpoint's
    stand: dict[str, Mark]
    values: dict[str, bytes]


def checkpoint(task: TaskStorage) -> Operation[bytes]:
    """Make a checkpoint and return its token."""
    parts = task.parts
    started = parts.clock.monotonic_ms()
    _release_old_ones(task)
    token = _unchanged(task)
    packs, nbytes = set[str](), 0
    if token is None:
        token, packs = yield from _write(task)
        nbytes = task.chain.newest_bytes
    parts.stats.count(
        task.task,
        checkpoints=1,
        checkpoint_packs=len(packs),
        checkpoint_bytes=nbytes,
        checkpoint_seconds=parts.ms_since(started) / 1000,
    )
    return token


def is_at(task: TaskStorage, token: bytes | None) -> bool:
    """Whether the task's content equals the checkpoint's (None: empty), so that it may continue from it.

    Merging and storing do not change the content. But where a master deletes, it collects packs that no checkpoint
    names after a grace time: a task that has held some for half of that time must be restored instead.
    """
    parts = task.parts
    if not task.is_as_at(token) or any(handle.dirty for handle in task.handles()):
        return False
    return parts.is_kept(task.unnamed_since_ms)


def _unchanged(task: TaskStorage) -> bytes | None:
    """The last token, if a checkpoint made now would be equal."""
    parts = task.parts
    last = task.last_checkpoint
    if last is None or last.token is None or not is_at(task, last.token):
        return None
    stores = task.attached()
    names = {*task.restored, *(store.spec.name for store in stores)}
    if names != last.named or not all(store.state.index.is_exported for store in stores):
        return None
    if parts.config.deletes:
        number = Token.decode(last.token).number
        if not parts.holds.hold_again(task.task, number):
            return None  # released already
        task.retained.append(number)
    return last.token


def _write(task: TaskStorage) -> Operation[tuple[bytes, set[str]]]:
    """Write a new manifest; returns its token, and the packs it names."""
    parts = task.parts
    with ExitStack() as pinned:
        cut = yield from _flush_until_clean(task, pinned)
        since_ms, task.unnamed_since_ms = task.unnamed_since_ms, None
        yield "cut"
        stores = {**task.restored, **cut.stores}
        manifest = Manifest(task.task, task.number + 1, stores, extras_of(cut.values))
        before = set(task.chain.names())
        touched = {name: cut.touched.get(name, set()) for name in manifest.stores}
        try:
            token = task.chain.write(manifest, parts.randomness.uuid().hex, touched=touched).encode()
        except BaseException:
            task.unnamed_since_ms = since_ms
            raise
        task.number = manifest.number
        task.last_checkpoint = LastCheckpoint(token, frozenset(manifest.stores), cut.stand)
        task.named.saved(cut.values)
        packs = manifest.packs()
        retain(task, manifest.number, {*packs, *task.chain.names()})
        # Manifests that neither the next one builds on nor a retained checkpoint needs can go.
        parts.retirement.retire(task.task, before - set(task.chain.names()))
        for store, mark in cut.marks:
            store.state.index.exported(mark)
        yield "written"
    return token, packs


def retain(task: TaskStorage, number: int, names: set[str]) -> None:
    """Hold the packs and manifests of a checkpoint until its release; no effect where the worker deletes nothing."""
    parts = task.parts
    if not parts.config.deletes:
        return
    parts.holds.hold(task.task, number, names)
    if number in task.retained:
        task.retained.remove(number)
    task.retained.append(number)


def _release_old_ones(task: TaskStorage) -> None:
    """Release checkpoints beyond the retained ones; called before the next, when the last token was saved."""
    parts = task.parts
    while len(task.retained) > parts.config.retained_checkpoints:
        parts.holds.release(task.task, task.retained.pop(0))


def _flush_until_clean(task: TaskStorage, pinned: ExitStack) -> Operation[Cut]:
    unclean = ""
    for _ in range(MAX_ATTEMPTS):
        for handle in task.handles():
            handle.flush_all()
        # All stores at once: one store's packs are synced while the next one's are written.
        unstored = [(store, store.state.index.unstored_buckets()) for store in task.attached()]
        if any(buckets for _, buckets in unstored):
            yield from dump(task, unstored, evict=False, wait=True)
        cut, unclean = _cut(task, pinned)
        if cut is not None:
            return cut
        yield "unclean"
    raise ConflictError(
        f"checkpoint of task {task.task}: {unclean} changed in each of {MAX_ATTEMPTS} attempts, because rows were "
        "appended or state was changed meanwhile; call checkpoint on the task's own thread, between batches"
    )


def _cut(task: TaskStorage, pinned: ExitStack) -> tuple[Cut | None, str]:
    """The cut if everything is stored, else None and what is not. Atomic because it never yields (C1)."""
    parts = task.parts
    for cache in task.handles():
        if cache.dirty:
            return None, f"state {cache.namespace}"
    cut = Cut({}, [], {}, {}, task.named.ask())
    with ExitStack() as leases:
        for store in task.attached():
            index, name = store.state.index, store.spec.name
            mark = index.version
            buckets, lease = index.capture(
                EARLIEST, LATEST, lambda refs: parts.pins.pin(task.task, refs), everything=True
            )
            if lease is not None:
                leases.callback(lease.close)
            entries = [run for bucket in buckets for run in bucket.runs]
            unstored = [run.bucket for run in entries if run.stored is None]
            if unstored:
                return None, f"bucket {unstored[0]} of store {name}"
            changed = index.changes()  # after the capture, so that none is missed
            if changed is None:
                return None, f"a bucket of store {name}"
            cut.touched[name] = changed
            next_order = 1 + max([entry.order for entry in entries], default=-1)
            cut.stores[name] = StoreState(store.spec.fingerprint, store.next_seq, next_order, entries)
            cut.stand[name] = mark_of(store)
            cut.marks.append((store, mark))
        pinned.push(leases.pop_all())
    return cut, ""


# -- restore -----------------------------------------------------------------------------------------


def restore(task: TaskStorage, encoded: bytes | None, retained: Sequence[bytes] = ()) -> None:
    """Restore the task to the checkpoint of this token, or to empty; `retained` stay restorable."""
    parts = task.parts
    chain, manifest = ManifestChain(task.parts.backend, task.task), Manifest(task.task, 0)
    if encoded is not None:
        chain, manifest = _load(task, encoded)
    others = [_load(task, each) for each in retained]
    for store in task.attached():
        state = manifest.stores.get(store.spec.name)
        if state is not None:
            check_fingerprint(store, state)

    forget(task)
    parts.use.add(task.task, _refs(manifest.stores))
    parts.use.forget_dead(task.task)
    for _, other in others:
        parts.use.see(task.task, _refs(other.stores))
    charge = sum(entry.charge for state in manifest.stores.values() for entry in state.entries)
    parts.backlog.force(charge, task=task.task)
    task.chain = chain
    task.number = max(task.number, manifest.number)
    restorable = others if encoded is None else [*others, (chain, manifest)]
    for their_chain, other in sorted(restorable, key=lambda each: each[1].number):
        retain(task, other.number, {*other.packs(), *their_chain.names()})
    task.last_checkpoint = LastCheckpoint(encoded, frozenset(manifest.stores))
    task.unnamed_since_ms = None
    task.restored = dict(manifest.stores)
    task.named.load(manifest.extras)  # before the stores, whose states read their values from it
    for store in task.attached():
        if store.spec.name in task.restored:
            fill(store)
        elif isinstance(store.state, ProgressState):
            store.state.restore_progress(
                b""
            )  # it did not exist then: its clocks and counters start empty, too
        task.last_checkpoint.marks[store.spec.name] = mark_of(store)
    task.named.saved(task.named.ask())
    task.is_measured = False
    task.failure = None


def _load(task: TaskStorage, encoded: bytes) -> tuple[ManifestChain, Manifest]:
    parts = task.parts
    token = Token.decode(encoded)
    token.check(parts.backend, task.task)
    return ManifestChain.load(parts.backend, token)


def forget(task: TaskStorage) -> None:
    """Empty the task: its indexes, caches, clock, queue and budgets. Holds of checkpoints stay."""
    parts = task.parts
    for handle in task.handles():
        handle.clear()
    task.named.load({})
    for store in task.attached():
        gone = store.state.index.load((), next_order=0)
        parts.use.remove(task.task, gone.stored)
        store.next_seq = 0
        store.cold_reads.clear()
    parts.use.remove(task.task, _refs(task.restored))
    task.restored = {}
    parts.write_buffer.clear(task.task)
    parts.base_runs.clear(task.task)
    task.key_lru.clear()
    parts.retirement.clear(task.task)
    parts.backlog.drop(task.task)


def fill(store: AttachedStore) -> None:
    """Load an attached store's content from the last restore, if there is any."""
    task, name = store.task, store.spec.name
    state = task.restored.get(name)
    if state is None:
        return
    check_fingerprint(store, state)
    store.state.index.load(state.entries, next_order=state.next_order)
    store.next_seq = state.next_seq
    del task.restored[name]
    if isinstance(store.state, ProgressState):
        store.state.restore_progress(task.named.get(progress_name(name)) or b"")


def check_fingerprint(store: AttachedStore, state: StoreState) -> None:
    if not store.spec.reads(state.fingerprint):
        raise InvalidError(
            f"store {store.spec.name} of task {store.task.task} has another shape than in the checkpoint (columns, "
            "kind of merge, aggregates or bucket width differ): attach the state with the shape it was written with, "
            "or give the new shape another store name and let the old one age out"
        )


def _refs(stores: Mapping[str, StoreState]) -> Iterator[StoredRef]:
    """The stored runs that these states name."""
    for state in stores.values():
        yield from (entry.stored for entry in state.entries if entry.stored is not None)
