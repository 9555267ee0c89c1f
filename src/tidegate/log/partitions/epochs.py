"""`leader-epoch-checkpoint`: which leader epoch wrote from which offset on.

    0\\n<count>\\n then <epoch> <start offset>\\n per line, epochs and start offsets growing strictly

Owns the entries of one partition and their file; every change is on the disk before the method returns, so
the file never lacks an entry that a batch in the log refers to. Recovery and replication ask it where an
epoch ended. Thread rule: any thread; one lock guards entries and file.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import NamedTuple

from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.log.partitions.checkpoints import (
    INT32_MAX,
    INT64_MAX,
    checkpoint_text,
    parse_checkpoint,
    parse_integer,
    read_text_file,
)

NO_EPOCH = -1
NO_OFFSET = -1


class EpochEntry(NamedTuple):
    """From `start_offset` on, batches were written in leader epoch `epoch`."""

    epoch: int
    start_offset: int


class EpochEnd(NamedTuple):
    """Where the largest epoch up to the asked one ended; (-1, -1) when that is not known."""

    epoch: int
    end_offset: int


class LeaderEpochs:
    """The leader epochs of one partition, oldest first; a damaged file is a `CorruptError` at once."""

    def __init__(self, path: Path, *, files: Files) -> None:
        self.path = path
        self._files = files
        self._lock = threading.Lock()
        self._entries: list[EpochEntry] = []
        for entry in parse_checkpoint(read_text_file(path, files=files), _epoch_line, path=path):
            self._entries = _with_entry(self._entries, entry)

    @classmethod
    def empty(cls, path: Path, *, files: Files) -> LeaderEpochs:
        """Start without entries, whatever the file holds, to rebuild it from the log. Writes nothing yet."""
        epochs = cls.__new__(cls)
        epochs.path = path
        epochs._files = files
        epochs._lock = threading.Lock()
        epochs._entries = []
        return epochs

    @property
    def entries(self) -> tuple[EpochEntry, ...]:
        with self._lock:
            return tuple(self._entries)

    @property
    def latest(self) -> EpochEntry | None:
        """The current epoch, None when no batch carried one yet."""
        entries = self._entries
        return entries[-1] if entries else None

    @property
    def earliest(self) -> EpochEntry | None:
        entries = self._entries
        return entries[0] if entries else None

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Note that `epoch` writes from `start_offset` on; whether that was news.

        The latest epoch at the same or a higher start is not news. Otherwise entries with an epoch or a start
        not below the new one's contradict it and are dropped first.
        """
        entry = EpochEntry(epoch, start_offset)
        if epoch < 0 or start_offset < 0:
            raise InvalidError(f"{self.path}: leader epoch {epoch} from offset {start_offset} cannot be")
        with self._lock:
            entries = _with_entry(self._entries, entry)
            if entries is self._entries:
                return False
            self._replace(entries)
            return True

    def end_offset_for(self, epoch: int, log_end: int) -> EpochEnd:
        """Where `epoch` ended, or the largest epoch below it that is known."""
        with self._lock:
            entries = self._entries
            if epoch == NO_EPOCH or not entries:
                return EpochEnd(NO_EPOCH, NO_OFFSET)
            if entries[-1].epoch == epoch:
                return EpochEnd(epoch, log_end)
            higher = bisect_right(entries, epoch, key=_epoch_of)
            if higher == len(entries):
                return EpochEnd(NO_EPOCH, NO_OFFSET)
            # Below the first known epoch the answer carries the asked one: its data is gone from the log.
            known = entries[higher - 1].epoch if higher > 0 else epoch
            return EpochEnd(known, entries[higher].start_offset)

    def truncate_from_start(self, start_offset: int) -> None:
        """Forget what lies before `start_offset`; the epoch that covers it now starts there."""
        with self._lock:
            gone = bisect_right(self._entries, start_offset, key=_start_of)
            if gone == 0:
                return
            kept = [EpochEntry(self._entries[gone - 1].epoch, start_offset), *self._entries[gone:]]
            if kept != self._entries:
                self._replace(kept)

    def truncate_from_end(self, end_offset: int) -> None:
        """Drop epochs that start at or behind `end_offset` (a negative one changes nothing)."""
        with self._lock:
            kept = bisect_left(self._entries, end_offset, key=_start_of)
            if end_offset >= 0 and kept < len(self._entries):
                self._replace(self._entries[:kept])

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._replace([])

    def _replace(self, entries: list[EpochEntry]) -> None:
        # File first: a failed write must leave the entry unknown, or it would never be written.
        self._files.publish(
            self.path, checkpoint_text(f"{epoch} {start_offset}" for epoch, start_offset in entries)
        )
        self._entries = entries


def _with_entry(entries: list[EpochEntry], entry: EpochEntry) -> list[EpochEntry]:
    """A list with `entry` last and nothing that contradicts it; `entries` itself when `entry` is no news."""
    if entries and entries[-1].epoch == entry.epoch and entry.start_offset >= entries[-1].start_offset:
        return entries
    kept = len(entries)
    while kept > 0 and not (
        entries[kept - 1].epoch < entry.epoch and entries[kept - 1].start_offset < entry.start_offset
    ):
        kept -= 1
    return [*entries[:kept], entry]


def _epoch_line(fields: list[str]) -> EpochEntry | None:
    if len(fields) != 2:
        return None
    epoch, start_offset = parse_integer(fields[0], 0, INT32_MAX), parse_integer(fields[1], 0, INT64_MAX)
    return None if epoch is None or start_offset is None else EpochEntry(epoch, start_offset)


def _epoch_of(entry: EpochEntry) -> int:
    return entry.epoch


def _start_of(entry: EpochEntry) -> int:
    return entry.start_offset
