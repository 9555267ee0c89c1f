"""A source's records held against their producers' numbering, as one task of the pipeline does it.

This is the consumer's validator of the leader leg: repeats, control records and faulty records are left out, faults
do what the flow says. Its state is part of the source's state, so it always stands where reading stands; producers
silent for too long leave it when it is loaded and when it is saved.

Records without any header have no numbering; they pass by with only the position moved, which is half the cost
of a topic that other programs write. Without `validate()` only Tidegate's own control records are left out, and
records that carry a numbering are counted as `unchecked`.

Thread rule: one reading, one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.integrity import Tolerance, ValidationRules
from tidegate.integrity.columns import read_columns
from tidegate.integrity.state import NEVER, PartitionState, restore_checkpoint, take_checkpoint
from tidegate.integrity.validator import (
    FaultLog,
    OnError,
    PartitionValidator,
    Throttle,
    policy_of,
    reasons_of,
)
from tidegate.integrity.verdicts import Finding, Verdict, tolerance_of
from tidegate.kernels.integrity import MANAGED
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import Validate

Flags = npt.NDArray[np.bool_]


class Checked(NamedTuple):
    """Of some records: how many were looked at, which go on (None: all), which are set aside and why, which faulty ones
    are dropped, what stopped, and how many have a numbering that nobody checks."""

    rows: int
    kept: Flags | None
    aside: npt.NDArray[np.int64]
    reasons: tuple[str, ...]
    dropped: npt.NDArray[np.int64]
    fault: Finding | None
    unchecked: int = 0


_NONE = np.empty(0, np.int64)


def passed(rows: int) -> Checked:
    """All of them go on."""
    return Checked(rows, None, _NONE, (), _NONE, None)


class SourceValidation:
    """The validator of one partition of one source."""

    def __init__(
        self,
        step: Validate | None,
        topic: str,
        partition: int,
        saved: bytes,
        rules: ValidationRules | None,
        *,
        now_ms: int,
        throttle: Throttle | None = None,
    ) -> None:
        self._is_on = step is not None
        self._max_age_ms = NEVER if step is None else step.max_age_ms
        self._now_ms = now_ms
        self._saved = saved
        self.verdicts: Counter[str] = Counter()
        self._faults = FaultLog(throttle=throttle)
        state = PartitionState()
        if saved and self._is_on:
            state = restore_checkpoint(saved, now_ms=now_ms, max_age_ms=self._max_age_ms)
        self._validator = PartitionValidator(topic, partition, rules=rules, state=state)
        self._before: PartitionState | None = None
        self._last: Counter[str] = Counter()

    def check(self, records: pa.RecordBatch, now_ms: int) -> Checked:
        """Judge the next records; `take_back` may be called about them afterwards."""
        if not self._is_on:
            if not has_headers(records):
                return passed(records.num_rows)
            columns = read_columns(records.column("headers"))
            control, numbered = columns.is_control, columns.state == MANAGED
            return passed(records.num_rows)._replace(
                kept=~control if control.any() else None, unchecked=int(np.count_nonzero(numbered & ~control))
            )
        self._before = self._validator.state.copy()
        return self._judge(records, now_ms)

    def take_back(self, records: pa.RecordBatch, rows: int, now_ms: int) -> None:
        """Of the records checked last only the first `rows` count."""
        if not self._is_on or self._before is None:
            return
        self._validator.state = self._before
        self.verdicts.subtract(self._last)
        if rows:
            self._judge(records.slice(0, rows), now_ms)
        self.verdicts = +self.verdicts

    def pass_over(self, records: pa.RecordBatch, now_ms: int) -> None:
        """Let records be that somebody decided to leave out: the state moves on over faults among them."""
        if self._is_on and has_headers(records):
            state = self._validator.state
            rules = replace(self._validator.rules, during_push=OnError.KEEP, otherwise=OnError.KEEP)
            PartitionValidator(
                self._validator.topic, self._validator.partition, rules=rules, state=state
            ).validate(records, now_ms)

    def begin_anew(self) -> None:
        """Forget all producers: what lies between is not there to be looked at."""
        self._validator.state = PartitionState()
        self._validator.rules = replace(self._validator.rules, head_may_be_gone=True)

    def _judge(self, records: pa.RecordBatch, now_ms: int) -> Checked:
        if not has_headers(records):
            self._validator.state.next_offset = int(records.column("offset")[-1].as_py()) + 1
            self._count({Verdict.UNMANAGED: records.num_rows})
            return passed(records.num_rows)
        judged = self._validator.validate(records, now_ms)
        self._faults.take(judged, now_ms)
        self._count(judged.counts)
        rows = len(judged.verdicts) if judged.stop_at is None else judged.stop_at
        kept: Flags | None = judged.kept[:rows]
        if kept is not None and kept.all():
            kept = None
        aside, dropped = np.flatnonzero(judged.aside[:rows]), np.flatnonzero(judged.dropped[:rows])
        fault = None if judged.stop_at is None else judged.findings[-1]
        return Checked(rows, kept, aside, reasons_of(aside, judged, records), dropped, fault)

    def _count(self, counts: Mapping[Verdict, int]) -> None:
        self._last = Counter({verdict.label: count for verdict, count in counts.items() if count})
        self.verdicts.update(self._last)

    def saved(self, next_offset: int) -> bytes:
        """The state for the source's own, standing at `next_offset`."""
        if not self._is_on:
            return self._saved
        self._validator.state.next_offset = next_offset
        return take_checkpoint(self._validator.state, now_ms=self._now_ms, max_age_ms=self._max_age_ms)


def source_tolerance(log: Any, flow: Flow, partition: int) -> Tolerance:
    """Which gaps of a partition of the flow's topic are no faults; the log is not asked where nobody validates."""
    if not any(isinstance(step, Validate) for step in flow.steps):
        return Tolerance()
    return tolerance_of(log, flow.source.topic, partition)


def rules_for(step: Validate, tolerance: Tolerance, *, is_cut: bool) -> ValidationRules:
    """What the partition's records are judged by; `is_cut`: producers may be met in the middle of a chain."""
    return ValidationRules(
        during_push=policy_of(step.during_push),
        otherwise=policy_of(step.on_error),
        tolerance=tolerance,
        head_may_be_gone=is_cut,
    )


def has_headers(records: pa.RecordBatch) -> bool:
    """Whether any record carries a header."""
    column = records.column("headers")
    bounds = np.frombuffer(column.buffers()[1], np.int32)
    return bool(bounds[column.offset] != bounds[column.offset + len(column)])
