"""Arrow columns into record batches: whole tables at a time, without a Python object for any record.

Owns the path from `RecordColumns` to the bytes of batches: exact sizes first, so that a table splits into
batches of a wanted size by arithmetic, then one pass that writes. Compression is `codecs`', the header is
`batch`'s; offsets and leader epochs are the log's to assign (`batch.stamp`).

A null timestamp becomes `now_ms`, as a producer would write it; without `now_ms` it stays none (-1).

Thread rule: pure functions; the kernels run without the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.errors import InvalidError
from tidegate.kernels.encoding import (
    LARGEST_INT64,
    SIZES_ROW,
    RecordSource,
    Sizes,
    encode_records,
    size_records,
)
from tidegate.log.batches.batch import (
    ATTRIBUTES_POSITION,
    CONTROL_BIT,
    CRC_POSITION,
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    LENGTH_OVERHEAD,
    LOG_APPEND_TIME_BIT,
    MAGIC,
    NO_LEADER_EPOCH,
    NO_PRODUCER,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Codec,
    TimestampType,
    batch_crc,
    next_sequence,
)
from tidegate.log.batches.codecs import compress
from tidegate.log.batches.column_buffers import NO_DELTAS, record_source
from tidegate.log.batches.record_facts import RecordFacts
from tidegate.log.batches.records import RecordTable, coerce, pieces

LARGEST_DELTA: Final = 2**31 - 1
LARGEST_BODY: Final = 2**31 - 1 - HEADER_SIZE
UNBOUNDED: Final = 2**62


@dataclass(frozen=True, slots=True)
class ProducerStamp:
    """Who writes: an idempotent or transactional producer, and the sequence of its first record here."""

    producer_id: int
    producer_epoch: int
    base_sequence: int
    transactional: bool = False


def encode(
    source: RecordTable,
    *,
    base_offset: int = 0,
    leader_epoch: int = NO_LEADER_EPOCH,
    codec: Codec = Codec.NONE,
    level: int | None = None,
    producer: ProducerStamp | None = None,
    timestamp_type: TimestampType = TimestampType.CREATE_TIME,
    log_append_time: int | None = None,
    offset_deltas: NDArray[np.int64] | pa.Array | None = None,
    last_offset_delta: int | None = None,
    base_timestamp: int | None = None,
    delete_horizon_ms: int | None = None,
    control: bool = False,
    now_ms: int | None = None,
) -> bytearray:
    """One batch holding every row of `source`, in order.

    `offset_deltas` (rising) and `last_offset_delta` are for batches with gaps, `delete_horizon_ms` for those
    compaction has marked; the horizon is then stored as the base timestamp. `log_append_time` is what a batch
    of type LogAppendTime says of all its records.
    """
    columns = coerce(source)
    if len(columns) == 0:
        raise InvalidError("a batch needs a record; use `empty_batch` for one that compaction emptied")
    deltas = _checked_deltas(offset_deltas, last_offset_delta, len(columns))
    rows = record_source(columns, deltas, now_ms)
    sizes = _sized(rows, 0, base_timestamp if delete_horizon_ms is None else delete_horizon_ms)
    attributes = int(codec)
    max_timestamp = sizes.max_timestamp
    if delete_horizon_ms is not None:
        attributes |= DELETE_HORIZON_BIT
    if control:
        attributes |= CONTROL_BIT
    if timestamp_type is TimestampType.LOG_APPEND_TIME:
        if log_append_time is None:
            raise InvalidError("a LogAppendTime batch needs its log_append_time")
        attributes, max_timestamp = attributes | LOG_APPEND_TIME_BIT, log_append_time
    header = _header(sizes, len(columns), attributes, producer)._replace(
        base_offset=base_offset, leader_epoch=leader_epoch, max_timestamp=max_timestamp
    )
    if last_offset_delta is not None:
        header = header._replace(last_offset_delta=last_offset_delta)
    elif len(deltas):
        header = header._replace(last_offset_delta=int(deltas[-1]))
    return _written(rows, 0, sizes, header, level)


def encode_with_facts(
    source: RecordTable,
    *,
    max_batch_bytes: int,
    max_batch_records: int | None = None,
    codec: Codec = Codec.NONE,
    level: int | None = None,
    producer: ProducerStamp | None = None,
    now_ms: int | None = None,
) -> Iterator[tuple[bytearray, RecordFacts]]:
    """Batches of at most `max_batch_bytes` before compression, each with the facts an append asks for.

    A record that alone is larger gets a batch of its own; whether that is too large is the log's to say. With
    a `producer` the sequence goes on from batch to batch. All base offsets are 0.
    """
    for columns in pieces(source):
        rows, start = record_source(columns, NO_DELTAS, now_ms), 0
        while start < len(columns):
            sizes = _sized(rows, start, None, max_batch_bytes - HEADER_SIZE, max_batch_records or UNBOUNDED)
            count = sizes.stop - start
            header = _header(sizes, count, int(codec), producer)
            yield _written(rows, start, sizes, header, level), _facts(sizes, start)
            start = sizes.stop
            if producer is not None:
                producer = replace(producer, base_sequence=next_sequence(producer.base_sequence, count))


def encode_batches(
    source: RecordTable,
    *,
    max_batch_bytes: int,
    max_batch_records: int | None = None,
    codec: Codec = Codec.NONE,
    level: int | None = None,
    producer: ProducerStamp | None = None,
    now_ms: int | None = None,
) -> Iterator[bytearray]:
    """The batches of `encode_with_facts` alone."""
    for batch, _ in encode_with_facts(
        source,
        max_batch_bytes=max_batch_bytes,
        max_batch_records=max_batch_records,
        codec=codec,
        level=level,
        producer=producer,
        now_ms=now_ms,
    ):
        yield batch


def encode_together(sources: Sequence[RecordTable], *, max_batch_bytes: int) -> memoryview:
    """The batches of `encode_batches` for all sources, uncompressed, behind each other in one piece of memory.

    It comes from Arrow's pool, whose pages are reused: of records by the million, fresh pages for each batch cost
    more than the encoding.
    """
    planned: list[tuple[RecordSource, int, Sizes]] = []
    for columns in (piece for source in sources for piece in pieces(source)):
        rows, start = record_source(columns, NO_DELTAS, None), 0
        while start < len(columns):
            sizes = _sized(rows, start, None, max_batch_bytes - HEADER_SIZE)
            planned.append((rows, start, sizes))
            start = sizes.stop
    memory = pa.allocate_buffer(sum(HEADER_SIZE + sizes.body_bytes for _, _, sizes in planned))
    array, view, position = np.frombuffer(memory, np.uint8), memoryview(memory).cast("B"), 0
    for rows, start, sizes in planned:
        end = position + HEADER_SIZE + sizes.body_bytes
        encode_records(rows, start, sizes.stop, sizes.base_timestamp, array, position + HEADER_SIZE)
        header = _header(sizes, sizes.stop - start, int(Codec.NONE), None)
        batch = view[position:end]
        batch[:HEADER_SIZE] = header._replace(length=len(batch) - LENGTH_OVERHEAD).pack()
        batch[CRC_POSITION:ATTRIBUTES_POSITION] = batch_crc(batch, 0, len(batch)).to_bytes(4, "big")
        position = end
    return view


def empty_batch(header: BatchHeader) -> bytes:
    """The 61 bytes compaction leaves of a batch whose records are gone but whose offsets still matter."""
    kept = header._replace(
        length=HEADER_SIZE - LENGTH_OVERHEAD,
        attributes=header.attributes & (LOG_APPEND_TIME_BIT | TRANSACTIONAL_BIT | CONTROL_BIT),
        base_timestamp=NO_TIMESTAMP,
        count=0,
    )
    return bytes(_sealed(bytearray(kept.pack())))


def _sized(
    rows: RecordSource,
    start: int,
    base_timestamp: int | None,
    max_body_bytes: int = UNBOUNDED,
    max_records: int = UNBOUNDED,
) -> Sizes:
    row = np.empty(1, SIZES_ROW)
    own_base = base_timestamp is None
    size_records(rows, start, max_body_bytes, max_records, own_base, base_timestamp or 0, row)
    sizes = Sizes._make(row[0].item())
    if sizes.body_bytes > LARGEST_BODY:
        raise InvalidError(
            f"{sizes.stop - start} records take {sizes.body_bytes} bytes, more than a batch can hold; "
            f"split them",
            kafka_name="RECORD_LIST_TOO_LARGE",
        )
    return sizes


def _header(sizes: Sizes, count: int, attributes: int, producer: ProducerStamp | None) -> BatchHeader:
    """The header of a fresh batch of consecutive offsets; length and CRC come when its bytes are there."""
    return BatchHeader(
        base_offset=0,
        length=0,
        leader_epoch=NO_LEADER_EPOCH,
        magic=MAGIC,
        crc=0,
        attributes=attributes | (TRANSACTIONAL_BIT if producer is not None and producer.transactional else 0),
        last_offset_delta=count - 1,
        base_timestamp=sizes.base_timestamp,
        max_timestamp=sizes.max_timestamp,
        producer_id=NO_PRODUCER if producer is None else producer.producer_id,
        producer_epoch=NO_PRODUCER if producer is None else producer.producer_epoch,
        base_sequence=NO_SEQUENCE if producer is None else producer.base_sequence,
        count=count,
    )


def _written(
    rows: RecordSource, start: int, sizes: Sizes, header: BatchHeader, level: int | None
) -> bytearray:
    """The batch: its records encoded, packed where the header's codec says so, and sealed."""
    plain = header.codec is Codec.NONE
    before = HEADER_SIZE if plain else 0
    batch = bytearray(before + sizes.body_bytes)
    array = np.frombuffer(batch, np.uint8)
    encode_records(rows, start, sizes.stop, sizes.base_timestamp, array, before)
    if not plain:
        packed = compress(header.codec, batch, level=level)
        batch = bytearray(HEADER_SIZE) + packed
    batch[:HEADER_SIZE] = header._replace(length=len(batch) - LENGTH_OVERHEAD).pack()
    return _sealed(batch)


def _sealed(batch: bytearray) -> bytearray:
    batch[CRC_POSITION:ATTRIBUTES_POSITION] = batch_crc(batch, 0, len(batch)).to_bytes(4, "big")
    return batch


def _facts(sizes: Sizes, start: int) -> RecordFacts:
    return RecordFacts(
        count=sizes.stop - start,
        min_timestamp=NO_TIMESTAMP if sizes.min_timestamp == LARGEST_INT64 else sizes.min_timestamp,
        max_timestamp=sizes.max_timestamp,
        max_timestamp_offset=sizes.max_timestamp_row - start,
        null_keys=sizes.null_keys,
        consecutive=True,
    )


def _checked_deltas(
    given: NDArray[np.int64] | pa.Array | None, last_offset_delta: int | None, rows: int
) -> NDArray[np.int64]:
    """The offset deltas to write, empty for 0, 1, 2, …"""
    deltas = NO_DELTAS if given is None else np.ascontiguousarray(given, np.int64)
    first, last = (deltas[0], deltas[-1]) if len(deltas) else (0, rows - 1)
    if given is not None and (len(deltas) != rows or first < 0 or (np.diff(deltas) <= 0).any()):
        raise InvalidError(f"offset deltas must be {rows} rising numbers from 0")
    if not last <= (last if last_offset_delta is None else last_offset_delta) <= LARGEST_DELTA:
        raise InvalidError(f"last offset delta {last_offset_delta} cannot hold a record at {last}")
    return deltas
