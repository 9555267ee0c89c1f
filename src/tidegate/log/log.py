"""`Log`: a folder of topics on local disk; and `open_log`, which opens a folder or a Kafka cluster by URL.

`Log` creates, describes, alters and deletes topics, opens partitions for writing, and makes readers and writers.
`Log` and `KafkaLog` share `topics`, `describe`, `partition_rows`, `create_topic`, `alter_topic`, `add_partitions`,
`delete_topic`, `writer`, `reader` and `close`, and are context managers. With `integrity=True` the `integrity`
package, imported inside functions, wraps writers.

L1  nothing is created, locked or changed until something is written; reading changes no file.
L2  a folder without Tidegate's catalog is foreign: it can only be read.
L3  a log belongs to the process that opened it; after a fork, open it again in the child.
T1  a topic is listed only when all its partition folders exist; folders left by an interrupted creation
    hold no records and are reused.
T2  a deleted topic leaves the catalog first, its folders listed as `removing`; then they are renamed
    `…-delete`, then removed. The next change of the catalog finishes what a crash interrupted.

Thread rule: a `Log` may be shared by threads; each partition is opened once and has its own lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, overload
from urllib.parse import unquote, urlsplit

from tidegate.clock import Clock, SystemClock
from tidegate.durations import format_size
from tidegate.errors import ConflictError, InvalidError, TidegateError
from tidegate.files import Files
from tidegate.log.catalog import (
    Catalog,
    LogFolder,
    TopicDescription,
    TopicEntry,
    TopicPartition,
    TopicState,
    check_partition_count,
    check_topic_name,
    deleted_folder_name,
    is_deleted_folder,
    parse_folder_name,
    partition_folder_name,
    require_folder,
)
from tidegate.log.checkpoints import (
    CompactedBelow,
    TopicId,
    drop_from_checkpoints,
    last_segment_base,
    read_topic_id,
    write_topic_id,
)
from tidegate.log.locks import changing_folder, lock_partition
from tidegate.log.open_partitions import OpenPartition, OwnedPartitions, no_partition
from tidegate.log.partition_reader import PartitionView
from tidegate.log.topic_config import TopicConfig
from tidegate.metrics import Metrics
from tidegate.notebook import SHOWN_ROWS, facts_html, grid_html, grid_text
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.scheduling import Scheduler, ThreadScheduler

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.log.kafka.log import KafkaLog
    from tidegate.log.maintenance import Maintenance
    from tidegate.log.partition import PartitionLog
    from tidegate.log.reader import Reader, StartLike
    from tidegate.log.writer import Writer


LOOKED_AT: Final = 64
COLUMNS: Final = ("topic", "partitions", "offsets", "bytes")


def _rows(log: Log) -> list[list[Any]]:
    """Return one row for each of the first topics; cells that cannot be read, or only slowly, are empty."""
    rows: list[list[Any]] = []
    left = LOOKED_AT
    for topic, partitions in list(log.partition_counts().items())[:SHOWN_ROWS]:
        offsets: Any = None
        size: Any = None
        left -= partitions
        if left >= 0:
            try:
                known = log.partition_rows(topic)
                offsets = sum(row["high_watermark"] - row["log_start"] for row in known)
                size = format_size(sum(row["bytes"] for row in known))
            except (TidegateError, OSError) as error:  # deleted meanwhile, or damaged: display never fails
                size = str(error)
        rows.append([topic, partitions, offsets, size])
    return rows


def numbered(writer: Any, integrity: bool | Mapping[str, Any], **ports: Any) -> Any:
    """Return a `Sender` around `writer`; a mapping holds the sender's settings."""
    settings = {} if isinstance(integrity, bool) else dict(integrity)
    return import_module("tidegate.integrity.sender").Sender(writer, **{**ports, **settings})


def data_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the records of a batch without Tidegate's control records (chain and push boundaries, heartbeats)."""
    if not len(batch.column("headers").flatten()):
        return batch
    data: pa.RecordBatch = import_module("tidegate.integrity.columns").without_control(batch)
    return data


def _make_folder(files: Files, folder: Path, topic_id: TopicId) -> None:
    found = files.stat(folder)
    if found is not None:
        place = parse_folder_name(folder.name)
        if place is not None:
            require_folder(files, folder, place)
        if last_segment_base(files, folder) is not None:
            raise ConflictError(
                f"{folder} holds records of a topic that is not in the catalog; move it out of the log or "
                f"choose another name"
            )
        if read_topic_id(folder, files=files) not in (None, topic_id):
            _remove_folder(files, folder)  # left by an interrupted creation
    files.mkdir(folder)
    write_topic_id(folder, topic_id, files=files)


def _finish_removals(log: Log, catalog: Catalog) -> Catalog:
    """Rename and remove the folders of deleted topics, then drop them from the catalog (T2)."""
    files, gone = log.files, []
    for name in catalog.removing:
        place = parse_folder_name(name)
        if place is None:
            continue
        gone.append(place)
        if files.exists(log.path / name):
            files.rename(log.path / name, log.path / deleted_folder_name(*place, log.randomness.uuid().hex))
            files.sync_folder(log.path)
    for name in files.list(log.path):
        if is_deleted_folder(name):
            _remove_folder(files, log.path / name)
    drop_from_checkpoints(files, log.path, gone)
    finished = replace(catalog, removing=())
    log.contents.write(finished)
    return finished


def _remove_folder(files: Files, folder: Path) -> None:
    """Remove a partition folder, which holds only files; a symbolic link is removed, not followed."""
    found = files.stat(folder)
    if found is None or not found.is_folder:
        return
    for name in files.list(folder):
        files.unlink(folder / name, missing_ok=True)
    files.rmdir(folder)


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
        facts = {
            "folder": self.path,
            "durability": self.durability,
            "opened": "to read" if self.read_only else None,
        }
        topics = grid_html(COLUMNS, _rows(self), total=len(self.topics()), noun="topics")
        return facts_html("log", facts) + topics

    def show(self) -> None:
        """Print a table of the first topics."""
        print(grid_text(COLUMNS, _rows(self), total=len(self.topics())))

    # -- topics ----------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return [description.name for description in self.contents.describe_all()]

    def partition_counts(self) -> dict[str, int]:
        """Return topic → number of partitions."""
        return {description.name: description.partitions for description in self.contents.describe_all()}

    def topic_states(self, topics: Iterable[str]) -> dict[str, TopicState]:
        """Return the id and the number of partitions of each given topic that exists."""
        return self.contents.states(topics)

    def describe(self, topic: str) -> TopicDescription:
        """Return a topic's partitions and its settings, each with its source."""
        return self.contents.describe(topic)

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, Any] | None = None,
        *,
        if_not_exists: bool = False,
    ) -> TopicDescription:
        """Create a topic, and the log folder if there is none."""
        self._require_writable()
        with self._guard:
            if not (if_not_exists and name in self.topics()):
                self.contents.initialise()
                self._create_topic(name, partitions, config or {})
            return self.describe(name)

    def _create_topic(self, name: str, partitions: int, config: Mapping[str, Any]) -> None:
        """Make the folders, then list the topic (T1)."""
        with self._changing() as catalog:
            check_topic_name(name)
            check_partition_count(partitions)
            checked = TopicConfig.of(config, broker=self.contents.broker_config())
            if name in catalog.topics:
                raise ConflictError(
                    f"topic {name} exists already with {catalog.topics[name].partitions} partitions; alter it, "
                    f"or create it with --if-not-exists",
                    kafka_name="TOPIC_ALREADY_EXISTS",
                )
            if not self.contents.is_ours():
                self.contents.write(catalog)  # first: partition folders without a catalog look foreign
            topic_id = TopicId.random(self.randomness)
            for number in range(partitions):
                _make_folder(self.files, self.path / partition_folder_name(name, number), topic_id)
            entry = TopicEntry(str(topic_id), partitions, checked.overrides())
            self.contents.write(catalog.with_topic(name, entry))

    def alter_topic(
        self, name: str, set: Mapping[str, Any] | None = None, unset: Iterable[str] = ()
    ) -> TopicDescription:
        """Change settings of a topic; `unset` resets settings to the broker's value or the default."""
        with self._changing() as catalog:
            entry, broker = catalog.entry(name), self.contents.broker_config()
            before = TopicConfig.of(entry.config, broker=broker)
            altered = before.altered(set or {}, unset=tuple(unset), broker=broker)
            self.contents.write(catalog.with_topic(name, replace(entry, config=altered.overrides())))
        self._owned.take_settings()
        return self.describe(name)

    def record_encoding(self, name: str, encoding: Mapping[str, Any]) -> None:
        """Record the encoding of a topic's keys and values in the catalog; read it with `describe(name).encoding`."""
        with self._changing() as catalog:
            self.contents.write(catalog.with_topic(name, replace(catalog.entry(name), encoding=encoding)))

    def add_partitions(self, name: str, total: int) -> TopicDescription:
        """Add partitions to a topic; records with the same key may be written to another partition than before."""
        with self._changing() as catalog:
            check_partition_count(total)
            entry = catalog.entry(name)
            if total <= entry.partitions:
                raise InvalidError(
                    f"topic {name} has {entry.partitions} partitions; a topic can only get more, not {total}",
                    kafka_name="INVALID_PARTITIONS",
                )
            for number in range(entry.partitions, total):  # first the folders, then the catalog (T1)
                folder = self.path / partition_folder_name(name, number)
                _make_folder(self.files, folder, TopicId.parse(entry.topic_id))
            self.contents.write(catalog.with_topic(name, replace(entry, partitions=total)))
        return self.describe(name)

    def delete_topic(self, name: str) -> None:
        """Remove a topic and all its records; refused while another process writes to it."""
        self._require_writable()
        with self._guard:
            for number in self.describe(name).partition_numbers:
                self.release(name, number)
            with self._changing() as catalog, ExitStack() as locks:
                places = [TopicPartition(name, number) for number in range(catalog.entry(name).partitions)]
                for place in places:
                    folder = self.path / str(place)
                    if self.files.exists(folder):
                        require_folder(self.files, folder, place)
                        locks.enter_context(lock_partition(self.files, folder, self.clock))
                unlisted = catalog.without_topic(name, [str(place) for place in places])
                self.contents.write(unlisted)
                _finish_removals(self, unlisted)

    def delete_records(self, topic: str, partition: int, before: int) -> int:
        """Hide a partition's records below offset `before` (-1: all) from readers; return the new log start offset.

        Retention then removes the log segments that lie wholly below it.
        """
        return self.partition(topic, partition).delete_records_before(before)

    # -- records ---------------------------------------------------------------------------------

    @overload
    def writer(self, topic: str, *, integrity: Literal[False] = False, **settings: Any) -> Writer: ...

    @overload
    def writer(self, topic: str, *, integrity: Literal[True] | Mapping[str, Any], **settings: Any) -> Any: ...

    def writer(self, topic: str, *, integrity: bool | Mapping[str, Any] = False, **settings: Any) -> Any:
        """Return a `Writer` of Arrow tables; keyword arguments are passed to `Writer`.

        With `integrity=True`, or a mapping of `Sender`'s settings, return a `Sender` around that writer. It numbers
        and checksums every record.
        """
        from tidegate.log.writer import Writer

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
        """Return a `Reader` of Arrow batches; it takes no lock and may run next to any writer."""
        from tidegate.log.reader import Reader

        return Reader(self, topic, partitions, start=start, stop=stop, **settings)

    def partition(self, topic: str, partition: int) -> PartitionLog:
        """Return the partition's log, opened for writing by this process alone until `close` or `release`."""
        return self.open_partition(topic, partition).log

    def open_partition(self, topic: str, partition: int) -> OpenPartition:
        """Open a partition for writing, or return it if it is open already."""
        self._require_writable()
        return self._owned.get(TopicPartition(topic, partition))

    @contextmanager
    def borrowed(self, topic: str, partition: int) -> Iterator[PartitionLog | None]:
        """Yield the partition's log; close it afterwards unless it was open before or was opened meanwhile.

        Yield None when another process writes the partition, or the topic is gone.
        """
        self._require_writable()
        with self._owned.borrowed(TopicPartition(topic, partition)) as log:
            yield log

    def offset_for_time(self, topic: str, partition: int, time_ms: int) -> int | None:
        """Return the first offset whose timestamp is at or after `time_ms`; None if there is none."""
        view = self.view(topic, partition)
        return view.offset_for_time(time_ms, view.bounds())

    def view(
        self, topic: str, partition: int, *, description: TopicDescription | None = None
    ) -> PartitionView:
        """Return the partition as readers see it; pass `description` to avoid reading the catalog again."""
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
        """Return a callable that gives the offset below which compaction may have removed records."""
        is_foreign = self.describe(topic).assumed
        return CompactedBelow(self.path, topic, partition, is_foreign)

    def partition_rows(self, topic: str) -> list[dict[str, int]]:
        """Return a row for each partition, as `describe` shows it: visible offsets, number of log segments, bytes."""
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

    # -- lifecycle -------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of this log's delayed work; a thread of its own unless one was passed in."""
        with self._guard:
            if self._scheduler is None:
                self._scheduler = ThreadScheduler(self.clock)
            return self._scheduler

    @property
    def open_partitions(self) -> list[PartitionLog]:
        """The logs that this process has open for writing."""
        return self._owned.logs

    def idle_partitions(self) -> list[TopicPartition]:
        """Return the partitions of all topics that are not open for writing in this process."""
        return self._owned.idle()

    def refresh(self) -> None:
        """Apply settings that another process changed; checks at most once a second."""
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
        """Close one partition cleanly, so that another process may write it."""
        self._owned.release(TopicPartition(topic, partition))

    def close(self) -> None:
        """Close every partition cleanly and release the folder; may be called twice."""
        if os.getpid() != self._owner_pid:
            self._owned.abandon()  # the parent process closes them
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

    @contextmanager
    def _changing(self) -> Iterator[Catalog]:
        """Yield the catalog, read under the folder's short lock, after finishing interrupted removals."""
        self._require_writable()
        with self._guard:
            self._owned.keep_brokers_out()
            with changing_folder(self.files, self.path, self.clock):
                catalog = self.contents.read()
                yield _finish_removals(self, catalog) if catalog.removing else catalog

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
        from tidegate.log.maintenance import Maintenance

        self._require_writable()
        self.contents.initialise()
        self._maintenance = Maintenance(self)
        self._maintenance.start()


_SCHEME = "kafka://"


def is_kafka(url: str) -> bool:
    return url.startswith(_SCHEME)


def open_log(url: str, *, client: Mapping[str, str] | None = None, **settings: Any) -> Log | KafkaLog:
    """Open the log at `url`; `client` holds settings of the Kafka client, `settings` those of `Log`."""
    if is_kafka(url):
        from tidegate.log.kafka.log import KafkaLog

        return KafkaLog(bootstrap_servers(url), client or {})
    if client:
        raise InvalidError(
            f"{next(iter(client))} is a setting of the Kafka client, but {url} is a folder; give "
            f"--log kafka://HOST:PORT, or leave it out"
        )
    return Log(folder_path(url), **settings)


def folder_path(url: str) -> Path:
    """Return the folder that a URL names: a plain path or `file:///…`."""
    if not url:
        raise InvalidError("--log is empty; give a folder or kafka://HOST:PORT")
    if "://" not in url:
        return Path(url).expanduser()
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise InvalidError(f"--log {url}: give a folder, file:///FOLDER or kafka://HOST:PORT")
    return Path(unquote(parts.path))


def bootstrap_servers(url: str) -> str:
    """Return `host:port,host:port` of a `kafka://` URL; the default port is 9092."""
    servers = url.removeprefix(_SCHEME).rstrip("/")
    if not servers or "/" in servers or "@" in servers:
        raise InvalidError(
            f"{url}: write kafka://HOST:PORT or kafka://HOST:PORT,HOST:PORT; user and password belong into "
            f"--command-config FILE"
        )
    return ",".join(server if _has_port(server) else f"{server}:9092" for server in servers.split(","))


def _has_port(server: str) -> bool:
    return server.rpartition(":")[2].isdigit() and not server.endswith("]")
