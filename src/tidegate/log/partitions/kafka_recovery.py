"""What to believe of a log segment found on disk, and Kafka's way of recovering one.

Owns the question (`Recovery`) and the answer of a Kafka 3.9 broker: lengths are believed after a clean stop; else
a segment's indexes, epochs and producers are rebuilt from its batches and the file is cut before the first batch
that is not sound. When which segment is recovered is `loading`'s business.

Recovering can be interrupted anywhere and started again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Protocol

from tidegate.errors import CorruptError
from tidegate.log.format.batch import BatchHeader
from tidegate.log.partitions.epochs import LeaderEpochs
from tidegate.log.producers.producer_replay import check_batch
from tidegate.log.producers.producer_state import Origin, ProducerStates
from tidegate.log.segments.batch_file import sound_headers
from tidegate.log.segments.segment import LogSegment
from tidegate.log.segments.splitting import OffsetOverflowError


class Recovery(Protocol):
    """What to believe of a segment found on disk, and what to do with one that a crash may have hurt."""

    @property
    def read_only(self) -> str | None:
        """Why the log must not be written to; None when it may. Asked after loading."""
        ...

    def known_end(self, segment: LogSegment) -> int | None:
        """The offset after a segment's last; None when it must be read."""
        ...

    def recover(self, segment: LogSegment, producers: ProducerStates, epochs: LeaderEpochs) -> int:
        """Rebuild the segment's indexes and cut what is no sound batch; how many bytes went."""
        ...


class KafkaRecovery:
    """Believes file lengths after a clean stop; cuts a segment at its first bad batch otherwise."""

    read_only: str | None = None

    def known_end(self, segment: LogSegment) -> int | None:
        return None

    def recover(self, segment: LogSegment, producers: ProducerStates, epochs: LeaderEpochs) -> int:
        return recover_segment(segment, producers, epochs)


def recover_segment(segment: LogSegment, producers: ProducerStates, epochs: LeaderEpochs) -> int:
    """Rebuild indexes, epochs and producers from the batches, and cut the file before the first bad one."""
    segment.reset_indexes()
    valid = 0
    with segment.reader() as file:
        for position, header in _until_damage(sound_headers(file, 0, segment.size)):
            if not segment.holds(header.last_offset):
                raise OffsetOverflowError(segment, header, position)
            step = None
            if header.has_producer:
                content = partial(file.read_at, position, header.size)
                try:
                    step = check_batch(producers, header, content, Origin.REPLICATION)
                except CorruptError:  # a marker that cannot be read ends the log as a bad batch does
                    break
            segment.reindex(header, position)
            note_epoch(epochs, header)
            if step is not None:
                step.take(producers)
                if step.aborted is not None:
                    segment.add_aborted(step.aborted)
            producers.update_map_end_offset(header.next_offset)
            valid = position + header.size
    cut = segment.cut_file(valid)
    segment.become_inactive()
    return cut


def note_epoch(epochs: LeaderEpochs, header: BatchHeader) -> None:
    """Remember where a leader epoch begins that is newer than all known ones."""
    latest = epochs.latest
    if header.leader_epoch >= 0 and (latest is None or header.leader_epoch > latest.epoch):
        epochs.assign(header.leader_epoch, header.base_offset)


def _until_damage(batches: Iterator[tuple[int, BatchHeader]]) -> Iterator[tuple[int, BatchHeader]]:
    with suppress(CorruptError):
        yield from batches
