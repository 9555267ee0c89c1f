"""A partition against a list: whatever is done to it in whatever order, it holds what it should."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from log_partitions import START_MS, Place, records
from tidegate.log.fetch import Isolation
from tidegate.log.format.batch import RecordFacts, iter_headers
from tidegate.log.partition import PartitionLog


@dataclass(frozen=True)
class Batch:
    base: int
    last: int
    timestamp: int


class PartitionModel(RuleBasedStateMachine):
    """Appends, rolls, cuts, deletions, clean and unclean restarts, with a plain list as the truth."""

    log: PartitionLog

    @initialize(
        segment_bytes=st.integers(200, 1200),
        interval=st.integers(0, 400),
        index_bytes=st.sampled_from([24, 60, 240, 4096]),
    )
    def open(self, segment_bytes: int, interval: int, index_bytes: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="tidegate-model-")
        self.place = Place(Path(self.folder.name))
        self.log = self.place.open(
            segment_bytes=segment_bytes, index_interval_bytes=interval, segment_index_bytes=index_bytes
        )
        self.batches: list[Batch] = []
        self.start = self.end = self.watermark = 0

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.log.close(clean=False)
            self.folder.cleanup()

    @rule(count=st.integers(1, 6), size=st.integers(0, 60), timestamp=st.integers(0, 50))
    def append(self, count: int, size: int, timestamp: int) -> None:
        stamp = START_MS + timestamp
        batch = records(count, timestamp=stamp, value=b"x" * size)
        if len(batch) > self.log.config.segment_bytes:
            return
        info = self.log.append(batch, facts=RecordFacts(count, stamp, stamp, 0, count, True))
        assert (info.first_offset, info.last_offset) == (self.end, self.end + count - 1)
        self.batches.append(Batch(self.end, self.end + count - 1, stamp))
        self.end += count

    @rule(sync=st.booleans())
    def acknowledge(self, sync: bool) -> None:
        self.watermark = self.log.acknowledge(sync=sync)
        assert self.watermark == self.end

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule(back=st.integers(0, 15))
    def truncate(self, back: int) -> None:
        offset = max(self.end - back, 0)
        first_base = self.log.segments[0].base_offset
        self.log.truncate_to(offset)
        self.batches = [batch for batch in self.batches if batch.last < offset]
        if offset < first_base:
            self.batches = []
        if offset < self.end:
            self.end = offset
            self.start = min(self.start, offset)
            self.watermark = min(self.watermark, offset)

    @rule(ahead=st.integers(0, 20))
    def delete_records(self, ahead: int) -> None:
        self.start = self.log.delete_records_before(min(self.start + ahead, self.watermark))

    @rule()
    def delete_old_segments(self) -> None:
        gone = [
            segment
            for segment, following in zip(self.log.segments, self.log.segments[1:], strict=False)
            if following.base_offset <= self.start
        ]
        self.log.delete_segments(gone, reason="start-offset")
        first = self.log.segments[0].base_offset
        self.batches = [batch for batch in self.batches if batch.last >= first]
        self.place.clock.advance("2m")
        self.place.scheduler.run_due()

    @precondition(lambda self: self.batches)
    @rule(clean=st.booleans(), from_zero=st.booleans())
    def reopen(self, clean: bool, from_zero: bool) -> None:
        kept = self.log.recovery_point
        self.log = self.place.reopen(
            self.log, clean=clean, recovery_point=0 if from_zero else kept, high_watermark=self.watermark
        )
        if self.log.log_end_offset < self.end:
            # the end of a log cut inside a batch is not written anywhere
            assert self.log.log_end_offset == max(
                self.batches[-1].last + 1, self.log.segments[-1].base_offset
            )
            self.end = self.log.log_end_offset
            self.watermark = min(self.watermark, self.end)
        self.start = max(self.start, self.log.segments[0].base_offset)
        assert self.log.log_start_offset == self.start

    @invariant()
    def offsets_agree(self) -> None:
        if hasattr(self, "batches"):
            log = self.log
            assert (log.log_start_offset, log.high_watermark, log.log_end_offset) == (
                self.start,
                self.watermark,
                self.end,
            )
            assert log.log_start_offset <= log.last_stable_offset <= log.high_watermark <= log.log_end_offset
            assert log.recovery_point <= log.log_end_offset

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(self.start, self.end))
        isolation = data.draw(st.sampled_from([Isolation.LOG_END, Isolation.HIGH_WATERMARK]))
        limit = self.end if isolation is Isolation.LOG_END else self.watermark
        seen, at = [], start
        while True:
            fetched = self.log.fetch(at, max_bytes=data.draw(st.integers(1, 400)), isolation=isolation)
            got = [(header.base_offset, header.last_offset) for _, header in iter_headers(fetched.data)]
            if not got:
                break
            seen += got
            at = got[-1][1] + 1
        wanted = [
            b for b in self.batches if b.last >= start and (b.last < limit or isolation is Isolation.LOG_END)
        ]
        assert seen == [(batch.base, batch.last) for batch in wanted]

    @rule(timestamp=st.integers(0, 55))
    def find(self, timestamp: int) -> None:
        asked = START_MS + timestamp
        wanted = next(
            (max(b.base, self.start) for b in self.batches if b.timestamp >= asked and b.last >= self.start),
            None,
        )
        first_late = next((s for s in self.log.segments if s.largest_timestamp >= asked), None)
        found = self.log.offset_for_timestamp(asked)
        if (
            wanted is not None
            and first_late is not None
            and any(
                header.max_timestamp >= asked and header.last_offset >= self.start
                for _, header in first_late.batches()
            )
        ):
            assert found is not None
            assert found.offset == wanted


PartitionModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPartitionModel = PartitionModel.TestCase
