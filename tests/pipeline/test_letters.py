"""Dead letters that were damaged or forged are refused with the object's name, whatever is wrong with them."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from fastcrc.crc32 import iscsi as crc32c

from tidegate.errors import CorruptError
from tidegate.pipeline.dead_letters import SourceState, chain_of, read_letters, write_letters
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.tables.dead_letters import DEAD_LETTER_SCHEMA

ROWS = pa.record_batch(
    [
        pa.array([1, 2], pa.int64()),
        pa.array([0, 0], pa.int32()),
        pa.array(["no JSON", "too long"]),
        pa.array([b"k", None], pa.binary()),
        pa.array([b"{", b"x" * 9], pa.binary()),
    ],
    schema=DEAD_LETTER_SCHEMA,
)
STATE = SourceState(letters="new").encoded()


def put(backend: MemoryBackend, name: str, body: bytes) -> None:
    backend.put(name, [struct.pack(">4sBI", b"TGDL", 1, crc32c(body)), body])


def stream_of(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_letters_come_back_oldest_first() -> None:
    backend = MemoryBackend()
    write_letters(backend, "old", "", [ROWS.slice(0, 1)])
    write_letters(backend, "new", "old", [ROWS.slice(1)])
    assert read_letters(backend, STATE).to_pylist() == ROWS.to_pylist()
    assert chain_of(backend, STATE) == ["new", "old"]


@pytest.mark.parametrize(
    "body",
    [
        struct.pack(">H", 9) + b"short",
        struct.pack(">H", 2) + b"\xff\xfe" + stream_of(ROWS),
        struct.pack(">H", 0) + b"no stream of Arrow at all",
        struct.pack(">H", 0) + stream_of(ROWS)[:-40],
        struct.pack(">H", 0) + stream_of(ROWS.select(["offset"])),
        struct.pack(">H", 3) + b"new" + stream_of(ROWS),
    ],
    ids=["name", "utf-8", "stream", "cut", "columns", "circle"],
)
def test_letters_that_contradict_themselves_are_named(body: bytes) -> None:
    backend = MemoryBackend()
    put(backend, "new", body)
    with pytest.raises(CorruptError, match="object new holds no dead letters"):
        read_letters(backend, STATE)


def test_offsets_that_lead_out_of_the_letters_are_refused() -> None:
    """Every number of the stream made absurd in turn, under a checksum that is right."""
    content, refused = stream_of(ROWS), 0
    for position in range(0, len(content) - 8, 4):
        changed = bytearray(content)
        changed[position : position + 4] = (1 << 29).to_bytes(4, "little")
        backend = MemoryBackend()
        put(backend, "new", struct.pack(">H", 0) + bytes(changed))
        try:
            read_letters(backend, STATE).to_pylist()
        except CorruptError:
            refused += 1
    assert refused > 50
