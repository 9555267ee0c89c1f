"""A run: the immutable, sorted rows of one bucket, many keys together, with a directory of its keys.

    directory   hash uint64 | key binary | start int32      one line a key, ascending by (hash, key)
    rows        ts int64 | seq int64 | [deleted bool] | payload…   the rows of key i are start[i] … start[i+1]

`hash` is XXH64 of the key, seed 0, and is part of the disk format. Its top ten bits are the key group, so
the rows of one key group are one slice. Two keys with one hash are two lines: bytes are always compared.

Invariants: rows of a key ascend by (ts, seq), each identity once; every ts lies in the bucket; the directory
names no key without rows. A run is never changed: readers, maintenance and a checkpoint share it freely.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

DIRECTORY = pa.schema(
    [
        pa.field("hash", pa.uint64(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("start", pa.int32(), nullable=False),
    ]
)

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Run:
    """Rows of one bucket. Build one with `runs.build` or `runs.merge`; read one with `pack`."""

    bucket: int
    directory: pa.RecordBatch
    rows: pa.RecordBatch

    @property
    def row_count(self) -> int:
        return int(self.rows.num_rows)

    @property
    def key_count(self) -> int:
        return int(self.directory.num_rows)

    @cached_property
    def nbytes(self) -> int:
        """Logical bytes: the size of these rows, not of the buffers they are slices of."""
        return int(self.directory.nbytes + self.rows.nbytes)

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint64]:
        return self._numbers(self.directory.column(0))

    @cached_property
    def starts(self) -> npt.NDArray[np.int32]:
        """The start of each key's rows, and the end of the last key's."""
        starts = np.empty(self.key_count + 1, np.int32)
        starts[:-1] = self._numbers(self.directory.column(2))
        starts[-1] = self.row_count
        return starts

    @cached_property
    def ts(self) -> Int64s:
        return self._numbers(self.rows.column(0))

    @cached_property
    def seq(self) -> Int64s:
        return self._numbers(self.rows.column(1))

    @cached_property
    def min_ts(self) -> int:
        return int(self.ts.min())

    @cached_property
    def max_ts(self) -> int:
        return int(self.ts.max())

    @property
    def keys(self) -> pa.BinaryArray:
        return self.directory.column(1)

    def row_keys(self) -> pa.DictionaryArray:
        """The key of every row, as a dictionary over the directory."""
        counts = np.diff(self.starts)
        indices = np.repeat(np.arange(self.key_count, dtype=np.int32), counts)
        return pa.DictionaryArray.from_arrays(pa.array(indices), self.keys)

    @staticmethod
    def _numbers(column: pa.Array) -> npt.NDArray[Any]:
        numbers: npt.NDArray[Any] = column.to_numpy(zero_copy_only=True)
        return numbers
