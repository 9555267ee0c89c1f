"""Administration of a stopped app: status, reset, replay, resume, rebase, acknowledge.

Each change takes the lease first, so it is refused while the app runs, and becomes a commit of its own (`checkpoint`,
R4). A coordinator in the middle of a round is fenced; data that others read does not disappear at once.

A position and the state built up to it belong together. A position below kept state would count records twice, so it
is refused; dropped state drops its position too.

Thread rule: any thread; functions keep no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from tidegate.clock import Clock, SystemClock
from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log, is_kafka, open_log
from tidegate.pipeline.checkpoint import CommitRecord, Loss, Records, SourceLine
from tidegate.pipeline.gc import Collector
from tidegate.pipeline.lease import AppLease
from tidegate.pipeline.log_end_offsets import LogEndOffsets
from tidegate.pipeline.messages import Held, resume_command
from tidegate.pipeline.planner import RECREATED, held_of
from tidegate.pipeline.progress import StoppedPartition, acknowledged, new_faults, read_once, stopped_of
from tidegate.pipeline.recovery import REPLAYED
from tidegate.randomness import SystemRandomness
from tidegate.storage import open_backend
from tidegate.storage.backends.base import ObjectInfo, StorageBackend
from tidegate.tables.commits import DEFAULT_TTL_MS, read_lease

# -- positions ------------------------------------------------------------------------------------


def require_not_read_again(app: str, line: SourceLine, to: int) -> None:
    """Refuse a position below kept state; for a recreated topic the remedy names its first offset."""
    at = line.frontier[1]
    if to >= at:
        return
    if line.stopped is not None and line.stopped.remedy == resume_command(app, line.flow, line.partition, to):
        return
    raise InvalidError(
        f"app {app}: {line.flow}:{line.partition} stopped at offset {at}, and the records before it are "
        f"in its state and results: going on at {to} would count them twice. Leave --skip-to out, or give "
        f"{at} or more; to read records again, go back to a commit with `tidegate app replay {app} "
        "--to-round N` "
        f"(`tidegate app checkpoints {app}` lists them) or compute everything again with `tidegate app replay {app}`"
    )


def from_offsets_of(
    records: Records, commit: CommitRecord, offsets: Mapping[str, Mapping[int, int]]
) -> CommitRecord:
    _check_offsets(records, commit, offsets)
    lines, losses = list[SourceLine](), list(commit.losses)
    for line in commit.sources:
        to = offsets.get(line.flow, {}).get(line.partition)
        if to is None:
            lines.append(line)
            continue
        lines.append(SourceLine(line.flow, line.partition, to, seen_ms=line.seen_ms))
        if to > line.next_offset:
            losses.append(Loss(line.flow, line.partition, line.next_offset, to, commit.round + 1))
    rekeyed = _rekeyed(records, commit)
    return replace(
        commit,
        sources=tuple(lines),
        tasks=tuple(
            line
            for line in commit.tasks
            if line.flow not in offsets or (line.flow not in rekeyed and line.task not in offsets[line.flow])
        ),
        losses=tuple(losses),
        watermarks={flow: time for flow, time in commit.watermarks.items() if flow not in offsets},
        closed=tuple(flow for flow in commit.closed if flow not in offsets),
        change="to be replayed from offsets",
    )


def _check_offsets(records: Records, commit: CommitRecord, offsets: Mapping[str, Mapping[int, int]]) -> None:
    partitions: dict[str, set[int]] = {}
    for line in commit.sources:
        partitions.setdefault(line.flow, set()).add(line.partition)
    rekeyed = _rekeyed(records, commit)
    for flow, wanted in offsets.items():
        if flow not in partitions:
            have = ", ".join(sorted(partitions))
            raise InvalidError(f"app {commit.app} has no flow {flow!r}; it has {have}")
        for number, offset in wanted.items():
            if number not in partitions[flow]:
                raise InvalidError(
                    f"app {commit.app}: flow {flow} reads partitions 0 to {max(partitions[flow])}, not {number}"
                )
            if offset < 0:
                raise InvalidError(
                    f"app {commit.app}: {flow}:{number}={offset} is no offset; it must be 0 or more"
                )
        missing = sorted(partitions[flow] - wanted.keys())
        if flow in rekeyed and missing:
            left = ", ".join(f"{flow}:{number}" for number in missing)
            raise InvalidError(
                f"app {commit.app}: flow {flow} is re-keyed, so its state is of all source partitions together and "
                f"begins empty for all of them; give offsets for {left}, too"
            )


def _rekeyed(records: Records, commit: CommitRecord) -> set[str]:
    """Return the flows that keep state behind a `key_by`."""
    rekeyed = set[str]()
    for line in records.flows_of(commit):
        steps = [step["step"] for step in msgspec.json.decode(line.description)["steps"]]
        after = steps[steps.index("key_by") :] if "key_by" in steps else []
        if "deduplicate" in after or "aggregate" in after:
            rekeyed.add(line.name)
    return rekeyed


# -- status and changes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AppStatus:
    """The status of an app according to its records. `owner` is the process that runs it, empty if none does."""

    app: str
    generation: int
    owner: str
    round: int
    committed_ms: int
    records: int
    positions: Mapping[str, Mapping[int, int]]
    topics: Mapping[str, str]
    stopped: tuple[StoppedPartition, ...]
    definition: str
    change: str = ""
    lag_records: int | None = None
    totals: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    watermarks: Mapping[str, int] = field(default_factory=dict)
    losses: tuple[Loss, ...] = ()
    backlog_bytes: int = 0
    held: Mapping[str, Held] = field(default_factory=dict)
    orphans: int | None = None  # objects that no kept commit needs; None: not requested, or unknown
    orphan_bytes: int | None = None


@dataclass(frozen=True)
class CommitInfo:
    """One commit in a list of commits."""

    round: int
    committed_ms: int
    generation: int
    records: int
    positions: Mapping[str, Mapping[int, int]]
    change: str
    stream_times: Mapping[str, int] = field(default_factory=dict)  # TOPIC-PARTITION → event time reached
    memory_bytes: int = 0
    backlog_bytes: int = 0
    flows: frozenset[str] = frozenset()
    """The flows that have state in this commit."""


def list_apps(backend: StorageBackend) -> list[str]:
    """Return the names of all apps that have state here."""
    names = {each.name.split("/")[1] for each in backend.list("apps") if each.name.endswith("/app")}
    return sorted(names)


def has_app(backend: StorageBackend, app: str) -> bool:
    """Whether an app of that name has state here; one lookup, however many apps there are."""
    try:
        return Records(backend, app).load_app() is not None
    except InvalidError:  # not a valid app name
        return False


def app_status(
    backend: StorageBackend,
    app: str,
    log: Log | KafkaLog | None = None,
    *,
    clock: Clock | None = None,
    orphans: bool = False,
) -> AppStatus:
    """Return the status of an app; with a log, also how many records are left to read.

    With `orphans` all its objects are listed, to count those that no kept commit needs: written by a round in
    progress, or left by failed attempts. Runs remove them once they are older than `grace_ms`.
    """
    records = _existing(backend, app)
    commit = _newest(records)[0]
    topics = _topics(records, commit)
    clock = clock or SystemClock()
    now_ms = clock.now_ms()
    unneeded = _unneeded(records, clock) if orphans else None
    lease = read_lease(backend, records.lease_name)
    held = None if lease is None else lease[0]
    owner = "" if held is None or not held.owner or held.until_ms <= now_ms else f"{held.host}:{held.pid}"
    return AppStatus(
        app=app,
        generation=0 if held is None else held.epoch,
        owner=owner,
        round=commit.round,
        committed_ms=commit.committed_ms,
        records=_records(commit, topics),
        positions=_positions(commit),
        topics=topics,
        stopped=stopped_of(commit, topics, backend.address),
        definition=commit.definition,
        change=commit.change,
        lag_records=None if log is None else _lag(commit, topics, log),
        totals=commit.totals,
        watermarks=commit.watermarks,
        losses=commit.losses,
        backlog_bytes=sum(line.backlog_bytes for line in commit.tasks),
        held=held_of(topics, commit),
        orphans=None if unneeded is None else len(unneeded),
        orphan_bytes=None if unneeded is None else sum(each.size for each in unneeded),
    )


def _unneeded(records: Records, clock: Clock) -> list[ObjectInfo] | None:
    """Return the objects that no kept commit needs; None if damage or a concurrent collection makes that unknown."""
    try:
        return Collector(records, clock=clock, grace_ms=0, every_ms=0).unneeded()
    except (CorruptError, UnavailableError):
        return None


def app_commits(backend: StorageBackend, app: str) -> list[CommitInfo]:
    """Return the kept commits, oldest first."""
    records = _existing(backend, app)
    app_record = records.load_app()
    known = {} if app_record is None else app_record[0].definitions
    found = (_sound(records, round) for round in records.rounds())
    return [
        _info(commit, {line.name: line.topic for line in known.get(commit.definition, ())})
        for commit in found
        if commit is not None
    ]


def _info(commit: CommitRecord, topics: Mapping[str, str]) -> CommitInfo:
    return CommitInfo(
        commit.round,
        commit.committed_ms,
        commit.generation,
        _records(commit, topics),
        _positions(commit),
        commit.change,
        _stream_times(topics, commit),
        sum(line.memory_bytes for line in commit.tasks),
        sum(line.backlog_bytes for line in commit.tasks),
        frozenset(line.flow for line in commit.tasks),
    )


def _sound(records: Records, round: int) -> CommitRecord | None:
    """Return the commit if it exists and can be read."""
    try:
        found = records.load_commit(round)
    except CorruptError:
        return None
    return None if found is None else found[0]


def _stream_times(topics: Mapping[str, str], commit: CommitRecord) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in commit.sources:
        if line.stream_time >= 0:
            name = f"{topics.get(line.flow, line.flow)}-{line.partition}"
            found[name] = min(line.stream_time, found.get(name, line.stream_time))
    return found


def reset_app(backend: StorageBackend, app: str) -> CommitInfo:
    """Delete all state and positions; the next start begins as the sources say, with any definition.

    Results that were delivered stay in their topics; new ones follow them.
    """
    return _edited(backend, app, lambda records, commit: _emptied(commit, "reset"), repairs=True)


def replay_app(
    backend: StorageBackend,
    app: str,
    *,
    to_round: int | None = None,
    from_offsets: Mapping[str, Mapping[int, int]] | None = None,
    clock: Clock | None = None,
) -> CommitInfo:
    """Compute again: from the beginning of the log, from a kept commit, or from offsets (flow → partition).

    Without `to_round` state begins empty: for all flows, or for the partitions whose offsets are given, so windows
    that began before such an offset are incomplete. A re-keyed flow's state is not separated by source partition:
    give the offsets of all of them. Results are sent again; in tables the later ones count. A commit that was
    undone, and that the app has not passed again since, cannot be restored.
    """
    if to_round is not None and from_offsets is not None:
        raise InvalidError("replay either from a round, which has its own offsets, or from offsets; not both")

    def edit(records: Records, commit: CommitRecord) -> CommitRecord:
        if to_round is not None:
            return _gone_back(records, commit, to_round)
        if from_offsets is not None:
            return from_offsets_of(records, commit, from_offsets)
        return _emptied(commit, REPLAYED)

    return _edited(backend, app, edit, clock, repairs=from_offsets is None)


def resume_partition(
    backend: StorageBackend, app: str, partition: str, *, skip_to: int | None = None
) -> CommitInfo:
    """Resume a stopped partition (`FLOW:3` or `TOPIC-3`) at the offset where it stopped, or at `skip_to`.

    Skipped offsets are recorded as a permanent loss, and the flow's faults so far count as acknowledged. An offset
    below the stop is refused, unless the stop's message names it: records that are already in the state would be
    counted twice.
    """

    def edit(records: Records, commit: CommitRecord) -> CommitRecord:
        chosen = _chosen(commit, _topics(records, commit), partition)
        lines, losses = list[SourceLine](), list(commit.losses)
        for line in commit.sources:
            if line not in chosen:
                lines.append(line)
                continue
            to = line.frontier[1] if skip_to is None else skip_to
            if line.stopped is not None and line.stopped.reason == RECREATED:
                if skip_to is None:
                    raise InvalidError(
                        f"{partition} stopped because its topic was deleted and created again, and offset {to} is of "
                        f"the old one: say where to begin in the new one, `{line.stopped.remedy}`"
                    )
                lines.append(replace(line, next_offset=to, stopped=None, topic_id="", skipped=()))
                continue
            require_not_read_again(commit.app, line, to)
            first, following, skipped = line.frontier[1], to, line.skipped
            if first < line.next_offset:  # it stopped at a held-back record that was read before
                following = max(to, line.next_offset)
                skipped = (*skipped, (first, to)) if to > first else skipped
            if to > first:
                losses.append(Loss(line.flow, line.partition, first, to, commit.round + 1))
            lines.append(replace(line, next_offset=following, stopped=None, skipped=skipped))
        known = acknowledged(commit, {line.flow for line in chosen})
        return replace(known, sources=tuple(lines), losses=tuple(losses), change=f"{partition} resumed")

    return _edited(backend, app, edit)


def acknowledge_faults(backend: StorageBackend, app: str) -> CommitInfo:
    """Acknowledge the faults found so far: from now on exit codes report only new ones."""

    def edit(records: Records, commit: CommitRecord) -> CommitRecord:
        known, topics = acknowledged(commit, commit.totals), _topics(records, commit)
        return replace(known, change=f"{new_faults(commit.totals, topics):,} faults acknowledged")

    return _edited(backend, app, edit)


def rebase_outputs(backend: StorageBackend, app: str, log: Log | KafkaLog) -> CommitInfo:
    """Continue at the current ends of the output topics, after another program wrote to them.

    Results that are committed and not yet delivered are appended there, too.
    """

    def edit(records: Records, commit: CommitRecord) -> CommitRecord:
        heads = LogEndOffsets(log)
        counts = log.partition_counts()
        ends = {
            topic: {
                number: heads.of(topic, counts[topic])[number].end
                for number in partitions
                if topic in counts and number < counts[topic]
            }
            for topic, partitions in commit.ends.items()
        }
        deliveries = []
        for each in commit.deliveries:
            bases = []
            for section in each.parcel.sections:
                if section.partition not in ends.get(section.topic, {}):
                    raise InvalidError(
                        f"partition {section.partition} of topic {section.topic} does not exist, and round "
                        f"{each.round} has results for it: create it (`tidegate topic create "
                        f"{section.topic} --partitions {max(commit.ends[section.topic], default=0) + 1}`), then "
                        "try again"
                    )
                bases.append(ends[section.topic][section.partition])
                ends[section.topic][section.partition] += section.records
            deliveries.append(replace(each, bases=tuple(bases)))
        return replace(commit, ends=ends, deliveries=tuple(deliveries), change="goes on where its topics end")

    return _edited(backend, app, edit)


def _edited(
    backend: StorageBackend,
    app: str,
    edit: Callable[[Records, CommitRecord], CommitRecord],
    clock: Clock | None = None,
    *,
    repairs: bool = False,
) -> CommitInfo:
    """Commit a change under the app's lease; with `repairs` the newest commit that can be read is enough."""
    clock, randomness = clock or SystemClock(), SystemRandomness()
    records = _existing(backend, app)
    generation = AppLease(records, clock=clock, randomness=randomness, lease_ms=DEFAULT_TTL_MS)
    try:
        commit, digest = records.newest_sound() if repairs else _newest(records)
        number = max(records.rounds()) + 1
        if number > commit.round + 1:  # the last is damaged; its deliveries were done before it was committed
            commit = replace(commit, deliveries=())
        changed = replace(
            edit(records, commit),
            round=number,
            generation=generation.number,
            base=digest,
            plan=b"",
            incarnation=randomness.uuid().hex[:12],
            committed_ms=clock.now_ms(),
        )
        made, _ = records.put_change(changed)
        generation.check()
    finally:
        generation.release()
    return _info(made, _topics(records, made))


def _existing(backend: StorageBackend, app: str) -> Records:
    records = Records(backend, app)
    if records.load_app() is None:
        have = ", ".join(list_apps(backend)) or "none"
        raise InvalidError(f"there is no app {app!r} in this state; there are: {have}")
    return records


def _newest(records: Records) -> tuple[CommitRecord, bytes]:
    newest = records.newest()
    if newest is None:
        raise InvalidError(f"app {records.app} was never started; run it first")
    return records.read_commit(newest)


def _topics(records: Records, commit: CommitRecord) -> dict[str, str]:
    return {line.name: line.topic for line in records.flows_of(commit)}


def _emptied(commit: CommitRecord, why: str) -> CommitRecord:
    return replace(
        commit,
        definition="",
        sources=(),
        tasks=(),
        deliveries=(),
        ends={},
        totals={},
        watermarks={},
        closed=(),
        change=why,
    )


def _gone_back(records: Records, commit: CommitRecord, to_round: int) -> CommitRecord:
    """Return the state after that round, with outputs continuing at their current ends."""
    then = records.read_commit(to_round)[0]
    if not then.definition:
        raise InvalidError(
            f"commit {to_round} is a {then.change}: there is nothing to go back to; take another"
        )
    _require_not_ahead(records, commit, then)
    return replace(
        then,
        deliveries=commit.deliveries,
        ends=commit.ends,
        losses=commit.losses,
        change=f"back to commit {to_round}",
    )


def _require_not_ahead(records: Records, commit: CommitRecord, then: CommitRecord) -> None:
    """Refuse a commit that is ahead of results sent after it: windows that its state has advanced past would not be
    sent again, and topics would keep the older results."""
    is_ahead = False
    for round in range(then.round + 1, commit.round + 1):
        found = _sound(records, round)
        if found is None:
            continue
        reached = {(line.flow, line.partition): line.next_offset for line in found.sources}
        if all(reached.get((line.flow, line.partition), -1) >= line.next_offset for line in then.sources):
            is_ahead = False
        elif found.plan and not found.change:
            is_ahead = True
    if is_ahead:
        raise InvalidError(
            f"commit {then.round} of app {commit.app} was undone, and what was sent since then ends before it: its own "
            f"results would not be sent again. Run the app until it is past that, go back to an earlier commit, or "
            f"compute all of it again with `tidegate app replay {commit.app}`"
        )


def _chosen(commit: CommitRecord, topics: Mapping[str, str], partition: str) -> list[SourceLine]:
    """Return the stopped lines that `FLOW:3` or `TOPIC-3` names."""
    flow, colon, number = partition.rpartition(":")
    topic, dash, last = partition.rpartition("-")
    stopped = [line for line in commit.sources if line.stopped is not None]
    chosen = [
        line
        for line in stopped
        if (colon and number.isdigit() and (line.flow, line.partition) == (flow, int(number)))
        or (dash and last.isdigit() and (topics.get(line.flow), line.partition) == (topic, int(last)))
    ]
    if not chosen:
        have = ", ".join(f"{line.flow}:{line.partition}" for line in stopped) or "none is"
        raise InvalidError(f"no partition {partition!r} of app {commit.app} is stopped; stopped: {have}")
    return chosen


def _positions(commit: CommitRecord) -> dict[str, dict[int, int]]:
    positions: dict[str, dict[int, int]] = {}
    for line in commit.sources:
        positions.setdefault(line.flow, {})[line.partition] = line.next_offset
    return positions


def _records(commit: CommitRecord, topics: Mapping[str, str]) -> int:
    """Count the records read since the app was created, those of a topic once."""
    return read_once(commit.totals, topics)["records"]


def _lag(commit: CommitRecord, topics: Mapping[str, str], log: Log | KafkaLog) -> int:
    heads, counts = LogEndOffsets(log), log.partition_counts()
    ends = {topic: heads.of(topic, counts[topic]) for topic in set(topics.values()) if topic in counts}
    left: dict[tuple[str, int], int] = {}  # flows that share a topic read the same records
    for line in commit.sources:
        topic = topics.get(line.flow)
        if line.stopped is None and topic in ends:
            place = topic, line.partition
            left[place] = max(left.get(place, 0), ends[topic][line.partition].end - line.next_offset)
    return sum(left.values())


# -- an app's own calls -----------------------------------------------------------------------------


class AppAdmin:
    """Status of one app, and changes to it while it does not run: `app.admin.status()`.

    Every change is a commit of its own; it is refused while the app runs.
    """

    def __init__(self, app: str, state: str, log: str, client: Mapping[str, str]) -> None:
        self.app, self._state, self._log, self._client = app, state, log, client

    def status(self, *, orphans: bool = False) -> AppStatus:
        """Return positions, lag, faults and stopped partitions as of the last commit.

        `orphans` counts the objects in the state that no kept commit needs.
        """
        with closing(open_backend(self._state, read_only=True)) as backend, self._opened_log() as log:
            return app_status(backend, self.app, log, orphans=orphans)

    def commits(self) -> list[CommitInfo]:
        """Return the kept commits, oldest first."""
        with closing(open_backend(self._state, read_only=True)) as backend:
            return app_commits(backend, self.app)

    def resume(self, partition: str, *, skip_to: int | None = None) -> CommitInfo:
        """Resume a stopped partition (`FLOW:3` or `TOPIC-3`) at the offset where it stopped, or at `skip_to`.

        Skipped records are recorded as a permanent loss. An offset below the stop is refused: records that are
        already in the state would be counted twice.
        """
        with closing(open_backend(self._state)) as backend:
            return resume_partition(backend, self.app, partition, skip_to=skip_to)

    def replay(
        self, *, to_round: int | None = None, from_offsets: Mapping[str, Mapping[int, int]] | None = None
    ) -> CommitInfo:
        """Compute again: from the beginning of the log, from a kept commit, or from offsets (flow → partition).

        Results are sent again; in tables the later ones count.
        """
        with closing(open_backend(self._state)) as backend:
            return replay_app(backend, self.app, to_round=to_round, from_offsets=from_offsets)

    def reset(self) -> CommitInfo:
        """Delete all state and positions; the next start begins as the sources say. Delivered results stay."""
        with closing(open_backend(self._state)) as backend:
            return reset_app(backend, self.app)

    def acknowledge(self) -> CommitInfo:
        """Acknowledge the faults found so far: from now on exit codes report only new ones."""
        with closing(open_backend(self._state)) as backend:
            return acknowledge_faults(backend, self.app)

    def rebase(self) -> CommitInfo:
        """Continue at the current ends of the output topics, after another program wrote to them."""
        with closing(open_backend(self._state)) as backend, self._opened_log() as log:
            return rebase_outputs(backend, self.app, log)

    def _opened_log(self) -> Log | KafkaLog:
        if is_kafka(self._log):
            return open_log(self._log, client=self._client or None)
        return open_log(self._log, read_only=True)
