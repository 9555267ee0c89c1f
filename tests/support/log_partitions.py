"""A partition on its own, for tests below `Log`: one folder, a manual clock, chores run by hand.

    place = Place(tmp_path)
    log = place.open(segment_bytes=720)
    log.append(one_record(b"test"))                  # a batch of 72 bytes
    log = place.reopen(log, clean=False)             # as after a crash: nothing trimmed, nothing synced

    world = CompactedPartition(tmp_path)
    world.append([1, 2, 1])                          # one batch with these keys
    world.append([2], values=[None])                 # a tombstone
    world.log.roll()
    world.clean()
    world.offsets()                                  # of the records that remain, markers included

Everything appended is acknowledged at once. Kafka's recovery is the default, because most tests state what a broker
does. `ProducerBench` holds a partition's producer state without a log: appends and end markers in one call each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from batch_checks import check_batch
from tidegate.clock import ManualClock
from tidegate.errors import InvalidError
from tidegate.files import Effect, Files
from tidegate.log.compaction_plan import Cleanable, Limits, cleanable
from tidegate.log.format.batch import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader
from tidegate.log.indexes import AbortedTxn
from tidegate.log.partition import PartitionLog
from tidegate.log.producer_state import CompletedTxn, Origin, ProducerEntry, ProducerStates
from tidegate.log.recovery import Recovery
from tidegate.log.topic_config import BrokerConfig, TopicConfig
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.testing.batches import CodecName, Rec, build_batch, end_transaction_batch

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.log.compaction import CompactionReport


START_MS = 1_700_000_000_000


@dataclass
class Place:
    """Where a partition lives and what it is given."""

    root: Path
    topic: str = "orders"
    clock: ManualClock = field(default_factory=lambda: ManualClock(START_MS))
    files: Files = field(default_factory=Files)
    broker: BrokerConfig = field(default_factory=BrokerConfig)
    seed: int = 0
    config: TopicConfig = field(default_factory=TopicConfig)

    def __post_init__(self) -> None:
        self.scheduler = ManualScheduler(self.clock)

    @property
    def folder(self) -> Path:
        return self.root / f"{self.topic}-0"

    def open(
        self,
        config: TopicConfig | None = None,
        *,
        clean: bool = True,
        recovery_point: int = 0,
        log_start: int = 0,
        high_watermark: int | None = None,
        recovery: str | Recovery = "kafka",
        **settings: Any,
    ) -> PartitionLog:
        """Open the folder; `settings` are fields of `TopicConfig`, kept for `reopen`."""
        if config is not None or settings:
            self.config = config if config is not None else TopicConfig(**settings)
        return PartitionLog.open(
            self.folder,
            self.config,
            broker=self.broker,
            files=self.files,
            clock=self.clock,
            randomness=SeededRandomness(self.seed),
            scheduler=self.scheduler,
            clean=clean,
            recovery_point=recovery_point,
            log_start=log_start,
            high_watermark=high_watermark,
            recovery=recovery,
        )

    def reopen(self, log: PartitionLog, *, clean: bool = True, **options: Any) -> PartitionLog:
        """Close and open again; by default with the recovery point and log start a checkpoint would keep."""
        options.setdefault("recovery_point", log.recovery_point)
        options.setdefault("log_start", log.log_start_offset)
        log.close(clean=clean)
        return self.open(clean=clean, **options)

    def names(self, ending: str = "") -> list[str]:
        """Files in the folder with this ending, sorted."""
        return [name for name in self.files.list(self.folder) if name.endswith(ending)]

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size


def one_record(
    value: bytes | None = b"test", *, key: bytes | None = None, timestamp: int = -1, **batch: Any
) -> bytearray:
    """A client's batch of one record: 72 bytes with the default value. `batch` goes to `build_batch`."""
    return bytearray(build_batch([Rec(key, value, timestamp)], **batch))


def records(number: int, /, *, timestamp: int = -1, value: bytes = b"test", **batch: Any) -> bytearray:
    """A client's batch of `number` equal records."""
    return bytearray(build_batch([Rec(None, value, timestamp)] * number, **batch))


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


PID = 1


class ProducerBench:
    """A partition's producer state with an append that does what a log does."""

    def __init__(self, folder: Path, *, files: Files | None = None, clock: ManualClock | None = None) -> None:
        self.folder = folder
        self.clock = clock or ManualClock()
        self.states = ProducerStates(folder, files=files or Files())

    def header(
        self,
        sequence: int,
        offset: int,
        *,
        pid: int = PID,
        epoch: int = 0,
        count: int = 1,
        attributes: int = 0,
        timestamp: int | None = None,
    ) -> BatchHeader:
        now = self.clock.now_ms() if timestamp is None else timestamp
        return BatchHeader(
            base_offset=offset,
            length=49,
            leader_epoch=0,
            magic=2,
            crc=0,
            attributes=attributes,
            last_offset_delta=count - 1,
            base_timestamp=now,
            max_timestamp=now,
            producer_id=pid,
            producer_epoch=epoch,
            base_sequence=sequence,
            count=count,
        )

    def append(
        self,
        sequence: int,
        offset: int,
        *,
        pid: int = PID,
        epoch: int = 0,
        count: int = 1,
        txn: bool = False,
        origin: Origin = Origin.CLIENT,
        timestamp: int | None = None,
    ) -> None:
        header = self.header(
            sequence,
            offset,
            pid=pid,
            epoch=epoch,
            count=count,
            attributes=TRANSACTIONAL_BIT if txn else 0,
            timestamp=timestamp,
        )
        self.states.update(self.states.check_data(header, origin))
        self.states.update_map_end_offset(header.next_offset)

    def marker(
        self,
        offset: int,
        *,
        pid: int = PID,
        epoch: int = 0,
        coordinator_epoch: int = 0,
        abort: bool = False,
        origin: Origin = Origin.COORDINATOR,
    ) -> CompletedTxn | None:
        header = self.header(-1, offset, pid=pid, epoch=epoch, attributes=TRANSACTIONAL_BIT | CONTROL_BIT)
        step = self.states.check_marker(header, origin, is_abort=abort, coordinator_epoch=coordinator_epoch)
        self.states.update(step)
        self.states.update_map_end_offset(offset + 1)
        return step.completed

    def entry(self, pid: int = PID) -> ProducerEntry:
        """What is known of a producer, which must be known."""
        entry = self.states.entry(pid)
        if entry is None:
            raise InvalidError(f"producer {pid} is not known in {self.folder.name}")
        return entry

    def reloaded(self, log_start: int, log_end: int, now_ms: int | None = None) -> ProducerBench:
        again = ProducerBench(self.folder, clock=self.clock)
        again.states.truncate_and_reload(
            log_start, log_end, self.clock.now_ms() if now_ms is None else now_ms
        )
        return again

    def files(self) -> list[int]:
        return sorted(int(path.name.split(".")[0]) for path in self.folder.glob("*.snapshot"))
