"""The content of one manifest file, and the plain snapshot that files are made from and applied to.

A snapshot holds facts only (numbers and names, never a run), so keeping one keeps no memory of evicted runs
alive. `Changes` is what was touched between two checkpoints; a delta says for each touched thing what it is *now*, or
that it is gone. So the delta over several checkpoints is made from the union of their changes and the newest
snapshot, and no older snapshot is ever needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, Final, TypeAlias

import msgspec

from tidegate.errors import InvalidError
from tidegate.storage.backends.port import StorageBackend, check_name
from tidegate.storage.index.entries import RunEntry, StoredRef
from tidegate.storage.packs.layout import Format, damaged, unseal
from tidegate.storage.packs.token import digest_of

MANIFEST = Format(
    b"TG-MANIF", "manifest", 1, "go back to an older checkpoint, or restore the file from a copy"
)

Facts: TypeAlias = "tuple[int, int, int, int, int, int, int, bool, str, int]"
Cells: TypeAlias = "dict[int, tuple[Facts, ...]]"
_facts = attrgetter(
    *("order", "rows", "keys", "nbytes", "charge", "min_ts", "max_ts", "base", "stored.pack", "stored.slot")
)
_order = itemgetter(0)
PACK: Final = 8  # where the pack's name is among the facts


# -- the file ------------------------------------------------------------------------------------


class _Shape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class RunBody(_Shape, frozen=True, gc=False):
    """One run; `pack` counts in the store's own list of packs."""

    order: int
    rows: int
    keys: int
    nbytes: int
    charge: int
    min_ts: int
    max_ts: int
    base: bool
    pack: int
    slot: int


class StoreBody(_Shape, frozen=True):
    """A store's counters, and its touched buckets; `extra` is None when that was not touched."""

    fingerprint: str
    next_seq: int
    next_order: int
    extra: bytes | None
    packs: list[str]
    buckets: dict[int, list[RunBody]]
    gone: list[int]


class Link(_Shape, frozen=True):
    """What a delta builds on."""

    manifest: str
    digest: bytes
    number: int


class Body(_Shape, frozen=True):
    """One manifest file: full when `base` is None."""

    name: str
    task: str
    number: int
    span: int
    base: Link | None
    stores: dict[str, StoreBody]
    stores_gone: list[str]
    extras: dict[str, bytes]
    extras_gone: list[str]


def read_body(backend: StorageBackend, task: str, wanted: Link) -> tuple[Body, int]:
    """One file of a chain and its size, with every check of M3."""
    name = check_name(wanted.manifest)
    sealed = backend.read(name)
    body = unseal(MANIFEST, sealed, Body, name=name)
    if (body.name, body.task, body.number) != (name, task, wanted.number):
        why = f"it is {body.name}, checkpoint {body.number} of task {body.task}, under another name"
        raise damaged(MANIFEST, name, why, 0)
    if digest_of(sealed) != wanted.digest:
        raise damaged(MANIFEST, name, "its digest is not the one its checkpoint names", None)
    if body.base is not None and body.base.number >= body.number:
        raise damaged(MANIFEST, name, f"it builds on the later checkpoint {body.base.number}", None)
    return body, sealed.size


# -- snapshots and changes -----------------------------------------------------------------------


@dataclass(slots=True)
class StoreFacts:
    """One store as the newest manifest has it."""

    counters: tuple[str, int, int]
    extra: bytes
    cells: Cells


@dataclass(slots=True)
class Snapshot:
    """A whole checkpoint as plain facts."""

    stores: dict[str, StoreFacts] = field(default_factory=dict)
    extras: dict[str, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Changes:
    """What was touched: buckets by store (an empty set: its counters), stores whose extra was, extras."""

    stores: dict[str, set[int]] = field(default_factory=dict)
    extra_of: set[str] = field(default_factory=set)
    extras: set[str] = field(default_factory=set)

    def add(self, other: Changes) -> None:
        for store, buckets in other.stores.items():
            self.stores.setdefault(store, set()).update(buckets)
        self.extra_of |= other.extra_of
        self.extras |= other.extras

    def add_store(self, name: str, facts: StoreFacts) -> None:
        """A store that came or went: all of it is touched."""
        self.stores.setdefault(name, set()).update(facts.cells)
        self.extra_of.add(name)


def cells_of(entries: Iterable[RunEntry], store: str, wanted: set[int] | None = None) -> Cells:
    """The facts of the entries by bucket, in order; only of the wanted buckets."""
    found: dict[int, list[Facts]] = {}
    try:
        for entry in entries:
            bucket = entry.bucket
            if wanted is None or bucket in wanted:
                found.setdefault(bucket, []).append(_facts(entry))
    except AttributeError:  # M4: `stored` is None
        raise InvalidError(
            f"a run of bucket {bucket} of store {store} is only in memory; store it before the checkpoint"
        ) from None
    return {bucket: tuple(sorted(runs, key=_order)) for bucket, runs in found.items()}


def store_body(facts: StoreFacts, touched: Iterable[int], *, with_extra: bool) -> StoreBody:
    """What a file says of a store: its counters and what its touched buckets hold now."""
    packs: dict[str, int] = {}
    buckets, gone = {}, []
    for bucket in sorted(touched):
        runs = facts.cells.get(bucket)
        if runs is None:
            gone.append(bucket)
        else:
            buckets[bucket] = [_run_body(run, packs) for run in runs]
    return StoreBody(*facts.counters, facts.extra if with_extra else None, list(packs), buckets, gone)


def _run_body(run: Facts, packs: dict[str, int]) -> RunBody:
    order, rows, keys, nbytes, charge, min_ts, max_ts, base, pack, slot = run
    if min(slot, rows, keys, nbytes, charge) < 0:  # what `apply_body` would refuse must not be written
        raise InvalidError(
            f"slot {slot} of {pack}: a run of {rows} rows, {nbytes} bytes, charge {charge} cannot be"
        )
    number = packs.setdefault(pack, len(packs))
    return RunBody(order, rows, keys, nbytes, charge, min_ts, max_ts, base, number, slot)


def body_of(snapshot: Snapshot, changes: Changes, **head: Any) -> Body:
    """A file of the touched things; with everything touched and no base, a full one."""
    stores = snapshot.stores
    return Body(
        stores={
            name: store_body(stores[name], touched, with_extra=name in changes.extra_of)
            for name, touched in changes.stores.items()
            if name in stores
        },
        stores_gone=sorted(changes.stores.keys() - stores.keys()),
        extras={key: snapshot.extras[key] for key in sorted(changes.extras & snapshot.extras.keys())},
        extras_gone=sorted(changes.extras - snapshot.extras.keys()),
        **head,
    )


def everything(snapshot: Snapshot) -> Changes:
    """All of a snapshot as touched: what a full manifest says."""
    changes = Changes(extras=set(snapshot.extras))
    for name, facts in snapshot.stores.items():
        changes.add_store(name, facts)
    return changes


def apply_body(body: Body, snapshot: Snapshot) -> Changes:
    """Make the file's changes to the snapshot; what they touched."""
    changes = Changes(extras={*body.extras, *body.extras_gone})
    for name in body.stores_gone:
        dropped = snapshot.stores.pop(name, None)
        if dropped is not None:
            changes.add_store(name, dropped)
    for name, changed in body.stores.items():
        _apply_store(body, name, changed, snapshot)
        changes.stores.setdefault(name, set()).update(changed.buckets, changed.gone)
        if changed.extra is not None:
            changes.extra_of.add(name)
    for key in body.extras_gone:
        snapshot.extras.pop(key, None)
    snapshot.extras.update(body.extras)
    return changes


def _apply_store(body: Body, name: str, changed: StoreBody, snapshot: Snapshot) -> None:
    before = snapshot.stores.get(name)
    if before is None and changed.extra is None:
        raise damaged(MANIFEST, body.name, f"it changes store {name}, which its base has not", None)
    cells = {} if before is None else before.cells
    for bucket in changed.gone:
        cells.pop(bucket, None)
    for bucket, runs in changed.buckets.items():
        for run in runs:
            sizes = (run.slot, run.rows, run.keys, run.nbytes, run.charge)
            if not 0 <= run.pack < len(changed.packs) or min(sizes) < 0:
                why = f"a run of bucket {bucket} of store {name} has no pack, or a size below 0"
                raise damaged(MANIFEST, body.name, why, None)
        cells[bucket] = tuple(_facts_of(run, changed.packs[run.pack]) for run in runs)
    counters = (changed.fingerprint, changed.next_seq, changed.next_order)
    extra = changed.extra if changed.extra is not None or before is None else before.extra
    snapshot.stores[name] = StoreFacts(counters, extra or b"", cells)


def _facts_of(run: RunBody, pack: str) -> Facts:
    numbers = (run.order, run.rows, run.keys, run.nbytes, run.charge, run.min_ts, run.max_ts)
    return (*numbers, run.base, pack, run.slot)


def entries_of(cells: Cells) -> list[RunEntry]:
    """The entries of a store as a restored index takes them: stored, not hot."""
    entries = []
    for bucket, runs in sorted(cells.items()):
        for order, rows, keys, nbytes, charge, min_ts, max_ts, base, pack, slot in runs:
            entries.append(
                RunEntry(
                    bucket=bucket,
                    order=order,
                    rows=rows,
                    keys=keys,
                    nbytes=nbytes,
                    charge=charge,
                    min_ts=min_ts,
                    max_ts=max_ts,
                    base=base,
                    stored=StoredRef(pack, slot, nbytes),
                )
            )
    return entries
