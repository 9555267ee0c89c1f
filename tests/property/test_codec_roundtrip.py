"""Arrow → batches → Arrow gives the same rows, however the table was cut, sliced, split or compressed."""

from itertools import pairwise
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_checks import check_batch
from encoded_batches import encode_batches
from tidegate.log.format.batch import Codec, stamp
from tidegate.log.format.decode import DecodeLimits, decode, decode_pieces, scan_batches

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

texts = st.none() | st.binary(max_size=30)
headers = st.none() | st.lists(
    st.fixed_dictionaries({"key": st.text(max_size=3), "value": st.none() | st.binary(max_size=3)}),
    max_size=3,
)
rows = st.fixed_dictionaries(
    {"key": texts, "value": texts, "timestamp": st.none() | st.integers(0, 2**42), "headers": headers}
)
schema = pa.schema(
    [("key", pa.binary()), ("value", pa.binary()), ("timestamp", pa.int64()), ("headers", HEADERS)]
)


def cut(table: pa.Table, places: list[int]) -> pa.Table:
    """The same rows in chunks that are slices of a larger table."""
    padded = pa.concat_tables([table.slice(0, 1), table, table.slice(0, 1)]).combine_chunks()
    ends = sorted({min(place, table.num_rows) for place in places} | {0, table.num_rows})
    chunks = [padded.slice(1 + start, end - start) for start, end in pairwise(ends)]
    return pa.concat_tables(chunks) if chunks else table


def written(table: pa.Table, codec: Codec, limit: int, records: int, first: int) -> bytes:
    """The log a leader would make of it, offsets from `first` on."""
    log, offset = b"", first
    for batch in encode_batches(table, max_batch_bytes=limit, max_batch_records=records, codec=codec):
        offset = stamp(batch, base_offset=offset, leader_epoch=1).next_offset
        log += batch
    return log


@given(
    st.lists(rows, max_size=25),
    st.lists(st.integers(0, 25), max_size=3),
    st.sampled_from(Codec),
    st.integers(61, 400),
    st.integers(1, 30),
    st.integers(0, 2**40),
)
@settings(max_examples=250, deadline=None)
def test_rows_survive(
    some: list[dict[str, Any]], places: list[int], codec: Codec, limit: int, records: int, first: int
) -> None:
    table = pa.Table.from_pylist(some, schema)
    log = written(cut(table, places), codec, limit, records, first)
    back = decode(log, topic="t", partition=5)
    back.validate(full=True)
    assert back["offset"].to_pylist() == list(range(first, first + len(some)))
    assert back["key"].equals(table["key"].combine_chunks())
    assert back["value"].equals(table["value"].combine_chunks())
    assert back["timestamp"].view(pa.int64()).equals(table["timestamp"].combine_chunks())
    assert back["headers"].to_pylist() == [row["headers"] or [] for row in some]
    pieces = list(decode_pieces(log, topic="t", partition=5, limits=DecodeLimits(max_piece_bytes=limit)))
    assert pa.Table.from_batches(pieces, back.schema).combine_chunks().equals(pa.Table.from_batches([back]))


@given(
    st.lists(rows, min_size=1, max_size=25), st.sampled_from(Codec), st.integers(-2, 30), st.integers(-2, 30)
)
@settings(max_examples=150, deadline=None)
def test_a_range_of_offsets_is_a_slice_of_all(
    some: list[dict[str, Any]], codec: Codec, start: int, stop: int
) -> None:
    log = written(pa.Table.from_pylist(some, schema), codec, 150, 7, 0)
    everything = decode(log, topic="t", partition=0)
    part = decode(log, topic="t", partition=0, from_offset=start, to_offset=stop)
    first = min(max(start, 0), len(some))
    assert part.equals(everything.slice(first, max(0, min(stop, len(some)) - first)))


@given(st.lists(rows, min_size=1, max_size=25), st.sampled_from(Codec))
@settings(max_examples=60, deadline=None)
def test_a_table_of_headers_is_what_each_header_says(some: list[dict[str, Any]], codec: Codec) -> None:
    log = written(pa.Table.from_pylist(some, schema), codec, 150, 7, 3)
    table = scan_batches(log)
    for index, position in enumerate(table.position.tolist()):
        assert table.header(index) == check_batch(log, position)
