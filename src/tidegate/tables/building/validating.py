"""The two validators of a partition, in front of the buffer and behind it, as a table uses them.

Records without any header have no numbering: neither validator has anything to say about them, whatever their
number, so they pass by with only the position moved. That is the common case of topics that other programs
write, and half the cost of validating.

V1  the drainer's state that is saved says the same offset as the rows beside it.
V2  a fault that stops the partition is raised after the records before it were stored, and nothing is saved any more.

Thread rule: as `integrity.roles`: `consume` in one thread, `drain` and `saved` in one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.errors import InternalError
from tidegate.integrity import Replica, ValidationRules
from tidegate.integrity.state import max_age_of
from tidegate.integrity.validator import Judged, policy_of
from tidegate.integrity.verdicts import Verdict, tolerance_of
from tidegate.metrics import Metrics
from tidegate.tables.building.consumed import Consumed
from tidegate.tables.building.partition_state import PartitionState


class Validation:
    """One partition's `Replica`, leading from the table's last commit on."""

    is_stopped = False
    """A fault is raised here, and stops the whole table."""

    def __init__(
        self, log: Any, state: PartitionState, *, now_ms: int, metrics: Metrics, consumed: Consumed
    ) -> None:
        topic = state.shape.topic
        rules = replace(rules_of(log, topic, state.partition), otherwise=policy_of(consumed.on_error))
        self.replica = Replica(
            topic, state.partition, rules=rules, max_age_ms=max_age_of(consumed.max_age), metrics=metrics
        )
        self._now_ms = now_ms
        self.replica.to_standby(state.drainer or None, now_ms=now_ms)
        self.replica.to_leader(now_ms=now_ms)
        state.encode_drainer = self.saved

    def consume(self, records: pa.RecordBatch, now_ms: int) -> None:
        """In front of the buffer."""
        if has_headers(records):
            self.replica.consume(records, now_ms)
        else:
            self.replica.consumer.state.next_offset = offset_after(records)

    def drain(
        self,
        records: pa.RecordBatch,
        now_ms: int,
        store: Callable[[pa.RecordBatch], None],
        set_aside: Callable[[pa.RecordBatch, Judged], None],
    ) -> int:
        """Behind the buffer: validate, store, and set faulty records aside; how many were left out as repeats."""
        self._now_ms = now_ms
        if self.replica.error is not None:
            raise self.replica.error
        if not has_headers(records):
            store(records)
            self.replica.drainer.state.next_offset = offset_after(records)
            self.replica.faults.counts.verdicts[Verdict.UNMANAGED] += records.num_rows
            return 0

        def put(kept: pa.RecordBatch, judged: Judged) -> None:
            store(kept)
            set_aside(records, judged)

        judged = self.replica.drain(records, now_ms, put)
        if self.replica.error is not None:
            raise self.replica.error
        return repeats_of(judged)

    def wants_commit(self) -> bool:
        """A plain table commits by time and bytes alone."""
        return False

    def saved(self) -> bytes:
        """The drainer's state, for the commit that has its rows."""
        data = self.replica.checkpoint(now_ms=self._now_ms)
        if data is None:
            raise self.replica.error or InternalError("a stopped partition has no error")
        return data


def rules_of(log: Any, topic: str, partition: int) -> ValidationRules:
    """How a topic's records are judged: gaps of compaction are tolerated, and a head that aged out."""
    with log.reader(topic, [partition], start="earliest") as probe:
        head_is_gone = probe.positions()[partition] > 0
    return ValidationRules(tolerance=tolerance_of(log, topic, partition), head_may_be_gone=head_is_gone)


def repeats_of(judged: Judged) -> int:
    """How many data records are left out though nothing is wrong with them."""
    if judged.kept.all():
        return 0
    return int(np.count_nonzero(~judged.kept & ~judged.columns.is_control & ~judged.is_fatal))


def has_headers(records: pa.RecordBatch) -> bool:
    """Whether any record carries a header."""
    return len(records.column("headers").flatten()) > 0


def offset_after(records: pa.RecordBatch) -> int:
    """The offset after the last record."""
    return int(records.column("offset")[-1].as_py()) + 1
