"""What a record's checksum covers: scalar against bytes written by hand, vector against scalar."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.integrity.columns import (
    checksum_of,
    computed_checksums,
    computed_field_sums,
    field_sum,
    read_columns,
    source_of,
)
from tidegate.integrity.header import ChecksumType, ControlKey, Stamp
from tidegate.kernels.integrity import field_sums, record_checksums
from tidegate.log.format.records import HEADERS_TYPE

GUID = bytes(range(1, 17))
PUT = Stamp(0, 255, 0, GUID, 0, 1, 1000, 77)
START = Stamp(2, 2, 0, GUID, 0, 0, 1000, 0)
START_KEY = ControlKey(GUID, 0, 0, 9).to_bytes()


def test_a_put_covers_kind_key_schema_and_value() -> None:
    covered = struct.pack(">ii2si3s", 0, 2, b"ab", 0, b"xyz")
    assert checksum_of(PUT, b"ab", b"xyz") == zlib.crc32(covered)


def test_a_delete_covers_kind_and_key() -> None:
    assert checksum_of(PUT._replace(kind=1), b"ab", None) == zlib.crc32(struct.pack(">ii2s", 1, 2, b"ab"))


def test_a_null_key_is_not_an_empty_one_and_a_null_value_not_an_empty_one() -> None:
    assert checksum_of(PUT, None, b"v") == zlib.crc32(struct.pack(">iiis", 0, -1, 0, b"v"))
    known = {checksum_of(PUT, None, b""), checksum_of(PUT, b"", b""), checksum_of(PUT, b"", None)}
    assert len(known) == 3


def test_bytes_that_move_from_key_to_value_change_the_checksum() -> None:
    assert checksum_of(PUT, b"ab", b"c") != checksum_of(PUT, b"a", b"bc")


def test_no_byte_of_a_control_record_but_the_nonce_can_change_unseen() -> None:
    sound = checksum_of(START, START_KEY, b"", b"\x01\x05")
    for position in range(len(START_KEY) - 4):
        key = bytearray(START_KEY)
        key[position] ^= 1
        assert checksum_of(START, bytes(key), b"", b"\x01\x05") != sound
    for payload in (b"\x01\x04", b"\x01", b"", None):
        assert checksum_of(START, START_KEY, b"", payload) != sound
    for change in ({"control": 3}, {"flags": 1}, {"timestamp": 1001}):
        assert checksum_of(START._replace(**change), START_KEY, b"", b"\x01\x05") != sound
    for value in (b"x", None):
        assert checksum_of(START, START_KEY, value, b"\x01\x05") != sound
    other_attempt = ControlKey(GUID, 0, 0, 10).to_bytes()
    assert checksum_of(START, other_attempt, b"", b"\x01\x05") == sound


def test_adhash_sums_one_crc_per_field() -> None:
    four = struct.Struct(">i").pack
    expected = zlib.crc32(four(0)) + zlib.crc32(b"k") + zlib.crc32(four(0)) + zlib.crc32(b"v")
    assert field_sum(PUT, b"k", b"v") == expected
    assert field_sum(PUT._replace(kind=1), b"k", None) == zlib.crc32(four(1)) + zlib.crc32(b"k")
    assert field_sum(START, START_KEY, b"") == zlib.crc32(four(2)) + zlib.crc32(four(2))


@pytest.mark.parametrize("row", ["DIV-45"])
def test_two_values_that_change_places_are_seen_by_adhash2_and_not_by_adhash(row: str) -> None:
    def total(kind: ChecksumType, pairs: list[tuple[bytes, bytes]]) -> int:
        return sum(
            checksum_of(PUT, key, value) if kind is ChecksumType.ADHASH2 else field_sum(PUT, key, value)
            for key, value in pairs
        )

    sent, swapped = [(b"a", b"1"), (b"b", b"2")], [(b"a", b"2"), (b"b", b"1")]
    assert total(ChecksumType.ADHASH, sent) == total(ChecksumType.ADHASH, swapped)
    assert total(ChecksumType.ADHASH2, sent) != total(ChecksumType.ADHASH2, swapped)


fields = st.one_of(st.none(), st.binary(max_size=80))
records = st.tuples(
    st.sampled_from([None, 0, 1, 2, 3]),  # None: not managed
    fields,
    fields,
    st.sampled_from([5, 7, 200]),
    st.integers(0, 255),
    st.integers(-(2**63), 2**63 - 1),
    fields,
)


def built(rows: list[tuple[object, ...]]) -> tuple[pa.RecordBatch, list[Stamp | None]]:
    headers, stamps = [], []
    for kind, _, _, control, flags, time, payload in rows:
        if kind is None:
            stamps.append(None)
            headers.append([])
            continue
        stamp = Stamp(kind, control if kind == 2 else 255, flags, GUID, 1, 2, time, 12345)  # type: ignore[arg-type]
        stamps.append(stamp)
        entries = [{"key": "div", "value": stamp.to_bytes()}]
        headers.append(entries if payload is None else [{"key": "divc", "value": payload}, *entries])
    batch = pa.record_batch(
        {
            "key": pa.array([row[1] for row in rows], pa.binary()),
            "value": pa.array([row[2] for row in rows], pa.binary()),
            "headers": pa.array(headers, HEADERS_TYPE),
        }
    )
    return batch, stamps


@settings(max_examples=200, deadline=None)
@given(st.lists(records, max_size=12), st.data())
def test_vector_checksums_are_the_scalar_ones(rows: list[tuple[object, ...]], draw: st.DataObject) -> None:
    batch, stamps = built(rows)
    start = draw.draw(st.integers(0, len(rows)))
    batch, stamps, rows = batch.slice(start), stamps[start:], rows[start:]
    columns = read_columns(batch.column("headers"))
    computed = computed_checksums(batch, columns).tolist()
    cheap = computed_checksums(batch, columns, payloads=False).tolist()
    sums = computed_field_sums(batch, columns).tolist()
    for number, (stamp, row) in enumerate(zip(stamps, rows, strict=True)):
        key, value, payload = row[1], row[2], row[6]
        if stamp is None:
            assert (computed[number], cheap[number], sums[number]) == (0, 0, 0)
            continue
        expected = checksum_of(stamp, key, value, payload)  # type: ignore[arg-type]
        assert computed[number] == expected
        assert cheap[number] == (expected if stamp.kind == 2 else stamp.crc)
        assert sums[number] == field_sum(stamp, key, value)  # type: ignore[arg-type]


def test_the_uncompiled_kernels_give_the_same() -> None:
    rows: list[tuple[object, ...]] = [
        (0, b"k" * 21, b"v" * 40, 5, 0, 7, None),
        (1, None, None, 5, 0, 7, None),
        (2, b"k" * 33, b"", 5, 1, -7, b"p" * 18),
        (None, b"", b"", 5, 0, 7, None),
    ]
    batch, _ = built(rows)
    columns = read_columns(batch.column("headers"))
    source = source_of(key=batch.column("key"), value=batch.column("value"), headers=batch.column("headers"))
    plain = np.zeros(len(rows), np.uint32)
    record_checksums.py_func(source, columns.rows, 1, plain)
    assert plain.tolist() == computed_checksums(batch, columns).tolist()
    sums = np.zeros(len(rows), np.uint64)
    field_sums.py_func(source, columns.rows, sums)
    assert sums.tolist() == computed_field_sums(batch, columns).tolist()


def test_metadata_of_another_batch_is_refused() -> None:
    batch, _ = built([(2, b"k", b"", 5, 0, 7, b"payload")] * 3)
    columns = read_columns(batch.column("headers"))
    with pytest.raises(InvalidError, match="another batch"):
        computed_checksums(batch.slice(1), columns)
    other, _ = built([(0, b"k", b"", 5, 0, 7, None)] * 3)
    with pytest.raises(InvalidError, match="another batch"):
        computed_checksums(other, columns)
