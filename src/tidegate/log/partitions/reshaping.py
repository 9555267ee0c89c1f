"""Changes of a partition's list of segments: rolling, cutting the end, dropping the start, swapping.

Owns the order of steps of each; which segments are concerned is decided by the caller (`rolling`, `retention`,
`cleaner`). Everything here runs under the partition's lock.

A roll makes the new segment before it finishes the old one, and dropping old segments only renames, so that a
full disk leaves a working log. Cutting and swapping touch several files: one that stops half-way leaves the log
read-only, and reopening it finishes or undoes the change.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.errors import ConflictError, InvalidError
from tidegate.log.partitions.partition_state import PartitionState
from tidegate.log.producers.producer_replay import rebuild_producers
from tidegate.log.segments.file_names import DELETED, INDEX_SUFFIXES, LOG, offset_file
from tidegate.log.segments.segment import LogSegment
from tidegate.log.segments.segment_list import SegmentList

TRUNCATION = "truncation"
COMPACTION = "compaction"


class Reshaping:
    """The segment list of one partition, changed."""

    def __init__(self, state: PartitionState) -> None:
        self._state = state
        self._is_sync_planned = False

    # -- rolling ---------------------------------------------------------------------------------

    def roll(self, first_offset: int = 0) -> LogSegment:
        """Finish the active segment; the new one starts at the log end, or at `first_offset` beyond it."""
        state = self._state
        view = state.view
        active, base = view.segments.last, max(first_offset, view.end.offset)
        if active.base_offset > base or (active.base_offset == base and active.size > 0):
            raise InvalidError(f"{state.where}: a log segment at {base} cannot follow {active}")
        if active.base_offset == base:
            with state.changing_names():
                fresh = self._recreate(active)
            segments = view.segments.with_segments([fresh])
        else:
            fresh = self._follow(active, base)
            segments = view.segments.appended(fresh)
        state.set_segments(segments, view.end.offset)
        if active.base_offset != base:
            state.finished.append(active)
            self._plan_sync()
            for hook in state.hooks.on_roll:
                hook(active)
        state.producers.update_map_end_offset(base)
        state.producers.take_snapshot(sync=False)
        return fresh

    def _follow(self, active: LogSegment, base: int) -> LogSegment:
        state = self._state
        for kind in (LOG, *INDEX_SUFFIXES):
            leftover = offset_file(state.folder, base, kind)
            if state.ports.files.exists(leftover):
                state.ports.files.unlink(leftover, missing_ok=True)
        fresh = self._create(base)
        try:
            active.become_inactive()
        except BaseException:
            fresh.delete()
            raise
        return fresh

    def _recreate(self, empty: LogSegment) -> LogSegment:
        """An empty segment whose index is full (it may have been cut to nothing) makes room for itself."""
        state = self._state
        empty.change_suffix(DELETED)
        try:
            fresh = self._create(empty.base_offset)
        except BaseException:
            empty.change_suffix("")
            raise
        state.retirement.retire([empty], state.config.file_delete_delay_ms, keep_snapshots=True)
        return fresh

    def _create(self, base: int) -> LogSegment:
        state, ports = self._state, self._state.ports
        return LogSegment(
            state.folder,
            base,
            state.config,
            files=ports.files,
            clock=ports.clock,
            randomness=ports.randomness,
        ).create()

    def _plan_sync(self) -> None:
        """A finished segment should reach the disk soon, whoever acknowledges what."""
        if not self._is_sync_planned:
            self._is_sync_planned = True
            self._state.ports.scheduler.after(0, self._sync_finished, "flush-log")

    def _sync_finished(self) -> None:
        self._is_sync_planned = False
        state = self._state
        if state.finished and not state.is_closed and state.commit.failure is None:
            state.flush()

    # -- cutting the end -------------------------------------------------------------------------

    def truncate_to(self, offset: int) -> bool:
        """Drop every batch that reaches `offset` or beyond; whether there was one. The log then ends there."""
        state = self._state
        view = state.view
        if offset < 0:
            raise InvalidError(f"{state.where} cannot be cut at {offset}")
        if offset >= view.end.offset:
            state.epochs.truncate_from_end(view.end.offset)
            return False
        with state.whole_or_read_only(f"cutting it at offset {offset}"), state.changing_names():
            if offset < view.segments.first.base_offset:
                self._restart(offset)
            else:
                self._cut(offset)
        return True

    def truncate_fully(self, offset: int) -> None:
        """Drop everything; the log starts and ends at `offset`."""
        state = self._state
        with state.whole_or_read_only(f"restarting it at offset {offset}"), state.changing_names():
            self._restart(offset)

    def _cut(self, offset: int) -> None:
        state = self._state
        view = state.view
        gone = [segment for segment in view.segments if segment.base_offset > offset]
        segments = view.segments.without(gone)
        state.retirement.retire(gone, state.config.file_delete_delay_ms)
        segments.last.truncate_to(offset)
        state.ports.files.sync_folder(state.folder)
        state.epochs.truncate_from_end(offset)
        state.set_segments(segments, offset)
        log_start = min(offset, view.log_start)
        self._rebuild_producers(segments, log_start, offset)
        state.restart_at(log_start)
        self._tell_removed(gone, TRUNCATION)
        for hook in state.hooks.on_truncate:
            hook(segments.last)

    def _restart(self, offset: int) -> None:
        state = self._state
        old = state.view.segments.segments
        delay_ms = state.config.file_delete_delay_ms
        for segment in old:
            segment.change_suffix(DELETED)
        segments = SegmentList([self._create(offset)])
        state.retirement.retire(old, delay_ms)
        state.ports.files.sync_folder(state.folder)
        state.epochs.clear()
        state.producers.truncate_fully_and_start_at(offset)
        state.set_segments(segments, offset)
        state.view = state.view._replace(high_watermark=state.view.end)
        self._rebuild_producers(segments, offset, offset)
        state.restart_at(offset)
        self._tell_removed(old, TRUNCATION)
        for hook in state.hooks.on_truncate:
            hook(segments.last)

    def _rebuild_producers(self, segments: SegmentList, log_start: int, end: int) -> None:
        state = self._state
        rebuild_producers(
            state.producers,
            segments,
            log_start=log_start,
            end=end,
            clean=False,
            now_ms=state.ports.clock.now_ms(),
        )

    # -- dropping the start, swapping ------------------------------------------------------------

    def delete_segments(self, segments: Sequence[LogSegment], reason: str) -> int:
        """Let the oldest segments go; how many. If those are all, an empty one is rolled first."""
        state = self._state
        going = [segment for segment in segments if state.view.segments.get(segment.base_offset) is segment]
        if not going:
            return 0
        if len(going) == len(state.view.segments):
            self.roll()
            # An empty active segment was made anew by that, at the same base.
            going = [segment for segment in going if state.view.segments.get(segment.base_offset) is segment]
        count = len(going)
        if going:
            survivors = state.view.segments.without(going)
            state.raise_log_start(survivors.first.base_offset)
            state.set_segments(survivors, state.view.end.offset)
            with state.changing_names():
                state.retirement.retire(going, state.config.file_delete_delay_ms, is_urgent=False)
            self._tell_removed(going, reason)
        return count

    def replace_segments(self, new: Sequence[LogSegment], old: Sequence[LogSegment]) -> None:
        """Put finished `.cleaned` segments where `old` ones were."""
        state = self._state
        current = state.view.segments
        if any(current.get(segment.base_offset) is not segment for segment in old):
            raise ConflictError(
                f"{state.where}: a log segment to be replaced has left the log meanwhile; clean again"
            )
        state.retirement.stage(new)
        with state.whole_or_read_only("swapping in compacted segments"), state.changing_names():
            state.retirement.swap(new, old, state.config.file_delete_delay_ms)
            state.set_segments(current.without(old).with_segments(new), state.view.end.offset)
        self._tell_removed(old, COMPACTION)
        for segment in new:
            for hook in state.hooks.on_segment_added:
                hook(segment)

    def _tell_removed(self, segments: Sequence[LogSegment], reason: str) -> None:
        for segment in segments:
            for hook in self._state.hooks.on_segment_removed:
                hook(segment, reason)
