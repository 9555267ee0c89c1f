"""Summarise ranges of records for audits: runs of each producer, and digests of records.

`fold_runs` folds records into runs (`integrity/summary.py` defines them), in offset order, and returns the first row
not folded: the number of rows, or the row that exceeds the capacity for runs. Then grow the array, rebuild the index
and call it again. `add_field_sums` is a second pass, over the records of the chosen runs only.

`hash_records` computes XXH64 of each record's canonical bytes (`integrity/digests.py` defines them). They lie in
several buffers and are concatenated in `scratch`, which the caller allocates for the largest record.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from tidegate.kernels.hashing import xxh64
from tidegate.kernels.integrity import (
    CONTROL,
    END_OF_PUSH,
    MALFORMED,
    MANAGED,
    STAMP_ROW,
    START_OF_CHAIN,
    field_sum,
)
from tidegate.kernels.jit import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_INT64S,
    READ_UINT64S,
    UINT32S,
    UINT64S,
    copy,
    helper,
    kernel,
    load,
    pointer,
    rows_of,
    store,
    store_int32,
    store_int64,
)
from tidegate.kernels.record_encoding import RECORD_SOURCE, Column, RecordSource, column_of, length_at
from tidegate.kernels.validation import EMPTY, ends, fill_index, find_place, is_supported, opens

# -- runs of producers -----------------------------------------------------------------------------

RUN_ROW: Final = np.dtype(
    [
        ("guid_high", "u8"),
        ("guid_low", "u8"),
        ("is_first", "i8"),
        ("chain", "i8"),
        ("first_sequence", "i8"),
        ("last_sequence", "i8"),
        ("first_offset", "i8"),
        ("last_offset", "i8"),
        ("announced", "i8"),
        ("records", "i8"),
        ("crc_sum", "u8"),
        ("field_sum", "u8"),
        ("stamp_sum", "u8"),
        ("data_records", "i8"),
        ("newest_time", "i8"),
        ("log_time", "i8"),
        ("bad_offset", "i8"),
        ("end_row", "i8"),
    ]
)
RUNS = rows_of(RUN_ROW)
NOWHERE: Final = 2**63 - 1
HEARTBEAT_FLAG: Final = 2
NO_RUN: Final = -1
BAD_HEARTBEAT: Final = -2
GOOD_HEARTBEAT: Final = -3
# Places in the `state` array.
COUNT, UNMANAGED_COUNT, MALFORMED_COUNT, FIRST_MALFORMED, HAS_PUSH = 0, 1, 2, 3, 4
STATE_SIZE: Final = 5
NO_TIME: Final = -1


@helper
def begin(run: Any, record: Any, offset: int, is_first: bool) -> None:
    run["guid_high"], run["guid_low"] = record["guid_high"], record["guid_low"]
    run["is_first"] = is_first
    run["chain"], run["first_sequence"] = record["chain"], record["sequence"]
    run["first_offset"] = offset
    run["announced"] = np.int64(record["announced_type"]) if opens(record) else np.int64(-1)
    run["records"], run["crc_sum"], run["field_sum"], run["stamp_sum"] = 0, 0, 0, 0
    run["data_records"], run["newest_time"] = 0, NO_TIME
    run["bad_offset"], run["end_row"] = NOWHERE, NO_RUN


@helper
def take(run: Any, record: Any, computed: Any, offset: int, log_time: int, row: int) -> None:
    run["last_sequence"], run["last_offset"], run["log_time"] = record["sequence"], offset, log_time
    if record["kind"] != CONTROL:
        run["data_records"] += 1
    if record["timestamp"] > run["newest_time"]:
        run["newest_time"] = record["timestamp"]
    if run["bad_offset"] == NOWHERE and (computed != record["crc"] or not is_supported(record)):
        run["bad_offset"] = offset
    if ends(record):
        run["end_row"] = row
        return
    run["records"] += 1
    run["crc_sum"] += np.uint64(record["crc"])
    run["stamp_sum"] += np.uint64(record["timestamp"]) + (np.uint64(record["flags"]) << np.uint64(56))


@kernel(INT64(rows_of(STAMP_ROW), UINT32S, READ_INT64S, READ_INT64S, INT64, RUNS, INT32S, INT64S, INT32S))
def fold_runs(
    records: Any,
    crcs: Any,
    offsets: Any,
    log_times: Any,
    start: int,
    runs: Any,
    index: Any,
    state: Any,
    numbers: Any,
) -> int:
    """Fold rows from `start`; `numbers` gets each record's run, or why it has none."""
    computed, at_offsets, into, places = pointer(crcs), pointer(offsets), pointer(numbers), pointer(index)
    at_times = pointer(log_times)
    mask, slot, high, low = len(index) - 1, EMPTY, np.uint64(0), np.uint64(0)
    for row in range(start, len(records)):
        record, offset, crc = records[row], load(at_offsets, row), load(computed, row)
        store(into, row, NO_RUN)
        if record["state"] != MANAGED:
            if record["state"] == MALFORMED:
                state[MALFORMED_COUNT] += 1
                state[FIRST_MALFORMED] = min(state[FIRST_MALFORMED], offset)
            else:
                state[UNMANAGED_COUNT] += 1
            continue
        if record["kind"] == CONTROL:
            if record["control"] == START_OF_CHAIN and record["flags"] & HEARTBEAT_FLAG:
                store(into, row, BAD_HEARTBEAT if crc != record["crc"] else GOOD_HEARTBEAT)
                continue
            if record["control"] <= END_OF_PUSH:
                state[HAS_PUSH] = 1
        if slot == EMPTY or record["guid_high"] != high or record["guid_low"] != low:
            high, low = record["guid_high"], record["guid_low"]
            slot = load(places, find_place(runs, places, mask, high, low))
        follows = (
            slot != EMPTY
            and runs[slot]["chain"] == record["chain"]
            and runs[slot]["last_sequence"] + 1 == record["sequence"]
            and runs[slot]["end_row"] == NO_RUN
        )
        if not follows:
            if state[COUNT] >= len(runs):
                return row
            is_first = slot == EMPTY
            slot = state[COUNT]
            store(places, find_place(runs, places, mask, high, low), slot)
            begin(runs[slot], record, offset, is_first)
            state[COUNT] += 1
        take(runs[slot], record, crc, offset, load(at_times, row), row)
        store(into, row, slot)
    return len(records)


@kernel(types.void(RUNS, INT64, INT32S))
def index_runs(runs: Any, count: int, index: Any) -> None:
    """Fill the index with each producer's last run among the first `count`."""
    fill_index(runs, count, index)


@kernel(types.void(RECORD_SOURCE, rows_of(STAMP_ROW), INT32S, BYTES, RUNS))
def add_field_sums(source: RecordSource, records: Any, numbers: Any, chosen: Any, runs: Any) -> None:
    """Add up the ADHASH summands of the `chosen` runs, without ends of chains."""
    key, value = column_of(source.key), column_of(source.value)
    run_of, wanted = pointer(numbers), pointer(chosen)
    for row in range(len(records)):
        number = load(run_of, row)
        if number >= 0 and load(wanted, number) and not ends(records[row]):
            runs[number]["field_sum"] += np.uint64(field_sum(records[row], key, value, row))


# -- digests of records ----------------------------------------------------------------------------

OFFSET, TIMESTAMP, KEY, VALUE, HEADERS = 1, 2, 4, 8, 16
FIXED_BYTES: Final = 28  # offset, timestamp, and the lengths of key, value and headers


@helper
def put_field(target: Any, at: int, column: Column, row: int) -> int:
    length = length_at(column, row)
    store_int32(target, at, length)
    at += 4
    if length > 0:
        copy(target, at, column.content, load(column.ends, row), length)
        at += length
    return at


@kernel(types.void(RECORD_SOURCE, READ_INT64S, INT64, BYTES, UINT64S))
def hash_records(source: RecordSource, offsets: Any, parts: int, scratch: Any, hashes: Any) -> None:
    """The hash of each record over the `parts` chosen, in the order of their bits."""
    target, at_offsets, at_times = pointer(scratch), pointer(offsets), pointer(source.timestamp)
    key, value = column_of(source.key), column_of(source.value)
    name, content = column_of(source.header_key), column_of(source.header_value)
    ends, has_headers = pointer(source.header_ends), len(source.header_ends) > 0
    for row in range(len(hashes)):
        at = 0
        if parts & OFFSET:
            store_int64(target, at, load(at_offsets, row))
            at += 8
        if parts & TIMESTAMP:
            store_int64(target, at, load(at_times, row))
            at += 8
        if parts & KEY:
            at = put_field(target, at, key, row)
        if parts & VALUE:
            at = put_field(target, at, value, row)
        if parts & HEADERS:
            first, stop = 0, 0
            if has_headers:
                first, stop = load(ends, row), load(ends, row + 1)
            store_int32(target, at, stop - first)
            at += 4
            for header in range(first, stop):
                at = put_field(target, at, name, header)
                at = put_field(target, at, content, header)
        hashes[row] = xxh64(target, 0, at)


@kernel(types.void(READ_UINT64S, INT64S, UINT64S, UINT64S, UINT64S))
def sum_blocks(hashes: Any, edges: Any, sums: Any, squares: Any, ordered: Any) -> None:
    """Compute each block's sum, sum of squares, and sum weighted by 1, 3, 5, …, all modulo 2^64."""
    for block in range(len(sums)):
        total, squared, weighted = sums[block], squares[block], ordered[block]
        weight = np.uint64(1)
        for row in range(edges[block], edges[block + 1]):
            total += hashes[row]
            squared += hashes[row] * hashes[row]
            weighted += hashes[row] * weight
            weight += np.uint64(2)
        sums[block], squares[block], ordered[block] = total, squared, weighted
