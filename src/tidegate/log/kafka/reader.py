"""Records of a Kafka cluster as Arrow batches, beside any consumer: it joins no group and commits nothing.

Positions are asked of the cluster for all partitions at once; messages become one Arrow batch a partition, without
passing through Python objects (`consumer`).

R1  a position never passes its stop: what lies behind it belongs to whoever reads on from there.
R2  a position is behind what was handed out, never behind what was only fetched: good as `start` of another reader.
R3  after an error, seeking, or iterating up to an end, nothing is skipped: the client fetches anew what it had sent
    and was not handed out. What came before an error is handed out before it is raised.
R4  what passes by itself, as when a leader moves, is waited for, and raised when it lasts. Iterating ends: where
    nothing comes any more although the partition goes on, the cluster is out of reach.

Thread rule: one reader, one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.durations import DurationLike, milliseconds
from tidegate.errors import InvalidError, OffsetOutOfRangeError, TidegateError, UnavailableError
from tidegate.log.access.numbered_writer import data_records
from tidegate.log.access.positions import Position, PositionKind, StartLike, parse_positions
from tidegate.log.kafka.client import admin_client, load_client, translated
from tidegate.log.kafka.consumer import Fetched, MessageConsumer
from tidegate.log.kafka.offsets import Offsets

_FETCH_MESSAGES = 10_000
_FETCH_WAIT_MS = 50  # of a range: how long a broker may take to say that only markers are left in it
_FETCHED_AHEAD = 100_000
_QUEUE_WAIT_MS = 10  # a client that has fetched enough looks again after that; a second is its own
_STALL_MS = 10_000


class _Track:
    """One partition being read: the next offset to hand out, and the next one to come from the client."""

    def __init__(self, start: int, stop: int | None) -> None:
        self.offset = self.fetched = start
        self.stop = stop
        self.waiting = 0
        """Batches that came and were not handed out."""
        self.is_cut = False
        """Whether the client sent more than was wanted: it must be told to go back if more is."""

    def fetched_to(self, offset: int) -> None:
        """What lies before `offset` has come; where nothing of it waits, it counts as handed out, too."""
        self.fetched = max(self.fetched, offset)
        if not self.waiting:
            self.offset = self.fetched

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
        control_records: bool = False,
        admin: Any | None = None,
    ) -> None:
        """`control_records` hands out Tidegate's own records, too (see the embedded log's reader)."""
        self.topic = topic
        self.partitions = tuple(partitions)
        self.isolation = isolation
        self.follow = follow
        self._control_records = control_records
        self._servers = servers
        load_client()
        self._clock = SystemClock()
        admin = admin_client(servers, client) if admin is None else admin
        self._offsets = Offsets(servers, admin, topic, isolation)
        self._ready: deque[tuple[_Track, pa.RecordBatch]] = deque()
        self._failure: TidegateError | None = None
        self._troubled_ms: int | None = None
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
        open_ended = [] if self.follow else [each for each in self._tracks.items() if each[1].stop is None]
        ends = self.end_offsets() if open_ended else {}
        for number, track in open_ended:
            track.stop = max(ends[number], track.fetched)
        try:
            moved_ms, before = self._clock.monotonic_ms(), self.positions()
            while not self.is_done:
                batch = self.poll(1000)
                if batch is not None:
                    yield batch
                if batch is not None or self.positions() != before:
                    moved_ms, before = self._clock.monotonic_ms(), self.positions()
                elif not self.follow and self._clock.monotonic_ms() - moved_ms >= _STALL_MS:
                    raise self._stalled()
        finally:
            for _, track in open_ended:
                track.stop = None
            if self._consumer.is_open and any(track.is_cut for _, track in open_ended):
                self._assign()

    def poll(self, timeout: int | DurationLike = 0) -> pa.RecordBatch | None:
        """The next batch, of one partition, waiting up to `timeout`; None when none came or all is read."""
        deadline_ms = self._clock.monotonic_ms() + milliseconds(timeout)
        while self._fill(deadline_ms):
            track, batch = self._ready.popleft()
            track.waiting -= 1
            track.offset = int(batch.column("offset")[-1].as_py()) + 1 if track.waiting else track.fetched
            if not self._control_records:
                batch = data_records(batch)
            if batch.num_rows:
                return batch
        return None

    def _fill(self, deadline_ms: int) -> bool:
        """Wait until a batch is ready, up to the deadline; whether one is."""
        while not self._ready:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if self.is_done:
                return False
            left_ms = max(deadline_ms - self._clock.monotonic_ms(), 0)
            self._take(left_ms)
            if left_ms == 0:
                break
        return bool(self._ready)

    @property
    def is_done(self) -> bool:
        """Whether every partition has reached its stop, and all of it was handed out."""
        return not self._ready and all(track.is_done for track in self._tracks.values())

    def positions(self) -> dict[int, int]:
        """Partition → the next offset it will be read at (R2); good as `start` of another reader."""
        return {number: track.offset for number, track in self._tracks.items()}

    def seek(self, partition: int, offset: int) -> None:
        """Read the partition from `offset` next; what was fetched of it is fetched again."""
        track = self._tracks.get(partition)
        if track is None:
            raise InvalidError(f"partition {partition} of {self.topic} is not read here")
        self._ready = deque(each for each in self._ready if each[0] is not track)
        self._failure = None  # what is wrong there still comes again
        track.offset = track.fetched = offset
        track.waiting = 0
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
        """Have every partition sent from where it has come to (R3)."""
        self._consumer.assign({number: track.fetched for number, track in self._tracks.items()})
        for track in self._tracks.values():
            track.is_cut = False

    def _take(self, timeout_ms: int) -> None:
        """Fetch messages and line them up as one batch a partition; an error waits for what came before it (R3)."""
        try:
            fetched = self._consumer.fetch(timeout_ms)
            if fetched is None:
                return
            with fetched:
                start = 0
                for place in np.flatnonzero(fetched.rows["error"]).tolist():
                    self._line_up(fetched, start, place)
                    self._note_error(fetched, place)
                    start = place + 1
                self._line_up(fetched, start, len(fetched.rows))
            self._troubled_ms = None
        except TidegateError as error:
            if not self._consumer.is_open:
                raise
            if not (isinstance(error, UnavailableError) and self._is_patient()):
                self._failure = error
            self._assign()

    def _is_patient(self) -> bool:
        """Whether what passes by itself has not lasted for too long yet (R4)."""
        now_ms = self._clock.monotonic_ms()
        self._troubled_ms = now_ms if self._troubled_ms is None else self._troubled_ms
        return now_ms - self._troubled_ms < _STALL_MS

    def _line_up(self, fetched: Fetched, start: int, stop: int) -> None:
        """Make a batch of each partition's messages that lie in its range, and move on behind them."""
        partitions = fetched.rows["partition"][start:stop]
        for number in np.unique(partitions).tolist():
            rows = start + np.flatnonzero(partitions == number)
            track, offsets = self._tracks[number], fetched.rows["offset"][rows]
            low = int(np.searchsorted(offsets, track.fetched))
            high = len(offsets) if track.stop is None else max(low, int(np.searchsorted(offsets, track.stop)))
            if low < high:
                self._ready.append((track, fetched.batch(rows[low:high])))
                track.waiting += 1
                track.fetched_to(int(offsets[high - 1]) + 1)
            if high < len(offsets) and track.stop is not None:
                track.fetched_to(track.stop)  # R1: nothing but markers was left before it
                track.is_cut = True

    def _note_error(self, fetched: Fetched, place: int) -> None:
        error, number = fetched.error(place), int(fetched.rows["partition"][place])
        offset, track = int(fetched.rows["offset"][place]), self._tracks.get(number)
        if error.name() == "_PARTITION_EOF":
            if track is not None:  # the last offsets may be markers, which no message shows
                track.fetched_to(offset if track.stop is None else min(offset, track.stop))
            return
        if error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE") and track is not None:
            first, end = self.start_offsets()[number], self.end_offsets()[number]
            if first <= track.fetched <= end:
                raise UnavailableError(
                    f"{self._servers} did not find offset {track.fetched} of {self.topic}-{number} ({error.str()}), "
                    f"though the partition holds {first} to {end}: its leader may be moving; try again"
                )
            raise OffsetOutOfRangeError(
                f"offset {track.fetched} of {self.topic}-{number} is not there: the partition "
                f"holds {first} to {end}; start at 'earliest' (-o start) or within that range",
                offset=track.fetched,
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
