"""What a log says about itself when it is closed, and what opening believes of it.

Per partition, `tidegate.closed`: the sizes of the last log segment's files when the partition was closed
cleanly, one line of JSON and one line `crc32c:<8 hex digits>`. It is removed, and the removal synced, before
anything else in the folder changes; so where it stands and the sizes agree nobody has written since.

Per log folder, Kafka's own files: the offset checkpoints, into which whoever closes partitions merges their
lines, and `.kafka_cleanshutdown`, which stands only while every partition is closed cleanly. Callers hold the
folder's short lock around the functions that change these.

H1  to learn whether a partition was closed cleanly, at most the last 64 KiB of one `.log` are read.
H2  checkpoints are hints: a damaged one counts as empty.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fastcrc import crc32

from tidegate.errors import CorruptError, TidegateWarning
from tidegate.files import Files
from tidegate.log.partitions.checkpoints import (
    CLEANER_OFFSETS,
    CLEANING,
    HIGH_WATERMARKS,
    LOG_STARTS,
    RECOVERY_POINTS,
    Offsets,
    read_offsets,
    write_clean_shutdown,
    write_offsets,
)
from tidegate.log.topics.topics import TopicPartition

CLOSED_NAME = "tidegate.closed"
_MARK_LIMIT_BYTES = 4096
_SEGMENT_FILES = (".log", ".index", ".timeindex", ".txnindex")


class Position(NamedTuple):
    """What the checkpoints keep of one partition."""

    recovery_point: int
    log_start: int
    first_base: int
    high_watermark: int


def was_closed_cleanly(files: Files, partition_folder: Path) -> bool:
    """Whether the sizes are those that the last writer left; whether the bytes are, the seal knows (H1)."""
    closed = _sizes_at_close(files, partition_folder)
    return closed is not None and closed == _last_sizes(files, partition_folder)


def was_changed_since(files: Files, partition_folder: Path) -> bool:
    """Whether somebody who does not keep our marks, a broker say, has written since our clean close."""
    closed = _sizes_at_close(files, partition_folder)
    return closed is not None and closed != _last_sizes(files, partition_folder)


def _sizes_at_close(files: Files, partition_folder: Path) -> dict[str, int] | None:
    """File name → size when the partition was last closed cleanly; None without a sound mark."""
    try:
        stored = files.read(partition_folder / CLOSED_NAME, limit=_MARK_LIMIT_BYTES)
    except FileNotFoundError:
        return None
    line, _, trailer = stored.partition(b"\n")
    if trailer != b"crc32c:%08x\n" % crc32.iscsi(line):
        return None
    sizes: dict[str, int] = json.loads(line)
    return sizes


def forget_closed(files: Files, partition_folder: Path) -> None:
    """The partition is about to change."""
    if files.exists(partition_folder / CLOSED_NAME):
        files.unlink(partition_folder / CLOSED_NAME, missing_ok=True)
        files.sync_folder(partition_folder)


def mark_closed(files: Files, partition_folder: Path) -> None:
    """The partition is closed and synced: the last thing its writer does."""
    line = json.dumps(_last_sizes(files, partition_folder), separators=(",", ":")).encode("ascii")
    files.publish(partition_folder / CLOSED_NAME, line + b"\ncrc32c:%08x\n" % crc32.iscsi(line))


def last_segment_base(files: Files, partition_folder: Path) -> int | None:
    """The base offset of the last log segment, by name; None when there is none."""
    bases = [
        int(name[:20])
        for name in files.list(partition_folder)
        if len(name) == 24 and name.endswith(".log") and name[:20].isdigit()
    ]
    return max(bases, default=None)


def read_checkpoint(files: Files, path: Path) -> Offsets:
    """The offsets of a checkpoint; a damaged one is told and counts as empty (H2)."""
    try:
        return read_offsets(path, files=files)
    except CorruptError as error:
        warnings.warn(TidegateWarning(f"{error}; going on without it"), stacklevel=2)
        return {}


def merge_checkpoints(files: Files, log_folder: Path, positions: Mapping[TopicPartition, Position]) -> None:
    """Put the partitions' lines into Kafka's checkpoint files, leaving everybody else's."""
    recovery = {place: position.recovery_point for place, position in positions.items()}
    watermarks = {place: position.high_watermark for place, position in positions.items()}
    starts = {
        place: position.log_start if position.log_start > position.first_base else None
        for place, position in positions.items()
    }
    for name, lines in ((RECOVERY_POINTS, recovery), (HIGH_WATERMARKS, watermarks), (LOG_STARTS, starts)):
        _merge(files, log_folder / name, lines)


def drop_from_checkpoints(files: Files, log_folder: Path, places: Iterable[TopicPartition]) -> None:
    """Take deleted partitions out of Kafka's checkpoint files."""
    gone: dict[TopicPartition, int | None] = dict.fromkeys(places)
    for name in (RECOVERY_POINTS, HIGH_WATERMARKS, LOG_STARTS, CLEANER_OFFSETS, CLEANING):
        _merge(files, log_folder / name, gone)


def mark_folder_clean(files: Files, log_folder: Path, partition_folders: Iterable[Path]) -> bool:
    """Write `.kafka_cleanshutdown` if every partition is closed (or was never opened); whether it was.

    A partition whose folder is missing was not closed: whoever opens it says so.
    """
    for folder in partition_folders:
        if not files.exists(folder):
            return False
        if not files.exists(folder / CLOSED_NAME) and last_segment_base(files, folder) is not None:
            return False
    write_clean_shutdown(log_folder, files=files)
    return True


def _merge(files: Files, path: Path, lines: Mapping[TopicPartition, int | None]) -> None:
    before = read_checkpoint(files, path)
    after = dict(before)
    for place, offset in lines.items():
        if offset is None:
            after.pop(place, None)
        else:
            after[place] = offset
    if after != before:
        write_offsets(path, after, files=files)


def _last_sizes(files: Files, partition_folder: Path) -> dict[str, int]:
    """File name → size of the last log segment; and of nothing when there is none."""
    base = last_segment_base(files, partition_folder)
    if base is None:
        return {}
    names = [f"{base:020d}{suffix}" for suffix in _SEGMENT_FILES]
    found = {name: files.stat(partition_folder / name) for name in names}
    return {name: known.size for name, known in found.items() if known is not None}
