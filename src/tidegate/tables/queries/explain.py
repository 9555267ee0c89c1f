"""Why a window has the value it has: the records of the topic that set it, what was left out, what is still to come.

The table keeps for each window the offset that set it; the rest comes from reading the topic again, from its first
record to its end, looking for this very key. So an explanation costs a scan of the partitions, and is as complete as
the topic still is: what aged out or was compacted away is said to be gone, not guessed.

| outcome | the record |
|---|---|
| current | set the value the table has now |
| replaced | was overwritten by a later one |
| deletion | has no value: it removed the window |
| expired | came when its window lay beyond the retention, and was not stored |
| waiting | is in the topic, and not in the table yet |

Thread rule: pure but for reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.tables.building.partition_state import PartitionState
from tidegate.tables.building.shape import TableRules, TableShape
from tidegate.tables.building.source import TableSource
from tidegate.tables.queries.reading import rows_of_key
from tidegate.tables.queries.results import Rows, window_of
from tidegate.windows.keys.columns import decode_keys
from tidegate.windows.keys.layouts import KeyFormat, SessionWindow, TimeWindow, encode_key


@dataclass(frozen=True, slots=True)
class Contribution:
    """One record for the window."""

    partition: int
    offset: int
    timestamp: int | None
    outcome: str
    value: Any


@dataclass(frozen=True, slots=True)
class Reach:
    """What of a partition could be looked at, and what of it the table has seen."""

    partition: int
    first_offset: int  # what lies before it has aged out
    position: int
    end_offset: int


@dataclass(frozen=True)
class Explanation:
    """Everything known about one window's value."""

    key: Any
    window: TimeWindow | SessionWindow | None
    value: Any
    is_expired: bool
    contributions: tuple[Contribution, ...]
    reach: tuple[Reach, ...]
    current: Contribution | None
    """The record that set the value, as the table knows it: known also when it has aged out of the topic."""

    @property
    def aged_out(self) -> bool:
        """Whether records before the topic's beginning may have been part of this."""
        return any(reach.first_offset > 0 for reach in self.reach)

    @property
    def waiting_offsets(self) -> int:
        """How many offsets of the topic the table has not seen yet."""
        return sum(max(0, reach.end_offset - reach.position) for reach in self.reach)

    def lines(self) -> list[str]:
        """The explanation in words."""
        where = "" if self.window is None else f" in [{self.window.start}, {self.window.end}]"
        told = [f"{self.key!r}{where}: " + ("no value" if self.value is None else repr(self.value))]
        if self.is_expired:
            told.append("the window lies beyond the table's retention: it is not stored and not answered")
        if self.current is not None:
            told.append(f"set by partition {self.current.partition} offset {self.current.offset}")
        for each in self.contributions:
            told.append(
                f"  partition {each.partition} offset {each.offset} timestamp {each.timestamp}: {each.outcome}"
            )
        for reach in self.reach:
            if reach.first_offset > 0:
                told.append(
                    f"partition {reach.partition}: offsets before {reach.first_offset} have aged out of the topic"
                )
            if reach.end_offset > reach.position:
                told.append(
                    f"partition {reach.partition}: waits for {reach.end_offset - reach.position} more offsets, up to "
                    f"{reach.end_offset}"
                )
        return told

    def __str__(self) -> str:
        return "\n".join(self.lines())


def explain(source: TableSource, log: Any, key: bytes, ts: int, seq: int) -> Explanation:
    """Look the window up and read the topic again."""
    rules = source.rules
    shape = rules.shape
    found = list(_present(source, key, ts, seq))
    contributions: list[Contribution] = []
    reaches: list[Reach] = []
    wanted = _raw_key(shape, key, ts, seq)
    for state in source.partitions:
        current = next((row.offset for row in found if row.partition == state.partition), None)
        seen, reach = _records(source, log, state, wanted, current, ts)
        contributions += seen
        reaches.append(reach)
    latest = found[-1] if found else None
    current_one = (
        None
        if latest is None
        else Contribution(latest.partition, latest.offset, latest.timestamp, "current", latest.value)
    )
    return Explanation(
        key=rules.key.decode(key),
        window=window_of(shape, ts, seq),
        value=None if latest is None else latest.value,
        is_expired=shape.is_windowed and all(ts < state.readable_from for state in source.partitions),
        contributions=tuple(contributions),
        reach=tuple(reaches),
        current=current_one,
    )


def _present(source: TableSource, key: bytes, ts: int, seq: int) -> Rows:
    batches = [batch.filter(pc.equal(batch.column("seq"), seq)) for batch in rows_of_key(source, key, ts, ts)]
    return Rows.of(batches, source.rules)


def _raw_key(shape: TableShape, key: bytes, ts: int, seq: int) -> bytes:
    window = window_of(shape, ts, seq)
    if window is None:
        return key
    return encode_key(key, window, KeyFormat(shape.key_format)) or b""


def _records(
    source: TableSource, log: Any, state: PartitionState, wanted: bytes, current: int | None, ts: int
) -> tuple[list[Contribution], Reach]:
    rules, number = source.rules, state.partition
    scalar = pa.scalar(wanted, pa.binary())
    found: list[Contribution] = []
    observed = -1
    with log.reader(
        rules.shape.topic, [number], start="earliest", isolation=rules.consumed.isolation
    ) as reader:
        first, end = reader.positions()[number], reader.end_offsets()[number]
        for batch in reader:
            mine = np.flatnonzero(pc.fill_null(pc.equal(batch.column("key"), scalar), False))
            running = _observed(rules, batch, observed)
            for row in mine.tolist():
                found.append(_contribution(rules, state, batch, row, current, ts, int(running[row])))
            observed = int(running[-1])
    return found, Reach(number, first, state.next_offset, end)


def _observed(rules: TableRules, batch: pa.RecordBatch, before: int) -> Any:
    """The observed time at each record of the batch."""
    if not rules.shape.is_windowed:
        return np.full(batch.num_rows, -1, np.int64)
    size_ms = rules.shape.size_ms if rules.shape.kind == "window" else None
    keys = decode_keys(batch.column("key"), rules.key_format, size_ms=size_ms, checks=rules.checks)
    ts = keys.end if rules.shape.kind == "session" else keys.start
    return np.maximum(np.maximum.accumulate(np.where(keys.good, ts, -1)), before)


def _contribution(
    rules: TableRules,
    state: PartitionState,
    batch: pa.RecordBatch,
    row: int,
    current: int | None,
    ts: int,
    observed: int,
) -> Contribution:
    offset = int(batch.column("offset")[row].as_py())
    raw = batch.column("value")[row].as_py()
    shape, width = rules.shape, rules.shape.segment_ms
    timestamp = batch.column("timestamp").view(pa.int64())[row].as_py()
    if offset >= state.next_offset:
        outcome = "waiting"
    elif offset == current:
        outcome = "current"
    elif shape.is_windowed and ts // width < max(0, observed - shape.retention_ms) // width:
        outcome = "expired"
    elif raw is None:
        outcome = "deletion"
    else:
        outcome = "replaced"
    return Contribution(state.partition, offset, timestamp, outcome, _readable(rules, raw))


def _readable(rules: TableRules, raw: bytes | None) -> Any:
    decoded = rules.value.decode_column(pa.array([raw], pa.binary()))
    return raw if len(decoded.bad_rows) else decoded.values[0].as_py()
