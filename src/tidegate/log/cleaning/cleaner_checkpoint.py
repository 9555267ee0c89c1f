"""How far each partition has been compacted: Kafka's `cleaner-offset-checkpoint`, kept true.

A line says: everything below this offset was compacted once, so its keys need not be mapped again. That must
never outlive the records it speaks of. If a log is cut and grows again, a line beyond the cut would call new
records compacted: their older values would stay and, once a tombstone among them had aged out, a deleted key would
come back. So whoever opens or cuts a partition calls `lower`.

A compaction swaps its segments before its line is written. `tidegate.cleaning`, a file of the same form, has a line for
each partition whose compaction has begun and is not known to have ended: how far it may come. Both together say where
compaction cannot have removed anything (`CompactedBelow`).

Thread rule: any thread; the folder's short lock makes reading and writing one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tidegate.clock import Clock
from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.access.closing import last_segment_base, merge_lines, read_checkpoint
from tidegate.log.access.locks import changing_folder
from tidegate.log.partitions.checkpoints import CLEANER_OFFSETS, CLEANING, read_offsets
from tidegate.log.topics.topics import partition_folder_name


class CleanerCheckpoint:
    """The file of one log folder."""

    def __init__(self, log_folder: Path, *, files: Files, clock: Clock) -> None:
        self._path = log_folder / CLEANER_OFFSETS
        self._begun = log_folder / CLEANING
        self._files = files
        self._clock = clock

    def get(self, topic: str, partition: int) -> int | None:
        """Where the dirty part of the partition begins; None when it was never compacted."""
        return read_checkpoint(self._files, self._path).get((topic, partition))

    def put(self, topic: str, partition: int, offset: int) -> None:
        """Everything below `offset` is compacted."""
        merge_checkpoint(self._path, {(topic, partition): offset}, files=self._files, clock=self._clock)

    def begin(self, topic: str, partition: int, stop: int) -> None:
        """A compaction is about to replace segments; nothing from `stop` on is touched."""
        merge_checkpoint(self._begun, {(topic, partition): stop}, files=self._files, clock=self._clock)

    def end(self, topic: str, partition: int, offset: int) -> None:
        """It is done: everything below `offset` is compacted."""
        self.put(topic, partition, offset)
        merge_checkpoint(self._begun, {(topic, partition): None}, files=self._files, clock=self._clock)

    def lower(self, topic: str, partition: int, log_end: int) -> None:
        """The log ends at `log_end`: nothing from there on was compacted, whatever was said."""
        for path in (self._path, self._begun):
            known = read_checkpoint(self._files, path).get((topic, partition))
            if known is not None and known > log_end:
                lines = {(topic, partition): log_end}
                merge_checkpoint(path, lines, files=self._files, clock=self._clock)


@dataclass(frozen=True, slots=True)
class CompactedBelow:
    """Called, it answers the offset below which compaction may have removed records of a partition.

    The answer grows with every compaction, so ask after the records were read. Where no checkpoint tells, or another
    program wrote the folder, everything below the active segment may have been compacted. Travels.
    """

    log_folder: Path
    topic: str
    partition: int
    is_foreign: bool = False

    def __call__(self) -> int:
        files, place = Files(), (self.topic, self.partition)
        try:
            begun = read_offsets(self.log_folder / CLEANING, files=files).get(place, 0)
            if not self.is_foreign and files.exists(self.log_folder / CLEANER_OFFSETS):
                done = read_offsets(self.log_folder / CLEANER_OFFSETS, files=files).get(place, 0)
                return max(begun, done)
        except CorruptError:
            pass  # a checkpoint is a hint: without it the active segment alone is known to be whole
        folder = self.log_folder / partition_folder_name(self.topic, self.partition)
        return last_segment_base(files, folder) or 0


def merge_checkpoint(
    path: Path, lines: Mapping[tuple[str, int], int | None], *, files: Files, clock: Clock
) -> None:
    """`merge_lines` under the folder's short lock."""
    if lines:
        with changing_folder(files, path.parent, clock):
            merge_lines(files, path, lines)
