"""A running app: the loop of rounds on its own thread, and the handle that users hold.

Rounds follow each other immediately while there is something to read, and at the trigger interval once caught up.
Committed results are delivered before the loop waits. `until="caught_up"` ends the run at the log end offsets of its
start; later records are left for the next run. `Tracker` turns the coordinator's outcomes into progress, rates and
an estimate of the remaining time.

Thread rule: `Run` may be used from any thread; the loop and the coordinator run on one thread of their own.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Final, Never

from tidegate.clock import Clock
from tidegate.durations import DurationLike, milliseconds
from tidegate.errors import (
    ConflictError,
    FencedError,
    InvalidError,
    TidegateError,
    UnavailableError,
    without_credentials,
)
from tidegate.notebook import cell
from tidegate.pipeline.checkpoint import CommitRecord
from tidegate.pipeline.coordinator import Coordinator, Engine, StepOutcome, Targets
from tidegate.pipeline.planner import held_of
from tidegate.pipeline.progress import (
    READ,
    Progress,
    StoppedPartition,
    exit_code_of,
    faults_of,
    given_state,
    is_duplicate,
    is_late,
    is_partly_late,
    left_out,
    new_faults,
    null_shares,
    null_text,
    read_once,
    stopped_of,
    topics_of,
)
from tidegate.pipeline.recovery import Opened
from tidegate.pipeline.settings import RunSettings

# -- tracking -------------------------------------------------------------------------------------


class Tracker:
    """Builds progress values from step outcomes; the rate covers the last rounds that read something."""

    def __init__(self, opened: Opened, coordinator: Coordinator, *, clock: Clock, processes: int) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._topics = topics_of(opened.flows)
        self._backlog_limit = opened.setup.storage.backlog_limit_bytes * processes
        self._memory_limit = opened.setup.storage.worker_total_bytes * processes
        self._started_ms = clock.monotonic_ms()
        self.address = opened.records.backend.address
        self._recent: deque[tuple[int, int]] = deque(maxlen=5)  # records and milliseconds of recent rounds
        self.rounds = self._read = 0
        self._before = {flow: self._counted(flow) for flow in self._topics}
        self.progress = self._made(None)

    @property
    def seconds(self) -> float:
        return (self._clock.monotonic_ms() - self._started_ms) / 1000

    def after(self, outcome: StepOutcome) -> Progress:
        """Return the progress after a step."""
        if outcome.kind == "round":
            self.rounds += 1
            read, self._read = self.records - self._read, self.records
            if read:
                self._recent.append((read, max(1, outcome.took_ms)))
        self.progress = self._made(outcome)
        return self.progress

    @property
    def records(self) -> int:
        """Count the records that this run read, those of a topic once."""
        new = {flow: {"records": self._counted(flow) - before} for flow, before in self._before.items()}
        return read_once(new, self._topics)["records"]

    def _counted(self, flow: str) -> int:
        return self._coordinator.commit.totals.get(flow, {}).get("records", 0)

    def ended(self, caught_up: bool) -> Progress:
        self.progress = replace(self.progress, caught_up=caught_up)
        return self.progress

    def _made(self, outcome: StepOutcome | None) -> Progress:
        commit = self._coordinator.commit
        counters: Counter[str] = Counter()
        totals = {flow: commit.totals.get(flow, {}) for flow in self._topics}
        for each in totals.values():
            counters.update(each)
        read = read_once(totals, self._topics)
        verdicts = {
            name.removeprefix("verdict."): count
            for name, count in read.items()
            if name.startswith("verdict.")
        }
        lag = 0 if outcome is None else outcome.lag_records
        took_ms = sum(each[1] for each in self._recent)
        rate = sum(each[0] for each in self._recent) * 1000 / took_ms if took_ms else 0.0
        watermarks: dict[str, dict[int, int]] = {flow: {} for flow in self._topics}
        for line in commit.sources:
            if line.flow in watermarks:
                watermarks[line.flow][line.partition] = line.stream_time
        old = self.progress if outcome is not None and outcome.kind == "rest" else None
        return Progress(
            app=commit.app,
            round=commit.round,
            records=read["records"],
            records_per_second=rate,
            lag_records=lag,
            lag_seconds=max(self._coordinator.lag_seconds().values(), default=0.0),
            eta_s=lag / rate if rate > 0 else None,
            caught_up=outcome is not None and lag == 0,
            watermarks=watermarks,
            lookup_lag_records=self._coordinator.lookup_lags,
            waiting_for=() if outcome is None else outcome.waiting_for,
            backlog_bytes=sum(line.backlog_bytes for line in commit.tasks),
            backlog_limit_bytes=self._backlog_limit,
            memory_bytes=sum(line.memory_bytes for line in commit.tasks),
            memory_limit_bytes=self._memory_limit,
            verdicts=verdicts,
            faults=faults_of(totals, self._topics),
            new_faults=new_faults(totals, self._topics),
            counters={
                name: read[name] if name in READ else count
                for name, count in counters.items()
                if not name.startswith("verdict.")
            },
            late=sum(count for name, count in counters.items() if is_late(name)),
            partly_late=sum(count for name, count in counters.items() if is_partly_late(name)),
            left_out={flow: found for flow, each in totals.items() if (found := left_out(each))},
            duplicates=sum(count for name, count in counters.items() if is_duplicate(name)),
            held=sum(each.events for each in held_of(self._topics, commit).values()),
            nulls={
                name: share
                for flow in self._topics
                for name, share in null_shares(flow, commit.totals.get(flow, {})).items()
            },
            stopped=stopped_of(commit, self._topics, self.address),
            round_seconds=old.round_seconds if old else 0.0 if outcome is None else outcome.took_ms / 1000,
            timings_ms=old.timings_ms if old else {} if outcome is None else outcome.timings_ms or {},
        )


RETRY_MS: Final = 1000
BEGINS_WITHIN_S: Final = 5


@dataclass(frozen=True)
class Summary:
    """The result of a run: what it did, what stopped, and its exit code."""

    app: str
    engine: str
    rounds: int
    records: int
    seconds: float
    caught_up: bool
    closed: bool
    progress: Progress
    stopped: tuple[StoppedPartition, ...]
    exit_code: int
    notes: tuple[str, ...] = ()
    state: str | None = None

    def __str__(self) -> str:
        rate = f", {self.records / self.seconds:,.0f}/s" if self.seconds > 0 and self.records else ""
        state = "caught up" if self.caught_up else f"{self.progress.lag_records:,} records left"
        if self.caught_up and self.stopped:
            state += f", but for {len(self.stopped)} stopped"
        rounds = f"{self.rounds} round{'' if self.rounds == 1 else 's'}"
        first = (
            f"{self.app}: {self.records:,} records in {rounds}, {self.seconds:.1f} s{rate} ({self.engine})"
        )
        lines = [f"{first}; {state}{_held_back(self.progress)}"]
        if self.progress.nulls:
            lines.append(f"without a value: {null_text(self.progress.nulls)} of the records")
        lines += [f"note: {note}" for note in self.notes]
        lines += self._fault_lines()
        for flow, said in self.progress.left_out.items():
            told = ", ".join(f"{count:,} {what}" for what, count in said.items())
            lines.append(f"not in all results of {flow}: {told}")
        lines += [
            f"stopped ({each.reason}): {each.message}\n  resume with: {each.command}" for each in self.stopped
        ]
        return "\n".join(lines)

    def _fault_lines(self) -> list[str]:
        """Describe the faults that validation found in all that the app read, and what it could not check."""
        progress, lines = self.progress, list[str]()
        if progress.faults:
            found = ", ".join(f"{count:,} {kind}" for kind, count in progress.faults.items())
            counters = progress.counters
            fates = (("faulty_kept", "set aside as dead letters"), ("faulty_dropped", "dropped"))
            done = [f"{counters[name]:,} {fate}" for name, fate in fates if counters.get(name)]
            lines.append(f"faults: {found}" + (f" ({', '.join(done)})" if done else ""))
        if progress.new_faults:
            lines.append(
                f"  when they are known: tidegate app acknowledge {self.app}{given_state(self.state)}"
            )
        if unchecked := progress.counters.get("unchecked"):
            lines.append(
                f"note: {unchecked:,} records are numbered and check-summed, and nobody looked; add .validate()"
            )
        return lines

    def _repr_html_(self) -> str:
        return f"<p>{cell(str(self).splitlines()[0])}</p>" + self.progress._repr_html_()


class Run:
    """A running app. `with app.start() as run: …` stops it at the end."""

    def __init__(
        self,
        opened: Opened,
        engine: Engine,
        coordinator: Coordinator,
        *,
        clock: Clock,
        settings: RunSettings,
        resources: ExitStack,
        look: Callable[[], Targets],
        show: Callable[[Progress], None] | None,
    ) -> None:
        self.app = opened.setup.app
        self.notes = opened.notes
        self._engine = engine
        self._coordinator = coordinator
        self._tracker = Tracker(opened, coordinator, clock=clock, processes=engine.processes)
        self._clock = clock
        self._settings = settings
        self._resources = resources
        self._look = look
        self._show = show
        self._topics = topics_of(opened.flows)
        self._depth = sum(1 for flow in opened.flows.values() if flow.upstream)
        self._changed = threading.Condition()
        self._stopping = False
        self._progress = self._tracker.progress
        self._reached: CommitRecord | None = None  # the newest commit whose parcels are in the log
        self._error: BaseException | None = None
        self._summary: Summary | None = None
        # Set as the loop's last act and checked instead of the thread, which an interrupted `join` can mark as ended.
        self._ended = threading.Event()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"tidegate-run-{self.app}", daemon=True)

    def __repr__(self) -> str:
        return f"<Run of {self.app} ({self._engine.name}), {'running' if self.is_running else 'ended'}>"

    def _repr_html_(self) -> str:
        return f"<p>{cell(repr(self))}</p>" + self.progress._repr_html_()

    # -- what users ask --------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """The progress as of the last round or look at the log."""
        return self._progress

    @property
    def error(self) -> BaseException | None:
        """The error that ended the run, if it failed."""
        return self._error

    @property
    def is_running(self) -> bool:
        return self._begun.is_set() and not self._ended.is_set()

    def stop(self) -> None:
        """Ask the run to end after its current round (see `await_termination`); a failing round is not retried."""
        self._coordinator.tries_again = False
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def stop_or_give_up(self) -> None:
        """End the run after its current round; if that takes longer than `stop_within_ms`, `give_up`."""
        self.stop()
        try:
            self.join(self._settings.stop_within_ms)
        finally:  # also if waiting is interrupted
            self.give_up()

    def give_up(self) -> None:
        """Release the app at once: the next run can begin, and the current round is not committed."""
        self.stop()
        if not self._ended.is_set():
            self._coordinator.generation.give_up()
            self._engine.cancel()

    def join(self, timeout: int | DurationLike | None = None) -> None:
        """Wait at most so long; raises nothing."""
        self._ended.wait(None if timeout is None else milliseconds(timeout) / 1000)

    def await_termination(self, timeout: int | DurationLike | None = None) -> Summary:
        """Wait until the run ends; raise its error, or `UnavailableError` if it has not ended in time."""
        self.join(timeout)
        if not self._ended.is_set():
            raise UnavailableError(
                f"app {self.app} still runs after {timeout}; wait longer, or stop it with run.stop()"
            )
        if self._error is not None:
            raise self._error
        if self._summary is None:
            raise InvalidError(f"app {self.app} was never started")
        return self._summary

    def await_caught_up(self, timeout: int | DurationLike | None = None) -> Progress:
        """Wait until what is in the log now is committed and its results are delivered.

        Stopped partitions are not waited for, nor events that are held back because of them. If the run ends first,
        its error is raised.
        """
        deadline_ms = None if timeout is None else self._clock.monotonic_ms() + milliseconds(timeout)
        for _ in range(1 + self._depth):  # one flow's output may be another flow's input
            self._await(self._ends(deadline_ms), timeout, deadline_ms)
        return self._progress

    def _ends(self, deadline_ms: int | None) -> Targets:
        """Return the sources' log end offsets; an unavailable log is retried for as long as the run itself retries."""
        while True:
            try:
                return self._look()
            except UnavailableError:
                now_ms = self._clock.monotonic_ms()
                if self._ended.is_set() or (deadline_ms is not None and now_ms >= deadline_ms):
                    raise
            with self._changed:
                self._clock.wait_ms(self._changed, RETRY_MS)

    def _await(self, targets: Targets, timeout: int | DurationLike | None, deadline_ms: int | None) -> None:
        with self._changed:
            while not self._has_reached(targets):
                if self._ended.is_set() and (self._error is not None or self._summary is not None):
                    if self._error is not None:
                        raise self._error
                    raise UnavailableError(
                        f"app {self.app} was stopped before it had caught up; start it again"
                    )
                left_ms = 1000 if deadline_ms is None else deadline_ms - self._clock.monotonic_ms()
                if left_ms <= 0:
                    progress = self._progress
                    raise UnavailableError(
                        f"app {self.app} has not caught up within {timeout}: {progress.lag_records} records are left "
                        f"at {progress.records_per_second:,.0f} records/s{_held_back(progress)}; wait longer"
                    )
                self._clock.wait_ms(self._changed, min(left_ms, 1000))

    def __getattr__(self, name: str) -> Never:
        if name == "wait":
            raise InvalidError("run.wait(…) is run.await_termination(…) now")
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None:
            self.await_termination()
        else:
            self.join()

    # -- the loop --------------------------------------------------------------------------------

    def begin(self) -> Run:
        """Begin rounds. If this is interrupted, the run may have begun (`is_running`) and must be stopped."""
        try:
            self._thread.start()
            self._begun.wait()
        except BaseException as error:
            if isinstance(error, RuntimeError) or not self._begun.wait(BEGINS_WITHIN_S):
                self._resources.close()  # no thread was started
            raise
        return self

    def _main(self) -> None:
        self._begun.set()
        caught_up = closed = False
        try:
            with self._resources:
                try:
                    caught_up, closed = self._loop()
                except FencedError:
                    raise
                except TidegateError:  # runs that fail again and again must not fill the disk
                    with suppress(TidegateError):
                        self._coordinator.collector.finish()
                    raise
                self._coordinator.collector.finish()
        except SystemExit as end:  # whoever waits must not take it for a signal
            self._error = InvalidError(
                f"a function of app {self.app} called sys.exit({end.code!r}); what it was called for is not committed. "
                "Have it raise an error, then start the app again"
            )
        except BaseException as error:  # noqa: BLE001 - the edge of the thread: whoever waits is told
            self._error = error
        progress = self._tracker.ended(caught_up)
        with self._changed:
            self._progress = progress
            if self._error is None:
                self._summary = Summary(
                    app=self.app,
                    engine=self._engine.name,
                    rounds=self._tracker.rounds,
                    records=self._tracker.records,
                    seconds=self._tracker.seconds,
                    caught_up=caught_up,
                    closed=closed,
                    progress=progress,
                    stopped=progress.stopped,
                    exit_code=exit_code_of(progress.stopped, progress.new_faults),
                    notes=self.notes,
                    state=self._tracker.address and without_credentials(self._tracker.address),
                )
            self._ended.set()
            self._changed.notify_all()

    def _loop(self) -> tuple[bool, bool]:
        """Run the loop; return whether it caught up, and whether the input was closed."""
        until = self._settings.until is not None
        targets = self._coordinator.ends_now() if until else None
        closing = False
        began_ms = self._clock.monotonic_ms()
        reached_ms: int | None = None  # when a step last succeeded
        while not self._stopping:
            started_ms = self._clock.monotonic_ms()
            try:
                outcome, reached = self._stepped(targets, closing)
            except (ConflictError, UnavailableError) as error:
                if isinstance(error, ConflictError):
                    if not self._coordinator.generation.was_left:
                        raise
                    # the process before has its files open until it is fenced
                    reached_ms = reached_ms or began_ms
                elif self._is_asked_to_stop():
                    break  # the current round is abandoned and not committed
                if reached_ms is None or started_ms - reached_ms >= self._settings.patience_ms:
                    raise
                self._tell(StepOutcome("rest", self._progress.lag_records, waiting_for=(str(error),)))
                self._wait(self._clock.monotonic_ms() + RETRY_MS)
                continue
            reached_ms = self._clock.monotonic_ms()
            self._tell(outcome, reached)
            if outcome.kind != "rest":
                if outcome.lag_records == 0 and not until:
                    self._wait(started_ms + self._settings.trigger_ms)
                continue
            if outcome.delivered:
                continue
            if until and outcome.lag_records == 0:
                if self._settings.close and not closing:
                    closing = True
                    continue
                return True, set(self._topics) <= set(self._coordinator.commit.closed)
            wake_ms = self._settings.trigger_ms
            if outcome.rest_until_ms is not None:
                wake_ms = min(wake_ms, max(1, outcome.rest_until_ms - self._clock.now_ms()))
            self._wait(started_ms + wake_ms)
        self._coordinator.deliver_outstanding()
        with self._changed:
            self._reached = self._coordinator.commit
            self._changed.notify_all()
        return self._progress.lag_records == 0, False

    def _is_asked_to_stop(
        self,
    ) -> bool:  # by another thread, which a type checker does not expect in the loop
        return self._stopping

    def _stepped(self, targets: Targets | None, closing: bool) -> tuple[StepOutcome, CommitRecord | None]:
        """Do a step; if no round follows immediately, deliver its results and return the commit they are of."""
        outcome = self._coordinator.step(targets=targets, closing=closing)
        if outcome.lag_records and outcome.kind != "rest":
            return outcome, None
        self._coordinator.deliver_outstanding()
        return outcome, self._coordinator.commit

    def _wait(self, until_ms: int) -> None:
        with self._changed:
            left_ms = until_ms - self._clock.monotonic_ms()
            if left_ms > 0 and not self._stopping:
                self._clock.wait_ms(self._changed, left_ms)

    def _tell(self, outcome: StepOutcome, reached: CommitRecord | None = None) -> None:
        """Set the progress and, with it, the commit whose results are delivered; None: as before."""
        progress = self._tracker.after(outcome)
        with self._changed:
            self._progress = progress
            self._reached = self._reached if reached is None else reached
            self._changed.notify_all()
        if self._show is not None:
            self._show(progress)

    def _has_reached(self, targets: Targets) -> bool:
        commit = self._reached
        if commit is None:
            return False
        lines = [line for line in commit.sources if line.flow in self._topics]
        stopped = {line.flow for line in lines if line.stopped is not None}
        held = {
            flow: each.offsets for flow, each in held_of(self._topics, commit).items() if flow not in stopped
        }
        for line in lines:
            target = targets[self._topics[line.flow], line.partition]
            worked_up_to = held.get(line.flow, {}).get(line.partition, line.next_offset)
            if line.stopped is None and worked_up_to < target:
                return False
        return True


def _held_back(progress: Progress) -> str:
    """Describe what is held back for the sake of order, and which partition it waits for, as the end of a sentence."""
    if not progress.held:
        return ""
    waits = f", waiting for {'; '.join(progress.waiting_for)}" if progress.waiting_for else ""
    return f", {progress.held:,} records held back{waits}"
