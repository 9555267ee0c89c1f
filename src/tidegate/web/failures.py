"""Errors as answers: a status and a document with `error`, `message` and `remedy`; never a traceback or a secret.

| error | status |
|---|---|
| a wrong request (`InvalidError`) | 400 |
| no such topic, table, app, record (`NotThereError`, an offset out of range) | 404 |
| changed or busy meanwhile (conflict, fenced, unavailable) | 409 |
| stored bytes are damaged, a key cannot be read | 422 |
| too much at once (`OverloadError`) | 429 |
| it took too long, or the worker process was restarted | 503 |
| an internal error | 500 |

Pure functions.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from tidegate.errors import (
    ConflictError,
    CorruptError,
    FencedError,
    IntegrityError,
    InvalidError,
    OffsetOutOfRangeError,
    OverloadError,
    TidegateError,
    UnavailableError,
    WindowedKeyFormatError,
)

MOST_TEXT: Final = 2000


class Failure(msgspec.Struct, frozen=True):
    """What went wrong (a stable word), what happened, and what to do."""

    error: str
    message: str
    remedy: str


class NotThereError(InvalidError):
    """The topic, table, app or record that was asked for is not there."""


class TooLongError(UnavailableError):
    """An answer did not come in time."""


class ReadingEndedError(UnavailableError):
    """The process that reads ended before it answered."""


_KINDS: Final[tuple[tuple[type[TidegateError], int, str, str], ...]] = (
    (NotThereError, 404, "not_found", "look at what there is: /api/topics, /api/tables, /api/apps"),
    (OffsetOutOfRangeError, 404, "offset_out_of_range", "ask for an offset that is there; the message names them"),
    (InvalidError, 400, "invalid", "change what the message names, and ask again"),
    (WindowedKeyFormatError, 422, "key_format", "choose another way to read keys"),
    (CorruptError, 422, "corrupt", "`tidegate verify` shows the extent of the damage"),
    (IntegrityError, 422, "integrity", "`tidegate verify` shows what is missing or changed"),
    (OverloadError, 429, "overload", "ask again in a moment"),
    (TooLongError, 503, "too_long", "ask for less: fewer rows, a shorter time, one partition"),
    (ReadingEndedError, 503, "started_anew", "ask again in a moment"),
    (ConflictError, 409, "conflict", "load the page again"),
    (FencedError, 409, "fenced", "load the page again"),
    (UnavailableError, 409, "unavailable", "wait a moment and ask again"),
)  # fmt: skip
INTERNAL: Final = Failure(
    "internal",
    "something in Tidegate itself went wrong; the server's log says what",
    "ask again, or report it",
)


def failure_of(error: TidegateError) -> tuple[int, Failure]:
    """The status and the document of an error; what its message says after the first `;` is the remedy."""
    if getattr(error, "kafka_name", None) == "UNKNOWN_TOPIC_OR_PARTITION":
        error = NotThereError(str(error))
    for kind, status, word, remedy in _KINDS:
        if isinstance(error, kind):
            what, _, advice = str(error).partition("; ")
            return status, Failure(word, _cut(what), _cut(advice or remedy))
    return 500, INTERNAL


def debugging() -> bool:
    """Whether tracebacks are wanted in the log."""
    return bool(os.environ.get("TIDEGATE_DEBUG"))


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}…"
