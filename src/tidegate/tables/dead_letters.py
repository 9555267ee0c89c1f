"""Records that could not be read: kept with their place and the reason, or an error that stops the work.

| column | holds |
|---|---|
| partition, offset | where the record is in its topic |
| reason | what is wrong with it, in words |
| key, value | its bytes, as read |

I1  with `fail` the first such record stops the work, and no record of its batch is used.
I2  with `keep` all of them are kept until `take`; none is dropped. When too many bytes are waiting, adding more is
    refused.
I3  with `drop` they are counted and not kept.

Thread rule: one owner, the operator's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import CorruptError, InvalidError, OverloadError
from tidegate.integrity.validator import OnError

DEAD_LETTER_SCHEMA: Final = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)
LARGEST_BYTES: Final = 64 << 20


class DeadLetters:
    """The dead letters of one topic that were not taken yet."""

    def __init__(
        self,
        topic: str,
        policy: OnError | str = OnError.FAIL,
        *,
        limit_bytes: int = LARGEST_BYTES,
    ) -> None:
        self.topic = topic
        self.policy = OnError.of(policy)
        self.limit_bytes = limit_bytes
        self.total = 0
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._waiting)

    def add(
        self,
        rows: npt.NDArray[np.int64],
        reasons: Sequence[str],
        *,
        offsets: npt.NDArray[np.int64],
        partitions: npt.NDArray[np.int32],
        keys: pa.BinaryArray,
        values: pa.BinaryArray,
    ) -> None:
        """Keep these rows of a batch, or only count them (`drop`); with `fail` raise an error about the first of them.

        `rows` are positions in the other columns, which are those of the whole batch.
        """
        if len(rows) != len(reasons):
            raise InvalidError(f"{len(reasons)} reasons for {len(rows)} rows")
        if len(rows) == 0:
            return
        if self.policy is OnError.FAIL:
            offset, partition = int(offsets[rows[0]]), int(partitions[rows[0]])
            raise CorruptError(
                f"topic {self.topic} partition {partition} offset {offset} cannot be read: {reasons[0]}"
                f"{f' (and {len(rows) - 1} more in this batch)' if len(rows) > 1 else ''}. Mend the producer, declare"
                " the value as it is, or set such records aside with Consumed(…, on_value_error='keep')",
                offset=offset,
                kafka_name=None,
            )
        if self.policy is OnError.DROP:
            self.total += len(rows)
            return
        picked = pa.array(rows)
        batch = pa.record_batch(
            [
                pa.array(offsets[rows], pa.int64()),
                pa.array(partitions[rows], pa.int32()),
                pa.array(list(reasons), pa.string()),
                keys.take(picked).cast(pa.binary()),
                values.take(picked).cast(pa.binary()),
            ],
            schema=DEAD_LETTER_SCHEMA,
        )
        if self._waiting_bytes and self._waiting_bytes + batch.nbytes > self.limit_bytes:
            raise OverloadError(
                f"topic {self.topic}: {len(self)} dead letters ({self._waiting_bytes} bytes) are waiting to be taken"
                f" away and {batch.num_rows} more do not fit {self.limit_bytes} bytes; take them, then go on",
                reason="dead_letters",
            )
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        self.total += batch.num_rows

    def take(self) -> pa.Table:
        """Return all that are waiting, in order, and remove them."""
        taken = pa.Table.from_batches(self._waiting, DEAD_LETTER_SCHEMA)
        self._waiting, self._waiting_bytes = [], 0
        return taken
