"""The leader of a partition of a hybrid table: what it writes, how it begins and ends, and a replica's loop.

    STANDBY ──► lease ──► stamp ──► drain to the stamp ──► LEADER: read the live topic, leave out repeats, append
       ▲                                                      │
       └── lease lost, an error, or stopped: the chain is ended if all is well, the lease released ◄──┘

P1  a leader appends only after its own stamp was drained here and counts. Its state then is that of every replica at
    that stamp, and nothing an older leader appends later changes it (`replica`, F1). So no record is lost or doubled;
    the lease only avoids useless changes of leader.
P2  an error while appending ends the leadership. What arrived is not guessed: the next stamp, with a new sender,
tells. P3  the state of the live topic's producers is written before the topic may delete the records it was learnt
from. P4  a fault is reported by the leader that meets it first; after one behind the last copied record, a switch
moves on.

Thread rules: `Outgoing` and `Leading` belong to one thread; `Serving.step` on one, or `run` for threads of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.clock import Clock
from tidegate.errors import ConflictError, FencedError, InvalidError, TidegateError, UnavailableError
from tidegate.integrity import Judged, Replica, Role
from tidegate.integrity.control_records import Leadership, TopicSwitch, send_leadership, with_upstream
from tidegate.integrity.header import ControlType
from tidegate.integrity.replica import LeaderSource
from tidegate.integrity.sender import SCHEMA
from tidegate.integrity.state import PartitionState, Phase, decode_state, encode_state
from tidegate.integrity.validator import FaultLog
from tidegate.integrity.verdicts import Verdict
from tidegate.log.log import Log
from tidegate.randomness import Randomness
from tidegate.tables.commits import Lease
from tidegate.tables.hybrid.replica import AgedOut, Following, LiveTopic, kept_for, rewound, topic_id_of
from tidegate.tables.hybrid.status import ReplicaStatus, partition_status
from tidegate.tables.ingest.validation import rules_of
from tidegate.tables.versions.catalog import status_name
from tidegate.waiting import waiting

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend
    from tidegate.tables.ingest.materializer import Materialiser


# --- outgoing

LARGEST_PART: Final = 512 << 10
"""A switch has at most so many bytes of validation state, and at most half of what the topic takes as one batch."""
STATES: Final = 1 << 20
"""More than one leadership writes."""
LOCK_WAIT_MS: Final = 2_000
PAUSE_MS: Final = 5
WRITE_SECONDS: Final = 30.0


class Outgoing:
    """The writer of one leadership into the version topic."""

    def __init__(
        self, log: Any, topic: str, partition: int, leadership: Leadership, *, clock: Clock, hold_ms: int
    ) -> None:
        self.leadership = leadership
        self._log, self._topic, self._partition = log, topic, partition
        self._clock, self._hold_ms = clock, hold_ms
        self._is_embedded = isinstance(log, Log)
        self._settings = {} if self._is_embedded else {"timeout_seconds": WRITE_SECONDS}
        self._sender: Any = None
        self._holds, self._used_ms = False, 0
        self._most_bytes = max(1, min(LARGEST_PART, log.describe(topic).config.max_message_bytes // 2))
        self._generation = leadership.epoch * STATES

    def stamp(self, nonce: int = 0) -> int:
        """Write the stamp that begins this leadership; return its offset."""
        with self._turn():
            writer = self._log.writer(self._topic, **self._settings)
            try:
                written = send_leadership(
                    writer, self._partition, self.leadership, nonce=nonce, now_ms=self._clock.now_ms()
                )
            finally:
                writer.close()
        return int(written.last_offset)

    def switch(self, switch: TopicSwitch) -> None:
        """Write where the live topic is read from, or how far it was read; a large state in parts, one record each."""
        self._generation += 1
        with self._turn():
            sender = self._open()
            for part in switch.in_parts(self._most_bytes, self._generation % (1 << 64)):
                sender.send_control(ControlType.TOPIC_SWITCH, {self._partition: part.to_bytes()})

    def copy(self, records: pa.RecordBatch) -> None:
        """Append records of the live topic, each with its offset there; return when they are stored."""
        offsets = records.column("offset").to_numpy()
        rows = pa.RecordBatch.from_arrays(
            [
                records.column("key"),
                records.column("value"),
                records.column("timestamp"),
                with_upstream(records.column("headers"), offsets),
            ],
            schema=SCHEMA,
        )
        with self._turn():
            self._open().write(rows, partition=self._partition)

    def close(self, *, graceful: bool) -> None:
        """End the chain, with everything acknowledged; not gracefully: close without writing anything more."""
        try:
            if self._sender is not None:
                with self._turn() if graceful else nullcontext():
                    self._sender.close(graceful=graceful)
        finally:
            self._sender = None
            self._give_back()

    def rest(self) -> None:
        """There is nothing to append: release the lock after an idle time."""
        if self._holds and self._clock.monotonic_ms() - self._used_ms >= self._hold_ms:
            self._give_back()

    # -- inside ----------------------------------------------------------------------------------

    def _open(self) -> Any:
        if self._sender is None:
            self._sender = self._log.writer(
                self._topic, integrity={"guid": self.leadership.guid}, **self._settings
            )
        return self._sender

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._is_embedded and not self._holds:
            self._take()
        try:
            yield
        finally:
            self._used_ms = self._clock.monotonic_ms()
            if self._hold_ms <= 0:
                self._give_back()

    def _take(self) -> None:
        opening = partial(self._log.open_partition, self._topic, self._partition)
        try:
            waiting(self._clock, LOCK_WAIT_MS, opening, pause_ms=PAUSE_MS)
        except ConflictError as error:
            raise UnavailableError(
                f"{self._topic}-{self._partition} cannot be written: {error} If that process is stopped, let it go on "
                "or kill it"
            ) from error
        self._holds = True

    def _give_back(self) -> None:
        if self._holds:
            self._holds = False
            self._log.release(self._topic, self._partition)


# --- leading

SILENT_MS: Final = 1_000
"""How long there is nothing to read before the position in the live topic is written."""
CHECK_MS: Final = 2_000
"""How often the live topic is looked at, whether it is still the same."""
SAFETY: Final = 4
"""P3: the state is written when this part of the records' life is over."""
SPARING: Final = 10
"""A live topic that falls silent has its state written at once, but only so often in the time of P3."""
FIRST_PAUSE_MS: Final = 50
LONGEST_PAUSE_MS: Final = 5_000
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Live:
    """The live topic of a hybrid table, and how a leader reads it.

    `rewind_ms` before the end of the push (or its start) is where reading begins. `state_bytes`, `state_ms`: how
    much of the live topic is read, and for how long, before the leader writes its position; less where the live
    topic keeps less. `hold_ms`: how long an embedded log's lock is kept idle.
    """

    topic: str
    rewind_ms: int
    rewind_from: str = "end"
    state_bytes: int = 32 << 20
    state_ms: int = 600_000
    read_bytes: int = 4 << 20
    hold_ms: int = 200
    on_gap: str = "earliest"


class Leading:
    """The leadership of one partition of one replica, in any state."""

    def __init__(
        self,
        log: Any,
        following: Following,
        live: Live,
        lease_of: Callable[[], Lease],
        *,
        every_ms: int = 50,
        clock: Clock,
        randomness: Randomness,
    ) -> None:
        self.following = following
        self.live = live
        self.error: BaseException | None = None
        """What ended the last leadership, until the next one."""
        self.live_faults = FaultLog()
        self._aged_out = AgedOut()
        self._log, self._lease_of, self._every_ms = log, lease_of, every_ms
        self._clock, self._randomness = clock, randomness
        self._lease: Lease | None = None
        self._outgoing: Outgoing | None = None
        self._stamp_offset = -1
        self._source: LiveTopic | None = None
        self._switch: TopicSwitch | None = None
        self._copied_from = 0
        self._told_offset, self._read_ms = 0, 0
        self._since_bytes, self._since_ms = 0, -1
        self._said_ms: int | None = None
        self._owes = False
        """Whether a fault was told that no record behind it was copied (P4)."""
        self._checked_ms = 0
        self._state_bytes, self._state_ms = live.state_bytes, live.state_ms
        self._retry_ms, self._pause_ms = 0, FIRST_PAUSE_MS

    @property
    def role(self) -> Role:
        return self._replica.role

    @property
    def is_standing(self) -> bool:
        """Whether it leads, or has begun to."""
        return self._outgoing is not None or self._lease is not None

    @property
    def epoch(self) -> int:
        """The epoch it leads or tries to lead with, 0 otherwise."""
        return 0 if self._outgoing is None else self._outgoing.leadership.epoch

    @property
    def live_position(self) -> int:
        """The next offset of the live topic that this leader reads, -1 for others."""
        return -1 if self._source is None else self._source.next_offset

    @property
    def aged_out(self) -> AgedOut:
        """Counters of records that the live topic deleted too early, over all leaderships of this replica."""
        return self._aged_out if self._source is None else self._aged_out + self._source.aged_out

    def step(self) -> bool:
        """Do one step; return whether there was anything to do. Errors end the leadership and are kept in `error`
        (P2)."""
        try:
            if self._outgoing is None:
                return self._stand_for()
            if self._lease is not None:
                self._lease.keep()
            return self._lead() if self.role is Role.LEADER else self._wait_for_stamp()
        except (TidegateError, OSError) as error:
            self._fall(error)
            self._pause()  # also after a replacement: two processes whose clocks differ must not alternate all the time
        return True

    def stop(self, *, graceful: bool = True) -> None:
        """Return to STANDBY: end the chain with everything acknowledged, then release the lease; without
        `graceful`, write nothing."""
        try:
            if graceful and self.role is Role.LEADER and self._outgoing is not None:
                if self._since_ms >= 0:
                    self._say_how_far()
                self._outgoing.close(graceful=True)
                self._outgoing = None
        except (TidegateError, OSError) as error:
            logger.warning("%s: the end of a leadership was not written: %s", self.following.place, error)
        finally:
            self._fall(None)

    # -- standing --------------------------------------------------------------------------------

    @property
    def _replica(self) -> Replica:
        return self.following.replica

    def _stand_for(self) -> bool:
        """Take the lease and write the stamp, if the partition has no leader."""
        following = self.following
        if following.is_stopped or not following.is_pushed or self._clock.monotonic_ms() < self._retry_ms:
            return False
        lease = self._lease_of()
        if lease.acquire(at_least=following.upstream.epoch + 1) is not None:
            self._retry_ms = self._clock.monotonic_ms() + self._every_ms
            return False
        self._lease = lease
        leadership = Leadership(lease.epoch, self._randomness.uuid().bytes)
        self._outgoing = Outgoing(
            self._log,
            self._replica.topic,
            self._replica.partition,
            leadership,
            clock=self._clock,
            hold_ms=self.live.hold_ms,
        )
        self._stamp_offset = self._outgoing.stamp()
        return True

    def _wait_for_stamp(self) -> bool:
        """Lead once our own stamp is drained, if it counts (P1)."""
        outgoing, following = self._outgoing, self.following
        if outgoing is None or following.is_stopped:
            raise InvalidError(f"{following.place} stopped at a fault and cannot be led")
        with following.lock:
            if following.state.next_offset <= self._stamp_offset:
                outgoing.rest()
                return False
            upstream = following.upstream
            if upstream.leadership != outgoing.leadership:
                raise FencedError(
                    f"{following.place}: epoch {outgoing.leadership.epoch} came after epoch {upstream.epoch}; this "
                    "replica stays a standby and tries again with a later one"
                )
            self._promote()
        return True

    def _promote(self) -> None:
        """Wipe the consumer's state, copy the drainer's knowledge, and begin to read."""
        upstream, live, partition = self.following.upstream, self.live, self._replica.partition
        if upstream.is_switched and upstream.topic != live.topic:
            raise InvalidError(
                f"{self.following.place} follows the live topic {upstream.topic} since its offset "
                f"{upstream.start_offset}, not {live.topic}: serve it with that one, or push a new version"
            )
        rules = rules_of(self._log, live.topic, partition)
        if upstream.is_switched:
            switch = TopicSwitch(
                upstream.topic,
                upstream.start_ms,
                upstream.state_offset,
                upstream.state,
                topic_id=upstream.topic_id or topic_id_of(self._log, live.topic),
            )
        else:
            switch = rewound(self._log, self.following, live.topic, live.rewind_ms, live.rewind_from)
        state = PartitionState(phase=Phase.PUSHED) if not switch.state else decode_state(switch.state)
        state.next_offset = switch.offset
        source = LeaderSource(live.topic, state, rules)
        self._replica.to_leader(now_ms=self._clock.now_ms(), source=source)
        self._switch = switch
        self._copied_from = self._told_offset = max(upstream.next_offset, switch.offset)
        self._read_ms = self._clock.monotonic_ms()
        self._source = LiveTopic(
            self._log,
            live.topic,
            partition,
            switch.offset,
            topic_id=switch.topic_id,
            copied=self._copied_from,
            read_bytes=live.read_bytes,
            on_gap=live.on_gap,
        )
        if not upstream.is_switched and self._outgoing is not None:
            self._outgoing.switch(switch)
        self._bound_state()
        self._checked_ms = self._read_ms
        self._since_bytes, self._since_ms, self._said_ms, self._owes = 0, -1, None, False
        self._pause_ms, self.error = FIRST_PAUSE_MS, None
        logger.info(
            "%s: leading with epoch %d, from offset %d of %s on",
            self.following.place, self.epoch, self._copied_from, live.topic,
        )  # fmt: skip

    # -- leading ---------------------------------------------------------------------------------

    def _lead(self) -> bool:
        """Copy the next records of the live topic."""
        source, outgoing = self._source, self._outgoing
        if source is None or outgoing is None:
            raise InvalidError(f"{self.following.place} leads without a live topic")
        if self.following.is_stopped:
            raise InvalidError(f"{self.following.place} stopped at a fault and cannot be led")
        if self.following.upstream.epoch > self.epoch:
            raise FencedError(
                f"{self.following.place}: epoch {self.following.upstream.epoch} leads, and {self.epoch} does not any "
                "more; this process continues as a standby"
            )
        if self._clock.monotonic_ms() - self._checked_ms >= CHECK_MS:
            source.check()
            self._checked_ms = self._clock.monotonic_ms()
        records = source.poll()
        if records is None:
            if self._is_due():
                self._say_how_far()
                return True
            outgoing.rest()
            return False
        self._read_ms, now_ms = self._clock.monotonic_ms(), self._clock.now_ms()
        judged = self._replica.consume(records, now_ms)
        if judged is None:
            raise InvalidError(f"{self.following.place} is no leader any more")
        offsets = records.column("offset").to_numpy()
        is_new = offsets >= self._copied_from
        kept = judged.kept & is_new
        news = self._told(judged, offsets, is_new)
        self.live_faults.take(news, now_ms)
        if kept.any():
            outgoing.copy(records if kept.all() else records.filter(pa.array(kept)))
            self._told_offset = int(offsets[kept][-1]) + 1
        self._owes |= bool(news.is_fatal.any()) and source.next_offset > self._told_offset
        self._since_bytes += records.get_total_buffer_size()
        if self._since_ms < 0:
            self._since_ms = self._read_ms
        if self._is_due():
            self._say_how_far()
        return True

    def _told(self, judged: Judged, offsets: NDArray[np.int64], is_new: NDArray[np.bool_]) -> Judged:
        """Return the new findings of a judgement (P4): without records that were read before, and without records
        that are missing only because the live topic deleted them after they were copied."""
        unknown = 0 if self._source is None else self._source.unknown_below
        copied = [
            found.offset
            for found in (judged.findings if unknown else ())
            if found.verdict is Verdict.MISSING and (found.previous_offset or 0) < unknown
        ]
        is_new = is_new & ~np.isin(offsets, copied)
        if is_new.all():
            return judged
        return replace(
            judged,
            verdicts=judged.verdicts[is_new],
            rules=judged.rules[is_new],
            notes=judged.notes[is_new],
            findings=[found for found in judged.findings if is_new[np.searchsorted(offsets, found.offset)]],
        )

    def _is_due(self) -> bool:
        """Whether to write the position in the live topic, and the state of its producers, now."""
        source, now_ms = self._source, self._clock.monotonic_ms()
        if source is None or source.next_offset < self._copied_from:
            return False
        if self._since_bytes >= self._state_bytes or source.has_skipped:
            return True
        if self._owes and (self._said_ms is None or now_ms - self._said_ms >= SILENT_MS):
            return True
        if now_ms - self._read_ms >= SILENT_MS and source.next_offset > self._told_offset:
            return True
        if self._since_ms < 0:
            return False
        is_rare = self._said_ms is None or now_ms - self._said_ms >= self._state_ms // SPARING
        is_silent = now_ms - self._read_ms >= SILENT_MS
        return (is_silent and is_rare) or now_ms - self._since_ms >= self._state_ms

    def _bound_state(self) -> None:
        """Compute when P3 is due, as the live topic is configured now."""
        life_ms, most_bytes = kept_for(self._log.describe(self.live.topic).config)
        self._state_ms = max(SILENT_MS, min(self.live.state_ms, life_ms // SAFETY))
        self._state_bytes = max(1, min(self.live.state_bytes, most_bytes // SAFETY))

    def _say_how_far(self) -> None:
        """Write another switch with the current state: the next leader begins there."""
        source, outgoing, switch = self._source, self._outgoing, self._switch
        if source is None or outgoing is None or switch is None or source.next_offset < self._copied_from:
            return
        source.check()  # before an offset of another topic is written
        offset, state = source.next_offset, self._replica.consumer.state.copy()
        state.expire(self._replica.max_age_ms, now_ms=self._clock.now_ms())
        outgoing.switch(switch._replace(offset=offset, state=encode_state(state)))
        self._told_offset, self._said_ms = offset, self._clock.monotonic_ms()
        self._since_bytes, self._since_ms = 0, -1
        self._owes = source.has_skipped = False
        self._bound_state()

    # -- falling ---------------------------------------------------------------------------------

    def _fall(self, error: BaseException | None) -> None:
        """Return to STANDBY from any state; release the lease if it is still ours."""
        if error is not None:
            self.error = error
            logger.warning("%s: leadership with epoch %d ends: %s", self.following.place, self.epoch, error)
        outgoing, self._outgoing = self._outgoing, None
        lease, self._lease = self._lease, None
        self._aged_out = self.aged_out
        source, self._source = self._source, None
        with self.following.lock:
            if self.role is Role.LEADER:
                self._replica.to_standby(now_ms=self._clock.now_ms())
        for let_go in (
            None if outgoing is None else partial(outgoing.close, graceful=False),
            None if source is None else source.close,
            None if lease is None else lease.release,
        ):
            try:
                if let_go is not None:
                    let_go()
            except (TidegateError, OSError) as failure:
                logger.warning("%s: %s", self.following.place, failure)

    def _pause(self) -> None:
        self._retry_ms = self._clock.monotonic_ms() + self._pause_ms
        self._pause_ms = min(2 * self._pause_ms, LONGEST_PAUSE_MS)


# --- serving

IDLE_MS: Final = 10


def leader_lease_name(version: str, partition: int) -> str:
    return f"tables/{version}/leader-{partition}"


class Serving:
    """The partitions of a version that one process replicates."""

    def __init__(
        self,
        log: Any,
        builder: Materialiser,
        live: Live,
        backend: StorageBackend,
        replica: str,
        *,
        lease_ttl_ms: int,
        heartbeat_ms: int,
        clock: Clock,
        randomness: Randomness,
    ) -> None:
        shape = builder.source.rules.shape
        self.version, self.replica = shape.topic, replica
        self.live = live
        self.error: BaseException | None = None
        self._log, self._builder, self._backend = log, builder, backend
        self._clock, self._randomness, self._ttl_ms = clock, randomness, lease_ttl_ms
        self._heartbeat_ms = heartbeat_ms
        self._published: str | None = None
        self._said_ms: int | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.leading = {
            number: Leading(
                log,
                builder.validations[number],
                live,
                self._lease_of(number),
                every_ms=min(max(lease_ttl_ms // 10, 50), 1000),
                clock=clock,
                randomness=randomness,
            )
            for number in shape.partitions
        }

    @property
    def roles(self) -> dict[int, Role]:
        return {number: each.role for number, each in self.leading.items()}

    def step(self) -> bool:
        """Drain what there is, commit when due, and do one step of leading; return whether anything was done."""
        builder = self._builder
        did = builder.consume_once()
        while builder.drain_once():
            did = True
        builder.commit_if_due()
        return self.conduct() or did

    def conduct(self) -> bool:
        """Do one step for every partition, and publish the status at intervals."""
        if self._builder.error is not None:
            self._stand_down(graceful=False)
            return False
        did = False
        for each in self.leading.values():
            did |= each.step()
        self._say()
        return did

    def status(self) -> ReplicaStatus:
        """Return the status of every partition."""
        numbers = list(self.leading)
        ends, live_ends = _ends(self._log, self.version, numbers), _ends(self._log, self.live.topic, numbers)
        partitions = tuple(
            partition_status(self.leading[each], ends[each], live_ends[each]) for each in sorted(numbers)
        )
        return ReplicaStatus(
            self.replica, socket.gethostname(), os.getpid(), self._clock.now_ms(), partitions
        )

    def run(self) -> None:
        """Run in the background until `stop`."""
        if self._thread is None:
            if not self._builder.is_running:
                self._builder.run()
            self._thread = threading.Thread(
                target=self._conduct_on, name=f"tidegate-{self.version}-conductor", daemon=True
            )
            self._thread.start()

    def stop(self, *, graceful: bool = True) -> None:
        """Stop leading all partitions, and publish that."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
        self._stand_down(graceful=graceful)
        self._said_ms = None
        self._say()

    # -- inside ----------------------------------------------------------------------------------

    def _lease_of(self, number: int) -> Callable[[], Lease]:
        return partial(
            Lease,
            self._backend,
            leader_lease_name(self.version, number),
            clock=self._clock,
            randomness=self._randomness,
            ttl_ms=self._ttl_ms,
            duty="leads this partition",
            remedy="this process continues as a standby",
        )

    def _stand_down(self, *, graceful: bool) -> None:
        for each in self.leading.values():
            if each.is_standing:
                each.stop(graceful=graceful)

    def _say(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._said_ms is not None and now_ms - self._said_ms < self._heartbeat_ms:
            return
        self._said_ms = now_ms
        try:
            self._publish(msgspec.json.encode(self.status()))
        except (TidegateError, OSError) as error:
            logger.warning("%s: news of replica %s were not published: %s", self.version, self.replica, error)

    def _publish(self, data: bytes) -> None:
        name = status_name(self.version, self.replica)
        try:
            self._published = self._backend.publish(name, data, expected=self._published)
        except ConflictError:
            found = self._backend.read_published(name)
            expected = None if found is None else found[1]
            self._published = self._backend.publish(name, data, expected=expected)

    def _conduct_on(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self.conduct():
                    self._stopping.wait(IDLE_MS / 1000)
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to tell: kept, and raised to whoever asks
            self.error = error
            logger.error("%s: replica %s leads nothing any more: %s", self.version, self.replica, error)
            self._stand_down(graceful=False)


def _ends(log: Any, topic: str, partitions: Sequence[int]) -> dict[int, int]:
    with log.reader(topic, list(partitions), start="latest") as reader:
        ends: dict[int, int] = reader.end_offsets()
        return ends
