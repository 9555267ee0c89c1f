"""The keys that sign state, from the environment.

    TIDEGATE_STATE_KEY        one key, or several with commas between
    TIDEGATE_STATE_KEY_FILE   instead: a file with one key a line

A key is at least 32 random bytes, as hex or base64 (`openssl rand -hex 32`). The first key signs; all of them verify,
so that a key can be replaced while state that the one before signed is still read.

K1  a key is never in an error, a log or a representation. What names a key is its id: 16 hex digits of a MAC that it
    makes, from which nothing of the key can be computed.

Thread rule: values and pure functions.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from tidegate.errors import InvalidError, TidegateError
from tidegate.files import Files

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
        """Every key under its id, the one that signs first."""
        return {hmac.digest(key, _ID_OF, hashlib.sha256).hex()[:16]: key for key in self.keys}

    @property
    def id(self) -> str:
        """The id of the key that signs (K1)."""
        return next(iter(self.by_id))


def state_keys(environment: Mapping[str, str] | None = None) -> StateKeys | None:
    """The keys that the environment names; None when it names none, `InvalidError` when one is no good."""
    environment = os.environ if environment is None else environment
    given, file = environment.get(KEY_VARIABLE, ""), environment.get(FILE_VARIABLE, "")
    if given and file:
        raise InvalidError(
            f"{KEY_VARIABLE} and {FILE_VARIABLE} both name keys of the state; keep one of them"
        )
    if not given and not file:
        return None
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
    """One key as bytes; its text is not in any error (K1)."""
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
