"""The token: the few bytes a master keeps for a task's checkpoint, and all that is needed to restore it.

It names the backend (kind and identity), the task, the checkpoint's number and its manifest with a digest. It
is opaque to whoever keeps it, and refused, before anything is read, by another backend or another task.
"""

from __future__ import annotations

import hashlib

import msgspec
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage.backends.port import StorageBackend, check_name
from tidegate.storage.packs.layout import Format, damaged, seal, unseal

MAX_TOKEN_BYTES = 16 << 10
TOKEN = Format(b"TG-TOKEN", "checkpoint token", 1, "go back to an older checkpoint's token")


def digest_of(data: bytes | pa.Buffer) -> bytes:
    """What tells one manifest from every other: 16 bytes of BLAKE2b."""
    return hashlib.blake2b(memoryview(data), digest_size=16).digest()


class Token(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A checkpoint of one task on one backend."""

    kind: str
    identity: str
    task: str
    number: int
    manifest: str
    digest: bytes

    def encode(self) -> bytes:
        return seal(TOKEN, self)

    @classmethod
    def decode(cls, token: bytes) -> Token:
        """`CorruptError` unless every byte is as it was written."""
        if len(token) > MAX_TOKEN_BYTES:
            raise damaged(TOKEN, "(handed in)", f"it has {len(token)} bytes, above {MAX_TOKEN_BYTES}", None)
        decoded = unseal(TOKEN, token, cls, name="(handed in)")
        check_name(decoded.manifest)
        return decoded

    def check(self, backend: StorageBackend, task: str) -> None:
        """`InvalidError` unless the token is of this backend and this task."""
        if (self.kind, self.identity) != (backend.kind, backend.identity):
            raise InvalidError(
                f"the checkpoint token of task {self.task} is of the {self.kind} backend {self.identity}, and this is "
                f"the {backend.kind} backend {backend.identity}; open the backend it was written to"
            )
        if self.task != task:
            raise InvalidError(
                f"the checkpoint token is of task {self.task}, not {task}; give each task its own"
            )
