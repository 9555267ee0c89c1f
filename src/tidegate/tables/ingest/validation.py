"""The two validators of a partition, in front of the buffer and behind it, and the check for updates out of order.

Records without any header have no numbering: neither validator checks them, so they pass and only move the position.
That is the common case of topics that other programs write, and half the cost of validating. The drainer's saved state
has the same offset as the rows it is saved with; a fault that stops the partition is raised after the records before
it were stored, and nothing is saved any more.

Thread rules: `consume` in one thread; `drain`, `saved` and the order watch in the draining thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tidegate.clock import Clock
from tidegate.errors import InternalError
from tidegate.integrity import Replica, ValidationRules
from tidegate.integrity.state import max_age_of
from tidegate.integrity.validator import Judged, policy_of
from tidegate.integrity.verdicts import Verdict, tolerance_of
from tidegate.metrics import Metrics
from tidegate.tables.ingest.consumer import first_and_end
from tidegate.tables.options import Consumed, TableShape
from tidegate.tables.snapshot import PartitionState

# --- validating


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
        """Check records in front of the buffer."""
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
        """Validate, store, and set faulty records aside behind the buffer; return how many were left out as repeats."""
        self._now_ms = now_ms
        if self.replica.error is not None:
            raise self.replica.error
        if not has_headers(records):
            store(records)
            self.replica.drainer.state.next_offset = offset_after(records)
            self.replica.faults.verdicts[Verdict.UNMANAGED] += records.num_rows
            return 0

        def put(kept: pa.RecordBatch, judged: Judged) -> None:
            store(kept)
            set_aside(records, judged)

        judged = self.replica.drain(records, now_ms, put)
        if self.replica.error is not None:
            raise self.replica.error
        return repeats_of(judged)

    def wants_commit(self) -> bool:
        """Return False: a plain table commits by time and bytes alone."""
        return False

    def saved(self) -> bytes:
        """Return the drainer's state, for the commit that has its rows."""
        data = self.replica.checkpoint(now_ms=self._now_ms)
        if data is None:
            raise self.replica.error or InternalError("a stopped partition has no error")
        return data


def rules_of(log: Any, topic: str, partition: int) -> ValidationRules:
    """Return the validation rules of a topic: gaps of compaction are tolerated, and a head that aged out."""
    first, _ = first_and_end(log, topic, partition)
    return ValidationRules(tolerance=tolerance_of(log, topic, partition), head_may_be_gone=first > 0)


def repeats_of(judged: Judged) -> int:
    """Return how many data records are left out although they are correct."""
    if judged.kept.all():
        return 0
    return int(np.count_nonzero(~judged.kept & ~judged.columns.is_control & ~judged.is_fatal))


def has_headers(records: pa.RecordBatch) -> bool:
    """Whether any record carries a header."""
    return len(records.column("headers").flatten()) > 0


def offset_after(records: pa.RecordBatch) -> int:
    """The offset after the last record."""
    return int(records.column("offset")[-1].as_py()) + 1


# --- order watch

QUIET_MS: Final = 60_000
MOST_LOOKED_AT: Final = 256
logger = logging.getLogger(__name__)


class OrderWatch:
    """Checks the rows of each batch before they are written."""

    def __init__(self, shape: TableShape, clock: Clock) -> None:
        self._shape = shape
        self._clock = clock
        self._told: dict[int, int] = {}

    def look(self, state: PartitionState, rows: pa.RecordBatch) -> None:
        """Check a batch; `state` is as it was before the batch."""
        if rows.num_rows == 0:
            return
        times = rows.column("value_ts").to_numpy()
        running = np.maximum(np.maximum.accumulate(times), state.newest_ms)
        if int(running[0]) == times[0] and np.array_equal(running, times):
            return
        now_ms = self._clock.monotonic_ms()
        told = self._told.get(state.partition)
        if told is not None and now_ms - told < QUIET_MS:
            return
        back = np.flatnonzero(times < running)[:MOST_LOOKED_AT]
        found = self._first_older(state, rows, back.tolist())
        if found is None:
            return
        self._told[state.partition] = now_ms
        offset, time, newer = found
        shape = self._shape
        logger.warning(
            "table %s: offset %d of %s-%d has timestamp %d and replaces a value of %d; the later offset wins. "
            "Further ones of this partition are not told for a minute",
            shape.name, offset, shape.topic, state.partition, time, newer,
        )  # fmt: skip

    def _first_older(
        self, state: PartitionState, rows: pa.RecordBatch, back: list[int]
    ) -> tuple[int, int, int] | None:
        """Return the first of these rows that replaces a newer one: its offset and time, and the newer time."""
        wanted = set(back)
        keys = rows.column("key").take(pa.array(back)).unique()
        mine = pa.compute.index_in(rows.column("key"), keys).is_valid().to_numpy(zero_copy_only=False)
        seen = self._stored_times(state, keys, rows)
        for row in np.flatnonzero(mine)[: 64 * MOST_LOOKED_AT].tolist():
            key, ts, seq, time, offset = (
                rows.column(name)[row].as_py() for name in ("key", "ts", "seq", "value_ts", "offset")
            )
            before = seen.get((key, ts, seq))
            if row in wanted and before is not None and before > time:
                return offset, time, before
            seen[key, ts, seq] = time
        return None

    def _stored_times(
        self, state: PartitionState, keys: pa.Array, rows: pa.RecordBatch
    ) -> dict[tuple[bytes, int, int], int]:
        ts = rows.column("ts").to_numpy()
        numbers, found = state.store.fetch_batch(keys, int(ts.min()), int(ts.max()))
        columns = [found.column(name).to_pylist() for name in ("ts", "seq", "value_ts")]
        owners = keys.take(pa.array(numbers)).to_pylist()
        return {(key, start, seq): time for key, start, seq, time in zip(owners, *columns, strict=True)}
