"""What every replica does with its partition of the version topic, whoever leads: screen, validate, store, remember.

    version topic ──► whose records count ──► drainer's validator ──► rows, upstream position, leader ──► commit

It stands where `building.validating` stands for plain tables. A standby looks at records once, behind the buffer; the
validator in front of it is the leader's, and looks at the live topic (`leading`).

D1  rows, offset, validation state and upstream position are saved together, and say the same moment.
D2  the table is a function of the version topic alone: what does not count (`fencing`), what came before (the
    validator) and what goes back in the live topic is left out, the same by every replica.
D3  before the end of the push a fault stops the partition: it is frozen as it was saved last, it is told, and the
    replica's other partitions go on. After it, faults are counted and told, and records are kept.
D4  a commit is due after a control record other than a chain's start or end, and after so many bytes.

Thread rule: `drain` and `saved` on the draining thread; whoever looks at `upstream` and `replica` from another one, or
changes the role, holds `lock`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tidegate.errors import IntegrityError, InvalidError
from tidegate.integrity import CheckpointCadence, Judged, Replica
from tidegate.integrity.columns import control_payload, read_columns
from tidegate.integrity.control_records import TopicSwitch, upstream_offsets
from tidegate.integrity.header import ControlType
from tidegate.integrity.state import NEVER, Phase
from tidegate.integrity.verdicts import Note, Verdict
from tidegate.metrics import Metrics
from tidegate.tables.building.partition_state import PartitionState
from tidegate.tables.building.validating import has_headers, offset_after, repeats_of, rules_of
from tidegate.tables.replicas.fencing import NOBODY, Screened, screen
from tidegate.tables.replicas.upstream import Upstream, decode_upstream, encode_upstream

Store = Callable[[pa.RecordBatch], None]
SetAside = Callable[[pa.RecordBatch, Judged], None]
SOUND: Final = (Verdict.OK, Verdict.MISSING, Verdict.UNREGISTERED_PRODUCER)
"""Verdicts of a control record that is what its sender wrote, and new: after the push a gap before it is no reason."""

logger = logging.getLogger(__name__)


class Following:
    """One partition of a version topic, as one replica takes it."""

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
        """Whether the end of the push was drained: only then a partition can be led."""
        return self.replica.drainer.state.phase is Phase.PUSHED

    def consume(self, records: pa.RecordBatch, now_ms: int) -> None:
        """In front of the buffer a replica has nothing to say about the version topic."""

    def drain(self, records: pa.RecordBatch, now_ms: int, store: Store, set_aside: SetAside) -> int:
        """Take the next records and set faulty ones aside; how many were left out as repeats."""
        self._now_ms = now_ms
        with self.lock:
            if not has_headers(records) and self.upstream.leadership == NOBODY:
                return self._drain_plain(records, store)
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
        """Whether a commit is due (D4); asked by the draining thread, which then commits."""
        return self._is_due

    def saved(self) -> bytes:
        """The drainer's state, for the commit that has its rows."""
        with self.lock:  # a promotion forgets expired producers, too
            data = self.replica.checkpoint(now_ms=self._now_ms)
        if data is None:
            raise InvalidError(f"{self.place} stopped at a fault and is not saved")
        self._is_due = False
        self._cadence.taken(self._now_ms)
        return data

    # -- inside ----------------------------------------------------------------------------------

    def _drain_plain(self, records: pa.RecordBatch, store: Store) -> int:
        store(records)
        self.replica.drainer.state.next_offset = offset_after(records)
        self.replica.faults.counts.verdicts[Verdict.UNMANAGED] += records.num_rows
        return 0

    def _drain_counting(
        self,
        records: pa.RecordBatch,
        now_ms: int,
        screened: Screened,
        store: Store,
        set_aside: SetAside,
    ) -> tuple[int, Judged]:
        """Validate and store what counts, and only then move on (D1)."""
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
    """The records that lie behind what was taken of the live topic, all but for a leader's error (U3)."""
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
