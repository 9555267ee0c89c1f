"""From an address to a backend: a folder, an object store, or memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tidegate.clock import Clock
from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.randomness import Randomness
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.backends.port import StorageBackend


def open_backend(
    address: str | Path,
    *,
    cache: Path | None = None,
    cache_bytes: int | None = None,
    options: Mapping[str, str] | None = None,
    files: Files | None = None,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
) -> StorageBackend:
    """Open a path or `file://` as a folder, `memory://` in memory, any other URL as an object store.

    An object store needs `cache`, a local folder for the packs that are read; `options` are the store's own.
    """
    url = str(address)
    scheme = urlsplit(url).scheme if "://" in url else ""
    if scheme in ("", "file"):
        path = Path(unquote(urlsplit(url).path)) if scheme else Path(address)
        return FolderBackend(path, files=files, clock=clock, randomness=randomness)
    if scheme == "memory":
        return MemoryBackend(clock=clock, randomness=randomness)
    if cache is None:
        raise InvalidError(f"{url} needs a local folder for copies of what is read: give cache=…")
    from tidegate.storage.backends.objects import CACHE_BYTES, ObjectsBackend

    return ObjectsBackend.open(
        url,
        cache=cache,
        cache_bytes=CACHE_BYTES if cache_bytes is None else cache_bytes,
        options=options,
        files=files,
        randomness=randomness,
    )
