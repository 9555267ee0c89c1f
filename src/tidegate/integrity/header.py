"""Byte layout of the metadata that a producer adds to each record: the `div`, `divc` and `divo` record headers.

Owns the layout, one record at a time; `columns` does the same for whole Arrow batches. Key and value of a
record are unchanged, so ordinary consumers read them as usual.

`div`, on every managed record, 40 bytes, big-endian:

    0  u8  version, 1               20  i32  chain, from 0
    1  u8  kind of record           24  i32  sequence in the chain, from 0
    2  u8  control type, 255 none   28  i64  producer's clock, ms
    3  u8  flags                    36  u32  CRC-32 of the record (see `columns`)
    4  16 bytes producer GUID

flags: bit 0 this ends the sender's last chain here, bit 1 heartbeat, bit 2 copied by a relay, bit 3 (data records
only) *headers only*: the sender writes no control records. Its chain begins with a data record of sequence 0, continues
up to sequence 2^31 - 1 and has no checksum of its own; each record's CRC also covers flags and clock.

`divc`, on control records only; version (1), then by control type:

    start of chain  u8 checksum type
    end of chain    u8 checksum type | u64 checksum | u32 records before this one | u64 stamp sum
    start of push   u8 flags (bit 0: sorted)
    end of push     the completeness manifest (see `state`)
    others          free

`divo`, on a start of chain, names the process that wrote the chain: JSON `{"host": …, "pid": …, "app": …}`, for display
only. No checksum covers it, so that attempts of several processes at one chain send the same numbers and sums. Senders
whose records must be the same bytes at every attempt omit it.

The *stamp sum* is the sum of (producer's clock + flags·2^56) modulo 2^64 over the chain's records: it covers
the header bytes that no record checksum covers.

A control record's key is `00 "DIV" 00 | GUID | chain i32 | sequence i32 | nonce u32`, unique so that
compaction keeps it, and its value is empty, not null: a null would be a tombstone, which compaction removes.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

from tidegate.errors import InvalidError

HEADER_KEY: Final = "div"
CONTROL_HEADER_KEY: Final = "divc"
ORIGIN_HEADER_KEY: Final = "divo"
HEADER_BYTES: Final = 40
VERSION: Final = 1
NO_CONTROL: Final = 255

FINAL: Final = 1
HEARTBEAT: Final = 2
HEADERS_ONLY: Final = 8

CONTROL_KEY_PREFIX: Final = b"\x00DIV\x00"
CONTROL_VALUE: Final = b""
MAX_SEQUENCE: Final = 2**31 - 1

_STAMP = struct.Struct(">BBBB16siiqI")
_CONTROL_KEY = struct.Struct(">5s16siiI")
_START_OF_CHAIN = struct.Struct(">BB")
_END_OF_CHAIN = struct.Struct(">BBQIQ")
_START_OF_PUSH = struct.Struct(">BB")


class RecordKind(IntEnum):
    """The kind of a record."""

    PUT = 0
    DELETE = 1
    CONTROL = 2
    UPDATE = 3


class ControlType(IntEnum):
    """The type of a control record."""

    START_OF_PUSH = 0
    END_OF_PUSH = 1
    START_OF_CHAIN = 2
    END_OF_CHAIN = 3
    START_OF_INCREMENTAL_PUSH = 5
    END_OF_INCREMENTAL_PUSH = 6
    TOPIC_SWITCH = 7
    VERSION_SWAP = 8


class ChecksumType(IntEnum):
    """The checksum algorithm of a chain; see `columns`."""

    NONE = 0
    ADHASH = 4
    ADHASH2 = 5


class Stamp(NamedTuple):
    """One record's `div` header."""

    kind: int
    control: int
    flags: int
    guid: bytes
    chain: int
    sequence: int
    timestamp: int
    crc: int

    @property
    def is_heartbeat(self) -> bool:
        return bool(self.flags & HEARTBEAT)

    @property
    def is_final(self) -> bool:
        return bool(self.flags & FINAL)

    @property
    def is_start_of_chain(self) -> bool:
        return self.kind == RecordKind.CONTROL and self.control == ControlType.START_OF_CHAIN

    @property
    def is_end_of_chain(self) -> bool:
        return self.kind == RecordKind.CONTROL and self.control == ControlType.END_OF_CHAIN

    @property
    def is_headers_only(self) -> bool:
        """Whether this is a data record of a sender that writes no control records."""
        return self.kind != RecordKind.CONTROL and bool(self.flags & HEADERS_ONLY)

    @property
    def stamp_summand(self) -> int:
        """The record's contribution to its chain's stamp sum."""
        return (self.timestamp + (self.flags << 56)) % 2**64

    def to_bytes(self) -> bytes:
        return _STAMP.pack(VERSION, *self)

    @classmethod
    def from_bytes(cls, data: bytes) -> Stamp:
        """Decode after a check of length and version; the validator checks kind and control type."""
        if len(data) != HEADER_BYTES:
            raise InvalidError(f"a `{HEADER_KEY}` header has {HEADER_BYTES} bytes, this one has {len(data)}")
        version, *fields = _STAMP.unpack(data)
        if version != VERSION:
            raise InvalidError(
                f"`{HEADER_KEY}` header version {version} is unknown, this release reads {VERSION}"
            )
        return cls(*fields)


class ControlKey(NamedTuple):
    """The key of a control record; `nonce` distinguishes attempts that share a GUID."""

    guid: bytes
    chain: int
    sequence: int
    nonce: int = 0

    def to_bytes(self) -> bytes:
        return _CONTROL_KEY.pack(CONTROL_KEY_PREFIX, *self)

    @classmethod
    def from_bytes(cls, data: bytes) -> ControlKey | None:
        """Decode; None when it is not the key of a control record."""
        if len(data) != _CONTROL_KEY.size or not data.startswith(CONTROL_KEY_PREFIX):
            return None
        return cls(*_CONTROL_KEY.unpack(data)[1:])


class EndOfChain(NamedTuple):
    """The content of an end of chain: count and sums of the chain's records."""

    checksum_type: int
    checksum: int
    records: int
    stamp_sum: int

    def to_bytes(self) -> bytes:
        return _END_OF_CHAIN.pack(VERSION, *self)

    @classmethod
    def from_bytes(cls, data: bytes) -> EndOfChain:
        return cls(*_payload(_END_OF_CHAIN, data, "end of chain"))


def start_of_chain_bytes(checksum_type: ChecksumType) -> bytes:
    return _START_OF_CHAIN.pack(VERSION, checksum_type)


def start_of_chain_from_bytes(data: bytes) -> int:
    """The checksum type a chain announces."""
    (checksum_type,) = _payload(_START_OF_CHAIN, data, "start of chain")
    return int(checksum_type)


class ChainOrigin(NamedTuple):
    """The process that started a chain; `app` is the name it gave itself."""

    host: str
    pid: int
    app: str

    def __str__(self) -> str:
        return f"{self.app}, process {self.pid} on {self.host}"

    def to_bytes(self) -> bytes:
        return json.dumps(self._asdict(), ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> ChainOrigin | None:
        """Decode; None for other content, which is not a fault because the origin is for display only."""
        try:
            said = json.loads(data)
            return cls(str(said["host"]), int(said["pid"]), str(said["app"]))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None

    @classmethod
    def of_this_process(cls, app: str | None = None) -> ChainOrigin:
        return cls(socket.gethostname(), os.getpid(), app or Path(sys.argv[0] or "python").name)


def start_of_push_bytes(*, is_sorted: bool) -> bytes:
    return _START_OF_PUSH.pack(VERSION, int(is_sorted))


def _payload(layout: struct.Struct, data: bytes, what: str) -> tuple[int, ...]:
    if len(data) != layout.size:
        raise InvalidError(
            f"a `{CONTROL_HEADER_KEY}` of {what} has {layout.size} bytes, this one {len(data)}"
        )
    version, *fields = layout.unpack(data)
    if version != VERSION:
        raise InvalidError(
            f"`{CONTROL_HEADER_KEY}` version {version} is unknown, this release reads {VERSION}"
        )
    return tuple(fields)
