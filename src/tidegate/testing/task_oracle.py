"""What the tasks of a flow must say, one record at a time: deduplication, then windows, by the source's own clock.

`stream` is events in the order of a partition, with jitter, late ones and copies; `rows_of` brings them into a log;
`expected` is an oracle that met them in the order of a task; `said` is its table in the bytes that a changelog holds.

Thread rule: for tests, one thread.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

from tidegate.testing.dedupe import Oracle as DedupeOracle
from tidegate.testing.dedupe import Record as DedupeRecord
from tidegate.testing.windows import Clock, Record, WindowOracle, oracle_of
from tidegate.windows.keys import KeyFormat
from tidegate.windows.kinds import Deduplicate, Session, Sliding, WindowKind

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

    def judge(self, record: Record) -> int:
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
    first, oracle = None if rule is None else DedupeOracle(rule), oracle_of(kind, emit)
    oracle.clock = SourceClock(stamps)
    for partition, offset, event in events:
        key = event["who"].encode()
        if first is not None:
            verdict = first.judge(DedupeRecord(event["id"], event["ts"], offset, key, partition))
            if not first.goes_on(verdict):
                continue
        oracle.process(Record(key, event["ts"], event["n"], offset, partition))
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
