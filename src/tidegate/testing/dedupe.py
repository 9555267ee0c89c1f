"""Deduplication for tests: records as plain values, batches of them, and an oracle that takes one at a time.

The oracle keeps everything it ever accepted and knows nothing of batches, storage or retention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.randomness import SeededRandomness
from tidegate.testing.workers import TASK, Worker
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Deduplicate
from tidegate.windows.operators.base import Output
from tidegate.windows.operators.dedupe import DedupeOperator

VALUES = pa.schema([pa.field("id", pa.string()), pa.field("n", pa.int64())])


@dataclass(frozen=True)
class Record:
    """One record as the oracle sees it."""

    id: str | None
    ts: int
    offset: int
    key: bytes | None = b"k"
    partition: int = 0


def batch_of(records: Sequence[Record]) -> EventBatch:
    return EventBatch(
        key=pa.array([each.key for each in records], pa.binary()),
        ts=np.array([each.ts for each in records], np.int64),
        offset=np.array([each.offset for each in records], np.int64),
        partition=np.array([each.partition for each in records], np.int32),
        stream_time=np.full(len(records), -1, np.int64),
        values=pa.RecordBatch.from_arrays(
            [pa.array([each.id for each in records], pa.string()), pa.array(range(len(records)), pa.int64())],
            schema=VALUES,
        ),
    )


def operator_on(
    worker: Worker, definition: Deduplicate, *, bucket_ms: int = 50, **options: Any
) -> DedupeOperator:
    return DedupeOperator(
        worker.runtime, TASK, "dedupe", definition, VALUES,
        bucket_ms=bucket_ms, randomness=SeededRandomness(7), **options,
    )  # fmt: skip


def forwarded(output: Output) -> list[tuple[int, int]]:
    if not isinstance(output.rows, EventBatch):
        raise TypeError("deduplication sends events on")
    return list(zip(output.rows.partition.tolist(), output.rows.offset.tolist(), strict=True))


@dataclass
class Oracle:
    """The rules, one record at a time, with everything ever accepted."""

    definition: Deduplicate
    times: dict[int, int] = field(default_factory=dict)
    known: dict[tuple[bytes | None, str], list[tuple[int, int, int]]] = field(default_factory=dict)

    def judge(self, record: Record) -> str:
        d = self.definition
        if record.id is None:
            return "no_id"
        stream_time = max(self.times.get(record.partition, -1), record.ts)
        self.times[record.partition] = stream_time
        seen = self.known.setdefault((record.key, record.id), [])
        is_own = (record.ts, record.offset, record.partition) in seen
        judged = max(stream_time, min(self.times.values()))
        if record.ts < judged - d.grace_ms:
            is_kept = record.ts > judged - d.within_ms - d.grace_ms
            return "replays" if is_own and is_kept else "late"
        if is_own:
            return "replays"
        if any(abs(record.ts - ts) < d.within_ms for ts, _, _ in seen):
            if d.refresh and not any(ts == record.ts for ts, _, _ in seen):
                seen.append((record.ts, -1 - record.offset, record.partition))
            return "duplicates"
        seen.append((record.ts, record.offset, record.partition))
        return "new"

    def goes_on(self, verdict: str) -> bool:
        return verdict in ("new", "replays", "no_id") or (
            verdict == "late" and self.definition.late == "forward"
        )
