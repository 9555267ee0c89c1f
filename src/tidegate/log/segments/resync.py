"""Finding the next sound batch behind damage.

A damaged length loses the way to everything behind it, though most of that is intact. Batches have no start
mark, but a header is far from arbitrary: magic 2 at byte 16, a length that fits the file, a CRC over the
whole. A candidate is believed only when its CRC matches, so a look-alike costs a checksum and never a wrong
answer.

Owns the search; what damage means is decided elsewhere. Memory is bounded by the window and one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tidegate.errors import CorruptError, verify_command
from tidegate.files import File
from tidegate.log.format.batch import HEADER_SIZE, MAGIC, BatchHeader
from tidegate.log.segments.batch_file import BatchPlace, sound_headers

RESYNC_BYTES: Final = 1 << 20
_MAGIC_AT: Final = 16
_MAGIC_BYTE: Final = bytes([MAGIC])


def next_sound_batch(
    file: File, position: int, end: int, *, min_offset: int = 0
) -> tuple[int, BatchHeader] | None:
    """The first batch at or after byte `position` whose CRC matches and whose base is ≥ `min_offset`."""
    for candidate in _candidates(file, position, end, min_offset):
        try:
            return next(sound_headers(file, candidate, end))
        except CorruptError:
            continue
    return None


def sound_batches(file: File, position: int, end: int) -> Iterator[tuple[int, BatchHeader]]:
    """Position and header of every sound batch from byte `position` on, whatever lies between them."""
    while (found := next_sound_batch(file, position, end)) is not None:
        try:
            yield from sound_headers(file, found[0], end)
            return
        except CorruptError as damage:
            position = damage.position if damage.position is not None else end


def find_around(file: File, end: int, offset: int, *, bound: int | None = None) -> BatchPlace | None:
    """`find_offset` in a damaged file: the first batch that reaches `offset`, whatever is broken before it.

    A batch counts when its CRC matches and its offset, which the CRC does not cover, ascends and stays below
    `bound`. Where bytes that hold no such batch lie right before the one found, and that one begins beyond the
    offset, the record asked for may be among them: an error, never a quiet skip.
    """
    sound_end, expected = 0, 0
    for position, header in sound_batches(file, 0, end):
        if header.base_offset < expected or (bound is not None and header.last_offset >= bound):
            continue
        if header.last_offset >= offset:
            if header.base_offset <= offset or position == sound_end:
                return BatchPlace(position, header.size, header.base_offset, header.last_offset)
            raise _damaged(file, sound_end, offset, f"reading can go on at {header.base_offset}")
        sound_end, expected = position + header.size, header.next_offset
    if sound_end < end:
        raise _damaged(file, sound_end, offset, "nothing sound follows")
    return None


def _damaged(file: File, position: int, offset: int, resume: str) -> CorruptError:
    return CorruptError(
        f"{file.path} is damaged at position {position}, where offset {offset} may have been; {resume} "
        f"({verify_command(file.path.parent)} shows the extent)",
        path=file.path,
        position=position,
        offset=offset,
    )


def _candidates(file: File, position: int, end: int, min_offset: int) -> Iterator[int]:
    """Byte positions that look like the start of a batch, by everything cheap."""
    while end - position >= HEADER_SIZE:
        window = file.read_at(position, min(RESYNC_BYTES, end - position))
        last_start = len(window) - HEADER_SIZE
        if last_start < 0:
            return
        found = window.find(_MAGIC_BYTE, _MAGIC_AT)
        while 0 <= found - _MAGIC_AT <= last_start:
            at = found - _MAGIC_AT
            if _is_plausible(window, at, end - position - at, min_offset):
                yield position + at
            found = window.find(_MAGIC_BYTE, found + 1)
        position += last_start + 1


def _is_plausible(window: bytes, at: int, room: int, min_offset: int) -> bool:
    try:
        header = BatchHeader.parse(window, at)
    except CorruptError:
        return False
    return (
        HEADER_SIZE <= header.size <= room
        and header.base_offset >= min_offset
        and header.last_offset_delta >= 0
        and header.count >= 0
    )
