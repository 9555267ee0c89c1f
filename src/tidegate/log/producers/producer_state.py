"""What one partition knows of its producers: sequences, epochs, transactions, and their snapshots.

Wires the rules (`producer_append`) and the files (`producer_snapshot`), and keeps the map of producers and which
transactions readers of committed records must not pass yet: open ones, and complete ones whose marker the high
watermark has not passed. It reads no log: after `truncate_and_reload` the owner replays the log from
`map_end_offset` on. The owner's order for every append is: `duplicate_of`, `prepare`, the append's checks,
write the bytes, `update`, and per ended transaction `last_stable_offset`, transaction index, `complete_txn`;
then `update_map_end_offset`.

Invariants:
I1  a refused append changes nothing here.
I2  the state is that of the log up to `map_end_offset`, exclusive; a snapshot at that offset holds it, but
    only the last batch of each producer.
I3  a damaged snapshot is never used: it is deleted and the next older one tried.

Thread rule: belongs to its partition's owner, who holds the partition's lock.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Files
from tidegate.log.format.batch import BatchHeader
from tidegate.log.producers.producer_append import CompletedTxn, Origin, ProducerAppend
from tidegate.log.producers.producer_snapshot import BatchMetadata, ProducerEntry, SnapshotFiles

__all__ = [
    "BatchMetadata",
    "CompletedTxn",
    "Origin",
    "ProducerAppend",
    "ProducerEntry",
    "ProducerStates",
]

_log = logging.getLogger(__name__)


class ProducerStates:
    """The producers of one partition."""

    def __init__(
        self,
        folder: Path,
        *,
        files: Files,
        expiration_ms: int = 86_400_000,
    ) -> None:
        self.folder = folder
        self.expiration_ms = expiration_ms
        self._files = files
        self._producers: dict[int, ProducerEntry] = {}
        self._open: dict[int, int] = {}  # first offset → producer of each open transaction
        self._open_order: list[int] = []
        self._unreplicated: dict[int, CompletedTxn] = {}  # by first offset
        self._snapshots = SnapshotFiles(folder, files=files)
        self._map_end_offset = 0
        self._last_snapshot_offset = 0

    # -- looking ---------------------------------------------------------------------------------

    @property
    def active_producers(self) -> Mapping[int, ProducerEntry]:
        """Producer id → what is known of it; a live view."""
        return MappingProxyType(self._producers)

    @property
    def is_empty(self) -> bool:
        """No producer is known and nothing waits for the high watermark."""
        return not self._producers and not self._unreplicated

    @property
    def map_end_offset(self) -> int:
        """The first offset that is not part of this state."""
        return self._map_end_offset

    @property
    def first_unstable_offset(self) -> int | None:
        """Where the earliest transaction begins that is open, or complete but not replicated."""
        found = [
            offset for offset in (self.first_undecided_offset, *self._unreplicated) if offset is not None
        ]
        return min(found, default=None)

    @property
    def first_undecided_offset(self) -> int | None:
        """Where the earliest open transaction begins."""
        return self._open_order[0] if self._open_order else None

    def entry(self, producer_id: int) -> ProducerEntry | None:
        return self._producers.get(producer_id)

    # -- appending -------------------------------------------------------------------------------

    def duplicate_of(self, header: BatchHeader) -> BatchMetadata | None:
        """The batch this one repeats exactly, if it is among the last five of its producer's epoch."""
        entry = self._producers.get(header.producer_id)
        if entry is None:
            return None
        return entry.find_batch(header.producer_epoch, header.base_sequence, header.last_sequence)

    def prepare(self, producer_id: int, origin: Origin) -> ProducerAppend:
        """Start checking one producer's batches of an append."""
        current = self._producers.get(producer_id) or ProducerEntry(producer_id)
        return ProducerAppend(self.folder.name, current, origin)

    def update(self, append: ProducerAppend) -> None:
        """Take over what a finished append says."""
        producer_id = append.producer_id
        if producer_id < 0:
            raise InvalidError(f"{self.folder.name}: producer id {producer_id} has no state")
        known = self._producers.get(producer_id)
        self._producers[producer_id] = append.entry if known is None else known.merged(append.entry)
        for first_offset in append.started:
            self._begin(producer_id, first_offset)

    def update_map_end_offset(self, offset: int) -> None:
        """The log was written up to `offset`, exclusive, and this state knows all of it."""
        self._map_end_offset = offset

    def last_stable_offset(self, completed: CompletedTxn) -> int:
        """What is stable once `completed` ended: up to the earliest open transaction of another producer."""
        others = (first for first in self._open_order if self._open[first] != completed.producer_id)
        return next(others, completed.last_offset + 1)

    def complete_txn(self, completed: CompletedTxn) -> None:
        """The transaction's marker is in the log: it is stable once the high watermark passes the marker."""
        if self._open.pop(completed.first_offset, None) is None:
            raise InvalidError(
                f"the transaction of producer {completed.producer_id} at offset {completed.first_offset} "
                f"cannot end at {completed.last_offset}: it is not open",
                kafka_name="INVALID_TXN_STATE",
            )
        del self._open_order[bisect_left(self._open_order, completed.first_offset)]
        self._unreplicated[completed.first_offset] = completed

    def on_high_watermark(self, high_watermark: int) -> None:
        """Complete transactions whose marker lies before the high watermark are stable now."""
        if self._unreplicated:
            self._unreplicated = {
                first_offset: txn
                for first_offset, txn in self._unreplicated.items()
                if txn.last_offset >= high_watermark
            }

    # -- forgetting ------------------------------------------------------------------------------

    def remove_expired(self, now_ms: int) -> int:
        """Forget producers that were silent too long and have no open transaction; how many."""
        expired = [entry.producer_id for entry in self._producers.values() if self._is_expired(entry, now_ms)]
        for producer_id in expired:
            del self._producers[producer_id]
        return len(expired)

    def on_log_start_incremented(self, log_start: int) -> None:
        """Records before `log_start` are gone; producers stay known."""
        self.on_high_watermark(log_start)
        self._map_end_offset = max(self._map_end_offset, log_start)
        latest = self._snapshots.latest
        self._last_snapshot_offset = log_start if latest is None else latest

    def truncate_fully_and_start_at(self, offset: int) -> None:
        """Forget everything and delete all snapshots: the log begins anew at `offset`."""
        self._clear()
        self._keep_snapshots(())
        self._last_snapshot_offset = 0
        self._map_end_offset = offset

    def truncate_and_reload(self, log_start: int, log_end: int, now_ms: int) -> None:
        """Make the state that of a log of [log_start, log_end), as far as snapshots reach.

        Afterwards `map_end_offset` says from where the log must be replayed.
        """
        self._keep_snapshots(offset for offset in self._snapshots.offsets if log_start < offset <= log_end)
        if log_end == self._map_end_offset:
            self.on_log_start_incremented(log_start)
            return
        self._clear()
        self._load_latest_snapshot(log_start, now_ms)

    def load_entry(self, entry: ProducerEntry) -> None:
        """Know a producer as a snapshot describes it."""
        self._producers[entry.producer_id] = entry
        if entry.txn_first_offset is not None:
            self._begin(entry.producer_id, entry.txn_first_offset)

    # -- snapshots -------------------------------------------------------------------------------

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Offsets of the snapshot files, growing."""
        return self._snapshots.offsets

    @property
    def latest_snapshot(self) -> int | None:
        return self._snapshots.latest

    def snapshot_path(self, offset: int) -> Path | None:
        """The file of the snapshot at `offset`, None when there is none."""
        return self._snapshots.path(offset) if offset in self._snapshots else None

    def take_snapshot(self, *, sync: bool = True) -> Path | None:
        """Write the state at `map_end_offset`; None when the last snapshot is not older."""
        if self._map_end_offset <= self._last_snapshot_offset:
            return None
        path = self._snapshots.write(self._map_end_offset, self._producers.values(), sync=sync)
        self._last_snapshot_offset = self._map_end_offset
        return path

    def remove_stray_snapshots(self, segment_bases: Iterable[int]) -> None:
        """Delete snapshots that are at no log segment's base.

        The largest one stays if it lies behind the last base: it was taken at a clean close.
        """
        bases = set(segment_bases)
        self._snapshots.reload()
        stray = [offset for offset in self._snapshots.offsets if offset not in bases]
        if stray and (not bases or stray[-1] > max(bases)):
            stray.pop()
        for offset in stray:
            self._snapshots.remove(offset)

    def mark_snapshot_deleted(self, offset: int) -> Path | None:
        """Rename a snapshot to `….deleted` and return that path; None when there is none."""
        return self._snapshots.mark_deleted(offset)

    # -- inside ----------------------------------------------------------------------------------

    def _is_expired(self, entry: ProducerEntry, now_ms: int) -> bool:
        return entry.txn_first_offset is None and now_ms - entry.last_timestamp >= self.expiration_ms

    def _load_latest_snapshot(self, log_start: int, now_ms: int) -> None:
        while (offset := self._snapshots.latest) is not None:
            try:
                entries = self._snapshots.read(offset)
            except (CorruptError, FileNotFoundError) as error:
                _log.warning("discarding a producer snapshot, an older one or the log replaces it: %s", error)
                self._snapshots.remove(offset)
                continue
            for entry in entries:
                if not self._is_expired(entry, now_ms):
                    self.load_entry(entry)
            self._last_snapshot_offset = self._map_end_offset = offset
            return
        self._last_snapshot_offset = self._map_end_offset = log_start

    def _keep_snapshots(self, offsets: Iterable[int]) -> None:
        kept = set(offsets)
        for offset in self._snapshots.offsets:
            if offset not in kept:
                self._snapshots.remove(offset)

    def _clear(self) -> None:
        for known in (self._producers, self._open, self._open_order, self._unreplicated):
            known.clear()

    def _begin(self, producer_id: int, first_offset: int) -> None:
        if first_offset not in self._open:
            insort(self._open_order, first_offset)
        self._open[first_offset] = producer_id
