"""The checksums of many records at once, over Arrow buffers (what they cover: `integrity/columns.py`).

Owns the loop; the arithmetic is `crc32`'s. A library computes one CRC per call, and a call per record from
Python costs more than the checksum.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import INT64, kernel, rows_of
from tidegate.kernels.crc32 import ONES, fold_bytes, fold_int32, fold_int64
from tidegate.kernels.encoding import RECORD_SOURCE, Column, RecordSource, column_of, length_at
from tidegate.kernels.integrity_headers import HEADERS_ONLY, MANAGED, STAMP_ROW
from tidegate.kernels.memory import load, pointer, store

UINT32S = types.Array(types.uint32, 1, "C")
UINT64S = types.Array(types.uint64, 1, "C")

CONTROL: Final = 2
NONCE_BYTES: Final = 4
SCHEMA: Final = 0


@register_jitable
def data_crc(kind: Any, key: Column, key_left_out: int, value: Column, row: int) -> Any:
    """The CRC on its way over kind, key (but for its last bytes) and value."""
    crc = fold_int32(np.int64(ONES), np.int64(kind))
    length = length_at(key, row)
    crc = fold_int32(crc, length)
    if length > key_left_out:
        start = load(key.ends, row)
        crc = fold_bytes(crc, key.content, start, start + length - key_left_out)
    length = length_at(value, row)
    if length >= 0:
        start = load(value.ends, row)
        crc = fold_bytes(fold_int32(crc, np.int64(SCHEMA)), value.content, start, start + length)
    return crc


@register_jitable
def data_field_sum(kind: Any, key: Column, value: Column, row: int) -> Any:
    """The sum of one CRC per field; a null key or value adds nothing."""
    ones = np.int64(ONES)
    total = fold_int32(ones, np.int64(kind)) ^ ones
    length = length_at(key, row)
    if length > 0:
        start = load(key.ends, row)
        total += fold_bytes(ones, key.content, start, start + length) ^ ones
    length = length_at(value, row)
    if length >= 0:
        start = load(value.ends, row)
        total += fold_int32(ones, np.int64(SCHEMA)) ^ ones
        total += fold_bytes(ones, value.content, start, start + length) ^ ones
    return total


@kernel(types.void(RECORD_SOURCE, rows_of(STAMP_ROW), INT64, UINT32S))
def record_checksums(source: RecordSource, stamps: Any, payloads: int, out: Any) -> None:
    """One CRC per record into `out`, 0 for those that are not managed.

    Without `payloads` only control records are computed; for the others the header's own answer stands.
    """
    into = pointer(out)
    key, value, payload = column_of(source.key), column_of(source.value), column_of(source.header_value)
    for row in range(len(stamps)):
        stamp = stamps[row]
        if stamp["state"] != MANAGED:
            store(into, row, 0)
        elif stamp["kind"] == CONTROL:
            crc = data_crc(np.int64(stamp["kind"]), key, NONCE_BYTES, value, row)
            crc = fold_int32(fold_int32(crc, np.int64(stamp["control"])), np.int64(stamp["flags"]))
            crc = fold_int64(crc, stamp["timestamp"])
            entry: Any = np.int64(stamp["payload"])
            length = length_at(payload, entry) if entry >= 0 else -1
            crc = fold_int32(crc, length)
            if length > 0:
                start = load(payload.ends, entry)
                crc = fold_bytes(crc, payload.content, start, start + length)
            store(into, row, crc ^ ONES)
        elif payloads:
            crc = data_crc(np.int64(stamp["kind"]), key, 0, value, row)
            if stamp["flags"] & HEADERS_ONLY:
                crc = fold_int64(fold_int32(crc, np.int64(stamp["flags"])), stamp["timestamp"])
            store(into, row, crc ^ ONES)
        else:
            claimed: Any = np.int64(stamp["crc"])
            store(into, row, claimed)


@register_jitable
def field_sum(stamp: Any, key: Column, value: Column, row: int) -> Any:
    """The sum of one CRC per field; a control record's fields are its kind and control type."""
    if stamp["kind"] == CONTROL:
        ones = np.int64(ONES)
        total = fold_int32(ones, np.int64(stamp["kind"])) ^ ones
        return total + (fold_int32(ones, np.int64(stamp["control"])) ^ ones)
    return data_field_sum(np.int64(stamp["kind"]), key, value, row)


@kernel(types.void(RECORD_SOURCE, rows_of(STAMP_ROW), UINT64S))
def field_sums(source: RecordSource, stamps: Any, out: Any) -> None:
    """The field sum of each record into `out`, 0 for those that are not managed."""
    into = pointer(out)
    key, value = column_of(source.key), column_of(source.value)
    for row in range(len(stamps)):
        stamp = stamps[row]
        if stamp["state"] != MANAGED:
            store(into, row, 0)
        else:
            store(into, row, field_sum(stamp, key, value, row))
