"""What an app remembers between rounds: one chain of commits, each made once, and the plan of the round after it.

    apps/<app>/app                 what the app is: its definitions by digest (replaced by compare-and-swap)
    apps/<app>/lease               who runs it; its epoch is the generation (`generation`)
    apps/<app>/plans/<round>       what round N reads, and what it says about time
    apps/<app>/commits/<round>     what was true after round N: offsets, tokens, parcels, totals

Plans and commits are created if absent and never changed, so of any number of masters, attempts and processes that
come back from the dead, one decides each round and all others take over what it decided or stop:

R1  a plan names the digest of the commit it builds on, a commit the digest of its plan and of the commit before it.
R2  `put_plan` gives back the one plan of the round: ours, or one of the same base that is not from a later
    generation. Otherwise `FencedError`.
R3  `put_commit` gives back the one commit of the round: ours, or one of the same plan and base. Otherwise
    `FencedError`.
R4  a change from outside of rounds (a new definition, reset, replay, resume) is a commit of its own without a plan: it
    takes the next number, so whoever was in the middle of that round is fenced by R3.
R5  commits are numbered without gaps and are never deleted but from the old end (`collecting`). A master that slept
    until its round was deleted could create the record again; therefore whoever created a commit asks afterwards
    whether the lease is still its own (`generation`), before anything is built on it. Only a later generation
    can have deleted it, and that one's epoch is in the lease since before. What was created then is below the
    newest commit, is never read, and is collected.

Records are MessagePack, sealed by the backend. Source states above 64 KiB lie beside, as objects.

Thread rule: one master, one thread; `newest` and the readers from any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final, TypeVar
from urllib.parse import quote

import msgspec

from tidegate.errors import ConflictError, CorruptError, FencedError, InvalidError, SignatureError
from tidegate.pipeline.rounds.orders import Delivery, Held, Stop, Tick, decode, encode
from tidegate.storage.backends.base import StorageBackend, check_name, check_state_name

VERSION: Final = 4
READABLE: Final = (
    1,
    2,
    3,
    4,
)  # 1: no topic ids, nothing held back; 2: no limits; 3: no stops at held-back records
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
    """What the app is. `definitions` are all that a retained commit may name, by digest."""

    version: int
    app: str
    created_ms: int
    definitions: dict[str, tuple[FlowLine, ...]]


class SourceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One source partition of one flow: where it goes on, and since when it has been silent.

    `state` is its reader's own; where that is large, `apart` names the object that holds it and `state` is its
    digest. `seen_ms` is the time of the last round that had records of it, or of the first that asked for some.
    `topic_id` is the id of the topic that `next_offset` counts in; empty until a round has seen it. `skipped` are
    offsets (first, next) that somebody chose to leave out after they were read; they are held back still.
    """

    flow: str
    partition: int
    next_offset: int
    state: bytes = b""
    apart: str = ""
    stream_time: int = -1
    seen_ms: int = -1
    stopped: Stop | None = None
    topic_id: str = ""
    skipped: tuple[tuple[int, int], ...] = ()

    @property
    def frontier(self) -> tuple[int, int]:
        """The stream time and offset up to which its events can be worked on."""
        stop = self.stopped
        if stop is not None and stop.stream_time is not None:
            return stop.stream_time, stop.offset
        return self.stream_time, self.next_offset


class TaskLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One task of one flow: the token that brings its state back, and what it held."""

    flow: str
    task: int
    token: bytes = b""
    stream_time: int = -1
    backlog_bytes: int = 0
    memory_bytes: int = 0
    ticked_ms: int = -1  # the time of the last round it took part in
    held: Held | None = None  # what it has read and holds back


class Loss(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Records that were deleted from the log before this flow read them, and that somebody accepted to lose."""

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
    """A partition that the plan takes out: what it was to read next is not in the log."""

    flow: str
    partition: int
    stop: Stop


class PlanRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a round is to do, decided before anything of it begins."""

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
    """What the tasks of an app may hold together: accepted and not pruned, and in memory."""

    backlog_bytes: int
    memory_bytes: int


class CommitRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is true after a round. `plan` is empty where the commit is a change from outside, said in `change`.

    `limits` are those of the last run that did a round; None before that.
    """

    version: int
    app: str
    round: int
    generation: int
    base: bytes
    plan: bytes
    definition: str
    life: str
    tick: Tick
    committed_ms: int
    sources: tuple[SourceLine, ...]
    tasks: tuple[TaskLine, ...]
    deliveries: tuple[Delivery, ...] = ()
    ends: dict[
        str, dict[int, int]
    ] = {}  # topic → partition → the offset after all that was ever committed for it
    totals: dict[str, dict[str, int]] = {}  # flow → counter → since the app was made
    watermarks: dict[str, int] = {}
    losses: tuple[Loss, ...] = ()
    closed: tuple[str, ...] = ()  # flows whose input was said to end here
    change: str = ""
    limits: Limits | None = None


def digest(record: bytes) -> bytes:
    """What tells one record from every other: 16 bytes of BLAKE2b."""
    return hashlib.blake2b(record, digest_size=16).digest()


def escaped(name: str) -> str:
    """A flow's name as one part of an object's name."""
    quoted = quote(name, safe="=+@,")
    return "%2E" + quoted[1:] if quoted.startswith(".") else quoted


def app_folder(app: str) -> str:
    """Where an app's records live; its name must be good for a path as it is."""
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

    # -- what the app is -------------------------------------------------------------------------

    def load_app(self) -> tuple[AppRecord, str] | None:
        """The app's record and its version; None when there is no such app."""
        found = self.backend.read_published(f"{self.folder}/app")
        return None if found is None else (self._decoded("app", found[0], AppRecord), found[1])

    def save_app(self, record: AppRecord, expected: str | None) -> None:
        """Replace the app's record; `ConflictError` when it changed meanwhile."""
        self.backend.publish(f"{self.folder}/app", encode(record), expected=expected)

    # -- rounds ----------------------------------------------------------------------------------

    def rounds(self) -> list[int]:
        """The numbers of all commits there are, in order."""
        return sorted(self._numbers("commits"))

    def newest_sound(self) -> tuple[CommitRecord, bytes]:
        """The newest commit that can be read, and its digest; raises what is wrong with the last one otherwise."""
        damage: CorruptError | None = None
        for round in reversed(self.rounds()):
            try:
                return self.read_commit(round)
            except CorruptError as error:
                damage = damage or error
        raise damage or InvalidError(f"app {self.app} was never started; run it first")

    def newest(self) -> int | None:
        """The number of the last commit; None before the first."""
        return max(self._numbers("commits"), default=None)

    def load_plan(self, round: int) -> tuple[PlanRecord, bytes] | None:
        """The plan of a round and its digest; None where nobody made one."""
        return self._load(self.plan_name(round), PlanRecord)

    def load_commit(self, round: int) -> tuple[CommitRecord, bytes] | None:
        """The commit of a round and its digest; None where there is none."""
        return self._load(self.commit_name(round), CommitRecord)

    def read_commit(self, round: int) -> tuple[CommitRecord, bytes]:
        """The commit of a round, which must be there."""
        found = self.load_commit(round)
        if found is None:
            kept = self.rounds()
            have = f"those from {kept[0]} to {kept[-1]} are" if kept else "there is none"
            raise InvalidError(f"commit {round} of app {self.app} is not kept (any more); {have}")
        return found

    def put_plan(self, plan: PlanRecord) -> tuple[PlanRecord, bytes]:
        """The plan of the round, ours or the one that was there (R2), and its digest."""
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
        """The commit of the round, ours or the one that was there (R3), and its digest."""
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
        """A commit without a plan (R4); `ConflictError` when a round was committed meanwhile."""
        data, won = self._create(self.commit_name(commit.round), encode(commit))
        if not won:
            raise ConflictError(f"app {self.app} committed round {commit.round} meanwhile; try again")
        return commit, digest(data)

    # -- states of sources that are too large for a record ----------------------------------------

    def store_state(
        self, flow: str, partition: int, round: int, unique: str, state: bytes
    ) -> tuple[bytes, str]:
        """The state as a line holds it: itself, or its digest and the object it was put into."""
        if len(state) <= INLINE_BYTES:
            return state, ""
        name = check_name(f"{self.folder}/sources/{escaped(flow)}/{partition}/{round:010d}-{unique}")
        self.backend.put(name, [state])
        return digest(state), name

    def state_of(self, line: SourceLine) -> bytes:
        """The state of a line, wherever it lies; `CorruptError` when it is not what was committed."""
        if not line.apart:
            return line.state
        state = bytes(memoryview(self.backend.read(line.apart)))
        if digest(state) != line.state:
            raise CorruptError(
                f"{line.apart} is not what app {self.app} committed; restore it from a copy, or go back to an older "
                f"commit (`tidegate app replay {self.app} --to-round N`)",
                path=line.apart,
                kafka_name=None,
            )
        return state

    def delete(self, kind: str, round: int) -> None:
        """Remove a plan or a commit; `collecting` knows which."""
        self.backend.delete(f"{self.folder}/{kind}/{round:010d}")

    def numbers(self, kind: str) -> list[int]:
        """The rounds that have a record of this kind (`plans`, `commits`)."""
        return sorted(self._numbers(kind))

    # -- inside ----------------------------------------------------------------------------------

    def _numbers(self, kind: str) -> Iterator[int]:
        for found in self.backend.list(f"{self.folder}/{kind}"):
            last = found.name.rpartition("/")[2]
            if len(last) == 10 and last.isdigit():
                yield int(last)

    def _create(self, name: str, data: bytes) -> tuple[bytes, bool]:
        """Publish if absent; what is there now, and whether it is ours.

        An answer that was lost is no trouble: our own bytes are found and taken for ours.
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
        """Tell a record of a later release from a damaged one."""
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
