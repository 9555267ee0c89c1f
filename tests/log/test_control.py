"""Control records: markers byte for byte, what they say, what is refused."""

import struct
from typing import Any

import pytest

from batch_checks import check_batch
from encoded_batches import end_txn_marker
from tidegate.errors import CorruptError
from tidegate.log.format.batch import (
    ControlRecord,
    ControlType,
    parse_control,
    read_control,
)
from tidegate.testing.batches import CODECS, CodecName, Rec, build_batch, end_transaction_batch


def test_the_golden_commit_marker() -> None:
    marker = end_txn_marker(
        ControlType.COMMIT,
        producer_id=98323,
        producer_epoch=99,
        coordinator_epoch=100,
        timestamp=1639133049552,
        base_offset=10,
        leader_epoch=7,
    )
    header = check_batch(marker)
    assert (len(marker), header.crc, header.attributes) == (78, 3679295762, 0x0030)
    assert (header.base_offset, header.leader_epoch, header.base_sequence, header.count) == (10, 7, -1, 1)
    assert read_control(marker) == ControlRecord(ControlType.COMMIT, 0, 100)


@pytest.mark.parametrize("kind", ["ABORT", "COMMIT"])
@pytest.mark.parametrize("coordinator_epoch", [-1, 0, 2**31 - 1])
def test_markers_are_the_twins(kind: Any, coordinator_epoch: int) -> None:
    told = {
        "producer_id": 2**62,
        "producer_epoch": 3,
        "coordinator_epoch": coordinator_epoch,
        "timestamp": 77,
    }
    marker = end_txn_marker(ControlType[kind], **told)
    assert marker == end_transaction_batch(kind, **told)
    assert read_control(b"...." + marker, 4) == ControlRecord(ControlType[kind], 0, coordinator_epoch)
    assert read_control(marker).ends_transaction


@pytest.mark.parametrize("kind", [kind for kind in ControlType if kind > ControlType.COMMIT])
def test_only_transactions_end_with_a_marker(kind: ControlType) -> None:
    with pytest.raises(ValueError, match=kind.name):
        end_txn_marker(kind, producer_id=1, producer_epoch=0, coordinator_epoch=0, timestamp=0)
    assert parse_control(struct.pack(">hh", 0, kind), b"") == ControlRecord(kind, 0)


@pytest.mark.parametrize("code", [-1, 7, 32767])
def test_a_type_from_the_future_is_unknown(code: int) -> None:
    said = parse_control(struct.pack(">hh", 0, code), None)
    assert said.kind is ControlType.UNKNOWN
    assert not said.ends_transaction


def test_later_versions_may_be_longer() -> None:
    key, value = struct.pack(">hhh", 1, 1, 9), struct.pack(">hih", 1, 5, 9)
    assert parse_control(key, value) == ControlRecord(ControlType.COMMIT, 1, 5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b"\0" * 6),
        (b"", b"\0" * 6),
        (b"\0\0\0", b"\0" * 6),
        (b"\xff\xff\0\0", b"\0" * 6),
        (b"\0\0\0\1", None),
        (b"\0\0\0\1", b"\0" * 5),
        (b"\0\0\0\1", b"\xff\xff\0\0\0\0"),
    ],
)
def test_short_or_negative_fields_are_invalid_records(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_control(key, value)
    assert caught.value.kafka_name == "INVALID_RECORD"


@pytest.mark.parametrize("codec", CODECS)
def test_a_compressed_control_batch_reads_too(codec: CodecName) -> None:
    batch = build_batch(
        [Rec(b"\0\0\0\0", b"\0\0\0\0\0\5")], control=True, transactional=True, producer_id=1, codec=codec
    )
    assert read_control(batch) == ControlRecord(ControlType.ABORT, 0, 5)


def test_what_is_no_whole_control_batch_is_refused_with_its_place() -> None:
    marker = end_transaction_batch("ABORT", producer_id=1, producer_epoch=0, base_offset=9)
    for buffer in (marker[:-1], build_batch([Rec()], base_offset=9)):
        with pytest.raises(CorruptError, match="no whole control batch at position 3") as caught:
            read_control(b"abc" + buffer, 3)
        assert (caught.value.position, caught.value.offset) == (3, 9)


def test_any_flipped_bit_of_a_markers_record_gives_an_answer_or_a_corrupt_error() -> None:
    marker = end_transaction_batch("COMMIT", producer_id=1, producer_epoch=0)
    for bit in range(61 * 8, 78 * 8):
        flipped = bytearray(marker)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        try:
            read_control(flipped)
        except CorruptError as error:
            assert error.position == 0
