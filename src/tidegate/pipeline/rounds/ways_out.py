"""Ways out that messages name: look at an app, start it over, go back to a commit, go on with a stopped partition.

Each change takes the app's turn first, so it is refused while the app runs, and becomes a commit of its own
(`records`, R4): whoever was in the middle of a round is fenced, and nothing that others read disappears at once.

Thread rule: any thread; functions keep nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec

from tidegate.clock import Clock, SystemClock
from tidegate.errors import CorruptError, InvalidError, UnavailableError
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log
from tidegate.pipeline.rounds.collecting import Collector
from tidegate.pipeline.rounds.generation import Generation
from tidegate.pipeline.rounds.heads import Heads
from tidegate.pipeline.rounds.opening import REPLAYED
from tidegate.pipeline.rounds.orders import Held
from tidegate.pipeline.rounds.planning import RECREATED, held_of
from tidegate.pipeline.rounds.positions import from_offsets_of, require_not_read_again
from tidegate.pipeline.rounds.progress import StoppedPartition
from tidegate.pipeline.rounds.records import CommitRecord, FlowLine, Loss, Records, SourceLine
from tidegate.pipeline.rounds.stops import acknowledged, new_faults, read_once, stopped_of
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.storage.backends.base import ObjectInfo, StorageBackend
from tidegate.tables.commits import DEFAULT_TTL_MS, read_lease


@dataclass(frozen=True)
class AppStatus:
    """An app as its records say. `owner` is who runs it now, empty when nobody does."""

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
    orphans: int | None = None  # objects that no kept commit needs; None: nobody asked, or it cannot be said
    orphan_bytes: int | None = None


@dataclass(frozen=True)
class CommitInfo:
    """One commit in a list of them."""

    round: int
    committed_ms: int
    generation: int
    records: int
    positions: Mapping[str, Mapping[int, int]]
    change: str
    stream_times: Mapping[str, int] = field(default_factory=dict)  # TOPIC-PARTITION → event time reached
    memory_bytes: int = 0
    backlog_bytes: int = 0


def list_apps(backend: StorageBackend) -> list[str]:
    """The names of all apps that have state here."""
    names = {each.name.split("/")[1] for each in backend.list("apps") if each.name.endswith("/app")}
    return sorted(names)


def has_app(backend: StorageBackend, app: str) -> bool:
    """Whether an app of that name has state here: one look, however many there are."""
    try:
        return Records(backend, app).load_app() is not None
    except InvalidError:  # no name that an app can have
        return False


def app_status(
    backend: StorageBackend,
    app: str,
    log: Log | KafkaLog | None = None,
    *,
    clock: Clock | None = None,
    orphans: bool = False,
) -> AppStatus:
    """Where an app stands; with a log, also how much is left to read.

    With `orphans` all its objects are listed, to say how many of them no kept commit needs: what a round in progress
    has written, and what attempts left behind that failed. Runs remove them once they are older than `grace_ms`.
    """
    records = _existing(backend, app)
    commit = _newest(records)[0]
    topics = _topics(records, commit)
    clock = clock or SystemClock()
    now_ms = clock.now_ms()
    unneeded = _unneeded(backend, records, clock) if orphans else None
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
        stopped=stopped_of(commit, topics),
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


def _unneeded(backend: StorageBackend, records: Records, clock: Clock) -> list[ObjectInfo] | None:
    """Objects that no kept commit needs; None where damage, or a collection at this moment, hides which are."""
    try:
        return Collector(backend, records, clock=clock, grace_ms=0, every_ms=0).unneeded()
    except (CorruptError, UnavailableError):
        return None


def app_commits(backend: StorageBackend, app: str) -> list[CommitInfo]:
    """The commits that are kept, oldest first."""
    records = _existing(backend, app)
    app_record = records.load_app()
    known = {} if app_record is None else app_record[0].definitions
    found = (_sound(records, round) for round in records.rounds())
    return [
        CommitInfo(
            commit.round,
            commit.committed_ms,
            commit.generation,
            _records(commit, {line.name: line.topic for line in known.get(commit.definition, ())}),
            _positions(commit),
            commit.change,
            _stream_times(known.get(commit.definition, ()), commit),
            sum(line.memory_bytes for line in commit.tasks),
            sum(line.backlog_bytes for line in commit.tasks),
        )
        for commit in found
        if commit is not None
    ]


def _sound(records: Records, round: int) -> CommitRecord | None:
    """A commit that is there and can be read."""
    try:
        found = records.load_commit(round)
    except CorruptError:
        return None
    return None if found is None else found[0]


def _stream_times(flows: Sequence[FlowLine], commit: CommitRecord) -> dict[str, int]:
    topics = {flow.name: flow.topic for flow in flows}
    found: dict[str, int] = {}
    for line in commit.sources:
        if line.stream_time >= 0:
            name = f"{topics.get(line.flow, line.flow)}-{line.partition}"
            found[name] = min(line.stream_time, found.get(name, line.stream_time))
    return found


def reset_app(
    backend: StorageBackend,
    app: str,
    *,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
) -> CommitInfo:
    """Forget all state and where reading was; the next start begins as the sources say, with any definition.

    Results that were delivered stay in their topics; new ones follow them.
    """
    return _edited(
        backend, app, lambda records, commit: _emptied(commit, "reset"), clock, randomness, repairs=True
    )


def replay_app(
    backend: StorageBackend,
    app: str,
    *,
    to_round: int | None = None,
    from_offsets: Mapping[str, Mapping[int, int]] | None = None,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
) -> CommitInfo:
    """Compute again: from the beginning of the log, from a commit that is kept, or from offsets (flow → partition).

    Without `to_round` state begins empty: of all flows, or of the partitions whose offsets are given, so windows that
    began before such an offset are incomplete. A re-keyed flow's state is not apart by source partition: give the
    offsets of all of them. Results are sent again; in tables the later ones count. A commit that was undone, and that
    the app has not come past again, cannot be gone back to.
    """
    if to_round is not None and from_offsets is not None:
        raise InvalidError("replay either from a round, which has its own offsets, or from offsets; not both")

    def edit(records: Records, commit: CommitRecord) -> CommitRecord:
        if to_round is not None:
            return _gone_back(records, commit, to_round)
        if from_offsets is not None:
            return from_offsets_of(records, commit, from_offsets)
        return _emptied(commit, REPLAYED)

    return _edited(backend, app, edit, clock, randomness, repairs=from_offsets is None)


def resume_partition(
    backend: StorageBackend,
    app: str,
    partition: str,
    *,
    skip_to: int | None = None,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
) -> CommitInfo:
    """Go on with a stopped partition (`FLOW:3` or `TOPIC-3`), at the offset it stopped at or at `skip_to`.

    What is skipped is recorded as a loss for ever; faults of the flow up to here count as acknowledged. An offset
    below where it stopped is refused, unless the message that it stopped with names it: records that are in the state
    would be counted twice.
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
                lines.append(
                    msgspec.structs.replace(line, next_offset=to, stopped=None, topic_id="", skipped=())
                )
                continue
            require_not_read_again(commit.app, line, to)
            first, following, skipped = line.frontier[1], to, line.skipped
            if first < line.next_offset:  # it stopped at a record that was read before and held back
                following = max(to, line.next_offset)
                skipped = (*skipped, (first, to)) if to > first else skipped
            if to > first:
                losses.append(Loss(line.flow, line.partition, first, to, commit.round + 1))
            lines.append(msgspec.structs.replace(line, next_offset=following, stopped=None, skipped=skipped))
        known = acknowledged(commit, {line.flow for line in chosen})
        return msgspec.structs.replace(
            known, sources=tuple(lines), losses=tuple(losses), change=f"{partition} resumed"
        )

    return _edited(backend, app, edit, clock, randomness)


def acknowledge_faults(backend: StorageBackend, app: str) -> CommitInfo:
    """Say that the faults found so far are known: exit codes are about new ones from here on."""

    def edit(records: Records, commit: CommitRecord) -> CommitRecord:
        known, topics = acknowledged(commit, commit.totals), _topics(records, commit)
        return msgspec.structs.replace(
            known, change=f"{new_faults(commit.totals, topics):,} faults acknowledged"
        )

    return _edited(backend, app, edit, None, None)


def rebase_outputs(
    backend: StorageBackend,
    app: str,
    log: Log | KafkaLog,
    *,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
) -> CommitInfo:
    """Go on where output topics end now, after somebody else wrote into them.

    What was committed and not delivered yet goes behind that, too.
    """

    def edit(records: Records, commit: CommitRecord) -> CommitRecord:
        heads = Heads(log)
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
            deliveries.append(msgspec.structs.replace(each, bases=tuple(bases)))
        heads.close()
        return msgspec.structs.replace(
            commit, ends=ends, deliveries=tuple(deliveries), change="goes on where its topics end"
        )

    return _edited(backend, app, edit, clock, randomness)


# -- inside --------------------------------------------------------------------------------------


def _edited(
    backend: StorageBackend,
    app: str,
    edit: Callable[[Records, CommitRecord], CommitRecord],
    clock: Clock | None,
    randomness: Randomness | None,
    *,
    repairs: bool = False,
) -> CommitInfo:
    """Commit a change under the app's lease; one that `repairs` needs no more than a commit that can be read."""
    clock, randomness = clock or SystemClock(), randomness or SystemRandomness()
    records = _existing(backend, app)
    with _turn(backend, records, clock, randomness) as generation:
        commit, digest = records.newest_sound() if repairs else _newest(records)
        number = max(records.rounds()) + 1
        if (
            number > commit.round + 1
        ):  # the last one is damaged; what this one had to deliver was delivered before it
            commit = msgspec.structs.replace(commit, deliveries=())
        changed = msgspec.structs.replace(
            edit(records, commit),
            round=number,
            generation=generation.number,
            base=digest,
            plan=b"",
            life=randomness.uuid().hex[:12],
            committed_ms=clock.now_ms(),
        )
        made, _ = records.put_change(changed)
        generation.check()
    return CommitInfo(
        made.round,
        made.committed_ms,
        made.generation,
        _records(made, _topics(records, made)),
        _positions(made),
        made.change,
    )


@contextmanager
def _turn(
    backend: StorageBackend, records: Records, clock: Clock, randomness: Randomness
) -> Iterator[Generation]:
    generation = Generation(backend, records, clock=clock, randomness=randomness, lease_ms=DEFAULT_TTL_MS)
    try:
        yield generation
    finally:
        generation.release()


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
    found = records.load_app()
    lines = () if found is None else found[0].definitions.get(commit.definition, ())
    return {line.name: line.topic for line in lines}


def _emptied(commit: CommitRecord, why: str) -> CommitRecord:
    return msgspec.structs.replace(
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
    """As it was after that round; outputs go on from where they are now."""
    then = records.read_commit(to_round)[0]
    if not then.definition:
        raise InvalidError(
            f"commit {to_round} is a {then.change}: there is nothing to go back to; take another"
        )
    _require_not_ahead(records, commit, then)
    return msgspec.structs.replace(
        then,
        deliveries=commit.deliveries,
        ends=commit.ends,
        losses=commit.losses,
        change=f"back to commit {to_round}",
    )


def _require_not_ahead(records: Records, commit: CommitRecord, then: CommitRecord) -> None:
    """Refuse a commit that is ahead of results which were sent after it: windows that are further in its state than in
    these results would not be sent again, and topics would keep the older ones."""
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
    """The stopped lines that `FLOW:3` or `TOPIC-3` means."""
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
    """Records read since the app was made, those of a topic once."""
    return read_once(commit.totals, topics)["records"]


def _lag(commit: CommitRecord, topics: Mapping[str, str], log: Log | KafkaLog) -> int:
    heads = Heads(log)
    try:
        counts = log.partition_counts()
        ends = {topic: heads.of(topic, counts[topic]) for topic in set(topics.values()) if topic in counts}
    finally:
        heads.close()
    left: dict[tuple[str, int], int] = {}  # flows that share a topic read the same records
    for line in commit.sources:
        topic = topics.get(line.flow)
        if line.stopped is None and topic in ends:
            place = topic, line.partition
            left[place] = max(left.get(place, 0), ends[topic][line.partition].end - line.next_offset)
    return sum(left.values())
