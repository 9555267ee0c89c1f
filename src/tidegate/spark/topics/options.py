"""The options of reading with `format("tidegate")`, read and checked before anything is opened.

| option | means | default |
|---|---|---|
| `log` (or the path given to `load`) | the log's folder, or `kafka://host:port` | required |
| `topic`, or `subscribe` | one topic; or several with commas between | required |
| `startingOffsets` | `earliest`, `latest`, or JSON per partition | `earliest` |
| `endingOffsets` | the same, exclusive; batch only | `latest` |
| `startingTimestamp` | instead: from the first record at or after this moment | |
| `endingTimestamp` | instead: up to the first record at or after it; batch only | |
| `maxRecordsPerTrigger` | at most so many offsets a micro-batch (also `maxOffsetsPerTrigger`) | no limit |
| `maxBytesPerTrigger` | at most so many stored bytes a micro-batch (`64MiB`); log folders only | no limit |
| `minPartitions` | cut the ranges into at least so many Spark tasks | one per partition |
| `failOnDataLoss` | stop when records that were not read yet are gone | `true` |
| `isolation` | or `read_committed`, which hides open and aborted transactions | `read_uncommitted` |
| `controlRecords` | show Tidegate's own control records too | `false` |
| `verdicts` | add the column `verdict`: what integrity validation says of each record | `false` |
| `verdictState` | a shared folder where streams keep validation's state | from the log's start each time |
| `kafka.…` | settings of the Kafka client, as `kafka.security.protocol` | |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.errors import InvalidError
from tidegate.log.log import is_kafka
from tidegate.spark.options import GivenOptions
from tidegate.spark.sink.options import KAFKA, log_address

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
    """What the user asked for. None means not asked for."""

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
        """Every option of a `DataSource`, checked one by one and against each other."""
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
        """A stream has no end, and a batch no triggers."""
        if self.ending_offsets is not None or self.ending_timestamp is not None:
            raise InvalidError("a stream does not end: endingOffsets and endingTimestamp are for spark.read")
