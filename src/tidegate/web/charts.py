"""Charts: series as values for uPlot (`charts.js`), and their positions in an SVG where no script runs.

A chart is JSON in an attribute of its element, because the page's policy allows no inline script. A live chart also
says where in an event's document its points are, so that events update it without reloading the page.

Pure functions; no pixels, no colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import msgspec

MOST_WIDE: Final = 80.0
MOST_LINES: Final = 8
Unit = Literal["number", "bytes", "moment", "rate"]


class Line(msgspec.Struct, frozen=True):
    """One series; `path` leads from a point of an event's document to its value."""

    label: str
    values: list[float | None]
    path: list[str] = []


class Chart(msgspec.Struct, frozen=True):
    """Lines or bars over x: epoch milliseconds, or (`by` round) numbers of rounds."""

    x: list[float]
    lines: list[Line]
    unit: Unit = "number"
    by: Literal["moment", "round"] = "moment"
    kind: Literal["bars", "lines"] = "lines"
    points: str = ""
    """Which list of an event's document has the points; empty: the document itself is one."""
    at: list[str] = []
    """Where in a point its x is; empty: the chart is not live."""
    links: list[str] = []
    """Where a click on each x leads."""

    def json(self) -> str:
        return msgspec.json.encode(self).decode()


def windows_chart(rows: Sequence[Mapping[str, Any]], column: str, links: Sequence[str]) -> Chart:
    """One column of a key's windows, by when they start."""
    values = [_number(row["value"].get(column)) for row in rows]
    at = [float(row["window_start_ms"]) for row in rows]
    return Chart(at, [Line(column, values)], kind="bars", links=list(links))


def app_charts(document: Mapping[str, Any]) -> dict[str, Chart]:
    """An app's rounds as they commit, by name: records, rate, lag, event time, memory."""
    rounds = document["rounds"]
    whole = [row for row in rounds if row["records"] is not None]

    def line(rows: Sequence[Mapping[str, Any]], label: str, *path: str) -> Line:
        return Line(label, [_number(_at(row, path)) for row in rows], list(path))

    def by_time(rows: Sequence[Mapping[str, Any]], lines: list[Line], unit: Unit) -> Chart:
        at = [float(row["committed_ms"]) for row in rows]
        return Chart(at, lines, unit=unit, points="rounds", at=["committed_ms"])

    at_round = [float(row["round"]) for row in whole]
    of_partitions = [line(rounds, name, "stream_times", name) for name in _partitions(rounds)]
    held = [line(rounds, "in memory", "memory_bytes"), line(rounds, "kept", "backlog_bytes")]
    records, rate = line(whole, "records", "records"), line(whole, "records a second", "records_per_second")
    behind = line([document], "records behind", "lag_records")
    return {
        "records": Chart(at_round, [records], by="round", kind="bars", points="rounds", at=["round"]),
        "rate": by_time(whole, [rate], "rate"),
        "lag": Chart([float(document["now_ms"])], [behind], at=["now_ms"]),
        "times": by_time(rounds, of_partitions, "moment"),
        "memory": by_time(rounds, held, "bytes"),
    }


def _at(point: Mapping[str, Any], path: Sequence[str]) -> Any:
    """The value that a path leads to; None where there is none."""
    found: Any = point
    for name in path:
        found = None if found is None else found.get(name)
    return found


def _partitions(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """The partitions that are drawn; of many, those that are furthest behind."""
    if not rounds:
        return []
    last: Mapping[str, int] = rounds[-1]["stream_times"]
    return sorted(sorted(last, key=lambda name: (last[name], name))[:MOST_LINES])


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


class Bar(NamedTuple):
    """One bar of a picture, in units of its view box."""

    x: float
    y: float
    width: float
    height: float


def bars(
    values: Sequence[float | None], width: float = 1000, height: float = 200, gap: float = 0.2
) -> list[Bar]:
    """Bars from the bottom up, the largest as high as the box: what is seen where no script runs."""
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


class Dot(NamedTuple):
    """One point of a line, in units of the view box, and what it stands for."""

    x: float
    y: float
    at: float
    value: float


class Trace(NamedTuple):
    """One line of a picture: its points as a polyline takes them, and each as a dot."""

    label: str
    points: str
    dots: list[Dot]


def traces(chart: Chart, width: float = 1000, height: float = 200, edge: float = 6) -> list[Trace]:
    """The lines of a chart in one box, where no script runs; moments from the first on, all else from 0."""
    values = [value for line in chart.lines for value in line.values if value is not None]
    if chart.unit != "moment":
        values.append(0.0)
    low, high = min(values, default=0.0), max(values, default=0.0)
    first, last = min(chart.x, default=0.0), max(chart.x, default=0.0)
    wide, floor = width - 2 * edge, height - 2 * edge
    found = []
    for line in chart.lines:
        dots = [
            Dot(_along(at, first, last, wide), round(floor - _along(value, low, high, floor), 2), at, value)
            for at, value in zip(chart.x, line.values, strict=True)
            if value is not None
        ]
        half = edge / 2
        points = " ".join(f"{dot.x + half:g},{dot.y + half:g}" for dot in dots)
        found.append(Trace(line.label, points, dots))
    return found


def _along(value: float, low: float, high: float, length: float) -> float:
    """How far a value lies along a length that stands for `low` to `high`."""
    return round(length * ((value - low) / (high - low)), 2) if high > low else 0.0


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
