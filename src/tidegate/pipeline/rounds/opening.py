"""Opening an app: take its turn, hold its definition against the recorded one, and find where it goes on.

A new app gets its record and commit 0, which holds where reading begins; an app that is started again goes on from its
newest commit. A definition that changed in a way that keeps state right becomes a commit of its own
(`records`, R4); any other is refused with the ways out.

O1  the record that names a definition is written before the commit that refers to it, so a crash between the two leaves
    an app that opens.
O2  what was committed and perhaps not delivered is carried over by every change: it is delivered by whoever goes on.

Thread rule: one master, one thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tidegate.clock import Clock
from tidegate.errors import ConflictError, InvalidError
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log
from tidegate.pipeline.definition.changes import Changes, compare
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.rounds.facts import FlowFacts, all_facts
from tidegate.pipeline.rounds.generation import Generation
from tidegate.pipeline.rounds.heads import Heads
from tidegate.pipeline.rounds.orders import Tick
from tidegate.pipeline.rounds.records import (
    KEPT,
    VERSION,
    AppRecord,
    CommitRecord,
    FlowLine,
    Records,
    SourceLine,
)
from tidegate.pipeline.rounds.topics import (
    largest_batch,
    make_topics,
    require_as_recorded,
    require_one_writer,
)
from tidegate.pipeline.tasks.setup import WorkerSetup
from tidegate.randomness import Randomness

Lines = tuple[FlowLine, ...]
REPLAYED = "to be replayed from the beginning of the log"  # a change after which every source begins there


@dataclass(frozen=True)
class Opened:
    """An app that is this process's to run, and where it stands."""

    setup: WorkerSetup
    flows: Mapping[str, FlowFacts]
    records: Records
    generation: Generation
    commit: CommitRecord
    digest: bytes
    heads: Heads
    notes: tuple[str, ...] = ()  # what a changed definition means, in words


def open_app(
    setup: WorkerSetup,
    log: Log | KafkaLog,
    records: Records,
    generation: Generation,
    *,
    clock: Clock,
    randomness: Randomness,
) -> Opened:
    """Everything up to the first round."""
    if not setup.flows:
        raise InvalidError(
            f"app {setup.app} has no flow: end a stream with .to_topic(topic) or .to_table(name)"
        )
    heads = Heads(log)
    opening = _Opening(setup, log, records, generation, heads, clock, randomness)
    require_as_recorded(log, records.backend, setup.flows)
    commit, digest, flows, notes = opening.changed(opening.newest())
    facts = opening.facts(flows)
    sinks = make_topics(log, records.backend, setup.app, flows, facts)
    require_one_writer(flows, facts, sinks)
    sources = {flow.topic: flow.partitions for flow in facts.values()}
    known = replace(
        setup,
        flows=flows,
        partitions={**setup.partitions, **sources, **sinks},
        max_batch_bytes={topic: largest_batch(log, topic, setup.client) for topic in sinks},
    )
    return Opened(known, facts, records, generation, commit, digest, heads, notes)


def definition_digest(lines: Lines) -> str:
    """What tells one definition of an app from another."""
    said = msgspec.msgpack.encode(
        [(line.name, line.fingerprint, line.partitions, line.tasks) for line in lines]
    )
    return hashlib.blake2b(said, digest_size=8).hexdigest()


def starting_lines(flow: FlowFacts, heads: Heads, now_ms: int) -> tuple[SourceLine, ...]:
    """Where a flow begins that has never read anything."""
    found = heads.of(flow.topic, flow.partitions)
    topic_id = heads.states([flow.topic])[flow.topic].topic_id
    return tuple(
        SourceLine(
            flow.name,
            number,
            found[number].start if flow.start == "earliest" else found[number].end,
            seen_ms=now_ms,
            topic_id=topic_id,
        )
        for number in range(flow.partitions)
    )


def partitions_added(app: str, flows: Mapping[str, FlowFacts], topic: str, partitions: int) -> InvalidError:
    """The error that ends a run whose source got more partitions, with what to do."""
    readers = [flow for flow in flows.values() if flow.topic == topic]
    had = f"topic {topic} had {readers[0].partitions} partitions when app {app} was started and has {partitions} now"
    if all(flow.is_rekeyed for flow in readers):
        return InvalidError(
            f"{had}. Start the app again: it reads the new ones from their start and keeps its state"
        )
    return InvalidError(f"{had}. {_moved(app)}")


def _moved(app: str) -> str:
    return (
        "Keys would move between tasks, and their state would not. Run it under a new app name, or start over with "
        f"`tidegate app reset {app}`"
    )


def _done(commit: CommitRecord, flows: Set[str]) -> tuple[Any, ...]:
    """What flows have come to, whatever their definition: where they read, and the state of their tasks."""
    sources = {
        (line.flow, line.partition): (line.next_offset, line.state)
        for line in commit.sources
        if line.flow in flows
    }
    return sources, {(line.flow, line.task): line.token for line in commit.tasks if line.flow in flows}


def _untouched(commit: CommitRecord) -> frozenset[str]:
    """Flows that have read nothing and keep nothing."""
    worked = {line.flow for line in commit.tasks if line.token}
    read = {flow for flow, counters in commit.totals.items() if counters.get("records")}
    begun = {line.flow for line in commit.sources if line.state}
    return frozenset(line.flow for line in commit.sources) - worked - read - begun


@dataclass(frozen=True)
class _Opening:
    setup: WorkerSetup
    log: Log | KafkaLog
    records: Records
    generation: Generation
    heads: Heads
    clock: Clock
    randomness: Randomness

    def facts(self, flows: Sequence[Flow]) -> dict[str, FlowFacts]:
        own = {sink.topic for flow in flows for sink in flow.topics}

        def partitions(topic: str) -> int | None:
            if topic in own:
                return self.heads.partitions(topic)
            return self.heads.require(topic, self.setup.app)

        return all_facts(flows, partitions)

    def lines(self, flows: Sequence[Flow]) -> Lines:
        facts = self.facts(flows)
        return tuple(
            FlowLine(
                flow.name,
                flow.fingerprint,
                flow.description,
                flow.source.topic,
                facts[flow.name].partitions,
                facts[flow.name].tasks,
            )
            for flow in flows
        )

    def _make_topics(self, flows: Sequence[Flow], facts: Mapping[str, FlowFacts]) -> None:
        make_topics(self.log, self.records.backend, self.setup.app, flows, facts)

    def newest(self) -> tuple[CommitRecord, bytes]:
        """The newest commit; the first one is made where there is none."""
        newest = self.records.newest()
        if newest is None:
            self._make_topics(self.setup.flows, self.facts(self.setup.flows))
            lines = self.lines(self.setup.flows)
            self._know_definition(lines)
            try:
                return self.records.put_change(self._first(lines))
            except ConflictError:
                newest = 0
        return self.records.read_commit(newest)

    def changed(
        self, newest: tuple[CommitRecord, bytes]
    ) -> tuple[CommitRecord, bytes, tuple[Flow, ...], tuple[str, ...]]:
        """The commit to go on from, after what the definition changed in it, and the flows to run."""
        commit, digest = newest
        recorded = self._recorded(commit)
        changes = self._compared(recorded)
        if changes.kind == "incompatible":
            recorded, changes = self._undone(commit, recorded, changes)
        changes.require(self.setup.app)
        lines = self.lines(changes.flows)
        self._require_same_numbers(recorded, lines)
        if definition_digest(lines) == commit.definition:
            return commit, digest, changes.flows, ()
        facts = self.facts(changes.flows)
        self._make_topics(changes.flows, facts)
        self._know_definition(lines, commit.definition)
        change = self._change(commit, digest, definition_digest(lines), facts, fresh=changes.fresh)
        commit, digest = self.records.put_change(change)
        self.generation.check()
        return commit, digest, changes.flows, changes.notes if recorded else ()

    def _compared(self, recorded: Lines) -> Changes:
        return compare({line.name: line.description for line in recorded}, self.setup.flows)

    def _undone(self, commit: CommitRecord, recorded: Lines, changes: Changes) -> tuple[Lines, Changes]:
        """Compare with what the state that is there was made by, where that is not the newest definition.

        Flows that have read nothing have no state, and begin as any definition says. Where nothing was done since an
        earlier definition, the state is of that one: a change that was committed before any record was read can be
        taken back.
        """
        empty = _untouched(commit)
        begun = tuple(line for line in recorded if line.name not in empty)
        if len(begun) < len(recorded) and (anew := self._compared(begun)).kind != "incompatible":
            return begun, anew
        known = self.records.load_app()
        if known is None:
            return recorded, changes
        for round in sorted(self.records.rounds(), reverse=True):
            found = self.records.load_commit(round) if round < commit.round else None
            if found is None:
                continue
            flows = {line.flow for line in found[0].sources}
            if _done(found[0], flows) != _done(commit, flows):
                break
            lines = known[0].definitions.get(found[0].definition)
            if lines is None or found[0].definition == commit.definition:
                continue
            earlier = self._compared(lines)
            if earlier.kind != "incompatible" and not earlier.fresh & {line.name for line in recorded}:
                return lines, earlier
        return recorded, changes

    def _know_definition(self, lines: Lines, *used: str) -> None:
        """Have the app's record name this definition (O1); those in use stay, of others the recent ones."""
        wanted = definition_digest(lines)
        for _ in range(8):
            found = self.records.load_app()
            app = AppRecord(VERSION, self.setup.app, self.clock.now_ms(), {}) if found is None else found[0]
            if wanted in app.definitions:
                return
            recent = {*used, *list(app.definitions)[-KEPT:]}
            kept = {name: known for name, known in app.definitions.items() if name in recent}
            record = AppRecord(app.version, app.app, app.created_ms, {**kept, wanted: lines})
            try:
                self.records.save_app(record, None if found is None else found[1])
            except ConflictError:
                continue
            return
        raise ConflictError(f"the record of app {self.setup.app} changes all the time; try again")

    def _recorded(self, commit: CommitRecord) -> Lines:
        if not commit.definition:
            return ()  # it was reset: nothing of it is left to hold anything against
        found = self.records.load_app()
        lines = None if found is None else found[0].definitions.get(commit.definition)
        if lines is None:
            raise InvalidError(
                f"app {self.setup.app}: the definition that commit {commit.round} was made with is not known any more; "
                f"give the app a new name, or start over with `tidegate app reset {self.setup.app}`"
            )
        return lines

    def _require_same_numbers(self, recorded: Lines, lines: Lines) -> None:
        now = {line.name: line for line in lines}
        for line in recorded:
            have = now.get(line.name)
            if have is None or (have.partitions, have.tasks) == (line.partitions, line.tasks):
                continue
            if have.tasks == line.tasks and have.partitions > line.partitions:
                continue  # behind a key_by, keys have a task whatever partition they come from
            raise InvalidError(
                f"app {self.setup.app}, flow {line.name}: topic {line.topic} had {line.partitions} partitions and "
                f"{line.tasks} tasks when the app was made, and now it is {have.partitions} and {have.tasks}. "
                f"{_moved(self.setup.app)}"
            )

    def _first(self, lines: Lines) -> CommitRecord:
        now_ms = self.clock.now_ms()
        facts = self.facts(self.setup.flows)
        sources = [line for flow in facts.values() for line in starting_lines(flow, self.heads, now_ms)]
        return CommitRecord(
            version=VERSION,
            app=self.setup.app,
            round=0,
            generation=self.generation.number,
            base=b"",
            plan=b"",
            definition=definition_digest(lines),
            life=self.randomness.uuid().hex[:12],
            tick=Tick(now_ms),
            committed_ms=now_ms,
            sources=tuple(sorted(sources, key=lambda line: (line.flow, line.partition))),
            tasks=(),
            change="made",
        )

    def _change(
        self,
        commit: CommitRecord,
        digest: bytes,
        definition: str,
        facts: Mapping[str, FlowFacts],
        *,
        fresh: frozenset[str],
    ) -> CommitRecord:
        """The same app with another definition: new flows begin, others go on; what is not said any more stays."""
        now_ms = self.clock.now_ms()
        empty = {name for name in _untouched(commit) & fresh if commit.change != REPLAYED}
        same = {
            name
            for name in empty
            if {line.topic_id for line in commit.sources if line.flow == name}
            == {line.topic_id for line in starting_lines(facts[name], self.heads, now_ms)}
        }  # they begin where they would have begun: "latest" was decided when they were made
        sources = [line for line in commit.sources if line.flow not in fresh - same]
        for name in fresh - same:
            flow = facts[name]
            if commit.change == REPLAYED:
                flow = replace(flow, start="earliest")
            sources += starting_lines(flow, self.heads, now_ms)
        have = {(line.flow, line.partition) for line in sources}
        for flow in facts.values():  # partitions that were added since: nothing of them was read
            begun = starting_lines(replace(flow, start="earliest"), self.heads, now_ms)
            sources += [line for line in begun if (line.flow, line.partition) not in have]
        return msgspec.structs.replace(
            commit,
            round=commit.round + 1,
            generation=self.generation.number,
            base=digest,
            plan=b"",
            definition=definition,
            life=self.randomness.uuid().hex[:12],
            committed_ms=now_ms,
            sources=tuple(sorted(sources, key=lambda line: (line.flow, line.partition))),
            tasks=tuple(line for line in commit.tasks if line.flow not in fresh),
            watermarks={flow: time for flow, time in commit.watermarks.items() if flow not in fresh},
            closed=(),
            change="another definition",
        )
