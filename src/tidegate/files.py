"""Every effect on the file system, and nothing else: open, read, map, write, sync, rename, unlink, lock.

No other module calls `open`, `os.*` on files or `fcntl`; so a test can number, fail, tear or record each
effect by handing in `Files(watch=…)`. A watcher is called *before* an effect with an `Effect`; what it
raises is raised to the caller and the effect does not happen. A watcher that wants a torn write writes the
prefix through `effect.fd` itself, then raises.

What it promises:
F1  `publish` is atomic: readers see the old bytes or the new bytes, whatever dies when.
F2  a failed `sync` is final: the file is poisoned and every later write or sync of it fails (the kernel
    may have dropped the pages; trying again would report a success that is not one).
F3  nothing follows a symbolic link or opens anything but a regular file; a file with a second hard link
    is not opened for writing (it may be somebody's backup).
F4  nothing is made that others than its owner can write to, whatever the umask says.
F5  operating-system errors leave as `UnavailableError` naming the file, `FileNotFoundError` excepted.

Thread rule: a `Files` may be shared; one `File` has one writer, any number of readers by position.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tidegate.errors import ConflictError, InvalidError, UnavailableError
from tidegate.file_locks import FileLock, lock_record, lock_whole

if TYPE_CHECKING:
    import pyarrow as pa

Bytes: TypeAlias = "bytes | bytearray | memoryview"

_serial = itertools.count()
_READ_TRIES = 5  # of a file that another process cuts short meanwhile

MUTATIONS = frozenset(
    {
        "create",
        "write",
        "truncate",
        "sync",
        "sync_folder",
        "rename",
        "link",
        "unlink",
        "mkdir",
        "rmdir",
        "mtime",
    }
)


@dataclass(slots=True)
class Effect:
    """One thing about to happen to a file. `mutates` tells changes from looks (`open`, `read`, `map`, `list`)."""

    kind: str
    path: Path
    position: int = 0
    length: int = 0
    data: Bytes | None = None
    target: Path | None = None
    fd: int = -1

    @property
    def mutates(self) -> bool:
        return self.kind in MUTATIONS


@dataclass(frozen=True, slots=True)
class FileStat:
    """What is known of a file without reading it. `version` differs whenever the file was replaced or written to:
    inode, size, and the times of the last change of content and of anything, in nanoseconds."""

    size: int
    mtime_ms: int
    is_file: bool
    is_folder: bool
    version: tuple[int, int, int, int]


class File:
    """One open regular file, read and written by position."""

    def __init__(self, files: Files, path: Path, fd: int, *, writable: bool) -> None:
        self.path = path
        self.writable = writable
        self._files = files
        self._fd = fd
        self._poison: str | None = None

    def read_at(self, position: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""
        self._files.watch("read", self.path, position=position, length=length, fd=self._open_fd())
        with _named(self.path, "read"):
            data = os.pread(self._fd, length, position)
            while len(data) < length:  # a short read is the end of the file only when the next one is empty
                more = os.pread(self._fd, length - len(data), position + len(data))
                if not more:
                    break
                data += more
        return data

    def read_into(self, position: int, buffer: memoryview) -> int:
        """Fill `buffer` from `position`; how many bytes were there."""
        self._files.watch("read", self.path, position=position, length=len(buffer), fd=self._open_fd())
        count = 0
        with _named(self.path, "read"):
            while count < len(buffer):
                got = os.preadv(self._fd, [buffer[count:]], position + count)
                if got == 0:
                    break
                count += got
        return count

    def write_at(self, position: int, data: Bytes) -> None:
        """All of `data`, or an error."""
        fd = self._writable_fd()
        self._files.watch("write", self.path, position=position, data=data, length=len(data), fd=fd)
        view, written = memoryview(data).cast("B"), 0
        with _named(self.path, "write"):
            while written < len(view):
                written += os.pwrite(fd, view[written:], position + written)

    def write_parts(self, position: int, parts: Sequence[memoryview]) -> None:
        """All parts, one after the other, in one call; if somebody watches, in one for each."""
        fd, left = (
            self._writable_fd(),
            [] if self._files.is_watched else [part for part in parts if part.nbytes],
        )
        if self._files.is_watched:
            for part in parts:
                self.write_at(position, part)
                position += part.nbytes
        with _named(self.path, "write"):
            while left:
                written = os.pwritev(fd, left, position)
                position += written
                while left and written >= left[0].nbytes:
                    written -= left.pop(0).nbytes
                if written:
                    left[0] = left[0][written:]

    def truncate(self, length: int) -> None:
        fd = self._writable_fd()
        self._files.watch("truncate", self.path, length=length, fd=fd)
        with _named(self.path, "truncate"):
            os.ftruncate(fd, length)

    def sync(self) -> None:
        """Data and length are on the disk when this returns; a failure poisons the file (F2)."""
        fd = self._writable_fd()
        try:
            self._files.watch("sync", self.path, fd=fd)
            with _named(self.path, "sync"):
                _sync(fd)
        except BaseException:
            self._poison = (
                "an earlier sync failed, so what is on the disk is unknown; close and reopen the log"
            )
            raise

    def size(self) -> int:
        return os.fstat(self._open_fd()).st_size

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise InvalidError(f"{self.path} is closed")
        return self._fd

    def _writable_fd(self) -> int:
        fd = self._open_fd()
        if self._poison is not None:
            raise UnavailableError(f"{self.path}: {self._poison}")
        if not self.writable:
            raise InvalidError(f"{self.path} was opened for reading only")
        return fd


class Files:
    """The file system, watched."""

    def __init__(self, watch: Callable[[Effect], None] | None = None) -> None:
        self._watch = watch

    def watch(
        self,
        kind: str,
        path: Path,
        *,
        position: int = 0,
        length: int = 0,
        data: Bytes | None = None,
        target: Path | None = None,
        fd: int = -1,
    ) -> None:
        """Tell the watcher what is about to happen; an error it raises counts as the operating system's."""
        if self._watch is not None:
            with _named(path, kind.replace("_", " ")):
                self._watch(Effect(kind, path, position, length, data, target, fd))

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at each effect, and may fail or tear it."""
        return self._watch is not None

    # -- opening ---------------------------------------------------------------------------------

    def open(self, path: Path, *, write: bool = False, create: bool = False, new: bool = False) -> File:
        """Open a regular file; `create` (implying `write`) makes it when absent, `new` insists on that."""
        create = create or new
        write = write or create
        missing = create and not os.path.lexists(path)
        self.watch("create" if missing else "open", path)
        # O_NONBLOCK: a FIFO planted under our name must not hang the open before fstat refuses it.
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with _named(path, "open"):
            fd = os.open(path, flags | (os.O_CREAT if create else 0) | (os.O_EXCL if new else 0), 0o644)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise InvalidError(f"{path} is not a regular file; move it out of the log folder")
            if write and info.st_nlink > 1:
                raise InvalidError(
                    f"{path} has {info.st_nlink} hard links, so writing would change another copy; "
                    f"replace it by a copy of its own (cp, then mv)"
                )
        except BaseException:
            os.close(fd)
            raise
        return File(self, path, fd, writable=write)

    def read(self, path: Path, *, limit: int | None = None) -> bytes:
        """The whole file, refused above `limit` bytes. A file that is cut short while it is read is read again."""
        data = b""
        with self.open(path) as file:
            for _ in range(_READ_TRIES):
                size = file.size()
                if limit is not None and size > limit:
                    raise InvalidError(f"{path} has {size} bytes, more than the {limit} such a file may have")
                data = file.read_at(0, size)
                if len(data) == size:
                    break
        return data

    def map(self, path: Path) -> pa.Buffer:
        """The whole file as read-only memory, paged in when touched; unlinking it later does no harm.

        For files that never change: one that another process cuts short while it is mapped ends this one with
        SIGBUS at the next touch behind the cut.
        """
        import pyarrow as pa

        with self.open(path) as file:
            size = file.size()
            self.watch("map", path, length=size, fd=file._open_fd())
            if size == 0:
                return pa.py_buffer(b"")
            with _named(path, "map"):
                return pa.py_buffer(mmap.mmap(file._open_fd(), size, prot=mmap.PROT_READ))

    # -- looking ---------------------------------------------------------------------------------

    def list(self, folder: Path) -> list[str]:
        """Names in the folder, sorted."""
        self.watch("list", folder)
        with _named(folder, "list"):
            return sorted(os.listdir(folder))

    def stat(self, path: Path) -> FileStat | None:
        """What is there, None when nothing is. Does not follow links."""
        try:
            info = os.lstat(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unavailable(error, path, "stat") from error
        return FileStat(
            info.st_size,
            info.st_mtime_ns // 1_000_000,
            stat.S_ISREG(info.st_mode),
            stat.S_ISDIR(info.st_mode),
            (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns),
        )

    def exists(self, path: Path) -> bool:
        return self.stat(path) is not None

    # -- changing --------------------------------------------------------------------------------

    def publish(self, path: Path, data: Bytes, *, sync: bool = True) -> None:
        """Replace the file's whole content atomically: temporary file, sync, rename, sync folder (F1)."""
        temporary = self._write_temporary(path, data, sync=sync)
        try:
            self.rename(temporary, path)
        except Exception:
            self.unlink(temporary, missing_ok=True)
            raise
        if sync:
            self.sync_folder(path.parent)

    def publish_new(self, path: Path, data: Bytes) -> None:
        """Like `publish`, but refused with `ConflictError` when the name is taken: one winner only."""
        temporary = self._write_temporary(path, data, sync=True)
        try:
            self.link(temporary, path)
        except FileExistsError:
            raise ConflictError(f"{path} exists already") from None
        finally:
            self.unlink(temporary, missing_ok=True)
        self.sync_folder(path.parent)

    def link(self, source: Path, target: Path) -> None:
        """A second name for the file; `FileExistsError` when that name is taken."""
        self.watch("link", source, target=target)
        with _named(target, "create"):
            os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self.watch("rename", source, target=target)
        with _named(source, f"rename to {target.name}"):
            os.replace(source, target)

    def unlink(self, path: Path, *, missing_ok: bool = False) -> None:
        self.watch("unlink", path)
        try:
            os.unlink(path)
        except FileNotFoundError:
            if not missing_ok:
                raise
        except OSError as error:
            raise _unavailable(error, path, "unlink") from error

    def mkdir(self, path: Path, *, private: bool = False) -> None:
        """Make the folder (and its parents), which only its owner can write to; fine when it is there already.

        A `private` one only its owner can look into, and one that belongs to another user is refused: it may lie
        where everybody can make folders.
        """
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            self.watch("mkdir", folder)
            with _named(folder, "mkdir"):
                folder.mkdir(0o700 if private else 0o755, exist_ok=True)
            self.sync_folder(folder.parent)
        if private:
            with _named(path, "stat"):
                owner = os.lstat(path).st_uid
            if owner != os.geteuid():
                raise InvalidError(f"{path} belongs to another user (uid {owner}); name another folder")

    def rmdir(self, path: Path) -> None:
        self.watch("rmdir", path)
        with _named(path, "rmdir"):
            os.rmdir(path)

    def set_mtime_ms(self, path: Path, mtime_ms: int) -> None:
        self.watch("mtime", path, position=mtime_ms)
        with _named(path, "set time of"):
            os.utime(path, ns=(mtime_ms * 1_000_000, mtime_ms * 1_000_000), follow_symlinks=False)

    def sync_folder(self, folder: Path) -> None:
        """Names created, renamed and removed in the folder are on the disk when this returns."""
        self.watch("sync_folder", folder)
        with _named(folder, "sync"):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _sync(fd)
            finally:
                os.close(fd)

    # -- locking ---------------------------------------------------------------------------------

    def lock(self, path: Path, *, shared: bool = False, posix: bool = False, create: bool = True) -> FileLock:
        """Take the lock at once or raise `ConflictError`.

        `posix=True` takes a record lock as Java's `FileChannel.lock` does, so a Kafka broker and Tidegate see
        each other; otherwise a whole-file lock that also excludes other openers in this process.
        """
        take = lock_record if posix else lock_whole
        try:
            return take(path, shared=shared, create=create)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _unavailable(error, path, "lock") from error

    # -- helpers ---------------------------------------------------------------------------------

    def _write_temporary(self, path: Path, data: Bytes, *, sync: bool) -> Path:
        # Process numbers repeat (after a reboot, in containers), so a leftover must never be written into.
        unique = f"{os.getpid()}-{os.urandom(4).hex()}-{next(_serial)}"
        temporary = path.with_name(f"{path.name}.{unique}.tmp")
        try:
            with self.open(temporary, new=True) as file:
                file.write_at(0, data)
                if sync:
                    file.sync()
        except Exception:
            self.unlink(temporary, missing_ok=True)
            raise
        return temporary


def _sync(fd: int) -> None:
    """Have the disk itself keep what was written. macOS's fsync stops at the cache of the drive."""
    if (full_sync := getattr(fcntl, "F_FULLFSYNC", None)) is not None:
        try:
            fcntl.fcntl(fd, full_sync)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.EINVAL):  # a file system that has only the weaker one
                raise
    os.fsync(fd)


@contextmanager
def _named(path: Path, doing: str) -> Iterator[None]:
    """Give operating-system errors a file and a remedy (F5)."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise _unavailable(error, path, doing) from error


def _denied(path: Path) -> str:
    """Why permission was denied: a folder that this user cannot write, or the file itself."""
    user = f"user {os.geteuid()}"
    if not os.access(path.parent, os.W_OK):
        return (
            f"the folder {path.parent} is read-only for {user}; give that user write permission, "
            "or choose another folder"
        )
    return f"permission denied for {user}; check the owner and the mode of the file"


def _unavailable(error: OSError, path: Path, doing: str) -> Exception:
    if error.errno == errno.ELOOP:
        return InvalidError(
            f"{path} is a symbolic link, which a log folder may not hold; replace it by the file itself"
        )
    remedies = {
        errno.ENOSPC: "the disk is full: free some space (retention still runs), then retry",
        errno.EDQUOT: "the disk quota is used up: free some space, then retry",
        errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
        errno.EACCES: _denied(path),
        errno.EPERM: _denied(path),
        errno.EROFS: f"{path.parent} lies on a file system that is read-only; choose another folder",
        errno.EIO: "the disk reported an error: check it before going on",
    }
    reason = remedies.get(error.errno or 0, error.strerror or str(error))
    return UnavailableError(f"could not {doing} {path}: {reason}")
