"""What a crash left half-done in a partition folder: finished or undone, before a segment is opened.

Owns the meaning of second suffixes at start-up, as a Kafka 3.9 broker reads them. `*.deleted` and `*.tmp` are
leftovers and go. A swap (see `retiring`) whose `.cleaned` files are not all `.swap` yet did not happen: its files
go. One with all `.swap` names did happen: the segments it replaces go, with their seals first, and the `.swap` files
get their final names.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.segments.file_names import CLEANED, DELETED, LOG, SEAL, SWAP, offset_file
from tidegate.log.segments.segment import LogSegment

OFFSET_NAME: Final = re.compile(r"([0-9]+)\.(.+)")
_KRAFT_DELETED: Final = ".checkpoint.deleted"


def finish_interrupted_work(
    folder: Path, open_segment: Callable[[int, str], LogSegment], *, files: Files
) -> None:
    """Leave only files with their final names; `open_segment(base, suffix)` opens one."""
    names = files.list(folder)
    cleaned = [name for name in names if name.endswith(CLEANED)]
    first_cleaned = min((_offset_of(name, folder) for name in cleaned), default=None)
    complete: list[str] = []
    incomplete: list[str] = []
    for name in names:
        if name.endswith((DELETED, ".tmp")) and not name.endswith(_KRAFT_DELETED):
            files.unlink(folder / name, missing_ok=True)
        elif name.endswith(SWAP):
            is_complete = first_cleaned is None or _offset_of(name, folder) < first_cleaned
            (complete if is_complete else incomplete).append(name)
    for name in incomplete:
        files.unlink(folder / name, missing_ok=True)
    if incomplete:
        files.sync_folder(folder)  # before the .cleaned files go that prove these incomplete
    for name in cleaned:
        files.unlink(folder / name, missing_ok=True)
    if complete:
        new = [open_segment(_offset_of(name, folder), SWAP) for name in complete if name.endswith(LOG + SWAP)]
        _complete_swap(folder, complete, new, files)


def _complete_swap(folder: Path, names: list[str], new: list[LogSegment], files: Files) -> None:
    if new:
        taken = {segment.base_offset for segment in new}
        first, stop = min(taken), max(segment.read_next_offset() for segment in new)
        replaced = [
            (int(matched[1]), name)
            for name in files.list(folder)
            if (matched := OFFSET_NAME.fullmatch(name)) and not name.endswith(SWAP)
        ]
        # Seals first: one never stands beside files that it does not speak of. A segment may come back empty, so
        # that its own offset is not below where the new ones end.
        seals = [base for base, name in replaced if name.endswith(SEAL)]
        for base in seals:
            if base in taken or first <= base < stop:
                files.unlink(offset_file(folder, base, SEAL), missing_ok=True)
        if seals:
            files.sync_folder(folder)
        for base, name in replaced:
            if not name.endswith(SEAL) and first <= base < stop:
                files.unlink(folder / name, missing_ok=True)
    for name in names:
        files.rename(folder / name, folder / name.removesuffix(SWAP))
    files.sync_folder(folder)


def _offset_of(name: str, folder: Path) -> int:
    matched = OFFSET_NAME.fullmatch(name)
    if matched is None:
        raise CorruptError(
            f"{folder / name} has a name no log segment has; move it out of the folder", path=folder / name
        )
    return int(matched[1])
