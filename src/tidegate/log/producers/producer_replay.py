"""Batches of the log, told to the producer state: one by one, or a stretch of the log again.

Owns the step from a stored batch to `ProducerStates` (data batch or end marker, and what an ended transaction
leads to) and Kafka's rebuilding of the state from snapshots and log. What is in order is decided by
`producer_append`, what is remembered by `producer_state`.

Thread rule: under the partition's lock, or while the log is being loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tidegate.log.format.batch import BatchHeader, Buffer, ControlType, read_control
from tidegate.log.producers.producer_state import CompletedTxn, Origin, ProducerAppend, ProducerStates
from tidegate.log.segments.batch_file import headers
from tidegate.log.segments.segment import LogSegment
from tidegate.log.segments.segment_list import SegmentList
from tidegate.log.segments.transaction_index import AbortedTxn


class ProducerStep(NamedTuple):
    """What one batch does to its producer; nothing is changed before `take`."""

    append: ProducerAppend
    completed: CompletedTxn | None
    aborted: AbortedTxn | None

    def take(self, producers: ProducerStates) -> None:
        """The batch is in the log: remember it."""
        producers.update(self.append)
        if self.completed is not None:
            producers.complete_txn(self.completed)


def check_batch(
    producers: ProducerStates, header: BatchHeader, content: Callable[[], Buffer], origin: Origin
) -> ProducerStep:
    """Check a batch that has a producer; `content` gives its bytes, asked for only if it is a marker."""
    append = producers.prepare(header.producer_id, origin)
    completed = None
    if not header.is_control:
        append.append(header)
    elif header.count > 0:  # a compacted marker leaves an empty batch
        control = read_control(content())
        if control.ends_transaction:
            completed = append.append_marker(
                header,
                is_abort=control.kind is ControlType.ABORT,
                coordinator_epoch=control.coordinator_epoch or 0,
            )
    aborted = None
    if completed is not None and completed.is_aborted:
        stable = producers.last_stable_offset(completed)
        aborted = AbortedTxn(completed.producer_id, completed.first_offset, completed.last_offset, stable)
    return ProducerStep(append, completed, aborted)


def replay_segment(producers: ProducerStates, segment: LogSegment, start: int, end: int) -> None:
    """Tell `producers` the batches of one segment from offset `start` to byte `end`, without checks."""
    file, hint = segment.open_near(start)
    with file:
        place = segment.locate_in(file, hint, start, end)
        if place is None:
            return
        for position, header in headers(file, place.position, end):
            if header.has_producer:
                content = _reading(file.read_at, position, header.size)
                check_batch(producers, header, content, Origin.REPLICATION).take(producers)


def _reading(read_at: Callable[[int, int], bytes], position: int, size: int) -> Callable[[], bytes]:
    return lambda: read_at(position, size)


def rebuild_producers(
    producers: ProducerStates,
    segments: SegmentList,
    *,
    log_start: int,
    end: int,
    clean: bool,
    now_ms: int,
) -> None:
    """Make `producers` the state at offset `end`: newest snapshot, then the log behind it, then a snapshot.

    After a clean stop without any snapshot there is nothing to know, so the log is not read.
    """
    bases = segments.bases[-2:]
    if clean and producers.latest_snapshot is None:
        for offset in (*bases, end):
            producers.update_map_end_offset(offset)
            producers.take_snapshot()
        return
    nothing_to_lose = producers.is_empty and producers.map_end_offset >= end
    producers.truncate_and_reload(log_start, end, now_ms)
    if end > producers.map_end_offset and not nothing_to_lose:
        last = segments.floor(end)
        for segment in segments.between(producers.map_end_offset, end):
            start = max(segment.base_offset, producers.map_end_offset, log_start)
            producers.update_map_end_offset(start)
            if segment.base_offset in bases:
                producers.take_snapshot()
            stop = segment.size
            if segment is last and (place := segment.locate(end)) is not None:
                stop = place.position
            replay_segment(producers, segment, start, stop)
    producers.update_map_end_offset(end)
    producers.take_snapshot()
