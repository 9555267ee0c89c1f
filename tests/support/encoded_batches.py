"""Encoded batches for tests: of a table, and end markers of transactions."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from tidegate.log.format.batch import (
    CONTROL_BIT,
    HEADER_SIZE,
    LENGTH_OVERHEAD,
    MAGIC,
    MARKER_SIZE,
    NO_LEADER_EPOCH,
    NO_SEQUENCE,
    TRANSACTIONAL_BIT,
    BatchHeader,
    ControlType,
    batch_crc,
)
from tidegate.log.format.encode import encode_with_facts
from tidegate.log.format.records import RecordTable

_KEY = struct.Struct(">hh")
_MARKER = struct.Struct(">hi")


def encode_batches(source: RecordTable, **options: Any) -> Iterator[bytearray]:
    """The batches of `encode_with_facts`, without the facts."""
    return (batch for batch, _ in encode_with_facts(source, **options))


def end_txn_marker(
    kind: ControlType,
    *,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int,
    timestamp: int,
    base_offset: int = 0,
    leader_epoch: int = NO_LEADER_EPOCH,
) -> bytes:
    """The batch that commits or aborts a producer's transaction."""
    if kind not in (ControlType.ABORT, ControlType.COMMIT):
        raise ValueError(f"a transaction ends with COMMIT or ABORT, not {kind.name}")
    key = _KEY.pack(0, kind)
    value = _MARKER.pack(0, coordinator_epoch)
    # attributes, timestamp delta, offset delta: 0; then the lengths, zig-zag in one byte each; no headers
    record = bytes((0, 0, 0, len(key) << 1)) + key + bytes((len(value) << 1,)) + value + b"\0"
    batch = bytearray(MARKER_SIZE)
    header = BatchHeader(
        base_offset=base_offset,
        length=MARKER_SIZE - LENGTH_OVERHEAD,
        leader_epoch=leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=TRANSACTIONAL_BIT | CONTROL_BIT,
        last_offset_delta=0,
        base_timestamp=timestamp,
        max_timestamp=timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=NO_SEQUENCE,
        count=1,
    )
    batch[:HEADER_SIZE] = header.pack()
    batch[HEADER_SIZE:] = bytes((len(record) << 1,)) + record
    batch[17:21] = batch_crc(batch, 0, MARKER_SIZE).to_bytes(4, "big")
    return bytes(batch)
