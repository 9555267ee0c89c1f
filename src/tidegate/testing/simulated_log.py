"""A log in memory whose appends may be lost, arrive late, in part, or after their writer was given up for dead.

Readers and writers have the surface of the real logs, as far as replicas of tables use it. What becomes of an append is
drawn by whoever made the log (`fate`); one that is late waits in `late` until it is told to `land`. As in a cluster, no
lock keeps a second writer out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from tidegate.errors import OffsetOutOfRangeError, UnavailableError
from tidegate.integrity.sender import SCHEMA, table_of
from tidegate.log.access.numbered_writer import numbered
from tidegate.log.access.writer import Written
from tidegate.log.format.records import RECORD_SCHEMA, coerce
from tidegate.log.topics.topics import TopicState

Fate = Literal["stored", "lost", "unknown", "late", "partly", "dies before", "dies after"]


class SimulatedDeath(BaseException):
    """The process that was writing is no more."""


@dataclass
class Partition:
    """Batches one after the other."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    end: int = 0
    start: int = 0
    """What lies before has aged out: readers do not get it, `rows` does."""


class SimulatedLog:
    """Topics of one partition each."""

    def __init__(self, fate: Callable[[str], Fate] = lambda topic: "stored") -> None:
        self.partitions: dict[str, Partition] = {}
        self.late: list[tuple[str, pa.RecordBatch]] = []
        self.fate = fate
        self.most = 1
        """How many appends a reader gets at once when it does not say."""
        self.max_message_bytes = 1 << 20

    def create_topic(self, name: str) -> None:
        self.partitions[name] = Partition()

    def describe(self, topic: str) -> Any:
        config = SimpleNamespace(
            compacts=False,
            deletes=True,
            min_compaction_lag_ms=0,
            retention_ms=-1,
            retention_bytes=-1,
            max_message_bytes=self.max_message_bytes,
        )
        return SimpleNamespace(name=topic, partitions=1, partition_numbers=(0,), config=config)

    def topic_states(self, topics: Iterable[str]) -> dict[str, TopicState]:
        return {topic: TopicState("", 1) for topic in topics if topic in self.partitions}

    def writer(self, topic: str, *, integrity: bool | Mapping[str, Any] = False, **_: Any) -> Any:
        writer = _Writer(self, topic)
        return numbered(writer, integrity) if integrity is not False else writer

    def reader(self, topic: str, *_: Any, start: Any = "earliest", stop: Any = None, **__: Any) -> _Reader:
        return _Reader(self, topic, start, stop)

    def store(self, topic: str, rows: pa.RecordBatch) -> Written:
        """Append for good."""
        partition = self.partitions[topic]
        count, first = rows.num_rows, partition.end
        names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([topic]))
        columns = {
            "topic": names,
            "partition": pa.array(np.zeros(count, np.int32)),
            "offset": pa.array(np.arange(first, first + count)),
        }
        columns |= {name: rows.column(name) for name in ("timestamp", "key", "value", "headers")}
        partition.batches.append(
            pa.RecordBatch.from_arrays([columns[each.name] for each in RECORD_SCHEMA], schema=RECORD_SCHEMA)
        )
        partition.firsts.append(first)
        partition.end += count
        return Written(0, first, partition.end - 1, -1, -1, False, rows.nbytes)

    def append(self, topic: str, rows: pa.RecordBatch) -> Written:
        """Append, or have happen to it what its fate is."""
        fate = self.fate(topic)
        if fate == "dies before":
            raise SimulatedDeath
        if fate in ("stored", "unknown", "dies after"):
            written = self.store(topic, rows)
            if fate == "stored":
                return written
            if fate == "dies after":
                raise SimulatedDeath
        elif fate == "late":
            self.late.append((topic, rows))
        elif fate == "partly":
            cut = rows.num_rows // 2
            if cut:
                self.store(topic, rows.slice(0, cut))
            self.late.append((topic, rows.slice(cut)))
        raise UnavailableError(f"simulated: an append to {topic} was {fate}")

    def land(self, choice: int) -> None:
        """One of the late appends arrives after all; those of one writer in their order."""
        if self.late:
            self.store(*self.late.pop(choice % len(self.late)))

    def rows(self, topic: str) -> list[dict[str, Any]]:
        return [row for batch in self.partitions[topic].batches for row in batch.to_pylist()]


class _Writer:
    def __init__(self, log: SimulatedLog, topic: str) -> None:
        self._log, self.topic, self.partitions = log, topic, 1

    def write(self, table: Any, *, partition: int | None = None) -> list[Written]:
        rows = table_of(coerce(table)) if table.schema != SCHEMA else table
        return [self._log.append(self.topic, rows)]

    def close(self) -> None:
        """Nothing is held."""


class _Reader:
    def __init__(self, log: SimulatedLog, topic: str, start: Any, stop: Any) -> None:
        self._log, self._partition, self.topic = log, log.partitions[topic], topic
        self._stop = None if stop is None else stop[0]
        self._next = self._resolve(start)

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while (found := self.poll()) is not None:
            yield found

    def poll(self, timeout: int = 0, *, most: int = 0) -> pa.RecordBatch | None:
        """The next records, of up to `most` appends."""
        if self._next < self._partition.start:
            raise OffsetOutOfRangeError(
                f"simulated: {self.topic} has aged out up to {self._partition.start}",
                offset=self._next,
                first=self._partition.start,
                end=self._partition.end,
            )
        end = self._partition.end if self._stop is None else min(self._stop, self._partition.end)
        firsts, most = self._partition.firsts, most or self._log.most
        found: list[pa.RecordBatch] = []
        for number in range(max(0, bisect_right(firsts, self._next) - 1), len(firsts)):
            if self._next >= end or len(found) == most:
                break
            batch, start = self._partition.batches[number], self._next - firsts[number]
            found.append(batch.slice(start, min(batch.num_rows, end - firsts[number]) - start))
            self._next += found[-1].num_rows
        if len(found) > 1:
            return pa.Table.from_batches(found).combine_chunks().to_batches()[0]
        return found[0] if found else None

    def positions(self) -> dict[int, int]:
        return {0: self._next}

    def end_offsets(self) -> dict[int, int]:
        return {0: self._partition.end}

    def close(self) -> None:
        """Nothing is held."""

    def _resolve(self, start: Any) -> int:
        if isinstance(start, Mapping):
            return int(start[0])
        if start in ("earliest", "latest"):
            return self._partition.start if start == "earliest" else self._partition.end
        wanted = int(str(start).removeprefix("@"))
        for batch in self._partition.batches:
            times: Sequence[int] = batch.column("timestamp").view(pa.int64()).to_pylist()
            for row, time in enumerate(times):
                if time >= wanted:
                    return int(batch.column("offset")[row].as_py())
        return self._partition.end
