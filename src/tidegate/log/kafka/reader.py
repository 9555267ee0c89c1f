"""Records of a Kafka cluster as Arrow batches, beside any consumer: it joins no group and commits nothing.

Positions are asked of the cluster for all partitions at once; messages become one Arrow batch a partition, without
passing through Python objects (`consumer`).

R1  a position never passes its stop: what lies behind it belongs to whoever reads on from there.
R2  iterating ends: where nothing comes any more although the partition goes on, the cluster is out of reach.

Thread rule: one reader, one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.durations import DurationLike, milliseconds
from tidegate.errors import OffsetOutOfRangeError, UnavailableError
from tidegate.log.access.positions import Position, PositionKind, StartLike, parse_positions
from tidegate.log.kafka.client import calling, load_client, translated
from tidegate.log.kafka.consumer import Fetched, MessageConsumer
from tidegate.log.kafka.offsets import Offsets

_FETCH_MESSAGES = 10_000
_FETCH_WAIT_MS = 50  # of a range: how long a broker may take to say that only markers are left in it
_FETCHED_AHEAD = 100_000
_QUEUE_WAIT_MS = 10  # a client that has fetched enough looks again after that; a second is its own
_STALL_MS = 10_000


class _Track:
    """One partition being read."""

    def __init__(self, start: int, stop: int | None) -> None:
        self.offset = start
        self.stop = stop
        self.at_end = False

    @property
    def is_done(self) -> bool:
        return self.stop is not None and self.offset >= self.stop


class KafkaReader:
    """Iterates `pyarrow.RecordBatch` of `RECORD_SCHEMA` from a cluster; made by `KafkaLog.reader`."""

    def __init__(
        self,
        servers: str,
        client: Mapping[str, Any],
        topic: str,
        partitions: Sequence[int],
        *,
        start: StartLike = "earliest",
        stop: StartLike | None = None,
        isolation: str = "read_uncommitted",
        follow: bool = False,
        admin: Any | None = None,
    ) -> None:
        self.topic = topic
        self.partitions = tuple(partitions)
        self.isolation = isolation
        self.follow = follow
        self._servers = servers
        load_client()
        self._clock = SystemClock()
        if admin is None:
            make = import_module("confluent_kafka.admin").AdminClient
            admin = calling("configure the Kafka client", servers, lambda: make(dict(client)))
        self._offsets = Offsets(servers, admin, topic, isolation)
        self._ready: deque[pa.RecordBatch] = deque()
        now_ms = self._clock.now_ms()
        starts = self._resolve(parse_positions(start, self.partitions, now_ms=now_ms))
        stops: Mapping[int, int | None] = dict.fromkeys(self.partitions)
        if stop is not None:
            stops = self._resolve(parse_positions(stop, self.partitions, now_ms=now_ms))
        self._tracks = {number: _Track(starts[number], stops[number]) for number in self.partitions}
        ranges = [track.stop - track.offset for track in self._tracks.values() if track.stop is not None]
        settings = {
            "group.id": "tidegate-reader",
            **({} if stop is None else _of_range(max(ranges, default=0))),
            **client,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "isolation.level": isolation,
        }
        self._consumer = MessageConsumer(settings, servers, topic, most=_FETCH_MESSAGES)
        self._assign()

    def __enter__(self) -> KafkaReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Batches up to `stop`, or up to where the partitions end now; without end when following."""
        if not self.follow:
            ends = self.end_offsets()
            for number, track in self._tracks.items():
                track.stop = max(ends[number], track.offset) if track.stop is None else track.stop
        moved_ms, before = self._clock.monotonic_ms(), self.positions()
        while not self.is_done:
            batch = self.poll(1000)
            if batch is not None:
                yield batch
            if batch is not None or self.positions() != before:
                moved_ms, before = self._clock.monotonic_ms(), self.positions()
            elif not self.follow and self._clock.monotonic_ms() - moved_ms >= _STALL_MS:
                raise self._stalled()

    def poll(self, timeout: int | DurationLike = 0) -> pa.RecordBatch | None:
        """The next batch, of one partition, waiting up to `timeout`; None when none came or all is read."""
        deadline_ms = self._clock.monotonic_ms() + milliseconds(timeout)
        while not self._ready:
            if self.is_done:
                return None
            left_ms = max(deadline_ms - self._clock.monotonic_ms(), 0)
            self._take(left_ms)
            if left_ms == 0:
                break
        return self._ready.popleft() if self._ready else None

    @property
    def is_done(self) -> bool:
        """Whether every partition has reached its stop, and all of it was handed out."""
        return not self._ready and all(track.is_done for track in self._tracks.values())

    def positions(self) -> dict[int, int]:
        """Partition → the next offset."""
        return {number: track.offset for number, track in self._tracks.items()}

    def seek(self, partition: int, offset: int) -> None:
        """Read the partition from `offset` next."""
        self._ready.clear()
        self._tracks[partition].offset = offset
        self._assign()

    def start_offsets(self) -> dict[int, int]:
        """Partition → its first offset."""
        return self._offsets.first(self.partitions)

    def end_offsets(self) -> dict[int, int]:
        """Partition → the offset readers of this isolation may not reach yet."""
        return self._offsets.end(self.partitions)

    def close(self) -> None:
        self._consumer.close()

    # -- inside ----------------------------------------------------------------------------------

    def _assign(self) -> None:
        self._consumer.assign(self.positions())

    def _take(self, timeout_ms: int) -> None:
        """Fetch messages and line them up as one batch a partition."""
        fetched = self._consumer.fetch(timeout_ms)
        if fetched is None:
            return
        with fetched:
            start = 0
            for place in np.flatnonzero(fetched.rows["error"]).tolist():
                self._line_up(fetched, start, place)  # what came before an error counts before it
                self._note_error(fetched, place)
                start = place + 1
            self._line_up(fetched, start, len(fetched.rows))

    def _line_up(self, fetched: Fetched, start: int, stop: int) -> None:
        """Make a batch of each partition's messages that lie in its range, and move on behind them."""
        partitions = fetched.rows["partition"][start:stop]
        for number in np.unique(partitions).tolist():
            rows = start + np.flatnonzero(partitions == number)
            track, offsets = self._tracks[number], fetched.rows["offset"][rows]
            low = int(np.searchsorted(offsets, track.offset))
            high = len(offsets) if track.stop is None else max(low, int(np.searchsorted(offsets, track.stop)))
            if low < high:
                self._ready.append(fetched.batch(rows[low:high]))
                track.offset = int(offsets[high - 1]) + 1
            if high < len(offsets) and track.stop is not None:
                track.offset = max(track.offset, track.stop)  # R1: nothing but markers was left before it

    def _note_error(self, fetched: Fetched, place: int) -> None:
        error, number = fetched.error(place), int(fetched.rows["partition"][place])
        offset, track = int(fetched.rows["offset"][place]), self._tracks.get(number)
        if error.name() == "_PARTITION_EOF":
            if track is not None:  # the last offsets may be markers, which no message shows
                end = offset if track.stop is None else min(offset, track.stop)
                track.offset = max(track.offset, end)
            return
        if error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE") and track is not None:
            first, end = self.start_offsets()[number], self.end_offsets()[number]
            raise OffsetOutOfRangeError(
                f"offset {track.offset} of {self.topic}-{number} is not there: the partition "
                f"holds {first} to {end}; start at 'earliest' (-o start) or within that range",
                offset=track.offset,
                first=first,
                end=end,
            )
        raise translated(error, f"read topic {self.topic}", self._servers)

    def _stalled(self) -> UnavailableError:
        number, track = next(each for each in self._tracks.items() if not each[1].is_done)
        return UnavailableError(
            f"{self._servers} sent nothing of {self.topic}-{number} from offset {track.offset} on "
            f"for {_STALL_MS // 1000} s, though the range goes on to {track.stop}; check that its brokers are up"
        )

    def _resolve(self, positions: Mapping[int, Position]) -> dict[int, int]:
        """Partition → the offset meant."""
        if all(position.kind is PositionKind.OFFSET for position in positions.values()):
            return {number: position.value for number, position in positions.items()}
        firsts, ends = self.start_offsets(), self.end_offsets()
        times = {
            number: position.value
            for number, position in positions.items()
            if position.kind is PositionKind.TIME
        }
        at_times = self._offsets.at(times) if times else {}
        resolved: dict[int, int] = {}
        for number, (kind, value) in positions.items():
            if kind is PositionKind.OFFSET:
                resolved[number] = value
            elif kind is PositionKind.EARLIEST:
                resolved[number] = firsts[number]
            elif kind is PositionKind.BEFORE_END:
                resolved[number] = max(ends[number] - value, firsts[number])
            elif kind is PositionKind.TIME and at_times[number] >= 0:
                resolved[number] = at_times[number]
            else:
                resolved[number] = ends[number]
        return resolved


def _of_range(records: int) -> dict[str, int]:
    """Settings for reading so many records and no more: the client fetches ahead, by default a hundred thousand."""
    return {
        "fetch.wait.max.ms": _FETCH_WAIT_MS,
        "queued.min.messages": min(max(records, 1), _FETCHED_AHEAD),
        "fetch.queue.backoff.ms": _QUEUE_WAIT_MS,
    }
