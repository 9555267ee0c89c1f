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
    batch_crc,
    next_sequence,
)
from tidegate.log.batches.codecs import compress
from tidegate.log.batches.column_buffers import NO_DELTAS, record_source
from tidegate.log.batches.record_facts import RecordFacts
from tidegate.log.batches.records import RecordTable, coerce, pieces

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
    codec: Codec = Codec.NONE,
    level: int | None = None,
    producer: ProducerStamp | None = None,
) -> bytearray:
    """One batch holding every row of `source`, in order; its base offset is 0."""
    columns = coerce(source)
    if len(columns) == 0:
        raise InvalidError("a batch needs a record; use `empty_batch` for one that compaction emptied")
    rows = record_source(columns, NO_DELTAS, None)
    sizes = _sized(rows, 0)
    return _written(rows, 0, sizes, _header(sizes, len(columns), int(codec), producer), level)


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
            sizes = _sized(rows, start, max_batch_bytes - HEADER_SIZE, max_batch_records or UNBOUNDED)
            count = sizes.stop - start
            header = _header(sizes, count, int(codec), producer)
            yield _written(rows, start, sizes, header, level), _facts(sizes, start)
            start = sizes.stop
            if producer is not None:
                producer = replace(producer, base_sequence=next_sequence(producer.base_sequence, count))


def encode_together(sources: Sequence[RecordTable], *, max_batch_bytes: int) -> memoryview:
    """The batches of `encode_with_facts` for all sources, uncompressed, behind each other in one piece of memory.

    It comes from Arrow's pool, whose pages are reused: of records by the million, fresh pages for each batch cost
    more than the encoding.
    """
    planned: list[tuple[RecordSource, int, Sizes]] = []
    for columns in (piece for source in sources for piece in pieces(source)):
        rows, start = record_source(columns, NO_DELTAS, None), 0
        while start < len(columns):
            sizes = _sized(rows, start, max_batch_bytes - HEADER_SIZE)
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
    rows: RecordSource, start: int, max_body_bytes: int = UNBOUNDED, max_records: int = UNBOUNDED
) -> Sizes:
    row = np.empty(1, SIZES_ROW)
    size_records(rows, start, max_body_bytes, max_records, True, 0, row)
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
