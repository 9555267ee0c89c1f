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

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

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
from tidegate.log.segments.file_names import LOG, SEGMENT_SUFFIXES, offset_file, offsets_of
from tidegate.log.topics.checksummed_json import checksummed_json, parse_checksummed_json
from tidegate.log.topics.topics import TopicPartition

CLOSED_NAME = "tidegate.closed"
_MARK_LIMIT_BYTES = 4096


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
        sizes: dict[str, int] | None = parse_checksummed_json(
            files.read(partition_folder / CLOSED_NAME, limit=_MARK_LIMIT_BYTES)
        )
    except (FileNotFoundError, ValueError):
        return None
    return sizes


def forget_closed(files: Files, partition_folder: Path) -> None:
    """The partition is about to change."""
    if files.exists(partition_folder / CLOSED_NAME):
        files.unlink(partition_folder / CLOSED_NAME, missing_ok=True)
        files.sync_folder(partition_folder)


def mark_closed(files: Files, partition_folder: Path) -> None:
    """The partition is closed and synced: the last thing its writer does."""
    files.publish(partition_folder / CLOSED_NAME, checksummed_json(_last_sizes(files, partition_folder)))


def last_segment_base(files: Files, partition_folder: Path) -> int | None:
    """The base offset of the last log segment, by name; None when there is none."""
    return max(offsets_of(files.list(partition_folder), LOG), default=None)


def read_checkpoint(files: Files, path: Path) -> Offsets:
    """The offsets of a checkpoint; a damaged one is told and counts as empty (H2)."""
    try:
        return read_offsets(path, files=files)
    except CorruptError as error:
        warnings.warn(TidegateWarning(f"{error}; going on without it"), stacklevel=2)
        return {}


def merge_checkpoints(files: Files, log_folder: Path, positions: Mapping[TopicPartition, Position]) -> None:
    """Put the partitions' lines into Kafka's checkpoint files, leaving everybody else's."""
    lines: dict[str, dict[tuple[str, int], int | None]] = {
        RECOVERY_POINTS: {},
        HIGH_WATERMARKS: {},
        LOG_STARTS: {},
    }
    for place, position in positions.items():
        lines[RECOVERY_POINTS][place] = position.recovery_point
        lines[HIGH_WATERMARKS][place] = position.high_watermark
        inside = position.log_start > position.first_base  # else the folder itself says it
        lines[LOG_STARTS][place] = position.log_start if inside else None
    for name, chosen in lines.items():
        merge_lines(files, log_folder / name, chosen)


def drop_from_checkpoints(files: Files, log_folder: Path, places: Iterable[TopicPartition]) -> None:
    """Take deleted partitions out of Kafka's checkpoint files."""
    gone: dict[tuple[str, int], int | None] = dict.fromkeys(places)
    for name in (RECOVERY_POINTS, HIGH_WATERMARKS, LOG_STARTS, CLEANER_OFFSETS, CLEANING):
        merge_lines(files, log_folder / name, gone)


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


def merge_lines(files: Files, path: Path, lines: Mapping[tuple[str, int], int | None]) -> None:
    """Put these partitions' lines into a checkpoint, leaving everybody else's; None takes one out."""
    before = read_checkpoint(files, path)
    after = {place: offset for place, offset in {**before, **lines}.items() if offset is not None}
    if after != before:
        write_offsets(path, after, files=files)


def _last_sizes(files: Files, partition_folder: Path) -> dict[str, int]:
    """File name → size of the last log segment; and of nothing when there is none."""
    base = last_segment_base(files, partition_folder)
    if base is None:
        return {}
    paths = [offset_file(partition_folder, base, suffix) for suffix in SEGMENT_SUFFIXES]
    found = {path.name: files.stat(path) for path in paths}
    return {name: known.size for name, known in found.items() if known is not None}
