"""Where reading starts and stops, as people say it.

| said | means |
|---|---|
| `"earliest"`, `"start"`, `"beginning"` | the first record there is |
| `"latest"`, `"end"` | after the last record there is now |
| `42` | offset 42 |
| `-10` | ten offsets before the end, at the earliest the start |
| `"@1767225600000"`, `"@2026-01-01T10:00Z"`, a `datetime` | the first record at or after that time |
| `"@-1h"` | the same, an hour ago |
| `{0: 42, 1: "earliest"}` | each partition its own |

Numbers in strings are numbers. Only `parse_range` knows the two-sided forms of the command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from typing import NamedTuple, TypeAlias

from tidegate.durations import duration_ms, moment_ms
from tidegate.errors import InvalidError

PlaceLike: TypeAlias = "int | str | datetime | Position"
StartLike: TypeAlias = "PlaceLike | Mapping[int, PlaceLike]"

_NUMBER = re.compile(r"[+-]?\d{1,19}")
_HELP = "use start, end, N, -N (N before the end), @TIME or @FROM:TO"


class PositionKind(Enum):
    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    BEFORE_END = "before the end"
    TIME = "time"


class Position(NamedTuple):
    """One place in a partition; `value` is an offset, a count or epoch milliseconds."""

    kind: PositionKind
    value: int = 0


EARLIEST = Position(PositionKind.EARLIEST)
LATEST = Position(PositionKind.LATEST)
_WORDS = {
    "earliest": EARLIEST,
    "start": EARLIEST,
    "beginning": EARLIEST,
    "oldest": EARLIEST,
    "latest": LATEST,
    "end": LATEST,
    "newest": LATEST,
}


def parse_position(said: PlaceLike, *, now_ms: int = 0) -> Position:
    """One place; `now_ms` is what relative times count from."""
    if isinstance(said, bool):
        raise TypeError("a position is an offset, a word, a time or a mapping, not a bool")
    if isinstance(said, Position):
        return said
    if isinstance(said, datetime):
        return Position(PositionKind.TIME, moment_ms(said))
    if isinstance(said, int):
        return _offset(said)
    text = said.strip()
    if (known := _WORDS.get(text.lower())) is not None:
        return known
    if _NUMBER.fullmatch(text):
        return _offset(int(text))
    if text.startswith("@"):
        return Position(PositionKind.TIME, _time(text[1:], now_ms))
    raise InvalidError(f"{said!r} is not a position; {_HELP}")


def parse_positions(said: StartLike, partitions: tuple[int, ...], *, now_ms: int = 0) -> dict[int, Position]:
    """A place for each partition."""
    if not isinstance(said, Mapping):
        position = parse_position(said, now_ms=now_ms)
        return dict.fromkeys(partitions, position)
    missing = sorted(set(partitions) - set(said))
    unknown = sorted(set(said) - set(partitions))
    if missing or unknown:
        wrong = f"partition {missing[0]} has none" if missing else f"partition {unknown[0]} is not read"
        raise InvalidError(f"positions {dict(said)!r} do not fit partitions {list(partitions)}: {wrong}")
    return {number: parse_position(said[number], now_ms=now_ms) for number in partitions}


def parse_range(text: str, *, now_ms: int) -> tuple[Position, Position | None]:
    """Start and stop of the command line's `-o`: `@T1:T2`, `N:M`, `:end`, or a single place."""
    stripped = text.strip()
    if stripped.startswith("@"):
        return _time_range(stripped, now_ms)
    first, colon, last = stripped.partition(":")
    if not colon:
        return parse_position(stripped, now_ms=now_ms), None
    return (
        parse_position(first or "start", now_ms=now_ms),
        parse_position(last or "end", now_ms=now_ms),
    )


def _time_range(text: str, now_ms: int) -> tuple[Position, Position | None]:
    """A time by itself holds colons too, so that reading is tried first."""
    try:
        return parse_position(text, now_ms=now_ms), None
    except InvalidError as not_one_time:
        for at in (i for i, letter in enumerate(text) if letter == ":"):
            try:
                start = _time(text[1:at], now_ms)
                stop = _time(text[at + 1 :].removeprefix("@"), now_ms)
            except InvalidError:
                continue
            return Position(PositionKind.TIME, start), Position(PositionKind.TIME, stop)
        raise not_one_time from None


def _offset(number: int) -> Position:
    if number < 0:
        return Position(PositionKind.BEFORE_END, -number)
    return Position(PositionKind.OFFSET, number)


def _time(text: str, now_ms: int) -> int:
    stripped = text.strip()
    if stripped.isdigit() and len(stripped) <= 19:
        return moment_ms(int(stripped))
    if stripped.startswith("-"):
        return now_ms - duration_ms(stripped[1:])
    if not stripped:
        raise InvalidError(f"an empty time; {_HELP}")
    return moment_ms(stripped)
