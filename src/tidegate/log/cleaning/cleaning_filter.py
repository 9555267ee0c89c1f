"""What compaction keeps of a stretch of batches: Kafka's filter by columns, and the bytes that remain.

Owns the rules of one pass. The bytes of a batch that loses records are `rebuilding`'s; reading files, filling
the key map and swapping log segments `cleaner`'s.

A record, by the first line that fits:

| record | fate |
|---|---|
| in a data batch of an aborted transaction, or in a marker past its horizon that may go | dropped |
| in any other control batch | kept |
| offset beyond the last one mapped | kept |
| without a key, or its key mapped to a later offset | dropped |
| without a value (a tombstone), batch past its delete horizon | dropped |
| otherwise | kept |

A batch then is copied as it stands (all records kept), rebuilt (some kept, or it needs a delete horizon), cut
to its 61-byte header (none kept, but its last offset matters), or dropped.

Invariants:
F1  Base and last offset, producer, epoch, sequence, leader epoch, flags and codec of a batch never change;
    offsets and order of records never change.
F2  A delete horizon is set once, by the first pass that keeps a tombstone or a marker of an emptied
    transaction, and never moved.
F3  The last batch of an active producer, and the last batch below the round's end, stay at least as a header:
    sequence numbers, epochs and the end of the log depend on them.

Thread rule: a filter belongs to one cleaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.errors import CorruptError
from tidegate.log.cleaning.cleaned_transactions import CleanedTransactions, MarkerKind
from tidegate.log.cleaning.rebuilding import rebuild
from tidegate.log.format.batch import (
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    TRANSACTIONAL_BIT,
    BatchHeader,
    ControlType,
    read_control,
)
from tidegate.log.format.encode import empty_batch

if TYPE_CHECKING:
    from tidegate.log.cleaning.key_map import KeyMap
    from tidegate.log.format.decode import BatchTable
    from tidegate.log.segments.transaction_index import AbortedTxn

Flags = NDArray[np.bool_]
Longs = NDArray[np.int64]

_LARGEST = np.iinfo(np.int64).max
_MARKER_KINDS = {ControlType.ABORT: MarkerKind.ABORT, ControlType.COMMIT: MarkerKind.COMMIT}


class LastBatch(NamedTuple):
    """Where an active producer's sequence stands: its last data offset, -1 when only a marker is known."""

    last_data_offset: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Rules:
    """What one pass goes by. `mapped_to` is the last offset the key map speaks for (inclusive)."""

    now_ms: int
    delete_retention_ms: int
    mapped_to: int
    round_end: int
    max_decompressed_bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """The bytes that remain of a stretch, and for each remaining batch what the indexes need."""

    data: bytes
    sizes: Longs
    last_offsets: Longs
    max_timestamps: Longs
    aborted: list[AbortedTxn]
    records_read: int
    records_kept: int


@dataclass(frozen=True, slots=True)
class _Verdicts:
    """One entry per batch, `keep` one per record."""

    keep: Flags
    kept: Longs
    needs_horizon: Flags
    verbatim: Flags
    emptied: Flags
    aborted: list[AbortedTxn]


class CleaningFilter:
    """The filter for one group of segments; `transactions` goes through the whole pass. Feed it in order."""

    def __init__(
        self,
        key_map: KeyMap,
        rules: Rules,
        last_batches: Mapping[int, LastBatch],
        transactions: CleanedTransactions,
    ) -> None:
        self.transactions = transactions
        self._map = key_map
        self._rules = rules
        known = sorted(last_batches.items())
        self._producers = np.array([producer for producer, _ in known], np.int64)
        self._last_data = np.array([last.last_data_offset for _, last in known], np.int64)
        self._epochs = np.array([last.epoch for _, last in known], np.int64)

    def filter(self, buffer: bytes, table: BatchTable, records: pa.RecordBatch) -> Kept:
        """`records` are all records of all batches of the table, control records included, in order."""
        rows = int(table.count.sum())
        if rows != records.num_rows:
            raise CorruptError(
                f"the batches from offset {table.base_offset[0]} on claim {rows} records but hold "
                f"{records.num_rows}",
                offset=int(table.base_offset[0]),
            )
        verdicts = self._judge(buffer, table, records)
        sizes = np.where(verdicts.verbatim, table.size, 0)
        max_timestamps = table.max_timestamp.copy()
        pieces: list[tuple[int, bytes | memoryview]] = _verbatim_runs(buffer, table, verdicts.verbatim)
        for index in np.flatnonzero(verdicts.emptied).tolist():
            pieces.append((index, empty_batch(BatchHeader.parse(buffer, int(table.position[index])))))
            sizes[index] = HEADER_SIZE
        rebuilt = np.flatnonzero((verdicts.kept > 0) & ~verdicts.verbatim)
        if len(rebuilt):
            timestamps = pc.fill_null(records.column("timestamp").cast(pa.int64()), -1).to_numpy()
            done = rebuild(
                buffer,
                table,
                rebuilt,
                keep=verdicts.keep,
                timestamps=timestamps,
                new_horizon=verdicts.needs_horizon[rebuilt],
                horizon_ms=min(self._rules.now_ms + self._rules.delete_retention_ms, int(_LARGEST)),
                max_decompressed_bytes=self._rules.max_decompressed_bytes,
            )
            sizes[rebuilt] = [len(batch) for batch in done.batches]
            max_timestamps[rebuilt] = done.max_timestamps
            pieces += zip(rebuilt.tolist(), done.batches, strict=True)
        pieces.sort(key=lambda piece: piece[0])
        remaining = sizes > 0
        return Kept(
            data=b"".join([data for _, data in pieces]),
            sizes=sizes[remaining],
            last_offsets=table.last_offset[remaining],
            max_timestamps=max_timestamps[remaining],
            aborted=verdicts.aborted,
            records_read=rows,
            records_kept=int(verdicts.kept.sum()),
        )

    # -- deciding --------------------------------------------------------------------------------

    def _judge(self, buffer: bytes, table: BatchTable, records: pa.RecordBatch) -> _Verdicts:
        now_ms = self._rules.now_ms
        control = (table.attributes & CONTROL_BIT) != 0
        has_horizon = (table.attributes & DELETE_HORIZON_BIT) != 0
        may_go, aborted = follow_transactions(self.transactions, buffer, table)
        past_horizon = has_horizon & (table.base_timestamp <= now_ms)
        discarded = may_go & (past_horizon | ~control)
        batch_of_row = np.repeat(np.arange(len(table)), table.count)
        offsets = records.column("offset").to_numpy()
        keys = records.column("key")
        tombstone = pc.is_null(records.column("value")).to_numpy(zero_copy_only=False)
        beyond = offsets > self._rules.mapped_to
        keyed = pc.is_valid(keys).to_numpy(zero_copy_only=False)
        asked = keyed & ~beyond & ~(control | discarded)[batch_of_row]
        superseded = offsets < self._map.get(keys, asked)
        keep = beyond | (asked & ~superseded & ~(tombstone & past_horizon[batch_of_row]))
        keep |= control[batch_of_row]
        keep &= ~discarded[batch_of_row]
        kept = np.bincount(batch_of_row[keep], minlength=len(table))
        kept_tombstones = np.bincount(batch_of_row[keep & tombstone], minlength=len(table))
        needs_horizon = (kept > 0) & ~has_horizon & ((kept_tombstones > 0) | (may_go & control))
        return _Verdicts(
            keep=keep,
            kept=kept,
            needs_horizon=needs_horizon,
            verbatim=(kept > 0) & (kept == table.count) & ~needs_horizon,
            emptied=(kept == 0) & self._must_stay(table, control),
            aborted=aborted,
        )

    def _must_stay(self, table: BatchTable, control: Flags) -> Flags:
        """Batches of which at least the header is kept (F3)."""
        stays: Flags = table.last_offset + 1 == self._rules.round_end
        if len(self._producers):
            found = np.searchsorted(self._producers, table.producer_id)
            found[found == len(self._producers)] = 0
            active = (self._producers[found] == table.producer_id) & (table.producer_id >= 0)
            last_data = self._last_data[found]
            by_marker = control & (table.producer_epoch == self._epochs[found])
            stays |= active & np.where(last_data >= 0, table.last_offset == last_data, by_marker)
        return stays


def _verbatim_runs(buffer: bytes, table: BatchTable, verbatim: Flags) -> list[tuple[int, bytes | memoryview]]:
    """The bytes of the batches that stay as they are, neighbours in one piece, each with its first index."""
    chosen = np.flatnonzero(verbatim)
    if not len(chosen):
        return []
    view = memoryview(buffer)
    breaks = np.flatnonzero(np.diff(chosen) > 1) + 1
    firsts = chosen[np.concatenate(([0], breaks))]
    lasts = chosen[np.concatenate((breaks - 1, [len(chosen) - 1]))]
    starts = table.position[firsts].tolist()
    stops = (table.position[lasts] + table.size[lasts]).tolist()
    return [
        (first, view[start:stop]) for first, start, stop in zip(firsts.tolist(), starts, stops, strict=True)
    ]


def follow_transactions(
    tracked: CleanedTransactions, buffer: bytes, table: BatchTable
) -> tuple[Flags, list[AbortedTxn]]:
    """For each batch whether its transaction lets it go; and the aborted ones that stay indexed.

    A Python step for each transactional or control batch, none for others.
    """
    may_go = np.zeros(len(table), bool)
    aborted: list[AbortedTxn] = []
    control = (table.attributes & CONTROL_BIT) != 0
    transactional = (table.attributes & TRANSACTIONAL_BIT) != 0
    for index in np.flatnonzero(control | transactional).tolist():
        producer_id, last_offset = int(table.producer_id[index]), int(table.last_offset[index])
        if not control[index]:
            may_go[index] = tracked.data(producer_id=producer_id, last_offset=last_offset)
            continue
        kind = MarkerKind.EMPTIED
        if table.count[index] > 0:
            control_type = read_control(buffer, int(table.position[index])).kind
            kind = _MARKER_KINDS.get(control_type, MarkerKind.OTHER)
        may_go[index], indexed = tracked.marker(kind, producer_id=producer_id, last_offset=last_offset)
        if indexed is not None:
            aborted.append(indexed)
    return may_go, aborted
