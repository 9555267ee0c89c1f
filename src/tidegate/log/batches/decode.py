"""Record batches into Arrow: whole buffers at a time, without a Python object for any record.

Owns the path from bytes to `RECORD_SCHEMA`: find the batches, check them, choose those that are wanted,
decompress, decode. Headers alone are `batch_table`'s, compression is `codecs`', memory is `record_builder`'s.
It reads no files.

Invariants:
D1  any bytes give records or one `CorruptError` that names the batch's position and offset; what is wrong
    inside a batch has Kafka's name `INVALID_RECORD`.
D2  memory follows the bytes that are there, never a count or a length they claim; compressed bytes unfold
    within `DecodeLimits`.
D3  offsets of the result rise strictly within a batch.

Thread rule: pure functions; the kernels run without the interpreter lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, Unpack

import numpy as np
import pyarrow as pa

from tidegate.errors import CorruptError, InvalidError
from tidegate.kernels.headers import (
    NEGATIVE_COUNT,
    NEGATIVE_DELTA,
    NEGATIVE_OFFSET,
    OFFSET_OVERFLOW,
    TOO_MANY_RECORDS,
    UNKNOWN_CODEC,
    choose_batches,
)
from tidegate.kernels.measuring import LARGEST_INT64, MEASURED_ROW, Measured, measure_records
from tidegate.log.batches.aborted import aborted_batches
from tidegate.log.batches.batch import BatchHeader, Buffer
from tidegate.log.batches.batch_table import (
    BatchTable,
    ByteArray,
    Flags,
    byte_array,
    check_crcs,
    scan_batches,
)
from tidegate.log.batches.bodies import (
    DEFAULT_LIMITS,
    BodyRun,
    DecodeLimits,
    Place,
    body_of,
    body_runs,
    verify_crcs,
)
from tidegate.log.batches.record_builder import RecordBuilder
from tidegate.log.batches.record_facts import RecordFacts

__all__ = [
    "BatchTable",
    "DecodeLimits",
    "RecordFacts",
    "check_crcs",
    "decode",
    "decode_pieces",
    "inspect_records",
    "scan_batches",
]

SMALLEST_OFFSET: Final = -(2**63)
LARGEST_OFFSET: Final = 2**63 - 1


BROKEN_RULES: Final = {
    NEGATIVE_OFFSET: "has a negative base offset",
    OFFSET_OVERFLOW: "has a base offset so large that its records have none",
    NEGATIVE_DELTA: "has a negative last offset delta",
    NEGATIVE_COUNT: "has a negative record count",
    TOO_MANY_RECORDS: "counts more records than it has offsets",
    UNKNOWN_CODEC: "has an unknown compression codec",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records of a buffer are asked for: offsets from `start` up to, not including, `stop`."""

    start: int
    stop: int
    control: bool
    aborted: tuple[tuple[Any, ...], ...]
    any_offsets: bool


EVERYTHING: Final = Wanted(SMALLEST_OFFSET, LARGEST_OFFSET, True, (), True)


class DecodeOptions(TypedDict, total=False):
    """Which records, and how.

    Records below `from_offset` (0), or at or above `to_offset`, are left out; so are control batches unless `control`
    is "include", and the batches of `aborted` transactions ((producer id, first offset, …), as a fetch returns them).
    A batch cut off at the end of the buffer is an error unless `partial_end`. `any_offsets` keeps every record,
    whatever order its batch has them in (a leader uses it to put them right). `path` and `file_position`, where the
    buffer begins in that file, only serve messages.
    """

    from_offset: int
    to_offset: int | None
    check_crcs: bool
    control: Literal["skip", "include"]
    aborted: Iterable[tuple[Any, ...]]
    partial_end: bool
    any_offsets: bool
    limits: DecodeLimits
    path: Path | str | None
    file_position: int


def decode(
    buffer: Buffer | ByteArray, *, topic: str, partition: int, **options: Unpack[DecodeOptions]
) -> pa.RecordBatch:
    """The records of consecutive batches as one Arrow batch of `RECORD_SCHEMA`."""
    wanted, place = _wanted(options), _place(options)
    limits, builder, unfolded = options.get("limits", DEFAULT_LIMITS), RecordBuilder(), 0
    for run in _runs(byte_array(buffer), wanted, options, place):
        unfolded += run.bytes if run.inflated else 0
        if unfolded > limits.max_total_bytes:
            raise InvalidError(
                f"these batches unfold to more than the {limits.max_total_bytes} bytes allowed at once; "
                f"read fewer bytes at a time, or decode them in pieces"
            )
        _decode(run, wanted, builder, place)
    return builder.finish(topic, partition)


def decode_pieces(
    buffer: Buffer | ByteArray, *, topic: str, partition: int, **options: Unpack[DecodeOptions]
) -> Iterator[pa.RecordBatch]:
    """Like `decode`, in Arrow batches of about `limits.max_piece_bytes` of records each (or one batch's).

    Memory is bounded by that however far the buffer unfolds. Pieces without a record are left out.
    """
    wanted, place = _wanted(options), _place(options)
    limits, builder, held = options.get("limits", DEFAULT_LIMITS), RecordBuilder(), 0
    for run in _runs(byte_array(buffer), wanted, options, place):
        if held and held + run.bytes > limits.max_piece_bytes:
            if builder.progress.records:
                yield builder.finish(topic, partition)
            builder, held = RecordBuilder(), 0
        _decode(run, wanted, builder, place)
        held += run.bytes
    if builder.progress.records:
        yield builder.finish(topic, partition)


def inspect_records(
    batch: Buffer, header: BatchHeader | None = None, *, limits: DecodeLimits = DEFAULT_LIMITS
) -> RecordFacts:
    """The facts about the records of one whole batch, each of them checked; `CorruptError` when malformed.

    The header's own claims (CRC, offsets) are not looked at, the record count excepted.
    """
    source, place = byte_array(batch), Place()
    table = scan_batches(source, stop=None if header is None else header.size)[:1]
    if len(table) == 0:
        raise place.corrupt(f"is cut off: {len(source)} bytes of it are there", 0)
    _chosen(table, EVERYTHING, place)
    run, row = body_of(source, table, limits, place), np.empty(1, MEASURED_ROW)
    sound = measure_records(run.source, run.rows, row)
    found = Measured._make(row[0].item())
    if not sound:
        raise run.malformed(0, found.record, found.position, place)
    return RecordFacts(
        count=found.record,
        min_timestamp=-1 if found.min_timestamp == LARGEST_INT64 else found.min_timestamp,
        max_timestamp=found.max_timestamp,
        max_timestamp_offset=found.max_timestamp_offset,
        null_keys=found.null_keys,
        consecutive=found.nonconsecutive == 0,
    )


def _wanted(options: DecodeOptions) -> Wanted:
    any_offsets = options.get("any_offsets", False)
    start, stop = options.get("from_offset", 0), options.get("to_offset")
    if any_offsets:
        start, stop = SMALLEST_OFFSET, LARGEST_OFFSET
    return Wanted(
        max(start, SMALLEST_OFFSET),
        LARGEST_OFFSET if stop is None else min(stop, LARGEST_OFFSET),
        options.get("control") == "include",
        tuple(options.get("aborted", ())),
        any_offsets,
    )


def _place(options: DecodeOptions) -> Place:
    return Place(options.get("path"), options.get("file_position", 0))


def _runs(source: ByteArray, wanted: Wanted, options: DecodeOptions, place: Place) -> Iterator[BodyRun]:
    """The records of the wanted batches, checked as far as headers and CRCs can be."""
    table = scan_batches(source, path=place.path, file_position=place.file_position)
    check_crcs, limits = options.get("check_crcs", True), options.get("limits", DEFAULT_LIMITS)
    if table.end < len(source) and not options.get("partial_end", False):
        left = len(source) - table.end
        raise place.corrupt(f"is cut off: {left} bytes of it are there", table.end)
    chosen = _chosen(table, wanted, place)
    if not wanted.control:
        chosen &= ~table.is_control
    if check_crcs and not chosen.all():  # a flipped bit must not make a batch look unwanted
        verify_crcs(source, table[~chosen], place)
    if wanted.aborted:
        chosen &= ~aborted_batches(source.data, table, wanted.aborted)
    yield from body_runs(source, table if chosen.all() else table[chosen], check_crcs, limits, place)


def _chosen(table: BatchTable, wanted: Wanted, place: Place) -> Flags:
    """Which batches have a wanted offset. Raises for one whose header contradicts itself."""
    chosen = np.empty(len(table), np.uint8)
    _, index, rule = choose_batches(table.rows, wanted.start, wanted.stop, chosen)
    if index >= 0:
        position, offset = int(table.position[index]), int(table.base_offset[index])
        raise place.corrupt(BROKEN_RULES[rule], position, offset, kafka_name="INVALID_RECORD")
    return chosen.view(np.bool_)


def _decode(run: BodyRun, wanted: Wanted, builder: RecordBuilder, place: Place) -> None:
    """Add the run's records to the builder, or raise for what is wrong with them."""
    if not builder.add(run.source, run.rows, run.bytes, run.done, wanted.start, wanted.stop):
        found = builder.progress
        raise run.malformed(found.batch, found.record, found.position, place)
    if builder.progress.unordered and not wanted.any_offsets:
        raise _unordered(run, wanted, place)


def _unordered(run: BodyRun, wanted: Wanted, place: Place) -> CorruptError:
    """The first batch of the run whose offsets do not rise, or leave it."""
    for index in range(len(run.rows)):
        alone = RecordBuilder()
        alone.add(run.source, run.rows[index : index + 1], run.bytes, 1.0, wanted.start, wanted.stop)
        if alone.progress.unordered:
            break
    return place.corrupt(
        "has records whose offsets do not rise, or lie beyond its last one",
        int(run.positions[index]),
        int(run.rows[index]["base_offset"]),
        kafka_name="INVALID_RECORD",
    )
