"""One partition's records judged batch by batch: Arrow in, one verdict per record out.

Owns the way of a batch through the kernels (metadata, checksums, decision table) and the state it leaves. The
rules are those of `kernels.decision_table`; what a caller does about a fault is `policy`'s.

Invariants:
V1  the verdicts of a stream, and the state after it, do not depend on where it was cut into batches;
V2  a batch that stops the partition at a record leaves the state as it was before that record;
V3  an error raised here (a batch of another shape) has changed nothing.

Thread rule: one thread per validator; the kernels run without the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.errors import InvalidError
from tidegate.integrity.checksum import computed_checksums, computed_field_sums
from tidegate.integrity.columns import (
    MANAGED,
    IntegrityColumns,
    control_payload,
    int64s,
    read_columns,
    times_of,
)
from tidegate.integrity.counters import VALIDATOR, Counters
from tidegate.integrity.findings import Finding
from tidegate.integrity.manifest import compare_manifest
from tidegate.integrity.rules import OnError, ValidationRules
from tidegate.integrity.state import PartitionState, Phase
from tidegate.integrity.tolerance import INCOMING
from tidegate.integrity.verdicts import FATAL, GAPS, Note, Rule, Verdict
from tidegate.kernels.decision_table import Settings
from tidegate.kernels.judge import (
    COUNT,
    DONE,
    FAULTS,
    KINDS_OF_FAULTS,
    NEEDS_SUMS,
    NO_ROOM,
    PHASE,
    PUSH_END,
    PUSH_ENDS,
    REASON,
    STATE_SIZE,
    STOPPED,
    TOLD,
    judge_records,
)
from tidegate.kernels.producer_index import PRODUCER_ROW
from tidegate.metrics import Metrics

MOST_FINDINGS: Final = 1000
"""Findings of one batch that are told in full: the first sixth of them of each kind, so that a flood of one kind hides
no other; verdicts and counts are always complete."""

_NO_SUMS: Final = np.zeros(0, np.uint64)
_IS_FATAL: Final = np.array([verdict in FATAL for verdict in Verdict])
_IS_GAP: Final = np.array([verdict in GAPS for verdict in Verdict])


@dataclass(frozen=True, slots=True)
class Judged:
    """The outcome of one batch; arrays have one element per record before `stop`."""

    verdicts: NDArray[np.uint8]
    rules: NDArray[np.uint8]
    notes: NDArray[np.uint8]
    columns: IntegrityColumns
    findings: Sequence[Finding]
    """The first faults, each made when it is looked at; the one that stopped the partition is the last."""
    stop_at: int | None
    """The row whose fault stopped the partition, counted among the verdicts; None when it goes on."""
    kept: NDArray[np.bool_]
    """The data records to go on with: no repeats, no control records, no faulty ones."""
    aside: NDArray[np.bool_]
    """Faulty data records to set aside as dead letters; those that are neither kept nor aside are dropped."""

    @property
    def is_fatal(self) -> NDArray[np.bool_]:
        return _fatal(self.verdicts, self.rules)

    @property
    def dropped(self) -> NDArray[np.bool_]:
        """Faulty data records that are left out and not set aside."""
        left_out = self.is_fatal & ~self.kept & ~self.aside & ~self.columns.is_control
        if self.stop_at is not None:
            left_out[self.stop_at] = False
        return left_out

    @property
    def counts(self) -> dict[Verdict, int]:
        """How often each verdict was given."""
        counted = np.bincount(self.verdicts, minlength=len(Verdict))
        return {verdict: int(counted[verdict]) for verdict in Verdict}

    def noted(self, note: Note) -> int:
        """How many records carry a note."""
        return int(((self.notes & note) != 0).sum())


class PartitionValidator:
    """The validator of one partition; what it finds is added to `metrics`, where given."""

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
        """Judge the next records of the partition, in offset order; `now_ms` is the round's one time."""
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
                difference = compare_manifest(
                    control_payload(batch.column("headers"), run.row), self.state.producers.get
                )
                shortfall = "" if difference is None else str(difference)
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
    """One batch on its way through the kernel."""

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
        """On from the row it stands at, until the kernel has a reason to ask."""
        producers = state.producers
        self.row = int(
            judge_records(
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
    """The faults of one batch that are told, made one by one: a flood of them costs nothing until read."""

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
        before = run.before[number]
        return Finding.of(
            self._topic,
            self._partition,
            Verdict(int(run.verdicts[row])),
            Rule(int(run.rules[row])),
            offset=int(run.offsets[row]),
            log_time=int(run.times[row]),
            stamp=run.columns.stamp(row) if run.columns.state[row] == MANAGED else None,
            before=before if int(before["chain"]) >= 0 else None,
            record=run.columns.rows[row],
            computed_crc=int(run.crcs[row]),
            shortfall=self._shortfall if run.rules[row] == Rule.M1 else "",
        )


def reasons_of(rows: NDArray[np.int64], judged: Judged, batch: pa.RecordBatch) -> tuple[str, ...]:
    """Why each of these rows of a judged batch is faulty: its finding, or its verdict alone in a flood of them."""
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
