"""The sealed form of small published objects, shared by every backend that keeps bytes.

A published object carries its own name and a nonce beside the bytes: the nonce makes equal bytes published twice
two versions (B3), lets a writer whose answer was lost find out that it won, and the name keeps a copied file from
being taken for another.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage.backends.port import MAX_PUBLISHED_BYTES
from tidegate.storage.packs.layout import Format, damaged, seal, unseal

PUBLISHED = Format(b"TG-PUBL\n", "published object", 1, "restore it from a copy")


class Published(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What is published under a name, and which publishing of it this is."""

    name: str
    nonce: str
    data: bytes


def seal_published(name: str, nonce: str, data: bytes) -> bytes:
    if len(data) > MAX_PUBLISHED_BYTES:
        raise InvalidError(f"{name}: {len(data)} bytes are too many to publish; put them as an object")
    return seal(PUBLISHED, Published(name, nonce, bytes(data)))


def unseal_published(name: str, sealed: bytes | pa.Buffer) -> Published:
    found = unseal(PUBLISHED, sealed, Published, name=name)
    if found.name != name:
        raise damaged(PUBLISHED, name, f"it is {found.name} under another name", 0)
    return found
