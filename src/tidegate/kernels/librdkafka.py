"""Read and send messages of librdkafka through its C functions, without a Python object per message.

A message is a C structure of the library's public header, the same in all its releases (here for 64-bit machines):

     0  i32  error          16  i32  partition      32  size  value's length    48  size  key's length
     8  ptr  topic          24  ptr  value          40  ptr   key               56  i64   offset

Timestamps and headers are read through the library's functions, which are passed as addresses. A null key or value has
address 0. To send, a message is described by an array of units of nine words: a kind and its arguments (`rdkafka.h`: a
type and a union padded to 64 bytes).

Thread rule: the caller owns messages until it has copied what it needs, and keeps columns alive until they are sent.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tidegate.kernels.jit import (
    BYTES,
    INT64,
    INT64S,
    READ_INT32S,
    READ_INT64S,
    address_of,
    byte_at,
    call,
    copy_at,
    half_at,
    kernel,
    load,
    pointer,
    rows_of,
    word_at,
)

# -- reading messages ------------------------------------------------------------------------------

NONE: Final = -1  # the length of what is not there; the timestamp of a message that has none
_WORD = 8
MESSAGE_ROW: Final = np.dtype(
    [
        ("error", "i8"),
        ("partition", "i8"),
        ("offset", "i8"),
        ("timestamp", "i8"),
        ("key", "i8"),
        ("key_length", "i8"),
        ("value", "i8"),
        ("value_length", "i8"),
        ("headers", "i8"),
        ("header_count", "i8"),
    ],
    align=True,
)
DELIVERY_ROW: Final = np.dtype([("error", "i8"), ("partition", "i8"), ("offset", "i8")], align=True)
HEADER_ROW: Final = np.dtype(
    [("name", "i8"), ("name_length", "i8"), ("value", "i8"), ("value_length", "i8")], align=True
)


@kernel((READ_INT64S, INT64, INT64, INT64, INT64S, rows_of(MESSAGE_ROW)))
def look_at_messages(
    messages: Any, timestamp_of: int, headers_of: int, count_of: int, scratch: Any, rows: Any
) -> int:
    """Fill `rows` with the facts of each message; returns the total number of headers.

    The library writes into `scratch`, a word.
    """
    told, headers = address_of(scratch), 0
    for number in range(len(messages)):
        message, row = messages[number], rows[number]
        row["error"] = half_at(message, 0)
        row["partition"] = half_at(message, 4)
        row["value"], row["value_length"] = word_at(message, 3), word_at(message, 4)
        row["key"], row["key_length"] = word_at(message, 5), word_at(message, 6)
        row["offset"] = word_at(message, 7)
        row["timestamp"], row["headers"], row["header_count"] = NONE, 0, 0
        if row["value"] == 0:
            row["value_length"] = NONE
        if row["key"] == 0:
            row["key_length"] = NONE
        if row["error"] != 0:
            continue
        time = call(timestamp_of, (message, told))
        if half_at(told, 0) != 0:  # the kind of time: none, the sender's, or the log's
            row["timestamp"] = time
        scratch[0] = 0
        call(headers_of, (message, told))  # which writes nothing where there are none
        if word_at(told, 0) != 0:
            row["headers"] = word_at(told, 0)
            row["header_count"] = call(count_of, (row["headers"],))
            headers += row["header_count"]
    return headers


@kernel((READ_INT64S, rows_of(DELIVERY_ROW)))
def look_at_deliveries(messages: Any, rows: Any) -> None:
    """Fill `rows` with each message's stored position, or its error."""
    for number in range(len(messages)):
        message, row = messages[number], rows[number]
        row["error"], row["partition"] = half_at(message, 0), half_at(message, 4)
        row["offset"] = word_at(message, 7)


@kernel((READ_INT64S, READ_INT64S, INT64, INT64S, rows_of(HEADER_ROW)))
def look_at_headers(headers: Any, counts: Any, header_at: int, scratch: Any, rows: Any) -> None:
    """Fill `rows` with the headers of messages, one after another. The library writes into `scratch`, three words."""
    told, row = address_of(scratch), 0
    for number in range(len(headers)):
        for index in range(counts[number]):
            call(header_at, (headers[number], index, told, told + _WORD, told + 2 * _WORD))
            entry = rows[row]
            entry["name"], entry["value"] = word_at(told, 0), word_at(told, 1)
            entry["value_length"] = word_at(told, 2)
            if entry["value"] == 0:
                entry["value_length"] = NONE
            length = 0
            while byte_at(entry["name"], length) != 0:
                length += 1
            entry["name_length"] = length
            row += 1


@kernel((READ_INT64S, READ_INT32S, BYTES))
def copy_values(addresses: Any, ends: Any, content: Any) -> None:
    """Copy each value from its address to its place between `ends` in `content`."""
    target, bounds = pointer(content), pointer(ends)
    for number in range(len(addresses)):
        start = load(bounds, number)
        length = load(bounds, number + 1) - start
        if length > 0:
            copy_at(target, start, addresses[number], length)


@kernel((READ_INT64S, INT64))
def let_go(messages: Any, destroy: int) -> None:
    """Release messages to the library."""
    for number in range(len(messages)):
        call(destroy, (messages[number],))


# -- sending rows ----------------------------------------------------------------------------------

UNIT_WORDS: Final = 9
MOST_UNITS: Final = 7
TOPIC: Final = 2
PARTITION: Final = 3
VALUE: Final = 4
KEY: Final = 5
FLAGS: Final = 7
TIMESTAMP: Final = 8
HEADERS: Final = 10
_FIXED = 2  # units that the caller has filled: topic and flags
_PLACED = _FIXED * UNIT_WORDS


@kernel(
    (
        INT64, INT64, INT64, INT64, INT64, INT64S, INT64S, READ_INT64S, READ_INT64S, READ_INT64S, READ_INT64S,
        READ_INT64S, READ_INT64S, READ_INT64S, rows_of(HEADER_ROW), INT64,
    )
)  # fmt: skip
def send_rows(
    producer: int,
    produce: int,
    new_headers: int,
    add_header: int,
    drop_headers: int,
    failed: Any,
    units: Any,
    partitions: Any,
    keys: Any,
    key_lengths: Any,
    values: Any,
    value_lengths: Any,
    timestamps: Any,
    header_ends: Any,
    headers: Any,
    row: int,
) -> int:
    """Hand over rows from `row` on; the row that was refused, its error's address in `failed`, or how many there are.

    `units` has room for `MOST_UNITS`, the first two filled. A length of `NONE` is a null, a timestamp of `NONE` none.
    """
    told = address_of(units)
    while row < len(keys):
        place = _PLACED
        units[place], units[place + 1] = PARTITION, partitions[row]
        place += UNIT_WORDS
        units[place], units[place + 1], units[place + 2] = KEY, 0, 0
        if key_lengths[row] != NONE:
            units[place + 1], units[place + 2] = keys[row], key_lengths[row]
        place += UNIT_WORDS
        units[place], units[place + 1], units[place + 2] = VALUE, 0, 0
        if value_lengths[row] != NONE:
            units[place + 1], units[place + 2] = values[row], value_lengths[row]
        place += UNIT_WORDS
        if timestamps[row] != NONE:
            units[place], units[place + 1] = TIMESTAMP, timestamps[row]
            place += UNIT_WORDS
        first, behind, made = header_ends[row], header_ends[row + 1], 0
        if behind > first:
            made = call(new_headers, (behind - first,))
            for number in range(first, behind):
                entry = headers[number]
                value, length = entry["value"], entry["value_length"]
                if length == NONE:
                    value, length = 0, 0
                call(add_header, (made, entry["name"], entry["name_length"], value, length))
            units[place], units[place + 1] = HEADERS, made
            place += UNIT_WORDS
        failed[0] = call(produce, (producer, told, place // UNIT_WORDS))
        if failed[0] != 0:
            if made != 0:
                call(drop_headers, (made,))  # they are the message's only where it was taken
            return row
        row += 1
    return row
