"""Compaction: merge adjacent runs of one bucket into one tier, by the merge kind of the store.

Runs are taken in order, oldest first; the pieces of one big merge share an order and form one *tier*. Tiers are merged
where each is at most `RATIO` times all that is younger, so n rows cost O(n log n) copies in total. With more than
`max_tiers` left, the ratio is doubled until tiers are found.

Small merges leave a hot base run. Large ones (above `max_batch_bytes`) go strip by strip over ranges of key hashes:
each strip is stored as it is made, so a bucket of any size is merged in the memory of two strips.

M1  only neighbours in order are merged, all of them readable, or nothing is published (INV-8).
M2  a merge that includes the oldest run of the bucket drops tombstones: nothing is left below to hide.
M3  `append` keeps the charge of its inputs; `last` and `fold` give back what merging made unreachable.
M4  publish, then retire the inputs' packs and drop their hot copies; lost, the outputs are dropped instead (INV-7,
    INV-9).
M5  a merge that rests between its strips releases permit and lock meanwhile, and continues only if the bucket is
    unchanged. Strips that no checkpoint names yet are published only while no master can have collected them.
M6  a key too large to merge in working memory stays in pieces; reading that key is refused, or needs more memory.

A generator: phases `captured`, `merged` (one for each strip) or `resting`, `placed`; see `operations`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np

from tidegate.storage.index import Bucket, HotCopy, RunEntry, StoredRef
from tidegate.storage.maintenance.operations import RESTING, Operation, Work
from tidegate.storage.parts import AttachedStore, StorageParts, TaskStorage
from tidegate.storage.runs.merge import merge_bytes, merge_runs, slice_rows
from tidegate.storage.runs.run import Run
from tidegate.storage.scratch import COPIES, SORT_BYTES
from tidegate.storage.spec import Merge

# -- choice of runs ----------------------------------------------------------------------------------

MAX_TIERS = 8
RATIO = 2.0
SMALL_BYTES = 1 << 20
WORTH_MERGING = 4  # deltas below a quarter of their base wait: rewriting the base costs more than it saves
ROOMY_BYTES = 2 << 20  # runs of this size on average are few for what they hold


@dataclass(frozen=True, slots=True)
class Tier:
    """The runs of one order, which one append or one merge produced."""

    runs: tuple[RunEntry, ...]
    nbytes: int
    hot: bool  # every run has a complete copy in memory


def tiers_of(runs: Sequence[RunEntry]) -> list[Tier]:
    """The runs of a bucket, grouped by order, oldest first."""
    grouped = [tuple(group) for _, group in groupby(runs, key=lambda run: run.order)]
    return [
        Tier(group, sum(run.nbytes for run in group), all(run.is_hot for run in group)) for group in grouped
    ]


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
    """The longest range of adjacent tiers in memory, at least two; of equal ones the younger."""
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


def has_reclaimable_rows(merge: Merge, runs: Sequence[RunEntry]) -> bool:
    """Whether much of a small bucket may be unreachable once merged: tombstones, overwritten rows, partials.

    Such rows hold backlog until then. The bucket is merged whole, from its oldest run on, wherever it lies; only
    when a quarter of its rows is new, so that each row is still copied a bounded number of times.
    """
    if merge is Merge.APPEND or (merge is Merge.FOLD and len(runs) < 2):
        return False
    fresh = sum(run.rows for run in runs if not run.base)
    return 4 * fresh >= sum(run.rows for run in runs) and sum(run.nbytes for run in runs) <= SMALL_BYTES


def pays_to_compact(runs: Sequence[RunEntry], max_deltas: int) -> bool:
    """Whether merging the runs of a bucket pays.

    Too many deltas always do. Fewer do when two hot runs overlap in time and the deltas together weigh enough beside
    the bases they would be merged into. Without deltas there is nothing to merge.
    """
    deltas = [run for run in runs if not run.base]
    if not deltas or len(runs) < 2:
        return False
    if len(deltas) > max_deltas:
        return True
    base_bytes = sum(run.nbytes for run in runs if run.base)
    if sum(run.nbytes for run in deltas) * WORTH_MERGING < base_bytes:
        return False
    spans = sorted((run.min_ts, run.max_ts) for run in runs if run.hot is not None)
    return any(after[0] <= before[1] for before, after in pairwise(spans))


def is_worth(merge: Merge, runs: Sequence[RunEntry], most: int) -> bool:
    """Whether to compact a bucket that is no longer written: it has many tiers, or merging pays, or frees backlog."""
    if len({run.order for run in runs}) > most or has_reclaimable_rows(merge, runs):
        return True
    return pays_to_compact(runs, most) and any(run.stored is None for run in runs)


def is_crowded(runs: Sequence[RunEntry], most: int) -> bool:
    """Whether a bucket that is still written to has too many runs: small ones, or ones of the same time.

    Large runs with different times are not merged until the bucket is cold: a read of a time range touches few of
    them, and merging them repeatedly would cost more than all appends.
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


# -- compaction of a bucket --------------------------------------------------------------------------

SAMPLE_LINES = 1024  # of directories looked at for each strip, to cut strips of about the same size


def compact(
    store: AttachedStore,
    bucket: int,
    *,
    whole: bool = False,
    rest_bytes: int | None = None,
) -> Operation[bool]:
    """Merge the runs of the bucket where it pays; returns whether something was published.

    `whole` merges all adjacent runs in memory, regardless of size. With `rest_bytes` the merge rests after that many
    bytes (M5), which suits buckets that are no longer written.
    """
    task, parts = store.task, store.task.parts
    with Work(task) as work:
        if not (yield from work.claim(store, bucket)):
            return False
        found = work.capture(store, bucket)
        window = None if found is None else _chosen(store, tiers_of(found.runs), whole=whole)
        if found is None or window is None:
            return False
        inputs = [run for tier in window for run in tier.runs]
        started = parts.clock.monotonic_ms()
        yield "captured"
        merged = yield from _merge(store, found, inputs, work, rest_bytes)
        yield "placed"
        if merged is None or not _publish(store, found, inputs, merged):
            parts.stats.lost(task.task, "compact")
            return False
        work.undo.clear()
        parts.stats.count(
            task.task,
            compact_published=1,
            compact_runs=len(inputs),
            compact_bytes=sum(run.nbytes for run in inputs),
            compact_seconds=parts.ms_since(started) / 1000,
        )
        return True


def reclaim(task: TaskStorage) -> Operation[bool]:
    """Merge hot runs that overwrite or fold into each other's rows, so that their backlog is released.

    Returns whether another thread works on a bucket of the task and may release more.
    """
    for store in task.attached():
        if store.spec.merge is not Merge.APPEND:
            for bucket in store.state.index.crowded_buckets():
                yield from compact(store, bucket, whole=True)
    return task.parts.locks.held(task.task) > 0


def _chosen(store: AttachedStore, tiers: list[Tier], *, whole: bool) -> list[Tier] | None:
    """The tiers to merge now, as few as fit into working memory (M6)."""
    parts = store.task.parts
    most = parts.config.max_deltas
    if whole:
        window = hot_window(tiers)
    elif has_reclaimable_rows(store.spec.merge, [run for tier in tiers for run in tier.runs]):
        window = 0, len(tiers)
    else:
        window = choose_window(tiers, max_tiers=most)
    if window is not None and not _fits(store, tiers[slice(*window)]):
        window = small_window(tiers, parts.scratch.working_bytes // (4 * COPIES), max_tiers=most)
    return None if window is None else tiers[slice(*window)]


def _fits(store: AttachedStore, tiers: Sequence[Tier]) -> bool:
    """Whether every strip of the tiers fits into working memory."""
    task, parts = store.task, store.task.parts
    inputs = [run for tier in tiers for run in tier.runs]
    weight, most = sum(run.nbytes for run in inputs), parts.scratch.working_bytes
    if (COPIES + SORT_BYTES) * weight <= most:  # values of a byte each would take that
        return True
    runs = task.load_all(store.spec, inputs)
    return all(merge_bytes(strip) <= most for strip in _strips(runs, _strip_count(parts, weight, None)))


def _strip_count(parts: StorageParts, weight: int, rest_bytes: int | None) -> int:
    """The number of strips for a merge of `weight` bytes."""
    most = min(parts.config.max_batch_bytes, parts.scratch.working_bytes // (2 * COPIES))
    return -(-weight // max(1, most if rest_bytes is None else min(most, rest_bytes)))


class _Merged(NamedTuple):
    """The output of a merge, and when its first part was stored, if any was."""

    runs: list[RunEntry]
    stored_ms: int | None


def _publish(
    store: AttachedStore,
    found: Bucket,
    inputs: Sequence[RunEntry],
    merged: _Merged,
) -> bool:
    task, parts = store.task, store.task.parts
    stored_ms = merged.stored_ms
    if not parts.is_kept(stored_ms) or not store.state.index.publish(found, inputs, merged.runs):
        return False
    if stored_ms is not None:
        task.note_unnamed(stored_ms)
    task.retire([run.stored for run in inputs if run.stored is not None])
    task.drop_hot([run.hot for run in inputs if run.hot is not None])
    released = sum(run.charge for run in inputs) - sum(run.charge for run in merged.runs)
    parts.backlog.release(released, task=task.task)
    return True


def _merge(
    store: AttachedStore,
    found: Bucket,
    inputs: Sequence[RunEntry],
    work: Work,
    rest_bytes: int | None,
) -> Operation[_Merged | None]:
    """The merged runs as entries with a place each; `work` can undo them. None: the bucket is lost."""
    task, parts = store.task, store.task.parts
    spec, config = store.spec, parts.config
    runs = task.load_all(spec, inputs)
    weight, order = sum(run.nbytes for run in inputs), inputs[-1].order
    outputs: list[RunEntry] = []
    stored_ms: int | None = None
    for number, strip in enumerate(_strips(runs, _strip_count(parts, weight, rest_bytes))):
        if number and rest_bytes is not None and not (yield from _rest(work, store, found)):
            return None
        if merge_bytes(strip) > parts.scratch.working_bytes:
            return None  # one key is too large to merge (M6)
        with parts.scratch.hold(merge_bytes(strip), lambda: f"compaction of store {spec.name}"):
            merged = merge_runs(
                spec,
                strip,
                max_rows=config.max_run_rows,
                drop_tombstones=inputs[0] is found.runs[0],
                join=True,
            )
        if weight > config.max_batch_bytes and merged:
            stored_ms = parts.clock.monotonic_ms() if stored_ms is None else stored_ms
            (refs,) = task.store_all([(spec, spec.segment_of(merged[0].bucket), merged)])
            work.undo[refs[0]] = partial(task.retire, refs)
            outputs += [_entry(run, order, stored=ref) for run, ref in zip(merged, refs, strict=True)]
        else:
            for run in merged:
                hot = parts.base_runs.put(task.task, run)
                work.undo[hot] = partial(task.drop_hot, [hot])
                outputs.append(_entry(run, order, hot=hot))
        yield "merged"
    charges = shared_charge(spec.merge, sum(run.charge for run in inputs), [run.nbytes for run in outputs])
    charged = [replace(run, charge=charge) for run, charge in zip(outputs, charges, strict=True)]
    return _Merged(charged, stored_ms)


def _rest(work: Work, store: AttachedStore, found: Bucket) -> Operation[bool]:
    """Release the bucket for a while; returns whether it is unchanged (M5)."""
    work.release()
    yield RESTING
    return (yield from work.claim(store, found.start)) and store.state.index.snapshot(found.start) is found


def shared_charge(merge: Merge, total: int, sizes: Sequence[int]) -> list[int]:
    """Each output's share of the backlog: together `total` for `append`, else its size (M3)."""
    weight = sum(sizes)
    if not weight:
        return [0 for _ in sizes]
    if merge is not Merge.APPEND:
        total = min(total, weight)
    ends = [total * sum(sizes[: position + 1]) // weight for position in range(len(sizes))]
    return [end - start for start, end in pairwise([0, *ends])]


def _strips(runs: Sequence[Run], count: int) -> Iterator[list[Run]]:
    """The runs cut at the same key hashes, into about `count` strips of equal rows."""
    if count <= 1:
        yield list(runs)
        return
    step = max(1, sum(run.key_count for run in runs) // (SAMPLE_LINES * count))
    sample = np.sort(np.concatenate([run.hashes[::step] for run in runs]))
    cuts = np.unique(sample[np.arange(1, count) * len(sample) // count])
    places = [[0, *np.searchsorted(run.hashes, cuts).tolist(), run.key_count] for run in runs]
    for strip in range(len(cuts) + 1):
        pieces = []
        for run, place in zip(runs, places, strict=True):
            start, stop = int(run.starts[place[strip]]), int(run.starts[place[strip + 1]])
            if start < stop:
                pieces.append(slice_rows(run, start, stop))
        if pieces:
            yield pieces


def _entry(run: Run, order: int, *, hot: HotCopy | None = None, stored: StoredRef | None = None) -> RunEntry:
    return RunEntry(
        bucket=run.bucket,
        order=order,
        rows=run.row_count,
        keys=run.key_count,
        nbytes=run.nbytes,
        charge=0,
        min_ts=run.min_ts,
        max_ts=run.max_ts,
        base=True,
        hot=hot,
        stored=stored,
    )
