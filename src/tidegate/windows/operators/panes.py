"""Panes: the partial states windows are made of, in a fold store, read back together with what a batch adds.

    key = the record's key     ts = where the pane starts     seq = the first window that takes the records

`seq` is 0 for records all windows of the pane take. A record that came when some of its windows had closed is
folded under the start of the first that was open: a window reads only what lies under its own start or an earlier
one, so records that came too late for a window never change it, whenever and however often it is read.

`fold_and_merge` answers the merged state of all it touched. It captures the runs that were there before and inserts
its own, so the answer is the one content plus the other whatever maintenance does meanwhile; a sorted walk through
each older run finds the few rows that matter (`kernels/run_matching.py`), and only those are merged.

Thread rule: the operator's thread folds; any thread reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InternalError
from tidegate.kernels.run_matching import match_runs
from tidegate.storage import (
    AppendBatch,
    BucketIndex,
    BucketIndexState,
    Merge,
    RangeRequest,
    StoreSpec,
    Time,
    WorkerStorageRuntime,
)
from tidegate.storage.index.entries import RunEntry
from tidegate.storage.memory.scratch import Scratch
from tidegate.storage.runs.assembling import gather, words
from tidegate.storage.runs.hashing import binary_parts
from tidegate.storage.runs.run import Run
from tidegate.windows.aggregates.folds import Folds
from tidegate.windows.events import Int64s
from tidegate.windows.keys.binary_columns import Int32s


class PaneRows(NamedTuple):
    """Panes with their merged states; rows of one key need not stand together."""

    keys: pa.BinaryArray
    ts: Int64s
    seq: Int64s
    states: list[pa.Array]


class Changed(NamedTuple):
    """What a batch folded into panes, and at some places what these hold together with what was there before."""

    rows: PaneRows
    places: Int32s
    merged: list[pa.Array]


class Touched(NamedTuple):
    """Panes that a batch was folded into: different keys, how many panes each has, and these, key by key."""

    keys: pa.BinaryArray
    counts: Int32s
    ts: Int64s
    seq: Int64s


def pane_spec(name: str, folds: Folds, bucket_ms: int, segment_ms: int) -> StoreSpec:
    """The store of one operator's panes."""
    return StoreSpec(name, Merge.FOLD, aggregates=folds.stored, bucket_ms=bucket_ms, segment_ms=segment_ms)


class Panes:
    """Reading and writing one store of panes; its state is attached already."""

    def __init__(
        self, runtime: WorkerStorageRuntime, task: str, state: BucketIndexState, folds: Folds
    ) -> None:
        self._runtime = runtime
        self._task = task
        self._state = state
        self._folds = folds

    @property
    def index(self) -> BucketIndex:
        return self._state.index

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────

    def fold(self, rows: pa.RecordBatch) -> list[Touched]:
        """Fold records in; the panes they belong to, by ascending bucket."""
        writer = self._runtime.writer()
        parts = writer.append(self._task, self._state, rows)
        try:
            self.index.insert(parts)
        except BaseException:
            writer.undo(self._task, parts)
            raise
        runs = [part.hot.run for part in parts]
        return [Touched(run.keys, np.diff(run.starts), run.ts, run.seq) for run in runs]

    def fold_and_merge(self, rows: pa.RecordBatch) -> Changed:
        """Fold records in, at least one; every pane that changed, with all it holds by now."""
        writer = self._runtime.writer()
        parts, whole = writer.append_folded(self._task, self._state, rows)
        with _Held() as held:
            try:
                before = self._capture(parts, held)
                self.index.insert(parts)
            except BaseException:
                writer.undo(self._task, parts)
                raise
            runs = [part.hot.run for part in parts]
            others = [list(before.get(run.bucket, ())) for run in runs]
            if whole is not None:
                return self._changed(PaneRows(*whole), runs, others, held)
            for at, run in enumerate(runs):  # pieces of a batch that was cut may have panes in common
                others[at] += [each for each in runs[:at] if each.bucket == run.bucket]
            return self._changed(_joined(runs), runs, others, held)

    def drop_before(self, ts: int) -> int:
        """Drop whole time segments that end at or before `ts`; how many rows went."""
        starts = self.index.spec.segment_of(ts)
        if not self.index.bucket_count or self.index.all_buckets()[0] >= starts:
            return 0
        return self._runtime.writer().drop_segments(self._task, self._state, ts).rows

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def of_keys(self, keys: pa.BinaryArray, first: int, last: int) -> tuple[Int32s, PaneRows]:
        """All panes of these different keys that start from `first` to `last`; the number of each one's key."""
        reader = self._runtime.reader()
        plan = reader.plan(self._task, self._state, [RangeRequest(keys, Time(first, last))])
        with reader.load(plan) as loaded:
            table = loaded.to_table().combine_chunks()
        codes = pc.index_in(table["key"], keys).to_numpy().astype(np.int32, copy=False)
        columns = [column.combine_chunks() for column in table.columns[1:]]
        return codes, PaneRows(columns[0], words(columns[1]), words(columns[2]), columns[3:])

    def scan(self, first: int, last: int) -> Iterator[PaneRows]:
        """All panes of all keys that start from `first` to `last`, by ascending bucket."""
        with self._runtime.reader().scan(self._task, self._state, Time(first, last)) as scan:
            for batch in scan:
                keys, ts, seq, *states = batch.columns
                yield PaneRows(keys, words(ts), words(seq), states)

    def bucket_starts(self, first: int, last: int) -> list[int]:
        """Where the buckets start that may hold panes from `first` to `last`."""
        return [bucket.start for bucket in self.index.buckets(first, last)]

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _capture(self, parts: Sequence[AppendBatch], held: _Held) -> dict[int, list[RunEntry | Run]]:
        """The runs of the buckets as they are without these parts, safe to read until `held` is closed."""
        wanted = {part.bucket for part in parts}
        buckets, lease = self.index.capture(
            min(wanted), max(wanted), lambda refs: self._runtime.pins.pin(self._task, refs)
        )
        if lease is not None:
            held.callback(lease.close)
        return {bucket.start: list(bucket.runs) for bucket in buckets if bucket.start in wanted}

    def _changed(
        self, rows: PaneRows, runs: Sequence[Run], others: Sequence[Sequence[RunEntry | Run]], held: _Held
    ) -> Changed:
        """Merge what older runs, some for each run, have for the same panes; `rows` are those of all runs."""
        matched, older, first = [], [], 0
        for run, older_runs in zip(runs, others, strict=True):
            for entry in older_runs:
                if entry.max_ts < run.min_ts or entry.min_ts > run.max_ts:
                    continue
                other = entry if isinstance(entry, Run) else self._load(entry, held)
                mine, theirs = _match(run, other)
                if len(mine):
                    matched.append(mine + np.int32(first))
                    older.append([gather(column, theirs) for column in other.rows.columns[2:]])
            first += run.row_count
        if not matched:
            return Changed(rows, np.empty(0, np.int32), [])
        met = np.concatenate(matched)
        number = np.full(first, -1, np.int32)
        number[met] = 0
        places = np.flatnonzero(number == 0).astype(np.int32)
        number[places] = np.arange(len(places), dtype=np.int32)
        # the oldest first: a user's own aggregate may depend on the order of records
        pieces = [*older, [gather(column, places) for column in rows.states]]
        states = [pa.concat_arrays(list(columns)) for columns in zip(*pieces, strict=True)]
        groups = np.concatenate([number[met], np.arange(len(places), dtype=np.int32)])
        return Changed(rows, places, self._folds.merge(states, groups, len(places)))

    def _load(self, entry: RunEntry, held: _Held) -> Run:
        if entry.hot is not None and entry.is_hot:
            return entry.hot.run
        if entry.stored is None:
            raise InternalError(
                f"store {self.index.spec.name}, bucket {entry.bucket}: a run without any place"
            )
        if not held.has_permit:
            held.callback(self._runtime.scratch.permit(Scratch.READER).close)
            held.has_permit = True
        return self._runtime.packs.load(self._task, self.index.spec, entry.stored)


class _Held(ExitStack):
    """What one reading holds: a lease on packs, and a place to read them once it needs one."""

    has_permit = False


def _joined(runs: Sequence[Run]) -> PaneRows:
    """What runs hold, one after the other."""
    columns = [
        pa.concat_arrays([run.rows.column(at) for run in runs]) for at in range(runs[0].rows.num_columns)
    ]
    keys = pa.concat_arrays([run.row_keys().dictionary_decode() for run in runs])
    return PaneRows(keys, words(columns[0]), words(columns[1]), columns[2:])


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
