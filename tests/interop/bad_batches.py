"""Batches a client should not send, each with one thing wrong, and some that are odd but allowed."""

from __future__ import annotations

import struct
import zlib

from raw_batches import CONTROL, Row, batch, crc32c, record, varint

SETTINGS: dict[str, dict[str, str]] = {
    "ordinary": {},
    "compacted": {"cleanup.policy": "compact"},
    "small": {"max.message.bytes": "100"},
    "short": {"segment.bytes": "100"},
    "timely": {"message.timestamp.before.max.ms": "100000", "message.timestamp.after.max.ms": "100000"},
    "stamped": {"message.timestamp.type": "LogAppendTime"},
}


def patched(raw: bytes, position: int, data: bytes, *, seal: bool = True) -> bytes:
    """Bytes put over others, with the checksum made right again unless told otherwise."""
    made = bytearray(raw)
    made[position : position + len(data)] = data
    if seal:
        made[17:21] = struct.pack(">I", crc32c(bytes(made[21:])))
    return bytes(made)


def assembled(body: bytes, count: int, last_delta: int, now_ms: int, attributes: int = 0) -> bytes:
    """A batch of these record bytes, whatever they are."""
    tail = struct.pack(">hiqqqhii", attributes, last_delta, now_ms, now_ms, -1, -1, -1, count) + body
    return struct.pack(">qiibI", 0, len(tail) + 9, -1, 2, crc32c(tail)) + tail


def gzipped(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(body) + packer.flush()


def bad_batches(now_ms: int) -> dict[str, tuple[str, bytes]]:
    """By name: the kind of topic it is sent to, and the bytes."""
    plain = Row(now_ms, b"k", b"v")
    good = batch([plain, Row(now_ms + 1, b"k2", b"v2")])
    records = [record(plain, 0, delta) for delta in range(3)]
    start = b"\0\0\0" + varint(1) + b"k" + varint(1) + b"v"
    old, far = Row(now_ms - 10**6, b"k", b"v"), Row(now_ms + 10**6, b"k", b"v")
    room = 100 - len(batch([Row(now_ms, b"k", b"")]))

    def made(body: bytes, count: int, last_delta: int, attributes: int = 0) -> bytes:
        return assembled(body, count, last_delta, now_ms, attributes)

    return {
        "fine": ("ordinary", good),
        "trailing bytes": ("ordinary", good + b"abc"),
        "wrong checksum": ("ordinary", patched(good, 30, b"\x77", seal=False)),
        "base offset": ("ordinary", patched(good, 0, struct.pack(">q", 5), seal=False)),
        "two batches": ("ordinary", good + good),
        "count too high": ("ordinary", patched(good, 57, struct.pack(">i", 3))),
        "count too low": ("ordinary", patched(good, 57, struct.pack(">i", 1))),
        "delta too high": ("ordinary", patched(good, 23, struct.pack(">i", 2))),
        "no records": ("ordinary", made(b"", 0, 0)),
        "no records, no delta": ("ordinary", made(b"", 0, -1)),
        "negative count": ("ordinary", made(records[0], -1, 0)),
        "control": ("ordinary", patched(good, 21, struct.pack(">h", CONTROL))),
        "producer without sequence": ("ordinary", batch([plain], producer_id=5, producer_epoch=0)),
        "producer without epoch": ("ordinary", batch([plain], producer_id=5, base_sequence=0)),
        "negative sequence": (
            "ordinary",
            batch([plain], producer_id=6, producer_epoch=0, base_sequence=-7),
        ),
        "null key": ("compacted", batch([Row(now_ms, None, b"v")])),
        "null key among compressed": ("compacted", batch([plain, Row(now_ms, None, b"v")], gzip=True)),
        "tombstone": ("compacted", batch([Row(now_ms, b"k", None)])),
        "too large": ("small", batch([Row(now_ms, b"k", b"v" * (room + 1))])),
        "just small enough": ("small", batch([Row(now_ms, b"k", b"v" * room)])),
        "larger than a log segment": ("short", batch([Row(now_ms, b"k", b"v" * 100)])),
        "too old": ("timely", batch([old])),
        "too far ahead": ("timely", batch([far])),
        "one too old": ("timely", batch([plain, old])),
        "one too old, compressed": ("timely", batch([plain, old], gzip=True)),
        "no time": ("timely", batch([Row(-1, b"k", b"v")])),
        "client says append time": ("ordinary", patched(good, 21, b"\0\x08")),
        "append time without time": ("ordinary", patched(batch([Row(-1, b"k", b"v")]), 21, b"\0\x08")),
        "append time twice": ("stamped", patched(good, 21, b"\0\x08")),
        "magic 3": ("ordinary", patched(good, 16, b"\x03", seal=False)),
        "magic -1": ("ordinary", patched(good, 16, b"\xff", seal=False)),
        "length too short": ("ordinary", patched(good, 8, struct.pack(">i", 40), seal=False)),
        "count too high, compressed": ("ordinary", made(gzipped(records[0] + records[1]), 3, 2, 1)),
        "extra bytes, compressed": ("ordinary", made(gzipped(b"".join(records[:2]) + b"zz"), 2, 1, 1)),
        "extra bytes": ("ordinary", made(records[0] + records[1] + b"zz", 2, 1)),
        "record missing": ("ordinary", made(records[0], 2, 1)),
        "record too long": (
            "ordinary",
            made(bytes([records[0][0] + 2]) + records[0][1:] + records[1], 2, 1),
        ),
        "record attributes": ("ordinary", made(records[0][:1] + b"\x07" + records[0][2:], 1, 0)),
        "null header key": ("ordinary", made(varint(10) + start + varint(1) + varint(-1) * 2, 1, 0)),
        "headers missing": ("ordinary", made(varint(8) + start + varint(5), 1, 0)),
        "negative header count": ("ordinary", made(varint(8) + start + varint(-3), 1, 0)),
        "wrong largest time": ("ordinary", patched(good, 35, struct.pack(">q", 5))),
        "unused attribute": ("ordinary", patched(good, 21, b"\x01\x00")),
        "delete horizon": ("ordinary", patched(good, 21, b"\x00\x40")),
        "leader epoch": ("ordinary", patched(good, 12, struct.pack(">i", 99), seal=False)),
    }


def hopeless_batches(now_ms: int) -> dict[str, bytes]:
    """Batches the broker breaks down on (it answers with an unknown error) or never looks at."""
    row = Row(now_ms, b"k", b"v")
    good = batch([row, row])
    body = record(row, 0, 0) + record(row, 0, 1)

    def made(compressed: bytes, attributes: int) -> bytes:
        return assembled(compressed, 2, 1, now_ms, attributes)

    return {
        "codec 5": patched(good, 21, b"\0\x05"),
        "codec 7": patched(good, 21, b"\0\x07"),
        "not gzip": made(b"\x1f\x8bgarbage", 1),
        "gzip cut short": made(gzipped(body)[:-9], 1),
        "not snappy": made(b"garbage!!", 2),
        "not lz4": made(b"garbage!!", 3),
        "not zstd": made(b"garbage!!", 4),
        "cut short": good[:-3],
        "header alone": good[:61],
        "magic 1": patched(good, 16, b"\x01", seal=False),
        "magic 0": patched(good, 16, b"\x00", seal=False),
    }
