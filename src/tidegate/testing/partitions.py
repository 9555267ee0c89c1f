"""A partition on its own, for tests below `Log`: one folder, a manual clock, chores run by hand.

    place = Place(tmp_path)
    log = place.open(segment_bytes=720)
    log.append(one_record(b"test"))                  # a batch of 72 bytes
    log = place.reopen(log, clean=False)             # as after a crash: nothing trimmed, nothing synced

Kafka's recovery is the default here, because most tests state what a broker does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.clock import ManualClock
from tidegate.files import Files
from tidegate.log.partition import PartitionLog
from tidegate.log.recovery import Recovery
from tidegate.log.topic_config import BrokerConfig, TopicConfig
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.testing.building import Rec, build_batch

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
