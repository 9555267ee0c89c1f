"""What an append must know about the records of a batch, without holding them.

The encoder knows these facts when it has written a batch, and `decode.inspect_records` finds them in one that
somebody else wrote. No numba and no Arrow here, so the append path can name the type.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """Facts over all records of one batch."""

    count: int
    min_timestamp: int
    """The smallest timestamp that is not -1; -1 when no record has one."""
    max_timestamp: int
    max_timestamp_offset: int
    """Offset of the first record with the largest timestamp; counted from the base offset as stored."""
    null_keys: int
    consecutive: bool
    """Whether the offset deltas are 0, 1, 2, …"""
