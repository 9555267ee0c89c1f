"""Dead letters: records that were set aside, stored as objects that count only if a commit names them.

A round that sets records aside writes one object for each partition. The source's state names the newest, and each
object names the one before it, so objects of failed attempts are in no chain.

    "TGDL" | u8 version, 1 | u32 CRC-32C of the rest | u16 length | name of the previous object | Arrow IPC stream

The columns are `offset, partition, reason, key, value` (`tables.dead_letters`).

`SourceState` is what a source keeps between rounds: position, stream time, producer state and newest dead letter. The
coordinator stores its bytes in commits and does not read them; empty bytes are the initial state:

    version u8 (1) | MessagePack array of the fields in their order

Thread rule: immutable values and pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from fastcrc.crc32 import iscsi as crc32c

from tidegate.errors import CorruptError
from tidegate.pipeline.messages import decode_state, encode_state
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.dead_letters import DEAD_LETTER_SCHEMA
from tidegate.windows.events import NO_TIME

STATE_VERSION = 1


class SourceState(msgspec.Struct, array_like=True, frozen=True):
    """One partition of one flow's source, after some round."""

    next_offset: int = -1  # -1: nothing was read yet
    stream_time: int = NO_TIME
    validator: bytes = b""  # the validator's checkpoint; empty: none yet
    is_cut: bool = False  # reading did not begin at the partition's first record
    letters: str = ""  # the newest object of dead letters; it names the one before
    letter_count: int = 0

    def encoded(self) -> bytes:
        return encode_state(STATE_VERSION, self)

    @classmethod
    def decoded(cls, data: bytes) -> SourceState:
        return decode_state(data, STATE_VERSION, cls, "a source")


# -- dead letters ----------------------------------------------------------------------------------

MAGIC: Final = b"TGDL"
VERSION: Final = 1
_HEAD: Final = struct.Struct(">4sBI")
_LENGTH: Final = struct.Struct(">H")


def letters_of(
    records: pa.RecordBatch, rows: npt.NDArray[np.int64], reasons: Sequence[str]
) -> pa.RecordBatch:
    """Return rows of a record batch as dead letters, each with its reason."""
    picked = pa.array(rows)
    return pa.record_batch(
        [
            records.column("offset").take(picked),
            records.column("partition").take(picked),
            pa.array(list(reasons), pa.string()),
            records.column("key").take(picked),
            records.column("value").take(picked),
        ],
        schema=DEAD_LETTER_SCHEMA,
    )


def letter_without_record(partition: int, offset: int, reason: str) -> pa.RecordBatch:
    """Return a dead letter for a record that is gone from the log: its place and the reason."""
    content = {
        "offset": [offset],
        "partition": [partition],
        "reason": [reason],
        "key": [None],
        "value": [None],
    }
    return pa.RecordBatch.from_pydict(content, schema=DEAD_LETTER_SCHEMA)


def write_letters(
    backend: StorageBackend, name: str, previous: str, batches: Sequence[pa.RecordBatch]
) -> None:
    """Write one object with these dead letters, linked to the object `previous` (empty: the first)."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, DEAD_LETTER_SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(batch)
    before = previous.encode()
    body = _LENGTH.pack(len(before)) + before + sink.getvalue().to_pybytes()
    backend.put(name, [_HEAD.pack(MAGIC, VERSION, crc32c(body)), body])


def read_letters(backend: StorageBackend, state: bytes) -> pa.Table:
    """Return all dead letters of a source's state, oldest first."""
    name, pieces, seen = SourceState.decoded(state).letters, list[pa.Table](), set[str]()
    while name:
        _check_new(name, seen)
        name, table = _read(backend, name)
        pieces.append(table)
    return pa.concat_tables(reversed(pieces)) if pieces else DEAD_LETTER_SCHEMA.empty_table()


def chain_of(backend: StorageBackend, state: bytes, known: Collection[str] = ()) -> list[str]:
    """Return the objects in the chain of a source's state, newest first, up to the first that is already known."""
    name, found, seen = SourceState.decoded(state).letters, list[str](), set[str]()
    while name and name not in known:
        _check_new(name, seen)
        found.append(name)
        name, _ = _opened(backend, name)
    return found


def _check_new(name: str, seen: set[str]) -> None:
    if name in seen:
        raise _corrupt(name, "the chain of objects it belongs to comes back to it")
    seen.add(name)


def _read(backend: StorageBackend, name: str) -> tuple[str, pa.Table]:
    previous, letters = _opened(backend, name)
    try:
        with pa.ipc.open_stream(pa.py_buffer(letters)) as reader:
            table = reader.read_all()
        table.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise _corrupt(name, str(error)) from error
    if table.schema != DEAD_LETTER_SCHEMA:
        raise _corrupt(name, f"its columns are {', '.join(table.column_names)}")
    return previous, table


def _opened(backend: StorageBackend, name: str) -> tuple[str, memoryview]:
    """Return the name of the previous object, and the dead letters as stored."""
    data = memoryview(backend.read(name))
    if len(data) < _HEAD.size + _LENGTH.size:
        raise _corrupt(name, f"it has {len(data)} bytes")
    magic, version, crc = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if magic != MAGIC or version != VERSION:
        raise _corrupt(name, f"it begins with {bytes(magic)!r}, version {version}")
    if crc32c(bytes(body)) != crc:
        raise _corrupt(name, "its CRC-32C does not match")
    (length,) = _LENGTH.unpack_from(body)
    if length > len(body) - _LENGTH.size:
        raise _corrupt(name, f"the name in it has {length} bytes, more than there are")
    try:
        previous = bytes(body[_LENGTH.size : _LENGTH.size + length]).decode()
    except UnicodeDecodeError as error:
        raise _corrupt(name, f"the name in it is not UTF-8 ({error.reason})") from error
    return previous, body[_LENGTH.size + length :]


def _corrupt(name: str, why: str) -> CorruptError:
    return CorruptError(
        f"the object {name} holds no dead letters: {why}; restore it", path=name, kafka_name=None
    )
