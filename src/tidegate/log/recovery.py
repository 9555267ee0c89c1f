"""Open a partition folder: finish interrupted renames, find the log segments, recover them after an unclean stop.

`Loader` follows the start-up sequence of a Kafka 3.9 broker for one partition. After a clean stop no segment is
read except the tail of the last one, and not even that where `known_end` knows its end. Loading can be
interrupted anywhere and started again.

A broker truncates a segment at its first bad batch (`KafkaRecovery`): right for a replica, wrong for the only
copy. `SafeRecovery` decides by the last synced offset (*durable end*) and the last acknowledged one (*high
watermark*), both from the watermark file:

| first bad batch | after it | action |
|---|---|---|
| below the durable end | anything | damage |
| below the high watermark | a sound batch | damage |
| at or above the high watermark | a sound batch | copied to `<base>.log.<position>.cut`, then cut |
| at or above the durable end | nothing sound | a torn tail: cut |

*Damage* changes nothing on disk: every sound batch before and after it is served, appends are refused, reading
into it raises `CorruptError`. The remedy is a restored file, or `recovery="kafka"`.

V1  `SafeRecovery` never removes a byte below the durable end;
V2  it cuts a torn batch, or keeps a copy of what it cuts; where the watermark file is damaged, both
    offsets are only lower bounds, so a torn batch is kept too;
V3  recovering twice, or again after a crash in the middle, ends in the same files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from tidegate.clock import Clock
from tidegate.errors import CorruptError, InvalidError, verify_command
from tidegate.files import File, Files
from tidegate.log.batch_file import is_zero, next_sound_batch, sound_batches, sound_headers
from tidegate.log.checkpoints import LEADER_EPOCHS, LeaderEpochs
from tidegate.log.format.batch import BatchHeader
from tidegate.log.format.partition_files import INDEX, INDEX_SUFFIXES, LOG, TIME_INDEX, TRANSACTION_INDEX
from tidegate.log.producer_state import Origin, ProducerStates, check_batch, rebuild_producers
from tidegate.log.seals import Seal, read_seal
from tidegate.log.segment import LogSegment, OffsetsGoBackError, SegmentList
from tidegate.log.segment_swap import (
    OFFSET_NAME,
    OffsetOverflowError,
    Retirement,
    finish_interrupted_work,
    split,
)
from tidegate.log.topic_config import BrokerConfig, TopicConfig
from tidegate.randomness import Randomness
from tidegate.scheduling import Scheduler


def recover_segment(segment: LogSegment, producers: ProducerStates, epochs: LeaderEpochs) -> int:
    """Rebuild indexes, epochs and producers from the batches, and cut the file at the first bad one."""
    segment.reset_indexes()
    valid = 0
    with segment.reader() as file:
        for position, header in _until_damage(sound_headers(file, 0, segment.size)):
            if not segment.holds(header.last_offset):
                raise OffsetOverflowError(segment, header, position)
            content = partial(file.read_at, position, header.size)
            try:
                step = check_batch(producers, header, content, Origin.REPLICATION)
            except CorruptError:  # an unreadable marker ends the log as a bad batch does
                break
            segment.reindex(header, position)
            note_epoch(epochs, header)
            if step is not None:
                producers.update(step)
                if step.aborted is not None:
                    segment.add_aborted(step.aborted)
            producers.update_map_end_offset(header.next_offset)
            valid = position + header.size
    cut = segment.cut_file(valid)
    segment.become_inactive()
    return cut


def note_epoch(epochs: LeaderEpochs, header: BatchHeader) -> None:
    """Record the start offset of a leader epoch that is newer than all known ones."""
    latest = epochs.latest
    if header.leader_epoch >= 0 and (latest is None or header.leader_epoch > latest.epoch):
        epochs.assign(header.leader_epoch, header.base_offset)


def _until_damage(batches: Iterator[tuple[int, BatchHeader]]) -> Iterator[tuple[int, BatchHeader]]:
    with suppress(CorruptError):
        yield from batches


logger = logging.getLogger("tidegate.log")


@dataclass(frozen=True, slots=True)
class Damage:
    """A range of bytes in a log segment that should hold batches but holds no sound one."""

    path: Path
    position: int
    end: int
    offset: int
    resume_offset: int | None
    message: str


@dataclass(slots=True)
class SafeRecovery:
    """The default strategy. Both offsets are those of the last writer, 0 when unknown.

    `is_certain` is False when they may have been larger, because the file that holds them is damaged. `end` is the
    seal of the last segment, if the segment is unchanged since it was closed.
    """

    files: Files
    durable_end: int = 0
    high_watermark: int = 0
    is_certain: bool = True
    end: Seal | None = None
    damages: list[Damage] = field(default_factory=list)
    _ends: dict[int, int] = field(default_factory=dict)

    @property
    def read_only(self) -> str | None:
        if not self.damages:
            return None
        first = self.damages[0]
        more = f" and {len(self.damages) - 1} more" if len(self.damages) > 1 else ""
        return (
            f"{first.message}{more}. Nothing was cut and everything sound is still readable. Look with "
            f"{verify_command(first.path.parent)}; then restore the file, or give up what is damaged by "
            f'opening the log with recovery="kafka"'
        )

    def known_end(self, segment: LogSegment) -> int | None:
        """Return where a segment ends, from its seal or from an earlier recovery."""
        if (known := self._ends.get(segment.base_offset)) is not None:
            return known
        try:
            is_end = self.end is not None and self.end.base_offset == segment.base_offset
            seal = self.end if is_end else read_seal(self.files, segment.folder, segment.base_offset)
        except CorruptError as error:
            logger.warning("%s; the log segment is read instead", error)
            return None
        if seal is None or seal.files[LOG].size != segment.size:
            return None
        return seal.next_offset

    def recover(self, segment: LogSegment, producers: ProducerStates, epochs: LeaderEpochs) -> int:
        """Rebuild the indexes, cut a torn tail and keep damage; return the number of bytes cut."""
        with segment.reader() as file:
            bad_at, expected = _first_bad(file, segment, self.high_watermark)
            behind = next_sound_batch(file, bad_at, segment.size) if bad_at < segment.size else None
            is_harmless = self.is_certain or is_zero(file, bad_at, segment.size)
        if bad_at == segment.size:
            if not self.damages:
                return recover_segment(segment, producers, epochs)
            self._ends[segment.base_offset] = expected  # already read-only: change nothing
            return 0
        # A flipped offset may have raised `expected`; the next sound batch shows where the log really was.
        offset = expected if behind is None else min(expected, behind[1].base_offset)
        promised = self.durable_end if behind is None else max(self.durable_end, self.high_watermark)
        if self.damages or offset < promised:
            self._keep(segment, bad_at, offset)
            return 0
        if behind is not None or not is_harmless:
            keep_cut(segment, bad_at, self.files)
        self._tell_cut(segment, bad_at, offset)
        return recover_segment(segment, producers, epochs)

    def _keep(self, segment: LogSegment, bad_at: int, offset: int) -> None:
        """Record the damage and where the log ends after it; the segment's files are not changed (V1)."""
        resume_at, resume, log_end = _survey(segment, bad_at, offset, self.high_watermark)
        self.damages.append(
            Damage(
                segment.path,
                bad_at,
                resume_at,
                offset,
                resume,
                f"{segment.path} is damaged at position {bad_at} (offset {offset}), {resume_at - bad_at} bytes",
            )
        )
        logger.error("%s", self.damages[-1].message)
        self._ends[segment.base_offset] = log_end

    def _tell_cut(self, segment: LogSegment, bad_at: int, offset: int) -> None:
        lost = max(0, self.high_watermark - offset)
        if lost:
            logger.warning(
                "%s: %d records from offset %d on were acknowledged without a sync and did not survive "
                '(durability="os")', segment.path, lost, offset,
            )  # fmt: skip
        else:
            logger.info("%s: a torn tail of %d bytes was cut", segment.path, segment.size - bad_at)


def keep_cut(segment: LogSegment, bad_at: int, files: Files) -> Path:
    """Copy the bytes that will be cut to a file in the log's folder (V2).

    A copy left by an interrupted recovery is overwritten (V3).
    """
    path = segment.folder / f"{segment.path.name}.{bad_at}.cut"
    tail = segment.read_at(bad_at, segment.size - bad_at)
    files.publish(path, tail)
    logger.warning(
        "%s: %d bytes from position %d on do not belong to the log; a copy is kept in %s",
        segment.path, len(tail), bad_at, path.name,
    )  # fmt: skip
    return path


def _first_bad(file: File, segment: LogSegment, high_watermark: int) -> tuple[int, int]:
    """Return the position of the first byte that starts no valid batch, and the offset expected there."""
    position, expected = 0, segment.base_offset
    try:
        for start, header in sound_headers(file, 0, segment.size):
            # The CRC does not cover the base offset. A base offset that decreases is damage. So is one
            # that jumps ahead of every acknowledged offset, because only compaction makes gaps, and only
            # below that.
            is_ahead = header.base_offset > expected and header.base_offset > high_watermark > 0
            if header.base_offset < expected or is_ahead:
                break
            position, expected = start + header.size, header.next_offset
    except CorruptError:
        pass
    return position, expected


def _survey(
    segment: LogSegment, bad_at: int, offset: int, high_watermark: int
) -> tuple[int, int | None, int]:
    """Return the position and offset of the next plausible batch after damage, and where the log ends."""
    resume_at, resume, log_end = segment.size, None, offset
    with segment.reader() as file:
        for position, header in sound_batches(file, bad_at, segment.size):
            if position > bad_at and log_end <= header.base_offset <= max(log_end, high_watermark):
                if resume is None:
                    resume_at, resume = position, header.base_offset
                log_end = header.next_offset
    return resume_at, resume, log_end


class KafkaRecovery:
    """Recover as a broker does: cut a segment at its first bad batch; keep a copy of sound batches after it."""

    read_only: str | None = None

    def __init__(self, files: Files) -> None:
        self.files = files

    def known_end(self, segment: LogSegment) -> int | None:
        return None

    def recover(self, segment: LogSegment, producers: ProducerStates, epochs: LeaderEpochs) -> int:
        with segment.reader() as file:
            bad_at, expected = _first_bad(file, segment, 0)
            behind = next_sound_batch(file, bad_at, segment.size, min_offset=expected)
        if behind is not None:
            keep_cut(segment, bad_at, self.files)
        return recover_segment(segment, producers, epochs)


Recovery: TypeAlias = SafeRecovery | KafkaRecovery
"""Decides which segments found on disk to trust, and how to recover the others."""


def recovery_named(name: str, files: Files) -> Recovery:
    """Return the recovery strategy with this name."""
    if name == "safe":
        return SafeRecovery(files)
    if name == "kafka":
        return KafkaRecovery(files)
    raise InvalidError(f"recovery={name!r}: say 'safe' or 'kafka'", kafka_name="INVALID_CONFIG")


END_OF_LOG: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Ports:
    """The injected dependencies of a partition: files, clock and the like."""

    files: Files
    clock: Clock
    randomness: Randomness
    scheduler: Scheduler


class Loader:
    """The loading of one partition folder: `load` leaves the parts of the loaded log in the attributes."""

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
        self.folder = folder
        self.config = config
        self._broker = broker
        self.ports = ports
        self._clean = clean
        self.recovery_point = recovery_point
        self.log_start = log_start
        self.recovery = recovery
        self.segments = SegmentList()
        self.epochs, self._are_epochs_damaged = self._open_epochs()
        self.producers = self._new_producers()
        self.retirement = Retirement(folder, self.producers, files=ports.files, scheduler=ports.scheduler)

    def load(self) -> None:
        finish_interrupted_work(self.folder, self._segment, files=self.ports.files)
        self._splitting(self._open_segments)
        if not self._clean:
            self._splitting(self._recover_unflushed)
        log_end = self._find_end()
        log_start = max(self.log_start, self.segments.first.base_offset)
        recovery_point = log_end
        if self.recovery.read_only is None:  # a damaged log is served as it is: nothing is grown or rebuilt
            self.segments.last.grow_indexes(self.config.segment_index_bytes)
            self._trim_epochs(log_end)
            self.producers.remove_stray_snapshots(self.segments.bases)
            rebuild_producers(
                self.producers,
                self.segments,
                log_start=log_start,
                end=log_end,
                clean=self._clean,
                now_ms=self.ports.clock.now_ms(),
            )
            if not self._clean:
                recovery_point = min(self.recovery_point, log_end)
            recovery_point = max(recovery_point, log_start)
        self.log_start, self.log_end, self.recovery_point = log_start, log_end, recovery_point

    # -- segments --------------------------------------------------------------------------------

    def _segment(self, base_offset: int, suffix: str = "") -> LogSegment:
        ports = self.ports
        return LogSegment(
            self.folder,
            base_offset,
            self.config,
            files=ports.files,
            clock=ports.clock,
            randomness=ports.randomness,
            suffix=suffix,
        )

    def _open_segments(self) -> None:
        """Open the segments in the order of their base offsets; sound ones are not read."""
        present = set(self.ports.files.list(self.folder))
        logs = sorted(name for name in present if name.endswith(LOG) and OFFSET_NAME.fullmatch(name))
        stems = [name.removesuffix(LOG) for name in logs]
        self._remove_orphans(present, set(stems))
        opened: list[LogSegment] = []
        for stem in stems:
            segment = self._segment(int(stem))
            has_index = stem + INDEX in present
            if has_index and stem + TIME_INDEX not in present:
                segment.times.resize(0)
            has_transactions = stem + TRANSACTION_INDEX in present
            if not has_index or (has_transactions and not self._has_sane_transactions(segment)):
                self.segments = SegmentList(opened)
                self._recover(segment)
            opened.append(segment)
        self.segments = SegmentList(opened)

    def _remove_orphans(self, present: set[str], stems: set[str]) -> None:
        for name in sorted(present):
            stem, dot, kind = name.partition(".")
            if dot + kind in INDEX_SUFFIXES and stem not in stems:
                self.ports.files.unlink(self.folder / name, missing_ok=True)

    def _has_sane_transactions(self, segment: LogSegment) -> bool:
        try:
            segment.transactions.sanity_check()
        except CorruptError:
            return False
        return True

    def _recover(self, segment: LogSegment) -> int:
        """Recover one segment, after the earlier ones; return the number of bytes cut."""
        producers = self._new_producers()
        if self.recovery.read_only is None:  # otherwise damage prevents a replay
            rebuild_producers(
                producers,
                self.segments,
                log_start=self.log_start,
                end=segment.base_offset,
                clean=False,
                now_ms=self.ports.clock.now_ms(),
            )
        cut = self.recovery.recover(segment, producers, self.epochs)
        if self.recovery.read_only is not None:
            return 0
        segment.sync()  # a second crash could lose part of a rebuilt index, which would not be checked again
        producers.take_snapshot()
        return cut

    def _recover_unflushed(self) -> None:
        unflushed = self.segments.between(self.recovery_point, END_OF_LOG)
        for number, segment in enumerate(unflushed):
            try:
                cut = self._recover(segment)
            except OffsetsGoBackError:  # nothing in such a segment is trusted
                cut = segment.truncate_to(segment.base_offset)
            if cut > 0:
                self._retire(unflushed[number + 1 :])
                return

    def _retire(self, segments: Sequence[LogSegment]) -> None:
        self.retirement.retire(segments, self.config.file_delete_delay_ms)
        self.segments = self.segments.without(segments)

    def _splitting(self, step: Callable[[], None]) -> None:
        """Run a step; repeat it after splitting each segment that has to be split first."""
        while True:
            try:
                return step()
            except OffsetOverflowError as overflow:
                old = overflow.segment
                parts = split(old, self._segment)
                self.retirement.stage(parts)
                self.retirement.swap(parts, [old], self.config.file_delete_delay_ms)
                self.segments = self.segments.without([old]).with_segments(parts)

    def _find_end(self) -> int:
        """Return the log end offset; replace the segments by an empty one if they end before the log start."""
        if len(self.segments):
            last = self.segments.last
            known = self.recovery.known_end(last)
            log_end = last.read_next_offset() if known is None else known
            if log_end >= self.log_start:
                return log_end
            self._retire(self.segments.segments)
            self.epochs.clear()
            self.producers.truncate_fully_and_start_at(self.log_start)
        self.segments = SegmentList([self._segment(self.log_start).create()])
        return self.log_start

    # -- epochs ----------------------------------------------------------------------------------

    def _open_epochs(self) -> tuple[LeaderEpochs, bool]:
        """Return the epochs of the checkpoint; none (rebuild them from the log) when it is damaged or missing."""
        path, files = self.folder / LEADER_EPOCHS, self.ports.files
        try:
            return LeaderEpochs(path, files=files), False
        except CorruptError:
            return LeaderEpochs(path, files=files, ignore_file=True), True

    def _trim_epochs(self, log_end: int) -> None:
        # A broker continues without the checkpoint; Tidegate rebuilds the epochs from the batches.
        is_missing = self.epochs.latest is None and self.segments.size > 0
        if self._are_epochs_damaged or (is_missing and not isinstance(self.recovery, KafkaRecovery)):
            self.epochs.clear()
            for segment in self.segments:
                for _, header in segment.batches():
                    note_epoch(self.epochs, header)
        self.epochs.truncate_from_end(log_end)
        self.epochs.truncate_from_start(self.log_start)

    # -- producers -------------------------------------------------------------------------------

    def _new_producers(self) -> ProducerStates:
        return ProducerStates(
            self.folder,
            files=self.ports.files,
            expiration_ms=self._broker.producer_id_expiration_ms,
        )
