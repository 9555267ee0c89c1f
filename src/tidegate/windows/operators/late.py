"""The late table: records that were set aside, readable with how late they were and why, for a while.

An append store of its own: key = the record's key, ts = the stream time it was judged with. Rows are kept for
`retention` of stream time and up to `max_bytes`; what comes when it is full is counted. Each row's size is
reckoned from its own values, in the order rows come, so what is kept does not depend on how a stream is cut; room
that retention gives back is there from the next batch on.

Thread rule: the operator's thread adds; any thread reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import InvalidError
from tidegate.kernels.assignment import admit_sizes
from tidegate.storage import AppendBatch, BucketIndex, Merge, PlainState, StoreSpec, WorkerStorageRuntime
from tidegate.storage.runs.assembling import int64_column
from tidegate.windows.events import EventBatch, Int64s
from tidegate.windows.operators.progress import Progress
from tidegate.windows.operators.shapes import LateRows

LATE, FUTURE = "late", "future"
ROW_BYTES = 96  # what a row takes beside its key and values
NESTED_BYTES = 16  # of a value whose size is not plain to see
BUCKET_MS = 3_600_000


@dataclass(frozen=True, slots=True, init=False)
class LateSettings:
    """How long and how much of what came too late is kept.

    `segment_ms` is how much stream time is dropped at a time; None: half the retention, in whole buckets. A table that
    has rows keeps the one it was made with.
    """

    retention_ms: int
    max_bytes: int
    segment_ms: int

    def __init__(
        self, retention: DurationLike = "7d", max_bytes: int = 64 << 20, segment_ms: int | None = None
    ) -> None:
        kept_ms = duration_ms(retention)
        buckets = max(1, -(-kept_ms // 2 // BUCKET_MS))
        object.__setattr__(self, "retention_ms", kept_ms)
        object.__setattr__(self, "max_bytes", max_bytes)
        object.__setattr__(self, "segment_ms", buckets * BUCKET_MS if segment_ms is None else segment_ms)
        if self.retention_ms < 0 or max_bytes < 0:
            raise InvalidError(f"a late table of {retention} and {max_bytes} bytes: neither can be negative")


def late_spec(name: str, values: pa.Schema, settings: LateSettings) -> StoreSpec:
    """The store of an operator's late rows; the user's values are one struct, so that no name can clash."""
    payload = pa.schema(
        [
            pa.field("event_ts", pa.int64(), nullable=False),
            pa.field("partition", pa.int32(), nullable=False),
            pa.field("offset", pa.int64(), nullable=False),
            pa.field("window_start", pa.int64(), nullable=False),
            pa.field("how_late_ms", pa.int64(), nullable=False),
            pa.field("reason", pa.string(), nullable=False),
            pa.field("values", pa.struct(list(values))),
        ]
    )
    return StoreSpec(
        f"{name}.late", Merge.APPEND, payload=payload, bucket_ms=BUCKET_MS, segment_ms=settings.segment_ms
    )


class LateTable:
    """Late rows of one operator."""

    def __init__(
        self,
        runtime: WorkerStorageRuntime,
        task: str,
        name: str,
        values: pa.Schema,
        settings: LateSettings,
    ) -> None:
        self._runtime = runtime
        self._task = task
        self._settings = settings
        self._values = values
        self.state = PlainState(BucketIndex(late_spec(name, values, settings)))
        runtime.attach(task, self.state)

    def prepare(self, late: LateRows, progress: Progress) -> list[AppendBatch]:
        """Take what there is room for; the rest is counted as `late_not_kept`. The caller inserts it, or undoes."""
        if not len(late):
            return []
        if late.events.values.schema != self._values:
            raise InvalidError(
                f"late values have the columns {late.events.values.schema}; the table holds {self._values}"
            )
        spec, admitted = self.state.index.spec, np.empty(len(late), np.uint8)
        sizes = row_sizes(late.events)
        admit_sizes(sizes, sum(progress.late_bytes.values()), self._settings.max_bytes, admitted)
        kept = np.flatnonzero(admitted)
        progress.count("late_not_kept", len(late) - len(kept))
        if not len(kept):
            return []
        segments = late.events.stream_time[kept] // spec.segment_ms * spec.segment_ms
        for segment in np.unique(segments).tolist():
            size = int(sizes[kept][segments == segment].sum())
            progress.late_bytes[segment] = progress.late_bytes.get(segment, 0) + size
        return self._runtime.writer().append(self._task, self.state, self._rows(late, kept))

    def drop_before(self, ts: int, progress: Progress) -> None:
        """Drop whole time segments of rows that were judged before `ts`."""
        edge = self.state.index.spec.segment_of(ts)
        gone = [segment for segment in progress.late_bytes if segment < edge]
        if gone:
            self._runtime.writer().drop_segments(self._task, self.state, ts)
            for segment in gone:
                del progress.late_bytes[segment]

    def expire(self, floor: int, progress: Progress) -> None:
        """Drop what retention no longer keeps at this stream time."""
        self.drop_before(floor - self._settings.retention_ms + 1, progress)

    def read(self) -> pa.Table:
        """Everything kept: key, stream_time, event_ts, partition, offset, window_start, how_late_ms, reason, values."""
        with self._runtime.reader().scan(self._task, self.state) as scan:
            batches = list(scan)
        names = ["key", "stream_time", "seq", *self.state.index.spec.payload.names]
        schema = pa.schema([pa.field("key", pa.binary()), *self.state.index.spec.rows], metadata=None)
        table = pa.Table.from_batches(batches, schema=batches[0].schema if batches else schema)
        return table.rename_columns(names).sort_by("seq").drop_columns(["seq"])

    def _rows(self, late: LateRows, kept: Int64s) -> pa.RecordBatch:
        indices, events = pa.array(kept), late.events
        values = pa.StructArray.from_arrays(events.values.columns, fields=list(self._values))
        columns = {
            "key": pc.fill_null(events.key.take(indices), b""),  # a store has no rows without a key
            "ts": int64_column(events.stream_time[kept]),
            "event_ts": int64_column(events.ts[kept]),
            "partition": pa.array(events.partition[kept]),
            "offset": int64_column(events.offset[kept]),
            "window_start": int64_column(late.window_start[kept]),
            "how_late_ms": int64_column(late.how_late_ms[kept]),
            "reason": late.reason.take(indices),
            "values": values.take(indices),
        }
        return pa.RecordBatch.from_pydict(columns)


def row_sizes(events: EventBatch) -> Int64s:
    """What each event is reckoned to take in the late table, from its own values alone."""
    sizes = np.full(len(events), ROW_BYTES, np.int64)
    for column in (events.key, *events.values.columns):
        type_ = column.type
        if pa.types.is_primitive(type_) or pa.types.is_decimal(type_):
            sizes += max(1, type_.bit_width // 8)
        elif (
            pa.types.is_binary(type_)
            or pa.types.is_string(type_)
            or pa.types.is_large_binary(type_)
            or pa.types.is_large_string(type_)
        ):
            sizes += pc.fill_null(pc.binary_length(column), 0).to_numpy().astype(np.int64) + 4
        else:
            sizes += NESTED_BYTES
    return sizes
