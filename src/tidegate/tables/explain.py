"""Explain a window's value: the topic's records that set it, those that were left out, and those not read yet.

The table keeps for each window the offset that set its value, and for each cell of time the range of offsets with its
records (`snapshot.OffsetCells`). The rest is read again: the offsets of the window's cell, and a few of those that
the table has not read yet. Records that aged out or were compacted away are reported as gone. For plain keys, which
have no time to search by, only the record that set the value is read again. Outcomes of a record: `current`,
`replaced`, `deletion`, `expired`, `unreadable` (a dead letter), `waiting` (not in the table yet).

Thread rule: pure functions, except for reading the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import OffsetOutOfRangeError
from tidegate.tables.ingest.consumer import first_and_end
from tidegate.tables.options import TableRules
from tidegate.tables.queries import rows_of_keys
from tidegate.tables.rows import Row, Rows, StoredForm, window_of
from tidegate.tables.snapshot import Cell, PartitionState, TableSource
from tidegate.windows.keys import KeyFormat, SessionWindow, TimeWindow, encode_key

MOST_WAITING: Final = 100_000  # offsets beyond the table's position that are read


@dataclass(frozen=True, slots=True)
class Contribution:
    """One record for the window; `reason` says why it was left out, if it was."""

    partition: int
    offset: int
    timestamp: int | None
    outcome: str
    value: Any
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Reach:
    """The offsets of a partition that may have records of the window, and how many of them could be read.

    `low_offset` to `high_offset` (-1, -1: none) hold every record of the window that the table has read; `records`
    counts the records in that cell, including those of other keys and of windows close by.
    """

    partition: int
    first_offset: int  # earlier offsets have aged out
    position: int
    end_offset: int
    low_offset: int
    high_offset: int
    records: int

    @property
    def aged_out(self) -> bool:
        """Whether offsets that may have records of the window are gone from the topic."""
        return 0 <= self.low_offset < self.first_offset


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
        """Whether records that are gone from the topic may have been part of the value."""
        return any(reach.aged_out for reach in self.reach)

    @property
    def waiting_offsets(self) -> int:
        """The number of offsets of the topic that the table has not read yet."""
        return sum(max(0, reach.end_offset - reach.position) for reach in self.reach)

    def lines(self) -> list[str]:
        """Return the explanation as lines of text."""
        where = "" if self.window is None else f" in [{self.window.start}, {self.window.end}]"
        told = [f"{self.key!r}{where}: " + ("no value" if self.value is None else repr(self.value))]
        if self.is_expired:
            told.append("the window lies beyond the table's retention: it is not stored and not answered")
        if self.current is not None:
            told.append(
                f"set by partition {self.current.partition} offset {self.current.offset}{self._gone()}"
            )
        for each in self.contributions:
            why = "" if each.reason is None else f" ({each.reason})"
            told.append(
                f"  partition {each.partition} offset {each.offset} timestamp {each.timestamp}: {each.outcome}{why}"
            )
        for reach in self.reach:
            told += _reach_lines(reach)
        return told

    def _gone(self) -> str:
        current = self.current
        if current is None or any(
            (each.partition, each.offset) == (current.partition, current.offset)
            for each in self.contributions
        ):
            return ""
        first = next(each.first_offset for each in self.reach if each.partition == current.partition)
        return ", which has aged out of the topic" if current.offset < first else ", which was compacted away"

    def __str__(self) -> str:
        return "\n".join(self.lines())


def _reach_lines(reach: Reach) -> list[str]:
    told = []
    if reach.aged_out:
        told.append(
            f"partition {reach.partition}: offsets {reach.low_offset} to "
            f"{min(reach.first_offset - 1, reach.high_offset)} may speak of it and have aged out of the topic"
        )
    if reach.end_offset > reach.position:
        told.append(
            f"partition {reach.partition}: waits for {reach.end_offset - reach.position} more offsets, up to "
            f"{reach.end_offset}"
        )
    return told


def explain(source: TableSource, log: Any, key: bytes, ts: int, seq: int) -> Explanation:
    """Look up the window, and read the records again that may belong to it."""
    rules = source.rules
    shape = rules.shape
    rows = rows_of_keys(source, pa.array([key], pa.binary()), ts, ts)
    batches = [batch.filter(pc.equal(batch.column("seq"), seq)) for batch in rows]
    found = list(Rows.of(batches, StoredForm(rules)))
    contributions: list[Contribution] = []
    reaches: list[Reach] = []
    window = window_of(shape, ts, seq)
    wanted = key if window is None else encode_key(key, window, KeyFormat(shape.key_format)) or b""
    letters = _letters(source, wanted)
    for state in source.partitions:
        row = next((row for row in found if row.partition == state.partition), None)
        reading = _Reading(rules, log, state, wanted, _cell(state, ts, row), row, letters)
        contributions += reading.contributions()
        reaches.append(reading.reach)
    latest = found[-1] if found else None
    current = (
        None
        if latest is None
        else Contribution(latest.partition, latest.offset, latest.timestamp, "current", latest.value)
    )
    return Explanation(
        key=rules.key.decode(key),
        window=window,
        value=None if latest is None else latest.value,
        is_expired=shape.is_windowed and all(ts < state.readable_from for state in source.partitions),
        contributions=tuple(contributions),
        reach=tuple(reaches),
        current=current,
    )


def _cell(state: PartitionState, ts: int, row: Row | None) -> Cell | None:
    """Return the offsets that may have records of the window; only the one that set it where no cell is kept."""
    cell = state.cells.find(ts) if state.shape.is_windowed else None
    if cell is None and row is not None:
        return Cell(1, row.offset, row.offset)
    return cell


def _letters(source: TableSource, wanted: bytes) -> dict[tuple[int, int], tuple[str, bytes | None]]:
    """Return the dead letters with this key: partition and offset → reason, and the value as read."""
    letters = source.letters.read()
    mine = letters.filter(pc.equal(letters.column("key"), pa.scalar(wanted, pa.binary())))
    return {(row["partition"], row["offset"]): (row["reason"], row["value"]) for row in mine.to_pylist()}


class _Reading:
    """Reads one partition again."""

    def __init__(
        self,
        rules: TableRules,
        log: Any,
        state: PartitionState,
        wanted: bytes,
        cell: Cell | None,
        row: Row | None,
        letters: dict[tuple[int, int], tuple[str, bytes | None]],
    ) -> None:
        self._rules, self._log, self._number = rules, log, state.partition
        self._wanted = pa.scalar(wanted, pa.binary())
        self._cell, self._current = cell, None if row is None else row.offset
        self._letters = letters
        topic, isolation = rules.shape.topic, rules.consumed.isolation
        first, end = first_and_end(log, topic, self._number, isolation)
        low, high, count = (-1, -1, 0) if cell is None else (cell.low, cell.high, cell.count)
        self.reach = Reach(self._number, first, state.next_offset, end, low, high, count)

    def contributions(self) -> list[Contribution]:
        reach, found = self.reach, {}
        for (partition, offset), (reason, value) in self._letters.items():
            if partition == self._number:
                found[offset] = Contribution(partition, offset, None, "unreadable", value, reason)
        stretches = [(reach.position, min(reach.end_offset, reach.position + MOST_WAITING))]
        if self._cell is not None:
            stretches.insert(0, (reach.low_offset, min(reach.high_offset + 1, reach.position)))
        for start, stop in stretches:
            for each in self._records(max(start, reach.first_offset), stop):
                found.setdefault(each.offset, each)
        return [found[offset] for offset in sorted(found)]

    def _records(self, start: int, stop: int) -> Iterator[Contribution]:
        """Yield the window's records from `start` up to `stop`; records deleted meanwhile are left out."""
        if start >= stop:
            return
        number = self._number
        try:
            with self._log.reader(
                self._rules.shape.topic,
                [number],
                start={number: start},
                stop={number: stop},
                isolation=self._rules.consumed.isolation,
            ) as reader:
                for batch in reader:
                    mine = pc.fill_null(pc.equal(batch.column("key"), self._wanted), False)
                    for row in np.flatnonzero(mine).tolist():
                        yield self._contribution(batch, row)
        except OffsetOutOfRangeError:
            return

    def _contribution(self, batch: pa.RecordBatch, row: int) -> Contribution:
        offset = int(batch.column("offset")[row].as_py())
        raw = batch.column("value")[row].as_py()
        timestamp = batch.column("timestamp").view(pa.int64())[row].as_py()
        dropped_from = -1 if self._cell is None else self._cell.dropped_from
        reason = None
        if offset >= self.reach.position:
            outcome = "waiting"
        elif offset == self._current:
            outcome = "current"
        elif 0 <= dropped_from <= offset:
            outcome, reason = "expired", "it came when the window lay beyond the retention"
        else:
            outcome = "deletion" if raw is None else "replaced"
        decoded = self._rules.value.decode_column(pa.array([raw], pa.binary()))
        value = raw if len(decoded.bad_rows) else decoded.values[0].as_py()
        return Contribution(self._number, offset, timestamp, outcome, value, reason)
