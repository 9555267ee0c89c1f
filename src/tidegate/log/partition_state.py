"""The mutable state of one partition: its view, its offsets, its hooks, and changes of its list of segments.

`PartitionState` keeps log start, high watermark, last stable offset, log end and durable point in order, and
calls the hooks when they move. It rolls, cuts the end, drops the start and swaps in compacted segments; its callers
(`segment_roll`, `retention`, `compaction`) decide which segments. These changes run under the lock.

A roll makes the new segment before it finishes the old one, and dropping old segments only renames, so that a
full disk leaves a working log. Cutting and swapping change several files: a failure half-way leaves the
log read-only, and reopening it finishes or undoes the change.

Invariants:
P1  log start ≤ last stable offset ≤ high watermark ≤ log end, and durable point ≤ log end;
P2  `view` is replaced as a whole, so that a reader sees a consistent state;
P3  after a failed sync, or a change of files that failed half-way, nothing is written or acknowledged until
    the log is reopened.

Thread rule: changes hold `lock` (re-entrant); `view` may be read by any thread at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.errors import ConflictError, CorruptError, InvalidError, OffsetOutOfRangeError, UnavailableError
from tidegate.files import Bytes
from tidegate.log.fetch import LogPoint, LogView
from tidegate.log.format.batch import BatchHeader
from tidegate.log.format.partition_files import DELETED, INDEX_SUFFIXES, LOG, offset_file
from tidegate.log.group_commit import GroupCommit, sync_segments
from tidegate.log.producer_state import rebuild_producers
from tidegate.log.recovery import LoadedLog, Ports
from tidegate.log.segment import LogSegment, SegmentList
from tidegate.log.segment_swap import Retirement
from tidegate.log.topic_config import TopicConfig

TRUNCATION = "truncation"
COMPACTION = "compaction"


@dataclass(slots=True)
class Hooks:
    """Lists of callables, called after the event and under the partition's lock; they must be quick."""

    on_append: list[Callable[[LogSegment, int, Bytes, BatchHeader], object]] = field(default_factory=list)
    """(segment, position, bytes of the batch, its header)"""
    on_acknowledged: list[Callable[[int, int, int], object]] = field(default_factory=list)
    """(high watermark, log start, durable end), whenever the first or the second moved"""
    on_roll: list[Callable[[LogSegment], object]] = field(default_factory=list)
    """(the segment that is finished now)"""
    on_truncate: list[Callable[[LogSegment], object]] = field(default_factory=list)
    """(the segment that lost its end, and is the active one now)"""
    on_segment_added: list[Callable[[LogSegment], object]] = field(default_factory=list)
    """(a compacted segment that took its place)"""
    on_segment_removed: list[Callable[[LogSegment, str], object]] = field(default_factory=list)
    """(a segment that left the log, why)"""
    on_segments_changing: list[Callable[[], object]] = field(default_factory=list)
    """() before segment files get other names"""
    on_segments_changed: list[Callable[[], object]] = field(default_factory=list)
    """() when they have them, or when that stopped half-way"""
    on_close: list[Callable[[Sequence[LogSegment]], object]] = field(default_factory=list)
    """(all segments), at a clean close, when every file has its final length"""


class PartitionState:
    """The offsets, segments, hooks and lock that the steps of one partition share."""

    def __init__(self, folder: Path, config: TopicConfig, ports: Ports, loaded: LoadedLog) -> None:
        self.folder = folder
        self.where = folder.name
        self.config = config
        self.ports = ports
        self.epochs = loaded.epochs
        self.producers = loaded.producers
        self.hooks = Hooks()
        self.lock = threading.RLock()
        self.read_only = loaded.read_only
        self.is_closed = False
        self.is_progress_told = True
        self._is_sync_planned = False
        self.retirement = Retirement(folder, self.producers, files=ports.files, scheduler=ports.scheduler)
        self.finished: list[LogSegment] = []  # rolled, not synced since
        active = loaded.segments.last
        end = LogPoint(loaded.log_end, active.base_offset, active.size)
        durable = end if loaded.recovery_point >= loaded.log_end else LogPoint(loaded.recovery_point)
        self.commit = GroupCommit(durable, self._sync, where=self.where)
        self.view = LogView(
            loaded.segments, loaded.log_start, end, LogPoint(loaded.log_start), None, self.where
        )

    # -- checks ----------------------------------------------------------------------------------

    def require_open(self) -> None:
        if self.is_closed:
            raise InvalidError(f"{self.where} is closed; open the log again")

    def require_writable(self) -> None:
        """Raise unless the log may be changed (P3)."""
        self.require_open()
        self.commit.require_sound()
        if self.read_only is not None:
            raise CorruptError(
                f"{self.where} is read-only: {self.read_only}",
                path=self.folder,
                kafka_name="KAFKA_STORAGE_ERROR",
            )

    @contextmanager
    def whole_or_read_only(self, doing: str) -> Iterator[None]:
        """Wrap a change of several files; if it fails half-way, the log becomes read-only (P3)."""
        with self.lock:
            self.require_writable()
            try:
                yield
            except BaseException as error:
                self.commit.fail(f"{doing} stopped half-way ({error})")
                raise

    @contextmanager
    def changing_names(self) -> Iterator[None]:
        """Wrap every renaming of segment files, for readers in other processes."""
        for hook in self.hooks.on_segments_changing:
            hook()
        try:
            yield
        finally:
            for hook in self.hooks.on_segments_changed:
                hook()

    # -- offsets ---------------------------------------------------------------------------------

    @property
    def recovery_point(self) -> int:
        """The offset where recovery after a crash begins: earlier batches are on disk, and so are the indexes of all
        segments before the one that holds it.
        """
        return min((self.commit.durable.offset, *(segment.base_offset for segment in self.finished)))

    def extend(self, segment: LogSegment, position: int, data: Bytes, header: BatchHeader) -> None:
        """Advance the log end after a batch was written."""
        view = self.view
        end = LogPoint(header.next_offset, segment.base_offset, position + header.size)
        self.view = LogView(
            view.segments, view.log_start, end, view.high_watermark, self._first_unstable(), view.where
        )
        for hook in self.hooks.on_append:
            hook(segment, position, data, header)

    def set_segments(self, segments: SegmentList, log_end: int) -> None:
        """Replace the list of segments and set the log end."""
        active = segments.last
        end = LogPoint(log_end, active.base_offset, active.size)
        watermark = self.view.high_watermark
        # A LogPoint in a segment that was cut, swapped or removed has no valid position any more.
        watermark = end if watermark.offset >= log_end else LogPoint(watermark.offset)
        self.finished = [segment for segment in self.finished if segments.get(segment.base_offset) is segment]
        self.view = self.view._replace(segments=segments, end=end, high_watermark=watermark)

    def move_high_watermark(self, point: LogPoint) -> None:
        self.producers.on_high_watermark(point.offset)
        self.view = self.view._replace(high_watermark=point, first_unstable=self._first_unstable())
        self.tell_progress()

    def raise_log_start(self, offset: int) -> bool:
        """Raise the log start to `offset`; return whether it moved."""
        view = self.view
        if offset > view.high_watermark.offset:
            raise OffsetOutOfRangeError(
                f"{self.where} cannot start at {offset}, beyond the high watermark {view.high_watermark.offset}",
                offset=offset,
                first=view.log_start,
                end=view.high_watermark.offset,
            )
        if offset <= view.log_start:
            return False
        with suppress(UnavailableError):  # old epochs do no harm, and a full disk must not stop retention
            self.epochs.truncate_from_start(offset)
        self.producers.on_log_start_incremented(offset)
        self.view = view._replace(log_start=offset)
        self.view = self.view._replace(first_unstable=self._first_unstable())
        self.commit.raise_to(LogPoint(offset))
        self.tell_progress()
        return True

    def restart_at(self, log_start: int) -> None:
        """Bring offsets that lie beyond the end of a truncated log back to its end."""
        view = self.view
        self.commit.lower(view.end)
        self.producers.on_high_watermark(view.high_watermark.offset)
        self.view = view._replace(log_start=log_start)
        self.view = self.view._replace(first_unstable=self._first_unstable())
        self.tell_progress()

    def _first_unstable(self) -> int | None:
        offset = self.producers.first_unstable_offset
        return None if offset is None else max(offset, self.view.log_start)

    def tell_progress(self) -> None:
        view = self.view
        self.is_progress_told = False  # until every hook was called: one may fail, and is called again later
        for hook in self.hooks.on_acknowledged:
            hook(view.high_watermark.offset, view.log_start, self.recovery_point)
        self.is_progress_told = True

    # -- syncing ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Sync everything written so far to disk."""
        self.commit.reach(self.view.end.offset, anyway=bool(self.finished))

    def _sync(self) -> LogPoint:
        """Sync everything from the durable point on; runs without the lock."""
        finished, view = tuple(self.finished), self.view
        sync_segments(
            view, self.commit.durable.offset, finished, self.ports.files, self.producers, self._is_current
        )
        for segment in finished:
            with suppress(ValueError):  # the file left the log meanwhile
                self.finished.remove(segment)
        return view.end

    def settle(self) -> None:
        """Take a snapshot at the log end, and sync every file at its final length."""
        with self.whole_or_read_only("closing it"):
            segments = self.view.segments
            self.producers.take_snapshot()
            segments.last.become_inactive()
            for segment in segments.between(self.recovery_point, self.view.end.offset + 1):
                segment.sync()
            for hook in self.hooks.on_close:
                hook(segments.segments)
            self.ports.files.sync_folder(self.folder)
            self.commit.raise_to(self.view.end)

    def _is_current(self, segment: LogSegment) -> bool:
        return self.view.segments.get(segment.base_offset) is segment

    # -- rolling ---------------------------------------------------------------------------------

    def roll(self, first_offset: int = 0) -> LogSegment:
        """Finish the active segment and return the new one, at the log end or at `first_offset` beyond it."""
        view = self.view
        active, base = view.segments.last, max(first_offset, view.end.offset)
        if active.base_offset > base or (active.base_offset == base and active.size > 0):
            raise InvalidError(f"{self.where}: a log segment at {base} cannot follow {active}")
        if active.base_offset == base:
            with self.changing_names():
                fresh = self._recreate(active)
            segments = view.segments.with_segments([fresh])
        else:
            fresh = self._follow(active, base)
            segments = view.segments.appended(fresh)
        self.set_segments(segments, view.end.offset)
        if active.base_offset != base:
            self.finished.append(active)
            self._plan_sync()
            for hook in self.hooks.on_roll:
                hook(active)
        self.producers.update_map_end_offset(base)
        self.producers.take_snapshot(sync=False)
        return fresh

    def _follow(self, active: LogSegment, base: int) -> LogSegment:
        for kind in (LOG, *INDEX_SUFFIXES):
            leftover = offset_file(self.folder, base, kind)
            if self.ports.files.exists(leftover):
                self.ports.files.unlink(leftover, missing_ok=True)
        fresh = self._create(base)
        try:
            active.become_inactive()
        except BaseException:
            fresh.delete()
            raise
        return fresh

    def _recreate(self, empty: LogSegment) -> LogSegment:
        """Recreate an empty segment whose index is full (it may have been truncated to nothing)."""
        empty.change_suffix(DELETED)
        try:
            fresh = self._create(empty.base_offset)
        except BaseException:
            empty.change_suffix("")
            raise
        self.retirement.retire([empty], self.config.file_delete_delay_ms, keep_snapshots=True)
        return fresh

    def _create(self, base: int) -> LogSegment:
        ports = self.ports
        return LogSegment(
            self.folder,
            base,
            self.config,
            files=ports.files,
            clock=ports.clock,
            randomness=ports.randomness,
        ).create()

    def _plan_sync(self) -> None:
        """Schedule a sync of finished segments, independently of acknowledgements."""
        if not self._is_sync_planned:
            self._is_sync_planned = True
            self.ports.scheduler.after(0, self._sync_finished, "flush-log")

    def _sync_finished(self) -> None:
        self._is_sync_planned = False
        if self.finished and not self.is_closed and self.commit.failure is None:
            self.flush()

    # -- truncation ------------------------------------------------------------------------------

    def truncate_to(self, offset: int) -> bool:
        """Drop every batch that reaches `offset` or beyond; the log then ends there. Return whether any existed."""
        view = self.view
        if offset < 0:
            raise InvalidError(f"{self.where} cannot be cut at {offset}")
        if offset >= view.end.offset:
            self.epochs.truncate_from_end(view.end.offset)
            return False
        with self.whole_or_read_only(f"cutting it at offset {offset}"), self.changing_names():
            if offset < view.segments.first.base_offset:
                self._restart(offset)
            else:
                self._cut(offset)
        return True

    def truncate_fully(self, offset: int) -> None:
        """Drop everything; the log starts and ends at `offset`."""
        with self.whole_or_read_only(f"restarting it at offset {offset}"), self.changing_names():
            self._restart(offset)

    def _cut(self, offset: int) -> None:
        view = self.view
        gone = [segment for segment in view.segments if segment.base_offset > offset]
        segments = view.segments.without(gone)
        self.retirement.retire(gone, self.config.file_delete_delay_ms)
        segments.last.truncate_to(offset)
        self.ports.files.sync_folder(self.folder)
        self.epochs.truncate_from_end(offset)
        self.set_segments(segments, offset)
        log_start = min(offset, view.log_start)
        self._rebuild_producers(segments, log_start, offset)
        self.restart_at(log_start)
        self._tell_removed(gone, TRUNCATION)
        for hook in self.hooks.on_truncate:
            hook(segments.last)

    def _restart(self, offset: int) -> None:
        old = self.view.segments.segments
        delay_ms = self.config.file_delete_delay_ms
        for segment in old:
            segment.change_suffix(DELETED)
        segments = SegmentList([self._create(offset)])
        self.retirement.retire(old, delay_ms)
        self.ports.files.sync_folder(self.folder)
        self.epochs.clear()
        self.producers.truncate_fully_and_start_at(offset)
        self.set_segments(segments, offset)
        self.view = self.view._replace(high_watermark=self.view.end)
        self._rebuild_producers(segments, offset, offset)
        self.restart_at(offset)
        self._tell_removed(old, TRUNCATION)
        for hook in self.hooks.on_truncate:
            hook(segments.last)

    def _rebuild_producers(self, segments: SegmentList, log_start: int, end: int) -> None:
        rebuild_producers(
            self.producers,
            segments,
            log_start=log_start,
            end=end,
            clean=False,
            now_ms=self.ports.clock.now_ms(),
        )

    # -- dropping the start, swapping ------------------------------------------------------------

    def delete_segments(self, segments: Sequence[LogSegment], reason: str) -> int:
        """Remove the oldest segments and return how many. If those are all, an empty one is rolled first."""
        going = [segment for segment in segments if self.view.segments.get(segment.base_offset) is segment]
        if not going:
            return 0
        if len(going) == len(self.view.segments):
            self.roll()
            # Rolling recreated an empty active segment at the same base.
            going = [segment for segment in going if self.view.segments.get(segment.base_offset) is segment]
        count = len(going)
        if going:
            survivors = self.view.segments.without(going)
            self.raise_log_start(survivors.first.base_offset)
            self.set_segments(survivors, self.view.end.offset)
            with self.changing_names():
                self.retirement.retire(going, self.config.file_delete_delay_ms, is_urgent=False)
            self._tell_removed(going, reason)
        return count

    def replace_segments(self, new: Sequence[LogSegment], old: Sequence[LogSegment]) -> None:
        """Replace the `old` segments by finished `.cleaned` ones."""
        current = self.view.segments
        if any(current.get(segment.base_offset) is not segment for segment in old):
            raise ConflictError(
                f"{self.where}: a log segment to be replaced has left the log meanwhile; clean again"
            )
        self.retirement.stage(new)
        with self.whole_or_read_only("swapping in compacted segments"), self.changing_names():
            self.retirement.swap(new, old, self.config.file_delete_delay_ms)
            self.set_segments(current.without(old).with_segments(new), self.view.end.offset)
        self._tell_removed(old, COMPACTION)
        for segment in new:
            for hook in self.hooks.on_segment_added:
                hook(segment)

    def _tell_removed(self, segments: Sequence[LogSegment], reason: str) -> None:
        for segment in segments:
            for hook in self.hooks.on_segment_removed:
                hook(segment, reason)
