"""Open the backend of an address: a folder, an object store, or memory. All state is opened here.

    ./data/state, file:///…        a folder
    s3://BUCKET/PREFIX, gs://…     an object store; its settings come from `options`, else from the environment
    memory://                      this process's memory, for tests

A1  without `create` an address without state is a `NoStateError`, and is not changed. With `read_only` nothing is
    created either, and every write is refused: it needs no write permission, and one request to an object store.
A2  objects are signed and verified with the keys from the environment (`state_keys` in `signed`), except in memory.
A3  copies of an object store's packs are in `TIDEGATE_CACHE`, by default in this user's folder among the temporary
    files. All processes of one user on a machine share them. A folder that belongs to another user is refused.

Thread rule: pure functions.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tidegate.clock import Clock
from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.randomness import Randomness
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.backends.signed import FILE_VARIABLE, KEY_VARIABLE, SignedBackend, StateKeys, state_keys

CACHE_VARIABLE = "TIDEGATE_CACHE"


def open_backend(
    address: str | Path,
    *,
    create: bool = True,
    read_only: bool = False,
    cache: Path | None = None,
    cache_bytes: int | None = None,
    options: Mapping[str, str] | None = None,
    key_id: str | None = None,
    files: Files | None = None,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
) -> StorageBackend:
    """Open a path or `file://` as a folder, `memory://` in memory, any other URL as an object store.

    With `create=False` or `read_only=True` state must exist; with the latter nothing is written (A1). `cache` is the
    local folder for copies of objects read from an object store (A3), `options` are the store's own settings. `key_id`
    names the key that this process must sign with, because another process of the same app does (empty: no key).
    """
    url, create = str(address), create and not read_only
    keys = state_keys()
    if key_id is not None:
        _require_key(url, keys, key_id)
    scheme = urlsplit(url).scheme if "://" in url else ""
    if scheme in ("", "file"):
        path = Path(unquote(urlsplit(url).path)) if scheme else Path(address)
        folder = FolderBackend(
            path, create=create, read_only=read_only, files=files, clock=clock, randomness=randomness
        )
        return SignedBackend(folder, keys, where=folder.address, read_only=read_only)
    if scheme == "memory":
        return MemoryBackend(clock=clock, randomness=randomness)
    from tidegate.storage.backends.objects import CACHE_BYTES, ObjectsBackend

    store = ObjectsBackend.open(
        url,
        create=create,
        read_only=read_only,
        cache=copies_folder(url) if cache is None else cache,
        cache_bytes=CACHE_BYTES if cache_bytes is None else cache_bytes,
        options=options,
        files=files,
        randomness=randomness,
    )
    return SignedBackend(store, keys, where=url, read_only=read_only)


def _require_key(where: str, keys: StateKeys | None, key_id: str) -> None:
    """Raise unless this process signs with the required key (A2)."""
    here = "" if keys is None else keys.id
    if here != key_id:
        there, here = (f"key {each}" if each else "no key" for each in (key_id, here))
        raise InvalidError(
            f"the driver signs {where} with {there}, and this process with {here}: give both the same {KEY_VARIABLE} "
            f"or {FILE_VARIABLE}; Spark's executors get it by spark.executorEnv.{FILE_VARIABLE}"
        )


def copies_folder(address: str) -> Path:
    """The folder for copies of an object store's packs on this machine, for this user (A3)."""
    store = hashlib.sha256(address.encode()).hexdigest()[:16]
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).absolute() / store
    try:
        shared = Path(tempfile.gettempdir()) / f"tidegate-{os.getuid()}"
        shared.mkdir(mode=0o700, exist_ok=True)
        found = shared.lstat()
    except OSError as error:
        raise InvalidError(
            f"{address} is read through local copies, and there is no folder for them: {error.strerror}; name one that "
            f"can be written in {CACHE_VARIABLE}"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise InvalidError(
            f"{shared} can be changed by other users, so copies of {address} are not safe in it; make it yours "
            f"(chmod 700), or name another folder in {CACHE_VARIABLE}"
        )
    return shared / store
