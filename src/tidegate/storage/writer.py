"""The write path: build runs from rows, charge them to the budgets, and return them for the operator's index.

`append` does not change an index. It builds the runs, acquires their bytes from the backlog (the caller waits here when
consumers are behind), evicts the coldest keys if the write buffer would exceed its soft max, reserves the runs' bytes
in the pool, and returns an `AppendBatch` for each; `index.insert` makes them visible. If the backlog is full, hot runs
are merged first.

A1  a refused append changes nothing: budgets are released, no row number is used, and evicted keys have only moved to
    the backend. So runs are built before the backlog is acquired: only then is their size known.

Thread rule: one appending thread for each task; the rest from any thread. No lock is held while waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError, OverloadError
from tidegate.kernels.run_merge import match_runs
from tidegate.storage.index import AppendBatch, BucketIndexState, Pruned, RunEntry
from tidegate.storage.parts import AttachedStore, StorageParts, TaskStorage
from tidegate.storage.runs.build import FoldedRows, SortedRows, build_runs, build_sorted_runs
from tidegate.storage.runs.columns import (
    Int32s,
    binary_parts,
    gather,
    largest_window,
    merge_need,
    picked_need,
    words,
)
from tidegate.storage.runs.run import Int64s, Run
from tidegate.storage.scratch import Scratch
from tidegate.storage.spec import Merge


class StorageWriter:
    """The operators' write interface; cheap to create, without state of its own."""

    def __init__(
        self, parts: StorageParts, relieve: Callable[[str, int], int], reclaim: Callable[[str], bool]
    ) -> None:
        self._parts = parts
        self._relieve = relieve
        self._reclaim = reclaim

    def append(
        self, task: str, state: BucketIndexState, rows: pa.RecordBatch, *, timeout_ms: int | None = None
    ) -> list[AppendBatch]:
        """Accept rows, waiting for backlog; returns the runs to insert into `state.index`, by ascending bucket.

        Columns: `key`, `ts`, and by kind `seq`, `deleted`, payload or inputs. Raises `OverloadError` if the backlog
        stays full for `timeout_ms` (default: the configured timeout); then nothing was accepted.
        """
        store = self._store(task, state)
        if rows.num_rows == 0:
            return []
        runs = self._build(store, rows)
        return self.accept(store, runs, rows.num_rows, timeout_ms=timeout_ms)

    def append_merged(
        self, task: str, state: BucketIndexState, rows: pa.RecordBatch
    ) -> tuple[list[AppendBatch], MergedRows]:
        """Append at least one row to a fold store; also returns every changed row with its merged state.

        The older runs are captured, so the states are correct under concurrent maintenance; a sorted walk through each
        of them finds the rows with the same identity (`kernels/run_merge.py`), and only those are merged. Raises
        `OverloadError` without memory for the merge; then nothing was accepted.
        """
        store = self._store(task, state)
        whole: list[FoldedRows] = []
        runs = self._build(store, rows, whole)
        batches = self.accept(store, runs, rows.num_rows)
        try:
            with _Before(store) as before:
                return batches, before.merge(batches, whole[0] if len(whole) == 1 else None)
        except BaseException:
            self.undo(task, batches)
            raise

    def append_sorted(
        self, task: str, state: BucketIndexState, rows: SortedRows, *, timeout_ms: int | None = None
    ) -> list[AppendBatch]:
        """`append` to a `last` store for rows that ascend by (hash of the key, key, ts)."""
        store, config, count = self._store(task, state), self._parts.config, len(rows.order)
        step = max(1, count * config.max_batch_bytes // max(rows.nbytes, config.max_batch_bytes))
        runs: list[Run] = []
        for start in range(0, max(count, 1), step):
            piece = rows if step >= count else rows.slice(start, start + step)
            runs += build_sorted_runs(store.spec, piece, max_rows=config.max_run_rows)
        return self.accept(store, runs, count, timeout_ms=timeout_ms) if runs else []

    def accept(
        self,
        store: AttachedStore,
        runs: Sequence[Run],
        numbers: int,
        *,
        timeout_ms: int | None = None,
        forced: bool = False,
    ) -> list[AppendBatch]:
        """Charge and cache built runs; `forced` for state blobs, whose flush must never wait."""
        parts, task = self._parts, store.task.task
        charge = sum(run.nbytes for run in runs)
        try:
            batches = self._take_in(store.task, runs, charge, timeout_ms, forced=forced)
        except OverloadError as error:
            parts.stats.overloaded(task, error.reason)
            raise
        if store.spec.merge is Merge.APPEND:
            store.next_seq += numbers
        parts.stats.count(task, appended_rows=numbers, appended_bytes=charge)
        return batches

    def undo(self, task: str, batches: Iterable[AppendBatch]) -> None:
        """Release what `append` accepted and the operator did not insert."""
        storage = self._parts.tasks[task]
        batches = list(batches)
        storage.drop_hot([each.hot for each in batches])
        self._parts.backlog.release(sum(each.charge for each in batches), task=task)

    # -- progress --------------------------------------------------------------------------------

    def prune(self, task: str, state: BucketIndexState, cutoff: int) -> Pruned:
        """Drop every run before `cutoff`: remove it from the index, retire its pack slot, free memory and backlog."""
        return self._gone(task, state.index.prune(cutoff))

    def drop_segments(self, task: str, state: BucketIndexState, before_ts: int) -> Pruned:
        """Drop whole time segments that end at or before `before_ts`."""
        return self._gone(task, state.index.drop_segments(before_ts))

    def nothing_left_to_prune(self, task: str) -> None:
        """Declare that nothing more can be pruned, so that a full backlog raises an error instead of waiting."""
        self._parts.backlog.nothing_left_to_prune(task)

    # -- memory ----------------------------------------------------------------------------------

    def is_over_limit(self, task: str) -> bool:
        """Whether the task's write buffer is above its soft max; exactly the soft max is not."""
        return self._parts.write_buffer.is_over_limit(task)

    def relieve(self, task: str) -> int:
        """Bring the task's memory below its limits on this thread; returns the bytes freed."""
        self._parts.tasks[task].check()
        return self._relieve(task, 0)

    # -- inside ----------------------------------------------------------------------------------

    def _store(self, task: str, state: BucketIndexState) -> AttachedStore:
        storage = self._parts.tasks[task]
        storage.check()
        return storage.store_of(state)

    def _build(
        self, store: AttachedStore, rows: pa.RecordBatch, whole: list[FoldedRows] | None = None
    ) -> list[Run]:
        config = self._parts.config
        largest = config.max_batch_bytes
        seq = store.next_seq if store.spec.merge is Merge.APPEND else None
        # The buffers' size is quick to compute and an upper bound of the rows': usually that suffices.
        if rows.get_total_buffer_size() <= largest or (nbytes := rows.nbytes) <= largest:
            return build_runs(store.spec, rows, first_seq=seq, max_rows=config.max_run_rows, whole=whole)
        if rows.num_rows == 1 and nbytes > config.largest_append_bytes:
            raise InvalidError(
                f"store {store.spec.name}: one row of {nbytes} bytes is more than the "
                f"{config.largest_append_bytes} bytes between worker_total_bytes and memory_ceiling_bytes"
            )
        step = max(1, rows.num_rows * largest // nbytes)
        runs: list[Run] = []
        for start in range(0, rows.num_rows, step):
            piece = rows.slice(start, step)
            first = None if seq is None else seq + start
            runs += build_runs(store.spec, piece, first_seq=first, max_rows=config.max_run_rows, whole=whole)
        return runs

    def _take_in(
        self, storage: TaskStorage, runs: Sequence[Run], charge: int, timeout_ms: int | None, *, forced: bool
    ) -> list[AppendBatch]:
        """Acquire backlog and pool memory for all of the runs, or for none."""
        parts, task = self._parts, storage.task
        if forced:
            parts.backlog.force(charge, task=task)
        else:
            parts.backlog.acquire(charge, timeout_ms, task=task, make_room=partial(self._reclaim, task))
        try:
            if not forced and parts.write_buffer.is_over_limit(task, charge):
                for run in runs:  # do not evict the keys being written
                    storage.key_lru.touch(run.hashes)
                self._relieve(task, charge)
            hot = parts.write_buffer.put_all(task, runs, forced=forced)
            return [
                AppendBatch(run.bucket, copy, run.row_count, run.nbytes, run.nbytes, run.min_ts, run.max_ts)
                for run, copy in zip(runs, hot, strict=True)
            ]
        except BaseException:
            parts.backlog.release(charge, task=task)
            raise

    def _gone(self, task: str, pruned: Pruned) -> Pruned:
        storage = self._parts.tasks[task]
        storage.retire(pruned.stored)
        storage.drop_hot(pruned.hot)
        self._parts.backlog.release(pruned.charge, task=task)
        self._parts.stats.count(task, pruned_rows=pruned.rows, pruned_bytes=pruned.charge)
        return pruned


# -- what an append to a fold store became ---------------------------------------------------------


class MergedRows(NamedTuple):
    """The folded rows of a batch; at some rows the states merged with the store's earlier ones."""

    rows: FoldedRows
    places: Int32s
    merged: list[pa.Array]


class TouchedRows(NamedTuple):
    """The rows a batch was folded into: distinct keys, the number of rows of each, and the rows, key by key."""

    keys: pa.BinaryArray
    counts: Int32s
    ts: Int64s
    seq: Int64s


def touched_rows(parts: Sequence[AppendBatch]) -> list[TouchedRows]:
    """The identities of the rows of an append, by ascending bucket."""
    runs = [part.hot.run for part in parts]
    return [TouchedRows(run.keys, np.diff(run.starts), run.ts, run.seq) for run in runs]


class _Before(ExitStack):
    """The older runs of a store: a lease on packs, and a scratch permit once a stored run is read."""

    def __init__(self, store: AttachedStore) -> None:
        super().__init__()
        self._task, self._index, self._spec = store.task, store.state.index, store.spec
        self._parts = store.task.parts
        self._has_permit = False

    def merge(self, parts: Sequence[AppendBatch], whole: FoldedRows | None) -> MergedRows:
        """Merge the rows of these parts with older states; `whole` has all rows, None if the batch was split."""
        before = self._capture(parts)
        runs = [part.hot.run for part in parts]
        others = [list(before.get(run.bucket, ())) for run in runs]
        if whole is None:
            for at, run in enumerate(runs):  # pieces of a split batch may share identities
                others[at] += [each for each in runs[:at] if each.bucket == run.bucket]
        return self._changed(_joined(runs) if whole is None else whole, runs, others)

    def _capture(self, parts: Sequence[AppendBatch]) -> dict[int, list[RunEntry | Run]]:
        """The buckets' runs without these parts, safe to read until this object is closed."""
        wanted = {part.bucket for part in parts}
        buckets, lease = self._index.capture(
            min(wanted), max(wanted), lambda refs: self._parts.pins.pin(self._task.task, refs)
        )
        if lease is not None:
            self.callback(lease.close)
        return {bucket.start: list(bucket.runs) for bucket in buckets if bucket.start in wanted}

    def _changed(
        self, rows: FoldedRows, runs: Sequence[Run], others: Sequence[Sequence[RunEntry | Run]]
    ) -> MergedRows:
        """Merge with the older runs' states of the same identities; `rows` are those of all runs."""
        matched, chosen, first = [], list[tuple[Run, Int32s]](), 0
        for run, older_runs in zip(runs, others, strict=True):
            for entry in older_runs:
                if entry.max_ts < run.min_ts or entry.min_ts > run.max_ts:
                    continue
                other = entry if isinstance(entry, Run) else self._load(entry)
                mine, theirs = _match(run, other)
                if len(mine):
                    matched.append(mine + np.int32(first))
                    chosen.append((other, theirs))
            first += run.row_count
        if not matched:
            return MergedRows(rows, np.empty(0, np.int32), [])
        met = np.concatenate(matched)
        number = np.full(first, -1, np.int32)
        number[met] = 0
        places = np.flatnonzero(number == 0).astype(np.int32)
        number[places] = np.arange(len(places), dtype=np.int32)
        need = sum(picked_need(*each) for each in chosen) + merge_need(rows.states)
        with self._parts.scratch.hold(need, lambda: f"operator {self._spec.name}: " + largest_window(chosen)):
            return MergedRows(rows, places, self._merged(rows, chosen, places, number[met]))

    def _merged(
        self, rows: FoldedRows, chosen: Sequence[tuple[Run, Int32s]], places: Int32s, met: Int32s
    ) -> list[pa.Array]:
        """Merge the states at `places` with the chosen older ones, which belong to the rows `met`."""
        older = [[gather(column, theirs) for column in run.rows.columns[2:]] for run, theirs in chosen]
        # oldest first: a user-defined aggregate may depend on the order of records
        pieces = [*older, [gather(column, places) for column in rows.states]]
        states = [pa.concat_arrays(list(columns)) for columns in zip(*pieces, strict=True)]
        groups = np.concatenate([met, np.arange(len(places), dtype=np.int32)])
        return self._spec.fold(states, groups, len(places))

    def _load(self, entry: RunEntry) -> Run:
        if not entry.is_hot and not self._has_permit:
            self.callback(self._parts.scratch.permit(Scratch.READER).close)
            self._has_permit = True
        return self._task.load_all(self._spec, [entry])[0]


def _joined(runs: Sequence[Run]) -> FoldedRows:
    """Concatenate the rows of the runs."""
    columns = [
        pa.concat_arrays([run.rows.column(at) for run in runs]) for at in range(runs[0].rows.num_columns)
    ]
    keys = pa.concat_arrays([run.row_keys().dictionary_decode() for run in runs])
    return FoldedRows(keys, words(columns[0]), words(columns[1]), columns[2:])


def _match(run: Run, other: Run) -> tuple[Int32s, Int32s]:
    """The pairs of rows of the two runs with equal identity."""
    room = min(run.row_count, other.row_count)
    mine, theirs = np.empty(room, np.int32), np.empty(room, np.int32)
    found = match_runs(
        run.hashes, *binary_parts(run.keys), run.starts, run.ts, run.seq,
        other.hashes, *binary_parts(other.keys), other.starts, other.ts, other.seq,
        mine, theirs,
    )  # fmt: skip
    return mine[:found], theirs[:found]
