"""Packs of format versions 1 and 2 stay readable, and a slot of theirs that contradicts itself is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from column_cases import EVEN, MANY, TYPED, VALUES, run_with
from earlier_slots_writer import slot_parts, take_apart
from tidegate.errors import CorruptError, InvalidError
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.backends.sealed import pack_name
from tidegate.storage.earlier_slots import read_earlier_slot
from tidegate.storage.index import StoredRef
from tidegate.storage.pack import PackCache, PackReader
from tidegate.storage.slots import BadSlot
from tidegate.storage.spec import Merge, StoreSpec

TASK = "app/join/3"
GOLDEN = Path(__file__).parents[1] / "fixtures" / "storage-2" / "pack"
ROWS = 260


def test_a_pack_of_version_2_with_a_column_of_every_type_is_read() -> None:
    columns = {"int64": pa.array([7 * i - 3 for i in range(ROWS)])}
    for kind, column in TYPED.items():
        columns[kind] = column.take(pa.array([i % len(column) for i in range(ROWS)]))
    spec = StoreSpec("typed", Merge.APPEND, pa.schema([(name, each.type) for name, each in columns.items()]))
    backend, name = MemoryBackend(), pack_name(TASK, "typed", 0, "golden")
    backend.put(name, [GOLDEN.read_bytes()])
    loaded = PackCache(backend).load(TASK, spec, StoredRef(name, 0))
    for kind, column in columns.items():
        found = loaded.rows.column(kind)
        found.validate(full=True)
        assert found.equals(column) or found.to_pylist() == column.to_pylist(), kind
    assert loaded.keys.to_pylist() == sorted(loaded.keys.to_pylist(), key=lambda key: hash_at(loaded, key))


def hash_at(run: Any, key: bytes) -> int:
    return int(run.hashes[run.keys.to_pylist().index(key)])


def test_every_flipped_byte_of_a_pack_of_version_2_is_found() -> None:
    good, name = GOLDEN.read_bytes(), pack_name(TASK, "typed", 0, "golden")
    fields = pa.ipc.read_schema(pa.py_buffer(PackReader(pa.py_buffer(good), name).foot.columns))
    payload = pa.schema([field for field in fields if field.name not in ("ts", "seq")])
    spec = StoreSpec("typed", Merge.APPEND, payload)
    chance = np.random.default_rng(1)
    for position in [
        *range(64),
        *chance.integers(0, len(good), 200).tolist(),
        *range(len(good) - 64, len(good)),
    ]:
        damaged = bytearray(good)
        damaged[position] ^= 0x41
        with pytest.raises((CorruptError, InvalidError)):
            reader = PackReader(pa.py_buffer(bytes(damaged)), name)
            reader.check(TASK, spec)
            reader.load(0)


@pytest.mark.parametrize("slice_from", [0, 1])
@pytest.mark.parametrize("kind", TYPED)
def test_every_type_comes_back_as_it_was(kind: str, slice_from: int) -> None:
    column = TYPED[kind].slice(slice_from)
    spec, run = run_with(column)
    slot = b"".join(bytes(part) for part in slot_parts(run))
    loaded = read_earlier_slot(pa.py_buffer(slot), spec.rows).rows.column("value")
    assert loaded.type == column.type
    assert loaded.equals(column) or loaded.to_pylist() == column.to_pylist()


@settings(max_examples=150, deadline=None)
@given(VALUES, st.integers(0, 40), st.integers(0, 40))
def test_any_slice_of_any_column_survives(column: pa.Array, start: int, length: int) -> None:
    column = column.slice(min(start, len(column)), length)
    spec, run = run_with(column, keys=min(1, len(column)))
    slot = b"".join(bytes(part) for part in slot_parts(run))
    assert len(slot) % 64 == 0
    loaded = read_earlier_slot(pa.py_buffer(slot), spec.rows)
    loaded.rows.validate(full=True)
    assert loaded.rows.column("value").equals(column)


@pytest.mark.parametrize("field", range(6))
def test_a_slot_that_contradicts_itself_is_refused_without_a_crash(field: int) -> None:
    """Bytes that were wrong before they were sealed: every number of the slot's map, made absurd in turn."""
    spec, run = run_with(pa.array([[1, 2], [3]], pa.list_(pa.int64())))
    slot = b"".join(bytes(part) for part in slot_parts(run))
    length = int.from_bytes(slot[:4], "little")
    described = msgspec.msgpack.decode(slot[4 : 4 + length])
    refused = read = 0
    for absurd in (-1, -2, 0, 1, 3, 2**31, 2**62):
        changed = msgspec.msgpack.decode(msgspec.msgpack.encode(described))
        match field:
            case 0:
                changed[1] = absurd
            case 1:
                changed[2] = absurd
            case _:
                node = changed[3][field]
                node[0] = absurd
        for target in ([changed], _buffer_changes(described, absurd)):
            for each in target:
                if each == described:
                    continue
                head = msgspec.msgpack.encode(each)
                head = len(head).to_bytes(4, "little") + head
                body = slot[4 + length + (-(4 + length) % 64) :]
                try:
                    loaded = read_earlier_slot(pa.py_buffer(head + bytes(-len(head) % 64) + body), spec.rows)
                except BadSlot:
                    refused += 1
                else:  # bits of no nulls, or zeros behind the last value: the same rows
                    assert loaded.rows.equals(run.rows) and loaded.directory.equals(run.directory)
                    read += 1
    assert refused > 90 and read < 10


def _buffer_changes(described: Any, absurd: int) -> list[Any]:
    found = []
    for number, node in enumerate(described[3]):
        for index in range(len(node[2])):
            changed = msgspec.msgpack.decode(msgspec.msgpack.encode(described))
            changed[3][number][2][index] = absurd
            found.append(changed)
    return found


@pytest.mark.parametrize("cut", [0, 3])
@pytest.mark.parametrize("kind", EVEN)
def test_numbers_in_even_steps_come_back_without_having_been_stored(kind: str, cut: int) -> None:
    column = pa.array(EVEN[kind]).slice(cut)
    spec, run = run_with(column)
    parts, stepped = take_apart(run)
    slot = b"".join(bytes(part) for part in parts)
    loaded = read_earlier_slot(pa.py_buffer(slot), spec.rows).rows.column("value")
    loaded.validate(full=True)
    assert loaded.equals(column)
    stored = {part.address for part in parts if isinstance(part, pa.Buffer)}
    is_stored = column.buffers()[1].address + cut * column.type.bit_width // 8 in stored
    is_even = len(column) >= 256 and len(set(np.diff(EVEN[kind][cut:].astype(object)).tolist())) == 1
    assert is_stored is not is_even
    assert stepped or len(column) < 256, "the column seq counts up"


@pytest.mark.parametrize("width", [0, 1, 12])
def test_offsets_of_values_of_one_width_are_not_stored_and_nulls_are(width: int) -> None:
    values = [None if at % 5 == 0 else bytes([at % 256]) * width for at in range(MANY)]
    for column in (pa.array([b"x" * width] * MANY, pa.binary()), pa.array(values, pa.large_binary())):
        spec, run = run_with(column)
        slot = b"".join(bytes(part) for part in slot_parts(run))
        loaded = read_earlier_slot(pa.py_buffer(slot), spec.rows).rows.column("value")
        loaded.validate(full=True)
        assert loaded.equals(column)
    spec, run = run_with(pa.array(range(MANY), pa.int64(), mask=np.arange(MANY) % 3 == 0))
    slot = b"".join(bytes(part) for part in slot_parts(run))
    assert read_earlier_slot(pa.py_buffer(slot), spec.rows).rows.equals(run.rows)


@pytest.mark.parametrize(
    "step", [(0, 2**62), (2**63 - 1, 1), (-(2**63), -1), (0, 2**64), (-(2**63), 2**64 - 1)]
)
def test_steps_that_lead_out_of_their_numbers_are_refused(step: tuple[int, int]) -> None:
    spec, run = run_with(pa.array(np.zeros(300, np.int64)))
    slot = b"".join(bytes(part) for part in slot_parts(run))
    length = int.from_bytes(slot[:4], "little")
    described = msgspec.msgpack.decode(slot[4 : 4 + length])
    body = slot[4 + length + (-(4 + length) % 64) :]
    for steps in ([*described[4][:-1], step], described[4][:-1], [*described[4], (0, 0)]):
        if any(abs(each) >= 2**63 for each in step) and steps[-1] == step and step[1] >= 2**64:
            continue  # not a number of msgpack
        head = msgspec.msgpack.encode([*described[:4], steps])
        head = len(head).to_bytes(4, "little") + head
        with pytest.raises(BadSlot):
            read_earlier_slot(pa.py_buffer(head + bytes(-len(head) % 64) + body), spec.rows)


@pytest.mark.parametrize("kind", TYPED)
def test_any_number_in_a_slot_that_leads_out_of_it_is_refused(kind: str) -> None:
    """Offsets and indexes used to be taken as they were under a right checksum: reading then ended the process."""
    spec, run = run_with(TYPED[kind])
    slot = b"".join(bytes(part) for part in slot_parts(run))
    start = 4 + int.from_bytes(slot[:4], "little")
    start += -start % 64
    refused = 0
    for position in range(start, len(slot), 4):
        for absurd in (-1, 1, 1 << 30):
            changed = bytearray(slot)
            changed[position : position + 4] = absurd.to_bytes(4, "little", signed=True)
            try:
                loaded = read_earlier_slot(pa.py_buffer(bytes(changed)), spec.rows)
            except BadSlot:
                refused += 1
                continue
            everything = pa.array(range(loaded.row_count))
            assert len(loaded.rows.take(everything).column("value")) == run.row_count
    assert refused > 20, "hash, key and start of the directory, at least"
