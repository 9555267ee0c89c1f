"""Remove, replace and split log segments of a partition by renames, so that a crash can be finished or undone.

Removing: files and the producer snapshot of the same base are renamed `*.deleted` at once and unlinked after
`file.delete.delay.ms`. Replacing: new segments are written as `*.cleaned` and synced, renamed `*.swap` in descending
order of base, the old ones are removed, the new ones get their final names, the folder is synced. At start-up
(`finish_interrupted_work`), as in a Kafka 3.9 broker, a swap whose `.cleaned` files are not all `.swap` yet is undone;
one with all `.swap` names is completed, seals of replaced segments first.

Splitting: a segment whose offsets do not fit its indexes (of a very old broker) is split. Every batch stays, in
order; each new segment begins with the batch that did not fit the one before.

Thread rule: called under the partition's lock, or while the log is loaded.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tidegate.errors import CorruptError, TidegateError, TidegateWarning
from tidegate.files import Files
from tidegate.log.format.batch import BatchHeader
from tidegate.log.format.partition_files import CLEANED, DELETED, LOG, SEAL, SWAP, offset_file
from tidegate.log.producer_state import ProducerStates
from tidegate.log.segment import LogSegment
from tidegate.scheduling import Scheduler


class OffsetOverflowError(CorruptError):
    """A segment holds an offset that does not fit its indexes. The loader catches it and splits the segment."""

    def __init__(self, segment: LogSegment, header: BatchHeader, position: int) -> None:
        super().__init__(
            f"{segment.path} holds offset {header.last_offset} at position {position}, too far from its base "
            f"{segment.base_offset}: its header is damaged, or an old broker wrote it",
            path=segment.path,
            position=position,
            offset=header.last_offset,
        )
        self.segment = segment


def split(segment: LogSegment, new_segment: Callable[[int, str], LogSegment]) -> list[LogSegment]:
    """Return finished, synced `.cleaned` segments, made by `new_segment(base, suffix)`, with all of its batches."""
    parts: list[LogSegment] = []
    copied = 0
    try:
        with segment.reader() as file:
            for position, header in segment.batches():
                if not parts or not parts[-1].holds(header.last_offset):
                    parts.append(new_segment(header.base_offset, CLEANED))
                parts[-1].append(file.read_at(position, header.size), header)
                copied = position + header.size
        if copied != segment.size:
            raise CorruptError(
                f"{segment.path} cannot be split: from position {copied} on it holds no batch; move it aside",
                path=segment.path,
                position=copied,
            )
        for part in parts:
            part.become_inactive()
            part.sync()
            part.set_mtime_ms(segment.mtime_ms)
    except BaseException:
        for part in parts:
            part.delete()
        raise
    return parts


class Retirement:
    """Removes and replaces segment files of one partition."""

    def __init__(
        self, folder: Path, producers: ProducerStates, *, files: Files, scheduler: Scheduler
    ) -> None:
        self._folder = folder
        self._producers = producers
        self._files = files
        self._scheduler = scheduler
        self._is_cancelled = False

    def retire(
        self,
        segments: Sequence[LogSegment],
        delay_ms: int,
        *,
        keep_snapshots: bool = False,
        is_urgent: bool = True,
    ) -> None:
        """Rename the files of `segments` (and their snapshots) to `.deleted` and unlink them later.

        A failed rename is raised if the names are needed or must not be found again (`is_urgent`); otherwise the
        files are unlinked under their current names.
        """
        leftovers: list[Path] = []
        for segment in segments:
            try:
                if segment.suffix != DELETED:
                    segment.change_suffix(DELETED)
                if not keep_snapshots:
                    snapshot = self._producers.snapshots.mark_deleted(segment.base_offset)
                    if snapshot is not None:
                        leftovers.append(snapshot)
            except TidegateError:
                if is_urgent:
                    raise
        if segments:
            retired = tuple(segments)
            self._scheduler.after(delay_ms, lambda: self._unlink(retired, leftovers), "delete-file")

    def stage(self, new: Sequence[LogSegment]) -> None:
        """Rename finished `.cleaned` segments to `.swap`, or remove them all."""
        try:
            for segment in sorted(new, key=lambda segment: segment.base_offset, reverse=True):
                segment.change_suffix(SWAP)
        except TidegateError:
            for segment in sorted(new, key=lambda segment: segment.base_offset, reverse=True):
                segment.delete()
            raise

    def swap(self, staged: Sequence[LogSegment], old: Sequence[LogSegment], delay_ms: int) -> None:
        """Replace the `old` segments by the `staged` ones."""
        # The .swap names must be on disk before an old file is removed: only a complete set survives a crash.
        self._files.sync_folder(self._folder)
        taken = {segment.base_offset for segment in staged}
        self.retire([segment for segment in old if segment.base_offset not in taken], delay_ms)
        self.retire(
            [segment for segment in old if segment.base_offset in taken], delay_ms, keep_snapshots=True
        )
        for segment in sorted(staged, key=lambda segment: segment.base_offset):
            segment.change_suffix("")
        self._files.sync_folder(self._folder)

    def cancel(self) -> None:
        """Leave files that wait to be unlinked to the next start of the log."""
        self._is_cancelled = True

    def _unlink(self, segments: Sequence[LogSegment], snapshots: Sequence[Path]) -> None:
        if self._is_cancelled:
            return
        try:
            for segment in segments:
                segment.delete()
            for snapshot in snapshots:
                self._files.unlink(snapshot, missing_ok=True)
        except TidegateError as error:
            warnings.warn(
                f"{self._folder}: files marked .deleted could not be removed yet ({error}); the next start of "
                f"the log removes them",
                TidegateWarning,
                stacklevel=1,
            )


OFFSET_NAME: Final = re.compile(r"([0-9]+)\.(.+)")
_KRAFT_DELETED: Final = ".checkpoint.deleted"


def finish_interrupted_work(
    folder: Path, open_segment: Callable[[int, str], LogSegment], *, files: Files
) -> None:
    """Finish or undo interrupted changes until only final names remain; `open_segment(base, suffix)` opens one."""
    names = files.list(folder)
    cleaned = [name for name in names if name.endswith(CLEANED)]
    first_cleaned = min((_offset_of(name, folder) for name in cleaned), default=None)
    complete: list[str] = []
    incomplete: list[str] = []
    for name in names:
        if name.endswith((DELETED, ".tmp")) and not name.endswith(_KRAFT_DELETED):
            files.unlink(folder / name, missing_ok=True)
        elif name.endswith(SWAP):
            is_complete = first_cleaned is None or _offset_of(name, folder) < first_cleaned
            (complete if is_complete else incomplete).append(name)
    for name in incomplete:
        files.unlink(folder / name, missing_ok=True)
    if incomplete:
        files.sync_folder(folder)  # before the .cleaned files go, which prove these incomplete
    for name in cleaned:
        files.unlink(folder / name, missing_ok=True)
    if complete:
        new = [open_segment(_offset_of(name, folder), SWAP) for name in complete if name.endswith(LOG + SWAP)]
        _complete_swap(folder, complete, new, files)


def _complete_swap(folder: Path, names: list[str], new: list[LogSegment], files: Files) -> None:
    if new:
        taken = {segment.base_offset for segment in new}
        first, stop = min(taken), max(segment.read_next_offset() for segment in new)
        replaced = [
            (int(matched[1]), name)
            for name in files.list(folder)
            if (matched := OFFSET_NAME.fullmatch(name)) and not name.endswith(SWAP)
        ]
        # Seals first: a seal must never lie next to files it was not made for. A replaced segment may
        # be empty, so its own offset may not be below the end of the new ones.
        seals = [base for base, name in replaced if name.endswith(SEAL)]
        for base in seals:
            if base in taken or first <= base < stop:
                files.unlink(offset_file(folder, base, SEAL), missing_ok=True)
        if seals:
            files.sync_folder(folder)
        for base, name in replaced:
            if not name.endswith(SEAL) and first <= base < stop:
                files.unlink(folder / name, missing_ok=True)
    for name in names:
        files.rename(folder / name, folder / name.removesuffix(SWAP))
    files.sync_folder(folder)


def _offset_of(name: str, folder: Path) -> int:
    matched = OFFSET_NAME.fullmatch(name)
    if matched is None:
        raise CorruptError(
            f"{folder / name} has a name no log segment has; move it out of the folder", path=folder / name
        )
    return int(matched[1])
