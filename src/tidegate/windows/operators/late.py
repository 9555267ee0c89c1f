"""The late table: records that were set aside, kept for a time with the reason and how late they were.

A window store of its own: key = the record's key, ts = the stream time it was judged with. Rows are kept for
`retention` of stream time and up to `max_bytes`; rows that arrive when it is full are only counted. Each row's size
is estimated from its own values, in order, so what is kept does not depend on batch boundaries; space freed by
retention is available from the next batch on.

Thread rule: the operator's thread adds; any thread reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import InvalidError
from tidegate.kernels.windows import admit_sizes
from tidegate.storage import EarlierShape, Merge, RuntimeContext, StoreSpec
from tidegate.storage.runs.columns import int64_column
from tidegate.windows.events import EventBatch, Int64s
from tidegate.windows.operators.base import LateRows
from tidegate.windows.operators.clock import Progress
from tidegate.windows.stores.segmented_store import PreparedPut, RowsState
from tidegate.windows.stores.segments import EARLIEST
from tidegate.windows.stores.window_store import WindowStore

LATE, FUTURE = "late", "future"
ROW_BYTES = 96  # of a row, besides its key and values
NESTED_BYTES = 16  # for a value whose size is not known without looking
BUCKET_MS = 3_600_000


@dataclass(frozen=True, slots=True, init=False)
class LateSettings:
    """The limits of a late table: for how long, and how many bytes.

    `segment_ms` is how much stream time is dropped at a time; None: half the retention, in whole buckets. A table
    that has rows keeps the one it was created with. `lacking` are, for each earlier set of columns of stored rows,
    the current columns that were not declared then.
    """

    retention_ms: int
    max_bytes: int
    segment_ms: int
    lacking: tuple[tuple[str, ...], ...]

    def __init__(
        self,
        retention: DurationLike = "7d",
        max_bytes: int = 64 << 20,
        segment_ms: int | None = None,
        lacking: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        kept_ms = duration_ms(retention)
        buckets = max(1, -(-kept_ms // 2 // BUCKET_MS))
        object.__setattr__(self, "retention_ms", kept_ms)
        object.__setattr__(self, "max_bytes", max_bytes)
        object.__setattr__(self, "lacking", lacking)
        object.__setattr__(self, "segment_ms", buckets * BUCKET_MS if segment_ms is None else segment_ms)
        if self.retention_ms < 0 or max_bytes < 0:
            raise InvalidError(f"a late table of {retention} and {max_bytes} bytes: neither can be negative")


def late_spec(name: str, values: pa.Schema, settings: LateSettings) -> StoreSpec:
    """Return the store of an operator's late rows; the user's values are one struct, so that no name can clash."""
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
    spec = StoreSpec(
        f"{name}.late", Merge.APPEND, payload=payload, bucket_ms=BUCKET_MS, segment_ms=settings.segment_ms
    )
    shapes = [_earlier(spec, names) for names in settings.lacking]
    return spec.grown_from(shapes) if shapes else spec


def _earlier(spec: StoreSpec, lacking: tuple[str, ...]) -> EarlierShape:
    """Return the store for values without these fields, which are null in earlier rows."""
    values = spec.payload.field("values")
    kept = [field for field in values.type if field.name not in lacking]
    *others, _ = spec.payload
    payload = pa.schema([*others, pa.field(values.name, pa.struct(kept))])
    before = StoreSpec(
        spec.name, spec.merge, payload=payload, bucket_ms=spec.bucket_ms, segment_ms=spec.segment_ms
    )

    def grow(rows: pa.RecordBatch) -> pa.RecordBatch:
        *columns, stored = rows.columns
        have = dict(zip([field.name for field in kept], stored.flatten(), strict=True))
        fields = [have.get(each.name, pa.nulls(len(stored), each.type)) for each in values.type]
        whole = pa.StructArray.from_arrays(fields, fields=list(values.type), mask=stored.is_null())
        return pa.RecordBatch.from_arrays([*columns, whole], schema=spec.rows)

    return EarlierShape(before, grow)


class LateTable:
    """Late rows of one operator, in a window store of its own; the clock is the operator's."""

    def __init__(
        self,
        context: RuntimeContext,
        name: str,
        values: pa.Schema,
        settings: LateSettings,
        clock: Callable[[], int],
    ) -> None:
        self._context = context
        self._settings = settings
        self._values = values
        self.state = RowsState(late_spec(name, values, settings), clock)
        self._store = WindowStore(context, self.state, retention=settings.retention_ms)

    def prepare(self, late: LateRows, progress: Progress) -> PreparedPut | None:
        """Store what there is room for; count the rest as `late_not_kept`. The caller commits or undoes it."""
        if not len(late):
            return None
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
            return None
        segments = late.events.stream_time[kept] // spec.segment_ms * spec.segment_ms
        for segment in np.unique(segments).tolist():
            size = int(sizes[kept][segments == segment].sum())
            progress.late_bytes[segment] = progress.late_bytes.get(segment, 0) + size
        return self._store.prepare(self._rows(late, kept), stream_time=self.state.stream_time)

    def expire(self, stream_time: int, progress: Progress) -> None:
        """Drop whole time segments beyond the retention at this stream time."""
        self._store.advance(stream_time)
        first = self._store.expiry.first_live_ts(stream_time)
        for segment in [each for each in progress.late_bytes if each < first]:
            del progress.late_bytes[segment]

    def read(self) -> pa.Table:
        """Return all rows: key, stream_time, event_ts, partition, offset, window_start, how_late_ms, reason, values."""
        batches = list(self._store.scan(EARLIEST))
        names = ["key", "stream_time", "seq", *self.state.index.spec.payload.names]
        schema = pa.schema([pa.field("key", pa.binary()), *self.state.index.spec.rows], metadata=None)
        table = pa.Table.from_batches(batches, schema=batches[0].schema if batches else schema)
        return table.rename_columns(names).sort_by("seq").drop_columns(["seq"])

    def _rows(self, late: LateRows, kept: Int64s) -> pa.RecordBatch:
        indices, events = pa.array(kept), late.events
        values = pa.StructArray.from_arrays(events.values.columns, fields=list(self._values))
        columns = {
            "key": pc.fill_null(events.key.take(indices), b""),  # a store has no null keys
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
    """Estimate the size of each event in the late table, from its own values alone."""
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
