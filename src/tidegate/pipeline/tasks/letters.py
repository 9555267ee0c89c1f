"""Records that were set aside, as objects on the backend: readable later, and only if a commit knows them.

A round that sets records aside writes one object a partition; the source's state names the newest, and each names
the one before it. So what a failed or repeated attempt wrote is in no chain and never shown.

    "TGDL" | u8 version, 1 | u32 CRC-32C of all that follows | u16 length | name of the object before | Arrow IPC stream

The columns are `offset, partition, reason, key, value` (`tables.serdes.dead_letters`).

Thread rule: pure functions.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from fastcrc.crc32 import iscsi as crc32c

from tidegate.errors import CorruptError
from tidegate.pipeline.tasks.source_state import decode_state
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.dead_letters import DEAD_LETTER_SCHEMA

MAGIC: Final = b"TGDL"
VERSION: Final = 1
_HEAD: Final = struct.Struct(">4sBI")
_LENGTH: Final = struct.Struct(">H")


def letters_of(
    records: pa.RecordBatch, rows: npt.NDArray[np.int64], reasons: Sequence[str]
) -> pa.RecordBatch:
    """These rows of a batch of records, with why each of them is here."""
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
    """A letter for a record that is gone from the log: where it was, and why it is here."""
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
    """One object with these letters, after those of `previous` (empty: the first)."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, DEAD_LETTER_SCHEMA) as writer:
        for batch in batches:
            writer.write_batch(batch)
    before = previous.encode()
    body = _LENGTH.pack(len(before)) + before + sink.getvalue().to_pybytes()
    backend.put(name, [_HEAD.pack(MAGIC, VERSION, crc32c(body)), body])


def read_letters(backend: StorageBackend, state: bytes) -> pa.Table:
    """All letters that a source's state knows, oldest first."""
    name, pieces, seen = decode_state(state).letters, list[pa.Table](), set[str]()
    while name:
        _check_new(name, seen)
        name, table = _read(backend, name)
        pieces.append(table)
    return pa.concat_tables(reversed(pieces)) if pieces else DEAD_LETTER_SCHEMA.empty_table()


def chain_of(backend: StorageBackend, state: bytes, known: Collection[str] = ()) -> list[str]:
    """The objects whose letters a source's state knows, newest first, up to the first one that is known already."""
    name, found, seen = decode_state(state).letters, list[str](), set[str]()
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
    """The name of the object before, and the letters as they are stored."""
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
