"""Parse and check the options of the Spark data sources.

Names are compared without regard to case, as Spark does. An unknown option is an error: a misspelt limit that is
silently ignored costs more than a message. Names that begin with one of a source's prefixes (`kafka.`) are passed on
unchanged. The pages `docs/reference/spark-*.md` list all options with their meanings and defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.durations import duration_ms, moment_ms, size_bytes
from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log, folder_path, is_kafka, open_log

if TYPE_CHECKING:
    from tidegate.storage.backends.base import StorageBackend
    from tidegate.tables.serdes.base import Serde


class GivenOptions:
    """The options one user gave to one source."""

    def __init__(
        self,
        options: Mapping[str, str],
        names: tuple[str, ...],
        *,
        source: str,
        aliases: Mapping[str, str] | None = None,
        prefixes: tuple[str, ...] = (),
    ) -> None:
        self._spelling = {name.lower(): name for name in names}
        self._given: dict[str, str] = {}
        self._prefixed: dict[str, str] = {}
        for name, value in options.items():
            key = name.lower()
            if key.startswith(prefixes):
                self._prefixed[key] = value
                continue
            if key not in self._spelling:
                near = get_close_matches(key, list(self._spelling), n=1)
                hint = f"did you mean {self._spelling[near[0]]}?" if near else f"there are {', '.join(names)}"
                raise InvalidError(f"the {source} has no option {name!r}; {hint}")
            key = (aliases or {}).get(key, key)
            if self._given.get(key, value) != value:
                raise InvalidError(
                    f"option {self._spelling[key]} is given twice, as {self._given[key]!r} and {value!r}"
                )
            self._given[key] = value

    def text(self, name: str) -> str | None:
        """Return the option's text; None if it was not given."""
        return self._given.get(name.lower())

    def required(self, name: str, example: str) -> str:
        found = self.text(name)
        if not found:
            raise InvalidError(f"option {name} is missing: {example}")
        return found

    def below(self, prefix: str) -> dict[str, str]:
        """Return the options of a prefix, without it."""
        return {
            key.removeprefix(prefix): value for key, value in self._prefixed.items() if key.startswith(prefix)
        }

    def moment(self, name: str) -> int | None:
        """Return a time as epoch milliseconds, given as such or as ISO 8601."""
        text = self.text(name)
        if text is None:
            return None
        return moment_ms(int(text) if text.strip().lstrip("-").isdecimal() else text)

    def count(self, name: str, *, least: int = 1) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not text.strip().isdecimal() or int(text) < least:
            raise InvalidError(f"{name}={text!r} is not a whole number of at least {least}")
        return int(text)

    def size(self, name: str) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        size = size_bytes(text)
        if size < 1:
            raise InvalidError(f"{name}={text!r} would read nothing; give at least 1")
        return size

    def duration(self, name: str, default: str) -> int:
        """Return a duration in milliseconds."""
        return duration_ms(self.text(name) or default)

    def flag(self, name: str, *, default: bool) -> bool:
        text = self.text(name)
        if text is None:
            return default
        if text.strip().lower() not in ("true", "false"):
            raise InvalidError(f"{name}={text!r} is neither true nor false")
        return text.strip().lower() == "true"

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return one of the words; by default the first."""
        text = (self.text(name) or allowed[0]).strip().lower()
        if text not in allowed:
            raise InvalidError(f"{name}={text!r} is none of {', '.join(allowed)}")
        return text

    def words(self, name: str) -> tuple[str, ...]:
        """Return several words, separated by commas; each once."""
        text = self.text(name) or ""
        return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


# -- options of the sink --------------------------------------------------------------------------

SINK_NAMES = (
    *("log", "path", "topic", "outbox", "writeId", "compression", "checksum", "lockTimeout"),
    *("checkpointLocation", "queryName"),  # Spark's own, which are passed to the sink as well
)
KAFKA = "kafka."
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
_CHECKSUMS = ("adhash2", "adhash", "none")


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of the sink."""

    log: str
    topic: str
    outbox: Path
    write_id: str | None = None
    compression: str | None = None
    checksum: str = _CHECKSUMS[0]
    lock_timeout_ms: int = 30_000
    client: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        given = GivenOptions(
            options, SINK_NAMES, source="tidegate sink", aliases={"path": "log"}, prefixes=(KAFKA,)
        )
        log = log_address(given.required("log", "the log's folder, as in .option('log', './data/log')"))
        topic = given.required("topic", "the topic to append to, as in .option('topic', 'orders')")
        outbox, write_id = given.text("outbox"), given.text("writeId")
        if outbox is None and is_kafka(log):
            raise InvalidError(
                "option outbox is missing: rows wait there until a micro-batch is complete, so it must be a folder "
                "that the driver and all executors share, as in .option('outbox', '/shared/outbox')"
            )
        if write_id is not None and not _ID.match(write_id):
            raise InvalidError(f"writeId={write_id!r}: use letters, digits, '.', '_' and '-', at most 100")
        return cls(
            log=log,
            topic=topic,
            outbox=Path(f"{log}.outbox") if outbox is None else Path(outbox).absolute(),
            write_id=write_id,
            compression=given.text("compression"),
            checksum=given.one_of("checksum", _CHECKSUMS),
            lock_timeout_ms=given.duration("lockTimeout", "30s"),
            client=given.below(KAFKA),
        )

    def open(self, files: Files | None = None) -> Log | KafkaLog:
        """Open the log for writing."""
        return open_log(self.log, client=self.client, files=files)

    def partition_count(self) -> int:
        """Return the topic's number of partitions; `InvalidError` if it does not exist."""
        with open_log(self.log, client=self.client, read_only=True) as log:
            if isinstance(log, Log):
                return log.describe(self.topic).partitions
            with log.reader(self.topic) as reader:  # its error for unknown topics has a hint
                return len(reader.partitions)


def log_address(text: str) -> str:
    """Return a Kafka cluster's address unchanged, a folder's as an absolute path."""
    return text if is_kafka(text) else str(folder_path(text).absolute())


# -- options of topics ----------------------------------------------------------------------------

_NAMES = (
    *("log", "path", "topic", "subscribe", "startingOffsets", "endingOffsets"),
    *("startingTimestamp", "endingTimestamp", "maxRecordsPerTrigger", "maxOffsetsPerTrigger"),
    *("maxBytesPerTrigger", "minPartitions", "failOnDataLoss", "isolation"),
    *("controlRecords", "verdicts", "verdictState"),
)
_ALIASES = {"path": "log", "subscribe": "topic", "maxoffsetspertrigger": "maxrecordspertrigger"}
ISOLATIONS = ("read_uncommitted", "read_committed")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of the topic source; None if not given."""

    log: str
    topics: tuple[str, ...]
    starting_offsets: str | None = None
    ending_offsets: str | None = None
    starting_timestamp: int | None = None
    ending_timestamp: int | None = None
    max_records: int | None = None
    max_bytes: int | None = None
    min_partitions: int = 0
    fail_on_data_loss: bool = True
    isolation: str = "read_uncommitted"
    control_records: bool = False
    verdicts: bool = False
    verdict_state: Path | None = None
    client: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parse every option of a `DataSource`, and check each one and their combination."""
        given = GivenOptions(options, _NAMES, source="tidegate source", aliases=_ALIASES, prefixes=(KAFKA,))
        log = log_address(given.required("log", "the folder of the log, as in .option('log', './data/log')"))
        topics = given.words("topic")
        if not topics:
            raise InvalidError("option topic is missing: a topic, or several with commas between")
        verdict_state = given.text("verdictState")
        found = cls(
            log=log,
            topics=topics,
            starting_offsets=given.text("startingOffsets"),
            ending_offsets=given.text("endingOffsets"),
            starting_timestamp=given.moment("startingTimestamp"),
            ending_timestamp=given.moment("endingTimestamp"),
            max_records=given.count("maxRecordsPerTrigger"),
            max_bytes=given.size("maxBytesPerTrigger"),
            min_partitions=given.count("minPartitions") or 0,
            fail_on_data_loss=given.flag("failOnDataLoss", default=True),
            isolation=given.one_of("isolation", ISOLATIONS),
            control_records=given.flag("controlRecords", default=False),
            verdicts=given.flag("verdicts", default=False),
            verdict_state=None if verdict_state is None else Path(verdict_state).absolute(),
            client=given.below(KAFKA),
        )
        found._check()
        return found

    def _check(self) -> None:
        if self.starting_offsets is not None and self.starting_timestamp is not None:
            raise InvalidError("startingOffsets and startingTimestamp both say where to start; keep one")
        if self.ending_offsets is not None and self.ending_timestamp is not None:
            raise InvalidError("endingOffsets and endingTimestamp both say where to end; keep one")
        if self.client and not self.is_kafka:
            name = next(iter(self.client))
            raise InvalidError(f"kafka.{name} is a setting of the Kafka client, but {self.log} is a folder")
        if self.max_bytes is not None and self.is_kafka:
            raise InvalidError(
                "maxBytesPerTrigger counts the bytes of a log folder; for a cluster use maxRecordsPerTrigger"
            )
        if self.verdicts and self.min_partitions:
            raise InvalidError(
                "verdicts are given in a partition's order, so minPartitions cannot cut partitions; leave it out"
            )
        if self.verdict_state is not None and not self.verdicts:
            raise InvalidError("verdictState is of use with verdicts=true only")

    @property
    def is_kafka(self) -> bool:
        return is_kafka(self.log)

    def check_streaming(self) -> None:
        """Refuse an end for a stream, and triggers for a batch."""
        if self.ending_offsets is not None or self.ending_timestamp is not None:
            raise InvalidError("a stream does not end: endingOffsets and endingTimestamp are for spark.read")


# -- options of tables ----------------------------------------------------------------------------

TABLE_NAMES = (
    *("state", "path", "table", "key", "value", "columns"),
    *("versionAsOf", "timestampAsOf", "batchRows", "cache"),
)
STORAGE = "storage."
BATCH_ROWS = 1 << 16


def _key_of_this_process() -> str:
    from tidegate.storage import state_key_id

    return state_key_id()


@dataclass(frozen=True, slots=True)
class TableOptions:
    """The options of the table source; None if not given."""

    state: str
    table: str | None = None
    key: str | None = None
    value: str | None = None
    columns: tuple[str, ...] = ()
    version: int | None = None
    moment_ms: int | None = None
    batch_rows: int = BATCH_ROWS
    cache: str | None = None
    storage: Mapping[str, str] = field(default_factory=dict)
    key_id: str = field(default_factory=_key_of_this_process)
    """The key that the state is verified with, as the driver has it; empty where it has none."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> TableOptions:
        given = GivenOptions(
            options,
            TABLE_NAMES,
            source="tidegate.table source",
            aliases={"path": "state"},
            prefixes=(STORAGE,),
        )
        found = cls(
            state=_address(
                given.required("state", "where the table is kept, as in .option('state', './data/state')")
            ),
            table=given.text("table"),
            key=given.text("key"),
            value=given.text("value"),
            columns=given.words("columns"),
            version=given.count("versionAsOf"),
            moment_ms=given.moment("timestampAsOf"),
            batch_rows=given.count("batchRows") or BATCH_ROWS,
            cache=given.text("cache"),
            storage=given.below(STORAGE),
        )
        if found.version is not None and found.moment_ms is not None:
            raise InvalidError("versionAsOf and timestampAsOf both choose a commit; keep one")
        return found

    @contextmanager
    def opened(self) -> Iterator[StorageBackend]:
        """The backend, opened until the block ends; it must exist: reading creates nothing."""
        from tidegate.storage import open_backend

        cache = None if self.cache is None else Path(self.cache)
        backend = open_backend(
            self.state, read_only=True, cache=cache, options=self.storage or None, key_id=self.key_id
        )
        try:
            yield backend
        finally:
            backend.close()

    def serde(self, option: str, stored: str) -> Serde[Any]:
        """Return the requested serde, else the stored one if its name is enough, else bytes."""
        from tidegate.tables.serdes.base import Bytes
        from tidegate.tables.serdes.json import require_serde, serde_from

        asked = self.key if option == "key" else self.value
        return require_serde(asked, option) if asked is not None else serde_from(stored) or Bytes()


def is_folder(address: str) -> bool:
    return "://" not in address


def _address(text: str) -> str:
    if text.startswith("memory://"):
        raise InvalidError(
            "a table in memory is seen by its own process alone; keep it in a folder for Spark"
        )
    if text.startswith("file:///"):
        return text.removeprefix("file://")
    return str(Path(text).absolute()) if is_folder(text) else text
