"""Decode record batches into Arrow, a whole buffer at a time, without a Python object per record.

`scan_batches` reads the headers of a buffer into a `BatchTable`; `body_runs` checks CRCs and decompresses, and groups
adjacent uncompressed batches into runs small enough to stay in the CPU cache; `decode` turns runs into
`RECORD_SCHEMA`. Reads no files.

Invariants:
D1  any input gives records or one `CorruptError` that names the batch's position and offset; an error inside a
    batch has Kafka's name `INVALID_RECORD`.
D2  memory is bounded by the bytes present, never by a count or length they state; compressed batches decompress
    within `DecodeLimits`.
D3  offsets of the result ascend strictly within a batch.

Thread rule: values and pure functions; kernels run without the interpreter lock. Scratch memory belongs to one
iteration at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeAlias, TypedDict, TypeVar, Unpack

import numpy as np
import pyarrow as pa
from fastcrc.crc32 import iscsi as crc32c
from numpy.typing import NDArray

from tidegate.errors import CorruptError, InvalidError
from tidegate.kernels.record_batch import (
    BAD_LENGTH,
    BAD_MAGIC,
    HEADER_ROW,
    LARGEST_INT64,
    MEASURED_ROW,
    NEGATIVE_COUNT,
    NEGATIVE_DELTA,
    NEGATIVE_OFFSET,
    OFFSET_OVERFLOW,
    TOO_MANY_RECORDS,
    UNKNOWN_CODEC,
    Measured,
    choose_batches,
    count_batches,
    measure_records,
    read_headers,
)
from tidegate.log.format.batch import (
    ATTRIBUTES_POSITION,
    CODEC_MASK,
    CONTROL_BIT,
    HEADER_SIZE,
    LENGTH_OVERHEAD,
    MAGIC,
    SMALLEST_LENGTH,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    Codec,
    ControlType,
    RecordFacts,
    corrupt_batch,
    read_control,
    read_record,
)
from tidegate.log.format.compression import Unpacker
from tidegate.log.format.record_builder import RecordBuilder

ByteArray: TypeAlias = NDArray[np.uint8]
Flags: TypeAlias = NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)
_HEADER_FIELDS = tuple(name for name in HEADER_ROW.fields or () if name != "position")


class _Column(Generic[Scalar]):
    """One column of a table's rows."""

    def __init__(self, kind: type[Scalar]) -> None:
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, table: BatchTable, owner: type) -> NDArray[Scalar]:
        column: NDArray[Scalar] = table.rows[self._name]
        return column


@dataclass(frozen=True, slots=True)
class BatchTable:
    """One row for each whole batch found, in order. `rows` is the structured array behind the columns."""

    rows: NDArray[Any]
    end: int
    """Position after the last whole batch."""
    fault: CorruptError | None = None
    """Why the scan ended at `end`, when not for want of bytes."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, chosen: Flags | slice) -> BatchTable:
        """Return the chosen rows as a table."""
        return BatchTable(self.rows[chosen], self.end, self.fault)

    def header(self, index: int) -> BatchHeader:
        """Return the header of one row."""
        row = self.rows[index]
        return BatchHeader(**{name: int(row[name]) for name in _HEADER_FIELDS}, magic=MAGIC)

    position = _Column(np.int64)
    base_offset = _Column(np.int64)
    length = _Column(np.int32)
    leader_epoch = _Column(np.int32)
    crc = _Column(np.uint32)
    attributes = _Column(np.int16)
    last_offset_delta = _Column(np.int32)
    base_timestamp = _Column(np.int64)
    max_timestamp = _Column(np.int64)
    producer_id = _Column(np.int64)
    producer_epoch = _Column(np.int16)
    base_sequence = _Column(np.int32)
    count = _Column(np.int32)

    @property
    def size(self) -> NDArray[np.int64]:
        """Size of each whole batch in bytes."""
        return self.length + np.int64(LENGTH_OVERHEAD)

    @property
    def last_offset(self) -> NDArray[np.int64]:
        """Last offset of each batch, inclusive; a base offset near 2^63 would wrap (`decode` refuses those)."""
        return self.base_offset + self.last_offset_delta

    @property
    def codec(self) -> NDArray[np.int16]:
        """The codec's number; 5 to 7 are no codecs."""
        return self.attributes & np.int16(CODEC_MASK)

    def _has(self, bit: int) -> Flags:
        return (self.attributes & np.int16(bit)).astype(np.bool_)

    @property
    def is_control(self) -> Flags:
        return self._has(CONTROL_BIT)

    @property
    def is_transactional(self) -> Flags:
        return self._has(TRANSACTIONAL_BIT)


def byte_array(buffer: Buffer | ByteArray) -> ByteArray:
    """Return any buffer as a read-only numpy array over the same memory."""
    array = np.frombuffer(buffer, np.uint8)
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


def scan_batches(
    buffer: Buffer | ByteArray,
    start: int = 0,
    stop: int | None = None,
    *,
    strict: bool = True,
    path: Path | str | None = None,
    file_position: int = 0,
) -> BatchTable:
    """Return the headers of the whole batches in `buffer[start:stop]`, ending before a partial one.

    At an invalid header it raises, or with `strict=False` ends there and keeps the error as `fault`.
    """
    source = byte_array(buffer)
    stop = len(source) if stop is None else min(stop, len(source))
    batches, end, reason = count_batches(source, max(start, 0), stop)
    rows = np.empty(batches, HEADER_ROW)
    read_headers(source, max(start, 0), rows)
    if reason not in (BAD_LENGTH, BAD_MAGIC):
        return BatchTable(rows, end)
    try:
        BatchHeader.parse(source.data, end, path=path, file_position=file_position)
    except CorruptError as error:
        if strict:
            raise
        return BatchTable(rows, end, error)
    raise CorruptError(f"the bytes at position {file_position + end} changed while they were read", path=path)


def check_crcs(buffer: Buffer | ByteArray, table: BatchTable) -> Flags:
    """Return which batches of the table match their stored CRC."""
    return np.equal(computed_crcs(buffer, table), table.crc)


def computed_crcs(buffer: Buffer | ByteArray, table: BatchTable) -> NDArray[np.uint32]:
    """Return the CRC-32C of each batch's checksummed part."""
    view = byte_array(buffer).data  # read-only, otherwise fastcrc would copy it
    starts = (table.position + ATTRIBUTES_POSITION).tolist()
    stops = (table.position + table.size).tolist()
    return np.fromiter(
        (crc32c(view[start:stop]) for start, stop in zip(starts, stops, strict=True)), np.uint32, len(table)
    )


# --- record bytes

RUN_BYTES: Final = 512 << 10
SCRATCH_BYTES: Final = 4 << 20
_kept: Final[deque[memoryview]] = deque(maxlen=4)  # free scratch memory for reuse


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits on the decompressed bytes: of one batch, of one piece, of a whole call."""

    max_decompressed_bytes: int = 64 << 20
    max_piece_bytes: int = 64 << 20
    max_total_bytes: int = 1 << 30


DEFAULT_LIMITS: Final = DecodeLimits()


@dataclass(frozen=True, slots=True)
class Place:
    """The source of a buffer, for messages."""

    path: Path | str | None = None
    file_position: int = 0

    def corrupt(
        self, what: str, position: int, offset: int | None = None, *, kafka_name: str = "CORRUPT_MESSAGE"
    ) -> CorruptError:
        """Return the error about the batch at `position` of the buffer; `what` continues the sentence."""
        return corrupt_batch(what, self.path, self.file_position + position, offset, kafka_name)


@dataclass(frozen=True, slots=True)
class BodyRun:
    """Batches whose records lie uncompressed in one array of bytes.

    `rows` describe them (see `kernels/record_batch.py`); `positions` are those of the batches in the source buffer.
    `done` is the share of that buffer up to the end of the run. The bytes of an `inflated` run are valid until
    the next run is requested.
    """

    source: ByteArray
    rows: NDArray[Any]
    positions: NDArray[np.int64]
    bytes: int
    done: float
    inflated: bool

    def malformed(self, index: int, number: int, start: int, place: Place) -> CorruptError:
        """Return the error about record `number` of batch `index`, which begins at `start`."""
        row = self.rows[index]
        end = int(row["position"]) + LENGTH_OVERHEAD + int(row["length"])
        if number == row["count"]:
            what = f"has {end - start} bytes after its {number} records"
        elif start == end:
            what = f"says it has {row['count']} records but holds {number}"
        else:
            what = f"has a malformed record, number {number}: {_explain(self.source.data[start:end])}"
        return place.corrupt(
            what, int(self.positions[index]), int(row["base_offset"]), kafka_name="INVALID_RECORD"
        )


def body_runs(
    source: ByteArray, table: BatchTable, check_crcs: bool, limits: DecodeLimits, place: Place
) -> Iterator[BodyRun]:
    """Yield the records of the table's batches in order; checks their CRCs if `check_crcs`."""
    packed, start = np.flatnonzero(table.codec).tolist(), 0
    if packed:
        with _scratch() as memory:
            unpack = _Unpacking(source, table, Unpacker(limits.max_decompressed_bytes, memory), place)
            for index in packed:
                if start < index:
                    yield from _plain_runs(source, table[start:index], check_crcs, place)
                yield unpack(index, check_crcs)
                start = index + 1
    if start < len(table):
        yield from _plain_runs(source, table[start:], check_crcs, place)


def body_of(source: ByteArray, table: BatchTable, limits: DecodeLimits, place: Place) -> BodyRun:
    """Return the records of a table's only batch; its CRC is not checked."""
    if table.codec[0]:
        unpacker = Unpacker(limits.max_decompressed_bytes)
        return _Unpacking(source, table, unpacker, place)(0, check_crc=False)
    return _plain(source, table)


@contextmanager
def _scratch() -> Iterator[memoryview]:
    """Yield memory to decompress into; it is reused, because new pages cost 7 % of a scan of LZ4."""
    try:
        memory = _kept.pop()
    except IndexError:
        memory = np.empty(SCRATCH_BYTES, np.uint8).data
    try:
        yield memory
    finally:
        _kept.append(memory)


def _plain_runs(source: ByteArray, table: BatchTable, check_crcs: bool, place: Place) -> Iterator[BodyRun]:
    starts = table.position - table.position[0]
    cuts = [0, len(table)]
    if starts[-1] > RUN_BYTES:
        cuts[1:1] = (np.flatnonzero(np.diff(starts // RUN_BYTES)) + 1).tolist()
    for first, stop in pairwise(cuts):
        part = table[first:stop]
        if check_crcs:
            verify_crcs(source, part, place)
        yield _plain(source, part)


def _plain(source: ByteArray, table: BatchTable) -> BodyRun:
    last = table.rows[-1]
    done = (int(last["position"]) + LENGTH_OVERHEAD + int(last["length"])) / len(source)
    return BodyRun(
        source, table.rows, table.position, int(table.length.sum(dtype=np.int64)), done, inflated=False
    )


class _Unpacking:
    """Decompresses batches of a table, with little Python work for each: batches may be small."""

    def __init__(self, source: ByteArray, table: BatchTable, unpacker: Unpacker, place: Place) -> None:
        self._source, self._table, self._unpacker, self._place = source, table, unpacker, place
        self._rows = table.rows.copy()
        self._rows["position"] = -HEADER_SIZE

    def __call__(self, index: int, check_crc: bool) -> BodyRun:
        """Return batch `index`, decompressed."""
        row, view = self._table.rows[index], self._source.data
        position = int(row["position"])
        end = position + LENGTH_OVERHEAD + int(row["length"])
        if check_crc and (computed := crc32c(view[position + ATTRIBUTES_POSITION : end])) != row["crc"]:
            raise _wrong_crc(row, computed, self._place)
        plain = view[position + HEADER_SIZE : end]
        if row["count"] or len(plain):  # an emptied batch may keep its codec; then nothing is decompressed
            try:
                plain = self._unpacker.unpack(Codec(int(row["attributes"]) & CODEC_MASK), plain)
            except CorruptError as error:
                what = f"does not unpack: {error}"
                raise self._place.corrupt(what, position, int(row["base_offset"])) from None
        rows, positions = self._rows[index : index + 1], self._table.position[index : index + 1]
        rows["length"] = SMALLEST_LENGTH + len(plain)
        return BodyRun(byte_array(plain), rows, positions, len(plain), end / len(view), inflated=True)


def verify_crcs(source: ByteArray, table: BatchTable, place: Place) -> None:
    """Raise for the first batch whose bytes do not match its stored CRC."""
    computed = computed_crcs(source, table)
    if not np.array_equal(computed, table.crc):
        index = int(np.flatnonzero(computed != table.crc)[0])
        raise _wrong_crc(table.rows[index], int(computed[index]), place)


def _wrong_crc(row: Any, computed: int, place: Place) -> CorruptError:
    what = f"has stored CRC {row['crc']} but its bytes give {computed}"
    return place.corrupt(what, int(row["position"]), int(row["base_offset"]))


def _explain(record: memoryview) -> str:
    """Return in words why there is no valid record at the start of these bytes."""
    try:
        read_record(record)
    except CorruptError as error:
        return str(error)
    return "it changed while it was read"


# --- aborted transactions


def aborted_batches(buffer: Buffer, table: BatchTable, aborted: Iterable[tuple[Any, ...]]) -> Flags:
    """Return a flag for each batch of the table: true when it belongs to an aborted transaction.

    Only the first two fields of each item of `aborted` are used. Takes a Python step for each transactional
    batch, none for others.
    """
    hidden = np.zeros(len(table), np.bool_)
    waiting = sorted(((first_offset, producer_id) for producer_id, first_offset, *_ in aborted), reverse=True)
    aborting: set[int] = set()
    control, transactional = table.is_control, table.is_transactional & (table.producer_id >= 0)
    last_offset, producers = table.last_offset, table.producer_id
    for index in np.flatnonzero(transactional).tolist():
        while waiting and waiting[-1][0] <= last_offset[index]:
            aborting.add(waiting.pop()[1])
        producer = int(producers[index])
        if producer not in aborting:
            continue
        if not control[index]:
            hidden[index] = True
        elif read_control(buffer, int(table.position[index])).kind is ControlType.ABORT:
            aborting.discard(producer)
    return hidden


# --- records

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
    """The requested records of a buffer: offsets from `start` up to, not including, `stop`."""

    start: int
    stop: int
    control: bool
    aborted: tuple[tuple[Any, ...], ...]
    any_offsets: bool


EVERYTHING: Final = Wanted(SMALLEST_OFFSET, LARGEST_OFFSET, True, (), True)


class DecodeOptions(TypedDict, total=False):
    """Options that choose records and how they are decoded.

    Records below `from_offset` (0), or at or above `to_offset`, are left out; so are control batches unless `control`
    is "include", and the batches of `aborted` transactions ((producer id, first offset, …), as a fetch returns them).
    A batch truncated at the end of the buffer is an error unless `partial_end`. `any_offsets` accepts records in any
    order of offsets (a leader uses it to renumber them). `path` and `file_position`, the position of the buffer in
    that file, are only used in messages.
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
    """Decode the records of consecutive batches into one Arrow batch of `RECORD_SCHEMA`."""
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
    """Like `decode`, but yield Arrow batches of about `limits.max_piece_bytes` of records (or of one batch).

    That bounds memory, whatever the compression ratio. Pieces without a record are left out.
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
    """Check every record of one whole batch and return the facts about them; `CorruptError` when malformed.

    Of the header only the record count is compared, not the CRC or the offsets.
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
    """Yield the records of the wanted batches, after the checks of headers and CRCs."""
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
    """Return which batches have a wanted offset. Raises for a header that contradicts itself."""
    chosen = np.empty(len(table), np.uint8)
    _, index, rule = choose_batches(table.rows, wanted.start, wanted.stop, chosen)
    if index >= 0:
        position, offset = int(table.position[index]), int(table.base_offset[index])
        raise place.corrupt(BROKEN_RULES[rule], position, offset, kafka_name="INVALID_RECORD")
    return chosen.view(np.bool_)


def _decode(run: BodyRun, wanted: Wanted, builder: RecordBuilder, place: Place) -> None:
    """Add the run's records to the builder; raise if one is malformed."""
    if not builder.add(run.source, run.rows, run.bytes, run.done, wanted.start, wanted.stop):
        found = builder.progress
        raise run.malformed(found.batch, found.record, found.position, place)
    if builder.progress.unordered and not wanted.any_offsets:
        raise _unordered(run, wanted, place)


def _unordered(run: BodyRun, wanted: Wanted, place: Place) -> CorruptError:
    """Return the error for the run's first batch whose offsets do not ascend, or exceed its last offset."""
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
