"""Print log files line for line as Kafka 3.9's `DumpLogSegments` does, or as JSON lines.

`dump` writes one file after the other to stdout, and the mismatches to stderr at the end; `text` and `json`
format the lines. Where the Java tool stops with an exception, the lines up to that point are the same; the fault is
then reported on stderr and the remaining files are still dumped.

A `.log` (or KRaft `.checkpoint`) file is decoded a window at a time, and batch by batch where that fails. Each entry
of an index is compared with its log. An entry after the first whose offset is the base offset marks the unused,
zero tail of an index that was never trimmed: the dump stops there.

Thread rule: one dump, one thread.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, TypeAlias

from tidegate.errors import CorruptError, InvalidError
from tidegate.files import File, Files
from tidegate.log.dump.decoders import CONTROL_RECORDS, RecordParser, read_versionless
from tidegate.log.dump.records import (
    BatchRun,
    BatchWalk,
    LegacyMessage,
    OddBatch,
    RecordColumns,
    inner_records,
    read_message,
    read_records,
    readable_part,
)
from tidegate.log.format.batch import (
    CODEC_MASK,
    CONTROL_BIT,
    HEADER_SIZE,
    SPAN_LAYOUT,
    Codec,
    ControlType,
    parse_control,
)
from tidegate.log.indexes import OffsetIndex, TimeIndex, TimestampOffset, TransactionIndex
from tidegate.log.producer_state import read_snapshot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tidegate.log.dump.json import JsonSink
    from tidegate.log.dump.text import TextSink


CHUNK_ENTRIES = 4096
_SEARCH_BYTES = 64 * 1024


def dump_index(target: Target, options: DumpOptions, sink: Sink, findings: Findings, files: Files) -> None:
    """Print an offset index."""
    index = OffsetIndex(target.path, target.base_offset, 0, files=files)
    _require(index.exists, target, target.path)
    with _open_sibling(target, ".log", files) as log:
        if index.entries == 0:
            sink.index_empty(target)
            return
        if options.index_sanity_check:
            index.sanity_check()
            sink.index_sane(target)
            return
        for entries in _chunked(index):
            for entry in entries:
                found = _last_offset_at(log, entry.position, options.max_message_bytes, target)
                if found != entry.offset:
                    findings.index_mismatches.setdefault(target.absolute, []).append((entry.offset, found))
            if not options.verify_index_only:
                sink.offset_entries(entries)


def dump_time_index(
    target: Target, options: DumpOptions, sink: Sink, findings: Findings, files: Files
) -> None:
    """Print a time index."""
    index = TimeIndex(target.path, target.base_offset, 0, files=files)
    _require(index.exists, target, target.path)
    if options.index_sanity_check:
        index.sanity_check()
        sink.index_sane(target)
        return
    offset_path = target.path.with_name(f"{target.name.partition('.')[0]}.index")
    offsets = OffsetIndex(offset_path, target.base_offset, 0, files=files, read_only=True)
    _require(offsets.exists, target, offset_path)
    with _open_sibling(target, ".log", files) as log:
        check = _TimeCheck(target, log, offsets, findings)
        for entries in _chunked(index):
            for entry in entries:
                check.entry(entry)
            if not options.verify_index_only:
                sink.time_entries(entries)


def dump_transaction_index(target: Target, sink: Sink, files: Files) -> None:
    """Print a transaction index."""
    index = TransactionIndex(target.path, target.base_offset, files=files, read_only=True)
    _require(index.exists, target, target.path)
    sink.aborted(list(index))


def dump_snapshot(target: Target, sink: Sink, files: Files) -> None:
    """Print a producer snapshot; a corrupt one is reported and is not a failure."""
    try:
        entries = read_snapshot(target.path, files=files)
    except CorruptError as error:
        sink.snapshot_broken(target, error)
        return
    sink.producers(entries)


class _TimeCheck:
    """Compares time index entries with the log, one after the other."""

    def __init__(self, target: Target, log: File, offsets: OffsetIndex, findings: Findings) -> None:
        self._target = target
        self._log = log
        self._size = log.size()
        self._offsets = offsets
        self._findings = findings
        self._previous = -1

    def entry(self, entry: TimestampOffset) -> None:
        found = self._find(entry.offset)
        path = self._target.absolute
        if found is None or found[0] != entry.offset:
            last = -1 if found is None else found[0]
            self._findings.offsets_not_found.setdefault(path, []).append((entry.offset, last))
        else:
            if found[1] != entry.timestamp:
                self._findings.time_mismatches.setdefault(path, []).append((entry.timestamp, found[1]))
            if self._previous >= entry.timestamp:
                self._findings.time_disorder.setdefault(path, []).append((entry.timestamp, self._previous))
        self._previous = entry.timestamp

    def _find(self, offset: int) -> tuple[int, int] | None:
        """Return (last offset, largest record timestamp) of the first batch that ends at or after `offset`."""
        from tidegate.log.format.decode import inspect_records

        start = self._offsets.lookup(offset).position
        for piece in BatchWalk(self._log, start, self._size, window_bytes=_SEARCH_BYTES):
            if isinstance(piece, LegacyMessage):
                outer = read_message(piece.data, path=self._log.path, position=piece.position)
                if outer.offset >= offset:
                    inner = inner_records(outer, path=self._log.path, position=piece.position)
                    return outer.offset, max(record.timestamp for record in inner)
            elif isinstance(piece, BatchRun):
                reached = (piece.table.last_offset >= offset).nonzero()[0]
                if len(reached):
                    number = int(reached[0])
                    at = int(piece.table.position[number])
                    batch = piece.data[at : at + int(piece.table.size[number])]
                    last = int(piece.table.last_offset[number])
                    if int(piece.table.count[number]) == 0:
                        return last, -1
                    return last, inspect_records(batch).max_timestamp
            elif piece.header.last_offset >= offset:
                return piece.header.last_offset, piece.header.max_timestamp
        return None


def _last_offset_at(log: File, position: int, max_message_bytes: int, target: Target) -> int:
    """Return the last offset of the batch that starts at `position`."""
    size = log.size()
    head = log.read_at(position, SPAN_LAYOUT.size) if 0 <= position < size else b""
    if len(head) == SPAN_LAYOUT.size:
        base, length, magic, delta = SPAN_LAYOUT.unpack(head)
        whole = length + 12
        if length >= 14 and whole <= min(max_message_bytes, size - position):
            return int(base if magic < 2 else base + delta)
        if whole > max_message_bytes:
            raise CorruptError(
                f"{target.shown} points at position {position}, where a batch of {whole} bytes starts; "
                f"--max-message-size is {max_message_bytes}, raise it",
                path=target.path,
            )
    raise CorruptError(
        f"{target.shown} points at position {position} of {log.path.name}, where no whole batch starts "
        f"({size} bytes, a header takes {HEADER_SIZE})",
        path=target.path,
    )


def _chunked(index: OffsetIndex | TimeIndex) -> Iterator[list[Any]]:
    entries: Iterator[Any] = iter(index)
    first = itertools.islice(entries, 1)
    used = itertools.takewhile(lambda entry: entry.offset != index.base_offset, entries)
    found = itertools.chain(first, used)
    while chunk := list(itertools.islice(found, CHUNK_ENTRIES)):
        yield chunk


def _open_sibling(target: Target, suffix: str, files: Files) -> File:
    path = target.path.with_name(f"{target.name.partition('.')[0]}{suffix}")
    _require(files.exists(path), target, path)
    return files.open(path)


def _require(there: bool, target: Target, path: Path) -> None:
    if there:
        return
    if path == target.path:
        raise InvalidError(f"{target.shown} does not exist; check the path")
    raise InvalidError(f"{target.shown} is compared with {path.name}, which is not beside it; copy it there")


_CONTROL_KEY = Struct(">hh")


def dump_log(target: Target, options: DumpOptions, sink: Sink, findings: Findings, files: Files) -> None:
    """Print one log file; `CorruptError` where it cannot be read further."""
    sink.log_start(target)
    with files.open(target.path) as file:
        size = file.size()
        walk = BatchWalk(file, 0, min(size, options.max_bytes))
        dumper = _LogDumper(target, options, sink, findings)
        for piece in walk:
            if isinstance(piece, BatchRun):
                dumper.run(piece)
            elif isinstance(piece, LegacyMessage):
                dumper.legacy(piece)
            else:
                dumper.odd(piece)
        if walk.position < size and options.max_bytes == MAX_INT:
            sink.trailing(target, size - walk.position)


@dataclass(slots=True)
class _LogDumper:
    target: Target
    options: DumpOptions
    sink: Sink
    findings: Findings
    last_offset: int = -1

    def run(self, run: BatchRun) -> None:
        from tidegate.log.format.decode import check_crcs

        _refuse_unknown_codec(run, self.target)
        valid = check_crcs(run.data, run.table)
        if not self.options.is_deep:
            self.sink.run(run, valid, None, {})
            return
        try:
            records = read_records(run, self.target.path)
            controls = _controls(run, records, self.target)
        except (CorruptError, InvalidError):  # InvalidError: decompresses to more than the limit
            if len(run.table) == 1:
                self._as_far_as_possible(run, valid)
                raise
            for single in _singles(run):
                self.run(single)
            return
        self._note_gaps(records.offsets)
        self.sink.run(run, valid, records, controls)

    def _as_far_as_possible(self, run: BatchRun, valid: NDArray[np.bool_]) -> None:
        """Print a batch that cannot be decoded, with its records before the malformed one."""
        try:
            part = readable_part(run)
            records = None if part is None else read_records(part, self.target.path)
            controls = {} if part is None or records is None else _controls(part, records, self.target)
        except (CorruptError, InvalidError):
            records, controls = None, {}
        if records is not None:
            self._note_gaps(records.offsets)
        self.sink.run(run, valid, records, controls)

    def legacy(self, message: LegacyMessage) -> None:
        outer = read_message(message.data, path=self.target.path, position=message.position)
        if not self.options.is_deep:
            self.sink.legacy(message.position, outer, ())
            return
        try:
            inner = inner_records(outer, path=self.target.path, position=message.position)
        except CorruptError:
            self.sink.legacy(message.position, outer, ())
            raise
        self._note_gaps([record.offset for record in inner])
        self.sink.legacy(message.position, outer, inner)

    def odd(self, batch: OddBatch) -> None:
        size = len(batch.data)
        self.sink.odd(batch)
        if self.options.is_deep:
            raise CorruptError(
                f"{self.target.shown}: the batch at position {batch.position} has {size} bytes, fewer than "
                f"its header, so its records cannot be read",
                path=self.target.path,
                position=batch.position,
                offset=batch.header.base_offset,
            )

    def _note_gaps(self, offsets: Sequence[int] | NDArray[np.int64]) -> None:
        """Record where an offset does not follow the one before it."""
        import numpy as np

        if not len(offsets):
            return
        column = np.concatenate(([self.last_offset], np.asarray(offsets, dtype=np.int64)))
        broken = np.nonzero(column[1:] != column[:-1] + 1)[0]
        self.last_offset = int(column[-1])
        pairs = array("q")
        for index in broken.tolist():
            if column[index] != -1:  # -1: nothing came before
                pairs.extend((int(column[index]), int(column[index + 1])))
        if pairs:
            self.findings.gaps.setdefault(self.target.absolute, array("q")).extend(pairs)


def _singles(run: BatchRun) -> list[BatchRun]:
    """Return the batches of a run as one run each."""
    from tidegate.log.format.decode import scan_batches

    singles = []
    for position, size in zip(run.table.position.tolist(), run.table.size.tolist(), strict=True):
        data = run.data[position : position + size]
        singles.append(BatchRun(run.position + position, data, scan_batches(data)))
    return singles


def _refuse_unknown_codec(run: BatchRun, target: Target) -> None:
    codes = run.table.attributes & CODEC_MASK
    if codes.max(initial=0) > Codec.ZSTD:
        index = int((codes > Codec.ZSTD).argmax())
        position = run.position + int(run.table.position[index])
        raise CorruptError(
            f"{target.shown}: the batch at position {position} has the unknown codec {codes[index]}",
            path=target.path,
            position=position,
            offset=int(run.table.base_offset[index]),
        )


def _controls(run: BatchRun, records: RecordColumns, target: Target) -> dict[int, Control]:
    """Return the content of the control records, by record number."""
    batches = (run.table.attributes & CONTROL_BIT).nonzero()[0].tolist()
    if not batches:
        return {}
    keys, values = records.batch.column("key"), records.batch.column("value")
    controls = {}
    for batch in batches:
        for number in range(int(records.starts[batch]), int(records.starts[batch + 1])):
            try:
                controls[number] = read_control_record(keys[number].as_py(), values[number].as_py())
            except CorruptError as error:
                position = run.position + int(run.table.position[batch])
                raise CorruptError(
                    f"{target.shown}: the control batch at position {position}: {error}",
                    path=target.path,
                    position=position,
                    offset=int(records.offsets[number]),
                ) from None
    return controls


def read_control_record(key: bytes | None, value: bytes | None) -> Control:
    """Parse a control record's key and value, as far as the dump shows them."""
    record = parse_control(key, value)
    _, type_id = _CONTROL_KEY.unpack_from(key or b"")
    if record.ends_transaction:
        return Control(record.kind.name, type_id, record.coordinator_epoch)
    if type_id in CONTROL_RECORDS and record.kind is not ControlType.UNKNOWN:
        name, schema = CONTROL_RECORDS[type_id]
        return Control(record.kind.name, type_id, message=(name, read_versionless(value or b"", schema, 0)))
    return Control(record.kind.name, type_id)


if TYPE_CHECKING:
    Sink: TypeAlias = TextSink | JsonSink
MAX_INT = 2**31 - 1
PROFILES = ("modern", "seed")


@dataclass(frozen=True, slots=True)
class DumpOptions:
    """What to print. `parser` None: keys and values are UTF-8 text; `profile` "seed" is Kafka ≤ 2.7."""

    print_data: bool = False
    deep: bool = False
    index_sanity_check: bool = False
    verify_index_only: bool = False
    skip_record_metadata: bool = False
    max_message_bytes: int = 5 * 1024 * 1024
    max_bytes: int = MAX_INT
    profile: str = "modern"
    parser: RecordParser | None = None

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise InvalidError(f"no format profile {self.profile!r}: there are {' and '.join(PROFILES)}")
        if self.max_bytes < 0 or self.max_message_bytes < 0:
            raise InvalidError("--max-bytes and --max-message-size cannot be negative")

    @property
    def is_deep(self) -> bool:
        return self.deep or self.print_data or self.parser is not None

    @property
    def shows_contents(self) -> bool:
        return self.print_data or self.parser is not None


@dataclass(slots=True)
class Findings:
    """The mismatches, by file as an absolute path, in the order found."""

    index_mismatches: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    time_mismatches: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    time_disorder: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    offsets_not_found: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    gaps: dict[str, array[int]] = field(default_factory=dict)
    """Flat pairs: a compacted log may have millions."""


@dataclass(frozen=True, slots=True)
class Target:
    """A file to dump: the name as given (printed) and its path (opened)."""

    shown: str
    path: Path

    @classmethod
    def of(cls, given: str) -> Target:
        shown = re.sub("/+", "/", given)
        shown = shown.rstrip("/") or shown
        return cls(shown, Path(shown))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def absolute(self) -> str:
        """The absolute path as Java makes it: the working folder prepended, nothing resolved."""
        return self.shown if self.shown.startswith("/") else f"{Path.cwd()}/{self.shown}"

    @property
    def base_offset(self) -> int:
        """The offset that a log file is named after: the digits before the first dot."""
        digits = self.name.partition(".")[0]
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 20:
            raise InvalidError(
                f"{self.shown} is not named like a log file (00000000000000000042.log), so its base offset "
                f"is unknown"
            )
        return int(digits)


@dataclass(frozen=True, slots=True)
class Control:
    """The content of a control record: a transaction's end, or a schema's name and fields, or only its type."""

    kind: str
    type_id: int
    coordinator_epoch: int | None = None
    message: tuple[str, dict[str, Any]] | None = None


def dump(
    targets: Iterable[Target], options: DumpOptions, sink: Sink, *, files: Files | None = None
) -> list[CorruptError]:
    """Dump each file into the sink; return the errors of files that could not be read to their end."""

    files = files if files is not None else Files()
    findings = Findings()
    faults: list[CorruptError] = []
    for target in targets:
        sink.begin(target)
        try:
            match target.path.suffix:
                case ".log" | ".checkpoint":
                    dump_log(target, options, sink, findings, files)
                case ".index":
                    dump_index(target, options, sink, findings, files)
                case ".timeindex":
                    dump_time_index(target, options, sink, findings, files)
                case ".txnindex":
                    dump_transaction_index(target, sink, files)
                case ".snapshot":
                    dump_snapshot(target, sink, files)
                case _:
                    sink.unknown(target)
        except CorruptError as error:
            sink.fault(target, error)
            faults.append(error)
    sink.findings(findings)
    return faults
