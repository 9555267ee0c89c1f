"""Rows handed to librdkafka, the client under confluent-kafka: no Python object for any of them.

A message is described to the library by an array of units, each a kind and what it needs of nine words (`rdkafka.h`: a
type and a union padded to 64 bytes). Topic and flags are the same for all; the others are written anew for each row.

Thread rule: columns stay where they are until the kernel is done; the library copies what it takes.
"""

from __future__ import annotations

from typing import Any, Final

from tidegate.kernels.addresses import address_of
from tidegate.kernels.calling import call, call_five, call_three
from tidegate.kernels.client_messages import HEADER_ROW, NONE
from tidegate.kernels.compiling import INT64, INT64S, READ_INT64S, kernel, rows_of

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
            made = call(new_headers, behind - first)
            for number in range(first, behind):
                entry = headers[number]
                value, length = entry["value"], entry["value_length"]
                if length == NONE:
                    value, length = 0, 0
                call_five(add_header, made, entry["name"], entry["name_length"], value, length)
            units[place], units[place + 1] = HEADERS, made
            place += UNIT_WORDS
        failed[0] = call_three(produce, producer, told, place // UNIT_WORDS)
        if failed[0] != 0:
            if made != 0:
                call(drop_headers, made)  # they are the message's only where it was taken
            return row
        row += 1
    return row
