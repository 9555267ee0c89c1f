"""One slot of a pack: a run as two Arrow IPC streams, its directory and its rows, of one record batch each.

Writing shares the run's buffers and reading maps the file's, so neither copies columns. Zeros fill the slot to a
multiple of 64 bytes. A column of integers with a constant step (constant, counting) is not stored: the record batch's
metadata `tidegate.steps` has its place, its first number and the step, and reading computes it.

The pack verifies a slot's checksum before this module reads it. A checksum proves that the bytes are as written, not
that they are valid, so at its first use in a process a slot is validated in full (`checked_run`): every offset, index
and null bit (Arrow's full validation), no nulls where the schema allows none, and the order that lookups rely on. A
record batch that takes more memory than the slot has is refused; computed columns have a limit of their own.

Packs of format versions 1 and 2 have slots of another kind; `earlier_slots` reads them.

Thread rule: pure, but for the shared zeros, which only grow.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.sorting import halves_are_even, words_are_even
from tidegate.storage.backends.base import Part
from tidegate.storage.backends.sealed import padding
from tidegate.storage.runs.columns import hash_keys
from tidegate.storage.runs.run import DIRECTORY, Run

STEPS: Final = b"tidegate.steps"
MALFORMED: Final = (  # what Arrow and msgspec raise for bytes in memory that are no stream of theirs
    pa.ArrowException,
    msgspec.MsgspecError,
    OSError,
    EOFError,
    StopIteration,
    ValueError,
    IndexError,
    OverflowError,
    MemoryError,
)
FEWEST_STEPS: Final = 256  # numbers; shorter columns are stored as they are
SHARED_BYTES: Final = 4096  # smaller buffers are copied: a part of its own would cost more
MAX_MADE_BYTES: Final = 1 << 30
INTEGERS: Final = {
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


class BadSlot(ValueError):
    """The slot's content is inconsistent; the pack adds the file and the position."""


class Step(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A column that is not stored: its place in the schema, its first number, and the step from each to the next."""

    column: int
    first: int
    step: int


# -- numbers in even steps ---------------------------------------------------------------------------


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


# -- writing -----------------------------------------------------------------------------------------


def check_storable(schema: pa.Schema) -> None:
    """`InvalidError` for a column whose Arrow type the stores do not take."""
    for field in schema:
        for kind in _types_in(field.type):
            if not _is_storable(kind):
                raise InvalidError(
                    f"column {field.name} has the Arrow type {field.type}, and {kind} cannot be stored; cast it to a "
                    f"plain type (string instead of string_view, the storage type of an extension)"
                )


def _types_in(kind: pa.DataType) -> Iterator[pa.DataType]:
    yield kind
    if isinstance(kind, pa.BaseExtensionType):
        return
    if pa.types.is_dictionary(kind):
        yield from _types_in(kind.value_type)
    else:
        for index in range(kind.num_fields):
            yield from _types_in(kind.field(index).type)


def _is_storable(kind: pa.DataType) -> bool:
    types = pa.types
    return not (
        isinstance(kind, pa.BaseExtensionType)
        or types.is_union(kind)
        or types.is_run_end_encoded(kind)
        or types.is_string_view(kind)
        or types.is_binary_view(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    )


class _Parts(io.RawIOBase):
    """A sink that keeps large buffers as they are and joins small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[Part] = []
        self.size = 0
        self._small: list[bytes] = []

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        if len(data) < SHARED_BYTES:
            self._small.append(bytes(data))
        else:
            self._join()
            self.parts.append(data)
        self.size += len(data)
        return len(data)

    def finish(self) -> list[Part]:
        """The parts, padded to a multiple of 64 bytes."""
        self._small.append(bytes(padding(self.size)))
        self._join()
        return self.parts

    def _join(self) -> None:
        if self._small:
            self.parts.append(b"".join(self._small))
            self._small.clear()


def slot_parts(run: Run) -> list[Part]:
    """The slot's bytes, in order, a multiple of 64 long; large parts are the run's own buffers."""
    sink = _Parts()
    file = pa.PythonFile(sink, mode="w")
    for batch in (run.directory, run.rows):
        stored, steps = _without_steps(batch)
        with pa.ipc.new_stream(file, stored.schema) as stream:
            stream.write_batch(stored, custom_metadata={STEPS: msgspec.json.encode(steps)} if steps else None)
    return sink.finish()


def _without_steps(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[Step]]:
    """The columns to store, and the others as steps."""
    if batch.num_rows < FEWEST_STEPS:
        return batch, []
    steps: list[Step] = []
    stored: list[int] = []
    for place, column in enumerate(batch.columns):
        step = None
        if column.type.id in INTEGERS and not column.null_count:
            step = step_of(column.to_numpy())
        if step is None:
            stored.append(place)
        else:
            steps.append(Step(place, *step))
    return (batch.select(stored), steps) if steps else (batch, steps)


# -- reading -----------------------------------------------------------------------------------------


def read_slot(slot: pa.Buffer, schema: pa.Schema, bucket: int, *, checked: bool = False) -> Run:
    """The run in a verified slot, sharing its memory; `BadSlot` when the content contradicts itself.

    `checked`: this slot was validated before.
    """
    source = pa.BufferReader(slot)
    try:
        directory, _ = _read_batch(source, DIRECTORY, slot.size)
        rows, made_bytes = _read_batch(source, schema, slot.size)
    except BadSlot:
        raise
    except MALFORMED as error:
        raise BadSlot(f"it is not two Arrow IPC streams ({error})") from error
    return checked_run(bucket, directory, rows, made_bytes, checked=checked)


def _read_batch(source: pa.BufferReader, schema: pa.Schema, most_bytes: int) -> tuple[pa.RecordBatch, int]:
    """The next stream's one batch, with computed columns put in; and the bytes these take."""
    with pa.ipc.open_stream(source) as stream:
        batch, metadata = stream.read_next_batch_with_custom_metadata()
        if next(stream, None) is not None:
            raise BadSlot("one of its streams has more than one record batch")
    if batch.get_total_buffer_size() > most_bytes:
        raise BadSlot("one of its record batches takes more bytes than it has")
    encoded = None if metadata is None else metadata.get(STEPS)
    if encoded is None:
        if not batch.schema.equals(schema):
            raise BadSlot(f"it has the columns {batch.schema.names}, not {schema.names}, or other types")
        return batch, 0
    return _with_steps(batch, msgspec.json.decode(encoded, type=list[Step]), schema)


def _with_steps(batch: pa.RecordBatch, steps: list[Step], schema: pa.Schema) -> tuple[pa.RecordBatch, int]:
    """The batch with its computed columns, and the bytes that these take."""
    computed = {each.column for each in steps}
    stored = [field for place, field in enumerate(schema) if place not in computed]
    if len(computed) != len(steps) or not batch.schema.equals(pa.schema(stored)):
        raise BadSlot(f"it has the columns {batch.schema.names} and steps for {computed}, not {schema.names}")
    columns, rows, made_bytes = batch.columns, batch.num_rows, 0
    for each in sorted(steps, key=lambda each: each.column):
        kind = schema.field(each.column).type
        numbers = INTEGERS.get(kind.id)
        if numbers is None:
            raise BadSlot(f"a column of {kind} is given by steps")
        made = made_of(each.first, each.step, numbers, rows)
        made_bytes += 0 if each.first == each.step == 0 else made.size
        columns.insert(each.column, pa.Array.from_buffers(kind, rows, [None, made], 0))
    return pa.RecordBatch.from_arrays(columns, schema=schema), made_bytes


def checked_run(
    bucket: int, directory: pa.RecordBatch, rows: pa.RecordBatch, made_bytes: int, *, checked: bool
) -> Run:
    """The run of these batches, validated unless `checked`; `made_bytes` of it are not the file's."""
    run = Run(bucket, directory, rows)
    run.__dict__["made_bytes"] = made_bytes
    if not checked:
        try:
            validate(directory)
            validate(rows)
        except (pa.ArrowException, OverflowError) as error:
            raise BadSlot(str(error)) from error
        _check_order(run)
    return run


def validate(batch: pa.RecordBatch) -> None:
    """Check every offset, index and null of a batch whose buffers come from a file; `ArrowInvalid` if one is wrong."""
    batch.validate(full=True)
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if column.null_count and not field.nullable:
            raise pa.ArrowInvalid(f"column {field.name} has {column.null_count} nulls and may have none")


def _check_order(run: Run) -> None:
    """The hashes are those of the keys, the directory ascends, and so do the rows of every key."""
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
