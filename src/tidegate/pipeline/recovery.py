"""Open an app: take the lease, compare its definition with the recorded one, prepare topics, find the newest commit.

A new app gets its record and commit 0, which holds the start offsets. A restarted app continues from its newest
commit. A changed definition that keeps the state correct becomes a commit of its own (`checkpoint`, R4); any other is
refused with the remedies.

Topics that the app reads must exist; topics that it writes are created. The encoding of what it writes is recorded
with the topic (`tables.topic_encoding`), and another encoding is refused.

O1  the record that names a definition is written before the commit that refers to it, so a crash between the two
    leaves an app that opens.
O2  every change carries over what was committed but perhaps not delivered; the next coordinator delivers it.

Thread rule: one coordinator thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
from msgspec.structs import replace as replaced

from tidegate.clock import Clock
from tidegate.durations import format_duration
from tidegate.errors import ConflictError, InvalidError
from tidegate.integrity.verdicts import INTEGRITY_LAG_MS
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log
from tidegate.pipeline.checkpoint import (
    KEPT,
    VERSION,
    AppRecord,
    CommitRecord,
    FlowLine,
    Records,
    SourceLine,
)
from tidegate.pipeline.evolution import Changes, compare
from tidegate.pipeline.flow import Flow, FlowFacts, all_facts, find
from tidegate.pipeline.lease import AppLease
from tidegate.pipeline.log_end_offsets import LogEndOffsets
from tidegate.pipeline.messages import Tick
from tidegate.pipeline.settings import WorkerSetup
from tidegate.pipeline.topology import To, serde, window
from tidegate.randomness import Randomness
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.topic_encoding import TopicEncoding, read_encoding, record_encoding, require_fit
from tidegate.windows.changelog import changelog_settings
from tidegate.windows.kinds import Session, Unlimited

# -- topics ---------------------------------------------------------------------------------------

CLIENT_BATCH_BYTES: Final = 1_000_000  # librdkafka's default of message.max.bytes


def make_topics(
    log: Log | KafkaLog,
    backend: StorageBackend,
    app: str,
    flows: Sequence[Flow],
    facts: Mapping[str, FlowFacts],
) -> dict[str, int]:
    """Create missing topics that the flows write; return the number of partitions of each."""
    counts = log.partition_counts()
    for flow in flows:
        for sink in flow.topics:
            wanted = facts[flow.name].tasks if sink.partitions is None else sink.partitions
            if sink.topic not in counts:
                log.create_topic(sink.topic, wanted, sink_settings(flow, sink), if_not_exists=True)
                counts = log.partition_counts()
            elif sink.partitions is not None and counts[sink.topic] != wanted:
                raise InvalidError(
                    f"topic {sink.topic} has {counts[sink.topic]} partitions, and flow {flow.name} is to write "
                    f"{wanted}: leave out partitions=, or write to another topic"
                )
            now = encoding_of(flow, sink, facts[flow.name].tasks)
            _keep_encoding(log, backend, app, counts[sink.topic], sink.topic, now)
    return {sink.topic: counts[sink.topic] for flow in flows for sink in flow.topics}


def largest_batch(log: Log | KafkaLog, topic: str, client: Mapping[str, str]) -> int:
    """Return the bytes of the largest batch that can be written to the topic; for a cluster, that the client sends."""
    if not isinstance(log, Log):
        return int(client.get("message.max.bytes", CLIENT_BATCH_BYTES))
    config = log.describe(topic).config
    return min(config.max_message_bytes, config.segment_bytes)


def require_as_recorded(log: Log | KafkaLog, backend: StorageBackend, flows: Sequence[Flow]) -> None:
    """Refuse windows over changes of a topic if its recorded encoding differs from how it is read."""
    counts = log.partition_counts()
    for flow in flows:
        source = flow.source
        if source.windows is None or not flow.is_stateful or source.topic not in counts:
            continue
        recorded = read_encoding(log, backend, source.topic)
        if recorded is None or not recorded.emit:
            continue
        if source.emit != recorded.emit:
            raise InvalidError(
                f"flow {flow.name} reads changes of {source.topic} as emit={str(source.emit)!r}, and the topic is "
                f"written with emit={recorded.emit!r}: say app.changes({source.topic!r}, emit={recorded.emit!r}, …)"
            )
        if recorded.window_size_ms != source.windows.size_ms:
            said, made = (
                "sessions" if size is None else f"windows of {format_duration(size)}"
                for size in (source.windows.size_ms, recorded.window_size_ms)
            )
            raise InvalidError(
                f"flow {flow.name} reads changes of {source.topic} as {said}, and the topic has {made}"
            )
        if recorded.tasks:
            _require_own_partitions(flow, counts[source.topic], recorded.tasks)


def require_one_writer(
    flows: Sequence[Flow], facts: Mapping[str, FlowFacts], counts: Mapping[str, int]
) -> None:
    """Refuse windows over changes of a topic whose partitions several tasks write: no task knows what is final for
    all."""
    for flow in flows:
        if flow.source.windows is None or not flow.is_stateful:
            continue
        known = find(flows, flow.source.topic)
        if known is not None:
            _require_own_partitions(flow, counts[flow.source.topic], facts[known[0].name].tasks)


def _require_own_partitions(flow: Flow, partitions: int, tasks: int) -> None:
    if partitions != tasks:
        topic = flow.source.topic
        raise InvalidError(
            f"flow {flow.name} makes windows of the changes in {topic}, which has {partitions} partitions and "
            f"{tasks} tasks that write it: of one that is ahead, changes by the others would come too late. Leave "
            f"partitions= out of .to_topic({topic!r}), and let the app make the topic"
        )


def encoding_of(flow: Flow, sink: To, tasks: int) -> TopicEncoding:
    """Return the encoding of the keys and values of a flow's records in a topic."""
    value = flow.value_format(sink)
    said = (
        {"json": [[each.name, str(each.type)] for each in flow.result_schema]}
        if value.serde is None
        else serde(value.serde)
    )
    key, aggregate = serde(flow.key_serde), flow.window
    if aggregate is None:
        return TopicEncoding(key, said)
    kind = {
        name: length
        for name, length in window(aggregate.kind).items()
        if name not in ("grace_ms", "retention_ms")  # not in the records, and may grow
    }
    return TopicEncoding(key, said, kind, sink.key_format, str(aggregate.emit), tasks)


def _keep_encoding(
    log: Log | KafkaLog, backend: StorageBackend, app: str, partitions: int, topic: str, now: TopicEncoding
) -> None:
    """Record the encoding, or refuse it where the topic holds records of another one."""
    recorded = read_encoding(log, backend, topic)
    if recorded == now:
        return
    if recorded is not None and any(head.end for head in LogEndOffsets(log).of(topic, partitions).values()):
        now = require_fit(topic, recorded, now, app)
    if recorded != now:
        record_encoding(log, backend, topic, now)


def sink_settings(flow: Flow, sink: To) -> dict[str, str]:
    """Return the topic config of results: windows like a Kafka Streams changelog, others with the log's defaults.

    Numbered records are exempt from compaction for at least a day: a gap among younger ones is loss.
    """
    window = flow.window
    if window is None:
        return {}
    own = {"min.compaction.lag.ms": str(INTEGRITY_LAG_MS)} if sink.integrity else {}
    if isinstance(window.kind, Unlimited):
        return changelog_settings("key-value", own=own)
    if not isinstance(window.kind, Session):
        return changelog_settings("window", retention=window.kind.retention_ms, own=own)
    settings = changelog_settings("session", retention=window.kind.retention_ms, own=own)
    # A reader that comes back must find that a session was deleted, as long as it finds the session.
    return {**settings, "delete.retention.ms": settings["retention.ms"]}


Lines = tuple[FlowLine, ...]
REPLAYED = "to be replayed from the beginning of the log"  # a change after which every source begins there
RESET = "reset"


@dataclass(frozen=True)
class Opened:
    """An app that this process may run, and its newest commit."""

    setup: WorkerSetup
    flows: Mapping[str, FlowFacts]
    records: Records
    generation: AppLease
    commit: CommitRecord
    digest: bytes
    heads: LogEndOffsets
    notes: tuple[str, ...] = ()  # the effects of a changed definition, in words


def open_app(
    setup: WorkerSetup,
    log: Log | KafkaLog,
    records: Records,
    generation: AppLease,
    *,
    clock: Clock,
    randomness: Randomness,
) -> Opened:
    """Open an app up to its first round."""
    if not setup.flows:
        raise InvalidError(
            f"app {setup.app} has no flow: end a stream with .to_topic(topic) or .to_table(name)"
        )
    heads = LogEndOffsets(log)
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
    """Return the digest that identifies a definition of an app."""
    said = msgspec.msgpack.encode(
        [(line.name, line.fingerprint, line.partitions, line.tasks) for line in lines]
    )
    return hashlib.blake2b(said, digest_size=8).hexdigest()


def starting_lines(flow: FlowFacts, heads: LogEndOffsets, now_ms: int) -> tuple[SourceLine, ...]:
    """Return the start positions of a flow that has never read anything."""
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
    """Return the error, with the remedy, that ends a run whose source got more partitions."""
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
    """Return what flows have done, whatever their definition: positions, and the state of their tasks."""
    sources = {
        (line.flow, line.partition): (line.next_offset, line.state)
        for line in commit.sources
        if line.flow in flows
    }
    return sources, {(line.flow, line.task): line.token for line in commit.tasks if line.flow in flows}


def _untouched(commit: CommitRecord) -> frozenset[str]:
    """Return the flows that have read nothing and keep no state."""
    worked = {line.flow for line in commit.tasks if line.token}
    read = {flow for flow, counters in commit.totals.items() if counters.get("records")}
    begun = {line.flow for line in commit.sources if line.state}
    return frozenset(line.flow for line in commit.sources) - worked - read - begun


@dataclass(frozen=True)
class _Opening:
    setup: WorkerSetup
    log: Log | KafkaLog
    records: Records
    generation: AppLease
    heads: LogEndOffsets
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

    def newest(self) -> tuple[CommitRecord, bytes]:
        """Return the newest commit; create the first one if there is none."""
        newest = self.records.newest()
        if newest is None:
            facts = self.facts(self.setup.flows)
            make_topics(self.log, self.records.backend, self.setup.app, self.setup.flows, facts)
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
        """Return the commit to continue from, after the changes of the definition, and the flows to run."""
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
        make_topics(self.log, self.records.backend, self.setup.app, changes.flows, facts)
        self._know_definition(lines, commit.definition)
        change = self._change(commit, digest, definition_digest(lines), facts, fresh=changes.fresh)
        commit, digest = self.records.put_change(change)
        self.generation.check()
        return commit, digest, changes.flows, changes.notes if recorded else ()

    def _compared(self, recorded: Lines) -> Changes:
        return compare({line.name: line.description for line in recorded}, self.setup.flows)

    def _undone(self, commit: CommitRecord, recorded: Lines, changes: Changes) -> tuple[Lines, Changes]:
        """Compare with the definition that produced the existing state, where that is not the newest one.

        Flows that have read nothing have no state and begin as any definition says. If nothing was done since an
        earlier definition, the state belongs to that one: a change that was committed before any record was read can
        be undone.
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
        """Add this definition to the app's record (O1); keep those in use, and of others the recent ones."""
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
            return ()  # it was reset: nothing is left to compare with
        lines = self.records.flows_of(commit)
        if not lines:
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
                continue  # behind a key_by the task of a key does not depend on the source partition
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
            incarnation=self.randomness.uuid().hex[:12],
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
        """Return the same app with another definition: new flows begin, others continue; removed ones are kept
        stored."""
        now_ms = self.clock.now_ms()
        empty = {name for name in _untouched(commit) & fresh if commit.change != REPLAYED}
        same = {
            name
            for name in empty
            if {line.topic_id for line in commit.sources if line.flow == name}
            == {line.topic_id for line in starting_lines(facts[name], self.heads, now_ms)}
        }  # they begin where they would have begun: "latest" was resolved when they were created
        sources = [line for line in commit.sources if line.flow not in fresh - same]
        for name in fresh - same:
            flow = facts[name]
            if commit.change == REPLAYED:
                flow = replace(flow, start="earliest")
            sources += starting_lines(flow, self.heads, now_ms)
        have = {(line.flow, line.partition) for line in sources}
        for flow in facts.values():  # partitions that were added since: none of their records were read
            begun = starting_lines(replace(flow, start="earliest"), self.heads, now_ms)
            sources += [line for line in begun if (line.flow, line.partition) not in have]
        return replaced(
            commit,
            round=commit.round + 1,
            generation=self.generation.number,
            base=digest,
            plan=b"",
            definition=definition,
            incarnation=self.randomness.uuid().hex[:12],
            committed_ms=now_ms,
            sources=tuple(sorted(sources, key=lambda line: (line.flow, line.partition))),
            tasks=tuple(line for line in commit.tasks if line.flow not in fresh),
            watermarks={flow: time for flow, time in commit.watermarks.items() if flow not in fresh},
            closed=(),
            change="another definition",
        )
