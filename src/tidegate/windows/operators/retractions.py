"""Turn changes of a table's rows into events that can be summed: retract a row's old content, add its new content.

A topic of changes has the new content of rows and not the old one, so the content that each row added before is kept
in a window store: key = the row's key in its table, ts = its event time, payload = the key and columns it was added
with. A change becomes an event of weight -1 with the earlier content, if there was any, and one of weight 1 with the
new content, unless the row is deleted. Both have the change's place, stream time and offset, so windows judge them
alike.

Thread rule: one operator belongs to its task's thread.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidegate.storage import Merge, StoreSpec, WorkerStorageRuntime
from tidegate.storage.runs.columns import int64_column
from tidegate.windows.events import EventBatch, Int64s, RowChanges
from tidegate.windows.operators.layout import StateLayout
from tidegate.windows.stores.segmented_store import RowsState
from tidegate.windows.stores.window_store import WindowStore

_NONE = -1


class Retractions:
    """The rows of one task, and the events of their changes."""

    def __init__(
        self, runtime: WorkerStorageRuntime, task: str, name: str, values: pa.Schema, layout: StateLayout
    ) -> None:
        self._runtime, self._task, self._values = runtime, task, values
        self._content = pa.struct(list(values))
        payload = pa.schema([pa.field("of", pa.binary()), pa.field("content", self._content)])
        spec = StoreSpec(
            f"{name}.rows",
            Merge.LAST,
            payload=payload,
            bucket_ms=layout.bucket_ms,
            segment_ms=layout.segment_ms,
        )
        self.state = RowsState(spec)
        self._store = WindowStore(runtime.context(task), self.state, retention=0)

    def process(self, events: EventBatch) -> EventBatch:
        """Return the retractions and additions of these changes, and store the new rows."""
        changes = events.changes
        if changes is None or not len(events):
            return events
        rows = changes.row.dictionary_encode()
        codes = rows.indices.fill_null(_NONE).to_numpy().astype(np.int64)
        ts = np.ascontiguousarray(events.ts)
        kept, of, content = self._find(rows.dictionary, ts)
        before = _before(codes, changes.weight, kept, len(of))
        self._keep(events, codes, rows.dictionary, kept)
        return self._added_up(events, changes, before, of, content)

    def drop_before(self, ts: int) -> None:
        """Drop whole time segments of rows whose event time is before `ts`."""
        self._store.advance(ts)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _find(self, rows: pa.BinaryArray, ts: Int64s) -> tuple[Int64s, pa.BinaryArray, pa.StructArray]:
        """Look up these rows in the store: for each its number among the found ones, -1 for none."""
        places = np.full(len(rows), _NONE, np.int64)
        numbers, found = self._store.fetch_batch(rows, int(ts.min()), int(ts.max()))
        places[numbers] = np.arange(len(numbers))
        return places, found.column("of"), found.column("content")

    def _keep(self, events: EventBatch, codes: Int64s, rows: pa.BinaryArray, kept: Int64s) -> None:
        """Write the last change of each row; a deletion of a row that was not kept is not written."""
        changes = events.changes
        if changes is None:
            return
        last = np.full(len(rows), _NONE, np.int64)
        has_row = np.flatnonzero(codes >= 0)
        last[codes[has_row]] = has_row  # of equal numbers the last assignment counts
        gone = changes.weight[last] <= 0
        chosen = last[~gone | (kept >= 0)]
        if not len(chosen):
            return
        indices, deleted = pa.array(chosen), changes.weight[chosen] <= 0
        content = pa.StructArray.from_arrays(events.values.columns, fields=list(self._values))
        columns = {
            "key": changes.row.take(indices),
            "ts": int64_column(np.ascontiguousarray(events.ts[chosen])),
            "seq": int64_column(np.zeros(len(chosen), np.int64)),
            "deleted": pa.array(deleted),
            "of": events.key.take(indices),
            "content": content.take(indices),
        }
        self._store.put_batch(pa.RecordBatch.from_pydict(columns), stream_time=self.state.stream_time)

    def _added_up(
        self,
        events: EventBatch,
        changes: RowChanges,
        before: Int64s,
        of: pa.BinaryArray,
        content: pa.StructArray,
    ) -> EventBatch:
        """Return for each change first the retraction, then the addition."""
        count = len(events)
        is_taken, is_added = before != _NONE, changes.weight > 0
        # two positions for each change, some of them empty
        sources = np.empty(2 * count, np.int64)
        sources[0::2], sources[1::2] = before, len(of) + np.arange(count)
        wanted = np.empty(2 * count, np.bool_)
        wanted[0::2], wanted[1::2] = is_taken, is_added
        places = np.flatnonzero(wanted)
        chosen, at = pa.array(sources[places]), places // 2
        own = pa.StructArray.from_arrays(events.values.columns, fields=list(self._values))
        values = pa.concat_arrays([content, own]).take(chosen)
        return EventBatch(
            key=pa.concat_arrays([of, events.key]).take(chosen),
            ts=events.ts[at],
            offset=events.offset[at],
            partition=events.partition[at],
            stream_time=events.stream_time[at],
            values=pa.RecordBatch.from_arrays(values.flatten(), schema=self._values),
            changes=RowChanges(
                changes.row.take(pa.array(at)),
                np.where(places % 2 == 0, -1, 1).astype(np.int64),
                changes.written[at],
            ),
        )


def _before(codes: Int64s, weight: Int64s, kept: Int64s, found: int) -> Int64s:
    """Return the position of the content that each change replaces, -1 for none: `found` rows of the store, then the
    changes.

    `codes[i]` is the row of change i, -1 for none; `kept[row]` its position in the store, -1 for none.
    """
    order = np.argsort(codes, kind="stable")
    sorted_codes = codes[order]
    before = np.full(len(codes), _NONE, np.int64)
    is_first = np.empty(len(codes), np.bool_)
    is_first[0], is_first[1:] = True, sorted_codes[1:] != sorted_codes[:-1]
    first, later = order[is_first], order[~is_first]
    has_row = codes[first] >= 0
    before[first[has_row]] = kept[codes[first[has_row]]]
    previous = order[np.flatnonzero(~is_first) - 1]
    is_there = (weight[previous] > 0) & (codes[later] >= 0)
    before[later[is_there]] = found + previous[is_there]
    return before
