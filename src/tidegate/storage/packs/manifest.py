"""What a checkpoint of a task names: every stored run of every store, and the counters to go on from.

A manifest file is sealed (see `layout`) and either *full* or a *delta*: the buckets, stores and extras that
changed since another manifest, which it names with its digest. So a checkpoint writes bytes for what changed, and
a chain of files ends at a full one:

    full ◄── delta over 4 checkpoints ◄── delta over 2 ◄── delta over 1

M1  the spans of a chain's deltas fall like the bits of a number: a new delta that would cover as many
    checkpoints as the last one replaces it, and covers both. A chain of n checkpoints has at most
    log2(n) + 1 deltas, and a changed bucket is written that often at most; no full manifest is written just
    because time passed.
M2  when a delta would have half the bytes of the full manifest, a full one is written instead.
M3  a manifest names its task, its number and its own object, and the digest of what it builds on: a file of another
    task, an older file under a newer name and a swapped link are all refused.
M4  a manifest names only stored runs; a run that is only in memory is a caller's mistake.

Thread rule: `Manifest` and `StoreState` are values; a `ManifestChain` belongs to its task's one writer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tidegate.errors import InvalidError
from tidegate.storage.backends.port import StorageBackend
from tidegate.storage.index.entries import RunEntry
from tidegate.storage.packs.layout import damaged, manifest_name, seal
from tidegate.storage.packs.manifest_body import (
    MANIFEST,
    PACK,
    Body,
    Cells,
    Changes,
    Link,
    Snapshot,
    StoreFacts,
    apply_body,
    body_of,
    cells_of,
    entries_of,
    everything,
    read_body,
)
from tidegate.storage.packs.token import Token, digest_of

MAX_CHAIN = 64


@dataclass(frozen=True, slots=True)
class StoreState:
    """One store in a checkpoint. `entries` are read without their hot copies; each must be stored."""

    fingerprint: str
    next_seq: int
    next_order: int
    entries: Sequence[RunEntry] = ()
    extra: bytes = b""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a checkpoint of one task names."""

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


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A file about to be put, and how many checkpoints it covers."""

    content: bytes
    span: int


class ManifestFiles:
    """Manifest files, each read once: the chains of neighbouring checkpoints share most of theirs."""

    def __init__(self, backend: StorageBackend) -> None:
        self.backend = backend
        self._read: dict[tuple[str, Link], tuple[Body, int]] = {}

    def read(self, task: str, wanted: Link) -> tuple[Body, int]:
        """One file and its size, checked."""
        known = self._read.get((task, wanted))
        if known is None:
            known = self._read[task, wanted] = read_body(self.backend, task, wanted)
        return known


class ManifestChain:
    """The manifests of one task that the next one may build on: a full one and the deltas after it."""

    def __init__(self, backend: StorageBackend, task: str) -> None:
        self._backend = backend
        self._task = task
        self._links: list[_Written] = []
        self._newest = Snapshot()

    def names(self) -> list[str]:
        """The objects the next manifest may build on: garbage collection in a live process must keep them."""
        return [each.link.manifest for each in self._links]

    def write(
        self, manifest: Manifest, unique: str, *, touched: Mapping[str, Collection[int]] | None = None
    ) -> Token:
        """Put the manifest, full or as what changed, and return its token; publishing that is the caller's.

        `touched` names, by store, every bucket that may have changed since the chain's last manifest; then only
        those are looked at. Without it (or for a store it does not name) all are compared, about 1 µs a run.
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
        links, sealed, changes = self._choose(manifest.number, name, after, changes)
        self._backend.put(name, [sealed.content])
        link = Link(name, digest_of(sealed.content), manifest.number)
        self._links = [*links, _Written(link, sealed.span, len(sealed.content), changes)]
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
                new.stores[name] = StoreFacts(counters, state.extra, cells_of(state.entries, name))
                changes.add_store(name, new.stores[name])
                continue
            cells, different = _compare_cells(name, state, before, touched.get(name))
            new.stores[name] = StoreFacts(counters, state.extra, cells)
            if different or counters != before.counters or state.extra != before.extra:
                changes.stores[name] = different
            if state.extra != before.extra:
                changes.extra_of.add(name)
        return new, changes

    def _choose(
        self, number: int, name: str, after: Snapshot, changes: Changes
    ) -> tuple[list[_Written], _Sealed, Changes]:
        """The links that stay, the new file, and what it says is changed."""
        links, span, union = list(self._links), 1, Changes()
        union.add(changes)
        while len(links) > 1 and links[-1].span <= span:  # M1
            replaced = links.pop()
            span += replaced.span
            union.add(replaced.changes)
        if links and len(links) < MAX_CHAIN:
            head = {"name": name, "task": self._task, "number": number, "span": span}
            delta = _Sealed(seal(MANIFEST, body_of(after, union, base=links[-1].link, **head)), span)
            if 2 * len(delta.content) < links[0].size:  # M2
                return links, delta, union
        head = {"name": name, "task": self._task, "number": number, "span": 0}
        return [], _Sealed(seal(MANIFEST, body_of(after, everything(after), base=None, **head)), 0), Changes()

    @classmethod
    def load(cls, backend: StorageBackend, token: Token) -> tuple[ManifestChain, Manifest]:
        """The checkpoint's manifest, and a chain that continues from it. Nothing missing is skipped."""
        chain = cls.follow(ManifestFiles(backend), token)
        newest = chain._newest
        stores = {
            name: StoreState(*facts.counters, entries_of(facts.cells), facts.extra)
            for name, facts in newest.stores.items()
        }
        return chain, Manifest(token.task, token.number, stores, dict(newest.extras))

    @classmethod
    def follow(cls, files: ManifestFiles, token: Token) -> ManifestChain:
        """The chain that ends at the checkpoint."""
        found: list[tuple[Link, Body, int]] = []
        wanted: Link | None = Link(token.manifest, token.digest, token.number)
        while wanted is not None:
            if len(found) > MAX_CHAIN:
                raise damaged(MANIFEST, token.manifest, f"it builds on more than {MAX_CHAIN} others", None)
            body, size = files.read(token.task, wanted)
            found.append((wanted, body, size))
            wanted = body.base
        chain = cls(files.backend, token.task)
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
