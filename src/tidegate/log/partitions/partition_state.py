"""The mutable heart of one partition: its view, its offsets, and who is told when they move.

Owns the offsets that matter (log start, high watermark, last stable offset, log end, durable point) and keeps
them in order. The steps that change the log work on this: `partition` appends, `reshaping` rolls, cuts and
removes. It touches no file itself.

Invariants:
P1  log start ≤ last stable offset ≤ high watermark ≤ log end, and durable point ≤ log end;
P2  `view` is replaced as a whole, so that whoever takes it sees one moment;
P3  after a failed sync, or a change of files that stopped half-way, nothing is written or acknowledged any
    more until the log is reopened.

Thread rule: changes hold `lock` (re-entrant); `view` may be taken by anyone at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.errors import CorruptError, InvalidError, OffsetOutOfRangeError, UnavailableError
from tidegate.files import Bytes
from tidegate.log.format.batch import BatchHeader
from tidegate.log.partitions.fetching import LogPoint, LogView
from tidegate.log.partitions.loading import LoadedLog, Ports
from tidegate.log.partitions.retiring import Retirement
from tidegate.log.partitions.syncing import GroupCommit, sync_segments
from tidegate.log.segments.segment import LogSegment
from tidegate.log.segments.segment_list import SegmentList
from tidegate.log.topics.topic_config import TopicConfig


@dataclass(slots=True)
class Hooks:
    """Lists of callables, told after the fact and under the partition's lock: they should be quick."""

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
    """What the steps of one partition share."""

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
        self.retirement = Retirement(folder, self.producers, files=ports.files, scheduler=ports.scheduler)
        self.finished: list[LogSegment] = []  # rolled, not synced since
        active = loaded.segments.last
        end = LogPoint(loaded.log_end, active.base_offset, active.size)
        durable = end if loaded.recovery_point >= loaded.log_end else LogPoint(loaded.recovery_point)
        self.commit = GroupCommit(durable, self._sync, where=self.where)
        self.view = LogView(
            loaded.segments, loaded.log_start, end, LogPoint(loaded.log_start), None, self.where
        )

    # -- guards ----------------------------------------------------------------------------------

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
        """A change of several files: stopped half-way, it leaves the log readable but not writable (P3)."""
        with self.lock:
            self.require_writable()
            try:
                yield
            except BaseException as error:
                self.commit.fail(f"{doing} stopped half-way ({error})")
                raise

    @contextmanager
    def changing_names(self) -> Iterator[None]:
        """Around every renaming of segment files, for readers in other processes."""
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
        """Where recovery after a crash begins: batches before it are on the disk, and so are the indexes of
        the segments before the one it lies in."""
        return min((self.commit.durable.offset, *(segment.base_offset for segment in self.finished)))

    def extend(self, segment: LogSegment, position: int, data: Bytes, header: BatchHeader) -> None:
        """A batch was written: the log ends after it now."""
        view = self.view
        end = LogPoint(header.next_offset, segment.base_offset, position + header.size)
        self.view = LogView(
            view.segments, view.log_start, end, view.high_watermark, self._first_unstable(), view.where
        )
        for hook in self.hooks.on_append:
            hook(segment, position, data, header)

    def set_segments(self, segments: SegmentList, log_end: int) -> None:
        """The list of segments changed, and perhaps where the log ends."""
        active = segments.last
        end = LogPoint(log_end, active.base_offset, active.size)
        watermark = self.view.high_watermark
        # A point in a segment that was cut, swapped or removed no longer stands for a position.
        watermark = end if watermark.offset >= log_end else LogPoint(watermark.offset)
        self.finished = [segment for segment in self.finished if segments.get(segment.base_offset) is segment]
        self.view = self.view._replace(segments=segments, end=end, high_watermark=watermark)

    def move_high_watermark(self, point: LogPoint) -> None:
        self.producers.on_high_watermark(point.offset)
        self.view = self.view._replace(high_watermark=point, first_unstable=self._first_unstable())
        self.tell_progress()

    def raise_log_start(self, offset: int) -> bool:
        """Forget everything before `offset`; whether that was news."""
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
        """The log was cut: offsets that lay beyond its end come back to it."""
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
        self.is_progress_told = False  # until every hook was told: one may fail, and is told again then
        for hook in self.hooks.on_acknowledged:
            hook(view.high_watermark.offset, view.log_start, self.recovery_point)
        self.is_progress_told = True

    # -- the disk --------------------------------------------------------------------------------

    def flush(self) -> None:
        """Everything written so far is on the disk when this returns."""
        self.commit.reach(self.view.end.offset, anyway=bool(self.finished))

    def _sync(self) -> LogPoint:
        """Bring everything from the durable point on to the disk; runs without the lock."""
        finished, view = tuple(self.finished), self.view
        sync_segments(
            view, self.commit.durable.offset, finished, self.ports.files, self.producers, self._is_current
        )
        for segment in finished:
            with suppress(ValueError):  # it left the log meanwhile
                self.finished.remove(segment)
        return view.end

    def settle(self) -> None:
        """Snapshot at the log end, every file at its final length and on the disk."""
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
