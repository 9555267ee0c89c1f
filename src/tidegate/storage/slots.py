"""One slot of a pack: the Arrow buffers of one run, in a layout that is read by slicing.

    length of the map   u32
    map                 msgpack: lengths of rows and directory; per array its rows, its nulls, its buffers' lengths
    buffers             each at the next multiple of 64, zeros between

A buffer of integers with a constant step (constant, counting, offsets of fixed-width values) is not stored: the map has
the first number and the step, and reading computes the buffer. Packs with such slots have a foot of version 2. A
computed buffer is never larger than the stored columns could be, and zeros take no memory.

The arrays are those of the directory, then of the rows, each followed by its children, depth first; a dictionary's
values come last. The schema is in the pack's foot, once for all slots.

Writing copies only where a sliced array requires it (offsets that do not start at 0, bits that do not start at a byte).
Reading copies nothing. The pack verifies a slot's checksum before this module reads it. A checksum proves that the
bytes are as written, not that they are valid, so the content is checked as well:

P1  every length fits its type and the slot; no allocation size is taken from a file.
P2  at its first use in a process a slot is fully validated: every offset, index and null bit (Arrow's full
    validation), no nulls where the schema allows none, and the order that lookups rely on (`_check_order`).

Thread rule: pure, but for the shared zeros, which only grow, and a cache of layouts by type.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.sorting import halves_are_even, words_are_even
from tidegate.storage.backends.base import Part
from tidegate.storage.backends.sealed import ALIGNMENT, padding
from tidegate.storage.runs.columns import hash_keys
from tidegate.storage.runs.run import DIRECTORY, Run

# -- numbers in even steps ---------------------------------------------------------------------------

MAX_MADE_BYTES = 1 << 30


class BadSlot(ValueError):
    """The slot's content is inconsistent; the pack adds the file and the position."""


def numbers_of(kind: pa.DataType, layout: str | None, *, large: bool) -> np.dtype[Any] | None:
    """The integer type of a plain column's second buffer (values or offsets); None if it holds none."""
    if layout == "binary":
        return np.dtype(np.int64 if large else np.int32)
    return INTEGERS.get(kind.id) if layout == "fixed" else None


INTEGERS = {
    kind.id: np.dtype(kind.to_pandas_dtype())
    for kind in (
        pa.int8(),
        pa.int16(),
        pa.int32(),
        pa.int64(),
        pa.uint8(),
        pa.uint16(),
        pa.uint32(),
        pa.uint64(),
    )
}


def step_of(numbers: np.ndarray[Any, Any]) -> tuple[int, int] | None:
    """The first number and the step if the step is constant, else None."""
    count, value = len(numbers), numbers.item
    first: int = value(0)
    step: int = value(1) - first
    if value(count // 2) != first + step * (count // 2) or value(count - 1) != first + step * (count - 1):
        return None
    if numbers.dtype == np.int64 and numbers.flags.aligned and abs(step) < 1 << 62:
        same = words_are_even(numbers, step)
    elif numbers.dtype == np.int32 and numbers.flags.aligned:
        same = halves_are_even(numbers, step)
    else:
        same = bool((numbers[1:] - numbers[:-1] == step).all())
    return (first, step) if same else None


def made_of(first: int, step: int, numbers: np.dtype[Any], count: int) -> pa.Buffer:
    """The buffer of a constant step; zeros are shared and take no memory."""
    info = np.iinfo(numbers)
    ends = (first, first + step * (count - 1))
    fits = all(info.min <= each <= info.max for each in (*ends, step))
    if count * numbers.itemsize > MAX_MADE_BYTES or not fits:
        raise BadSlot(f"a buffer of {count} numbers from {first} in steps of {step} cannot be")
    if first == step == 0:
        return _zeros(count * numbers.itemsize)
    if step == 0:
        return pa.py_buffer(np.full(count, first, numbers))
    return pa.py_buffer(np.arange(count, dtype=numbers) * numbers.type(step) + numbers.type(first))


_shared_zeros: list[pa.Buffer] = [pa.py_buffer(np.zeros(1 << 20, np.uint8))]


def _zeros(size: int) -> pa.Buffer:
    """A buffer of zeros; it is never written, so that the operating system maps one page for all of it."""
    shared = _shared_zeros[0]
    if shared.size < size:
        shared = _shared_zeros[0] = pa.py_buffer(np.zeros(1 << (size - 1).bit_length(), np.uint8))
    return shared.slice(0, size)


# -- layouts of Arrow types --------------------------------------------------------------------------


def layout_of(kind: pa.DataType) -> str | None:
    """The buffer layout of a type, by its type id, which is quicker to compare."""
    number = kind.id
    if number not in _LAYOUTS:
        _LAYOUTS[number] = _find_layout(kind)
    return _LAYOUTS[number]


_LAYOUTS: dict[int, str | None] = {}
PLAIN: dict[int, tuple[int, np.dtype[Any] | None, bool]] = {
    # by type id: width and kind of the numbers in the second buffer, and whether they are offsets
    **{number: (numbers.itemsize, numbers, False) for number, numbers in INTEGERS.items()},
    pa.float64().id: (8, None, False),
    pa.binary().id: (4, np.dtype(np.int32), True),
}


def _find_layout(kind: pa.DataType) -> str | None:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType) or types.is_union(kind) or types.is_run_end_encoded(kind):
        return None
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


def element_of(kind: pa.DataType) -> pa.DataType:
    return pa.struct([kind.key_field, kind.item_field]) if pa.types.is_map(kind) else kind.value_type


def types_in(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    if isinstance(kind, pa.BaseExtensionType):
        return
    if pa.types.is_dictionary(kind):
        yield from types_in(kind.value_type)
    else:
        for index in range(kind.num_fields):
            yield from types_in(kind.field(index).type)


# -- slots -------------------------------------------------------------------------------------------

_LENGTH = struct.Struct("<I")
MAX_MAP_BYTES = 16 << 20
MAX_DEPTH = 32
ZEROS = bytes(64)
_PADDINGS = [bytes(size) for size in range(64)]
STEPPED = -2  # instead of a buffer's size
FEWEST_STEPS = 256  # numbers; fewer are not tested


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


class SteppedMap(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The map of a slot in which some buffers are given by first number and step."""

    bucket: int
    keys: int
    rows: int
    nodes: list[Node]
    steps: list[tuple[int, int]] = []  # (first number, step) of each buffer of size STEPPED, in order


# -- writing -------------------------------------------------------------------------------------


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
            if not _take_plain(column, nodes, buffers, steps):
                _take_apart(column, nodes, buffers, steps)
    described = (run.bucket, run.key_count, run.row_count, nodes)
    encoded = msgspec.msgpack.encode(SteppedMap(*described, steps) if steps else SlotMap(*described))
    if len(encoded) > MAX_MAP_BYTES:
        raise InvalidError(f"a run of {len(nodes)} arrays is too wide to be stored; declare fewer columns")
    head = _LENGTH.pack(len(encoded)) + encoded
    parts: list[Part] = [head + ZEROS[: -len(head) % ALIGNMENT]]
    for buffer in buffers:
        parts.append(buffer)
        missing = -buffer.size % ALIGNMENT
        if missing:
            parts.append(_PADDINGS[missing])
    return parts, bool(steps)


def _take_plain(
    array: pa.Array, nodes: list[Node], buffers: list[pa.Buffer], steps: list[tuple[int, int]]
) -> bool:
    """Fast path for a whole column of plain numbers or bytes without nulls; False for any other column."""
    plain = PLAIN.get(array.type.id)
    if plain is None or array.offset or array.null_count or len(array) < FEWEST_STEPS:
        return False
    width, kind, is_binary = plain
    rows, stored = len(array), array.buffers()
    count = rows + is_binary
    sizes = [-1, count * width]
    if kind is not None:
        numbers = np.frombuffer(stored[1], kind, count)
        if is_binary:
            if numbers.item(0):
                return False
            sizes.append(numbers.item(rows))
        step = step_of(numbers)
        if step is not None:
            steps.append(step)
            sizes[1] = STEPPED
    nodes.append(Node(rows, 0, sizes))
    for buffer, size in zip(stored[1:], sizes[1:], strict=True):
        if size != STEPPED:
            buffers.append(buffer if buffer is not None and buffer.size == size else _slice(buffer, 0, size))
    return True


def check_storable(schema: pa.Schema) -> None:
    """`InvalidError` for a column whose Arrow type has no layout here."""
    for field in schema:
        for kind in types_in(field.type):
            if layout_of(kind) is None:
                raise InvalidError(
                    f"column {field.name} has the Arrow type {field.type}, and {kind} cannot be stored; cast it to a "
                    f"plain type (string instead of string_view, the storage type of an extension)"
                )


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
            raise InvalidError(f"an array of type {kind} cannot be stored")


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


# -- reading -------------------------------------------------------------------------------------


def read_slot(slot: pa.Buffer, schema: pa.Schema, *, checked: bool = False) -> Run:
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
            memoryview(slot)[_LENGTH.size : _LENGTH.size + length], type=SteppedMap
        )
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadSlot(f"its map is not one ({error})") from error
    reader = _Buffers(slot, _LENGTH.size + length, described.nodes, described.steps)
    try:
        directory = pa.RecordBatch.from_arrays(
            [reader.array(field.type, described.keys) for field in DIRECTORY], schema=DIRECTORY
        )
        rows = pa.RecordBatch.from_arrays(
            [reader.array(field.type, described.rows) for field in schema], schema=schema
        )
        reader.finish()
        if not checked:
            validate(directory)
            validate(rows)
    except (pa.ArrowException, OverflowError) as error:
        raise BadSlot(str(error)) from error
    run = Run(described.bucket, directory, rows)
    run.__dict__["made_bytes"] = reader.made_bytes
    if not checked:
        _check_order(run)
    return run


def validate(batch: pa.RecordBatch) -> None:
    """Check every offset, index and null of a batch whose buffers come from a file; `ArrowInvalid` if one is wrong."""
    batch.validate(full=True)
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if column.null_count and not field.nullable:
            raise pa.ArrowInvalid(f"column {field.name} has {column.null_count} nulls and may have none")


def _check_order(run: Run) -> None:
    """P2: the hashes are those of the keys, the directory ascends, and so do the rows of every key."""
    starts, hashes = run.starts, run.hashes
    if not run.key_count:
        if run.row_count:
            raise BadSlot("it has rows of no key")
        return
    if starts[0] != 0 or bool((np.diff(starts) <= 0).any()):
        raise BadSlot("its directory does not ascend")
    if not np.array_equal(hash_keys(run.keys), hashes):
        raise BadSlot("its hashes are not those of its keys")
    if bool((hashes[1:] < hashes[:-1]).any()):
        raise BadSlot("its keys are not in order")
    for place in np.flatnonzero(hashes[1:] == hashes[:-1]).tolist():
        if not run.keys[place].as_py() < run.keys[place + 1].as_py():
            raise BadSlot("its keys are not in order")
    ts, seq = run.ts, run.seq
    ascends = (ts[1:] > ts[:-1]) | ((ts[1:] == ts[:-1]) & (seq[1:] > seq[:-1]))
    ascends[starts[1:-1] - 1] = True  # the first row of a key follows the last one of another
    if not ascends.all():
        raise BadSlot("the rows of a key are not in order")


class _Buffers:
    """Builds the arrays of a slot in the order in which they were written."""

    def __init__(
        self, slot: pa.Buffer, position: int, nodes: list[Node], steps: list[tuple[int, int]]
    ) -> None:
        self._slot = slot
        self._position = position + padding(position)
        self._nodes: Iterator[Node] = iter(nodes)
        self._steps = iter(steps)
        self.made_bytes = 0  # of computed buffers whose memory is not shared

    def array(self, kind: pa.DataType, rows: int, depth: int = 0) -> pa.Array:
        node = next(self._nodes, None)
        if node is None or node.rows != rows or not 0 <= node.nulls <= rows or depth > MAX_DEPTH:
            raise BadSlot(f"its map does not describe a column of {kind} with {rows} rows")
        if pa.types.is_null(kind):
            return pa.nulls(rows)
        layout = layout_of(kind)
        buffers: Any = [
            self._make(kind, layout, rows) if size == STEPPED and place == 1 else self._take(size)
            for place, size in enumerate(node.buffers)
        ]
        self._check_sizes(kind, layout, node, buffers)
        children: list[pa.Array] | None = None
        match layout:
            case "binary":
                if self._last_offset(buffers[1], rows, large=is_large(kind)) != buffers[2].size:
                    raise BadSlot(f"the values of a column of {kind} are not as long as its offsets say")
            case "fixed" if pa.types.is_dictionary(kind):
                values = self.dictionary(kind.value_type, depth)
                return pa.DictionaryArray.from_buffers(kind, rows, buffers, values, node.nulls)
            case "list":
                size = self._last_offset(buffers[1], rows, large=is_large(kind))
                children = [self.array(element_of(kind), size, depth + 1)]
            case "fixed_list":
                children = [self.array(kind.value_type, rows * kind.list_size, depth + 1)]
            case "struct":
                children = [self.array(kind.field(i).type, rows, depth + 1) for i in range(kind.num_fields)]
        return pa.Array.from_buffers(kind, rows, buffers, node.nulls, children=children)

    def dictionary(self, kind: pa.DataType, depth: int) -> pa.Array:
        """A dictionary's values, which have their own length."""
        node = next(self._nodes, None)
        if node is None or node.rows < 0:
            raise BadSlot("a dictionary's values are not described")
        self._nodes = _before(node, self._nodes)
        return self.array(kind, node.rows, depth + 1)

    def _make(self, kind: pa.DataType, layout: str | None, rows: int) -> pa.Buffer:
        step, numbers = next(self._steps, None), numbers_of(kind, layout, large=is_large(kind))
        if step is None or numbers is None:
            raise BadSlot(f"a column of {kind} is not described by steps")
        made = made_of(*step, numbers, rows + 1 if layout == "binary" else rows)
        self.made_bytes += 0 if step == (0, 0) else made.size
        return made

    def finish(self) -> None:
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

    @staticmethod
    def _check_sizes(
        kind: pa.DataType, layout: str | None, node: Node, buffers: list[pa.Buffer | None]
    ) -> None:
        """Check buffer sizes, because Arrow does not (P1)."""
        rows = node.rows
        bits = (rows + 7) // 8
        expected: list[int | None]
        match layout:
            case "fixed":
                expected = [rows * fixed_width(kind)]
            case "bits":
                expected = [bits]
            case "binary":
                expected = [(rows + 1) * (8 if is_large(kind) else 4), None]
            case "list":
                expected = [(rows + 1) * (8 if is_large(kind) else 4)]
            case "struct" | "fixed_list":
                expected = []
            case _:
                raise BadSlot(f"columns of {kind} are not stored")
        if len(buffers) != len(expected) + 1:
            raise BadSlot(f"a column of {kind} has {len(buffers)} buffers")
        valid, *others = buffers
        if (node.nulls and valid is None) or (valid is not None and valid.size != bits):
            raise BadSlot(f"a column of {kind} has nulls but no bits for its {rows} rows")
        for buffer, size in zip(others, expected, strict=True):
            if buffer is None or (size is not None and buffer.size != size):
                raise BadSlot(f"a buffer of {kind} has not the bytes that {rows} rows need")

    @staticmethod
    def _last_offset(buffer: Any, rows: int, *, large: bool) -> int:
        size = int(np.frombuffer(buffer, np.int64 if large else np.int32)[rows])
        if size < 0:
            raise BadSlot("a list ends before it starts")
        return size


def _before(first: Node, rest: Iterator[Node]) -> Iterator[Node]:
    yield first
    yield from rest
