"""The plain-Python batch builder reproduces every published checksum."""

from __future__ import annotations

import struct

import pytest

from tidegate.testing.batches import (
    CANARY_CRCS,
    CODECS,
    Rec,
    build_batch,
    canary_batch,
    crc32c,
    end_transaction_batch,
    varint,
)

TWO = [Rec(b"k1", b"v1", 1000, (("h", b"x"), ("n", None))), Rec(b"k2", None, 1005)]


def crc_of(batch: bytes) -> int:
    return int(struct.unpack_from(">I", batch, 17)[0])


@pytest.mark.parametrize(
    ("batch", "size", "crc"),
    [
        pytest.param(
            build_batch(
                TWO, base_offset=100, leader_epoch=3, producer_id=7, producer_epoch=0, base_sequence=5
            ),
            88,
            3319513931,
            id="two-records",
        ),
        pytest.param(
            end_transaction_batch(
                "COMMIT",
                producer_id=98323,
                producer_epoch=99,
                coordinator_epoch=100,
                timestamp=1639133049552,
                base_offset=10,
                leader_epoch=7,
            ),
            78,
            3679295762,
            id="commit-marker",
        ),
        pytest.param(
            build_batch(
                [],
                base_offset=15,
                last_offset_delta=22,
                producer_id=23423,
                producer_epoch=145,
                base_sequence=983,
                max_timestamp=1639133049552,
            ),
            61,
            1469308350,
            id="empty",
        ),
    ],
)
def test_golden_batches(batch: bytes, size: int, crc: int) -> None:
    assert (len(batch), crc_of(batch)) == (size, crc)


def test_the_canary_segment_has_its_published_size_and_checksums() -> None:
    batches = [canary_batch(i) for i in range(109)]
    assert sum(map(len, batches)) == 16314
    assert {i: crc_of(batches[i]) for i in CANARY_CRCS} == CANARY_CRCS


@pytest.mark.parametrize(
    ("number", "encoded"),
    [
        *[(0, "00"), (-1, "01"), (1, "02"), (63, "7e"), (-64, "7f"), (64, "8001"), (8192, "808001")],
        (2**31 - 1, "feffffff0f"),
    ],
)
def test_varints(number: int, encoded: str) -> None:
    assert varint(number).hex() == encoded


def test_crc_of_the_check_string() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("codec", CODECS)
def test_each_codec_sets_its_attribute_and_the_checksum_covers_the_stored_bytes(codec: str) -> None:
    batch = build_batch(TWO * 50, codec=codec)  # type: ignore[arg-type]
    assert struct.unpack_from(">h", batch, 21)[0] & 7 == CODECS.index(codec)  # type: ignore[arg-type]
    assert crc_of(batch) == crc32c(batch[21:])


def test_any_field_can_be_made_wrong() -> None:
    batch = build_batch(TWO, crc=1, count=99, magic=9, length=5)
    assert crc_of(batch) == 1
    assert batch[16] == 9
    assert struct.unpack_from(">i", batch, 57)[0] == 99
    assert struct.unpack_from(">i", batch, 8)[0] == 5
