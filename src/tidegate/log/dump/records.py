"""The records of a run of batches as columns of what the dump prints of each.

Owns the step from decoded records to sizes, sequences and header keys, done column by column. Does not
format. Memory is bounded by the window the run came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import CorruptError
from tidegate.log.dump.batches import BatchRun
from tidegate.log.format.batch import CODEC_MASK, HEADER_SIZE, LENGTH_OVERHEAD, BatchHeader, read_record

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

_EVERY_OFFSET = -(2**63)
_MAX_SEQUENCE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """Records of consecutive batches; those of batch b are `starts[b]` … `starts[b + 1]`.

    `header_keys` is None when no record has headers.
    """

    starts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    timestamps: pa.Array
    key_sizes: pa.Array
    value_sizes: pa.Array
    sequences: NDArray[np.int64]
    header_keys: pa.ListArray | None
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return len(self.offsets)

    def text_column(self, name: str) -> pa.Array:
        """The `key` or `value` column as text; bytes that are no UTF-8 become U+FFFD as Java makes them."""
        import pyarrow as pa

        column = self.batch.column(name)
        try:
            return column.cast(pa.large_binary()).cast(pa.large_string())
        except pa.ArrowInvalid:
            return pa.array([java_text(value) for value in column.to_pylist()], pa.large_string())

    def bytes_of(self, name: str) -> list[bytes | None]:
        column: list[bytes | None] = self.batch.column(name).to_pylist()
        return column


def read_records(run: BatchRun, path: Path) -> RecordColumns:
    """Decode a run; CRCs are not looked at, a malformed record is a `CorruptError`."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    from tidegate.log.format.decode import decode

    table = run.table
    batch = decode(
        run.data,
        topic="",
        partition=0,
        from_offset=_EVERY_OFFSET,
        check_crcs=False,
        control="include",
        any_offsets=True,
        path=path,
        file_position=run.position,
    )
    counts = table.count.astype(np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    if starts[-1] != batch.num_rows:
        raise CorruptError(
            f"{path} from position {run.position}: {batch.num_rows} records, not {starts[-1]} as announced",
            path=path,
            position=run.position,
        )
    offsets = batch.column("offset").to_numpy()
    first = np.repeat(table.base_sequence.astype(np.int64), counts)
    sequence = first + (offsets - np.repeat(table.base_offset, counts))
    sequence = np.where(sequence > _MAX_SEQUENCE, sequence - (_MAX_SEQUENCE + 1), sequence)
    timestamps = pc.fill_null(batch.column("timestamp").cast(pa.int64()), -1)
    return RecordColumns(
        starts=starts,
        offsets=offsets,
        timestamps=timestamps,
        key_sizes=pc.fill_null(pc.binary_length(batch.column("key")), -1),
        value_sizes=pc.fill_null(pc.binary_length(batch.column("value")), -1),
        sequences=np.where(first >= 0, sequence, -1),
        header_keys=_header_keys(batch.column("headers")),
        batch=batch,
    )


def readable_part(run: BatchRun) -> BatchRun | None:
    """The first records of a single batch, up to the one that is malformed, as a batch of their own.

    None when not even the first record, or the codec's bytes, can be read. For printing only: its CRC is not right.
    """
    from tidegate.log.format.compression import decompress
    from tidegate.log.format.decode import DEFAULT_LIMITS, scan_batches

    header = BatchHeader.parse(run.data)
    count = end = 0
    try:
        packed = run.data[HEADER_SIZE : header.size]
        body = decompress(header.codec, packed, limit=DEFAULT_LIMITS.max_decompressed_bytes)
        while count < header.count and end < len(body):
            end = read_record(body, end).end
            count += 1
    except CorruptError:
        pass
    if count == 0:
        return None
    plain = header._replace(
        count=count,
        attributes=header.attributes & ~CODEC_MASK,
        length=HEADER_SIZE + end - LENGTH_OVERHEAD,
    )
    data = memoryview(plain.pack() + bytes(body[:end]))
    return BatchRun(run.position, data, scan_batches(data))


def _header_keys(column: Any) -> Any:
    import pyarrow as pa

    flat = column.flatten()
    if len(flat) == 0:
        return None
    offsets = column.offsets.to_numpy()
    return pa.ListArray.from_arrays(pa.array(offsets - offsets[0], pa.int32()), flat.field("key"))


def java_text(value: bytes | None) -> str | None:
    """UTF-8 as Java's decoder reads it: the bytes of a surrogate are one replacement, not several."""
    if value is None:
        return None
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        import re

        return re.sub(rb"\xed[\xa0-\xbf][\x80-\xbf]?", b"\xef\xbf\xbd", value).decode("utf-8", "replace")
