"""Write Arrow tables as record batches to the logs of partitions.

`Writer` chooses partitions, cuts and compresses batches, assigns sequence numbers for an idempotent producer, and waits
for acknowledgement. The log checks, stamps and stores each batch (`PartitionLog.append`). Columns: `value`, and
optionally `key`, `timestamp`, `headers` (see `format.records.coerce`), `partition`. A row with no timestamp gets the
time of the write.

D1  `write` returns after everything it wrote is acknowledged: on the disk (`durability="disk"`, one sync per
    partition and call, shared with other writers of this process) or with the operating system (`"os"`).
D2  with a producer id, a failed write may be repeated with the same rows: those that were stored are not
    stored again. Other rows are stored as new ones. Sequence numbers always continue after the last batch that is
    in the log. All batches are cut and checked before the first is stored.
D3  a batch counts as a duplicate only if the stored batch holds the same records; one that reuses the
    sequence numbers of other records is refused.

Thread rule: a writer may be shared; appends are serialised, syncs are shared.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.durations import SizeLike, size_bytes
from tidegate.errors import InvalidError
from tidegate.kernels.hashing import murmur2, partitions_of_keys
from tidegate.log.append_validation import (
    LOG_APPEND_TIME,
    AppendInfo,
    Appending,
    compression_level,
    duplicate_of,
    prepare,
)
from tidegate.log.fetch import Isolation
from tidegate.log.format.batch import (
    HEADER_SIZE,
    NO_TIMESTAMP,
    BatchHeader,
    Codec,
    RecordFacts,
    next_sequence,
)
from tidegate.log.format.decode import decode
from tidegate.log.format.encode import ProducerStamp, encode_with_facts
from tidegate.log.format.records import RecordColumns, binary_buffers, coerce
from tidegate.log.producer_state import Origin
from tidegate.log.topic_config import TopicConfig

if TYPE_CHECKING:
    from tidegate.log.log import Durability, Log
    from tidegate.log.open_partitions import OpenPartition


RUN_ROWS = 4096


def partition_of_key(key: bytes, partitions: int) -> int:
    """Return the partition that Kafka's default partitioner chooses for a key."""
    return int(murmur2(np.frombuffer(key, np.uint8)) & 0x7FFFFFFF) % partitions


def partitions_of_column(keys: pa.BinaryArray, partitions: int) -> NDArray[np.int32]:
    """Return the partition that Kafka's default partitioner chooses for each key of a column; 0 for null keys."""
    chosen = np.zeros(len(keys), np.int32)
    if len(keys) > keys.null_count:
        data, bounds = binary_buffers(keys)
        partitions_of_keys(data, bounds, _valid(keys), partitions, chosen)
    return chosen


class Partitioner:
    """Choose partitions for the rows of one topic; keep the next partition for rows without a key."""

    def __init__(self, topic: str, partitions: int, *, first: int = 0) -> None:
        self.topic = topic
        self.partitions = partitions
        self._next_keyless = first % partitions

    def choose(self, columns: RecordColumns, explicit: pa.Array | None) -> NDArray[np.int32]:
        """Return the partition of every row."""
        rows = len(columns)
        chosen = np.full(rows, -1, np.int32)
        if explicit is not None:
            self._take_explicit(explicit, chosen)
        open_rows = chosen < 0
        if self.partitions == 1:
            chosen[open_rows] = 0
            return chosen
        if open_rows.any() and columns.key.null_count < rows:
            has_key = _valid(columns.key) & open_rows
            data, bounds = binary_buffers(columns.key)
            partitions_of_keys(data, bounds, has_key, self.partitions, chosen)
        keyless = np.flatnonzero(chosen < 0)
        if len(keyless):
            runs = np.arange(len(keyless)) // RUN_ROWS
            chosen[keyless] = (self._next_keyless + runs) % self.partitions
            self._next_keyless = int(self._next_keyless + runs[-1] + 1) % self.partitions
        return chosen

    def split(self, columns: RecordColumns, explicit: pa.Array | None) -> Iterator[tuple[int, RecordColumns]]:
        """Yield (partition, its rows in order) for every partition that gets rows."""
        if len(columns) == 0:
            return
        chosen = self.choose(columns, explicit)
        first = int(chosen[0])
        if (chosen == first).all():
            yield first, columns
            return
        order = np.argsort(chosen, kind="stable")
        sorted_columns = columns.take(pa.array(order))
        counts = np.bincount(chosen, minlength=self.partitions)
        start = 0
        for partition, count in enumerate(counts.tolist()):
            if count:
                yield partition, sorted_columns.slice(start, count)
                start += count

    def _take_explicit(self, explicit: pa.Array, chosen: NDArray[np.int32]) -> None:
        if not (pa.types.is_integer(explicit.type) or pa.types.is_null(explicit.type)):
            raise InvalidError(
                f"column 'partition' is {explicit.type}; give partition numbers, null for none"
            )
        bounds = pc.min_max(explicit.cast(pa.int64()))
        for wrong in (bounds["min"].as_py(), bounds["max"].as_py()):
            if wrong is not None and not 0 <= wrong < self.partitions:
                raise InvalidError(
                    f"topic {self.topic} has no partition {wrong}; it has 0 to {self.partitions - 1}",
                    kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
                )
        given = explicit.cast(pa.int32()).fill_null(-1)
        chosen[:] = given.to_numpy(zero_copy_only=False)


def _valid(array: pa.Array) -> NDArray[np.bool_]:
    valid: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


class PreparedWrite:
    """Encoded and checked batches of one partition that are not stored yet; made by `Writer.prepare`."""

    def __init__(
        self,
        batches: Sequence[tuple[bytearray, RecordFacts]],
        store: Callable[[bytearray, RecordFacts], Written],
        turn: threading.Lock,
    ) -> None:
        self._left = deque(batches)
        self._store = store
        self._turn = turn
        self._written: list[Written] = []

    def append(self) -> list[Written]:
        """Store the batches that are not stored yet, and return all stored ones; after an error, call it again."""
        with self._turn:
            while self._left:
                self._written.append(self._store(*self._left[0]))
                self._left.popleft()
        return self._written


def check_appendable(
    batch: bytearray, facts: RecordFacts, config: TopicConfig, where: str, now_ms: int
) -> None:
    """Raise the error that appending the batch would raise; leaves the batch unchanged."""
    to = Appending(where, config, next_offset=0, leader_epoch=0, now_ms=now_ms)
    prepared = prepare(batch, Origin.CLIENT, to, facts)
    if prepared is not None and prepared.data is batch:
        prepared.undo()


DEFAULT_BATCH_BYTES = 1 << 20
CODECS = {codec.label: codec for codec in Codec}
_UNCOMPRESSED = ("producer", "uncompressed", "none")
_REMEMBERED_FAILURES = 16
Encoded: TypeAlias = "tuple[bytearray, RecordFacts]"


class Written(NamedTuple):
    """The location of one stored batch. A duplicate has the offsets of the first copy."""

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


class _Arrived(NamedTuple):
    """A batch that is in the log: its location and its producer's sequence number."""

    info: AppendInfo
    base_sequence: int


@dataclass(slots=True)
class _NumberedWrite:
    """One call of `write` of an idempotent writer, and which of its batches are stored (D2)."""

    columns: RecordColumns
    explicit: pa.Array | None
    first_sequences: Mapping[int, int]
    parts: list[tuple[int, RecordColumns]]
    arrived: dict[int, list[_Arrived]] = field(default_factory=dict)
    partitions: dict[int, OpenPartition] = field(default_factory=dict)

    def has_same_rows(self, other: _NumberedWrite) -> bool:
        return (
            len(self.columns) == len(other.columns)
            and self.first_sequences == other.first_sequences
            and _are_equal(self.explicit, other.explicit)
            and all(
                _are_equal(getattr(self.columns, name), getattr(other.columns, name))
                for name in ("timestamp", "key", "value", "headers")
            )
        )


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
            "tidegate_records_total", "records by outcome", ("topic", "partition", "verdict")
        )
        self._failed: list[_NumberedWrite] = []

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
        """Store the rows and wait until they are acknowledged (D1); return one entry for each batch.

        `partition` sends all rows to that partition. `first_sequences` sets the first sequence number of some
        partitions, for a producer that repeats what it sent before; otherwise numbering continues after the last
        batch of this producer in the log, also after a restart. After an error, call `write` with the same rows
        again: rows that were stored the first time are returned as duplicates and not stored twice (D2).
        """
        columns = coerce(table)
        explicit = _partition_column(table, partition, len(columns))
        self._log.refresh()
        if self.producer_id is None:
            written = self._write_plain(columns, explicit)
        else:
            written = self._write_numbered(columns, explicit, first_sequences or {})
        for batch in written:
            self._count(batch)
        return written

    def prepare(self, pieces: Sequence[RecordColumns], partition: int) -> PreparedWrite:
        """Cut and check records for one partition without storing them; `append` of the result stores them.

        For callers that number records themselves, one at a time for each partition. Call `acknowledge` afterwards.
        """
        self._log.refresh()
        opened = self._log.open_partition(self.topic, partition)
        config, where = opened.log.config, f"{self.topic}-{partition}"
        sequence = None if self.producer_id is None else self._sequence(opened)
        batches: list[Encoded] = []
        now_ms = self._log.clock.now_ms()
        for rows in pieces:
            for batch, facts in self._encode(config, rows, sequence, now_ms):
                _require_fits(batch, config, where)
                check_appendable(batch, facts, config, where, now_ms)
                batches.append((batch, facts))
            if sequence is not None:
                sequence = next_sequence(sequence, len(rows))

        def store(batch: bytearray, facts: RecordFacts) -> Written:
            opened.check_owner()
            info = opened.log.append(batch, facts=facts)
            if info.duplicate:
                _require_same_records(opened, batch, info)
            written = Written(partition, *info)
            self._count(written)
            return written

        return PreparedWrite(batches, store, self._lock)

    def acknowledge(self, partitions: Iterable[int]) -> None:
        """Wait until everything appended to these partitions is acknowledged (D1)."""
        for number in partitions:
            opened = self._log.open_partition(self.topic, number)
            opened.log.acknowledge(sync=self.durability == "disk")

    def close(self) -> None:
        """Do nothing: no work is pending after a write, and partitions stay open until the log closes."""

    def _count(self, written: Written) -> None:
        verdict = "duplicate" if written.duplicate else "written"
        self._records.add(written.records, topic=self.topic, partition=written.partition, verdict=verdict)

    def _write_plain(self, columns: RecordColumns, explicit: pa.Array | None) -> list[Written]:
        written: list[Written] = []
        now_ms = self._log.clock.now_ms()
        with self._lock:
            prepared = [
                (number, self._log.open_partition(self.topic, number), rows)
                for number, rows in self._partitioner.split(columns, explicit)
            ]
            for number, opened, rows in prepared:
                opened.check_owner()
                for batch, facts in self._encode(opened.log.config, rows, None, now_ms):
                    written.append(Written(number, *opened.log.append(batch, facts=facts)))
        self._acknowledge(opened for _, opened, _ in prepared)
        return written

    def _acknowledge(self, partitions: Iterable[OpenPartition]) -> None:
        for opened in partitions:
            opened.check_owner()
            opened.log.acknowledge(sync=self.durability == "disk")

    # -- idempotent writes -------------------------------------------------------------------------

    def _write_numbered(
        self, columns: RecordColumns, explicit: pa.Array | None, first_sequences: Mapping[int, int]
    ) -> list[Written]:
        """Store the rows that are not in the log yet; on failure remember which batches were stored (D2)."""
        with self._lock:
            sending = self._repeated(_NumberedWrite(columns, explicit, first_sequences, []))
            try:
                written = self._append_numbered(sending)
            except BaseException:
                self._remember(sending)
                raise
        try:
            self._acknowledge(sending.partitions.values())
        except BaseException:
            with self._lock:
                self._remember(sending)
            raise
        return written

    def _repeated(self, write: _NumberedWrite) -> _NumberedWrite:
        """Return the failed write that this one repeats, removed from the list; else this one, split by partition."""
        for number, failed in enumerate(self._failed):
            if failed.has_same_rows(write):
                del self._failed[number]
                return failed
        write.parts = list(self._partitioner.split(write.columns, write.explicit))
        return write

    def _remember(self, failed: _NumberedWrite) -> None:
        if any(failed.arrived.values()):  # if nothing was stored, the retry is a first write
            self._failed = [*self._failed, failed][-_REMEMBERED_FAILURES:]

    def _append_numbered(self, sending: _NumberedWrite) -> list[Written]:
        """Cut, number and check every batch that is not in the log, then store them."""
        ready: list[tuple[int, OpenPartition, list[Encoded]]] = []
        now_ms = self._log.clock.now_ms()
        for number, rows in sending.parts:
            opened = self._log.open_partition(self.topic, number)
            arrived = sending.arrived.get(number, [])
            if arrived and sending.partitions.get(number) is not opened:  # reopened: recovery may have cut it
                arrived = [batch for batch in arrived if self._is_in_log(opened, batch)]
            sending.arrived[number], sending.partitions[number] = arrived, opened
            done = sum(batch.info.last_offset - batch.info.first_offset + 1 for batch in arrived)
            first = None if done else sending.first_sequences.get(number)
            sequence = self._sequence(opened) if first is None else first
            left = rows.slice(done)
            batches = list(self._encode(opened.log.config, left, sequence, now_ms)) if len(left) else []
            for batch, _ in batches:
                _require_fits(batch, opened.log.config, f"{self.topic}-{number}")
            ready.append((number, opened, batches))
        written: list[Written] = []
        for number, opened, batches in ready:
            opened.check_owner()
            arrived = sending.arrived[number]
            written += [Written(number, *batch.info._replace(duplicate=True, size=0)) for batch in arrived]
            for batch, facts in batches:
                info = self._append_one(opened, batch, facts, arrived, now_ms)
                written.append(Written(number, *info))
        return written

    def _append_one(
        self,
        opened: OpenPartition,
        batch: bytearray,
        facts: RecordFacts,
        arrived: list[_Arrived],
        now_ms: int,
    ) -> AppendInfo:
        header = BatchHeader.parse(batch)
        try:
            info = opened.log.append(batch, facts=facts)
        except BaseException:
            # Steps after the bytes were written may fail, too; the log knows whether the batch is stored.
            entry = opened.log.active_producers.get(header.producer_id)
            known = (
                None
                if entry is None
                else entry.find_batch(header.producer_epoch, header.base_sequence, header.last_sequence)
            )
            if known is not None:
                arrived.append(_Arrived(duplicate_of(known), header.base_sequence))
            raise
        if info.duplicate:
            _require_same_records(opened, batch, info, unstamped_ms=now_ms)
        arrived.append(_Arrived(info, header.base_sequence))
        return info

    def _is_in_log(self, opened: OpenPartition, batch: _Arrived) -> bool:
        """Return whether a stored batch is still there after its partition was closed and reopened."""
        stored = _stored_batch(opened, batch.info)
        if stored is None:  # beyond the end, or compacted away meanwhile
            return batch.info.last_offset < opened.log.log_end_offset
        header = BatchHeader.parse(stored)
        return (header.producer_id, header.producer_epoch, header.base_sequence) == (
            self.producer_id, self.producer_epoch, batch.base_sequence,
        )  # fmt: skip

    def _encode(
        self, config: TopicConfig, rows: RecordColumns, sequence: int | None, now_ms: int
    ) -> Iterator[Encoded]:
        codec = self._codec(config)
        producer = None
        if self.producer_id is not None and sequence is not None:
            producer = ProducerStamp(self.producer_id, self.producer_epoch, sequence)
        return encode_with_facts(
            rows,
            max_batch_bytes=min(self.batch_bytes, config.max_message_bytes, config.segment_bytes),
            max_batch_records=self.batch_records,
            codec=codec,
            level=compression_level(codec, config),
            producer=producer,
            now_ms=now_ms,
        )

    def _codec(self, config: TopicConfig) -> Codec:
        """Return the topic's codec if `compression.type` names one, else the writer's."""
        wanted = config.compression_type if config.compression_type != "producer" else self.compression
        return Codec.NONE if wanted is None or wanted in _UNCOMPRESSED else CODECS[wanted]

    def _sequence(self, opened: OpenPartition) -> int:
        """Return the sequence number after this producer's last one in the log; 0 when the log has none."""
        entry = opened.log.active_producers.get(self.producer_id if self.producer_id is not None else -1)
        if entry is None or entry.epoch != self.producer_epoch or entry.last_sequence < 0:
            return 0
        return next_sequence(entry.last_sequence, 1)


def _are_equal(one: pa.Array | None, other: pa.Array | None) -> bool:
    if one is None or other is None:
        return one is other
    equal: bool = one.equals(other)
    return equal


def _stored_batch(opened: OpenPartition, info: AppendInfo) -> memoryview | None:
    """Return the bytes of the batch stored at `info`'s first offset; None when it is gone."""
    log = opened.log
    if not log.log_start_offset <= info.first_offset < log.log_end_offset:
        return None
    fetched = log.fetch(info.first_offset, max_bytes=HEADER_SIZE, isolation=Isolation.LOG_END)
    data = memoryview(fetched.data)
    if len(data) < HEADER_SIZE or (header := BatchHeader.parse(data)).base_offset != info.first_offset:
        return None
    return data[: header.size]


def _require_same_records(
    opened: OpenPartition, sent: bytearray, info: AppendInfo, *, unstamped_ms: int | None = None
) -> None:
    """Refuse a batch that reuses the sequence numbers of a stored batch with other records (D3).

    `unstamped_ms` is the time given to records that came without a timestamp; the first attempt had given another.
    """
    stored = _stored_batch(opened, info)
    if stored is None:
        return  # retention or compaction removed it: there is nothing to compare with
    ours, theirs = decode(sent, topic="", partition=0), decode(stored, topic="", partition=0)
    ours = ours.take(pc.subtract(theirs.column("offset"), info.first_offset))
    is_same = all(ours.column(name).equals(theirs.column(name)) for name in ("key", "value", "headers"))
    if is_same and opened.log.config.message_timestamp_type != LOG_APPEND_TIME:
        times = ours.column("timestamp").cast(pa.int64()).fill_null(NO_TIMESTAMP)
        before = theirs.column("timestamp").cast(pa.int64()).fill_null(NO_TIMESTAMP)
        differ = times.filter(pc.not_equal(times, before))
        is_same = set(differ.to_pylist()) <= {unstamped_ms}
    if is_same:
        return
    header = BatchHeader.parse(sent)
    raise InvalidError(
        f"sequence {header.base_sequence} of producer {header.producer_id} in {opened.place} belongs to other "
        f"records, stored at offset {info.first_offset}, so these were not written; leave first_sequences out to "
        f"write them as new ones, or give the records that were sent with that number",
        kafka_name="OUT_OF_ORDER_SEQUENCE_NUMBER",
    )


def _partition_column(table: pa.Table | pa.RecordBatch, partition: int | None, rows: int) -> pa.Array | None:
    if partition is not None:
        return pa.repeat(pa.scalar(partition, pa.int32()), rows)
    index = table.schema.get_field_index("partition")
    if index < 0:
        return None
    column = table.column(index)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _require_fits(batch: bytearray, config: TopicConfig, where: str) -> None:
    limit = min(config.max_message_bytes, config.segment_bytes)
    if len(batch) > limit:
        raise InvalidError(
            f"a record for {where} makes a batch of {len(batch)} bytes, above the {limit} that "
            f"max.message.bytes and segment.bytes allow, so nothing was written; make the record smaller or "
            f"raise the setting",
            kafka_name="MESSAGE_TOO_LARGE",
        )
