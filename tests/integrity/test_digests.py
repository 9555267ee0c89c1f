"""Digests of records: the bytes are those the page of formats says, and sums do not depend on cuts."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidegate.integrity.digests import ALL, Digest, Parts, digest_blocks, hashes_of
from tidegate.kernels.range_summaries import hash_records, sum_blocks
from tidegate.log.format.records import RECORD_SCHEMA

xxhash = pytest.importorskip("xxhash")


def canonical(row: dict[str, Any], parts: Parts = ALL) -> bytes:
    """The definition, in plain Python."""

    def field(content: bytes | None) -> bytes:
        return struct.pack(">i", -1 if content is None else len(content)) + (content or b"")

    out = b""
    if parts & Parts.OFFSET:
        out += struct.pack(">q", row["offset"])
    if parts & Parts.TIMESTAMP:
        out += struct.pack(">q", -1 if row["timestamp"] is None else row["timestamp"])
    if parts & Parts.KEY:
        out += field(row["key"])
    if parts & Parts.VALUE:
        out += field(row["value"])
    if parts & Parts.HEADERS:
        out += struct.pack(">i", len(row["headers"]))
        for header in row["headers"]:
            out += field(header["key"].encode()) + field(header["value"])
    return out


def random_rows(chance: random.Random, count: int) -> list[dict[str, Any]]:
    def content() -> bytes | None:
        return (
            None
            if chance.random() < 0.2
            else bytes(chance.getrandbits(8) for _ in range(chance.randint(0, 70)))
        )

    return [
        {
            "offset": 7 + number * chance.choice([1, 3]) * 10,
            "timestamp": chance.choice([None, 0, 1_800_000_000_000 + number]),
            "key": content(),
            "value": content(),
            "headers": [
                {"key": "é" * chance.randint(0, 4), "value": content()} for _ in range(chance.randint(0, 3))
            ],
        }
        for number in range(count)
    ]


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    full = [{"topic": "orders", "partition": 0, **row} for row in rows]
    table = pa.Table.from_pylist(
        [{**row, "timestamp": None if row["timestamp"] is None else row["timestamp"]} for row in full],
        pa.schema([RECORD_SCHEMA.field(name) for name in RECORD_SCHEMA.names]),
    )
    return table.combine_chunks().to_batches()[0]


@pytest.mark.parametrize("parts", [ALL, Parts.KEY | Parts.VALUE, Parts.KEY, ALL & ~Parts.OFFSET])
def test_hashes_are_xxh64_of_the_canonical_bytes(parts: Parts) -> None:
    chance = random.Random(int(parts))
    for count in (1, 2, 60):
        rows = random_rows(chance, count)
        given = batch_of(rows)
        expected = [xxhash.xxh64_intdigest(canonical(row, parts)) for row in rows]
        assert hashes_of(given, parts).tolist() == expected
        assert hashes_of(given.slice(count // 2), parts).tolist() == expected[count // 2 :]


def test_a_golden_record_for_those_who_write_their_own_check() -> None:
    row = {"offset": 5, "timestamp": 1_700_000_000_000, "key": b"alice", "value": None, "headers": []}
    row["headers"] = [{"key": "div", "value": b"\x01"}]
    assert canonical(row).hex() == (
        "00000000000000050000018bcfe5680000000005616c696365ffffffff00000001000000036469760000000101"
    )
    assert int(hashes_of(batch_of([row]), ALL)[0]) == xxhash.xxh64_intdigest(canonical(row))


def test_digests_add_up_wherever_blocks_are_cut() -> None:
    chance = random.Random(3)
    hashes = np.array([chance.getrandbits(64) for _ in range(200)], np.uint64)
    naive = Digest(200, sum(hashes.tolist()) % 2**64, sum(h * h for h in hashes.tolist()) % 2**64)
    for _ in range(20):
        cuts = sorted(chance.randint(0, 200) for _ in range(chance.randint(0, 6)))
        parts = digest_blocks(hashes, np.array([0, *cuts, 200], np.int64))
        total = Digest()
        for part in parts:
            total += part
        assert total == naive
    shuffled = hashes.copy()
    np.random.default_rng(1).shuffle(shuffled)
    assert digest_blocks(shuffled, np.array([0, 200], np.int64)) == [naive]
    assert Digest.of(naive.records, naive.hex()) == naive


def test_two_values_that_changed_places_and_a_repeat_for_a_loss_are_seen() -> None:
    rows = random_rows(random.Random(9), 40)
    before = digest_blocks(hashes_of(batch_of(rows), ALL), np.array([0, 40], np.int64))
    swapped = [dict(row) for row in rows]
    swapped[3]["value"], swapped[8]["value"] = b"one", b"other"
    again = [dict(row) for row in swapped]
    again[3]["value"], again[8]["value"] = b"other", b"one"
    found = [
        digest_blocks(hashes_of(batch_of(each), ALL), np.array([0, 40], np.int64))
        for each in (swapped, again)
    ]
    assert found[0] != found[1] != before


def test_the_uncompiled_kernels_give_the_same_and_stay_inside_their_buffers() -> None:
    from tidegate.integrity import digests

    rows = random_rows(random.Random(4), 12)
    given = batch_of(rows)
    compiled = hashes_of(given, ALL)
    real = digests.kernels.hash_records
    try:
        digests.kernels.hash_records = getattr(real, "py_func", real)
        with np.errstate(over="ignore"):
            assert hashes_of(given, ALL).tolist() == compiled.tolist()
    finally:
        digests.kernels.hash_records = real
    assert hash_records is real and sum_blocks is not None
