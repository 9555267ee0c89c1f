"""Batches into Arrow: golden bytes, every kind of batch, what is left out, what is refused and how."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import CorruptError, InvalidError
from tidegate.log.format.batch import RecordFacts
from tidegate.log.format.decode import (
    DecodeLimits,
    check_crcs,
    decode,
    decode_pieces,
    inspect_records,
    scan_batches,
)
from tidegate.log.format.records import RECORD_SCHEMA
from tidegate.testing.batches import (
    CODECS,
    CodecName,
    Rec,
    build_batch,
    canary_batch,
    canary_timestamp,
    canary_value,
    end_transaction_batch,
)

ROWS = [Rec(b"k1", b"v1", 1000, (("h", b"x"), ("n", None))), Rec(b"k2", None, 1005), Rec(None, b"", 1003)]


def rows_of(buffer: Any, **options: Any) -> list[tuple[Any, ...]]:
    """Offset, timestamp in ms, key, value and headers of every decoded record."""
    batch = decode(buffer, topic="t", partition=3, **options)
    batch.validate(full=True)
    assert batch.schema.equals(RECORD_SCHEMA)
    return as_rows(batch)


def as_rows(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    stamps = batch["timestamp"].view(pa.int64()).to_pylist()
    columns = (batch[name].to_pylist() for name in ("offset", "key", "value", "headers"))
    return [
        (offset, stamp, key, value, [(header["key"], header["value"]) for header in headers])
        for stamp, (offset, key, value, headers) in zip(stamps, zip(*columns, strict=True), strict=True)
    ]


def offsets_of(buffer: Any, **options: Any) -> list[int]:
    return [row[0] for row in rows_of(buffer, **options)]


def plain_log(*counts: int, codec: CodecName = "none") -> bytes:
    """Batches of so many records each, offsets from 0 on."""
    log, offset = b"", 0
    for count in counts:
        log += build_batch([Rec(b"k", b"v%d" % i) for i in range(count)], base_offset=offset, codec=codec)
        offset += count
    return log


# -- golden bytes ---------------------------------------------------------------------------------


def test_the_whole_canary_segment_reads_back() -> None:
    segment = b"".join(canary_batch(i) for i in range(109))
    assert len(segment) == 16314
    assert rows_of(segment) == [(i, canary_timestamp(i), None, canary_value(i), []) for i in range(109)]


@pytest.mark.parametrize("codec", CODECS)
def test_golden_records_read_back_under_every_codec(codec: CodecName) -> None:
    batch = build_batch(ROWS, base_offset=100, codec=codec)
    assert rows_of(batch) == [
        (100, 1000, b"k1", b"v1", [("h", b"x"), ("n", None)]),
        (101, 1005, b"k2", None, []),
        (102, 1003, None, b"", []),
    ]


def test_topic_and_partition_are_constant_columns() -> None:
    batch = decode(plain_log(3), topic="orders", partition=7)
    assert batch["topic"].to_pylist() == ["orders"] * 3
    assert batch["topic"].dictionary.to_pylist() == ["orders"]
    assert batch["partition"].to_pylist() == [7, 7, 7]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, pa.py_buffer, np.frombuffer])
def test_any_kind_of_buffer_is_read(kind: Any) -> None:
    log = plain_log(2, 1)
    buffer = np.frombuffer(log, np.uint8) if kind is np.frombuffer else kind(log)
    assert offsets_of(buffer) == [0, 1, 2]


def test_nothing_decodes_to_no_rows() -> None:
    assert rows_of(b"") == []
    assert list(decode_pieces(b"", topic="t", partition=0)) == []


# -- kinds of batches -----------------------------------------------------------------------------


def test_no_timestamp_is_null() -> None:
    stamps = decode(
        build_batch([Rec(timestamp=-1), Rec(timestamp=0), Rec(timestamp=5)]), topic="t", partition=0
    )
    assert stamps["timestamp"].is_null().to_pylist() == [True, False, False]
    assert decode(build_batch([Rec(timestamp=-1)] * 9), topic="t", partition=0)["timestamp"].null_count == 9


@pytest.mark.parametrize("_", [pytest.param(None, id="LS-B4-append-time-records")])
def test_append_time_is_the_time_of_all_records(_: None) -> None:
    batch = build_batch(ROWS, log_append_time=7777)
    assert [row[1] for row in rows_of(batch)] == [7777] * 3


def test_a_delete_horizon_as_base_gives_negative_deltas_and_the_same_times() -> None:
    batch = build_batch(ROWS, delete_horizon_ms=1_700_000_000_000)
    assert [row[1] for row in rows_of(batch)] == [1000, 1005, 1003]


@pytest.mark.parametrize("codec", CODECS)
def test_a_compacted_batch_keeps_its_gaps(codec: CodecName) -> None:
    kept = [Rec(b"a", b"1", 1, offset_delta=2), Rec(b"b", b"2", 2, offset_delta=9)]
    batch = build_batch(kept, base_offset=50, last_offset_delta=14, codec=codec)
    assert offsets_of(batch + build_batch([Rec()], base_offset=65)) == [52, 59, 65]


@pytest.mark.parametrize("codec", CODECS)
def test_an_emptied_batch_has_no_records(codec: CodecName) -> None:
    empty = build_batch([], base_offset=15, last_offset_delta=22, body=b"", codec=codec)
    assert len(empty) == 61
    assert offsets_of(plain_log(2) + empty + build_batch([Rec()], base_offset=38)) == [0, 1, 38]


def test_codecs_may_change_from_batch_to_batch() -> None:
    log = b"".join(
        build_batch([Rec(b"k", codec.encode())] * 2, base_offset=2 * i, codec=codec)
        for i, codec in enumerate([*CODECS, *CODECS])
    )
    assert [row[3].decode() for row in rows_of(log)] == [codec for codec in [*CODECS, *CODECS] for _ in "12"]


def test_a_header_key_that_is_no_utf8_shows_replacement_characters() -> None:
    batch = build_batch([Rec(headers=(("abc", b"x"),))])
    broken = batch.replace(b"abc", b"a\xffc")
    assert rows_of(broken, check_crcs=False)[0][4] == [("a\ufffdc", b"x")]


# -- what is left out -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, None), (1, None), (3, 4), (5, 8), (4, 4), (9, 2), (10, None), (0, 0), (2, 99), (0, 2**70)],
)
def test_offsets_outside_the_range_are_left_out(codec: CodecName, start: int, stop: int | None) -> None:
    log = plain_log(3, 4, 3, codec=codec)
    assert offsets_of(log, from_offset=start, to_offset=stop) == list(range(10))[start:stop]


def test_control_batches_show_only_when_asked_for() -> None:
    marker = end_transaction_batch("COMMIT", producer_id=7, producer_epoch=0, base_offset=2)
    log = plain_log(2) + marker + build_batch([Rec()], base_offset=3)
    assert offsets_of(log) == [0, 1, 3]
    assert offsets_of(log, control="include") == [0, 1, 2, 3]


def transactional(offset: int, producer: int, count: int = 2) -> bytes:
    return build_batch(
        [Rec(b"k", b"v")] * count,
        base_offset=offset,
        transactional=True,
        producer_id=producer,
        producer_epoch=0,
        base_sequence=0,
    )


def marker(kind: Any, offset: int, producer: int) -> bytes:
    return end_transaction_batch(kind, producer_id=producer, producer_epoch=0, base_offset=offset)


def test_aborted_transactions_are_hidden_from_their_first_offset_to_their_marker() -> None:
    log = (
        transactional(0, 1)
        + transactional(2, 2)
        + build_batch([Rec()], base_offset=4)
        + transactional(5, 1)
        + marker("ABORT", 7, 1)
        + marker("COMMIT", 8, 2)
        + transactional(9, 1)  # the producer's next transaction, which commits
        + marker("COMMIT", 11, 1)
        + transactional(12, 2)  # and one that aborts
        + marker("ABORT", 14, 2)
    )
    everything = [0, 1, 2, 3, 4, 5, 6, 9, 10, 12, 13]
    assert offsets_of(log) == everything
    assert offsets_of(log, aborted=[(1, 0), (2, 12)]) == [2, 3, 4, 9, 10]
    assert offsets_of(log, aborted=[(2, 12, 14, 15), (1, 0, 7, 0)]) == [2, 3, 4, 9, 10]
    assert offsets_of(log, aborted=[(1, 5)]) == [0, 1, 2, 3, 4, 9, 10, 12, 13]
    assert offsets_of(log, aborted=[(3, 0)]) == everything
    assert offsets_of(log, aborted=[(1, 0), (2, 12)], from_offset=5) == [9, 10]
    assert offsets_of(log, aborted=[(1, 0)], control="include") == [2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14]


def test_a_producer_without_transactions_is_never_hidden() -> None:
    log = build_batch([Rec()], producer_id=1, producer_epoch=0, base_sequence=0)
    assert offsets_of(log, aborted=[(1, 0)]) == [0]


def test_a_partial_batch_at_the_end_is_an_error_unless_it_is_expected() -> None:
    log = plain_log(2, 2)
    for cut in (1, 40, len(log) // 2 - 1):
        assert offsets_of(log[:-cut], partial_end=True) == [0, 1]
        with pytest.raises(CorruptError, match="is cut off"):
            decode(log[:-cut], topic="t", partition=0)


# -- pieces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("piece", [1, 1000, 10_000, 1 << 30])
def test_pieces_hold_the_same_rows_and_stay_small(codec: CodecName, piece: int) -> None:
    log = b"".join(
        build_batch([Rec(b"k", b"%d" % i * 100)] * 5, base_offset=5 * i, codec=codec) for i in range(40)
    )
    limits = DecodeLimits(max_piece_bytes=piece)
    pieces = list(decode_pieces(log, topic="t", partition=3, limits=limits))
    assert [row for part in pieces for row in as_rows(part)] == rows_of(log)
    if codec != "none":
        assert all(part.num_rows == 5 or part["value"].nbytes <= piece for part in pieces)


def test_pieces_without_a_record_are_left_out() -> None:
    log = plain_log(5, 5, 5)
    limits = DecodeLimits(max_piece_bytes=1)
    assert [
        part.num_rows for part in decode_pieces(log, topic="t", partition=0, limits=limits, from_offset=13)
    ] == [2]


def test_decoding_stops_as_soon_as_batches_unfold_beyond_the_total() -> None:
    log = b"".join(build_batch([Rec(value=bytes(10_000))], base_offset=i, codec="zstd") for i in range(50))
    with pytest.raises(InvalidError, match="unfold to more than the 100000 bytes"):
        decode(log, topic="t", partition=0, limits=DecodeLimits(max_total_bytes=100_000))
    assert decode(log, topic="t", partition=0).num_rows == 50


@pytest.mark.parametrize("codec", CODECS[1:])
def test_one_batch_may_not_unfold_beyond_its_limit(codec: CodecName) -> None:
    log = plain_log(1) + build_batch([Rec(value=bytes(200_000))], base_offset=1, codec=codec)
    with pytest.raises(
        CorruptError, match=r"position 7\d \(base offset 1\) does not unpack: .* 100000 bytes"
    ):
        decode(log, topic="t", partition=0, limits=DecodeLimits(max_decompressed_bytes=100_000))


def values_of(log: bytes, limits: DecodeLimits) -> Iterator[bytes]:
    for part in decode_pieces(log, topic="t", partition=0, limits=limits):
        yield from part["value"].to_pylist()


@pytest.mark.parametrize("codec", CODECS[1:])
def test_readers_that_take_turns_do_not_unpack_into_each_others_memory(codec: CodecName) -> None:
    limits = DecodeLimits(max_piece_bytes=1)
    wanted = [[b"%d-%d " % (reader, i) * 9000 for i in range(6)] for reader in range(7)]
    logs = [
        b"".join(build_batch([Rec(value=v)], base_offset=i, codec=codec) for i, v in enumerate(values))
        for values in wanted
    ]
    for _ in range(2):  # the second time with memory that the first readers left
        turns = zip(*(values_of(log, limits) for log in logs), strict=True)
        assert [list(values) for values in zip(*turns, strict=True)] == wanted
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda log: list(values_of(log, limits)), logs * 3)) == wanted * 3


# -- headers and facts ----------------------------------------------------------------------------


def test_a_table_of_headers_has_every_field() -> None:
    log = (
        plain_log(2, 3)
        + transactional(5, 9)
        + end_transaction_batch("ABORT", producer_id=9, producer_epoch=0)
    )
    table = scan_batches(log)
    assert table.count.tolist() == [2, 3, 2, 1]
    assert table.base_offset.tolist() == [0, 2, 5, 0]
    assert table.last_offset.tolist() == [1, 4, 6, 0]
    assert table.size.sum() == len(log) == table.end
    assert table.producer_id.tolist() == [-1, -1, 9, 9]
    assert table.is_control.tolist() == [False, False, False, True]
    assert table.is_transactional.tolist() == [False, False, True, True]
    assert table.fault is None
    assert check_crcs(log, table).all()
    assert table.header(2).base_offset == 5
    assert len(table[1:]) == 3


def test_scanning_ends_at_a_fault_that_is_raised_or_kept() -> None:
    log = plain_log(2) + bytes(100)
    with pytest.raises(CorruptError, match="length 0"):
        scan_batches(log)
    table = scan_batches(log, strict=False, path="x.log", file_position=500)
    assert (len(table), table.end) == (1, len(plain_log(2)))
    assert table.fault is not None
    assert table.fault.position == 500 + table.end


def test_wrong_crcs_are_told_one_by_one() -> None:
    log = bytearray(plain_log(1, 1, 1))
    log[len(log) // 2] ^= 1
    assert check_crcs(log, scan_batches(log)).tolist() == [True, False, True]


@pytest.mark.parametrize("codec", CODECS)
def test_facts_of_a_batch(codec: CodecName) -> None:
    batch = build_batch([*ROWS, Rec(b"k", b"v", -1)], base_offset=40, codec=codec)
    facts = RecordFacts(4, 1000, 1005, 41, null_keys=1, consecutive=True)
    assert inspect_records(batch) == inspect_records(batch + b"trailing") == facts
    gaps = build_batch([Rec(b"k", offset_delta=0), Rec(b"k", offset_delta=2)], codec=codec)
    assert inspect_records(gaps).consecutive is False


def test_facts_without_any_timestamp() -> None:
    facts = inspect_records(build_batch([Rec(b"k", timestamp=-1)]))
    assert (facts.min_timestamp, facts.max_timestamp) == (-1, -1)


def test_a_batch_that_is_not_all_there_has_no_facts() -> None:
    with pytest.raises(CorruptError, match="cut off"):
        inspect_records(plain_log(2)[:-1])
