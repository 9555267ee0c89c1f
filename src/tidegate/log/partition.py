"""One partition: an append-only log made of segments, with one writer and many readers.

`PartitionLog` runs the steps of an append in Kafka's order: `append_validation` checks and stamps the batch,
`segment_roll` decides on a roll, `producer_state` checks sequences, `segment` writes. `fetch` reads,
`group_commit` syncs, `partition_state` keeps offsets and changes the list of segments, `recovery` opens the
folder. Locks between processes, checkpoint files and watermark files belong to `open_partitions`, which registers
hooks.

Invariants: those of `partition_state`, and
L1  an append that raises has changed nothing that a reader, or the next append, could see;
L2  the last segment is the only one written to, and there always is one.

Thread rule: append, roll, cuts and close hold `lock` (re-entrant); readers take `view`, an immutable value,
and no lock. Syncs run without the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Bytes
from tidegate.log.append_validation import (
    AppendInfo,
    Appending,
    Prepared,
    duplicate_of,
    nothing_appended,
    prepare,
)
from tidegate.log.catalog import parse_folder_name
from tidegate.log.checkpoints import TopicId, read_topic_id, write_topic_id
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
from tidegate.log.indexes import AbortedTxn, TimestampOffset
from tidegate.log.partition_state import Hooks, PartitionState
from tidegate.log.producer_state import Origin, ProducerEntry, check_batch
from tidegate.log.recovery import Loader, Ports, Recovery, recovery_named
from tidegate.log.segment import LogSegment
from tidegate.log.segment_roll import roll_reason
from tidegate.log.topic_config import BrokerConfig, TopicConfig

if TYPE_CHECKING:
    import threading

    from tidegate.clock import Clock
    from tidegate.files import Files
    from tidegate.randomness import Randomness
    from tidegate.scheduling import Scheduler


Result = TypeVar("Result")


class PartitionLog:
    """The log of one partition folder; made by `open`."""

    def __init__(self, state: PartitionState, topic_id: TopicId | None) -> None:
        name = parse_folder_name(state.folder.name)
        self.topic, self.partition = (state.folder.name, 0) if name is None else name
        self.topic_id = topic_id
        self._state = state

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
        ports = Ports(files, clock, randomness, scheduler)
        loaded = Loader(
            folder,
            config,
            broker=broker,
            ports=ports,
            clean=clean,
            recovery_point=recovery_point,
            log_start=log_start,
            recovery=recovery_named(recovery, files) if isinstance(recovery, str) else recovery,
        ).load()
        log = cls(
            PartitionState(folder, config, ports, loaded), topic_id or read_topic_id(folder, files=files)
        )
        log.update_high_watermark(loaded.log_end if high_watermark is None else high_watermark)
        return log

    def __repr__(self) -> str:
        return f"PartitionLog({self.folder}, {self.log_start_offset} … {self.log_end_offset})"

    # -- state -----------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self._state.folder

    @property
    def config(self) -> TopicConfig:
        return self._state.config

    @property
    def hooks(self) -> Hooks:
        return self._state.hooks

    @property
    def lock(self) -> threading.RLock:
        """The lock that every change takes; a caller may hold it around several changes."""
        return self._state.lock

    @property
    def view(self) -> LogView:
        """The current state of the log as an immutable value."""
        return self._state.view

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
        """The offset where recovery would begin after a crash: everything before it is on disk."""
        return self._state.recovery_point

    @property
    def leader_epoch(self) -> int:
        """The epoch of the last leader (perhaps a broker) that wrote here; 0 if there was none. Never decreases."""
        latest = self._state.epochs.latest
        return 0 if latest is None else latest.epoch

    @property
    def size(self) -> int:
        return self.view.segments.size

    @property
    def read_only_reason(self) -> str | None:
        """Why changes are refused; None when they are allowed."""
        return self._state.read_only or self._state.commit.failure

    @property
    def active_producers(self) -> Mapping[int, ProducerEntry]:
        """Producer id → its state: epoch, last sequence, open transaction."""
        return self._state.producers.active_producers

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
        self._state.require_open()
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
        state = self._state
        with state.lock:
            state.require_writable()
            now_ms = state.ports.clock.now_ms()
            epoch = self.leader_epoch if leader_epoch is None else leader_epoch
            to = Appending(state.where, state.config, state.view.end.offset, epoch, now_ms)
            prepared = prepare(batch, origin, to, facts)
            if prepared is None:
                return nothing_appended(to.next_offset)
            try:
                info = self._append(prepared, origin, now_ms)
            except BaseException:
                prepared.undo()
                raise
            unflushed = state.view.end.offset - state.commit.durable.offset
        if unflushed >= state.config.flush_messages:
            self.flush()
        return info

    def _append(self, prepared: Prepared, origin: Origin, now_ms: int) -> AppendInfo:
        """Run the steps in Kafka's order: epochs, size, roll, producers, bytes. The roll precedes the duplicate
        check.
        """
        state = self._state
        for header in prepared.headers:
            latest = state.epochs.latest
            if header.leader_epoch >= 0 and (latest is None or latest.epoch != header.leader_epoch):
                state.epochs.assign(header.leader_epoch, header.base_offset)
        if prepared.size > state.config.segment_bytes:
            raise InvalidError(
                f"an append of {prepared.size} bytes to {state.where} exceeds segment.bytes="
                f"{state.config.segment_bytes}; send smaller batches or raise the setting",
                kafka_name="RECORD_LIST_TOO_LARGE",
            )
        segment = state.view.segments.last
        if roll_reason(segment, prepared, state.config, now_ms) is not None:
            segment = self._state.roll(prepared.first_offset)
        if origin is Origin.CLIENT and prepared.headers[0].has_producer:
            known = state.producers.duplicate_of(prepared.headers[0])
            if known is not None:
                prepared.undo()
                return duplicate_of(known)
        for header, data in prepared.batches():
            self._append_batch(segment, header, data, origin)
        return prepared.info()

    def _append_batch(self, segment: LogSegment, header: BatchHeader, data: Bytes, origin: Origin) -> None:
        state = self._state
        step = check_batch(state.producers, header, lambda: data, origin) if header.has_producer else None
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
            step.take(state.producers)
        state.producers.update_map_end_offset(header.next_offset)
        state.extend(segment, position, data, header)

    def acknowledge(self, *, sync: bool) -> int:
        """Make everything appended so far visible to readers, after an fsync if `sync`; return the high watermark.

        Callers that sync at the same time share one fsync. A failed fsync makes the partition read-only.
        """
        state = self._state
        state.require_writable()
        point = state.commit.reach(state.view.end.offset) if sync else state.view.end
        with state.lock:
            if self.high_watermark < point.offset <= self.log_end_offset:
                state.move_high_watermark(point)
            elif not state.is_progress_told:
                state.tell_progress()
            return self.high_watermark

    def flush(self) -> None:
        """Sync everything appended so far to disk."""
        self._state.require_writable()
        self._state.flush()

    def update_high_watermark(self, offset: int) -> int:
        """Move the high watermark, bounded by log start and log end; return its new value."""
        state = self._state
        with state.lock:
            end = state.view.end
            state.move_high_watermark(
                end if offset >= end.offset else LogPoint(max(offset, state.view.log_start))
            )
            return self.high_watermark

    # -- changing the list of segments -----------------------------------------------------------

    def roll(self) -> LogSegment:
        """Finish the active segment and start a new one at the log end."""
        with self._state.lock:
            self._state.require_writable()
            return self._state.roll()

    def truncate_to(self, offset: int) -> bool:
        """Drop every batch that reaches `offset` or beyond; return whether any was dropped."""
        with self._state.lock:
            self._state.require_writable()
            return self._state.truncate_to(offset)

    def truncate_fully(self, offset: int) -> None:
        """Drop everything and restart the log at `offset`."""
        with self._state.lock:
            self._state.require_writable()
            self._state.truncate_fully(offset)

    def delete_records_before(self, offset: int) -> int:
        """Raise the log start to `offset` (−1: the high watermark); return it. Retention frees the files."""
        with self._state.lock:
            self._state.require_writable()
            self._state.raise_log_start(self.high_watermark if offset == -1 else offset)
            return self.log_start_offset

    def delete_segments(self, segments: Sequence[LogSegment], reason: str) -> int:
        """Remove the oldest segments (unlinked after `file.delete.delay.ms`); return how many."""
        with self._state.lock:
            self._state.require_writable()
            return self._state.delete_segments(segments, reason)

    def replace_segments(self, new: Sequence[LogSegment], old: Sequence[LogSegment]) -> None:
        """Replace the `old` segments by finished, synced `.cleaned` ones; `ConflictError` if an old one is gone."""
        with self._state.lock:
            self._state.require_writable()
            self._state.replace_segments(new, old)

    def remove_expired_producers(self, now_ms: int) -> int:
        """Drop producers that were idle for too long; return how many."""
        with self._state.lock:
            self._state.require_open()
            return self._state.producers.remove_expired(now_ms)

    def update_config(self, config: TopicConfig) -> None:
        """Apply settings: sizes, ages and limits from the next append, index settings from the next segment."""
        self._state.config = config

    def close(self, *, clean: bool = True) -> bool:
        """Sync every file at its final length and close it; return whether that was done.

        Return False when the log was read-only, or when `clean=False` asked to drop it as a crash would.
        """
        state = self._state
        with state.lock:
            if state.is_closed:
                return False
            is_clean = clean and self.read_only_reason is None
            try:
                if is_clean:
                    state.settle()
            finally:
                state.is_closed = True
                state.retirement.cancel()
                for segment in state.view.segments:
                    segment.close()
        return is_clean
