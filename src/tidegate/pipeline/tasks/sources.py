"""A range of one log partition as events: read, validated, decoded, stamped with stream time.

    log → [validation] → values to columns → event time → stream time → steps that keep nothing → events

Stream time is the source's own: the largest event time of all its records so far that have one and are not beyond
the future guard, also of those that a filter leaves out. Every event carries it, and all operators judge by it,
so that results do not depend on cuts, nor on whether the flow is re-keyed.

Of a changelog it is what its records say is final (header `settled`, see `changelog`); of records that do not say it,
their timestamp less the time for which windows may still change (`Source.settles_ms`). So a change that its writer made
in time is late for nobody. Where the changelog has updates and the flow keeps state, events are changes of rows
(`RowChanges`), and deletions are, too.

Nothing but a function of the log, the order and the tick is in the result: a repeated order gives the same events.

S1  a fault that stops the partition is data: events before it are handed out, and `result().stopped` says why, where
    and what would go on. The state then stands right before the record at fault.
S2  what is set aside is written as one object before `result()` names it.

Thread rule: one reading, one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import CorruptError, InternalError, OffsetOutOfRangeError
from tidegate.integrity.policy import Throttle
from tidegate.integrity.tolerance import Tolerance
from tidegate.log.access.embedded import Log
from tidegate.log.access.reader import DEFAULT_MAX_BYTES
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import Validate
from tidegate.pipeline.rounds.orders import SourceOrder, SourceResult, Stop, Tick
from tidegate.pipeline.tasks import names
from tidegate.pipeline.tasks.changelog import settled_times
from tidegate.pipeline.tasks.decoding import Decoded, RecordDecoder
from tidegate.pipeline.tasks.letters import letters_of, write_letters
from tidegate.pipeline.tasks.source_state import SourceState, decode_state, encode_state
from tidegate.pipeline.tasks.stateless import Stateless
from tidegate.pipeline.tasks.timing import Timings
from tidegate.pipeline.tasks.validation import SourceValidation, rules_for
from tidegate.randomness import Randomness
from tidegate.storage.backends.port import StorageBackend
from tidegate.windows.events import NO_TIME, EventBatch, Int64s, RowChanges, weights
from tidegate.windows.kinds import LATEST

ROOM_BYTES = 512  # of a fetch, for each record: a small round needs no large buffer
LEAST_FETCH_BYTES = 64 << 10
_COLUMNS = ("key", "value", "timestamp", "offset", "partition")


@dataclass(frozen=True)
class SourceParts:
    """What all readings of one partition of one flow share."""

    app: str
    flow: Flow
    log: Any
    backend: StorageBackend
    clock: Clock
    randomness: Randomness
    stages: Stateless
    tolerance: Tolerance
    buffers: FetchBuffers
    keyless: str = ""
    """Why a record without a key stops its partition; empty: it does not."""
    throttle: Throttle = field(default_factory=Throttle)
    """Of warnings: rounds are shorter than the minute that a kind of fault is not told of again."""


class FetchBuffers:
    """Memory for fetches, one piece for each reading that runs at the time; fresh pages every round would cost more."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    @contextmanager
    def lent(self) -> Iterator[bytearray]:
        """A buffer for a while. Safe from any thread."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = bytearray(DEFAULT_MAX_BYTES)
        try:
            yield buffer
        finally:
            self._free.append(buffer)


class _Made(NamedTuple):
    """What came of some records."""

    events: EventBatch | None
    stream_time: int
    counters: Counter[str]
    letters: list[pa.RecordBatch]


class _Bad(NamedTuple):
    """A record that a step cannot read, and why."""

    offset: int
    reason: str


class Reading:
    """Iterate to get the events of one source order; then `result()` says how far it came."""

    def __init__(self, parts: SourceParts, order: SourceOrder, tick: Tick) -> None:
        self._parts, self._order, self._tick = parts, order, tick
        self._flow = flow = parts.flow
        self._source = flow.source
        self._state = state = decode_state(order.state)
        self._next = order.start
        parts.stages.look_up(order.lookups)
        self._is_cut = state.is_cut or (state.next_offset < 0 and order.start > 0)
        step = next((each for each in flow.steps if isinstance(each, Validate)), None)
        rules = None if step is None else rules_for(step, parts.tolerance, is_cut=self._is_cut)
        self._validation = SourceValidation(
            step,
            flow.source.topic,
            order.partition,
            state.validator,
            rules,
            now_ms=tick.now_ms,
            throttle=parts.throttle,
        )
        checks_time = flow.is_stateful or flow.source.timestamp is not None
        self._decoder = RecordDecoder(flow.source, flow.schemas[0], checks_time=checks_time)
        self._has_windows = flow.source.windows is not None and flow.is_stateful
        self._has_rows = flow.source.has_updates and flow.is_stateful
        guard = None if flow.window is None else flow.window.future
        self._latest = LATEST if guard is None else min(tick.now_ms + guard.ahead_ms, LATEST)
        self._letters: list[pa.RecordBatch] = []
        self._counters: Counter[str] = Counter()
        self._records = self._size = 0
        self._stopped: Stop | None = None
        self._result: SourceResult | None = None
        self._begun = False
        self._buffer: bytearray | None = None
        self.stream_time = state.stream_time
        """The source's stream time, as far as it was read."""
        self.timings = Timings(parts.clock)

    def __iter__(self) -> Iterator[EventBatch]:
        if self._begun:
            raise InternalError("a reading can be iterated once")
        self._begun = True
        for held in self._pieces():
            # Records are let go before their events are worked on: their values are columns by then.
            events = self._events(held.pop())
            if events is not None and len(events):
                yield events
            del events
            if self._stopped is not None:
                break
        self._finish()

    def result(self) -> SourceResult:
        """How far the source came; only after the iteration has ended."""
        if self._result is None:
            raise InternalError("a reading's result is known when all its events were taken")
        return self._result

    # -- inside ----------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[list[pa.RecordBatch]]:
        """The records of the range in batches, each alone in a list to be taken out; the position follows."""
        order = self._order
        if 0 <= self._state.next_offset < order.start:
            self._pass_over(self._state.next_offset, order.start)
        if order.start >= order.stop:
            return
        lent = self._parts.buffers.lent() if isinstance(self._parts.log, Log) else nullcontext()
        try:
            with lent as self._buffer, self._read_from(order.start, order.stop) as reader:
                pieces = iter(reader)
                while True:
                    with self.timings("read"):
                        held = [records for records in (next(pieces, None),) if records is not None]
                    if not held:
                        break
                    yield held
                self._next = max(self._next, reader.positions()[order.partition])
        except CorruptError as error:
            self._stop("corrupt", str(error), self._next if error.offset is None else error.offset)
        except OffsetOutOfRangeError as error:
            self._lose(error)

    def _read_from(self, start: int, stop: int) -> Any:
        with self.timings("read"):
            return self._reader(start, stop)

    def _reader(self, start: int, stop: int) -> Any:
        number, log = self._order.partition, self._parts.log
        settings: dict[str, Any] = {"isolation": "read_committed", "control_records": True}
        if isinstance(log, Log):  # a cluster's client decides for itself how much it fetches
            room = (stop - start) * ROOM_BYTES
            settings["max_bytes"] = min(max(room, LEAST_FETCH_BYTES), DEFAULT_MAX_BYTES)
            settings["buffer"] = self._buffer
        return log.reader(
            self._source.topic, [number], start={number: start}, stop={number: stop}, **settings
        )

    def _pass_over(self, start: int, stop: int) -> None:
        """Somebody decided to go on behind these offsets: a fault among them must not be one again."""
        self._counters["skipped_offsets"] += stop - start
        try:
            with self._reader(start, stop) as reader:
                for records in reader:
                    self._validation.pass_over(records, self._tick.now_ms)
        except (CorruptError, OffsetOutOfRangeError):
            self._is_cut = True
            self._validation.begin_anew()

    def _events(self, records: pa.RecordBatch) -> EventBatch | None:
        """The events of some records; sets `_stopped` when a record among them stops the partition."""
        now_ms, on_bad = self._tick.now_ms, self._source.on_bad
        with self.timings("validate"):
            checked = self._validation.check(records, now_ms)
        following = int(records.column("offset")[-1].as_py()) + 1
        if checked.fault is not None:
            following = checked.fault.offset
            self._stop("integrity", str(checked.fault), following)
        taken = records if checked.rows == records.num_rows else records.slice(0, checked.rows)
        aside, reasons, dropped = checked.aside, checked.reasons, checked.dropped
        going = taken.select([*_COLUMNS, "headers"] if self._has_windows else list(_COLUMNS))
        if checked.kept is not None:
            going = going.filter(pa.array(checked.kept))
        with self.timings("decode"):
            decoded = self._decoder.decode(going)
        unreadable: tuple[int, str] | None = None
        if len(decoded.bad_rows) and on_bad == "fail":
            unreadable = int(decoded.bad_rows[0]), decoded.reasons[0]
        made = self._made(going, decoded, unreadable)
        if isinstance(made, _Bad):
            row = int(np.searchsorted(going.column("offset").to_numpy(), made.offset))
            unreadable = row, made.reason
            made = self._made(going, decoded, unreadable)
        if isinstance(made, _Bad):
            raise InternalError(f"offset {made.offset} cannot be read, though it was left out")
        if unreadable is not None:
            following = int(going.column("offset")[unreadable[0]].as_py())
            self._stop("unreadable", unreadable[1], following)
            row = int(np.searchsorted(records.column("offset").to_numpy(), following))
            self._validation.take_back(records, row, now_ms)
            taken = records.slice(0, row)
            kept = int(np.count_nonzero(aside < row))
            aside, reasons, dropped = aside[:kept], reasons[:kept], dropped[dropped < row]
        if len(aside):
            self._counters["faulty_kept"] += len(aside)
            self._letters.append(letters_of(taken, aside, reasons))
        if len(dropped):
            self._counters["faulty_dropped"] += len(dropped)
        if checked.unchecked:
            self._counters["unchecked"] += min(checked.unchecked, taken.num_rows)
        self._counters.update(made.counters)
        self._letters += made.letters
        self.stream_time = made.stream_time
        self._records += taken.num_rows
        self._size += taken.column("key").nbytes + taken.column("value").nbytes
        self._next = following
        return made.events

    def _made(
        self, records: pa.RecordBatch, decoded: Decoded, unreadable: tuple[int, str] | None
    ) -> _Made | _Bad:
        """The events of records up to the one that cannot be read; or which one else cannot be."""
        key, values, absent, bad_rows, _ = decoded
        if unreadable is not None:
            rows = unreadable[0]
            records, key, values = records.slice(0, rows), key.slice(0, rows), values.slice(0, rows)
            absent = None if absent is None else absent[:rows]
            bad_rows = bad_rows[bad_rows < rows]
        counters: Counter[str] = Counter()
        letters: list[pa.RecordBatch] = []
        if absent is not None:
            counters["no_value"] = int(np.count_nonzero(absent))
        if (absent is not None and not self._has_rows) or len(bad_rows):
            good = np.ones(records.num_rows, np.bool_)
            if absent is not None and not self._has_rows:
                good &= ~absent
            if len(bad_rows):
                good[bad_rows] = False
                counters["unreadable"] = len(bad_rows)
                if self._source.on_bad == "keep":
                    letters.append(letters_of(records, bad_rows, decoded.reasons[: len(bad_rows)]))
            mask = pa.array(good)
            records, key, values = records.filter(mask), key.filter(mask), values.filter(mask)
            absent = None if absent is None else absent[good]
        if not records.num_rows:
            return _Made(None, self.stream_time, counters, letters)
        with self.timings("stamp"):
            ts = written = self._decoder.event_time(values, records.column("timestamp"))
            changes = None
            if self._has_windows:
                ts = self._decoder.window_time(values)
                stream_time = self._running(self._settled(written, records.column("headers")))
            else:
                stream_time = self._running(self._guarded(ts))
            if self._has_rows:
                there = np.ones(len(ts), np.int64) if absent is None else (~absent).astype(np.int64)
                changes = RowChanges(records.column("key"), there, written)
            events = EventBatch(
                key=key,
                ts=ts,
                offset=records.column("offset").to_numpy(),
                partition=records.column("partition").to_numpy(),
                stream_time=stream_time,
                values=values,
                changes=changes,
            )
        try:
            with self.timings("steps"):
                made = self._parts.stages(events)
        except CorruptError as error:
            if error.offset is None:
                raise
            return _Bad(error.offset, str(error))
        if self._parts.keyless and made.key.null_count:
            first = int(np.argmin(made.key.is_valid().to_numpy(zero_copy_only=False)))
            return _Bad(int(made.offset[first]), self._parts.keyless)
        counters["left_out"] += int(weights(events).sum() - weights(made).sum())
        return _Made(made, int(stream_time[-1]), counters, letters)

    def _guarded(self, times: Int64s) -> Int64s:
        """Times that may move the clock: none that lie beyond the future guard."""
        return times if int(times.max()) <= self._latest else np.where(times <= self._latest, times, NO_TIME)

    def _settled(self, written: Int64s, headers: pa.ListArray) -> Int64s:
        """What each record of a changelog says is final."""
        said, says_it = settled_times(headers)
        times = np.where(says_it, said, written - self._source.settles_ms)
        return np.maximum(self._guarded(times), NO_TIME)

    def _running(self, times: Int64s) -> Int64s:
        running: Int64s = np.maximum.accumulate(times)
        if int(running[0]) < self.stream_time:  # times before the epoch are below any stream time, too
            np.maximum(running, self.stream_time, out=running)
        return running

    def _stop(self, reason: str, message: str, offset: int) -> None:
        place = f"{self._source.topic}-{self._order.partition}"
        remedy = (
            f"look at it with `tidegate verify {self._source.topic}`; `tidegate app resume {self._parts.app} "
            f"--partition {self._order.flow}:{self._order.partition} --skip-to {offset + 1}` goes on after it"
        )
        self._stopped = Stop(reason, f"{place} stopped at offset {offset}: {message}", offset, remedy)

    def _lose(self, error: OffsetOutOfRangeError) -> None:
        """Offsets went while they were to be read: reading can go on at the first that is there."""
        place, order = f"{self._source.topic}-{self._order.partition}", self._order
        remedy = (
            f"tidegate app resume {self._parts.app} --partition {order.flow}:{order.partition} "
            f"--skip-to {max(error.first, self._next)}"
        )
        self._stopped = Stop("lost", f"{place} stopped at offset {self._next}: {error}", self._next, remedy)

    def _finish(self) -> None:
        state, order = self._state, self._order
        letters, count = state.letters, state.letter_count
        if self._letters:
            unique = self._parts.randomness.uuid().hex
            letters = names.letters_name(self._parts.app, order.flow, order.partition, order.start, unique)
            with self.timings("letters"):
                write_letters(self._parts.backend, letters, state.letters, self._letters)
            count += sum(batch.num_rows for batch in self._letters)
        saved = SourceState(
            self._next, self.stream_time, self._validation.saved(self._next), self._is_cut, letters, count
        )
        self._result = SourceResult(
            flow=order.flow,
            partition=order.partition,
            next_offset=self._next,
            state=encode_state(saved),
            stream_time=self.stream_time,
            records=self._records,
            size=self._size,
            counters=dict(self._counters),
            verdicts=dict(self._validation.verdicts),
            stopped=self._stopped,
        )
