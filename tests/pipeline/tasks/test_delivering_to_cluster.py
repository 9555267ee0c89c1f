"""Delivery into a Kafka cluster (a mock one): nothing twice over crashes, nothing over somebody else's records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from encoded_batches import encode_batches
from tidegate.clock import ManualClock
from tidegate.errors import FencedError
from tidegate.integrity import PartitionValidator
from tidegate.integrity.sender import Chains, ChainState
from tidegate.log.format.encode import encode_together
from tidegate.log.format.records import coerce
from tidegate.log.log import open_log
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import Aggregate, Source, To
from tidegate.pipeline.rounds.orders import Delivery, Parcel, SourceOrder, TaskOrder, Tick
from tidegate.pipeline.tasks.delivering import Deliverer
from tidegate.pipeline.tasks.parcels import Batches, write_parcel
from tidegate.pipeline.tasks.sections import records_of
from tidegate.pipeline.tasks.setup import WorkerSetup
from tidegate.pipeline.tasks.worker import Worker
from tidegate.storage import StorageConfig
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.tables.serdes.base import Long, String
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.kinds import Tumbling

START = 1_767_225_600_000
GUID = bytes(range(16))


@pytest.fixture
def log() -> Iterator[Any]:
    confluent_kafka = pytest.importorskip("confluent_kafka")
    owner = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "replaced", "log_level": 0}
    )
    broker = next(iter(owner.list_topics(timeout=120).brokers.values()))
    for topic in ("events", "results"):
        owner.list_topics(topic, timeout=20)  # asking for it makes it
    with open_log(f"kafka://127.0.0.1:{broker.port}") as opened:
        yield opened
    del owner


def table_of(first: int, count: int) -> pa.Table:
    rows = range(first, first + count)
    return pa.table(
        {
            "key": pa.array([f"k{row % 4}".encode() for row in rows], pa.binary()),
            "value": pa.array([f"value {row}".encode() for row in rows], pa.binary()),
            "timestamp": pa.array([START + row for row in rows], pa.int64()),
        }
    )


def parcel_of(backend: MemoryBackend, name: str, first: int, count: int) -> Parcel:
    batches = [
        batch
        for start in range(first, first + count, 10)
        for batch in encode_batches(table_of(start, min(10, first + count - start)), max_batch_bytes=1 << 20)
    ]
    return write_parcel(backend, name, [Batches("results", 1, b"".join(batches), count)])


def values(log: Any) -> list[str]:
    with log.reader("results", [1], control_records=True) as reader:
        return [value.decode() for batch in reader for value in batch.column("value").to_pylist()]


def test_what_is_there_is_compared_and_only_the_rest_is_produced(log: Any) -> None:
    backend = MemoryBackend()
    deliverer = Deliverer(log, backend, ManualClock(), keeps_open=False)
    first = Delivery(1, parcel_of(backend, "p/1", 0, 25), (0,))
    with log.writer("results") as writer:
        writer.write(table_of(0, 13), partition=1)  # the run before died in the middle
    assert deliverer.deliver([first]) == 12
    assert deliverer.deliver([first]) == 0
    second = Delivery(2, parcel_of(backend, "p/2", 25, 5), (25,))
    assert deliverer.deliver([first, second]) == 5
    assert values(log) == [f"value {row}" for row in range(30)]


def test_a_foreign_record_or_a_missing_one_fences(log: Any) -> None:
    backend = MemoryBackend()
    deliverer = Deliverer(log, backend, ManualClock(), keeps_open=False)
    parcel = parcel_of(backend, "p/1", 0, 25)
    with pytest.raises(FencedError, match="ends before"):
        deliverer.deliver([Delivery(1, parcel, (7,))])
    with log.writer("results") as writer:
        writer.write(table_of(100, 2), partition=1)
    with pytest.raises(FencedError, match=r"results-1.*another record"):
        deliverer.deliver([Delivery(1, parcel, (0,))])
    assert values(log) == ["value 100", "value 101"]


def numbered(
    backend: MemoryBackend, sent: list[ChainState], first: int, count: int, guid: bytes = GUID
) -> Parcel:
    """The next parcel of a sender that stands at the last of `sent`; the first also holds its chain's start."""
    columns = coerce(table_of(first, count))
    planned = Chains(guid).data(sent[-1], columns, START)
    sent.append(planned.after)
    records = sum(map(len, planned.pieces))
    batches = encode_together(planned.pieces, max_batch_bytes=1 << 20)
    return write_parcel(backend, f"p/{guid.hex()}/{first}", [Batches("results", 1, batches, records)])


def test_repeats_of_numbered_records_are_no_strangers(log: Any) -> None:
    """An attempt that came back from the dead wrote everything once more: later parcels go behind it, and only once."""
    backend, sent = MemoryBackend(), [ChainState()]
    parcels = [numbered(backend, sent, first, 10) for first in (0, 10, 20)]
    bases = (0, 11, 21)  # as the commits say, which know nothing of repeats
    deliveries = [
        Delivery(n, parcel, (base,)) for n, (parcel, base) in enumerate(zip(parcels, bases, strict=True))
    ]
    deliverer = Deliverer(log, backend, ManualClock(), keeps_open=False)
    assert deliverer.deliver(deliveries[:1]) == 11
    zombie = records_of(parcels[0].sections[0], memoryview(backend.read(parcels[0].name)), 0)
    with log.writer("results") as writer:
        writer.write(zombie, partition=1)
    assert deliverer.deliver(deliveries[:2]) == 10
    assert deliverer.deliver(deliveries[1:]) == 10
    assert deliverer.deliver(deliveries) == 0
    deliverer.close()
    validator, verdicts, kept = PartitionValidator("results", 1), Counter[str](), list[bytes]()
    with log.reader("results", [1], control_records=True) as reader:
        for batch in reader:
            judged = validator.validate(batch, START)
            verdicts.update({verdict.label: count for verdict, count in judged.counts.items() if count})
            kept += batch.filter(pa.array(judged.kept & ~judged.columns.is_control))["value"].to_pylist()
    assert verdicts == {"ok": 31, "duplicate": 11}
    assert kept == [f"value {row}".encode() for row in range(30)]


def test_what_lies_among_numbered_records_and_is_not_ours_fences(log: Any) -> None:
    backend = MemoryBackend()
    parcel = numbered(backend, [ChainState()], 0, 10)
    deliverer = Deliverer(log, backend, ManualClock(), keeps_open=False)
    assert deliverer.deliver([Delivery(1, parcel, (0,))]) == 11
    other = numbered(MemoryBackend(), [ChainState()], 50, 10)  # the same positions, another content
    with pytest.raises(FencedError, match="another record"):
        Deliverer(log, _holding(other, 50), ManualClock(), keeps_open=False).deliver(
            [Delivery(1, other, (0,))]
        )
    with log.writer("results") as writer:
        writer.write(table_of(0, 1), partition=1)
    following = numbered(backend, [ChainState()], 20, 10, bytes(16))
    with pytest.raises(FencedError, match=r"results-1.*another record.*tidegate app rebase"):
        deliverer.deliver([Delivery(2, following, (11,))])


def _holding(parcel: Parcel, first: int) -> MemoryBackend:
    backend = MemoryBackend()
    assert numbered(backend, [ChainState()], first, 10) == parcel
    return backend


def test_a_task_from_cluster_to_cluster(log: Any, tmp_path: Path) -> None:
    flow = Flow(
        Source("events", String(), Json(n="int64")),
        (Aggregate(Tumbling("1000ms"), (agg.count(),)),),
        (To("results"),),
    )
    counts = log.partition_counts()
    setup = WorkerSetup(
        "app", (flow,), "kafka://unused", "memory://", StorageConfig.for_tests(), partitions=counts
    )
    raw = [json.dumps({"n": number}).encode() for number in range(40)]
    with log.writer("events") as writer:
        writer.write(
            pa.table({"key": ["a"] * 40, "value": raw, "timestamp": [START + 100 * n for n in range(40)]}),
            partition=2,
        )
    worker = Worker(setup, log=log, backend=MemoryBackend())
    tick = Tick(START)
    reading = worker.read(SourceOrder("results", 2, 0, 40, b""), tick)
    result = worker.work(TaskOrder("results", 2, b""), tick, 1, reading)
    assert reading.result().next_offset == 40
    assert result.parcel is not None
    worker.deliver([Delivery(1, result.parcel, (0,))])
    worker.deliver([Delivery(1, result.parcel, (0,))])
    with log.reader("results", [2], control_records=True) as reader:
        found = pa.Table.from_batches(list(reader))
    assert found.num_rows == result.parcel.sections[0].records
    assert found["value"].to_pylist() == [Long().encode(10)] * 4
    worker.close()
