"""Charts: series as values for uPlot (`charts.js`), or for the macro `still` where no script runs.

A chart is JSON in an attribute of its element, because the page's policy allows no inline script. A live chart also
says where in an event's document its points are, so that events update it without reloading the page.

Pure functions; no pixels, no colours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

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
