"""Draw a timeline: as one self-contained HTML file, or as PNG or SVG.

The HTML file holds inline SVG, no script and no network reference, and follows the reader's light or dark
theme. External text (topic names) is escaped. PNG and SVG are drawn with matplotlib (the `plot`
extra). Both use one palette, lightened on dark pages.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.log.lifetime.timeline import PHASE_TEXTS, PHASES, Bar, Timeline, mark_levels, ticks

_WIDTH = 1080
_LEFT = 190
_ROW = 52
_BAR = 30
_STEP = 22
_STYLE = """
:root { --ink: #1d2730; --pale: #66727d; --line: #e4e8ec; --paper: #ffffff; --dark-text: #ffffff;
  --filling: #2f6f9f; --retention: #7fb3d5; --check: #f2b134; --delay: #c9562c; --open: #c7cdd4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8edf2; --pale: #9aa7b3; --line: #2b343d; --paper: #14191f; --dark-text: #ffffff;
    --filling: #3f86bd; --retention: #86b9da; --check: #f2b950; --delay: #d8683d; --open: #4a545e; } }
body { margin: 2rem auto; max-width: 1120px; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .2rem; } p { margin: 0 0 1.2rem; color: var(--pale); }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font-size: 13px; }
svg .pale { fill: var(--pale); } svg .note { font-size: 11px; } svg .strong { font-weight: 600; }
svg .inside { fill: #10171d; text-anchor: middle; } svg .inside.light { fill: var(--dark-text); }
ul { list-style: none; display: flex; flex-wrap: wrap; gap: .4rem 1.6rem; padding: 0; margin: 1rem 0 0; }
li::before { content: ""; display: inline-block; width: 1.1em; height: .8em; margin-right: .5em;
  background: var(--swatch); }
"""
_HATCH = (
    '<defs><pattern id="open" width="8" height="8" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="8" height="8" fill="var(--open)"/>'
    '<rect width="3" height="8" fill="var(--paper)"/></pattern></defs>'
)


def page(timeline: Timeline) -> str:
    """Return the HTML file's content."""
    phases = [
        phase for phase in PHASES if any(s.phase == phase for bar in timeline.bars for s in bar.stretches)
    ]
    legend = "".join(
        f'<li style="--swatch: var(--{phase})">{escape(PHASE_TEXTS[phase])}</li>' for phase in phases
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(timeline.title)}</title><style>{_STYLE}</style></head>\n<body>"
        f"<h1>{escape(timeline.title)}</h1><p>{escape(timeline.subtitle)}</p>\n"
        f"{_svg(timeline)}\n<ul>{legend}</ul></body></html>\n"
    )


def _svg(timeline: Timeline) -> str:
    head = 14 + _STEP * (1 + max(mark_levels(timeline), default=0))
    height = head + _ROW * len(timeline.bars) + 44
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(timeline.title, quote=True)}">',
        _HATCH,
    ]
    parts += _grid(timeline, head, height)
    for row, bar in enumerate(timeline.bars):
        parts += _bar(timeline, bar, head + row * _ROW)
    parts += _marks(timeline, head)
    return "\n".join([*parts, "</svg>"])


def _x(timeline: Timeline, at: int) -> float:
    span = max(1, timeline.end - timeline.start)
    return round(_LEFT + (at - timeline.start) / span * (_WIDTH - _LEFT - 14), 1)


def _grid(timeline: Timeline, head: int, height: int) -> list[str]:
    parts = []
    for at in ticks(timeline, 8 if timeline.is_relative else 6):
        x = _x(timeline, at)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{head - 8}" y2="{height - 40}" stroke="var(--line)"/>')
        parts.append(
            f'<text x="{x}" y="{height - 22}" text-anchor="middle">{escape(timeline.label_of(at))}</text>'
        )
    caption = "since its first record" if timeline.is_relative else "UTC"
    middle = (_LEFT + _WIDTH) // 2
    parts.append(f'<text class="pale" x="{middle}" y="{height - 4}" text-anchor="middle">{caption}</text>')
    return parts


def _bar(timeline: Timeline, bar: Bar, top: int) -> list[str]:
    middle = top + _BAR / 2
    edge = _LEFT - 12
    parts = [
        f'<text x="{edge}" y="{middle - 2}" text-anchor="end">{escape(bar.label)}</text>',
        f'<text class="pale note" x="{edge}" y="{middle + 14}" text-anchor="end">{escape(bar.note)}</text>',
    ]
    for stretch in bar.stretches:
        left, right = _x(timeline, stretch.start), _x(timeline, stretch.end)
        if right <= left:
            continue
        fill = "url(#open)" if stretch.phase == "open" else f"var(--{stretch.phase})"
        length = timeline.label_of(stretch.end - stretch.start) if timeline.is_relative else ""
        title = escape(f"{PHASE_TEXTS[stretch.phase]} {length}".strip())
        parts.append(
            f'<rect x="{left}" y="{top}" width="{round(right - left, 1)}" height="{_BAR}" fill="{fill}" '
            f'stroke="var(--paper)"><title>{title}</title></rect>'
        )
        if length and right - left > 44:
            light = " light" if stretch.phase in ("filling", "delay") else ""
            x = (left + right) / 2
            parts.append(f'<text class="inside{light}" x="{x}" y="{middle + 5}">{escape(length)}</text>')
    return parts


def _marks(timeline: Timeline, head: int) -> list[str]:
    parts = []
    foot = head + _BAR + 6 if timeline.is_relative else head + _ROW * len(timeline.bars) - 12
    for mark, level in zip(timeline.marks, mark_levels(timeline), strict=True):
        x, y = _x(timeline, mark.at), 14 + _STEP * level
        right = x > _WIDTH * 0.8
        words = f"{mark.text}  {mark.label}" if right else f"{mark.label}  {mark.text}"
        colour, dash = ("var(--ink)", "") if mark.strong else ("var(--pale)", ' stroke-dasharray="5 4"')
        parts.append(f'<line x1="{x}" x2="{x}" y1="{y + 5}" y2="{foot}" stroke="{colour}"{dash}/>')
        parts.append(
            f'<text class="{"strong" if mark.strong else "pale"}" x="{x}" y="{y}" '
            f'text-anchor="{"end" if right else "start"}">{escape(words)}</text>'
        )
    return parts


# -- chart -----------------------------------------------------------------------------------------

# The colours differ in lightness as well as in hue, so they differ in greyscale and for colour-blind readers.
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
    """Write the picture to a `.png`, `.svg` or `.html` file."""
    files = files if files is not None else Files()
    suffix = path.suffix.lower()
    if suffix in (".html", ".htm"):
        content = page(timeline).encode("utf-8")
    elif suffix in (".png", ".svg"):
        content = draw(timeline, suffix[1:])
    else:
        raise InvalidError(f"{path}: a picture is a .png, .svg or .html file")
    if path.parent != Path() and not files.exists(path.parent):
        raise InvalidError(f"{path}: there is no folder {path.parent}; make it first")
    files.publish(path, content, sync=False)


def draw(timeline: Timeline, kind: str) -> bytes:
    """Return the picture as the bytes of a PNG or an SVG."""
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
    """Draw marks; labels of close marks are staggered, so that none crosses the line of the next."""
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
    """Return where the marks' labels begin, above the first bar."""
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
