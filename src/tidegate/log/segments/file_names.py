"""Names of the files in a partition folder: an offset in 20 digits and the kind of file, `00000000000000000042.log`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

LOG: Final = ".log"
INDEX: Final = ".index"
TIME_INDEX: Final = ".timeindex"
TRANSACTION_INDEX: Final = ".txnindex"
SNAPSHOT: Final = ".snapshot"
SEAL: Final = ".seal"
INDEX_SUFFIXES: Final = (INDEX, TIME_INDEX, TRANSACTION_INDEX)
SEGMENT_SUFFIXES: Final = (LOG, *INDEX_SUFFIXES)
DELETED: Final = ".deleted"
CLEANED: Final = ".cleaned"
SWAP: Final = ".swap"

_DIGITS: Final = 20


def offset_file(folder: Path, offset: int, kind: str, suffix: str = "") -> Path:
    """The file of this kind; with a second suffix while it is about to replace another, or to be removed."""
    return folder / f"{offset:020d}{kind}{suffix}"


def offsets_of(names: Iterable[str], kind: str) -> list[int]:
    """The offsets, ascending, of the names that are a file of this kind."""
    length = _DIGITS + len(kind)
    digits = [name[:_DIGITS] for name in names if len(name) == length and name.endswith(kind)]
    return sorted(int(each) for each in digits if each.isascii() and each.isdigit())
