"""Copies of remote objects in a local folder of bounded size, so that they can be mapped instead of held in memory.

A copy is the object's bytes and 36 bytes after them: length u64, CRC-32C of the bytes u32, digest of the
name (16 bytes), magic. A copy that another process left is verified as a whole before its first use, so a cut
or damaged one is fetched again instead of served. Nothing is synced: losing copies costs a download.

When the copies pass `limit_bytes`, those used longest ago are removed (one larger than the limit stays
alone until the next). Removing does no harm to who has mapped it. Several processes may share the folder.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.randomness import Randomness
from tidegate.storage.backends.port import TEMPORARY
from tidegate.storage.packs.layout import crc32c

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
        """The copy, None when there is no good one."""
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
        """Write a copy as its bytes arrive, and map it."""
        path = self._path(name)
        temporary = path.with_name(f"{path.name}.{self._randomness.uuid().hex}{TEMPORARY}")
        crc = position = 0
        self._files.mkdir(self.folder, private=True)  # somebody may have cleared the cache
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
        """Remove the copy; whether there was one."""
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
        """Copies of earlier processes count against the limit; unfinished ones are left to whoever writes them."""
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
