"""Messages of librdkafka, the client under confluent-kafka, read where they lie: no Python object for any of them.

A message is a C structure of the library's public header, the same in all its releases (here for 64-bit machines):

     0  i32  error          16  i32  partition      32  size  value's length    48  size  key's length
     8  ptr  topic          24  ptr  value          40  ptr   key               56  i64   offset

Time and headers are asked of the library, whose functions come as addresses. A key or value that is not there has no
address; an empty one has.

Thread rule: the caller holds the messages until it has copied what it wants of them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tidegate.kernels.addresses import address_of, byte_at, copy_at, half_at, word_at
from tidegate.kernels.calling import call, call_five, call_pair
from tidegate.kernels.compiling import BYTES, INT64, INT64S, READ_INT32S, READ_INT64S, kernel, rows_of
from tidegate.kernels.memory import load, pointer

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
    """Fill `rows` with what there is of each message; how many headers they have in all.

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
        time = call_pair(timestamp_of, message, told)
        if half_at(told, 0) != 0:  # the kind of time: none, the sender's, or the log's
            row["timestamp"] = time
        scratch[0] = 0
        call_pair(headers_of, message, told)  # which writes nothing where there are none
        if word_at(told, 0) != 0:
            row["headers"] = word_at(told, 0)
            row["header_count"] = call(count_of, row["headers"])
            headers += row["header_count"]
    return headers


@kernel((READ_INT64S, rows_of(DELIVERY_ROW)))
def look_at_deliveries(messages: Any, rows: Any) -> None:
    """Fill `rows` with where each message was stored, or why not."""
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
            call_five(header_at, headers[number], index, told, told + _WORD, told + 2 * _WORD)
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
    """Give messages back to the library."""
    for number in range(len(messages)):
        call(destroy, messages[number])
