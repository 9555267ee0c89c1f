"""Record batches built and read byte by byte, in the slowest and plainest way.

An independent twin of the product's codec for tests that judge it: it shares no code with it. It writes
uncompressed and gzip batches (what the broker accepts from anybody) and reads headers of every batch.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fastcrc import crc32 as _crc32

HEADER = struct.Struct(">qiibIhiqqqhii")
TRANSACTIONAL = 0x10
CONTROL = 0x20


class Row(NamedTuple):
    """One record to write."""

    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """The header of one batch, and where it is in its file."""

    position: int
    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int

    @property
    def size(self) -> int:
        return self.length + 12

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta


def crc32c(data: bytes) -> int:
    return _crc32.iscsi(data)


def batch(
    rows: Sequence[Row],
    *,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
    gzip: bool = False,
    base_offset: int = 0,
    leader_epoch: int = -1,
) -> bytes:
    """One batch as a client would send it."""
    first = rows[0].timestamp
    body = b"".join(record(row, row.timestamp - first, delta) for delta, row in enumerate(rows))
    attributes = (TRANSACTIONAL if transactional else 0) | (1 if gzip else 0)
    if gzip:
        packer = zlib.compressobj(wbits=31)
        body = packer.compress(body) + packer.flush()
    tail = struct.pack(
        ">hiqqqhii",
        attributes,
        len(rows) - 1,
        first,
        max(row.timestamp for row in rows),
        producer_id,
        producer_epoch,
        base_sequence,
        len(rows),
    )
    tail += body
    return struct.pack(">qiibI", base_offset, len(tail) + 9, leader_epoch, 2, crc32c(tail)) + tail


def marker(
    commit: bool, *, producer_id: int, producer_epoch: int, coordinator_epoch: int, timestamp: int
) -> bytes:
    """The control batch that ends a transaction."""
    row = Row(timestamp, struct.pack(">hh", 0, int(commit)), struct.pack(">hi", 0, coordinator_epoch))
    made = bytearray(batch([row], producer_id=producer_id, producer_epoch=producer_epoch, transactional=True))
    made[22] |= CONTROL
    made[17:21] = struct.pack(">I", crc32c(bytes(made[21:])))
    return bytes(made)


def heads(log: bytes) -> Iterator[Head]:
    """The headers of all whole batches."""
    position = 0
    while position + HEADER.size <= len(log):
        head = Head(position, *HEADER.unpack_from(log, position))
        if head.length < 49 or position + head.size > len(log):
            return
        yield head
        position += head.size


def as_sent(raw: bytes) -> bytes:
    """A stored batch as its client sent it: no offset and no leader epoch yet (no checksum covers them)."""
    return struct.pack(">q", 0) + raw[8:12] + struct.pack(">i", -1) + raw[16:]


def stored_batches(folder: Path) -> Iterator[tuple[Head, bytes]]:
    """Every whole batch of a partition folder, in offset order."""
    for path in sorted(folder.glob("*.log")):
        log = path.read_bytes()
        for head in heads(log):
            yield head, log[head.position : head.position + head.size]


def record(row: Row, timestamp_delta: int, offset_delta: int) -> bytes:
    """One record as it stands in a batch."""
    body = b"\0" + varint(timestamp_delta) + varint(offset_delta) + _sized(row.key) + _sized(row.value)
    body += varint(len(row.headers))
    for key, value in row.headers:
        body += _sized(key.encode()) + _sized(value)
    return varint(len(body)) + body


def _sized(value: bytes | None) -> bytes:
    return varint(-1) if value is None else varint(len(value)) + value


def varint(value: int) -> bytes:
    """Zig-zag, then seven bits a byte."""
    rest = (value << 1) ^ (value >> 63)
    rest &= (1 << 64) - 1
    out = bytearray()
    while rest >= 0x80:
        out.append((rest & 0x7F) | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)
