"""How far each partition has been compacted: Kafka's `cleaner-offset-checkpoint`, kept true.

A line says: everything below this offset was compacted once, so its keys need not be mapped again. That must
never outlive the records it speaks of. If a log is cut and grows again, a line beyond the cut would call new
records compacted: their older values would stay and, once a tombstone among them had aged out, a deleted key would
come back. So whoever opens or cuts a partition calls `lower`.

Thread rule: any thread; the folder's short lock makes reading and writing one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tidegate.clock import Clock
from tidegate.files import Files
from tidegate.log.access.closing import read_checkpoint
from tidegate.log.access.locks import changing_folder
from tidegate.log.partitions.checkpoints import CLEANER_OFFSETS, write_offsets


class CleanerCheckpoint:
    """The file of one log folder."""

    def __init__(self, log_folder: Path, *, files: Files, clock: Clock) -> None:
        self._path = log_folder / CLEANER_OFFSETS
        self._files = files
        self._clock = clock

    def get(self, topic: str, partition: int) -> int | None:
        """Where the dirty part of the partition begins; None when it was never compacted."""
        return read_checkpoint(self._files, self._path).get((topic, partition))

    def put(self, topic: str, partition: int, offset: int) -> None:
        """Everything below `offset` is compacted."""
        merge_checkpoint(self._path, {(topic, partition): offset}, files=self._files, clock=self._clock)

    def lower(self, topic: str, partition: int, log_end: int) -> None:
        """The log ends at `log_end`: nothing from there on was compacted, whatever was said."""
        known = self.get(topic, partition)
        if known is not None and known > log_end:
            self.put(topic, partition, log_end)


def merge_checkpoint(
    path: Path, lines: Mapping[tuple[str, int], int | None], *, files: Files, clock: Clock
) -> None:
    """Put these partitions' lines into a checkpoint, leaving everybody else's; None takes one out."""
    if not lines:
        return
    with changing_folder(files, path.parent, clock):
        before = read_checkpoint(files, path)
        after = {place: offset for place, offset in {**before, **lines}.items() if offset is not None}
        if after != before:
            write_offsets(path, after, files=files)
