"""`push(frame, table=…)`: a DataFrame becomes the next version of a table, proven complete, then made current.

    report = push(spark.read.parquet("users"), table="users", key="id", log="./data/log", state="./data/state")

A push has two Spark jobs. The first moves rows into the partition of their key, sorts, numbers and appends them to the
version's topic, one task for each partition; the second reads every partition back, validates it and builds the
version. Between and after them the driver writes (`tables.versions.push`). The jobs run under a name, so that an
interrupted push can cancel them; progress is the share of their tasks that are done. pyspark is imported when called.

Thread rule: one thread for a push, which calls `step`; another thread reports progress. Several pushes may run at
once, also of one table.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.clock import Clock, SystemClock
from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import FencedError, InvalidError, TidegateError, UnavailableError
from tidegate.log.log import is_kafka, open_log
from tidegate.spark.errors import Failure, describe, rebuild
from tidegate.spark.push_rows import ANSWER_DDL, SendOrder, answer_of, row_shape, send_in_task, shaped
from tidegate.storage import open_backend, state_key_id
from tidegate.tables.versions.catalog import Fault, PartitionResult, PushReport, TableVersion, Versions
from tidegate.tables.versions.ingest import Ingested, ingest_partition
from tidegate.tables.versions.push import PushPlan, VersionPush, Watch
from tidegate.waiting import waiting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# -- progress -------------------------------------------------------------------------------------

EVERY_MS: Final = 500


@dataclass(frozen=True, slots=True)
class PushProgress:
    """A snapshot of a push's progress. `done` of `total` are tasks; `left_ms` is None while it is unknown."""

    table: str
    version: int
    step: str
    done: int
    total: int
    records: int
    elapsed_ms: int
    left_ms: int | None

    def to_dict(self) -> dict[str, Any]:
        found = {"doing" if name == "step" else name: value for name, value in asdict(self).items()}
        percent = round(100 * self.done / self.total) if self.total else None
        return {**found, "unit": "tasks", "percent": percent}


class Watcher:
    """Observes a push while it runs, and reports its progress."""

    def __init__(
        self,
        spark: SparkSession,
        group: str,
        plan: PushPlan,
        told: Callable[[PushProgress], None] | None,
        clock: Clock,
    ) -> None:
        self._context: Any = spark.sparkContext
        self._group = f"tidegate-push-{group}"
        self._plan, self._told, self._clock = plan, told, clock
        self._lock = threading.Lock()
        self._step, self._version, self._records = "starting", 0, 0
        self._began_ms = clock.monotonic_ms()
        self._jobs_before: set[int] = set()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watcher:
        self._context.setJobGroup(self._group, f"push into {self._plan.table}", True)
        if self._told is not None:
            self._thread = threading.Thread(target=self._run, name="tidegate-push-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopping.set()
        if kind is not None:
            self._context.cancelJobGroup(self._group)
        if self._thread is not None:
            self._thread.join()
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            self._context.setLocalProperty(name, None)

    def step(self, name: str, version: TableVersion, *, total: int = 0) -> None:
        """Begin the next step."""
        with self._lock:
            self._step, self._version, self._records = name, version.number, total
            self._began_ms = self._clock.monotonic_ms()
            self._jobs_before = set(self._context.statusTracker().getJobIdsForGroup(self._group))
        self._tell()

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_MS / 1000):
            self._tell()

    def _tell(self) -> None:
        if self._told is None:
            return
        with self._lock:
            done, total = self._tasks()
            elapsed_ms = self._clock.monotonic_ms() - self._began_ms
            left_ms = None if not 0 < done < total else elapsed_ms * (total - done) // done
            seen = PushProgress(
                self._plan.table, self._version, self._step, done, total, self._records, elapsed_ms, left_ms
            )
        self._told(seen)

    def _tasks(self) -> tuple[int, int]:
        """Return the tasks done and the total of this step's jobs, including stages that Spark has not begun."""
        tracker = self._context.statusTracker()
        done = total = 0
        for job in set(tracker.getJobIdsForGroup(self._group)) - self._jobs_before:
            info = tracker.getJobInfo(job)
            for stage in () if info is None else info.stageIds:
                seen = tracker.getStageInfo(stage)
                done += 0 if seen is None else seen.numCompletedTasks
                total += self._plan.partitions if seen is None else seen.numTasks
        return done, total


# -- source ---------------------------------------------------------------------------------------

FORMATS: Final = ("parquet", "orc", "json", "csv", "text", "tidegate.table")
_ENDINGS: Final = {
    ".parquet": "parquet", ".orc": "orc", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv",
}  # fmt: skip
_COMPRESSED: Final = {".gz", ".bz2", ".zst", ".snappy", ".lz4"}
_STRICT: Final = {
    "mode": "FAILFAST"
}  # Spark by itself makes nulls of what it cannot read, and drops what is too much
_SETTINGS: Final = {"csv": {"header": "true", "inferSchema": "true", **_STRICT}, "json": _STRICT}
_MALFORMED: Final = re.compile(r"(?:Malformed records are detected|MALFORMED_RECORD)[^\n]*")


def format_of(path: str) -> str:
    """Return the format of a path by its extension; a folder without one is Parquet, as in Spark."""
    endings = [ending for ending in PurePosixPath(path).suffixes if ending not in _COMPRESSED]
    if not endings:
        return "parquet"
    found = _ENDINGS.get(endings[-1].lower())
    if found is None:
        raise InvalidError(
            f"{path}: what is {endings[-1]}? Say --source-format {'|'.join(FORMATS)}, or any of Spark's"
        )
    return found


def source_frame(
    spark: SparkSession,
    path: str | None,
    *,
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    sql: str | None = None,
) -> DataFrame:
    """Return the rows of a path, or of a query; with both, the path is the view `source` of the query."""
    from pyspark.errors import AnalysisException, ParseException

    from tidegate.spark.compat import SPARK_ERRORS

    try:
        frame = None if path is None else _read(spark, path, format, options or {})
        if sql is None:
            if frame is None:
                raise InvalidError("nothing to push: name a path, or give a query with --sql")
            return frame
        if frame is not None:
            frame.createOrReplaceTempView("source")
        return spark.sql(sql)
    except (AnalysisException, ParseException) as error:
        raise InvalidError(f"Spark cannot read the source: {str(error).strip().splitlines()[0]}") from error
    except SPARK_ERRORS as error:
        if _MALFORMED.search(str(error)):
            raise push_error(str(error)) from error
        raise


def _read(spark: SparkSession, path: str, format: str | None, options: Mapping[str, str]) -> DataFrame:
    chosen = format or format_of(path)
    settings = {**_SETTINGS.get(chosen, {}), **options}
    # Spark's Java process may have another working directory.
    place = path if "://" in path else str(Path(path).expanduser().absolute())
    return spark.read.format(chosen).options(**settings).load(place)


DEFAULT_PARTITIONS: Final = 4
DEFAULT_PATIENCE_MS: Final = 60_000
_CONNECT: Final = "pyspark.sql.connect"


def push(
    frame: DataFrame,
    *,
    table: str,
    key: str | Sequence[str],
    log: str,
    state: str,
    value: str | Sequence[str] | None = None,
    timestamp: str | None = None,
    order_by: str | Sequence[str] = (),
    partitions: int | None = None,
    swap: bool = True,
    retain: int | None = None,
    without_key: str = "refuse",
    compression: str | None = None,
    lock_timeout: DurationLike = "60s",
    client: Mapping[str, str] | None = None,
    source: str = "",
    progress: Callable[[PushProgress], None] | None = None,
    watch: Watch | None = None,
    clock: Clock | None = None,
) -> PushReport:
    """Push all rows as the next version of `table` and make it current once every partition was proven complete.

    Raises `PushFailedError` with the report where records were lost, changed or late; the previous version stays
    current. `partitions` defaults to that of the previous version, or 4. `without_key` decides about rows without a
    key: "refuse" the push, or "skip" and count them. `swap=False` leaves the version ready, to be compared and
    swapped in later; `retain` is how many ready versions are kept.
    """
    if type(frame).__module__.startswith(_CONNECT):
        raise InvalidError(
            "a Spark Connect session cannot push: partitions are ingested by jobs over RDDs; push where the driver runs"
        )
    if without_key not in ("refuse", "skip"):
        raise InvalidError(f"without_key={without_key!r}: choose 'refuse' or 'skip'")
    if state.startswith("memory://"):
        raise InvalidError("state in memory:// cannot be shared with Spark's processes; give a folder")
    clock = clock or SystemClock()
    shape = row_shape(frame, key=key, value=value, timestamp=timestamp, order_by=order_by)
    backend = open_backend(state)
    try:
        before = Versions(backend, table).list().versions
        plan = PushPlan(
            log,
            table,
            partitions or (before[-1].partitions if before else DEFAULT_PARTITIONS),
            shape.key_serde,
            shape.value_serde,
            source,
            swap,
            retain,
            dict(client or {}),
            patience_ms=duration_ms(lock_timeout),
        )
        with (
            VersionPush(backend, plan, clock=clock, watch=watch) as version,
            Watcher(frame.sparkSession, version.push, plan, progress, clock) as watcher,
        ):
            version.start()
            order = SendOrder(
                log=log,
                topic=version.version.topic,
                partitions=plan.partitions,
                push=version.push,
                started_ms=version.started_ms,
                without_key=without_key,
                compression=compression,
                lock_timeout_ms=plan.patience_ms,
                client=plan.client,
            )
            watcher.step("sending", version.version)
            rows = shaped(frame, shape, plan.partitions)
            lines = _collected(rows.mapInArrow(partial(send_in_task, order), ANSWER_DDL).collect)
            answers = sorted((answer_of(line) for line in lines), key=lambda answer: answer.partition)
            keyless = sum(each.without_key for each in answers)
            if keyless and without_key == "refuse":
                raise InvalidError(
                    f"{keyless} rows have no key, so nothing is shown of this push; filter them out of the source, or "
                    "leave them out and have them counted with without_key='skip' (--without-key skip)"
                )
            if watch is not None:
                watch("sent")
            sending = {each.partition: [each.sent] for each in answers if each.sent is not None}
            ended = version.end(
                sending,
                nbytes=sum(each.nbytes for each in answers),
                repeated_keys=sum(each.repeated for each in answers),
                without_key=keyless,
            )
            watcher.step("ingesting", ended, total=sum(sent.records for (sent,) in sending.values()))
            ingested = ingest_on_spark(
                frame.sparkSession, log, state, ended, client=plan.client, patience_ms=order.lock_timeout_ms
            )
            if watch is not None:
                watch("ingested")
            return version.finish(ingested)
    finally:
        backend.close()


def ingest_on_spark(
    spark: SparkSession,
    log: str,
    state: str,
    version: TableVersion,
    *,
    client: Mapping[str, str] | None = None,
    patience_ms: int = DEFAULT_PATIENCE_MS,
) -> list[Ingested]:
    """Ingest all partitions of a version in parallel, one task each; an error fails only its partition.

    An attempt waits for another one at its partition, at most `patience_ms`, and then continues from its last
    commit.
    """
    described = msgspec.msgpack.encode(version)
    work = partial(_ingest_in_task, log, state, dict(client or {}), described, patience_ms, state_key_id())
    numbers = range(version.partitions)
    found = _collected(
        spark.sparkContext.parallelize(numbers, version.partitions).mapPartitions(work).collect
    )
    ingested = []
    for line in found:
        result, fault, failure = msgspec.msgpack.decode(
            line, type=tuple[PartitionResult, Fault | None, Failure | None]
        )
        if failure is not None and fault is None:
            raise rebuild(failure)
        ingested.append(Ingested(result, fault))
    return ingested


def _ingest_in_task(
    log: str,
    state: str,
    client: dict[str, str],
    described: bytes,
    patience_ms: int,
    key_id: str,
    partitions: Iterator[int],
) -> Iterator[bytes]:
    from tidegate.spark.workers import freeze_once

    freeze_once()
    version = msgspec.msgpack.decode(described, type=TableVersion)
    backend = open_backend(state, key_id=key_id)
    opened = open_log(log, client=client or None) if is_kafka(log) else open_log(log, read_only=True)
    with opened:
        for partition in partitions:
            work = partial(ingest_partition, opened, backend, version, partition)
            try:
                done = waiting(SystemClock(), patience_ms, work)
                line: Any = (done.result, done.fault, None)
            except FencedError:
                raise  # another attempt took the partition over: its result counts, this one does not
            except (
                TidegateError
            ) as error:  # an error of the machine: fails only this partition, and keeps its type
                fault = Fault(partition, type(error).__name__, str(error))
                line = (PartitionResult(partition), fault, describe(error))
            yield msgspec.msgpack.encode(line)
    backend.close()


def _collected(collect: Callable[[], list[Any]]) -> list[Any]:
    """Return a job's result; raise Spark's own message if a task failed for good."""
    from tidegate.spark.compat import SPARK_ERRORS

    try:
        return collect()
    except SPARK_ERRORS as error:
        raise push_error(str(error)) from error


def push_error(said: str) -> TidegateError:
    """Return the error that a task raised, from the last line of a Python traceback in Spark's message;
    `UnavailableError` for other errors. An error caused by a row is permanent: a retry would fail again."""
    if malformed := _MALFORMED.search(said):
        return InvalidError(
            f"the source has a malformed row, so nothing is shown of this push: {malformed[0][:500]}. Correct it, or "
            "take what Spark makes of such rows with -X mode=PERMISSIVE"
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("tidegate.errors.")]
    kind, _, message = (named[-1] if named else "").removeprefix("tidegate.errors.").partition(": ")
    if kind == InvalidError.__name__:
        return InvalidError(
            f"a row cannot be pushed: {message[:2000]}; nothing is shown of this push. Correct or leave out such rows "
            "in the source"
        )
    cause = f"{kind}: {message}" if kind else " ".join(lines[:3])
    return UnavailableError(f"Spark gave up on the push: {cause[:2000]}")
