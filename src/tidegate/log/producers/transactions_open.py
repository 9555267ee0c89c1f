"""Which transaction has been open the longest, found in a folder that nobody publishes a watermark for.

Starts from the newest producer snapshot, which names the open transactions at its offset, and follows the
batch headers from there to the end. Only readers of committed records of foreign folders need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.producers.producer_snapshot import read_snapshot
from tidegate.log.segments.batch_file import headers
from tidegate.log.segments.file_names import LOG, SNAPSHOT, offset_file, offsets_of


def first_open_transaction(files: Files, folder: Path, bases: Sequence[int], end: int) -> int | None:
    """The first offset of the earliest transaction still open below `end`; None when all are closed."""
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
    """(offset, producer → first offset of its open transaction) of the newest usable snapshot."""
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
