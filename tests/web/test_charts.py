"""What charts say, and that what draws them is what its notice names."""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st

import tidegate.web
from tidegate.web import charts, pages

UPLOT = Path(tidegate.web.__file__).parent / "static" / "uplot"


def test_uplot_is_the_one_its_notice_names() -> None:
    sums = dict(re.findall(r"\| `([\w.]+)` \| sha256 `(\w{64})`", (UPLOT / "NOTICE.md").read_text()))
    assert set(sums) == {each.name for each in UPLOT.iterdir()} - {"NOTICE.md"}
    for name, expected in sums.items():
        assert hashlib.sha256((UPLOT / name).read_bytes()).hexdigest() == expected, name


def test_a_window_without_a_number_leaves_a_gap() -> None:
    rows = [
        {"window_start_ms": 0, "value": {"n": 3}},
        {"window_start_ms": 60_000, "value": {"n": None}},
        {"window_start_ms": 120_000, "value": {}},
        {"window_start_ms": 180_000, "value": {"n": "three"}},
        {"window_start_ms": 240_000, "value": {"n": True}},
    ]
    made = charts.windows_chart(rows, "n", [])
    assert made.x == [0, 60_000, 120_000, 180_000, 240_000]
    assert made.lines[0].values == [3, None, None, None, None]


def test_of_many_partitions_those_that_hold_time_back_are_drawn() -> None:
    times = {f"t-{number}": 1000 - number for number in range(20)}
    row = {
        "round": 1, "committed_ms": 5, "records": 2, "records_per_second": None, "stream_times": times,
        "memory_bytes": 1, "backlog_bytes": 2,
    }  # fmt: skip
    made = charts.app_charts({"rounds": [row], "now_ms": 9, "lag_records": 4})
    assert [line.label for line in made["times"].lines] == [f"t-{number}" for number in range(12, 20)]
    assert made["lag"].x == [9] and made["lag"].lines[0].values == [4]
    assert charts.app_charts({"rounds": [], "now_ms": 9, "lag_records": 4})["records"].x == []


@given(st.text(max_size=60))
def test_a_chart_in_an_attribute_is_text_whatever_it_is_called(name: str) -> None:
    """H1: a column's name may try what it likes; the attribute gives back exactly what was put in."""
    made = charts.Chart([1.0], [charts.Line(name, [2.0])])
    shown = pages.environment().from_string('<p data-chart="{{ chart.json() }}"></p>').render(chart=made)
    inner = shown.removeprefix('<p data-chart="').removesuffix('"></p>')
    assert not set(inner) & set("<>\"'")
    for entity, sign in (("&#34;", '"'), ("&#39;", "'"), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        inner = inner.replace(entity, sign)
    assert msgspec.json.decode(inner, type=charts.Chart) == made


_points = st.lists(st.one_of(st.none(), st.floats(-1e15, 1e15)), max_size=12)


def drawn(chart: charts.Chart, kind: str) -> list[dict[str, float]]:
    """The rectangles of a chart as it is drawn where no script runs."""
    source = '{% from "parts.html" import still with context %}{{ still(chart, "a chart") }}'
    page = pages.environment().from_string(source).render(chart=chart, named={})
    found = [dict(re.findall(r'(\w+)="([^"]*)"', each)) for each in re.findall(r"<rect [^>]*>", page)]
    return [
        {name: float(each[name]) for name in ("x", "y", "width", "height")}
        for each in found
        if each["class"].split()[0] == kind
    ]


def test_bars_without_scripts_are_as_high_as_their_share_of_the_largest() -> None:
    made = drawn(charts.Chart([1, 2, 3, 4], [charts.Line("a", [1, None, 3, 0])], kind="bars"), "bar")
    assert [bar["height"] for bar in made] == [round(200 / 3, 2), 0, 200, 0]
    assert all(bar["x"] >= 0 and bar["x"] + bar["width"] <= 1000 for bar in made)
    assert all(bar["y"] + bar["height"] == 200 for bar in made)


@given(_points, _points, st.sampled_from(["number", "bytes", "moment", "rate"]))
def test_lines_without_scripts_lie_in_their_box_and_in_order(
    first: list[float | None], second: list[float | None], unit: charts.Unit
) -> None:
    """Every value has its dot, none lies outside, and of two dots the larger is never the lower one."""
    many = min(len(first), len(second))
    lines = [charts.Line("a", first[:many]), charts.Line("b", second[:many])]
    dots = drawn(charts.Chart([float(at * 1000) for at in range(many)], lines, unit=unit), "dotted")
    values = [value for line in lines for value in line.values if value is not None]
    assert len(dots) == len(values)
    assert all(0 <= dot["x"] <= 988 and 0 <= dot["y"] <= 188 for dot in dots)
    inside = sorted(zip(values, dots, strict=True), key=lambda each: each[0])
    for (_, low), (_, high) in pairwise(inside):
        assert high["y"] <= low["y"]
