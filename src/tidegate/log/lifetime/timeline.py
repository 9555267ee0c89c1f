"""The bars and marks of a lifetime picture on a time axis, before they are drawn.

Computes the phases of each log segment and where they begin and end; `page` draws them
with matplotlib (PNG, SVG) or as an HTML file. Pure functions.

| phase | from | to |
|---|---|---|
| filling | first record | last record of the log segment |
| retention | last record | the moment it expires |
| check | that moment | the latest check after it: it becomes unreadable in this phase |
| delay | the latest check | files leave the disk |
| open | wherever the end is not known | the edge of the picture |

Times are milliseconds: since the first record for a workload, since the epoch for a topic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.durations import format_duration, format_moment
from tidegate.log.lifetime.lifetime import PartitionFacts, SegmentLifetime, WorkloadLifetime

PHASES = ("filling", "retention", "check", "delay", "open")
PHASE_TEXTS = {
    "filling": "filling: records arrive",
    "retention": "retention: closed, kept",
    "check": "waiting for the check: readable until it comes",
    "delay": "deleted, files still on disk",
    "open": "no end in sight",
}
MAX_BARS = 24
_WORKLOAD_SEGMENTS = 3


@dataclass(frozen=True, slots=True)
class Stretch:
    """One phase of a bar, [start, end) in milliseconds."""

    phase: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Bar:
    """The bar of one log segment."""

    label: str
    note: str
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled moment: `at` in milliseconds, a label and a text; `strong` for the main results."""

    at: int
    label: str
    text: str
    strong: bool = True


@dataclass(frozen=True, slots=True)
class Timeline:
    """The whole picture. The axis shows durations from 0 if `is_relative`, otherwise dates."""

    title: str
    subtitle: str
    bars: tuple[Bar, ...]
    marks: tuple[Mark, ...]
    start: int
    end: int
    is_relative: bool

    def label_of(self, at: int) -> str:
        """Return the axis label of a moment."""
        if self.is_relative:
            return format_duration(at) if at else "0"
        moment = format_moment(at)
        return f"{moment[5:10]} {moment[11:19]}"


def workload_timeline(lifetime: WorkloadLifetime) -> Timeline:
    """Return three log segments in a row under the workload, with the first one's moments marked."""
    step = (
        lifetime.capacity.records * lifetime.workload.interval_ms
        if lifetime.fill_ms
        else lifetime.workload.interval_ms
    )
    bars = []
    ends = []
    for number in range(_WORKLOAD_SEGMENTS):
        stretches = _workload_stretches(lifetime, number * step)
        ends.append(stretches[-1].end)
        first = number * lifetime.capacity.records
        bars.append(
            Bar(
                f"log segment {number + 1}",
                f"records {first} … {first + lifetime.capacity.records - 1}",
                stretches,
            )
        )
    end = max(ends)
    if lifetime.visible_max.ms is None:
        end = _with_open_ends(bars, end)
    workload = lifetime.workload
    return Timeline(
        title="How long the first record of a log segment lives",
        subtitle=(
            f"{workload.record_bytes} bytes every {format_duration(workload.interval_ms)}: "
            f"{lifetime.capacity.records} records a log segment, rolled by "
            f"{lifetime.capacity.reason.replace('_', ' ')}"
        ),
        bars=tuple(bars),
        marks=_workload_marks(lifetime),
        start=0,
        end=end,
        is_relative=True,
    )


def _workload_stretches(lifetime: WorkloadLifetime, start: int) -> tuple[Stretch, ...]:
    filled = start + max(lifetime.fill_ms, 1)
    stretches = [Stretch("filling", start, filled)]
    if lifetime.retention_phase_ms is None:
        return (*stretches, Stretch("open", filled, filled + max(lifetime.fill_ms, 60_000)))
    expiry = start + lifetime.fill_ms + lifetime.retention_phase_ms
    stretches.append(Stretch("retention", filled, expiry))
    if lifetime.check_interval_ms is None:
        return (*stretches, Stretch("open", expiry, expiry + max(lifetime.retention_phase_ms // 2, 60_000)))
    seen = expiry + lifetime.check_interval_ms
    stretches += [Stretch("check", expiry, seen), Stretch("delay", seen, seen + lifetime.delete_delay_ms)]
    return tuple(stretches)


def _workload_marks(lifetime: WorkloadLifetime) -> tuple[Mark, ...]:
    texts = (
        (lifetime.guaranteed, "guaranteed to every record"),
        (lifetime.oldest_at_expiry, "may go"),
        (lifetime.visible_max, "unreadable at the latest"),
        (lifetime.disk_max, "off the disk at the latest"),
    )
    return tuple(
        Mark(bound.ms, format_duration(bound.ms), text, strong=not text.startswith("guaranteed"))
        for bound, text in texts
        if bound.ms is not None
    )


def _with_open_ends(bars: list[Bar], end: int) -> int:
    """Extend every bar without an end to the edge."""
    for number, bar in enumerate(bars):
        last = bar.stretches[-1]
        if last.phase == "open":
            bars[number] = Bar(bar.label, bar.note, (*bar.stretches[:-1], Stretch("open", last.start, end)))
    return end


def topic_timeline(facts: PartitionFacts, lifetimes: Sequence[SegmentLifetime]) -> Timeline:
    """Return the log segments of one partition, oldest first; of many, some in the middle are left out."""
    shown = list(lifetimes)
    left_out = 0
    if len(shown) > MAX_BARS:
        left_out = len(shown) - MAX_BARS
        shown = shown[: MAX_BARS // 2] + shown[-(MAX_BARS // 2) :]
    bars = [_segment_bar(facts, lifetime) for lifetime in shown]
    moments = [stretch.end for bar in bars for stretch in bar.stretches if stretch.phase != "open"]
    moments += [facts.now_ms]
    start = min([stretch.start for bar in bars for stretch in bar.stretches] + [facts.now_ms])
    # One future date must not compress everything else into a line: such a bar extends beyond the picture.
    end = min(max(moments), facts.now_ms + 3 * max(facts.now_ms - start, 60_000))
    end += max((end - start) // 20, 1000)
    bars = [
        Bar(bar.label, bar.note, tuple(_clipped(stretch, end) for stretch in bar.stretches)) for bar in bars
    ]
    subtitle = f"{len(facts.segments)} log segments" + (f", {left_out} not shown" if left_out else "")
    return Timeline(
        title=f"When {facts.topic}-{facts.partition} loses its log segments",
        subtitle=subtitle,
        bars=tuple(bars),
        marks=(Mark(facts.now_ms, "now", format_moment(facts.now_ms)),),
        start=start,
        end=end,
        is_relative=False,
    )


def _segment_bar(facts: PartitionFacts, lifetime: SegmentLifetime) -> Bar:
    segment = lifetime.segment
    filled = min(segment.largest_timestamp_ms, facts.now_ms)
    start = min(segment.first_timestamp_ms if segment.first_timestamp_ms is not None else filled, filled)
    stretches = [Stretch("filling", start, filled)]
    name = f"{segment.base_offset} … {segment.next_offset - 1}{' (active)' if segment.active else ''}"
    note = f"rule: {lifetime.rule.value}"
    if lifetime.due_ms is None:
        return Bar(name, note, (*stretches, Stretch("open", filled, filled)))
    due = max(lifetime.due_ms, filled)
    stretches.append(Stretch("retention", filled, due))
    if lifetime.gone_latest_ms is None or lifetime.disk_latest_ms is None or facts.check_interval_ms is None:
        return Bar(name, note, (*stretches, Stretch("open", due, due)))
    seen = max(lifetime.gone_latest_ms, due)
    if segment.active:  # its latest moment is days away and hides the rest; show that of an idle producer
        seen = max(due, facts.now_ms) + facts.check_interval_ms
        note += " (if silent)"
    delay = lifetime.disk_latest_ms - lifetime.gone_latest_ms
    stretches += [Stretch("check", due, seen), Stretch("delay", seen, seen + delay)]
    return Bar(name, note, tuple(stretches))


def _clipped(stretch: Stretch, end: int) -> Stretch:
    """Clip to the picture; a phase without an end extends to its edge."""
    stop = end if stretch.phase == "open" else min(stretch.end, end)
    return Stretch(stretch.phase, min(stretch.start, end), stop)


def mark_levels(timeline: Timeline) -> list[int]:
    """Return the row of each mark's label: one lower than its left neighbour's when that is near."""
    span = timeline.end - timeline.start
    levels: list[int] = []
    for number, mark in enumerate(timeline.marks):
        near = number > 0 and mark.at - timeline.marks[number - 1].at < span * 0.25
        levels.append(levels[-1] + 1 if near else 0)
    return levels


def ticks(timeline: Timeline, wanted: int = 8) -> list[int]:
    """Return round moments for the axis, about as many as wanted."""
    steps = (
        1, 10, 100, 1000, 5000, 10_000, 30_000, 60_000, 120_000, 300_000, 600_000, 900_000, 1_800_000,
        3_600_000, 7_200_000, 10_800_000, 21_600_000, 43_200_000, 86_400_000,
        604_800_000, 2_592_000_000, 31_536_000_000,
    )  # fmt: skip
    span = max(1, timeline.end - timeline.start)
    step = next((step for step in steps if span / step <= wanted), steps[-1])
    while span / step > wanted:
        step *= 2
    first = -(-timeline.start // step) * step
    return list(range(first, timeline.end + 1, step))
