"""Tumbling, hopping and unlimited windows: records in, results of windows out.

For every batch: the clocks run through it record by record; each record is judged with its own stream time and
folded into one pane; what changed, or what closed, is sent on; what fell out of retention is dropped.

    emit="update"   one row for each window the batch changed, with all the window holds by now
    emit="close"    one row for each window when it is final, ascending by (end, key) over the whole stream

Nothing that is sent on close, set aside as late or left in the table depends on where batches were cut: a record
is judged by times that belong to the record, panes remember from which window on a record counts (`panes`), and
windows are emitted for good in the order of their ends. Only what an update shows on the way does.

A window that closed is emitted before retention can drop it, however far stream time leaps.

Thread rule: one operator belongs to its task's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.durations import DurationLike, duration_ms, milliseconds
from tidegate.errors import InvalidError
from tidegate.storage import BucketIndex, BucketIndexState, WorkerStorageRuntime
from tidegate.storage.runs.aggregates import Aggregate
from tidegate.storage.runs.assembling import int64_column
from tidegate.windows.aggregates.folds import Aggregates, Folds
from tidegate.windows.events import NO_TIME, EventBatch
from tidegate.windows.kinds import LATEST, Hopping, Tumbling, Unlimited
from tidegate.windows.operators.assignment import Assigned, assign, assign_unlimited, late_lines
from tidegate.windows.operators.emission import Emission
from tidegate.windows.operators.late import FUTURE as FUTURE_REASON
from tidegate.windows.operators.late import LATE, LateSettings, LateTable
from tidegate.windows.operators.layout import StateLayout, grown, window_layout
from tidegate.windows.operators.panes import Changed, Panes, Touched, pane_spec
from tidegate.windows.operators.progress import Progress, decode, encode
from tidegate.windows.operators.shapes import LateRows, Moment, Output, WindowRows, join_rows, no_rows
from tidegate.windows.operators.stream_time import FUTURE, GOOD, NEGATIVE, NO_KEY, Stamped, StreamClocks

Compat = Literal["kafka-streams"]


class Emit(StrEnum):
    """When a window's result is sent on."""

    UPDATE = "update"
    CLOSE = "close"


@dataclass(frozen=True, slots=True, init=False)
class FutureGuard:
    """What happens to records whose time lies further ahead of the round's than `ahead`: they move no clock.

    `keep` takes them into their windows all the same, `late` sets them aside in the late table, `drop` counts them.
    """

    ahead_ms: int
    policy: str

    def __init__(self, ahead: DurationLike = "5m", policy: Literal["keep", "late", "drop"] = "late") -> None:
        if policy not in ("keep", "late", "drop"):
            raise InvalidError(f"a future guard's policy is 'keep', 'late' or 'drop', not {policy!r}")
        object.__setattr__(self, "ahead_ms", duration_ms(ahead))
        object.__setattr__(self, "policy", policy)


class WindowOperatorState:
    """The panes' index, with the operator's progress in the checkpoint beside it."""

    def __init__(self, index: BucketIndex, clocks: StreamClocks, *, forgets: bool) -> None:
        self._index = index
        self._forgets = forgets
        self.clocks = clocks
        self.progress = Progress()

    @property
    def index(self) -> BucketIndex:
        return self._index

    def encode_extra(self) -> bytes:
        self.progress.clocks = self.clocks.saved()
        return encode(self.progress)

    def restore_extra(self, data: bytes) -> None:
        self.roll_back(data)
        if self._forgets or not data:
            self.clocks.forget()

    def roll_back(self, data: bytes) -> None:
        """As it was when `encode_extra` answered this."""
        self.progress = decode(data)
        self.clocks.restore(self.progress.clocks)


class WindowOperator:
    """Aggregates of windows of one size, for every key of one task."""

    def __init__(
        self,
        runtime: WorkerStorageRuntime,
        task: str,
        name: str,
        kind: Tumbling | Hopping | Unlimited,
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
        """Attach the operator's stores to the task.

        `partitions` are the source partitions to wait for from the start on. `late` keeps what came too late and
        needs `values`, the schema of the user's columns. `stamped`: stream times in the batches come from clocks
        before a shuffle and count. `compat="kafka-streams"` forgets clocks when restored, and on close windows can be
        read for a millisecond longer, as in its stores of that kind. `layout` is that of a store
        which was made for a shorter retention, or fewer aggregates. `heard=False`: nobody takes rows that are sent on,
        the windows are read where they are kept; so none are made, which is a third of the work.
        """
        if not isinstance(kind, Hopping | Unlimited):
            raise TypeError(f"{type(kind).__name__} windows have an operator of their own")
        if compat not in (None, "kafka-streams"):
            raise InvalidError(f"compat is {compat!r}; only 'kafka-streams' is known")
        self.name = name
        self._runtime, self._task, self._kind = runtime, task, kind
        self._emit, self._is_heard = Emit(emit), heard
        if self._emit is Emit.CLOSE and isinstance(kind, Unlimited):
            raise InvalidError("an unlimited window never closes: emit on update")
        if late is not None and values is None:
            raise InvalidError("a late table needs the schema of the values: give `values`")
        if future is not None and future.policy == "late" and late is None:
            raise InvalidError("a future guard with policy 'late' needs a late table: give `late`")
        self._future, self._is_stamped = future, stamped
        # Kafka Streams' time-ordered store, which it emits from on close, reads one millisecond further back.
        self._reach_ms = 0 if compat is not None and self._emit is Emit.CLOSE else 1
        self._idle_ms = None if idle_close is None else milliseconds(idle_close)
        self._folds = Folds(aggregates)
        layout = window_layout(kind) if layout is None else layout
        spec = pane_spec(name, self._folds, layout.bucket_ms, layout.segment_ms)
        index = BucketIndex(grown(spec, self._folds, layout, values))
        self._state = WindowOperatorState(index, StreamClocks(partitions), forgets=compat is not None)
        runtime.attach(task, self._state)
        self._panes = Panes(runtime, task, self._state, self._folds)
        self._emission = Emission(kind, self._folds, self._panes)
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
                assigned = self._assign(batch, stamped)
                self._count(batch, stamped, assigned)
                late = self._late_rows(batch, stamped, assigned, latest)
                changed = self._keep(batch, assigned, late)
            except BaseException:
                self._state.roll_back(saved)
                raise
            pieces = self._updates(changed)
        pieces += self._advance(moment)
        return self._output(pieces, late, before)

    def tick(self, moment: Moment) -> Output:
        """A round without records: idle sources, a watermark or the end of the input may close windows."""
        before = self.counters
        return self._output(self._advance(moment), None, before)

    def windows(self, first: int = 0, last: int = LATEST) -> WindowRows:
        """The table as it is: every window kept that starts from `first` to `last`, ascending by (end, key)."""
        first = max(first, self._oldest())
        pieces = list(self._emission.between(first, last)) if first <= last else []
        return join_rows(pieces) if pieces else no_rows(self._folds.results)

    def windows_of(self, keys: pa.BinaryArray, first: int = 0, last: int = LATEST) -> WindowRows:
        """The windows of these different keys that start from `first` to `last`; no other key's rows are read."""
        first = max(first, self._oldest())
        if first > last or not len(keys):
            return no_rows(self._folds.results)
        return self._emission.of_keys(keys, first, last)

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────

    def _assign(self, batch: EventBatch, stamped: Stamped) -> Assigned:
        also = FUTURE if self._future is not None and self._future.policy == "keep" else GOOD
        ts = np.ascontiguousarray(batch.ts)
        if isinstance(self._kind, Unlimited):
            return assign_unlimited(self._kind, ts, stamped, also=also)
        return assign(self._kind, ts, stamped, also=also)

    def _keep(self, batch: EventBatch, assigned: Assigned, late: LateRows | None) -> Changed | list[Touched]:
        """Put records into panes and the late table, or neither; what they changed."""
        table, parts = self.late_table, []
        if table is not None and late is not None:
            parts = table.prepare(late, self._state.progress)
        try:
            changed = self._fold(batch, assigned) if assigned.accepted else []
        except BaseException:
            self._runtime.writer().undo(self._task, parts)
            raise
        if table is not None:
            table.state.index.insert(parts)
        return changed

    def _fold(self, batch: EventBatch, assigned: Assigned) -> Changed | list[Touched]:
        columns = {"key": batch.key, "ts": int64_column(assigned.pane_start)}
        if assigned.partly:
            columns["seq"] = int64_column(assigned.first_start)
        rows = pa.RecordBatch.from_pydict({**columns, **self._folds.inputs(batch)})
        if assigned.accepted < len(batch):
            rows = rows.take(pa.array(np.flatnonzero(assigned.taken)))
        if self._sends_updates and self._emission.is_plain:
            return self._panes.fold_and_merge(rows)
        return self._panes.fold(rows)

    def _updates(self, changed: Changed | list[Touched]) -> list[WindowRows]:
        """What is to be sent on about what changed."""
        if isinstance(changed, Changed):
            return [self._emission.changed(changed)]
        return self._emission.touched(changed) if changed and self._sends_updates else []

    @property
    def _sends_updates(self) -> bool:
        return self._is_heard and self._emit is Emit.UPDATE

    def _count(self, batch: EventBatch, stamped: Stamped, assigned: Assigned) -> None:
        count, told = self._state.progress.count, _told(batch)
        if told is None:
            count("records", len(batch))
            count("accepted", assigned.accepted)
            count("late_windows", assigned.closed)
        else:
            count("records", int(np.count_nonzero(told)))
            count("accepted", int(np.count_nonzero(told & (assigned.taken != 0))))
            count("late_windows", int(assigned.late_windows[told].sum()))
        if assigned.accepted == len(batch) and self._future is None:
            return
        by_verdict = np.bincount(stamped.verdicts if told is None else stamped.verdicts[told], minlength=4)
        count("no_key", by_verdict[NO_KEY])
        count("negative_time", by_verdict[NEGATIVE])
        count("future", by_verdict[FUTURE])
        gone = assigned.taken == 0 if told is None else told & (assigned.taken == 0)
        if isinstance(self._kind, Unlimited):
            count("before_start", int(np.count_nonzero(gone & (stamped.verdicts == GOOD))))
        else:
            count("late_records", int(np.count_nonzero(gone & (assigned.late_windows > 0))))

    def _late_rows(
        self, batch: EventBatch, stamped: Stamped, assigned: Assigned, latest: int
    ) -> LateRows | None:
        """Records that a window had closed to or that come from too far ahead, in their order."""
        policy = "drop" if self._future is None else self._future.policy
        ahead = np.flatnonzero(stamped.verdicts == FUTURE) if policy == "late" else np.empty(0, np.int64)
        if not assigned.closed and not len(ahead):
            return None
        rows, starts, how_late = ahead, np.full(len(ahead), NO_TIME), batch.ts[ahead] - latest
        reasons = np.full(len(ahead), FUTURE_REASON, object)
        if assigned.closed and not isinstance(self._kind, Unlimited):
            lines, told = (
                late_lines(self._kind, np.ascontiguousarray(batch.ts), stamped, assigned),
                _told(batch),
            )
            kept = slice(None) if told is None else np.flatnonzero(told[lines.rows])
            late_rows = lines.rows[kept]
            rows = np.concatenate([late_rows, rows])
            order = np.argsort(rows, kind="stable")
            rows = rows[order]
            starts = np.concatenate([lines.window_start[kept], starts])[order]
            how_late = np.concatenate([lines.how_late_ms[kept], how_late])[order]
            reasons = np.concatenate([np.full(len(late_rows), LATE, object), reasons])[order]
        events = batch.take(rows)
        judged = EventBatch(
            events.key, events.ts, events.offset, events.partition, stamped.judged[rows], events.values
        )
        return LateRows(judged, starts, how_late, pa.array(reasons, pa.string()))

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
        if floor == NO_TIME or isinstance(self._kind, Unlimited):
            return []
        size = self._kind.size_ms
        close = LATEST if floor == LATEST else self._kind.close_time(floor)
        pieces: list[WindowRows] = []
        if close > progress.closed:
            if self._is_heard and self._emit is Emit.CLOSE:
                last = LATEST if close == LATEST else close - size
                first = max(0, progress.closed - size + 1)
                pieces = list(self._emission.between(first, last)) if first <= last else []
            progress.closed = close
        if floor < LATEST:
            self._panes.drop_before(self._oldest())
            if self.late_table is not None:
                self.late_table.expire(floor, progress)
        return pieces

    def _oldest(self) -> int:
        """The earliest start of a window that is still kept: retention counts from the newest window's start."""
        floor = self.clocks.floor
        if isinstance(self._kind, Unlimited) or floor in (NO_TIME, LATEST):
            return 0
        observed = floor // self._kind.advance_ms * self._kind.advance_ms
        return max(0, observed - self._kind.retention_ms + self._reach_ms)

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


def _told(batch: EventBatch) -> npt.NDArray[np.bool_] | None:
    """Which events are counted and set aside as records: of a row's old and new content only the new; None: all are."""
    if batch.changes is None:
        return None
    told = np.ones(len(batch), np.bool_)
    is_same = (batch.offset[1:] == batch.offset[:-1]) & (batch.partition[1:] == batch.partition[:-1])
    told[:-1] = ~(is_same & (batch.changes.weight[:-1] < 0))
    return told
