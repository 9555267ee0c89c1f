"""The options of writing with `format("tidegate")`, read and checked before anything is opened.

| option | means | default |
|---|---|---|
| `log` (or the path given to `save`) | the log's folder, or `kafka://host:port` | required |
| `topic` | the topic, which must exist | required |
| `outbox` | a folder that the driver and all executors share | `<log>.outbox` beside a log folder |
| `writeId` | batch only: a repeat of this write under the same name adds nothing | |
| `compression` | of the stored batches: none, gzip, snappy, lz4, zstd | the topic's |
| `checksum` | of chains: adhash2, adhash, none | `adhash2` |
| `lockTimeout` | how long to wait for another writer of the topic | `30s` |
| `kafka.…` | settings of the Kafka client, as `kafka.security.protocol` | |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log, folder_path, is_kafka, open_log
from tidegate.spark.options import GivenOptions

NAMES = (
    *("log", "path", "topic", "outbox", "writeId", "compression", "checksum", "lockTimeout"),
    *("checkpointLocation", "queryName"),  # Spark's own, which reach the sink as well
)
KAFKA = "kafka."
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
_CHECKSUMS = ("adhash2", "adhash", "none")


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """What the user asked for."""

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
            options, NAMES, source="tidegate sink", aliases={"path": "log"}, prefixes=(KAFKA,)
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
        """The log, for writing."""
        return open_log(self.log, client=self.client, files=files)

    def partition_count(self) -> int:
        """How many partitions the topic has now; `InvalidError` when there is no such topic."""
        with open_log(self.log, client=self.client, read_only=True) as log:
            if isinstance(log, Log):
                return log.describe(self.topic).partitions
            with log.reader(self.topic) as reader:  # names unknown topics with a hint
                return len(reader.partitions)


def log_address(text: str) -> str:
    """A Kafka cluster's address as it is, a folder's as an absolute path."""
    return text if is_kafka(text) else str(folder_path(text).absolute())
