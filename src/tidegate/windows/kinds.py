"""The kinds of windows and when each one closes, and the definition of duplicates.

| | tumbling, hopping | sliding | session |
|---|---|---|---|
| bounds | [start, start + size) | [start, start + difference] | [first event, last event] |
| closes at | stream time − grace | stream time − grace | stream time − grace − gap |
| takes a record while | end > close | end ≥ close | end ≥ close |
| is final when | end ≤ close | end < close | end < close |
| kept for at least | size + grace | 2 × difference + grace | gap + grace (one more where none is said) |

A session that ends exactly where sessions close may still grow, so it can be read one millisecond longer than the
least retention by default. Retention says how long windows can be read, and changes no result.

Without a retention, windows are kept as long as they can change, and in a table for at least a day (`as_table`).

No window starts before the epoch. Thread rule: values only; storage and clocks are not used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from math import gcd
from typing import ClassVar, Final, Literal, TypeAlias

from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import InvalidError

LATEST = 2**63 - 1
TABLE_RETENTION_MS: Final = 86_400_000
LatePolicy = Literal["drop", "forward"]


@dataclass(frozen=True, slots=True, init=False)
class Hopping:
    """Windows of one size that start every `advance`; each event is in size / advance of them."""

    size_ms: int
    advance_ms: int
    grace_ms: int
    retention_ms: int
    is_retention_said: bool = field(compare=False, repr=False)
    name: ClassVar[str] = "hopping"

    def __init__(
        self,
        size: DurationLike,
        advance: DurationLike,
        *,
        grace: DurationLike = 0,
        retention: DurationLike | None = None,
    ) -> None:
        size_ms, advance_ms = _positive("size", size), _positive("advance", advance)
        if advance_ms > size_ms:
            raise InvalidError(
                f"advance {advance_ms} ms is above size {size_ms} ms: events between two windows would be lost;"
                " use an advance of at most the size"
            )
        _set(self, size_ms=size_ms, advance_ms=advance_ms)
        _keep(self, size_ms, grace, retention)

    @property
    def pane_ms(self) -> int:
        """The width of the panes that every window consists of."""
        return gcd(self.size_ms, self.advance_ms)

    def close_time(self, stream_time: int) -> int:
        """Windows that end at or before this are final."""
        return stream_time - self.grace_ms

    def end_of(self, start: int) -> int:
        return min(start + self.size_ms, LATEST)

    def starts(self, ts: int) -> range:
        """Return the starts of the windows of an event; none for a time before the epoch."""
        if ts < 0:
            return range(0)
        first = max(0, ts - self.size_ms + self.advance_ms) // self.advance_ms * self.advance_ms
        return range(first, ts + 1, self.advance_ms)


class Tumbling(Hopping):
    """Consecutive windows of one size; each event is in exactly one."""

    __slots__ = ()
    name: ClassVar[str] = "tumbling"

    def __init__(
        self, size: DurationLike, *, grace: DurationLike = 0, retention: DurationLike | None = None
    ) -> None:
        super().__init__(size, size, grace=grace, retention=retention)


@dataclass(frozen=True, slots=True, init=False)
class Sliding:
    """A window for every distinct set of events that are within `difference` of each other."""

    difference_ms: int
    grace_ms: int
    retention_ms: int
    is_retention_said: bool = field(compare=False, repr=False)
    name: ClassVar[str] = "sliding"

    def __init__(
        self, difference: DurationLike, *, grace: DurationLike = 0, retention: DurationLike | None = None
    ) -> None:
        _set(self, difference_ms=_positive("difference", difference))
        _keep(self, 2 * self.difference_ms, grace, retention)

    def close_time(self, stream_time: int) -> int:
        """Windows that end before this are final."""
        return stream_time - self.grace_ms

    def end_of(self, start: int) -> int:
        return min(start + self.difference_ms, LATEST)


@dataclass(frozen=True, slots=True, init=False)
class Session:
    """A window for every burst of events with at most `gap` between neighbours."""

    gap_ms: int
    grace_ms: int
    retention_ms: int
    is_retention_said: bool = field(compare=False, repr=False)
    name: ClassVar[str] = "session"

    def __init__(
        self, gap: DurationLike, *, grace: DurationLike = 0, retention: DurationLike | None = None
    ) -> None:
        _set(self, gap_ms=_positive("gap", gap))
        _keep(self, self.gap_ms, grace, retention, default_more=1)

    def close_time(self, stream_time: int) -> int:
        """Sessions that end before this are final."""
        return stream_time - self.grace_ms - self.gap_ms


@dataclass(frozen=True, slots=True)
class Unlimited:
    """One window from `start_ms` on that never closes."""

    start_ms: int = 0
    name: ClassVar[str] = "unlimited"

    def __post_init__(self) -> None:
        if self.start_ms < 0:
            raise InvalidError(f"an unlimited window cannot start at {self.start_ms}, before the epoch")


@dataclass(frozen=True, slots=True, init=False)
class Deduplicate:
    """The columns that identify an event, and how long duplicates are detected."""

    columns: tuple[str, ...]
    within_ms: int
    grace_ms: int
    late: LatePolicy
    refresh: bool

    def __init__(
        self,
        columns: str | Sequence[str],
        within: DurationLike,
        *,
        grace: DurationLike | None = None,
        late: LatePolicy = "drop",
        refresh: bool = False,
    ) -> None:
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        if not names or not all(isinstance(name, str) for name in names):
            raise TypeError(f"deduplicate by the name of a column or several, not {columns!r}")
        within_ms = _milliseconds("deduplicate: within", within)
        if within_ms < 1:
            raise InvalidError("deduplicate: within is 0 ms; nothing is a duplicate within no time at all")
        if late not in ("drop", "forward"):
            raise InvalidError(f"deduplicate: late is 'drop' or 'forward', not {late!r}")
        grace_ms = within_ms if grace is None else _milliseconds("deduplicate: grace", grace)
        _set(self, columns=names, within_ms=within_ms, grace_ms=grace_ms, late=late, refresh=bool(refresh))

    @property
    def retention_ms(self) -> int:
        """The stream time for which ids are kept: the oldest id that a record which is not late can still match."""
        return min(self.within_ms + self.grace_ms, LATEST)


WindowKind: TypeAlias = "Tumbling | Hopping | Sliding | Session | Unlimited"


def as_table(kind: WindowKind) -> WindowKind:
    """Return the windows as a table keeps them: for at least a day, unless a retention was given."""
    if isinstance(kind, Unlimited) or kind.is_retention_said:
        return kind
    kept = copy(kind)
    _set(kept, retention_ms=max(kind.retention_ms, TABLE_RETENTION_MS))
    return kept


def _set(window: object, **fields: object) -> None:
    for name, value in fields.items():
        object.__setattr__(window, name, value)


def _positive(what: str, value: DurationLike) -> int:
    milliseconds = _milliseconds(f"a window's {what}", value)
    if milliseconds <= 0:
        raise InvalidError(f"a window's {what} is {milliseconds} ms; it must be above 0")
    return milliseconds


def _keep(
    window: object,
    reach_ms: int,
    grace: DurationLike,
    retention: DurationLike | None,
    *,
    default_more: int = 0,
) -> None:
    """Set grace and retention: at least what the window reaches plus its grace, and by default that."""
    grace_ms = _milliseconds("a window's grace", grace)
    if grace_ms < 0:
        raise InvalidError(f"a window's grace is {grace_ms} ms; it must be 0 or more")
    least = reach_ms + grace_ms
    kept_ms = min(least + default_more, LATEST)
    if retention is not None:
        kept_ms = _milliseconds("a window's retention", retention)
        if kept_ms < least:
            raise InvalidError(
                f"a retention of {kept_ms} ms would drop windows that can still change: give at least {least} ms"
            )
    _set(window, grace_ms=grace_ms, retention_ms=kept_ms, is_retention_said=retention is not None)


def _milliseconds(what: str, value: DurationLike) -> int:
    try:
        return duration_ms(value)
    except InvalidError as error:
        raise InvalidError(f"{what}: {error}") from None
