"""Order-independent digests of records, and the offset ranges of a topic that workers read.

A record's *canonical bytes* are, ints big-endian and two's complement:

    offset i64 | timestamp i64, -1 none | key length i32, -1 null | key | value length i32, -1 null | value |
    number of headers i32 | for each header: name length i32 | name, UTF-8 | value length i32, -1 null | value

Comparing leaves parts out (`Parts`); certificates take all of them. A record's hash `h` is XXH64 with seed 0 of its
canonical bytes. The digest of a set of records is three numbers, the last two modulo 2^64:

    count | sum of h | sum of h times h

so digests of neighbouring ranges add up field by field, and order does not matter. This detects loss, change,
duplication and damage; XXH64 is neither keyed nor cryptographic, so it gives no protection against deliberate forgery.
It covers what a `read_uncommitted` reader returns, Tidegate's own control records included and Kafka's excluded.

Thread rule: values and pure functions; one reader for each range.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.errors import OffsetOutOfRangeError
from tidegate.integrity.columns import single, times_of
from tidegate.kernels import range_summaries as kernels
from tidegate.kernels.record_encoding import BinarySource, RecordSource
from tidegate.log.format.encode import NO_DELTAS, record_source
from tidegate.log.format.records import RecordColumns
from tidegate.log.log import Log, is_kafka, open_log

# -- digests ---------------------------------------------------------------------------------------

_MODULO: Final = 2**64


class Parts(IntFlag):
    """The fields of a record that enter its hash."""

    OFFSET = kernels.OFFSET
    TIMESTAMP = kernels.TIMESTAMP
    KEY = kernels.KEY
    VALUE = kernels.VALUE
    HEADERS = kernels.HEADERS


ALL: Final = Parts.OFFSET | Parts.TIMESTAMP | Parts.KEY | Parts.VALUE | Parts.HEADERS


class Digest(NamedTuple):
    """The digest of a set of records; `Digest()` is that of the empty set."""

    records: int = 0
    sum: int = 0
    squares: int = 0

    def __add__(self, other: object) -> Digest:
        if not isinstance(other, Digest):
            return NotImplemented
        return Digest(
            self.records + other.records,
            (self.sum + other.sum) % _MODULO,
            (self.squares + other.squares) % _MODULO,
        )

    def hex(self) -> str:
        """The two sums as 32 hexadecimal digits."""
        return f"{self.sum:016x}{self.squares:016x}"

    @classmethod
    def of(cls, records: int, digits: str) -> Digest:
        """Parse what `hex` returned; raises `ValueError` for anything but 32 hexadecimal digits."""
        if len(digits) != 32 or records < 0:
            raise ValueError(f"{digits!r} is no digest")
        return cls(records, int(digits[:16], 16), int(digits[16:], 16))


def hashes_of(batch: pa.RecordBatch, parts: Parts) -> NDArray[np.uint64]:
    """The hash of each record of a reader's batch."""
    hashes = np.empty(batch.num_rows, np.uint64)
    if batch.num_rows:
        headers = single(batch.column("headers")) if parts & Parts.HEADERS else None
        times = pa.array(times_of(batch))
        columns = RecordColumns(batch.column("key"), batch.column("value"), times, headers)
        source = record_source(columns, NO_DELTAS, None)
        scratch = np.empty(_largest(source), np.uint8)
        offsets: NDArray[np.int64] = batch.column("offset").to_numpy()
        kernels.hash_records(source, offsets, int(parts), scratch, hashes)
    return hashes


def digest_blocks(hashes: NDArray[np.uint64], edges: NDArray[np.int64]) -> list[Digest]:
    """The digests of consecutive blocks; block *i* is the rows from `edges[i]` up to `edges[i + 1]`."""
    sums, squares = np.zeros(len(edges) - 1, np.uint64), np.zeros(len(edges) - 1, np.uint64)
    kernels.sum_blocks(hashes, edges, sums, squares, np.zeros_like(sums))
    return [
        Digest(*numbers)
        for numbers in zip(np.diff(edges).tolist(), sums.tolist(), squares.tolist(), strict=True)
    ]


def _largest(source: RecordSource) -> int:
    """An upper bound of the canonical bytes of one record of `source`."""
    size = kernels.FIXED_BYTES + _longest(source.key) + _longest(source.value)
    if len(source.header_ends):
        entries = np.int64(8) * np.arange(len(source.header_key.ends)) + (
            source.header_key.ends.astype(np.int64) + source.header_value.ends.astype(np.int64)
        )
        size += int(np.diff(entries[source.header_ends]).max(initial=0))
    return size


def _longest(column: BinarySource) -> int:
    return int(np.diff(column.ends).max(initial=0))


# -- ranges of a topic -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TopicAt:
    """A topic and the URL of its log; picklable."""

    url: str
    topic: str
    client: Mapping[str, str] = field(default_factory=dict)
    isolation: str = "read_uncommitted"

    def extents(self) -> dict[int, tuple[int, int]]:
        """The first offset of each partition, and the end offset for readers (exclusive)."""
        with open_log(self.url, **self._settings()) as log:
            with log.reader(self.topic, isolation=self.isolation) as reader:
                ends = reader.end_offsets()
            if isinstance(log, Log):
                starts = {number: log.view(self.topic, number).bounds().log_start for number in ends}
            else:
                starts = {n: first for n, (first, _) in log.bounds(self.topic, ends).items()}
        return {number: (starts[number], ends[number]) for number in sorted(ends)}

    def compacts(self) -> str:
        """The setting under which the topic is compacted; empty where it is not."""
        with open_log(self.url, **self._settings()) as log:
            config = log.describe(self.topic).config
        return f"cleanup.policy={','.join(sorted(config.cleanup_policy))}" if config.compacts else ""

    def require(self, extents: Mapping[int, tuple[int, int]], reader: str) -> None:
        """Raise `OffsetOutOfRangeError` unless all these offsets are still readable; `reader` names who read them."""
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
        """Yield the records of a range."""
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
    """Offsets from `start` up to `stop` of one partition; `number` is the range's index within the partition."""

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
