"""Explain the value of a window of an app's table: the source records that belong to it, and the outcome of each.

The source topic is read again, from the window's start (and earlier by the deduplication horizon), up to a number of
records. Where event time is a column of the values, the log has no index of it: then the whole topic is read, up to
that number. Records that were set aside come from the app's late table and dead letters, so these outcomes are the
app's own; duplicates are found by the same columns and the same horizon.

| outcome | the record |
|---|---|
| counted | is part of the value |
| duplicate | has the id of an earlier one; `reason` names it |
| repeated | is stored twice: the same producer's same number |
| late, future | was set aside for its time |
| dead letter | could not be read or was proven corrupt, and was set aside with the reason |
| waiting | is in the topic, and not in this commit yet |

Only for flows whose state is kept by the source's own key: a re-keyed window has records of every partition.

Thread rule: pure functions, except for reading the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import MomentLike, moment_ms
from tidegate.errors import InvalidError, OffsetOutOfRangeError
from tidegate.integrity.columns import read_columns
from tidegate.kernels.integrity import MANAGED
from tidegate.pipeline.decoder import RecordDecoder
from tidegate.pipeline.expressions import value_schema
from tidegate.pipeline.topology import Dedupe
from tidegate.windows.events import NO_TIME

if TYPE_CHECKING:
    from tidegate.pipeline.table import ResultTable

MOST_RECORDS: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class Contribution:
    """One record of the window, and its outcome."""

    partition: int
    offset: int
    timestamp: int
    outcome: str
    value: Any
    reason: str = ""


@dataclass(frozen=True)
class WindowExplanation:
    """Everything known about one window. `is_whole`: all source records that may belong to it were read."""

    key: Any
    start: int
    end: int
    value: dict[str, Any] | None
    contributions: tuple[Contribution, ...]
    looked_at: int
    is_whole: bool
    notes: tuple[str, ...]

    @property
    def counted(self) -> int:
        return sum(1 for each in self.contributions if each.outcome == "counted")


def explain_window(
    table: ResultTable,
    log: Any,
    key: Any,
    start: MomentLike,
    *,
    most_records: int = MOST_RECORDS,
    between: Callable[[], None] = lambda: None,
) -> WindowExplanation:
    """Explain the window that starts at this time; `between` is called between batches, and may raise."""
    flow = table.flow
    if flow.rekey_at is not None:
        raise InvalidError(
            f"table {flow.name} is kept by another key than its source's, so a window's records lie anywhere in "
            f"{flow.source.topic}; look for them there by value"
        )
    moment = moment_ms(start)
    with table.pinned() as at:
        rows = [(each, each.window) for each in at.fetch(key, moment, moment)]
        row, window = next(((row, of) for row, of in rows if of and of.start == moment), (None, None))
        end = window.end if window is not None else moment + _size_ms(at)
        return _Reading(at, log, key, moment, end, most_records, between).explanation(
            None if row is None else row.value
        )


class _Reading:
    """Reads the source again for one window."""

    def __init__(
        self,
        table: ResultTable,
        log: Any,
        key: Any,
        start: int,
        end: int,
        most: int,
        between: Callable[[], None],
    ) -> None:
        self._table, self._log, self._key, self._between = table, log, key, between
        source = table.flow.source
        self._decoder = (
            None if source.timestamp is None else RecordDecoder(source, value_schema(source.value))
        )
        self._start, self._end, self._most = start, end, most
        self._raw = table.flow.key_serde.encode(key)
        self._position = table.position
        rules = [step.rule for step in table.flow.steps if isinstance(step, Dedupe)]
        self._rule = rules[0] if rules else None
        self._aside = _set_aside(table)
        self._ids: dict[Any, tuple[int, int]] = {}
        self._stamps: set[tuple[int, int, int, int]] = set()
        self._read = 0

    def explanation(self, value: dict[str, Any] | None) -> WindowExplanation:
        contributions: list[Contribution] = []
        is_whole = True
        for number in sorted(self._position):
            found, reached = self._partition(number)
            contributions += found
            is_whole &= reached
        notes = self._notes(value, contributions, is_whole)
        return WindowExplanation(
            self._key, self._start, self._end, value, tuple(contributions), self._read, is_whole, tuple(notes)
        )

    def _partition(self, number: int) -> tuple[list[Contribution], bool]:
        before = 0 if self._rule is None else self._rule.within_ms
        topic = self._table.flow.source.topic
        start: Any = "start"
        if self._decoder is None:
            first = self._log.offset_for_time(topic, number, max(0, self._start - before))
            if first is None:
                return [], True
            start = {number: first}
        found = []
        try:
            with self._log.reader(topic, [number], start=start) as reader:
                end = reader.end_offsets()[number]
                for batch in reader:
                    self._between()
                    self._read += batch.num_rows
                    found += [each for each in self._mine(batch, number) if each is not None]
                    if self._read >= self._most:
                        return found, reader.positions()[number] >= end
        except OffsetOutOfRangeError:
            return found, False
        return found, True

    def _mine(self, batch: pa.RecordBatch, number: int) -> Iterator[Contribution | None]:
        """The records of the key; those outside of the window only tell which ids were seen."""
        rows = np.flatnonzero(
            pc.fill_null(pc.equal(batch.column("key"), pa.scalar(self._raw, pa.binary())), False)
        )
        if not len(rows):
            return
        batch = batch.take(pa.array(rows))
        times = self._times(batch)
        offsets = batch.column("offset")
        stamps = read_columns(batch.column("headers"))
        for row in range(batch.num_rows):
            offset, time = int(offsets[row].as_py()), times[row]
            raw = batch.column("value")[row].as_py()
            stamp = stamps.rows[row] if stamps.state[row] == MANAGED else None
            outcome, reason = self._outcome(number, offset, time, raw, stamp)
            if time is not None and self._start <= time < max(self._end, self._start + 1):
                yield Contribution(number, offset, time, outcome, raw, reason)

    def _times(self, batch: pa.RecordBatch) -> list[int | None]:
        """The event time of each record; None where it is unknown."""
        if self._decoder is None:
            times: list[int | None] = batch.column("timestamp").cast(pa.int64()).to_pylist()
            return times
        decoded = self._decoder.decode(batch)
        found = self._decoder.event_time(decoded.values, batch.column("timestamp")).tolist()
        bad = set(decoded.bad_rows.tolist())
        return [None if row in bad or time == NO_TIME else time for row, time in enumerate(found)]

    def _outcome(
        self, number: int, offset: int, time: int | None, raw: bytes | None, stamp: Any
    ) -> tuple[str, str]:
        if offset >= self._position[number]:
            return "waiting", "it is in the topic, and not in this commit yet"
        aside = self._aside.get((number, offset))
        if aside is not None:
            return aside
        if stamp is not None:
            own = (
                int(stamp["guid_high"]),
                int(stamp["guid_low"]),
                int(stamp["chain"]),
                int(stamp["sequence"]),
            )
            if own in self._stamps:
                return "repeated", "the same producer's record of the same number stands here already"
            self._stamps.add(own)
        if self._rule is None or time is None:
            return "counted", ""
        name = _id_of(raw, self._rule.columns)
        if name is None:
            return "counted", ""
        earlier = self._ids.get(name)
        if earlier is not None and abs(time - earlier[1]) <= self._rule.within_ms:
            return "duplicate", f"the same {', '.join(self._rule.columns)} as offset {earlier[0]}"
        self._ids[name] = (offset, time)
        return "counted", ""

    def _notes(self, value: dict[str, Any] | None, found: list[Contribution], is_whole: bool) -> list[str]:
        notes = []
        if value is None:
            notes.append(
                "there is no such window: nothing was counted for it, or it lies beyond the table's retention"
            )
        window = self._table.flow.window
        counts = (
            []
            if window is None
            else [each.name for each in window.aggregates if each.kind == "count" and not each.columns]
        )
        counted = sum(1 for each in found if each.outcome == "counted")
        if value is not None and counts:
            said = value[counts[0]]
            if said == counted:
                notes.append(f"{counted} records are counted here, and {counts[0]} says {said}: they agree")
            elif is_whole:
                notes.append(
                    f"{counted} records are found now, and {counts[0]} says {said}: some have left the topic since, "
                    "or a step before the windows left some out"
                )
        if not is_whole:
            notes.append(
                f"only {self._read:,} records of the topic were looked at; later ones may belong to it, too"
            )
        return notes


def _set_aside(table: ResultTable) -> dict[tuple[int, int], tuple[str, str]]:
    """Partition and offset → outcome and reason, of records that the app set aside."""
    found: dict[tuple[int, int], tuple[str, str]] = {}
    late = table.late()
    if late.num_rows:
        for row in late.select(["partition", "offset", "reason", "how_late_ms", "operator"]).to_pylist():
            by = f"{row['how_late_ms']} ms" if row["how_late_ms"] >= 0 else "ahead of time"
            found[row["partition"], row["offset"]] = (
                "future" if "future" in row["reason"] else "late",
                f"{row['reason']} by {by}, set aside by {row['operator']}",
            )
    for row in table.dead_letters().select(["partition", "offset", "reason"]).to_pylist():
        found[row["partition"], row["offset"]] = ("dead letter", row["reason"])
    return found


def _id_of(raw: bytes | None, columns: tuple[str, ...]) -> tuple[Any, ...] | None:
    """The id of a record, None where it lacks one of the columns."""
    try:
        said = msgspec.json.decode(raw or b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(said, dict) or any(
        not isinstance(said.get(name), str | int | float | bool) for name in columns
    ):
        return None
    return tuple(said[name] for name in columns)


def _size_ms(table: ResultTable) -> int:
    window = table.flow.window
    kind = None if window is None else window.kind
    return int(
        getattr(kind, "size_ms", 0) or getattr(kind, "difference_ms", 0) or getattr(kind, "gap_ms", 0) or 1
    )
