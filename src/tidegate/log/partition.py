"""One partition: an append-only log made of segments, with one writer and many readers.

`PartitionLog` runs the steps of an append in Kafka's order: `append_validation` checks and stamps the batch,
`segment_roll` decides on a roll, `producer_state` checks sequences, `segment` writes. `fetch` reads, `group_commit`
syncs, `recovery` opens the folder. `retention` and `compaction` decide which segments are dropped or replaced.
Locks between processes, checkpoint files and watermark files belong to `open_partitions`, which registers hooks.

A roll makes the new segment before it finishes the old one, and dropping old segments only renames, so that a
full disk leaves a working log. Cutting and swapping change several files: a failure half-way leaves the log
read-only, and reopening it finishes or undoes the change.

L1  an append that raises has changed nothing that a reader, or the next append, could see;
L2  the last segment is the only one written to, and there always is one;
P1  log start ≤ last stable offset ≤ high watermark ≤ log end, and durable point ≤ log end;
P2  `view` is replaced as a whole, so that a reader sees a consistent state;
P3  after a failed sync, or a change of files that failed half-way, nothing is written or acknowledged until the
    log is reopened.

Thread rule: append, roll, cuts and close hold `lock` (re-entrant); readers take `view`, an immutable value, and no
lock. Syncs run without the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tidegate.clock import Clock
from tidegate.errors import ConflictError, CorruptError, InvalidError, OffsetOutOfRangeError, UnavailableError
from tidegate.files import Bytes, Files
from tidegate.log.append_validation import (
    AppendInfo,
    Appending,
    Prepared,
    duplicate_of,
    nothing_appended,
    prepare,
)
from tidegate.log.catalog import parse_folder_name
from tidegate.log.checkpoints import (
    HIGH_WATERMARKS,
    LOG_STARTS,
    RECOVERY_POINTS,
    TopicId,
    read_topic_id,
    write_topic_id,
)
from tidegate.log.fetch import (
    Fetched,
    Isolation,
    LogPoint,
    LogView,
    collect_aborted,
    fetch,
    offset_for_timestamp,
    out_of_range,
)
from tidegate.log.format.batch import BatchHeader, Buffer, RecordFacts
from tidegate.log.format.partition_files import DELETED, INDEX_SUFFIXES, LOG, offset_file
from tidegate.log.group_commit import GroupCommit, sync_segments
from tidegate.log.indexes import AbortedTxn, TimestampOffset
from tidegate.log.producer_state import Origin, ProducerEntry, check_batch, rebuild_producers
from tidegate.log.recovery import Loader, Ports, Recovery, recovery_named
from tidegate.log.segment import LogSegment, SegmentList
from tidegate.log.segment_roll import roll_reason
from tidegate.log.topic_config import BrokerConfig, TopicConfig
from tidegate.randomness import Randomness
from tidegate.scheduling import Scheduler

Result = TypeVar("Result")
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


class PartitionLog:
    """The log of one partition folder; made by `open`."""

    def __init__(self, loader: Loader, topic_id: TopicId | None) -> None:
        self.folder = loader.folder
        name = parse_folder_name(self.folder.name)
        self.topic, self.partition = (self.folder.name, 0) if name is None else name
        self.topic_id = topic_id
        self.config = loader.config
        self.hooks = Hooks()
        self.lock = threading.RLock()
        """Every change takes it; a caller may hold it around several changes."""
        self._where = self.folder.name
        self._ports = loader.ports
        self._epochs, self._producers, self._retirement = loader.epochs, loader.producers, loader.retirement
        self._read_only = loader.recovery.read_only
        self.cuts = 0
        """How often the end of the log was cut since it was opened."""
        self._is_closed = False
        self._is_progress_told = True
        self._is_sync_planned = False
        self._finished: list[LogSegment] = []  # rolled, not synced since
        active, log_end = loader.segments.last, loader.log_end
        end = LogPoint(log_end, active.base_offset, active.size)
        durable = end if loader.recovery_point >= log_end else LogPoint(loader.recovery_point)
        self._commit = GroupCommit(durable, self._sync, where=self._where)
        self.view = LogView(
            loader.segments, loader.log_start, end, LogPoint(loader.log_start), None, self._where
        )
        """The current state of the log as an immutable value."""

    @classmethod
    def open(
        cls,
        folder: Path,
        config: TopicConfig,
        *,
        broker: BrokerConfig,
        files: Files,
        clock: Clock,
        randomness: Randomness,
        scheduler: Scheduler,
        clean: bool,
        recovery_point: int = 0,
        log_start: int = 0,
        high_watermark: int | None = None,
        recovery: str | Recovery = "safe",
        topic_id: TopicId | None = None,
    ) -> PartitionLog:
        """Load the folder (created when absent) and recover it unless the last stop was `clean`.

        The high watermark defaults to the log end: with one replica, what is in the log is replicated. A `topic_id`
        that differs from the folder's is refused.
        """
        files.mkdir(folder)
        if topic_id is not None:
            write_topic_id(folder, topic_id, files=files)
        loader = Loader(
            folder,
            config,
            broker=broker,
            ports=Ports(files, clock, randomness, scheduler),
            clean=clean,
            recovery_point=recovery_point,
            log_start=log_start,
            recovery=recovery_named(recovery, files) if isinstance(recovery, str) else recovery,
        )
        loader.load()
        log = cls(loader, topic_id or read_topic_id(folder, files=files))
        log.update_high_watermark(loader.log_end if high_watermark is None else high_watermark)
        return log

    def __repr__(self) -> str:
        return f"PartitionLog({self.folder}, {self.log_start_offset} … {self.log_end_offset})"

    # -- state -----------------------------------------------------------------------------------

    @property
    def segments(self) -> tuple[LogSegment, ...]:
        return self.view.segments.segments

    @property
    def active_segment(self) -> LogSegment:
        return self.view.segments.last

    @property
    def log_start_offset(self) -> int:
        return self.view.log_start

    @property
    def high_watermark(self) -> int:
        return self.view.high_watermark.offset

    @property
    def last_stable_offset(self) -> int:
        return self.view.last_stable_offset

    @property
    def log_end_offset(self) -> int:
        return self.view.end.offset

    @property
    def recovery_point(self) -> int:
        """The offset where recovery after a crash begins: earlier batches are on disk, and so are the indexes of all
        segments before the one that holds it.
        """
        return min((self._commit.durable.offset, *(segment.base_offset for segment in self._finished)))

    def checkpoint_lines(self) -> dict[str, int | None]:
        """Return the partition's line in each of Kafka's checkpoint files; None where it has none."""
        start = self.log_start_offset
        is_inside = start > self.view.segments.first.base_offset  # otherwise the file name gives it
        return {
            RECOVERY_POINTS: self.recovery_point,
            HIGH_WATERMARKS: self.high_watermark,
            LOG_STARTS: start if is_inside else None,
        }

    @property
    def leader_epoch(self) -> int:
        """The epoch of the last leader (perhaps a broker) that wrote here; 0 if there was none. Never decreases."""
        latest = self._epochs.latest
        return 0 if latest is None else latest.epoch

    @property
    def size(self) -> int:
        return self.view.segments.size

    @property
    def read_only_reason(self) -> str | None:
        """Why changes are refused; None when they are allowed."""
        return self._read_only or self._commit.failure

    @property
    def active_producers(self) -> Mapping[int, ProducerEntry]:
        """Producer id → its state: epoch, last sequence, open transaction."""
        return self._producers.active_producers

    def fetch(
        self,
        start: int,
        *,
        max_bytes: int,
        isolation: Isolation = Isolation.HIGH_WATERMARK,
        min_one: bool = True,
        buffer: bytearray | None = None,
    ) -> Fetched:
        """Return raw batches from offset `start` on; see `fetch`."""

        def read(view: LogView) -> Fetched:
            return fetch(
                view, start, max_bytes=max_bytes, isolation=isolation, min_one=min_one, buffer=buffer
            )

        fetched = self._reading(read)
        if start < self.log_start_offset:  # retention removed its segment during the read
            raise out_of_range(self.view, start)
        return fetched

    def offset_for_timestamp(self, timestamp: int) -> TimestampOffset | None:
        """Return the first record at or after `timestamp`; −1 … −4 are special, see `fetch`."""
        return self._reading(lambda view: offset_for_timestamp(view, timestamp))

    def collect_aborted(self, start: int, upper: int) -> list[AbortedTxn]:
        """Return the aborted transactions with records in [start, upper)."""
        return self._reading(lambda view: collect_aborted(view, start, upper))

    def _reading(self, read: Callable[[LogView], Result]) -> Result:
        """Read, and repeat whenever a segment was removed meanwhile."""
        self._require_open()
        while True:
            view = self.view
            try:
                return read(view)
            except FileNotFoundError as error:
                if self.view.segments is view.segments:
                    raise CorruptError(
                        f"{error.filename} is missing: another program removed it; restore it, or reopen the log",
                        path=error.filename,
                    ) from error

    # -- appending -------------------------------------------------------------------------------

    def append(
        self,
        batch: Buffer,
        *,
        origin: Origin = Origin.CLIENT,
        leader_epoch: int | None = None,
        facts: RecordFacts | None = None,
    ) -> AppendInfo:
        """Write one encoded batch (a replica: consecutive ones) at the end of the log.

        A bytearray is stamped in place; other buffers are copied. `facts` avoids reading the records of a batch that
        the caller encoded itself. Without `leader_epoch` the log keeps its epoch. The high watermark does not move:
        `acknowledge` does that.
        """
        with self.lock:
            self._require_writable()
            now_ms = self._ports.clock.now_ms()
            epoch = self.leader_epoch if leader_epoch is None else leader_epoch
            to = Appending(self._where, self.config, self.view.end.offset, epoch, now_ms)
            prepared = prepare(batch, origin, to, facts)
            if prepared is None:
                return nothing_appended(to.next_offset)
            try:
                info = self._append(prepared, origin, now_ms)
            except BaseException:
                prepared.undo()
                raise
            unflushed = self.view.end.offset - self._commit.durable.offset
        if unflushed >= self.config.flush_messages:
            self.flush()
        return info

    def _append(self, prepared: Prepared, origin: Origin, now_ms: int) -> AppendInfo:
        """Run the steps in Kafka's order: epochs, size, roll, producers, bytes. The roll precedes the duplicate
        check.
        """
        for header in prepared.headers:
            latest = self._epochs.latest
            if header.leader_epoch >= 0 and (latest is None or latest.epoch != header.leader_epoch):
                self._epochs.assign(header.leader_epoch, header.base_offset)
        if prepared.size > self.config.segment_bytes:
            raise InvalidError(
                f"an append of {prepared.size} bytes to {self._where} exceeds segment.bytes="
                f"{self.config.segment_bytes}; send smaller batches or raise the setting",
                kafka_name="RECORD_LIST_TOO_LARGE",
            )
        segment = self.view.segments.last
        if roll_reason(segment, prepared, self.config, now_ms) is not None:
            segment = self.roll(prepared.first_offset)
        if origin is Origin.CLIENT and prepared.headers[0].has_producer:
            known = self._producers.duplicate_of(prepared.headers[0])
            if known is not None:
                prepared.undo()
                return duplicate_of(known)
        for header, data in prepared.batches():
            self._append_batch(segment, header, data, origin)
        return prepared.info()

    def _append_batch(self, segment: LogSegment, header: BatchHeader, data: Bytes, origin: Origin) -> None:
        step = check_batch(self._producers, header, lambda: data, origin)
        aborted = None if step is None else step.aborted
        if aborted is not None:
            segment.add_aborted(aborted)
        try:
            position = segment.append(data, header)
        except BaseException:
            if aborted is not None:
                segment.drop_aborted(header.base_offset)
            raise
        if step is not None:
            self._producers.update(step)
        self._producers.update_map_end_offset(header.next_offset)
        self._extend(segment, position, data, header)

    def acknowledge(self, *, sync: bool) -> int:
        """Make everything appended so far visible to readers, after an fsync if `sync`; return the high watermark.

        Callers that sync at the same time share one fsync. A failed fsync makes the partition read-only.
        """
        self._require_writable()
        point = self._commit.reach(self.view.end.offset) if sync else self.view.end
        with self.lock:
            if self.high_watermark < point.offset <= self.log_end_offset:
                self._move_high_watermark(point)
            elif not self._is_progress_told:
                self._tell_progress()
            return self.high_watermark

    def flush(self) -> None:
        """Sync everything appended so far to disk."""
        self._require_writable()
        self._flush()

    def update_high_watermark(self, offset: int) -> int:
        """Move the high watermark, bounded by log start and log end; return its new value."""
        with self.lock:
            end = self.view.end
            self._move_high_watermark(
                end if offset >= end.offset else LogPoint(max(offset, self.view.log_start))
            )
            return self.high_watermark

    # -- rolling ---------------------------------------------------------------------------------

    def roll(self, first_offset: int = 0) -> LogSegment:
        """Finish the active segment and return the new one, at the log end or at `first_offset` beyond it."""
        with self._changing():
            view = self.view
            active, base = view.segments.last, max(first_offset, view.end.offset)
            if active.base_offset > base or (active.base_offset == base and active.size > 0):
                raise InvalidError(f"{self._where}: a log segment at {base} cannot follow {active}")
            if active.base_offset == base:
                with self._changing_names():
                    fresh = self._recreate(active)
                segments = view.segments.with_segments([fresh])
            else:
                fresh = self._follow(active, base)
                segments = view.segments.appended(fresh)
            self._set_segments(segments, view.end.offset)
            if active.base_offset != base:
                self._finished.append(active)
                self._plan_sync()
                for hook in self.hooks.on_roll:
                    hook(active)
            self._producers.update_map_end_offset(base)
            self._producers.take_snapshot(sync=False)
            return fresh

    def _follow(self, active: LogSegment, base: int) -> LogSegment:
        for kind in (LOG, *INDEX_SUFFIXES):
            leftover = offset_file(self.folder, base, kind)
            if self._ports.files.exists(leftover):
                self._ports.files.unlink(leftover, missing_ok=True)
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
        self._retirement.retire([empty], self.config.file_delete_delay_ms, keep_snapshots=True)
        return fresh

    def _create(self, base: int) -> LogSegment:
        ports = self._ports
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
            self._ports.scheduler.after(0, self._sync_finished, "flush-log")

    def _sync_finished(self) -> None:
        self._is_sync_planned = False
        if self._finished and not self._is_closed and self._commit.failure is None:
            self._flush()

    # -- truncation ------------------------------------------------------------------------------

    def truncate_to(self, offset: int) -> bool:
        """Drop every batch that reaches `offset` or beyond; the log then ends there. Return whether any existed."""
        with self._changing():
            view = self.view
            if offset < 0:
                raise InvalidError(f"{self._where} cannot be cut at {offset}")
            if offset >= view.end.offset:
                self._epochs.truncate_from_end(view.end.offset)
                return False
            with self._whole_or_read_only(f"cutting it at offset {offset}"), self._changing_names():
                if offset < view.segments.first.base_offset:
                    self._restart(offset)
                else:
                    self._cut(offset)
            return True

    def truncate_fully(self, offset: int) -> None:
        """Drop everything; the log starts and ends at `offset`."""
        with self._whole_or_read_only(f"restarting it at offset {offset}"), self._changing_names():
            self._restart(offset)

    def _cut(self, offset: int) -> None:
        view = self.view
        gone = [segment for segment in view.segments if segment.base_offset > offset]
        segments = view.segments.without(gone)
        self._retirement.retire(gone, self.config.file_delete_delay_ms)
        segments.last.truncate_to(offset)
        self._ports.files.sync_folder(self.folder)
        self._epochs.truncate_from_end(offset)
        self._set_segments(segments, offset)
        log_start = min(offset, view.log_start)
        self._rebuild_producers(segments, log_start, offset)
        self._restart_at(log_start)
        self._tell_removed(gone, TRUNCATION)
        self._tell_truncated(segments.last)

    def _restart(self, offset: int) -> None:
        old = self.view.segments.segments
        delay_ms = self.config.file_delete_delay_ms
        for segment in old:
            segment.change_suffix(DELETED)
        segments = SegmentList([self._create(offset)])
        self._retirement.retire(old, delay_ms)
        self._ports.files.sync_folder(self.folder)
        self._epochs.clear()
        self._producers.truncate_fully_and_start_at(offset)
        self._set_segments(segments, offset)
        self.view = self.view._replace(high_watermark=self.view.end)
        self._rebuild_producers(segments, offset, offset)
        self._restart_at(offset)
        self._tell_removed(old, TRUNCATION)
        self._tell_truncated(segments.last)

    def _rebuild_producers(self, segments: SegmentList, log_start: int, end: int) -> None:
        rebuild_producers(
            self._producers,
            segments,
            log_start=log_start,
            end=end,
            clean=False,
            now_ms=self._ports.clock.now_ms(),
        )

    # -- dropping the start, swapping ------------------------------------------------------------

    def delete_records_before(self, offset: int) -> int:
        """Raise the log start to `offset` (−1: the high watermark); return it. Retention frees the files."""
        with self._changing():
            self._raise_log_start(self.high_watermark if offset == -1 else offset)
            return self.log_start_offset

    def delete_segments(self, segments: Sequence[LogSegment], reason: str) -> int:
        """Remove the oldest segments and return how many. If those are all, an empty one is rolled first."""
        with self._changing():
            going = [segment for segment in segments if self._is_current(segment)]
            if len(going) == len(self.view.segments):
                self.roll()  # which recreates an empty active segment at the same base
                going = [segment for segment in going if self._is_current(segment)]
            if going:
                survivors = self.view.segments.without(going)
                self._raise_log_start(survivors.first.base_offset)
                self._set_segments(survivors, self.view.end.offset)
                with self._changing_names():
                    self._retirement.retire(going, self.config.file_delete_delay_ms, is_urgent=False)
                self._tell_removed(going, reason)
            return len(going)

    def replace_segments(self, new: Sequence[LogSegment], old: Sequence[LogSegment]) -> None:
        """Replace the `old` segments by finished `.cleaned` ones."""
        with self._changing():
            current = self.view.segments
            if not all(self._is_current(segment) for segment in old):
                raise ConflictError(
                    f"{self._where}: a log segment to be replaced has left the log meanwhile; clean again"
                )
            self._retirement.stage(new)
            with self._whole_or_read_only("swapping in compacted segments"), self._changing_names():
                self._retirement.swap(new, old, self.config.file_delete_delay_ms)
                self._set_segments(current.without(old).with_segments(new), self.view.end.offset)
            self._tell_removed(old, COMPACTION)
            for segment in new:
                for hook in self.hooks.on_segment_added:
                    hook(segment)

    def _tell_truncated(self, active: LogSegment) -> None:
        self.cuts += 1
        for hook in self.hooks.on_truncate:
            hook(active)

    def _tell_removed(self, segments: Sequence[LogSegment], reason: str) -> None:
        for segment in segments:
            for hook in self.hooks.on_segment_removed:
                hook(segment, reason)

    def remove_expired_producers(self, now_ms: int) -> int:
        """Drop producers that were idle for too long; return how many."""
        with self.lock:
            self._require_open()
            return self._producers.remove_expired(now_ms)

    def update_config(self, config: TopicConfig) -> None:
        """Apply settings: sizes, ages and limits from the next append, index settings from the next segment."""
        self.config = config

    def close(self, *, clean: bool = True) -> bool:
        """Sync every file at its final length and close it; return whether that was done.

        Return False when the log was read-only, or when `clean=False` asked to drop it as a crash would.
        """
        with self.lock:
            if self._is_closed:
                return False
            is_clean = clean and self.read_only_reason is None
            try:
                if is_clean:
                    self._settle()
            finally:
                self._is_closed = True
                self._retirement.cancel()
                for segment in self.view.segments:
                    segment.close()
        return is_clean

    # -- checks ----------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._is_closed:
            raise InvalidError(f"{self._where} is closed; open the log again")

    def _require_writable(self) -> None:
        """Raise unless the log may be changed (P3)."""
        self._require_open()
        self._commit.require_sound()
        if self._read_only is not None:
            raise CorruptError(
                f"{self._where} is read-only: {self._read_only}",
                path=self.folder,
                kafka_name="KAFKA_STORAGE_ERROR",
            )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock around a change of a log that may be changed."""
        with self.lock:
            self._require_writable()
            yield

    @contextmanager
    def _whole_or_read_only(self, doing: str) -> Iterator[None]:
        """Wrap a change of several files; if it fails half-way, the log becomes read-only (P3)."""
        with self._changing():
            try:
                yield
            except BaseException as error:
                self._commit.fail(f"{doing} stopped half-way ({error})")
                raise

    @contextmanager
    def _changing_names(self) -> Iterator[None]:
        """Wrap every renaming of segment files, for readers in other processes."""
        for hook in self.hooks.on_segments_changing:
            hook()
        try:
            yield
        finally:
            for hook in self.hooks.on_segments_changed:
                hook()

    def _extend(self, segment: LogSegment, position: int, data: Bytes, header: BatchHeader) -> None:
        """Advance the log end after a batch was written."""
        view = self.view
        end = LogPoint(header.next_offset, segment.base_offset, position + header.size)
        self.view = LogView(
            view.segments, view.log_start, end, view.high_watermark, self._first_unstable(), view.where
        )
        for hook in self.hooks.on_append:
            hook(segment, position, data, header)

    def _set_segments(self, segments: SegmentList, log_end: int) -> None:
        """Replace the list of segments and set the log end."""
        active = segments.last
        end = LogPoint(log_end, active.base_offset, active.size)
        watermark = self.view.high_watermark
        # A LogPoint in a segment that was cut, swapped or removed has no valid position any more.
        watermark = end if watermark.offset >= log_end else LogPoint(watermark.offset)
        self._finished = [
            segment for segment in self._finished if segments.get(segment.base_offset) is segment
        ]
        self.view = self.view._replace(segments=segments, end=end, high_watermark=watermark)

    def _move_high_watermark(self, point: LogPoint) -> None:
        self._producers.on_high_watermark(point.offset)
        self.view = self.view._replace(high_watermark=point, first_unstable=self._first_unstable())
        self._tell_progress()

    def _raise_log_start(self, offset: int) -> None:
        view = self.view
        if offset > view.high_watermark.offset:
            raise OffsetOutOfRangeError(
                f"{self._where} cannot start at {offset}, beyond the high watermark {view.high_watermark.offset}",
                offset=offset,
                first=view.log_start,
                end=view.high_watermark.offset,
            )
        if offset <= view.log_start:
            return
        with suppress(UnavailableError):  # old epochs do no harm, and a full disk must not stop retention
            self._epochs.truncate_from_start(offset)
        self._producers.on_log_start_incremented(offset)
        self.view = view._replace(log_start=offset)
        self.view = self.view._replace(first_unstable=self._first_unstable())
        self._commit.raise_to(LogPoint(offset))
        self._tell_progress()

    def _restart_at(self, log_start: int) -> None:
        """Bring offsets that lie beyond the end of a truncated log back to its end."""
        view = self.view
        self._commit.lower(view.end)
        self._producers.on_high_watermark(view.high_watermark.offset)
        self.view = view._replace(log_start=log_start)
        self.view = self.view._replace(first_unstable=self._first_unstable())
        self._tell_progress()

    def _first_unstable(self) -> int | None:
        offset = self._producers.first_unstable_offset
        return None if offset is None else max(offset, self.view.log_start)

    def _tell_progress(self) -> None:
        view = self.view
        self._is_progress_told = False  # until every hook was called: one may fail, and is called again later
        for hook in self.hooks.on_acknowledged:
            hook(view.high_watermark.offset, view.log_start, self.recovery_point)
        self._is_progress_told = True

    # -- syncing ---------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._commit.reach(self.view.end.offset, anyway=bool(self._finished))

    def _sync(self) -> LogPoint:
        """Sync everything from the durable point on; runs without the lock."""
        finished, view = tuple(self._finished), self.view
        sync_segments(
            view, self._commit.durable.offset, finished, self._ports.files, self._producers, self._is_current
        )
        for segment in finished:
            with suppress(ValueError):  # the file left the log meanwhile
                self._finished.remove(segment)
        return view.end

    def _settle(self) -> None:
        """Take a snapshot at the log end, and sync every file at its final length."""
        with self._whole_or_read_only("closing it"):
            segments = self.view.segments
            self._producers.take_snapshot()
            segments.last.become_inactive()
            for segment in segments.between(self.recovery_point, self.view.end.offset + 1):
                segment.sync()
            for hook in self.hooks.on_close:
                hook(segments.segments)
            self._ports.files.sync_folder(self.folder)
            self._commit.raise_to(self.view.end)

    def _is_current(self, segment: LogSegment) -> bool:
        return self.view.segments.get(segment.base_offset) is segment
