"""The partitions that this process writes: opened once each, kept or borrowed, closed cleanly.

`OpenPartition` opens in this order: lock the partition, check whether it was closed cleanly, remove that
mark, open the log (which recovers it if needed), publish its offsets to readers. It closes in this order:
close the log, publish to readers; then `OwnedPartitions` merges checkpoints and marks the partition closed,
before the lock is released.

O1  a partition is open at most once in this process.
O2  a partition opened with `get` stays open until it is released; one that was only borrowed is closed when
    the last borrower returns it.
O3  closing continues past a partition that fails; the first failure is raised at the end.

Thread rule: every method may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tidegate.clock import Clock
from tidegate.errors import ConflictError, CorruptError, InvalidError, TidegateError
from tidegate.file_locks import FileLock
from tidegate.files import Files
from tidegate.log.catalog import LogFolder, TopicDescription, TopicPartition, require_folder
from tidegate.log.checkpoints import (
    LOG_STARTS,
    RECOVERY_POINTS,
    CleanerCheckpoint,
    TopicId,
    forget_closed,
    last_segment_base,
    mark_closed,
    mark_folder_clean,
    merge_checkpoints,
    read_checkpoint,
    remove_clean_shutdown,
    was_closed_cleanly,
)
from tidegate.log.locks import (
    changing_folder,
    check_still_owner,
    lock_against_brokers,
    lock_partition,
    note_owner,
)
from tidegate.log.topic_config import BrokerConfig, TopicConfig
from tidegate.log.watermark import Watermark, WatermarkFile
from tidegate.randomness import Randomness
from tidegate.scheduling import Scheduler

if TYPE_CHECKING:
    from tidegate.log.partition import PartitionLog


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
        from tidegate.log.partition import PartitionLog
        from tidegate.log.recovery import SafeRecovery, recovery_named
        from tidegate.log.sealer import Sealer, remove_seal, seal_of_end

        self.place = place
        self.folder = folder
        self.is_kept = False  # stays open until it is released, not until its last borrower returns it
        self.borrowers = 0
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
                    self._watermark.begin_change()  # recovery may rename and truncate files
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
                    Sealer(self.log, files, seal)
                if sync and not clean and self.log.read_only_reason is None:
                    self.log.flush()  # readers will see what recovery kept, so it must be on disk
                self._changed()
                if not self._watermark.was_certain:
                    self._tell_readers()  # write again, so that both slots are valid
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
        """Refuse a log that became shorter at either end: it has lost files."""
        first, end = self.log.segments[0].base_offset, self.log.log_end_offset
        if first <= last.log_start and end >= last.durable_end:
            return
        if self.log.read_only_reason is not None:
            # The log is damaged at its end. Opening it would publish a shorter end to readers and hide
            # acknowledged data.
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
        """Keep the partition open until it is released, and record that in the lock's file."""
        self.is_kept = True
        if self._is_brief:
            self._is_brief = False
            note_owner(self._files, self.folder, briefly=False)

    def close_log(self) -> bool:
        """Close the log and publish to readers a last time; return whether it was clean. The lock is kept."""
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


class OwnedPartitions:
    """The open partitions of one `Log`."""

    def __init__(
        self,
        contents: LogFolder,
        *,
        clock: Clock,
        randomness: Randomness,
        scheduler: Callable[[], Scheduler],
        recovery: Literal["safe", "kafka"],
        sync: bool,
    ) -> None:
        self._contents = contents
        self._files = contents.files
        self._clock = clock
        self._randomness = randomness
        self._scheduler = scheduler
        self._recovery = recovery
        self._sync = sync
        self._guard = threading.RLock()
        self._held: dict[TopicPartition, OpenPartition] = {}
        self._broker_lock: FileLock | None = None

    @property
    def logs(self) -> list[PartitionLog]:
        """The logs that are open, borrowed ones included."""
        with self._guard:
            return [partition.log for partition in self._held.values()]

    def idle(self) -> list[TopicPartition]:
        """Return the partitions of the catalog that are not open here."""
        with self._guard:
            return [
                TopicPartition(name, number)
                for name, entry in self._contents.read().topics.items()
                for number in range(entry.partitions)
                if TopicPartition(name, number) not in self._held
            ]

    def keep_brokers_out(self) -> None:
        """Take the folder's shared lock and keep it."""
        with self._guard:
            if self._broker_lock is None:
                self._broker_lock = lock_against_brokers(self._files, self._contents.path)

    def get(self, place: TopicPartition) -> OpenPartition:
        """Open the partition, or return it if it is open; it stays open until released (O1, O2)."""
        with self._guard:
            partition = self._held.get(place)
            if partition is None:
                partition = self._held[place] = self._open(place)
            partition.check_owner()
            partition.keep()
            return partition

    @contextmanager
    def borrowed(self, place: TopicPartition) -> Iterator[PartitionLog | None]:
        """Yield the partition's log; None when another process writes it or it is gone (O2)."""
        with self._guard:
            held = self._held.get(place)
            if held is None:
                try:
                    held = self._held[place] = self._open(place, briefly=True)
                except (ConflictError, InvalidError):
                    held = None
            if held is not None:
                held.borrowers += 1
        try:
            yield None if held is None else held.log
        finally:
            if held is not None:
                with self._guard:
                    held.borrowers -= 1
                    if held.borrowers == 0 and not held.is_kept and self._held.get(place) is held:
                        self.release(place)

    def release(self, place: TopicPartition) -> None:
        """Close one partition cleanly, so that another process may write it."""
        with self._guard:
            held = self._held.pop(place, None)
            if held is not None:
                self._close([held])

    def release_all(self) -> None:
        """Close everything and release the lock against brokers."""
        with self._guard:
            opened = list(self._held.values())
            self._held.clear()
            try:
                self._close(opened)
            finally:
                if self._broker_lock is not None:
                    self._broker_lock.release()
                    self._broker_lock = None

    def abandon(self) -> None:
        """Drop all references without touching the disk, in a forked child."""
        self._held.clear()
        self._broker_lock = None

    def take_settings(self) -> None:
        """Apply the current settings of their topics to open partitions."""
        with self._guard:
            if not self._held:
                return
            configs = {topic.name: topic.config for topic in self._contents.describe_all()}
            for place, held in self._held.items():
                config = configs.get(place.topic)
                if config is not None and config != held.log.config:
                    held.log.update_config(config)

    def _open(self, place: TopicPartition, *, briefly: bool = False) -> OpenPartition:
        description = self._contents.describe(place.topic)
        if place.partition not in description.partition_numbers or description.topic_id is None:
            raise no_partition(description, place.partition)
        self.keep_brokers_out()
        path = self._contents.path
        with changing_folder(self._files, path, self._clock):
            remove_clean_shutdown(path, files=self._files)
            recovery_points = read_checkpoint(self._files, path / RECOVERY_POINTS)
            log_starts = read_checkpoint(self._files, path / LOG_STARTS)
        opened = OpenPartition(
            place,
            path / str(place),
            description.config,
            broker=self._contents.broker_config(),
            files=self._files,
            clock=self._clock,
            randomness=self._randomness,
            scheduler=self._scheduler(),
            recovery=self._recovery,
            recovery_point=recovery_points.get(place, 0),
            log_start=log_starts.get(place, 0),
            topic_id=description.topic_id,
            sync=self._sync,
            briefly=briefly,
        )
        try:
            self._follow_cuts(opened)
        except BaseException:
            opened.release()
            raise
        return opened

    def _follow_cuts(self, opened: OpenPartition) -> None:
        """Lower the cleaner checkpoint to the log end whenever recovery or a truncation removed compacted records."""
        checkpoint = CleanerCheckpoint(self._contents.path, files=self._files, clock=self._clock)
        log = opened.log

        def lower(_: object = None) -> None:
            checkpoint.lower(log.topic, log.partition, log.log_end_offset)

        lower()
        log.hooks.on_truncate.append(lower)

    def _close(self, opened: Sequence[OpenPartition]) -> None:
        """Close the logs, then merge their checkpoints, then release the locks (O3)."""
        clean: list[OpenPartition] = []
        failures: list[Exception] = []
        for partition in opened:
            try:
                if partition.close_log():
                    clean.append(partition)
            except (TidegateError, OSError) as failure:
                failures.append(failure)
        try:
            if opened:
                failures += self._leave_behind(clean, all_clean=len(clean) == len(opened))
        finally:
            for partition in opened:
                partition.release()
        if failures:
            raise failures[0]

    def _leave_behind(self, clean: Sequence[OpenPartition], *, all_clean: bool) -> list[Exception]:
        path = self._contents.path
        failures: list[Exception] = []
        with changing_folder(self._files, path, self._clock):
            lines = {partition.place: partition.log.checkpoint_lines() for partition in clean}
            merge_checkpoints(self._files, path, lines)
            for partition in clean:
                try:
                    mark_closed(self._files, partition.folder)
                except (TidegateError, OSError) as failure:
                    failures.append(failure)
            if all_clean and not failures:
                topics = self._contents.read().topics
                folders = [
                    path / f"{name}-{number}"
                    for name, entry in topics.items()
                    for number in range(entry.partitions)
                ]
                mark_folder_clean(self._files, path, folders)
        return failures


def no_partition(description: TopicDescription, partition: int) -> InvalidError:
    """Return the error for a partition that a topic does not have."""
    numbers = description.partition_numbers
    known = f"0 to {len(numbers) - 1}" if numbers == tuple(range(len(numbers))) else f"{list(numbers)}"
    return InvalidError(
        f"topic {description.name} has no partition {partition}; it has {known}",
        kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
    )
