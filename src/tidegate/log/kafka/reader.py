"""Read records of a Kafka cluster as Arrow batches, without joining a consumer group or committing offsets.

`MessageConsumer` fetches messages of assigned partitions as Arrow columns, without a Python object for each message.
The result of `fetch` is memory of librdkafka until it is closed; `batch` copies it once. `KafkaReader`
requests the end offsets of all partitions at once and makes one Arrow batch for each partition.

R1  a position never passes its stop offset.
R2  a position is after the records that were returned, not after those only fetched: it can be the `start` of
    another reader.
R3  after an error, a seek, or iteration up to an end, nothing is skipped: the client fetches again what it
    had fetched and not returned. Records before an error are returned before it is raised.
R4  a transient condition, such as a leader that moves, is waited for, and raised when it lasts too long.
    Iteration ends: if no record arrives although the partition has more, it raises `UnavailableError`.

Thread rule: one reader, one thread.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.durations import DurationLike, milliseconds
from tidegate.errors import InvalidError, OffsetOutOfRangeError, TidegateError, UnavailableError
from tidegate.kernels.librdkafka import (
    HEADER_ROW,
    MESSAGE_ROW,
    NONE,
    copy_values,
    let_go,
    look_at_headers,
    look_at_messages,
)
from tidegate.log.format.record_builder import header_names
from tidegate.log.format.records import HEADER_TYPE, HEADERS_TYPE, RECORD_SCHEMA, TIMESTAMP_TYPE, TOPIC_TYPE
from tidegate.log.kafka.client import ClientError, Library, admin_client, library, load_client, translated
from tidegate.log.kafka.log import Offsets
from tidegate.log.log import data_records
from tidegate.log.reader import Position, PositionKind, StartLike, parse_positions, resolve

Rows = npt.NDArray[Any]
MOST_BYTES: Final = (1 << 31) - 1  # of a column: Arrow's offsets have 31 bits


class MessageConsumer:
    """Fetches messages of one topic; joins no group."""

    def __init__(self, settings: Mapping[str, Any], servers: str, topic: str, *, most: int) -> None:
        self._library = library()
        self._servers, self._topic = servers, topic
        consumer = self._library.consumer(settings)
        queue = self._library.calls["rd_kafka_queue_get_consumer"](consumer)
        self._consumer, self._queue = consumer, queue
        self._messages = np.zeros(most, np.int64)
        self._end = weakref.finalize(self, _end, self._library, consumer, queue)

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def assign(self, offsets: Mapping[int, int]) -> None:
        """Fetch these partitions from these offsets on."""
        self._require_open()
        error = self._library.assign(self._consumer, self._topic, offsets)
        if error is not None:
            raise translated(error, f"read topic {self._topic}", self._servers)

    def fetch(self, timeout_ms: int) -> Fetched | None:
        """Return the messages that arrived, after waiting up to `timeout_ms` for the first; None when none did."""
        self._require_open()
        calls, room = self._library.calls, self._messages
        first = calls["rd_kafka_consumer_poll"](self._consumer, timeout_ms)
        if not first:
            return None
        room[0] = first  # a request for many would wait for all of them
        more = calls["rd_kafka_consume_batch_queue"](self._queue, 0, room[1:].ctypes.data, len(room) - 1)
        fetched = Fetched(self._library, self._topic, room[: 1 + max(more, 0)].copy())
        if more < 0:
            fetched.close()
            error = self._library.error(calls["rd_kafka_last_error"]())
            raise translated(error, f"read topic {self._topic}", self._servers)
        return fetched

    def close(self) -> None:
        self._end()

    def _require_open(self) -> None:
        if not self.is_open:  # its memory is freed: calling the library would crash the process
            raise InvalidError(f"the reader of {self._topic} was closed; open another")


class Fetched:
    """Fetched messages, and errors among them, in order; `rows` has a `MESSAGE_ROW` for each."""

    def __init__(self, client: Library, topic: str, messages: npt.NDArray[np.int64]) -> None:
        self._library, self._topic, self._messages = client, topic, messages
        self.rows: Rows = np.zeros(len(messages), MESSAGE_ROW)
        of = client.addresses
        look_at_messages(
            messages, of["timestamp_of"], of["headers_of"], of["count_of"], np.zeros(1, np.int64), self.rows
        )

    def __enter__(self) -> Fetched:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the messages."""
        let_go(self._messages, self._library.addresses["destroy"])
        self._messages = self._messages[:0]

    def error(self, row: int) -> ClientError:
        """Return the error at this row."""
        said = self._library.calls["rd_kafka_message_errstr"](int(self._messages[row]))
        return self._library.error(int(self.rows["error"][row]), (said or b"").decode("utf-8", "replace"))

    def batch(self, chosen: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """Return these rows, all of one partition, as an Arrow batch."""
        rows: Rows = self.rows[chosen]
        count, partition = len(rows), int(rows["partition"][0])
        times = np.ascontiguousarray(rows["timestamp"])
        columns = [
            pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([self._topic])),
            pa.array(np.full(count, partition, np.int32)),
            pa.array(np.ascontiguousarray(rows["offset"])),
            pa.Array.from_buffers(TIMESTAMP_TYPE, count, [_bitmap(times != NONE), pa.py_buffer(times)]),
            _binary(rows["key"], rows["key_length"]),
            _binary(rows["value"], rows["value_length"]),
            self._headers(rows),
        ]
        columns[0] = columns[0].cast(TOPIC_TYPE)
        return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)

    def _headers(self, rows: Rows) -> pa.Array:
        counts = np.ascontiguousarray(rows["header_count"])
        ends = _ends(counts)
        entries: Rows = np.zeros(int(ends[-1]), HEADER_ROW)
        look_at_headers(
            np.ascontiguousarray(rows["headers"]),
            counts,
            self._library.addresses["header_at"],
            np.zeros(3, np.int64),
            entries,
        )
        names = header_names(_binary(entries["name"], entries["name_length"]))
        pairs = [names, _binary(entries["value"], entries["value_length"])]
        return pa.ListArray.from_arrays(
            pa.array(ends), pa.StructArray.from_arrays(pairs, fields=list(HEADER_TYPE)), type=HEADERS_TYPE
        )


def _end(client: Library, consumer: int, queue: int) -> None:
    client.calls["rd_kafka_queue_destroy"](queue)
    client.calls["rd_kafka_consumer_close"](consumer)
    client.calls["rd_kafka_destroy"](consumer)


def _binary(addresses: Rows, lengths: Rows) -> pa.Array:
    """Copy values at addresses into a column; a length of `NONE` is a null."""
    count, there = len(lengths), lengths != NONE
    ends = _ends(np.where(there, lengths, 0))
    content = np.empty(int(ends[-1]), np.uint8)
    copy_values(np.ascontiguousarray(addresses), ends, content)
    return pa.Array.from_buffers(
        pa.binary(), count, [_bitmap(there), pa.py_buffer(ends), pa.py_buffer(content)]
    )


def _ends(lengths: Rows) -> npt.NDArray[np.int32]:
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    if ends[-1] > MOST_BYTES:
        raise InvalidError(
            f"{ends[-1]:,} bytes came at once, more than Arrow can count; lower the client's queued.max.messages.kbytes"
        )
    return ends.astype(np.int32)


def _bitmap(there: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    return None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))


_FETCH_MESSAGES = 10_000
_FETCH_WAIT_MS = 50  # of a range: how long a broker waits when only markers are left in it
_FETCHED_AHEAD = 100_000
_QUEUE_WAIT_MS = 10  # a client with full buffers checks again after that; its default is a second
_STALL_MS = 10_000


class _Track:
    """One partition being read: the next offset to return, and the next one to fetch."""

    def __init__(self, start: int, stop: int | None) -> None:
        self.offset = self.fetched = start
        self.stop = stop
        self.waiting = 0
        """Batches that came and were not handed out."""
        self.is_cut = False
        """Whether the client sent more than was wanted: it must be told to go back if more is."""

    def fetched_to(self, offset: int) -> None:
        """Record that everything before `offset` was fetched; if nothing waits, it counts as returned, too."""
        self.fetched = max(self.fetched, offset)
        if not self.waiting:
            self.offset = self.fetched

    @property
    def is_done(self) -> bool:
        return self.stop is not None and self.offset >= self.stop


class KafkaReader:
    """Iterator over `pyarrow.RecordBatch` of `RECORD_SCHEMA` from a cluster; made by `KafkaLog.reader`."""

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
        """Open a reader. With `control_records` it also returns Tidegate's own records (see `log.reader`)."""
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
        """Yield batches up to `stop`, or up to the current end of the partitions; without end when following."""
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
        """Return the next batch, of one partition, waiting up to `timeout`; None when none came or all is read."""
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
        """Wait until a batch is ready or the deadline has passed; return whether one is ready."""
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
        """Return whether every partition has reached its stop and all records were returned."""
        return not self._ready and all(track.is_done for track in self._tracks.values())

    def positions(self) -> dict[int, int]:
        """Return partition → next offset (R2); usable as `start` of another reader."""
        return {number: track.offset for number, track in self._tracks.items()}

    def seek(self, partition: int, offset: int) -> None:
        """Continue the partition at `offset`; records that were fetched ahead are fetched again."""
        track = self._tracks.get(partition)
        if track is None:
            raise InvalidError(f"partition {partition} of {self.topic} is not read here")
        self._ready = deque(each for each in self._ready if each[0] is not track)
        self._failure = None  # an error that persists will be reported again
        track.offset = track.fetched = offset
        track.waiting = 0
        self._assign()

    def start_offsets(self) -> dict[int, int]:
        """Return partition → its first offset."""
        return self._offsets.first(self.partitions)

    def end_offsets(self) -> dict[int, int]:
        """Return partition → the first offset that readers of this isolation level cannot read yet."""
        return self._offsets.end(self.partitions)

    def close(self) -> None:
        self._consumer.close()

    def _assign(self) -> None:
        """Assign every partition from its current position (R3)."""
        self._consumer.assign({number: track.fetched for number, track in self._tracks.items()})
        for track in self._tracks.values():
            track.is_cut = False

    def _take(self, timeout_ms: int) -> None:
        """Fetch messages and queue a batch for each partition; an error waits for what came before it (R3)."""
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
        """Return whether a transient condition has not lasted too long yet (R4)."""
        now_ms = self._clock.monotonic_ms()
        self._troubled_ms = now_ms if self._troubled_ms is None else self._troubled_ms
        return now_ms - self._troubled_ms < _STALL_MS

    def _line_up(self, fetched: Fetched, start: int, stop: int) -> None:
        """Make a batch of each partition's messages that lie in its range, and advance its position."""
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
                track.fetched_to(track.stop)  # R1: only markers were left before it
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
        """Return partition → the offset of its position."""
        if all(position.kind is PositionKind.OFFSET for position in positions.values()):
            return {number: position.value for number, position in positions.items()}
        firsts, ends = self.start_offsets(), self.end_offsets()
        times = {
            number: position.value
            for number, position in positions.items()
            if position.kind is PositionKind.TIME
        }
        found = self._offsets.at(times) if times else {}
        at_times = {number: offset for number, offset in found.items() if offset >= 0}
        return {
            number: resolve(position, firsts[number], ends[number], at_times.get(number))
            for number, position in positions.items()
        }


def _of_range(records: int) -> dict[str, int]:
    """Return client settings that limit prefetching to so many records; the default is a hundred thousand."""
    return {
        "fetch.wait.max.ms": _FETCH_WAIT_MS,
        "queued.min.messages": min(max(records, 1), _FETCHED_AHEAD),
        "fetch.queue.backoff.ms": _QUEUE_WAIT_MS,
    }
