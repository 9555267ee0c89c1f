"""Seals: lengths and checksums of the files of a finished log segment.

`<base>.seal` is a plain file that brokers ignore. It is written when a log segment is rolled, when a log is
closed cleanly, and by `tidegate log reseal`, which accepts files that another program wrote. `sealer` decides when
seals are written, `recovery` how a mismatch is handled. Producer snapshots are not sealed; they carry a
checksum themselves.

    {"version": 1, "base_offset": …, "next_offset": …, "records": …, "batches": …, "first_timestamp": …,
     "max_timestamp": …, "max_timestamp_offset": …,
     "files": {".log": {"size": …, "blocks": "<base64 of one big-endian CRC-32C per 64 KiB>"}, ".index": …}}
    crc32c:<8 hex digits over the line above>

Invariants:
L1  a seal describes whole files: every byte of a listed file is in one checksummed block, its size is exact;
L2  block checksums of the `.log` come from the bytes passed to the writer: a seal records what was to be
    written, not what the disk returned;
L3  a seal that cannot be read or does not match its own checksum is damage, never "no seal".

Values are immutable; `BlockSums` has one writer.
"""

from __future__ import annotations

import base64
import shlex
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastcrc import crc32

from tidegate.errors import CorruptError, verify_command
from tidegate.files import Bytes, Files
from tidegate.log.format.partition_files import (
    SEAL,
    SEGMENT_SUFFIXES,
    checksummed_json,
    offset_file,
    offsets_of,
    parse_checksummed_json,
)

BLOCK_BYTES = 65536
_VERSION = 1
_MAX_SEAL_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FileSum:
    """Size and block checksums of one file."""

    size: int
    blocks: bytes


@dataclass(frozen=True, slots=True)
class Seal:
    """The facts of a log segment when it was finished; `records` counts data records without markers."""

    base_offset: int
    next_offset: int
    records: int
    batches: int
    first_timestamp: int
    max_timestamp: int
    max_timestamp_offset: int
    files: Mapping[str, FileSum]

    def to_bytes(self) -> bytes:
        body: dict[str, Any] = {"version": _VERSION} | {
            name: value for name, value in asdict(self).items() if name != "files"
        }
        body["files"] = {
            suffix: {"size": part.size, "blocks": base64.b64encode(part.blocks).decode("ascii")}
            for suffix, part in self.files.items()
        }
        return checksummed_json(body)

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> Seal:
        try:
            body = parse_checksummed_json(data)
            if body is None:
                raise _unreadable(path, "does not match its own checksum")
            if body.get("version") != _VERSION:
                raise CorruptError(
                    f"{path}: seal version {body.get('version')!r} is unknown, this release reads {_VERSION}",
                    path=path,
                )
            files = {
                suffix: FileSum(part["size"], base64.b64decode(part["blocks"]))
                for suffix, part in body["files"].items()
            }
            del body["version"], body["files"]
            return cls(files=files, **body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(path, "has a right checksum and cannot be read") from error


def _unreadable(path: Path, what: str) -> CorruptError:
    return CorruptError(
        f"{path}: the seal {what}; check the log segment with {verify_command(path.parent)}, then accept it with "
        f"{reseal_command(path.parent)}",
        path=path,
    )


def reseal_command(folder: Path) -> str:
    """Return the command that accepts the log segments of a partition folder as they are, for error messages."""
    topic = folder.name.rpartition("-")[0]
    return f"`tidegate log reseal {topic} --log {shlex.quote(str(folder.parent))}`"


@dataclass(frozen=True, slots=True)
class SealMismatch:
    """A range where a file differs from its seal: `length` bytes from `position`."""

    path: Path
    suffix: str
    position: int
    length: int
    message: str


class BlockSums:
    """Checksums of a growing file, computed from the bytes passed to the writer (L2)."""

    def __init__(self, start: FileSum | None = None) -> None:
        self.size = 0
        self._finished = bytearray()
        self._running = 0
        if start is not None:
            self.size = start.size
            whole = start.size // BLOCK_BYTES * 4
            self._finished += start.blocks[:whole]
            if len(start.blocks) > whole:  # a CRC-32C can be continued, so a partial block is no problem
                self._running = struct.unpack_from(">I", start.blocks, whole)[0]

    def update(self, data: Bytes) -> None:
        """Add bytes at the end of the file."""
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            room = BLOCK_BYTES - self.size % BLOCK_BYTES
            piece = view[position : position + room]
            self._running = (
                crc32.iscsi(piece, self._running) if self.size % BLOCK_BYTES else crc32.iscsi(piece)
            )
            self.size += len(piece)
            position += len(piece)
            if self.size % BLOCK_BYTES == 0:
                self._finished += struct.pack(">I", self._running)

    def sum(self) -> FileSum:
        """Return the checksums of everything so far."""
        partial = struct.pack(">I", self._running) if self.size % BLOCK_BYTES else b""
        return FileSum(self.size, bytes(self._finished) + partial)


def sum_file(files: Files, path: Path, *, limit: int | None = None) -> FileSum | None:
    """Return the checksums of a file on disk (of its first `limit` bytes); None when there is no such file."""
    if not files.exists(path):
        return None
    sums = BlockSums()
    buffer = memoryview(bytearray(16 * BLOCK_BYTES))
    with files.open(path) as file:
        end = file.size() if limit is None else min(limit, file.size())
        while sums.size < end:
            count = file.read_into(sums.size, buffer[: min(len(buffer), end - sums.size)])
            if count == 0:
                break
            sums.update(buffer[:count])
    return sums.sum()


def last_block_matches(files: Files, path: Path, expected: FileSum) -> bool:
    """Return whether the size of a file and the checksum of its last block are as expected."""
    with files.open(path) as file:
        if file.size() != expected.size:
            return False
        if expected.size == 0:
            return True
        start = (expected.size - 1) // BLOCK_BYTES * BLOCK_BYTES
        last = crc32.iscsi(file.read_at(start, expected.size - start))
    return struct.pack(">I", last) == expected.blocks[-4:]


def read_seal(files: Files, folder: Path, base_offset: int) -> Seal | None:
    """Return the seal of a log segment; None when it has none, `CorruptError` when it is damaged (L3)."""
    path = offset_file(folder, base_offset, SEAL)
    if not files.exists(path):
        return None
    seal = Seal.from_bytes(files.read(path, limit=_MAX_SEAL_BYTES), path)
    if seal.base_offset != base_offset:
        raise CorruptError(
            f"{path}: the seal of log segment {seal.base_offset} under a foreign name", path=path
        )
    return seal


def write_seal(files: Files, folder: Path, seal: Seal) -> None:
    files.publish(offset_file(folder, seal.base_offset, SEAL), seal.to_bytes())


def mismatches(
    files: Files, folder: Path, seal: Seal, suffixes: tuple[str, ...] = SEGMENT_SUFFIXES
) -> list[SealMismatch]:
    """Return every place where the sealed files differ from the seal; reads the files whole."""
    found: list[SealMismatch] = []
    for suffix in suffixes:
        path, expected = offset_file(folder, seal.base_offset, suffix), seal.files.get(suffix)
        if expected is not None:
            differences = _differences(path.name, expected, sum_file(files, path))
            found += [SealMismatch(path, suffix, *difference) for difference in differences]
    return found


def _differences(name: str, expected: FileSum, actual: FileSum | None) -> Iterator[tuple[int, int, str]]:
    """Yield position, length and description of each difference."""
    if actual is None:
        yield 0, expected.size, f"{name} is missing"
        return
    comparable = min(expected.size, actual.size)
    if actual.size != expected.size:
        what = f"{name} has {actual.size} bytes, sealed with {expected.size}"
        yield comparable, abs(actual.size - expected.size), what
    for start in range(0, comparable, BLOCK_BYTES):
        end, at = min(start + BLOCK_BYTES, expected.size), start // BLOCK_BYTES * 4
        is_whole = end == min(start + BLOCK_BYTES, actual.size)
        if is_whole and expected.blocks[at : at + 4] != actual.blocks[at : at + 4]:
            yield start, end - start, f"{name}: bytes {start}–{end - 1} changed since sealed"


def check_seals(files: Files, folder: Path) -> list[SealMismatch]:
    """Compare every sealed log segment of a partition folder with its seal; reads all its files."""
    found: list[SealMismatch] = []
    for base_offset in offsets_of(files.list(folder), SEAL):
        path = offset_file(folder, base_offset, SEAL)
        try:
            seal = read_seal(files, folder, base_offset)
        except CorruptError as error:
            found.append(SealMismatch(path, SEAL, 0, 0, str(error)))
            continue
        if seal is not None:
            found += mismatches(files, folder, seal)
    return found
