"""Durations, sizes and moments as people write them; milliseconds and bytes as programs need them.

| written | means |
|---|---|
| `500ms` `30s` `5m` `1h30m` `7d` `2w` | a duration; units largest first, each at most once |
| `10 minutes` `5 MINUTES` `1 hour 30 minutes` | the same, as Spark and SQL users write it |
| `PT5M` `P1DT12H` | ISO 8601, without years and months (they have no fixed length) |
| a `timedelta`; `0` | the same; nothing |
| `16384` `16KiB` `64 MiB` `1GB` | a size; `KiB` = 1024, `KB` = 1000 |
| `2026-01-01T10:00Z` `2026-01-01 10:00:00.5+02:00` | a moment; without a zone it is UTC |
| `datetime` `date` `pandas.Timestamp` `numpy.datetime64`, Arrow scalars | the same moment; without a zone it is UTC |

A bare number is refused for durations, as text and as an int: whether it means seconds or milliseconds is the
oldest mistake there is. So is `1M`: Arrow, pandas and people mean a month, a minute or a million by it. Keys and
parameters that end in `ms` parse their own integers.

Moments are ISO 8601 as Python, Java and JavaScript write it: `T` or a blank, seconds and up to nine digits of a
fraction, `Z`, `+02:00`, `+0200` or `+02`, and the name of a zone in brackets behind the offset, which says where it is
from and changes nothing. Digits beyond milliseconds are cut off. A moment that is an int is epoch milliseconds; one
that would lie in early 1970 or beyond the year 17000, and in our days in seconds, microseconds or nanoseconds, is
refused.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tidegate.errors import InvalidError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

DurationLike: TypeAlias = "Literal[0] | str | timedelta"
SizeLike: TypeAlias = "int | str"
MomentLike: TypeAlias = "int | str | date | datetime | np.datetime64 | np.integer[Any] | pa.Scalar"

_UNIT_MS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_WORDS = {
    "w": ("w", "week", "weeks"),
    "d": ("d", "day", "days"),
    "h": ("h", "hr", "hour", "hours"),
    "m": ("m", "min", "mins", "minute", "minutes"),
    "s": ("s", "sec", "secs", "second", "seconds"),
    "ms": ("ms", "milli", "millis", "millisecond", "milliseconds"),
}
_UNIT_OF = {word: unit for unit, words in _WORDS.items() for word in words}
_RANK = {unit: rank for rank, unit in enumerate(_UNIT_MS)}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_ZONE = re.compile(r"(?<=[Z0-9])\[[A-Za-z0-9_+\-/:]+\]$")  # Java's ZonedDateTime says it behind the offset
_ISO = re.compile(
    r"P(?:(?P<w>\d+)W)?(?:(?P<d>\d+(?:\.\d+)?)D)?"
    r"(?:T(?:(?P<h>\d+(?:\.\d+)?)H)?(?:(?P<m>\d+(?:\.\d+)?)M)?(?:(?P<s>\d+(?:\.\d+)?)S)?)?"
)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)?\s*", re.IGNORECASE)
_SIZE_UNIT = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_LONGEST = 2**63 - 1
_EXAMPLES = "write it like 500ms, 30s, 5m, 1h30m, 7d or PT5M"


def duration_ms(value: DurationLike) -> int:
    """The duration in whole milliseconds; never negative."""
    if isinstance(value, bool):
        raise TypeError("a duration is a string or a timedelta, not a bool")
    if isinstance(value, int | float):
        if value < 0:
            raise InvalidError(f"duration {value} is negative; {_EXAMPLES}")
        if value:
            raise InvalidError(f"the duration {value} has no unit: {_readings(str(value))}")
        milliseconds = 0
    elif isinstance(value, timedelta):
        milliseconds = value // timedelta(milliseconds=1)
    elif isinstance(value, str):
        milliseconds = _parse_duration(value)
    else:
        raise TypeError(f"a duration is a string or a timedelta, not {value!r}")
    if not 0 <= milliseconds <= _LONGEST:
        raise InvalidError(f"duration {_short(value)} is negative or longer than {_LONGEST} ms; {_EXAMPLES}")
    return milliseconds


def milliseconds(value: int | DurationLike) -> int:
    """As `duration_ms`, but a number is milliseconds: for timeouts, and for parts below those that users define."""
    if isinstance(value, str | timedelta):
        return duration_ms(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a duration is a string, a timedelta or an int of milliseconds, not {value!r}")
    if value < 0:
        raise InvalidError(f"{value} ms is negative; {_EXAMPLES}")
    return value


def _parse_duration(text: str) -> int:
    stripped = text.strip()
    if stripped[:1] in ("P", "p"):
        match = _ISO.fullmatch(stripped.upper())
        if match is None or not any(match.groups()):
            raise InvalidError(
                f"{text!r} is not a duration (ISO years and months have no fixed length); {_EXAMPLES}"
            )
        named = ((unit, number) for unit, number in match.groupdict().items() if number)
        return _whole(sum((Fraction(number) * _UNIT_MS[unit] for unit, number in named), Fraction(0)), text)
    if re.fullmatch(r"\d+(\.\d+)?", stripped):
        raise InvalidError(f"the duration {text!r} has no unit: {_readings(stripped)}")
    total, position, last_rank = Fraction(0), 0, -1
    lowered = stripped.lower()
    while position < len(stripped):
        match = _PART.match(stripped, position)
        unit = _UNIT_OF.get(match.group(2).lower()) if match else None
        if match is not None and match.group(2) == "M":
            number = match.group(1)
            days = f"{30 * int(number)}d" if number.isdigit() else "30d"
            raise InvalidError(
                f"the duration {text!r} has two readings: write {number}m for minutes, or {days} for months of 30 days"
            )
        if match is None or unit is None:
            hint = (
                "months and years have no fixed length; " if "month" in lowered or "year" in lowered else ""
            )
            raise InvalidError(f"{text!r} is not a duration; {hint}{_EXAMPLES}")
        if _RANK[unit] <= last_rank:
            raise InvalidError(f"{text!r} repeats a unit or names a larger one after a smaller; {_EXAMPLES}")
        last_rank = _RANK[unit]
        total += Fraction(match.group(1)) * _UNIT_MS[unit]
        position = match.end()
    if last_rank < 0:
        raise InvalidError(f"an empty string is not a duration; {_EXAMPLES}")
    return _whole(total, text)


def _readings(number: str) -> str:
    return (
        f"{number} seconds or {number} milliseconds? Write '{number}s' or '{number}ms', or give a timedelta"
    )


def _whole(milliseconds: Fraction, text: str) -> int:
    if milliseconds.denominator != 1:
        raise InvalidError(f"{text!r} is not a whole number of milliseconds")
    return milliseconds.numerator


def format_duration(milliseconds: int) -> str:
    """The normal form, largest unit first: 5400000 → `1h30m`."""
    if milliseconds < 0:
        return f"-{format_duration(-milliseconds)}"
    if milliseconds == 0:
        return "0ms"
    parts = []
    for unit, length in _UNIT_MS.items():
        if unit == "w":  # 604800000 reads better as 7d
            continue
        count, milliseconds = divmod(milliseconds, length)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def size_bytes(value: SizeLike) -> int:
    """The size in bytes; never negative."""
    if isinstance(value, bool):
        raise TypeError("a size is an int of bytes or a string, not a bool")
    if isinstance(value, int):
        size = value
    elif isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise InvalidError(f"{value!r} is not a size; write it like 16384, 16KiB, 64MiB or 1GB")
        exact = Fraction(match.group(1)) * _SIZE_UNIT[(match.group(2) or "b").lower()]
        if exact.denominator != 1:
            raise InvalidError(f"{value!r} is not a whole number of bytes")
        size = exact.numerator
    else:
        raise TypeError(f"a size is an int of bytes or a string, not {value!r}")
    if not 0 <= size <= _LONGEST:
        raise InvalidError(f"size {_short(value)} is negative or larger than {_LONGEST} bytes")
    return size


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def format_size(size: int) -> str:
    """For people: 16384 → `16 KiB`, 16314 → `15.9 KiB`."""
    if abs(size) < 1024:
        return f"{size} B"
    scaled = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        scaled /= 1024
        if abs(scaled) < 1024 or unit == "TiB":
            break
    return f"{scaled:.0f} {unit}" if scaled == int(scaled) else f"{scaled:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """`1 record`, `1,200 records`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def setting_meaning(key: str, value: str) -> str:
    """The value of a setting in words, where its name ends in `ms`, `bytes` or `messages`; else nothing."""
    unit = key.rpartition(".")[2]
    if not value.lstrip("-").isdigit():
        return ""
    if value in ("-1", str(_LONGEST)) and unit in ("ms", "bytes", "messages"):
        return "no limit"
    if unit == "ms" and int(value) > 0:
        return format_duration(int(value))
    return format_size(int(value)) if unit == "bytes" and int(value) >= 1024 else ""


def moment_ms(value: MomentLike) -> int:
    """The moment in epoch milliseconds; what lies between two is rounded down."""
    if hasattr(value, "as_py"):  # an Arrow scalar
        value = value.as_py()
    kind: str = getattr(getattr(value, "dtype", None), "kind", "")  # of numpy's scalars
    if kind == "M":
        return _datetime64_ms(value)
    if kind in ("i", "u"):
        value = int(value)  # type: ignore[arg-type]
    if isinstance(value, bool):
        raise TypeError("a moment is an int of epoch milliseconds, a string or a datetime, not a bool")
    if isinstance(value, int):
        unit = likely_unit(value, "ms")
        if unit is not None:
            raise InvalidError(
                f"the moment {value} is {format_moment(value)} in milliseconds, and looks like {UNITS[unit]}: "
                f"{format_moment(in_ms(value, unit))}. Give epoch milliseconds, or write it like 2026-01-01T10:00Z"
            )
        return value
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(without_zone_name(value.strip()))
        except ValueError:
            raise InvalidError(f"{value!r} is not a moment; write it like 2026-01-01T10:00Z") from None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise TypeError(f"a moment is an int of epoch milliseconds, a string or a datetime, not {value!r}")
    if value != value:  # pandas.NaT
        raise InvalidError(f"{value!r} is no moment")
    if value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    return int((value - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1))


def _datetime64_ms(value: Any) -> int:
    if value != value:
        raise InvalidError(f"{value!r} is no moment")
    return int(value.astype("datetime64[ms]").astype("int64"))


UNITS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_PER_MS = {"s": Fraction(1, 1000), "ms": Fraction(1), "us": Fraction(1000), "ns": Fraction(1_000_000)}
OUR_DAYS_MS = (500_000_000_000, 5_000_000_000_000)  # 1985 to 2128: where event times of programs lie


def in_ms(number: int, unit: str) -> int:
    """A number of epoch seconds, milliseconds, microseconds or nanoseconds in milliseconds."""
    return int(number / _PER_MS[unit] // 1)


@cache
def bounds_of(unit: str) -> tuple[int, int]:
    """Where our days begin and end, in a unit."""
    first, stop = OUR_DAYS_MS
    return int(first * _PER_MS[unit]), int(stop * _PER_MS[unit])


def likely_unit(number: int, unit: str) -> str | None:
    """The unit in which a number lies in our days, when it does not in `unit`; None when nothing seems wrong."""
    found = [each for each in UNITS if bounds_of(each)[0] <= number < bounds_of(each)[1]]
    return None if not found or unit in found else found[0]


def without_zone_name(text: str) -> str:
    """A moment without the name of its zone, which Java writes in brackets behind the offset."""
    return _ZONE.sub("", text)


def format_moment(epoch_ms: int) -> str:
    """ISO 8601 in UTC with milliseconds; a moment no calendar holds is printed as its number."""
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=epoch_ms)
    except OverflowError:
        return f"{epoch_ms}ms"
    return f"{moment.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
