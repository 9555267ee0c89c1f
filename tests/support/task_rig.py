"""A flow's tasks driven round by round without a master: orders made by hand, commits kept in variables.

What a master would do is here in its plainest form: after every round tokens, source states and the offsets of parcels
are kept, and only then delivered. A test may throw the worker away at any moment (`restart`), repeat a round
that was not committed, or cut rounds wherever it likes.

Thread rule: for tests, one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidegate.clock import ManualClock
from tidegate.log.log import Log
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.rounds.orders import (
    Delivery,
    SourceOrder,
    SourceResult,
    TaskOrder,
    TaskResult,
    Tick,
)
from tidegate.pipeline.rounds.topics import largest_batch
from tidegate.pipeline.tasks.setup import WorkerSetup
from tidegate.pipeline.tasks.worker import Worker, pack_events, unpack_events
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.storage import StorageConfig
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.windows.events import EventBatch
from tidegate.windows.keys import KeyFormat, decode_keys


@dataclass
class Round:
    """What one round came to."""

    sources: dict[int, SourceResult]
    tasks: dict[int, TaskResult]

    def counter(self, name: str) -> int:
        """A counter over all sources and tasks."""
        results: list[SourceResult | TaskResult] = [*self.sources.values(), *self.tasks.values()]
        return sum(result.counters.get(name, 0) for result in results)


@dataclass
class Committed:
    """What a commit would hold."""

    states: dict[int, bytes] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, bytes] = field(default_factory=dict)
    ends: dict[tuple[str, int], int] = field(default_factory=dict)
    waiting: dict[int, tuple[Delivery, ...]] = field(default_factory=dict)


class TaskRig:
    """One flow over a log in `folder`, its state on a backend."""

    def __init__(
        self,
        folder: Path,
        flow: Flow,
        *,
        partitions: int = 1,
        sink_partitions: int | None = None,
        backend: StorageBackend | None = None,
        storage: StorageConfig | None = None,
        clock: ManualClock | None = None,
        randomness: Randomness | None = None,
        life: str = "",
    ) -> None:
        self.folder, self.flow, self.life = folder, flow, life
        self.clock = clock or ManualClock()
        self.randomness = randomness or SystemRandomness()
        self.log = Log(folder, durability="os", clock=self.clock)
        self.backend = backend or MemoryBackend(clock=self.clock)
        self.partitions = partitions
        counts = {flow.source.topic: partitions}
        counts |= {sink.topic: sink_partitions or flow.tasks(partitions) for sink in flow.topics}
        for topic, count in counts.items():
            self.log.create_topic(topic, count, if_not_exists=True)
        self.setup = WorkerSetup(
            "app",
            (flow,),
            str(folder),
            "memory://",
            storage or StorageConfig.for_tests(),
            partitions=counts,
            max_batch_bytes={topic: largest_batch(self.log, topic, {}) for topic in counts},
        )
        self.done = Committed()
        self.number = 0
        self.worker = self._worker()

    def _worker(self) -> Worker:
        return Worker(
            self.setup, log=self.log, backend=self.backend, clock=self.clock, randomness=self.randomness
        )

    def restart(self) -> None:
        """Another process takes over: nothing is warm."""
        self.worker.close()
        self.worker = self._worker()

    def close(self) -> None:
        self.worker.close()
        self.log.close()

    def __enter__(self) -> TaskRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- input -----------------------------------------------------------------------------------

    def write(
        self, rows: Iterable[tuple[bytes | None, int, Any]], *, partition: int = 0, integrity: bool = False
    ) -> None:
        """Records as (key, time, value bytes) into one partition of the source."""
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        table = pa.table(
            {
                "key": pa.array(columns[0], pa.binary()),
                "timestamp": pa.array(columns[1], pa.int64()),
                "value": pa.array(columns[2], pa.binary()),
            }
        )
        writer: Any
        settings: Any = {"integrity": True} if integrity else {}
        with self.log.writer(self.flow.source.topic, **settings) as writer:
            writer.write(table, partition=partition)

    def end(self, partition: int) -> int:
        rows = self.log.partition_rows(self.flow.source.topic)
        return rows[partition]["high_watermark"]

    # -- rounds ----------------------------------------------------------------------------------

    def attempt(
        self, stops: Mapping[int, int] | None = None, *, tick: Tick | None = None, shuffle: int = 0
    ) -> Round:
        """One round up to the commit, which is not made; `shuffle` turns the order in which pieces arrive."""
        tick = tick or Tick(self.clock.now_ms())
        orders = [
            SourceOrder(
                self.flow.name,
                number,
                self.done.offsets.get(number, 0),
                self.end(number) if stops is None else stops.get(number, self.done.offsets.get(number, 0)),
                self.done.states.get(number, b""),
            )
            for number in range(self.partitions)
        ]
        sources: dict[int, SourceResult] = {}
        tasks: dict[int, TaskResult] = {}
        if self.flow.rekey_at is None:
            for order in orders:
                reading = self.worker.read(order, tick)
                tasks[order.partition] = self._work(order.partition, tick, reading)
                sources[order.partition] = reading.result()
            return Round(sources, tasks)
        shards: dict[int, list[EventBatch]] = {
            number: [] for number in range(self.flow.tasks(self.partitions))
        }
        for order in orders:
            reading = self.worker.read(order, tick)
            for events in reading:
                for shard, part in self.worker.split(self.flow.name, events):
                    shards[shard].append(unpack_events(pack_events(part)))
            sources[order.partition] = reading.result()
        for shard, batches in shards.items():
            turned = batches[shuffle % max(1, len(batches)) :] + batches[: shuffle % max(1, len(batches))]
            tasks[shard] = self._work(shard, tick, turned)
        return Round(sources, tasks)

    def _work(self, task: int, tick: Tick, events: Iterable[EventBatch]) -> TaskResult:
        order = TaskOrder(
            self.flow.name, task, self.done.tokens.get(task, b""), self.done.waiting.get(task, ())
        )
        return self.worker.work(order, tick, self.number + 1, events, life=self.life)

    def commit(self, found: Round) -> Round:
        """Let the round count; its parcels wait to be delivered by the next one."""
        self.number += 1
        done = self.done
        for number, source in found.sources.items():
            done.states[number], done.offsets[number] = source.state, source.next_offset
        for number, task in found.tasks.items():
            done.tokens[number] = task.token
            done.waiting[number] = ()
            if task.parcel is not None:
                bases = []
                for section in task.parcel.sections:
                    place = (section.topic, section.partition)
                    bases.append(done.ends.get(place, 0))
                    done.ends[place] = bases[-1] + section.records
                done.waiting[number] = (Delivery(self.number, task.parcel, tuple(bases)),)
        return found

    def round(
        self, stops: Mapping[int, int] | None = None, *, tick: Tick | None = None, shuffle: int = 0
    ) -> Round:
        return self.commit(self.attempt(stops, tick=tick, shuffle=shuffle))

    def deliver(self) -> None:
        """What waits, in order."""
        for number in sorted(self.done.waiting):
            self.worker.deliver(self.done.waiting[number])
        self.done.waiting = {}

    # -- results ---------------------------------------------------------------------------------

    def records(self, topic: str | None = None) -> pa.Table:
        """All records of the sink, partition by partition."""
        with self.log.reader(topic or self.flow.topics[0].topic) as reader:
            return reader.read_all().sort_by([("partition", "ascending"), ("offset", "ascending")])

    def windows(self, key_format: KeyFormat, *, size_ms: int | None = None) -> list[tuple[Any, ...]]:
        """The sink's records as (key, start, end, time, value bytes), control records left out."""
        return window_rows(self.records(), key_format, size_ms)


def window_rows(records: pa.Table, key_format: KeyFormat, size_ms: int | None) -> list[tuple[Any, ...]]:
    """Records of a changelog of windows as (key, start, end, time, value bytes), control records left out."""
    from tidegate.integrity.columns import without_control

    rows: list[tuple[Any, ...]] = []
    for batch in records.combine_chunks().to_batches():
        data = without_control(batch)
        keys = decode_keys(data.column("key"), key_format, size_ms=size_ms)
        times = data.column("timestamp").cast(pa.int64()).to_pylist()
        rows += zip(
            keys.inner.to_pylist(),
            keys.start.tolist(),
            keys.end.tolist(),
            times,
            data.column("value").to_pylist(),
            strict=True,
        )
    return rows


def last_of_each(rows: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """What a table over a changelog holds: of every (key, start, end) the last (time, value) that is not deleted."""
    table: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for key, start, end, time, value in rows:
        if value is None:
            table.pop((key, start, end), None)
        else:
            table[key, start, end] = (time, value)
    return table
