"""What a power cut may leave behind: an enumeration of the legal folder trees after a recorded run.

After the first k operations of a `Recording` the power goes. Operations that a later sync covers are there;
the others are *pending*, and each model says which of them may survive.

- `model="ordered"`, a journalling file system with ordered data. Names: the first so many of the pending
  changes survive, and any sync commits all before it. Bytes of a file: the first so many of its writes
  since its last sync, the next one torn.
- `model="weak"`, no more than POSIX promises. Names: any subset of a folder's changes since its last
  `sync_folder`. Bytes of a file: any of its writes since its last sync lost, torn, or zeros in their place.

Torn means cut at a byte near either end or at a multiple of 512. A file whose length grew but whose bytes did
not arrive reads as zeros. A name may come back to an old file, a file may lose its name altogether.

Bounded on purpose (most bugs need few lost operations): where the full product of choices at one crash
point exceeds `limit`, each choice is varied alone, around "everything survived" and "nothing pending
survived". States that are equal and carry equal marks are given once. Deterministic.

    recorder = Recorder(folder)
    log = Log(folder, files=Files(watch=recorder)); log.append(…); recorder.mark("acknowledged 1"); …
    for state in crash_states(recorder.recording, model="weak"):
        state.write_to(fresh_folder)
        …open it, check that everything in state.marks is there…
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from tidegate.errors import InvalidError
from tidegate.testing.recording import ROOT, Name, Operation, Recording, Sync, SyncFolder, Truncate, Write

Model: TypeAlias = Literal["ordered", "weak"]
Tree: TypeAlias = "dict[str, bytes | None]"
SECTOR = 512
FULL_SUBSETS = 5


@dataclass(frozen=True, slots=True)
class CrashState:
    """One folder tree a power cut may leave: relative path → bytes, None for a folder."""

    after: int
    tree: Tree
    marks: tuple[str, ...]
    story: str

    def write_to(self, folder: Path) -> Path:
        """Lay the tree out under `folder` (made when absent, otherwise empty)."""
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in sorted(self.tree.items()):
            if content is None:
                (folder / path).mkdir(parents=True, exist_ok=True)
            else:
                (folder / path).write_bytes(content)
        return folder


def crash_states(
    recording: Recording,
    *,
    model: Model = "weak",
    limit: int = 64,
    points: Sequence[int] | None = None,
) -> Iterator[CrashState]:
    """Every state a power cut may leave, at every point of the run (or at `points` = operations done)."""
    if model not in ("ordered", "weak"):
        raise InvalidError(f"a crash model is 'ordered' or 'weak', not {model!r}")
    wanted = None if points is None else set(points)
    disk = _Disk(recording, model)
    seen: set[tuple[int, frozenset[tuple[str, bytes | None]]]] = set()
    for done in range(len(recording.operations) + 1):
        if done:
            disk.apply(recording.operations[done - 1])
        if wanted is not None and done not in wanted:
            continue
        marks = tuple(label for at, label in recording.marks if at <= done)
        for tree, story in disk.states(limit):
            key = (len(marks), frozenset(tree.items()))
            if key not in seen:
                seen.add(key)
                yield CrashState(done, tree, marks, f"after {_last(recording, done)}: {story}")


def _last(recording: Recording, done: int) -> str:
    return "nothing" if done == 0 else f"operation {done} ({recording.describe(done - 1)})"


@dataclass(slots=True)
class _FileOnDisk:
    """The bytes that are safe, and the changes since the last sync of the file."""

    safe: bytes
    pending: list[Write | Truncate] = field(default_factory=list)
    _variants: dict[Model, list[tuple[str, bytes]]] = field(default_factory=dict)

    def push(self, change: Write | Truncate) -> None:
        self.pending.append(change)
        self._variants.clear()

    def sync(self) -> None:
        self.safe = _changed(self.safe, self.pending)
        self.pending.clear()
        self._variants.clear()

    def variants(self, model: Model) -> list[tuple[str, bytes]]:
        """What the file may hold: first everything, then nothing pending, then the odd cases."""
        if model not in self._variants:
            found = dict.fromkeys(self._possible(model)) if self.pending else {("", self.safe): None}
            self._variants[model] = list(found)
        return self._variants[model]

    def _possible(self, model: Model) -> Iterator[tuple[str, bytes]]:
        pending = self.pending
        yield "", _changed(self.safe, pending)
        yield "lost its unsynced writes", self.safe
        for kept in _spread(len(pending)):
            before = _changed(self.safe, pending[:kept])
            yield f"lost its last {len(pending) - kept} writes", before
            change = pending[kept]
            if isinstance(change, Write):
                for cut in _cuts(change):
                    torn = Write(change.node, change.position, change.content[:cut])
                    yield f"write {kept} torn at byte {cut}", _changed(before, [torn])
            if model == "weak":
                yield f"lost write {kept} alone", _changed(self.safe, pending[:kept] + pending[kept + 1 :])
                if isinstance(change, Write):
                    zeros = Write(change.node, change.position, bytes(len(change.content)))
                    story = f"zeros in place of write {kept}"
                    yield story, _changed(self.safe, [*pending[:kept], zeros, *pending[kept + 1 :]])


class _Disk:
    """Names and files, each with what is safe and what is pending."""

    def __init__(self, recording: Recording, model: Model) -> None:
        self.model = model
        self.paths = recording.paths
        self.safe_names = {folder: dict(names) for folder, names in recording.folders.items()}
        self.pending_names: list[Name] = []
        self.files = {node: _FileOnDisk(content) for node, content in recording.contents.items()}

    def apply(self, step: Operation) -> None:
        match step:
            case Write() | Truncate():
                self.files[step.node].push(step)
            case Sync():
                self.files[step.node].sync()
                if self.model == "ordered":
                    self._commit(self.pending_names)
            case Name():
                self.pending_names.append(step)
            case SyncFolder():
                mine = [change for change in self.pending_names if step.folder == change.folder]
                self._commit(self.pending_names if self.model == "ordered" else mine)

    def _commit(self, changes: list[Name]) -> None:
        done = {id(change) for change in changes}
        for change in changes:
            _rename_in(self.safe_names, change)
        self.pending_names = [change for change in self.pending_names if id(change) not in done]

    def states(self, limit: int) -> Iterator[tuple[Tree, str]]:
        names = list(self._name_variants())
        moving = [node for node, file in self.files.items() if file.pending]
        choices = [self.files[node].variants(self.model) for node in moving]
        size = len(names)
        for choice in choices:
            size *= len(choice)
        sizes = [len(names), *(len(choice) for choice in choices)]
        for pick in _one_at_a_time(sizes) if size > limit else itertools.product(*map(range, sizes)):
            story, folders = names[pick[0]]
            stories = [story] if story else []
            contents = {node: file.safe for node, file in self.files.items() if not file.pending}
            for node, choice, index in zip(moving, choices, pick[1:], strict=True):
                story, contents[node] = choice[index]
                if story:
                    stories.append(f"{self.paths[node]} {story}")
            yield _tree(folders, contents), "; ".join(stories) or "everything survived"

    def _name_variants(self) -> Iterator[tuple[str, dict[int, dict[str, int]]]]:
        """What the folders may list: first every change, then none, then the cases in between."""
        for kept in _kept_changes(len(self.pending_names), ordered=self.model == "ordered"):
            folders = {folder: dict(names) for folder, names in self.safe_names.items()}
            for index in kept:
                _rename_in(folders, self.pending_names[index])
            lost = [c for i, c in enumerate(self.pending_names) if i not in set(kept)]
            yield "lost names: " + ", ".join(map(_name_story, lost)) if lost else "", folders


def _name_story(change: Name) -> str:
    if change.node is None:
        return f"unlink {change.name}"
    return f"{change.from_name} → {change.name}" if change.from_name else f"create {change.name}"


def _rename_in(folders: dict[int, dict[str, int]], change: Name) -> None:
    if change.from_folder is not None and change.from_name is not None:
        names = folders[change.from_folder]
        if names.get(change.from_name) == change.node:
            del names[change.from_name]
    if change.node is None:
        folders[change.folder].pop(change.name, None)
    else:
        folders[change.folder][change.name] = change.node


def _kept_changes(count: int, *, ordered: bool) -> Iterator[tuple[int, ...]]:
    everything = tuple(range(count))
    yield everything
    if count == 0:
        return
    yield ()
    if ordered:
        yield from (everything[:kept] for kept in range(1, count))
    elif count <= FULL_SUBSETS:
        for kept in range(1, count):
            yield from itertools.combinations(everything, kept)
    else:
        yield from (everything[:kept] for kept in range(1, count))
        yield from (everything[:one] + everything[one + 1 :] for one in everything)
        yield from ((one,) for one in everything)


def _one_at_a_time(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Variant 0 is "all there", variant 1 "nothing pending": vary each choice alone around both."""
    for base in ([0] * len(sizes), [min(1, size - 1) for size in sizes]):
        yield tuple(base)
        for place, size in enumerate(sizes):
            for value in range(size):
                if value != base[place]:
                    yield (*base[:place], value, *base[place + 1 :])


def _changed(content: bytes, changes: Sequence[Write | Truncate]) -> bytes:
    buffer = bytearray(content)
    for change in changes:
        if isinstance(change, Truncate):
            del buffer[change.length :]
            buffer.extend(bytes(max(0, change.length - len(buffer))))
        elif change.content:
            buffer.extend(bytes(max(0, change.position - len(buffer))))
            buffer[change.position : change.position + len(change.content)] = change.content
    return bytes(buffer)


def _cuts(change: Write) -> list[int]:
    """Where a write may be torn: near both ends, at the first and last sector boundary, in the middle."""
    size = len(change.content)
    first = SECTOR - change.position % SECTOR
    last = size - (change.position + size) % SECTOR
    return sorted({cut for cut in (1, first, size // 2, last, size - 1) if 0 < cut < size})


def _spread(count: int) -> list[int]:
    """All positions when few, else the first, the middle and the last four."""
    return sorted({0, count // 2, *range(max(0, count - 4), count)}) if count else []


def _tree(folders: dict[int, dict[str, int]], contents: dict[int, bytes]) -> Tree:
    tree: Tree = {}
    walk = [("", ROOT)]
    while walk:
        prefix, folder = walk.pop()
        for name, node in folders[folder].items():
            path = f"{prefix}{name}"
            if node in folders:
                tree[path] = None
                walk.append((f"{path}/", node))
            else:
                tree[path] = contents[node]
    return tree
