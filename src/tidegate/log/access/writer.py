"""Arrow tables in, record batches in the partitions' logs.

Owns choosing partitions, cutting batches, compressing, numbering an idempotent producer's batches, and when a
write counts as done. The log checks, stamps and stores each batch (`PartitionLog.append`).

Columns: `value`, and optionally `key`, `timestamp`, `headers` (see `records.coerce`) and `partition`. A row
with no timestamp gets the time of the write.

D1  `write` returns after everything it wrote is acknowledged: on the disk (`durability="disk"`, one sync per
    partition and call, shared with other writers of this process) or with the operating system (`"os"`).
D2  with a producer id, a write that failed may be repeated as it was: batches that arrived are recognised by
    their sequence numbers and not stored twice. All batches are cut and checked before the first is stored.

Thread rule: a writer may be shared; appends take turns, syncs are shared.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import pyarrow as pa

from tidegate.durations import SizeLike, size_bytes
from tidegate.errors import InvalidError
from tidegate.log.access.partitioner import Partitioner
from tidegate.log.access.prepared_write import PreparedWrite, check_appendable
from tidegate.log.batches.batch import BatchHeader, Codec, next_sequence
from tidegate.log.batches.encode import ProducerStamp, encode_with_facts
from tidegate.log.batches.record_facts import RecordFacts
from tidegate.log.batches.records import RecordColumns, coerce
from tidegate.log.partitions.appending import AppendInfo
from tidegate.log.topics.topic_config import TopicConfig

if TYPE_CHECKING:
    from tidegate.log.access.embedded import Durability, Log
    from tidegate.log.access.open_partition import OpenPartition

DEFAULT_BATCH_BYTES = 1 << 20
CODECS = {codec.label: codec for codec in Codec}
_UNCOMPRESSED = ("producer", "uncompressed", "none")
Encoded: TypeAlias = "tuple[bytearray, RecordFacts]"


class Written(NamedTuple):
    """One stored batch: where it is. A duplicate has the offsets its first arrival got."""

    partition: int
    first_offset: int
    last_offset: int
    max_timestamp: int
    log_append_time: int
    duplicate: bool
    size: int

    @property
    def records(self) -> int:
        return self.last_offset - self.first_offset + 1


class Writer:
    """Writes to one topic of an embedded log; made by `Log.writer`."""

    def __init__(
        self,
        log: Log,
        topic: str,
        *,
        compression: str | None = None,
        batch_bytes: SizeLike = DEFAULT_BATCH_BYTES,
        batch_records: int | None = None,
        producer_id: int | None = None,
        producer_epoch: int = 0,
        durability: Durability | None = None,
    ) -> None:
        description = log.describe(topic)
        if compression is not None and compression not in CODECS and compression not in _UNCOMPRESSED:
            raise InvalidError(f"compression {compression!r}: choose one of {', '.join(CODECS)}")
        if batch_records is not None and batch_records < 1:
            raise InvalidError(f"batch_records={batch_records}: a batch holds at least one record")
        if producer_id is not None and not (0 <= producer_id < 2**63 and 0 <= producer_epoch < 2**15):
            raise InvalidError(
                f"producer id {producer_id}, epoch {producer_epoch}: an id is from 0, an epoch 0 to 32767"
            )
        self.topic = topic
        self.partitions = description.partitions
        self.batch_bytes = size_bytes(batch_bytes)
        self.batch_records = batch_records
        self.compression = compression
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.durability = durability if durability is not None else log.durability
        self._log = log
        self._lock = threading.Lock()
        self._partitioner = Partitioner(topic, self.partitions, first=log.randomness.below(self.partitions))
        self._records = log.metrics.counter(
            "tidegate_records_total", "records by what became of them", ("topic", "partition", "verdict")
        )
        self._sequences: dict[int, int] = {}
        self._unfinished: dict[tuple[int, int, int], AppendInfo] = {}

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(
        self,
        table: pa.Table | pa.RecordBatch,
        *,
        partition: int | None = None,
        first_sequences: Mapping[int, int] | None = None,
    ) -> list[Written]:
        """Store the rows; one entry per batch. Returns when they are acknowledged (D1).

        `partition` sends all rows there. `first_sequences` numbers the batches of some partitions anew, as a
        producer does that repeats what it sent before; without it numbering goes on from the last write, also
        over a restart.
        """
        columns = coerce(table)
        explicit = _partition_column(table, partition, len(columns))
        self._log.refresh()
        with self._lock:
            prepared = [
                (number, self._log.open_partition(self.topic, number), rows)
                for number, rows in self._partitioner.split(columns, explicit)
            ]
            if self.producer_id is None:
                plain = [
                    (number, opened, self._encode(opened.log.config, rows, None))
                    for number, opened, rows in prepared
                ]
                written = self._append_all(plain)
            else:
                written = self._append_numbered(prepared, first_sequences or {})
        for _, opened, _ in prepared:
            opened.check_owner()
            opened.log.acknowledge(sync=self.durability == "disk")
        for batch in written:
            self._count(batch)
        return written

    def prepare(self, pieces: Sequence[RecordColumns], partition: int) -> PreparedWrite:
        """Cut and check records for one partition, and store nothing: the result's `append` does.

        For callers that number records themselves, one at a time per partition; `acknowledge` comes after.
        """
        self._log.refresh()
        opened = self._log.open_partition(self.topic, partition)
        config, where = opened.log.config, f"{self.topic}-{partition}"
        sequence = None if self.producer_id is None else self._sequence(partition, opened)
        batches: list[Encoded] = []
        for rows in pieces:
            for batch, facts in self._encode(config, rows, sequence):
                _require_fits(batch, config, where)
                check_appendable(batch, facts, config, where, self._log.clock.now_ms())
                batches.append((batch, facts))
            if sequence is not None:
                sequence = next_sequence(sequence, len(rows))

        def store(batch: bytearray, facts: RecordFacts) -> Written:
            opened.check_owner()
            written = Written(partition, *opened.log.append(batch, facts=facts))
            self._count(written)
            return written

        def begin() -> None:
            if sequence is not None:
                self._sequences[partition] = sequence

        return PreparedWrite(batches, store, self._lock, begin)

    def acknowledge(self, partitions: Iterable[int]) -> None:
        """Wait until what was appended to these partitions counts as written (D1)."""
        for number in partitions:
            opened = self._log.open_partition(self.topic, number)
            opened.log.acknowledge(sync=self.durability == "disk")

    def close(self) -> None:
        """Nothing is pending after a write; partitions stay open until the log closes."""

    # -- inside ----------------------------------------------------------------------------------

    def _count(self, written: Written) -> None:
        verdict = "duplicate" if written.duplicate else "written"
        self._records.add(written.records, topic=self.topic, partition=written.partition, verdict=verdict)

    def _append_numbered(
        self, prepared: list[tuple[int, OpenPartition, RecordColumns]], first_sequences: Mapping[int, int]
    ) -> list[Written]:
        """Cut and number everything, then store it, then let the numbers count (D2)."""
        ready: list[tuple[int, OpenPartition, Iterable[Encoded]]] = []
        following: dict[int, int] = {}
        for number, opened, rows in prepared:
            first = first_sequences.get(number)
            sequence = self._sequence(number, opened) if first is None else first
            batches = list(self._encode(opened.log.config, rows, sequence))
            for batch, _ in batches:
                _require_fits(batch, opened.log.config, f"{self.topic}-{number}")
            following[number] = next_sequence(sequence, len(rows))
            ready.append((number, opened, batches))
        written = self._append_all(ready)
        self._sequences.update(following)
        self._unfinished.clear()
        return written

    def _append_all(self, ready: Iterable[tuple[int, OpenPartition, Iterable[Encoded]]]) -> list[Written]:
        written: list[Written] = []
        for number, opened, batches in ready:
            opened.check_owner()
            for batch, facts in batches:
                written.append(Written(number, *self._append(number, opened, batch, facts)))
        return written

    def _append(self, number: int, opened: OpenPartition, batch: bytearray, facts: RecordFacts) -> AppendInfo:
        if self.producer_id is None:
            return opened.log.append(batch, facts=facts)
        header = BatchHeader.parse(batch)
        identity = (number, header.base_sequence, header.last_sequence)
        arrived = self._unfinished.get(identity)
        if arrived is not None:  # the log itself remembers only the last five batches of a producer
            return arrived._replace(duplicate=True, size=0)
        appended = opened.log.append(batch, facts=facts)
        self._unfinished[identity] = appended
        return appended

    def _encode(self, config: TopicConfig, rows: RecordColumns, sequence: int | None) -> Iterator[Encoded]:
        codec = self._codec(config)
        producer = None
        if self.producer_id is not None and sequence is not None:
            producer = ProducerStamp(self.producer_id, self.producer_epoch, sequence)
        return encode_with_facts(
            rows,
            max_batch_bytes=min(self.batch_bytes, config.max_message_bytes, config.segment_bytes),
            max_batch_records=self.batch_records,
            codec=codec,
            level=_level(codec, config),
            producer=producer,
            now_ms=self._log.clock.now_ms(),
        )

    def _codec(self, config: TopicConfig) -> Codec:
        """The topic's codec where it insists on one, else the writer's."""
        wanted = config.compression_type if config.compression_type != "producer" else self.compression
        return Codec.NONE if wanted is None or wanted in _UNCOMPRESSED else CODECS[wanted]

    def _sequence(self, number: int, opened: OpenPartition) -> int:
        """The number after the last one this producer used here, as far as the log remembers."""
        known = self._sequences.get(number)
        if known is not None:
            return known
        entry = opened.log.active_producers.get(self.producer_id if self.producer_id is not None else -1)
        if entry is None or entry.epoch != self.producer_epoch or entry.last_sequence < 0:
            return 0
        return next_sequence(entry.last_sequence, 1)


def _partition_column(table: pa.Table | pa.RecordBatch, partition: int | None, rows: int) -> pa.Array | None:
    if partition is not None:
        return pa.repeat(pa.scalar(partition, pa.int32()), rows)
    index = table.schema.get_field_index("partition")
    if index < 0:
        return None
    column = table.column(index)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _level(codec: Codec, config: TopicConfig) -> int | None:
    return {
        Codec.GZIP: config.compression_gzip_level,
        Codec.LZ4: config.compression_lz4_level,
        Codec.ZSTD: config.compression_zstd_level,
    }.get(codec)


def _require_fits(batch: bytearray, config: TopicConfig, where: str) -> None:
    limit = min(config.max_message_bytes, config.segment_bytes)
    if len(batch) > limit:
        raise InvalidError(
            f"a record for {where} makes a batch of {len(batch)} bytes, above the {limit} that "
            f"max.message.bytes and segment.bytes allow, so nothing was written; make the record smaller or "
            f"raise the setting",
            kafka_name="MESSAGE_TOO_LARGE",
        )
