"""Backpressure: limits how much each task may read, by the backlog of the process that keeps its state.

The backlog is data that was accepted and not pruned. From three quarters of the limit on, nothing more is read,
except for ticks that can free something. Where no tick can, only reading advances time, so one small range is
admitted. If time then passed everything that is kept and nothing was freed, or the limit is nearly reached, the
state does not fit: the run ends with `retention_exceeds_backlog` and says what to change.

A1  a partition that has records and may read none is never reported as caught up: the planner over-admits, waits for
    a moment it can name, or raises.
A2  every over-admitted range is bounded, and takes at most half of the room that is left; each either advances time,
    or fills the last quarter; so it ends.

Thread rule: one coordinator, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tidegate.errors import OverloadError
from tidegate.pipeline.checkpoint import CommitRecord
from tidegate.pipeline.flow import FlowFacts

THRESHOLD_PERMILLE: Final = 750
FULL_PERMILLE: Final = 970
OVER_ADMITTED: Final = 1000  # records admitted where nothing else helps: about one log batch
FIRST_GUESS_BYTES: Final = 64.0
BUCKETS_MS: Final = 120_000  # state is freed by buckets, which are minutes at least

Source: TypeAlias = tuple[str, int]  # flow, partition
Place: TypeAlias = Callable[[str, int], int]


@dataclass
class Backpressure:
    """The state of the backlog: its growth per record, and what happened since backpressure began."""

    limit_bytes: int
    place: Place
    growth: dict[str, float] = field(default_factory=dict)  # flow → bytes per record, where it was measured
    _since: dict[str, int] = field(default_factory=dict)  # throttled flow → least stream time when it began

    @property
    def threshold_bytes(self) -> int:
        return self.limit_bytes * THRESHOLD_PERMILLE // 1000

    def note(self, before: CommitRecord, after: CommitRecord, records: Mapping[str, int]) -> None:
        """Record by how much a round with these records of each flow changed the tasks' backlog."""
        held = _by_flow(before)
        for flow, now in _by_flow(after).items():
            if count := records.get(flow, 0):
                grown = (now - held.get(flow, 0)) / count
                self.growth[flow] = max(grown, self.growth.get(flow, FIRST_GUESS_BYTES) / 2, 1.0)

    def admitted(
        self, flows: Mapping[str, FlowFacts], commit: CommitRecord, wanted: Mapping[Source, int]
    ) -> dict[Source, int]:
        """Return how many of the wanted records may be read, so that no process exceeds its share."""
        free = self._free(flows, commit)
        cost = dict.fromkeys(free, 0.0)
        shares = {source: self._shares(flows[source[0]], source[1]) for source in wanted}
        for source, place_shares in shares.items():
            each = self.growth.get(source[0], FIRST_GUESS_BYTES)
            for place, share in place_shares.items():
                cost[place] += wanted[source] * each * share
        part = {
            place: max(0.0, free[place] / cost[place]) if cost[place] > max(free[place], 0.0) else 1.0
            for place in free
        }
        return {
            source: int(count * min((part[place] for place in shares[source]), default=1.0))
            for source, count in wanted.items()
        }

    def over_admit(
        self,
        flows: Mapping[str, FlowFacts],
        commit: CommitRecord,
        braked: Sequence[Source],
        waiting: Sequence[str],
        held: Container[str] = (),
    ) -> int:
        """Return how many records each throttled source may read anyway; `OverloadError` when that cannot help.

        Flows with `held` events free them as the partition that is behind advances, whatever windows keep.
        """
        for flow in sorted({flow for flow, _ in braked}):
            time = _least_time(commit, flow)
            began = self._since.setdefault(flow, time)
            kept_ms = flows[flow].kept_ms
            if flow not in held and kept_ms is not None and time - began > 2 * kept_ms + BUCKETS_MS:
                raise self.overload(flows, commit, waiting)
        used = max(self._used(flows, commit).values(), default=0)
        if used * 1000 >= self.limit_bytes * FULL_PERMILLE:
            raise self.overload(flows, commit, waiting)
        largest = max(self.growth.get(flow, FIRST_GUESS_BYTES) for flow, _ in braked)
        room = (self.limit_bytes - used) / 2 / largest / len(braked)
        return max(1, min(OVER_ADMITTED, int(room)))

    def released(self) -> None:
        """Note that reading was admitted normally again."""
        self._since.clear()

    def overload(
        self, flows: Mapping[str, FlowFacts], commit: CommitRecord, waiting: Sequence[str] = ()
    ) -> OverloadError:
        """Return the error that says what does not fit, why, and what to change; it names the flow that holds most."""
        used = max(self._used(flows, commit).values(), default=0)
        held_by = _by_flow(commit)
        flow = max(flows, key=lambda name: held_by.get(name, 0))
        facts = flows[flow]
        kept = (
            "it has nothing that time would free (windows without end)"
            if facts.kept_ms is None
            else f"it keeps {facts.kept_ms} ms of events"
        )
        held = f"; it waits for {', '.join(waiting)}" if waiting else ""
        enough = -(-2 * max(used, self.limit_bytes) // (1 << 20))
        return OverloadError(
            f"app {commit.app}, flow {flow}: what must be kept does not fit. {used} bytes of backlog are in use in one "
            f"worker, the limit is {self.limit_bytes}, and reading on frees nothing: {kept}{held}. Raise "
            f"backlog_limit_bytes of the app's storage (to {enough}MiB, say), or shorten window, grace, retention or "
            "the horizon of drop_duplicates; then start the app again, it goes on where it stopped",
            reason="retention_exceeds_backlog",
        )

    def _free(self, flows: Mapping[str, FlowFacts], commit: CommitRecord) -> dict[int, float]:
        return {
            place: float(self.threshold_bytes - used) for place, used in self._used(flows, commit).items()
        }

    def _used(self, flows: Mapping[str, FlowFacts], commit: CommitRecord) -> dict[int, int]:
        used = {self.place(flow.name, task): 0 for flow in flows.values() for task in range(flow.tasks)}
        for line in commit.tasks:
            if line.flow in flows:
                place = self.place(line.flow, line.task)
                used[place] = used.get(place, 0) + line.backlog_bytes
        return used

    def _shares(self, flow: FlowFacts, partition: int) -> dict[int, float]:
        """Return which processes read a source, and which share of it."""
        if not flow.is_stateful:
            return {}
        if not flow.is_rekeyed:
            return {self.place(flow.name, partition): 1.0}
        shares: dict[int, float] = {}
        for task in range(flow.tasks):
            place = self.place(flow.name, task)
            shares[place] = shares.get(place, 0.0) + 1 / flow.tasks
        return shares


def _by_flow(commit: CommitRecord) -> dict[str, int]:
    held: dict[str, int] = {}
    for line in commit.tasks:
        held[line.flow] = held.get(line.flow, 0) + line.backlog_bytes
    return held


def _least_time(commit: CommitRecord, flow: str) -> int:
    return min((line.stream_time for line in commit.sources if line.flow == flow), default=-1)
