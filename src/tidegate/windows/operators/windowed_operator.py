"""The base of all window operators: records in, results of windows out.

    emit="update"   one row for each window the batch changed, with all the window holds by now
    emit="close"    one row for each window when it is final, ascending by (end, key) over the whole stream

This module owns clocks, counters, late records, the advance of time and the output. A subclass decides which records
it accepts, what they do to its store, and which windows end in a range of time. A closed window is emitted before
retention can drop it: a batch is put with the stream time before it, and the store gets the new one afterwards.

Thread rule: one operator belongs to its task's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.durations import DurationLike, duration_ms, milliseconds
from tidegate.errors import InvalidError
from tidegate.kernels.stream_time import FUTURE, GOOD, NEGATIVE, NO_KEY
from tidegate.storage import BucketIndexState, RuntimeContext, StoreSpec, WorkerStorageRuntime
from tidegate.windows.aggregates.folds import Folds, ResolvedAggregates
from tidegate.windows.events import NO_TIME, EventBatch, Int64s
from tidegate.windows.keys import Bytes, Int32s
from tidegate.windows.kinds import LATEST, Unlimited, WindowKind
from tidegate.windows.operators.base import (
    LateLines,
    LateRows,
    Moment,
    Output,
    Places,
    WindowRows,
    join_rows,
    no_rows,
    rows_that_fit,
)
from tidegate.windows.operators.clock import OperatorState, Stamped, StreamClocks
from tidegate.windows.operators.late import FUTURE as FUTURE_REASON
from tidegate.windows.operators.late import LATE, LateSettings, LateTable
from tidegate.windows.operators.layout import StateLayout, grown, window_layout
from tidegate.windows.stores.segmented_store import SegmentedStore
from tidegate.windows.stores.segments import Compat as StoreCompat

Answer = TypeVar("Answer")
Compat = Literal["kafka-streams"]
_NO_ROWS = np.empty(0, np.int64)


class Emit(StrEnum):
    """When a window's result is sent."""

    UPDATE = "update"
    CLOSE = "close"


@dataclass(frozen=True, slots=True, init=False)
class FutureGuard:
    """What happens to records whose time is more than `ahead` ahead of the round's: they advance no clock.

    `keep` accepts them into their windows anyway, `late` sets them aside in the late table, `drop` only counts them.
    """

    ahead_ms: int
    policy: str

    def __init__(self, ahead: DurationLike = "5m", policy: Literal["keep", "late", "drop"] = "late") -> None:
        if policy not in ("keep", "late", "drop"):
            raise InvalidError(f"a future guard's policy is 'keep', 'late' or 'drop', not {policy!r}")
        object.__setattr__(self, "ahead_ms", duration_ms(ahead))
        object.__setattr__(self, "policy", policy)


class Taken(NamedTuple):
    """The outcome of a batch's records, and the work left for accepted ones."""

    taken: Bytes | npt.NDArray[np.bool_]  # per record: whether some window accepts it
    late_windows: Int32s | npt.NDArray[np.bool_]  # per record: how many windows were already closed
    accepted: int
    closed: int  # pairs of a record and a window that was already closed
    late: Callable[[], LateLines]  # these pairs, in the order of the records
    put: Callable[[int], list[WindowRows]]  # stores them, at this stream time, and returns what to send


class TaskOperator:
    """What windows and deduplication share: clocks, counters, a store and a late table in one task's storage."""

    name: str
    late_table: LateTable | None
    _state: OperatorState
    _store: SegmentedStore
    _idle_ms: int | None

    @property
    def states(self) -> Sequence[BucketIndexState]:
        return (self._state,) if self.late_table is None else (self._state, self.late_table.state)

    @property
    def clocks(self) -> StreamClocks:
        return self._state.clocks

    @property
    def counters(self) -> dict[str, int]:
        """Counters by name; they are in the checkpoint."""
        return dict(self._state.progress.counters)

    def _keep(self, late: LateRows | None, put: Callable[[], Answer]) -> Answer:
        """Put records into the store and set late ones aside, or neither; return what `put` does."""
        aside = None
        if self.late_table is not None and late is not None:
            aside = self.late_table.prepare(late, self._state.progress)
        try:
            answer = put()
        except BaseException:
            if aside is not None:
                aside.undo()
            raise
        if aside is not None:
            aside.commit()
        return answer

    def _pass_time(self, moment: Moment) -> None:
        """Advance the clocks to the round's time and watermark."""
        if self._idle_ms is not None:
            self.clocks.advance_idle(moment.now_ms, self._idle_ms)
        if moment.watermark is not None:
            self.clocks.raise_floor(moment.watermark)

    def _drop_old(self) -> None:
        """Drop what is no longer kept."""
        self._store.advance(self._state.stream_time)
        if self.late_table is not None:
            self.late_table.expire(self.clocks.open_floor, self._state.progress)


class WindowedOperator(TaskOperator, ABC):
    """Aggregates of windows of one kind, for every key of one task."""

    _kinds: tuple[type, ...]
    """The kinds of windows that the operator is for."""
    _kind: Any
    _step_ms = 1  # the distance between window starts

    def __init__(
        self,
        runtime: WorkerStorageRuntime,
        task: str,
        name: str,
        kind: WindowKind,
        aggregates: ResolvedAggregates,
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

        `partitions` are the source partitions to wait for from the start. `late` keeps late records and needs
        `values`, the schema of the user's columns. `stamped`: stream times in the batches were computed before a
        shuffle and are used. `compat="kafka-streams"` forgets clocks when restored, unless they are `stamped` and so
        not the operator's own, and on close windows can be read for a millisecond longer, as in its stores of that
        kind. `layout` is that of a store which was created for a shorter retention, or fewer aggregates.
        `heard=False`: results are not sent, windows are only read from state; so no rows are made, which saves a
        third of the work.
        """
        if not isinstance(kind, self._kinds):
            raise TypeError(f"{type(kind).__name__} windows have an operator of their own")
        if compat not in (None, "kafka-streams"):
            raise InvalidError(f"compat is {compat!r}; only 'kafka-streams' is known")
        if late is not None and values is None:
            raise InvalidError("a late table needs the schema of the values: give `values`")
        if future is not None and future.policy == "late" and late is None:
            raise InvalidError("a future guard with policy 'late' needs a late table: give `late`")
        self.name = name
        self._runtime, self._task, self._kind = runtime, task, kind
        self._emit, self._future, self._is_stamped = Emit(emit), future, stamped
        self._is_heard, self._stay_final = heard, compat is None
        self._idle_ms = None if idle_close is None else milliseconds(idle_close)
        self._folds = Folds(aggregates)
        self._set_up(kind, is_compat=compat is not None)
        layout = window_layout(kind) if layout is None else layout
        spec = grown(self._spec(name, layout), self._folds, layout, values)
        context = runtime.context(task)
        self._state = OperatorState(
            spec,
            StreamClocks(partitions),
            step_ms=self._step_ms,
            forgets=compat is not None and not stamped,
        )
        rules = StoreCompat.TIDEGATE
        if compat is not None:
            # Kafka Streams emits on close from its time-ordered store, which reads one millisecond further back.
            is_on_close = self._emit is Emit.CLOSE
            rules = StoreCompat.KAFKA_STREAMS_TIME_ORDERED if is_on_close else StoreCompat.KAFKA_STREAMS
        self._open_store(context, rules)
        self.late_table = None
        if late is not None and values is not None:
            self.late_table = LateTable(context, name, values, late, lambda: self._state.clocks.open_floor)

    @property
    def results(self) -> pa.Schema:
        return self._folds.results

    def process(self, batch: EventBatch, moment: Moment) -> Output:
        """Process the next records of the stream.

        If storage has no room for them (`OverloadError`), nothing was stored and no clock has advanced: pass the
        same batch again. After any other error, and if the contents of windows are too large to be merged
        (`OverloadError` with the reason `window_state`), the task must be restored.
        """
        before, late, places = self.counters, None, dict[str, Places]()
        pieces: list[WindowRows] = []
        if len(batch):
            latest = LATEST if self._future is None else min(moment.now_ms + self._future.ahead_ms, LATEST)
            saved, stream_time = self._state.encode_progress(), self._state.stream_time
            floor = self.clocks.floor
            try:
                stamped = self.clocks.stamp(batch, moment.now_ms, latest=latest, trusted=self._is_stamped)
                if self._stay_final and (least := self._least_judged) > floor:
                    np.maximum(stamped.judged, least, out=stamped.judged)
                taken = self._take(batch, stamped)
                places = self._count(batch, stamped, taken)
                late = self._late_rows(batch, stamped, taken, latest)
                pieces = self._keep(late, lambda: taken.put(stream_time) if taken.accepted else [])
            except BaseException:
                self._state.roll_back(saved)
                raise
        pieces += self._advance(moment)
        return self._output(pieces, late, before, places)

    def tick(self, moment: Moment) -> Output:
        """Advance time in a round without records: idle sources, a watermark or the end of the input may close
        windows."""
        before = self.counters
        return self._output(self._advance(moment), None, before)

    def windows(self, first: int = 0, last: int = LATEST) -> WindowRows:
        """Return the table: every kept window from `first` to `last`, ascending by (end, key).

        Bounds are starts of tumbling and hopping windows, and ends of sessions and sliding windows.
        """
        pieces = list(self.scan(first, last))
        return join_rows(pieces) if pieces else no_rows(self._folds.results)

    def scan(self, first: int = 0, last: int = LATEST) -> Iterator[WindowRows]:
        """Yield the same in pieces of some time buckets each."""
        first = max(first, self._oldest())
        return self._between(first, last) if first <= last else iter(())

    def windows_of(self, keys: pa.BinaryArray, first: int = 0, last: int = LATEST) -> WindowRows:
        """Return the windows of these different keys from `first` to `last`; no other key's rows are read."""
        first = max(first, self._oldest())
        if first > last or not len(keys):
            return no_rows(self._folds.results)
        return self._of_keys(keys, first, last)

    # ── what a kind says ─────────────────────────────────────────────────────────────────────────────────────

    def _set_up(self, kind: Any, *, is_compat: bool) -> None:
        """Derive from the kind what the operator needs, before its stores are opened."""

    @abstractmethod
    def _spec(self, name: str, layout: StateLayout) -> StoreSpec:
        """Return the store of its rows."""

    @abstractmethod
    def _open_store(self, context: RuntimeContext, compat: StoreCompat) -> None:
        """Open `_store` over `_state`."""

    @abstractmethod
    def _take(self, batch: EventBatch, stamped: Stamped) -> Taken:
        """Judge the records, each with its own stream time."""

    @abstractmethod
    def _between(self, first: int, last: int) -> Iterator[WindowRows]:
        """Yield every window from `first` to `last`, both inclusive, ascending by (end, key), in pieces."""

    @abstractmethod
    def _of_keys(self, keys: pa.BinaryArray, first: int, last: int) -> WindowRows:
        """Return the windows of these keys from `first` to `last`, in no defined order."""

    @abstractmethod
    def _oldest(self) -> int:
        """Return the first window that is still kept, as `_between` counts them."""

    def _closing(self, closed: int, close: int) -> tuple[int, int]:
        """Return the first and last window that is final at `close` and was not at `closed`, as `_between` counts
        them."""
        return max(0, closed), LATEST if close == LATEST else close - 1

    def _close_time(self, floor: int) -> int:
        """Return the time at which windows close; NO_TIME: they never do."""
        if isinstance(self._kind, Unlimited):
            return NO_TIME
        return LATEST if floor == LATEST else self._kind.close_time(floor)

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _least_judged(self) -> int:
        """Return the time at which the final windows close: above the floor where the grace became longer since."""
        closed: int = self._state.progress.closed
        if isinstance(self._kind, Unlimited) or closed in (NO_TIME, LATEST):
            return NO_TIME
        least: int = min(closed - self._kind.close_time(0), LATEST)
        return least

    @property
    def _sends_updates(self) -> bool:
        return self._is_heard and self._emit is Emit.UPDATE

    @property
    def _keeps_future(self) -> bool:
        return self._future is not None and self._future.policy == "keep"

    @property
    def _also(self) -> int:
        """The clock verdict that is as good as `GOOD`."""
        return FUTURE if self._keeps_future else GOOD

    def _partial(self, events: EventBatch, groups: Int32s, count: int) -> list[pa.Array]:
        """Return one state for each of `count` groups of records."""
        rows = pa.RecordBatch.from_pydict(self._folds.inputs(events))
        return [column for each in self._folds.stored for column in each.partial(rows, groups, count)]

    def _count(self, batch: EventBatch, stamped: Stamped, taken: Taken) -> dict[str, Places]:
        """Count the outcomes of the records; return the places of those that some window did not accept."""
        count, told = self._state.progress.count, _told(batch)
        if told is None:
            count("records", len(batch))
            count("accepted", taken.accepted)
            count("late_windows", taken.closed)
        else:
            count("records", int(np.count_nonzero(told)))
            count("accepted", int(np.count_nonzero(told & (taken.taken != 0))))
            count("late_windows", int(taken.late_windows[told].sum()))
        if taken.accepted == len(batch) and not taken.closed and self._future is None:
            return {}
        is_told = np.ones(len(batch), np.bool_) if told is None else told
        found = self._not_taken(stamped, taken.taken == 0, taken.late_windows > 0)
        places = {name: Places.of(batch, is_told & chosen) for name, chosen in found.items() if chosen.any()}
        for name, each in places.items():
            count(name, len(each.offset))
        if self._keeps_future:
            places.pop("future", None)
        return places

    def _not_taken(
        self, stamped: Stamped, is_gone: npt.NDArray[np.bool_], is_late: npt.NDArray[np.bool_]
    ) -> dict[str, npt.NDArray[np.bool_]]:
        """Return, by counter name, which records some window did not accept."""
        return {
            "no_key": stamped.verdicts == NO_KEY,
            "negative_time": stamped.verdicts == NEGATIVE,
            "future": stamped.verdicts == FUTURE,
            "late_records": is_gone & is_late,
            "partly_late_records": ~is_gone & is_late,
        }

    def _late_rows(self, batch: EventBatch, stamped: Stamped, taken: Taken, latest: int) -> LateRows | None:
        """Return records that came after a window closed or are too far ahead, in their order."""
        is_aside = self._future is not None and self._future.policy == "late"
        ahead = np.flatnonzero(stamped.verdicts == FUTURE) if is_aside else _NO_ROWS
        if not taken.closed and not len(ahead):
            return None
        rows, starts, how_late = ahead, np.full(len(ahead), NO_TIME), batch.ts[ahead] - latest
        reasons = np.full(len(ahead), FUTURE_REASON, object)
        if taken.closed:
            lines, told = taken.late(), _told(batch)
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
        """Advance time to the moment's, emit windows that this makes final, drop what is no longer kept."""
        clocks, progress = self.clocks, self._state.progress
        self._pass_time(moment)
        if moment.closing:
            clocks.end()
        floor = clocks.floor
        if floor == NO_TIME:
            return []
        close = self._close_time(floor)
        pieces: list[WindowRows] = []
        if close > progress.closed:
            if self._is_heard and self._emit is Emit.CLOSE:
                first, last = self._closing(progress.closed, close)
                if first <= last:
                    pieces = rows_that_fit(self._between(first, last), self._runtime.scratch)
            progress.closed = close
        self._drop_old()
        return pieces

    def _output(
        self,
        pieces: Sequence[WindowRows],
        late: LateRows | None,
        before: dict[str, int],
        places: Mapping[str, Places] | None = None,
    ) -> Output:
        rows = join_rows(pieces) if pieces else no_rows(self._folds.results)
        self._state.progress.count("emitted", len(rows))
        self._state.progress.count("without_result", self._folds.take_unfit())
        counters = {
            name: number - before.get(name, 0)
            for name, number in self._state.progress.counters.items()
            if number != before.get(name, 0)
        }
        return Output(rows, late, counters, places or {})


def _told(batch: EventBatch) -> npt.NDArray[np.bool_] | None:
    """Return which events count as records: of a row's old and new content only the new; None: all do."""
    if batch.changes is None:
        return None
    told = np.ones(len(batch), np.bool_)
    is_same = (batch.offset[1:] == batch.offset[:-1]) & (batch.partition[1:] == batch.partition[:-1])
    told[:-1] = ~(is_same & (batch.changes.weight[:-1] < 0))
    return told


def taken_by_key(
    batch: EventBatch, good: Int64s, late_by: Int64s, put: Callable[[int], list[WindowRows]] | None = None
) -> Taken:
    """Return the outcome of records in windows of their own: `good` or not, and `late_by` how much."""
    late_rows, how_late = good[late_by > 0], late_by[late_by > 0]
    is_late, is_taken = np.zeros(len(batch), np.bool_), np.zeros(len(batch), np.bool_)
    is_taken[good], is_late[late_rows] = True, True
    is_taken[late_rows] = False
    return Taken(
        is_taken,
        is_late,
        len(good) - len(late_rows),
        len(late_rows),
        lambda: LateLines(late_rows, batch.ts[late_rows], how_late),
        put or (lambda _: []),
    )
