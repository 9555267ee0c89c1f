"""A log segment whose offsets lie too far apart for its indexes, made into several.

Very old brokers could write one, and a damaged base offset (which no checksum covers) looks like one. A broker
splits it when it starts: every batch stays, in order, each new segment beginning with the batch that did not fit
the one before. The new segments are swapped in as compacted ones are, so a crash on the way is harmless.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.errors import CorruptError
from tidegate.log.format.batch import BatchHeader
from tidegate.log.segments.file_names import CLEANED
from tidegate.log.segments.segment import LogSegment


class OffsetOverflowError(CorruptError):
    """The segment holds an offset that does not fit its indexes. Caught by the loader, which splits it."""

    def __init__(self, segment: LogSegment, header: BatchHeader, position: int) -> None:
        super().__init__(
            f"{segment.path} holds offset {header.last_offset} at position {position}, too far from its base "
            f"{segment.base_offset}: its header is damaged, or an old broker wrote it",
            path=segment.path,
            position=position,
            offset=header.last_offset,
        )
        self.segment = segment


def split(segment: LogSegment, new_segment: Callable[[int, str], LogSegment]) -> list[LogSegment]:
    """Finished and synced `.cleaned` segments with all batches of `segment`; `new_segment(base, suffix)` makes one."""
    parts: list[LogSegment] = []
    copied = 0
    try:
        with segment.reader() as file:
            for position, header in segment.batches():
                if not parts or not parts[-1].holds(header.last_offset):
                    parts.append(new_segment(header.base_offset, CLEANED))
                parts[-1].append(file.read_at(position, header.size), header)
                copied = position + header.size
        if copied != segment.size:
            raise CorruptError(
                f"{segment.path} cannot be split: from position {copied} on it holds no batch; move it aside",
                path=segment.path,
                position=copied,
            )
        for part in parts:
            part.become_inactive()
            part.sync()
            part.set_mtime_ms(segment.mtime_ms)
    except BaseException:
        for part in parts:
            part.delete()
        raise
    return parts
