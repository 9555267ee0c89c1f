"""Records that could not be read or are faulty, kept with the table: their place, the reason, and their bytes.

They are kept up to a limit of bytes; further ones are only counted. A letter's size is estimated from its own bytes,
in the order of the topic, so which ones are kept does not depend on how the topic was cut.

Thread rule: the draining thread puts; reading from any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.kernels.windows import admit_sizes
from tidegate.storage import Merge, RuntimeContext, StoreSpec
from tidegate.windows.stores.key_value_store import KeyValueStore
from tidegate.windows.stores.segmented_store import RowsState

DEAD_LETTER_SCHEMA: Final = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)
LETTER_BYTES: Final = 64  # of a letter, besides reason, key and value
_STORED: Final = StoreSpec(
    name="dead-letters",
    merge=Merge.LAST,
    payload=pa.schema(
        [
            pa.field("reason", pa.string()),
            pa.field("value", pa.binary()),
            pa.field("record_key", pa.binary()),
        ]
    ),
    bucket_ms=1 << 40,
)
"""Dead letters in storage: key = partition as 4 bytes, ts = 0, seq = offset."""


def letters_of(
    records: pa.RecordBatch, rows: npt.NDArray[np.int64], reasons: Sequence[str]
) -> pa.RecordBatch:
    """Return these rows of a batch of the topic as dead letters."""
    picked = records.take(pa.array(rows))
    offset, partition, key, value = (picked.column(name) for name in ("offset", "partition", "key", "value"))
    letters = [
        offset,
        partition,
        pa.array(reasons, pa.string()),
        key.cast(pa.binary()),
        value.cast(pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(letters, schema=DEAD_LETTER_SCHEMA)


class LettersState(RowsState):
    """The dead letters of a table, and in every checkpoint how many bytes of them are kept."""

    def __init__(self, context: RuntimeContext) -> None:
        super().__init__(_STORED)
        self.kept_bytes = 0
        self._store = KeyValueStore(context, self)

    def encode_progress(self) -> bytes:
        return self.kept_bytes.to_bytes(8, "big")

    def restore_progress(self, data: bytes) -> None:
        self.kept_bytes = int.from_bytes(data, "big")
        self.restored()

    def put(self, letters: pa.RecordBatch, limit_bytes: int) -> int:
        """Store letters, in all up to the limit; return how many of these were not kept."""
        sizes = np.full(letters.num_rows, LETTER_BYTES, np.int64)
        for name in ("reason", "key", "value"):
            sizes += pc.fill_null(pc.binary_length(letters.column(name)), 0).to_numpy().astype(np.int64)
        admitted = np.empty(letters.num_rows, np.uint8)
        kept_bytes = admit_sizes(sizes, self.kept_bytes, limit_bytes, admitted)
        kept = letters.filter(pa.array(admitted.astype(np.bool_)))
        if kept.num_rows:
            self._store.put_batch(_rows(kept), stream_time=0)
        self.kept_bytes = kept_bytes
        return int(letters.num_rows - kept.num_rows)

    def read(self) -> pa.Table:
        """Return all letters, in the order of partition and offset."""
        pieces: list[pa.Table] = []
        with self._store.open_scan(0) as scan:
            for batch in scan:
                partition = [int.from_bytes(key, "big") for key in batch.column("key").to_pylist()]
                columns = {
                    "offset": batch.column("seq"),
                    "partition": pa.array(partition, pa.int32()),
                    "reason": batch.column("reason"),
                    "key": batch.column("record_key"),
                    "value": batch.column("value"),
                }
                pieces.append(pa.table(columns).cast(DEAD_LETTER_SCHEMA))
        found = pa.concat_tables(pieces) if pieces else DEAD_LETTER_SCHEMA.empty_table()
        return found.sort_by([("partition", "ascending"), ("offset", "ascending")])


def _rows(letters: pa.RecordBatch) -> pa.RecordBatch:
    partitions = [number.to_bytes(4, "big") for number in letters.column("partition").to_pylist()]
    return pa.record_batch(
        {
            "key": pa.array(partitions, pa.binary()),
            "ts": pa.array(np.zeros(letters.num_rows, np.int64)),
            "seq": letters.column("offset"),
            "deleted": pa.array(np.zeros(letters.num_rows, np.bool_)),
            "reason": letters.column("reason"),
            "value": letters.column("value"),
            "record_key": letters.column("key"),
        }
    )
