"""Read one partition from its folder alone, in any process, without a lock.

`PartitionView` follows a folder while another process appends, rolls, deletes and compacts, and knows how far a
reader may read: to the end that the partition's writer publishes in `tidegate.watermark`. A folder without that
file (a broker's) is read up to its last whole batch; one whose file is damaged, or older than a power failure, up
to its last sound batch and at least to its durable end. `fetch` reads from the `LogView`s it makes.

V1  nothing below the published log start offset is returned, even from a file that is still open.
V2  a read that overlapped a removal or a replacement of log segments is repeated on the new files.
V3  offsets are never skipped because a file was being renamed: where the next log segment begins above
    the requested offset, the folder is listed again, and not trusted while its writer is replacing files (the
    published generation is odd then). A gap that remains, and that compaction does not explain, is damage.

Thread rule: one view, one thread.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tidegate.clock import Clock
from tidegate.errors import CorruptError, InvalidError, OffsetOutOfRangeError, UnavailableError
from tidegate.files import File, Files
from tidegate.log.batch_file import headers, next_sound_batch, sound_headers
from tidegate.log.catalog import TopicPartition, require_folder
from tidegate.log.checkpoints import CLEANER_OFFSETS, LOG_STARTS, read_offsets, was_changed_since
from tidegate.log.fetch import (
    GAPS_ANYWHERE,
    Fetched,
    LogPoint,
    LogView,
    collect_aborted,
    fetch,
    find_by_timestamp,
)
from tidegate.log.format.batch import HEADER_SIZE, BatchHeader
from tidegate.log.format.partition_files import LOG, SNAPSHOT, offset_file, offsets_of
from tidegate.log.indexes import AbortedTxn
from tidegate.log.producer_state import read_snapshot
from tidegate.log.segment import LogSegment, SegmentList, read_only_segment
from tidegate.log.topic_config import TopicConfig
from tidegate.log.watermark import (
    WATERMARK_NAME,
    Watermark,
    boot_mark,
    is_certain,
    newest,
    read_slots,
)


def first_open_transaction(files: Files, folder: Path, bases: Sequence[int], end: int) -> int | None:
    """Return the first offset of the earliest transaction still open below `end`; None when all are closed."""
    start, open_since = _newest_snapshot(files, folder, end)
    for number, base in enumerate(bases):
        if number + 1 < len(bases) and bases[number + 1] <= start:
            continue
        path = offset_file(folder, base, LOG)
        with files.open(path) as file:
            try:
                for _, header in headers(file, 0, file.size()):
                    if header.base_offset >= end:
                        break
                    if header.last_offset < start or not header.is_transactional:
                        continue
                    if header.is_control:
                        open_since.pop(header.producer_id, None)
                    else:
                        open_since.setdefault(header.producer_id, header.base_offset)
            except CorruptError:
                if number + 1 < len(bases):
                    raise
    return min(open_since.values(), default=None)


def _newest_snapshot(files: Files, folder: Path, end: int) -> tuple[int, dict[int, int]]:
    """Return (offset, producer → first offset of its open transaction) of the newest usable snapshot."""
    for offset in reversed(offsets_of(files.list(folder), SNAPSHOT)):
        if offset > end:
            continue
        try:
            entries = read_snapshot(offset_file(folder, offset, SNAPSHOT), files=files)
        except CorruptError:
            continue
        opened = {
            entry.producer_id: entry.txn_first_offset
            for entry in entries
            if entry.txn_first_offset is not None
        }
        return offset, opened
    return 0, {}


logger = logging.getLogger("tidegate.log")

_CHANGING_WAIT_MS = 10_000
_CHANGING_PAUSE_MS = 5
_TORN_LOOKS = 5
NO_GENERATION = -2  # even, like a folder that is not being changed


class Bounds(NamedTuple):
    """The readable range: offsets from `log_start` up to the high watermark, exclusive."""

    log_start: int
    high_watermark: int
    last_stable: int
    generation: int


class PartitionView:
    """The read-only side of a partition folder."""

    def __init__(
        self,
        files: Files,
        clock: Clock,
        folder: Path,
        *,
        topic: str,
        partition: int,
        config: TopicConfig,
        is_foreign: bool = False,
    ) -> None:
        require_folder(files, folder, TopicPartition(topic, partition))
        self.folder = folder
        self.topic = topic
        self.partition = partition
        self._config = config
        self._is_foreign = is_foreign
        self._files = files
        self._clock = clock
        self._is_others: bool | None = None
        self._known: SegmentList | None = None
        self._generation = NO_GENERATION
        self._boot = boot_mark(files)
        self._tail: tuple[object, int] | None = None  # version of the file, end: an unpublished end, cached
        self._damaged_slots: bytes | None = None  # of the watermark file, cached: reported once

    # -- offsets ---------------------------------------------------------------------------------

    def bounds(self) -> Bounds:
        """Return the range that may be read now."""
        mark, is_sure = self._published()
        is_stale = mark is not None and mark.boot and self._boot and mark.boot != self._boot
        if mark is None or is_stale or not is_sure or self._was_written_by_others():
            return self._unpublished_bounds(mark)
        if mark.generation != self._generation:
            self._known = None
            self._generation = mark.generation
        return Bounds(mark.log_start, mark.high_watermark, mark.last_stable, mark.generation)

    def _published(self) -> tuple[Watermark | None, bool]:
        """Return what the writer published last, and whether it is exact and not only a lower bound."""
        slots = read_slots(self._files, self.folder)
        for _ in range(_TORN_LOOKS):
            if slots is None or is_certain(slots) or slots == self._damaged_slots:
                break
            self._clock.sleep_ms(1)  # a slot that is being written is valid a moment later
            slots = read_slots(self._files, self.folder)
        if slots is None:
            return None, False
        mark = newest(slots)
        if is_certain(slots) or (mark is not None and mark.generation % 2 == 1):  # odd: wait for its writer
            return mark, True
        if slots != self._damaged_slots:
            self._damaged_slots = slots
            logger.warning(
                "%s is damaged; the log is read up to its last sound batch. Open the log for writing once to "
                "write the file anew", self.folder / WATERMARK_NAME,
            )  # fmt: skip
        return mark, False

    def _was_written_by_others(self) -> bool:
        """Return whether another program, such as a broker, wrote after Tidegate's last writer."""
        if self._is_others is not False:
            self._is_others = was_changed_since(self._files, self.folder)
        return self._is_others

    def last_stable(self, bounds: Bounds) -> int:
        """Return the end for readers of committed records only; scans folders without a watermark file."""
        if bounds.generation != NO_GENERATION:
            return bounds.last_stable
        open_since = first_open_transaction(
            self._files, self.folder, self._segments().bases, bounds.high_watermark
        )
        return bounds.high_watermark if open_since is None else min(open_since, bounds.high_watermark)

    def segment_sizes(self) -> list[tuple[int, int]]:
        """Return (base offset, bytes) of every log segment as it is now."""
        self._known = None
        return [(segment.base_offset, segment.size) for segment in self._segments()]

    # -- reading ---------------------------------------------------------------------------------

    def fetch(
        self, offset: int, max_bytes: int, bounds: Bounds, *, buffer: bytearray | None = None
    ) -> Fetched | None:
        """Return bytes from the batch that holds `offset` on (V1, V2, V3); None when nothing is there.

        They may begin before `offset`, end in the middle of a batch, and extend beyond the high watermark. They are
        read into `buffer` if one is given and they fit.
        """
        deadline_ms = self._clock.monotonic_ms() + _CHANGING_WAIT_MS
        while True:
            if not bounds.log_start <= offset <= bounds.high_watermark:
                raise self.out_of_range(offset, bounds)
            fetched = self._try_fetch(offset, max_bytes, bounds, buffer)
            after = self.bounds()
            if after.generation == bounds.generation and after.log_start <= offset:
                if fetched is not None and 0 <= fetched.segment_base <= offset:
                    return fetched
                if self._is_settled(after):
                    if fetched is None:
                        self._require_not_removed(offset, after)
                    else:
                        self._require_explained(offset, fetched.segment_base)
                    return fetched
                self._clock.sleep_ms(_CHANGING_PAUSE_MS)
            bounds = after
            if self._clock.monotonic_ms() > deadline_ms:
                raise UnavailableError(
                    f"{self.folder}: its log segments are being replaced and it does not end; if the writer "
                    f"died, open the log for writing once (`tidegate log clean {self.topic} --log "
                    f"{shlex.quote(str(self.folder.parent))}`), then read again"
                )

    def offset_for_time(self, time_ms: int, bounds: Bounds) -> int | None:
        """Return the first offset whose record is at or after the time; None when there is none below the end.

        Damage that may hide an earlier such record raises `CorruptError`.
        """
        segments = self._segments().segments
        gaps_below = self.gaps_below()
        for number, segment in enumerate(segments):
            is_last = number + 1 == len(segments)
            # The index of the last segment may lag behind the log, so that one is always searched.
            if is_last or not segment.is_older_than(time_ms):
                found = find_by_timestamp(
                    segment, time_ms, bounds.log_start, below=bounds.high_watermark, gaps_below=gaps_below
                )
                if found is not None:
                    return found.offset if found.offset < bounds.high_watermark else None
            following = 0 if is_last else segments[number + 1].base_offset
            if following > max(gaps_below, bounds.log_start):
                end = segment.read_next_offset() if segment.seal is None else segment.seal.next_offset
                if end < following:
                    self._require_explained(max(end, bounds.log_start), following)
        return None

    def next_sound_offset(self, offset: int) -> int | None:
        """Return the first undamaged offset after `offset`, in the same log segment or the next."""
        segments = self._segments()
        for segment in segments.segments[max(segments.floor_index(offset), 0) :]:
            with segment.reader() as file:
                found = next_sound_batch(file, 0, segment.size, min_offset=offset + 1)
            if found is not None:
                return found[1].base_offset
        return None

    def aborted(self, start: int, upper: int) -> list[AbortedTxn]:
        """Return aborted transactions with records in [start, upper)."""
        return collect_aborted(self._view(self.bounds()), start, upper)

    def log_path(self, base_offset: int) -> Path:
        return offset_file(self.folder, base_offset, LOG)

    def out_of_range(self, offset: int, bounds: Bounds) -> OffsetOutOfRangeError:
        """Return the error for an offset out of range, with its remedy."""
        where = f"{self.topic}-{self.partition}"
        if offset < bounds.log_start:
            reason = (
                f"offset {offset} of {where} is gone: retention or deletion moved the log's start to "
                f"{bounds.log_start}; start at 'earliest' (-o start) or at {bounds.log_start}"
            )
        else:
            reason = (
                f"offset {offset} of {where} does not exist yet: the log ends at {bounds.high_watermark}; "
                f"start at 'latest' (-o end) or at most at {bounds.high_watermark}"
            )
        return OffsetOutOfRangeError(reason, offset=offset, first=bounds.log_start, end=bounds.high_watermark)

    def _try_fetch(
        self, offset: int, max_bytes: int, bounds: Bounds, buffer: bytearray | None
    ) -> Fetched | None:
        """Fetch from the known log segments, then from a new listing of the folder: a roll, a trim or a removal in
        between shows as nothing found, a missing file, or a shorter file.
        """
        for looks_left in (1, 0):
            try:
                fetched = fetch(self._view(bounds), offset, max_bytes=max_bytes, buffer=buffer)
                if len(fetched.data) >= HEADER_SIZE:
                    return fetched
            except FileNotFoundError:
                pass
            except CorruptError:
                if not looks_left:
                    raise
            self._known = None
        return None

    def _view(self, bounds: Bounds) -> LogView:
        """Return a `LogView` for `fetch`. It ends at the end of the last file; the reader cuts at offsets."""
        segments = self._segments()
        last = segments.last
        end = LogPoint(max(bounds.high_watermark, last.base_offset), last.base_offset, last.size)
        return LogView(segments, bounds.log_start, end, end, None, self.folder.name)

    def _segments(self) -> SegmentList:
        """Return the log segments by name; the last one is opened anew, because it grows."""
        if self._known is None:
            self._known = SegmentList(self._segment(base) for base in self._listed_bases())
        elif len(self._known):
            self._known = self._known.with_segments([self._segment(self._known.last.base_offset)])
        return self._known

    def _listed_bases(self) -> list[int]:
        try:
            names = self._files.list(self.folder)
        except FileNotFoundError:
            raise InvalidError(
                f"topic {self.topic} was deleted while it was being read",
                kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
            ) from None
        return offsets_of(names, LOG)

    def _segment(self, base_offset: int) -> LogSegment:
        return read_only_segment(self.folder, base_offset, self._config, files=self._files, clock=self._clock)

    def _is_settled(self, bounds: Bounds) -> bool:
        """Return whether no process renames log segments, by generation and a second listing of the folder (V3)."""
        known, self._known = self._segments().bases, None
        return bounds.generation % 2 == 0 and self._segments().bases[: len(known)] == known

    def _require_not_removed(self, offset: int, bounds: Bounds) -> None:
        segments = self._segments()
        if len(segments) and offset < segments.first.base_offset:
            raise self.out_of_range(offset, bounds._replace(log_start=segments.first.base_offset))

    def gaps_below(self) -> int:
        """Return the offset from which a gap is damage: only compaction leaves gaps, also when the topic was
        compacted earlier; a broker's folder may have others.
        """
        if self._is_foreign or self._config.compacts:
            return GAPS_ANYWHERE
        try:
            cleaned = read_offsets(self.folder.parent / CLEANER_OFFSETS, files=self._files)
        except CorruptError:
            return 0
        return cleaned.get((self.topic, self.partition), 0)

    def _require_explained(self, offset: int, next_base: int) -> None:
        if offset >= self.gaps_below():
            raise CorruptError(
                f"{self.folder}: offsets {offset} to {next_base - 1} are missing, and compaction did not remove "
                f"them: a log segment is gone; restore it, or go on behind the gap (-o {next_base})",
                path=self.folder,
                offset=offset,
            )

    def _unpublished_bounds(self, old: Watermark | None) -> Bounds:
        """Return the bounds of a folder without a watermark: from its first log segment to its last batch."""
        self._generation = NO_GENERATION
        self._known = None
        segments = self._segments()
        if not len(segments):
            return Bounds(0, 0, 0, NO_GENERATION)
        try:
            starts = read_offsets(self.folder.parent / LOG_STARTS, files=self._files)
        except CorruptError:
            starts = {}
        start = max(segments.first.base_offset, starts.get((self.topic, self.partition), 0))
        if old is not None:
            start = max(start, old.log_start)
        last = segments.last
        found = self._files.stat(last.path)  # its size alone is not enough: it may be preallocated
        version = (last.base_offset, None if found is None else found.version)
        if self._tail is None or self._tail[0] != version:
            end = _end_of_last_batch(last) if old is None else _end_of_last_sound_batch(last)
            self._tail = (version, end)
        # Less than the durable end is damage; it is included in the range, so that reading it raises.
        end = max(self._tail[1], start, 0 if old is None else old.durable_end)
        return Bounds(start, end, end, NO_GENERATION)


def _end_of_last_batch(segment: LogSegment) -> int:
    """Return the offset after the last whole batch; zeros or a torn batch after it do not count."""
    try:
        return segment.read_next_offset()
    except CorruptError:
        return _end(segment, 0, headers)


def _end_of_last_sound_batch(segment: LogSegment) -> int:
    """Return the offset after the last batch whose CRC matches, in the leading run of undamaged batches."""
    file, hint = segment.open_near(segment.base_offset + 2**31 - 1)
    file.close()
    end = _end(segment, hint, sound_headers)
    return end if end > segment.base_offset or hint == 0 else _end(segment, 0, sound_headers)


def _end(
    segment: LogSegment, start: int, walk: Callable[[File, int, int], Iterator[tuple[int, BatchHeader]]]
) -> int:
    end = segment.base_offset
    with segment.reader() as file:
        try:
            for _, header in walk(file, start, segment.size):
                if header.base_offset < end:
                    break  # an old part of the file where new bytes never arrived
                end = header.next_offset
        except CorruptError:
            pass  # the batches before it are the log
    return end
