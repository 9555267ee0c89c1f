"""A backend on S3, Google Cloud Storage, Azure or any store that `obstore` supports, with local copies of reads.

    <url>/tidegate-storage   the backend's identity (sealed), made once by a conditional put, before any other object
    <url>/<name>             an object, or a sealed published object

O1  publishing is the store's own conditional put: create-only, or an update on the ETag that was read. Opening
    to write tests on a temporary object that the store refuses a second put of each kind; a store that does not is
    refused. Opening to read writes nothing, and reads the identity.
O2  a conditional put whose response was lost is resolved by reading back: the nonce identifies the writer.
O3  retries are bounded in number and time by the client; after that an error is `UnavailableError`. Absent is
    `MissingObjectError`, and a missing bucket is not an absent object.
O4  a large object is uploaded in parts and appears whole after the last. Multipart uploads are not create-only in
    object stores: the name is looked up first, and names are unique.
O5  large objects are kept as local copies and mapped; small objects are held in memory. So an object that another
    process deleted may stay readable here for a while; its content is valid, because names are never reused.

A local copy (`LocalCopies`) is the object's bytes and 36 bytes after them: length u64, CRC-32C of the bytes u32, digest
of the name (16 bytes), magic. A copy left by another process is fully verified before its first use. Copies are not
synced, because losing one costs only a download. Above `limit_bytes` the least recently used ones are removed, which
does not affect processes that mapped them. Several processes may share the folder.

Safe from any thread.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidegate.errors import ConflictError, InvalidError, UnavailableError
from tidegate.files import Files
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.storage.backends.base import (
    TEMPORARY,
    ObjectInfo,
    Part,
    check_name,
    check_prefix,
    chunks,
    joined,
    missing,
    no_state,
    read_only_error,
    same_bytes,
    total_size,
    view_of,
)
from tidegate.storage.backends.folder import IDENTITY, IDENTITY_FILE, Identity, identity_of
from tidegate.storage.backends.sealed import crc32c, seal, seal_published, unseal_published

try:
    import obstore
    from obstore import exceptions
    from obstore.store import ObjectStore, from_url
except ImportError as error:
    raise InvalidError("object stores need an extra: pip install 'tidegate[objects]'") from error


# -- local copies ------------------------------------------------------------------------------------

SUFFIX = ".copy"
MAGIC = b"TG-COPY\n"
_TRAILER = struct.Struct("<QI16s8s")


class LocalCopies:
    """A bounded folder of copies, by object name. Safe to share between threads."""

    def __init__(self, folder: Path, *, limit_bytes: int, files: Files, randomness: Randomness) -> None:
        if limit_bytes <= 0:
            raise InvalidError(f"the limit of local copies is {limit_bytes} bytes; it must be above 0")
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._files = files
        self._randomness = randomness
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Path, int] = OrderedDict()  # oldest use first
        self._trusted: set[Path] = set()
        files.mkdir(folder, private=True)
        self._find_leftovers()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(self._sizes.values())

    def get(self, name: str) -> pa.Buffer | None:
        """The copy, None when there is no valid one."""
        path = self._path(name)
        try:
            mapped = self._files.map(path)
        except FileNotFoundError:
            self._forget(path)
            return None
        content = mapped.slice(0, max(0, mapped.size - _TRAILER.size))
        with self._lock:
            trusted = path in self._trusted
        if not _is_good(mapped, content, name, checked=trusted):
            self.drop(name)
            return None
        self._touch(path, mapped.size)
        return content

    def add(self, name: str, chunks: Iterable[bytes | memoryview]) -> pa.Buffer:
        """Write a copy while its bytes arrive, and map it."""
        path = self._path(name)
        temporary = path.with_name(f"{path.name}.{self._randomness.uuid().hex}{TEMPORARY}")
        crc = position = 0
        self._files.mkdir(self.folder, private=True)  # the cache may have been cleared
        try:
            with self._files.open(temporary, new=True) as file:
                for chunk in chunks:
                    crc = crc32c(chunk, crc)
                    file.write_at(position, chunk)
                    position += len(chunk)
                file.write_at(position, _TRAILER.pack(position, crc, _digest(name), MAGIC))
            mapped = self._files.map(temporary)
            self._files.rename(temporary, path)
        except Exception:
            self._files.unlink(temporary, missing_ok=True)
            raise
        self._touch(path, mapped.size)
        self._shrink(keep=path)
        return mapped.slice(0, position)

    def drop(self, name: str) -> bool:
        """Remove the copy; returns whether there was one."""
        path = self._path(name)
        had = self._files.exists(path)
        self._files.unlink(path, missing_ok=True)
        self._forget(path)
        return had

    def _path(self, name: str) -> Path:
        return self.folder / f"{_digest(name).hex()}{SUFFIX}"

    def _touch(self, path: Path, size: int) -> None:
        with self._lock:
            self._sizes[path] = size
            self._sizes.move_to_end(path)
            self._trusted.add(path)

    def _forget(self, path: Path) -> None:
        with self._lock:
            self._sizes.pop(path, None)
            self._trusted.discard(path)

    def _shrink(self, *, keep: Path) -> None:
        with self._lock:
            used = sum(self._sizes.values())
            victims = []
            for path, size in self._sizes.items():
                if used <= self._limit_bytes:
                    break
                if path != keep:
                    victims.append(path)
                    used -= size
        for path in victims:
            self._files.unlink(path, missing_ok=True)
            self._forget(path)

    def _find_leftovers(self) -> None:
        """Count copies of earlier processes against the limit; unfinished ones are left to their writers."""
        found = []
        for each in self._files.list(self.folder):
            info = self._files.stat(self.folder / each)
            if info is not None and info.is_file and each.endswith(SUFFIX):
                found.append((info.mtime_ms, self.folder / each, info.size))
        self._sizes.update((path, size) for _, path, size in sorted(found))


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def _is_good(mapped: pa.Buffer, content: pa.Buffer, name: str, *, checked: bool) -> bool:
    if mapped.size < _TRAILER.size:
        return False
    length, crc, digest, magic = _TRAILER.unpack_from(mapped, mapped.size - _TRAILER.size)
    if (length, digest, magic) != (content.size, _digest(name), MAGIC):
        return False
    return checked or crc == crc32c(content)


# -- object store ------------------------------------------------------------------------------------

PROBE_PREFIX = "tidegate-probe-"
WHOLE_PUT_BYTES = 8 << 20  # above this, objects are uploaded in parts
IN_MEMORY_BYTES = 256 << 10  # up to this, objects are kept in memory
CHUNK_BYTES = 8 << 20
MAX_RETRIES = 6
RETRY_TIMEOUT_S = 60
CACHE_BYTES = 4 << 30
ABSENT_IS_AN_ANSWER = frozenset({"read", "delete", "publish", "look up"})


class ObjectsBackend:
    """A backend in a bucket, or in a prefix of one."""

    kind = "objects"
    is_remote = True

    def __init__(
        self,
        store: ObjectStore,
        *,
        where: str,
        cache: Path,
        create: bool = True,
        read_only: bool = False,
        cache_bytes: int = CACHE_BYTES,
        files: Files | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        self._store = store
        self._where = where
        self.address: str | None = None
        self._create = create
        self._read_only = read_only
        self._randomness = randomness or SystemRandomness()
        if not read_only:
            self._check_conditional_puts()
        self.identity = identity_of(
            self._read_identity,
            self._make_identity,
            is_empty=lambda: next(self.list(""), None) is None,
            where=where,
            file=IDENTITY_FILE,
        )
        self._copies = LocalCopies(
            cache / self.identity,
            limit_bytes=cache_bytes,
            files=files or Files(),
            randomness=self._randomness,
        )

    @classmethod
    def open(cls, url: str, *, options: Mapping[str, str] | None = None, **settings: Any) -> ObjectsBackend:
        """Open `s3://bucket/prefix`, `gs://…`, `az://…`; `options` are the store's own (`endpoint`, `region`, …)."""
        opened = cls(_connect(url, dict(options or {})), where=url, **settings)
        opened.address = None if options else url
        return opened

    # -- objects ---------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Part]) -> None:
        self._check_writable(name)
        with self._reaching("put", name):
            try:
                if total_size(parts) <= WHOLE_PUT_BYTES:
                    obstore.put(self._store, name, b"".join(map(view_of, parts)), mode="create")
                    return
                if not self._exists(name):
                    obstore.put(self._store, name, chunks(parts, CHUNK_BYTES), use_multipart=True)
                    return
            except exceptions.AlreadyExistsError:
                pass
        if not same_bytes(parts, self.read(name)):
            raise ConflictError(f"{name} exists already on {self._where} with other bytes; take a fresh name")

    def replace(self, name: str, parts: Sequence[Part]) -> None:
        """Put other bytes in the place of an object, whole or not at all: for `signed.resign` alone."""
        self._check_writable(name)
        with self._reaching("put", name):
            if total_size(parts) <= WHOLE_PUT_BYTES:
                obstore.put(self._store, name, b"".join(map(view_of, parts)))
            else:
                obstore.put(self._store, name, chunks(parts, CHUNK_BYTES), use_multipart=True)
        self._copies.drop(name)

    def read(self, name: str) -> pa.Buffer:
        self._check(name)
        copy = self._copies.get(name)
        if copy is not None:
            return copy
        try:
            with self._reaching("read", name):
                found = obstore.get(self._store, name)
        except FileNotFoundError:
            raise missing(name, self._where) from None
        size = found.meta["size"]
        with self._reaching("download", name):
            if size <= IN_MEMORY_BYTES:
                content = joined([memoryview(found.bytes())])
            else:
                content = self._copies.add(name, map(memoryview, found.stream(min_chunk_size=CHUNK_BYTES)))
        if content.size != size:
            self._copies.drop(name)
            raise UnavailableError(
                f"{name} on {self._where} has {size} bytes, and {content.size} arrived; retry"
            )
        return content

    def delete(self, name: str) -> None:
        self._check_writable(name, temporary=True)
        try:
            with self._reaching("delete", name):
                obstore.delete(self._store, name)
        except FileNotFoundError:
            pass
        self._copies.drop(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = check_prefix(prefix)
        with self._reaching("list", prefix or "everything"):
            for page in obstore.list(self._store, prefix=folder or None, chunk_size=1000):
                for each in page:
                    name = each["path"]
                    if name != IDENTITY_FILE and not name.startswith(PROBE_PREFIX):
                        modified_ms = int(each["last_modified"].timestamp() * 1000)
                        yield ObjectInfo(name, each["size"], modified_ms)

    def forget(self, name: str) -> bool:
        return self._copies.drop(name)

    def close(self) -> None:
        pass

    # -- published -------------------------------------------------------------------------------

    def publish(self, name: str, data: bytes, *, expected: str | None) -> str:
        self._check_writable(name)
        nonce = self._randomness.uuid().hex
        sealed = seal_published(name, nonce, data)
        mode: Any = "create"
        if expected is not None:
            current = self._read_published(name)
            if current is None or current[1] != expected:
                found = None if current is None else current[1]
                raise ConflictError(f"{name} has version {found}, not {expected}; read it again, then decide")
            mode = {"e_tag": current[2]}
        try:
            with self._reaching("publish", name):
                obstore.put(self._store, name, sealed, mode=mode)
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, FileNotFoundError):
            settled = self._read_published(name)  # O2
            if settled is None or settled[1] != nonce:
                raise ConflictError(f"{name} was published by another; read it again, then decide") from None
        return nonce

    def read_published(self, name: str) -> tuple[bytes, str] | None:
        found = self._read_published(self._check(name))
        return None if found is None else found[:2]

    def _read_published(self, name: str) -> tuple[bytes, str, str] | None:
        """The bytes, their nonce (our version) and the store's ETag."""
        try:
            with self._reaching("read", name):
                found = obstore.get(self._store, name)
                sealed, tag = bytes(found.bytes()), found.meta["e_tag"]
        except FileNotFoundError:
            return None
        published = unseal_published(name, sealed)
        return published.data, published.nonce, str(tag)

    # -- opening ---------------------------------------------------------------------------------

    def _check_conditional_puts(self) -> None:
        """Test conditional puts (O1) on a temporary object."""
        name = f"{PROBE_PREFIX}{self._randomness.uuid().hex}"
        with self._reaching("open", name):
            try:
                first = self._probe(name, b"1", "create")
                kept = first is not None and self._probe(name, b"2", "create") is None
                second = self._probe(name, b"3", {"e_tag": first}) if kept else None
                kept = second is not None and self._probe(name, b"4", {"e_tag": first}) is None
            except (exceptions.NotSupportedError, NotImplementedError):
                kept = False
            obstore.delete(self._store, name)
        if not kept:
            raise InvalidError(
                f"{self._where} has no conditional put (create-only and update by ETag), so two writers could both "
                f"win; use a store that has it, or a plain path for a local folder"
            )

    def _probe(self, name: str, data: bytes, mode: Any) -> str | None:
        """The ETag of a conditional put, None when it was refused."""
        try:
            return obstore.put(self._store, name, data, mode=mode)["e_tag"]
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            return None

    def _read_identity(self) -> bytes | None:
        try:
            with self._reaching("read", IDENTITY_FILE):
                return bytes(obstore.get(self._store, IDENTITY_FILE).bytes())
        except FileNotFoundError:
            return None

    def _make_identity(self) -> bytes:
        if not self._create:
            raise no_state(self._where)
        fresh = seal(IDENTITY, Identity(self._randomness.uuid().hex))
        with self._reaching("open", IDENTITY_FILE):
            try:
                obstore.put(self._store, IDENTITY_FILE, fresh, mode="create")
            except (
                exceptions.AlreadyExistsError
            ):  # made concurrently by another process, or by a put whose response was lost
                fresh = bytes(obstore.get(self._store, IDENTITY_FILE).bytes())
        return fresh

    # -- helpers ---------------------------------------------------------------------------------

    def _check(self, name: str, *, temporary: bool = False) -> str:
        if name == IDENTITY_FILE or name.startswith(PROBE_PREFIX):
            raise InvalidError(f"object name {name!r} is the backend's own; take another")
        return check_name(name, temporary=temporary)

    def _check_writable(self, name: str, *, temporary: bool = False) -> None:
        self._check(name, temporary=temporary)
        if self._read_only:
            raise read_only_error(self._where, name)

    def _exists(self, name: str) -> bool:
        try:
            with self._reaching("look up", name):
                obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def _reaching(self, doing: str, name: str) -> Iterator[None]:
        """Convert the client's errors to ours, with a remedy (O3)."""
        passed = (exceptions.AlreadyExistsError, exceptions.PreconditionError)
        try:
            yield
        except passed:
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise UnavailableError(
                    f"{self._where}: there is no such bucket; make it, then retry"
                ) from error
            if doing in ABSENT_IS_AN_ANSWER:
                raise
            raise UnavailableError(
                f"could not {doing} {name} on {self._where}: {_first_line(error)}"
            ) from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise UnavailableError(
                f"could not {doing} {name} on {self._where}: {_first_line(error)}; check the credentials"
            ) from error
        except exceptions.BaseError as error:
            raise UnavailableError(
                f"could not {doing} {name} on {self._where}: {_first_line(error)}; see whether it can be reached, retry"
            ) from error


def _connect(url: str, options: dict[str, str]) -> ObjectStore:
    client: Any = {"timeout": "60s", "connect_timeout": "10s"}
    if _has_plain_endpoint(options):
        client["allow_http"] = True
    retries: Any = {"max_retries": MAX_RETRIES, "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S)}
    settings: Any = {"config": options} if options else {}
    try:
        return from_url(url, client_options=client, retry_config=retries, **settings)
    except exceptions.BaseError as error:
        raise InvalidError(
            f"{url} cannot be opened: {_first_line(error)}; check the address and the options"
        ) from error


def _has_plain_endpoint(options: Mapping[str, str]) -> bool:
    """Whether the endpoint, given here or in the environment, is `http://`, which then is intended."""
    named = [value for name, value in options.items() if "endpoint" in name.lower()]
    if not named:
        clouds = ("AWS_", "AZURE_", "GOOGLE_")
        named = [
            value for name, value in os.environ.items() if name.startswith(clouds) and "ENDPOINT" in name
        ]
    return any(value.startswith("http://") for value in named)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:300]
