"""What session and sliding windows have in common: windows that lie where a key's own records lie.

An operator of either kind judges every record with the record's own stream time, keeps rows in one store with its
progress beside them, and emits on update or on close. This module owns clocks, verdicts, late records, the course of
time and the counters; a kind says what records do to its store and which windows end in a stretch of time.

Thread rule: one operator belongs to its task's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.durations import DurationLike, milliseconds
from tidegate.errors import InvalidError
from tidegate.storage import BucketIndex, BucketIndexState, StoreSpec, WorkerStorageRuntime
from tidegate.storage.runs.aggregates import Aggregate
from tidegate.windows.aggregates.folds import Aggregates, Folds
from tidegate.windows.events import NO_TIME, EventBatch, Int64s
from tidegate.windows.keys.binary_columns import Bytes, Int32s
from tidegate.windows.kinds import LATEST, Session, Sliding
from tidegate.windows.operators.late import FUTURE as FUTURE_REASON
from tidegate.windows.operators.late import LATE, LateSettings, LateTable
from tidegate.windows.operators.layout import StateLayout, grown, window_layout
from tidegate.windows.operators.neighbours import place
from tidegate.windows.operators.shapes import LateRows, Moment, Output, WindowRows, join_rows, no_rows
from tidegate.windows.operators.stream_time import FUTURE, GOOD, NEGATIVE, NO_KEY, Stamped, StreamClocks
from tidegate.windows.operators.windows import Compat, Emit, FutureGuard, WindowOperatorState


class Taken(NamedTuple):
    """What records do: windows to send on (on update), by how much each came too late, or 0, and rows to store."""

    pieces: list[WindowRows]
    late_by: Int64s
    rows: pa.RecordBatch | None


class ByKey(NamedTuple):
    """Rows of different keys, side by side by key: the keys, the key number of each row, the rows in order."""

    keys: pa.BinaryArray
    codes: Int32s
    rows: Int32s
    starts: Int32s


class KeyWindowOperator(ABC):
    """Aggregates of session or sliding windows, for every key of one task."""

    def __init__(
        self,
        runtime: WorkerStorageRuntime,
        task: str,
        name: str,
        kind: Session | Sliding,
        aggregates: Aggregates | Sequence[Aggregate],
        *,
        emit: Emit | str = Emit.UPDATE,
        partitions: Sequence[int] = (),
        values: pa.Schema | None = None,
        late: LateSettings | None = None,
        future: FutureGuard | None = None,
        idle_close: int | DurationLike | None = None,
        stamped: bool = False,
        compat: Compat | None = None,
        layout: StateLayout | None = None,
        heard: bool = True,
    ) -> None:
        """Attach the operator's stores to the task; the arguments are those of `WindowOperator`."""
        if compat not in (None, "kafka-streams"):
            raise InvalidError(f"compat is {compat!r}; only 'kafka-streams' is known")
        if late is not None and values is None:
            raise InvalidError("a late table needs the schema of the values: give `values`")
        if future is not None and future.policy == "late" and late is None:
            raise InvalidError("a future guard with policy 'late' needs a late table: give `late`")
        self.name = name
        self._runtime, self._task = runtime, task
        self._emit, self._future, self._is_stamped = Emit(emit), future, stamped
        self._is_heard = heard
        self._reach_ms = 0 if compat is not None and self._emit is Emit.CLOSE else 1  # see `WindowOperator`
        self._idle_ms = None if idle_close is None else milliseconds(idle_close)
        self._folds = Folds(aggregates)
        self._grace_ms, self._retention_ms = kind.grace_ms, kind.retention_ms
        layout = window_layout(kind) if layout is None else layout
        index = BucketIndex(grown(self._spec(name, layout), self._folds, layout, values))
        self._state = WindowOperatorState(index, StreamClocks(partitions), forgets=compat is not None)
        runtime.attach(task, self._state)
        self.late_table = (
            None if late is None or values is None else LateTable(runtime, task, name, values, late)
        )

    @property
    def states(self) -> Sequence[BucketIndexState]:
        return (self._state,) if self.late_table is None else (self._state, self.late_table.state)

    @property
    def clocks(self) -> StreamClocks:
        return self._state.clocks

    @property
    def counters(self) -> dict[str, int]:
        """What happened so far, by name; in the checkpoint."""
        return dict(self._state.progress.counters)

    @property
    def results(self) -> pa.Schema:
        return self._folds.results

    def process(self, batch: EventBatch, moment: Moment) -> Output:
        """Take the next records of the stream.

        When storage has no room for them (`OverloadError`) nothing was taken and no clock has moved: give the same
        batch again. After any other error the task is to be restored.
        """
        before, late = self.counters, None
        pieces: list[WindowRows] = []
        if len(batch):
            latest = LATEST if self._future is None else min(moment.now_ms + self._future.ahead_ms, LATEST)
            saved = self._state.encode_extra()
            try:
                stamped = self.clocks.stamp(batch, moment.now_ms, latest=latest, trusted=self._is_stamped)
                pieces, late = self._judged(batch, stamped, latest)
            except BaseException:
                self._state.roll_back(saved)
                raise
        pieces += self._advance(moment)
        return self._output(pieces, late, before)

    def tick(self, moment: Moment) -> Output:
        """A round without records: idle sources, a watermark or the end of the input may close windows."""
        before = self.counters
        return self._output(self._advance(moment), None, before)

    def windows(self, first: int = 0, last: int = LATEST) -> WindowRows:
        """The table as it is: every window kept that ends from `first` to `last`, ascending by (end, key)."""
        pieces = list(self._ending(max(first, self._oldest_end()), last))
        return join_rows(pieces) if pieces else no_rows(self._folds.results)

    def windows_of(self, keys: pa.BinaryArray, first: int = 0, last: int = LATEST) -> WindowRows:
        """The windows of these different keys that end from `first` to `last`; no other key's rows are read."""
        first = max(first, self._oldest_end())
        if first > last or not len(keys):
            return no_rows(self._folds.results)
        return self._of_keys(keys, first, last)

    # ── what a kind says ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def _sends_updates(self) -> bool:
        return self._is_heard and self._emit is Emit.UPDATE

    @abstractmethod
    def _spec(self, name: str, layout: StateLayout) -> StoreSpec:
        """The store of its rows."""

    @abstractmethod
    def _take(self, events: EventBatch, judged: Int64s) -> Taken:
        """Records with a key and a time, in order, and the stream time each is judged with."""

    @abstractmethod
    def _ending(self, first: int, last: int) -> Iterator[WindowRows]:
        """Every window that ends from `first` to `last`, both inclusive, ascending by (end, key), in pieces."""

    @abstractmethod
    def _of_keys(self, keys: pa.BinaryArray, first: int, last: int) -> WindowRows:
        """The windows of these keys that end from `first` to `last`, in no promised order."""

    @abstractmethod
    def _close_time(self, floor: int) -> int:
        """Windows that end before this are final."""

    @abstractmethod
    def _oldest_end(self) -> int:
        """The earliest end of a window that is still kept."""

    @abstractmethod
    def _oldest_row(self) -> int:
        """Rows of the store before this time are needed for nothing."""

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────

    def _partial(self, events: EventBatch, groups: Int32s, count: int) -> list[pa.Array]:
        """One state for each of `count` groups of records."""
        rows = pa.RecordBatch.from_pydict(self._folds.inputs(events))
        return [column for each in self._folds.stored for column in each.partial(rows, groups, count)]

    def _judged(
        self, batch: EventBatch, stamped: Stamped, latest: int
    ) -> tuple[list[WindowRows], LateRows | None]:
        """Take the records that have a key and a time; what to send on, and what was set aside."""
        is_wanted = stamped.verdicts == GOOD
        if self._future is not None and self._future.policy == "keep":
            is_wanted |= stamped.verdicts == FUTURE
        good = np.flatnonzero(is_wanted)
        late_by, taken = np.zeros(len(batch), np.int64), Taken([], np.empty(0, np.int64), None)
        if len(good):
            events = batch if len(good) == len(batch) else batch.take(good)
            taken = self._take(events, stamped.judged[good])
            late_by[good] = taken.late_by
        self._count(batch, stamped.verdicts, len(good), late_by)
        late = self._late_rows(batch, stamped, late_by, latest)
        self._keep(taken.rows, late)
        return taken.pieces, late

    def _keep(self, rows: pa.RecordBatch | None, late: LateRows | None) -> None:
        """Store rows and late rows, or neither."""
        table, parts, writer = self.late_table, [], self._runtime.writer()
        if table is not None and late is not None:
            parts = table.prepare(late, self._state.progress)
        if rows is not None:
            try:
                self._state.index.insert(writer.append(self._task, self._state, rows))
            except BaseException:
                writer.undo(self._task, parts)
                raise
        if table is not None:
            table.state.index.insert(parts)

    def _count(self, batch: EventBatch, verdicts: Bytes, good: int, late_by: Int64s) -> None:
        count = self._state.progress.count
        late = int(np.count_nonzero(late_by))
        count("records", len(batch))
        count("accepted", good - late)
        count("late_records", late)
        count("late_windows", late)
        if good < len(batch) or self._future is not None:
            by_verdict = np.bincount(verdicts, minlength=4)
            count("no_key", by_verdict[NO_KEY])
            count("negative_time", by_verdict[NEGATIVE])
            count("future", by_verdict[FUTURE])

    def _late_rows(
        self, batch: EventBatch, stamped: Stamped, late_by: Int64s, latest: int
    ) -> LateRows | None:
        """Records that came too late, and those from too far ahead."""
        is_late = late_by > 0
        is_ahead = np.zeros(len(batch), np.bool_)
        if self._future is not None and self._future.policy == "late":
            is_ahead = stamped.verdicts == FUTURE
        rows = np.flatnonzero(is_late | is_ahead)
        if not len(rows):
            return None
        ahead, events = is_ahead[rows], batch.take(rows)
        how_late = np.where(ahead, events.ts - latest, late_by[rows])
        starts = np.where(ahead, NO_TIME, events.ts)
        judged_events = EventBatch(
            events.key, events.ts, events.offset, events.partition, stamped.judged[rows], events.values
        )
        reasons = pa.array(np.where(ahead, FUTURE_REASON, LATE), pa.string())
        return LateRows(judged_events, starts, how_late, reasons)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _advance(self, moment: Moment) -> list[WindowRows]:
        """Let time pass as the moment says, emit what that makes final, drop what is no longer kept."""
        clocks, progress = self.clocks, self._state.progress
        if self._idle_ms is not None:
            clocks.advance_idle(moment.now_ms, self._idle_ms)
        if moment.watermark is not None:
            clocks.raise_floor(moment.watermark)
        if moment.closing:
            clocks.raise_floor(LATEST)
        floor = clocks.floor
        if floor == NO_TIME:
            return []
        close = LATEST if floor == LATEST else self._close_time(floor)
        pieces: list[WindowRows] = []
        if close > progress.closed:
            if self._is_heard and self._emit is Emit.CLOSE:
                last = LATEST if close == LATEST else close - 1
                pieces = list(self._ending(max(0, progress.closed), last))
            progress.closed = close
        if floor < LATEST:
            self._drop_before(self._oldest_row())
            if self.late_table is not None:
                self.late_table.expire(floor, progress)
        return pieces

    def _drop_before(self, ts: int) -> None:
        """Drop whole time segments that end at or before `ts`."""
        index = self._state.index
        if index.bucket_count and index.all_buckets()[0] < index.spec.segment_of(ts):
            self._runtime.writer().drop_segments(self._task, self._state, ts)

    def _output(self, pieces: Sequence[WindowRows], late: LateRows | None, before: dict[str, int]) -> Output:
        rows = join_rows(pieces) if pieces else no_rows(self._folds.results)
        self._state.progress.count("emitted", len(rows))
        if self._runtime.writer().is_over_limit(self._task):
            self._runtime.writer().relieve(self._task)
        counters = {
            name: number - before.get(name, 0)
            for name, number in self._state.progress.counters.items()
            if number != before.get(name, 0)
        }
        return Output(rows, late, counters)


def by_key(keys: pa.BinaryArray) -> ByKey:
    """Rows put side by side by key, each key's in the order they came."""
    encoded = keys.dictionary_encode()
    codes = encoded.indices.to_numpy().astype(np.int32, copy=False)
    return ByKey(encoded.dictionary, codes, *place(codes, len(encoded.dictionary)))
