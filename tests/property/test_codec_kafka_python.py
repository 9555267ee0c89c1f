"""An independent codec reads what we write, and we read what it writes: kafka-python, every compression.

Its compressors are independent too (lz4, zstandard, gzip of the standard library); only snappy shares ours.
"""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.memory_records import MemoryRecords

from batch_checks import check_batch
from encoded_batches import encode_batches
from tidegate.log.format.batch import Codec
from tidegate.log.format.decode import decode
from tidegate.log.format.encode import ProducerStamp

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
EXAMPLES = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])

Row = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]

fields = st.none() | st.binary(max_size=40) | st.binary(min_size=1, max_size=3).map(lambda b: b * 700)
header_lists = st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=8)), max_size=3)
rows_lists = st.lists(st.tuples(st.integers(0, 2**42), fields, fields, header_lists), min_size=1, max_size=20)
producers = st.none() | st.builds(
    ProducerStamp,
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**15 - 1),
    st.integers(0, 2**31 - 1),
    st.booleans(),
)


def table_of(rows: list[Row]) -> pa.Table:
    headers = [[{"key": key, "value": value} for key, value in row[3]] for row in rows]
    return pa.table(
        {
            "timestamp": pa.array([row[0] for row in rows], pa.int64()),
            "key": pa.array([row[1] for row in rows], pa.binary()),
            "value": pa.array([row[2] for row in rows], pa.binary()),
            "headers": pa.array(headers, HEADERS),
        }
    )


def theirs(batch: bytes) -> list[tuple[Any, ...]]:
    """Offset and row of every record, as kafka-python reads it."""
    records = MemoryRecords(batch)
    seen = []
    while records.has_next():
        found = records.next_batch()
        assert found.validate_crc()
        seen += [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in found]
    return seen


def ours(batch: bytes) -> list[tuple[Any, ...]]:
    read = decode(batch, topic="t", partition=0)
    read.validate(full=True)
    stamps = read["timestamp"].view(pa.int64()).to_pylist()
    columns = zip(*(read[name].to_pylist() for name in ("offset", "key", "value", "headers")), strict=True)
    return [
        (offset, stamp, key, value, [(h["key"], h["value"]) for h in headers])
        for stamp, (offset, key, value, headers) in zip(stamps, columns, strict=True)
    ]


@pytest.mark.parametrize("codec", Codec)
@given(rows=rows_lists, producer=producers, limit=st.sampled_from([100, 1000, 1 << 20]))
@EXAMPLES
def test_kafka_python_reads_what_we_write(
    codec: Codec, rows: list[Row], producer: ProducerStamp | None, limit: int
) -> None:
    seen: list[Any] = []
    for batch in encode_batches(table_of(rows), max_batch_bytes=limit, codec=codec, producer=producer):
        header = check_batch(batch)
        assert header.codec is codec
        seen += [row[1:] for row in theirs(bytes(batch))]
    assert seen == rows


@pytest.mark.parametrize("codec", Codec)
@given(rows=rows_lists, producer=producers, gap=st.integers(1, 1000))
@EXAMPLES
def test_we_read_what_kafka_python_writes(
    codec: Codec, rows: list[Row], producer: ProducerStamp | None, gap: int
) -> None:
    stamp = producer or ProducerStamp(-1, -1, -1)
    builder = DefaultRecordBatchBuilder(
        2, codec, stamp.transactional, stamp.producer_id, stamp.producer_epoch, stamp.base_sequence, 1 << 30
    )
    for place, (timestamp, key, value, headers) in enumerate(rows):
        assert builder.append(place * gap, timestamp, key, value, headers) is not None
    batch = bytes(builder.build())
    assert ours(batch) == [(place * gap, *row) for place, row in enumerate(rows)] == theirs(batch)
    header = check_batch(batch)
    assert (header.count, header.last_offset_delta) == (len(rows), (len(rows) - 1) * gap)
    assert (header.producer_id, header.producer_epoch) == (stamp.producer_id, stamp.producer_epoch)
    assert header.is_transactional == stamp.transactional


@pytest.mark.parametrize("codec", Codec)
def test_both_really_compress(codec: Codec) -> None:
    rows: list[Row] = [(5, b"k", b"v" * 5000, [])] * 50
    (batch,) = encode_batches(table_of(rows), max_batch_bytes=1 << 20, codec=codec)
    builder = DefaultRecordBatchBuilder(2, codec, False, -1, -1, -1, 1 << 30)
    for place, row in enumerate(rows):
        builder.append(place, *row)
    other = bytes(builder.build())
    assert check_batch(other).codec is codec
    assert (len(batch) < 50_000) == (codec is not Codec.NONE)
    assert theirs(bytes(batch)) == ours(other)
