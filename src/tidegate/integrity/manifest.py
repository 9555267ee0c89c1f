"""The completeness manifest of a push: what each partition must have received, carried by its end of push.

Owns the manifest's bytes and the comparison with what arrived. Sequences and checksums cannot see that the last
records of a chain, or a whole producer, never arrived; the manifest can, because it is written by whoever
knows which senders took part (and only their last attempts).

Bytes, big-endian (they are the `divc` of an end of push):

    u8 version, 1 | u64 data records | u32 producers | per producer, in order of GUID:
        16 bytes GUID | i32 last chain | i32 last sequence | u64 checksum of the last chain | u64 data records

Thread rule: values and pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from tidegate.errors import InvalidError
from tidegate.integrity.state import UNCOUNTED, Producer

VERSION: Final = 1
MOST_TOLD: Final = 5
"""Producers that are named when a push falls short."""
_HEAD = struct.Struct(">BQI")
_SENT = struct.Struct(">16siiQQ")


class Sent(NamedTuple):
    """What one sender sent to one partition: its last position, its last chain's checksum, its data records."""

    guid: bytes
    chain: int
    sequence: int
    checksum: int
    records: int


class Received(NamedTuple):
    """What a receiver knows of one producer; None where it cannot tell."""

    chain: int
    sequence: int
    checksum: int | None = None
    records: int | None = None


class Manifest(NamedTuple):
    """Everything one partition must have received before its end of push."""

    producers: tuple[Sent, ...] = ()

    @property
    def records(self) -> int:
        """Data records of all producers, repeats counted once."""
        return sum(sent.records for sent in self.producers)

    @classmethod
    def of(cls, sent: Iterable[Sent]) -> Manifest:
        """The senders whose work counts. Attempts that share a GUID are one sender, and must agree."""
        known: dict[bytes, Sent] = {}
        for one in sent:
            if known.setdefault(one.guid, one) != one:
                raise InvalidError(
                    f"sender {one.guid.hex()} says it sent {one[1:]} and {known[one.guid][1:]}; attempts that "
                    f"share a GUID must send the same records: use one GUID per attempt otherwise"
                )
        return cls(tuple(known[guid] for guid in sorted(known)))

    def to_bytes(self) -> bytes:
        head = _HEAD.pack(VERSION, self.records, len(self.producers))
        return head + b"".join(_SENT.pack(*sent) for sent in self.producers)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Any other bytes than `to_bytes` writes are an `InvalidError`."""
        if len(data) < _HEAD.size:
            raise InvalidError(f"a manifest has at least {_HEAD.size} bytes, this one {len(data)}")
        version, records, count = _HEAD.unpack_from(data)
        if version != VERSION:
            raise InvalidError(f"manifest version {version} is unknown, this release reads {VERSION}")
        if len(data) != _HEAD.size + count * _SENT.size:
            raise InvalidError(
                f"a manifest of {count} producers has {_HEAD.size + count * _SENT.size} bytes, this one "
                f"{len(data)}"
            )
        manifest = cls(tuple(Sent(*fields) for fields in _SENT.iter_unpack(data[_HEAD.size :])))
        guids = [sent.guid for sent in manifest.producers]
        if guids != sorted(set(guids)) or manifest.records != records:
            raise InvalidError("a manifest names each producer once, in order, and its records add up")
        if any(sent.chain < 0 or sent.sequence < 0 for sent in manifest.producers):
            raise InvalidError("a manifest has no negative chain or sequence")
        return manifest


class Shortfall(NamedTuple):
    """One producer that did not arrive as the manifest says."""

    guid: bytes
    expected: Sent
    found: Received | None
    reason: str


class Completeness(NamedTuple):
    """A manifest against what arrived. `unlisted` producers (attempts that lost) are not a fault."""

    shortfalls: tuple[Shortfall, ...]
    unlisted: tuple[bytes, ...]

    @property
    def is_complete(self) -> bool:
        return not self.shortfalls

    def __str__(self) -> str:
        """What is short, in words; of many producers the first few."""
        told = "; ".join(shortfall.reason for shortfall in self.shortfalls[:MOST_TOLD])
        more = len(self.shortfalls) - MOST_TOLD
        return f"{told}; and {more} more producers" if more > 0 else told or "all that was sent arrived"


def check_manifest(manifest: Manifest, received: Mapping[bytes, Received]) -> Completeness:
    """Compare exactly: fewer is lost, more or other is damage; both are a shortfall."""
    shortfalls = []
    for sent in manifest.producers:
        found = received.get(sent.guid)
        reason = _difference(sent, found)
        if reason is not None:
            shortfalls.append(Shortfall(sent.guid, sent, found, reason))
    listed = {sent.guid for sent in manifest.producers}
    return Completeness(tuple(shortfalls), tuple(sorted(set(received) - listed)))


def compare_manifest(
    payload: bytes | None, known: Callable[[bytes], Producer | None]
) -> Completeness | str | None:
    """A push's manifest against what is known of its producers: None when they agree, else how they do not."""
    try:
        manifest = Manifest.from_bytes(payload or b"")
    except InvalidError as error:
        return str(error)
    listed = ((sent.guid, known(sent.guid)) for sent in manifest.producers)
    received = {guid: _received(producer) for guid, producer in listed if producer is not None}
    completeness = check_manifest(manifest, received)
    return None if completeness.is_complete else completeness


def _received(producer: Producer) -> Received:
    """What a manifest is compared with; where a chain has a known gap its sum says nothing."""
    is_whole = producer.registered and not producer.tainted
    records = None if producer.data_records == UNCOUNTED else producer.data_records
    return Received(producer.chain, producer.sequence, producer.checksum if is_whole else None, records)


def _difference(sent: Sent, found: Received | None) -> str | None:
    if found is None:
        return f"producer {sent.guid.hex()} never arrived; it sent {sent.records} records"
    if (found.chain, found.sequence) != (sent.chain, sent.sequence):
        return (
            f"producer {sent.guid.hex()} arrived up to chain {found.chain} sequence {found.sequence}; it sent "
            f"up to chain {sent.chain} sequence {sent.sequence}"
        )
    if found.records is not None and found.records != sent.records:
        return f"producer {sent.guid.hex()} sent {sent.records} records, {found.records} arrived"
    if found.checksum is not None and found.checksum != sent.checksum:
        return (
            f"producer {sent.guid.hex()} certified {sent.checksum:016x} for chain {sent.chain}, "
            f"{found.checksum:016x} arrived"
        )
    return None
