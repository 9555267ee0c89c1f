"""Where the records of a window lie: of each source partition how many, and their lowest and highest offset.

Every window keeps one count and one range of offsets (`folds.Notes`), which says all while a task has one source
partition. Behind a change of keys records of many partitions meet in one window, and offsets of different partitions
say nothing about each other: there this aggregate stands beside the user's, and `tables.queries.source_records` finds
the records again.

The state is a list of whole numbers, four for each partition, ascending by partition: partition, count, lowest and
highest offset. The same records give the same state however they were cut and merged.

Thread rule: pure values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from tidegate.storage.runs.assembling import int64_column, words
from tidegate.windows.aggregates.lists import Int32s, Int64s, cut_lists, list_lengths

WIDTH: Final = 4  # numbers of a partition
RESULT: Final = pa.list_(
    pa.struct(
        [
            pa.field("partition", pa.int32()),
            pa.field("count", pa.int64()),
            pa.field("min_offset", pa.int64()),
            pa.field("max_offset", pa.int64()),
        ]
    )
)


@dataclass(frozen=True, slots=True)
class SourceRanges:
    """The result is a list of structs: partition, count, min_offset, max_offset."""

    name: str = "sources"
    inputs: tuple[str, ...] = ("partition", "offset")

    @property
    def state(self) -> tuple[pa.Field, ...]:
        return (pa.field(self.name, pa.list_(pa.int64())),)

    @property
    def result(self) -> pa.DataType:
        return RESULT

    def partial(self, rows: pa.RecordBatch, groups: Int32s, count: int) -> list[pa.Array]:
        partitions = rows.column("partition").to_numpy().astype(np.int64)
        offsets = words(rows.column("offset"))
        return [_joined(groups, partitions, np.ones(len(groups), np.int64), offsets, offsets, count)]

    def merge(self, states: Sequence[pa.Array], groups: Int32s, count: int) -> list[pa.Array]:
        numbers = words(states[0].flatten()).reshape(-1, WIDTH)
        owners = np.repeat(groups, list_lengths(states[0]) // WIDTH)
        partitions, counts, lows, highs = (np.ascontiguousarray(column) for column in numbers.T)
        return [_joined(owners, partitions, counts, lows, highs, count)]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        numbers = words(states[0].flatten()).reshape(-1, WIDTH)
        ends = np.append(0, np.cumsum(list_lengths(states[0]) // WIDTH)).astype(np.int32)
        fields = list(RESULT.value_type)
        columns = [
            pa.array(np.ascontiguousarray(column)).cast(each.type)
            for column, each in zip(numbers.T, fields, strict=True)
        ]
        return pa.ListArray.from_arrays(pa.array(ends), pa.StructArray.from_arrays(columns, fields=fields))

    def fingerprint(self) -> str:
        return "source_ranges/1"


def _joined(
    groups: Int32s, partitions: Int64s, counts: Int64s, lows: Int64s, highs: Int64s, count: int
) -> pa.ListArray:
    """One list for each of `count` groups, of every partition once."""
    order = np.lexsort((partitions, groups))
    owners, numbers = groups[order], partitions[order]
    begins = np.flatnonzero(np.append(True, (owners[1:] != owners[:-1]) | (numbers[1:] != numbers[:-1])))
    if not len(order):
        begins = begins[:0]
    joined = np.empty((len(begins), WIDTH), np.int64)
    if len(begins):
        joined[:, 0] = numbers[begins]
        joined[:, 1] = np.add.reduceat(counts[order], begins)
        joined[:, 2] = np.minimum.reduceat(lows[order], begins)
        joined[:, 3] = np.maximum.reduceat(highs[order], begins)
    flat = joined.reshape(-1)
    return cut_lists(int64_column(flat), np.arange(len(flat)), np.repeat(owners[begins], WIDTH), count)
