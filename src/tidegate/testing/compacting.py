"""A compacted partition on its own, for tests: append keys, end transactions, clean, look what is left.

    world = CompactedPartition(tmp_path)
    world.append([1, 2, 1])                  # one batch with these keys
    world.append([2], values=[None])         # a tombstone
    world.log.roll()
    world.clean()
    world.offsets()                          # of the records that remain, markers included

Everything appended is acknowledged at once. The clock is manual, chores run by hand, recovery is Kafka's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tidegate.clock import ManualClock
from tidegate.files import Effect, Files
from tidegate.log.compaction_plan import Cleanable, Limits, cleanable
from tidegate.log.format.batch import BatchHeader, check_batch
from tidegate.log.indexes import AbortedTxn
from tidegate.log.partition import PartitionLog
from tidegate.log.producer_state import Origin
from tidegate.log.topic_config import BrokerConfig, TopicConfig
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.testing.building import CodecName, Rec, build_batch, end_transaction_batch

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.log.compaction import CompactionReport

START_MS = 1_700_000_000_000


def compacting(**settings: Any) -> TopicConfig:
    """A small compacted topic; `settings` are fields of `TopicConfig`."""
    small: dict[str, Any] = {"segment_bytes": 2048, "segment_index_bytes": 4096}
    return TopicConfig(cleanup_policy=frozenset({"compact"}), **{**small, **settings})


@dataclass
class CompactedPartition:
    """One partition folder and what happens to it; `clean_stop` and `recovery_point` say how it was left."""

    root: Path
    config: TopicConfig = field(default_factory=compacting)
    watch: Callable[[Effect], None] | None = None
    clean_stop: bool = False
    recovery_point: int = 0
    clock: ManualClock = field(default_factory=lambda: ManualClock(START_MS))

    def __post_init__(self) -> None:
        self.scheduler = ManualScheduler(self.clock)
        self.files = Files(self.watch)
        self.sequences: dict[int, int] = {}
        self.log = self.open(clean=self.clean_stop, recovery_point=self.recovery_point)

    def open(self, *, clean: bool, recovery_point: int = 0, recovery: str = "kafka") -> PartitionLog:
        return PartitionLog.open(
            self.root / "compacted-0",
            self.config,
            broker=BrokerConfig(),
            files=self.files,
            clock=self.clock,
            randomness=SeededRandomness(1),
            scheduler=self.scheduler,
            clean=clean,
            recovery_point=recovery_point,
            recovery=recovery,
        )

    def reopen(self, *, clean: bool = True) -> None:
        """Close and open again; not `clean` is as after a crash, everything recovered from the log."""
        self.log.close(clean=clean)
        self.log = self.open(clean=clean)

    # -- writing ---------------------------------------------------------------------------------

    def append(
        self,
        keys: Sequence[int | None],
        *,
        values: Sequence[bytes | None] | None = None,
        producer: int = -1,
        sequence: int | None = None,
        transactional: bool = False,
        codec: CodecName = "none",
        epoch: int = 0,
    ) -> tuple[int, int]:
        """One batch with these keys; first and last offset. Sequences of a producer go on by themselves."""
        now_ms = self.clock.now_ms()
        records = [
            Rec(
                None if key is None else b"%d" % key,
                b"%d@%d" % (key or 0, now_ms) if values is None else values[place],
                now_ms,
            )
            for place, key in enumerate(keys)
        ]
        base = self.sequences.get(producer, 0) if sequence is None else sequence
        batch = build_batch(
            records,
            codec=codec,
            transactional=transactional,
            producer_id=producer,
            producer_epoch=-1 if producer < 0 else epoch,
            base_sequence=-1 if producer < 0 else base,
        )
        info = self.log.append(bytearray(batch))
        self.log.acknowledge(sync=False)
        if not info.duplicate and producer >= 0 and sequence is None:
            self.sequences[producer] = base + len(keys)
        return info.first_offset, info.last_offset

    def end(self, kind: Literal["ABORT", "COMMIT"], producer: int, *, epoch: int = 0) -> int:
        """End the producer's transaction; the marker's offset."""
        marker = end_transaction_batch(
            kind, producer_id=producer, producer_epoch=epoch, timestamp=self.clock.now_ms()
        )
        info = self.log.append(bytearray(marker), origin=Origin.COORDINATOR)
        self.log.acknowledge(sync=False)
        return info.first_offset

    # -- cleaning --------------------------------------------------------------------------------

    def part(self, first_dirty: int | None = 0) -> Cleanable:
        """What a cleaning from `first_dirty` on would cover."""
        return cleanable(
            self.log.segments,
            checkpoint=first_dirty,
            log_start=self.log.log_start_offset,
            log_end=self.log.log_end_offset,
            last_stable=self.log.last_stable_offset,
            limits=Limits(self.config.min_compaction_lag_ms, self.config.max_compaction_lag_ms),
            now_ms=self.clock.now_ms(),
        )

    def clean(self, first_dirty: int | None = 0, **settings: Any) -> CompactionReport:
        """Compact, however little is dirty; `settings` are fields of `CleanerSettings`."""
        from tidegate.log.compaction import Cleaner, CleanerSettings

        cleaner = Cleaner(
            files=self.files,
            clock=self.clock,
            randomness=SeededRandomness(3),
            settings=CleanerSettings(**settings),
        )
        return cleaner.clean(self.log, self.part(first_dirty))

    # -- what is in the log ----------------------------------------------------------------------

    def headers(self) -> list[BatchHeader]:
        """Of all batches, each one's CRC checked."""
        found = []
        for segment in self.log.segments:
            data = segment.read_at(0, segment.size)
            for position, header in segment.batches():
                check_batch(data, position)
                found.append(header)
        return found

    def last_offsets(self) -> list[int]:
        """Of all batches."""
        return [header.last_offset for header in self.headers()]

    def last_sequences(self) -> dict[int, int]:
        """Producer → last sequence its batches in the log tell."""
        return {header.producer_id: header.last_sequence for header in self.headers() if header.has_producer}

    def records(self, *, control: bool = False) -> pa.Table:
        """All records, read segment by segment past every watermark."""
        import pyarrow as pa

        from tidegate.log.format.decode import decode

        return pa.Table.from_batches(
            decode(
                segment.read_at(0, segment.size),
                topic="compacted",
                partition=0,
                control="include" if control else "skip",
            )
            for segment in self.log.segments
        )

    def keys(self) -> list[int | None]:
        return [None if key is None else int(key) for key in self.records().column("key").to_pylist()]

    def offsets(self) -> list[int]:
        """Of all records, transaction markers included."""
        offsets: list[int] = self.records(control=True).column("offset").to_pylist()
        return offsets

    def aborted(self) -> list[AbortedTxn]:
        return self.log.collect_aborted(0, self.log.log_end_offset)

    def names(self, *suffixes: str) -> list[str]:
        """The files in the folder, or those whose names end so."""
        return [name for name in self.files.list(self.log.folder) if not suffixes or name.endswith(suffixes)]
