"""What one partition knows of its producers: sequences, epochs, transactions, and their snapshots.

Wires the rules (`producer_append`), the transactions (`transactions`) and the files (`producer_snapshot`),
and keeps the map of producers. It reads no log: after `truncate_and_reload` the owner replays the log from
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from tidegate.clock import Clock
from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Files
from tidegate.log.batches.batch import BatchHeader
from tidegate.log.producers.producer_append import Origin, ProducerAppend, Verification
from tidegate.log.producers.producer_snapshot import BatchMetadata, ProducerEntry, SnapshotFiles
from tidegate.log.producers.transactions import CompletedTxn, OpenTxn, Transactions

__all__ = [
    "BatchMetadata",
    "CompletedTxn",
    "Origin",
    "ProducerAppend",
    "ProducerEntry",
    "ProducerStates",
    "Verification",
]

LATE_TRANSACTION_BUFFER_MS = 5 * 60 * 1000

_log = logging.getLogger(__name__)


class ProducerStates:
    """The producers of one partition."""

    def __init__(
        self,
        folder: Path,
        *,
        files: Files,
        clock: Clock,
        expiration_ms: int = 86_400_000,
        transaction_max_timeout_ms: int = 900_000,
    ) -> None:
        self.folder = folder
        self.expiration_ms = expiration_ms
        self.transaction_max_timeout_ms = transaction_max_timeout_ms
        self._files = files
        self._clock = clock
        self._producers: dict[int, ProducerEntry] = {}
        self._transactions = Transactions()
        self._verifications: dict[int, Verification] = {}
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
        return not self._producers and not self._transactions.has_unreplicated

    @property
    def map_end_offset(self) -> int:
        """The first offset that is not part of this state."""
        return self._map_end_offset

    @property
    def first_unstable_offset(self) -> int | None:
        """Where the earliest transaction begins that is open, or complete but not replicated."""
        return self._transactions.first_unstable_offset

    @property
    def first_undecided_offset(self) -> int | None:
        """Where the earliest open transaction begins."""
        return self._transactions.first_undecided_offset

    def entry(self, producer_id: int) -> ProducerEntry | None:
        return self._producers.get(producer_id)

    def has_late_transaction(self, now_ms: int) -> bool:
        """Whether the oldest open transaction was left behind: silent for longer than any may be."""
        oldest = self._transactions.oldest_open
        entry = None if oldest is None else self._producers.get(oldest.producer_id)
        if entry is None or entry.last_timestamp <= 0:
            return False
        return now_ms - entry.last_timestamp > self.transaction_max_timeout_ms + LATE_TRANSACTION_BUFFER_MS

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
        return ProducerAppend(
            self.folder.name, current, origin, verification=self._verifications.get(producer_id)
        )

    def update(self, append: ProducerAppend) -> None:
        """Take over what a finished append says."""
        producer_id = append.producer_id
        if producer_id < 0:
            raise InvalidError(f"{self.folder.name}: producer id {producer_id} has no state")
        known = self._producers.get(producer_id)
        self._producers[producer_id] = append.entry if known is None else known.merged(append.entry)
        for txn in append.started:
            self._transactions.begin(txn)

    def update_map_end_offset(self, offset: int) -> None:
        """The log was written up to `offset`, exclusive, and this state knows all of it."""
        self._map_end_offset = offset

    def last_stable_offset(self, completed: CompletedTxn) -> int:
        """What will be stable once `completed` ended; ask before `complete_txn`."""
        return self._transactions.last_stable_offset(completed)

    def complete_txn(self, completed: CompletedTxn) -> None:
        """The transaction's marker is in the log: it is stable once the high watermark passes the marker."""
        self._transactions.complete(completed)

    def on_high_watermark(self, high_watermark: int) -> None:
        """Complete transactions whose marker lies before the high watermark are stable now."""
        self._transactions.on_high_watermark(high_watermark)

    # -- verification of transactional appends -----------------------------------------------------

    def start_verification(self, producer_id: int, sequence: int, epoch: int) -> Verification:
        """A transactional append waits for its coordinator's word; the lowest waiting sequence goes first."""
        known = self._verifications.get(producer_id)
        if known is None:
            known = self._verifications[producer_id] = Verification(self._clock.now_ms(), sequence, epoch)
        known.saw(sequence, epoch)
        return known

    def clear_verification(self, producer_id: int) -> None:
        self._verifications.pop(producer_id, None)

    # -- forgetting ------------------------------------------------------------------------------

    def remove_expired(self, now_ms: int) -> int:
        """Forget producers that were silent too long and have no open transaction; how many."""
        expired = [entry.producer_id for entry in self._producers.values() if self._is_expired(entry, now_ms)]
        for producer_id in expired:
            del self._producers[producer_id]
        self._verifications = {
            producer_id: verification
            for producer_id, verification in self._verifications.items()
            if now_ms - verification.created_ms < self.expiration_ms
        }
        return len(expired)

    def on_log_start_incremented(self, log_start: int) -> None:
        """Records before `log_start` are gone; producers stay known."""
        self._transactions.on_high_watermark(log_start)
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
            self._transactions.begin(OpenTxn(entry.producer_id, entry.txn_first_offset))

    # -- snapshots -------------------------------------------------------------------------------

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Offsets of the snapshot files, growing."""
        return self._snapshots.offsets

    @property
    def last_snapshot_offset(self) -> int:
        """Up to where the state was last written; the next snapshot must lie behind."""
        return self._last_snapshot_offset

    @property
    def latest_snapshot(self) -> int | None:
        return self._snapshots.latest

    @property
    def oldest_snapshot(self) -> int | None:
        return self._snapshots.oldest

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

    def delete_snapshots_before(self, offset: int) -> None:
        self._keep_snapshots(known for known in self._snapshots.offsets if known >= offset)

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

    def relocate(self, folder: Path) -> None:
        """The partition folder was renamed."""
        self.folder = folder
        self._snapshots.folder = folder

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
        self._producers.clear()
        self._transactions.clear()
