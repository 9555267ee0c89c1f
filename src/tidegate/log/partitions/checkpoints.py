"""The small text files of a log folder: offset checkpoints, `partition.metadata`, the clean-shutdown marker.

Owns their exact text and their strict reading. `epochs` keeps `leader-epoch-checkpoint` in the same form
through `parse_checkpoint` and `checkpoint_text`. What an offset means, and what to do when a file is damaged,
is decided by the readers: a checkpoint is a hint, it has no checksum.

    *-offset-checkpoint      0\\n<count>\\n then <topic> <partition> <offset>\\n per line
    partition.metadata       version: 0\\ntopic_id: <22 characters of URL-safe base64>, no newline at the end
    .kafka_cleanshutdown     {"version":0,"brokerEpoch":<n>}, no newline at the end

Every file is replaced atomically. Thread rule: pure functions and single file effects; callers that read,
change and write a shared checkpoint hold a lock around the three.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from tidegate.errors import ConflictError, CorruptError, InvalidError
from tidegate.files import Files
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
        """The all-zero id stands for "none" and belongs to no topic."""
        return not any(self.value)

    @classmethod
    def parse(cls, text: str) -> TopicId:
        if not _TOPIC_ID.fullmatch(text):
            raise InvalidError(f"{text[:64]!r} is not a topic id (22 characters of URL-safe base64)")
        return cls(base64.urlsafe_b64decode(text[:22] + "=="))

    @classmethod
    def random(cls, randomness: Randomness) -> TopicId:
        """A new id. Like Kafka's, it never starts with a dash: command lines would take it for an option."""
        while True:
            topic_id = cls(randomness.uuid().bytes)
            if not str(topic_id).startswith("-"):
                return topic_id


# -- offset checkpoints ------------------------------------------------------------------------------


def read_offsets(path: Path, *, files: Files) -> Offsets:
    """(topic, partition) → offset; empty when the file is missing or empty."""
    return dict(parse_checkpoint(_read(path, files), _offset_line, path=path))


def write_offsets(path: Path, offsets: Mapping[tuple[str, int], int], *, files: Files) -> None:
    """Replace the checkpoint, sorted, on the disk when this returns."""
    for (topic, partition), offset in offsets.items():
        if not topic or any(character.isspace() for character in topic) or partition < 0 or offset < 0:
            raise InvalidError(f"{path}: cannot write {topic!r} {partition} {offset}")
    lines = [f"{topic} {partition} {offset}" for (topic, partition), offset in sorted(offsets.items())]
    files.publish(path, checkpoint_text(lines))


def checkpoint_text(lines: Iterable[str]) -> bytes:
    """Version, number of lines, lines."""
    listed = list(lines)
    return "".join(f"{line}\n" for line in ("0", len(listed), *listed)).encode("utf-8")


def parse_checkpoint(
    data: bytes, parse_line: Callable[[list[str]], Line | None], *, path: Path
) -> list[Line]:
    """The lines behind version and count; `parse_line` gets a line's fields, None from it means malformed."""
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
    """A decimal integer in [low, high], None for anything else, however long."""
    if not _INTEGER.fullmatch(text):
        return None
    value = int(text)
    return value if low <= value <= high else None


# -- partition.metadata ------------------------------------------------------------------------------


def read_topic_id(folder: Path, *, files: Files) -> TopicId | None:
    """The topic id of a partition folder, None when it has no `partition.metadata`."""
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
    """Give the partition folder its topic id; a different one that is there already is a `ConflictError`."""
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
    """Whether everything in the log folder was closed cleanly; only the marker's existence counts."""
    return files.exists(log_folder / CLEAN_SHUTDOWN)


def write_clean_shutdown(log_folder: Path, *, files: Files, broker_epoch: int = -1) -> None:
    """Write the marker; the last thing of a clean shutdown."""
    text = f'{{"version":0,"brokerEpoch":{broker_epoch}}}'
    files.publish(log_folder / CLEAN_SHUTDOWN, text.encode("ascii"))


def remove_clean_shutdown(log_folder: Path, *, files: Files) -> bool:
    """Take the marker away, for good when this returns; whether there was one. The first thing of opening."""
    path = log_folder / CLEAN_SHUTDOWN
    if not files.exists(path):
        return False
    files.unlink(path, missing_ok=True)
    files.sync_folder(log_folder)
    return True


# -- inside ------------------------------------------------------------------------------------------


def read_text_file(path: Path, *, files: Files) -> bytes:
    """The bytes of a checkpoint, empty when it is missing, refused when absurdly long."""
    return _read(path, files)


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
