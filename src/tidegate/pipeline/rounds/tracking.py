"""From what the master did to what users see: progress values, rates, and how long it will still take.

Thread rule: the run's thread; the values it makes go anywhere.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from tidegate.clock import Clock
from tidegate.pipeline.rounds.master import Master, StepOutcome
from tidegate.pipeline.rounds.metrics import is_duplicate, is_late, is_partly_late, left_out
from tidegate.pipeline.rounds.opening import Opened
from tidegate.pipeline.rounds.planning import held_of
from tidegate.pipeline.rounds.progress import Progress, null_shares
from tidegate.pipeline.rounds.stops import READ, faults_of, new_faults, read_once, stopped_of, topics_of


class Tracker:
    """Makes progress values out of what the master says; the rate is of the last rounds that read something."""

    def __init__(self, opened: Opened, master: Master, *, clock: Clock, processes: int) -> None:
        self._master = master
        self._clock = clock
        self._topics = topics_of(opened.flows)
        self._backlog_limit = opened.setup.storage.backlog_limit_bytes * processes
        self._memory_limit = opened.setup.storage.worker_total_bytes * processes
        self._started_ms = clock.monotonic_ms()
        self._recent: deque[tuple[int, int]] = deque(maxlen=5)  # records and milliseconds of rounds
        self.rounds = self._read = 0
        self._before = {flow: self._counted(flow) for flow in self._topics}
        self.progress = self._made(None)

    @property
    def seconds(self) -> float:
        return (self._clock.monotonic_ms() - self._started_ms) / 1000

    def after(self, outcome: StepOutcome) -> Progress:
        """Where things stand after a step."""
        if outcome.kind == "round":
            self.rounds += 1
            read, self._read = self.records - self._read, self.records
            if read:
                self._recent.append((read, max(1, outcome.took_ms)))
        self.progress = self._made(outcome)
        return self.progress

    @property
    def records(self) -> int:
        """Records that this run read, those of a topic once."""
        new = {flow: {"records": self._counted(flow) - before} for flow, before in self._before.items()}
        return read_once(new, self._topics)["records"]

    def _counted(self, flow: str) -> int:
        return self._master.commit.totals.get(flow, {}).get("records", 0)

    def ended(self, caught_up: bool) -> Progress:
        self.progress = replace(self.progress, caught_up=caught_up)
        return self.progress

    def _made(self, outcome: StepOutcome | None) -> Progress:
        commit = self._master.commit
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
        rate = self._rate()
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
            lag_seconds=max(self._master.lag_seconds().values(), default=0.0),
            eta_s=lag / rate if rate > 0 else None,
            caught_up=outcome is not None and lag == 0,
            watermarks=watermarks,
            lookup_lag_records=self._master.lookup_lags,
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
            stopped=stopped_of(commit, self._topics),
            round_seconds=old.round_seconds if old else 0.0 if outcome is None else outcome.took_ms / 1000,
            timings_ms=old.timings_ms if old else {} if outcome is None else outcome.timings_ms or {},
        )

    def _rate(self) -> float:
        records = sum(each[0] for each in self._recent)
        took_ms = sum(each[1] for each in self._recent)
        return records * 1000 / took_ms if took_ms else 0.0
