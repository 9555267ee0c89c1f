"""Dumping `.index`, `.timeindex`, `.txnindex` and `.snapshot` files, each entry compared with its log.

Owns the comparison the Java tool makes: does the batch an offset index entry points at end with that offset;
does the batch a time index entry names hold that timestamp. An entry after the first whose offset is the base
offset marks the unused, zero tail of an index that was never trimmed: the dump stops there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import CorruptError, InvalidError
from tidegate.files import File, Files
from tidegate.log.dump.batches import BatchRun, BatchWalk, LegacyMessage
from tidegate.log.dump.dump import DumpOptions, Findings, Target
from tidegate.log.dump.legacy import inner_records, read_message
from tidegate.log.format.batch import HEADER_SIZE, SPAN_LAYOUT
from tidegate.log.producers.producer_snapshot import read_snapshot
from tidegate.log.segments.offset_index import OffsetIndex
from tidegate.log.segments.time_index import TimeIndex, TimestampOffset
from tidegate.log.segments.transaction_index import TransactionIndex

if TYPE_CHECKING:
    from tidegate.log.dump.dump import Sink

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
    """Print a producer snapshot; a corrupt one is told of and is no failure."""
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
        """(last offset, largest record timestamp) of the first batch that ends at or after `offset`."""
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
    """The last offset of the batch that starts at `position`."""
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
