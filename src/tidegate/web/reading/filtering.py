"""Which records of a table match: parts of key, value and headers, and a stretch of time; whole columns at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Filter:
    """Parts to be found, as bytes; empty ones match everything."""

    key: bytes = b""
    value: bytes = b""
    header: str = ""
    header_value: bytes = b""

    @classmethod
    def of(cls, key: str, value: str, header: str) -> Filter:
        name, _, part = header.partition("=")
        return cls(_bytes(key), _bytes(value), name, _bytes(part))

    @property
    def is_empty(self) -> bool:
        return not (self.key or self.value or self.header or self.header_value)


def matching(table: pa.Table, wanted: Filter, from_ms: int, until_ms: int) -> pa.Table:
    """The rows that match, in their order; times from `from_ms` up to `until_ms`, both included."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if wanted.key:
        table = table.filter(pc.fill_null(pc.match_substring(table.column("key"), wanted.key), False))
    if wanted.value:
        table = table.filter(pc.fill_null(pc.match_substring(table.column("value"), wanted.value), False))
    times = table.column("timestamp").cast(pa.int64())
    if from_ms >= 0:
        table = table.filter(pc.fill_null(pc.greater_equal(times, from_ms), False))
        times = table.column("timestamp").cast(pa.int64())
    if until_ms < 2**62:
        table = table.filter(pc.fill_null(pc.less_equal(times, until_ms), False))
    if wanted.header or wanted.header_value:
        table = table.filter(_with_header(table, wanted))
    return table


def _with_header(table: pa.Table, wanted: Filter) -> pa.Array:
    """Rows with a header of that name (and that part in its value)."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    headers = table.column("headers").combine_chunks()
    owners = pc.list_parent_indices(headers)
    entries = headers.flatten()
    found = pc.equal(entries.field("key"), wanted.header)
    if wanted.header_value:
        part = pc.fill_null(pc.match_substring(entries.field("value"), wanted.header_value), False)
        found = pc.and_(found, part)
    mask = np.zeros(len(headers), bool)
    mask[owners.filter(found).to_numpy()] = True
    return pa.array(mask)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
