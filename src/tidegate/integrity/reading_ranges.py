"""Ranges of a topic read by any number of workers, of a folder or of a cluster: for digests and comparisons.

Owns the order of a range and how a topic is cut into them; what is made of the records is the caller's.

Thread rule: values; one reader for each range.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tidegate.errors import OffsetOutOfRangeError
from tidegate.log.log import Log, is_kafka, open_log


@dataclass(frozen=True, slots=True)
class TopicAt:
    """A topic and where it is. Travels."""

    url: str
    topic: str
    client: Mapping[str, str] = field(default_factory=dict)
    isolation: str = "read_uncommitted"

    def extents(self) -> dict[int, tuple[int, int]]:
        """Each partition's first offset, and the one readers may not reach yet."""
        with open_log(self.url, **self._settings()) as log:
            with log.reader(self.topic, isolation=self.isolation) as reader:
                ends = reader.end_offsets()
            if isinstance(log, Log):
                starts = {number: log.view(self.topic, number).bounds().log_start for number in ends}
            else:
                starts = {n: first for n, (first, _) in log.bounds(self.topic, ends).items()}
        return {number: (starts[number], ends[number]) for number in sorted(ends)}

    def compacts(self) -> str:
        """Why records may leave from between others; empty where they do not."""
        with open_log(self.url, **self._settings()) as log:
            config = log.describe(self.topic).config
        return f"cleanup.policy={','.join(sorted(config.cleanup_policy))}" if config.compacts else ""

    def require(self, extents: Mapping[int, tuple[int, int]], reader: str) -> None:
        """Refuse offsets that are not all there (any more); `reader` is who read them once."""
        present = self.extents()
        for partition, (first, end) in extents.items():
            start, stop = present.get(partition, (0, 0))
            if first < end and not start <= first <= end <= stop:
                raise OffsetOutOfRangeError(
                    f"{reader} read offsets {first} to {end - 1} of {self.topic}-{partition}, and the log has {start} "
                    f"to {stop - 1}: they aged out, or this is another log; certify sooner, or name the right --log",
                    offset=first,
                    first=start,
                    end=stop,
                )

    def read(self, partition: int, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """The records of a range."""
        if start >= stop:
            return
        with (
            open_log(self.url, **self._settings()) as log,
            log.reader(
                self.topic,
                [partition],
                start=start,
                stop=stop,
                isolation=self.isolation,
                control_records=True,
            ) as reader,
        ):
            yield from reader

    def _settings(self) -> dict[str, Any]:
        return {"client": self.client} if is_kafka(self.url) else {"read_only": True}


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """Offsets from `start` up to `stop` of one partition; `number` counts a partition's ranges."""

    source: TopicAt
    partition: int
    number: int
    start: int
    stop: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        return self.source.read(self.partition, self.start, self.stop)


def cut(
    source: TopicAt, extents: Mapping[int, tuple[int, int]], pieces: int, *, smallest: int, align: int = 1
) -> list[ReadOrder]:
    """About `pieces` ranges of similar length, none much below `smallest` offsets, cut at multiples of `align`."""
    total = sum(end - first for first, end in extents.values())
    step = max(smallest, -(-total // max(1, pieces)))
    step = -(-step // align) * align
    orders = []
    for partition, (first, end) in extents.items():
        edges = [first, *range((first // step + 1) * step, end, step), max(end, first)]
        orders += [
            ReadOrder(source, partition, number, start, stop)
            for number, (start, stop) in enumerate(itertools.pairwise(edges))
        ]
    return orders
