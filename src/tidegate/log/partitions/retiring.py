"""How log segments leave a partition folder, and how compacted ones take their place.

Owns the choreography of names; it does not decide which segments go (`retention`, `compaction`, `partition`).

Leaving: files and the producer snapshot of the same base are renamed `*.deleted` at once and unlinked after
`file.delete.delay.ms`, so that a reader in the middle of one is not disturbed. Whatever is still there when the
log is opened next is removed then.

Swapping: new segments come as `*.cleaned`, finished and synced. They are renamed `*.swap` in descending order
of base, the old ones leave, the new ones get their final names, the folder is synced. A crash before the last
`.swap` rename undoes the swap at the next start, a crash after it completes it (see `loading`).

Thread rule: called under the partition's lock.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from tidegate.errors import TidegateError, TidegateWarning
from tidegate.files import Files
from tidegate.log.producers.producer_state import ProducerStates
from tidegate.log.segments.file_names import DELETED, SWAP
from tidegate.log.segments.segment import LogSegment
from tidegate.scheduling import Scheduler


class Retirement:
    """Takes segments of one partition out of its folder."""

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

        A rename that fails is raised if the names are needed or must not be found again (`is_urgent`); else the
        files are unlinked under the names they have.
        """
        leftovers: list[Path] = []
        for segment in segments:
            try:
                if segment.suffix != DELETED:
                    segment.change_suffix(DELETED)
                if not keep_snapshots:
                    snapshot = self._producers.mark_snapshot_deleted(segment.base_offset)
                    if snapshot is not None:
                        leftovers.append(snapshot)
            except TidegateError:
                if is_urgent:
                    raise
        if segments:
            retired = tuple(segments)
            self._scheduler.after(delay_ms, lambda: self._unlink(retired, leftovers), "delete-file")

    def stage(self, new: Sequence[LogSegment]) -> None:
        """Give finished `.cleaned` segments their `.swap` names, or remove them all."""
        try:
            for segment in sorted(new, key=lambda segment: segment.base_offset, reverse=True):
                segment.change_suffix(SWAP)
        except TidegateError:
            for segment in sorted(new, key=lambda segment: segment.base_offset, reverse=True):
                segment.delete()
            raise

    def swap(self, staged: Sequence[LogSegment], old: Sequence[LogSegment], delay_ms: int) -> None:
        """Put `staged` segments where `old` ones were."""
        # The .swap names must be on the disk before an old file goes: only a complete set survives a crash.
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
        """Leave what is waiting to be unlinked to the next start of the log."""
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
