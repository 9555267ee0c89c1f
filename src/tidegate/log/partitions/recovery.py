"""Safe recovery: telling a torn tail from damage, so that nothing is ever cut silently.

Owns what becomes of a log segment whose bytes do not check out after an unclean stop. A broker cuts a segment
at its first bad batch: right for a replica, wrong for the only copy. Here the last synced offset (*durable
end*) and the last acknowledged one (*high watermark*), both from the watermark file, decide:

| first bad batch | behind it | what happens |
|---|---|---|
| below the durable end | anything | damage |
| below the high watermark | a sound batch | damage |
| at or above the high watermark | a sound batch | copied to `<base>.log.<position>.cut`, then cut |
| at or above the durable end | nothing sound | a torn tail: cut |

*Damage* changes nothing on disk: every sound batch is served, before and behind it; appends are refused;
reading into it raises `CorruptError` with file and position. `tidegate verify` shows the extent; a restored
file, or `recovery="kafka"`, which keeps a copy of what it cuts, is the way out.

Invariants:
V1  no byte below the durable end is ever removed here;
V2  what is cut is a torn batch, or is kept beside the log; where the watermark file is damaged, both offsets are only
    lower bounds, so that a torn batch is kept, too;
V3  recovering twice, or again after a crash in the middle, ends in the same files.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tidegate.errors import CorruptError, InvalidError, verify_command
from tidegate.files import File, Files
from tidegate.log.partitions.epochs import LeaderEpochs
from tidegate.log.partitions.kafka_recovery import KafkaRecovery, Recovery, recover_segment
from tidegate.log.producers.producer_state import ProducerStates
from tidegate.log.segments.batch_file import sound_headers
from tidegate.log.segments.file_names import LOG
from tidegate.log.segments.resync import next_sound_batch, sound_batches
from tidegate.log.segments.seals import Seal, read_seal
from tidegate.log.segments.segment import LogSegment

logger = logging.getLogger("tidegate.log")

_LOOK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a log segment that hold no sound batch though they should."""

    path: Path
    position: int
    end: int
    offset: int
    resume_offset: int | None
    message: str


@dataclass(slots=True)
class SafeRecovery:
    """The default strategy; both offsets as the last writer left them, 0 when unknown.

    `is_certain` is False when they may have been larger, because the file that holds them is damaged. `end` is the
    seal that the last segment had, if it is as it was closed.
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
        """Where a segment ends, from its seal or from what recovery saw."""
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
        """Rebuild the indexes; cut a torn tail, keep damage. How many bytes went."""
        with segment.reader() as file:
            bad_at, expected = _first_bad(file, segment, self.high_watermark)
            behind = next_sound_batch(file, bad_at, segment.size) if bad_at < segment.size else None
        if bad_at == segment.size:
            if not self.damages:
                return recover_segment(segment, producers, epochs)
            self._ends[segment.base_offset] = expected  # read-only already: look, do not touch
            return 0
        # A flipped offset may have raised what is expected; what follows says where the log really was.
        offset = expected if behind is None else min(expected, behind[1].base_offset)
        promised = self.durable_end if behind is None else max(self.durable_end, self.high_watermark)
        if self.damages or offset < promised:
            self._keep(segment, bad_at, offset)
            return 0
        if behind is not None or not (self.is_certain or _is_zero(segment, bad_at)):
            keep_cut(segment, bad_at, self.files)
        self._tell_cut(segment, bad_at, offset)
        return recover_segment(segment, producers, epochs)

    def _keep(self, segment: LogSegment, bad_at: int, offset: int) -> None:
        """Remember the damage and where the log ends behind it; the segment's files stay as they are (V1)."""
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
    """Copy what is about to be cut to a file beside the log (V2); one left by an interrupted recovery is
    written again (V3)."""
    path = segment.folder / f"{segment.path.name}.{bad_at}.cut"
    tail = segment.read_at(bad_at, segment.size - bad_at)
    files.publish(path, tail)
    logger.warning(
        "%s: %d bytes from position %d on do not belong to the log; a copy is kept in %s",
        segment.path, len(tail), bad_at, path.name,
    )  # fmt: skip
    return path


def _is_zero(segment: LogSegment, start: int) -> bool:
    """Whether nothing but the zeros of a preallocated file follows."""
    with segment.reader() as file:
        for position in range(start, segment.size, _LOOK_BYTES):
            if any(file.read_at(position, min(_LOOK_BYTES, segment.size - position))):
                return False
    return True


def _first_bad(file: File, segment: LogSegment, high_watermark: int) -> tuple[int, int]:
    """Position of the first byte that begins no sound batch in its place, and the offset expected there."""
    position, expected = 0, segment.base_offset
    try:
        for start, header in sound_headers(file, 0, segment.size):
            # The CRC does not cover the base offset. One that goes back is damage; so is one that jumps ahead
            # of everything acknowledged, because only compaction makes gaps, and only below that.
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
    """What follows damage: position and offset of the next batch that can be true, and where the log ends."""
    resume_at, resume, log_end = segment.size, None, offset
    with segment.reader() as file:
        for position, header in sound_batches(file, bad_at, segment.size):
            if position > bad_at and log_end <= header.base_offset <= max(log_end, high_watermark):
                if resume is None:
                    resume_at, resume = position, header.base_offset
                log_end = header.next_offset
    return resume_at, resume, log_end


@dataclass(slots=True)
class CarefulKafkaRecovery(KafkaRecovery):
    """Recovers as a broker does, but keeps a copy of sound batches that its cut takes along."""

    files: Files

    def recover(self, segment: LogSegment, producers: ProducerStates, epochs: LeaderEpochs) -> int:
        with segment.reader() as file:
            bad_at, expected = _first_bad(file, segment, 0)
            behind = next_sound_batch(file, bad_at, segment.size, min_offset=expected)
        if behind is not None:
            keep_cut(segment, bad_at, self.files)
        return recover_segment(segment, producers, epochs)


def recovery_named(name: str, files: Files) -> Recovery:
    """The strategy a user asks for by name."""
    if name == "safe":
        return SafeRecovery(files)
    if name == "kafka":
        return CarefulKafkaRecovery(files)
    raise InvalidError(f"recovery={name!r}: say 'safe' or 'kafka'", kafka_name="INVALID_CONFIG")
