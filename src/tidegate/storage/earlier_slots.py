"""Slots of packs of format versions 1 and 2, which releases before Arrow IPC wrote: read only.

    length of the map   u32
    map                 msgpack: lengths of rows and directory; per array its rows, its nulls, its buffers' lengths
    buffers             each at the next multiple of 64, zeros between

The arrays are those of the directory, then of the rows, each followed by its children, depth first; a dictionary's
values come last. The schema is in the pack's foot, once for all slots. In version 2 the map may have, instead of a
buffer of integers with a constant step, the first number and the step.

P1  every length fits its type and the slot; no allocation size is taken from a file, but for computed buffers, which
    have a limit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tidegate.storage.backends.sealed import padding
from tidegate.storage.runs.run import DIRECTORY, Run
from tidegate.storage.slots import INTEGERS, BadSlot, checked_run, made_of

# -- maps --------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("<I")
MAX_MAP_BYTES = 16 << 20
MAX_DEPTH = 32
STEPPED = -2  # instead of a buffer's size


class Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One array: its rows, its nulls, and the bytes of each buffer (-1: no buffer)."""

    rows: int
    nulls: int
    buffers: list[int]


class SlotMap(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The map of a slot."""

    bucket: int
    keys: int
    rows: int
    nodes: list[Node]
    steps: list[tuple[int, int]] = []  # (first number, step) of each buffer of size STEPPED, in order


# -- reading -----------------------------------------------------------------------------------------


def read_earlier_slot(slot: pa.Buffer, schema: pa.Schema, *, checked: bool = False) -> Run:
    """The run in a verified slot, sharing its memory; `BadSlot` when the content contradicts itself.

    `checked`: this slot was validated before, so only the arrays are built again.
    """
    if slot.size < _LENGTH.size:
        raise BadSlot("it is too short to have a map")
    length = _LENGTH.unpack_from(slot)[0]
    if length > min(MAX_MAP_BYTES, slot.size - _LENGTH.size):
        raise BadSlot(f"its map of {length} bytes does not fit it")
    try:
        described = msgspec.msgpack.decode(
            memoryview(slot)[_LENGTH.size : _LENGTH.size + length], type=SlotMap
        )
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadSlot(f"its map is not one ({error})") from error
    reader = _Buffers(slot, _LENGTH.size + length, described.nodes, described.steps)
    try:
        directory, rows = (
            pa.RecordBatch.from_arrays([reader.array(field.type, count) for field in columns], schema=columns)
            for columns, count in ((DIRECTORY, described.keys), (schema, described.rows))
        )
        reader.finish()
    except (pa.ArrowException, ValueError, TypeError, IndexError, OverflowError) as error:
        raise BadSlot(str(error)) from error
    return checked_run(described.bucket, directory, rows, reader.made_bytes, checked=checked)


class _Buffers:
    """Builds the arrays of a slot in the order in which they were written; `checked_run` checks their buffers."""

    def __init__(
        self, slot: pa.Buffer, position: int, nodes: list[Node], steps: list[tuple[int, int]]
    ) -> None:
        self._slot = slot
        self._position = position + padding(position)
        self._nodes: Iterator[Node] = iter(nodes)
        self._steps = iter(steps)
        self.made_bytes = 0  # of computed buffers whose memory is not shared

    def array(self, kind: pa.DataType, rows: int | None, depth: int = 0) -> pa.Array:
        """The next array; `rows` is None for a dictionary's values, which have their own length."""
        node = next(self._nodes, None)
        if node is not None and rows is None:
            rows = node.rows
        if (
            node is None
            or rows is None
            or node.rows != rows
            or not 0 <= node.nulls <= rows
            or depth > MAX_DEPTH
        ):
            raise BadSlot(f"its map does not describe a column of {kind} with {rows} rows")
        types = pa.types
        if types.is_null(kind):
            return pa.nulls(rows)
        buffers: list[Any] = [
            self._make(kind, rows) if size == STEPPED and place == 1 else self._take(size)
            for place, size in enumerate(node.buffers)
        ]
        if not node.nulls and buffers:
            buffers[0] = None
        if types.is_dictionary(kind):
            values = self.array(kind.value_type, None, depth + 1)
            return pa.DictionaryArray.from_buffers(kind, rows, buffers, values, node.nulls)
        children: list[pa.Array] = []
        if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
            element = pa.struct([kind.key_field, kind.item_field]) if types.is_map(kind) else kind.value_type
            last = int(np.frombuffer(buffers[1], np.int64 if types.is_large_list(kind) else np.int32)[rows])
            children = [self.array(element, last, depth + 1)]
        elif types.is_fixed_size_list(kind):
            children = [self.array(kind.value_type, rows * kind.list_size, depth + 1)]
        elif types.is_struct(kind):
            children = [self.array(kind.field(i).type, rows, depth + 1) for i in range(kind.num_fields)]
        return pa.Array.from_buffers(kind, rows, buffers, node.nulls, children=children or None)

    def _make(self, kind: pa.DataType, rows: int) -> pa.Buffer:
        """A buffer of version 2: integers, or the offsets of values of one width."""
        types, step = pa.types, next(self._steps, None)
        count, numbers = rows, INTEGERS.get(kind.id)
        if types.is_binary(kind) or types.is_string(kind):
            count, numbers = rows + 1, np.dtype(np.int32)
        elif types.is_large_binary(kind) or types.is_large_string(kind):
            count, numbers = rows + 1, np.dtype(np.int64)
        if step is None or numbers is None:
            raise BadSlot(f"a column of {kind} is not described by steps")
        made = made_of(*step, numbers, count)
        self.made_bytes += 0 if step == (0, 0) else made.size
        return made

    def finish(self) -> None:
        """Check that the slot has no more than was read."""
        if next(self._steps, None) is not None:
            raise BadSlot("it describes more buffers than it has")
        if next(self._nodes, None) is not None or self._position != self._slot.size:
            raise BadSlot("it holds more than its map describes")

    def _take(self, size: int) -> pa.Buffer | None:
        if size == -1:
            return None
        if size < 0 or size > self._slot.size - self._position:
            raise BadSlot(f"a buffer of {size} bytes does not fit it")
        buffer = self._slot.slice(self._position, size)
        self._position += size + padding(size)
        return buffer
