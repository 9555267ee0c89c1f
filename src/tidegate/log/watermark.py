"""How far readers in other processes may read: `<partition>/tidegate.watermark`.

Two slots of 64 bytes, written in turn; a reader takes the valid one with the larger sequence:

| at | bytes | field |
|---|---|---|
| 0 | 8 | `TGATEWM1` |
| 8 | 8 | sequence, growing by one per write; the slot is sequence mod 2 |
| 16 | 8 | log start offset |
| 24 | 8 | high watermark |
| 32 | 8 | durable end: offsets below it are synced |
| 40 | 8 | last stable offset |
| 48 | 4 | generation: odd while log segments are being removed or replaced, then the next even number |
| 52 | 8 | mark of the machine's start during which it was written, 0 where that is not known |
| 60 | 4 | CRC-32C of bytes 0 to 59 |

W1  written after the data it describes is acknowledged, never before.
W2  not synced with each write: a power failure may leave it older or newer than the data. A slot of an earlier
    start of the machine is therefore only a lower bound, until opening the partition for writing rewrites it.
W3  next to a damaged slot the valid one is a lower bound: readers then search the log for its end, and recovery
    keeps a copy of all it cuts.

One writer (the holder of the partition lock); any number of readers.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

from fastcrc import crc32

from tidegate.errors import UnavailableError
from tidegate.files import File, Files

WATERMARK_NAME = "tidegate.watermark"
SLOT_BYTES = 64
_MAGIC = b"TGATEWM1"
_BODY = struct.Struct(">8sqqqqqIQ")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CRC = struct.Struct(">I")


class Watermark(NamedTuple):
    """The content of one slot."""

    sequence: int
    log_start: int
    high_watermark: int
    durable_end: int
    last_stable: int
    generation: int
    boot: int = 0

    def pack(self) -> bytes:
        body = _BODY.pack(_MAGIC, *self)
        return body + _CRC.pack(crc32.iscsi(body))


def parse_slot(slot: bytes) -> Watermark | None:
    """Return the slot's content; None when it is short, torn or empty."""
    if len(slot) < SLOT_BYTES:
        return None
    body = slot[: _BODY.size]
    if _CRC.unpack_from(slot, _BODY.size)[0] != crc32.iscsi(body):
        return None
    magic, *fields = _BODY.unpack(body)
    return Watermark(*fields) if magic == _MAGIC else None


def newest(slots: bytes) -> Watermark | None:
    """Return the valid slot with the larger sequence; None when neither is valid."""
    first, second = parse_slot(slots[:SLOT_BYTES]), parse_slot(slots[SLOT_BYTES : 2 * SLOT_BYTES])
    if first is None or second is None:
        return first or second
    return max(first, second)


def is_certain(slots: bytes) -> bool:
    """Return whether `newest` is what was written last: both slots are valid and consecutive (W3).

    A file that is empty, or that was written only once, counts, too.
    """
    first, second = parse_slot(slots[:SLOT_BYTES]), parse_slot(slots[SLOT_BYTES : 2 * SLOT_BYTES])
    if first is None:
        return not any(slots[:SLOT_BYTES]) and (not slots if second is None else second.sequence == 1)
    return second is not None and abs(first.sequence - second.sequence) == 1


def read_slots(files: Files, partition_folder: Path) -> bytes | None:
    """Return the bytes of the file; None when there is none."""
    try:
        with files.open(partition_folder / WATERMARK_NAME) as file:
            return file.read_at(0, 2 * SLOT_BYTES)
    except FileNotFoundError:
        return None


def read_watermark(files: Files, partition_folder: Path) -> Watermark | None:
    """Return what the partition's writer last published; None when no slot is valid."""
    slots = read_slots(files, partition_folder)
    return None if slots is None else newest(slots)


def boot_mark(files: Files) -> int:
    """Return a number that differs between starts of the machine; 0 where none is available."""
    try:
        with files.open(_BOOT_ID) as file:  # the kernel reports its length as 0
            found = file.read_at(0, 64).decode("ascii", "replace")
    except (FileNotFoundError, UnavailableError):
        return 0
    digits = found.replace("-", "").strip()[:16]
    return int(digits, 16) if len(digits) == 16 and set(digits) <= set("0123456789abcdef") else 0


class WatermarkFile:
    """The writer's side of the file. Call under the partition's own lock, or from one thread."""

    def __init__(self, files: Files, partition_folder: Path) -> None:
        self._file: File = files.open(partition_folder / WATERMARK_NAME, create=True)
        slots = self._file.read_at(0, 2 * SLOT_BYTES)
        found = newest(slots)
        self.was_found = found is not None
        self.was_certain = is_certain(slots)
        if found is None:
            found = Watermark(0, 0, 0, 0, 0, 0)
        # A writer that died during a change left an odd number; opening the partition has finished the
        # change.
        # The slot that was written last.
        self.newest = found._replace(generation=_even(found.generation + 2), boot=boot_mark(files))

    def write(self, *, log_start: int, high_watermark: int, durable_end: int, last_stable: int) -> None:
        """Publish how far readers may read."""
        self._put(
            self.newest._replace(
                log_start=log_start,
                high_watermark=high_watermark,
                durable_end=durable_end,
                last_stable=last_stable,
            )
        )

    def begin_change(self) -> None:
        """Publish an odd generation before log segments are renamed: readers must not conclude from a missing file.

        Synced, so that after a power failure a file that was removed on purpose is not missed.
        """
        if self.newest.generation % 2 == 0:
            self._put(self.newest._replace(generation=self.newest.generation + 1))
            self.sync()

    def end_change(self) -> None:
        """Publish an even generation after the renames: readers list the folder again."""
        if self.newest.generation % 2 == 1:
            self._put(self.newest._replace(generation=_even(self.newest.generation + 1)))

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _put(self, mark: Watermark) -> None:
        mark = mark._replace(sequence=mark.sequence + 1)
        self._file.write_at(mark.sequence % 2 * SLOT_BYTES, mark.pack())
        self.newest = mark


def _even(generation: int) -> int:
    return (generation & 0xFFFFFFFF) & ~1
