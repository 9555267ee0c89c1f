"""`<offset>.snapshot`: what was known of each producer before that offset.

Owns the value `ProducerEntry`, its bytes, and the set of snapshot files in a partition folder. The rules by
which entries change are `producer_append`'s; when a snapshot is due is `producer_state`'s.

    int16 version 1 | uint32 CRC-32C of bytes 6…end | int32 n | n × 46 bytes:
    int64 producer id, int16 epoch, int32 last sequence, int64 last offset, int32 offset delta,
    int64 timestamp, int32 coordinator epoch, int64 first offset of the open transaction (-1 for none)

Only the last batch of a producer is stored; a negative last offset means none. Entries are written by growing
producer id; a broker writes them in any order, so files of several producers are equal as sets.
Thread rule: values are immutable; `SnapshotFiles` belongs to its partition's owner.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from fastcrc.crc32 import iscsi as crc32c

from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.format.batch import NO_SEQUENCE, NO_TIMESTAMP, previous_sequence
from tidegate.log.segments.file_names import SNAPSHOT, offset_file, offsets_of

VERSION: Final = 1
BATCHES_KEPT: Final = 5
NO_EPOCH: Final = -1
LIMIT_BYTES: Final = 64 * 1024 * 1024

_HEAD = struct.Struct(">hIi")
_ENTRY = struct.Struct(">qhiqiqiq")
_COUNT_POSITION = 6


class BatchMetadata(NamedTuple):
    """What is remembered of a written batch, to know it again when it is sent again."""

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
    """What a partition knows of one producer; `batches`: its last ones of this epoch, oldest first."""

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
        """First offset of the oldest remembered batch, -1 when none is."""
        return self.batches[0].first_offset if self.batches else -1

    @property
    def last_offset(self) -> int:
        """Last offset of the newest batch, -1 when only markers are known."""
        return self.batches[-1].last_offset if self.batches else -1

    @property
    def last_offset_delta(self) -> int:
        return self.batches[-1].offset_delta if self.batches else 0

    def find_batch(self, epoch: int, first_sequence: int, last_sequence: int) -> BatchMetadata | None:
        """The remembered batch with exactly this epoch and these sequences."""
        if epoch == self.epoch:
            for batch in self.batches:
                if batch.last_sequence == last_sequence and batch.first_sequence == first_sequence:
                    return batch
        return None

    def with_batch(self, epoch: int, batch: BatchMetadata) -> ProducerEntry:
        """After one more batch; a new epoch forgets the batches of the old one."""
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
        """After the end of its transaction."""
        return ProducerEntry(
            self.producer_id,
            epoch,
            coordinator_epoch,
            timestamp,
            None,
            self.batches if epoch == self.epoch else (),
        )

    def merged(self, later: ProducerEntry) -> ProducerEntry:
        """After an append that ended in `later`, which holds only the batches of that append."""
        kept = self.batches if later.epoch == self.epoch else ()
        return replace(later, batches=(*kept, *later.batches)[-BATCHES_KEPT:])


# -- bytes -----------------------------------------------------------------------------------------


def encode_snapshot(entries: Iterable[ProducerEntry]) -> bytes:
    """The file of these producers."""
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
    """The producers in a snapshot's bytes, in the order stored; `CorruptError` for anything but version 1."""
    if len(data) < _HEAD.size:
        raise _corrupt(path, len(data), f"{len(data)} bytes are too few for a snapshot")
    version, crc, count = _HEAD.unpack_from(data)
    if version != VERSION:
        raise _corrupt(path, 0, f"version {version} is not known, only {VERSION} is")
    if crc != (computed := crc32c(data[_COUNT_POSITION:])):
        raise _corrupt(path, 2, f"the stored checksum is {crc}, the computed one {computed}")
    if count < 0 or _HEAD.size + count * _ENTRY.size != len(data):
        raise _corrupt(path, _COUNT_POSITION, f"{count} producers do not fill {len(data)} bytes")
    return [_decode_entry(*fields) for fields in _ENTRY.iter_unpack(data[_HEAD.size :])]


def _decode_entry(
    producer_id: int,
    epoch: int,
    last_sequence: int,
    last_offset: int,
    offset_delta: int,
    timestamp: int,
    coordinator_epoch: int,
    txn_first_offset: int,
) -> ProducerEntry:
    batch = BatchMetadata(last_sequence, last_offset, offset_delta, timestamp)
    return ProducerEntry(
        producer_id,
        epoch,
        coordinator_epoch,
        timestamp,
        txn_first_offset if txn_first_offset >= 0 else None,
        (batch,) if last_offset >= 0 else (),
    )


# -- files -----------------------------------------------------------------------------------------


def read_snapshot(path: Path, *, files: Files) -> list[ProducerEntry]:
    """The producers in a snapshot file; `CorruptError` when it is damaged."""
    found = files.stat(path)
    if found is not None and found.is_file and found.size > LIMIT_BYTES:
        raise _corrupt(path, LIMIT_BYTES, f"{found.size} bytes are more than the {LIMIT_BYTES} allowed")
    return decode_snapshot(files.read(path), path=path)


def write_snapshot(path: Path, entries: Iterable[ProducerEntry], *, files: Files, sync: bool = True) -> None:
    """Replace the file; without `sync` a power cut may leave it damaged, which reading notices."""
    files.publish(path, encode_snapshot(entries), sync=sync)


class SnapshotFiles:
    """The snapshot files of one partition folder, by offset."""

    def __init__(self, folder: Path, *, files: Files) -> None:
        self.folder = folder
        self._files = files
        self._offsets: list[int] = []
        self.reload()

    def reload(self) -> None:
        """Look at the folder again."""
        names = self._files.list(self.folder) if self._files.exists(self.folder) else []
        self._offsets = offsets_of(names, SNAPSHOT)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Growing."""
        return tuple(self._offsets)

    @property
    def latest(self) -> int | None:
        return self._offsets[-1] if self._offsets else None

    def __contains__(self, offset: int) -> bool:
        number = bisect_left(self._offsets, offset)
        return number < len(self._offsets) and self._offsets[number] == offset

    def path(self, offset: int) -> Path:
        return offset_file(self.folder, offset, SNAPSHOT)

    def write(self, offset: int, entries: Iterable[ProducerEntry], *, sync: bool) -> Path:
        write_snapshot(self.path(offset), entries, files=self._files, sync=sync)
        if offset not in self:
            insort(self._offsets, offset)
        return self.path(offset)

    def read(self, offset: int) -> list[ProducerEntry]:
        return read_snapshot(self.path(offset), files=self._files)

    def remove(self, offset: int) -> None:
        """Delete the file, when it is one of ours."""
        if offset in self:
            self._files.unlink(self.path(offset), missing_ok=True)
            self._offsets.remove(offset)

    def mark_deleted(self, offset: int) -> Path | None:
        """Rename the file to `….snapshot.deleted`, for unlinking later; None when it is gone already."""
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
