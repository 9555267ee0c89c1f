"""Committed parcels into their topics: each batch once, at the offset the commit gave it.

    the log ends at the base          append
    it ends behind it                 what lies there must be ours: it is compared and skipped, the rest appended
    it ends before it, or differs     somebody else wrote, or what was there is gone: `FencedError`

So a delivery may be repeated after any crash, by anybody, and readers never see a record twice nor an uncommitted one.
A batch's CRC covers all but its offset and epoch; equal CRCs at the same offsets are the same batches. Where the topic
packs batches anew, or compaction took records out meanwhile, the records that are there are compared instead.

That is for a folder; `delivering_to_cluster` says how it is with Kafka.

Thread rule: any thread; the log's partitions take turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from tidegate.clock import Clock
from tidegate.log.fetch import Isolation
from tidegate.log.format.batch import HEADER_SIZE, BatchHeader, iter_headers
from tidegate.log.format.decode import decode
from tidegate.log.log import Log
from tidegate.log.partition import PartitionLog
from tidegate.log.producer_state import Origin
from tidegate.pipeline.rounds.orders import Delivery, Section
from tidegate.pipeline.tasks.delivering_to_cluster import ClusterDeliverer
from tidegate.pipeline.tasks.parcels import read_parcel, section_of
from tidegate.pipeline.tasks.sections import fenced, records_of, require_ours
from tidegate.storage.backends.base import StorageBackend
from tidegate.waiting import waiting

BUSY_MS: Final = 10_000
PAUSE_MS: Final = 5
FETCH_BYTES: Final = 4 << 20


class Deliverer:
    """Delivers into one log."""

    def __init__(self, log: Any, backend: StorageBackend, clock: Clock, *, keeps_open: bool) -> None:
        """`keeps_open`: no other process writes here, so partitions stay open between deliveries."""
        self._log, self._backend, self._clock = log, backend, clock
        self._keeps_open = keeps_open
        self._cluster = None if isinstance(log, Log) else ClusterDeliverer(log)

    def deliver(self, deliveries: Iterable[Delivery]) -> int:
        """Append what is not there yet; how many records that were."""
        count = 0
        for delivery in deliveries:
            data = read_parcel(self._backend, delivery.parcel)
            for section, base in zip(delivery.parcel.sections, delivery.bases, strict=True):
                batches = section_of(data, section)
                if self._cluster is None:
                    count += self._into_folder(section, base, batches)
                else:
                    count += self._cluster.deliver(section, base, batches)
        return count

    def close(self) -> None:
        """Let go of what is kept for the next delivery; the log stays open."""
        if self._cluster is not None:
            self._cluster.close()

    # -- a folder --------------------------------------------------------------------------------

    def _into_folder(self, section: Section, base: int, batches: memoryview) -> int:
        log = self._open(section)
        try:
            return append_expecting(log, section, base, batches, self._log.durability == "disk")
        finally:
            if not self._keeps_open:
                self._log.release(section.topic, section.partition)

    def _open(self, section: Section) -> PartitionLog:
        """The partition for writing; another process that delivers has it for moments only."""
        opening = partial(self._log.partition, section.topic, section.partition)
        opened: PartitionLog = waiting(self._clock, BUSY_MS, opening, pause_ms=PAUSE_MS)
        return opened


def append_expecting(log: PartitionLog, section: Section, base: int, batches: memoryview, sync: bool) -> int:
    """Append a section's batches from offset `base` on, or what of them is not there; how many records that were."""
    appended, stop = 0, base + section.records
    with log.lock:
        end = log.log_end_offset
        if end < base:
            raise fenced(section, base, end, "it ends before them, what was published before is gone")
        if end > base:
            _compare(log, section, base, batches, min(end, stop))
        offset = base
        for position, header in iter_headers(batches):
            if offset < end < offset + header.count:
                raise fenced(section, base, end, "it ends in the middle of a batch")
            if offset >= end:
                _append(log, batches[position : position + header.size], header, offset)
                appended += header.count
            offset += header.count
    if log.high_watermark < stop:
        log.acknowledge(sync=sync)
    return appended


def _append(log: PartitionLog, batch: memoryview, header: BatchHeader, offset: int) -> None:
    """One batch at the log's end; as a replica does it, except where the topic has its own idea of batches."""
    config = log.config
    data = bytearray(batch)
    if config.compression_type != "producer" or config.message_timestamp_type != "CreateTime":
        log.append(data)
        return
    data[:HEADER_SIZE] = header._replace(base_offset=offset, leader_epoch=log.leader_epoch).pack()
    log.append(data, origin=Origin.REPLICATION)


def _compare(log: PartitionLog, section: Section, base: int, batches: memoryview, stop: int) -> None:
    """What lies from `base` up to `stop` is what we would have put there, as far as it is still there."""
    expected: dict[int, tuple[int, int]] = {}
    offset = base
    for _, header in iter_headers(batches):
        expected[offset] = (header.crc, header.count)
        offset += header.count
    at = max(base, log.log_start_offset)
    while at < stop:
        fetched = log.fetch(at, max_bytes=FETCH_BYTES, isolation=Isolation.LOG_END)
        found = list(iter_headers(fetched.data))
        if not found:
            return
        for position, header in found:
            if header.base_offset >= stop:
                return
            if expected.get(header.base_offset) != (header.crc, header.count):
                theirs = memoryview(fetched.data)[position : position + header.size]
                there = decode(theirs, topic=section.topic, partition=section.partition)
                require_ours(section, base, records_of(section, batches, base), there)
            at = header.next_offset
