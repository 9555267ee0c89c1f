"""What decoding refuses, how it says so, and where: rows B2 and B3, wrong CRCs, offsets that cannot be."""

import struct
from typing import Any

import pytest

from tidegate.errors import CorruptError
from tidegate.log.format.decode import decode, inspect_records
from tidegate.testing.batches import CODECS, COMPRESS, CodecName, Rec, build_batch

ROWS = [Rec(b"k1", b"v1", 1000, (("h", b"x"), ("n", None))), Rec(b"k2", None, 1005), Rec(None, b"", 1003)]


def offsets_of(buffer: Any, **options: Any) -> list[int]:
    offsets: list[int] = decode(buffer, topic="t", partition=0, **options)["offset"].to_pylist()
    return offsets


def plain_log(*counts: int) -> bytes:
    """Batches of so many records each, offsets from 0 on."""
    log, offset = b"", 0
    for count in counts:
        log += build_batch([Rec(b"k", b"v%d" % i) for i in range(count)], base_offset=offset)
        offset += count
    return log


def refused(buffer: bytes, **options: Any) -> CorruptError:
    with pytest.raises(CorruptError) as caught:
        decode(buffer, topic="t", partition=0, **options)
    return caught.value


def test_a_wrong_crc_names_file_position_and_offset() -> None:
    log = bytearray(plain_log(1, 1, 1))
    log[-2] ^= 1
    size = len(log) // 3
    error = refused(log, path="00000000000000000000.log", file_position=1000)
    assert (error.position, error.offset, error.kafka_name) == (1000 + 2 * size, 2, "CORRUPT_MESSAGE")
    assert "stored CRC" in str(error)
    assert "00000000000000000000.log" in str(error)
    assert offsets_of(log, check_crcs=False) == [0, 1, 2]


@pytest.mark.parametrize(("byte", "bit"), [(22, 0x20), (26, 0x40)], ids=["control", "last-offset-delta"])
def test_a_flip_that_makes_a_batch_look_unwanted_is_found_all_the_same(byte: int, bit: int) -> None:
    sparse = [Rec(b"k", offset_delta=0), Rec(b"k", offset_delta=60)]
    log = bytearray(plain_log(3) + build_batch(sparse, base_offset=3, last_offset_delta=96))
    assert offsets_of(log, from_offset=50) == [63]
    log[len(plain_log(3)) + byte] ^= bit
    assert "stored CRC" in str(refused(log, from_offset=50))


LIES: list[Any] = [
    pytest.param({"count": 4}, "says it has 4 records but holds 3", id="LS-B3-count-high"),
    pytest.param({"count": 2}, "bytes after its 2 records", id="LS-B3-count-low"),
    pytest.param({"count": 0}, "bytes after its 0 records", id="LS-B3-count-zero"),
    pytest.param({"count": -1}, "negative record count", id="LS-B3-count-negative"),
]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("lie", "words"), LIES)
def test_a_count_that_lies_is_an_invalid_record(lie: dict[str, int], words: str, codec: CodecName) -> None:
    error = refused(build_batch(ROWS, codec=codec, last_offset_delta=9, **lie))
    assert words in str(error)
    assert error.kafka_name == "INVALID_RECORD"


# length 12 | attributes | timestamp | offset | key 1 "k" | value 1 "v" | 1 header | key 1 "h" | value 1 "x"
GOOD = "18 00 00 00 02 6b 02 76 02 02 68 02 78"


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("record", "words"),
    [
        pytest.param("16 00 00 00 02 6b 02 76 02 02 68 02 78", "0 are left", id="LS-B2-length-short"),
        pytest.param("18 00 00 00 02 6b 02 76 04 02 68 02 78", "header 1", id="LS-B2-headers-high"),
        pytest.param("18 00 00 00 02 6b 02 76 00 02 68 02 78", "belong to no field", id="LS-B2-headers-low"),
        pytest.param(
            "18 00 00 00 02 6b 02 76 01 02 68 02 78", "says it has -1 headers", id="LS-B2-headers-negative"
        ),
        pytest.param(
            "18 00 00 00 02 6b 02 76 0e 02 68 02 78", "says it has 7 headers in 4", id="LS-B2-headers-absurd"
        ),
        pytest.param("18 00 00 00 7e 6b 02 76 02 02 68 02 78", "its key says it has 63", id="LS-B2-key-long"),
        pytest.param(
            "18 00 00 00 03 6b 02 76 02 02 68 02 78", "its key says it has -2", id="LS-B2-key-negative"
        ),
        pytest.param(
            "18 00 00 00 02 6b 7e 76 02 02 68 02 78", "its value says it has 63", id="LS-B2-value-long"
        ),
        pytest.param(
            "18 00 00 00 02 6b 02 76 02 7e 68 02 78", "the key of header 0 says", id="LS-B2-name-long"
        ),
        pytest.param("18 00 00 00 02 6b 02 76 02 01 68 02 78", "header 0 has no key", id="LS-B2-name-null"),
        pytest.param(
            "18 00 00 00 02 6b 02 76 02 02 68 7e 78", "the value of header 0 says", id="LS-B2-datum-long"
        ),
        pytest.param(
            "7e 00 00 00 02 6b 02 76 02 02 68 02 78", "it says it has 63 bytes", id="LS-B2-length-long"
        ),
        pytest.param(
            "01 00 00 00 02 6b 02 76 02 02 68 02 78", "it says it has -1 bytes", id="LS-B2-length-negative"
        ),
        pytest.param(
            "ff ff ff ff ff 00 02 6b 02 76 02 02 68", "more than 5 bytes", id="LS-B2-six-byte-length"
        ),
        pytest.param(
            "18 00 00 80 80 80 80 80 00 76 02 02 68", "offset delta takes more", id="LS-B2-six-byte-offset"
        ),
        pytest.param("00", "it has no bytes", id="LS-B2-no-bytes"),
    ],
)
def test_a_malformed_record_is_named(record: str, words: str, codec: CodecName) -> None:
    body = bytes.fromhex(GOOD) + bytes.fromhex(record)
    batch = build_batch(
        [], body=COMPRESS[codec](body), codec=codec, count=2, last_offset_delta=1, base_offset=40
    )
    error = refused(batch)
    assert words in str(error)
    assert (error.kafka_name, error.offset) == ("INVALID_RECORD", 40)
    with pytest.raises(CorruptError, match="malformed record"):
        inspect_records(batch)


def test_the_good_record_of_the_cases_above_is_good() -> None:
    batch = build_batch([], body=bytes.fromhex(GOOD), count=1, last_offset_delta=0)
    row = decode(batch, topic="t", partition=0).to_pylist()[0]
    assert (row["key"], row["value"], row["headers"]) == (b"k", b"v", [{"key": "h", "value": b"x"}])


@pytest.mark.parametrize(
    "batch",
    [
        build_batch([Rec(offset_delta=1), Rec(offset_delta=0)], last_offset_delta=1),
        build_batch([Rec(offset_delta=0), Rec(offset_delta=0)], last_offset_delta=1),
        build_batch([Rec(offset_delta=-1)], last_offset_delta=0),
        build_batch([Rec(offset_delta=5)], last_offset_delta=4),
    ],
    ids=["falling", "twice", "negative", "beyond-last"],
)
def test_offsets_that_do_not_rise_are_refused_unless_any_will_do(batch: bytes) -> None:
    error = refused(plain_log(1) + batch)
    assert "offsets do not rise" in str(error)
    assert error.position == len(plain_log(1))
    assert len(offsets_of(batch, any_offsets=True)) == struct.unpack_from(">i", batch, 57)[0]


@pytest.mark.parametrize("offset", [-1, -(2**63), 2**63 - 1, 2**63 - 2**31])
def test_a_base_offset_that_cannot_be_is_refused(offset: int) -> None:
    assert refused(build_batch([Rec()], base_offset=offset)).kafka_name == "INVALID_RECORD"
