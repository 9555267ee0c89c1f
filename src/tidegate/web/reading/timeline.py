"""The time axis on which log segments are shown: from the first record there is to when the last can disappear.

A pure function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidegate.web.reading.topics import SegmentLine

_DAY_MS: Final = 86_400_000
_LEAST_MS: Final = 1000
_TOO_LONG_MS: Final = 400 * _DAY_MS
_AHEAD_MS: Final = 30 * _DAY_MS


def axis(segments: Sequence[SegmentLine], now_ms: int) -> tuple[int, int] | tuple[None, None]:
    """Where the axis begins and ends.

    Now is on it unless all of it would shrink to a line beside a long emptiness. A record that is dated years ahead
    makes a segment that never seems to go: then the axis ends a month from now, and the bar at its edge.
    """
    if not segments:
        return None, None
    newest = [each.newest_ms for each in segments]
    goes = [moment for each in segments for moment in (each.gone_latest_ms, each.due_ms) if moment]
    low = min([*newest, *(each.first_ms for each in segments if each.first_ms)])
    high = max([*newest, *goes, now_ms, low + _LEAST_MS])
    reach = max([*newest, *goes, low + _LEAST_MS]) - low
    if goes and high - low > 4 * reach:
        high = low + reach * 11 // 10
    if goes and high - low > _TOO_LONG_MS:
        high = max(min(newest), now_ms) + _AHEAD_MS
    return low, high
