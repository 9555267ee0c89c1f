"""Names of the files in a partition folder, and the checksummed JSON of Tidegate's own small files.

A file name is an offset in 20 digits and the kind of file: `00000000000000000042.log`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from fastcrc import crc32

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
    """Return the path of the file of this kind; `suffix` marks one that will replace another, or be removed."""
    return folder / f"{offset:020d}{kind}{suffix}"


def offsets_of(names: Iterable[str], kind: str) -> list[int]:
    """Return the offsets, ascending, of the names that are files of this kind."""
    length = _DIGITS + len(kind)
    digits = [name[:_DIGITS] for name in names if len(name) == length and name.endswith(kind)]
    return sorted(int(each) for each in digits if each.isascii() and each.isdigit())


def checksummed_json(body: Any) -> bytes:
    """Return one line of JSON and one line `crc32c:<8 hex digits over the first>`."""
    line = json.dumps(body, separators=(",", ":")).encode("ascii")
    return line + b"\ncrc32c:%08x\n" % crc32.iscsi(line)


def parse_checksummed_json(data: bytes) -> Any:
    """Return the object given to `checksummed_json`; None when the checksum does not match.

    `ValueError` when the checksum matches but the text is no JSON, or is nested too deep.
    """
    line, _, trailer = data.partition(b"\n")
    if trailer != b"crc32c:%08x\n" % crc32.iscsi(line):
        return None
    try:
        return json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
