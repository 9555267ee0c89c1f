"""A timeline as PNG or SVG, drawn with matplotlib (the `plot` extra); `lifetime_page` needs nothing.

Owns colours, sizes and the placing of labels. The HTML page uses the same palette.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.log.lifetime.timeline import PHASE_TEXTS, PHASES, Bar, Timeline, mark_levels, ticks

# Told apart by lightness as well as by hue, so also in grey and by colour-blind eyes.
COLOURS = {
    "filling": "#2f6f9f",
    "retention": "#7fb3d5",
    "check": "#f2b134",
    "delay": "#c9562c",
    "open": "#c7cdd4",
}
INK = "#1d2730"
PALE = "#8a949e"


def write_picture(timeline: Timeline, path: Path, *, files: Files | None = None) -> None:
    """Draw into a `.png`, `.svg` or `.html` file."""
    files = files if files is not None else Files()
    suffix = path.suffix.lower()
    if suffix in (".html", ".htm"):
        from tidegate.log.lifetime.page import page

        content = page(timeline).encode("utf-8")
    elif suffix in (".png", ".svg"):
        content = draw(timeline, suffix[1:])
    else:
        raise InvalidError(f"{path}: a picture is a .png, .svg or .html file")
    if path.parent != Path() and not files.exists(path.parent):
        raise InvalidError(f"{path}: there is no folder {path.parent}; make it first")
    files.publish(path, content, sync=False)


def draw(timeline: Timeline, kind: str) -> bytes:
    """The picture as bytes of a PNG or an SVG."""
    figure = _figure(timeline)
    import io

    sink = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {}
    figure.savefig(sink, format=kind, dpi=150, metadata=metadata, facecolor="white")
    return sink.getvalue()


def _figure(timeline: Timeline) -> Any:
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidError(
            "PNG and SVG pictures need matplotlib: pip install 'tidegate[plot]'; a .html file needs nothing"
        ) from None
    height = 1.9 + 0.52 * (len(timeline.bars) - _top(timeline))
    with rc_context({"font.family": "DejaVu Sans", "svg.hashsalt": "tidegate", "svg.fonttype": "path"}):
        figure = Figure(figsize=(11, height), layout="constrained")
        axes = figure.add_subplot()
        for row, bar in enumerate(timeline.bars):
            _draw_bar(axes, timeline, row, bar)
        _draw_axis(axes, timeline)
        _draw_marks(axes, timeline)
        _draw_words(figure, axes, timeline)
    return figure


def _draw_bar(axes: Any, timeline: Timeline, row: int, bar: Bar) -> None:
    span = timeline.end - timeline.start
    for stretch in bar.stretches:
        if stretch.end <= stretch.start:
            continue
        axes.barh(
            row,
            stretch.end - stretch.start,
            left=stretch.start,
            height=0.56,
            color=COLOURS[stretch.phase],
            edgecolor="white",
            linewidth=0.8,
            hatch="////" if stretch.phase == "open" else None,
        )
        if timeline.is_relative and stretch.end - stretch.start > span * 0.045:
            dark = stretch.phase in ("filling", "delay")
            axes.text(
                (stretch.start + stretch.end) / 2,
                row,
                timeline.label_of(stretch.end - stretch.start),
                ha="center",
                va="center",
                fontsize=8.5,
                color="white" if dark else INK,
            )


def _draw_axis(axes: Any, timeline: Timeline) -> None:
    rows = len(timeline.bars)
    axes.set_ylim(rows - 0.45, _top(timeline))
    axes.set_xlim(timeline.start, timeline.end + (timeline.end - timeline.start) * 0.01)
    axes.set_yticks(
        range(rows), [f"{bar.label}\n{bar.note}" for bar in timeline.bars], fontsize=8.5, color=INK
    )
    places = ticks(timeline, 8 if timeline.is_relative else 6)
    axes.set_xticks(places, [timeline.label_of(at) for at in places], fontsize=8.5, color=INK)
    axes.tick_params(length=0)
    axes.grid(axis="x", color="#e4e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("since its first record" if timeline.is_relative else "UTC", fontsize=8.5, color=PALE)


def _draw_marks(axes: Any, timeline: Timeline) -> None:
    """Labels go down like stairs where marks are near, so that none crosses the line of the next."""
    span = timeline.end - timeline.start
    foot = 0.42 if timeline.is_relative else len(timeline.bars) - 0.45
    for mark, level in zip(timeline.marks, mark_levels(timeline), strict=True):
        y = _top(timeline) + 0.14 + 0.4 * level
        axes.plot(
            [mark.at, mark.at],
            [y + 0.12, foot],
            color=INK if mark.strong else PALE,
            linewidth=1.1,
            linestyle="-" if mark.strong else (0, (4, 3)),
            zorder=3,
        )
        right = mark.at > timeline.end - span * 0.2
        axes.text(
            mark.at,
            y,
            f"{mark.text}  {mark.label}" if right else f"{mark.label}  {mark.text}",
            ha="right" if right else "left",
            va="center",
            fontsize=8.5,
            fontweight="bold" if mark.strong else "normal",
            color=INK if mark.strong else PALE,
            zorder=4,
        )


def _top(timeline: Timeline) -> float:
    """Where the marks' labels begin, above the first bar."""
    return -0.55 - 0.4 * (1 + max(mark_levels(timeline), default=0))


def _draw_words(figure: Any, axes: Any, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    axes.set_title(timeline.title, loc="left", fontsize=13, fontweight="bold", color=INK, pad=22)
    axes.text(0, 1.015, timeline.subtitle, transform=axes.transAxes, fontsize=9, color=PALE, va="bottom")
    present = {
        stretch.phase for bar in timeline.bars for stretch in bar.stretches if stretch.end > stretch.start
    }
    patches = [
        Patch(
            facecolor=COLOURS[phase],
            label=PHASE_TEXTS[phase],
            hatch="////" if phase == "open" else None,
            edgecolor="white",
        )
        for phase in PHASES
        if phase in present
    ]
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False, fontsize=8.5)
