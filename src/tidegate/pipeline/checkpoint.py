"""The stored records of an app: one chain of commits, the plan of the next round, and how a round becomes a commit.

    apps/<app>/app                 the app's definitions by digest (replaced by compare-and-swap)
    apps/<app>/lease               who runs it; its epoch is the generation (`lease`)
    apps/<app>/plans/<round>       what round N reads, and its time: created if absent, never changed
    apps/<app>/commits/<round>     offsets, tokens, parcels and totals after round N: created if absent, never changed

R1  a plan names the digest of the commit it builds on; a commit those of its plan and of the commit before.
R2  `put_plan` returns the one plan of the round: ours, or one with the same base that is not from a later generation.
R3  `put_commit` returns the one commit of the round: ours, or one with the same plan and base.
R4  an administrative change is a commit without a plan, with the next round number: it fences a round in progress.
R5  commits have no gaps and are only deleted from the oldest (`gc`). A suspended coordinator could create a deleted
    one again, so the lease is checked after each commit: only a later generation can have deleted it.
C1  a line that the round did not change is copied from the last commit byte for byte.
C2  every section of every parcel gets its offset: the end of everything committed for its partition before, in the
    order of flow, task and section; for a partition without commits, the current end of the log.
C3  totals are sums over commits, so a repeated round counts once.

Records are MessagePack, sealed by the backend. Source states above 64 KiB are stored as separate objects.

Thread rule: one coordinator thread writes; `newest` and the readers may be called from any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec
from msgspec.structs import replace as replaced

from tidegate.errors import (
    ConflictError,
    CorruptError,
    FencedError,
    InternalError,
    InvalidError,
    SignatureError,
)
from tidegate.pipeline.flow import FlowFacts
from tidegate.pipeline.messages import (
    Delivery,
    Held,
    RoundOrder,
    RoundResult,
    SourceResult,
    Stop,
    TaskResult,
    Tick,
    decode,
    encode,
)
from tidegate.storage.backends.base import StorageBackend, check_name, check_state_name

# -- records --------------------------------------------------------------------------------------

VERSION: Final = 4
READABLE: Final = range(1, VERSION + 1)
# 1: no topic ids, no held events; 2: no limits; 3: no stops at held events
KEPT: Final = 10  # commits that stay readable
INLINE_BYTES: Final = 64 << 10

Record = TypeVar("Record", bound=msgspec.Struct)


class FlowLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One flow of a definition, and the numbers that are fixed for its life."""

    name: str
    fingerprint: str
    description: bytes
    topic: str
    partitions: int
    tasks: int


class AppRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The app's record. `definitions` are all definitions that a retained commit may name, by digest."""

    version: int
    app: str
    created_ms: int
    definitions: dict[str, tuple[FlowLine, ...]]


class SourceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One source partition of one flow: the position of its reader, and since when it has been silent.

    `state` is the reader's own; a large one is stored as an object: `apart` is its name and `state` its digest.
    `seen_ms` is the time of the last round that had records of it, or of the first that asked for some. `topic_id`
    is the id of the topic that `next_offset` counts in; empty until a round has seen it. `skipped` are offset ranges
    (first, next) that were set to be left out after they were read; they are still held back.
    """

    flow: str
    partition: int
    next_offset: int
    state: bytes = b""
    state_object: str = msgspec.field(default="", name="apart")
    stream_time: int = -1
    seen_ms: int = -1
    stopped: Stop | None = None
    topic_id: str = ""
    skipped: tuple[tuple[int, int], ...] = ()

    @property
    def frontier(self) -> tuple[int, int]:
        """The stream time and offset below which its events can be processed."""
        stop = self.stopped
        if stop is not None and stop.stream_time is not None:
            return stop.stream_time, stop.offset
        return self.stream_time, self.next_offset


class TaskLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task of one flow: the token that restores its state, and the size of that state."""

    flow: str
    task: int
    token: bytes = b""
    stream_time: int = -1
    backlog_bytes: int = 0
    memory_bytes: int = 0
    ticked_ms: int = -1  # the time of the last round it took part in
    held: Held | None = None  # events it has read and holds back


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Records that were deleted from the log before this flow read them, and whose loss was accepted."""

    flow: str
    partition: int
    first: int
    end: int
    round: int


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Offsets from `start` up to `stop` of one source partition."""

    flow: str
    partition: int
    start: int
    stop: int


class Halt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A partition that the plan stops: its next offset is not in the log."""

    flow: str
    partition: int
    stop: Stop


class PlanRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plan of a round, stored before any work of the round begins."""

    version: int
    app: str
    round: int
    generation: int
    base: bytes
    definition: str
    tick: Tick
    ranges: tuple[Range, ...]
    tasks: tuple[tuple[str, int], ...]
    ticks: dict[str, Tick] = {}
    losses: tuple[Loss, ...] = ()
    halts: tuple[Halt, ...] = ()
    lookups: dict[str, int] = {}
    topic_ids: dict[str, str] = {}  # of the topics it reads


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of what the tasks of an app hold together: backlog (accepted and not pruned) and memory."""

    backlog_bytes: int
    memory_bytes: int


class CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state after a round. `plan` is empty for an administrative change, which `change` describes.

    `limits` are those of the last run that did a round; None before that.
    """

    version: int
    app: str
    round: int
    generation: int
    base: bytes
    plan: bytes
    definition: str
    incarnation: str = msgspec.field(name="life")
    tick: Tick
    committed_ms: int
    sources: tuple[SourceLine, ...]
    tasks: tuple[TaskLine, ...]
    deliveries: tuple[Delivery, ...] = ()
    # topic → partition → the offset after everything committed for it so far
    ends: dict[str, dict[int, int]] = {}
    totals: dict[str, dict[str, int]] = {}  # flow → counter → since the app was created
    watermarks: dict[str, int] = {}
    losses: tuple[Loss, ...] = ()
    closed: tuple[str, ...] = ()  # flows whose input ended here
    change: str = ""
    limits: Limits | None = None


def digest(record: bytes) -> bytes:
    """The digest of a record: 16 bytes of BLAKE2b."""
    return hashlib.blake2b(record, digest_size=16).digest()


def escaped(name: str) -> str:
    """A flow's name as one component of an object's name."""
    quoted = quote(name, safe="=+@,")
    return "%2E" + quoted[1:] if quoted.startswith(".") else quoted


def app_folder(app: str) -> str:
    """The folder of an app's records; its name must be usable as a path component."""
    return f"apps/{check_state_name('app', app)}"


class Records:
    """The records of one app on its backend."""

    def __init__(self, backend: StorageBackend, app: str) -> None:
        self.backend = backend
        self.app = app
        self.folder = app_folder(app)

    @property
    def lease_name(self) -> str:
        return f"{self.folder}/lease"

    def plan_name(self, round: int) -> str:
        return f"{self.folder}/plans/{round:010d}"

    def commit_name(self, round: int) -> str:
        return f"{self.folder}/commits/{round:010d}"

    def load_app(self) -> tuple[AppRecord, str] | None:
        """Return the app's record and its version; None if there is no such app."""
        found = self.backend.read_published(f"{self.folder}/app")
        return None if found is None else (self._decoded("app", found[0], AppRecord), found[1])

    def flows_of(self, commit: CommitRecord) -> tuple[FlowLine, ...]:
        """Return the flows of a commit's definition; none where it is not known (any more)."""
        found = self.load_app()
        return () if found is None else found[0].definitions.get(commit.definition, ())

    def save_app(self, record: AppRecord, expected: str | None) -> None:
        """Replace the app's record; `ConflictError` if it changed meanwhile."""
        self.backend.publish(f"{self.folder}/app", encode(record), expected=expected)

    # -- rounds ----------------------------------------------------------------------------------

    def numbers(self, kind: str) -> list[int]:
        """Return the rounds that have a record of this kind (`plans`, `commits`), in order."""
        names = (found.name.rpartition("/")[2] for found in self.backend.list(f"{self.folder}/{kind}"))
        return sorted(int(name) for name in names if len(name) == 10 and name.isdigit())

    def rounds(self) -> list[int]:
        """Return the numbers of all commits, in order."""
        return self.numbers("commits")

    def newest_sound(self) -> tuple[CommitRecord, bytes]:
        """Return the newest commit that can be read, and its digest; if none can, raise the error of the last one."""
        damage: CorruptError | None = None
        for round in reversed(self.rounds()):
            try:
                return self.read_commit(round)
            except CorruptError as error:
                damage = damage or error
        raise damage or InvalidError(f"app {self.app} was never started; run it first")

    def newest(self) -> int | None:
        """The number of the last commit; None before the first."""
        return max(self.rounds(), default=None)

    def load_plan(self, round: int) -> tuple[PlanRecord, bytes] | None:
        """Return the plan of a round and its digest; None if there is none."""
        return self._load(self.plan_name(round), PlanRecord)

    def load_commit(self, round: int) -> tuple[CommitRecord, bytes] | None:
        """Return the commit of a round and its digest; None if there is none."""
        return self._load(self.commit_name(round), CommitRecord)

    def read_commit(self, round: int) -> tuple[CommitRecord, bytes]:
        """Return the commit of a round, which must exist."""
        found = self.load_commit(round)
        if found is None:
            kept = self.rounds()
            have = f"those from {kept[0]} to {kept[-1]} are" if kept else "there is none"
            raise InvalidError(f"commit {round} of app {self.app} is not kept (any more); {have}")
        return found

    def put_plan(self, plan: PlanRecord) -> tuple[PlanRecord, bytes]:
        """Store the plan of a round; return the plan that counts, ours or an earlier one (R2), and its digest."""
        name = self.plan_name(plan.round)
        data, won = self._create(name, encode(plan))
        if won:
            return plan, digest(data)
        found = self._decoded(name, data, PlanRecord)
        if found.base != plan.base or found.generation > plan.generation:
            raise FencedError(
                f"app {self.app}: round {plan.round} was planned by generation {found.generation}, and this process is "
                f"generation {plan.generation}: another process runs the app now; stop this one"
            )
        return found, digest(data)

    def put_commit(self, commit: CommitRecord) -> tuple[CommitRecord, bytes]:
        """Store the commit of a round; return the commit that counts, ours or an earlier one (R3), and its digest."""
        name = self.commit_name(commit.round)
        data, won = self._create(name, encode(commit))
        if won:
            return commit, digest(data)
        found = self._decoded(name, data, CommitRecord)
        if (found.plan, found.base) != (commit.plan, commit.base) or not found.plan:
            what = f"changed ({found.change})" if not found.plan else "committed from another plan"
            raise FencedError(
                f"app {self.app}: round {commit.round} was {what} by generation {found.generation} while this process, "
                f"generation {commit.generation}, worked on it; nothing of its work counts. Stop this process, or "
                "start it again to go on from there"
            )
        return found, digest(data)

    def put_change(self, commit: CommitRecord) -> tuple[CommitRecord, bytes]:
        """Store a commit without a plan (R4); `ConflictError` if a round was committed meanwhile."""
        data, won = self._create(self.commit_name(commit.round), encode(commit))
        if not won:
            raise ConflictError(f"app {self.app} committed round {commit.round} meanwhile; try again")
        return commit, digest(data)

    # -- states of sources that are too large for a record ----------------------------------------

    def store_state(
        self, flow: str, partition: int, round: int, unique: str, state: bytes
    ) -> tuple[bytes, str]:
        """Store a source state for a line: inline, or as a separate object with its digest in the line."""
        if len(state) <= INLINE_BYTES:
            return state, ""
        name = check_name(f"{self.folder}/sources/{escaped(flow)}/{partition}/{round:010d}-{unique}")
        self.backend.put(name, [state])
        return digest(state), name

    def state_of(self, line: SourceLine) -> bytes:
        """Return the state of a line, inline or from its object; `CorruptError` if it is not what was committed."""
        if not line.state_object:
            return line.state
        state = bytes(memoryview(self.backend.read(line.state_object)))
        if digest(state) != line.state:
            raise CorruptError(
                f"{line.state_object} is not what app {self.app} committed; restore it from a copy, or go back to an "
                f"older commit (`tidegate app replay {self.app} --to-round N`)",
                path=line.state_object,
                kafka_name=None,
            )
        return state

    def delete(self, kind: str, round: int) -> None:
        """Remove a plan or a commit; `gc` decides which."""
        self.backend.delete(f"{self.folder}/{kind}/{round:010d}")

    def _create(self, name: str, data: bytes) -> tuple[bytes, bool]:
        """Publish if absent; return the stored bytes, and whether they are ours.

        If the answer was lost, our own bytes are found and count as ours.
        """
        try:
            self.backend.publish(name, data, expected=None)
            return data, True
        except ConflictError:
            found = self.backend.read_published(name)
            if found is None:
                raise
            return found[0], found[0] == data

    def _remedy(self, name: str) -> str:
        if name == f"{self.folder}/app":
            return "restore it from a copy, or run the app under a new name"
        return (
            f"restore it from a copy, go back to a commit that `tidegate app checkpoints {self.app}` lists with "
            f"`tidegate app replay {self.app} --to-round N`, or start over with `tidegate app reset {self.app}`"
        )

    def _load(self, name: str, kind: type[Record]) -> tuple[Record, bytes] | None:
        try:
            found = self.backend.read_published(name)
        except SignatureError:
            raise
        except CorruptError as error:
            raise CorruptError(
                f"{name} of app {self.app} is damaged; {self._remedy(name)}", path=name, kafka_name=None
            ) from error
        return None if found is None else (self._decoded(name, found[0], kind), digest(found[0]))

    def _decoded(self, name: str, data: bytes, kind: type[Record]) -> Record:
        try:
            record = decode(data, kind)
        except msgspec.DecodeError as error:
            self._require_readable(name, data)
            raise CorruptError(
                f"{name} of app {self.app} cannot be read ({error}); {self._remedy(name)}",
                path=name,
                kafka_name=None,
            ) from None
        self._require_readable(name, data)
        return record

    def _require_readable(self, name: str, data: bytes) -> None:
        """Distinguish a record of a later release from a damaged one."""
        try:
            version = msgspec.msgpack.decode(data, type=_Versioned).version
        except msgspec.DecodeError:
            return
        if version not in READABLE:
            raise InvalidError(
                f"{name} of app {self.app} has format version {version}; this release reads up to version {VERSION}. "
                "Use the release that wrote it, or a later one"
            )


class _Versioned(msgspec.Struct):
    version: int = VERSION


# -- committing -----------------------------------------------------------------------------------

KEPT_LOSSES: Final = 1000  # per app; older ones are summed up
LATEST: Final = 2**63 - 1
EndOf = Callable[[str, int], int]


def commit_of(
    plan: PlanRecord,
    plan_digest: bytes,
    before: CommitRecord,
    result: RoundResult,
    flows: Mapping[str, FlowFacts],
    *,
    states: Mapping[tuple[str, int], tuple[bytes, str]],
    end_of: EndOf,
    generation: int,
    now_ms: int,
    limits: Limits | None = None,
) -> CommitRecord:
    """Build the commit of a round. `states` are the sources' new states: bytes, or digest and name of a stored
    object."""
    tasks = _tasks(plan, before, result.tasks)
    sources = _still_skipped(_sources(plan, before, result.sources, states, flows), tasks)
    deliveries, ends = _deliveries(plan.round, before, result.tasks, end_of)
    starts = {(each.flow, each.partition): each.start for each in plan.ranges}
    read = {
        each.flow
        for each in result.sources
        if each.records or each.next_offset > starts.get((each.flow, each.partition), each.next_offset)
    }
    closing = {name for name, tick in plan.ticks.items() if tick.closing}
    return CommitRecord(
        version=VERSION,
        app=plan.app,
        round=plan.round,
        generation=generation,
        base=plan.base,
        plan=plan_digest,
        definition=before.definition,
        incarnation=before.incarnation,
        tick=plan.tick,
        committed_ms=now_ms,
        sources=sources,
        tasks=tasks,
        deliveries=deliveries,
        ends=ends,
        totals=_totals(before, result),
        watermarks=_watermarks(plan, before, flows, result.sources),
        losses=_losses((*before.losses, *plan.losses)),
        closed=tuple(sorted((set(before.closed) - read) | closing)),
        limits=limits,
    )


def void_of(
    plan: PlanRecord, plan_digest: bytes, before: CommitRecord, *, generation: int, now_ms: int
) -> CommitRecord:
    """Build the commit of a round that could not be done as planned and is abandoned: only the round number changes."""
    return replaced(
        before,
        version=VERSION,
        round=plan.round,
        generation=generation,
        base=plan.base,
        plan=plan_digest,
        committed_ms=now_ms,
        change="given up, to be planned anew",
    )


def require_whole(order: RoundOrder, result: RoundResult) -> None:
    """Check that the engine returned exactly one result for every source and task of the order (`coordinator`, E1)."""
    ordered = [(each.flow, each.partition) for each in order.sources]
    wanted = [(each.flow, each.task) for each in order.tasks]
    came = [(each.flow, each.partition) for each in result.sources]
    tasks = [(each.flow, each.task) for each in result.tasks]
    if sorted(came) != sorted(ordered) or sorted(tasks) != sorted(wanted):
        raise InternalError(
            f"round {order.round}: {len(ordered)} sources and {len(wanted)} tasks were ordered, {len(came)} and "
            f"{len(tasks)} came back; nothing was committed, start the app again"
        )


def _sources(
    plan: PlanRecord,
    before: CommitRecord,
    results: Iterable[SourceResult],
    states: Mapping[tuple[str, int], tuple[bytes, str]],
    flows: Mapping[str, FlowFacts],
) -> tuple[SourceLine, ...]:
    lines = {(line.flow, line.partition): line for line in before.sources}
    for loss in plan.losses:
        line = lines[loss.flow, loss.partition]
        lines[loss.flow, loss.partition] = replaced(line, next_offset=loss.end, stopped=None)
    for result in results:
        source = (result.flow, result.partition)
        line = lines[source]
        state, state_object = states[source]
        lines[source] = SourceLine(
            result.flow,
            result.partition,
            result.next_offset,
            state,
            state_object,
            max(result.stream_time, line.stream_time),
            plan.tick.now_ms if result.records else line.seen_ms,
            result.stopped,
            plan.topic_ids.get(flows[result.flow].topic, line.topic_id),
            line.skipped,
        )
    for halt in plan.halts:
        line = lines[halt.flow, halt.partition]
        lines[halt.flow, halt.partition] = replaced(line, stopped=halt.stop)
    return tuple(lines[source] for source in sorted(lines))


def _still_skipped(sources: Iterable[SourceLine], tasks: Iterable[TaskLine]) -> tuple[SourceLine, ...]:
    """The sources, without skipped offsets that no task holds back any more."""
    least: dict[tuple[str, int], int] = {}
    for task in tasks:
        for partition, offset in ({} if task.held is None else task.held.offsets).items():
            place = task.flow, partition
            least[place] = min(offset, least.get(place, offset))
    lines = []
    for line in sources:
        first = least.get((line.flow, line.partition), LATEST)
        skipped = tuple(each for each in line.skipped if each[1] > first)
        lines.append(line if skipped == line.skipped else replaced(line, skipped=skipped))
    return tuple(lines)


def _tasks(plan: PlanRecord, before: CommitRecord, results: Iterable[TaskResult]) -> tuple[TaskLine, ...]:
    lines = {(line.flow, line.task): line for line in before.tasks}
    for each in results:
        lines[each.flow, each.task] = TaskLine(
            each.flow,
            each.task,
            each.token,
            each.stream_time,
            each.backlog_bytes,
            each.memory_bytes,
            plan.tick.now_ms,
            each.held,
        )
    return tuple(lines[task] for task in sorted(lines))


def _deliveries(
    round: int, before: CommitRecord, results: Iterable[TaskResult], end_of: EndOf
) -> tuple[tuple[Delivery, ...], dict[str, dict[int, int]]]:
    ends = {topic: dict(partitions) for topic, partitions in before.ends.items()}
    deliveries = []
    for each in sorted(results, key=lambda result: (result.flow, result.task)):
        if each.parcel is None or not each.parcel.sections:
            continue
        bases = []
        for section in each.parcel.sections:
            known = ends.setdefault(section.topic, {})
            if section.partition not in known:
                known[section.partition] = end_of(section.topic, section.partition)
            bases.append(known[section.partition])
            known[section.partition] += section.records
        deliveries.append(Delivery(round, each.parcel, tuple(bases), each.flow, each.task))
    return tuple(deliveries), ends


def _totals(before: CommitRecord, result: RoundResult) -> dict[str, dict[str, int]]:
    totals = {flow: dict(counters) for flow, counters in before.totals.items()}
    for source in result.sources:
        verdicts = {f"verdict.{name}": count for name, count in source.verdicts.items()}
        _add(totals, source.flow, {"records": source.records, "bytes": source.size})
        _add(totals, source.flow, source.counters)
        _add(totals, source.flow, verdicts)
    for task in result.tasks:
        _add(totals, task.flow, {"rows_sent": task.rows_sent})
        # "delivered" is counted for the round before, and only when a task delivered
        _add(totals, task.flow, {name: count for name, count in task.counters.items() if name != "delivered"})
    return {flow: dict(sorted(counters.items())) for flow, counters in sorted(totals.items())}


def _add(totals: dict[str, dict[str, int]], flow: str, counts: Mapping[str, int]) -> None:
    counters = totals.setdefault(flow, {})
    for name, count in counts.items():
        if count or name in counters:
            counters[name] = counters.get(name, 0) + count


def _watermarks(
    plan: PlanRecord, before: CommitRecord, flows: Mapping[str, FlowFacts], results: Iterable[SourceResult]
) -> dict[str, int]:
    marks = dict(before.watermarks)
    limits: dict[str, int] = {}
    for result in results:  # events that are held back from a stop on must not be late when it is resumed
        if result.stopped is not None and result.stopped.stream_time is not None:
            limits[result.flow] = min(result.stopped.stream_time, limits.get(result.flow, LATEST))
    for name, tick in plan.ticks.items():
        if tick.watermark is not None and name in flows:
            marks[name] = max(marks.get(name, -1), min(tick.watermark, limits.get(name, LATEST)))
    return dict(sorted(marks.items()))


def _losses(losses: tuple[Loss, ...]) -> tuple[Loss, ...]:
    """All losses; the oldest of a very long list are summed up by partition."""
    if len(losses) <= KEPT_LOSSES:
        return losses
    old, recent = losses[: -KEPT_LOSSES // 2], losses[-KEPT_LOSSES // 2 :]
    merged: dict[tuple[str, int], Loss] = {}
    for loss in old:
        have = merged.get((loss.flow, loss.partition), loss)
        merged[loss.flow, loss.partition] = replaced(
            loss, first=min(have.first, loss.first), end=max(have.end, loss.end)
        )
    return (*merged.values(), *recent)
