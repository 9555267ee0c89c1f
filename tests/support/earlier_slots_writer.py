"""Writes slots of packs of format versions 1 and 2, as releases before Arrow IPC did; `earlier_slots` reads them."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tidegate.storage.backends.base import Part
from tidegate.storage.backends.sealed import ALIGNMENT
from tidegate.storage.earlier_slots import STEPPED, Node
from tidegate.storage.earlier_slots import SlotMap as SteppedMap
from tidegate.storage.runs.run import Run
from tidegate.storage.slots import FEWEST_STEPS, INTEGERS, step_of

_LENGTH = struct.Struct("<I")


def numbers_of(kind: pa.DataType, layout: str | None, *, large: bool) -> np.dtype[Any] | None:
    """The integer type of a plain column's second buffer (values or offsets); None if it holds none."""
    if layout == "binary":
        return np.dtype(np.int64 if large else np.int32)
    return INTEGERS.get(kind.id) if layout == "fixed" else None


def layout_of(kind: pa.DataType) -> str | None:
    types = pa.types
    if types.is_null(kind):
        return "null"
    if types.is_boolean(kind):
        return "bits"
    if (
        types.is_binary(kind)
        or types.is_string(kind)
        or types.is_large_binary(kind)
        or types.is_large_string(kind)
    ):
        return "binary"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        return "list"
    if types.is_fixed_size_list(kind):
        return "fixed_list"
    if types.is_struct(kind):
        return "struct"
    if types.is_dictionary(kind) or types.is_fixed_size_binary(kind) or types.is_primitive(kind):
        return "fixed"
    return "fixed" if types.is_decimal(kind) else None


def fixed_width(kind: pa.DataType) -> int:
    return int((kind.index_type if pa.types.is_dictionary(kind) else kind).bit_width // 8)


def is_large(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(types.is_large_binary(kind) or types.is_large_string(kind) or types.is_large_list(kind))


class SlotMap(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The map of a slot."""

    bucket: int
    keys: int
    rows: int
    nodes: list[Node]


def slot_parts(run: Run) -> list[Part]:
    """The slot's bytes, in order, a multiple of 64 long; large parts are the run's own buffers."""
    return take_apart(run)[0]


def take_apart(run: Run) -> tuple[list[Part], bool]:
    """The slot's bytes as in `slot_parts`, and whether some buffers are described instead of stored."""
    nodes: list[Node] = []
    buffers: list[pa.Buffer] = []
    steps: list[tuple[int, int]] = []
    for batch in (run.directory, run.rows):
        for column in batch.columns:
            _take_apart(column, nodes, buffers, steps)
    described = (run.bucket, run.key_count, run.row_count, nodes)
    encoded = msgspec.msgpack.encode(SteppedMap(*described, steps) if steps else SlotMap(*described))
    head = _LENGTH.pack(len(encoded)) + encoded
    parts: list[Part] = [head + bytes(-len(head) % ALIGNMENT)]
    for buffer in buffers:
        parts.append(buffer)
        missing = -buffer.size % ALIGNMENT
        if missing:
            parts.append(bytes(missing))
    return parts, bool(steps)


def _take_apart(
    array: pa.Array, nodes: list[Node], buffers: list[pa.Buffer], steps: list[tuple[int, int]]
) -> None:
    kind, rows, nulls = array.type, len(array), array.null_count
    layout = layout_of(kind)
    if layout == "null":
        nodes.append(Node(rows, rows, []))
        return
    own, children = _own_buffers(array, kind, layout, rows, nulls)
    sizes = [-1 if each is None else each.size for each in own]
    if (
        rows >= FEWEST_STEPS
        and not children
        and (numbers := numbers_of(kind, layout, large=is_large(kind))) is not None
    ):
        step = step_of(np.frombuffer(memoryview(own[1]), numbers))  # type: ignore[arg-type]
        if step is not None:
            steps.append(step)
            sizes[1], own[1] = STEPPED, None
    nodes.append(Node(rows, nulls, sizes))
    buffers.extend(each for each in own if each is not None)
    for child in children:
        _take_apart(child, nodes, buffers, steps)


def _own_buffers(
    array: pa.Array, kind: pa.DataType, layout: str | None, rows: int, nulls: int
) -> tuple[list[pa.Buffer | None], list[pa.Array]]:
    """The array's buffers and children, sliced to its rows."""
    stored = array.buffers()
    valid = _bits(stored[0], array.offset, rows) if nulls else None
    match layout:
        case "fixed":
            width = fixed_width(kind)
            values = [array.dictionary] if pa.types.is_dictionary(kind) else []
            return [valid, _slice(stored[1], array.offset * width, rows * width)], values
        case "bits":
            return [valid, _bits(stored[1], array.offset, rows)], []
        case "binary":
            offsets, first, size = _offsets(stored[1], array.offset, rows, large=is_large(kind))
            return [valid, offsets, _slice(stored[2], first, size)], []
        case "list":
            offsets, first, size = _offsets(stored[1], array.offset, rows, large=is_large(kind))
            values = array.values if not pa.types.is_map(kind) else _map_entries(array)
            return [valid, offsets], [values.slice(first, size)]
        case "fixed_list":
            size = kind.list_size
            return [valid], [array.values.slice(array.offset * size, rows * size)]
        case "struct":
            return [valid], [array.field(index) for index in range(kind.num_fields)]
        case _:
            raise ValueError(f"an array of type {kind} cannot be stored")


def _offsets(buffer: pa.Buffer | None, offset: int, rows: int, *, large: bool) -> tuple[pa.Buffer, int, int]:
    """Offsets rebased to 0, and the range of the values they refer to."""
    number = np.dtype(np.int64 if large else np.int32)
    if buffer is None or buffer.size == 0:
        return pa.py_buffer(bytes(number.itemsize)), 0, 0
    values = np.frombuffer(buffer, number, rows + 1, offset * number.itemsize)
    first, last = int(values[0]), int(values[-1])
    if first:
        return pa.py_buffer(values - first), first, last - first
    return buffer.slice(offset * number.itemsize, (rows + 1) * number.itemsize), 0, last


def _bits(buffer: pa.Buffer, offset: int, rows: int) -> pa.Buffer:
    """`rows` bits from `offset` on, starting at a bit 0, zeros after the last."""
    if rows == 0:
        return pa.py_buffer(b"")
    if offset % 8 == 0 and rows % 8 == 0:
        return buffer.slice(offset // 8, rows // 8)
    packed = np.frombuffer(buffer, np.uint8, (offset % 8 + rows + 7) // 8, offset // 8)
    bits = np.unpackbits(packed, bitorder="little")[offset % 8 : offset % 8 + rows]
    return pa.py_buffer(np.packbits(bits, bitorder="little"))


def _slice(buffer: pa.Buffer | None, start: int, size: int) -> pa.Buffer:
    return pa.py_buffer(b"") if buffer is None or size == 0 else buffer.slice(start, size)


def _map_entries(array: pa.Array) -> pa.Array:
    """The key/item structs behind a map array, from its beginning."""
    entry = pa.struct([array.type.key_field, array.type.item_field])
    keys, items = array.keys, array.items
    return pa.StructArray.from_arrays([keys, items], fields=list(entry))
