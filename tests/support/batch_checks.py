"""Check one whole batch, as tests need it; the product checks many at a time (`format.decode`) or a file."""

from __future__ import annotations

from tidegate.log.format.batch import BatchHeader, Buffer, batch_crc, corrupt_batch


def check_batch(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Return the header of the batch at `position` after checking its length, magic and CRC."""
    header = BatchHeader.parse(buffer, position)
    there = len(buffer) - position
    if header.size > there:
        what = f"says it has {header.size} bytes but only {there} are there"
        raise corrupt_batch(what, None, position, header.base_offset)
    crc = batch_crc(buffer, position, header.size)
    if crc != header.crc:
        what = f"has stored CRC {header.crc} but its bytes give {crc}"
        raise corrupt_batch(what, None, position, header.base_offset)
    return header
