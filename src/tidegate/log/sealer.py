"""Write seals at every roll, at a clean close and after compaction; remove them before their files change.

`Sealer` attaches itself to one partition's hooks. The `.log` checksums of the active segment grow with every
append, so sealing a full segment reads only its small index files.

Invariants:
L4  the active segment has no seal while it may be written: it is removed, and the removal synced, before the
    partition is opened for writing; so a seal on the last segment means "closed cleanly, unchanged since";
L5  the seal of a segment that leaves the log is removed with it.

Thread rule: hooks run under the partition's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tidegate.errors import CorruptError
from tidegate.files import Bytes, Files
from tidegate.log.format.batch import NO_TIMESTAMP, BatchHeader
from tidegate.log.format.partition_files import INDEX_SUFFIXES, LOG, SEAL, offset_file, offsets_of
from tidegate.log.partition import PartitionLog
from tidegate.log.seals import (
    BlockSums,
    FileSum,
    Seal,
    last_block_matches,
    mismatches,
    read_seal,
    sum_file,
    write_seal,
)
from tidegate.log.segment import LogSegment


@dataclass(slots=True)
class Tally:
    """The facts of a segment that a seal stores next to checksums, in its order; updated batch by batch."""

    next_offset: int
    records: int = 0
    batches: int = 0
    first_timestamp: int = NO_TIMESTAMP
    max_timestamp: int = NO_TIMESTAMP
    max_timestamp_offset: int = 0

    @classmethod
    def of_seal(cls, seal: Seal) -> Tally:
        return cls(*(getattr(seal, each.name) for each in fields(cls)))

    def add(self, header: BatchHeader) -> None:
        if self.batches == 0:
            self.first_timestamp = header.max_timestamp
        if header.max_timestamp > self.max_timestamp:
            self.max_timestamp, self.max_timestamp_offset = header.max_timestamp, header.last_offset
        self.batches += 1
        self.records += 0 if header.is_control else header.count
        self.next_offset = header.next_offset


class Sealer:
    """Writes the seals of one partition; made before the partition is written to."""

    def __init__(self, log: PartitionLog, files: Files, end: Seal | None = None) -> None:
        """Attach to the partition's hooks. Remove the seals of missing segments and of the active one (L4).

        `end` is the seal of the active segment, if it was removed already (`seal_of_end`).
        """
        self._log = log
        self._files = files
        self._folder = log.folder
        self._sums, self._tally = self._take_up(log.active_segment, end)
        self._remove_strays()
        hooks = log.hooks
        hooks.on_append.append(self._appended)
        hooks.on_roll.append(self._rolled)
        hooks.on_truncate.append(self._truncated)
        hooks.on_segment_added.append(self._added)
        hooks.on_segment_removed.append(self._removed)
        hooks.on_close.append(self._closed)

    # -- hooks of the partition ------------------------------------------------------------------

    def _appended(self, segment: LogSegment, position: int, data: Bytes, header: BatchHeader) -> None:
        self._sums.update(data)
        self._tally.add(header)

    def _rolled(self, finished: LogSegment) -> None:
        self._write(finished.base_offset, self._sums.sum(), self._tally)
        self._sums, self._tally = BlockSums(), _new_tally(self._log.active_segment.base_offset)

    def _truncated(self, active: LogSegment) -> None:
        self._remove(active.base_offset)
        self._sums, self._tally = _measure(active, self._files)

    def _added(self, segment: LogSegment) -> None:
        sums, tally = _measure(segment, self._files)
        self._write(segment.base_offset, sums.sum(), tally)

    def _removed(self, segment: LogSegment, reason: str) -> None:
        self._remove(segment.base_offset)

    def _closed(self, segments: Sequence[LogSegment]) -> None:
        self._write(segments[-1].base_offset, self._sums.sum(), self._tally)

    def _take_up(self, active: LogSegment, end: Seal | None) -> tuple[BlockSums, Tally]:
        """Return the sums and counts of the active segment: continue from its seal, or read the segment."""
        with suppress(CorruptError):
            is_end = end is not None and end.base_offset == active.base_offset
            seal = end if is_end else read_seal(self._files, self._folder, active.base_offset)
            if seal is not None and seal.files[LOG].size == active.size:
                return BlockSums(seal.files[LOG]), Tally.of_seal(seal)
        return _measure(active, self._files)

    def _remove_strays(self) -> None:
        living = {segment.base_offset for segment in self._log.segments[:-1]}
        for base in set(offsets_of(self._files.list(self._folder), SEAL)) - living:
            self._remove(base)

    def _remove(self, base_offset: int) -> None:
        remove_seal(self._files, self._folder, base_offset)

    def _write(self, base_offset: int, log_sum: FileSum, tally: Tally) -> None:
        _write_seal(self._files, self._folder, base_offset, log_sum, tally)


def seal_of_end(files: Files, folder: Path, base_offset: int) -> Seal | None:
    """Return the seal of the last segment, if its index files and the end of its `.log` match it.

    The end is the last block of up to 64 KiB: after a power failure a file can have its length but not its bytes,
    and new batches must not be written after a hole.
    """
    try:
        seal = read_seal(files, folder, base_offset)
    except CorruptError:
        return None
    if seal is None or mismatches(files, folder, seal, INDEX_SUFFIXES):
        return None
    path = offset_file(folder, base_offset, LOG)
    return seal if last_block_matches(files, path, seal.files[LOG]) else None


def remove_seal(files: Files, folder: Path, base_offset: int) -> None:
    """Remove the seal of a segment whose files are about to change."""
    path = offset_file(folder, base_offset, SEAL)
    if files.exists(path):
        files.unlink(path, missing_ok=True)
        files.sync_folder(folder)


def seal_as_found(files: Files, folder: Path, segment: LogSegment) -> Seal:
    """Accept a segment as it is on disk: read it and write its seal."""
    sums, tally = _measure(segment, files)
    return _write_seal(files, folder, segment.base_offset, sums.sum(), tally)


def _measure(segment: LogSegment, files: Files) -> tuple[BlockSums, Tally]:
    """Compute sums and counts by reading the segment."""
    found = sum_file(files, segment.path, limit=segment.size)
    tally = _new_tally(segment.base_offset)
    for _, header in segment.batches():
        tally.add(header)
    return BlockSums(found), tally


def _new_tally(base_offset: int) -> Tally:
    return Tally(base_offset, max_timestamp_offset=base_offset)


def _write_seal(files: Files, folder: Path, base_offset: int, log_sum: FileSum, tally: Tally) -> Seal:
    sums = {LOG: log_sum}
    for suffix in INDEX_SUFFIXES:
        found = sum_file(files, offset_file(folder, base_offset, suffix))
        if found is not None:
            sums[suffix] = found
    seal = Seal(base_offset=base_offset, files=sums, **asdict(tally))
    write_seal(files, folder, seal)
    return seal
