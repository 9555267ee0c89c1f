"""Rows of a DataFrame as records of a topic: columns checked and typed, and each row's partition chosen.

All that the topic would refuse is refused here, in the task that has the row, before a batch is decided: a batch
that could never be appended would stop its query for good.

Pure; does not know pyspark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import InvalidError
from tidegate.integrity.header import CONTROL_KEY_PREFIX
from tidegate.log.format.records import HEADERS_TYPE, coerce
from tidegate.log.writer import Partitioner

ROWS_SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("timestamp", pa.int64()),
        ("headers", HEADERS_TYPE),
        ("partition", pa.int32()),
    ]
)
_OVERHEAD_BYTES: Final = 256
"""Of a batch with one record: the batch's header, the record's own fields, Tidegate's header."""


class RowShaper:
    """Turns the batches of one task into rows of `ROWS_SCHEMA`; keyless rows go round from the task's own number on."""

    def __init__(self, topic: str, partitions: int, *, task: int, largest_bytes: int | None) -> None:
        self._topic = topic
        self._partitioner = Partitioner(topic, partitions, first=task)
        self._largest = largest_bytes
        self.partitions: set[int] = set()

    def shaped(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield self._one(batch)

    def _one(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = coerce(batch)
        self._check(columns.key, columns.value, columns.headers)
        index = batch.schema.get_field_index("partition")
        chosen = self._partitioner.choose(columns, None if index < 0 else batch.column(index))
        self.partitions.update(set(chosen.tolist()))
        headers = pa.nulls(len(columns), HEADERS_TYPE) if columns.headers is None else columns.headers
        arrays = [columns.key, columns.value, columns.timestamp, headers.cast(HEADERS_TYPE), pa.array(chosen)]
        return pa.RecordBatch.from_arrays(arrays, schema=ROWS_SCHEMA)

    def _check(self, key: pa.Array, value: pa.Array, headers: pa.Array | None) -> None:
        reserved = pc.starts_with(key, CONTROL_KEY_PREFIX)
        if pc.any(reserved).as_py():
            raise InvalidError(
                f"a key begins with {CONTROL_KEY_PREFIX!r}, which is reserved for Tidegate's own control records; "
                "leave them out when you copy a topic (the tidegate source does, unless controlRecords is true)"
            )
        if self._largest is None:
            return
        sizes = pc.add(pc.fill_null(pc.binary_length(key), 0), pc.fill_null(pc.binary_length(value), 0))
        largest = (
            pc.max(sizes).as_py() + _OVERHEAD_BYTES + (0 if headers is None else _largest_headers(headers))
        )
        if largest > self._largest:
            raise InvalidError(
                f"a record of about {largest} bytes is above the {self._largest} that max.message.bytes and "
                f"segment.bytes of topic {self._topic} allow; make the record smaller or raise the setting",
                kafka_name="MESSAGE_TOO_LARGE",
            )


def _largest_headers(headers: pa.Array) -> int:
    """An upper bound for the headers of any one row: the longest entry, as often as the longest list has any."""
    entries = headers.flatten()
    if len(entries) == 0:
        return 0
    keys, values = entries.field("key"), pc.fill_null(pc.binary_length(entries.field("value")), 0)
    entry = pc.max(pc.add(pc.binary_length(keys), values)).as_py() + 8
    return int(entry * (pc.max(pc.list_value_length(headers)).as_py() or 0))
