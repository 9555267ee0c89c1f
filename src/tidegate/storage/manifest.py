"""The manifest of a task's checkpoint: every stored run of every store, counters, and named values.

A manifest file is sealed (see `backends.sealed`) and either *full* or a *delta*: the *present* value of each bucket,
store and extra that changed since another manifest, which it names with its digest. A chain ends at a full one:

    full ◄── delta over 4 checkpoints ◄── delta over 2 ◄── delta over 1

M1  a new delta that would cover as many checkpoints as the last one replaces it, and covers both. A chain of n
    checkpoints has at most log2(n) + 1 deltas, and a changed bucket is written at most that often.
M2  when a delta would have half the bytes of the full manifest, a full one is written instead.
M3  a manifest names its task, its number and its own object, and the digest of what it builds on: a file of another
    task, an older file under a newer name and a swapped link are all refused.
M4  a manifest names only stored runs; a run that is only in memory is an error of the caller.

The token is the small value a master keeps for a checkpoint and all that a restore needs. Garbage is every object below
a task's prefix that no retained token reaches.

G1  nothing is removed unless every retained token could be followed to its end.
G2  nothing younger than `grace_ms` is removed: a task may be writing it now. A live task adds what it holds (`keep`).
G3  objects of other tasks, also of those whose id begins the same, are never looked at.

Thread rule: `Manifest` and `StoreState` are values; a `ManifestChain` belongs to its task's one writer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa

from tidegate.errors import InvalidError, UnavailableError
from tidegate.storage.backends.base import StorageBackend, check_name
from tidegate.storage.backends.sealed import (
    Format,
    belongs_to,
    damaged,
    manifest_name,
    seal,
    task_prefix,
    unseal,
)
from tidegate.storage.index import RunEntry, StoredRef
from tidegate.storage.state import extra_name

# -- token -------------------------------------------------------------------------------------------

MAX_TOKEN_BYTES = 16 << 10
TOKEN = Format(b"TG-TOKEN", "checkpoint token", 1, "go back to an older checkpoint's token")


def digest_of(data: bytes | pa.Buffer) -> bytes:
    """The digest of a manifest: 16 bytes of BLAKE2b."""
    return hashlib.blake2b(memoryview(data), digest_size=16).digest()


class Token(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A checkpoint of one task on one backend."""

    kind: str
    identity: str
    task: str
    number: int
    manifest: str
    digest: bytes

    def encode(self) -> bytes:
        return seal(TOKEN, self)

    @classmethod
    def decode(cls, token: bytes) -> Token:
        """Decode; raises `CorruptError` if any byte changed."""
        if len(token) > MAX_TOKEN_BYTES:
            raise damaged(TOKEN, "(handed in)", f"it has {len(token)} bytes, above {MAX_TOKEN_BYTES}", None)
        decoded = unseal(TOKEN, token, cls, name="(handed in)")
        check_name(decoded.manifest)
        return decoded

    def check(self, backend: StorageBackend, task: str) -> None:
        """Raise `InvalidError` unless the token is of this backend and this task."""
        if (self.kind, self.identity) != (backend.kind, backend.identity):
            raise InvalidError(
                f"the checkpoint token of task {self.task} is of the {self.kind} backend {self.identity}, and this is "
                f"the {backend.kind} backend {backend.identity}; open the backend it was written to"
            )
        if self.task != task:
            raise InvalidError(
                f"the checkpoint token is of task {self.task}, not {task}; give each task its own"
            )


# -- content of a file -------------------------------------------------------------------------------

MANIFEST = Format(
    b"TG-MANIF", "manifest", 2, "go back to an older checkpoint, or restore the file from a copy", oldest=1
)
KEPT_BY_NAME = b"\x02"  # version 1 stored this with the runs of a store whose progress is a named value
Facts: TypeAlias = "tuple[Any, ...]"  # of a run, as `_facts` gets them
Cells: TypeAlias = "dict[int, tuple[Facts, ...]]"
Row: TypeAlias = (
    "tuple[int, int, int, int, int, int, int, bool, int, int]"  # in a file: the pack by its number
)
_facts = attrgetter(
    *("order", "rows", "keys", "nbytes", "charge", "min_ts", "max_ts", "base", "stored.pack", "stored.slot")
)
_order = itemgetter(0)
PACK: Final = 8  # where the pack's name is among the facts


class _Shape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class StoreBody(_Shape, frozen=True):
    """A store's counters, and its touched buckets.

    `extra` is None when the base has the store, too, and empty otherwise. In version 1 it was the progress of the
    store's state, and None when that was not touched; it is read as a named value.
    """

    fingerprint: str
    next_seq: int
    next_order: int
    extra: bytes | None
    packs: list[str]
    buckets: dict[int, list[Row]]
    gone: list[int]


class Link(_Shape, frozen=True):
    """The manifest a delta builds on."""

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


class StoreFacts(NamedTuple):
    """One store as the newest manifest has it: fingerprint, next row number, next order; and its runs."""

    counters: tuple[str, int, int]
    cells: Cells


@dataclass(slots=True)
class Snapshot:
    """A whole checkpoint as numbers and names."""

    stores: dict[str, StoreFacts] = field(default_factory=dict)
    extras: dict[str, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class Changes:
    """The changes: buckets by store (an empty set: its counters), added or removed stores, extras."""

    stores: dict[str, set[int]] = field(default_factory=dict)
    renewed: set[str] = field(default_factory=set)
    extras: set[str] = field(default_factory=set)

    def add(self, other: Changes) -> None:
        for store, buckets in other.stores.items():
            self.stores.setdefault(store, set()).update(buckets)
        self.renewed |= other.renewed
        self.extras |= other.extras

    def add_store(self, name: str, facts: StoreFacts) -> None:
        """Mark all of an added or removed store as changed."""
        self.stores.setdefault(name, set()).update(facts.cells)
        self.renewed.add(name)


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


def store_body(facts: StoreFacts, touched: Iterable[int], *, is_new: bool) -> StoreBody:
    """A store's part of a file: its counters and the present content of its changed buckets."""
    packs: dict[str, int] = {}
    buckets, gone = {}, []
    for bucket in sorted(touched):
        runs = facts.cells.get(bucket)
        if runs is None:
            gone.append(bucket)
        else:
            buckets[bucket] = [_row(run, packs) for run in runs]
    return StoreBody(*facts.counters, b"" if is_new else None, list(packs), buckets, gone)


def _row(run: Facts, packs: dict[str, int]) -> Row:
    pack, slot = run[PACK:]
    if min(slot, *run[1:5]) < 0:  # never write what `apply_body` would refuse
        raise InvalidError(
            f"slot {slot} of {pack}: a run with {run[1:5]} rows, keys, bytes and charge cannot be"
        )
    return (*run[:PACK], packs.setdefault(pack, len(packs)), slot)


def body_of(snapshot: Snapshot, changes: Changes, **head: Any) -> Body:
    """The file body with the changed items; a full one if everything changed and there is no base."""
    stores = snapshot.stores
    return Body(
        stores={
            name: store_body(stores[name], touched, is_new=name in changes.renewed)
            for name, touched in changes.stores.items()
            if name in stores
        },
        stores_gone=sorted(changes.stores.keys() - stores.keys()),
        extras={key: snapshot.extras[key] for key in sorted(changes.extras & snapshot.extras.keys())},
        extras_gone=sorted(changes.extras - snapshot.extras.keys()),
        **head,
    )


def everything(snapshot: Snapshot) -> Changes:
    """All of a snapshot as changed: the content of a full manifest."""
    changes = Changes(extras=set(snapshot.extras))
    for name, facts in snapshot.stores.items():
        changes.add_store(name, facts)
    return changes


def apply_body(body: Body, snapshot: Snapshot) -> Changes:
    """Apply the file's changes to the snapshot and return them."""
    changes = Changes(extras={*body.extras, *body.extras_gone})
    for name in body.stores_gone:
        dropped = snapshot.stores.pop(name, None)
        if dropped is not None:
            changes.add_store(name, dropped)
    for name, changed in body.stores.items():
        _apply_store(body, name, changed, snapshot)
        changes.stores.setdefault(name, set()).update(changed.buckets, changed.gone)
        if changed.extra is not None:
            changes.renewed.add(name)
            if changed.extra not in (b"", KEPT_BY_NAME):  # version 1
                snapshot.extras[extra_name(name)] = changed.extra
                changes.extras.add(extra_name(name))
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
        if any(not 0 <= run[PACK] < len(changed.packs) or min(run[-1], *run[1:5]) < 0 for run in runs):
            why = f"a run of bucket {bucket} of store {name} has no pack, or a size below 0"
            raise damaged(MANIFEST, body.name, why, None)
        cells[bucket] = tuple((*run[:PACK], changed.packs[run[PACK]], run[-1]) for run in runs)
    counters = (changed.fingerprint, changed.next_seq, changed.next_order)
    snapshot.stores[name] = StoreFacts(counters, cells)


def entries_of(cells: Cells) -> list[RunEntry]:
    """The entries of a store as a restored index takes them: stored, not hot."""
    entries = []
    for bucket, runs in sorted(cells.items()):
        for order, rows, keys, nbytes, charge, min_ts, max_ts, base, pack, slot in runs:
            stored = StoredRef(pack, slot, nbytes)
            entries.append(
                RunEntry(bucket, order, rows, keys, nbytes, charge, min_ts, max_ts, base, None, stored)
            )
    return entries


# -- chain of manifests ------------------------------------------------------------------------------

MAX_CHAIN = 64


@dataclass(frozen=True, slots=True)
class StoreState:
    """One store in a checkpoint. Hot copies of `entries` are ignored; each entry must be stored."""

    fingerprint: str
    next_seq: int
    next_order: int
    entries: Sequence[RunEntry] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint of one task."""

    task: str
    number: int
    stores: Mapping[str, StoreState] = field(default_factory=dict)
    extras: Mapping[str, bytes] = field(default_factory=dict)

    def packs(self) -> set[str]:
        """Every pack a stored run of this checkpoint lies in."""
        stored = [entry.stored for state in self.stores.values() for entry in state.entries]
        return {each.pack for each in stored if each is not None}


@dataclass(frozen=True, slots=True)
class _Written:
    """One manifest of the chain, and what was touched between the one before it and this one."""

    link: Link
    span: int
    size: int
    changes: Changes


class ManifestChain:
    """The manifests of one task that the next one may build on: a full one and the deltas after it."""

    def __init__(self, backend: StorageBackend, task: str) -> None:
        self._backend = backend
        self._task = task
        self._links: list[_Written] = []
        self._newest = Snapshot()

    @property
    def newest_bytes(self) -> int:
        """The size of the newest manifest."""
        return self._links[-1].size

    def names(self) -> list[str]:
        """The objects the next manifest may build on: garbage collection in a live process must keep them."""
        return [each.link.manifest for each in self._links]

    def write(
        self, manifest: Manifest, unique: str, *, touched: Mapping[str, Collection[int]] | None = None
    ) -> Token:
        """Put the manifest, full or as a delta, and return its token; the caller publishes the token.

        `touched` has, by store, every bucket that may have changed since the chain's last manifest; only those are
        compared. Without it (or for a store not in it) all are compared, at about 1 µs per run.
        """
        if manifest.task != self._task:
            raise InvalidError(
                f"a manifest of task {manifest.task} does not belong into {self._task}'s chain"
            )
        if self._links and manifest.number <= self._links[-1].link.number:
            last = self._links[-1].link.number
            raise InvalidError(
                f"checkpoint {manifest.number} of {self._task} follows {last}; numbers must grow"
            )
        name = manifest_name(manifest.task, manifest.number, unique)
        after, changes = self._compare(manifest, touched or {})
        links, span, content, changes = self._choose(manifest.number, name, after, changes)
        self._backend.put(name, [content])
        link = Link(name, digest_of(content), manifest.number)
        self._links = [*links, _Written(link, span, len(content), changes)]
        self._newest = after
        return Token(
            kind=self._backend.kind,
            identity=self._backend.identity,
            task=manifest.task,
            number=manifest.number,
            manifest=name,
            digest=link.digest,
        )

    def _compare(
        self, manifest: Manifest, touched: Mapping[str, Collection[int]]
    ) -> tuple[Snapshot, Changes]:
        """The new snapshot, and what is different in it."""
        old, new, changes = self._newest, Snapshot(extras=dict(manifest.extras)), Changes()
        changes.extras = {
            key for key in old.extras.keys() | new.extras.keys() if old.extras.get(key) != new.extras.get(key)
        }
        for name in old.stores.keys() - manifest.stores.keys():
            changes.add_store(name, old.stores[name])
        for name, state in manifest.stores.items():
            counters = (state.fingerprint, state.next_seq, state.next_order)
            before = old.stores.get(name)
            if before is None:
                new.stores[name] = StoreFacts(counters, cells_of(state.entries, name))
                changes.add_store(name, new.stores[name])
                continue
            cells, different = _compare_cells(name, state, before, touched.get(name))
            new.stores[name] = StoreFacts(counters, cells)
            if different or counters != before.counters:
                changes.stores[name] = different
        return new, changes

    def _choose(
        self, number: int, name: str, after: Snapshot, changes: Changes
    ) -> tuple[list[_Written], int, bytes, Changes]:
        """The links that stay; the new file's span and content; and what it says is changed."""
        links, span, union = list(self._links), 1, Changes()
        union.add(changes)
        while len(links) > 1 and links[-1].span <= span:  # M1
            replaced = links.pop()
            span += replaced.span
            union.add(replaced.changes)
        head = {"name": name, "task": self._task, "number": number}
        if links and len(links) < MAX_CHAIN:
            delta = seal(MANIFEST, body_of(after, union, base=links[-1].link, span=span, **head))
            if 2 * len(delta) < links[0].size:  # M2
                return links, span, delta, union
        return [], 0, seal(MANIFEST, body_of(after, everything(after), base=None, span=0, **head)), Changes()

    @classmethod
    def load(cls, backend: StorageBackend, token: Token) -> tuple[ManifestChain, Manifest]:
        """The checkpoint's manifest, and a chain that continues from it. Nothing missing is skipped."""
        chain = cls.follow(backend, token, partial(read_body, backend))
        newest = chain._newest
        stores = {
            name: StoreState(*facts.counters, entries_of(facts.cells))
            for name, facts in newest.stores.items()
        }
        return chain, Manifest(token.task, token.number, stores, dict(newest.extras))

    @classmethod
    def follow(
        cls, backend: StorageBackend, token: Token, read: Callable[[str, Link], tuple[Body, int]]
    ) -> ManifestChain:
        """The chain that ends at the checkpoint; `read` gets one file and its size, checked."""
        found: list[tuple[Link, Body, int]] = []
        wanted: Link | None = Link(token.manifest, token.digest, token.number)
        while wanted is not None:
            if len(found) > MAX_CHAIN:
                raise damaged(MANIFEST, token.manifest, f"it builds on more than {MAX_CHAIN} others", None)
            body, size = read(token.task, wanted)
            found.append((wanted, body, size))
            wanted = body.base
        chain = cls(backend, token.task)
        for link, body, size in reversed(found):
            changes = apply_body(body, chain._newest)
            chain._links.append(_Written(link, body.span, size, changes))
        return chain

    def packs(self) -> set[str]:
        """Every pack a stored run of the newest checkpoint lies in."""
        stores = self._newest.stores.values()
        return {run[PACK] for facts in stores for runs in facts.cells.values() for run in runs}


def _compare_cells(
    name: str, state: StoreState, before: StoreFacts, touched: Collection[int] | None
) -> tuple[Cells, set[int]]:
    """The store's cells now, and the buckets in which they differ."""
    old = before.cells
    wanted = None if touched is None else set(touched)
    found = cells_of(state.entries, name, wanted)
    if wanted is None:
        different = {bucket for bucket, runs in found.items() if old.get(bucket) != runs}
        return found, different | (old.keys() - found.keys())
    different = {bucket for bucket in wanted if old.get(bucket) != found.get(bucket)}
    cells = dict(old)
    for bucket in different:
        if bucket in found:
            cells[bucket] = found[bucket]
        else:
            cells.pop(bucket, None)
    return cells, different


# -- garbage -----------------------------------------------------------------------------------------

_OF_A_TASK = re.compile(r".+/(packs/[^/]+/[^/]*\.pack[^/]*|manifests/[^/]*\.manifest[^/]*)")


class GarbageReport(NamedTuple):
    """The result of a collection: names of objects (with `dry_run`, what would be removed), and how many stay."""

    removed: tuple[str, ...]
    failed: tuple[str, ...]
    kept: int
    young: int


def collect_garbage(
    backend: StorageBackend,
    task: str,
    retained: Sequence[bytes],
    *,
    grace_ms: int,
    now_ms: int,
    dry_run: bool = False,
    keep: Collection[str] = (),
) -> GarbageReport:
    """Remove the task's orphans; see the module's rules."""
    if grace_ms < 0:
        raise InvalidError(f"grace_ms is {grace_ms}; it must be 0 or more")
    tokens = [Token.decode(encoded) for encoded in retained]
    for token in tokens:
        token.check(backend, task)
    named = {*keep, *reachable(backend, *tokens)}
    kept, young, orphans = 0, 0, list[str]()
    for found in backend.list(task_prefix(task)):
        if belongs_to(task, found.name):
            is_young = now_ms - found.modified_ms < grace_ms
            if found.name in named:
                kept += 1
            elif is_young:
                young += 1
            else:
                orphans.append(found.name)
    removed, failed = [], []
    for orphan in sorted(orphans, key=lambda name: ("/packs/" in name, name)):  # first the manifests
        try:
            if not dry_run:
                backend.delete(orphan)
            removed.append(orphan)
        except UnavailableError:
            failed.append(orphan)
    return GarbageReport(tuple(removed), tuple(failed), kept, young)


def reachable(backend: StorageBackend, *tokens: Token) -> set[str]:
    """Every object the checkpoints need: their manifests, those they build on, and their packs. Reads no pack."""
    named: set[str] = set()
    read = cache(partial(read_body, backend))  # chains of neighbouring checkpoints share most of their files
    for token in tokens:
        chain = ManifestChain.follow(backend, token, read)
        named.update(chain.names(), chain.packs())
    return named


def is_task_object(name: str) -> bool:
    """Whether an object is a pack or a manifest of some task, whole or half written."""
    return _OF_A_TASK.fullmatch(name) is not None
