"""Encode Arrow columns as record batches, a whole table at a time, without a Python object per record.

Computes exact sizes first, so that a table is split into batches without trial encoding, then writes
in one pass. Offsets and leader epochs are assigned by the log (`batch.stamp`). A null timestamp becomes `now_ms`, or
none (-1) without `now_ms`.

Column buffers are passed to the kernels without copying, unless timestamps or header lists contain nulls. Slices share
their parent's buffers and start at an offset; validity may be missing; an empty array may have no buffers.

Thread rule: pure functions; arrays borrow the columns' memory and keep it alive; kernels run without the
interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.errors import InvalidError
from tidegate.kernels.record_encoding import (
    LARGEST_INT64,
    SIZES_ROW,
    BinarySource,
    RecordSource,
    Sizes,
    encode_records,
    size_records,
)
from tidegate.log.format.batch import (
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
    RecordFacts,
    batch_crc,
    next_sequence,
)
from tidegate.log.format.compression import compress
from tidegate.log.format.records import RecordColumns, RecordTable, coerce, pieces


def _fixed(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


NO_DELTAS: Final = _fixed(np.empty(0, np.int64))
_NO_ENDS: Final = _fixed(np.zeros(0, np.int32))
_ONE_END: Final = _fixed(np.zeros(1, np.int32))
_NO_BYTES: Final = _fixed(np.zeros(0, np.uint8))
_NO_BINARY: Final = BinarySource(_ONE_END, _NO_BYTES, _NO_BYTES, 0)


def record_source(columns: RecordColumns, deltas: NDArray[np.int64], now_ms: int | None) -> RecordSource:
    """Return the columns' buffers. Null timestamps become `now_ms`, or none without it; `deltas` is passed on."""
    header_ends, header_key, header_value = _headers(columns.headers)
    return RecordSource(
        timestamp=_timestamps(columns.timestamp, now_ms),
        deltas=_fixed(deltas[:]),
        key=_binary(columns.key),
        value=_binary(columns.value),
        header_ends=header_ends,
        header_key=header_key,
        header_value=header_value,
    )


def _timestamps(column: pa.Int64Array, now_ms: int | None) -> NDArray[np.int64]:
    if column.null_count:
        column = pc.fill_null(column, NO_TIMESTAMP if now_ms is None else now_ms)
    return _view(column.buffers()[1], np.int64, column.offset, len(column))


def _headers(column: pa.ListArray | None) -> tuple[NDArray[np.int32], BinarySource, BinarySource]:
    if column is None or len(column) == 0:
        return _NO_ENDS, _NO_BINARY, _NO_BINARY
    if column.null_count:
        counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
        ends = _fixed(np.concatenate([_ONE_END, np.cumsum(counts, dtype=np.int32)]))
        entries = column.flatten()
    else:
        ends = _view(column.buffers()[1], np.int32, column.offset, len(column) + 1)
        entries = column.values
    return ends, _binary(entries.field("key")), _binary(entries.field("value"))


def _binary(column: pa.BinaryArray | pa.StringArray) -> BinarySource:
    if len(column) == 0:
        return _NO_BINARY
    valid, ends, content = column.buffers()
    return BinarySource(
        ends=_view(ends, np.int32, column.offset, len(column) + 1),
        content=_view(content),
        valid=_view(valid) if column.null_count else _NO_BYTES,
        skip=column.offset,
    )


def _view(
    buffer: pa.Buffer | None, dtype: type[np.generic] = np.uint8, start: int = 0, length: int | None = None
) -> NDArray[Any]:
    if buffer is None:
        return _fixed(np.zeros(length or 0, dtype))
    array = np.frombuffer(buffer, dtype)
    return _fixed(array[start:] if length is None else array[start : start + length])


LARGEST_BODY: Final = 2**31 - 1 - HEADER_SIZE
UNBOUNDED: Final = 2**62


@dataclass(frozen=True, slots=True)
class ProducerStamp:
    """The idempotent or transactional producer that writes, and the sequence number of its first record here."""

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
    """Encode every row of `source` in order as one batch with base offset 0."""
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
    """Encode batches of at most `max_batch_bytes` before compression; return each with the facts an append needs.

    A larger record gets a batch of its own; the log decides whether that is too large. With a `producer` the
    sequence continues from batch to batch. All base offsets are 0.
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
    """Encode the batches of all sources, uncompressed and consecutive, into one piece of memory.

    The memory comes from Arrow's pool, which reuses pages: for millions of records, new pages for each batch cost
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
    """Return the 61 bytes that compaction keeps of a batch whose records are gone but whose offsets still matter."""
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
    """Return the header of a new batch of consecutive offsets; length and CRC are set when its bytes are there."""
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
    """Return the finished batch: records encoded, compressed if the header's codec says so, CRC set."""
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
