"""Group commit: callers that sync the log at the same time share one fsync, and a failed fsync is final.

`GroupCommit` keeps the durable point of a partition (everything before it is on disk) and decides which caller
syncs. The first caller whose target is not reached becomes the leader and syncs; callers that arrive
meanwhile wait. When the leader is done, either their target is reached, too, or one of them leads the next
round. `sync_segments` syncs the files of one round.

Invariants:
Y1  the durable point never passes what a successful sync covered; truncating the log lowers it, and a sync that
    was running during a truncation does not raise it again;
Y2  after a failed sync nothing becomes durable any more: the state of the kernel's pages is unknown.

Thread rule: any thread. The sync itself runs without this object's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from tidegate.errors import UnavailableError
from tidegate.files import Files
from tidegate.log.fetch import LogPoint, LogView
from tidegate.log.producer_state import ProducerStates
from tidegate.log.segment import LogSegment

PATIENCE_SECONDS: Final = 300.0


class GroupCommit:
    """Shares syncs between callers; `sync` syncs everything written so far and returns the point it covered."""

    def __init__(self, durable: LogPoint, sync: Callable[[], LogPoint], *, where: str) -> None:
        self._sync = sync
        self._where = where
        self._changed = threading.Condition()
        self._durable = durable
        self._is_syncing = False
        self._cuts = 0
        self._failure: str | None = None

    @property
    def durable(self) -> LogPoint:
        return self._durable

    @property
    def failure(self) -> str | None:
        """Why nothing can become durable any more; None if no sync failed."""
        return self._failure

    def reach(self, target: int, *, anyway: bool = False) -> LogPoint:
        """Return once everything before offset `target` is on disk; `anyway` syncs even if it is already."""
        while True:
            with self._changed:
                self.require_sound()
                if self._durable.offset >= target and not anyway:
                    return self._durable
                if self._is_syncing:
                    self._wait_for_leader()
                    continue
                self._is_syncing = True
                cuts = self._cuts
            self._lead(cuts)
            anyway = False

    def lower(self, point: LogPoint) -> None:
        """Lower the durable point after a truncation: nothing from this offset on is durable (Y1)."""
        with self._changed:
            self._cuts += 1
            if point.offset < self._durable.offset:
                self._durable = point

    def raise_to(self, point: LogPoint) -> None:
        """Raise the durable point: everything before `point` is known to be on disk, or was removed on purpose."""
        with self._changed:
            if point.offset > self._durable.offset:
                self._durable = point

    def fail(self, reason: str) -> None:
        """Mark the partition as failed: nothing becomes durable from here on (Y2)."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def require_sound(self) -> None:
        if self._failure is not None:
            raise UnavailableError(
                f"{self._where} is read-only since a failed sync: {self._failure}; check the disk, then close "
                f"and reopen the log (what was acknowledged before is safe)",
                kafka_name="KAFKA_STORAGE_ERROR",
            )

    def _lead(self, cuts: int) -> None:
        try:
            covered = self._sync()
        except BaseException as error:
            with self._changed:
                self._is_syncing = False
            self.fail(str(error) or type(error).__name__)
            raise
        with self._changed:
            self._is_syncing = False
            if cuts == self._cuts and covered.offset >= self._durable.offset:
                self._durable = covered
            self._changed.notify_all()

    def _wait_for_leader(self) -> None:
        if not self._changed.wait(PATIENCE_SECONDS):
            raise UnavailableError(
                f"{self._where}: a sync has taken more than {PATIENCE_SECONDS:.0f} s; the disk hangs or is "
                f"overloaded; nothing was acknowledged",
                kafka_name="KAFKA_STORAGE_ERROR",
            )


def sync_segments(
    view: LogView,
    durable: int,
    finished: Sequence[LogSegment],
    files: Files,
    producers: ProducerStates,
    is_current: Callable[[LogSegment], bool],
) -> None:
    """Sync what was written since offset `durable`, and the segments that were finished since.

    Of finished segments every file and producer snapshot is synced, because recovery does not read them again
    after a crash; of the active one only the batches, because the rest is rebuilt from them. If files were created,
    the folder is synced, too.
    """
    active = view.segments.last
    written = {segment.base_offset: segment for segment in view.segments.between(durable, view.end.offset)}
    written.update((segment.base_offset, segment) for segment in finished)
    for base in sorted(written):
        segment = written[base]
        try:
            if segment is active:
                segment.sync_log()
            else:
                segment.sync()
        except FileNotFoundError:
            if is_current(segment):  # else it left the log meanwhile
                raise
    for segment in finished:
        base_after = view.segments.next_base(segment.base_offset)
        snapshot = None if base_after is None else producers.snapshots.existing_path(base_after)
        if snapshot is not None:
            # A missing snapshot was not needed, or was removed with its segment meanwhile.
            with suppress(FileNotFoundError), files.open(snapshot, write=True) as file:
                file.sync()
    if finished or any(base >= durable for base in written):
        files.sync_folder(active.folder)
