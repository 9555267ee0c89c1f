"""Signed state: a backend that signs every object it puts or publishes and verifies every one it reads.

    TIDEGATE_STATE_KEY        one key, or several with commas between
    TIDEGATE_STATE_KEY_FILE   instead: a file with one key a line

A key is at least 32 random bytes, as hex or base64. The first key signs; all of them verify. With a key, a stored file
begins with 64 bytes (numbers are little-endian), followed by the object's bytes; a published object has them inside its
envelope (`sealed`):

    0  8 bytes  "TG-SIGN\\n"       16  8 bytes  id of the key
    8  u16      version, 1         24  8 bytes  zero
    10 6 bytes  zero               32  32 bytes HMAC-SHA256

The MAC covers the version, the backend's identity, the object's name and all bytes after the 64: a sound object under
another name, or of another state, does not verify.

K1  a key is never in an error, a log or a representation. A key is named by its id: 16 hex digits of a MAC computed
    with it, which reveal nothing of the key.
S1  with a key, nothing that does not verify is returned: `SignatureError` names the object and the command.
S2  without a key, signed objects are read without being verified, by backends that only read. One that may write
    refuses them: it would leave unsigned objects among them.
S3  `resign` replaces one object after the other atomically: after a crash it can be run again.

Not detected: an older object under the same name, missing objects (both are older states of the whole), and changes of
a mapped file after it was verified.

Thread rule: keys are values; the backend has the thread rule of the wrapped one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import shlex
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import pyarrow as pa

from tidegate.errors import ConflictError, CorruptError, InvalidError, SignatureError, TidegateError
from tidegate.files import Files
from tidegate.storage.backends.base import (
    TEMPORARY,
    MissingObjectError,
    ObjectInfo,
    Part,
    PutsTogether,
    StorageBackend,
    chunks,
    same_bytes,
    view_of,
)
from tidegate.storage.backends.sealed import PUBLISHED

if TYPE_CHECKING:
    from tidegate.storage.backends.folder import FolderBackend
    from tidegate.storage.backends.objects import ObjectsBackend


# -- keys --------------------------------------------------------------------------------------------

KEY_VARIABLE: Final = "TIDEGATE_STATE_KEY"
FILE_VARIABLE: Final = "TIDEGATE_STATE_KEY_FILE"
LEAST_BYTES: Final = 32
LEAST_DIFFERENT: Final = 16  # of 32 random bytes about 30 differ
MAKE_ONE: Final = "make one with `openssl rand -hex 32`"
_HEX: Final = re.compile(r"(?:[0-9a-fA-F]{2})+")
_MOST_BYTES: Final = 1 << 16
_ID_OF: Final = b"tidegate state key id"


@dataclass(frozen=True)
class StateKeys:
    """The keys of this process: the first signs, all verify."""

    keys: tuple[bytes, ...] = field(repr=False)
    source: str
    """The variable they come from."""

    @cached_property
    def by_id(self) -> dict[str, bytes]:
        """The keys by id, the signing key first."""
        return {hmac.digest(key, _ID_OF, hashlib.sha256).hex()[:16]: key for key in self.keys}

    @property
    def id(self) -> str:
        """The id of the key that signs (K1)."""
        return next(iter(self.by_id))


def state_keys(environment: Mapping[str, str] | None = None) -> StateKeys | None:
    """Read the keys from the environment; None without any, `InvalidError` for an invalid one."""
    environment = os.environ if environment is None else environment
    given, file = environment.get(KEY_VARIABLE, ""), environment.get(FILE_VARIABLE, "")
    if not given and not file:
        return None
    if given and file:
        raise InvalidError(
            f"{KEY_VARIABLE} and {FILE_VARIABLE} both name keys of the state; keep one of them"
        )
    source = KEY_VARIABLE if given else FILE_VARIABLE
    written = given if given else _content(Path(file))
    words = [word for word in re.split(r"[,\s]+", written) if word]
    if not words:
        raise InvalidError(f"{source} holds no key; {MAKE_ONE}, or unset it")
    return StateKeys(tuple(_key(word, number, source) for number, word in enumerate(words, 1)), source)


def state_key_id() -> str:
    """The id of the key that signs state in this process; empty when state is not signed."""
    keys = state_keys()
    return "" if keys is None else keys.id


def _content(path: Path) -> str:
    try:
        return Files().read(path, limit=_MOST_BYTES).decode("ascii")
    except FileNotFoundError:
        raise InvalidError(
            f"{FILE_VARIABLE} names {path}, which does not exist; {MAKE_ONE} > {path}"
        ) from None
    except TidegateError as error:
        raise InvalidError(
            f"{FILE_VARIABLE} names {path}, which cannot be read; name a file that this user may read"
        ) from error
    except UnicodeDecodeError:
        raise InvalidError(f"{FILE_VARIABLE}: {path} holds no hex or base64; {MAKE_ONE} > {path}") from None


def _key(written: str, number: int, source: str) -> bytes:
    """Decode one key; its text is in no error (K1)."""
    try:
        if _HEX.fullmatch(written):
            key = bytes.fromhex(written)
        else:
            standard = written.replace("-", "+").replace("_", "/")
            key = base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise InvalidError(f"{source}: key {number} is neither hex nor base64; {MAKE_ONE}") from None
    if len(key) < LEAST_BYTES:
        raise InvalidError(
            f"{source}: key {number} has {len(key)} bytes, and at least {LEAST_BYTES} are needed; {MAKE_ONE}"
        )
    if len(set(key)) < LEAST_DIFFERENT:
        raise InvalidError(f"{source}: key {number} is not random, so it could be guessed; {MAKE_ONE}")
    return key


# -- signed backend ----------------------------------------------------------------------------------

if TYPE_CHECKING:
    Stored: TypeAlias = FolderBackend | ObjectsBackend
MAGIC: Final = b"TG-SIGN\n"
VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sH6s8s8s32s")
HEAD_BYTES: Final = _HEAD.size  # a multiple of the alignment, so what follows is aligned as well


class SignedBackend:
    """Wraps a backend with signatures. `where` is its address as messages show it."""

    def __init__(
        self, inside: Stored, keys: StateKeys | None, *, where: str, read_only: bool = False
    ) -> None:
        self.inside = inside
        self.keys = keys
        self.where = where
        self._read_only = read_only
        self.kind = inside.kind
        self.identity = inside.identity
        self.address = inside.address
        self.is_remote = inside.is_remote
        if isinstance(inside, PutsTogether):  # or `together.put_all` puts one by one, several at once
            self.put_all = partial(self._put_all, inside)

    # -- objects ---------------------------------------------------------------------------------

    def put(self, name: str, parts: Sequence[Part]) -> None:
        try:
            self.inside.put(name, self.signed(name, parts))
        except ConflictError:
            if not same_bytes(parts, self.read(name)):  # the same, if it was signed with another key
                raise

    def _put_all(self, inside: PutsTogether, objects: Iterable[tuple[str, Sequence[Part]]]) -> None:
        inside.put_all((name, self.signed(name, parts)) for name, parts in objects)

    def read(self, name: str) -> pa.Buffer:
        try:
            return self.opened(name, self.inside.read(name))
        except SignatureError:
            if not self.inside.forget(name):
                raise
        return self.opened(name, self.inside.read(name))  # a local copy may have been the damaged one

    def delete(self, name: str) -> None:
        self.inside.delete(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self.inside.list(prefix)

    def forget(self, name: str) -> bool:
        return self.inside.forget(name)

    def close(self) -> None:
        self.inside.close()

    # -- published -------------------------------------------------------------------------------

    def publish(self, name: str, data: bytes, *, expected: str | None) -> str:
        return self.inside.publish(name, b"".join(map(view_of, self.signed(name, [data]))), expected=expected)

    def read_published(self, name: str) -> tuple[bytes, str] | None:
        found = self.inside.read_published(name)
        if found is None:
            return None
        return self.opened(name, pa.py_buffer(found[0])).to_pybytes(), found[1]

    # -- signatures ------------------------------------------------------------------------------

    def signed(self, name: str, parts: Sequence[Part]) -> Sequence[Part]:
        """The parts with the signature header; unchanged without a key."""
        if self.keys is None:
            return parts
        key_id = self.keys.id
        return [self._head(name, key_id, self.keys.by_id[key_id], parts), *parts]

    def _head(self, name: str, key_id: str, key: bytes, parts: Sequence[Part]) -> bytes:
        mac = hmac.new(key, digestmod=hashlib.sha256)
        for text in (self.identity.encode(), name.encode()):
            mac.update(struct.pack("<HI", VERSION, len(text)) + text)
        for chunk in chunks(parts):
            mac.update(chunk)
        return _HEAD.pack(MAGIC, VERSION, bytes(6), bytes.fromhex(key_id), bytes(8), mac.digest())

    def opened(self, name: str, stored: pa.Buffer) -> pa.Buffer:
        """The object's bytes without its header, verified where there is a key (S1, S2)."""
        key_id = signed_by(stored)
        if self.keys is None:
            if key_id is not None and not self._read_only:
                raise unkeyed(self.where, name)
            return stored if key_id is None else stored.slice(HEAD_BYTES)
        if key_id is None:
            raise unsigned(self.where, name)
        key, content = self.keys.by_id.get(key_id), stored.slice(HEAD_BYTES)
        if key is None:
            raise unknown_key(self.where, name, key_id, self.keys)
        if not hmac.compare_digest(self._head(name, key_id, key, [content]), memoryview(stored)[:HEAD_BYTES]):
            raise forged(self.where, name)
        return content


def signed_by(stored: pa.Buffer) -> str | None:
    """The id of the key in a stored object's header; None when it is not signed."""
    if stored.size < HEAD_BYTES or stored.slice(0, len(MAGIC)).to_pybytes() != MAGIC:
        return None
    return bytes(memoryview(stored)[16:24]).hex()


# -- errors ----------------------------------------------------------------------------------------


def unsigned(where: str, name: str) -> SignatureError:
    return SignatureError(
        f"{name} in {where} is not signed, and a key of the state is set, so it is not read: it was written without "
        f"the key, or by somebody who does not have it. If you trust all that is there now, end what writes there and "
        f"sign it with `tidegate state sign --state {shlex.quote(where)}`",
        path=name,
    )


def unknown_key(where: str, name: str, key_id: str, keys: StateKeys) -> SignatureError:
    return SignatureError(
        f"{name} in {where} is signed with key {key_id}, and {keys.source} has {', '.join(keys.by_id)}, so it is not "
        f"read. Add the key it was signed with behind the present one in {keys.source}; restore the file from a "
        f"copy if nobody has that key; or, if the key is lost and you trust all that is there now, run without a key "
        f"`tidegate state unsign --state {shlex.quote(where)}` and sign it anew",
        path=name,
    )


def forged(where: str, name: str) -> SignatureError:
    return SignatureError(
        f"{name} in {where} is not what was signed under this name: it was changed, or put in the place of another, so "
        f"it is not read. Restore it from a copy, and find out who can write there; "
        f"`tidegate state sign --dry-run --state {shlex.quote(where)}` names every such file and changes nothing",
        path=name,
    )


def unkeyed(where: str, name: str) -> InvalidError:
    return InvalidError(
        f"{name} in {where} is signed, and no key is set, so nothing can be written there: set {KEY_VARIABLE} or "
        f"{FILE_VARIABLE} as in the process that signed it. To continue without signatures, "
        f"`tidegate state unsign --state {shlex.quote(where)}`"
    )


# -- all of a state ----------------------------------------------------------------------------------


@dataclass(slots=True)
class SigningReport:
    """The result of `resign` (or of a dry run): objects and bytes changed, objects already right, objects refused."""

    changed: int = 0
    changed_bytes: int = 0
    unchanged: int = 0
    refused: list[CorruptError] = field(default_factory=list)


def resign(backend: StorageBackend, *, dry_run: bool = False) -> SigningReport:
    """Sign every object with the first key of this process; without a key, remove all signatures.

    Objects that are not signed are trusted as they are. Those whose signature does not verify, and damaged ones, are
    reported and left as they are. Without a key nothing can be verified.
    """
    if not isinstance(backend, SignedBackend):
        raise InvalidError("state in memory is not signed; name a folder or an object store")
    report = SigningReport()
    wanted = None if backend.keys is None else backend.keys.id
    for found in list(backend.list("")):
        if found.name.endswith(TEMPORARY):
            continue
        try:
            stored = _Stored.read(backend, found.name)
            if stored is None:
                continue  # deleted meanwhile
            content = stored.content(backend)
        except CorruptError as error:
            report.refused.append(error)
            continue
        if signed_by(stored.data) == wanted:
            report.unchanged += 1
            continue
        report.changed += 1
        report.changed_bytes += content.size
        if not dry_run:
            stored.replace(backend, content)
    return report


@dataclass(frozen=True, slots=True)
class _Stored:
    """An object as it is stored; `version` is that of a published one."""

    name: str
    data: pa.Buffer
    version: str | None

    @classmethod
    def read(cls, backend: SignedBackend, name: str) -> _Stored | None:
        try:
            raw = backend.inside.read(name)
        except MissingObjectError:
            return None
        if raw.slice(0, min(raw.size, len(PUBLISHED.magic))).to_pybytes() != PUBLISHED.magic:
            return cls(name, raw, None)
        backend.inside.forget(name)  # copies are for what never changes
        found = backend.inside.read_published(name)
        return None if found is None else cls(name, pa.py_buffer(found[0]), found[1])

    def content(self, backend: SignedBackend) -> pa.Buffer:
        """The bytes without their signature, which is verified where there is a key."""
        if signed_by(self.data) is None:
            return self.data
        return self.data.slice(HEAD_BYTES) if backend.keys is None else backend.opened(self.name, self.data)

    def replace(self, backend: SignedBackend, content: pa.Buffer) -> None:
        parts = backend.signed(self.name, [content])
        if self.version is None:
            backend.inside.replace(self.name, parts)
            return
        try:
            backend.inside.publish(self.name, b"".join(map(view_of, parts)), expected=self.version)
        except ConflictError:
            raise ConflictError(
                f"{self.name} in {backend.where} was changed meanwhile: end what writes there, then try again"
            ) from None
