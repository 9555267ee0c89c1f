"""A partition's state carried over a range that was summed up elsewhere, without looking at its records.

Owns `advance`: whether every record of a range is sound behind the state before it, and the state after it. It knows
the rows of the decision table by which a sound stream moves on (A1, A7, B1, C4, and ends of chains whose sums are not
tested any more); whatever needs another row is not decided here: the range is read again, with its carry, by the
validator.

Y1  where `advance` answers a state, the validator says of every record of the range that it is sound (OK, UNMANAGED or
    a heartbeat) and leaves that very state.
Y2  where it answers None nothing has changed.

Not for compacted partitions, whose gaps are judged by the age of records.

Thread rule: pure.
"""

from __future__ import annotations

from dataclasses import replace

from tidegate.integrity.header import MAX_SEQUENCE, ChecksumType, EndOfChain
from tidegate.integrity.rules import ValidationRules
from tidegate.integrity.state import NO_TIME, UNCOUNTED, PartitionState, Producer
from tidegate.integrity.summary import NOWHERE, RangeSummary, Run

_SUMMED = 2**64


def advance(state: PartitionState, summary: RangeSummary, rules: ValidationRules) -> PartitionState | None:
    """The state behind a range; None when the range must be judged record by record (Y1, Y2)."""
    if summary.malformed or summary.has_push or summary.bad_heartbeats or rules.strict or rules.batch_only:
        return None
    if not summary.records:
        return state
    if summary.first_offset < state.next_offset:
        return None
    moved: list[Producer] = []
    for guid, runs in sorted(summary.runs.items(), key=lambda item: item[1][0].first_offset):
        producer = state.producers.get(guid)
        for run in runs:
            producer = _follow(producer, guid, run)
            if producer is None:
                return None
        if producer is not None:
            moved.append(producer)
    after = state.copy()
    after.producers.put_all(moved)
    if len(after.producers) > rules.max_producers:
        return None
    after.next_offset = summary.last_offset + 1
    return after


def _follow(known: Producer | None, guid: bytes, run: Run) -> Producer | None:
    """The producer behind a run of sound records; None when they are not, or it cannot be told."""
    if run.bad_offset != NOWHERE:
        return None
    if run.announced >= 0:
        producer = _opened(known, guid, run)
    else:
        producer = None if known is None or known.ended else _continued(known, run)
    if producer is None:
        return None
    if run.end is None:
        return producer
    if producer.registered and not producer.tainted and run.end != _certified(producer):
        return None
    return replace(producer, ended=True, final=run.final)


def _opened(known: Producer | None, guid: bytes, run: Run) -> Producer | None:
    is_first = known is None and run.chain == 0
    is_next = known is not None and known.ended and run.chain == known.chain + 1
    if not is_first and not is_next:
        return None
    blank = Producer(
        guid=guid,
        chain=run.chain,
        sequence=run.first_sequence,
        registered=True,
        checksum_type=run.announced,
        data_records=0 if known is None else known.data_records,
        producer_time=NO_TIME if known is None else known.producer_time,
    )
    return _moved(blank, run)


def _continued(known: Producer, run: Run) -> Producer | None:
    if run.chain != known.chain or run.first_sequence != known.sequence + 1:
        return None
    if known.registered and known.checksum_type == ChecksumType.ADHASH:
        return None  # its sums are spared where a chain begins elsewhere
    if not known.registered:
        return None  # whether the records are of headers only, which makes it registered, is not in a run
    return _moved(known, run)


def _moved(producer: Producer, run: Run) -> Producer:
    counted = producer.data_records
    sums = {ChecksumType.ADHASH2: run.crc_sum, ChecksumType.ADHASH: run.field_sum}
    added = sums.get(ChecksumType(producer.checksum_type), 0)
    moved = replace(
        producer,
        sequence=run.last_sequence,
        data_records=counted if counted == UNCOUNTED else counted + run.data_records,
        producer_time=max(producer.producer_time, run.newest_time),
        log_time=run.log_time,
        offset=run.last_offset,
    )
    return replace(
        moved,
        checksum=(producer.checksum + added) % _SUMMED,
        stamp_sum=(producer.stamp_sum + run.stamp_sum) % _SUMMED,
        records=producer.records + run.records,
        ended=producer.ended or run.last_sequence == MAX_SEQUENCE,
    )


def _certified(producer: Producer) -> EndOfChain:
    return EndOfChain(
        ChecksumType(producer.checksum_type), producer.checksum, producer.records, producer.stamp_sum
    )
