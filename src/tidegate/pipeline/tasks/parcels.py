"""Parcels: what a task wants to publish, as one object that counts once a commit names it.

A parcel is the record batches of its sections behind each other, exactly as they go into the log, base offsets 0. The
description with positions and digests is in the commit; the object has no header of its own.

P1  a parcel's name is its attempt's alone, so attempts never meet; `put` is durable when it returns.
P2  bytes are checked against the digest (length and CRC-32C of the whole) before any of them is used.

Thread rule: pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fastcrc.crc32 import iscsi as crc32c

from tidegate.errors import CorruptError
from tidegate.pipeline.rounds.orders import Parcel, Section
from tidegate.storage.backends.base import StorageBackend

_DIGEST: Final = struct.Struct(">QI")


@dataclass(frozen=True, slots=True)
class Batches:
    """Encoded record batches for one partition of a topic, behind each other."""

    topic: str
    partition: int
    batches: bytes | bytearray | memoryview
    records: int


def write_parcel(backend: StorageBackend, name: str, contents: Sequence[Batches]) -> Parcel:
    """Store the batches as one object; its description."""
    sections: list[Section] = []
    position, crc = 0, 0
    for content in contents:
        size = len(content.batches)
        sections.append(Section(content.topic, content.partition, position, size, content.records))
        position += size
        crc = crc32c(memoryview(content.batches).toreadonly(), crc)  # what could change would be copied
    backend.put(name, [content.batches for content in contents])
    return Parcel(name, position, _DIGEST.pack(position, crc), tuple(sections))


def read_parcel(backend: StorageBackend, parcel: Parcel) -> memoryview:
    """The whole object, checked (P2)."""
    data = memoryview(backend.read(parcel.name))
    if _DIGEST.pack(len(data), crc32c(data)) != parcel.digest:
        length, crc = _DIGEST.unpack(parcel.digest)
        raise CorruptError(
            f"parcel {parcel.name} is damaged: {len(data)} bytes with CRC {crc32c(data):08x}, committed were {length} "
            f"with {crc:08x}; nothing of it was published. Restore the object from a backup",
            path=parcel.name,
            kafka_name=None,
        )
    return data


def section_of(data: memoryview, section: Section) -> memoryview:
    return data[section.position : section.position + section.size]
