"""Read a partition: by offset under an isolation level, and by timestamp.

All functions read a `LogView`, an immutable value, while the log is written. So a reader takes no
lock, and a process that has only the folder and a watermark can build its own view.

A fetch returns raw bytes that begin with the batch holding the wanted offset (so perhaps before
it) and may end in the middle of a batch; callers skip both.

Rules: an offset below the log start offset or above the log end is out of range; at or above the isolation's
limit the result is empty. The limit is the log end, the high watermark, or the last stable offset: the
smaller of high watermark and first offset of an open transaction. No byte at or after the batch holding the
limit is returned.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.errors import CorruptError, OffsetOutOfRangeError, verify_command
from tidegate.log.batch_file import headers, sound_headers
from tidegate.log.format.batch import BatchHeader
from tidegate.log.indexes import AbortedTxn, TimestampOffset
from tidegate.log.segment import LogSegment, SegmentList

if TYPE_CHECKING:
    from tidegate.files import File


LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
NO_TIMESTAMP: Final = -1
UNKNOWN: Final = -1
GAPS_ANYWHERE: Final = 2**63 - 1


class Isolation(Enum):
    """Isolation level: the limit of what a reader may see."""

    LOG_END = "log_end"
    HIGH_WATERMARK = "high_watermark"
    TXN_COMMITTED = "txn_committed"


class LogPoint(NamedTuple):
    """An offset and, where known, its file position, so that readers need not search for it."""

    offset: int
    segment_base: int = UNKNOWN
    position: int = UNKNOWN


class LogView(NamedTuple):
    """A partition at one moment. `end` always has its position; `high_watermark` may not."""

    segments: SegmentList
    log_start: int
    end: LogPoint
    high_watermark: LogPoint
    first_unstable: int | None = None
    where: str = "the log"

    @property
    def last_stable_offset(self) -> int:
        watermark = self.high_watermark.offset
        return watermark if self.first_unstable is None else min(self.first_unstable, watermark)

    def limit(self, isolation: Isolation) -> LogPoint:
        """Return the point that no reader of this isolation level may pass."""
        if isolation is Isolation.LOG_END:
            return self.end
        if isolation is Isolation.TXN_COMMITTED and self.last_stable_offset < self.high_watermark.offset:
            return LogPoint(self.last_stable_offset)
        return self.high_watermark

    def size_of(self, segment: LogSegment) -> int:
        """Return the segment's size at the moment of the view."""
        return self.end.position if segment.base_offset == self.end.segment_base else segment.size


class Fetched(NamedTuple):
    """The result of a fetch: raw batches from byte `start_position` of the segment with base `segment_base`."""

    data: bytes | memoryview
    start_position: int
    first_batch_incomplete: bool
    aborted: tuple[AbortedTxn, ...] = ()
    segment_base: int = UNKNOWN


def fetch(
    view: LogView,
    start: int,
    *,
    max_bytes: int,
    isolation: Isolation = Isolation.HIGH_WATERMARK,
    min_one: bool = True,
    buffer: bytearray | None = None,
) -> Fetched:
    """Return batches from `start` on: at most `max_bytes`, or one whole larger batch if `min_one`.

    With a `buffer` the bytes are read into it, if they fit, and `data` is a view of it.
    """
    if not view.log_start <= start <= view.end.offset:
        raise out_of_range(view, start)
    limit = view.limit(isolation)
    if start < limit.offset:
        limit = _resolve(view, limit)
        segments = view.segments.segments
        for index in range(max(view.segments.floor_index(start), 0), len(segments)):
            segment = segments[index]
            if segment.base_offset > limit.segment_base:
                break
            found = _fetch_from(view, segment, start, limit, max_bytes, min_one, buffer)
            if found is not None:
                if isolation is Isolation.TXN_COMMITTED and found.data:
                    return found._replace(aborted=_aborted_in(view, index, start, found))
                return found
    return Fetched(b"", limit.position, False, (), limit.segment_base)


def out_of_range(view: LogView, offset: int) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        f"{view.where} holds offsets {view.log_start} to {view.end.offset} (exclusive), so {offset} cannot be "
        f"read; start at the earliest or latest offset",
        offset=offset,
        first=view.log_start,
        end=view.end.offset,
    )


def _fetch_from(
    view: LogView,
    segment: LogSegment,
    start: int,
    limit: LogPoint,
    max_bytes: int,
    min_one: bool,
    buffer: bytearray | None,
) -> Fetched | None:
    """Return the bytes of one segment; None when it holds nothing at or after `start`."""
    end = view.size_of(segment)
    following = view.segments.next_base(segment.base_offset)
    bound = view.end.offset if following is None else following
    file, hint = segment.open_near(start)
    with file:
        place = segment.locate_in(file, hint, start, end, bound=bound)
        if place is None:
            return None
        allowed = limit.position if segment.base_offset == limit.segment_base else end
        wanted = max(max_bytes, place.size) if min_one else max_bytes
        length = max(min(allowed - place.position, wanted), 0)
        data = _read(file, place.position, length, buffer)
    if len(data) < length:
        raise CorruptError(
            f"{segment.path} ends at {place.position + len(data)} though {end} bytes belong to it; another "
            f"program has cut it: restore it, or reopen the log to recover it",
            path=segment.path,
            position=place.position + len(data),
            offset=start,
        )
    return Fetched(data, place.position, wanted < place.size, (), segment.base_offset)


def _read(file: File, position: int, length: int, buffer: bytearray | None) -> bytes | memoryview:
    if buffer is None or length > len(buffer):
        return file.read_at(position, length)
    view = memoryview(buffer)[:length]
    return view[: file.read_into(position, view)]


def _resolve(view: LogView, point: LogPoint) -> LogPoint:
    """Return the point with its position: the start of the batch that holds its offset."""
    if point.position != UNKNOWN:
        return point
    if point.offset == view.end.offset:
        return view.end
    index = max(view.segments.floor_index(point.offset), 0)
    for segment in view.segments.segments[index:]:
        place = segment.locate(point.offset, view.size_of(segment))
        if place is not None:
            return LogPoint(point.offset, segment.base_offset, place.position)
    return view.end


# -- aborted transactions ------------------------------------------------------------------------


def _aborted_in(view: LogView, index: int, start: int, found: Fetched) -> tuple[AbortedTxn, ...]:
    """Return the aborted transactions that may have records among the fetched bytes."""
    segment = view.segments.segments[index]
    upper = segment.upper_bound(start, found.start_position, len(found.data))
    if upper is None:
        following = view.segments.next_base(segment.base_offset)
        upper = view.end.offset if following is None else following
    return tuple(collect_aborted(view, start, upper))


def collect_aborted(view: LogView, start: int, upper: int) -> list[AbortedTxn]:
    """Return aborted transactions with records in [start, upper), from the transaction indexes."""
    aborted: list[AbortedTxn] = []
    for segment in view.segments.segments[max(view.segments.floor_index(start), 0) :]:
        entries, complete = segment.collect_aborted(start, upper)
        aborted += entries
        if complete:
            break
    return aborted


# -- by timestamp --------------------------------------------------------------------------------


def offset_for_timestamp(view: LogView, timestamp: int) -> TimestampOffset | None:
    """Return the first record at or after `timestamp`; None when there is none.

    Special: −1 the log end, −2 and −4 the log start, −3 the first record with the largest timestamp.
    """
    if timestamp == LATEST:
        return TimestampOffset(NO_TIMESTAMP, view.end.offset)
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return TimestampOffset(NO_TIMESTAMP, view.log_start)
    if timestamp == MAX_TIMESTAMP:
        return _newest(view)
    for segment in view.segments:
        if segment.largest_timestamp >= timestamp:
            return find_by_timestamp(segment, timestamp, view.log_start, view.size_of(segment))
    return None


def find_by_timestamp(
    segment: LogSegment,
    timestamp: int,
    from_offset: int,
    end: int | None = None,
    *,
    below: int = GAPS_ANYWHERE,
    gaps_below: int = GAPS_ANYWHERE,
) -> TimestampOffset | None:
    """Return the segment's first record at or after `timestamp` with an offset in [`from_offset`, `below`).

    `CorruptError` is raised for damage before it, because a damaged batch may hold an earlier such record. From
    `gaps_below` on a missing offset is damage. So is a segment without such a record whose seal says it has one.
    """
    file, position, expected = segment.open_before(timestamp, from_offset)
    end = segment.size if end is None else end
    is_met = from_offset > segment.base_offset  # then the record of the seal may lie below it
    with file:
        try:
            for start, header in sound_headers(file, position, end):
                if start > position and header.base_offset < expected:
                    raise _out_of_place(segment, start, header.base_offset, expected)
                if header.base_offset > expected >= gaps_below:
                    raise _out_of_place(segment, start, header.base_offset, expected)
                if header.base_offset >= below:
                    return None
                if header.max_timestamp >= timestamp:
                    is_met = True  # compaction may have left only the header
                    found = _first_record(file, start, header, timestamp, from_offset)
                    if found is not None:
                        return found
                expected = header.next_offset
        except CorruptError:
            if expected < below:  # beyond `below`, an unfinished batch or preallocated zeros are normal
                raise
            return None
    seal = segment.seal
    if not is_met and seal is not None and seal.max_timestamp >= timestamp:
        raise CorruptError(
            f"{segment.path} holds no record at or after time {timestamp}, though it held one up to offset "
            f"{seal.max_timestamp_offset} when it was sealed; {verify_command(segment.path.parent)} shows the extent "
            "of the damage",
            path=segment.path,
            offset=seal.max_timestamp_offset,
        )
    return None


def _out_of_place(segment: LogSegment, position: int, offset: int, expected: int) -> CorruptError:
    return CorruptError(
        f"{segment.path} holds offset {offset} at position {position}, where {expected} belongs; "
        f"{verify_command(segment.path.parent)} shows the extent of the damage",
        path=segment.path,
        position=position,
        offset=expected,
    )


def _newest(view: LogView) -> TimestampOffset | None:
    """Return the first record with the largest timestamp of the log."""
    segment = max(view.segments, key=lambda candidate: candidate.largest.timestamp)
    timestamp = segment.largest.timestamp
    if timestamp < 0:
        return None
    file, position, _ = segment.open_before(timestamp, segment.base_offset)
    with file:
        for start, header in headers(file, position, view.size_of(segment)):
            if header.max_timestamp == timestamp:
                return _first_record(file, start, header, timestamp, 0)
    return None


def _first_record(
    file: File, position: int, header: BatchHeader, timestamp: int, from_offset: int
) -> TimestampOffset | None:
    """Return the first record of one batch that is late enough in both time and offset."""
    import pyarrow as pa

    from tidegate.log.format.decode import decode

    batch = file.read_at(position, header.size)
    records = decode(
        batch, topic="", partition=0, from_offset=from_offset, control="include", path=file.path,
        file_position=position,
    )  # fmt: skip
    offsets = records.column("offset").to_numpy()
    times = records.column("timestamp").cast(pa.int64()).fill_null(NO_TIMESTAMP).to_numpy()
    late = (times >= timestamp).nonzero()[0]
    return TimestampOffset(int(times[late[0]]), int(offsets[late[0]])) if len(late) else None
