"""Finding and removing the objects of a task that no retained checkpoint names.

A crash between putting a pack and the checkpoint that names it leaves an orphan, as does a checkpoint that was
never acknowledged, a pack whose deleter died, and a `put` that died half-way. All of them are objects below the
task's prefix that no retained token reaches, through its manifest, the manifests that one builds on, and the
packs of its runs.

G1  nothing is removed unless every retained token could be followed to its end.
G2  nothing younger than `grace_ms` is removed: a task may be writing it now. Take a grace longer than the longest
    round; a live task adds what it holds itself with `keep` (its packs, and `ManifestChain.names`).
G3  objects of other tasks, also of those whose id begins the same, are never looked at.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tidegate.errors import InvalidError, UnavailableError
from tidegate.storage.backends.port import ObjectInfo, StorageBackend
from tidegate.storage.packs.layout import belongs_to, task_prefix
from tidegate.storage.packs.manifest import ManifestChain, ManifestFiles
from tidegate.storage.packs.token import Token

_OF_A_TASK = re.compile(r".+/(packs/[^/]+/[^/]*\.pack[^/]*|manifests/[^/]*\.manifest[^/]*)")


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """What a collection found and did. `removed` is what would be removed when `dry_run`."""

    task: str
    dry_run: bool
    kept: int
    kept_bytes: int
    young: int
    young_bytes: int
    removed: tuple[str, ...]
    removed_bytes: int
    failed: tuple[str, ...]

    def __str__(self) -> str:
        verb = "would remove" if self.dry_run else "removed"
        failed = f", {len(self.failed)} could not be removed (try again)" if self.failed else ""
        return (
            f"{self.task}: {verb} {len(self.removed)} objects ({self.removed_bytes} bytes), kept {self.kept} "
            f"({self.kept_bytes} bytes) and {self.young} too young to judge{failed}"
        )


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
    kept, young, orphans = [], [], []
    for found in backend.list(task_prefix(task)):
        if not belongs_to(task, found.name):
            continue
        if found.name in named:
            kept.append(found)
        elif now_ms - found.modified_ms < grace_ms:
            young.append(found)
        else:
            orphans.append(found)
    removed, failed = _remove(backend, orphans, dry_run=dry_run)
    return GarbageReport(
        task=task,
        dry_run=dry_run,
        kept=len(kept),
        kept_bytes=sum(each.size for each in kept),
        young=len(young),
        young_bytes=sum(each.size for each in young),
        removed=tuple(each.name for each in removed),
        removed_bytes=sum(each.size for each in removed),
        failed=tuple(each.name for each in failed),
    )


def reachable(backend: StorageBackend, *tokens: Token) -> set[str]:
    """Every object the checkpoints need: their manifests, those they build on, and their packs. Reads no pack."""
    named: set[str] = set()
    files = ManifestFiles(backend)
    for token in tokens:
        chain = ManifestChain.follow(files, token)
        named.update(chain.names(), chain.packs())
    return named


def is_task_object(name: str) -> bool:
    """Whether an object is a pack or a manifest of some task, whole or half written."""
    return _OF_A_TASK.fullmatch(name) is not None


def _remove(
    backend: StorageBackend, orphans: list[ObjectInfo], *, dry_run: bool
) -> tuple[list[ObjectInfo], list[ObjectInfo]]:
    # Manifests go first, so that none is ever left behind that names a pack which is gone.
    ordered = sorted(orphans, key=lambda each: ("/packs/" in each.name, each.name))
    if dry_run:
        return ordered, []
    removed, failed = [], []
    for orphan in ordered:
        try:
            backend.delete(orphan.name)
        except UnavailableError:
            failed.append(orphan)
        else:
            removed.append(orphan)
    return removed, failed
