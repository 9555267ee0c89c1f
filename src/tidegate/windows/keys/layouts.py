"""Windowed keys, one at a time: the bytes Kafka Streams gives a key together with its window.

| format | bytes | where |
|---|---|---|
| topic | inner, start i64 | a topic written with a windowed serde |
| changelog | inner, start i64, sequence i32 | a window store and its changelog |
| session | inner, end i64, start i64 | sessions, in stores, changelogs and topics alike |

Numbers are big-endian. `inner` is whatever the user's serde made of the raw key: it has any length and no length
prefix, so a key is always cut from its end, and its format cannot be told from the bytes. A session's end comes
before its start. A time window's end is not stored: it is start + size, at most 2**63 - 1.

I1  no key is invented: bytes that break a rule of their format raise `WindowedKeyFormatError`.
I2  null and empty bytes mean "no key" (None), as Kafka Streams has it.

Columns of keys: `key_columns`. Values and pure functions.
"""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, TypeAlias, TypeVar

from tidegate.errors import InvalidError, TidegateWarning, WindowedKeyFormatError

K = TypeVar("K")
LATEST: Final = 2**63 - 1
LARGEST_SEQUENCE: Final = 2**31 - 1
IMPLAUSIBLE: Final = 1 << 48
_LONGEST_SESSION_MS: Final = 366 * 86_400_000
_LOW: Final = 0xFFFFFFFF


class KeyFormat(StrEnum):
    """How a key and its window lie in the bytes."""

    TOPIC = "topic"
    CHANGELOG = "changelog"
    SESSION = "session"

    @property
    def suffix_bytes(self) -> int:
        """How many bytes follow the inner key."""
        return {"topic": 8, "changelog": 12, "session": 16}[self.value]


@dataclass(frozen=True, slots=True, order=True)
class TimeWindow:
    """From `start` up to, not including, `end`."""

    start: int
    end: int

    def __post_init__(self) -> None:
        _check_bounds(self.start, self.end)
        if self.end == self.start:
            raise InvalidError(f"a time window from {self.start} to {self.end} is empty")

    def overlaps(self, other: TimeWindow) -> bool:
        """Whether some moment lies in both; a session is another kind and is refused."""
        if not isinstance(other, TimeWindow):
            raise TypeError(f"a time window cannot be compared with a {type(other).__name__}")
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True, order=True)
class SessionWindow:
    """From the first event to the last, both included."""

    start: int
    end: int

    def __post_init__(self) -> None:
        _check_bounds(self.start, self.end)

    def overlaps(self, other: SessionWindow) -> bool:
        """Whether some moment lies in both; a time window is another kind and is refused."""
        if not isinstance(other, SessionWindow):
            raise TypeError(f"a session cannot be compared with a {type(other).__name__}")
        return not (other.end < self.start or self.end < other.start)


Window: TypeAlias = "TimeWindow | SessionWindow"


@dataclass(frozen=True, slots=True)
class Windowed(Generic[K]):
    """A key in one of its windows. `sequence` numbers retained duplicates and is 0 everywhere else."""

    key: K
    window: Window
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class KeyChecks:
    """What decoding looks at beyond what makes a key impossible.

    `strict` catches keys of another format by their structure, whatever their date:

    - a time at or beyond `IMPLAUSIBLE`, the year 10889: bytes of the inner key, or the low half of a start, read as
      the high bytes of one;
    - a sequence that is not 0 in changelog format: the low half of a start;
    - a start with a low half of zeros, the zero sequence of a changelog key, where the four bytes in front could be
      the high half of that key's start;
    - an inner key that ends with what would be a session's end: in topic format a time from the start up to a year
      later, in changelog format the high half of the start.

    `inner_bytes` is the length of a key serde with a fixed one, which settles the last two; `advance_ms` is what every
    start must be a multiple of.
    """

    strict: bool = True
    inner_bytes: int | None = None
    advance_ms: int | None = None

    def __post_init__(self) -> None:
        if self.inner_bytes is not None and self.inner_bytes < 0:
            raise InvalidError(f"an inner key of {self.inner_bytes} bytes is not possible")
        if self.advance_ms is not None and self.advance_ms <= 0:
            raise InvalidError(f"windows cannot start every {self.advance_ms} ms")


STRICT: Final = KeyChecks()
LENIENT: Final = KeyChecks(strict=False)


def window_end(start: int, size_ms: int) -> int:
    """The end of a time window; one beyond the largest number is cut there, with a warning."""
    if start + size_ms > LATEST:
        warnings.warn(
            f"a window of {size_ms} ms from {start} ends beyond the largest time; its end is given as {LATEST}",
            TidegateWarning,
            stacklevel=3,
        )
        return LATEST
    return start + size_ms


def encode_key(
    inner: bytes | None, window: Window, key_format: KeyFormat, *, sequence: int = 0
) -> bytes | None:
    """The bytes of a key in its window; none for no key."""
    if inner is None:
        return None
    if isinstance(window, SessionWindow) != (key_format is KeyFormat.SESSION):
        raise TypeError(f"a {type(window).__name__} has no {key_format.value} format")
    if key_format is KeyFormat.SESSION:
        return inner + struct.pack(">qq", window.end, window.start)
    if key_format is KeyFormat.TOPIC:
        return inner + struct.pack(">q", window.start)
    if not 0 <= sequence <= LARGEST_SEQUENCE:
        raise InvalidError(f"sequence {sequence} of a store key is not in 0 to {LARGEST_SEQUENCE}")
    return inner + struct.pack(">qi", window.start, sequence)


def decode_key(
    key: bytes | None, key_format: KeyFormat, *, size_ms: int | None = None, checks: KeyChecks = STRICT
) -> Windowed[bytes] | None:
    """The inner key and window of some bytes; None when there is no key.

    `size_ms` is needed for time windows, whose end is not in the bytes, and refused for sessions.
    """
    check_size(key_format, size_ms)
    if not key:
        return None
    inner_bytes = len(key) - key_format.suffix_bytes
    if inner_bytes < 0:
        raise WindowedKeyFormatError(_describe(key, key_format, "too short for one"))
    inner, suffix = key[:inner_bytes], key[inner_bytes:]
    fault = _fault(inner, suffix, key_format, checks)
    if fault is not None:
        raise WindowedKeyFormatError(_describe(key, key_format, fault))
    if size_ms is None:
        end, start = struct.unpack(">qq", suffix)
        return Windowed(inner, SessionWindow(start, end))
    start, sequence = struct.unpack(">qi", suffix.ljust(12, b"\0"))
    return Windowed(inner, TimeWindow(start, window_end(start, size_ms)), sequence)


def check_size(key_format: KeyFormat, size_ms: int | None) -> None:
    """A window size is given for time windows, and only for them."""
    if key_format is KeyFormat.SESSION:
        if size_ms is not None:
            raise TypeError("sessions carry both their ends: they have no window size")
    elif size_ms is None:
        raise TypeError("a time window's key does not say where it ends: give the window size")
    elif not 0 < size_ms <= LATEST:
        raise InvalidError(f"a window size of {size_ms} ms is not possible; give 1 ms or more")


def lower_range(inner: bytes) -> bytes:
    """The least store key that any window of this key, or of one after it, can have."""
    return inner + bytes(12)


def upper_range(inner: bytes, latest_start: int) -> bytes:
    """A store key that no window of `inner` starting at or before `latest_start` sorts after.

    A longer key that begins with `inner` may sort after some of its windows, so a bound that keeps all of `inner`
    could lie too low: bytes below the first byte of the start are left out. Rows must be judged again.
    """
    suffix = struct.pack(">qi", latest_start, LARGEST_SEQUENCE)
    kept = len(inner)
    if suffix[0] != 0:
        kept = next((at for at in range(1, len(inner)) if inner[at] < suffix[0]), len(inner))
    return inner[:kept] + suffix


def _fault(inner: bytes, suffix: bytes, key_format: KeyFormat, checks: KeyChecks) -> str | None:
    start = int.from_bytes(suffix[8:] if key_format is KeyFormat.SESSION else suffix[:8], "big", signed=True)
    if start < 0:
        return f"a window cannot start at {start}"
    if start == LATEST and key_format is not KeyFormat.SESSION:
        return f"a window that starts at {start} has no room for an end"
    end = start
    if key_format is KeyFormat.SESSION:
        end = int.from_bytes(suffix[:8], "big", signed=True)
        if end < start:
            return f"a session cannot end at {end}, before its start {start}"
    elif key_format is KeyFormat.CHANGELOG:
        sequence = int.from_bytes(suffix[8:], "big", signed=True)
        if sequence < 0:
            return f"a sequence cannot be {sequence}"
        if checks.strict and sequence != 0:
            return f"sequence {sequence} where 0 is expected; is it in topic format?"
    if checks.strict and (fault := _other_format(inner, start, end, key_format, checks)) is not None:
        return fault
    if checks.inner_bytes is not None and len(inner) != checks.inner_bytes:
        return f"the key inside has {len(inner)} bytes where {checks.inner_bytes} are expected"
    if (
        checks.advance_ms is not None
        and key_format is not KeyFormat.SESSION
        and start % checks.advance_ms != 0
    ):
        return f"start {start} is not a multiple of {checks.advance_ms} ms"
    return None


def _other_format(inner: bytes, start: int, end: int, key_format: KeyFormat, checks: KeyChecks) -> str | None:
    """What gives a key of another format away."""
    if end >= IMPLAUSIBLE:
        return f"{end} ms lies beyond the year 10889; is it in another format?"
    if checks.inner_bytes is not None or start == 0:
        return None
    before = int.from_bytes(inner[-4:], "big") if len(inner) >= 4 else -1
    is_changelog = is_session = False
    match key_format:
        case KeyFormat.SESSION:
            is_changelog = start & _LOW == 0 and end & _LOW < 1 << 16 and end >> 32 != start >> 32
        case KeyFormat.CHANGELOG:
            is_session = 0 < start & _LOW < 1 << 16 and before == start & _LOW
        case KeyFormat.TOPIC:
            is_changelog = start & _LOW == 0 and 0 <= before < 1 << 16
            last = int.from_bytes(inner[-8:], "big", signed=True) if len(inner) >= 8 else -1
            is_session = start <= last <= start + _LONGEST_SESSION_MS
    if is_changelog:
        return f"start {start} has a low half of zeros; is it in changelog format?"
    if is_session:
        return "the key inside ends with a time like the start; is it a session? Else give the key's serde"
    return None


def _describe(key: bytes, key_format: KeyFormat, fault: str) -> str:
    shown = key.hex() if len(key) <= 64 else f"{key[:32].hex()}…{key[-32:].hex()}"
    return (
        f"key {shown} ({len(key)} bytes) is no windowed key in {key_format.value} format: {fault}. Was the topic"
        " written by a windowed aggregation, and in this format? A plain topic becomes windows with"
        " window(…).aggregate(…)"
    )


def _check_bounds(start: int, end: int) -> None:
    if start < 0:
        raise InvalidError(f"a window cannot start at {start}, before the epoch")
    if not start <= end <= LATEST:
        raise InvalidError(f"a window cannot go from {start} to {end}")
