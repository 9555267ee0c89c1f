"""Panes: the partial states windows are made of, in a fold store, read back together with what a batch adds.

    key = the record's key     ts = where the pane starts     seq = the first window that takes the records

`seq` is 0 for records all windows of the pane take. A record that came when some of its windows had closed is
folded under the start of the first that was open: a window reads only what lies under its own start or an earlier
one, so records that came too late for a window never change it, whenever and however often it is read.

`fold` can answer the merged state of all it touched. It captures the runs that were there before and inserts its
own, so the answer is the one content plus the other whatever maintenance does meanwhile; a sorted walk through
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
from tidegate.storage.index.entries import Bucket, RunEntry
from tidegate.storage.memory.scratch import Scratch
from tidegate.storage.runs.assembling import numbers_column, words
from tidegate.storage.runs.hashing import binary_parts
from tidegate.storage.runs.run import Run
from tidegate.windows.aggregates.folds import Folds
from tidegate.windows.events import Int64s
from tidegate.windows.keys.binary_columns import Int32s

_INT32 = pa.int32()


class PaneRows(NamedTuple):
    """Panes with their merged states; rows of one key need not stand together."""

    keys: pa.BinaryArray
    ts: Int64s
    seq: Int64s
    states: list[pa.Array]


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

    def fold(self, rows: pa.RecordBatch, *, answer: bool) -> list[PaneRows]:
        """Fold records in; with `answer`, the merged state of every pane that changed, by ascending bucket."""
        writer = self._runtime.writer()
        parts = writer.append(self._task, self._state, rows)
        if not parts:
            return []
        with _Held() as held:
            try:
                before = self._capture(parts, held) if answer else {}
                self.index.insert(parts)
            except BaseException:
                writer.undo(self._task, parts)
                raise
            return [self._merged(part.hot.run, before.get(part.bucket), held) for part in parts if answer]

    def drop_before(self, ts: int) -> int:
        """Drop whole time segments that end at or before `ts`; how many rows went."""
        starts = self.index.spec.segment_of(ts)
        if not self.index.bucket_count or self.index.all_buckets()[0] >= starts:
            return 0
        return self._runtime.writer().drop_segments(self._task, self._state, ts).rows

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def of_keys(self, keys: pa.BinaryArray, first: int, last: int) -> tuple[Int64s, PaneRows]:
        """All panes of these different keys that start from `first` to `last`; the number of each one's key."""
        reader = self._runtime.reader()
        plan = reader.plan(self._task, self._state, [RangeRequest(keys, Time(first, last))])
        with reader.load(plan) as loaded:
            table = loaded.to_table().combine_chunks()
        codes = pc.index_in(table["key"], keys).to_numpy().astype(np.int64)
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

    def _capture(self, parts: Sequence[AppendBatch], held: _Held) -> dict[int, Bucket]:
        """The buckets as they are without these parts, safe to read until `held` is closed."""
        wanted = {part.bucket for part in parts}
        buckets, lease = self.index.capture(
            min(wanted), max(wanted), lambda refs: self._runtime.pins.pin(self._task, refs)
        )
        if lease is not None:
            held.callback(lease.close)
        return {bucket.start: bucket for bucket in buckets if bucket.start in wanted}

    def _merged(self, run: Run, before: Bucket | None, held: _Held) -> PaneRows:
        """The run's rows, with what older runs have for the same identities merged in."""
        owners = np.repeat(np.arange(run.key_count, dtype=np.int32), np.diff(run.starts))
        keys = run.keys if run.key_count == run.row_count else run.keys.take(numbers_column(_INT32, owners))
        fresh = PaneRows(keys, run.ts, run.seq, run.rows.columns[2:])
        older, matched = [], []
        for entry in before.runs if before is not None else ():
            if entry.max_ts < run.min_ts or entry.min_ts > run.max_ts:
                continue
            other = self._load(entry, held)
            mine, theirs = _match(run, other)
            if len(mine):
                matched.append(mine)
                older.append(other.rows.take(numbers_column(_INT32, theirs)).columns[2:])
        if not matched:
            return fresh
        return self._merge(fresh, np.concatenate(matched), older)

    def _merge(self, fresh: PaneRows, matched: Int32s, older: Sequence[Sequence[pa.Array]]) -> PaneRows:
        """Rows that are new as they are, then the others, merged."""
        number = np.full(len(fresh.ts), -1, np.int32)
        number[matched] = 0
        changed = np.flatnonzero(number == 0).astype(np.int32)
        number[changed] = np.arange(len(changed), dtype=np.int32)
        untouched = np.flatnonzero(number < 0).astype(np.int32)
        chosen = numbers_column(_INT32, changed)
        pieces = [[column.take(chosen) for column in fresh.states], *older]
        states = [pa.concat_arrays(list(columns)) for columns in zip(*pieces, strict=True)]
        groups = np.concatenate([number[changed], number[matched]])
        states = self._folds.merge(states, groups, len(changed))
        if len(untouched):
            kept = numbers_column(_INT32, untouched)
            states = [
                pa.concat_arrays([column.take(kept), merged])
                for column, merged in zip(fresh.states, states, strict=True)
            ]
        order = np.concatenate([untouched, changed])
        keys = fresh.keys.take(numbers_column(_INT32, order))
        return PaneRows(keys, fresh.ts[order], fresh.seq[order], states)

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
