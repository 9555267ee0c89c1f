"""Record batches written out byte by byte in plain Python: slow, obvious, and sharing no code with the log.

The twin that tests compare the real encoder and decoder with, and the quickest way to get some batches:

    build_batch([Rec(b"k", b"v", 1000)], base_offset=5)             # bytes of one batch
    build_batch([Rec(value=b"x")] * 3, codec="zstd", producer_id=7, producer_epoch=0, base_sequence=0)

It will also write what no sane producer would: any field can be overridden, `crc` included, so that hostile
input is one keyword away.

`canary_batch(i)` is record i of the canary workload (one record of about 150 bytes every 5 s) whose log
segment holds 109 records in 16314 bytes; its checksums at offsets 0, 1, 2 and 108 are published ones.

Layout of a batch: 61 bytes of header (base offset 8, length 4, leader epoch 4, magic 1, CRC-32C 4, attributes
2, last offset delta 4, base timestamp 8, max timestamp 8, producer id 8, producer epoch 2, base sequence 4,
count 4), then the records, compressed as one stream when a codec is set.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

CodecName: TypeAlias = Literal["none", "gzip", "snappy", "lz4", "zstd"]
CODECS: tuple[CodecName, ...] = ("none", "gzip", "snappy", "lz4", "zstd")

_AFTER_CRC = struct.Struct(">hiqqqhii")
_BEFORE_CRC = struct.Struct(">qiib")
_SNAPPY_BLOCK = 32 * 1024

CANARY_START_MS = 1_639_132_508_991
CANARY_CRCS = {0: 2142666254, 1: 1895373344, 2: 1097825866, 108: 1749984078}
_CANARY_TIMES = {0: 1639132508991, 1: 1639132514555, 2: 1639132519561, 107: 1639133044553, 108: 1639133049552}


@dataclass(frozen=True, slots=True)
class Rec:
    """One record. `offset_delta` None means its place in the batch."""

    key: bytes | None = None
    value: bytes | None = None
    timestamp: int = 0
    headers: tuple[tuple[str, bytes | None], ...] = ()
    offset_delta: int | None = None


def varint(number: int) -> bytes:
    """Zig-zag, then seven bits a byte, lowest first."""
    rest = (number << 1) ^ (number >> 63)
    out = bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def crc32c(content: bytes) -> int:
    """CRC-32C by the textbook table; about 10 MB/s."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC_TABLE = _crc_table()


def build_record(record: Rec, *, timestamp_delta: int, offset_delta: int) -> bytes:
    """One record as it lies in a batch, its length in front."""
    body = b"\0" + varint(timestamp_delta) + varint(offset_delta) + _sized(record.key) + _sized(record.value)
    body += varint(len(record.headers))
    for name, value in record.headers:
        body += _sized(name.encode()) + _sized(value)
    return varint(len(body)) + body


def _sized(content: bytes | None) -> bytes:
    return varint(-1) if content is None else varint(len(content)) + content


def build_batch(
    records: Sequence[Rec],
    *,
    base_offset: int = 0,
    leader_epoch: int = -1,
    codec: CodecName = "none",
    log_append_time: int | None = None,
    transactional: bool = False,
    control: bool = False,
    delete_horizon_ms: int | None = None,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    last_offset_delta: int | None = None,
    base_timestamp: int | None = None,
    max_timestamp: int | None = None,
    count: int | None = None,
    magic: int = 2,
    length: int | None = None,
    crc: int | None = None,
    body: bytes | None = None,
) -> bytes:
    """One batch. Whatever is left out gets the value a correct producer would write."""
    deltas = [place if r.offset_delta is None else r.offset_delta for place, r in enumerate(records)]
    stamps = [record.timestamp for record in records]
    first = stamps[0] if stamps else -1
    base = _first_given(delete_horizon_ms, base_timestamp, first)
    if body is None:
        body = b"".join(
            build_record(record, timestamp_delta=record.timestamp - base, offset_delta=delta)
            for record, delta in zip(records, deltas, strict=True)
        )
        body = COMPRESS[codec](body)
    attributes = (
        CODECS.index(codec)
        | (log_append_time is not None) << 3
        | transactional << 4
        | control << 5
        | (delete_horizon_ms is not None) << 6
    )
    checked = (
        _AFTER_CRC.pack(
            attributes,
            _first_given(last_offset_delta, deltas[-1] if deltas else 0),
            base,
            _first_given(max_timestamp, log_append_time, max(stamps, default=-1)),
            producer_id,
            producer_epoch,
            base_sequence,
            _first_given(count, len(records)),
        )
        + body
    )
    before = _BEFORE_CRC.pack(base_offset, _first_given(length, len(checked) + 9), leader_epoch, magic)
    return before + struct.pack(">I", _first_given(crc, crc32c(checked))) + checked


def end_transaction_batch(
    kind: Literal["ABORT", "COMMIT"],
    *,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int = 0,
    timestamp: int = 0,
    base_offset: int = 0,
    leader_epoch: int = -1,
) -> bytes:
    """The marker that ends a transaction: a control batch with one record, 78 bytes."""
    key = struct.pack(">hh", 0, ("ABORT", "COMMIT").index(kind))
    marker = Rec(key, struct.pack(">hi", 0, coordinator_epoch), timestamp)
    return build_batch(
        [marker],
        base_offset=base_offset,
        leader_epoch=leader_epoch,
        transactional=True,
        control=True,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
    )


def canary_value(i: int, timestamp: int | None = None) -> bytes:
    """What the canary sends as its i-th record: JSON of 78 to 80 bytes (messageId goes up by three)."""
    stamp = canary_timestamp(i) if timestamp is None else timestamp
    return b'{"producerId":"strimzi-canary-client","messageId":%d,"timestamp":%d}' % (1 + 3 * i, stamp)


def canary_timestamp(i: int) -> int:
    """When it sends it: the published moments where there are any, otherwise every 5 s."""
    return _CANARY_TIMES.get(i, CANARY_START_MS + 5000 * i)


def canary_batch(i: int, *, base_offset: int | None = None, leader_epoch: int = 0) -> bytes:
    """The canary's i-th record as it lies in the log; a client sends it with `base_offset=0`."""
    return build_batch(
        [Rec(None, canary_value(i), canary_timestamp(i))],
        base_offset=i if base_offset is None else base_offset,
        leader_epoch=leader_epoch,
        base_sequence=0,
    )


def _first_given(*candidates: int | None) -> int:
    return next(candidate for candidate in candidates if candidate is not None)


def _plain(content: bytes) -> bytes:
    return content


def _gzip(content: bytes) -> bytes:
    import gzip

    return gzip.compress(content, mtime=0)


def _snappy(content: bytes) -> bytes:
    """Xerial framing: a magic, two versions, then blocks of raw snappy with their lengths."""
    import cramjam

    out = bytearray(b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1))
    for start in range(0, len(content), _SNAPPY_BLOCK):
        block = bytes(cramjam.snappy.compress_raw(content[start : start + _SNAPPY_BLOCK]))
        out += struct.pack(">i", len(block)) + block
    return bytes(out)


def _lz4(content: bytes) -> bytes:
    import cramjam

    compressor = cramjam.lz4.Compressor(block_linked=False)
    compressor.compress(content)
    return bytes(compressor.finish())


def _zstd(content: bytes) -> bytes:
    import cramjam

    return bytes(cramjam.zstd.compress(content))


COMPRESS: dict[CodecName, Callable[[bytes], bytes]] = {
    "none": _plain,
    "gzip": _gzip,
    "snappy": _snappy,
    "lz4": _lz4,
    "zstd": _zstd,
}
