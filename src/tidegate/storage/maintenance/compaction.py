"""Compaction: merge adjacent runs of one bucket into one tier, by the merge kind of the store.

Which runs to merge is a pure choice by size. Runs are taken in order, oldest first; the pieces of one big merge share
an order and form one *tier*. A window of neighbours is worth merging when each member is at most `ratio` times all
that is younger than it in the window. A row is then copied once as part of the youngest member and afterwards only
into a run at least (1 + 1/ratio) times larger, so n rows cost O(n log n) copies in total, whatever the sizes of the
appends. When more than `max_tiers` are left, the ratio is doubled until a window is found. Only neighbours are
merged: that keeps "the later write wins" true for `last`.

Small merges happen in memory and leave a hot base run, to be stored later. Large ones (above `max_batch_bytes`)
go strip by strip over ranges of key hashes: each strip is merged and stored as it is made, so that a bucket of
any size is merged in the memory of two strips. All pieces of one merge share the highest order of its inputs.

M1  only neighbours in order are merged, all of them readable, or nothing is published (INV-8).
M2  a merge that includes the oldest run of the bucket drops tombstones: nothing is left below to hide.
M3  `append` keeps the charge of its inputs; `last` and `fold` give back what merging made unreachable.
M4  publish, then retire the inputs' packs and drop their hot copies; lost, the outputs are dropped instead (INV-7,
    INV-9).
M5  a merge that rests between its strips releases permit and lock meanwhile, and continues only if the bucket is
    unchanged. A checkpoint made meanwhile does not name the strips stored so far; they are published only while no
    master can have collected them as garbage.
M6  a key too large to merge in working memory stays in pieces: only tiers small enough are merged, so there are few
    large pieces. Reading that key is then refused, or needs more memory.

A generator: phases `captured`, `merged` (one for each strip) or `resting`, `placed`; see `operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from tidegate.storage.index import Bucket, HotCopy, RunEntry, StoredRef
from tidegate.storage.maintenance.operations import RESTING, WAITING, Operation, Undo, undoing
from tidegate.storage.memory.scratch import COPIES, SORT_BYTES, Scratch
from tidegate.storage.parts import AttachedStore, StorageParts, TaskStorage
from tidegate.storage.runs.merge import merge_bytes, merge_runs, slice_rows
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Merge

# -- choice of runs ----------------------------------------------------------------------------------

MAX_TIERS = 8
RATIO = 2.0
SMALL_BYTES = 1 << 20
ROOMY_BYTES = 2 << 20  # runs of this size on average are few for what they hold


@dataclass(frozen=True, slots=True)
class Tier:
    """The runs of one order, which one append or one merge produced."""

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

Choice = Callable[[Sequence[Tier]], "tuple[int, int] | None"]
SAMPLE_LINES = 1024  # of directories looked at for each strip, to cut strips of about the same size


def compact(
    parts: StorageParts,
    task: TaskStorage,
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
    choose: Choice = hot_window if whole else _by_size(parts, store.spec.merge)
    index = store.state.index
    with ExitStack() as held:
        claim = _Claim(parts, task, store, bucket)
        held.callback(claim.release)
        if not (yield from claim.take()):
            return False
        undo = held.enter_context(undoing())
        captured, lease = index.capture(bucket, bucket, lambda refs: parts.pins.pin(task.task, refs))
        if lease is not None:
            held.callback(lease.close)
        if not captured:
            return False
        found = captured[0]
        tiers = tiers_of(found.runs)
        window = choose(tiers)
        if window is not None and not _fits(parts, task, store, tiers[slice(*window)]):
            most = parts.scratch.working_bytes // (4 * COPIES)
            window = small_window(tiers, most, max_tiers=parts.config.max_deltas)
        if window is None:
            return False
        started = parts.clock.monotonic_ms()
        inputs = [run for tier in tiers[window[0] : window[1]] for run in tier.runs]
        yield "captured"
        pause = None if rest_bytes is None else _Pause(rest_bytes, partial(_rest, claim, found))
        merging = _merge(parts, task, store, inputs, drop_tombstones=window[0] == 0, undo=undo, pause=pause)
        merged = yield from merging
        yield "placed"
        if merged is None or not _publish(parts, task, store, found, inputs, merged):
            parts.stats.lost(task.task, "compact")
            return False
        undo.forget()
        nbytes = sum(run.nbytes for run in inputs)
        parts.stats.compacted(task.task, runs=len(inputs), nbytes=nbytes, ms=parts.ms_since(started))
        return True


def reclaim(parts: StorageParts, task: TaskStorage) -> Operation[bool]:
    """Merge hot runs that overwrite or fold into each other's rows, so that their backlog is released.

    Returns whether another thread works on a bucket of the task and may release more.
    """
    for store in task.attached():
        if store.spec.merge is not Merge.APPEND:
            for bucket in store.state.index.crowded_buckets():
                yield from compact(parts, task, store, bucket, whole=True)
    return parts.locks.held(task.task) > 0


def _by_size(parts: StorageParts, merge: Merge) -> Choice:
    def choose(tiers: Sequence[Tier]) -> tuple[int, int] | None:
        if has_reclaimable_rows(merge, [run for tier in tiers for run in tier.runs]):
            return 0, len(tiers)
        return choose_window(tiers, max_tiers=parts.config.max_deltas)

    return choose


def _fits(parts: StorageParts, task: TaskStorage, store: AttachedStore, tiers: Sequence[Tier]) -> bool:
    """Whether every strip of the tiers fits into working memory (M6)."""
    inputs = [run for tier in tiers for run in tier.runs]
    weight, most = sum(run.nbytes for run in inputs), parts.scratch.working_bytes
    if (COPIES + SORT_BYTES) * weight <= most:  # values of a byte each would take that
        return True
    runs = parts.load_all(task, store.spec, inputs)
    return all(merge_bytes(strip) <= most for strip in _strips(runs, _strip_count(parts, weight, None)))


def _strip_count(parts: StorageParts, weight: int, rest_bytes: int | None) -> int:
    """The number of strips for a merge of `weight` bytes."""
    most = min(parts.config.max_batch_bytes, parts.scratch.working_bytes // (2 * COPIES))
    return -(-weight // max(1, most if rest_bytes is None else min(most, rest_bytes)))


class _Claim:
    """A scratch permit and a bucket lock, taken and released together."""

    def __init__(self, parts: StorageParts, task: TaskStorage, store: AttachedStore, bucket: int) -> None:
        self.index = store.state.index
        self._parts, self._place = parts, (task.task, store.spec.name, bucket)
        self._held = ExitStack()

    def take(self) -> Operation[bool]:
        """Wait for a permit; False when the bucket is locked."""
        while (permit := self._parts.scratch.try_permit(Scratch.MAINTENANCE)) is None:
            yield WAITING
        self._held.callback(permit.close)
        unlock = self._parts.locks.try_lock(*self._place)
        if unlock is None:
            self.release()
            return False
        self._held.callback(unlock)
        return True

    def release(self) -> None:
        self._held.close()


class _Pause(NamedTuple):
    """The bytes to merge at a time, and the callback between strips, which returns False if the bucket changed."""

    strip_bytes: int
    rest: Callable[[], Operation[bool]]


class _Merged(NamedTuple):
    """The output of a merge, and when its first part was stored, if any was."""

    runs: list[RunEntry]
    stored_ms: int | None


def _rest(claim: _Claim, found: Bucket) -> Operation[bool]:
    """Release the bucket for a while; returns whether it is unchanged (M5)."""
    claim.release()
    yield RESTING
    if not (yield from claim.take()):
        return False
    now = claim.index.snapshot(found.start)
    versions = (found.data_version, found.layout_version)
    return now is not None and (now.data_version, now.layout_version) == versions


def _is_fresh(parts: StorageParts, stored_ms: int | None) -> bool:
    """Whether a master cannot collect the first stored part before a checkpoint names it (M5)."""
    config = parts.config
    return config.deletes or stored_ms is None or 2 * parts.ms_since(stored_ms) < config.garbage_grace_ms


def _publish(
    parts: StorageParts,
    task: TaskStorage,
    store: AttachedStore,
    found: Bucket,
    inputs: Sequence[RunEntry],
    merged: _Merged,
) -> bool:
    index = store.state.index
    if not _is_fresh(parts, merged.stored_ms) or not index.publish(
        found.start, found.data_version, found.layout_version, inputs, merged.runs
    ):
        return False
    if merged.stored_ms is not None:
        task.note_unnamed(merged.stored_ms)
    parts.retire(task, [run.stored for run in inputs if run.stored is not None])
    parts.drop_hot(task, [run.hot for run in inputs if run.hot is not None])
    released = sum(run.charge for run in inputs) - sum(run.charge for run in merged.runs)
    parts.backlog.release(released, task=task.task)
    return True


def _merge(
    parts: StorageParts,
    task: TaskStorage,
    store: AttachedStore,
    inputs: Sequence[RunEntry],
    *,
    drop_tombstones: bool,
    undo: Undo,
    pause: _Pause | None,
) -> Operation[_Merged | None]:
    """The merged runs as entries with a place each; `undo` gives the places back. None: the bucket is lost."""
    spec, config = store.spec, parts.config
    runs = parts.load_all(task, spec, inputs)
    weight, most = sum(run.nbytes for run in inputs), config.max_batch_bytes
    strips = _strip_count(parts, weight, None if pause is None else pause.strip_bytes)
    order = inputs[-1].order
    outputs: list[RunEntry] = []
    stored_ms: int | None = None
    for number, strip in enumerate(_strips(runs, strips)):
        if number and pause is not None and not (yield from pause.rest()):
            return None
        if merge_bytes(strip) > parts.scratch.working_bytes:
            return None  # one key is too large to merge (M6)
        with parts.scratch.hold(merge_bytes(strip), lambda: f"compaction of store {spec.name}"):
            merged = merge_runs(
                spec, strip, max_rows=config.max_run_rows, drop_tombstones=drop_tombstones, join=True
            )
        if weight > most and merged:
            stored_ms = parts.clock.monotonic_ms() if stored_ms is None else stored_ms
            refs = parts.store(task, spec, spec.segment_of(merged[0].bucket), merged)
            undo.push(partial(parts.retire, task, refs))
            outputs += [_entry(run, order, stored=ref) for run, ref in zip(merged, refs, strict=True)]
        else:
            for run in merged:
                hot = parts.base_runs.put(task.task, run)
                undo.push(partial(parts.drop_hot, task, [hot]))
                outputs.append(_entry(run, order, hot=hot))
        yield "merged"
    charges = shared_charge(spec.merge, sum(run.charge for run in inputs), [run.nbytes for run in outputs])
    charged = [replace(run, charge=charge) for run, charge in zip(outputs, charges, strict=True)]
    return _Merged(charged, stored_ms)


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
