"""How far the partitions of some topics reach, in a log folder or in a Kafka cluster.

Only looks. Every call opens what it needs and lets it go again, so nothing is held between micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from tidegate.errors import UnavailableError
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log, open_log
from tidegate.log.partition_reader import Bounds, PartitionView
from tidegate.log.reader import Position as StartPosition
from tidegate.log.reader import PositionKind
from tidegate.spark.topics.options import SourceOptions
from tidegate.spark.topics.ranges import Place, Position


class Extent(NamedTuple):
    """One partition: its first offset, where readers of this isolation end, and where it ends itself."""

    first: int
    readable: int
    end: int


class Extents(Protocol):
    """What planning asks of a log."""

    def places(self) -> list[Place]:
        """Every partition of the topics, in order."""
        ...

    def all(self) -> dict[Place, Extent]:
        """How far each of them reaches now."""
        ...

    def at_time(self, moment_ms: int) -> Position:
        """The first offset of each at or after a moment; where it ends when there is none."""
        ...


def extents_of(options: SourceOptions) -> Extents:
    return KafkaExtents(options) if options.is_kafka else FolderExtents(options)


@contextmanager
def opened(options: SourceOptions) -> Iterator[Log | KafkaLog]:
    """The log, for reading."""
    if not options.is_kafka and not Path(options.log).is_dir():
        raise UnavailableError(f"{options.log} does not exist; option log names the log's folder")
    with open_log(options.log, client=options.client, read_only=True) as log:
        yield log


class FolderExtents:
    """A log folder on this machine's disk."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def places(self) -> list[Place]:
        with opened(self._options) as log:
            found = [log.describe(topic) for topic in self._options.topics]
        return sorted((topic.name, number) for topic in found for number in topic.partition_numbers)

    def all(self) -> dict[Place, Extent]:
        return {place: self._extent(*look) for place, look in self._looks()}

    def at_time(self, moment_ms: int) -> Position:
        found: Position = {}
        for place, (view, bounds) in self._looks():
            offset = view.offset_for_time(moment_ms, bounds)
            found[place] = self._extent(view, bounds).readable if offset is None else offset
        return found

    @contextmanager
    def view(self, place: Place) -> Iterator[tuple[PartitionView, Bounds]]:
        """One partition's files."""
        with Log(self._options.log, read_only=True) as log:
            view = log.view(*place)
            yield view, view.bounds()

    def _looks(self) -> Iterator[tuple[Place, tuple[PartitionView, Bounds]]]:
        with opened(self._options) as log:
            for topic in sorted(self._options.topics):
                description = log.describe(topic)
                for number in description.partition_numbers:
                    view = log.view(topic, number, description=description)  # type: ignore[union-attr]
                    yield (topic, number), (view, view.bounds())

    def _extent(self, view: PartitionView, bounds: Bounds) -> Extent:
        committed = self._options.isolation == "read_committed"
        readable = view.last_stable(bounds) if committed else bounds.high_watermark
        return Extent(bounds.log_start, readable, bounds.high_watermark)


class KafkaExtents:
    """A Kafka cluster; each question is one request a topic."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def places(self) -> list[Place]:
        return sorted(self.all())

    def all(self) -> dict[Place, Extent]:
        found: dict[Place, Extent] = {}
        with opened(self._options) as log:
            for topic in self._options.topics:
                with log.reader(topic, isolation=self._options.isolation, start=0) as reader:
                    starts, ends = reader.start_offsets(), reader.end_offsets()  # type: ignore[union-attr]
                found |= {(topic, number): Extent(starts[number], end, end) for number, end in ends.items()}
        return dict(sorted(found.items()))

    def at_time(self, moment_ms: int) -> Position:
        found: Position = {}
        start = StartPosition(PositionKind.TIME, moment_ms)
        with opened(self._options) as log:
            for topic in self._options.topics:
                with log.reader(topic, isolation=self._options.isolation, start=start) as reader:
                    found |= {(topic, number): offset for number, offset in reader.positions().items()}
        return dict(sorted(found.items()))
