"""Packs whose bytes were changed and whose checksums were then made right again: what a hostile writer would leave."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pyarrow as pa

from tidegate.storage.backends.sealed import crc32c, seal
from tidegate.storage.pack import _PLACE, _TRAILER, END, FOOT, PackReader, Slot


def forged(pack: bytes, name: str, change: Callable[[int, bytearray], None]) -> bytes:
    """The pack with each slot as `change` leaves it (slots keep their length) and every checksum right."""
    foot = PackReader(pa.py_buffer(pack), name).foot
    content, slots = bytearray(pack), list[Slot]()
    for number, slot in enumerate(foot.slots):
        body = bytearray(pack[slot.position : slot.position + slot.length])
        change(number, body)
        content[slot.position : slot.position + slot.length] = body
        fields = {each: getattr(slot, each) for each in slot.__struct_fields__}
        slots.append(Slot(**fields | {"crc": crc32c(bytes(body))}))
    position, *_ = _TRAILER.unpack(pack[-_TRAILER.size :])
    kept = {each: getattr(foot, each) for each in foot.__struct_fields__}
    sealed = seal(FOOT._replace(version=pack[position + 8]), type(foot)(**kept | {"slots": slots}))
    place = _PLACE.pack(position, len(sealed), 0)
    return bytes(content[:position]) + sealed + place + struct.pack("<I8s", crc32c(place), END)
