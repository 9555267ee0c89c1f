"""The producers of one partition: sequences, epochs, transactions, and their `<offset>.snapshot` files.

`ProducerStates` maps producer ids to `ProducerEntry`s and tracks the transactions that readers of committed
records must not pass: open ones, and complete ones whose marker the high watermark has not passed.
`check_batch` applies the rules of idempotent and transactional writing to one batch and returns its effect;
`ProducerStates.update` applies that after the bytes are written. `rebuild_producers` rebuilds the state.

    origin        data batches                                   end markers
    CLIENT        epoch, sequence and transaction checks         epoch and coordinator epoch
    COORDINATOR   epoch and transaction checks                   epoch and coordinator epoch
    REPLICATION   none: the leader has made the checks           none; violations are logged

    int16 version 1 | uint32 CRC-32C of bytes 6…end | int32 n | n × 46 bytes, by producer id:
    int64 producer id, int16 epoch, int32 last sequence, int64 last offset (negative: none), int32 offset delta,
    int64 timestamp, int32 coordinator epoch, int64 first offset of the open transaction (-1 for none)

I1  a refused batch changes nothing here;
I2  the state is that of the log up to `map_end_offset`, exclusive; a snapshot at that offset holds it, but
    only the last batch of each producer;
I3  a damaged snapshot is never used: it is deleted and the next older one tried.

Thread rule: under the partition's lock, or while the log is loaded. Entries are immutable.
"""

from __future__ import annotations

import logging
import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from fastcrc.crc32 import iscsi as crc32c

from tidegate.errors import CorruptError, FencedError, InvalidError, TidegateError
from tidegate.files import Files
from tidegate.log.batch_file import headers
from tidegate.log.format.batch import (
    MAX_SEQUENCE,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    BatchHeader,
    Buffer,
    ControlType,
    previous_sequence,
    read_control,
)
from tidegate.log.format.partition_files import SNAPSHOT, offset_file, offsets_of
from tidegate.log.indexes import AbortedTxn
from tidegate.log.segment import LogSegment, SegmentList

VERSION: Final = 1
BATCHES_KEPT: Final = 5
NO_EPOCH: Final = -1
LIMIT_BYTES: Final = 64 * 1024 * 1024

_HEAD = struct.Struct(">hIi")
_ENTRY = struct.Struct(">qhiqiqiq")
_COUNT_POSITION = 6


class BatchMetadata(NamedTuple):
    """The facts of a written batch that identify it when it is sent again."""

    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp: int

    @property
    def first_sequence(self) -> int:
        return previous_sequence(self.last_sequence, self.offset_delta)

    @property
    def first_offset(self) -> int:
        return self.last_offset - self.offset_delta


@dataclass(frozen=True, slots=True)
class ProducerEntry:
    """The state of one producer in a partition; `batches` are its last ones of this epoch, oldest first."""

    producer_id: int
    epoch: int = NO_EPOCH
    coordinator_epoch: int = -1
    last_timestamp: int = NO_TIMESTAMP
    txn_first_offset: int | None = None
    batches: tuple[BatchMetadata, ...] = ()

    @property
    def first_sequence(self) -> int:
        return self.batches[0].first_sequence if self.batches else NO_SEQUENCE

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    @property
    def first_offset(self) -> int:
        """First offset of the oldest remembered batch; -1 when there is none."""
        return self.batches[0].first_offset if self.batches else -1

    @property
    def last_offset(self) -> int:
        """Last offset of the newest batch; -1 when only markers are known."""
        return self.batches[-1].last_offset if self.batches else -1

    @property
    def last_offset_delta(self) -> int:
        return self.batches[-1].offset_delta if self.batches else 0

    def find_batch(self, epoch: int, first_sequence: int, last_sequence: int) -> BatchMetadata | None:
        """Return the remembered batch with exactly this epoch and these sequence numbers."""
        if epoch == self.epoch:
            for batch in self.batches:
                if batch.last_sequence == last_sequence and batch.first_sequence == first_sequence:
                    return batch
        return None

    def with_batch(self, epoch: int, batch: BatchMetadata) -> ProducerEntry:
        """Return the entry after one more batch; a new epoch drops the batches of the old one."""
        kept = self.batches if epoch == self.epoch else ()
        return ProducerEntry(
            self.producer_id,
            epoch,
            self.coordinator_epoch,
            batch.timestamp,
            self.txn_first_offset,
            (*kept, batch)[-BATCHES_KEPT:],
        )

    def with_marker(self, epoch: int, coordinator_epoch: int, timestamp: int) -> ProducerEntry:
        """Return the entry after the end of its transaction."""
        return ProducerEntry(
            self.producer_id,
            epoch,
            coordinator_epoch,
            timestamp,
            None,
            self.batches if epoch == self.epoch else (),
        )


# -- bytes -----------------------------------------------------------------------------------------


def encode_snapshot(entries: Iterable[ProducerEntry]) -> bytes:
    """Return the snapshot file's bytes for these producers."""
    ordered = sorted(entries, key=lambda entry: entry.producer_id)
    body = bytearray(struct.pack(">i", len(ordered)))
    for entry in ordered:
        body += _ENTRY.pack(
            entry.producer_id,
            entry.epoch,
            entry.last_sequence,
            entry.last_offset,
            entry.last_offset_delta,
            entry.last_timestamp,
            entry.coordinator_epoch,
            -1 if entry.txn_first_offset is None else entry.txn_first_offset,
        )
    return struct.pack(">hI", VERSION, crc32c(bytes(body))) + bytes(body)


def decode_snapshot(data: bytes, *, path: Path | None = None) -> list[ProducerEntry]:
    """Return the producers of a snapshot in stored order; `CorruptError` for anything but version 1."""
    if len(data) < _HEAD.size:
        raise _corrupt(path, len(data), f"{len(data)} bytes are too few for a snapshot")
    version, crc, count = _HEAD.unpack_from(data)
    if version != VERSION:
        raise _corrupt(path, 0, f"version {version} is not known, only {VERSION} is")
    if crc != (computed := crc32c(data[_COUNT_POSITION:])):
        raise _corrupt(path, 2, f"the stored checksum is {crc}, the computed one {computed}")
    if count < 0 or _HEAD.size + count * _ENTRY.size != len(data):
        raise _corrupt(path, _COUNT_POSITION, f"{count} producers do not fill {len(data)} bytes")
    return [
        ProducerEntry(
            producer_id,
            epoch,
            coordinator_epoch,
            timestamp,
            txn_first_offset if txn_first_offset >= 0 else None,
            (BatchMetadata(last_sequence, last_offset, delta, timestamp),) if last_offset >= 0 else (),
        )
        for producer_id, epoch, last_sequence, last_offset, delta, timestamp, coordinator_epoch, txn_first_offset
        in _ENTRY.iter_unpack(data[_HEAD.size :])
    ]  # fmt: skip


# -- files -----------------------------------------------------------------------------------------


def read_snapshot(path: Path, *, files: Files) -> list[ProducerEntry]:
    """Return the producers of a snapshot file; `CorruptError` when it is damaged."""
    found = files.stat(path)
    if found is not None and found.is_file and found.size > LIMIT_BYTES:
        raise _corrupt(path, LIMIT_BYTES, f"{found.size} bytes are more than the {LIMIT_BYTES} allowed")
    return decode_snapshot(files.read(path), path=path)


def write_snapshot(path: Path, entries: Iterable[ProducerEntry], *, files: Files, sync: bool = True) -> None:
    """Replace the snapshot file; without `sync` a power failure may damage it, which reading detects."""
    files.publish(path, encode_snapshot(entries), sync=sync)


class SnapshotFiles:
    """The snapshot files of one partition folder, by offset."""

    def __init__(self, folder: Path, *, files: Files) -> None:
        self.folder = folder
        self._files = files
        self._offsets: list[int] = []
        self.reload()

    def reload(self) -> None:
        """List the folder again."""
        names = self._files.list(self.folder) if self._files.exists(self.folder) else []
        self._offsets = offsets_of(names, SNAPSHOT)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offsets in ascending order."""
        return tuple(self._offsets)

    @property
    def latest(self) -> int | None:
        return self._offsets[-1] if self._offsets else None

    def __contains__(self, offset: int) -> bool:
        number = bisect_left(self._offsets, offset)
        return number < len(self._offsets) and self._offsets[number] == offset

    def path(self, offset: int) -> Path:
        return offset_file(self.folder, offset, SNAPSHOT)

    def existing_path(self, offset: int) -> Path | None:
        return self.path(offset) if offset in self else None

    def write(self, offset: int, entries: Iterable[ProducerEntry], *, sync: bool) -> Path:
        write_snapshot(self.path(offset), entries, files=self._files, sync=sync)
        if offset not in self:
            insort(self._offsets, offset)
        return self.path(offset)

    def read(self, offset: int) -> list[ProducerEntry]:
        return read_snapshot(self.path(offset), files=self._files)

    def remove(self, offset: int) -> None:
        """Delete the snapshot at `offset`, if there is one."""
        if offset in self:
            self._files.unlink(self.path(offset), missing_ok=True)
            self._offsets.remove(offset)

    def mark_deleted(self, offset: int) -> Path | None:
        """Rename the file to `….snapshot.deleted`, to be unlinked later; return None when it is gone already."""
        if offset not in self:
            return None
        deleted = self.path(offset).with_name(f"{self.path(offset).name}.deleted")
        try:
            self._files.rename(self.path(offset), deleted)
        except FileNotFoundError:
            self._offsets.remove(offset)
            return None
        self._offsets.remove(offset)
        return deleted


def _corrupt(path: Path | None, position: int, what: str) -> CorruptError:
    name = "a producer snapshot" if path is None else str(path)
    return CorruptError(
        f"{name} is corrupt at byte {position}: {what}; without it producer state is rebuilt from the log",
        path=path,
        position=position,
        kafka_name=None,
    )


_log = logging.getLogger(__name__)


class Origin(Enum):
    """The kind of appender, which decides what is checked."""

    CLIENT = "client"
    REPLICATION = "replication"
    COORDINATOR = "coordinator"


class CompletedTxn(NamedTuple):
    """A transaction and the marker that ended it; offsets inclusive, `last_offset` is the marker's."""

    producer_id: int
    first_offset: int
    last_offset: int


class ProducerStep(NamedTuple):
    """The effect of one checked batch; `ProducerStates.update` applies it after the batch was written."""

    entry: ProducerEntry
    started: int | None = None
    """The first offset of a transaction that begins with the batch."""
    completed: CompletedTxn | None = None
    aborted: AbortedTxn | None = None


def check_data(entry: ProducerEntry, header: BatchHeader, origin: Origin, where: str) -> ProducerStep:
    """Check a data batch whose header has its final offsets against the producer's state."""
    epoch, offset = header.producer_epoch, header.base_offset
    _check_epoch(entry, epoch, offset, origin, where)
    if origin is Origin.CLIENT:
        _check_sequence(entry, epoch, header.base_sequence, offset, where)
    open_txn = entry.txn_first_offset
    if open_txn is not None and not header.is_transactional:
        message = (
            f"producer {entry.producer_id} wrote outside a transaction at offset {offset} of {where}"
            f" while its transaction from offset {open_txn} is open; end that one first"
        )
        _refuse(InvalidError(message, kafka_name="INVALID_TXN_STATE"), origin)
    batch = BatchMetadata(
        header.last_sequence, header.last_offset, header.last_offset_delta, header.max_timestamp
    )
    after = entry.with_batch(epoch, batch)
    if open_txn is None and header.is_transactional:
        return ProducerStep(replace(after, txn_first_offset=offset), started=offset)
    return ProducerStep(after)


def check_marker(
    entry: ProducerEntry,
    header: BatchHeader,
    origin: Origin,
    where: str,
    *,
    coordinator_epoch: int,
) -> ProducerStep:
    """Check an end marker against the producer's state; it completes the open transaction, if there is one."""
    offset = header.base_offset
    _check_epoch(entry, header.producer_epoch, offset, origin, where)
    if coordinator_epoch < entry.coordinator_epoch:
        message = (
            f"the end marker of producer {entry.producer_id} at offset {offset} of {where} has "
            f"coordinator epoch {coordinator_epoch}, but {entry.coordinator_epoch} is known: "
            f"a newer coordinator has taken over; stop this one"
        )
        _refuse(FencedError(message, kafka_name="TRANSACTION_COORDINATOR_FENCED"), origin)
    after = entry.with_marker(header.producer_epoch, coordinator_epoch, header.max_timestamp)
    first_offset = entry.txn_first_offset
    if first_offset is None:
        return ProducerStep(after)
    return ProducerStep(after, completed=CompletedTxn(entry.producer_id, first_offset, offset))


def _check_epoch(entry: ProducerEntry, epoch: int, offset: int, origin: Origin, where: str) -> None:
    if epoch < entry.epoch:
        message = (
            f"producer {entry.producer_id} wrote to {where} at offset {offset} in epoch {epoch}, "
            f"but epoch {entry.epoch} is known: a newer producer has taken over; stop this one"
        )
        _refuse(FencedError(message, kafka_name="INVALID_PRODUCER_EPOCH"), origin)


def _check_sequence(entry: ProducerEntry, epoch: int, sequence: int, offset: int, where: str) -> None:
    if entry.epoch == NO_EPOCH:
        return  # nothing is known, so any sequence is accepted
    last = entry.last_sequence
    if epoch != entry.epoch:
        why = f"its new epoch {epoch} (after {entry.epoch}) must start with 0" if sequence != 0 else None
    else:
        follows = sequence == last + 1 or (sequence == 0 and last == MAX_SEQUENCE)
        why = None if follows else f"the last one is {last}"
    if why is not None:
        raise InvalidError(
            f"producer {entry.producer_id} sent sequence {sequence} to {where} (offset {offset}), "
            f"but {why}: a batch is missing or came twice; resend from the first unacknowledged batch",
            kafka_name="OUT_OF_ORDER_SEQUENCE_NUMBER",
        )


def _refuse(error: TidegateError, origin: Origin) -> None:
    """Raise the error, or log it for a replica: its leader has made the checks."""
    if origin is not Origin.REPLICATION:
        raise error
    _log.warning("%s", error)


class ProducerStates:
    """The state of all producers of one partition."""

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
        self.snapshots = SnapshotFiles(folder, files=files)
        self._map_end_offset = 0
        self._last_snapshot_offset = 0

    # -- state -----------------------------------------------------------------------------------

    @property
    def active_producers(self) -> Mapping[int, ProducerEntry]:
        """Producer id → its state; a live view."""
        return MappingProxyType(self._producers)

    @property
    def is_empty(self) -> bool:
        """Return whether no producer is known and no transaction waits for the high watermark."""
        return not self._producers and not self._unreplicated

    @property
    def map_end_offset(self) -> int:
        """The first offset that is not part of this state."""
        return self._map_end_offset

    @property
    def first_unstable_offset(self) -> int | None:
        """The first offset of the earliest transaction that is open, or complete but not replicated."""
        found = [
            offset for offset in (self.first_undecided_offset, *self._unreplicated) if offset is not None
        ]
        return min(found, default=None)

    @property
    def first_undecided_offset(self) -> int | None:
        """The first offset of the earliest open transaction."""
        return self._open_order[0] if self._open_order else None

    def entry(self, producer_id: int) -> ProducerEntry | None:
        return self._producers.get(producer_id)

    # -- appending -------------------------------------------------------------------------------

    def duplicate_of(self, header: BatchHeader) -> BatchMetadata | None:
        """Return the batch that this one repeats exactly, if it is among the last five of its producer's epoch."""
        entry = self._producers.get(header.producer_id)
        if entry is None:
            return None
        return entry.find_batch(header.producer_epoch, header.base_sequence, header.last_sequence)

    def check_data(self, header: BatchHeader, origin: Origin) -> ProducerStep:
        """Check a data batch; changes nothing (I1)."""
        return check_data(self.known(header.producer_id), header, origin, self.folder.name)

    def check_marker(
        self, header: BatchHeader, origin: Origin, *, is_abort: bool, coordinator_epoch: int
    ) -> ProducerStep:
        """Check a transaction marker; changes nothing (I1)."""
        step = check_marker(
            self.known(header.producer_id),
            header,
            origin,
            self.folder.name,
            coordinator_epoch=coordinator_epoch,
        )
        if step.completed is None or not is_abort:
            return step
        stable = self.last_stable_offset(step.completed)
        return step._replace(aborted=AbortedTxn(*step.completed, stable))

    def known(self, producer_id: int) -> ProducerEntry:
        """Return the state of a producer, also of one that has written nothing yet."""
        if producer_id < 0:
            raise InvalidError(f"{self.folder.name}: producer id {producer_id} has no state")
        return self._producers.get(producer_id) or ProducerEntry(producer_id)

    def update(self, step: ProducerStep) -> None:
        """Apply the effect of a batch, after it was written."""
        self._producers[step.entry.producer_id] = step.entry
        if step.started is not None:
            self._begin(step.entry.producer_id, step.started)
        if step.completed is not None:
            self.complete_txn(step.completed)

    def update_map_end_offset(self, offset: int) -> None:
        """Record that the state covers the log up to `offset`, exclusive."""
        self._map_end_offset = offset

    def last_stable_offset(self, completed: CompletedTxn) -> int:
        """Return the last stable offset after `completed` ended, bounded by other producers' open transactions."""
        others = (first for first in self._open_order if self._open[first] != completed.producer_id)
        return next(others, completed.last_offset + 1)

    def complete_txn(self, completed: CompletedTxn) -> None:
        """Record a transaction whose marker is in the log; it is stable once the high watermark passes the marker."""
        if self._open.pop(completed.first_offset, None) is None:
            raise InvalidError(
                f"the transaction of producer {completed.producer_id} at offset {completed.first_offset} "
                f"cannot end at {completed.last_offset}: it is not open",
                kafka_name="INVALID_TXN_STATE",
            )
        del self._open_order[bisect_left(self._open_order, completed.first_offset)]
        self._unreplicated[completed.first_offset] = completed

    def on_high_watermark(self, high_watermark: int) -> None:
        """Mark complete transactions as stable whose marker lies before the high watermark."""
        if self._unreplicated:
            self._unreplicated = {
                first_offset: txn
                for first_offset, txn in self._unreplicated.items()
                if txn.last_offset >= high_watermark
            }

    # -- removing producers ----------------------------------------------------------------------

    def remove_expired(self, now_ms: int) -> int:
        """Drop producers that were idle too long and have no open transaction; return how many."""
        expired = [entry.producer_id for entry in self._producers.values() if self._is_expired(entry, now_ms)]
        for producer_id in expired:
            del self._producers[producer_id]
        return len(expired)

    def on_log_start_incremented(self, log_start: int) -> None:
        """Handle the removal of records before `log_start`; producers are kept."""
        self.on_high_watermark(log_start)
        self._map_end_offset = max(self._map_end_offset, log_start)
        latest = self.snapshots.latest
        self._last_snapshot_offset = log_start if latest is None else latest

    def truncate_fully_and_start_at(self, offset: int) -> None:
        """Drop everything and delete all snapshots: the log restarts at `offset`."""
        self._clear()
        self._keep_snapshots(())
        self._last_snapshot_offset = 0
        self._map_end_offset = offset

    def truncate_and_reload(self, log_start: int, log_end: int, now_ms: int) -> None:
        """Restore the state of a log of [log_start, log_end), as far as snapshots reach.

        Afterwards `map_end_offset` is the offset from which the log must be replayed.
        """
        self._keep_snapshots(offset for offset in self.snapshots.offsets if log_start < offset <= log_end)
        if log_end == self._map_end_offset:
            self.on_log_start_incremented(log_start)
            return
        self._clear()
        self._load_latest_snapshot(log_start, now_ms)

    def load_entry(self, entry: ProducerEntry) -> None:
        """Add a producer as a snapshot describes it."""
        self._producers[entry.producer_id] = entry
        if entry.txn_first_offset is not None:
            self._begin(entry.producer_id, entry.txn_first_offset)

    # -- snapshots -------------------------------------------------------------------------------

    def take_snapshot(self, *, sync: bool = True) -> Path | None:
        """Write the state at `map_end_offset`; return None when the last snapshot is as recent."""
        if self._map_end_offset <= self._last_snapshot_offset:
            return None
        path = self.snapshots.write(self._map_end_offset, self._producers.values(), sync=sync)
        self._last_snapshot_offset = self._map_end_offset
        return path

    def remove_stray_snapshots(self, segment_bases: Iterable[int]) -> None:
        """Delete snapshots that are not at a log segment's base offset.

        The newest one is kept if it lies after the last base: a clean close took it.
        """
        bases = set(segment_bases)
        self.snapshots.reload()
        stray = [offset for offset in self.snapshots.offsets if offset not in bases]
        if stray and (not bases or stray[-1] > max(bases)):
            stray.pop()
        for offset in stray:
            self.snapshots.remove(offset)

    def _is_expired(self, entry: ProducerEntry, now_ms: int) -> bool:
        return entry.txn_first_offset is None and now_ms - entry.last_timestamp >= self.expiration_ms

    def _load_latest_snapshot(self, log_start: int, now_ms: int) -> None:
        while (offset := self.snapshots.latest) is not None:
            try:
                entries = self.snapshots.read(offset)
            except (CorruptError, FileNotFoundError) as error:
                _log.warning("discarding a producer snapshot, an older one or the log replaces it: %s", error)
                self.snapshots.remove(offset)
                continue
            for entry in entries:
                if not self._is_expired(entry, now_ms):
                    self.load_entry(entry)
            self._last_snapshot_offset = self._map_end_offset = offset
            return
        self._last_snapshot_offset = self._map_end_offset = log_start

    def _keep_snapshots(self, offsets: Iterable[int]) -> None:
        kept = set(offsets)
        for offset in self.snapshots.offsets:
            if offset not in kept:
                self.snapshots.remove(offset)

    def _clear(self) -> None:
        for known in (self._producers, self._open, self._open_order, self._unreplicated):
            known.clear()

    def _begin(self, producer_id: int, first_offset: int) -> None:
        if first_offset not in self._open:
            insort(self._open_order, first_offset)
        self._open[first_offset] = producer_id


def check_batch(
    producers: ProducerStates, header: BatchHeader, content: Callable[[], Buffer], origin: Origin
) -> ProducerStep | None:
    """Check a batch; `content` returns its bytes and is called only for markers. None without a producer."""
    if not header.has_producer:
        return None
    if not header.is_control:
        return producers.check_data(header, origin)
    control = (
        read_control(content()) if header.count > 0 else None
    )  # a compacted marker leaves an empty batch
    if control is None or not control.ends_transaction:
        return ProducerStep(producers.known(header.producer_id))  # registers the producer, as a broker does
    return producers.check_marker(
        header,
        origin,
        is_abort=control.kind is ControlType.ABORT,
        coordinator_epoch=control.coordinator_epoch or 0,
    )


def replay_segment(producers: ProducerStates, segment: LogSegment, start: int, end: int) -> None:
    """Apply the batches of one segment to `producers`, from offset `start` to byte `end`, without checks."""
    file, hint = segment.open_near(start)
    with file:
        place = segment.locate_in(file, hint, start, end)
        if place is None:
            return
        for position, header in headers(file, place.position, end):
            content = partial(file.read_at, position, header.size)
            if (step := check_batch(producers, header, content, Origin.REPLICATION)) is not None:
                producers.update(step)


def rebuild_producers(
    producers: ProducerStates,
    segments: SegmentList,
    *,
    log_start: int,
    end: int,
    clean: bool,
    now_ms: int,
) -> None:
    """Restore `producers` at offset `end`: load the newest snapshot, replay the log after it, take a snapshot.

    After a clean stop without any snapshot there is no producer state, so the log is not read.
    """
    bases = segments.bases[-2:]
    if clean and producers.snapshots.latest is None:
        for offset in (*bases, end):
            producers.update_map_end_offset(offset)
            producers.take_snapshot()
        return
    nothing_to_lose = producers.is_empty and producers.map_end_offset >= end
    producers.truncate_and_reload(log_start, end, now_ms)
    if end > producers.map_end_offset and not nothing_to_lose:
        last = segments.floor(end)
        for segment in segments.between(producers.map_end_offset, end):
            start = max(segment.base_offset, producers.map_end_offset, log_start)
            producers.update_map_end_offset(start)
            if segment.base_offset in bases:
                producers.take_snapshot()
            stop = segment.size
            if segment is last and (place := segment.locate(end)) is not None:
                stop = place.position
            replay_segment(producers, segment, start, stop)
    producers.update_map_end_offset(end)
    producers.take_snapshot()
