"""Arrow into batches: golden bytes, splitting, gaps, horizons, producers, and what is refused."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from batch_checks import check_batch
from encoded_batches import encode_batches
from tidegate.errors import InvalidError
from tidegate.log.format.batch import MAX_SEQUENCE, BatchHeader, Codec, stamp
from tidegate.log.format.decode import decode, inspect_records
from tidegate.log.format.encode import (
    ProducerStamp,
    empty_batch,
    encode,
    encode_together,
    encode_with_facts,
)
from tidegate.testing.batches import (
    CANARY_CRCS,
    CODECS,
    CodecName,
    Rec,
    build_batch,
    canary_batch,
    canary_timestamp,
    canary_value,
)

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
ROWS = [Rec(b"k1", b"v1", 1000, (("h", b"x"), ("n", None))), Rec(b"k2", None, 1005), Rec(None, b"", 1003)]


def table_of(rows: list[Rec]) -> pa.Table:
    headers = [[{"key": name, "value": value} for name, value in row.headers] for row in rows]
    return pa.table(
        {
            "key": pa.array([row.key for row in rows], pa.binary()),
            "value": pa.array([row.value for row in rows], pa.binary()),
            "timestamp": pa.array(
                [None if row.timestamp == -1 else row.timestamp for row in rows], pa.int64()
            ),
            "headers": pa.array(headers, HEADERS),
        }
    )


def stamped(table: pa.Table, base_offset: int, leader_epoch: int, **options: Any) -> bytearray:
    """One batch with its place in a log."""
    batch = encode(table, **options)
    stamp(batch, base_offset=base_offset, leader_epoch=leader_epoch)
    return batch


def batch_at(table: pa.Table, now_ms: int) -> bytearray:
    (batch,) = encode_batches(table, max_batch_bytes=1 << 20, now_ms=now_ms)
    return batch


def values_of(batch: Any) -> list[Any]:
    rows: list[Any] = decode(batch, topic="t", partition=0)["value"].to_pylist()
    return rows


# -- golden bytes ---------------------------------------------------------------------------------


def test_the_canary_segment_comes_out_byte_for_byte() -> None:
    segment = b""
    for i in range(109):
        row = pa.table({"value": [canary_value(i)], "timestamp": [canary_timestamp(i)]})
        batch = stamped(row, i, 0, producer=ProducerStamp(-1, -1, 0))
        assert batch == canary_batch(i)
        segment += batch
    assert len(segment) == 16314


@pytest.mark.parametrize(("offset", "crc"), CANARY_CRCS.items())
def test_published_crcs_of_the_canary(offset: int, crc: int) -> None:
    row = pa.table({"value": [canary_value(offset)], "timestamp": [canary_timestamp(offset)]})
    assert check_batch(encode(row, producer=ProducerStamp(-1, -1, 0))).crc == crc


def test_the_golden_batch_of_two_records() -> None:
    batch = stamped(table_of(ROWS[:2]), 100, 3, producer=ProducerStamp(7, 0, 5))
    assert (len(batch), check_batch(batch).crc) == (88, 3319513931)
    assert batch[61:].hex() == "22000000046b310476310402680278026e0110000a02046b320100"


def test_the_golden_empty_batch() -> None:
    full = BatchHeader(15, 400, -1, 2, 99, 0x44, 22, 77, 1639133049552, 23423, 145, 983, 5)
    empty = empty_batch(full)
    header = check_batch(empty)
    assert (len(empty), header.crc, header.last_sequence) == (61, 1469308350, 1005)
    assert (header.base_timestamp, header.attributes, header.count) == (-1, 0, 0)
    assert header.last_offset == 37


def test_an_empty_batch_keeps_clock_transaction_and_control() -> None:
    header = BatchHeader(15, 400, 8, 2, 99, 0x7C, 22, 77, 88, 1, 0, 0, 5)
    assert check_batch(empty_batch(header)).attributes == 0x38
    assert check_batch(empty_batch(header)).leader_epoch == 8


# -- against the twin -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_one_batch_is_the_twins_under_every_codec(codec: CodecName) -> None:
    ours = stamped(table_of(ROWS), 9, 2, codec=Codec[codec.upper()])
    theirs = build_batch(ROWS, base_offset=9, leader_epoch=2, codec=codec)
    ignored = {"crc": 0, "length": 0}  # packed bytes may differ from one compressor to the next
    assert check_batch(ours)._replace(**ignored) == check_batch(theirs)._replace(**ignored)
    assert decode(ours, topic="t", partition=0).equals(decode(theirs, topic="t", partition=0))
    assert codec != "none" or ours == theirs


def test_a_transactional_producers_batch_is_the_twins() -> None:
    ours = encode(table_of(ROWS), producer=ProducerStamp(5, 6, 3, transactional=True))
    assert ours == build_batch(ROWS, transactional=True, producer_id=5, producer_epoch=6, base_sequence=3)


# -- times ----------------------------------------------------------------------------------------


def test_a_null_timestamp_is_now_or_none() -> None:
    table = pa.table({"value": [b"a", b"b"], "timestamp": pa.array([None, 7], pa.int64())})
    assert [header_times(encode(table)), header_times(batch_at(table, 1234))] == [(-1, 7), (1234, 1234)]
    assert decode(encode(table), topic="t", partition=0)["timestamp"].null_count == 1
    assert decode(batch_at(table, 1234), topic="t", partition=0)["timestamp"].null_count == 0
    only = pa.table({"value": [b"a"]})
    assert header_times(encode(only)) == (-1, -1)
    assert header_times(batch_at(only, 99)) == (99, 99)


def header_times(batch: bytearray) -> tuple[int, int]:
    header = check_batch(batch)
    return header.base_timestamp, header.max_timestamp


# -- splitting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("limit", [62, 100, 130, 1000, 5000, 1 << 20])
def test_batches_stay_within_the_limit_and_are_as_full_as_they_can_be(codec: CodecName, limit: int) -> None:
    table = pa.table(
        {"value": [b"v" * (i % 90) for i in range(200)], "timestamp": [10**6 + i * i for i in range(200)]}
    )
    batches = list(encode_batches(table, max_batch_bytes=limit, codec=Codec[codec.upper()]))
    assert [value for batch in batches for value in values_of(batch)] == table["value"].to_pylist()
    start = 0
    for batch in batches:
        count = check_batch(batch).count
        plain = len(encode(table.slice(start, count)))
        assert plain <= limit or count == 1
        if start + count < 200:
            assert len(encode(table.slice(start, count + 1))) > limit
        start += count


def test_a_record_larger_than_the_limit_is_alone_in_its_batch() -> None:
    table = pa.table({"value": [b"a", b"b" * 1000, b"c"]})
    batches = list(encode_batches(table, max_batch_bytes=200))
    assert [values_of(batch) for batch in batches] == [[b"a"], [b"b" * 1000], [b"c"]]


def test_a_batch_may_be_limited_in_records() -> None:
    table = pa.table({"value": [b"v"] * 10})
    batches = list(encode_batches(table, max_batch_bytes=1 << 20, max_batch_records=4))
    assert [check_batch(batch).count for batch in batches] == [4, 4, 2]
    assert [check_batch(batch).base_offset for batch in batches] == [0, 0, 0]


def test_sequences_go_on_from_batch_to_batch_and_wrap() -> None:
    table = pa.table({"value": [b"v"] * 7})
    producer = ProducerStamp(44, 2, MAX_SEQUENCE - 3, transactional=True)
    headers = [
        check_batch(batch)
        for batch in encode_batches(table, max_batch_bytes=1 << 20, max_batch_records=3, producer=producer)
    ]
    assert [header.base_sequence for header in headers] == [MAX_SEQUENCE - 3, MAX_SEQUENCE, 2]
    assert [header.last_sequence for header in headers] == [MAX_SEQUENCE - 1, 1, 2]
    assert all(header.is_transactional and header.producer_id == 44 for header in headers)


@pytest.mark.parametrize("codec", CODECS)
def test_facts_are_those_an_inspection_finds(codec: CodecName) -> None:
    rows = [*ROWS, Rec(b"k", b"v", -1), Rec(b"k", b"v", 1005), Rec(None, None, 999)] * 5
    for batch, facts in encode_with_facts(table_of(rows), max_batch_bytes=180, codec=Codec[codec.upper()]):
        assert inspect_records(batch) == facts


def test_no_rows_no_batches() -> None:
    assert list(encode_batches(pa.table({"value": pa.array([], pa.binary())}), max_batch_bytes=100)) == []


# -- Arrow's memory -------------------------------------------------------------------------------


def test_slices_chunks_and_nested_offsets_are_respected() -> None:
    rows = [
        Rec(
            None if i % 3 == 0 else b"k%d" % i,
            None if i % 4 == 0 else b"v%d" % i,
            -1 if i % 5 == 0 else i,
            tuple((f"h{i}", None if j % 2 else b"%d" % j) for j in range(i % 4)),
        )
        for i in range(60)
    ]
    whole = table_of(rows)
    for start, length in ((0, 60), (1, 59), (7, 9), (9, 7), (16, 1), (59, 1), (13, 33)):
        wanted = build_batch(rows[start : start + length])
        part = whole.slice(start, length)
        assert encode(part) == wanted
        assert encode(part.to_batches()[0]) == wanted
        cut = length // 2
        chunked = pa.concat_tables([whole.slice(start, cut), whole.slice(start + cut, length - cut)])
        assert encode(chunked) == wanted
        assert list(encode_batches(chunked, max_batch_bytes=1 << 20)) == [wanted]


def test_a_null_header_list_that_spans_entries_has_no_headers() -> None:
    entries = pa.array([{"key": "a", "value": b"1"}, {"key": "b", "value": b"2"}], HEADERS.value_type)
    headers = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), entries, mask=pa.array([True, False]))
    batch = encode(pa.table({"value": [b"x", b"y"], "headers": headers}))
    told = decode(batch, topic="t", partition=0)["headers"].to_pylist()
    assert told == [[], [{"key": "b", "value": b"2"}]]


def test_what_was_decoded_encodes_to_the_same_bytes() -> None:
    batch = build_batch([*ROWS, Rec(b"k", b"v", -1)], base_offset=7)
    again = stamped(decode(batch, topic="t", partition=0), 7, -1)
    assert again == batch


def test_a_stamped_batch_decodes_with_its_new_offsets() -> None:
    batch = encode(table_of(ROWS))
    stamp(batch, base_offset=498, leader_epoch=4)
    assert decode(batch, topic="t", partition=0)["offset"].to_pylist() == [498, 499, 500]


# -- refusals -------------------------------------------------------------------------------------


def test_a_level_that_the_codec_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidError, match="no level 99"):
        encode(table_of(ROWS), codec=Codec.ZSTD, level=99)


def test_a_batch_needs_a_record() -> None:
    with pytest.raises(InvalidError, match="needs a record"):
        encode(pa.table({"value": pa.array([], pa.binary())}))


def test_more_than_two_gib_is_too_much_for_one_batch() -> None:
    size = 1 << 30  # never touched, so never really there
    untouched = pa.py_buffer(np.zeros(size, np.uint8))
    ends = pa.py_buffer(np.array([0, size], np.int32))
    huge = pa.Array.from_buffers(pa.binary(), 1, [None, ends, untouched])
    with pytest.raises(InvalidError, match="1 records take 2147483667 bytes") as caught:
        encode(pa.table({"key": huge, "value": huge}))
    assert caught.value.kafka_name == "RECORD_LIST_TOO_LARGE"


@pytest.mark.parametrize("limit", [100, 400, 1 << 20])
def test_batches_in_one_piece_of_memory_are_those_made_one_by_one(limit: int) -> None:
    rows = [
        Rec(key=None if n % 7 == 0 else b"k%d" % n, value=b"v" * (n % 90), timestamp=1000 + n * 3)
        for n in range(200)
    ]
    tables = [table_of(rows[:1]), table_of(rows[1:150]), table_of([]), table_of(rows[150:])]
    expected = b"".join(
        bytes(batch) for table in tables for batch in encode_batches(table, max_batch_bytes=limit)
    )
    together = encode_together(tables, max_batch_bytes=limit)
    assert bytes(together) == expected
    assert len(encode_together([], max_batch_bytes=limit)) == 0
    position = 0
    while position < len(together):
        position += check_batch(together, position).size
