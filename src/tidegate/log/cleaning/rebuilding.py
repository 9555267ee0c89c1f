"""Batches with fewer records: the same identity, what is left of the content.

Owns the bytes of a batch that compaction takes records from, or gives a delete horizon. Who stays is
`cleaning_filter`'s decision. Base and last offset, producer, epoch, sequence, leader epoch, flags and codec are the
old batch's; count and largest timestamp the survivors'; the base timestamp the delete horizon, where there is
one, else the first survivor's. A batch with append time keeps it for all records.

Uncompressed batches, however many, are rebuilt by one kernel call and vector operations, a checksum each
excepted; a compressed one takes some Python steps of its own.

Thread rule: pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from fastcrc.crc32 import iscsi as crc32c
from numpy.typing import NDArray

from tidegate.errors import CorruptError
from tidegate.kernels.record_batch import GROWTH_BYTES, REBUILD_ROW, copy_kept
from tidegate.log.format.batch import (
    ATTRIBUTES_POSITION,
    CODEC_MASK,
    CRC_POSITION,
    DELETE_HORIZON_BIT,
    HEADER_LAYOUT,
    HEADER_SIZE,
    LENGTH_OVERHEAD,
    LOG_APPEND_TIME_BIT,
    BatchHeader,
    Codec,
)
from tidegate.log.format.compression import compress, decompress

if TYPE_CHECKING:
    from tidegate.log.format.decode import BatchTable

Flags = NDArray[np.bool_]
Longs = NDArray[np.int64]

_NUMPY_TYPES: Final = {"q": ">i8", "i": ">i4", "I": ">u4", "h": ">i2", "b": "i1"}
HEADER: Final = np.dtype(
    [
        (name, _NUMPY_TYPES[code])
        for name, code in zip(BatchHeader._fields, HEADER_LAYOUT.format[1:], strict=True)
    ]
)


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The new bytes of the chosen batches, in their order, and the largest timestamp of each."""

    batches: list[bytes | memoryview]
    max_timestamps: Longs


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
) -> Rebuilt:
    """Rebuild the batches `chosen` (indices into the table), each of which keeps at least one record.

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
    # What an append-time batch stores as deltas means nothing: every record has the append time.
    rows["delta_ms"] = np.where(appended, largest, old_bases) - bases
    rows["delta_is_fixed"], rows["room"] = appended, HEADER_SIZE

    batches: list[bytes | memoryview] = [b""] * len(chosen)
    plain = (attributes & CODEC_MASK) == Codec.NONE
    _rebuild_plain(buffer, rows, heads, keep, kept, np.flatnonzero(plain), batches)
    for index in np.flatnonzero(~plain).tolist():
        batches[index] = _rebuild_compressed(
            buffer, rows[index : index + 1], heads[index : index + 1], keep, max_decompressed_bytes
        )
    return Rebuilt(batches, largest)


def _survivors(
    first_rows: Longs, counts: Longs, keep: Flags, timestamps: Longs
) -> tuple[Longs, Longs, Longs]:
    """Of each batch: how many records stay, the first one's timestamp, the largest timestamp."""
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    rows = np.arange(counts.sum()) + np.repeat(first_rows - starts, counts)
    staying = keep[rows]
    batch_of_row = np.repeat(np.arange(len(counts)), counts)
    kept = np.bincount(batch_of_row[staying], minlength=len(counts))
    times = timestamps[rows[staying]]
    firsts = np.concatenate(([0], np.cumsum(kept)[:-1]))
    return kept, times[firsts], np.maximum.reduceat(times, firsts)


def _headers(buffer: bytes, positions: Longs) -> NDArray[Any]:
    """The headers at these positions, as rows that may be changed."""
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
    """Put the new bytes of the chosen, uncompressed batches into `batches`."""
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
    view = out.data.toreadonly()  # or each checksum would copy its bytes first
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
