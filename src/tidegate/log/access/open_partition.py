"""One partition while this process is its writer: the lock, the log, and what readers elsewhere are told.

Owns the order of opening and closing. Opening: lock the partition, learn whether it was closed cleanly,
forget that, open the log (which recovers what must be), tell readers. Closing: close the log, tell readers,
then let `Log` merge checkpoints and mark the partition closed before the lock goes.

Does not decide which partitions are opened; `embedded.py` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tidegate.clock import Clock
from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.access.closing import Position, forget_closed, last_segment_base, was_closed_cleanly
from tidegate.log.access.locks import check_still_owner, lock_partition, note_owner
from tidegate.log.access.watermark import Watermark, WatermarkFile
from tidegate.log.partitions.checkpoints import TopicId
from tidegate.log.topics.catalog import require_folder
from tidegate.log.topics.topic_config import BrokerConfig, TopicConfig
from tidegate.log.topics.topics import TopicPartition
from tidegate.randomness import Randomness
from tidegate.scheduling import Scheduler

if TYPE_CHECKING:
    from tidegate.log.partitions.partition import PartitionLog


class OpenPartition:
    """A partition open for writing."""

    def __init__(
        self,
        place: TopicPartition,
        folder: Path,
        config: TopicConfig,
        *,
        broker: BrokerConfig,
        files: Files,
        clock: Clock,
        randomness: Randomness,
        scheduler: Scheduler,
        recovery: Literal["safe", "kafka"],
        recovery_point: int,
        log_start: int,
        topic_id: str,
        sync: bool,
        briefly: bool = False,
    ) -> None:
        from tidegate.log.partitions.partition import PartitionLog
        from tidegate.log.partitions.recovery import SafeRecovery, recovery_named
        from tidegate.log.partitions.sealing import Sealer, remove_seal, seal_of_end

        self.place = place
        self.folder = folder
        require_folder(files, folder, place)
        self._files = files
        self._is_brief = briefly
        self._lock = lock_partition(files, folder, clock, briefly=briefly)
        try:
            base = last_segment_base(files, folder)
            seal = None
            if base is not None and was_closed_cleanly(files, folder):
                seal = seal_of_end(files, folder, base)
            clean = seal is not None
            if seal is not None:
                remove_seal(files, folder, seal.base_offset)  # before loading changes an index
            forget_closed(files, folder)
            self._watermark = WatermarkFile(files, folder)
            last = self._watermark.newest
            strategy = recovery_named(recovery, files)
            if recovery == "safe":
                strategy = SafeRecovery(
                    files, last.durable_end, last.high_watermark, self._watermark.was_certain, end=seal
                )
            try:
                if self._watermark.was_found and not clean:
                    self._watermark.begin_change()  # recovery may rename and cut
                self.log: PartitionLog = PartitionLog.open(
                    folder,
                    config,
                    broker=broker,
                    files=files,
                    clock=clock,
                    randomness=randomness,
                    scheduler=scheduler,
                    clean=clean,
                    recovery_point=max(recovery_point, last.durable_end),
                    log_start=max(log_start, last.log_start),
                    recovery=strategy,
                    topic_id=TopicId.parse(topic_id),
                )
                if recovery == "safe" and self._watermark.was_found:
                    self._require_all_there(last)
                if self.log.read_only_reason is None:
                    Sealer.attach(self.log, files, seal)
                if sync and not clean and self.log.read_only_reason is None:
                    self.log.flush()  # what recovery kept is shown to readers, so it must be on the disk
                self._changed()
                if not self._watermark.was_certain:
                    self._tell_readers()  # so that both slots are whole again
            except BaseException:
                self._watermark.close()
                raise
        except BaseException:
            self._lock.release()
            raise
        self.log.hooks.on_acknowledged.append(self._acknowledged)
        self.log.hooks.on_segments_changing.append(self._watermark.begin_change)
        self.log.hooks.on_segments_changed.append(self._changed)

    def _require_all_there(self, last: Watermark) -> None:
        """A log that is shorter than it was, at either end, has lost files: that is not for us to accept."""
        first, end = self.log.segments[0].base_offset, self.log.log_end_offset
        if first <= last.log_start and end >= last.durable_end:
            return
        if self.log.read_only_reason is not None:
            # Damage at the end: opened, it would tell readers of a shorter log, and hide what was acknowledged.
            raise CorruptError(
                f"{self.place} is read-only: {self.log.read_only_reason}", path=self.folder, offset=end
            )
        gone = (last.log_start, first) if first > last.log_start else (end, last.durable_end)
        raise CorruptError(
            f"{self.folder}: offsets {gone[0]} to {gone[1] - 1} were stored here and their files are gone; "
            f'restore them, or accept the loss by opening the log once with recovery="kafka"',
            path=self.folder,
            offset=gone[0],
        )

    def check_owner(self) -> None:
        """Refuse work after close and in a forked child."""
        check_still_owner(self._lock, f"partition {self.place}")

    def keep(self) -> None:
        """What was locked briefly is now locked for long; say so to those who wait."""
        if self._is_brief:
            self._is_brief = False
            note_owner(self._files, self.folder, briefly=False)

    def position(self) -> Position:
        """What the checkpoints keep."""
        first = self.log.segments[0].base_offset if self.log.segments else self.log.log_start_offset
        return Position(self.log.recovery_point, self.log.log_start_offset, first, self.log.high_watermark)

    def close_log(self) -> bool:
        """Close the log and tell readers a last time; whether it was clean. The lock stays."""
        try:
            clean = self.log.close(clean=True)
            self._tell_readers()
            self._watermark.sync()
            return clean
        finally:
            self._watermark.close()

    def release(self) -> None:
        self._lock.release()

    def _acknowledged(self, high_watermark: int, log_start: int, durable_end: int) -> None:
        self._watermark.write(
            log_start=log_start,
            high_watermark=high_watermark,
            durable_end=durable_end,
            last_stable=self.log.last_stable_offset,
        )

    def _changed(self) -> None:
        self._tell_readers()
        self._watermark.end_change()

    def _tell_readers(self) -> None:
        self._acknowledged(self.log.high_watermark, self.log.log_start_offset, self.log.recovery_point)
