"""Numbers as places in a picture: what templates draw as SVG. Pure functions; no pixels, no colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

MOST_WIDE: Final = 80.0


class Bar(NamedTuple):
    """One bar of a chart, in units of its view box."""

    x: float
    y: float
    width: float
    height: float


def bars(
    values: Sequence[float | None], width: float = 1000, height: float = 200, gap: float = 0.2
) -> list[Bar]:
    """Bars from the bottom up, the largest as high as the box; nothing is drawn for what is not there."""
    top = max((value for value in values if value), default=0) or 1
    step = width / max(1, len(values))
    found = []
    for place, value in enumerate(values):
        tall = height * max(0.0, float(value or 0)) / top
        if value and tall < 1.5:
            tall = 1.5
        wide = min(step * (1 - gap), MOST_WIDE)
        left = place * step + (step - wide) / 2
        found.append(Bar(round(left, 2), round(height - tall, 2), round(wide, 2), round(tall, 2)))
    return found


def part(value: float, whole: float) -> float:
    """A share in percent, from 0 to 100."""
    return round(max(0.0, min(100.0, 100 * value / whole)), 2) if whole else 0.0


def span(first: float, last: float, low: float, high: float, width: float = 1000) -> tuple[float, float]:
    """Where a stretch begins in a box from `low` to `high`, and how wide it is: never too thin to see."""
    scale = width / max(1.0, high - low)
    x = min(max(0.0, (first - low) * scale), width - 3.0)
    return round(x, 2), round(max(3.0, min(width - x, (last - first) * scale)), 2)


def heat(value: int, largest: int) -> int:
    """Which of five shades: 0 for nothing."""
    if value <= 0:
        return 0
    return 1 + min(3, int(4 * value / (largest + 1)))
