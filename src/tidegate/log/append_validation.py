"""Check a batch before it is appended, and stamp its offset, leader epoch and time. Writes nothing.

A *client* passes one batch starting at offset 0. It is checked (size, CRC, header, records) and stamped
with the next offset, the leader epoch and, for `LogAppendTime`, the time. A *coordinator* does the same with
its control batches. A *replica* passes batches that have their offsets: they must ascend and begin at or
after the log's end. Rolling, producer sequences and files are the next steps of `partition`.

Facts that are not in the header (keys, record timestamps, offset deltas) come as `RecordFacts`: from the
caller, if it encoded the batch itself, or by reading the records.

Invariants:
A1  nothing is stamped before every check has passed, and `Prepared.undo` restores a stamped buffer, so a
    caller may retry with the same bytes;
A2  a bytearray is stamped in place, without a copy of its records; other buffers are copied once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

from tidegate.errors import CorruptError, InvalidError
from tidegate.files import Bytes
from tidegate.log.format.batch import (
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    NO_TIMESTAMP,
    BatchHeader,
    Buffer,
    Codec,
    RecordFacts,
    TimestampType,
    batch_crc,
    iter_headers,
    stamp,
)
from tidegate.log.producer_state import BatchMetadata, Origin
from tidegate.log.topic_config import TopicConfig

LOG_APPEND_TIME: Final = "LogAppendTime"
_BAD_TIME: Final = "INVALID_TIMESTAMP"
_OFFSET_AND_EPOCH: Final = Struct(
    ">qii"
)  # base offset, length, leader epoch: all before the checksummed bytes


class AppendInfo(NamedTuple):
    """The result of an append. A duplicate has the offsets of its first copy, and size 0."""

    first_offset: int
    last_offset: int
    max_timestamp: int
    log_append_time: int
    duplicate: bool
    size: int


def nothing_appended(next_offset: int) -> AppendInfo:
    """Return the result of an empty append."""
    return AppendInfo(next_offset, next_offset - 1, NO_TIMESTAMP, NO_TIMESTAMP, False, 0)


def duplicate_of(known: BatchMetadata) -> AppendInfo:
    """Return the result of appending a batch that is in the log already."""
    return AppendInfo(known.first_offset, known.last_offset, known.timestamp, known.timestamp, True, 0)


class Prepared(NamedTuple):
    """An append that passed its checks: bytes ready to write, and the facts that the next steps need."""

    data: bytearray | memoryview
    headers: Sequence[BatchHeader]
    first_offset: int
    last_offset: int
    max_timestamp: int
    log_append_time: int
    size: int
    original: bytes | None
    """The header bytes before stamping; None when nothing was stamped."""

    def undo(self) -> None:
        """Restore the caller's buffer to its bytes before stamping (A1)."""
        if self.original is not None:
            self.data[:HEADER_SIZE] = self.original

    def batches(self) -> Iterator[tuple[BatchHeader, Bytes]]:
        """Yield each batch with its bytes."""
        if len(self.headers) == 1:
            yield self.headers[0], self.data
            return
        position = 0
        for header in self.headers:
            yield header, memoryview(self.data)[position : position + header.size]
            position += header.size

    def info(self) -> AppendInfo:
        return AppendInfo(
            self.first_offset, self.last_offset, self.max_timestamp, self.log_append_time, False, self.size
        )


class Appending(NamedTuple):
    """The state of the log that an append is checked against."""

    where: str
    config: TopicConfig
    next_offset: int
    leader_epoch: int
    now_ms: int


def prepare(
    batch: Buffer, origin: Origin, to: Appending, facts: RecordFacts | None = None
) -> Prepared | None:
    """Check and stamp a batch; return None for an empty append."""
    if len(batch) == 0:
        return None
    if origin is Origin.CLIENT or origin is Origin.COORDINATOR:
        return _prepare_assigning(batch, origin, to, facts)
    return _prepare_as_given(batch, to)


# -- batches that get their offsets here ---------------------------------------------------------


def _prepare_assigning(batch: Buffer, origin: Origin, to: Appending, facts: RecordFacts | None) -> Prepared:
    header = BatchHeader.parse(batch)
    if origin is Origin.CLIENT and header.base_offset != 0:
        raise _invalid(to, f"its base offset is {header.base_offset}; a client's batch starts at 0")
    _check_size(header.size, to)
    if header.size > len(batch):
        raise _corrupt(to, f"it says it has {header.size} bytes but {len(batch)} were handed in")
    if batch_crc(batch, 0, header.size) != header.crc:
        raise _corrupt(to, f"its bytes do not match its CRC {header.crc}")
    if len(batch) > header.size:
        _check_nothing_behind(batch, header.size, to)
    if origin is Origin.CLIENT:
        _check_client_header(header, to)
    source = memoryview(batch)[: header.size] if len(batch) > header.size else batch
    if not header.is_control:
        if facts is None:
            facts = _inspect(source, header, to)
        _check_records(facts, header, to)
        if to.config.compression_type != "producer" or not facts.consecutive:
            codec = _target_codec(header.codec, to.config)
            if codec is not header.codec or not facts.consecutive:
                rebuilt = _rebuilt(source, header, codec, to)
                _check_size(len(rebuilt), to)
                return _stamped(rebuilt, BatchHeader.parse(rebuilt), to, facts.max_timestamp)
    return _stamped(source, header, to, header.max_timestamp if facts is None else facts.max_timestamp)


def _stamped(batch: Buffer, header: BatchHeader, to: Appending, max_timestamp: int) -> Prepared:
    """Stamp the batch with its offset, epoch and time (A2)."""
    data = batch if isinstance(batch, bytearray) else bytearray(batch)
    original = bytes(data[:HEADER_SIZE])
    log_append_time, kind = NO_TIMESTAMP, TimestampType.CREATE_TIME
    if to.config.message_timestamp_type == LOG_APPEND_TIME:
        kind, max_timestamp, log_append_time = TimestampType.LOG_APPEND_TIME, to.now_ms, to.now_ms
    if max_timestamp == header.max_timestamp and kind is header.timestamp_type:
        _OFFSET_AND_EPOCH.pack_into(data, 0, to.next_offset, header.length, to.leader_epoch)
        header = BatchHeader.parse(data)
    else:
        header = stamp(
            data,
            base_offset=to.next_offset,
            leader_epoch=to.leader_epoch,
            max_timestamp=max_timestamp,
            timestamp_type=kind,
        )
    return Prepared(
        data,
        (header,),
        to.next_offset,
        header.last_offset,
        max_timestamp,
        log_append_time,
        header.size,
        original,
    )


def _check_client_header(header: BatchHeader, to: Appending) -> None:
    if header.last_offset_delta < 0 or header.count <= 0:
        raise _invalid(to, f"it holds {header.count} records up to offset delta {header.last_offset_delta}")
    if header.count != header.last_offset_delta + 1:
        raise _invalid(
            to, f"it says {header.count} records but its offsets span {header.last_offset_delta + 1}"
        )
    if header.is_control:
        raise _invalid(to, "it is a control batch, which only a coordinator may write")
    if header.has_producer and header.base_sequence < 0:
        raise _invalid(
            to, f"producer {header.producer_id} gave sequence {header.base_sequence}; it must be 0 or more"
        )


def _check_records(facts: RecordFacts, header: BatchHeader, to: Appending) -> None:
    config = to.config
    if config.compacts and facts.null_keys:
        raise _invalid(
            to, f"{facts.null_keys} of its records have no key, which a compacted topic cannot accept"
        )
    if config.message_timestamp_type == LOG_APPEND_TIME:
        if header.attributes & LOG_APPEND_TIME_BIT:
            raise _invalid(to, "its timestamp type is LogAppendTime, which only the log may set", _BAD_TIME)
        return
    if facts.max_timestamp == NO_TIMESTAMP:
        if header.attributes & LOG_APPEND_TIME_BIT:
            raise _invalid(to, "its timestamp type is LogAppendTime, but it has no timestamp", _BAD_TIME)
        return
    before, after = config.timestamp_bounds_ms
    if to.now_ms - facts.min_timestamp > before or facts.max_timestamp - to.now_ms > after:
        raise _invalid(
            to,
            f"its timestamps {facts.min_timestamp} to {facts.max_timestamp} are not within "
            f"{to.now_ms - before} to {to.now_ms + after} (message.timestamp.before/after.max.ms)",
            _BAD_TIME,
        )


def _check_size(size: int, to: Appending) -> None:
    if size > to.config.max_message_bytes:
        raise InvalidError(
            f"a batch of {size} bytes for {to.where} exceeds max.message.bytes={to.config.max_message_bytes}; "
            f"send smaller batches or raise the setting",
            kafka_name="MESSAGE_TOO_LARGE",
        )


def _check_nothing_behind(batch: Buffer, start: int, to: Appending) -> None:
    """Check the bytes that follow the batch: only a truncated further batch is accepted, and dropped."""
    if next(iter_headers(batch, start), None) is not None:
        raise _invalid(to, "more than one batch was handed in; append them one by one")


def _inspect(batch: Buffer, header: BatchHeader, to: Appending) -> RecordFacts:
    from tidegate.log.format.decode import (
        inspect_records,
    )  # loads Arrow and numba, which listing a log should not load

    try:
        return inspect_records(batch, header)
    except CorruptError as error:
        raise _invalid(to, str(error)) from error


def _target_codec(source: Codec, config: TopicConfig) -> Codec:
    kind = config.compression_type
    if kind == "producer":
        return source
    return Codec.NONE if kind == "uncompressed" else Codec[kind.upper()]


def compression_level(codec: Codec, config: TopicConfig) -> int | None:
    """Return the level that the topic's settings give a codec; None for codecs without levels."""
    return {
        Codec.GZIP: config.compression_gzip_level,
        Codec.LZ4: config.compression_lz4_level,
        Codec.ZSTD: config.compression_zstd_level,
    }.get(codec)


def _rebuilt(batch: Buffer, header: BatchHeader, codec: Codec, to: Appending) -> bytearray:
    """Encode the same records with another codec, or with offset deltas 0, 1, 2, …"""
    from tidegate.log.format.decode import decode
    from tidegate.log.format.encode import ProducerStamp, encode

    records = decode(batch, topic="", partition=0, control="include", any_offsets=True)
    producer = None
    if header.has_producer:
        producer = ProducerStamp(
            header.producer_id, header.producer_epoch, header.base_sequence, header.is_transactional
        )
    return encode(records, codec=codec, level=compression_level(codec, to.config), producer=producer)


# -- batches that have their offsets -------------------------------------------------------------


def _prepare_as_given(batch: Buffer, to: Appending) -> Prepared:
    headers: list[BatchHeader] = []
    size, last, max_timestamp = 0, -1, NO_TIMESTAMP
    for position, header in iter_headers(batch):
        if batch_crc(batch, position, header.size) != header.crc:
            raise _corrupt(to, f"the bytes at offset {header.base_offset} do not match CRC {header.crc}")
        if header.last_offset <= last:
            raise _out_of_order(to, f"offset {header.last_offset} follows {last}")
        headers.append(header)
        last = header.last_offset
        max_timestamp = max(max_timestamp, header.max_timestamp)
        size = position + header.size
    if not headers:
        raise _corrupt(to, f"its {len(batch)} bytes do not hold one whole batch")
    first = headers[0].base_offset
    if first < to.next_offset:
        raise _out_of_order(to, f"its first offset {first} is below the next offset {to.next_offset}")
    view = memoryview(batch)[:size]
    return Prepared(view, headers, first, last, max_timestamp, NO_TIMESTAMP, size, None)


def _invalid(to: Appending, what: str, kafka_name: str = "INVALID_RECORD") -> InvalidError:
    return InvalidError(
        f"a batch for {to.where} was refused, nothing was written: {what}", kafka_name=kafka_name
    )


def _out_of_order(to: Appending, what: str) -> InvalidError:
    return InvalidError(
        f"an append with given offsets to {to.where} was refused, nothing was written: {what}; "
        f"fetch again from offset {to.next_offset}",
        kafka_name="UNEXPECTED_APPEND_OFFSET",
    )


def _corrupt(to: Appending, what: str) -> CorruptError:
    return CorruptError(f"a batch for {to.where} is corrupt, nothing was written: {what}")
