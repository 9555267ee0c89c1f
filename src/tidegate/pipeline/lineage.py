"""Explain a window of an app's table: the source records that belong to it, each with its outcome.

| outcome | the record |
|---|---|
| counted | is part of the value |
| duplicate | has the id of an earlier one; `reason` names it |
| repeated | is stored twice: the same producer's same number |
| left out | was dropped by a step in front of the windows; `reason` names the step |
| late, future | was set aside for its time |
| dead letter | could not be read or was proven corrupt, and was set aside with the reason |
| waiting | is in the topic, and not in this commit yet |

The source is read again from the window's start (earlier by the deduplication horizon; from the topic's start where
event time is a column), up to a number of records, and the flow's steps are applied. Lookups and functions of the
app's program are not, nor what follows them; a note says so. Not for re-keyed flows and windows over changes.

Thread rule: pure functions, except for reading the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import MomentLike, moment_ms
from tidegate.errors import InvalidError, OffsetOutOfRangeError
from tidegate.integrity.columns import read_columns
from tidegate.kernels.integrity import MANAGED
from tidegate.pipeline.decoder import RecordDecoder
from tidegate.pipeline.messages import BadRecord
from tidegate.pipeline.topology import Aggregate, Dedupe, Lookup, Validate, needs_program
from tidegate.pipeline.transforms import Around, Stateless, stage_of, step_name
from tidegate.windows.events import NO_TIME, EventBatch, Int64s
from tidegate.windows.kinds import Deduplicate, Hopping, Session, Sliding

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
    if flow.source.windows is not None:
        raise InvalidError(
            f"table {flow.name} counts the rows of the table that is kept in topic {flow.source.topic}, not records; "
            "explain the rows of that table"
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
        flow = table.flow
        self._decoder = RecordDecoder(flow.source, flow.schemas[0])
        self._has_own_time = flow.source.timestamp is not None
        kind = None if flow.window is None else flow.window.kind
        is_inclusive = isinstance(kind, Sliding | Session)
        self._start, self._end, self._most = start, end, most
        self._stop = max(end + is_inclusive, start + 1)
        self._closes_at = end + kind.grace_ms if isinstance(kind, Sliding) else None
        self._stream_time = NO_TIME
        self._raw = flow.key_serde.encode(key)
        self._position = table.position
        self._steps, self._unknown = _applied(table)
        self._horizon_ms = max(
            (rule.within_ms for rule in self._steps if isinstance(rule, Deduplicate)), default=0
        )
        self._validates = any(isinstance(step, Validate) for step in flow.steps)
        self._aside = _set_aside(table)
        self._ids: dict[tuple[Deduplicate, Any], tuple[int, int]] = {}
        self._stamps: set[tuple[int, ...]] = set()
        self._read = 0

    def explanation(self, value: dict[str, Any] | None) -> WindowExplanation:
        contributions: list[Contribution] = []
        is_whole = True
        for number in sorted(self._position):
            self._stream_time = NO_TIME
            found, reached = self._partition(number)
            contributions += found
            is_whole &= reached
        notes = self._notes(value, contributions, is_whole)
        return WindowExplanation(
            self._key, self._start, self._end, value, tuple(contributions), self._read, is_whole, tuple(notes)
        )

    def _partition(self, number: int) -> tuple[list[Contribution], bool]:
        topic = self._table.flow.source.topic
        start: Any = "start"
        if not self._has_own_time:
            first = self._log.offset_for_time(topic, number, max(0, self._start - self._horizon_ms))
            if first is None:
                return [], True
            start = {number: first}
        found: list[Contribution] = []
        try:
            with self._log.reader(topic, [number], start=start) as reader:
                end = reader.end_offsets()[number]
                for batch in reader:
                    self._between()
                    self._read += batch.num_rows
                    found += self._mine(batch, number)
                    if self._read >= self._most:
                        return found, reader.positions()[number] >= end
        except OffsetOutOfRangeError:
            return found, False
        return found, True

    def _mine(self, batch: pa.RecordBatch, number: int) -> Iterator[Contribution]:
        """Yield the key's records in the window; those outside of it only tell which ids were seen."""
        stream_times = None if self._closes_at is None else self._stream_times(batch)
        rows = np.flatnonzero(
            pc.fill_null(pc.equal(batch.column("key"), pa.scalar(self._raw, pa.binary())), False)
        )
        if not len(rows):
            return
        batch = batch.take(pa.array(rows))
        decoded = self._decoder.decode(batch)
        times = self._decoder.event_time(decoded.values, batch.column("timestamp"))
        offsets = batch.column("offset").to_numpy()
        outcomes = self._before_steps(number, batch)
        for row, reason in zip(decoded.bad_rows.tolist(), decoded.reasons, strict=True):
            outcomes.setdefault(int(offsets[row]), ("left out", reason))
        for row in [] if decoded.absent is None else np.flatnonzero(decoded.absent).tolist():
            outcomes.setdefault(int(offsets[row]), ("left out", "it has no value"))
        numbers = np.full(len(offsets), number, np.int32)
        events = EventBatch(decoded.key, times, offsets, numbers, times, decoded.values)
        going = np.array([int(offset) not in outcomes for offset in offsets], np.bool_)
        outcomes |= self._left_out(events.take(going), number)
        if stream_times is not None and self._closes_at is not None:
            for row in np.flatnonzero(stream_times[rows] > self._closes_at).tolist():
                how_late = int(stream_times[rows[row]]) - self._closes_at
                closed = f"it came {how_late} ms after this window was closed"
                outcomes.setdefault(int(offsets[row]), ("late", closed))
        raw = batch.column("value").to_pylist()
        for row, time in enumerate(times.tolist()):
            offset = int(offsets[row])
            if time != NO_TIME and self._start <= time < self._stop:
                found = self._set_aside_here(number, offset) or outcomes.get(offset, ("counted", ""))
                yield Contribution(number, offset, time, found[0], raw[row], found[1])

    def _stream_times(self, batch: pa.RecordBatch) -> Int64s:
        """Return the partition's stream time at each record, as far as it was read.

        A late record of a sliding window is counted in those of its windows that are still open, and the late table
        does not list the others.
        """
        values, bad = batch, np.empty(0, np.int64)
        if self._has_own_time:
            decoded = self._decoder.decode(batch)
            values, bad = decoded.values, decoded.bad_rows
        times = self._decoder.event_time(values, batch.column("timestamp")).copy()
        times[bad] = NO_TIME
        found: Int64s = np.maximum(np.maximum.accumulate(times), self._stream_time)
        self._stream_time = int(found[-1])
        return found

    def _before_steps(self, number: int, batch: pa.RecordBatch) -> dict[int, tuple[str, str]]:
        """Return the offsets of records that no step saw, with their outcomes."""
        found: dict[int, tuple[str, str]] = {}
        stamps = read_columns(batch.column("headers"))
        for row, offset in enumerate(batch.column("offset").to_pylist()):
            if offset >= self._position[number]:
                found[offset] = "waiting", "it is in the topic, and not in this commit yet"
            elif any(each.outcome == "dead letter" for each in self._aside.get((number, offset), ())):
                found[offset] = "dead letter", ""  # `_set_aside_here` has the reason
            elif self._validates and stamps.state[row] == MANAGED:
                stamp = stamps.rows[row]
                own = tuple(int(stamp[name]) for name in ("guid_high", "guid_low", "chain", "sequence"))
                if own in self._stamps:
                    why = "the same producer's record of the same number stands here already"
                    found[offset] = "repeated", why
                self._stamps.add(own)
        return found

    def _left_out(self, events: EventBatch, number: int) -> dict[int, tuple[str, str]]:
        """Apply the steps; return the offsets of records that one of them left out, with their outcomes."""
        found: dict[int, tuple[str, str]] = {}
        for step in self._steps:
            if isinstance(step, Deduplicate):
                found |= self._duplicates(events, step, number)
                events = events.take(np.array([int(each) not in found for each in events.offset], np.bool_))
                continue
            name, stage = step
            bad: list[BadRecord] = []
            before, events = events, stage(events, bad)
            left = set(events.offset.tolist())
            found |= {offset: ("left out", name) for offset in before.offset.tolist() if offset not in left}
            found |= {each.offset: ("left out", each.reason) for each in bad}
        return found

    def _duplicates(self, events: EventBatch, rule: Deduplicate, number: int) -> dict[int, tuple[str, str]]:
        found: dict[int, tuple[str, str]] = {}
        ids = zip(*(events.values.column(name).to_pylist() for name in rule.columns), strict=True)
        for offset, time, id_ in zip(events.offset.tolist(), events.ts.tolist(), ids, strict=True):
            aside = self._aside.get((number, offset), ())
            if None in id_ or time == NO_TIME or any(each.is_by_dedupe for each in aside):
                continue
            earlier = self._ids.get((rule, id_))
            is_copy = earlier is not None and abs(time - earlier[1]) <= rule.within_ms
            if earlier is not None and is_copy:
                names = ", ".join(rule.columns)
                found[offset] = "duplicate", f"the same {names} as offset {earlier[0]}"
            if rule.refresh or not is_copy:
                self._ids[rule, id_] = (offset, time)
        return found

    def _set_aside_here(self, number: int, offset: int) -> tuple[str, str] | None:
        """Return why the app set a record aside; a record may be late for some of its hopping windows only."""
        aside = self._aside.get((number, offset), ())
        window = self._table.flow.window
        kind = None if window is None else window.kind
        for each in aside:
            if not isinstance(kind, Hopping) or each.window_start in (-1, self._start):
                return each.outcome, each.reason
        return None

    def _notes(self, value: dict[str, Any] | None, found: list[Contribution], is_whole: bool) -> list[str]:
        notes = []
        if value is None:
            notes.append(
                "there is no such window: nothing was counted for it, or it lies beyond the table's retention"
            )
        window = self._table.flow.window
        aggregates = () if window is None else window.aggregates
        counts = [each.name for each in aggregates if each.kind == "count" and not each.columns]
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
        if self._unknown:
            notes.append(f"{self._unknown} and what follows it in front of the windows is not applied here")
        if not is_whole:
            notes.append(
                f"only {self._read:,} records of the topic were looked at; later ones may belong to it, too"
            )
        return notes


@dataclass(frozen=True, slots=True)
class _Aside:
    """Why the app set a record aside; `window_start` is -1 where that concerns no particular window."""

    outcome: str
    reason: str
    window_start: int = -1
    is_by_dedupe: bool = False


def _set_aside(table: ResultTable) -> dict[tuple[int, int], list[_Aside]]:
    """Return what the app set aside, by partition and offset."""
    found: dict[tuple[int, int], list[_Aside]] = {}
    dedupes = {
        name for place, name in table.flow.operators.items() if isinstance(table.flow.steps[place], Dedupe)
    }
    late = table.late()
    names = ["partition", "offset", "window_start", "reason", "how_late_ms", "operator"]
    for row in late.select(names).to_pylist() if late.num_rows else []:
        by = f"{row['how_late_ms']} ms" if row["how_late_ms"] >= 0 else "ahead of time"
        aside = _Aside(
            "future" if "future" in row["reason"] else "late",
            f"{row['reason']} by {by}, set aside by {row['operator']}",
            row["window_start"],
            row["operator"] in dedupes,
        )
        found.setdefault((row["partition"], row["offset"]), []).append(aside)
    for row in table.dead_letters().select(["partition", "offset", "reason"]).to_pylist():
        found[row["partition"], row["offset"]] = [_Aside("dead letter", row["reason"])]
    return found


def _applied(table: ResultTable) -> tuple[list[Deduplicate | tuple[str, Stateless]], str]:
    """Return the steps in front of the windows that can be applied, and the name of the first that cannot be."""
    flow = table.flow
    around = Around(table._backend, table._clock)
    found: list[Deduplicate | tuple[str, Stateless]] = []
    unknown, known = "", flow.schemas[0]
    for place, step in enumerate(flow.steps):
        schema = flow.schemas[place]
        if isinstance(step, Aggregate):
            break
        if isinstance(step, Dedupe):
            if not unknown or set(step.rule.columns) <= set(known.names):
                found.append(step.rule)
            continue
        if not unknown and (isinstance(step, Lookup) or needs_program(step)):
            unknown, known = step_name(step), schema
        stage = None if unknown else stage_of(step, schema, flow.key_serdes[place], around)
        if stage is not None:
            stages = [(step_name(step), stage)]
            after = flow.schemas[place + 1]
            found.append((step_name(step), Stateless(stages, after, flow.source.topic, only_first=False)))
    return found, unknown


def _size_ms(table: ResultTable) -> int:
    window = table.flow.window
    kind = None if window is None else window.kind
    return int(
        getattr(kind, "size_ms", 0) or getattr(kind, "difference_ms", 0) or getattr(kind, "gap_ms", 0) or 1
    )
