"""Decide which records of a stretch of batches compaction keeps, and rebuild the batches that lose records.

The first line that applies decides on a record:

| record | decision |
|---|---|
| in a data batch of an aborted transaction, or in a marker past its horizon that may be removed | dropped |
| in any other control batch | kept |
| offset beyond the last one mapped | kept |
| without a key, or its key mapped to a later offset | dropped |
| without a value (a tombstone), batch past its delete horizon | dropped |
| otherwise | kept |

A batch is then copied unchanged (all records kept), rebuilt (some kept, or it needs a delete horizon), cut to its
61-byte header (none kept, but its last offset matters), or dropped.

M1  The key map holds at most `slots × load factor` keys, 24 bytes a slot as in Kafka's map. When it is full, the
    next key is refused even if it is known, so one pass covers the same offsets as Kafka's.
F1  Base and last offset, producer, epoch, sequence, leader epoch, flags and codec of a batch never change;
    offsets and order of records never change.
F2  A delete horizon is set once, by the first pass that keeps a tombstone or a marker of an emptied
    transaction, and never moved.
F3  The last batch of an active producer, and the last batch below the end of the pass, stay at least as a header:
    sequence numbers, epochs and the end of the log depend on them.
A1  A marker may be removed only when no data batch of its transaction was read in this pass.
A2  An aborted transaction stays in the new transaction index exactly while its marker may not be removed.

Thread rule: a filter belongs to one compaction; rebuilding is pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fastcrc.crc32 import iscsi as crc32c
from numpy.typing import NDArray

from tidegate.errors import CorruptError, InvalidError
from tidegate.kernels.hashing import fingerprint_keys, get_prints, move_prints, put_prints
from tidegate.kernels.record_batch import GROWTH_BYTES, REBUILD_ROW, copy_kept
from tidegate.log.format.batch import (
    ATTRIBUTES_POSITION,
    CODEC_MASK,
    CONTROL_BIT,
    CRC_POSITION,
    DELETE_HORIZON_BIT,
    HEADER_LAYOUT,
    HEADER_SIZE,
    LENGTH_OVERHEAD,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Codec,
    ControlType,
    read_control,
)
from tidegate.log.format.compression import compress, decompress
from tidegate.log.format.encode import empty_batch
from tidegate.log.format.records import binary_buffers
from tidegate.log.indexes import AbortedTxn
from tidegate.randomness import Randomness

if TYPE_CHECKING:
    from tidegate.log.format.decode import BatchTable
    from tidegate.log.producer_state import ProducerEntry


@dataclass(slots=True)
class _OngoingAbort:
    transaction: AbortedTxn
    data_seen: bool = False


@dataclass(slots=True)
class CleanedTransactions:
    """Tracks transactions through a pass; pass it every transactional data batch and control batch in order."""

    _committing: set[int] = field(default_factory=set)
    _aborting: dict[int, _OngoingAbort] = field(default_factory=dict)
    _announced: list[tuple[int, int, AbortedTxn]] = field(default_factory=list)

    def announce(self, aborted: Iterable[AbortedTxn]) -> None:
        """Add aborted transactions of the range ahead; adding one twice is harmless."""
        for transaction in aborted:
            entry = (transaction.first_offset, transaction.last_offset, transaction)
            heapq.heappush(self._announced, entry)

    def data(self, *, producer_id: int, last_offset: int) -> bool:
        """Track a transactional data batch; return whether its transaction was aborted."""
        self._begin_up_to(last_offset)
        ongoing = self._aborting.get(producer_id)
        if ongoing is None:
            self._committing.add(producer_id)
            return False
        ongoing.data_seen = True
        return True

    def marker(
        self, kind: ControlType | None, *, producer_id: int, last_offset: int
    ) -> tuple[bool, AbortedTxn | None]:
        """Track a control batch; return if it may be removed, and the aborted transaction that is kept (A1, A2).

        The `kind` of a batch whose record an earlier pass removed is None.
        """
        self._begin_up_to(last_offset)
        if kind is None:
            return True, None
        if kind is ControlType.ABORT:
            ongoing = self._aborting.pop(producer_id, None)
            if ongoing is not None and ongoing.data_seen:
                return False, ongoing.transaction
            return True, None
        if kind is ControlType.COMMIT:
            met = producer_id in self._committing
            self._committing.discard(producer_id)
            return not met, None
        return False, None

    def _begin_up_to(self, offset: int) -> None:
        while self._announced and self._announced[0][0] <= offset:
            _, _, transaction = heapq.heappop(self._announced)
            self._aborting.setdefault(transaction.producer_id, _OngoingAbort(transaction))


Flags = NDArray[np.bool_]
Longs = NDArray[np.int64]

_NUMPY_TYPES: Final = {"q": ">i8", "i": ">i4", "I": ">u4", "h": ">i2", "b": "i1"}
HEADER: Final = np.dtype(
    [
        (name, _NUMPY_TYPES[code])
        for name, code in zip(BatchHeader._fields, HEADER_LAYOUT.format[1:], strict=True)
    ]
)


def rebuild(
    buffer: bytes,
    table: BatchTable,
    chosen: Longs,
    *,
    keep: Flags,
    timestamps: Longs,
    new_horizon: Flags,
    horizon_ms: int,
    max_decompressed_bytes: int,
) -> tuple[list[bytes | memoryview], Longs]:
    """Rebuild the batches `chosen` (indices into the table), each of which keeps at least one record.

    Return their new bytes in order, and the largest timestamp of each.

    `keep` and `timestamps` have one entry for each record of the table, `new_horizon` one for each chosen batch.
    """
    first_rows = np.concatenate(([0], np.cumsum(table.count, dtype=np.int64)))[chosen]
    counts = table.count[chosen].astype(np.int64)
    kept, first_times, last_times = _survivors(first_rows, counts, keep, timestamps)
    heads = _headers(buffer, table.position[chosen])
    attributes = table.attributes[chosen] | np.where(new_horizon, DELETE_HORIZON_BIT, 0).astype(np.int16)
    has_horizon = (table.attributes[chosen] & DELETE_HORIZON_BIT) != 0
    old_bases = table.base_timestamp[chosen]
    bases = np.where(new_horizon, horizon_ms, np.where(has_horizon, old_bases, first_times))
    appended = (attributes & LOG_APPEND_TIME_BIT) != 0
    largest = np.where(appended, table.max_timestamp[chosen], last_times)
    heads["attributes"], heads["base_timestamp"] = attributes, bases
    heads["max_timestamp"], heads["count"] = largest, kept

    rows = np.zeros(len(chosen), REBUILD_ROW)
    rows["body_start"] = table.position[chosen] + HEADER_SIZE
    rows["body_stop"] = table.position[chosen] + table.size[chosen]
    rows["first_row"], rows["records"] = first_rows, counts
    # The deltas of an append-time batch are meaningless: every record has the append time.
    rows["delta_ms"] = np.where(appended, largest, old_bases) - bases
    rows["delta_is_fixed"], rows["room"] = appended, HEADER_SIZE

    batches: list[bytes | memoryview] = [b""] * len(chosen)
    plain = (attributes & CODEC_MASK) == Codec.NONE
    _rebuild_plain(buffer, rows, heads, keep, kept, np.flatnonzero(plain), batches)
    for index in np.flatnonzero(~plain).tolist():
        batches[index] = _rebuild_compressed(
            buffer, rows[index : index + 1], heads[index : index + 1], keep, max_decompressed_bytes
        )
    return batches, largest


def _survivors(
    first_rows: Longs, counts: Longs, keep: Flags, timestamps: Longs
) -> tuple[Longs, Longs, Longs]:
    """Return for each batch how many records stay, the first one's timestamp, and the largest timestamp."""
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    rows = np.arange(counts.sum()) + np.repeat(first_rows - starts, counts)
    staying = keep[rows]
    batch_of_row = np.repeat(np.arange(len(counts)), counts)
    kept = np.bincount(batch_of_row[staying], minlength=len(counts))
    times = timestamps[rows[staying]]
    firsts = np.concatenate(([0], np.cumsum(kept)[:-1]))
    return kept, times[firsts], np.maximum.reduceat(times, firsts)


def _headers(buffer: bytes, positions: Longs) -> NDArray[Any]:
    """Return the headers at these positions as a writable structured array."""
    source = np.frombuffer(buffer, np.uint8)
    heads: NDArray[Any] = source[positions[:, None] + np.arange(HEADER_SIZE)].view(HEADER).reshape(-1)
    return heads


def _rebuild_plain(
    buffer: bytes,
    rows: NDArray[Any],
    heads: NDArray[Any],
    keep: Flags,
    kept: Longs,
    chosen: Longs,
    batches: list[bytes | memoryview],
) -> None:
    """Write the new bytes of the chosen, uncompressed batches into `batches`."""
    if not len(chosen):
        return
    rows, heads = rows[chosen], heads[chosen]
    bound = int((rows["body_stop"] - rows["body_start"]).sum())
    out = np.empty(bound + int((HEADER_SIZE + GROWTH_BYTES * kept[chosen]).sum()), np.uint8)
    done = copy_kept(np.frombuffer(buffer, np.uint8), rows, keep, out)
    if done < len(rows):
        raise _changed(heads[done])
    starts, stops = rows["start"], rows["stop"]
    heads["length"] = stops - starts - LENGTH_OVERHEAD
    out[starts[:, None] + np.arange(HEADER_SIZE)] = heads.view(np.uint8).reshape(-1, HEADER_SIZE)
    view = out.data.toreadonly()  # otherwise each checksum would copy its bytes first
    bounds = list(zip(starts.tolist(), stops.tolist(), strict=True))
    crcs = np.array([crc32c(view[start + ATTRIBUTES_POSITION : stop]) for start, stop in bounds], ">u4")
    out[starts[:, None] + np.arange(CRC_POSITION, ATTRIBUTES_POSITION)] = crcs.view(np.uint8).reshape(-1, 4)
    for index, (start, stop) in zip(chosen.tolist(), bounds, strict=True):
        batches[index] = view[start:stop]


def _rebuild_compressed(
    buffer: bytes, row: NDArray[Any], head: NDArray[Any], keep: Flags, max_bytes: int
) -> bytes:
    codec = Codec(int(head["attributes"][0]) & CODEC_MASK)
    body = memoryview(buffer)[int(row["body_start"][0]) : int(row["body_stop"][0])]
    plain = np.frombuffer(decompress(codec, body, limit=max_bytes), np.uint8)
    row["body_start"], row["body_stop"], row["room"] = 0, len(plain), 0
    out = np.empty(len(plain) + GROWTH_BYTES * int(head["count"][0]), np.uint8)
    if copy_kept(plain, row, keep, out) < 1:
        raise _changed(head[0])
    stored = compress(codec, out.data[: int(row["stop"][0])])
    head["length"] = HEADER_SIZE - LENGTH_OVERHEAD + len(stored)
    checked = head.tobytes()[ATTRIBUTES_POSITION:] + bytes(stored)
    head["crc"] = crc32c(checked)
    return head.tobytes()[:ATTRIBUTES_POSITION] + checked


def _changed(head: Any) -> CorruptError:
    offset = int(head["base_offset"])
    return CorruptError(f"the batch at offset {offset} changed while it was compacted", offset=offset)


_LARGEST = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Rules:
    """The parameters of one pass. `mapped_to` is the last offset that the key map covers (inclusive)."""

    now_ms: int
    delete_retention_ms: int
    mapped_to: int
    round_end: int
    max_decompressed_bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """The remaining bytes of a piece, and the facts that the indexes need of each remaining batch."""

    data: bytes
    sizes: Longs
    last_offsets: Longs
    max_timestamps: Longs
    aborted: list[AbortedTxn]
    records_read: int
    records_kept: int


@dataclass(frozen=True, slots=True)
class _Verdicts:
    """One entry for each batch; `keep` has one for each record."""

    keep: Flags
    kept: Longs
    needs_horizon: Flags
    verbatim: Flags
    emptied: Flags
    aborted: list[AbortedTxn]


class CleaningFilter:
    """Filters the batches of one group of segments, in order; `transactions` spans the whole pass."""

    def __init__(
        self,
        key_map: KeyMap,
        rules: Rules,
        producers: Mapping[int, ProducerEntry],
        transactions: CleanedTransactions,
    ) -> None:
        self.transactions = transactions
        self._map = key_map
        self._rules = rules
        known = sorted(producers.items())
        self._producers = np.array([producer for producer, _ in known], np.int64)
        self._last_data = np.array([entry.last_offset for _, entry in known], np.int64)
        self._epochs = np.array([entry.epoch for _, entry in known], np.int64)

    def filter(self, buffer: bytes, table: BatchTable, records: pa.RecordBatch) -> Kept:
        """Filter a piece of a segment; `records` are all records of the table's batches, control records included."""
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
            batches, newest = rebuild(
                buffer,
                table,
                rebuilt,
                keep=verdicts.keep,
                timestamps=timestamps,
                new_horizon=verdicts.needs_horizon[rebuilt],
                horizon_ms=min(self._rules.now_ms + self._rules.delete_retention_ms, int(_LARGEST)),
                max_decompressed_bytes=self._rules.max_decompressed_bytes,
            )
            sizes[rebuilt] = [len(batch) for batch in batches]
            max_timestamps[rebuilt] = newest
            pieces += zip(rebuilt.tolist(), batches, strict=True)
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

    # -- decisions -------------------------------------------------------------------------------

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
        """Return the batches of which at least the header is kept (F3)."""
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
    """Return (first batch, bytes) of each run of consecutive batches that stay unchanged."""
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
    """Return for each batch whether its transaction allows removing it, and the aborted ones that stay indexed.

    Takes a Python step for each transactional or control batch, none for others.
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
        is_emptied = table.count[index] == 0
        kind = None if is_emptied else read_control(buffer, int(table.position[index])).kind
        may_go[index], indexed = tracked.marker(kind, producer_id=producer_id, last_offset=last_offset)
        if indexed is not None:
            aborted.append(indexed)
    return may_go, aborted


SLOT_BYTES = 24
DEFAULT_BYTES = 128 * 1024 * 1024
DEFAULT_LOAD_FACTOR = 0.9

_FIRST_SLOTS = 1 << 12
_GROWTH = 8
# Below its full size the table stays sparse: probes are short and growing is rare.
_SPARSE = 0.5


class KeyMap:
    """Maps keys to their last offsets in at most `memory_bytes`."""

    def __init__(
        self,
        randomness: Randomness,
        *,
        memory_bytes: int = DEFAULT_BYTES,
        load_factor: float = DEFAULT_LOAD_FACTOR,
    ) -> None:
        self.slots = min(memory_bytes // SLOT_BYTES, 2**31 - 1)
        self.capacity = int(self.slots * load_factor)
        if self.capacity < 1 or not 0 < load_factor <= 1:
            raise InvalidError(
                f"{memory_bytes} bytes at load factor {load_factor} hold not a single key, so compaction "
                f"would never progress; raise log.cleaner.dedupe.buffer.size",
                kafka_name="INVALID_CONFIG",
            )
        self.entries = 0
        self._secret = (np.uint64(randomness.below(2**64)), np.uint64(randomness.below(2**64)))
        self._table = self._empty_table(min(self.slots, _FIRST_SLOTS))

    @property
    def full(self) -> bool:
        return self.entries >= self.capacity

    def put(self, keys: pa.Array, offsets: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> int:
        """Map each masked row's key to its offset, in row order; return how many rows were mapped (M1).

        If that is less than all of them, the map is full and the next row did not fit.
        """
        prints = self._fingerprints(keys, mask)
        row = 0
        while True:
            limit = self._limit()
            row, self.entries = put_prints(self._table, self.entries, limit, prints, offsets, mask, row)
            if row == len(mask) or limit == self.capacity:
                return int(row)
            self._grow()

    def get(self, keys: pa.Array, mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return each masked row's last offset; -1 where the key is unknown or the row is not masked."""
        found = np.empty(len(mask), np.int64)
        get_prints(self._table, self._fingerprints(keys, mask), mask, found)
        return found

    def _fingerprints(self, keys: pa.Array, mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        data, bounds = binary_buffers(keys)
        prints = np.empty((len(mask), 2), np.uint64)
        fingerprint_keys(data, bounds, mask, *self._secret, prints)
        return prints

    def _limit(self) -> int:
        """Return how many entries the table may hold before it grows or is full."""
        size = len(self._table)
        return self.capacity if size == self._full_size() else min(self.capacity, int(size * _SPARSE))

    def _full_size(self) -> int:
        # A look-up of an unknown key ends at an empty slot, so one slot always stays empty.
        return max(self.slots, self.capacity + 1)

    def _grow(self) -> None:
        target = self._empty_table(min(self._full_size(), len(self._table) * _GROWTH))
        move_prints(self._table, target)
        self._table = target

    def _empty_table(self, slots: int) -> np.ndarray[Any, Any]:
        return np.zeros((max(slots, 2), 3), np.uint64)
