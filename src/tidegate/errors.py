"""Every error Tidegate raises on purpose.

One root and, below it, only what a caller would act on differently. A message says what happened, where
(file, partition, offset) and what to do next; the structured fields repeat the *where* for programs.
Duplicates and late records are verdicts and counters, never exceptions.

`exit_code` is what the command line ends with: 1 a check found a fault, 2 wrong usage, 3 out of reach or
try later, 4 conflict or fenced, 5 corrupt input stopped the run. `remedy` is what helps against any error of the
class; a message says more. The handbook's page of errors is made of both.
"""

from __future__ import annotations

import errno
import re
import shlex
from pathlib import Path

_TRANSIENT_ERRNOS = frozenset(
    number
    for name in (
        "EAGAIN", "EBUSY", "EINTR", "EIO", "EREMOTEIO", "ESTALE", "ENOSPC", "EDQUOT", "ENOMEM", "ENOBUFS", "EMFILE",
        "ENFILE", "ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN", "EHOSTUNREACH", "EADDRNOTAVAIL", "ENOTCONN",
    )
    if (number := getattr(errno, name, None)) is not None
)  # fmt: skip
_AFTER_SCHEME = re.compile(r"(?<=://)[^\s\"'<>]*@[^\s\"'<>]*")


def without_credentials(text: str) -> str:
    """The text with the user and the password of every URL in it replaced by `***`: they are never printed."""
    return _AFTER_SCHEME.sub(_hidden, text)


def _hidden(found: re.Match[str]) -> str:
    """All before the last `@` of the authority; also where an unquoted `/` of a password seems to end that."""
    authority, slash, path = found[0].partition("/")
    if "@" in authority:
        return f"***@{authority.rpartition('@')[2]}{slash}{path}"
    _, colon, port = authority.rpartition(":")
    return f"***@{path.rpartition('@')[2]}" if colon and not port.isdigit() else found[0]


class TidegateError(Exception):
    """The root of all errors raised on purpose.

    `kafka_name` is Kafka's own protocol name for the condition (`OFFSET_OUT_OF_RANGE`, …) where it has one.
    """

    exit_code = 1
    remedy = "Read the message: it says what, where, why and what to do."

    def __init__(self, message: str, *, kafka_name: str | None = None) -> None:
        super().__init__(without_credentials(message))
        self.kafka_name = kafka_name


class InvalidError(TidegateError, ValueError):
    """The call, the configuration or the record handed in is wrong: fix it and call again."""

    exit_code = 2
    remedy = "Fix the call, the setting or the record that the message names. Retrying does not help."


class OffsetOutOfRangeError(InvalidError):
    """The asked-for offset is not in the log (any more, or yet): `first` ≤ offset ≤ `end` would be."""

    remedy = (
        "Read from `first` or later; what lies before was deleted (`tidegate log lifetime TOPIC` says why)."
    )

    def __init__(self, message: str, *, offset: int, first: int, end: int) -> None:
        super().__init__(message, kafka_name="OFFSET_OUT_OF_RANGE")
        self.offset = offset
        self.first = first
        self.end = end


class UnsupportedError(InvalidError):
    """This kind of table cannot answer this call; the message says why, and what can."""

    remedy = "Ask for what the message names instead. Retrying does not help."


class AuthenticationError(InvalidError):
    """A cluster refuses to let this client in: the user, the password, the mechanism or the certificate is wrong."""

    remedy = "Correct the settings that the message names (`sasl.…`, `ssl.…`, `security.protocol`), then start again."


class CorruptError(TidegateError):
    """Stored bytes are wrong: which file, and where in it (`position` in bytes, `offset` in records)."""

    exit_code = 5
    remedy = "Do not delete anything. `tidegate verify` names every damaged file; restore it from a copy, then go on."

    def __init__(
        self,
        message: str,
        *,
        path: Path | str | None = None,
        position: int | None = None,
        offset: int | None = None,
        kafka_name: str | None = "CORRUPT_MESSAGE",
    ) -> None:
        super().__init__(message, kafka_name=kafka_name)
        self.path = None if path is None else Path(path)
        self.position = position
        self.offset = offset


class SignatureError(CorruptError):
    """A file of state is not signed with a key of this process, so it was not read: `path` is its name there."""

    remedy = (
        "Restore the file from a copy if somebody changed it. Set the key it was signed with; or, if you trust the "
        "state as it is, sign it with `tidegate state sign`."
    )

    def __init__(self, message: str, *, path: Path | str | None = None) -> None:
        super().__init__(message, path=path, kafka_name=None)


class IntegrityError(TidegateError):
    """A producer's stream is broken: which one, and at which record."""

    remedy = (
        "`tidegate verify TOPIC` shows what is missing or changed; have it sent again, or resume behind it."
    )

    def __init__(
        self,
        message: str,
        *,
        topic: str | None = None,
        partition: int | None = None,
        offset: int | None = None,
        producer: str | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.producer = producer
        self.kind = kind


class WindowedKeyFormatError(TidegateError):
    """A record key is not a windowed key of the declared kind."""

    exit_code = 5
    remedy = "Declare the kind and window size the topic was written with (`compat`, `size`), or name another topic."


class FencedError(TidegateError):
    """A newer owner exists: this one must stop, retrying cannot help."""

    exit_code = 4
    remedy = "Stop this process; another one has taken over. Start anew if it should be the owner."


class ConflictError(TidegateError):
    """Somebody else holds or changed it: reload, then retry."""

    exit_code = 4
    remedy = "End the other process, or wait for it; then load again and retry."


class OverloadError(TidegateError):
    """Too much at once: slow down, then retry. `reason` is a stable word for programs."""

    exit_code = 3
    remedy = "Slow down and retry; raise the limit that `reason` names if it comes again."

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class UnavailableError(TidegateError):
    """Out of reach for now (disk full, broker down, file system error): retry later.

    A function of yours in a pipeline may raise it, too: the round is then tried again, and no record is to blame.
    """

    exit_code = 3
    remedy = "Retry later: free the disk, start the broker, mend the connection."


class CommitGoneError(UnavailableError):
    """The commit that was being read is not kept any more: newer ones took its place meanwhile."""

    remedy = (
        "Read again: the newest commit is shown then. If it comes again, read less at a time, or have the table "
        "commit less often."
    )


class InternalError(TidegateError):
    """Our own bookkeeping contradicts itself: a fault of this program, never of the data or the caller."""

    remedy = "Report it, with the message and what `tidegate doctor` prints. State on disk is as of the last commit."


class TidegateWarning(UserWarning):
    """Something a person should know that does not stop the work."""


def is_transient(error: BaseException) -> bool:
    """Whether an error of a user's function says that something is out of reach, so that trying again may help.

    These are `UnavailableError`, `ConnectionError`, `TimeoutError`, `MemoryError`, a failed name lookup that may be
    tried again, an `OSError` about the network, the disk, or too many open files, and any error that Python reports as
    caused by one of them or raised while one of them was handled (unless it was raised `from None`).
    """
    found: BaseException | None = error
    seen = set[int]()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if isinstance(found, TidegateError):
            return isinstance(found, UnavailableError)
        if isinstance(found, ConnectionError | TimeoutError | MemoryError) or _is_out_of_reach(found):
            return True
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
    return False


def _is_out_of_reach(error: BaseException) -> bool:
    if not isinstance(error, OSError):
        return False
    import socket

    if isinstance(error, socket.gaierror):  # its numbers are not those of `errno`
        return error.errno == socket.EAI_AGAIN
    return error.errno in _TRANSIENT_ERRNOS


def verify_command(folder: Path | str) -> str:
    """The command that shows all damage of a partition's folder, as a message names it."""
    return f"`tidegate verify {shlex.quote(str(folder))}`"
