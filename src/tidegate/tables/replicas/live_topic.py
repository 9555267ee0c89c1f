"""The live topic as a leader reads it: where rewinding lands, what comes next, offsets that are gone.

T1  the rewind is from the time of the push's end (or start) in the partition; the first record at or after that time is
    where reading begins. It is looked up once, by the first leader, and stands in the topic switch: a later leader does
    not ask again.
T2  offsets that aged out before they were copied are lost: told with a warning, or refused with `on_gap="fail"`; never
    skipped silently.
T3  offsets that aged out after they were copied, but before what is known of their producers was written down, are no
    loss; but nobody knows their producers' numbers any more, so one that is sent again is taken for new. Told, too, and
    told apart.
T4  offsets count in the topic that the switch names by its id: one that was deleted and created again is not read on.

Thread rule: one thread.
"""

from __future__ import annotations

import warnings
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError, OffsetOutOfRangeError, TidegateWarning, UnavailableError
from tidegate.integrity.columns import read_columns
from tidegate.integrity.control_records import TopicSwitch
from tidegate.integrity.header import ControlType
from tidegate.log.catalog import TopicState
from tidegate.log.log import Log
from tidegate.tables.replicas.following import Following

COMPACTED_MS: Final = 240_000
"""The least life of a record that compaction may take: it is out of the active segment, and was not cleaned at once."""
FOREVER: Final = 1 << 62


class AgedOut(NamedTuple):
    """How many offsets a live topic let go of too early."""

    lost: int = 0
    """Before they were copied (T2)."""
    unknown: int = 0
    """After they were copied, and before their producers' state was written down (T3)."""

    def __add__(self, other: AgedOut) -> AgedOut:  # type: ignore[override]
        return AgedOut(self.lost + other.lost, self.unknown + other.unknown)


def kept_for(config: Any) -> tuple[int, int]:
    """How long, in ms, and up to how many bytes a topic keeps a record at least."""
    life_ms, most_bytes = FOREVER, FOREVER
    if config.deletes:
        life_ms = config.retention_ms if config.retention_ms >= 0 else FOREVER
        most_bytes = config.retention_bytes if config.retention_bytes >= 0 else FOREVER
    if config.compacts:
        life_ms = min(life_ms, max(config.min_compaction_lag_ms, COMPACTED_MS))
    return life_ms, most_bytes


def rewound(log: Any, following: Following, topic: str, rewind_ms: int, rewind_from: str) -> TopicSwitch:
    """Where a live topic is read from, for a partition whose push was drained (T1)."""
    version, partition = following.replica.topic, following.replica.partition
    end = following.replica.drainer.state.end_of_push
    if end < 0:
        raise InvalidError(f"{following.place} has no end of push: nothing to rewind from")
    moment = _time_at(log, version, partition, end)
    if rewind_from == "start":
        moment = _start_of_push(log, version, partition, end)
    start_ms = max(0, moment - rewind_ms)
    with log.reader(topic, [partition], start=f"@{start_ms}") as reader:
        return TopicSwitch(topic, start_ms, reader.positions()[partition], topic_id=topic_id_of(log, topic))


def topic_id_of(log: Any, topic: str) -> str:
    """The id of the topic that has this name now; empty where it is not known."""
    states: dict[str, TopicState] = log.topic_states([topic])
    if topic not in states:
        raise UnavailableError(f"live topic {topic} does not exist (any more); create it again")
    return states[topic].topic_id


class LiveTopic:
    """One partition of a live topic, from an offset on; what lies before `copied` is in the table already."""

    def __init__(
        self,
        log: Any,
        topic: str,
        partition: int,
        offset: int,
        *,
        topic_id: str,
        copied: int,
        read_bytes: int,
        on_gap: str,
    ) -> None:
        self.topic, self.partition = topic, partition
        self.aged_out = AgedOut()
        self.unknown_below = 0
        """What a producer seems to have left out since an offset before this one may have aged out (T3)."""
        self.has_skipped = False
        """Whether offsets that aged out were told of and not yet left behind for good, by a switch behind them."""
        self._log, self._copied, self._on_gap = log, copied, on_gap
        self._topic_id = topic_id
        # A cluster's client decides for itself how much it fetches.
        self._size = {"max_bytes": read_bytes} if isinstance(log, Log) else {}
        self._reader = self._open(offset)

    @property
    def next_offset(self) -> int:
        return int(self._reader.positions()[self.partition])

    def poll(self, timeout_ms: int = 0) -> pa.RecordBatch | None:
        """The next records, None when there are none yet."""
        try:
            found: pa.RecordBatch | None = self._reader.poll(timeout_ms)
        except OffsetOutOfRangeError:
            offset = self.next_offset
            self._reader.close()
            self._reader = self._open(offset)
            return None
        return found

    def close(self) -> None:
        self._reader.close()

    def check(self) -> None:
        """Raise when the topic is not the one any more that offsets count in (T4)."""
        self._require_same(self.next_offset)

    def _require_same(self, offset: int) -> None:
        topic_id = topic_id_of(self._log, self.topic)
        if self._topic_id and topic_id and topic_id != self._topic_id:
            raise InvalidError(
                f"{self.topic}-{self.partition} was read up to offset {offset} of the topic with id {self._topic_id}, "
                f"and was deleted and created again, with id {topic_id}. Push a new version of the table"
            )

    def _open(self, offset: int) -> Any:
        self._require_same(offset)
        with self._log.reader(self.topic, [self.partition], start="earliest") as probe:
            first, end = probe.positions()[self.partition], probe.end_offsets()[self.partition]
        place = f"{self.topic}-{self.partition}"
        if offset > end:
            raise InvalidError(
                f"{place} was read up to offset {offset} and ends at {end}: it was made anew. Push a new version of "
                "the table, or restore the topic"
            )
        lost = range(max(offset, self._copied), first)
        unknown = range(offset, min(first, self._copied))
        if lost:
            what = (
                f"offsets {lost[0]} to {lost[-1]} of {place} aged out before they were copied into the table"
            )
            if self._on_gap == "fail":
                raise OffsetOutOfRangeError(
                    f"{what}; go on without them with on_gap='earliest', or push a new version",
                    offset=offset,
                    first=first,
                    end=end,
                )
            warnings.warn(f"{what}, and are lost; going on at {first}", TidegateWarning, stacklevel=2)
        if unknown:
            self.unknown_below = 0 if lost else first
            warnings.warn(
                f"offsets {unknown[0]} to {unknown[-1]} of {place} aged out after they were copied into the table: "
                "nothing of them is lost, but a producer that sends one of them again is not recognised. No replica "
                "led this partition for longer than the live topic keeps its records",
                TidegateWarning,
                stacklevel=2,
            )
        self.aged_out += AgedOut(len(lost), len(unknown))
        self.has_skipped |= bool(lost or unknown)
        return self._log.reader(
            self.topic,
            [self.partition],
            start={self.partition: max(offset, first)},
            control_records=True,
            **self._size,
        )


def _time_at(log: Any, topic: str, partition: int, offset: int) -> int:
    stop = {partition: offset + 1}
    with log.reader(topic, [partition], start={partition: offset}, stop=stop, control_records=True) as reader:
        for batch in reader:
            return int(batch.column("timestamp").view(pa.int64())[0].as_py())
    raise InvalidError(
        f"{topic}-{partition} offset {offset} is not there any more: the push's end cannot be looked up"
    )


def _start_of_push(log: Any, topic: str, partition: int, end: int) -> int:
    with log.reader(topic, [partition], stop={partition: end}, control_records=True) as reader:
        for batch in reader:
            columns = read_columns(batch.column("headers"))
            found = np.flatnonzero(columns.is_control & (columns.control == ControlType.START_OF_PUSH))
            if len(found):
                return int(batch.column("timestamp").view(pa.int64())[int(found[0])].as_py())
    raise InvalidError(f"{topic}-{partition} has no start of push before offset {end}")
