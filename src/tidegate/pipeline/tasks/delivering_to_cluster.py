"""Committed parcels into a Kafka cluster: every record is there afterwards, and what is numbered counts once.

A cluster has no append that expects an offset. What is there is looked at first, and only the rest is produced, so a
delivery that is repeated after a crash adds nothing. Two that run at the same moment (an attempt that was given up and
came back to life) both see nothing and both produce: then plain consumers get records twice. Numbered records
(`integrity`, the default) are the same bytes at the same producer positions, so every validator calls the second
one a DUPLICATE, and tables leave it out.

L1  looking begins at the base that the commit gave. Repeats push later records behind their bases, so positions in the
    sender's numbering decide, not offsets: of a sender whose position n is in the log, all up to n were delivered, also
    where compaction has taken them out since.
L2  a record without numbering among ours, or other content at one of our positions, is somebody else's: `FencedError`.
    Results without numbering (`integrity=False`) are known by their offsets alone; after repeats they stop so, too.
L3  the producer is an idempotent one: what the client sends again on its own is neither doubled nor reordered. It takes
    half a second until a broker has given it its number, so producers are kept; one that failed is not used again.

Thread rule: any thread.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.integrity.columns import IntegrityColumns, read_columns
from tidegate.kernels.integrity import MANAGED
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.kafka.writer import KafkaWriter
from tidegate.pipeline.rounds.orders import Section
from tidegate.pipeline.tasks.sections import fenced, records_of, require_ours, require_same

TIMEOUT_SECONDS = 20.0  # for one section, which is delivered again if it takes longer
_CHAIN_BITS = 32  # a position in one number: chain, then sequence


class ClusterDeliverer:
    """Delivers into one cluster."""

    def __init__(self, log: KafkaLog) -> None:
        self._log = log
        self._guard = threading.Lock()
        self._free: dict[str, list[KafkaWriter]] = {}

    def deliver(self, section: Section, base: int, batches: memoryview) -> int:
        """Produce what of a section is not in the partition yet; how many records that were."""
        topic, number = section.topic, section.partition
        first, end = self._log.bounds(topic, [number])[number]
        if end < base:
            raise fenced(section, base, end, "it ends before them")
        ours = records_of(section, batches, base)
        left = ours.slice(_delivered(self._log, section, base, ours, first, end))
        if left.num_rows:
            with self._guard:
                free = self._free.setdefault(topic, [])
                kept = free.pop() if free else None
            writer = self._writer(topic) if kept is None else kept
            try:
                writer.write(left, partition=number)
            except BaseException:
                writer.close()
                raise
            with self._guard:
                free.append(writer)
        return int(left.num_rows)

    def _writer(self, topic: str) -> KafkaWriter:
        made: KafkaWriter = self._log.writer(topic, idempotent=True, timeout_seconds=TIMEOUT_SECONDS)
        return made

    def close(self) -> None:
        with self._guard:
            writers = [writer for free in self._free.values() for writer in free]
            self._free.clear()
        for writer in writers:
            writer.close()


def _delivered(log: KafkaLog, section: Section, base: int, ours: pa.RecordBatch, first: int, end: int) -> int:
    """How many of the section's records were delivered before."""
    number, start = section.partition, max(base, first)
    done = min(start - base, section.records)  # what retention has deleted was there
    if start >= end or done == section.records:
        return done
    stamps = read_columns(ours.column("headers"))
    numbered = bool((stamps.state == MANAGED).all())
    with log.reader(
        section.topic, [number], start={number: start}, stop={number: end}, control_records=True
    ) as reader:
        for piece in reader:
            if numbered:
                done = max(done, _reached(section, base, ours, stamps, piece))
            else:
                require_ours(section, base, ours, piece)
            if done == section.records:
                return done
    return done if numbered else min(end - base, section.records)


def _reached(
    section: Section, base: int, ours: pa.RecordBatch, stamps: IntegrityColumns, found: pa.RecordBatch
) -> int:
    """How many of our records the records found say were delivered (L1)."""
    theirs = read_columns(found.column("headers"))
    foreign = np.flatnonzero(theirs.state != MANAGED)
    if len(foreign):
        at = int(found.column("offset")[int(foreign[0])].as_py())
        raise fenced(section, base, at, "another record lies there")
    sent = np.flatnonzero((theirs.guid_high == stamps.guid_high[0]) & (theirs.guid_low == stamps.guid_low[0]))
    if not len(sent):
        return 0
    mine, seen = _positions(stamps), _positions(theirs)[sent]
    place = np.searchsorted(mine, seen)
    equal = place < len(mine)
    equal[equal] = mine[place[equal]] == seen[equal]
    require_same(section, base, found.take(pa.array(sent[equal])), ours.take(pa.array(place[equal])))
    return int(np.searchsorted(mine, seen.max(), side="right"))


def _positions(stamps: IntegrityColumns) -> npt.NDArray[np.int64]:
    return (stamps.chain.astype(np.int64) << _CHAIN_BITS) | stamps.sequence.astype(np.int64)
