"""Fresh metadata on whole Arrow columns: a headers column for rows that go out.

Owns the vector form of writing `header`: one kernel numbers, check-sums and writes 40 bytes per row; headers
the rows came with stay in front of `div`, a `div` or `divc` among them is replaced. Which numbers rows get
is `chains`'.

Thread rule: pure functions; the kernels run without the interpreter lock.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.errors import InvalidError
from tidegate.integrity.header import (
    CONTROL_HEADER_KEY,
    CONTROL_VALUE,
    HEADER_BYTES,
    HEADER_KEY,
    ControlKey,
    Stamp,
)
from tidegate.kernels.encoding import RecordSource
from tidegate.kernels.integrity_stamping import HeaderArrays, measure_headers, merge_headers, stamp_records
from tidegate.log.format.records import HEADER_TYPE, HEADERS_TYPE, RecordColumns

LARGEST_COLUMN: Final = 2**31 - 1
MOST_ROWS: Final = 1 << 20
"""Of one call, so that the fresh headers of a huge table stay small."""

_NAME: Final = np.frombuffer(HEADER_KEY.encode(), np.uint8)


class Stamped(NamedTuple):
    """What became of some rows: the headers of those before `stop`, and what they add to their chain."""

    stop: int
    headers: pa.ListArray
    checksum: int
    used_bytes: int


def stamp_rows(
    source: RecordSource, start: int, stop: int, *, first: Stamp, checksum_type: int, max_bytes: int
) -> Stamped:
    """Number and check-sum rows from `start`, as many as have at most `max_bytes` of keys and values.

    `first` is the stamp of the first row; kind and checksum of each row are its own.
    """
    stop = min(stop, start + MOST_ROWS)
    stamps = _memory((stop - start) * HEADER_BYTES, np.uint8)
    template = np.frombuffer(first.to_bytes(), np.uint8)
    answer = np.zeros(4, np.int64)
    stamp_records(source, start, stop, max_bytes, template, first.sequence, checksum_type, stamps, answer)
    stop, checksum, used_bytes, reserved = answer.tolist()
    if reserved >= 0:
        raise InvalidError(
            f"the key of row {reserved} is reserved for Tidegate's own control records, so nothing was "
            f"written; leave control records out when you copy a topic (integrity.columns.without_control)",
            kafka_name="INVALID_RECORD",
        )
    stamps = stamps[: (stop - start) * HEADER_BYTES]
    return Stamped(stop, _headers(source, start, stop, stamps), checksum % 2**64, used_bytes)


def control_row(stamp: Stamp, *, nonce: int, payload: bytes | None, log_time_ms: int) -> RecordColumns:
    """One control record as it goes out; the stamp has its checksum."""
    headers = [{"key": HEADER_KEY, "value": stamp.to_bytes()}]
    if payload is not None:
        headers.append({"key": CONTROL_HEADER_KEY, "value": payload})
    return RecordColumns(
        key=pa.array([control_key(stamp, nonce)], pa.binary()),
        value=pa.array([CONTROL_VALUE], pa.binary()),
        timestamp=pa.array([log_time_ms], pa.int64()),
        headers=pa.array([headers], HEADERS_TYPE),
    )


def with_header(row: RecordColumns, name: str, value: bytes) -> RecordColumns:
    """One control record with a header more, behind its own."""
    headers = [] if row.headers is None else row.headers.to_pylist()[0]
    return replace(row, headers=pa.array([[*headers, {"key": name, "value": value}]], HEADERS_TYPE))


def control_key(stamp: Stamp, nonce: int) -> bytes:
    """The key of a control record with this stamp."""
    return ControlKey(stamp.guid, stamp.chain, stamp.sequence, nonce).to_bytes()


def joined(pieces: list[RecordColumns]) -> RecordColumns:
    """Several pieces as one, copied."""
    headers = [piece.headers for piece in pieces]
    return RecordColumns(
        key=pa.concat_arrays([piece.key for piece in pieces]),
        value=pa.concat_arrays([piece.value for piece in pieces]),
        timestamp=pa.concat_arrays([piece.timestamp for piece in pieces]),
        headers=pa.concat_arrays([column for column in headers if column is not None]),
    )


# -- headers columns -----------------------------------------------------------------------------


def _headers(source: RecordSource, start: int, stop: int, stamps: NDArray[np.uint8]) -> pa.ListArray:
    rows = stop - start
    if len(source.header_ends) == 0 or source.header_ends[start] == source.header_ends[stop]:
        counts = _counted(rows)
        key = _binary(counts * len(_NAME), _names(rows), None)
        return _list(counts, key, _binary(counts * HEADER_BYTES, stamps, None))
    return _merged(source, start, stop, stamps)


def _merged(source: RecordSource, start: int, stop: int, stamps: NDArray[np.uint8]) -> pa.ListArray:
    answer = np.zeros(4, np.int64)
    measure_headers(source, start, stop, answer)
    entries, key_bytes, value_bytes, nulls = answer.tolist()
    rows = stop - start
    entries, key_bytes = entries + rows, key_bytes + rows * len(_NAME)
    value_bytes += rows * HEADER_BYTES
    if max(entries, key_bytes, value_bytes) > LARGEST_COLUMN:
        raise InvalidError(
            "the headers of this table take 2 GiB or more with Tidegate's own; write it in smaller pieces"
        )
    into = HeaderArrays(
        ends=_ends(rows),
        key_ends=_ends(entries),
        key_content=_memory(key_bytes, np.uint8),
        value_ends=_ends(entries),
        value_valid=np.zeros((entries + 7) // 8 if nulls else 0, np.uint8),
        value_content=_memory(value_bytes, np.uint8),
    )
    fresh = stamps.view()
    fresh.flags.writeable = False
    if not merge_headers(source, start, stop, _NAME, fresh, into):
        raise InvalidError("the headers of this table changed while they were read; Arrow columns must not")
    valid = pa.py_buffer(into.value_valid) if nulls else None
    value = _binary(into.value_ends, into.value_content, valid)
    return _list(into.ends, _binary(into.key_ends, into.key_content, None), value)


def _list(ends: NDArray[np.int32], key: pa.Array, value: pa.Array) -> pa.ListArray:
    entries = pa.StructArray.from_arrays([key.view(pa.string()), value], fields=list(HEADER_TYPE))
    return pa.Array.from_buffers(HEADERS_TYPE, len(ends) - 1, [None, pa.py_buffer(ends)], children=[entries])


def _binary(ends: NDArray[np.int32], content: NDArray[np.uint8], validity: pa.Buffer | None) -> pa.Array:
    buffers = [validity, pa.py_buffer(ends), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, buffers)


def _counted(rows: int) -> NDArray[np.int32]:
    return np.arange(rows + 1, dtype=np.int32)


def _ends(rows: int) -> NDArray[np.int32]:
    ends = _memory(rows + 1, np.int32)
    ends[0] = 0
    return ends


def _names(rows: int) -> NDArray[np.uint8]:
    return _name_block(1 << max(rows - 1, 0).bit_length())[: rows * len(_NAME)]


@lru_cache(maxsize=2)
def _name_block(rows: int) -> NDArray[np.uint8]:
    return np.tile(_NAME, rows)


def _memory(length: int, dtype: type[np.generic]) -> NDArray[Any]:
    """From Arrow's pool, whose pages are reused."""
    return np.frombuffer(pa.allocate_buffer(length * np.dtype(dtype).itemsize), dtype)
