"""Validate the records of one partition: the validator, its settings, metrics, and warnings about faults.

Owns the passage of a batch through the kernels (metadata, checksums, decision table) and the resulting state. The
rules are in `kernels.validation`; `OnError` decides the reaction to a fault.

V1  the verdicts of a stream, and the state after it, do not depend on the batch boundaries;
V2  a batch that stops the partition at a record leaves the state as it was before that record;
V3  an error raised here (a batch with another schema) changes nothing.

A *faulty record* (CORRUPT, AFTER_END, UNSUPPORTED) is not what its producer sent, so it is never passed on: it stops
the partition, is dropped, or becomes a dead letter. A *gap* (MISSING, UNREGISTERED_PRODUCER) is about missing records:
it stops the partition or is counted, and the record after the gap is passed on, unless it does not match its own
checksum (Note.DAMAGED) and is therefore faulty, too.

Metrics have the labels topic, partition and stage (`validator`, `consumer`, `drainer` or `audit`). They are updated
once per batch. Every fault is counted, few are logged: at most one line per kind of fault and minute.

Thread rule: one thread per validator, `Counters` and `FaultLog`; the kernels run without the interpreter lock.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.errors import IntegrityError, InvalidError
from tidegate.integrity.columns import (
    IntegrityColumns,
    computed_checksums,
    computed_field_sums,
    control_payload,
    int64s,
    read_columns,
    times_of,
)
from tidegate.integrity.state import PartitionState, Phase, compare_manifest
from tidegate.integrity.verdicts import FATAL, GAPS, INCOMING, Finding, Note, Rule, Tolerance, Verdict
from tidegate.kernels.integrity import MANAGED
from tidegate.kernels.validation import (
    COUNT,
    DONE,
    FAULTS,
    KINDS_OF_FAULTS,
    NEEDS_SUMS,
    NO_ROOM,
    PHASE,
    PRODUCER_ROW,
    PUSH_END,
    PUSH_ENDS,
    REASON,
    STATE_SIZE,
    STOPPED,
    TOLD,
    Settings,
    validate_batch,
)
from tidegate.metrics import Metrics

# -- settings --------------------------------------------------------------------------------------

DEFAULT_MOST_PRODUCERS: Final = 2_000_000
OLD_WORDS: Final = {"stop": "fail", "warn": "keep", "quarantine": "keep", "skip": "drop"}


class OnError(StrEnum):
    """The reaction to a fault: stop the partition (FAIL), or continue without the faulty record, which is counted
    (DROP) or counted and kept as a dead letter (KEEP). A gap has no faulty record: DROP and KEEP only count it."""

    FAIL = "fail"
    DROP = "drop"
    KEEP = "keep"

    @classmethod
    def of(cls, word: str) -> OnError:
        """Parse a policy; raises for an old spelling and names the new one."""
        try:
            return cls(word)
        except ValueError:
            instead = f": say {OLD_WORDS[word]!r}" if word in OLD_WORDS else ""
            raise InvalidError(f"{word!r}{instead}; choose 'fail', 'drop' or 'keep'") from None


def require_new_names(
    call: str,
    given: Mapping[str, object],
    new: Mapping[str, str],
    words: Mapping[str, str] = OLD_WORDS,
) -> None:
    """Raise for keywords of a call that were renamed, naming the new one; `words` are the old words for its values."""
    for name, said in given.items():
        if name not in new:
            raise TypeError(f"{call.partition('(')[0]}() got an unexpected keyword argument {name!r}")
        word = words.get(said, said) if isinstance(said, str) else said
        raise InvalidError(f"{call}{name}={said!r}) has another name now: {call}{new[name]}={word!r})")


Policy: TypeAlias = OnError | Mapping[Verdict, OnError]
"""One policy for every fault, or one per verdict; a verdict that is not named is KEEP."""


def policy_of(said: str | Mapping[str, str]) -> Policy:
    """Parse a policy: `"keep"`, or `{"missing": "fail", "corrupt": "drop"}`."""
    if isinstance(said, str):
        return OnError.of(said)
    known = {verdict.label: verdict for verdict in sorted(FATAL)}
    for label in said:
        if label not in known:
            raise InvalidError(f"{label!r} is no kind of fault; choose from {', '.join(known)}")
    return {known[label]: OnError.of(word) for label, word in said.items()}


@dataclass(frozen=True, slots=True)
class ValidationRules:
    """The validation settings of one partition.

    `during_push` is the policy before a push has ended, `otherwise` the one after it or without a push.
    `head_may_be_gone`: the log no longer begins at its first record, so unknown producers may start in the middle of
    a chain. `strict` makes a record without metadata a fault. `batch_only`: data after the end of a push gets the note
    UNEXPECTED. `payloads=False` trusts the data records' own checksums and reads no payload.
    """

    during_push: Policy = OnError.FAIL
    otherwise: Policy = OnError.KEEP
    tolerance: Tolerance = field(default_factory=Tolerance)
    head_may_be_gone: bool = False
    strict: bool = False
    batch_only: bool = False
    payloads: bool = True
    max_producers: int = DEFAULT_MOST_PRODUCERS

    def __post_init__(self) -> None:
        if not 1 <= self.max_producers <= 2**29:
            raise InvalidError(f"max_producers={self.max_producers}: choose 1 to {2**29}")

    def action(self, verdict: Verdict, phase: Phase) -> OnError:
        """The policy for this fault; under `strict` a record without metadata counts as UNSUPPORTED."""
        policy = self.otherwise if phase.is_settled else self.during_push
        if isinstance(policy, OnError):
            return policy
        return policy.get(Verdict.UNSUPPORTED if verdict is Verdict.UNMANAGED else verdict, OnError.KEEP)

    def verdicts_with(self, action: OnError, phase: Phase) -> int:
        """The fatal verdicts with this policy, as a bit mask."""
        judged = (*FATAL, Verdict.UNMANAGED)
        return sum(1 << verdict for verdict in judged if self.action(verdict, phase) is action)


# -- metrics ---------------------------------------------------------------------------------------

VALIDATOR: Final = "validator"
CONSUMER: Final = "consumer"
DRAINER: Final = "drainer"
AUDIT: Final = "audit"
COUNTED_NOTES: Final = (Note.TOLERATED, Note.TOLERATED_SUSPECT, Note.IGNORED, Note.UNEXPECTED)
_PLACE: Final = ("topic", "partition", "stage")


class Counters:
    """The metrics of one partition at one stage."""

    def __init__(self, metrics: Metrics, topic: str, partition: int, stage: str) -> None:
        self._place = {"topic": topic, "partition": partition, "stage": stage}
        self._records = metrics.counter(
            "tidegate_judged_records_total", "records by integrity verdict", (*_PLACE, "verdict")
        )
        self._faults = metrics.counter(
            "tidegate_integrity_faults_total", "records with an integrity fault", (*_PLACE, "phase")
        )
        self._notes = metrics.counter(
            "tidegate_integrity_notes_total", "records that integrity validation let pass", (*_PLACE, "note")
        )
        self._tracked = metrics.gauge("tidegate_tracked_producers", "producers held in memory", _PLACE)
        self._expired = metrics.counter(
            "tidegate_expired_producers_total", "producers forgotten because of their age", _PLACE
        )
        self._checkpoints = metrics.counter("tidegate_checkpoints_total", "checkpoints taken", _PLACE)
        self._bytes = metrics.gauge("tidegate_checkpoint_bytes", "size of the last checkpoint", _PLACE)

    def take(self, judged: Judged, tracked: int) -> None:
        """Count a batch; `tracked` is the number of producers after it."""
        for verdict, count in judged.counts.items():
            if count:
                self._records.add(count, verdict=verdict.label, **self._place)
        fatal = judged.is_fatal
        if fatal.any():
            during = int(((judged.notes[fatal] & Note.DURING_PUSH) != 0).sum())
            for phase, count in (("push", during), ("settled", int(fatal.sum()) - during)):
                if count:
                    self._faults.add(count, phase=phase, **self._place)
        if judged.notes.any():
            for note in COUNTED_NOTES:
                if count := judged.noted(note):
                    self._notes.add(count, note=str(note.name).lower(), **self._place)
        self._tracked.set(tracked, **self._place)

    def checkpointed(self, size: int, tracked: int) -> None:
        """Count a checkpoint of `size` bytes; `tracked` is the number of producers left."""
        self._checkpoints.add(1, **self._place)
        self._bytes.set(size, **self._place)
        self._tracked.set(tracked, **self._place)

    def expired(self, count: int) -> None:
        """Count forgotten producers."""
        if count:
            self._expired.add(count, **self._place)

    def released(self) -> None:
        """Reset the gauge of tracked producers."""
        self._tracked.set(0, **self._place)


# -- validator -------------------------------------------------------------------------------------

MOST_FINDINGS: Final = 1000
"""Limit of findings of one batch; each kind keeps at most a sixth of it, so that many faults of one kind hide no other.
Verdicts and counts are always complete."""
_NO_SUMS: Final = np.zeros(0, np.uint64)
_IS_FATAL: Final = np.array([verdict in FATAL for verdict in Verdict])
_IS_GAP: Final = np.array([verdict in GAPS for verdict in Verdict])


@dataclass(frozen=True, slots=True)
class Judged:
    """The result of one batch; arrays have one element per record before `stop`."""

    verdicts: NDArray[np.uint8]
    rules: NDArray[np.uint8]
    notes: NDArray[np.uint8]
    columns: IntegrityColumns
    findings: Sequence[Finding]
    """The first faults, each built on access; the one that stopped the partition is the last."""
    stop_at: int | None
    """The row whose fault stopped the partition (included in the verdicts); None when it did not stop."""
    kept: NDArray[np.bool_]
    """The data records to pass on: no duplicates, no control records, no faulty ones."""
    aside: NDArray[np.bool_]
    """Faulty data records for the dead-letter store; those that are neither kept nor aside are dropped."""

    @property
    def is_fatal(self) -> NDArray[np.bool_]:
        return _fatal(self.verdicts, self.rules)

    @property
    def dropped(self) -> NDArray[np.bool_]:
        """Mask of faulty data records that are dropped."""
        left_out = self.is_fatal & ~self.kept & ~self.aside & ~self.columns.is_control
        if self.stop_at is not None:
            left_out[self.stop_at] = False
        return left_out

    @property
    def counts(self) -> dict[Verdict, int]:
        """The number of records per verdict."""
        counted = np.bincount(self.verdicts, minlength=len(Verdict))
        return {verdict: int(counted[verdict]) for verdict in Verdict}

    def noted(self, note: Note) -> int:
        """The number of records with a note."""
        return int(((self.notes & note) != 0).sum())


class PartitionValidator:
    """The validator of one partition; it updates `metrics` where given."""

    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        rules: ValidationRules | None = None,
        state: PartitionState | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.rules = rules if rules is not None else ValidationRules()
        self.state = state if state is not None else PartitionState()
        self._counters = None if metrics is None else Counters(metrics, topic, partition, VALIDATOR)

    def validate(self, batch: pa.RecordBatch, now_ms: int) -> Judged:
        """Validate the next records of the partition, in offset order; `now_ms` is the round's fixed time."""
        offsets, times = int64s(batch, "offset"), times_of(batch)
        if len(offsets) > 1 and not (offsets[1:] > offsets[:-1]).all():
            raise InvalidError(
                f"{self.topic}-{self.partition}: offsets do not ascend; give a partition's records in order"
            )
        columns = read_columns(batch.column("headers"))
        crcs = computed_checksums(batch, columns, payloads=self.rules.payloads)
        run = _Run(columns, crcs, offsets, times, self.state)
        bound = self.rules.tolerance.bound()
        checked, shortfall = -1, ""
        while True:
            run.walk(self._settings(now_ms, bound, checked, bool(shortfall)), self.state)
            if run.reason == NO_ROOM:
                self.state.producers.reserve(1)
            elif run.reason == NEEDS_SUMS:
                run.sums = computed_field_sums(batch, columns)
            elif run.reason == PUSH_ENDS:
                checked = int(offsets[run.row])
                payload = control_payload(batch.column("headers"), run.row)
                shortfall = compare_manifest(payload, self.state.producers.get)
            else:
                break
        judged = self._judged(run, shortfall)
        if len(judged.verdicts):
            last = run.row if run.reason == STOPPED else run.row - 1
            after = int(offsets[last]) + (run.reason == DONE)
            self.state.next_offset = after
        if self._counters is not None:
            self._counters.take(judged, len(self.state.producers))
        return judged

    # -- inside ----------------------------------------------------------------------------------

    def _settings(self, now_ms: int, bound: int, checked: int, is_short: bool) -> Settings:
        rules, tolerance = self.rules, self.rules.tolerance
        return Settings(
            now_ms=now_ms,
            compaction_lag_ms=tolerance.compaction_lag_ms,
            compacted_below=bound,
            incoming_anchor=int(tolerance.anchor == INCOMING),
            always_tolerates=int(tolerance.always),
            head_may_be_gone=int(rules.head_may_be_gone or self.state.forgot),
            stops_pushing=rules.verdicts_with(OnError.FAIL, Phase.PUSHING),
            stops_settled=rules.verdicts_with(OnError.FAIL, Phase.LIVE),
            strict=int(rules.strict),
            batch_only=int(rules.batch_only),
            max_producers=rules.max_producers,
            checked=checked,
            is_short=int(is_short),
        )

    def _judged(self, run: _Run, shortfall: str) -> Judged:
        stop = run.row + (run.reason == STOPPED)
        verdicts, rules, notes = run.verdicts[:stop], run.rules[:stop], run.notes[:stop]
        columns = run.columns[:stop]
        kept = run.kept[:stop].view(np.bool_)
        aside = np.zeros(stop, np.bool_)
        if run.faults:
            during = (notes & Note.DURING_PUSH) != 0
            damaged = (notes & Note.DAMAGED) != 0
            verdict = np.where(damaged, np.uint8(Verdict.CORRUPT), verdicts)
            to_keep = [self.rules.verdicts_with(OnError.KEEP, each) for each in (Phase.PUSHING, Phase.LIVE)]
            is_kept_aside = np.where(during, *to_keep) >> verdict & 1 != 0
            is_faulty = damaged | (_fatal(verdicts, rules) & ~_IS_GAP[verdicts])
            aside = is_faulty & is_kept_aside & ~columns.is_control
            if run.reason == STOPPED:
                aside[run.row] = False
        found = _Findings(run, self.topic, self.partition, shortfall)
        stop_at = run.row if run.reason == STOPPED else None
        return Judged(verdicts, rules, notes, columns, found, stop_at, kept, aside)


class _Run:
    """The pass of one batch through the kernel."""

    def __init__(
        self,
        columns: IntegrityColumns,
        crcs: NDArray[np.uint32],
        offsets: NDArray[np.int64],
        times: NDArray[np.int64],
        state: PartitionState,
    ) -> None:
        self.columns, self.crcs, self.sums = columns, crcs, _NO_SUMS
        self.offsets, self.times = offsets, times
        self.row, self.reason = 0, DONE
        self.verdicts = np.empty(len(columns), np.uint8)
        self.rules = np.empty(len(columns), np.uint8)
        self.notes = np.empty(len(columns), np.uint8)
        self.kept = np.empty(len(columns), np.uint8)
        self.before = np.zeros(min(KINDS_OF_FAULTS * len(columns), MOST_FINDINGS), PRODUCER_ROW)
        self.fault_rows = np.zeros(len(self.before), np.int64)
        self._scratch = np.zeros(1, PRODUCER_ROW)
        self._state = np.zeros(STATE_SIZE, np.int64)
        self._state[PHASE], self._state[COUNT] = state.phase, state.producers.count
        self._state[PUSH_END] = state.end_of_push

    def walk(self, settings: Settings, state: PartitionState) -> None:
        """Run the kernel from the current row until it returns for a decision in Python."""
        producers = state.producers
        self.row = int(
            validate_batch(
                self.columns.rows, self.crcs, self.sums, self.offsets, self.times, self.row, settings,
                producers.rows, producers.index, self._scratch, self._state,
                self.verdicts, self.rules, self.notes, self.kept, self.before, self.fault_rows,
            )
        )  # fmt: skip
        self.reason = int(self._state[REASON])
        producers.count = int(self._state[COUNT])
        state.phase, state.end_of_push = Phase(int(self._state[PHASE])), int(self._state[PUSH_END])

    @property
    def faults(self) -> int:
        return int(self._state[FAULTS])

    @property
    def told(self) -> int:
        return int(self._state[TOLD])


class _Findings(Sequence[Finding]):
    """The findings of one batch as a lazy sequence: a finding is built when it is read."""

    def __init__(self, run: _Run, topic: str, partition: int, shortfall: str) -> None:
        self._run, self._topic, self._partition, self._shortfall = run, topic, partition, shortfall

    def __len__(self) -> int:
        return self._run.told

    @overload
    def __getitem__(self, number: int) -> Finding: ...
    @overload
    def __getitem__(self, number: slice) -> list[Finding]: ...
    def __getitem__(self, number: int | slice) -> Finding | list[Finding]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(f"finding {number} of {len(self)}")
        number %= len(self)
        run, row = self._run, int(self._run.fault_rows[number])
        before, record = run.before[number], run.columns.rows[row]
        rule = Rule(int(run.rules[row]))
        is_known = int(before["chain"]) >= 0
        detail = ""
        if record["state"] == MANAGED and run.crcs[row] != record["crc"]:
            detail = f"its checksum is {run.crcs[row]:08x}, its header says {record['crc']:08x}"
        elif rule is Rule.M1:
            detail = self._shortfall
        elif rule is Rule.U4:
            detail = (
                "the partition has as many producers as it may; a shorter max_age forgets silent ones earlier"
            )
        elif rule is Rule.C6 and is_known:
            detail = _broken_chain(before, record)
        return Finding(
            self._topic,
            self._partition,
            Verdict(int(run.verdicts[row])),
            rule,
            int(run.offsets[row]),
            int(run.times[row]),
            run.columns.stamp(row) if record["state"] == MANAGED else None,
            previous_chain=int(before["chain"]) if is_known else None,
            previous_sequence=int(before["sequence"]) if is_known else None,
            previous_offset=int(before["offset"]) if is_known else None,
            registered=bool(before["registered"]) if is_known else None,
            detail=detail,
        )


def _broken_chain(before: Any, record: Any) -> str:
    """The text of certified against received sums; equal contents mean that only headers were changed."""
    came, certified = int(before["checksum"]), int(record["certified_checksum"])
    counts = int(before["records"]), int(record["certified_records"])
    if (came, counts[0]) == (certified, counts[1]):
        return (
            f"keys and values of all {counts[0]} records are as certified, but their headers (numbers, producer's "
            "times) do not sum up to what the chain's end certifies"
        )
    return (
        f"the chain's records sum up to {came:016x} ({counts[0]} records), its end certifies {certified:016x} "
        f"({counts[1]} records)"
    )


def reasons_of(rows: NDArray[np.int64], judged: Judged, batch: pa.RecordBatch) -> tuple[str, ...]:
    """Why each of these rows is faulty: its finding, or only its verdict beyond the limit of findings."""
    if not len(rows):
        return ()
    told = {finding.offset: str(finding) for finding in judged.findings}
    reasons = []
    for row, offset in zip(rows.tolist(), int64s(batch, "offset")[rows].tolist(), strict=True):
        verdict, rule = Verdict(int(judged.verdicts[row])), Rule(int(judged.rules[row]))
        reasons.append(told.get(offset, f"{verdict.name} ({rule.name}); one of many in its batch"))
    return tuple(reasons)


def _fatal(verdicts: NDArray[np.uint8], rules: NDArray[np.uint8]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = _IS_FATAL[verdicts] | (rules == Rule.U3)
    return found


# -- counts and warnings ---------------------------------------------------------------------------

QUIET_MS: Final = 60_000
logger = logging.getLogger(__name__)


class Throttle:
    """Rate limiter: passes one event per kind and interval and counts the suppressed ones."""

    def __init__(self, quiet_ms: int = QUIET_MS) -> None:
        self._quiet_ms = quiet_ms
        self._last: dict[str, int] = {}
        self._held: Counter[str] = Counter()

    def held_back(self, kind: str, now_ms: int, count: int = 1) -> int | None:
        """Add `count` events; returns the number suppressed since the last line if one is due, else None."""
        last = self._last.get(kind)
        if last is not None and 0 <= now_ms - last < self._quiet_ms:
            self._held[kind] += count
            return None
        held = self._held.pop(kind, 0) + count - 1
        self._last[kind] = now_ms
        return held


class FaultLog:
    """Counts the verdicts of one partition and warns about faults, at most once a minute for each kind."""

    def __init__(self, *, throttle: Throttle | None = None) -> None:
        """Pass a `throttle` that lives longer to keep the rate limit across instances."""
        self.verdicts: Counter[Verdict] = Counter()
        self.faults = 0
        self._throttle = throttle or Throttle()

    def take(self, judged: Judged, now_ms: int) -> None:
        """Count a batch; warn about its faults."""
        fatal = judged.is_fatal
        for verdict, count in judged.counts.items():
            self.verdicts[verdict] += count
            faults = int((judged.verdicts[fatal] == verdict).sum()) if count and fatal.any() else 0
            if faults:
                self.faults += faults
                self._warn(judged, verdict, faults, now_ms)
        if judged.noted(Note.IGNORED) and self._throttle.held_back("push", now_ms) is not None:
            logger.warning("a start or end of push that came again, or too late, was ignored")

    def _warn(self, judged: Judged, verdict: Verdict, count: int, now_ms: int) -> None:
        held = self._throttle.held_back(verdict.label, now_ms, count)
        if held is None:
            return
        finding = next((found for found in judged.findings if found.verdict is verdict), None)
        logger.warning("%s%s", finding or verdict.name, f" (and {held} more like it)" if held else "")


def stopping_error(judged: Judged) -> IntegrityError | None:
    """The error of a partition that stopped at a fault, else None."""
    if judged.stop_at is None:
        return None
    finding: Finding = judged.findings[-1]
    return finding.error()
