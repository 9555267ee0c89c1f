"""The 61-byte header: golden bytes, what is refused and how, sequences, stamping."""

import struct

import pytest

from batch_checks import check_batch
from tidegate.errors import CorruptError
from tidegate.log.format.batch import (
    HEADER_SIZE,
    MAX_SEQUENCE,
    BatchHeader,
    Codec,
    TimestampType,
    batch_crc,
    crc32c,
    iter_headers,
    next_sequence,
    previous_sequence,
    stamp,
)
from tidegate.testing.batches import CANARY_CRCS, Rec, build_batch, canary_batch

TWO_RECORDS = bytes.fromhex(
    "0000000000000064 0000004c 00000003 02 c5dbc34b 0000 00000001"
    "00000000000003e8 00000000000003ed 0000000000000007 0000 00000005 00000002"
    "22000000046b310476310402680278026e01 10000a02046b320100"
)


def test_crc_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_header_of_the_canarys_first_batch_reads_field_by_field() -> None:
    header = check_batch(canary_batch(0))
    assert header == BatchHeader(
        base_offset=0,
        length=136,
        leader_epoch=0,
        magic=2,
        crc=2142666254,
        attributes=0,
        last_offset_delta=0,
        base_timestamp=1639132508991,
        max_timestamp=1639132508991,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=0,
        count=1,
    )
    assert (header.size, header.last_offset, header.next_offset) == (148, 0, 1)
    assert canary_batch(0)[:HEADER_SIZE] == bytes.fromhex(
        "0000000000000000 00000088 00000000 02 7fb67e0e 0000 00000000"
        "0000017da3e9333f 0000017da3e9333f ffffffffffffffff ffff 00000000 00000001"
    )


@pytest.mark.parametrize(("offset", "crc"), CANARY_CRCS.items())
def test_published_crcs_of_the_canary_hold(offset: int, crc: int) -> None:
    assert check_batch(canary_batch(offset)).crc == crc


def test_golden_batch_of_two_records_reads_back() -> None:
    header = check_batch(TWO_RECORDS)
    assert (header.crc, header.size, header.count) == (3319513931, 88, 2)
    assert (header.base_offset, header.leader_epoch, header.last_sequence) == (100, 3, 6)
    assert (header.has_producer, header.producer_id, header.producer_epoch) == (True, 7, 0)


def test_pack_is_the_inverse_of_parse() -> None:
    assert BatchHeader.parse(TWO_RECORDS).pack() == TWO_RECORDS[:HEADER_SIZE]


def test_attributes_name_codec_clock_and_flags() -> None:
    plain = BatchHeader.parse(TWO_RECORDS)
    assert (plain.codec, plain.timestamp_type, plain.is_transactional, plain.is_control) == (
        Codec.NONE,
        TimestampType.CREATE_TIME,
        False,
        False,
    )
    assert plain.delete_horizon_ms is None
    every_flag = plain._replace(attributes=0x7C)
    assert (every_flag.codec.label, every_flag.timestamp_type.label) == ("zstd", "LogAppendTime")
    assert (every_flag.is_transactional, every_flag.is_control) == (True, True)
    assert every_flag.delete_horizon_ms == 1000


@pytest.mark.parametrize("code", [5, 6, 7])
def test_a_codec_nobody_knows_is_corrupt(code: int) -> None:
    with pytest.raises(CorruptError, match=f"unknown compression codec {code}"):
        _ = BatchHeader.parse(TWO_RECORDS)._replace(attributes=code).codec


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        pytest.param(next_sequence(5, 5), 10, id="LS-B1-plus"),
        pytest.param(next_sequence(MAX_SEQUENCE, 1), 0, id="LS-B1-wraps"),
        pytest.param(next_sequence(MAX_SEQUENCE - 5, 10), 4, id="LS-B1-wraps-by-ten"),
        pytest.param(previous_sequence(5, 5), 0, id="LS-B1-minus"),
        pytest.param(previous_sequence(0, 1), MAX_SEQUENCE, id="LS-B1-minus-wraps"),
    ],
)
def test_sequences_wrap_at_the_largest_int32(got: int, wanted: int) -> None:
    assert got == wanted


def test_last_sequence_wraps_and_is_none_without_a_base() -> None:
    header = BatchHeader.parse(TWO_RECORDS)
    assert header._replace(base_sequence=MAX_SEQUENCE, last_offset_delta=1).last_sequence == 0
    assert header._replace(base_sequence=-1).last_sequence == -1


# -- refusing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [0, 1, 60])
def test_a_short_header_is_corrupt_and_names_what_is_there(there: int) -> None:
    with pytest.raises(CorruptError, match=f"has {there} of its 61 header bytes"):
        BatchHeader.parse(TWO_RECORDS[:there])


@pytest.mark.parametrize("length", [-(2**31), -1, 0, 48])
def test_a_length_below_the_smallest_is_corrupt(length: int) -> None:
    batch = bytearray(TWO_RECORDS)
    batch[8:12] = struct.pack(">i", length)
    with pytest.raises(CorruptError, match=f"length {length}, below"):
        BatchHeader.parse(batch)


@pytest.mark.parametrize("magic", [-128, -1, 0, 1, 3, 127])
def test_another_magic_is_corrupt(magic: int) -> None:
    with pytest.raises(CorruptError, match=f"magic {magic};"):
        check_batch(build_batch([Rec(value=b"v")], magic=magic))


def test_a_newer_magic_is_taken_only_when_asked_for() -> None:
    batch = build_batch([Rec(value=b"v")], magic=3)
    assert BatchHeader.parse(batch, newer_magic=True).magic == 3
    with pytest.raises(CorruptError):
        BatchHeader.parse(build_batch([Rec(value=b"v")], magic=1), newer_magic=True)


@pytest.mark.parametrize("cut", [1, 10, 27])
def test_a_body_that_is_not_there_is_corrupt(cut: int) -> None:
    with pytest.raises(CorruptError, match=f"says it has 88 bytes but only {88 - cut} are there"):
        check_batch(TWO_RECORDS[:-cut])


@pytest.mark.parametrize("position", range(17, 88))
def test_a_flipped_bit_behind_the_magic_is_found_by_the_crc(position: int) -> None:
    batch = bytearray(TWO_RECORDS)
    batch[position] ^= 0x10
    with pytest.raises(CorruptError, match="stored CRC"):
        check_batch(batch)


def test_errors_name_file_position_and_offset() -> None:
    batch = bytearray(TWO_RECORDS)
    batch[-1] ^= 1
    with pytest.raises(CorruptError, match=r"position 7 \(base offset 100\)") as caught:
        check_batch(b"seven.." + batch, 7)
    error = caught.value
    assert (error.position, error.offset, error.kafka_name) == (7, 100, "CORRUPT_MESSAGE")
    with pytest.raises(CorruptError, match=r"position 4176 of a\.log") as caught:
        BatchHeader.parse(b"seven..", 7, path="a.log", file_position=4169)
    assert (caught.value.position, str(caught.value.path)) == (4176, "a.log")


# -- walking --------------------------------------------------------------------------------------


def test_headers_of_whole_batches_come_in_order_and_a_partial_one_ends_them_quietly() -> None:
    batches = [canary_batch(i) for i in (0, 1, 32, 33)]
    log = b"".join(batches)
    found = list(iter_headers(log))
    assert [header.base_offset for _, header in found] == [0, 1, 32, 33]
    assert [position for position, _ in found] == [0, 148, 296, 296 + len(batches[2])]
    for cut in (1, 100, len(batches[-1]) - 1):
        assert [header.base_offset for _, header in iter_headers(log[:-cut])] == [0, 1, 32]
    assert list(iter_headers(log, 148)) == found[1:]


def test_walking_stops_with_an_error_at_what_cannot_be_a_header() -> None:
    walk = iter_headers(canary_batch(0) + bytes(61))
    assert next(walk)[0] == 0
    with pytest.raises(CorruptError, match="position 148 has length 0"):
        next(walk)


# -- stamping -------------------------------------------------------------------------------------


def three_records() -> bytearray:
    return bytearray(build_batch([Rec(b"k", b"v", 1000 + i) for i in range(3)]))


@pytest.mark.parametrize("_", [pytest.param(None, id="LS-B4-offset")])
def test_a_new_base_offset_moves_all_offsets_and_leaves_the_crc(_: None) -> None:
    batch = three_records()
    before = check_batch(batch)
    header = stamp(batch, base_offset=500 - before.last_offset_delta)
    assert (header.base_offset, header.last_offset, header.crc) == (498, 500, before.crc)
    assert check_batch(batch) == header


@pytest.mark.parametrize("_", [pytest.param(None, id="LS-B4-epoch")])
def test_a_leader_epoch_leaves_the_crc(_: None) -> None:
    batch = three_records()
    before = check_batch(batch)
    assert stamp(batch, leader_epoch=7) == before._replace(leader_epoch=7)
    assert check_batch(batch).leader_epoch == 7


@pytest.mark.parametrize("_", [pytest.param(None, id="LS-B4-append-time")])
def test_log_append_time_changes_the_crc(_: None) -> None:
    batch = three_records()
    before = check_batch(batch)
    header = stamp(batch, max_timestamp=9000, timestamp_type=TimestampType.LOG_APPEND_TIME)
    assert (header.max_timestamp, header.timestamp_type) == (9000, TimestampType.LOG_APPEND_TIME)
    assert header.crc != before.crc
    assert check_batch(batch) == header
    back = stamp(batch, max_timestamp=1002, timestamp_type=TimestampType.CREATE_TIME)
    assert back == before


def test_a_stamp_that_changes_nothing_checksummed_does_not_touch_a_wrong_crc() -> None:
    batch = three_records()
    batch[17:21] = bytes(4)
    stamp(batch, base_offset=3, leader_epoch=1, max_timestamp=1002, timestamp_type=TimestampType.CREATE_TIME)
    assert batch[17:21] == bytes(4)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_is_read(kind: type) -> None:
    buffer = kind(bytearray(TWO_RECORDS))
    assert check_batch(buffer).count == 2
    assert batch_crc(buffer, 0, 88) == 3319513931
    assert len(list(iter_headers(buffer))) == 1


def test_a_new_time_clears_attribute_bits_that_mean_nothing() -> None:
    """As a broker does that stamps its own time; without a new time the batch stays as it was sent."""
    sent = bytearray(build_batch([Rec(value=b"x", timestamp=5)]))
    header = BatchHeader.parse(sent)
    sent[:HEADER_SIZE] = header._replace(attributes=header.attributes | 0x7F80).pack()
    sent[:HEADER_SIZE] = BatchHeader.parse(sent)._replace(crc=batch_crc(sent, 0, len(sent))).pack()
    kept = stamp(bytearray(sent), base_offset=7, max_timestamp=5, timestamp_type=TimestampType.CREATE_TIME)
    assert kept.attributes == header.attributes | 0x7F80
    stamped = bytearray(sent)
    now = stamp(stamped, max_timestamp=9, timestamp_type=TimestampType.LOG_APPEND_TIME)
    assert now.attributes == header.attributes | 0x08
    assert now.crc == batch_crc(stamped, 0, len(stamped))
