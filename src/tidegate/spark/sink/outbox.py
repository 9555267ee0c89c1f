"""Where rows on their way into a topic wait until their batch is complete.

    <outbox>/<topic>/<sender>/          sender: a streaming query's id, or a batch write's
        <batch>-<task>-<unique>.arrow   one attempt's rows: an Arrow stream, synced before the task reports it
        plan-<batch>                    which files make the batch and how they are numbered; made once
        progress                        the last batch that is in the topic, and where the numbering stands
        lock                            held while a batch is appended

Plan and progress are one line of JSON and one line `crc32c:<8 hex digits>` over it.

B1  an attempt writes a file of its own and nothing else; files that no plan names are garbage.
B2  a plan is made once (create if absent): a repeat of its batch appends the plan's files, whatever it brings itself.
B3  files are deleted only after the progress that covers their batch is on the disk.

Does not know what a topic is. Thread rule: one holder of the lock at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa
from fastcrc.crc32 import iscsi as crc32c

from tidegate.clock import Clock
from tidegate.errors import CorruptError
from tidegate.files import File, Files
from tidegate.waiting import waiting

VERSION: Final = 1
BUFFER_BYTES: Final = 1 << 20
_MOST_BYTES: Final = 64 << 20
_ARROW: Final = ".arrow"

Record = TypeVar("Record", "Plan", "Progress")


class Attempt(msgspec.Struct, frozen=True):
    """What one task attempt wrote; `name` is empty when it had no rows."""

    task: int
    name: str
    rows: int
    size: int
    crc: int
    partitions: tuple[int, ...]


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One batch, decided: these files, in this order, from these positions on."""

    batch: int
    now_ms: int
    incarnation: str
    files: tuple[Attempt, ...]
    positions: dict[int, bytes]
    """Where the sender stood before the batch, by partition of the topic."""
    ends: dict[int, int]
    """Where the partitions ended before it: what is in the topic already lies behind."""
    topic_id: str
    checksum: str
    version: int = VERSION


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a sender has come."""

    batch: int
    incarnation: str
    positions: dict[int, bytes]
    ends: dict[int, int]
    """What the partitions reached at least: a topic that ends before was made anew."""
    topic_id: str
    checksum: str
    version: int = VERSION


class Outbox:
    """The folder of one sender."""

    def __init__(self, folder: Path, *, files: Files | None = None) -> None:
        self.folder = folder
        self.files = files or Files()

    # -- a task's side ---------------------------------------------------------------------------

    def write(
        self,
        batch: int,
        task: int,
        unique: str,
        rows: Iterator[pa.RecordBatch],
        partitions: Callable[[], set[int]],
    ) -> Attempt:
        """Store one attempt's rows durably; `partitions` is asked at the end where they go."""
        first = next(rows, None)
        if first is None:
            return Attempt(task, "", 0, 0, 0, ())
        self.files.mkdir(self.folder)
        path = self.folder / f"{batch}-{task}-{unique}{_ARROW}"
        count = 0
        with self.files.open(path, new=True) as file:
            sink = _Sink(file)
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            with pa.BufferedOutputStream(pa.PythonFile(sink, "w"), BUFFER_BYTES) as buffered:
                with pa.ipc.new_stream(buffered, first.schema, options=options) as stream:
                    for each in _chained(first, rows):
                        stream.write_batch(each)
                        count += each.num_rows
                buffered.flush()
            file.sync()
        self.files.sync_folder(self.folder)
        return Attempt(task, path.name, count, sink.size, sink.crc, tuple(sorted(partitions())))

    # -- the driver's side -----------------------------------------------------------------------

    @contextmanager
    def locked(self, clock: Clock, timeout_ms: int) -> Iterator[None]:
        """Be the only one who appends for this sender."""
        self.files.mkdir(self.folder)
        lock = waiting(clock, timeout_ms, lambda: self.files.lock(self.folder / "lock"))
        try:
            yield
        finally:
            lock.release()

    def read(self, attempt: Attempt) -> Iterator[pa.RecordBatch]:
        """The rows of one attempt, after all of its bytes were checked."""
        path = self.folder / attempt.name
        try:
            content = self.files.map(path)
        except FileNotFoundError:
            raise CorruptError(
                f"{path} is gone: rows of an unfinished write wait there until they are in the topic; restore it",
                path=path,
            ) from None
        if content.size != attempt.size or _crc_of(content) != attempt.crc:
            raise CorruptError(f"{path} is not as its task wrote it ({content.size} bytes)", path=path)
        try:
            with pa.ipc.open_stream(content) as stream:
                for batch in stream:
                    batch.validate(full=True)
                    yield batch
        except (pa.ArrowException, OSError) as error:
            raise CorruptError(f"{path} holds no rows that can be read: {error}", path=path) from error

    def plan(self, batch: int) -> Plan | None:
        return self._load(f"plan-{batch}", Plan)

    def progress(self) -> Progress | None:
        return self._load("progress", Progress)

    def decide(self, plan: Plan) -> None:
        """Make the plan that counts (B2)."""
        self.files.publish_new(self.folder / f"plan-{plan.batch}", _sealed(plan))

    def replace(self, plan: Plan) -> None:
        """Another plan for a batch of which nothing can be in the topic."""
        self.files.publish(self.folder / f"plan-{plan.batch}", _sealed(plan))

    def advance(self, progress: Progress) -> None:
        self.files.publish(self.folder / "progress", _sealed(progress))

    def clear(self, batch: int) -> None:
        """Delete what batches up to this one left behind, other attempts' files included (B3)."""
        for name in self.files.list(self.folder):
            number = name.removeprefix("plan-").split("-")[0]
            if number.isdecimal() and int(number) <= batch:
                self.files.unlink(self.folder / name, missing_ok=True)

    def remove(self) -> None:
        """Delete the folder of a sender that will never come again."""
        for name in self.files.list(self.folder):
            self.files.unlink(self.folder / name, missing_ok=True)
        self.files.rmdir(self.folder)

    def _load(self, name: str, kind: type[Record]) -> Record | None:
        path = self.folder / name
        if not self.files.exists(path):
            return None
        data = self.files.read(path, limit=_MOST_BYTES)
        line, _, trailer = data.partition(b"\n")
        if trailer != b"crc32c:%08x\n" % crc32c(line):
            raise CorruptError(
                f"{path} is damaged: its checksum does not match; restore it from a copy", path=path
            )
        try:
            found = msgspec.json.decode(line, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise CorruptError(
                f"{path} cannot be read ({error}); restore it from a copy", path=path
            ) from None
        if found.version != VERSION:
            raise CorruptError(f"{path} was written by another release (version {found.version})", path=path)
        return found


class _Sink:
    """A file that Arrow can write to, and its checksum."""

    closed = False

    def __init__(self, file: File) -> None:
        self._file = file
        self.size = 0
        self.crc = 0

    def write(self, data: Any) -> int:
        content = bytes(data)
        self._file.write_at(self.size, content)
        self.crc = crc32c(content, self.crc)
        self.size += len(content)
        return len(content)

    def writable(self) -> bool:
        return True

    def flush(self) -> None: ...

    def close(self) -> None: ...


def _crc_of(content: pa.Buffer) -> int:
    crc, step = 0, 4 << 20
    for start in range(0, content.size, step):
        crc = crc32c(content[start : start + step].to_pybytes(), crc)
    return crc


def _chained(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest


def _sealed(record: Plan | Progress) -> bytes:
    line = msgspec.json.encode(record)
    return line + b"\ncrc32c:%08x\n" % crc32c(line)
