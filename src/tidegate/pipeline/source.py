"""Read a range of one log partition as events: validated, decoded, stamped with stream time, through stateless steps.

Stream time is the largest event time of all records so far that have one and are not beyond the future guard, also of
records that a filter drops. Every event carries it, so results do not depend on batches nor on re-keying. In a
changelog it is the record's `settled` header (`sink`), or its timestamp less the time for which windows may still
change, and holds for the records behind it. If a changelog has updates and the flow keeps state, events are changes of
rows (`RowChanges`), deletions included. The validator's state is part of the source's. Without `validate()` Tidegate's
control records are left out, and numbered records are counted as `unchecked`.

S1  a fault that stops the partition is data: events before it are returned, and `result().stopped` has the reason,
    the offset and the remedy. The state then is that before the faulty record.
S2  records that are set aside are written as one object before `result()` names it.
S3  the result is a function of the log, the order and the tick: a repeated order gives the same events.

Thread rule: one thread for each reading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.clock import Clock
from tidegate.dropped_records import warn_dropped
from tidegate.errors import CorruptError, InternalError, OffsetOutOfRangeError, TidegateError
from tidegate.integrity import ValidationRules
from tidegate.integrity.columns import read_columns
from tidegate.integrity.state import NEVER, PartitionState, restore_checkpoint, take_checkpoint
from tidegate.integrity.validator import (
    FaultLog,
    OnError,
    PartitionValidator,
    Throttle,
    policy_of,
    reasons_of,
)
from tidegate.integrity.verdicts import Finding, Tolerance, Verdict, tolerance_of
from tidegate.kernels.integrity import MANAGED
from tidegate.log.log import Log
from tidegate.log.reader import DEFAULT_MAX_BYTES
from tidegate.pipeline.dead_letters import (
    SourceState,
    letter_without_record,
    letters_of,
    write_letters,
)
from tidegate.pipeline.decoder import NO_ROWS, Decoded, RecordDecoder
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.messages import (
    BadRecord,
    SourceOrder,
    SourceResult,
    Stop,
    Tick,
    letters_name,
    resume_command,
)
from tidegate.pipeline.sink import settled_times
from tidegate.pipeline.topology import Validate
from tidegate.pipeline.transforms import Stateless, Timings, raise_if_transient
from tidegate.randomness import Randomness
from tidegate.storage.backends.base import StorageBackend
from tidegate.windows.events import NO_TIME, EventBatch, Int64s, RowChanges, weights
from tidegate.windows.kinds import LATEST

# -- validation -----------------------------------------------------------------------------------

Flags = npt.NDArray[np.bool_]


class Checked(NamedTuple):
    """The result of checking some records: how many were checked, which pass (None: all), which are set aside and
    why, which faulty ones are dropped, what stopped the partition, and how many have a numbering that is not
    checked."""

    rows: int
    kept: Flags | None = None
    aside: npt.NDArray[np.int64] = NO_ROWS
    reasons: tuple[str, ...] = ()
    dropped: npt.NDArray[np.int64] = NO_ROWS
    fault: Finding | None = None
    unchecked: int = 0


class SourceValidation:
    """The validator of one partition of one source."""

    def __init__(
        self,
        step: Validate | None,
        topic: str,
        partition: int,
        saved: bytes,
        rules: ValidationRules | None,
        *,
        now_ms: int,
        throttle: Throttle | None = None,
    ) -> None:
        self._is_on = step is not None
        self._max_age_ms = NEVER if step is None else step.max_age_ms
        self._now_ms = now_ms
        self._saved = saved
        self.verdicts: Counter[str] = Counter()
        self._faults = FaultLog(throttle=throttle)
        state = PartitionState()
        if saved and self._is_on:
            state = restore_checkpoint(saved, now_ms=now_ms, max_age_ms=self._max_age_ms)
        self._validator = PartitionValidator(topic, partition, rules=rules, state=state)
        self._before: PartitionState | None = None
        self._last: Counter[str] = Counter()

    def check(self, records: pa.RecordBatch, now_ms: int) -> Checked:
        """Check the next records and return the outcome; `take_back` may undo some of them."""
        if not self._is_on:
            if not has_headers(records):
                return Checked(records.num_rows)
            columns = read_columns(records.column("headers"))
            control, numbered = columns.is_control, columns.state == MANAGED
            kept, unchecked = ~control if control.any() else None, int(np.count_nonzero(numbered & ~control))
            return Checked(records.num_rows, kept, unchecked=unchecked)
        self._before = self._validator.state.copy()
        return self._judge(records, now_ms)

    def take_back(self, records: pa.RecordBatch, rows: int, now_ms: int) -> None:
        """Keep only the first `rows` of the last checked records."""
        if not self._is_on or self._before is None:
            return
        self._validator.state = self._before
        self.verdicts.subtract(self._last)
        if rows:
            self._judge(records.slice(0, rows), now_ms)
        self.verdicts = +self.verdicts

    def pass_over(self, records: pa.RecordBatch, now_ms: int) -> None:
        """Skip records that were set to be left out: the state advances past faults among them."""
        if self._is_on and has_headers(records):
            state = self._validator.state
            rules = replace(self._validator.rules, during_push=OnError.KEEP, otherwise=OnError.KEEP)
            PartitionValidator(
                self._validator.topic, self._validator.partition, rules=rules, state=state
            ).validate(records, now_ms)

    def begin_anew(self) -> None:
        """Forget all producers: the records in between cannot be checked."""
        self._validator.state = PartitionState()
        self._validator.rules = replace(self._validator.rules, head_may_be_gone=True)

    def _judge(self, records: pa.RecordBatch, now_ms: int) -> Checked:
        if not has_headers(records):
            self._validator.state.next_offset = int(records.column("offset")[-1].as_py()) + 1
            self._count({Verdict.UNMANAGED: records.num_rows})
            return Checked(records.num_rows)
        judged = self._validator.validate(records, now_ms)
        self._faults.take(judged, now_ms)
        self._count(judged.counts)
        rows = len(judged.verdicts) if judged.stop_at is None else judged.stop_at
        kept: Flags | None = judged.kept[:rows]
        if kept is not None and kept.all():
            kept = None
        aside, dropped = np.flatnonzero(judged.aside[:rows]), np.flatnonzero(judged.dropped[:rows])
        fault = None if judged.stop_at is None else judged.findings[-1]
        return Checked(rows, kept, aside, reasons_of(aside, judged, records), dropped, fault)

    def _count(self, counts: Mapping[Verdict, int]) -> None:
        self._last = Counter({verdict.label: count for verdict, count in counts.items() if count})
        self.verdicts.update(self._last)

    def saved(self, next_offset: int) -> bytes:
        """Return the state to store with the source's own, at `next_offset`."""
        if not self._is_on:
            return self._saved
        self._validator.state.next_offset = next_offset
        return take_checkpoint(self._validator.state, now_ms=self._now_ms, max_age_ms=self._max_age_ms)


def source_tolerance(log: Any, flow: Flow, partition: int) -> Tolerance:
    """Return which gaps of a partition of the flow's topic are no faults; without validation the log is not read."""
    if not any(isinstance(step, Validate) for step in flow.steps):
        return Tolerance()
    return tolerance_of(log, flow.source.topic, partition)


def has_headers(records: pa.RecordBatch) -> bool:
    """Whether any record has headers."""
    column = records.column("headers")
    bounds = np.frombuffer(column.buffers()[1], np.int32)
    return bool(bounds[column.offset] != bounds[column.offset + len(column)])


# -- sources --------------------------------------------------------------------------------------

ROOM_BYTES = 512  # of a fetch, per record: a small round needs no large buffer
LEAST_FETCH_BYTES = 64 << 10
_COLUMNS = ("key", "value", "timestamp", "offset", "partition")


@dataclass(frozen=True)
class SourceParts:
    """The resources that all readings of one partition of one flow share."""

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
    """Fetch buffers, one for each concurrent reading; allocating new pages every round would cost more."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    @contextmanager
    def lent(self) -> Iterator[bytearray]:
        """Lend a buffer for a while. Safe from any thread."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = bytearray(DEFAULT_MAX_BYTES)
        try:
            yield buffer
        finally:
            self._free.append(buffer)


class _Made(NamedTuple):
    """The result of decoding some records."""

    events: EventBatch | None
    stream_time: int
    counters: Counter[str]
    letters: list[pa.RecordBatch]
    dropped: Mapping[str, tuple[Int64s, Sequence[str] | None]]
    """Why records were left out → their offsets, and what more there is to say of each."""


class _Stopping(NamedTuple):
    """The record that stops its partition: its row (or offset), the message, and the reason."""

    row: int
    reason: str
    kind: str


class Reading:
    """Reads one source order. Iterate to get its events; then `result()` returns the outcome."""

    def __init__(self, parts: SourceParts, order: SourceOrder, tick: Tick) -> None:
        self._parts, self._order, self._tick = parts, order, tick
        self._flow = flow = parts.flow
        self._source = flow.source
        self._state = state = SourceState.decoded(order.state)
        self._next = order.start
        parts.stages.look_up(order.lookups)
        self._is_cut = state.is_cut or (state.next_offset < 0 and order.start > 0)
        step = next((each for each in flow.steps if isinstance(each, Validate)), None)
        rules = None
        if step is not None:
            during_push, otherwise = policy_of(step.during_push), policy_of(step.on_error)
            # a cut: reading may begin in the middle of a producer's chain
            rules = ValidationRules(during_push, otherwise, parts.tolerance, head_may_be_gone=self._is_cut)
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
            # Records are released before their events are processed: their values are columns by then.
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
        """Return the outcome; only after the iteration has ended."""
        if self._result is None:
            raise InternalError("a reading's result is known when all its events were taken")
        return self._result

    def _pieces(self) -> Iterator[list[pa.RecordBatch]]:
        """Yield the records of the range in batches, each as the only item of a list, to be taken out; advance the
        position."""
        order = self._order
        if 0 <= self._state.next_offset < order.start:
            self._pass_over(self._state.next_offset, order.start)
        self._set_held_aside([each for each in order.bad if each.offset < order.start])
        if order.start >= order.stop or self._stopped is not None:
            return
        lent = self._parts.buffers.lent() if isinstance(self._parts.log, Log) else nullcontext()
        try:
            with lent as self._buffer, self._timed_reader(order.start, order.stop) as reader:
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
            # deleted while they were to be read: reading continues at the first that exists
            self._stop("lost", str(error), self._next, max(error.first, self._next))

    def _timed_reader(self, start: int, stop: int) -> Any:
        with self.timings("read"):
            return self._reader(start, stop)

    def _reader(self, start: int, stop: int) -> Any:
        number, log = self._order.partition, self._parts.log
        settings: dict[str, Any] = {"isolation": "read_committed", "control_records": True}
        if isinstance(log, Log):  # a cluster's client decides itself how much it fetches
            room = (stop - start) * ROOM_BYTES
            settings["max_bytes"] = min(max(room, LEAST_FETCH_BYTES), DEFAULT_MAX_BYTES)
            settings["buffer"] = self._buffer
        return log.reader(
            self._source.topic, [number], start={number: start}, stop={number: stop}, **settings
        )

    def _pass_over(self, start: int, stop: int) -> None:
        """Skip these offsets as requested: a fault among them must not stop the partition again."""
        self._counters["skipped_offsets"] += stop - start
        try:
            with self._reader(start, stop) as reader:
                for records in reader:
                    self._validation.pass_over(records, self._tick.now_ms)
        except (CorruptError, OffsetOutOfRangeError):
            self._is_cut = True
            self._validation.begin_anew()

    def _set_held_aside(self, bad: Sequence[BadRecord]) -> None:
        """Stop at held-back records of earlier rounds that steps fail on now, or set them aside."""
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
        offsets = np.array([each.offset for each in bad], np.int64)
        self._warn(self._unreadable, offsets, [each.reason for each in bad])

    @property
    def _unreadable(self) -> str:
        fate = "a dead letter now" if self._source.on_error == "keep" else "left out"
        return f"cannot be read, and is {fate}"

    def _letter_of(self, bad: BadRecord) -> pa.RecordBatch:
        """Return a record of an earlier round as a dead letter; without key and value if the log does not have it
        any more."""
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
        """Return the events of some records; set `_stopped` if a record among them stops the partition."""
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
        """Return the rows of bad records among these, with the reason of each."""
        found = {int(np.searchsorted(offsets, each.offset)): each for each in bad}
        return {
            row: each.reason
            for row, each in found.items()
            if row < len(offsets) and offsets[row] == each.offset
        }

    def _made(
        self, records: pa.RecordBatch, decoded: Decoded, rows: int | None
    ) -> _Made | _Stopping | list[BadRecord]:
        """Return the events of the first `rows` records, without the bad ones.

        If steps fail on others of them, return these, too; if one of them stops the partition, its offset and the
        reason.
        """
        key, values, absent, bad_rows, _ = decoded
        if rows is not None:
            records, key, values = records.slice(0, rows), key.slice(0, rows), values.slice(0, rows)
            absent = None if absent is None else absent[:rows]
            bad_rows = bad_rows[bad_rows < rows]
        counters: Counter[str] = Counter()
        letters: list[pa.RecordBatch] = []
        dropped: dict[str, tuple[Int64s, Sequence[str] | None]] = {}
        if absent is not None and not self._has_rows:
            counters["no_value"] = int(np.count_nonzero(absent))
            if counters["no_value"]:
                dropped["has no value, and is left out"] = records.column("offset").to_numpy()[absent], None
        if (absent is not None and not self._has_rows) or len(bad_rows):
            good = np.ones(records.num_rows, np.bool_)
            if absent is not None and not self._has_rows:
                good &= ~absent
            if len(bad_rows):
                good[bad_rows] = False
                counters["unreadable"] = len(bad_rows)
                dropped[self._unreadable] = records.column("offset").to_numpy()[bad_rows], decoded.reasons
                if self._source.on_error == "keep":
                    counters["unreadable_kept"] = len(bad_rows)
                    letters.append(letters_of(records, bad_rows, decoded.reasons[: len(bad_rows)]))
            mask = pa.array(good)
            records, key, values = records.filter(mask), key.filter(mask), values.filter(mask)
            absent = None if absent is None else absent[good]
        if not records.num_rows:
            return _Made(None, self.stream_time, counters, letters, dropped)
        offsets = records.column("offset").to_numpy()
        with self.timings("stamp"):
            ts = written = self._decoder.event_time(values, records.column("timestamp"))
            changes = None
            if self._has_windows:
                ts = self._decoder.window_time(values)
                settled = self._settled(written, ts, records.column("headers"))
                running = self._running(settled)
                before = np.concatenate([[self.stream_time], running[:-1]])
                stream_time = np.maximum(before, np.minimum(settled, ts))
            else:
                stream_time = running = self._running(self._guarded(ts))
            if self._has_rows:
                there = np.ones(len(ts), np.int64) if absent is None else (~absent).astype(np.int64)
                changes = RowChanges(records.column("key"), there, written)
            partition = records.column("partition").to_numpy()
            events = EventBatch(key, ts, offsets, partition, stream_time, values, changes)
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
        return _Made(made, int(running[-1]), counters, letters, dropped)

    def _warn(self, why: str, offsets: Int64s, reasons: Sequence[str] | None) -> None:
        """Log records that are set aside or left out."""
        parts, number = self._parts, self._order.partition
        who, before = f"app {parts.app}, flow {self._order.flow}", parts.dropped[why]
        parts.dropped[why] += len(offsets)
        numbers = np.broadcast_to(np.int32(number), len(offsets))
        warn_dropped(who, why, self._source.topic, numbers, offsets, before=before, reasons=reasons)

    def _guarded(self, times: Int64s) -> Int64s:
        """Return the times that may advance stream time: those not beyond the future guard."""
        return times if int(times.max()) <= self._latest else np.where(times <= self._latest, times, NO_TIME)

    def _settled(self, written: Int64s, ts: Int64s, headers: pa.ListArray) -> Int64s:
        """Return the settled time that each record of a changelog states; windows that end with it may follow."""
        said, says_it = settled_times(headers)
        times = np.where(says_it, said, np.minimum(written - self._source.settles_ms, ts))
        return np.maximum(self._guarded(times), NO_TIME)

    def _running(self, times: Int64s) -> Int64s:
        running: Int64s = np.maximum.accumulate(times)
        if int(running[0]) < self.stream_time:  # times before the epoch are below any stream time
            np.maximum(running, self.stream_time, out=running)
        return running

    def _sound_behind(self, offset: int) -> int:
        """Return the first readable offset after a damaged one; in a cluster, the next offset."""
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
        to = offset + 1 if skip_to is None else skip_to
        remedy = resume_command(self._parts.app, self._order.flow, self._order.partition, to)
        said = f"{self._place} stopped at offset {offset}: {message}"
        self._stopped = Stop(reason, said, offset, remedy, stream_time)

    def _finish(self) -> None:
        state, order = self._state, self._order
        letters, count = state.letters, state.letter_count
        if self._letters:
            unique = self._parts.randomness.uuid().hex
            letters = letters_name(self._parts.app, order.flow, order.partition, order.start, unique)
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
            state=saved.encoded(),
            stream_time=self.stream_time,
            records=self._records,
            size=self._size,
            counters=dict(self._counters),
            verdicts=dict(self._validation.verdicts),
            stopped=self._stopped,
        )
