"""A backend in a local folder: files are written under a temporary name, synced and linked; reads map them.

    <root>/tidegate-storage      the backend's identity (sealed), made once
    <root>/tidegate-storage.lock locked while a published object is compared and replaced
    <root>/<name>                an object, or a sealed published object
    <root>/<name>.<unique>.tmp   an unfinished `put`; garbage after its writer's crash

F1  an object appears under its name by one `link`, after its bytes were synced; the folder is synced after. The link
    refuses a taken name, so two writers of one name cannot both win. Of several objects put together none appears
    before all are synced; a crash may leave some of them.
F2  no component of a name may be a symbolic link, so names never leave the root.

Safe for any number of threads and processes on one machine.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa

from tidegate.clock import Clock, SystemClock
from tidegate.errors import ConflictError, CorruptError, InvalidError, UnavailableError
from tidegate.files import File, Files
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.storage.backends.base import (
    MAX_PUBLISHED_BYTES,
    TEMPORARY,
    ObjectInfo,
    Part,
    check_name,
    check_prefix,
    chunks,
    groups,
    missing,
    no_state,
    read_only_error,
    same_bytes,
)
from tidegate.storage.backends.sealed import Format, seal, seal_published, unseal, unseal_published

IDENTITY_FILE = "tidegate-storage"
LOCK_FILE = "tidegate-storage.lock"
IDENTITY = Format(b"TG-IDENT", "backend identity", 1, "restore it from a copy; tokens are checked against it")
SYNCS_AT_ONCE = 3  # more would take processor time from the writer of the next file
MAX_WAYS = 4096
LOCK_TRIES = 500
LOCK_PAUSE_MS = 10
OWN_FILES = frozenset({IDENTITY_FILE, LOCK_FILE})


class Identity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The permanent identity of a backend."""

    identity: str


class _Syncers:
    """Threads that sync files, reused across puts: starting threads costs as much as a small file."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0

    def submit(self, sync: Callable[[], None]) -> Future[None]:
        with self._lock:
            if self._threads is None or self._process != os.getpid():  # a fork inherits no threads
                self._threads = ThreadPoolExecutor(SYNCS_AT_ONCE, "tidegate-sync")
                self._process = os.getpid()
            return self._threads.submit(sync)

    def close(self) -> None:
        """Stop the threads; a later sync starts new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None and self._process == os.getpid():
            threads.shutdown(wait=True)


class FolderBackend:
    """A backend in a local folder."""

    kind = "folder"
    is_remote = False

    def __init__(
        self,
        root: Path,
        *,
        create: bool = True,
        read_only: bool = False,
        files: Files | None = None,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        self.root = root
        self.address = str(root.absolute())
        self._create = create
        self._read_only = read_only
        self._files = files or Files()
        self._clock = clock or SystemClock()
        self._randomness = randomness or SystemRandomness()
        self._publishing = threading.Lock()
        self._syncers = _Syncers()
        self._durable: set[Path] = set()  # folders whose directory entries are known to be durable
        self._ways: dict[
            str, list[Path]
        ] = {}  # from the root to a folder: building paths costs more than a lookup
        with _writable(root):
            if create:
                self._files.mkdir(root)
            self.identity = identity_of(
                self._read_identity,
                self._make_identity,
                is_empty=self._is_empty,
                where=str(root),
                file=IDENTITY_FILE,
            )

    # -- objects ---------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Part]) -> None:
        self.put_all([(name, parts)])

    def put_all(self, objects: Iterable[tuple[str, Sequence[Part]]]) -> None:
        """Put several objects: one is synced while the next is written, and each folder is synced once."""
        written: list[tuple[str, Path, Path, Sequence[Part]]] = []
        try:
            self._write_all(objects, written)
            for each in written:
                self._link(*each)
        finally:
            for _, _, temporary, _ in written:
                self._files.unlink(temporary, missing_ok=True)
        self._sync_folders(list(dict.fromkeys(path.parent for _, path, _, _ in written)))

    def _write_all(
        self,
        objects: Iterable[tuple[str, Sequence[Part]]],
        written: list[tuple[str, Path, Path, Sequence[Part]]],
    ) -> None:
        """Write each object to a temporary file and sync it; `written` lists them, also after an error."""
        folders: dict[str, Path] = {}  # each is checked once, not once per object
        waiting: list[File] = []  # the first file is not synced on a thread before there is a second
        syncing: list[Future[None]] = []
        with ExitStack() as opened:
            try:
                for name, parts in objects:
                    self._check_writable(name)
                    above, _, last = check_name(name).rpartition("/")
                    if above not in folders:
                        folders[above] = self._path(name, make=True).parent
                    path = folders[above] / last
                    temporary = path.with_name(f"{path.name}.{self._randomness.uuid().hex}{TEMPORARY}")
                    written.append((name, path, temporary, parts))
                    file = opened.enter_context(self._files.open(temporary, new=True))
                    self._write(file, parts)
                    waiting.append(file)
                    if self._files.is_watched:
                        waiting.pop().sync()
                    elif syncing or len(waiting) > 1:
                        syncing += [self._syncers.submit(each.sync) for each in waiting]
                        waiting.clear()
                for file in waiting:
                    file.sync()
            finally:
                wait(syncing)
            for each in syncing:
                each.result()

    def _write(self, file: File, parts: Sequence[Part]) -> None:
        position = 0
        for group in ([view] for view in chunks(parts)) if self._files.is_watched else groups(parts):
            file.write_parts(position, group)
            position += sum(view.nbytes for view in group)

    def _sync_folders(self, folders: Sequence[Path]) -> None:
        """Sync these folders concurrently, which is faster than one by one."""
        beside = [] if self._files.is_watched else folders[1:]
        syncing = [self._syncers.submit(partial(self._files.sync_folder, each)) for each in beside]
        try:
            for folder in folders[: len(folders) - len(beside)]:
                self._files.sync_folder(folder)
        finally:
            wait(syncing)
        for each in syncing:
            each.result()

    def _link(self, name: str, path: Path, temporary: Path, parts: Sequence[Part]) -> None:
        try:
            self._files.link(temporary, path)
        except FileExistsError:
            if not same_bytes(parts, self.read(name)):
                raise ConflictError(f"{path} exists already with other bytes; take a fresh name") from None

    def replace(self, name: str, parts: Sequence[Part]) -> None:
        """Put other bytes in the place of an object, whole or not at all: for `signed.resign` alone."""
        self._check_writable(name)
        path = self._path(check_name(name))
        temporary = path.with_name(f"{path.name}.{self._randomness.uuid().hex}{TEMPORARY}")
        try:
            with self._files.open(temporary, new=True) as file:
                self._write(file, parts)
                file.sync()
            self._files.rename(temporary, path)
        finally:
            self._files.unlink(temporary, missing_ok=True)
        self._files.sync_folder(path.parent)

    def read(self, name: str) -> pa.Buffer:
        try:
            return self._files.map(self._path(check_name(name)))
        except FileNotFoundError:
            raise missing(name, f"the folder {self.root}") from None

    def delete(self, name: str) -> None:
        self._check_writable(name)
        self._files.unlink(self._path(check_name(name, temporary=True)), missing_ok=True)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix)
        yield from self._walk(self._path(folder) if folder else self.root, folder)

    def forget(self, name: str) -> bool:
        return False

    def close(self) -> None:
        self._syncers.close()

    # -- published -------------------------------------------------------------------------------

    def publish(self, name: str, data: bytes, *, expected: str | None) -> str:
        self._check_writable(name)
        path = self._path(check_name(name), make=True)
        version = self._randomness.uuid().hex
        sealed = seal_published(name, version, data)
        with self._locked():
            current = self.read_published(name)
            found = None if current is None else current[1]
            if found != expected:
                raise ConflictError(f"{path} has version {found}, not {expected}; read it again, then decide")
            self._files.publish(path, sealed)
        return version

    def read_published(self, name: str) -> tuple[bytes, str] | None:
        try:
            sealed = self._files.read(self._path(check_name(name)), limit=MAX_PUBLISHED_BYTES + (1 << 16))
        except FileNotFoundError:
            return None
        found = unseal_published(name, sealed)
        return found.data, found.nonce

    # -- inside ----------------------------------------------------------------------------------

    def _check_writable(self, name: str) -> None:
        if self._read_only:
            raise read_only_error(str(self.root), name)

    def _path(self, name: str, *, make: bool = False) -> Path:
        """The object's path, after a check of every folder on the way (F2)."""
        if name in OWN_FILES:
            raise InvalidError(f"object name {name!r} is the backend's own; take another")
        above, _, last = name.rpartition("/")
        folders = self._ways.get(above)
        if folders is None:
            if len(self._ways) >= MAX_WAYS:
                self._ways.clear()
            parts = above.split("/") if above else []
            folders = [self.root.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
            self._ways[above] = folders
        for at in folders:
            found = self._files.stat(at)
            if make and at not in self._durable:
                self._make_durable(at, missing=found is None)
            if found is not None and not found.is_folder:
                raise InvalidError(f"{at} is not a folder, so {name} cannot lie in it; move it away")
        return (folders[-1] if folders else self.root) / last

    def _make_durable(self, folder: Path, *, missing: bool) -> None:
        """Sync the folders once per process: one that another process just made may not be durable yet."""
        if missing:
            self._files.mkdir(folder)
        else:
            self._files.sync_folder(folder.parent)
        self._durable.add(folder)

    def _walk(self, folder: Path, prefix: str) -> Iterator[ObjectInfo]:
        try:
            names = self._files.list(folder)
        except FileNotFoundError:
            return
        for each in names:
            found = self._files.stat(folder / each)
            if found is None or (folder == self.root and each in OWN_FILES):
                continue
            name = f"{prefix}/{each}" if prefix else each
            if found.is_folder:
                yield from self._walk(folder / each, name)
            elif found.is_file:
                yield ObjectInfo(name, found.size, found.mtime_ms)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the publish lock of this folder, after a bounded wait."""
        with self._publishing:
            for _ in range(LOCK_TRIES):
                try:
                    with _writable(self.root):
                        lock = self._files.lock(self.root / LOCK_FILE)
                except ConflictError:
                    self._clock.sleep_ms(LOCK_PAUSE_MS)
                else:
                    break
            else:
                raise UnavailableError(
                    f"{self.root / LOCK_FILE} was held by another process for {LOCK_TRIES * LOCK_PAUSE_MS} ms; "
                    f"see who holds it (fuser), then retry"
                )
            try:
                yield
            finally:
                lock.release()

    def _make_identity(self) -> bytes:
        path = self.root / IDENTITY_FILE
        if not self._create:
            raise no_state(str(self.root))
        try:
            self._files.publish_new(path, seal(IDENTITY, Identity(self._randomness.uuid().hex)))
        except ConflictError:
            pass  # another process made it concurrently: use that one
        return self._files.read(path, limit=4096)

    def _read_identity(self) -> bytes | None:
        try:
            return self._files.read(self.root / IDENTITY_FILE, limit=4096)
        except FileNotFoundError:
            return None

    def _is_empty(self) -> bool:
        return all(each.name.endswith(TEMPORARY) for each in self._walk(self.root, ""))


def identity_of(
    read: Callable[[], bytes | None],
    make: Callable[[], bytes],
    *,
    is_empty: Callable[[], bool],
    where: str,
    file: str,
) -> str:
    """Read a backend's identity; make it where nothing was stored before."""
    sealed = read()
    if sealed is None and not is_empty():
        sealed = read()  # once more: another process may just have made it, and objects
        if sealed is None:
            raise CorruptError(
                f"{file} is missing although {where} holds objects; restore it from a copy, or give tidegate an empty "
                "place",
                path=file,
                kafka_name=None,
            )
    return unseal(IDENTITY, make() if sealed is None else sealed, Identity, name=f"{where}/{file}").identity


@contextmanager
def _writable(root: Path) -> Iterator[None]:
    """Turn a denied permission into an error that the state folder is read-only."""
    try:
        yield
    except UnavailableError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (
            errno.EACCES,
            errno.EPERM,
            errno.EROFS,
        ):
            raise UnavailableError(f"the state folder {root} is read-only: {error}") from error
        raise
