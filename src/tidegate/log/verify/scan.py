"""Reading every sound batch of a `.log` file, and finding the next one behind damage.

Owns the walk of the audit: windows of consecutive batches whose CRC is right, and a finding for every
stretch that is not. Where a batch is bad it looks whether its length can be trusted (a sound batch or the end
of the file follows); where not, every byte is tried as the start of a batch until one has a plausible header
and the right CRC. So one flipped bit costs one batch, not the rest of the file.

S1  what is found does not depend on windows: a batch that is wrong is looked at together with the one behind it,
    wherever a window happens to end. So a file can be walked in parts (`start`, `stop`), and parts that meet at the
    same byte say together what one walk says (`ranges`).

Memory: one window, or one batch where that is larger. Reads only.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Final

import numpy as np

from tidegate.errors import CorruptError
from tidegate.files import File
from tidegate.log.dump.records import WINDOW_BYTES, LegacyRecord, inner_records, read_message
from tidegate.log.format.batch import HEADER_SIZE, LENGTH_OVERHEAD, MAGIC, START_LAYOUT, batch_crc
from tidegate.log.segments.resync import next_sound_batch
from tidegate.log.verify.findings import Findings, Severity

if TYPE_CHECKING:
    from tidegate.log.format.decode import BatchTable

_CRC = Struct(">I")
_SEARCH_BYTES: Final = 1 << 20
_MAX_BATCH_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class SoundRun:
    """Consecutive batches with the right CRC; `table.position` counts within `data`."""

    position: int
    data: memoryview
    table: BatchTable

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def control(self, position: int, size: int) -> memoryview:
        """The bytes of one batch, a control batch."""
        return self.data[position : position + size]


@dataclass(frozen=True, slots=True)
class SoundMessage:
    """One message of magic 0 or 1 and the records in it."""

    position: int
    outer: LegacyRecord
    inner: list[LegacyRecord]


@dataclass(slots=True)
class SegmentScan:
    """One `.log` file. `next_offset` follows the last sound batch; `acknowledged` is what must be there.

    It begins at byte `position`, which must be the start of a batch, and ends with the batch that reaches `stop`.
    """

    file: File
    base_offset: int
    limit_offset: int
    is_last: bool
    acknowledged: int
    findings: Findings
    next_offset: int = 0
    position: int = 0
    stop: int | None = None
    is_torn: bool = False
    damaged: list[tuple[int, int]] = field(default_factory=list)
    """(first offset, next known offset) of each stretch that cannot be read."""

    def __post_init__(self) -> None:
        self.next_offset = self.base_offset

    @property
    def path(self) -> Path:
        return self.file.path

    def __iter__(self) -> Iterator[SoundRun | SoundMessage]:
        end = self.file.size()
        stop = end if self.stop is None else min(end, self.stop)
        while self.position < stop:
            size = self._size_at(self.position, end)
            if size is None:
                self._skip_damage(end, "no batch starts here")
                continue
            data = memoryview(
                self.file.read_at(self.position, min(max(size, WINDOW_BYTES), end - self.position))
            )
            if data[16] < MAGIC:
                yield from self._message(data[:size], end)
            else:
                yield from self._run(data, end)

    def _size_at(self, position: int, end: int) -> int | None:
        """The size of the batch at `position` when its header is plausible and it is whole."""
        head = self.file.read_at(position, START_LAYOUT.size)
        if len(head) < START_LAYOUT.size:
            return None
        _, length, magic = START_LAYOUT.unpack(head)
        smallest = HEADER_SIZE - LENGTH_OVERHEAD if magic == MAGIC else 14
        size: int = length + LENGTH_OVERHEAD
        if not 0 <= magic <= MAGIC or length < smallest or size > end - position:
            return None
        return size

    def _run(self, data: memoryview, end: int) -> Iterator[SoundRun]:
        from tidegate.log.format.decode import check_crcs, scan_batches

        table, start = scan_batches(data, strict=False), self.position
        if self.stop is not None and start + table.end > self.stop:
            within = int(np.searchsorted(table.position, self.stop - start))
            if within < len(table):
                data = data[: int(table.position[within])]
                table = scan_batches(data)
        valid = check_crcs(data, table)
        if valid.all():
            self._passed(table)
            self.position = start + table.end
            yield SoundRun(start, data[: table.end], table)
            return
        bad = int(valid.argmin())
        if bad > 0:  # the bad one is met again, at the start of a window (S1)
            at = int(table.position[bad])
            sound = scan_batches(data, 0, at)
            self._passed(sound)
            self.position = start + at
            yield SoundRun(start, data[:at], sound)
            return
        size = int(table.size[0])
        what = f"stored CRC {int(table.crc[0])}, its bytes give {batch_crc(data, 0, size)}"
        following = self._sound_base(start + size, end)
        if following is None and start + size != end:
            self._skip_damage(end, what)
            return
        self._report(start, start + size, what, following)
        self.position += size

    def _sound_base(self, position: int, end: int) -> int | None:
        """The base offset of the batch that begins at `position`, when it is a sound one."""
        size = self._size_at(position, end)
        if size is None:
            return None
        data = self.file.read_at(position, size)
        if data[16] != MAGIC or batch_crc(data, 0, size) != int(_CRC.unpack_from(data, 17)[0]):
            return None
        return int(START_LAYOUT.unpack_from(data)[0])

    def _message(self, data: memoryview, end: int) -> Iterator[SoundMessage]:
        try:
            outer = read_message(data, path=self.path, position=self.position)
            if not outer.is_valid:
                self._skip_damage(end, f"stored CRC {outer.crc} of a message of magic {outer.magic}")
                return
            inner = inner_records(outer, path=self.path, position=self.position)
        except CorruptError as error:
            self._skip_damage(end, str(error))
            return
        start = self.position
        self.position += outer.size
        self.next_offset = outer.offset + 1
        yield SoundMessage(start, outer, inner)

    def _passed(self, table: BatchTable) -> None:
        if len(table):
            self.next_offset = int(table.last_offset[-1]) + 1

    # -- damage ----------------------------------------------------------------------------------

    def _skip_damage(self, end: int, what: str) -> None:
        """Find the next sound batch behind `position`, report what lies between, go on there."""
        start = self.position
        found = self._find_sound(start + 1, end)
        if found is not None:
            self.position = found[0]
            self._report(start, found[0], what, found[1])
            return
        self.position = end
        whole, zeros = self._is_whole_behind_header(start, end), False
        if whole:
            what = "the header is wrong, but the CRC fits the bytes up to the end of the file"
        elif zeros := self._is_zero(start, end):
            what = f"{end - start} zero bytes, as a preallocated file has behind its last batch"
        elif end - start < HEADER_SIZE or "no batch" in what:
            what = f"the last {end - start} bytes are no whole batch"
        if self.is_last and not whole and self.next_offset >= self.acknowledged:
            self.is_torn = True
            self.findings.add(
                "tail",
                self.path,
                f"{what}; nothing acknowledged is known to be in them",
                "opening the log for writing recovers it",
                severity=Severity.NOTICE if zeros else Severity.WARNING,
                position=start,
                offset=self.next_offset,
            )
            return
        self._report(start, end, what, self.acknowledged if self.is_last else self.limit_offset)

    def _report(self, start: int, end: int, what: str, next_known: int | None) -> None:
        lost = ""
        self.damaged.append((self.next_offset, next_known if next_known is not None else self.limit_offset))
        if next_known is not None and next_known > self.next_offset:
            lost = f"; offsets {self.next_offset} to {next_known - 1} cannot be read"
        self.findings.add(
            "corrupt",
            self.path,
            f"{what}; bytes {start} to {end - 1} are damaged{lost}",
            "restore the file from a replica or backup; "
            f"`tidegate log dump {shlex.quote(str(self.path))}` shows what is readable",
            position=start,
            offset=self.next_offset,
        )

    def _find_sound(self, start: int, end: int) -> tuple[int, int] | None:
        """(position, base offset) of the first sound batch of this log segment at or behind `start`."""
        while (found := next_sound_batch(self.file, start, end, min_offset=self.next_offset)) is not None:
            if found[1].last_offset < self.limit_offset:
                return found[0], found[1].base_offset
            start = found[0] + 1
        return None

    def _is_whole_behind_header(self, start: int, end: int) -> bool:
        """Is the last batch all there, with only its length or magic damaged? A torn one has another CRC."""
        head = self.file.read_at(start, HEADER_SIZE)
        if len(head) < HEADER_SIZE or end - start > _MAX_BATCH_BYTES:
            return False
        data = self.file.read_at(start, end - start)
        return batch_crc(data, 0, len(data)) == int(_CRC.unpack_from(head, 17)[0])

    def _is_zero(self, start: int, end: int) -> bool:
        position = start
        while position < end:
            data = self.file.read_at(position, min(_SEARCH_BYTES, end - position))
            if data.strip(b"\0"):
                return False
            position += len(data)
        return True
