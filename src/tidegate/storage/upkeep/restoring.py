"""Restoring a task from a token: exactly that task's content, caches, budgets and queues are replaced.

Only metadata is read: the manifest and those it builds on. No pack is opened before somebody reads from it, so
the time to the first read does not depend on the rows.

R1  everything that can be refused (a token of another backend or task, a damaged manifest, a store of another
    shape) is refused before anything is changed.
R2  other tasks are not touched (INV-19). Leases that are still open on the task's old runs stay valid until
    they are closed; operations of before find that their bucket changed, and give up.
R3  the backlog of the restored rows is taken without waiting.
R4  packs that only the given-up future used are garbage collection's: another token may still name them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tidegate.errors import InvalidError
from tidegate.storage.index.entries import StoredRef
from tidegate.storage.index.state import ExtraState
from tidegate.storage.packs.manifest import Manifest, ManifestChain, StoreState
from tidegate.storage.packs.token import Token
from tidegate.storage.parts import StorageParts
from tidegate.storage.spec import Cursor
from tidegate.storage.tasks import AttachedStore, Standing, TaskStorage, mark_of
from tidegate.storage.upkeep.checkpointing import cursor_of, retain


def restore(
    parts: StorageParts, task: TaskStorage, encoded: bytes | None, retained: Sequence[bytes] = ()
) -> None:
    """Make the task what it was at the checkpoint of this token, or empty; `retained` stay restorable."""
    chain, manifest = _beginning(parts, task) if encoded is None else _load(parts, task, encoded)
    others = [_load(parts, task, each) for each in retained]
    for store in task.attached():
        state = manifest.stores.get(store.spec.name)
        if state is not None:
            check_fingerprint(task, store, state)

    forget(parts, task)
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
        retain(parts, task, other.number, {*other.packs(), *their_chain.names()})
    task.standing = Standing(encoded, frozenset(manifest.stores))
    task.unnamed_since_ms = None
    task.restored = dict(manifest.stores)
    task.cursors = {name: cursor_of(manifest, name) for name in manifest.stores}
    task.named.load(manifest.extras)  # before the stores: their states look for their values there
    for store in task.attached():
        if store.spec.name in task.restored:
            fill(task, store)
        elif isinstance(store.state, ExtraState):
            store.state.restore_extra(b"")  # it did not exist then: its clocks and counters begin anew, too
        task.standing.marks[store.spec.name] = mark_of(store)
    task.named.saved(task.named.ask())
    task.is_measured = False
    task.failure = None


def _beginning(parts: StorageParts, task: TaskStorage) -> tuple[ManifestChain, Manifest]:
    """Before the first checkpoint: nothing."""
    return ManifestChain(parts.backend, task.task), Manifest(task.task, 0)


def _load(parts: StorageParts, task: TaskStorage, encoded: bytes) -> tuple[ManifestChain, Manifest]:
    token = Token.decode(encoded)
    token.check(parts.backend, task.task)
    return ManifestChain.load(parts.backend, token)


def forget(parts: StorageParts, task: TaskStorage) -> None:
    """Empty the task: its indexes, caches, clock, queue and budgets. Holds of checkpoints stay."""
    parts.states.clear(task.task)
    task.named.load({})
    for store in task.attached():
        gone = store.state.index.load((), next_order=0, max_cursor=None)
        parts.use.remove(task.task, gone.stored)
        store.next_seq = 0
        store.cold_reads.clear()
    parts.use.remove(task.task, _refs(task.restored))
    task.restored, task.cursors = {}, {}
    parts.write_buffer.clear(task.task)
    parts.base_runs.clear(task.task)
    task.key_lru.clear()
    parts.retirement.clear(task.task)
    parts.backlog.drop(task.task)


def fill(task: TaskStorage, store: AttachedStore) -> None:
    """Give an attached store what the last restore has for it, if anything."""
    name = store.spec.name
    state = task.restored.get(name)
    if state is None:
        return
    check_fingerprint(task, store, state)
    cursor: Cursor | None = task.cursors.get(name)
    store.state.index.load(state.entries, next_order=state.next_order, max_cursor=cursor)
    store.next_seq = state.next_seq
    del task.restored[name]
    if isinstance(store.state, ExtraState):
        store.state.restore_extra(state.extra)


def check_fingerprint(task: TaskStorage, store: AttachedStore, state: StoreState) -> None:
    if not store.spec.reads(state.fingerprint):
        raise InvalidError(
            f"store {store.spec.name} of task {task.task} has another shape than in the checkpoint (columns, kind of "
            "merge, aggregates or bucket width differ): attach the state with the shape it was written with, or "
            "give the new shape another store name and let the old one age out"
        )


def _refs(stores: Mapping[str, StoreState]) -> Iterator[StoredRef]:
    """The stored runs that these states name."""
    for state in stores.values():
        yield from (entry.stored for entry in state.entries if entry.stored is not None)
