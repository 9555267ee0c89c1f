"""Append to a fold store and answer what the rows became: the merged state of everything the batch touched.

The runs that were there before are captured, so the answer is the one content plus the other whatever maintenance does
meanwhile; a sorted walk through each older run finds the few rows that matter (`kernels/run_merge.py`), and only
those are merged. The caller inserts the new runs. When there is no memory to merge in (`OverloadError`), nothing was
taken.

Thread rule: one appending thread for each task.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.errors import InternalError
from tidegate.kernels.run_merge import match_runs
from tidegate.storage.context import RuntimeContext
from tidegate.storage.index.entries import AppendBatch, RunEntry
from tidegate.storage.index.state import BucketIndexState
from tidegate.storage.memory.scratch import Scratch
from tidegate.storage.runs.assembling import gather, merge_need, merge_needs, picked_need, window_words, words
from tidegate.storage.runs.building import FoldedRows
from tidegate.storage.runs.hashing import Int32s, binary_parts
from tidegate.storage.runs.run import Int64s, Run
from tidegate.storage.runtime import WorkerStorageRuntime
from tidegate.storage.spec import StoreSpec


class MergedRows(NamedTuple):
    """What a batch folded into a store, and at some places the states together with what was there before."""

    rows: FoldedRows
    places: Int32s
    merged: list[pa.Array]


class TouchedRows(NamedTuple):
    """Rows that a batch was folded into: different keys, how many rows each has, and these, key by key."""

    keys: pa.BinaryArray
    counts: Int32s
    ts: Int64s
    seq: Int64s


def touched_rows(parts: Sequence[AppendBatch]) -> list[TouchedRows]:
    """The identities of the rows of an append, by ascending bucket."""
    runs = [part.hot.run for part in parts]
    return [TouchedRows(run.keys, np.diff(run.starts), run.ts, run.seq) for run in runs]


def append_merged(
    context: RuntimeContext, state: BucketIndexState, rows: pa.RecordBatch
) -> tuple[list[AppendBatch], MergedRows]:
    """Append at least one row to a fold store; also every row that changed, with all it holds by now."""
    writer = context.writer()
    parts, whole = writer.append_folded(context.task, state, rows)
    try:
        with _Before(context._storage, context.task, state) as before:
            return parts, before.merge(parts, whole)
    except BaseException:
        writer.undo(context.task, parts)
        raise


class _Before(ExitStack):
    """The runs of a store as they are without a batch: a lease on packs, and a permit to read them once one is read."""

    def __init__(self, storage: WorkerStorageRuntime, task: str, state: BucketIndexState) -> None:
        super().__init__()
        self._storage, self._task, self._index = storage, task, state.index
        self._has_permit = False

    @property
    def _spec(self) -> StoreSpec:
        return self._index.spec

    def merge(self, parts: Sequence[AppendBatch], whole: FoldedRows | None) -> MergedRows:
        """What the rows of these parts became; `whole` are all of them in one piece, None: the batch was cut."""
        before = self._capture(parts)
        runs = [part.hot.run for part in parts]
        others = [list(before.get(run.bucket, ())) for run in runs]
        if whole is None:
            for at, run in enumerate(runs):  # pieces of a batch that was cut may have rows in common
                others[at] += [each for each in runs[:at] if each.bucket == run.bucket]
        return self._changed(_joined(runs) if whole is None else whole, runs, others)

    def _capture(self, parts: Sequence[AppendBatch]) -> dict[int, list[RunEntry | Run]]:
        """The runs of the buckets as they are without these parts, safe to read until this is closed."""
        wanted = {part.bucket for part in parts}
        buckets, lease = self._index.capture(
            min(wanted), max(wanted), lambda refs: self._storage.pins.pin(self._task, refs)
        )
        if lease is not None:
            self.callback(lease.close)
        return {bucket.start: list(bucket.runs) for bucket in buckets if bucket.start in wanted}

    def _changed(
        self, rows: FoldedRows, runs: Sequence[Run], others: Sequence[Sequence[RunEntry | Run]]
    ) -> MergedRows:
        """Merge what older runs, some for each run, have for the same identities; `rows` are those of all runs."""
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
        with self._storage.scratch.hold(need, lambda: _largest(self._spec.name, chosen)):
            return MergedRows(rows, places, self._merged(rows, chosen, places, number[met]))

    def _merged(
        self, rows: FoldedRows, chosen: Sequence[tuple[Run, Int32s]], places: Int32s, met: Int32s
    ) -> list[pa.Array]:
        """The states at `places` together with the chosen older ones, which belong to the places `met`."""
        older = [[gather(column, theirs) for column in run.rows.columns[2:]] for run, theirs in chosen]
        # the oldest first: a user's own aggregate may depend on the order of records
        pieces = [*older, [gather(column, places) for column in rows.states]]
        states = [pa.concat_arrays(list(columns)) for columns in zip(*pieces, strict=True)]
        groups = np.concatenate([met, np.arange(len(places), dtype=np.int32)])
        at, merged = 0, []
        for each in self._spec.aggregates:
            width = len(each.state)
            merged += each.merge(states[at : at + width], groups, len(places))
            at += width
        return merged

    def _load(self, entry: RunEntry) -> Run:
        if entry.hot is not None and entry.is_hot:
            return entry.hot.run
        if entry.stored is None:
            raise InternalError(f"store {self._spec.name}, bucket {entry.bucket}: a run without any place")
        if not self._has_permit:
            self.callback(self._storage.scratch.permit(Scratch.READER).close)
            self._has_permit = True
        return self._storage.packs.load(self._task, self._spec, entry.stored)


def _largest(store: str, chosen: Sequence[tuple[Run, Int32s]]) -> str:
    """The row that has most of what is to be merged."""
    run, rows = max(chosen, key=lambda each: picked_need(*each))
    row = int(rows[np.argmax(merge_needs(run.rows.columns)[rows])])
    line = int(np.searchsorted(run.starts, row, side="right")) - 1
    return f"operator {store}: " + window_words(run.keys[line].as_py(), int(run.ts[row]))


def _joined(runs: Sequence[Run]) -> FoldedRows:
    """What runs hold, one after the other."""
    columns = [
        pa.concat_arrays([run.rows.column(at) for run in runs]) for at in range(runs[0].rows.num_columns)
    ]
    keys = pa.concat_arrays([run.row_keys().dictionary_decode() for run in runs])
    return FoldedRows(keys, words(columns[0]), words(columns[1]), columns[2:])


def _match(run: Run, other: Run) -> tuple[Int32s, Int32s]:
    """Rows of the two with one identity, pair by pair."""
    room = min(run.row_count, other.row_count)
    mine, theirs = np.empty(room, np.int32), np.empty(room, np.int32)
    found = match_runs(
        run.hashes, *binary_parts(run.keys), run.starts, run.ts, run.seq,
        other.hashes, *binary_parts(other.keys), other.starts, other.ts, other.seq,
        mine, theirs,
    )  # fmt: skip
    return mine[:found], theirs[:found]
