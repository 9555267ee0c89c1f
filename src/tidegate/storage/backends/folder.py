"""Objects as files of one folder: written beside their name, synced, linked into place; read by mapping.

    <root>/tidegate-storage      who this backend is (sealed), made once
    <root>/tidegate-storage.lock taken while a published object is compared and replaced
    <root>/<name>                an object, or a sealed published object
    <root>/<name>.<unique>.tmp   an unfinished `put`; garbage when its writer is dead

F1  an object appears under its name by one `link`, after its bytes were synced; the folder is synced after. The link
    refuses a taken name, so two writers of one name cannot both win.
F2  no part of a name may be a symbolic link: names never lead out of the root.

Safe for any number of threads and processes on one machine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pyarrow as pa

from tidegate.clock import Clock, SystemClock
from tidegate.errors import ConflictError, CorruptError, InvalidError, UnavailableError
from tidegate.files import Files
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.storage.backends.port import (
    MAX_PUBLISHED_BYTES,
    TEMPORARY,
    ObjectInfo,
    Part,
    check_name,
    check_prefix,
    chunks,
    missing,
    same_bytes,
)
from tidegate.storage.backends.published import seal_published, unseal_published
from tidegate.storage.packs.layout import Format, seal, unseal

IDENTITY_FILE = "tidegate-storage"
LOCK_FILE = "tidegate-storage.lock"
IDENTITY = Format(b"TG-IDENT", "backend identity", 1, "restore it from a copy; tokens are checked against it")
LOCK_TRIES = 500
LOCK_PAUSE_MS = 10
OWN_FILES = frozenset({IDENTITY_FILE, LOCK_FILE})


class Identity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which backend this is, for life."""

    identity: str


class FolderBackend:
    """A local folder with the promises of a backend."""

    kind = "folder"
    is_remote = False

    def __init__(
        self,
        root: Path,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        self.root = root
        self._files = files or Files()
        self._clock = clock or SystemClock()
        self._randomness = randomness or SystemRandomness()
        self._publishing = threading.Lock()
        self._durable: set[Path] = set()  # folders whose names are known to be on the disk
        self._files.mkdir(root)
        self.identity = self._read_or_make_identity()

    # -- objects ---------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Part]) -> None:
        path = self._path(check_name(name), make=True)
        temporary = path.with_name(f"{path.name}.{self._randomness.uuid().hex}{TEMPORARY}")
        try:
            with self._files.open(temporary, new=True) as file:
                position = 0
                for chunk in chunks(parts):
                    file.write_at(position, chunk)
                    position += len(chunk)
                file.sync()
            self._files.link(temporary, path)
        except FileExistsError:
            if not same_bytes(parts, self.read(name)):
                raise ConflictError(f"{path} exists already with other bytes; take a fresh name") from None
        finally:
            self._files.unlink(temporary, missing_ok=True)
        self._files.sync_folder(path.parent)

    def read(self, name: str) -> pa.Buffer:
        try:
            return self._files.map(self._path(check_name(name)))
        except FileNotFoundError:
            raise missing(name, f"the folder {self.root}") from None

    def delete(self, name: str) -> None:
        self._files.unlink(self._path(check_name(name, temporary=True)), missing_ok=True)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix)
        yield from self._walk(self._path(folder) if folder else self.root, folder)

    def forget(self, name: str) -> bool:
        return False

    def close(self) -> None:
        pass

    # -- published -------------------------------------------------------------------------------

    def publish(self, name: str, data: bytes, *, expected: str | None) -> str:
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

    def _path(self, name: str, *, make: bool = False) -> Path:
        """Where the object lies, after a look at every folder on the way (F2)."""
        *folders, last = name.split("/")
        if name in OWN_FILES:
            raise InvalidError(f"object name {name!r} is the backend's own; take another")
        at = self.root
        for folder in folders:
            at = at / folder
            found = self._files.stat(at)
            if make and at not in self._durable:
                self._make_durable(at, missing=found is None)
            if found is not None and not found.is_folder:
                raise InvalidError(f"{at} is not a folder, so {name} cannot lie in it; move it away")
        return at / last

    def _make_durable(self, folder: Path, *, missing: bool) -> None:
        """A folder another one just made may be lost in a power cut: everybody syncs it once himself."""
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
        """Alone among all who publish here, after a bounded wait."""
        with self._publishing:
            for _ in range(LOCK_TRIES):
                try:
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

    def _read_or_make_identity(self) -> str:
        path = self.root / IDENTITY_FILE
        try:
            sealed = self._files.read(path, limit=4096)
        except FileNotFoundError:
            if next(self._walk_objects(), None) is not None:
                raise CorruptError(
                    f"{path} is missing although {self.root} holds objects; restore it from a copy, or give tidegate "
                    f"an empty folder",
                    path=path,
                    kafka_name=None,
                ) from None
            try:
                self._files.publish_new(path, seal(IDENTITY, Identity(self._randomness.uuid().hex)))
            except ConflictError:
                pass  # another process made it at the same time: take that one
            sealed = self._files.read(path, limit=4096)
        return unseal(IDENTITY, sealed, Identity, name=str(path)).identity

    def _walk_objects(self) -> Iterator[ObjectInfo]:
        return (each for each in self._walk(self.root, "") if not each.name.endswith(TEMPORARY))
