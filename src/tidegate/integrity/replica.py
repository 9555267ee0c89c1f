"""A replica's two validators of one partition, and their state on role changes.

    log → consumer stage → [consumer validator] → buffer → drainer stage → [drainer validator] → store

The consumer runs ahead of the drainer by the content of the buffer. Only the drainer's state matches the stored data,
so only it is saved, in the same commit as the data and the offset it describes. With a saved consumer state, a restart
would drop records as duplicates that were never stored.

    OFFLINE → STANDBY   the drainer's state is read from the checkpoint, without expired producers
    STANDBY → LEADER    the consumer's state is replaced by a copy of the drainer's
    LEADER  → STANDBY   the drainer's state stays; the consumer's is stale until the next promotion
    STANDBY → OFFLINE   both are dropped without a save; records since the last checkpoint are read again

Invariants:
R1  a partition that stopped at a fault is never checkpointed: its offset could be past a record not stored;
R2  the drainer's state advances only after the store has taken the records.

Thread rule: `consume` and `drain` may run in two threads, each in one; roles change while neither runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import pyarrow as pa

from tidegate.errors import ConflictError, IntegrityError
from tidegate.integrity.header import ControlType, Stamp
from tidegate.integrity.state import (
    NEVER,
    NO_TIME,
    PartitionState,
    Phase,
    decode_state,
    effective_max_age_ms,
    encode_state,
)
from tidegate.integrity.validator import (
    CONSUMER,
    DRAINER,
    Counters,
    FaultLog,
    Judged,
    PartitionValidator,
    ValidationRules,
    stopping_error,
)
from tidegate.integrity.verdicts import Tolerance, Verdict
from tidegate.metrics import Metrics

Store = Callable[[pa.RecordBatch, Judged], None]
"""Takes the kept records of a batch, or raises."""


class Role(Enum):
    OFFLINE = "offline"
    STANDBY = "standby"
    LEADER = "leader"


@dataclass(frozen=True, slots=True)
class LeaderSource:
    """The live topic that a leader reads besides the replica's own topic, and the state of its producers."""

    topic: str
    state: PartitionState
    rules: ValidationRules


class Replica:
    """One partition of one table in this process.

    `max_age_ms` is how long a producer may be silent before it is forgotten; a hybrid table, which rewinds its live
    topic by `rewind_ms`, keeps producers for at least that long. `tolerates_conflicts` is for a drainer behind
    conflict resolution, which drops records by design; the consumer before it stays strict.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        rules: ValidationRules | None = None,
        max_age_ms: int = NEVER,
        rewind_ms: int | None = None,
        tolerates_conflicts: bool = False,
        metrics: Metrics | None = None,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.role = Role.OFFLINE
        self.faults = FaultLog()
        self.error: IntegrityError | None = None
        self.max_age_ms = effective_max_age_ms(max_age_ms, rewind_ms)
        self._rules = rules if rules is not None else ValidationRules()
        self._drainer_rules = self._rules
        if tolerates_conflicts:
            self._drainer_rules = replace(self._rules, tolerance=Tolerance(always=True))
        metrics = metrics if metrics is not None else Metrics()
        self._in_front = Counters(metrics, topic, partition, CONSUMER)
        self._behind = Counters(metrics, topic, partition, DRAINER)
        self._consumer: PartitionValidator | None = None
        self._drainer: PartitionValidator | None = None

    # -- roles -----------------------------------------------------------------------------------

    def to_standby(self, checkpoint: bytes | None = None, *, now_ms: int) -> int:
        """Become a standby: from OFFLINE with the last checkpoint, or from LEADER. Returns the offset to read from."""
        if self.role is Role.OFFLINE:
            state = PartitionState() if checkpoint is None else decode_state(checkpoint)
            self._drainer = self._validator(self._drainer_rules, state)
            self._expire(now_ms)
            self.error = None
        elif self.role is Role.STANDBY:
            raise self._conflict(Role.STANDBY)
        self.role = Role.STANDBY
        return self.drainer.state.next_offset

    def to_leader(self, *, now_ms: int, source: LeaderSource | None = None) -> None:
        """Become the leader: the consumer starts from the drainer's state, or from the `source`'s for a live topic."""
        if self.role is not Role.STANDBY:
            raise self._conflict(Role.LEADER)
        self._expire(now_ms)
        if source is None:
            self._consumer = self._validator(self._rules, self.drainer.state.copy())
        else:
            state = source.state.copy()
            state.expire(self.max_age_ms, now_ms=now_ms)
            self._consumer = PartitionValidator(source.topic, self.partition, rules=source.rules, state=state)
        self.role = Role.LEADER

    def to_offline(self) -> None:
        """Drop all state without saving it."""
        if self.role is not Role.STANDBY:
            raise self._conflict(Role.OFFLINE)
        self._consumer = self._drainer = None
        self._in_front.released()
        self._behind.released()
        self.role = Role.OFFLINE

    # -- the two stages --------------------------------------------------------------------------

    def consume(self, batch: pa.RecordBatch, now_ms: int) -> Judged | None:
        """Validate before the buffer, to drop duplicates; only a leader does this, others return None."""
        if self.role is not Role.LEADER:
            return None
        judged = self.consumer.validate(batch, now_ms)
        self._in_front.take(judged, len(self.consumer.state.producers))
        return self._looked(judged)

    def drain(self, batch: pa.RecordBatch, now_ms: int, store: Store) -> Judged:
        """Validate after the buffer, store the kept records, and only then advance the state (R2)."""
        if self.error is not None:
            raise self.error
        trial = self._validator(self._drainer_rules, self.drainer.state.copy())
        judged = trial.validate(batch, now_ms)
        looked_at = batch.slice(0, len(judged.verdicts))
        store(looked_at if judged.kept.all() else looked_at.filter(pa.array(judged.kept)), judged)
        self._drainer = trial
        self.faults.take(judged, now_ms)
        self._behind.take(judged, len(trial.state.producers))
        return self._looked(judged)

    def checkpoint(self, *, now_ms: int) -> bytes | None:
        """The drainer's encoded state, for the commit of its data; None for a stopped partition (R1)."""
        if self.error is not None:
            return None
        self._expire(now_ms)
        data = encode_state(self.drainer.state)
        self._behind.checkpointed(len(data), len(self.drainer.state.producers))
        return data

    @property
    def consumer(self) -> PartitionValidator:
        if self._consumer is None:
            raise ConflictError(
                f"{self.topic}-{self.partition} never was a leader here; call to_leader first"
            )
        return self._consumer

    @property
    def drainer(self) -> PartitionValidator:
        if self._drainer is None:
            raise ConflictError(f"{self.topic}-{self.partition} is offline here; call to_standby first")
        return self._drainer

    def _expire(self, now_ms: int) -> None:
        """Forget producers that are too old: at restore, promotion and checkpoint only."""
        gone = self.drainer.state.expire(self.max_age_ms, now_ms=now_ms)
        self._behind.expired(gone)

    def _looked(self, judged: Judged) -> Judged:
        self.error = self.error or stopping_error(judged)
        return judged

    def _validator(self, rules: ValidationRules, state: PartitionState) -> PartitionValidator:
        return PartitionValidator(self.topic, self.partition, rules=rules, state=state)

    def _conflict(self, wanted: Role) -> ConflictError:
        return ConflictError(
            f"{self.topic}-{self.partition} is {self.role.value} and cannot become {wanted.value}; a replica goes "
            f"offline, standby, leader, standby, offline"
        )


# -- when to checkpoint ------------------------------------------------------------------------------


@dataclass(slots=True)
class CheckpointCadence:
    """Decides when a checkpoint is due: after a control record other than a chain's start and end, after a number of
    bytes (smaller once the push has ended; negative: off), and after `max_interval_ms` where set."""

    pushing_bytes: int = 60 << 20
    settled_bytes: int = 32 << 20
    max_interval_ms: int | None = None
    _since_bytes: int = 0
    _since_ms: int | None = None

    def is_due(self, judged: Judged, size: int, phase: Phase, now_ms: int) -> bool:
        """Whether a checkpoint is due; call once per batch, with its bytes. Call `taken` after checkpointing."""
        self._since_bytes += size
        if self._since_ms is None:
            self._since_ms = now_ms
        if self.max_interval_ms is not None and now_ms - self._since_ms >= self.max_interval_ms:
            return True
        limit = self.settled_bytes if phase.is_settled else self.pushing_bytes
        return 0 <= limit <= self._since_bytes or says_something(judged)

    def taken(self, now_ms: int) -> None:
        self._since_bytes, self._since_ms = 0, now_ms


def says_something(judged: Judged) -> bool:
    """Whether a control record other than a chain's start and end was accepted."""
    control = judged.columns.control
    chain = (control == ControlType.START_OF_CHAIN) | (control == ControlType.END_OF_CHAIN)
    return bool((judged.columns.is_control & ~chain & (judged.verdicts == Verdict.OK)).any())


# -- readers without a checkpoint --------------------------------------------------------------------

OnGap = Callable[[Stamp, "Seen"], None]


@dataclass(frozen=True, slots=True)
class Seen:
    """The last record of a producer."""

    chain: int
    sequence: int
    log_time: int
    ended: bool


class StatelessReader:
    """Find gaps in one partition without a checkpoint, from any offset on, without checksums and pushes.

    For exports and other readers that start anywhere. An unknown producer is accepted, and a position at or below the
    last one is a DUPLICATE. A skipped chain is MISSING at any age, because compaction keeps starts and ends of chains.
    A gap inside a chain is MISSING only while the record before it is younger than the compaction lag; with a lag of
    0 or less every such gap is tolerated. `on_gap` gets the stamp behind a gap and what was seen before it.
    """

    def __init__(self, *, compaction_lag_ms: int = 0, on_gap: OnGap | None = None) -> None:
        self._lag_ms = compaction_lag_ms
        self._on_gap = on_gap
        self._seen: dict[bytes, Seen] = {}

    def look(self, stamp: Stamp, log_time: int, now_ms: int) -> Verdict:
        """Return the verdict of the next record: OK, DUPLICATE, MISSING or HEARTBEAT."""
        if stamp.is_heartbeat and stamp.is_start_of_chain:
            return Verdict.HEARTBEAT
        seen = self._seen.get(stamp.guid)
        if seen is not None and (stamp.chain, stamp.sequence) <= (seen.chain, seen.sequence):
            return Verdict.DUPLICATE
        self._seen[stamp.guid] = Seen(stamp.chain, stamp.sequence, log_time, stamp.is_end_of_chain)
        if seen is None or not self._is_gap(seen, stamp, now_ms):
            return Verdict.OK
        if self._on_gap is not None:
            self._on_gap(stamp, seen)
        return Verdict.MISSING

    def _is_gap(self, seen: Seen, stamp: Stamp, now_ms: int) -> bool:
        if stamp.chain > seen.chain + 1:
            return True
        if stamp.chain == seen.chain + 1:
            return not seen.ended or stamp.sequence != 0
        if stamp.sequence == seen.sequence + 1 or self._lag_ms <= 0:
            return False
        return seen.log_time == NO_TIME or now_ms - seen.log_time < self._lag_ms
