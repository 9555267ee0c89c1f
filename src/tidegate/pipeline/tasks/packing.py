"""Events as bytes on their way from the stage that reads to the task that owns their keys: one Arrow IPC stream.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from tidegate.windows.events import EventBatch, RowChanges


def pack_events(batch: EventBatch) -> pa.Buffer:
    """A batch as one Arrow IPC stream; the user's columns come after the event's own, so that no name can clash."""
    own = [
        batch.key,
        pa.array(batch.ts),
        pa.array(batch.offset),
        pa.array(batch.partition),
        pa.array(batch.stream_time),
    ]
    if batch.changes is not None:
        own += [batch.changes.row, pa.array(batch.changes.weight), pa.array(batch.changes.written)]
    fields = [pa.field(name, column.type) for name, column in zip(_NAMES, own, strict=False)]
    schema = pa.schema([*fields, *batch.values.schema], metadata={_OWN: str(len(own))})
    packed = pa.RecordBatch.from_arrays([*own, *batch.values.columns], schema=schema)
    measure = pa.MockOutputStream()
    _write(packed, measure)
    data = pa.allocate_buffer(
        measure.size()
    )  # of the right size at once: a stream that grows copies what it has
    _write(packed, pa.FixedSizeBufferWriter(data))
    return data


def _write(packed: pa.RecordBatch, sink: pa.NativeFile) -> None:
    with pa.ipc.new_stream(sink, packed.schema) as writer:
        writer.write_batch(packed)


def unpack_events(data: bytes | memoryview | pa.Buffer) -> EventBatch:
    """What `pack_events` made; columns lie in the given bytes."""
    with pa.ipc.open_stream(data) as reader:
        packed = reader.read_next_batch()
    own = int(packed.schema.metadata[_OWN])
    key, ts, offset, partition, stream_time, *changes = packed.columns[:own]
    schema = pa.schema(list(packed.schema)[own:])
    return EventBatch(
        key=key,
        ts=ts.to_numpy(),
        offset=offset.to_numpy(),
        partition=partition.to_numpy(),
        stream_time=stream_time.to_numpy(),
        values=_values(packed.columns[own:], schema, packed.num_rows),
        changes=RowChanges(changes[0], changes[1].to_numpy(), changes[2].to_numpy()) if changes else None,
    )


def join_events(batches: Sequence[EventBatch]) -> EventBatch:
    """Several batches behind each other; at least one."""
    if len(batches) == 1:
        return batches[0]
    values = [batch.values for batch in batches]
    return EventBatch(
        key=pa.concat_arrays([batch.key for batch in batches]),
        ts=np.concatenate([batch.ts for batch in batches]),
        offset=np.concatenate([batch.offset for batch in batches]),
        partition=np.concatenate([batch.partition for batch in batches]),
        stream_time=np.concatenate([batch.stream_time for batch in batches]),
        values=pa.concat_batches(values) if values[0].num_columns else _rows_alone(batches),
        changes=_joined_changes([batch.changes for batch in batches if batch.changes is not None]),
    )


def _joined_changes(changes: Sequence[RowChanges]) -> RowChanges | None:
    if not changes:
        return None
    return RowChanges(
        row=pa.concat_arrays([each.row for each in changes]),
        weight=np.concatenate([each.weight for each in changes]),
        written=np.concatenate([each.written for each in changes]),
    )


def _rows_alone(batches: Sequence[EventBatch]) -> pa.RecordBatch:
    return _values([], batches[0].values.schema, sum(map(len, batches)))


def _values(columns: list[pa.Array], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    if columns:
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    # a batch without columns still has rows
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


_OWN = b"columns of the event itself"  # how many; the user's follow
_NAMES = ("key", "ts", "offset", "partition", "stream_time", "row", "weight", "written")
