"""`Log`: a folder of topics on this machine's disk.

Owns the topics' life (create, describe, alter, delete), which partitions this process writes, and closing
them all properly. Bytes are `PartitionLog`'s, records are `Writer`'s and `Reader`'s.

L1  nothing is created, locked or changed until something is written; reading leaves no trace.
L2  a folder without our catalog is foreign: it can be read, and nothing else.
L3  a log belongs to the process that opened it; after a fork, open it again in the child.

Thread rule: a `Log` may be shared by threads; each partition is opened once and has its own lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

from tidegate.clock import Clock, SystemClock
from tidegate.errors import ConflictError, InvalidError
from tidegate.files import Files
from tidegate.log.access.changing_topics import (
    _add_partitions,
    _alter,
    _create,
    _delete,
    _record_encoding,
)
from tidegate.log.access.numbered_writer import numbered
from tidegate.log.access.open_partition import OpenPartition
from tidegate.log.access.owned_partitions import OwnedPartitions, no_partition
from tidegate.log.access.partition_view import PartitionView
from tidegate.log.cleaning.cleaner_checkpoint import CompactedBelow
from tidegate.log.topics.catalog import LogFolder
from tidegate.log.topics.topics import TopicDescription, TopicPartition, TopicState, partition_folder_name
from tidegate.metrics import Metrics
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.scheduling import Scheduler, ThreadScheduler

if TYPE_CHECKING:
    from tidegate.log.access.positions import StartLike
    from tidegate.log.access.reader import Reader
    from tidegate.log.access.writer import Writer
    from tidegate.log.cleaning.maintenance import Maintenance
    from tidegate.log.partitions.partition import PartitionLog

Durability: TypeAlias = Literal["disk", "os"]
Recovery: TypeAlias = Literal["safe", "kafka"]
_REFRESH_MS = 1000


class Log:
    """A log folder: `with tg.Log("./data/log") as log: …`.

    `durability="disk"` acknowledges a write when it is on the disk, `"os"` when the operating system has it.
    `maintenance=True` makes this process run retention and compaction. `recovery="safe"` never cuts anything
    silently after a crash; `"kafka"` recovers as a broker does. `read_only=True` refuses every change.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        durability: Durability = "disk",
        maintenance: bool = False,
        recovery: Recovery = "safe",
        read_only: bool = False,
        files: Files | None = None,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
        scheduler: Scheduler | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        if durability not in ("disk", "os"):
            raise InvalidError(f"durability={durability!r}: choose 'disk' or 'os'")
        if recovery not in ("safe", "kafka"):
            raise InvalidError(f"recovery={recovery!r}: choose 'safe' or 'kafka'")
        self.path = Path(path)
        self.durability = durability
        self.recovery = recovery
        self.read_only = read_only
        self.files = files if files is not None else Files()
        self.clock = clock if clock is not None else SystemClock()
        self.randomness = randomness if randomness is not None else SystemRandomness()
        self.metrics = metrics if metrics is not None else Metrics()
        self.contents = LogFolder(self.files, self.path)
        self._scheduler = scheduler
        self._owns_scheduler = scheduler is None
        self._guard = threading.RLock()
        self._owned = OwnedPartitions(
            self.contents,
            clock=self.clock,
            randomness=self.randomness,
            scheduler=lambda: self.scheduler,
            recovery=recovery,
            sync=durability == "disk",
        )
        self._owner_pid = os.getpid()
        self._closed = False
        self._refreshed_ms = 0
        self._catalog_seen: tuple[int, ...] | None = None
        self._maintenance: Maintenance | None = None
        if maintenance:
            self._start_maintenance()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Log({str(self.path)!r})"

    def _repr_html_(self) -> str:
        from tidegate.log.access.showing import log_html

        return log_html(self)

    def show(self) -> None:
        """Print the first topics."""
        from tidegate.log.access.showing import log_text

        print(log_text(self))

    # -- topics ----------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """The names of all topics, sorted."""
        return [description.name for description in self.contents.describe_all()]

    def partition_counts(self) -> dict[str, int]:
        """Topic → number of partitions."""
        return {description.name: description.partitions for description in self.contents.describe_all()}

    def topic_states(self, topics: Iterable[str]) -> dict[str, TopicState]:
        """Id and number of partitions of each of these topics that exists now."""
        return self.contents.states(topics)

    def describe(self, topic: str) -> TopicDescription:
        """A topic's partitions and settings with the source of each."""
        return self.contents.describe(topic)

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, Any] | None = None,
        *,
        if_not_exists: bool = False,
    ) -> TopicDescription:
        """Make a topic, and the log folder where there is none yet."""
        self._require_writable()
        with self._guard:
            if not (if_not_exists and name in self.topics()):
                self.contents.initialise()
                self._owned.keep_brokers_out()
                _create(self, name, partitions, config or {})
            return self.describe(name)

    def alter_topic(
        self, name: str, set: Mapping[str, Any] | None = None, unset: Iterable[str] = ()
    ) -> TopicDescription:
        """Change settings; `unset` gives some back to the broker's or default value."""
        self._require_writable()
        with self._guard:
            self._owned.keep_brokers_out()
            _alter(self, name, set or {}, tuple(unset))
            self._owned.take_settings()
            return self.describe(name)

    def record_encoding(self, name: str, encoding: Mapping[str, Any]) -> None:
        """Record what a topic's keys and values are, in the catalog; `describe(name).encoding` has it."""
        self._require_writable()
        with self._guard:
            self._owned.keep_brokers_out()
            _record_encoding(self, name, encoding)

    def add_partitions(self, name: str, total: int) -> TopicDescription:
        """Give a topic more partitions; keys written from now on may go elsewhere than before."""
        self._require_writable()
        with self._guard:
            self._owned.keep_brokers_out()
            _add_partitions(self, name, total)
            return self.describe(name)

    def delete_topic(self, name: str) -> None:
        """Remove a topic and all its records; refused while another process writes to it."""
        self._require_writable()
        with self._guard:
            description = self.describe(name)
            for number in description.partition_numbers:
                self.release(name, number)
            self._owned.keep_brokers_out()
            _delete(self, name)

    def delete_records(self, topic: str, partition: int, before: int) -> int:
        """Hide a partition's records below offset `before` (-1: all) from readers; the new log start offset.

        Retention then removes the log segments that lie wholly below it.
        """
        return self.partition(topic, partition).delete_records_before(before)

    # -- records ---------------------------------------------------------------------------------

    @overload
    def writer(self, topic: str, *, integrity: Literal[False] = False, **settings: Any) -> Writer: ...

    @overload
    def writer(self, topic: str, *, integrity: Literal[True] | Mapping[str, Any], **settings: Any) -> Any: ...

    def writer(self, topic: str, *, integrity: bool | Mapping[str, Any] = False, **settings: Any) -> Any:
        """A `Writer` of Arrow tables; its keyword arguments are `Writer`'s.

        With `integrity=True`, or a mapping of `Sender`'s settings, a `Sender` around it, which numbers and
        check-sums every record.
        """
        from tidegate.log.access.writer import Writer

        self._require_writable()
        writer = Writer(self, topic, **settings)
        if integrity is False:
            return writer
        return numbered(writer, integrity, clock=self.clock, randomness=self.randomness)

    def reader(
        self,
        topic: str,
        partitions: Sequence[int] | None = None,
        *,
        start: StartLike = "earliest",
        stop: StartLike | None = None,
        **settings: Any,
    ) -> Reader:
        """A `Reader` of Arrow batches; it needs no lock and works beside any writer."""
        from tidegate.log.access.reader import Reader

        return Reader(self, topic, partitions, start=start, stop=stop, **settings)

    def partition(self, topic: str, partition: int) -> PartitionLog:
        """The partition's log, open for writing by this process alone until `close` or `release`."""
        return self.open_partition(topic, partition).log

    def open_partition(self, topic: str, partition: int) -> OpenPartition:
        """Open a partition for writing, or find it open."""
        self._require_writable()
        return self._owned.get(TopicPartition(topic, partition))

    @contextmanager
    def borrowed(self, topic: str, partition: int) -> Iterator[PartitionLog | None]:
        """The partition's log for a while, closed afterwards unless it was open or was asked for meanwhile.

        None when another process writes it, or the topic is gone.
        """
        self._require_writable()
        with self._owned.borrowed(TopicPartition(topic, partition)) as log:
            yield log

    def offset_for_time(self, topic: str, partition: int, time_ms: int) -> int | None:
        """The first offset of a record as new as that; None where there is none."""
        view = self.view(topic, partition)
        return view.offset_for_time(time_ms, view.bounds())

    def view(
        self, topic: str, partition: int, *, description: TopicDescription | None = None
    ) -> PartitionView:
        """The partition as readers see it; `description` spares asking the catalog again."""
        description = self.describe(topic) if description is None else description
        if partition not in description.partition_numbers:
            raise no_partition(description, partition)
        return PartitionView(
            self.files,
            self.clock,
            self.path / partition_folder_name(topic, partition),
            topic=topic,
            partition=partition,
            config=description.config,
            is_foreign=description.assumed,
        )

    def compacted_below(self, topic: str, partition: int) -> CompactedBelow:
        """Called, it answers the offset below which compaction may have removed records of the partition."""
        is_foreign = self.describe(topic).assumed
        return CompactedBelow(self.path, topic, partition, is_foreign)

    def partition_rows(self, topic: str) -> list[dict[str, int]]:
        """What `describe` shows of each partition: offsets readers may see, log segments, bytes."""
        rows = []
        description = self.describe(topic)
        for number in description.partition_numbers:
            view = self.view(topic, number, description=description)
            bounds, sizes = view.bounds(), view.segment_sizes()
            rows.append(
                {
                    "partition": number,
                    "log_start": bounds.log_start,
                    "high_watermark": bounds.high_watermark,
                    "segments": len(sizes),
                    "bytes": sum(size for _, size in sizes),
                }
            )
        return rows

    # -- life ------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Scheduler:
        """Where delayed work of this log runs; a thread of its own unless one was handed in."""
        with self._guard:
            if self._scheduler is None:
                self._scheduler = ThreadScheduler(self.clock)
            return self._scheduler

    @property
    def open_partitions(self) -> list[PartitionLog]:
        """The logs this process is writing."""
        return self._owned.logs

    def idle_partitions(self) -> list[TopicPartition]:
        """The partitions of all topics that this process is not writing."""
        return self._owned.idle()

    def refresh(self) -> None:
        """Take over settings that another process changed; looks at most once a second."""
        with self._guard:
            now_ms = self.clock.monotonic_ms()
            if now_ms - self._refreshed_ms >= _REFRESH_MS:
                self._refreshed_ms = now_ms
                found = self.files.stat(self.contents.catalog_path)
                seen = None if found is None else found.version
                if seen != self._catalog_seen:
                    self._catalog_seen = seen
                    self._owned.take_settings()

    def release(self, topic: str, partition: int) -> None:
        """Close one partition properly, so that another process may write it."""
        self._owned.release(TopicPartition(topic, partition))

    def close(self) -> None:
        """Close every partition cleanly and let go of the folder; fine to call twice."""
        if os.getpid() != self._owner_pid:
            self._owned.abandon()  # the parent closes
            return
        with self._guard:
            if self._closed:
                return
            self._closed = True
        with ExitStack() as last_to_first:
            if self._owns_scheduler and self._scheduler is not None:
                last_to_first.callback(self._scheduler.close)
            last_to_first.callback(self._owned.release_all)
            if self._maintenance is not None:
                last_to_first.callback(self._maintenance.close)

    # -- inside ----------------------------------------------------------------------------------

    def _require_writable(self) -> None:
        if os.getpid() != self._owner_pid:
            raise ConflictError(
                f"{self.path} was opened by process {self._owner_pid} and this is its fork; open it again "
                f"in the child process"
            )
        if self._closed:
            raise InvalidError(f"{self.path} is closed; open the log again")
        if self.read_only:
            raise InvalidError(f"{self.path} was opened with read_only=True; open it without to change it")
        if self.contents.is_foreign():
            raise ConflictError(
                f"{self.path} holds Kafka data that Tidegate did not create, so it is only read; write to "
                f"another folder, or through its broker with kafka://HOST:PORT"
            )

    def _start_maintenance(self) -> None:
        from tidegate.log.cleaning.maintenance import Maintenance

        self._require_writable()
        self.contents.initialise()
        self._maintenance = Maintenance(self)
        self._maintenance.start()
