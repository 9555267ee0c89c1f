"""What deduplication, and the tasks of a flow, must give: plain records and oracles that take one record at a time.

The deduplication oracle keeps every record it accepted and knows nothing of batches, storage or retention. `stream`
makes events in the order of a partition, with jitter, late ones and copies; `rows_of` writes them to a log;
`expected` is an oracle that has processed them in the order of a task; `said` is its table in the bytes of a
changelog.

Thread rule: for tests, one thread.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.randomness import SeededRandomness
from tidegate.windows.events import EventBatch
from tidegate.windows.keys import KeyFormat
from tidegate.windows.kinds import Deduplicate, Session, Sliding, WindowKind
from tidegate.windows.operators.base import Output
from tidegate.windows.operators.dedupe import DedupeOperator
from window_oracles import Clock, WindowOracle, oracle_of
from window_oracles import Record as WindowsRecord
from workers import TASK, Worker

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


START = 1_767_225_600_000
Event = dict[str, Any]


def stream(seed: int, rows: int, *, keys: int = 5) -> list[Event]:
    """Events in the order of a partition: time goes on with jitter, some come late, some twice."""
    chance, now, events = random.Random(seed), START, list[Event]()
    for number in range(rows):
        if events and chance.random() < 0.15:
            events.append(dict(chance.choice(events[-40:])))
            continue
        now += chance.randrange(0, 60)
        late = chance.randrange(0, 2500) if chance.random() < 0.1 else chance.randrange(0, 200)
        who = f"k{chance.randrange(keys)}"
        events.append(
            {"id": f"e{number}", "n": chance.randrange(100), "who": who, "ts": max(START, now - late)}
        )
    return events


def rows_of(events: Iterable[Event]) -> list[tuple[bytes, int, bytes]]:
    """Events as records: key, time, value."""
    return [
        (
            event["who"].encode(),
            event["ts"],
            json.dumps({name: event[name] for name in ("id", "n", "who")}).encode(),
        )
        for event in events
    ]


class SourceClock(Clock):
    """Stream time as the pipeline has it: of the source partition, whatever became of the records in between."""

    def __init__(self, stamps: dict[tuple[int, int], int]) -> None:
        super().__init__()
        self.stamps = stamps

    def judge(self, record: WindowsRecord) -> int:
        self.times[record.partition] = self.stamps[record.partition, record.offset]
        return self.times[record.partition]


def expected(
    kind: WindowKind, emit: str, events: Iterable[tuple[int, int, Event]], rule: Deduplicate | None = None
) -> WindowOracle:
    """The oracle after these (partition, offset, event), in the order a task meets them."""
    events = list(events)
    stamps, times = dict[tuple[int, int], int](), dict[int, int]()
    for partition, offset, event in events:
        times[partition] = max(times.get(partition, -1), event["ts"])
        stamps[partition, offset] = times[partition]
    first, oracle = None if rule is None else Oracle(rule), oracle_of(kind, emit)
    oracle.clock = SourceClock(stamps)
    for partition, offset, event in events:
        key = event["who"].encode()
        if first is not None:
            verdict = first.judge(Record(event["id"], event["ts"], offset, key, partition))
            if not first.goes_on(verdict):
                continue
        oracle.process(WindowsRecord(key, event["ts"], event["n"], offset, partition))
    return oracle


def said(oracle: WindowOracle) -> dict[tuple[bytes, int, int], tuple[int, bytes]]:
    """The table of the oracle's rows, with values as the pipeline writes them: `count` and `sum` of `n`."""
    return {
        window: (ts, json.dumps({"count": len(records), "sum": sum(each.value or 0 for each in records)},
                                separators=(",", ":")).encode())
        for window, (ts, records) in oracle.table.items()
    }  # fmt: skip


def key_format(kind: WindowKind) -> tuple[KeyFormat, int | None]:
    """How the keys of a changelog of these windows are written, and the size that reading them needs."""
    if isinstance(kind, Session):
        return KeyFormat.SESSION, None
    size = kind.difference_ms if isinstance(kind, Sliding) else kind.size_ms  # type: ignore[union-attr]
    return KeyFormat.CHANGELOG, size
