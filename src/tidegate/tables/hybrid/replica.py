"""A replica of a hybrid table: which records of the version topic count, and what it knows of the live topic.

    version topic ──► whose records count ──► drainer's validator ──► rows, upstream position, leader ──► commit

U1  `Upstream`, saved with the rows, is a function of the version topic up to the replica's position; its `next_offset`
    never decreases: all records of the live topic before it that should be in the table are, none from it on is.
F1  a leadership stamp counts when its epoch is larger than that of every stamp before it. From there to the next one,
    the records of its sender count and no others; before the first stamp, the push, everything does. So every replica
    accepts the same records, although a leader that was paused or cut off may append at any later moment.
D1  before the end of the push a fault stops the partition, which stays as it was saved last; after it, faults are
    counted and reported, and records are kept.

Thread rules: `drain` and `saved` on the draining thread; others hold `lock` to read `upstream` and `replica`, or to
change the role. `LiveTopic`: one thread.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace
from numpy.typing import NDArray

from tidegate.errors import (
    CorruptError,
    IntegrityError,
    InvalidError,
    OffsetOutOfRangeError,
    TidegateWarning,
    UnavailableError,
)
from tidegate.integrity import CheckpointCadence, Judged, Replica
from tidegate.integrity.columns import IntegrityColumns, control_payload, read_columns
from tidegate.integrity.control_records import Leadership, TopicSwitch, leadership_stamps, upstream_offsets
from tidegate.integrity.header import ControlType
from tidegate.integrity.state import NEVER, Phase
from tidegate.integrity.verdicts import Note, Verdict
from tidegate.log.catalog import TopicState
from tidegate.log.log import Log
from tidegate.metrics import Metrics
from tidegate.tables.ingest.consumer import first_and_end
from tidegate.tables.ingest.validation import has_headers, offset_after, repeats_of, rules_of
from tidegate.tables.snapshot import PartitionState

# --- upstream

VERSION: Final = 2
_READABLE: Final = (1, VERSION)
"""Version 1 knows nothing of topic ids and parts of states: its last three fields are not there."""
NONE: Final = -1


class Upstream(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Empty before the first leader; without `topic` before the first topic switch."""

    version: int = VERSION
    epoch: int = 0
    guid: bytes = b""
    stamp_offset: int = NONE
    """Where the leader's stamp is in the version topic."""
    topic: str = ""
    start_ms: int = NONE
    start_offset: int = NONE
    """Where in the live topic its first leader began."""
    next_offset: int = NONE
    """The next record of the live topic that is not in the table yet."""
    state_offset: int = NONE
    """Up to where in the live topic `state` says what is known of its producers."""
    state: bytes = b""
    copied: int = 0
    """Records of the live topic that the table took."""
    topic_id: str = ""
    """Of the live topic that offsets count in; empty where it is not known."""
    unfinished: tuple[int, int, int] = (0, 0, 0)
    """Generation, offset and parts of a state of which not all parts came yet."""
    parts: tuple[bytes, ...] = ()
    """Those of its parts that came."""

    @property
    def leadership(self) -> Leadership:
        return Leadership(self.epoch, self.guid)

    @property
    def is_switched(self) -> bool:
        return self.topic != ""

    def led_by(self, leadership: Leadership, stamp_offset: int) -> Upstream:
        """Return the state after a stamp that counts."""
        return replace(self, epoch=leadership.epoch, guid=leadership.guid, stamp_offset=stamp_offset)

    def switched(self, switch: TopicSwitch) -> Upstream:
        """Return the state after a topic switch: the first one names the topic, every one says how far it was read
        ."""
        known = replace(self, unfinished=(0, 0, 0), parts=()) if self.parts else self
        if switch.parts > 1:
            unfinished = (switch.generation, switch.offset, switch.parts)
            came = self.parts if self.unfinished == unfinished else ()
            if switch.part != len(came):
                return known  # an earlier part is missing: none of this state can be used
            came = (*came, switch.state)
            if len(came) < switch.parts:
                return replace(self, unfinished=unfinished, parts=came)
            switch = switch._replace(state=b"".join(came))
        if not self.is_switched:
            return replace(
                known,
                topic=switch.topic,
                start_ms=switch.start_ms,
                start_offset=switch.offset,
                next_offset=max(self.next_offset, switch.offset),
                state_offset=switch.offset,
                state=switch.state,
                topic_id=switch.topic_id,
            )
        if switch.topic != self.topic or switch.offset < self.state_offset:
            return known  # no leader writes that; the first switch is kept
        return replace(
            known,
            next_offset=max(self.next_offset, switch.offset),
            state_offset=switch.offset,
            state=switch.state,
            topic_id=self.topic_id or switch.topic_id,
        )

    def reached(self, next_offset: int, copied: int) -> Upstream:
        """Return the state after `copied` records of the live topic, the last of them just before `next_offset`."""
        return replace(self, next_offset=max(self.next_offset, next_offset), copied=self.copied + copied)


def encode_upstream(upstream: Upstream) -> bytes:
    return b"" if upstream == Upstream() else msgspec.msgpack.encode(upstream)


def decode_upstream(data: bytes, place: str) -> Upstream:
    """Decode the state in a commit; `place` is for the error."""
    if not data:
        return Upstream()
    try:
        found = msgspec.msgpack.decode(data, type=Upstream)
    except msgspec.DecodeError as error:
        raise CorruptError(
            f"what {place} knows of its live topic cannot be read ({error}); delete this replica's state and let it "
            "drain the version topic anew"
        ) from None
    if found.version not in _READABLE:
        raise CorruptError(
            f"{place} was written by another release (version {found.version}, this one reads up to {VERSION}); delete "
            "this replica's state and let it drain the version topic anew"
        )
    return replace(found, version=VERSION)


# --- fencing

NOBODY: Final = Leadership(0, b"")


class Screened(NamedTuple):
    """The records of a batch that count, and the leader after it."""

    counts: NDArray[np.bool_] | None
    """None: all of them."""
    leadership: Leadership
    stamped_at: int
    """The row of the last stamp that counted, -1 without."""


def screen(leadership: Leadership, batch: pa.RecordBatch, columns: IntegrityColumns) -> Screened:
    """Apply F1 to the next records of a version topic's partition."""
    stamps = list(leadership_stamps(batch, columns))
    if leadership == NOBODY and not stamps:
        return Screened(None, NOBODY, -1)
    counts = np.ones(len(columns), np.bool_)
    stamped_at, start = -1, 0
    for row, found in stamps:
        if found.epoch > leadership.epoch:
            counts[start:row] = _senders(leadership, columns, start, row)
            leadership, stamped_at, start = found, row, row
    counts[start:] = _senders(leadership, columns, start, len(columns))
    return Screened(None if counts.all() else counts, leadership, stamped_at)


def _senders(leadership: Leadership, columns: IntegrityColumns, start: int, stop: int) -> NDArray[np.bool_]:
    """Return the rows of this leader, or of no particular sender."""
    if leadership == NOBODY:
        return np.ones(stop - start, np.bool_)
    part = columns[start:stop]
    high, low = (int.from_bytes(half, "big") for half in (leadership.guid[:8], leadership.guid[8:]))
    chosen: NDArray[np.bool_] = (part.guid_high == high) & (part.guid_low == low) | part.is_heartbeat
    return chosen


# --- following

Store = Callable[[pa.RecordBatch], None]
SetAside = Callable[[pa.RecordBatch, Judged], None]
SOUND: Final = (Verdict.OK, Verdict.MISSING, Verdict.UNREGISTERED_PRODUCER)
"""Verdicts of a control record that is what its sender wrote, and new: after the push a gap before it is no reason."""
logger = logging.getLogger(__name__)


class Following:
    """One partition of a version topic, as one replica reads it."""

    def __init__(
        self,
        log: Any,
        state: PartitionState,
        *,
        now_ms: int,
        metrics: Metrics,
        max_age_ms: int = NEVER,
        rewind_ms: int = 0,
        cadence: Callable[[], CheckpointCadence] = CheckpointCadence,
    ) -> None:
        self.state = state
        self.lock = threading.RLock()
        self.place = f"{state.shape.topic}-{state.partition}"
        self.upstream = decode_upstream(state.live, self.place)
        self.replica = Replica(
            state.shape.topic,
            state.partition,
            rules=rules_of(log, state.shape.topic, state.partition),
            max_age_ms=max_age_ms,
            rewind_ms=rewind_ms,
            metrics=metrics,
        )
        self.replica.to_standby(state.drainer or None, now_ms=now_ms)
        self._cadence = cadence()
        self._is_due, self._now_ms = False, now_ms
        state.encode_drainer = self.saved
        state.encode_live = lambda: encode_upstream(self.upstream)

    @property
    def is_stopped(self) -> bool:
        return self.replica.error is not None

    @property
    def error(self) -> IntegrityError | None:
        return self.replica.error

    @property
    def is_pushed(self) -> bool:
        """Whether the end of the push was drained: only then can a partition be led."""
        return self.replica.drainer.state.phase is Phase.PUSHED

    def consume(self, records: pa.RecordBatch, now_ms: int) -> None:
        """Do nothing: in front of the buffer a replica does not check the version topic."""

    def drain(self, records: pa.RecordBatch, now_ms: int, store: Store, set_aside: SetAside) -> int:
        """Store the next records and set faulty ones aside; return how many were left out as repeats."""
        self._now_ms = now_ms
        with self.lock:
            if not has_headers(records) and self.upstream.leadership == NOBODY:
                store(records)
                self.replica.drainer.state.next_offset = offset_after(records)
                self.replica.faults.verdicts[Verdict.UNMANAGED] += records.num_rows
                return 0
            columns = read_columns(records.column("headers"))
            screened = screen(self.upstream.leadership, records, columns)
            counting, fenced = records, 0
            if screened.counts is not None:
                counting = records.filter(pa.array(screened.counts))
                fenced = records.num_rows - counting.num_rows
            left_out, judged = 0, None
            if counting.num_rows:
                left_out, judged = self._drain_counting(counting, now_ms, screened, store, set_aside)
            if self.is_stopped:
                self.state.freeze()
                logger.error("%s stopped, and is served up to there: %s", self.place, self.error)
                return left_out
            if screened.stamped_at >= 0:
                self.upstream = self.upstream.led_by(
                    screened.leadership, int(records.column("offset")[screened.stamped_at].as_py())
                )
            self.replica.drainer.state.next_offset = offset_after(records)
            self.state.counts.fenced += fenced
            if judged is not None:
                phase = self.replica.drainer.state.phase
                self._is_due |= self._cadence.is_due(judged, records.get_total_buffer_size(), phase, now_ms)
            return left_out

    def wants_commit(self) -> bool:
        """Whether a commit is due; called by the draining thread, which then commits."""
        return self._is_due

    def saved(self) -> bytes:
        """Return the drainer's state, for the commit that has its rows."""
        with self.lock:  # a promotion forgets expired producers, too
            data = self.replica.checkpoint(now_ms=self._now_ms)
        if data is None:
            raise InvalidError(f"{self.place} stopped at a fault and is not saved")
        self._is_due = False
        self._cadence.taken(self._now_ms)
        return data

    # -- inside ----------------------------------------------------------------------------------

    def _drain_counting(
        self,
        records: pa.RecordBatch,
        now_ms: int,
        screened: Screened,
        store: Store,
        set_aside: SetAside,
    ) -> tuple[int, Judged]:
        """Validate and store the records that count, and only then advance the position."""
        upstream, again = self.upstream, 0

        def put(kept: pa.RecordBatch, judged: Judged) -> None:
            nonlocal upstream, again
            set_aside(records, judged)
            if screened.leadership == NOBODY:
                store(kept)
                return
            fresh, upstream = _without_going_back(kept, upstream)
            again = kept.num_rows - fresh.num_rows
            store(fresh)

        judged = self.replica.drain(records, now_ms, put)
        self.upstream = _after_switches(records, judged, upstream)
        return repeats_of(judged) + again, judged


def _without_going_back(kept: pa.RecordBatch, upstream: Upstream) -> tuple[pa.RecordBatch, Upstream]:
    """Return the records after the position in the live topic: all of them, unless a leader made an error (U1)."""
    offsets = upstream_offsets(kept.column("headers"))
    copied = offsets >= 0
    if not copied.any():
        return kept, upstream
    before = np.maximum.accumulate(np.concatenate([[upstream.next_offset - 1], offsets]))[:-1]
    fresh = ~copied | (offsets > before)
    taken = int((fresh & copied).sum())
    upstream = upstream.reached(int(offsets.max()) + 1, taken)
    return (kept if fresh.all() else kept.filter(pa.array(fresh))), upstream


def _after_switches(records: pa.RecordBatch, judged: Judged, upstream: Upstream) -> Upstream:
    columns = judged.columns
    says = columns.is_control & (columns.control == ControlType.TOPIC_SWITCH)
    says &= np.isin(judged.verdicts, SOUND) & ((judged.notes & Note.DAMAGED) == 0)
    for row in np.flatnonzero(says).tolist():
        payload = control_payload(records.column("headers"), row)
        if payload is not None:
            upstream = upstream.switched(TopicSwitch.from_bytes(payload))
    return upstream


# --- live topic

COMPACTED_MS: Final = 240_000
"""The least life of a record that compaction may take: it is out of the active segment, and was not cleaned at once."""
FOREVER: Final = 1 << 62


class AgedOut(NamedTuple):
    """The numbers of offsets that a live topic deleted too early."""

    lost: int = 0
    """Before they were copied."""
    unknown: int = 0
    """After they were copied, and before their producers' state was written down."""

    def __add__(self, other: AgedOut) -> AgedOut:  # type: ignore[override]
        return AgedOut(self.lost + other.lost, self.unknown + other.unknown)


def kept_for(config: Any) -> tuple[int, int]:
    """Return the least time, in ms, and bytes for which a topic keeps a record."""
    life_ms, most_bytes = FOREVER, FOREVER
    if config.deletes:
        life_ms = config.retention_ms if config.retention_ms >= 0 else FOREVER
        most_bytes = config.retention_bytes if config.retention_bytes >= 0 else FOREVER
    if config.compacts:
        life_ms = min(life_ms, max(config.min_compaction_lag_ms, COMPACTED_MS))
    return life_ms, most_bytes


def rewound(log: Any, following: Following, topic: str, rewind_ms: int, rewind_from: str) -> TopicSwitch:
    """Return where a live topic is read from, for a partition whose push was drained."""
    version, partition = following.replica.topic, following.replica.partition
    end = following.replica.drainer.state.end_of_push
    if end < 0:
        raise InvalidError(f"{following.place} has no end of push: nothing to rewind from")
    moment = _time_at(log, version, partition, end)
    if rewind_from == "start":
        moment = _start_of_push(log, version, partition, end)
    start_ms = max(0, moment - rewind_ms)
    with log.reader(topic, [partition], start=f"@{start_ms}") as reader:
        return TopicSwitch(topic, start_ms, reader.positions()[partition], topic_id=topic_id_of(log, topic))


def topic_id_of(log: Any, topic: str) -> str:
    """Return the id of the topic that has this name now; empty where it is unknown."""
    states: dict[str, TopicState] = log.topic_states([topic])
    if topic not in states:
        raise UnavailableError(f"live topic {topic} does not exist (any more); create it again")
    return states[topic].topic_id


class LiveTopic:
    """One partition of a live topic, from an offset on; records before `copied` are in the table already."""

    def __init__(
        self,
        log: Any,
        topic: str,
        partition: int,
        offset: int,
        *,
        topic_id: str,
        copied: int,
        read_bytes: int,
        on_gap: str,
    ) -> None:
        self.topic, self.partition = topic, partition
        self.aged_out = AgedOut()
        self.unknown_below = 0
        """What a producer seems to have left out since an offset before this one may have aged out."""
        self.has_skipped = False
        """Whether offsets that aged out were told of and not yet left behind for good, by a switch behind them."""
        self._log, self._copied, self._on_gap = log, copied, on_gap
        self._topic_id = topic_id
        # A cluster's client decides itself how much it fetches.
        self._size = {"max_bytes": read_bytes} if isinstance(log, Log) else {}
        self._reader = self._open(offset)

    @property
    def next_offset(self) -> int:
        return int(self._reader.positions()[self.partition])

    def poll(self) -> pa.RecordBatch | None:
        """Return the next records, None if there are none yet."""
        try:
            found: pa.RecordBatch | None = self._reader.poll(0)
        except OffsetOutOfRangeError:
            offset = self.next_offset
            self._reader.close()
            self._reader = self._open(offset)
            return None
        return found

    def close(self) -> None:
        self._reader.close()

    def check(self) -> None:
        """Raise if the topic is not the one that the offsets belong to."""
        self._require_same(self.next_offset)

    def _require_same(self, offset: int) -> None:
        topic_id = topic_id_of(self._log, self.topic)
        if self._topic_id and topic_id and topic_id != self._topic_id:
            raise InvalidError(
                f"{self.topic}-{self.partition} was read up to offset {offset} of the topic with id {self._topic_id}, "
                f"and was deleted and created again, with id {topic_id}. Push a new version of the table"
            )

    def _open(self, offset: int) -> Any:
        self._require_same(offset)
        first, end = first_and_end(self._log, self.topic, self.partition)
        place = f"{self.topic}-{self.partition}"
        if offset > end:
            raise InvalidError(
                f"{place} was read up to offset {offset} and ends at {end}: it was made anew. Push a new version of "
                "the table, or restore the topic"
            )
        lost = range(max(offset, self._copied), first)
        unknown = range(offset, min(first, self._copied))
        if lost:
            what = (
                f"offsets {lost[0]} to {lost[-1]} of {place} aged out before they were copied into the table"
            )
            if self._on_gap == "fail":
                raise OffsetOutOfRangeError(
                    f"{what}; go on without them with on_gap='earliest', or push a new version",
                    offset=offset,
                    first=first,
                    end=end,
                )
            warnings.warn(f"{what}, and are lost; going on at {first}", TidegateWarning, stacklevel=2)
        if unknown:
            self.unknown_below = 0 if lost else first
            warnings.warn(
                f"offsets {unknown[0]} to {unknown[-1]} of {place} aged out after they were copied into the table: "
                "nothing of them is lost, but a producer that sends one of them again is not recognised. No replica "
                "led this partition for longer than the live topic keeps its records",
                TidegateWarning,
                stacklevel=2,
            )
        self.aged_out += AgedOut(len(lost), len(unknown))
        self.has_skipped |= bool(lost or unknown)
        return self._log.reader(
            self.topic,
            [self.partition],
            start={self.partition: max(offset, first)},
            control_records=True,
            **self._size,
        )


def _time_at(log: Any, topic: str, partition: int, offset: int) -> int:
    stop = {partition: offset + 1}
    with log.reader(topic, [partition], start={partition: offset}, stop=stop, control_records=True) as reader:
        for batch in reader:
            return int(batch.column("timestamp").view(pa.int64())[0].as_py())
    raise InvalidError(
        f"{topic}-{partition} offset {offset} is not there any more: the push's end cannot be looked up"
    )


def _start_of_push(log: Any, topic: str, partition: int, end: int) -> int:
    with log.reader(topic, [partition], stop={partition: end}, control_records=True) as reader:
        for batch in reader:
            columns = read_columns(batch.column("headers"))
            found = np.flatnonzero(columns.is_control & (columns.control == ControlType.START_OF_PUSH))
            if len(found):
                return int(batch.column("timestamp").view(pa.int64())[int(found[0])].as_py())
    raise InvalidError(f"{topic}-{partition} has no start of push before offset {end}")
