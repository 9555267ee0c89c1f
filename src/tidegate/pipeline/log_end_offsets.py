"""The first offset and the log end offset of every partition, as seen by a reader of committed records.

Thread rule: one coordinator, one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tidegate.errors import InvalidError, UnavailableError
from tidegate.log.catalog import TopicState
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log
from tidegate.log.partition_reader import PartitionView


class Head(NamedTuple):
    """Offsets from `start` up to `end` can be read; `goes_on`: the log has more, but this run reads no further."""

    start: int
    end: int
    goes_on: bool = False


class LogEndOffsets:
    """Reads the offsets of an embedded or a Kafka log."""

    def __init__(self, log: Log | KafkaLog) -> None:
        self._log = log
        self._views: dict[tuple[str, int], PartitionView] = {}

    def look(self, topics: Mapping[str, int]) -> dict[str, dict[int, Head]]:
        """Return the offsets of so many partitions of each topic."""
        return {topic: self.of(topic, partitions) for topic, partitions in topics.items()}

    def ends(self, topics: Mapping[str, int]) -> dict[tuple[str, int], int]:
        """Return the log end offset of each partition, as targets for catching up."""
        found = self.look(topics)
        return {(topic, number): head.end for topic, each in found.items() for number, head in each.items()}

    def states(self, topics: Iterable[str]) -> dict[str, TopicState]:
        """Return the current state of each topic, with its id; `UnavailableError` if a topic is gone."""
        wanted = list(topics)
        found = self._log.topic_states(wanted)
        for topic in wanted:
            if topic not in found:
                raise UnavailableError(
                    f"topic {topic} was deleted while it was being read; create it again, or stop the app",
                    kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
                )
        return found

    def of(self, topic: str, partitions: int) -> dict[int, Head]:
        if isinstance(self._log, Log):
            return {number: self._embedded(topic, number) for number in range(partitions)}
        found = self._log.bounds(topic, range(partitions), isolation="read_committed")
        return {number: Head(*bounds) for number, bounds in found.items()}

    def partitions(self, topic: str) -> int | None:
        """Return the number of partitions of a topic; None if it does not exist."""
        return self._log.partition_counts().get(topic)

    def require(self, topic: str, app: str) -> int:
        """Return the number of partitions of a topic that the app reads; it must exist."""
        found = self.partitions(topic)
        if found is None:
            raise InvalidError(
                f"app {app} reads topic {topic}, which does not exist; create it first "
                f"(`tidegate topic create {topic} --partitions N`) or write to it",
                kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
            )
        return found

    def bytes_per_record(self, topic: str, partitions: int) -> float | None:
        """Estimate the bytes of a record in the log; None where that is not cheap to find out."""
        if not isinstance(self._log, Log):
            return None
        size = records = 0
        for number in range(partitions):
            view = self._view(topic, number)
            bounds = view.bounds()
            size += sum(each for _, each in view.segment_sizes())
            records += bounds.high_watermark - bounds.log_start
        return size / records if records else None

    def _embedded(self, topic: str, partition: int) -> Head:
        view = self._view(topic, partition)
        bounds = view.bounds()
        return Head(bounds.log_start, min(bounds.high_watermark, view.last_stable(bounds)))

    def _view(self, topic: str, partition: int) -> PartitionView:
        view = self._views.get((topic, partition))
        if view is None:
            if not isinstance(self._log, Log):
                raise InvalidError("only an embedded log has views")
            view = self._views[topic, partition] = self._log.view(topic, partition)
        return view
