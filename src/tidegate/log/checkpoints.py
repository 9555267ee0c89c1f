"""The small files of a log folder: offset checkpoints, leader epochs, topic ids, and marks of a clean close.

    *-offset-checkpoint      0\\n<count>\\n then <topic> <partition> <offset>\\n per line
    leader-epoch-checkpoint  0\\n<count>\\n then <epoch> <start offset>\\n per line, both growing strictly
    partition.metadata       version: 0\\ntopic_id: <22 characters of URL-safe base64>, no newline at the end
    .kafka_cleanshutdown     {"version":0,"brokerEpoch":<n>}, no newline at the end; only while all is closed cleanly
    tidegate.closed          sizes of the last log segment's files at a clean close, checksummed JSON; one per partition
    tidegate.cleaning        an offset checkpoint: partitions with a compaction in progress, and the offset it may reach

Every file is replaced atomically. Kafka's files have no checksum.

H1  `tidegate.closed` is removed, and the removal synced, before anything else in the folder changes; if it
    exists and the sizes match, no program has written since.
H2  checkpoints are hints: a damaged one counts as empty.
H4  every change of `LeaderEpochs` is on the disk before the method returns.
H5  a line of `cleaner-offset-checkpoint` says that everything below its offset was compacted once. It must not
    outlive those records, so opening or cutting a partition lowers it. A compaction swaps its segments before
    that line is written; `tidegate.cleaning` covers the time between (`CompactedBelow`).

Thread rule: pure functions and single file effects; callers that read, change and write a shared checkpoint
hold the folder's short lock. `LeaderEpochs` and `CleanerCheckpoint` may be used from any thread.
"""

from __future__ import annotations

import base64
import binascii
import re
import threading
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

from tidegate.clock import Clock
from tidegate.errors import ConflictError, CorruptError, InvalidError, TidegateWarning
from tidegate.files import Files
from tidegate.log.catalog import TopicPartition, partition_folder_name
from tidegate.log.format.partition_files import (
    LOG,
    SEGMENT_SUFFIXES,
    checksummed_json,
    offset_file,
    offsets_of,
    parse_checksummed_json,
)
from tidegate.log.locks import changing_folder
from tidegate.randomness import Randomness

RECOVERY_POINTS = "recovery-point-offset-checkpoint"
LOG_STARTS = "log-start-offset-checkpoint"
HIGH_WATERMARKS = "replication-offset-checkpoint"
CLEANER_OFFSETS = "cleaner-offset-checkpoint"
CLEANING = "tidegate.cleaning"
LEADER_EPOCHS = "leader-epoch-checkpoint"
PARTITION_METADATA = "partition.metadata"
CLEAN_SHUTDOWN = ".kafka_cleanshutdown"

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
CHECKPOINT_LIMIT_BYTES = 64 * 1024 * 1024
SMALL_LIMIT_BYTES = 4096

Offsets: TypeAlias = dict[tuple[str, int], int]
Line = TypeVar("Line")

_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_TOPIC_ID = re.compile(r"[A-Za-z0-9_-]{22}(==)?")


@dataclass(frozen=True, slots=True)
class TopicId:
    """A topic's identity: 16 bytes, written as 22 characters of URL-safe base64."""

    value: bytes

    def __post_init__(self) -> None:
        if len(self.value) != 16:
            raise InvalidError(f"a topic id has 16 bytes, not {len(self.value)}")

    def __str__(self) -> str:
        return base64.urlsafe_b64encode(self.value).decode("ascii").rstrip("=")

    @property
    def is_zero(self) -> bool:
        """Whether this is the all-zero id, which means "none" and belongs to no topic."""
        return not any(self.value)

    @classmethod
    def parse(cls, text: str) -> TopicId:
        if not _TOPIC_ID.fullmatch(text):
            raise InvalidError(f"{text[:64]!r} is not a topic id (22 characters of URL-safe base64)")
        return cls(base64.urlsafe_b64decode(text[:22] + "=="))

    @classmethod
    def random(cls, randomness: Randomness) -> TopicId:
        """Return a new id. Like Kafka's, it never starts with a dash: command lines would take it for an option."""
        while True:
            topic_id = cls(randomness.uuid().bytes)
            if not str(topic_id).startswith("-"):
                return topic_id


# -- offset checkpoints ------------------------------------------------------------------------------


def read_offsets(path: Path, *, files: Files) -> Offsets:
    """Return (topic, partition) → offset; empty when the file is missing or empty."""
    return dict(parse_checkpoint(_read(path, files), _offset_line, path=path))


def write_offsets(path: Path, offsets: Mapping[tuple[str, int], int], *, files: Files) -> None:
    """Replace the checkpoint, sorted and synced."""
    for (topic, partition), offset in offsets.items():
        if not topic or any(character.isspace() for character in topic) or partition < 0 or offset < 0:
            raise InvalidError(f"{path}: cannot write {topic!r} {partition} {offset}")
    lines = [f"{topic} {partition} {offset}" for (topic, partition), offset in sorted(offsets.items())]
    files.publish(path, checkpoint_text(lines))


def checkpoint_text(lines: Iterable[str]) -> bytes:
    """Return the file's bytes: version, number of lines, lines."""
    listed = list(lines)
    return "".join(f"{line}\n" for line in ("0", len(listed), *listed)).encode("utf-8")


def parse_checkpoint(
    data: bytes, parse_line: Callable[[list[str]], Line | None], *, path: Path
) -> list[Line]:
    """Return the parsed lines after version and count; `parse_line` returns None for malformed fields."""
    if not data:
        return []
    lines = data.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    position = 0
    parsed: list[Line] = []
    count: int | None = None
    for number, raw in enumerate(lines):
        fields = _text(raw, path, position).split()
        if number == 0:
            if _integer(fields, path, position) != 0:
                raise _corrupt(path, position, f"version {fields[0]} is not known, only 0 is")
        elif number == 1:
            count = _integer(fields, path, position)
        else:
            line = parse_line(fields)
            if line is None:
                raise _corrupt(path, position, f"malformed line {raw[:40]!r}")
            parsed.append(line)
        position += len(raw) + 1
    if count is not None and count != len(parsed):
        raise _corrupt(path, len(data), f"{count} lines were announced, {len(parsed)} are there")
    return parsed


def parse_integer(text: str, low: int, high: int) -> int | None:
    """Return a decimal integer in [low, high]; None for anything else, however long."""
    if not _INTEGER.fullmatch(text):
        return None
    value = int(text)
    return value if low <= value <= high else None


# -- partition.metadata ------------------------------------------------------------------------------


def read_topic_id(folder: Path, *, files: Files) -> TopicId | None:
    """Return the topic id of a partition folder; None when it has no `partition.metadata`."""
    path = folder / PARTITION_METADATA
    if not files.exists(path):
        return None
    data = _read(path, files, limit=SMALL_LIMIT_BYTES)
    lines = _text(data, path, 0).splitlines()
    values: list[str] = []
    for number, name in enumerate(("version", "topic_id")):
        found = re.fullmatch(rf"{name}:\s+(\S+)", lines[number]) if number < len(lines) else None
        if found is None:
            raise _corrupt(path, 0, f"line {number + 1} should be `{name}: …`")
        values.append(found[1])
    # A later version may only add lines, so a higher number is read like 0.
    if parse_integer(values[0], 0, INT32_MAX) is None:
        raise _corrupt(path, 0, f"version {values[0][:32]!r} is not known")
    try:
        topic_id = TopicId.parse(values[1])
    except (InvalidError, binascii.Error):
        raise _corrupt(path, 0, f"{values[1][:64]!r} is not a topic id") from None
    if topic_id.is_zero:
        raise _corrupt(path, 0, "the topic id is zero, which belongs to no topic")
    return topic_id


def write_topic_id(folder: Path, topic_id: TopicId, *, files: Files) -> None:
    """Write the topic id of a partition folder; a different existing one is a `ConflictError`."""
    if topic_id.is_zero:
        raise InvalidError(f"{folder}: a topic id may not be zero")
    known = read_topic_id(folder, files=files)
    if known == topic_id:
        return
    if known is not None:
        raise ConflictError(
            f"{folder / PARTITION_METADATA} belongs to topic id {known}, not {topic_id}: "
            f"the folder is of another topic of that name; move it aside or delete it",
            kafka_name="INCONSISTENT_TOPIC_ID",
        )
    files.publish(folder / PARTITION_METADATA, f"version: 0\ntopic_id: {topic_id}".encode("ascii"))


# -- clean-shutdown marker -------------------------------------------------------------------------


def has_clean_shutdown(log_folder: Path, *, files: Files) -> bool:
    """Return whether everything in the log folder was closed cleanly; only the marker's existence counts."""
    return files.exists(log_folder / CLEAN_SHUTDOWN)


def write_clean_shutdown(log_folder: Path, *, files: Files, broker_epoch: int = -1) -> None:
    """Write the marker; the last step of a clean shutdown."""
    text = f'{{"version":0,"brokerEpoch":{broker_epoch}}}'
    files.publish(log_folder / CLEAN_SHUTDOWN, text.encode("ascii"))


def remove_clean_shutdown(log_folder: Path, *, files: Files) -> bool:
    """Remove the marker and sync; return whether there was one. The first step of opening."""
    path = log_folder / CLEAN_SHUTDOWN
    if not files.exists(path):
        return False
    files.unlink(path, missing_ok=True)
    files.sync_folder(log_folder)
    return True


def _read(path: Path, files: Files, *, limit: int = CHECKPOINT_LIMIT_BYTES) -> bytes:
    found = files.stat(path)
    if found is None:
        return b""
    if found.is_file and found.size > limit:
        raise _corrupt(path, limit, f"{found.size} bytes are more than the {limit} such a file may have")
    try:
        return files.read(path)
    except FileNotFoundError:
        return b""


def _offset_line(fields: list[str]) -> tuple[tuple[str, int], int] | None:
    if len(fields) != 3:
        return None
    partition = parse_integer(fields[1], 0, INT32_MAX)
    offset = parse_integer(fields[2], 0, INT64_MAX)
    return None if partition is None or offset is None else ((fields[0], partition), offset)


def _integer(fields: list[str], path: Path, position: int) -> int:
    value = parse_integer(fields[0], -INT32_MAX, INT32_MAX) if len(fields) == 1 else None
    if value is None:
        raise _corrupt(path, position, f"expected a number, found {' '.join(fields)[:32]!r}")
    return value


def _text(data: bytes, path: Path, position: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _corrupt(path, position + error.start, "the bytes are not UTF-8") from None


def _corrupt(path: Path, position: int, what: str) -> CorruptError:
    return CorruptError(
        f"{path} is corrupt at byte {position}: {what}; delete the file to start without it",
        path=path,
        position=position,
        kafka_name=None,
    )


NO_EPOCH = -1
NO_OFFSET = -1


class EpochEntry(NamedTuple):
    """From `start_offset` on, batches were written in leader epoch `epoch`."""

    epoch: int
    start_offset: int


class EpochEnd(NamedTuple):
    """Where the largest epoch up to the requested one ended; (-1, -1) when that is not known."""

    epoch: int
    end_offset: int


class LeaderEpochs:
    """The leader epochs of one partition, oldest first; a damaged file raises `CorruptError` at once."""

    def __init__(self, path: Path, *, files: Files, ignore_file: bool = False) -> None:
        """Read the file; with `ignore_file` begin without entries, to rebuild them from the log."""
        self.path = path
        self._files = files
        self._lock = threading.Lock()
        self._entries: list[EpochEntry] = []
        stored = b"" if ignore_file else _read(path, files)
        for entry in parse_checkpoint(stored, _epoch_line, path=path):
            self._entries = _with_entry(self._entries, entry)

    @property
    def entries(self) -> tuple[EpochEntry, ...]:
        with self._lock:
            return tuple(self._entries)

    @property
    def latest(self) -> EpochEntry | None:
        """The current epoch; None when no batch had one yet."""
        entries = self._entries
        return entries[-1] if entries else None

    @property
    def earliest(self) -> EpochEntry | None:
        entries = self._entries
        return entries[0] if entries else None

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Record that `epoch` writes from `start_offset` on; return whether an entry was added.

        The latest epoch at the same or a higher start adds nothing. Otherwise entries with an epoch or a start
        not below the new one's contradict it and are dropped first.
        """
        entry = EpochEntry(epoch, start_offset)
        if epoch < 0 or start_offset < 0:
            raise InvalidError(f"{self.path}: leader epoch {epoch} from offset {start_offset} cannot be")
        with self._lock:
            entries = _with_entry(self._entries, entry)
            if entries is self._entries:
                return False
            self._replace(entries)
            return True

    def end_offset_for(self, epoch: int, log_end: int) -> EpochEnd:
        """Return where `epoch` ended, or the largest known epoch below it."""
        with self._lock:
            entries = self._entries
            if epoch == NO_EPOCH or not entries:
                return EpochEnd(NO_EPOCH, NO_OFFSET)
            if entries[-1].epoch == epoch:
                return EpochEnd(epoch, log_end)
            higher = bisect_right(entries, epoch, key=lambda entry: entry.epoch)
            if higher == len(entries):
                return EpochEnd(NO_EPOCH, NO_OFFSET)
            # Below the first known epoch the result has the requested one: its data is gone from the log.
            known = entries[higher - 1].epoch if higher > 0 else epoch
            return EpochEnd(known, entries[higher].start_offset)

    def truncate_from_start(self, start_offset: int) -> None:
        """Drop what lies before `start_offset`; the epoch that covers it now starts there."""
        with self._lock:
            gone = bisect_right(self._entries, start_offset, key=lambda entry: entry.start_offset)
            if gone == 0:
                return
            kept = [EpochEntry(self._entries[gone - 1].epoch, start_offset), *self._entries[gone:]]
            if kept != self._entries:
                self._replace(kept)

    def truncate_from_end(self, end_offset: int) -> None:
        """Drop epochs that start at or after `end_offset` (a negative one changes nothing)."""
        with self._lock:
            kept = bisect_left(self._entries, end_offset, key=lambda entry: entry.start_offset)
            if end_offset >= 0 and kept < len(self._entries):
                self._replace(self._entries[:kept])

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._replace([])

    def _replace(self, entries: list[EpochEntry]) -> None:
        # File first: after a failed write the entry must be unknown, or it would never be written.
        self._files.publish(
            self.path, checkpoint_text(f"{epoch} {start_offset}" for epoch, start_offset in entries)
        )
        self._entries = entries


def _with_entry(entries: list[EpochEntry], entry: EpochEntry) -> list[EpochEntry]:
    """Return a list with `entry` last and nothing that contradicts it; `entries` itself when `entry` adds nothing."""
    if entries and entries[-1].epoch == entry.epoch and entry.start_offset >= entries[-1].start_offset:
        return entries
    kept = len(entries)
    while kept > 0 and not (
        entries[kept - 1].epoch < entry.epoch and entries[kept - 1].start_offset < entry.start_offset
    ):
        kept -= 1
    return [*entries[:kept], entry]


def _epoch_line(fields: list[str]) -> EpochEntry | None:
    if len(fields) != 2:
        return None
    epoch, start_offset = parse_integer(fields[0], 0, INT32_MAX), parse_integer(fields[1], 0, INT64_MAX)
    return None if epoch is None or start_offset is None else EpochEntry(epoch, start_offset)


CLOSED_NAME = "tidegate.closed"
_MARK_LIMIT_BYTES = 4096


def was_closed_cleanly(files: Files, partition_folder: Path) -> bool:
    """Return whether the file sizes are those of the last clean close; the seal covers the bytes (H1)."""
    closed = _sizes_at_close(files, partition_folder)
    return closed is not None and closed == _last_sizes(files, partition_folder)


def was_changed_since(files: Files, partition_folder: Path) -> bool:
    """Return whether a program that does not know Tidegate's files, such as a broker, wrote after the clean close."""
    closed = _sizes_at_close(files, partition_folder)
    return closed is not None and closed != _last_sizes(files, partition_folder)


def _sizes_at_close(files: Files, partition_folder: Path) -> dict[str, int] | None:
    """Return file name → size at the last clean close; None without a valid `tidegate.closed`."""
    try:
        sizes: dict[str, int] | None = parse_checksummed_json(
            files.read(partition_folder / CLOSED_NAME, limit=_MARK_LIMIT_BYTES)
        )
    except (FileNotFoundError, ValueError):
        return None
    return sizes


def forget_closed(files: Files, partition_folder: Path) -> None:
    """Remove `tidegate.closed`, before the partition changes."""
    if files.exists(partition_folder / CLOSED_NAME):
        files.unlink(partition_folder / CLOSED_NAME, missing_ok=True)
        files.sync_folder(partition_folder)


def mark_closed(files: Files, partition_folder: Path) -> None:
    """Write `tidegate.closed` after the partition was closed and synced: the writer's last step."""
    files.publish(partition_folder / CLOSED_NAME, checksummed_json(_last_sizes(files, partition_folder)))


def last_segment_base(files: Files, partition_folder: Path) -> int | None:
    """Return the base offset of the last log segment, by name; None when there is none."""
    return max(offsets_of(files.list(partition_folder), LOG), default=None)


def read_checkpoint(files: Files, path: Path) -> Offsets:
    """Return the offsets of a checkpoint; a damaged one is logged and counts as empty (H2)."""
    try:
        return read_offsets(path, files=files)
    except CorruptError as error:
        warnings.warn(TidegateWarning(f"{error}; going on without it"), stacklevel=2)
        return {}


def merge_checkpoints(
    files: Files, log_folder: Path, lines: Mapping[TopicPartition, Mapping[str, int | None]]
) -> None:
    """Write the partitions' lines, by file name, into Kafka's checkpoint files and keep all other lines."""
    for name in (RECOVERY_POINTS, HIGH_WATERMARKS, LOG_STARTS):
        merge_lines(files, log_folder / name, {place: by_name[name] for place, by_name in lines.items()})


def drop_from_checkpoints(files: Files, log_folder: Path, places: Iterable[TopicPartition]) -> None:
    """Remove deleted partitions from Kafka's checkpoint files."""
    gone: dict[tuple[str, int], int | None] = dict.fromkeys(places)
    for name in (RECOVERY_POINTS, HIGH_WATERMARKS, LOG_STARTS, CLEANER_OFFSETS, CLEANING):
        merge_lines(files, log_folder / name, gone)


def mark_folder_clean(files: Files, log_folder: Path, partition_folders: Iterable[Path]) -> bool:
    """Write `.kafka_cleanshutdown` if every partition is closed (or was never opened); return whether it was written.

    A partition whose folder is missing was not closed; opening it raises the error.
    """
    for folder in partition_folders:
        if not files.exists(folder):
            return False
        if not files.exists(folder / CLOSED_NAME) and last_segment_base(files, folder) is not None:
            return False
    write_clean_shutdown(log_folder, files=files)
    return True


def merge_lines(files: Files, path: Path, lines: Mapping[tuple[str, int], int | None]) -> None:
    """Write these partitions' lines into a checkpoint and keep all other lines; None removes a line."""
    before = read_checkpoint(files, path)
    after = {place: offset for place, offset in {**before, **lines}.items() if offset is not None}
    if after != before:
        write_offsets(path, after, files=files)


def _last_sizes(files: Files, partition_folder: Path) -> dict[str, int]:
    """Return file name → size of the last log segment's files; empty when there is none."""
    base = last_segment_base(files, partition_folder)
    if base is None:
        return {}
    paths = [offset_file(partition_folder, base, suffix) for suffix in SEGMENT_SUFFIXES]
    found = {path.name: files.stat(path) for path in paths}
    return {name: known.size for name, known in found.items() if known is not None}


class CleanerCheckpoint:
    """The cleaner checkpoint of one log folder."""

    def __init__(self, log_folder: Path, *, files: Files, clock: Clock) -> None:
        self._path = log_folder / CLEANER_OFFSETS
        self._begun = log_folder / CLEANING
        self._files = files
        self._clock = clock

    def get(self, topic: str, partition: int) -> int | None:
        """Return where the dirty part of the partition begins; None when it was never compacted."""
        return read_checkpoint(self._files, self._path).get((topic, partition))

    def put(self, topic: str, partition: int, offset: int) -> None:
        """Record that everything below `offset` is compacted."""
        self._merge(self._path, (topic, partition), offset)

    def begin(self, topic: str, partition: int, stop: int) -> None:
        """Record that a compaction is about to replace segments; nothing from `stop` on is touched."""
        self._merge(self._begun, (topic, partition), stop)

    def end(self, topic: str, partition: int, offset: int) -> None:
        """Record that the compaction is done: everything below `offset` is compacted."""
        self.put(topic, partition, offset)
        self._merge(self._begun, (topic, partition), None)

    def lower(self, topic: str, partition: int, log_end: int) -> None:
        """Lower the checkpoint to a log that ends at `log_end`: nothing from there on was compacted."""
        for path in (self._path, self._begun):
            if read_checkpoint(self._files, path).get((topic, partition), 0) > log_end:
                self._merge(path, (topic, partition), log_end)

    def _merge(self, path: Path, place: tuple[str, int], offset: int | None) -> None:
        merge_checkpoint(path, {place: offset}, files=self._files, clock=self._clock)


@dataclass(frozen=True, slots=True)
class CompactedBelow:
    """Callable that returns the offset below which compaction may have removed records of a partition.

    The offset grows with every compaction, so call it after the records were read. Without a checkpoint, or when
    another program wrote the folder, everything below the active segment may have been compacted. Picklable.
    """

    log_folder: Path
    topic: str
    partition: int
    is_foreign: bool = False

    def __call__(self) -> int:
        files, place = Files(), (self.topic, self.partition)
        try:
            begun = read_offsets(self.log_folder / CLEANING, files=files).get(place, 0)
            if not self.is_foreign and files.exists(self.log_folder / CLEANER_OFFSETS):
                done = read_offsets(self.log_folder / CLEANER_OFFSETS, files=files).get(place, 0)
                return max(begun, done)
        except CorruptError:
            pass  # a checkpoint is a hint: without it only the active segment is known to be uncompacted
        folder = self.log_folder / partition_folder_name(self.topic, self.partition)
        return last_segment_base(files, folder) or 0


def merge_checkpoint(
    path: Path, lines: Mapping[tuple[str, int], int | None], *, files: Files, clock: Clock
) -> None:
    """Run `merge_lines` under the folder's short lock."""
    if lines:
        with changing_folder(files, path.parent, clock):
            merge_lines(files, path, lines)
