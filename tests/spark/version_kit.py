"""What tests of one version's ingest on Spark share: its topic written record by record, and the job over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from msgspec.structs import replace

from stamped_streams import NOW, Pen, Row
from tidegate.integrity.header import ChecksumType
from tidegate.integrity.sender import SCHEMA
from tidegate.integrity.state import Manifest, Sent, decode_state
from tidegate.log.log import Log
from tidegate.spark.push import ingest_on_spark
from tidegate.storage import open_backend
from tidegate.tables.commits import load_commits
from tidegate.tables.queries import all_rows
from tidegate.tables.rows import StoredForm
from tidegate.tables.snapshot import EARLIEST
from tidegate.tables.versions.catalog import State, TableVersion, Versions
from tidegate.tables.versions.ingest import Ingested
from tidegate.tables.versions.reader import VersionSnapshot, view_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Script:
    """One partition of a push: the driver's records, and those of the task that sends rows."""

    def __init__(self, kind: ChecksumType = ChecksumType.ADHASH2, time: int = NOW) -> None:
        self.driver, self.task = Pen(9, time=time), Pen(1, kind, time)
        self.head = [self.driver.start(), self.driver.start_push()]

    def sent(self, pen: Pen | None = None) -> Sent:
        pen = pen or self.task
        return Sent(pen.guid, pen.chain, pen.sequence - 1, pen.checksum, pen.data)

    def tail(self, *more: Sent) -> list[Row]:
        listed = sorted((self.sent(), *more), key=lambda sent: sent.guid)
        return [self.driver.end_push(Manifest(tuple(listed))), self.driver.end()]

    def whole(self, rows: Sequence[Row], *more: Sent) -> list[Row]:
        return [*self.head, *rows, *self.tail(*more)]


def write(log: Log, topic: str, partition: int, rows: Sequence[Row]) -> None:
    columns = {
        "key": [row.key for row in rows],
        "value": [row.value for row in rows],
        "headers": [row.headers for row in rows],
        "timestamp": [row.time for row in rows],
    }
    table = pa.table({name: pa.array(columns[name], SCHEMA.field(name).type) for name in SCHEMA.names})
    with log.writer(topic) as writer:
        writer.write(table, partition=partition)


@dataclass(frozen=True)
class Job:
    """One ingest on Spark: the version, and what became of each partition."""

    folder: Path
    version: TableVersion
    done: dict[int, Ingested]

    def stored(self) -> list[tuple[str, str]]:
        """The rows of all partitions; read as if the version were ready, which with a fault it never is."""
        with self._view() as view:
            rows = pa.Table.from_batches(list(all_rows(view.source, EARLIEST, batch_rows=1 << 16)))
            found = StoredForm(view.source.rules).typed(rows).to_pylist()
        return sorted((row["key"], row["value"]) for row in found)

    def drained(self, partition: int) -> int:
        """The offset that the validation state in a partition's last commit goes on from."""
        with self._view() as view:
            return decode_state(view.source.partitions[partition].drainer).next_offset

    @contextmanager
    def _view(self) -> Iterator[VersionSnapshot]:
        backend = open_backend(str(self.folder / "state"))
        view = view_version(backend, replace(self.version, state=State.READY))
        try:
            yield view
        finally:
            view.close()
            backend.close()

    def commits(self, partition: int) -> list[int]:
        found = load_commits(open_backend(str(self.folder / "state")), self.version.shape(partition).name)
        return [] if found is None else [commit.positions[partition] for commit in found[0].commits]


def made(folder: Path, table: str, partitions: int, settings: dict[str, Any] | None = None) -> TableVersion:
    """A version that is being pushed, and its topic."""
    backend = open_backend(str(folder / "state"))
    version = Versions(backend, table).create(
        f"push-{table}", partitions=partitions, key_serde="String()", value_serde="String()"
    )
    backend.close()
    with Log(folder / "log", durability="os") as log:
        log.create_topic(version.topic, partitions, settings or {})
    return version


def ingested(spark: SparkSession, folder: Path, version: TableVersion) -> Job:
    found = ingest_on_spark(spark, str(folder / "log"), str(folder / "state"), version)
    return Job(folder, version, {each.result.partition: each for each in found})
