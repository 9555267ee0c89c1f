"""What a power cut may leave on disk: a recording of file operations, and the folder trees that are possible after it.

`Recorder(root)` is a watcher for `Files(watch=…)`. It notes each change of bytes and names as an `Operation` on *nodes*
(files and folders, whatever they are called at the moment), and keeps every byte in memory. `mark(label)` puts a note
between the operations ("offset 12 was acknowledged"); a crash state carries the marks set before it. Lock files are
opened outside the watched effects and never appear.

`crash_states(recording)` cuts the power after the first k operations. What a later sync covers is there; of the rest

- `model="ordered"` (a journalling file system) keeps the first so many changes of names, and of each file's writes
  since its last sync the first so many, the next one torn; any sync commits all changes of names before it.
- `model="weak"` (what POSIX promises) keeps any subset of a folder's changes since its last `sync_folder`, and of a
  file's writes any: lost, torn, or zeros in their place.

Torn means cut near either end or at a multiple of 512. Where the product of choices exceeds `limit`, each is varied
alone, around "everything survived" and "nothing pending survived". Equal states with equal marks are given once.

Thread rule: operations of several threads are put into one order under a lock.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from tidegate.errors import InvalidError
from tidegate.files import Effect

ROOT = 0


@dataclass(frozen=True, slots=True)
class Write:
    node: int
    position: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    node: int
    length: int


@dataclass(frozen=True, slots=True)
class Sync:
    """The bytes and the length of one file are on the disk. Its name may not be."""

    node: int


@dataclass(frozen=True, slots=True)
class Name:
    """`folder/name` now means `node` (None: nothing). A rename also frees the old name, in one step."""

    folder: int
    name: str
    node: int | None
    from_folder: int | None = None
    from_name: str | None = None


@dataclass(frozen=True, slots=True)
class SyncFolder:
    """The names in one folder are on the disk."""

    folder: int


Operation: TypeAlias = "Write | Truncate | Sync | Name | SyncFolder"


@dataclass(slots=True)
class Recording:
    """What happened: the tree at the start, the operations in order, and the marks between them."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    contents: dict[int, bytes] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    paths: dict[int, str] = field(default_factory=lambda: {ROOT: "."})

    def barriers(self) -> list[int]:
        """Positions of the operations that promise something: syncs of files and folders."""
        return [i for i, step in enumerate(self.operations) if isinstance(step, Sync | SyncFolder)]

    def without(self, barrier: int) -> Recording:
        """The same run on a disk that ignored that one sync: a *lying* disk, or the audit of a barrier."""
        if not isinstance(self.operations[barrier], Sync | SyncFolder):
            raise InvalidError(f"operation {barrier} is {self.describe(barrier)}, not a sync")
        operations = self.operations[:barrier] + self.operations[barrier + 1 :]
        marks = [(at - (at > barrier), label) for at, label in self.marks]
        return Recording(self.folders, self.contents, operations, marks, self.paths)

    def describe(self, index: int) -> str:
        """One operation in words."""
        step = self.operations[index]
        match step:
            case Write():
                where = f"{step.position}+{len(step.content)}"
                return f"write {self.paths[step.node]} at {where}"
            case Truncate():
                return f"truncate {self.paths[step.node]} to {step.length}"
            case Sync():
                return f"sync {self.paths[step.node]}"
            case SyncFolder():
                return f"sync folder {self.paths[step.folder]}"
            case Name() if step.node is None:
                return f"unlink {step.name} in {self.paths[step.folder]}"
            case Name() if step.from_name is not None:
                return f"rename {step.from_name} to {step.name} in {self.paths[step.folder]}"
            case _:
                return f"create {step.name} in {self.paths[step.folder]}"


class Recorder:
    """A watcher that fills `recording`; only what happens under `root` is noted."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.recording = Recording()
        self._folders: dict[int, dict[str, int]] = {ROOT: {}}  # the tree as the process sees it
        self._next_node = ROOT + 1
        self._node_of_inode: dict[int, int] = {}
        self._lock = threading.Lock()
        if self.root.is_dir():
            self._load(self.root, ROOT)
        self.recording.folders = {node: dict(names) for node, names in self._folders.items()}

    def mark(self, label: str) -> None:
        """Note that something was promised to somebody at this moment."""
        with self._lock:
            self.recording.marks.append((len(self.recording.operations), label))

    def __call__(self, effect: Effect) -> None:
        if not effect.mutates:
            return
        with self._lock:
            for operation in self._operations(effect):
                self.recording.operations.append(operation)

    def _operations(self, effect: Effect) -> Iterator[Operation]:
        match effect.kind:
            case "write" | "truncate" | "sync":
                node = self._open_node(effect)
                if node is None:
                    return
                if effect.kind == "write":
                    yield Write(node, effect.position, bytes(effect.data or b""))
                elif effect.kind == "truncate":
                    yield Truncate(node, effect.length)
                else:
                    yield Sync(node)
            case "create" | "mkdir":
                if (place := self._place(effect.path)) is not None:
                    yield self._bind(place, self._new_node(effect.path, folder=effect.kind == "mkdir"))
            case "link" if effect.target is not None:
                source, place = self._place(effect.path), self._place(effect.target)
                node = self._node_at(source)
                # os.link refuses a taken name, so such an effect is about to fail and changes nothing
                if place is not None and node is not None and self._node_at(place) is None:
                    self._note_inode(effect.path, node)
                    yield self._bind(place, node)
            case "rename" if effect.target is not None:
                yield from self._rename(effect.path, effect.target)
            case "unlink" | "rmdir":
                yield from self._remove(effect.path)
            case "sync_folder":
                if (folder := self._folder(effect.path)) is not None:
                    yield SyncFolder(folder)

    def _rename(self, source: Path, target: Path) -> Iterator[Operation]:
        old, new = self._place(source), self._place(target)
        node = self._node_at(old)
        if old is None or node is None or new is None:
            return
        self._note_inode(source, node)
        del self._folders[old[0]][old[1]]
        self._folders[new[0]][new[1]] = node
        self.recording.paths[node] = str(target.absolute().relative_to(self.root))
        yield Name(new[0], new[1], node, *old)

    def _remove(self, path: Path) -> Iterator[Operation]:
        place = self._place(path)
        node = self._node_at(place)
        if place is None or node is None:
            return
        self._node_of_inode = {inode: n for inode, n in self._node_of_inode.items() if n != node}
        del self._folders[place[0]][place[1]]
        yield Name(place[0], place[1], None)

    def _bind(self, place: tuple[int, str], node: int) -> Name:
        self._folders[place[0]][place[1]] = node
        return Name(place[0], place[1], node)

    def _new_node(self, path: Path, *, folder: bool) -> int:
        node, self._next_node = self._next_node, self._next_node + 1
        self.recording.paths[node] = str(path.absolute().relative_to(self.root))
        if folder:
            self._folders[node] = {}
            self.recording.folders[node] = {}
        else:
            self.recording.contents[node] = b""
        return node

    def _open_node(self, effect: Effect) -> int | None:
        """The node behind a file descriptor, whatever it is called by now; None when it is not ours."""
        inode = os.fstat(effect.fd).st_ino
        node = self._node_at(self._place(effect.path))
        if node is not None and self._is_at(effect.path, inode):
            # Asked first: a disk gives the number of a file that is gone to another one.
            self._node_of_inode[inode] = node
            return node
        return self._node_of_inode.get(inode)

    def _is_at(self, path: Path, inode: int) -> bool:
        try:
            return os.lstat(path).st_ino == inode
        except FileNotFoundError:
            return False

    def _note_inode(self, path: Path, node: int) -> None:
        if node in self.recording.contents:
            self._node_of_inode[os.lstat(path).st_ino] = node

    def _folder(self, path: Path) -> int | None:
        path = path.absolute()
        if not path.is_relative_to(self.root):
            return None
        node: int | None = ROOT
        for part in path.relative_to(self.root).parts:
            node = None if node is None else self._folders.get(node, {}).get(part)
        return node if node in self._folders else None

    def _place(self, path: Path) -> tuple[int, str] | None:
        folder = self._folder(path.parent)
        return None if folder is None else (folder, path.name)

    def _node_at(self, place: tuple[int, str] | None) -> int | None:
        return None if place is None else self._folders[place[0]].get(place[1])

    def _load(self, path: Path, node: int) -> None:
        for child in sorted(path.iterdir()):
            if child.is_symlink():
                continue
            inner = self._new_node(child, folder=child.is_dir())
            self._folders[node][child.name] = inner
            if child.is_dir():
                self._load(child, inner)
            elif child.is_file():
                self.recording.contents[inner] = child.read_bytes()


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
