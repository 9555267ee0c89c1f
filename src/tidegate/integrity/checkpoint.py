"""A receiver's state as bytes, and how old a producer in it may be.

Owns the encoding; where the bytes go is the store's business, in the same commit as the data and
the offset they describe. Only the drainer's state is ever saved (`roles`).

Bytes, big-endian; anything else is a `CorruptError`:

    4 bytes "TGIV" | u8 version, 1 | u8 phase, plus 128 once producers were forgotten
    i64 next offset | i64 offset of the end of push, -1 none
    u32 producers | per producer, in order of GUID:
        16 bytes GUID | u64 checksum | u64 stamp sum | i64 records | i64 data records, -1 uncounted
        i64 producer's time | i64 log time | i64 offset | i32 chain | i32 sequence
        u8 flags: bit 0 registered, 1 ended, 2 final, 3 tainted | u8 checksum type
    u32 CRC-32C of all before

Thread rule: values and pure functions.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
from fastcrc.crc32 import iscsi as crc32c
from numpy.typing import NDArray

from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import CorruptError, InvalidError
from tidegate.integrity.header import ChecksumType
from tidegate.integrity.state import NEVER, PartitionState, Phase, ProducerTable
from tidegate.kernels.producer_index import PRODUCER_ROW

MAGIC: Final = b"TGIV"
VERSION: Final = 1
_FORGOT: Final = 128
_HEAD: Final = struct.Struct(">4sBBqqI")
_CRC: Final = struct.Struct(">I")
_FLAGS: Final = ("registered", "ended", "final", "tainted")
_NUMBERS: Final = [
    name for name in PRODUCER_ROW.names or () if name not in _FLAGS and name != "checksum_type"
]
_ROW: Final = np.dtype(
    [(name, ">" + PRODUCER_ROW[name].str[1:]) for name in _NUMBERS]
    + [("flags", "u1"), ("checksum_type", "u1")]
)
_ALL_FLAGS: Final = (1 << len(_FLAGS)) - 1


def encode_state(state: PartitionState) -> bytes:
    """The state as bytes; the same state always gives the same ones."""
    rows = state.producers.ordered()
    packed = np.zeros(len(rows), _ROW)
    for name in (*_NUMBERS, "checksum_type"):
        packed[name] = rows[name]
    for bit, name in enumerate(_FLAGS):
        packed["flags"] |= rows[name] << bit
    phase = state.phase | (_FORGOT if state.forgot else 0)
    head = _HEAD.pack(MAGIC, VERSION, phase, state.next_offset, state.end_of_push, len(rows))
    body = head + packed.tobytes()
    return body + _CRC.pack(crc32c(body))


def decode_state(data: bytes) -> PartitionState:
    """The state in these bytes."""
    if len(data) < _HEAD.size + _CRC.size:
        raise _corrupt(f"{len(data)} bytes are too few")
    magic, version, phase, next_offset, end_of_push, count = _HEAD.unpack_from(data)
    if magic != MAGIC:
        raise _corrupt(f"it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise _corrupt(f"version {version} is unknown, this release reads {VERSION}")
    if len(data) != _HEAD.size + count * _ROW.itemsize + _CRC.size:
        raise _corrupt(f"{len(data)} bytes do not hold {count} producers")
    if _CRC.unpack_from(data, len(data) - _CRC.size)[0] != crc32c(bytes(data[: -_CRC.size])):
        raise _corrupt("its CRC-32C does not match")
    packed = np.frombuffer(data, _ROW, count, _HEAD.size)
    forgot, phase = phase & _FORGOT != 0, phase & ~_FORGOT
    if phase not in list(Phase) or next_offset < 0 or end_of_push < -1 or not _is_sane(packed):
        raise _corrupt("it says what no receiver writes")
    rows = np.zeros(count, PRODUCER_ROW)
    for name in (*_NUMBERS, "checksum_type"):
        rows[name] = packed[name]
    for bit, name in enumerate(_FLAGS):
        rows[name] = packed["flags"] >> bit & 1
    return PartitionState(ProducerTable(rows), Phase(phase), next_offset, end_of_push, forgot)


def _is_sane(packed: NDArray[Any]) -> bool:
    high, low = packed["guid_high"], packed["guid_low"]
    ascends = (high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] > low[:-1]))
    known = np.isin(packed["checksum_type"], [int(kind) for kind in ChecksumType])
    numbered = (packed["chain"] >= 0) & (packed["sequence"] >= 0) & (packed["flags"] <= _ALL_FLAGS)
    return bool(ascends.all() and known.all() and numbered.all())


def _corrupt(why: str) -> CorruptError:
    return CorruptError(
        f"this is not a receiver's checkpoint: {why}; delete it and validate the partition from its beginning"
    )


# -- how old a producer may be -------------------------------------------------------------------


def max_age_of(given: DurationLike | None) -> int:
    """A maximum age as users give it, in milliseconds; None and -1 are never."""
    return NEVER if given is None or given == NEVER else duration_ms(given)


def effective_max_age_ms(configured_ms: int, rewind_ms: int | None = None) -> int:
    """The maximum age to use: at least the time a hybrid table rewinds by, or replayed records of producers that
    were forgotten would not be known as repeats; -1 stays never."""
    if configured_ms < NEVER:
        raise InvalidError(f"a maximum age of {configured_ms} ms: choose 0 or more, -1 for never")
    if rewind_ms is not None and rewind_ms < 0:
        raise InvalidError(f"a rewind of {rewind_ms} ms: choose 0 or more")
    return configured_ms if configured_ms == NEVER else max(configured_ms, rewind_ms or 0)


def take_checkpoint(state: PartitionState, *, now_ms: int, max_age_ms: int = NEVER) -> bytes:
    """The state as bytes, after producers that are too old have left it, in memory too."""
    state.expire(max_age_ms, now_ms=now_ms)
    return encode_state(state)


def restore_checkpoint(data: bytes, *, now_ms: int, max_age_ms: int = NEVER) -> PartitionState:
    """The state in a checkpoint, without producers that are too old by now's limit."""
    state = decode_state(data)
    state.expire(max_age_ms, now_ms=now_ms)
    return state
