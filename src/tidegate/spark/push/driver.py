"""`push(frame, table=…)`: a DataFrame becomes the next version of a table, proven complete, then shown.

Two Spark jobs: the first brings rows into the partition of their key, sorts, numbers and appends them to the version's
topic, one task for each partition; the second reads every partition back, validates it and builds the version, one
task for each partition. Between them, and after, it is the driver who writes (`tables.versions.pushing`).

    report = push(spark.read.parquet("users"), table="users", key="id", log="./data/log", state="./data/state")

Thread rule: one thread for a push; several pushes may run at once, also of one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidegate.clock import Clock, SystemClock
from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import FencedError, InvalidError, TidegateError, UnavailableError
from tidegate.log.log import is_kafka, open_log
from tidegate.spark.push.columns import row_shape, shaped
from tidegate.spark.push.progress import PushProgress, Watcher
from tidegate.spark.push.sending import ANSWER_DDL, Answer, SendOrder, answer_of, send_in_task
from tidegate.spark.rounds.failures import Failure, describe, rebuild
from tidegate.storage import open_backend, state_key_id
from tidegate.tables.versions.catalog import Fault, PartitionResult, PushReport, TableVersion
from tidegate.tables.versions.ingest import Ingested, ingest_partition
from tidegate.tables.versions.push import PushPlan, VersionPush, Watch
from tidegate.waiting import waiting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
    """Push all rows as the next version of `table` and show it when every partition was proven complete.

    Raises `PushFailedError` with the report where records were lost, changed or late; the version before is shown on.
    `partitions` are those of the version before, or 4. `without_key` is what becomes of rows without a key: "refuse"
    the push, or "skip" and count them. `swap=False` leaves the version ready, to be compared and swapped in later;
    `retain` is how many ready versions are kept.
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
        plan = PushPlan(
            log,
            table,
            partitions or _partitions_before(backend, table),
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
            answers = _sent(shaped(frame, shape, plan.partitions), order)
            _refuse_without_key(answers, without_key)
            if watch is not None:
                watch("sent")
            sending = {each.partition: [each.sent] for each in answers if each.sent is not None}
            ended = version.end(
                sending,
                nbytes=sum(each.nbytes for each in answers),
                repeated_keys=sum(each.repeated for each in answers),
                without_key=sum(each.without_key for each in answers),
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
    """Ingest all partitions of a version side by side, a task each; what fails is that partition's fault.

    An attempt waits for another one at its partition, at most `patience_ms`, and then goes on from what that one left.
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
                raise  # another attempt took the partition over: its answer counts, and this is none
            except TidegateError as error:  # the machine's: only this partition's, and told with its type
                fault = Fault(partition, type(error).__name__, str(error))
                line = (PartitionResult(partition), fault, describe(error))
            yield msgspec.msgpack.encode(line)
    backend.close()


def _sent(rows: DataFrame, order: SendOrder) -> list[Answer]:
    """Run the first job; the answers of the attempts that count."""
    lines = _collected(rows.mapInArrow(partial(send_in_task, order), ANSWER_DDL).collect)
    return sorted((answer_of(line) for line in lines), key=lambda answer: answer.partition)


def _refuse_without_key(answers: Sequence[Answer], without_key: str) -> None:
    count = sum(answer.without_key for answer in answers)
    if count and without_key == "refuse":
        raise InvalidError(
            f"{count} rows have no key, so nothing is shown of this push; filter them out of the source, or leave them "
            "out and have them counted with without_key='skip' (--without-key skip)"
        )


def _collected(collect: Callable[[], list[Any]]) -> list[Any]:
    """A job's answer; Spark's own words where a task failed for good."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        return collect()
    except (PySparkException, Py4JJavaError) as error:
        raise push_error(str(error)) from error


def push_error(said: str) -> TidegateError:
    """What a task raised, by the last line of a Python traceback in what Spark says; `UnavailableError` where it was
    none of our errors. What was wrong with a row is wrong at the next try, too."""
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


def _partitions_before(backend: Any, table: str) -> int:
    from tidegate.tables.versions.catalog import Versions

    known = Versions(backend, table).list().versions
    return known[-1].partitions if known else DEFAULT_PARTITIONS
