"""The cache of compiled kernels: its folders, their permissions, and numba's cache interface.

Folders are read in this order, and a newly compiled kernel is written to the first writable one:

    NUMBA_CACHE_DIR      when it is set
    __pycache__          next to the sources: kernels compiled by root in an image are used by all users
    the user's cache     XDG_CACHE_HOME, ~/.cache or ~/Library/Caches
    the temporary folder (TMPDIR), in a folder of this user's own

D1  a folder is read even where it cannot be written; where none can be written, kernels live as long as the process.
D2  compiled kernels are code. The last two folders are used only if they belong to this user and no other user can
    write to them, so another user's files in a shared temporary folder are never run.
D3  a kernel is used only with the stamp of the code it was compiled from, and for the processor it was compiled for.
    One that cannot be read is compiled again.

Thread rule: any; numba calls the cache under its own lock.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numba.core
from numba.core.caching import IndexDataCacheFile
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target

config: Any = numba.core.config  # its settings are read from the environment, and have no annotations


class KernelCache:
    """The cache of one kernel, in numba's interface: `load_overload`, `save_overload`, `flush`, `cache_path`."""

    def __init__(
        self,
        function: Callable[..., Any],
        stamp_of: Callable[[Callable[..., Any]], str],
        missed: Callable[[Path | None], None],
    ) -> None:
        """`missed` is called with the folder to write to, before a kernel that no folder has is compiled.

        `stamp_of` is called when the cache is first used: by then the module's globals are all there.
        """
        code, name = function.__code__, function.__qualname__.replace("<", "").replace(">", "")
        self.sources = Path(code.co_filename).parent
        self._function = function
        self._stamp_of = stamp_of
        self._missed = missed
        self._file_name = f"{Path(code.co_filename).stem}.{name}.py{sys.version_info[0]}{sys.version_info[1]}"
        self._code_hash = hashlib.sha256(code.co_code).hexdigest()
        self._is_fixed = function.__closure__ is None  # what a closure holds is in no file and in no stamp

    @cached_property
    def _stamp(self) -> str:
        return self._stamp_of(self._function)

    @property
    def cache_path(self) -> str:
        return str(folder_to_write(self.sources) or "")

    def find(self, signature: Any) -> Path | None:
        """The folder that has this kernel compiled for this machine, else None; compiles and loads nothing."""
        if self._is_fixed:
            key = self._key(signature)
            for folder in folders_to_read(self.sources):
                with suppress(Exception):  # an index that cannot be read has nothing
                    name = self._file(folder)._load_index().get(key)
                    if name is not None and os.access(folder / name, os.R_OK):
                        return folder
        return None

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The compiled kernel, or None, and then numba compiles it."""
        context.refresh()
        if self._is_fixed:
            key = self._key(signature)
            for folder in folders_to_read(self.sources):
                with suppress(Exception):  # whatever a broken file raises, compiling anew is the answer (D3)
                    stamp, reduced = self._file(folder).load(key) or (None, ())
                    if stamp == self._stamp:
                        return CompileResult._rebuild(context, *reduced)
        self._missed(folder_to_write(self.sources))
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Write a compiled kernel to the first writable folder (D1)."""
        if not self._is_fixed or compiled.lifted or compiled.library.has_dynamic_globals:
            return
        # The stamp is stored with the kernel: numba writes the index first, a crash may leave an older kernel.
        entry = (self._stamp, compiled._reduce())
        for folder in _candidates(self.sources):
            with suppress(OSError):
                if _takes_files(folder):
                    _make(folder)
                    self._save_in(folder, self._key(signature), entry)
                    return

    def flush(self) -> None:
        """Do nothing: stale kernels are detected by their stamp and overwritten."""

    def _save_in(self, folder: Path, key: Any, entry: Any) -> None:
        file = self._file(folder)
        try:
            file.save(key, entry)
        except OSError:
            raise
        except Exception:  # noqa: BLE001 - an index that cannot be read: begin it anew
            file.flush()
            file.save(key, entry)

    def _file(self, folder: Path) -> Any:
        return IndexDataCacheFile(
            cache_path=str(folder), filename_base=self._file_name, source_stamp=self._stamp
        )

    def _key(self, signature: Any) -> Any:
        return signature, cpu_target.target_context.codegen().magic_tuple(), self._code_hash


def folders_to_read(sources: Path) -> Iterator[Path]:
    """Yield the existing, trusted folders with kernels of these sources (D2)."""
    return (folder for folder in _candidates(sources) if folder.is_dir() and _is_trusted(folder))


def folder_to_write(sources: Path) -> Path | None:
    """The folder to write kernels of these sources to; None if no folder is writable."""
    return next((folder for folder in _candidates(sources) if _takes_files(folder)), None)


def _candidates(sources: Path) -> Iterator[Path]:
    """Yield the possible folders for kernels of these sources, in order, existing or not."""
    name = f"{sources.name}_{hashlib.sha1(str(sources.absolute()).encode()).hexdigest()}"
    if config.CACHE_DIR:
        yield Path(config.CACHE_DIR) / name
    yield sources / "__pycache__"
    if (user_cache := _user_cache()) is not None:
        yield user_cache / "tidegate" / name
    with suppress(OSError):  # there may be no temporary folder that can be written
        yield Path(tempfile.gettempdir()) / f"tidegate-{os.geteuid()}" / name


def _user_cache() -> Path | None:
    """The folder of this user's caches; None for a user without a home folder."""
    if (told := os.environ.get("XDG_CACHE_HOME", "")).startswith("/"):
        return Path(told)
    if os.environ.get("HOME") == "":  # Python would take / for it
        return None
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor an entry in the user database
        return None
    if not home.is_absolute():
        return None
    return home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"


def _takes_files(folder: Path) -> bool:
    """Whether files could be written there once the folder is created; does not create it."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK) and _is_trusted(folder)


def _make(folder: Path) -> None:
    """Create the folder, private to this user unless it is next to the sources or configured."""
    if _is_shared(folder):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    else:
        folder.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in (folder.parent, folder):
            place.mkdir(mode=0o700, exist_ok=True)


def _is_shared(folder: Path) -> bool:
    return folder.name == "__pycache__" or bool(config.CACHE_DIR and Path(config.CACHE_DIR) in folder.parents)


def _is_trusted(folder: Path) -> bool:
    """Whether its files may be run: a shared folder, or one that only this user can write to (D2)."""
    return _is_shared(folder) or all(
        not place.is_symlink()
        and (not place.exists() or (place.stat().st_uid == os.geteuid() and not place.stat().st_mode & 0o022))
        for place in (folder, folder.parent)
    )
