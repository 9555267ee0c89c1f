"""Opening a partition folder: finish interrupted work, find the log segments, recover what a crash left.

Owns the start-up sequence of a Kafka 3.9 broker for one partition. It does not cover checkpoints and markers of
the whole log folder (the caller says whether the last stop was clean), nor what to believe of a segment and how to
recover one (a `Recovery` does).

1. Interrupted work is finished or undone (`interrupted`).
2. Index files without a `.log` go. A segment without `.index`, or with an impossible `.txnindex`, is recovered.
3. After an unclean stop every segment from the recovery point on is recovered; if one had to be cut, all later
   ones go.
4. The log ends after the last batch of the last segment; if that is before the log start, nothing is left but
   an empty segment at the log start.
5. Epochs are trimmed to the log, producers rebuilt from snapshots and log, stray snapshots removed.

After a clean stop no segment is read except the tail of the last one, and not even that where `Recovery.known_end`
knows its end. Loading can be interrupted anywhere and started again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidegate.clock import Clock
from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.partitions.checkpoints import LEADER_EPOCHS
from tidegate.log.partitions.epochs import LeaderEpochs
from tidegate.log.partitions.interrupted import OFFSET_NAME, finish_interrupted_work
from tidegate.log.partitions.kafka_recovery import KafkaRecovery, Recovery, note_epoch
from tidegate.log.partitions.retiring import Retirement
from tidegate.log.producers.producer_replay import rebuild_producers
from tidegate.log.producers.producer_state import ProducerStates
from tidegate.log.segments.file_names import INDEX, INDEX_SUFFIXES, LOG, TIME_INDEX, TRANSACTION_INDEX
from tidegate.log.segments.segment import LogSegment
from tidegate.log.segments.segment_indexes import OffsetsGoBackError
from tidegate.log.segments.segment_list import SegmentList
from tidegate.log.segments.splitting import OffsetOverflowError, split
from tidegate.log.topics.topic_config import BrokerConfig, TopicConfig
from tidegate.randomness import Randomness
from tidegate.scheduling import Scheduler

END_OF_LOG: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Ports:
    """The outside world of a partition."""

    files: Files
    clock: Clock
    randomness: Randomness
    scheduler: Scheduler


@dataclass(frozen=True, slots=True)
class LoadedLog:
    """A partition ready to be used. `read_only` says why it must not be written to, if so."""

    segments: SegmentList
    log_start: int
    log_end: int
    recovery_point: int
    epochs: LeaderEpochs
    producers: ProducerStates
    read_only: str | None


class Loader:
    """One opening of one partition folder."""

    def __init__(
        self,
        folder: Path,
        config: TopicConfig,
        *,
        broker: BrokerConfig,
        ports: Ports,
        clean: bool,
        recovery_point: int,
        log_start: int,
        recovery: Recovery,
    ) -> None:
        self._folder = folder
        self._config = config
        self._broker = broker
        self._ports = ports
        self._clean = clean
        self._recovery_point = recovery_point
        self._log_start = log_start
        self._recovery = recovery
        self._segments = SegmentList()
        self._epochs, self._are_epochs_damaged = self._open_epochs()
        self._producers = self._new_producers()
        self._retirement = Retirement(folder, self._producers, files=ports.files, scheduler=ports.scheduler)

    def load(self) -> LoadedLog:
        finish_interrupted_work(self._folder, self._segment, files=self._ports.files)
        self._splitting(self._open_segments)
        if not self._clean:
            self._splitting(self._recover_unflushed)
        log_end = self._find_end()
        log_start = max(self._log_start, self._segments.first.base_offset)
        recovery_point = log_end
        if self._recovery.read_only is None:  # a damaged log is served as it is: nothing is grown or rebuilt
            self._segments.last.grow_indexes(self._config.segment_index_bytes)
            self._trim_epochs(log_end)
            self._producers.remove_stray_snapshots(self._segments.bases)
            rebuild_producers(
                self._producers,
                self._segments,
                log_start=log_start,
                end=log_end,
                clean=self._clean,
                now_ms=self._ports.clock.now_ms(),
            )
            if not self._clean:
                recovery_point = min(self._recovery_point, log_end)
            recovery_point = max(recovery_point, log_start)
        return LoadedLog(
            self._segments,
            log_start,
            log_end,
            recovery_point,
            self._epochs,
            self._producers,
            self._recovery.read_only,
        )

    # -- segments --------------------------------------------------------------------------------

    def _segment(self, base_offset: int, suffix: str = "") -> LogSegment:
        ports = self._ports
        return LogSegment(
            self._folder,
            base_offset,
            self._config,
            files=ports.files,
            clock=ports.clock,
            randomness=ports.randomness,
            suffix=suffix,
        )

    def _open_segments(self) -> None:
        """Segments by ascending base; nothing of a sound one is read."""
        present = set(self._ports.files.list(self._folder))
        logs = sorted(name for name in present if name.endswith(LOG) and OFFSET_NAME.fullmatch(name))
        stems = [name.removesuffix(LOG) for name in logs]
        self._remove_orphans(present, set(stems))
        opened: list[LogSegment] = []
        for stem in stems:
            segment = self._segment(int(stem))
            has_index = stem + INDEX in present
            if has_index and stem + TIME_INDEX not in present:
                segment.indexes.times.resize(0)
            has_transactions = stem + TRANSACTION_INDEX in present
            if not has_index or (has_transactions and not self._has_sane_transactions(segment)):
                self._segments = SegmentList(opened)
                self._recover(segment)
            opened.append(segment)
        self._segments = SegmentList(opened)

    def _remove_orphans(self, present: set[str], stems: set[str]) -> None:
        for name in sorted(present):
            stem, dot, kind = name.partition(".")
            if dot + kind in INDEX_SUFFIXES and stem not in stems:
                self._ports.files.unlink(self._folder / name, missing_ok=True)

    def _has_sane_transactions(self, segment: LogSegment) -> bool:
        try:
            segment.indexes.transactions.sanity_check()
        except CorruptError:
            return False
        return True

    def _recover(self, segment: LogSegment) -> int:
        """Recover one segment, at least the earlier ones being in `_segments`; how many bytes were cut."""
        producers = self._new_producers()
        if self._recovery.read_only is None:  # else damage lies in the way of a replay
            rebuild_producers(
                producers,
                self._segments,
                log_start=self._log_start,
                end=segment.base_offset,
                clean=False,
                now_ms=self._ports.clock.now_ms(),
            )
        cut = self._recovery.recover(segment, producers, self._epochs)
        if self._recovery.read_only is not None:
            return 0
        segment.sync()  # a rebuilt index that a second crash half-lost would not be looked at again
        producers.take_snapshot()
        return cut

    def _recover_unflushed(self) -> None:
        unflushed = self._segments.between(self._recovery_point, END_OF_LOG)
        for number, segment in enumerate(unflushed):
            try:
                cut = self._recover(segment)
            except OffsetsGoBackError:  # nothing of such a segment is believed
                cut = segment.truncate_to(segment.base_offset)
            if cut > 0:
                self._retire(unflushed[number + 1 :])
                return

    def _retire(self, segments: Sequence[LogSegment]) -> None:
        self._retirement.retire(segments, self._config.file_delete_delay_ms)
        self._segments = self._segments.without(segments)

    def _splitting(self, step: Callable[[], None]) -> None:
        """Do a step; again, whenever it met a segment that has to be split first."""
        while True:
            try:
                return step()
            except OffsetOverflowError as overflow:
                old = overflow.segment
                parts = split(old, self._segment)
                self._retirement.stage(parts)
                self._retirement.swap(parts, [old], self._config.file_delete_delay_ms)
                self._segments = self._segments.without([old]).with_segments(parts)

    def _find_end(self) -> int:
        """The log end offset; the segments are replaced by an empty one if they end before the log start."""
        if len(self._segments):
            last = self._segments.last
            known = self._recovery.known_end(last)
            log_end = last.read_next_offset() if known is None else known
            if log_end >= self._log_start:
                return log_end
            self._retire(self._segments.segments)
            self._epochs.clear()
            self._producers.truncate_fully_and_start_at(self._log_start)
        self._segments = SegmentList([self._segment(self._log_start).create()])
        return self._log_start

    # -- epochs ----------------------------------------------------------------------------------

    def _open_epochs(self) -> tuple[LeaderEpochs, bool]:
        """The epochs of the checkpoint; none, to be rebuilt from the log, when it is damaged or missing."""
        path, files = self._folder / LEADER_EPOCHS, self._ports.files
        try:
            return LeaderEpochs(path, files=files), False
        except CorruptError:
            return LeaderEpochs.empty(path, files=files), True

    def _trim_epochs(self, log_end: int) -> None:
        # A broker goes on without the checkpoint; for the only copy of a log the epochs are looked up again.
        is_missing = self._epochs.latest is None and self._segments.size > 0
        if self._are_epochs_damaged or (is_missing and not isinstance(self._recovery, KafkaRecovery)):
            self._epochs.clear()
            for segment in self._segments:
                for _, header in segment.batches():
                    note_epoch(self._epochs, header)
        self._epochs.truncate_from_end(log_end)
        self._epochs.truncate_from_start(self._log_start)

    # -- producers -------------------------------------------------------------------------------

    def _new_producers(self) -> ProducerStates:
        return ProducerStates(
            self._folder,
            files=self._ports.files,
            expiration_ms=self._broker.producer_id_expiration_ms,
        )
