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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.clock import Clock
from tidegate.dropped_records import warn_dropped
from tidegate.errors import CorruptError, InternalError, OffsetOutOfRangeError, TidegateError
from tidegate.integrity.validator import Throttle
from tidegate.integrity.verdicts import Tolerance
from tidegate.log.log import Log
from tidegate.log.reader import DEFAULT_MAX_BYTES
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import Validate
from tidegate.pipeline.rounds.orders import (
    BadRecord,
    SourceOrder,
    SourceResult,
    Stop,
    Tick,
    resume_command,
)
from tidegate.pipeline.tasks import names
from tidegate.pipeline.tasks.changelog import settled_times
from tidegate.pipeline.tasks.decoding import Decoded, RecordDecoder
from tidegate.pipeline.tasks.letters import letter_without_record, letters_of, write_letters
from tidegate.pipeline.tasks.source_state import SourceState, decode_state, encode_state
from tidegate.pipeline.tasks.stateless import Stateless, raise_if_transient
from tidegate.pipeline.tasks.timing import Timings
from tidegate.pipeline.tasks.validation import SourceValidation, rules_for
from tidegate.randomness import Randomness
from tidegate.storage.backends.base import StorageBackend
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
    dropped: Counter[str] = field(default_factory=Counter)
    """Records that this process set aside or left out, by why; what was warned about depends on it."""
    checks: Stateless | None = None
    """Steps that run elsewhere, tried on every event (`chain.checks_of`)."""
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
    dropped: Mapping[str, tuple[Int64s, Sequence[str] | None]]
    """Why records were left out → their offsets, and what more there is to say of each."""


class _Stopping(NamedTuple):
    """The record that stops its partition: its row (or offset), why, and in one word."""

    row: int
    reason: str
    kind: str


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
            try:
                events = self._events(held.pop())
            except TidegateError:
                raise
            except Exception as error:
                raise_if_transient(self._place, f"reading {self._source.value!r}", error)
                raise
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
        self._set_held_aside([each for each in order.bad if each.offset < order.start])
        if order.start >= order.stop or self._stopped is not None:
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
            offset = self._next if error.offset is None else error.offset
            self._stop("corrupt", str(error), offset, self._sound_behind(offset))
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

    def _set_held_aside(self, bad: Sequence[BadRecord]) -> None:
        """Stop at records of earlier rounds that steps fail on only now, or set them aside: they were held back."""
        if not bad:
            return
        if self._source.on_error == "fail":
            first = min(bad, key=lambda each: each.offset)
            self._stop(first.kind, first.reason, first.offset, stream_time=first.stream_time)
            return
        keeps = self._source.on_error == "keep"
        for each in sorted(bad, key=lambda each: each.offset):
            self._counters["unreadable"] += 1
            if keeps:
                self._counters["unreadable_kept"] += 1
                self._letters.append(self._letter_of(each))
        fate = "a dead letter now" if keeps else "left out"
        offsets = np.array([each.offset for each in bad], np.int64)
        self._warn(f"cannot be read, and is {fate}", offsets, [each.reason for each in bad])

    def _letter_of(self, bad: BadRecord) -> pa.RecordBatch:
        """A record that was read before as a dead letter; without key and value where the log has it no more."""
        why = "it is not in the log any more"
        try:
            with self._reader(bad.offset, bad.offset + 1) as reader:
                for records in reader:
                    rows = np.flatnonzero(records.column("offset").to_numpy() == bad.offset)
                    if len(rows):
                        return letters_of(records, rows, [bad.reason])
        except OffsetOutOfRangeError:
            pass
        except CorruptError as error:
            why = f"it cannot be read from the log any more: {error}"
        return letter_without_record(bad.partition, bad.offset, f"{bad.reason} ({why})")

    def _events(self, records: pa.RecordBatch) -> EventBatch | None:
        """The events of some records; sets `_stopped` when a record among them stops the partition."""
        now_ms, on_error = self._tick.now_ms, self._source.on_error
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
        offsets = going.column("offset").to_numpy()
        decoded = decoded.with_bad(self._rows_of(offsets, self._order.bad))
        kinds = {each.offset: each.kind for each in self._order.bad}
        stop: _Stopping | None = None
        while True:
            if len(decoded.bad_rows) and on_error == "fail":
                row = int(decoded.bad_rows[0])
                stop = _Stopping(row, decoded.reasons[0], kinds.get(int(offsets[row]), "unreadable"))
            made = self._made(going, decoded, None if stop is None else stop.row)
            if isinstance(made, _Stopping):
                stop = made._replace(row=int(np.searchsorted(offsets, made.row)))
            elif isinstance(made, list):
                kinds |= {each.offset: each.kind for each in made}
                decoded = decoded.with_bad(self._rows_of(offsets, made))
            else:
                break
        if stop is not None:
            following = int(offsets[stop.row])
            self._stop(stop.kind, stop.reason, following)
            row = int(np.searchsorted(records.column("offset").to_numpy(), following))
            self._validation.take_back(records, row, now_ms)
            taken = records.slice(0, row)
            kept = int(np.count_nonzero(aside < row))
            aside, reasons, dropped = aside[:kept], reasons[:kept], dropped[dropped < row]
        offsets = taken.column("offset").to_numpy()
        if len(aside):
            self._counters["faulty_kept"] += len(aside)
            self._letters.append(letters_of(taken, aside, reasons))
            self._warn("is faulty, and a dead letter now", offsets[aside], None)
        if len(dropped):
            self._counters["faulty_dropped"] += len(dropped)
            self._warn("is faulty, and left out", offsets[dropped], None)
        for why, (gone, said) in made.dropped.items():
            self._warn(why, gone, said)
        if checked.unchecked:
            self._counters["unchecked"] += min(checked.unchecked, taken.num_rows)
        self._counters.update(made.counters)
        self._letters += made.letters
        self.stream_time = made.stream_time
        self._records += taken.num_rows
        self._size += taken.column("key").nbytes + taken.column("value").nbytes
        self._next = following
        return made.events

    @staticmethod
    def _rows_of(offsets: Int64s, bad: Sequence[BadRecord]) -> dict[int, str]:
        """The rows of bad records among these, with the reason of each."""
        found = {int(np.searchsorted(offsets, each.offset)): each for each in bad}
        return {
            row: each.reason
            for row, each in found.items()
            if row < len(offsets) and offsets[row] == each.offset
        }

    def _made(
        self, records: pa.RecordBatch, decoded: Decoded, rows: int | None
    ) -> _Made | _Stopping | list[BadRecord]:
        """The events of the first `rows` records, without the bad ones.

        Where steps fail on others of them, these; where one of them stops the partition, its offset and why.
        """
        key, values, absent, bad_rows, _ = decoded
        if rows is not None:
            records, key, values = records.slice(0, rows), key.slice(0, rows), values.slice(0, rows)
            absent = None if absent is None else absent[:rows]
            bad_rows = bad_rows[bad_rows < rows]
        counters: Counter[str] = Counter()
        letters: list[pa.RecordBatch] = []
        dropped: dict[str, tuple[Int64s, Sequence[str] | None]] = {}
        if absent is not None:
            counters["no_value"] = int(np.count_nonzero(absent))
            if counters["no_value"] and not self._has_rows:
                dropped["has no value, and is left out"] = records.column("offset").to_numpy()[absent], None
        if (absent is not None and not self._has_rows) or len(bad_rows):
            good = np.ones(records.num_rows, np.bool_)
            if absent is not None and not self._has_rows:
                good &= ~absent
            if len(bad_rows):
                good[bad_rows] = False
                counters["unreadable"] = len(bad_rows)
                fate = "a dead letter now" if self._source.on_error == "keep" else "left out"
                why = f"cannot be read, and is {fate}"
                dropped[why] = records.column("offset").to_numpy()[bad_rows], decoded.reasons
                if self._source.on_error == "keep":
                    counters["unreadable_kept"] = len(bad_rows)
                    letters.append(letters_of(records, bad_rows, decoded.reasons[: len(bad_rows)]))
            mask = pa.array(good)
            records, key, values = records.filter(mask), key.filter(mask), values.filter(mask)
            absent = None if absent is None else absent[good]
        if not records.num_rows:
            return _Made(None, self.stream_time, counters, letters, dropped)
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
        bad: list[BadRecord] = []
        with self.timings("steps"):
            made = self._parts.stages(events, bad)
            if self._parts.checks is not None and len(made):
                self._parts.checks(made, bad)
        if bad:
            return bad
        if self._parts.keyless and made.key.null_count:
            first = int(np.argmin(made.key.is_valid().to_numpy(zero_copy_only=False)))
            return _Stopping(int(made.offset[first]), self._parts.keyless, "unreadable")
        counters["left_out"] += int(weights(events).sum() - weights(made).sum())
        return _Made(made, int(stream_time[-1]), counters, letters, dropped)

    def _warn(self, why: str, offsets: Int64s, reasons: Sequence[str] | None) -> None:
        """Log records that are set aside or left out."""
        parts, number = self._parts, self._order.partition
        who, before = f"app {parts.app}, flow {self._order.flow}", parts.dropped[why]
        parts.dropped[why] += len(offsets)
        numbers = np.broadcast_to(np.int32(number), len(offsets))
        warn_dropped(who, why, self._source.topic, numbers, offsets, before=before, reasons=reasons)

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

    def _sound_behind(self, offset: int) -> int:
        """The first offset behind a damaged one that can be read; of a cluster, the next offset."""
        log = self._parts.log
        if not isinstance(log, Log):
            return offset + 1
        view = log.view(self._source.topic, self._order.partition)
        sound = view.next_sound_offset(offset)
        return max(offset + 1, view.bounds().high_watermark) if sound is None else sound

    @property
    def _place(self) -> str:
        return f"{self._source.topic}-{self._order.partition}"

    def _stop(
        self,
        reason: str,
        message: str,
        offset: int,
        skip_to: int | None = None,
        *,
        stream_time: int | None = None,
    ) -> None:
        if reason == "failed":
            resume = resume_command(self._parts.app, self._order.flow, self._order.partition)
            message += (
                f". Correct the step and read the record again with `{resume}`, leave the record out with `{resume} "
                f'--skip-to {offset + 1}`, or keep all such records as dead letters with on_error="keep"'
            )
        if reason == "integrity":
            message = f"{message}; `tidegate verify {self._source.topic}` shows all there is to find"
        remedy = self._resume(offset + 1 if skip_to is None else skip_to)
        said = f"{self._place} stopped at offset {offset}: {message}"
        self._stopped = Stop(reason, said, offset, remedy, stream_time)

    def _lose(self, error: OffsetOutOfRangeError) -> None:
        """Offsets went while they were to be read: reading can go on at the first that is there."""
        message = f"{self._place} stopped at offset {self._next}: {error}"
        self._stopped = Stop("lost", message, self._next, self._resume(max(error.first, self._next)))

    def _resume(self, skip_to: int) -> str:
        return resume_command(self._parts.app, self._order.flow, self._order.partition, skip_to)

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
