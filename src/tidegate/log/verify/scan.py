"""Find the partitions to verify, and read the sound batches of their log segments.

`find_partitions` turns a path or a topic name into partition folders, and finds out whether compaction may have
removed records (gaps are then no loss): from Tidegate's catalog, else from the broker's
`cleaner-offset-checkpoint`. Where neither exists it is unknown until the log itself shows it.

`SegmentScan` reads windows of consecutive batches whose CRC is right and reports a finding for every stretch that is
not. Where a length cannot be trusted, every byte is tried as the start of a batch until one has a plausible
header and the right CRC: one flipped bit costs one batch. `parse_records` decodes the records of sound batches.

S1  the findings do not depend on windows, so a file can be scanned in parts (`start`, `stop`), and parts that
    meet at the same byte report together what one scan reports (`ranges`).
T1  a tap receives the records of a run that are below its end and not below its start, without those of
    control batches, in order: what a reader of the partition receives.
T2  a run that does not decode is reported to the tap as `spoiled`: records of it that the tap received may be
    part of a batch.

Memory: one window, or one batch where that is larger. Reads only; takes no lock.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from tidegate.errors import CorruptError, InvalidError
from tidegate.files import File, Files
from tidegate.log.batch_file import is_zero, next_sound_batch
from tidegate.log.catalog import (
    LogFolder,
    TopicDescription,
    TopicPartition,
    parse_folder_name,
    partition_folder_name,
)
from tidegate.log.checkpoints import has_clean_shutdown, read_offsets
from tidegate.log.dump.records import WINDOW_BYTES, LegacyRecord, inner_records, read_message
from tidegate.log.format.batch import HEADER_SIZE, LENGTH_OVERHEAD, MAGIC, START_LAYOUT, batch_crc
from tidegate.log.format.partition_files import LOG, offsets_of
from tidegate.log.verify.findings import Findings, Severity
from tidegate.log.watermark import WATERMARK_NAME, Watermark, is_certain, newest, read_slots

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.log.verify.ranges import GatheredRun

    CheckedRun: TypeAlias = "SoundRun | GatheredRun"
    from tidegate.log.format.decode import BatchTable


class Compaction(Enum):
    """Whether compaction may have removed records between others."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PartitionTarget:
    """One partition folder, and what its log folder says about it."""

    folder: Path
    place: TopicPartition
    compaction: Compaction
    compaction_because: str
    log_start: int
    acknowledged: int
    """Offsets below it were acknowledged, so they must be readable (0: not known)."""


_CHECKPOINTS = {
    "high watermark": "replication-offset-checkpoint",
    "recovery point": "recovery-point-offset-checkpoint",
    "log start": "log-start-offset-checkpoint",
    "cleaner": "cleaner-offset-checkpoint",
}


def find_partitions(where: str, log: Path, findings: Findings, *, files: Files) -> list[PartitionTarget]:
    """Return the partitions of a folder (a log or one partition), or of a topic of the log at `log`."""
    path = Path(where)
    found = files.stat(path)
    if found is not None and found.is_folder:
        if parse_folder_name(path.resolve().name) is not None and _has_log_files(path, files):
            return [_Surroundings(path.resolve().parent, findings, files).target(path)]
        return _whole_log(path, findings, files)
    if "/" in where:
        raise InvalidError(f"{where} is not a folder; name a partition folder, a log folder or a topic")
    description = LogFolder(files, log).describe(where)
    surroundings = _Surroundings(log, findings, files)
    return [
        surroundings.target(log / partition_folder_name(where, number))
        for number in description.partition_numbers
    ]


def _whole_log(path: Path, findings: Findings, files: Files) -> list[PartitionTarget]:
    surroundings = _Surroundings(path, findings, files)
    folders = [path / name for name in files.list(path) if parse_folder_name(name) is not None]
    targets = [surroundings.target(folder) for folder in folders if _has_log_files(folder, files)]
    if targets:
        return targets
    if _has_log_files(path, files):  # a partition folder under another name, such as a backup
        return [surroundings.target(path)]
    raise InvalidError(
        f"{path} holds no partition folders (topic-0, topic-1, …) and no .log files; "
        f"name a partition folder, a log folder or a topic"
    )


def _has_log_files(folder: Path, files: Files) -> bool:
    found = files.stat(folder)
    if found is None or not found.is_folder:
        return False
    return bool(offsets_of(files.list(folder), LOG))


class _Surroundings:
    """The catalog and the broker's checkpoints of a log folder, each read once."""

    def __init__(self, log: Path, findings: Findings, files: Files) -> None:
        self._log = log
        self._files = files
        self._findings = findings
        self._offsets = {kind: self._read_offsets(log / name) for kind, name in _CHECKPOINTS.items()}
        self._descriptions = self._read_catalog()
        self._clean = has_clean_shutdown(log, files=files)

    def target(self, folder: Path) -> PartitionTarget:
        name = folder.resolve().name
        place = parse_folder_name(name) or TopicPartition(name, 0)
        mark = self._watermark(folder)
        compaction, because = self._compaction(place)
        log_start = self._known("log start", place)
        acknowledged = self._known("high watermark", place)
        if self._clean:
            acknowledged = max(acknowledged, self._known("recovery point", place))
        if mark is not None:
            log_start = max(log_start, mark.log_start)
            acknowledged = max(acknowledged, mark.high_watermark)
        return PartitionTarget(folder, place, compaction, because, log_start, acknowledged)

    def _watermark(self, folder: Path) -> Watermark | None:
        slots = read_slots(self._files, folder)
        if slots is not None and not is_certain(slots):
            slots = read_slots(self._files, folder)  # its writer may have been in the middle of a write
        if slots is None:
            return None
        if not is_certain(slots):
            self._findings.add(
                "checkpoint",
                folder / WATERMARK_NAME,
                "it does not match its checksums, so how far the log was acknowledged is not known for sure; "
                "readers go to the last sound batch",
                "open the log for writing once: the file is written anew from the log",
                severity=Severity.WARNING,
            )
        return newest(slots)

    def _compaction(self, place: TopicPartition) -> tuple[Compaction, str]:
        description = self._descriptions.get(place.topic)
        if description is not None:
            policy = ",".join(sorted(description.config.cleanup_policy))
            answer = Compaction.YES if description.config.compacts else Compaction.NO
            return answer, f"the topic's cleanup.policy={policy}"
        if (place.topic, place.partition) in (self._offsets["cleaner"] or {}):
            return Compaction.YES, "the cleaner-offset-checkpoint lists it"
        if self._offsets["cleaner"] is not None:
            return Compaction.NO, "the cleaner-offset-checkpoint does not list it"
        return Compaction.UNKNOWN, "no settings and no cleaner-offset-checkpoint beside it"

    def _known(self, kind: str, place: TopicPartition) -> int:
        return (self._offsets[kind] or {}).get((place.topic, place.partition), 0)

    def _read_offsets(self, path: Path) -> dict[tuple[str, int], int] | None:
        """Return the offsets of a checkpoint; None when there is no such file, or it cannot be read (a finding)."""
        if not self._files.exists(path):
            return None
        try:
            return dict(read_offsets(path, files=self._files))
        except CorruptError as error:
            self._findings.add(
                "checkpoint",
                path,
                str(error),
                "a broker ignores it and starts from the beginning; remove it to do the same",
                severity=Severity.WARNING,
                position=error.position,
            )
            return None

    def _read_catalog(self) -> dict[str, TopicDescription]:
        folder = LogFolder(self._files, self._log)
        if not folder.is_ours():
            return {}
        try:
            return {description.name: description for description in folder.describe_all()}
        except CorruptError as error:
            self._findings.add(
                "checkpoint",
                folder.catalog_path,
                str(error),
                "restore it from a backup",
                severity=Severity.FAULT,
            )
            return {}


_LEAST: int = -(2**63)


class RecordTap(Protocol):
    """Receives the records from offset `first` up to, not including, `end` (T1)."""

    first: int
    end: int

    def take(self, batch: pa.RecordBatch) -> None: ...
    def spoiled(self) -> None:
        """Note that the records differ from what a reader receives (T2); the tap may stop."""
        ...


class Unparsed(NamedTuple):
    """A batch whose records do not parse: its place, and the reason."""

    position: int
    offset: int
    reason: str


def parse_records(run: SoundRun, path: Path, tap: RecordTap | None) -> list[Unparsed]:
    """Parse every record of the run; return the batches that do not parse, by position in the file."""
    table = run.table
    whole = tap is not None and not table.is_control.any()
    if tap is not None and whole and len(table):
        whole = bool(int(table.base_offset.min()) >= tap.first and int(table.last_offset.max()) < tap.end)
    try:
        for piece in _pieces(run, path, control="include"):
            if tap is not None and whole:
                tap.take(piece)
        if tap is not None and not whole:
            for piece in _pieces(run, path, control="skip", from_offset=tap.first, to_offset=tap.end):
                tap.take(piece)
        return []
    except (CorruptError, InvalidError):
        if tap is not None:
            tap.spoiled()
        return _blamed(run)


def _pieces(run: SoundRun, path: Path, **wanted: Any) -> Any:
    from tidegate.log.format.decode import decode_pieces

    return decode_pieces(
        run.data,
        topic="",
        partition=0,
        check_crcs=False,
        path=path,
        file_position=run.position,
        **{"from_offset": _LEAST, **wanted},
    )


def _blamed(run: SoundRun) -> list[Unparsed]:
    from tidegate.log.format.decode import inspect_records

    found = []
    for position, size, offset in zip(
        run.table.position.tolist(), run.table.size.tolist(), run.table.base_offset.tolist(), strict=True
    ):
        try:
            inspect_records(run.data[position : position + size])
        except (CorruptError, InvalidError) as error:
            found.append(Unparsed(run.position + position, offset, str(error)))
    return found


_CRC = Struct(">I")
_MAX_BATCH_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class SoundRun:
    """Consecutive batches with the right CRC; `table.position` is relative to `data`."""

    position: int
    data: memoryview
    table: BatchTable

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def control(self, position: int, size: int) -> memoryview:
        """Return the bytes of one control batch."""
        return self.data[position : position + size]


@dataclass(frozen=True, slots=True)
class SoundMessage:
    """One message of magic 0 or 1 and the records in it."""

    position: int
    outer: LegacyRecord
    inner: list[LegacyRecord]


@dataclass(slots=True)
class SegmentScan:
    """A scan of one `.log` file. `next_offset` follows the last sound batch; offsets below `acknowledged` must exist.

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
        """Return the size of the batch at `position` if its header is plausible and it is complete."""
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
        if bad > 0:  # the bad batch is examined again at the start of a window (S1)
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
        """Return the base offset of the batch at `position` if it is sound."""
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
        """Find the next sound batch after `position`, report the bytes before it, and continue there."""
        start = self.position
        found = next_sound_batch(
            self.file, start + 1, end, min_offset=self.next_offset, below=self.limit_offset
        )
        if found is not None:
            self.position = found[0]
            self._report(start, found[0], what, found[1].base_offset)
            return
        self.position = end
        whole, zeros = self._is_whole_behind_header(start, end), False
        if whole:
            what = "the header is wrong, but the CRC fits the bytes up to the end of the file"
        elif zeros := is_zero(self.file, start, end):
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

    def _is_whole_behind_header(self, start: int, end: int) -> bool:
        """Return whether the last batch is complete but has a damaged length or magic. A torn one fails its CRC."""
        head = self.file.read_at(start, HEADER_SIZE)
        if len(head) < HEADER_SIZE or end - start > _MAX_BATCH_BYTES:
            return False
        data = self.file.read_at(start, end - start)
        return batch_crc(data, 0, len(data)) == int(_CRC.unpack_from(head, 17)[0])
