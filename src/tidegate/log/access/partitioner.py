"""Which partition each row of a table goes to, and the rows of each partition together.

In this order: the table's own `partition` column where it is not null; Kafka's hash of the key (murmur2);
for rows with neither, runs of rows to one partition after the other, so that batches stay full, continuing
over calls.

Does not know what a record is otherwise. One partitioner belongs to one writer, under that writer's lock.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.errors import InvalidError
from tidegate.kernels.hashing import murmur2, partitions_of_keys
from tidegate.log.format.records import RecordColumns

RUN_ROWS = 4096


def partition_of_key(key: bytes, partitions: int) -> int:
    """Where Kafka's default partitioner puts one key."""
    return int(murmur2(np.frombuffer(key, np.uint8)) & 0x7FFFFFFF) % partitions


def partitions_of_column(keys: pa.BinaryArray, partitions: int) -> NDArray[np.int32]:
    """Where Kafka's default partitioner puts each key of a column; 0 where there is none."""
    chosen = np.zeros(len(keys), np.int32)
    if len(keys) > keys.null_count:
        data, bounds = _buffers(keys)
        partitions_of_keys(data, bounds, _valid(keys), partitions, chosen)
    return chosen


class Partitioner:
    """Chooses partitions for one topic; remembers where keyless rows go next."""

    def __init__(self, topic: str, partitions: int, *, first: int = 0) -> None:
        self.topic = topic
        self.partitions = partitions
        self._next_keyless = first % partitions

    def choose(self, columns: RecordColumns, explicit: pa.Array | None) -> NDArray[np.int32]:
        """The partition of every row."""
        rows = len(columns)
        chosen = np.full(rows, -1, np.int32)
        if explicit is not None:
            self._take_explicit(explicit, chosen)
        open_rows = chosen < 0
        if self.partitions == 1:
            chosen[open_rows] = 0
            return chosen
        if open_rows.any() and columns.key.null_count < rows:
            has_key = _valid(columns.key) & open_rows
            data, bounds = _buffers(columns.key)
            partitions_of_keys(data, bounds, has_key, self.partitions, chosen)
        keyless = np.flatnonzero(chosen < 0)
        if len(keyless):
            runs = np.arange(len(keyless)) // RUN_ROWS
            chosen[keyless] = (self._next_keyless + runs) % self.partitions
            self._next_keyless = int(self._next_keyless + runs[-1] + 1) % self.partitions
        return chosen

    def split(self, columns: RecordColumns, explicit: pa.Array | None) -> Iterator[tuple[int, RecordColumns]]:
        """(partition, its rows in their order) for every partition that gets any."""
        if len(columns) == 0:
            return
        chosen = self.choose(columns, explicit)
        first = int(chosen[0])
        if (chosen == first).all():
            yield first, columns
            return
        order = np.argsort(chosen, kind="stable")
        sorted_columns = _take(columns, pa.array(order))
        counts = np.bincount(chosen, minlength=self.partitions)
        start = 0
        for partition, count in enumerate(counts.tolist()):
            if count:
                yield partition, sorted_columns.slice(start, count)
                start += count

    def _take_explicit(self, explicit: pa.Array, chosen: NDArray[np.int32]) -> None:
        if not (pa.types.is_integer(explicit.type) or pa.types.is_null(explicit.type)):
            raise InvalidError(
                f"column 'partition' is {explicit.type}; give partition numbers, null for none"
            )
        bounds = pc.min_max(explicit.cast(pa.int64()))
        for wrong in (bounds["min"].as_py(), bounds["max"].as_py()):
            if wrong is not None and not 0 <= wrong < self.partitions:
                raise InvalidError(
                    f"topic {self.topic} has no partition {wrong}; it has 0 to {self.partitions - 1}",
                    kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
                )
        given = explicit.cast(pa.int32()).fill_null(-1)
        chosen[:] = given.to_numpy(zero_copy_only=False)


def _valid(array: pa.Array) -> NDArray[np.bool_]:
    valid: NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _buffers(array: pa.BinaryArray) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The bytes and the n + 1 offsets of a binary column, where they lie."""
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(data if data is not None else b"", np.uint8), bounds


def _take(columns: RecordColumns, order: pa.Array) -> RecordColumns:
    return RecordColumns(
        columns.key.take(order),
        columns.value.take(order),
        columns.timestamp.take(order),
        None if columns.headers is None else columns.headers.take(order),
    )
