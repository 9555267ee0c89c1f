"""Writes down every change to a folder tree, so that `crash_states` can say what a power cut may leave.

`Recorder(root)` is a watcher for `Files(watch=…)`. It starts from the tree as it is (taken to be on the disk)
and notes each change as an `Operation` on *nodes*: a node is a file or a folder, whatever its name is at
the moment. Operations that change no bytes and no names (mtime) are not kept. Lock files are opened outside
the watched effects and never appear.

`mark(label)` puts a note between the operations ("offset 12 was acknowledged"); a crash state carries the
marks that had been set before it, which is what a test checks the reopened log against.

The tree is small by intention: every byte of it is held in memory, a preallocated index included, so record
with a small `segment.index.bytes`.

Thread rule: operations of several threads are put into one order under a lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

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
