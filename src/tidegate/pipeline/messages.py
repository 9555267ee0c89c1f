"""Messages between the coordinator and workers, the same for every engine, and the names of an app's stored objects.

A round has two kinds of work. A *source order* is an offset range of one log partition to read, validate and decode.
A *task order* is one task's state (its last token) and the time of the round; its events come from the source of the
same number if the flow is co-partitioned, or from all sources by key group if it is re-keyed. No message names a
process or an engine.

Messages are encoded as MessagePack (`encode`, `decode`), never pickled; commit records contain some of them. Object
names are made of user-given names with every unsafe character percent-encoded (`component`).

Thread rule: immutable values and pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import quote

import msgspec

from tidegate.errors import CorruptError

# -- names ----------------------------------------------------------------------------------------


def component(name: str) -> str:
    """A user's name as one component of an object's name: other characters percent-encoded, no dot in front."""
    safe = quote(name, safe="")
    return "%2E" + safe[1:] if safe.startswith(".") else safe


def storage_task(app: str, flow: str, task: int) -> str:
    return f"{component(app)}/{component(flow)}/{task}"


def parcel_name(app: str, flow: str, task: int, round: int, unique: str) -> str:
    return f"apps/{component(app)}/parcels/{component(flow)}/{task}/{round:010d}-{unique}"


def letters_name(app: str, flow: str, partition: int, start: int, unique: str) -> str:
    return f"apps/{component(app)}/letters/{component(flow)}/{partition}/{start:020d}-{unique}"


Any_ = TypeVar("Any_")


class Tick(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The time of a round: recorded in its plan, and the same when the round is repeated."""

    now_ms: int
    watermark: int | None = None  # re-keyed flows: no source's stream time is below this any more
    closing: bool = False
    waits: tuple[int, ...] = ()  # source partitions that held-back events wait for (`pipeline.held_events`)


class Held(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Events that a task has read and not processed yet, because an earlier one may still come.

    `waits_for` is the frontier of the source partition that is furthest behind: stream time, partition, next offset.
    Nothing that is held back is below it. Partition -1: no partition is waited for, the events are too many for one
    round. `offsets` gives, by source partition, an offset that nothing held back is below.
    """

    events: int
    waits_for: tuple[int, int, int]
    offsets: dict[int, int]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Record batches for one partition of a topic inside a parcel."""

    topic: str
    partition: int
    position: int
    size: int
    records: int


class Parcel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A task's results to publish, as one object; it counts when a commit names it."""

    name: str
    size: int
    digest: bytes
    sections: tuple[Section, ...]


class Delivery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A committed parcel to be delivered into topics: `bases` are the base offsets of its sections, in their order."""

    round: int
    parcel: Parcel
    bases: tuple[int, ...]
    flow: str = ""  # the parcel's flow
    task: int = -1


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a partition was stopped, and what would resume it.

    A record that was read in an earlier round and held back may fail when its turn comes. Then `offset` lies before
    the partition's position, and `stream_time` is the record's: events from there on stay held back
    (`SourceLine.frontier`).
    """

    reason: str  # integrity | corrupt | unreadable | failed | lost | recreated
    message: str
    offset: int
    remedy: str
    stream_time: int | None = None


class BadRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record that a step of its flow fails on; `kind` is the reason with which its partition stops (`Stop.reason`).

    `stream_time` is that of its source at its place.
    """

    partition: int
    offset: int
    reason: str
    kind: str = "failed"
    stream_time: int = -1


def resume_command(app: str, flow: str, partition: int, skip_to: int | None = None) -> str:
    """Return the command that resumes a stopped partition."""
    skip = "" if skip_to is None else f" --skip-to {skip_to}"
    return f"tidegate app resume {app} --partition {flow}:{partition}{skip}"


class SourceOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Read offsets from `start` up to `stop` of one partition, continuing from `state` (empty: the initial state).

    `bad` are records that a task failed on when the same range was tried before, also those that were read in an
    earlier round and held back since: they lie before `start`.
    """

    flow: str
    partition: int
    start: int
    stop: int
    state: bytes
    # for lookups in front of a key_by: table → the commit of it that this round reads
    lookups: dict[str, int] = {}
    bad: tuple[BadRecord, ...] = ()


class TaskOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bring one task from `token` (empty: no state) through this round; deliver what was committed before.

    `left_out` are held-back events to skip: source partition, first offset, next offset.
    """

    flow: str
    task: int
    token: bytes
    deliveries: tuple[Delivery, ...] = ()
    lookups: dict[str, int] = {}  # table → the commit of it that this round reads
    left_out: tuple[tuple[int, int, int], ...] = ()


class RoundOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One round of an app. Co-partitioned flows have source and task orders of the same numbers.

    `ticks` are those of flows that have their own (a watermark, an end of input); use `tick_of`. `incarnation`
    changes when the app is reset or replayed: names and sequence numbers that must be unique begin anew with it.
    `frontiers` are, for each flow, the partitions that held-back events wait for: stream time and next offset before
    this round. `stops` are, for each flow, the places from which on a partition's events stay held back.
    """

    app: str
    round: int
    generation: int
    tick: Tick
    sources: tuple[SourceOrder, ...]
    tasks: tuple[TaskOrder, ...]
    ticks: dict[str, Tick] = {}
    incarnation: str = ""
    frontiers: dict[str, dict[int, tuple[int, int]]] = {}
    stops: dict[str, dict[int, tuple[int, int]]] = {}

    def tick_of(self, flow: str) -> Tick:
        return self.ticks.get(flow, self.tick)

    def frontiers_after(
        self, flow: str, reached: Mapping[int, tuple[int, int]]
    ) -> dict[int, tuple[int, int]]:
        """Return the frontiers of the partitions that are waited for, after this round `reached` new ones in some
        of them."""
        waited = self.frontiers.get(flow, {})
        found = {
            partition: max(before, reached.get(partition, before)) for partition, before in waited.items()
        }
        return found | self.stops.get(flow, {})


class SourceResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of a source order; with `stopped`, `next_offset` is where it would resume."""

    flow: str
    partition: int
    next_offset: int
    state: bytes
    stream_time: int
    records: int
    size: int  # bytes of keys and values
    counters: dict[str, int] = {}
    verdicts: dict[str, int] = {}
    stopped: Stop | None = None


class TaskResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of a task order: the token that restores the task, and the results to publish.

    With `bad` there is neither: its steps failed on these records, and the round is repeated without them.
    """

    flow: str
    task: int
    token: bytes
    parcel: Parcel | None = None
    stream_time: int = -1
    rows_sent: int = 0
    counters: dict[str, int] = {}
    backlog_bytes: int = 0
    memory_bytes: int = 0
    timings_ms: dict[str, float] = {}
    held: Held | None = None
    bad: tuple[BadRecord, ...] = ()


class RoundResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The results of all sources and tasks of a round."""

    sources: tuple[SourceResult, ...]
    tasks: tuple[TaskResult, ...]


def encode_state(version: int, value: msgspec.Struct) -> bytes:
    """Encode a state that checkpoints keep: u8 version | MessagePack."""
    return bytes([version]) + msgspec.msgpack.encode(value)


def decode_state(data: bytes, version: int, kind: type[Any_], what: str) -> Any_:
    """Decode what `encode_state` returned; no bytes are the initial state. `what` names the state in errors."""
    if not data:
        return kind()
    if data[0] != version:
        raise CorruptError(
            f"{what}: the state has format {data[0]}; this version knows {version}: run the version that wrote it",
            kafka_name=None,
        )
    try:
        return msgspec.msgpack.decode(data[1:], type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"{what}: the state cannot be read: {error}", kafka_name=None) from error


def encode(value: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(value)


def decode(data: bytes, kind: type[Any_]) -> Any_:
    """Decode one of the values above; `msgspec.DecodeError` if the bytes are none."""
    return msgspec.msgpack.decode(data, type=kind)
