"""Durations, sizes and moments as people write them; milliseconds and bytes as programs need them.

| written | means |
|---|---|
| `500ms` `30s` `5m` `1h30m` `7d` `2w` | a duration; units largest first, each at most once |
| `10 minutes` `5 MINUTES` `1 hour 30 minutes` | the same, as Spark and SQL users write it |
| `PT5M` `P1DT12H` | ISO 8601, without years and months (they have no fixed length) |
| `600000` (int) | milliseconds |
| `16384` `16KiB` `64 MiB` `1GB` | a size; `KiB` = 1024, `KB` = 1000 |
| `2026-01-01T10:00Z` `2026-01-01 10:00:00.5+02:00` | a moment; without a zone it is UTC |
| `datetime` `date` `pandas.Timestamp` `numpy.datetime64`, Arrow scalars | the same moment; without a zone it is UTC |

A bare number in a *string* is refused for durations: whether it means seconds or milliseconds is the
oldest mistake there is. Keys that end in `.ms` parse their own integers.
"""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

from tidegate.errors import InvalidError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

DurationLike: TypeAlias = "int | str | timedelta"
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
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
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
        raise TypeError("a duration is an int of milliseconds, a string or a timedelta, not a bool")
    if isinstance(value, int):
        milliseconds = value
    elif isinstance(value, timedelta):
        milliseconds = value // timedelta(milliseconds=1)
    elif isinstance(value, str):
        milliseconds = _parse_duration(value)
    else:
        raise TypeError(f"a duration is an int of milliseconds, a string or a timedelta, not {value!r}")
    if not 0 <= milliseconds <= _LONGEST:
        raise InvalidError(f"duration {_short(value)} is negative or longer than {_LONGEST} ms; {_EXAMPLES}")
    return milliseconds


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
    total, position, last_rank = Fraction(0), 0, -1
    lowered = stripped.lower()
    while position < len(lowered):
        match = _PART.match(lowered, position)
        unit = _UNIT_OF.get(match.group(2)) if match else None
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


def moment_ms(value: MomentLike) -> int:
    """The moment in epoch milliseconds; what lies between two is rounded down."""
    if hasattr(value, "as_py"):  # an Arrow scalar
        value = value.as_py()
    if type(value).__module__ == "numpy":
        value = _numpy_moment(value)
    if isinstance(value, bool):
        raise TypeError("a moment is an int of epoch milliseconds, a string or a datetime, not a bool")
    if isinstance(value, int):
        return value
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
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


def _numpy_moment(value: Any) -> Any:
    """A number or a datetime64 of numpy as epoch milliseconds; anything else as it is."""
    if value.dtype.kind in "iu":
        return int(value)
    if value.dtype.kind != "M":
        return value
    if value != value:
        raise InvalidError(f"{value!r} is no moment")
    return int(value.astype("datetime64[ms]").astype("int64"))


def format_moment(epoch_ms: int) -> str:
    """ISO 8601 in UTC with milliseconds; a moment no calendar holds is printed as its number."""
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=epoch_ms)
    except OverflowError:
        return f"{epoch_ms}ms"
    return f"{moment.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"
