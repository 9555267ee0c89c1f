"""Tumbling, hopping and unlimited windows: records fold into panes, and windows are put together from panes.

Nothing that is sent on close, set aside as late or left in the table depends on where batches were cut: a record
is judged by times that belong to the record, panes remember from which window on a record counts (`panes`), and
windows are emitted for good in the order of their ends. Only what an update shows on the way does.

Thread rule: one operator belongs to its task's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage import RuntimeContext, StoreSpec, WorkerStorageRuntime
from tidegate.storage.runs.aggregates import Aggregate
from tidegate.storage.runs.columns import int64_column
from tidegate.windows.aggregates.folds import Aggregates
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import LATEST, Hopping, Tumbling, Unlimited
from tidegate.windows.operators.assignment import Assigned, LateLines, assign, assign_unlimited, late_lines
from tidegate.windows.operators.base import Compat, Emit, FutureGuard, Taken, WindowedOperator
from tidegate.windows.operators.emission import Emission
from tidegate.windows.operators.layout import StateLayout
from tidegate.windows.operators.panes import pane_spec
from tidegate.windows.operators.shapes import WindowRows
from tidegate.windows.operators.stream_time import GOOD, Stamped
from tidegate.windows.stores.expiry import Compat as StoreCompat
from tidegate.windows.stores.segmented_store import Returning
from tidegate.windows.stores.window_store import WindowStore

__all__ = ["Compat", "Emit", "FutureGuard", "WindowOperator"]


class WindowOperator(WindowedOperator):
    """Aggregates of windows of one size, for every key of one task."""

    _kind: Hopping | Unlimited

    def __init__(
        self,
        runtime: WorkerStorageRuntime,
        task: str,
        name: str,
        kind: Tumbling | Hopping | Unlimited,
        aggregates: Aggregates | Sequence[Aggregate],
        **settings: Any,
    ) -> None:
        """Attach the operator's stores to the task; `settings` are those of `WindowedOperator`."""
        if not isinstance(kind, Hopping | Unlimited):
            raise TypeError(f"{type(kind).__name__} windows have an operator of their own")
        if isinstance(kind, Hopping):
            self._step_ms = kind.advance_ms
        elif Emit(settings.get("emit", Emit.UPDATE)) is Emit.CLOSE:
            raise InvalidError("an unlimited window never closes: emit on update")
        super().__init__(runtime, task, name, kind, aggregates, **settings)

    def _spec(self, name: str, layout: StateLayout) -> StoreSpec:
        return pane_spec(name, self._folds, layout.bucket_ms, layout.segment_ms)

    def _open_store(self, context: RuntimeContext, compat: StoreCompat) -> None:
        kept = None if isinstance(self._kind, Unlimited) else self._kind.retention_ms
        store = WindowStore(context, self._state, retention=kept, compat=compat)
        self._store = store
        self._emission = Emission(self._kind, self._folds, store, self._runtime.scratch)

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────

    def _take(self, batch: EventBatch, stamped: Stamped) -> Taken:
        ts, kind = np.ascontiguousarray(batch.ts), self._kind
        if isinstance(kind, Unlimited):
            assigned = assign_unlimited(kind, ts, stamped, also=self._also)
        else:
            assigned = assign(kind, ts, stamped, also=self._also)

        def late() -> LateLines:
            if isinstance(kind, Unlimited):
                raise TypeError("an unlimited window closes to no record")
            return late_lines(kind, ts, stamped, assigned)

        return Taken(
            assigned.taken,
            assigned.late_windows,
            assigned.accepted,
            assigned.closed,
            late,
            lambda stream_time: self._fold(batch, assigned, stream_time),
        )

    def _fold(self, batch: EventBatch, assigned: Assigned, stream_time: int) -> list[WindowRows]:
        """Fold records into panes; the windows that changed, if they are sent on."""
        columns = {"key": batch.key, "ts": int64_column(assigned.pane_start)}
        if assigned.partly:
            columns["seq"] = int64_column(assigned.first_start)
        rows = pa.RecordBatch.from_pydict({**columns, **self._folds.inputs(batch)})
        if assigned.accepted < len(batch):
            rows = rows.take(pa.array(np.flatnonzero(assigned.taken)))
        returning: Returning | None = None
        if self._sends_updates:
            returning = "merged" if self._emission.is_plain else "touched"
        result = self._store.put_batch(rows, stream_time=stream_time, returning=returning)
        if result.merged is not None:
            return [self._emission.changed(result.merged)]
        return self._emission.touched(result.touched) if result.touched else []

    def _not_taken(
        self, stamped: Stamped, is_gone: npt.NDArray[np.bool_], is_late: npt.NDArray[np.bool_]
    ) -> dict[str, npt.NDArray[np.bool_]]:
        found = super()._not_taken(stamped, is_gone, is_late)
        if isinstance(self._kind, Unlimited):
            found["before_start"] = is_gone & (stamped.verdicts == GOOD)
        return found

    # ── windows, by their starts ─────────────────────────────────────────────────────────────────────────────

    def _between(self, first: int, last: int) -> Iterator[WindowRows]:
        return self._emission.between(first, last)

    def _of_keys(self, keys: pa.BinaryArray, first: int, last: int) -> WindowRows:
        return self._emission.of_keys(keys, first, last)

    def _oldest(self) -> int:
        return self._store.first_readable_ts

    def _closing(self, closed: int, close: int) -> tuple[int, int]:
        size = 0 if isinstance(self._kind, Unlimited) else self._kind.size_ms
        return max(0, closed - size + 1), LATEST if close == LATEST else close - size
