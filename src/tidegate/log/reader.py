"""Read records of a topic as Arrow batches, from any process, while the topic is written.

`Reader` keeps the position of each partition: its start, its next offset and its stop. Start and stop are given as

| value | meaning |
|---|---|
| `"earliest"`, `"start"`, `"beginning"` | the first record in the log |
| `"latest"`, `"end"` | after the last record that is in the log now |
| `42` | offset 42 |
| `-10` | ten offsets before the end, at the earliest the start |
| `"@1767225600000"`, `"@2026-01-01T10:00Z"`, a `datetime` | the first record at or after that time |
| `"@-1h"` | the same, an hour ago |
| `{0: 42, 1: "earliest"}` | one for each partition |

A number may be given as a string. Only `parse_range` accepts the two-sided forms of the command line.

R1  only whole batches below the high watermark are returned (below the last stable offset, and without
    aborted transactions, for `isolation="read_committed"`).
R2  memory is bounded by `max_bytes` of the log (or one larger batch) and `max_piece_bytes` of records.
R3  records before damage are returned first; then `CorruptError` names the position and the offset to resume at.
R4  Tidegate's own control records are left out unless requested; positions and offsets count them.
R5  an offset that retention removed raises `OffsetOutOfRangeError`, never a silent jump.

Thread rule: one reader, one thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.durations import DurationLike, SizeLike, duration_ms, milliseconds, moment_ms, size_bytes
from tidegate.errors import CorruptError, InvalidError, verify_command
from tidegate.log.fetch import Fetched
from tidegate.log.format.decode import BatchTable, DecodeLimits, check_crcs, decode_pieces, scan_batches
from tidegate.log.log import data_records
from tidegate.log.partition_reader import Bounds, PartitionView

if TYPE_CHECKING:
    from tidegate.log.log import Log


PlaceLike: TypeAlias = "int | str | datetime | Position"
StartLike: TypeAlias = "PlaceLike | Mapping[int, PlaceLike]"

_NUMBER = re.compile(r"[+-]?\d{1,19}")
_HELP = "use start, end, N, -N (N before the end), @TIME or @FROM:TO"


class PositionKind(Enum):
    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    BEFORE_END = "before the end"
    TIME = "time"


class Position(NamedTuple):
    """A position in a partition; `value` is an offset, a count or epoch milliseconds."""

    kind: PositionKind
    value: int = 0


EARLIEST = Position(PositionKind.EARLIEST)
LATEST = Position(PositionKind.LATEST)
_WORDS = {
    "earliest": EARLIEST,
    "start": EARLIEST,
    "beginning": EARLIEST,
    "oldest": EARLIEST,
    "latest": LATEST,
    "end": LATEST,
    "newest": LATEST,
}


def parse_position(said: PlaceLike, *, now_ms: int = 0) -> Position:
    """Parse one position; relative times count from `now_ms`."""
    if isinstance(said, bool):
        raise TypeError("a position is an offset, a word, a time or a mapping, not a bool")
    if isinstance(said, Position):
        return said
    if isinstance(said, datetime):
        return Position(PositionKind.TIME, moment_ms(said))
    if isinstance(said, int):
        return _offset(said)
    text = said.strip()
    if (known := _WORDS.get(text.lower())) is not None:
        return known
    if _NUMBER.fullmatch(text):
        return _offset(int(text))
    if text.startswith("@"):
        return Position(PositionKind.TIME, _time(text[1:], now_ms))
    raise InvalidError(f"{said!r} is not a position; {_HELP}")


def parse_positions(said: StartLike, partitions: tuple[int, ...], *, now_ms: int = 0) -> dict[int, Position]:
    """Parse the position of each partition."""
    if not isinstance(said, Mapping):
        position = parse_position(said, now_ms=now_ms)
        return dict.fromkeys(partitions, position)
    missing = sorted(set(partitions) - set(said))
    unknown = sorted(set(said) - set(partitions))
    if missing or unknown:
        wrong = f"partition {missing[0]} has none" if missing else f"partition {unknown[0]} is not read"
        raise InvalidError(f"positions {dict(said)!r} do not fit partitions {list(partitions)}: {wrong}")
    return {number: parse_position(said[number], now_ms=now_ms) for number in partitions}


def resolve(position: Position, first: int, end: int, at_time: int | None) -> int:
    """Return the offset of a position in a partition of [first, end); `at_time` answers a time (None: the end)."""
    kind, value = position
    if kind is PositionKind.EARLIEST:
        return first
    if kind is PositionKind.OFFSET:
        return value
    if kind is PositionKind.BEFORE_END:
        return max(end - value, first)
    return end if kind is PositionKind.LATEST or at_time is None else at_time


def parse_range(text: str, *, now_ms: int) -> tuple[Position, Position | None]:
    """Parse the command line's `-o` into start and stop: `@T1:T2`, `N:M`, `:end`, or a single position."""
    stripped = text.strip()
    if stripped.startswith("@"):
        return _time_range(stripped, now_ms)
    first, colon, last = stripped.partition(":")
    if not colon:
        return parse_position(stripped, now_ms=now_ms), None
    return (
        parse_position(first or "start", now_ms=now_ms),
        parse_position(last or "end", now_ms=now_ms),
    )


def _time_range(text: str, now_ms: int) -> tuple[Position, Position | None]:
    """Parse a range of times; a single time is tried first, because it holds colons, too."""
    try:
        return parse_position(text, now_ms=now_ms), None
    except InvalidError as not_one_time:
        for at in (i for i, letter in enumerate(text) if letter == ":"):
            try:
                start = _time(text[1:at], now_ms)
                stop = _time(text[at + 1 :].removeprefix("@"), now_ms)
            except InvalidError:
                continue
            return Position(PositionKind.TIME, start), Position(PositionKind.TIME, stop)
        raise not_one_time from None


def _offset(number: int) -> Position:
    if number < 0:
        return Position(PositionKind.BEFORE_END, -number)
    return Position(PositionKind.OFFSET, number)


def _time(text: str, now_ms: int) -> int:
    stripped = text.strip()
    if stripped.isdigit() and len(stripped) <= 19:
        return moment_ms(int(stripped))
    if stripped.startswith("-"):
        return now_ms - duration_ms(stripped[1:])
    if not stripped:
        raise InvalidError(f"an empty time; {_HELP}")
    return moment_ms(stripped)


IsolationName: TypeAlias = Literal["read_uncommitted", "read_committed"]
DEFAULT_MAX_BYTES = 12 << 20  # measured: less costs more per fetch, more leaves the cache
DEFAULT_PIECE_BYTES = 32 << 20
_SHORTEST_PAUSE_MS = 1
_LONGEST_PAUSE_MS = 50


class _Track:
    """One partition being read: the next offset, and the offset to stop at (exclusive)."""

    def __init__(self, view: PartitionView, offset: int, stop: int | None) -> None:
        self.view = view
        self.offset = offset
        self.stop = stop

    @property
    def is_done(self) -> bool:
        return self.stop is not None and self.offset >= self.stop


class Reader:
    """Iterator over `pyarrow.RecordBatch` of `RECORD_SCHEMA`; made by `Log.reader`.

    Iteration ends at `stop`, or where the log ended when it began; with `follow=True` it waits for more.
    `poll` returns the next batch, or None after the timeout.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        partitions: Sequence[int] | None = None,
        *,
        start: StartLike = "earliest",
        stop: StartLike | None = None,
        isolation: IsolationName = "read_uncommitted",
        follow: bool = False,
        max_bytes: SizeLike = DEFAULT_MAX_BYTES,
        max_piece_bytes: SizeLike = DEFAULT_PIECE_BYTES,
        check_crcs: bool = True,
        control_records: bool = False,
        buffer: bytearray | None = None,
    ) -> None:
        """Open a reader. With `control_records` it also returns Tidegate's own records, which a writer with
        `integrity=True` writes between the others. `buffer` is memory to fetch into; pass it to many short-lived
        readers.
        """
        if isolation not in ("read_uncommitted", "read_committed"):
            raise InvalidError(f"isolation={isolation!r}: choose 'read_uncommitted' or 'read_committed'")
        description = log.describe(topic)
        numbers = description.partition_numbers if partitions is None else tuple(partitions)
        if len(set(numbers)) != len(numbers):
            raise InvalidError(f"partitions {list(numbers)} name one twice")
        self.topic = topic
        self.partitions = numbers
        self.isolation = isolation
        self.follow = follow
        self.max_bytes = max(size_bytes(max_bytes), 1)
        self._limits = DecodeLimits(max_piece_bytes=max(size_bytes(max_piece_bytes), 1))
        self._check_crcs = check_crcs
        self._control_records = control_records
        self._clock = log.clock
        self._records = log.metrics.counter(
            "tidegate_records_total", "records by outcome", ("topic", "partition", "verdict")
        )
        self._buffer = buffer  # decoding copies out of it, so it can be reused
        self._pieces: Iterator[pa.RecordBatch] = iter(())
        self._turn = 0
        now_ms = log.clock.now_ms()
        starts = parse_positions(start, numbers, now_ms=now_ms)
        stops = None if stop is None else parse_positions(stop, numbers, now_ms=now_ms)
        self._tracks = [
            self._track(
                log.view(topic, number, description=description),
                starts[number],
                None if stops is None else stops[number],
            )
            for number in numbers
        ]

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield batches up to `stop`, or up to the current end of the log; without end when following."""
        if self.follow:
            while not self.is_done:
                batch = self.poll(_LONGEST_PAUSE_MS * 20)
                if batch is not None:
                    yield batch
            return
        ends = self.end_offsets()
        open_ended = [track for track in self._tracks if track.stop is None]
        for track in open_ended:
            track.stop = max(ends[track.view.partition], track.offset)
        try:
            while (batch := self._next_batch()) is not None:
                yield batch
        finally:
            for track in open_ended:
                track.stop = None

    def poll(self, timeout: int | DurationLike = 0) -> pa.RecordBatch | None:
        """Return the next batch, waiting up to `timeout`; None when none came or `stop` is reached."""
        deadline_ms = self._clock.monotonic_ms() + milliseconds(timeout)
        pause_ms = _SHORTEST_PAUSE_MS
        while True:
            batch = self._next_batch()
            if batch is not None or self.is_done:
                return batch
            left_ms = deadline_ms - self._clock.monotonic_ms()
            if left_ms <= 0:
                return None
            self._clock.sleep_ms(min(pause_ms, left_ms))
            pause_ms = min(pause_ms * 2, _LONGEST_PAUSE_MS)

    def read_all(self) -> pa.Table:
        """Return everything up to the end as one table: for small topics and tests."""
        from tidegate.log.format.records import RECORD_SCHEMA

        return pa.Table.from_batches(list(self), RECORD_SCHEMA)

    @property
    def is_done(self) -> bool:
        """Return whether every partition has reached its stop."""
        return all(track.is_done for track in self._tracks)

    def positions(self) -> dict[int, int]:
        """Return partition → next offset; usable as `start` of another reader."""
        return {track.view.partition: track.offset for track in self._tracks}

    def seek(self, partition: int, offset: int) -> None:
        """Continue the partition at `offset`; records that were fetched ahead are read again."""
        for track in self._tracks:
            if track.view.partition == partition:
                self._pieces = iter(())
                track.offset = offset
                return
        raise InvalidError(f"partition {partition} of {self.topic} is not read here")

    def end_offsets(self) -> dict[int, int]:
        """Return partition → the first offset that readers of this isolation level cannot read yet."""
        return {track.view.partition: self._end(track.view, track.view.bounds()) for track in self._tracks}

    def lag(self) -> int:
        """Return the number of offsets between the positions and the end, over all partitions."""
        ends = self.end_offsets()
        return sum(max(ends[number] - offset, 0) for number, offset in self.positions().items())

    def close(self) -> None:
        """Drop the records that were fetched ahead; a reader holds no other resources."""
        self._pieces = iter(())
        self._buffer = None

    def _track(self, view: PartitionView, start: Position, stop: Position | None) -> _Track:
        bounds = view.bounds()
        offset = self._resolve(view, start, bounds)
        if start.kind is PositionKind.OFFSET and not bounds.log_start <= offset <= bounds.high_watermark:
            raise view.out_of_range(offset, bounds)
        return _Track(view, offset, None if stop is None else self._resolve(view, stop, bounds))

    def _resolve(self, view: PartitionView, position: Position, bounds: Bounds) -> int:
        end, found = self._end(view, bounds), None
        if position.kind is PositionKind.TIME:
            found = view.offset_for_time(position.value, bounds)
        return resolve(position, bounds.log_start, end, None if found is None else min(found, end))

    def _end(self, view: PartitionView, bounds: Bounds) -> int:
        return view.last_stable(bounds) if self.isolation == "read_committed" else bounds.high_watermark

    def _next_batch(self) -> pa.RecordBatch | None:
        """Return the next wanted records."""
        while (batch := self._next_piece()) is not None and not self._control_records:
            batch = data_records(batch)
            if batch.num_rows:
                break
        return batch

    def _next_piece(self) -> pa.RecordBatch | None:
        """Return the rest of the last fetch, or fetch from the next partition."""
        while True:
            batch = next(self._pieces, None)
            if batch is not None:
                return batch
            for _ in range(len(self._tracks)):
                track = self._tracks[self._turn]
                self._turn = (self._turn + 1) % len(self._tracks)
                before = track.offset
                self._pieces = self._fetch(track)
                batch = next(self._pieces, None)
                if batch is not None:
                    return batch
                if track.offset != before:
                    break  # only control batches or gaps there: fetch again
            else:
                return None

    def _fetch(self, track: _Track) -> Iterator[pa.RecordBatch]:
        """Fetch once from one partition and yield decoded pieces; the position advances with each piece yielded."""
        view = track.view
        bounds = view.bounds()
        end = self._end(view, bounds)
        if track.is_done or track.offset == end:
            return
        if self._buffer is None:
            self._buffer = bytearray(self.max_bytes)
        try:
            fetched = view.fetch(track.offset, self.max_bytes, bounds, buffer=self._buffer)
        except CorruptError as error:
            raise _damage(view, track.offset, str(error), error) from error
        if fetched is None:
            if track.offset < end:
                raise _damage(view, track.offset, f"nothing readable is left before the end at {end}")
            return
        table = self._sound(track, fetched, end)
        if len(table) == 0:
            return
        stop = end if track.stop is None else min(track.stop, end)
        following = int(table.last_offset[-1]) + 1
        try:
            yield from self._decode(track, fetched, table.end, stop, following)
        except CorruptError as error:
            # Records before the malformed batch are returned first (R3).
            number = int(np.searchsorted(table.position, (error.position or 0) - fetched.start_position))
            if error.position is None or not 0 < number < len(table):
                raise _damage(view, track.offset, str(error), error) from error
            yield from self._decode(track, fetched, int(table.position[number]), stop, following)
            following = int(table.base_offset[number])
        track.offset = max(track.offset, following if track.stop is None else min(following, track.stop))

    def _decode(
        self, track: _Track, fetched: Fetched, length: int, stop: int, following: int
    ) -> Iterator[pa.RecordBatch]:
        view = track.view
        aborted = view.aborted(track.offset, following) if self.isolation == "read_committed" else []
        for piece in decode_pieces(
            memoryview(fetched.data)[:length],
            topic=self.topic,
            partition=view.partition,
            from_offset=track.offset,
            to_offset=stop,
            check_crcs=False,
            aborted=aborted,
            limits=self._limits,
            path=view.log_path(fetched.segment_base),
            file_position=fetched.start_position,
        ):
            track.offset = int(piece.column("offset")[-1].as_py()) + 1
            self._records.add(piece.num_rows, topic=self.topic, partition=view.partition, verdict="read")
            yield piece

    def _sound(self, track: _Track, fetched: Fetched, end: int) -> BatchTable:
        """Return the leading batches that are below the end and undamaged; raise if the first one is damaged."""
        table = scan_batches(fetched.data, strict=False)
        last_offset = table.last_offset
        sound = last_offset >= table.base_offset
        sound[1:] &= table.base_offset[1:] > last_offset[:-1]
        sound &= ~self._gaps(track, table)
        if self._check_crcs:
            sound &= check_crcs(fetched.data, table)
        below_end = table.base_offset < end
        if len(table) and below_end[0] and not sound[0]:
            why = f"the batch at byte {fetched.start_position} does not match its CRC or its neighbours"
            raise _damage(track.view, track.offset, why)
        if len(table) == 0 and table.fault is not None:
            raise _damage(track.view, track.offset, str(table.fault), table.fault)
        keep = int(np.argmin(good)) if not (good := sound & below_end).all() else len(table)
        bytes_kept = int(table.position[keep - 1] + table.size[keep - 1]) if keep else 0
        return BatchTable(table.rows[:keep], bytes_kept)

    def _gaps(self, track: _Track, table: BatchTable) -> NDArray[np.bool_]:
        """Mark the batches before which offsets are missing that compaction cannot have removed.

        The CRC does not cover a batch's base offset: a flipped one shows as a gap before or after the batch.
        """
        expected = np.empty(len(table), dtype=np.int64)
        expected[:1] = track.offset
        expected[1:] = table.last_offset[:-1] + 1
        gaps = table.base_offset > expected
        return gaps & (expected >= track.view.gaps_below()) if gaps.any() else gaps


def _damage(view: PartitionView, offset: int, why: str, cause: CorruptError | None = None) -> CorruptError:
    """Return the error for an offset that cannot be read, with the offset to resume at (R3)."""
    resume = view.next_sound_offset(offset)
    way_out = (
        f"no sound batch follows; {verify_command(view.folder)} shows the extent"
        if resume is None
        else f"the next sound batch begins at offset {resume}: go on there (-o {resume})"
    )
    return CorruptError(
        f"{view.topic}-{view.partition} is damaged at offset {offset} in {view.folder}: {why}; {way_out}",
        path=None if cause is None else cause.path,
        position=None if cause is None else cause.position,
        offset=offset,
    )
