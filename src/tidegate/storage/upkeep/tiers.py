"""Which neighbouring runs of a bucket to merge next: a pure choice, by size.

Runs are looked at in order, oldest first; the pieces of one big merge share an order and form one *tier*. A
window of neighbours is worth merging when each member is at most `ratio` times all that is younger than it in
the window. A row is then copied once as part of the youngest member and afterwards only into a run at least
(1 + 1/ratio) times larger, so n rows cost O(n log n) copies in total, whatever the sizes of the appends.

What is left unmerged shrinks geometrically from old to young, so there are few tiers; if there still are
more than `max_tiers`, the ratio is doubled until a window is found. Only neighbours are ever merged: that
keeps "the later write wins" true for `last`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tidegate.storage.index.entries import RunEntry
from tidegate.storage.spec import Merge

MAX_TIERS = 8
RATIO = 2.0
SMALL_BYTES = 1 << 20
ROOMY_BYTES = 2 << 20  # runs of this size on average are few for what they hold


@dataclass(frozen=True, slots=True)
class Tier:
    """Runs of one order: what one append or one merge left in the bucket."""

    runs: tuple[RunEntry, ...]
    nbytes: int
    hot: bool  # every run has a complete copy in memory


def tiers_of(runs: Sequence[RunEntry]) -> list[Tier]:
    """The runs of a bucket, grouped by order, oldest first."""
    grouped: list[list[RunEntry]] = []
    for run in runs:
        if grouped and grouped[-1][-1].order == run.order:
            grouped[-1].append(run)
        else:
            grouped.append([run])
    return [
        Tier(tuple(group), sum(run.nbytes for run in group), all(is_hot(run) for run in group))
        for group in grouped
    ]


def is_hot(run: RunEntry) -> bool:
    """Whether every row of the run is in memory."""
    return run.hot is not None and run.hot.complete


def choose_window(
    tiers: Sequence[Tier], *, max_tiers: int = MAX_TIERS, ratio: float = RATIO
) -> tuple[int, int] | None:
    """The half-open range of tiers to merge now, or None when the bucket is in good shape.

    Up to `max_tiers`, only tiers in memory are considered; beyond, stored ones too.
    """
    if len(tiers) <= max_tiers:
        return _window(tiers, ratio, hot_only=True)
    while (window := _window(tiers, ratio, hot_only=False)) is None:
        ratio *= 2
    return window


def hot_window(tiers: Sequence[Tier]) -> tuple[int, int] | None:
    """The longest stretch of neighbours in memory, at least two, the younger one of equals."""
    best: tuple[int, int] | None = None
    first = 0
    for position in range(len(tiers) + 1):
        if position < len(tiers) and tiers[position].hot:
            continue
        if position - first >= 2 and (best is None or position - first >= best[1] - best[0]):
            best = (first, position)
        first = position + 1
    return best


def small_window(
    tiers: Sequence[Tier], most_bytes: int, *, max_tiers: int = MAX_TIERS
) -> tuple[int, int] | None:
    """As `choose_window`, but nothing of more than half of `most_bytes` is merged, and no more than that together.

    For buckets of which not everything can be merged at once: what stays apart is few runs for its size.
    """
    stop = len(tiers)
    while stop > 1:
        first = stop
        while first > 0 and 2 * tiers[first - 1].nbytes <= most_bytes:
            first -= 1
        window = choose_window(tiers[first:stop], max_tiers=max_tiers)
        if window is not None:
            low, high = first + window[0], first + window[1]
            while sum(tier.nbytes for tier in tiers[low:high]) > most_bytes:
                low += 1
            if high - low > 1:
                return low, high
        stop = first - 1
    return None


def is_unsettled(merge: Merge, runs: Sequence[RunEntry]) -> bool:
    """Whether much of a small bucket may be unreachable once merged: tombstones, overwritten rows, partials.

    Such rows hold backlog until then. The bucket is merged whole, from its oldest run on, wherever it lies; only
    when a quarter of its rows is new, so that each row is still copied a bounded number of times.
    """
    if merge is Merge.APPEND or (merge is Merge.FOLD and len(runs) < 2):
        return False
    fresh = sum(run.rows for run in runs if not run.base)
    return 4 * fresh >= sum(run.rows for run in runs) and sum(run.nbytes for run in runs) <= SMALL_BYTES


def is_crowded(runs: Sequence[RunEntry], most: int) -> bool:
    """Whether a bucket that is still written to has too many runs: small ones, or ones of the same time.

    Large runs of different times are left alone until the bucket is cold: whoever looks for a time finds few of
    them, and to merge them again and again would cost more than all appends.
    """
    if len(runs) <= most:
        return False
    if sum(run.nbytes for run in runs) < ROOMY_BYTES * len(runs):
        return True
    return _deepest(runs) > most


def _deepest(runs: Sequence[RunEntry]) -> int:
    """The most runs that any one moment of time lies in."""
    edges = sorted([*((run.min_ts, 1) for run in runs), *((run.max_ts + 1, -1) for run in runs)])
    return max(accumulate(step for _, step in edges))


def _window(tiers: Sequence[Tier], ratio: float, *, hot_only: bool) -> tuple[int, int] | None:
    for youngest in range(len(tiers) - 1, 0, -1):
        if hot_only and not tiers[youngest].hot:
            continue
        total, first = tiers[youngest].nbytes, youngest
        while (
            first > 0 and tiers[first - 1].nbytes <= ratio * total and (tiers[first - 1].hot or not hot_only)
        ):
            first -= 1
            total += tiers[first].nbytes
        if first < youngest:
            return first, youngest + 1
    return None
