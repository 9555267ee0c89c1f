"""Rows handed to the C client: what it is told of each, against the same loop in plain Python."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tidegate.kernels.librdkafka import (
    FLAGS,
    HEADER_ROW,
    HEADERS,
    KEY,
    MOST_UNITS,
    NONE,
    PARTITION,
    TIMESTAMP,
    TOPIC,
    UNIT_WORDS,
    VALUE,
    send_rows,
)

ROWS: list[tuple[int, bytes | None, bytes | None, int, list[tuple[bytes, bytes | None]]]] = [
    (0, b"key", b"value", 1000, [(b"a", b"1"), (b"b", None), (b"", b"")]),
    (-1, None, b"", NONE, []),
    (7, b"", None, 0, [(b"name", b"\0\xff")]),
    (2, b"k", b"v" * 500, NONE, []),
]


class Client:
    """A library that writes down what it is told, and refuses row `full` once."""

    def __init__(self, full: int | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.dropped: list[int] = []
        self._full = full
        self._lists: dict[int, list[tuple[bytes, bytes | None]]] = {}
        self._kept: list[Any] = []
        word = ctypes.c_int64
        self.produce = self._function(ctypes.CFUNCTYPE(word, word, word, word), self._produce)
        self.new_headers = self._function(ctypes.CFUNCTYPE(word, word), self._new_headers)
        self.add_header = self._function(
            ctypes.CFUNCTYPE(ctypes.c_int32, word, word, word, word, word), self._add_header
        )
        self.drop_headers = self._function(ctypes.CFUNCTYPE(None, word), self.dropped.append)

    def _function(self, kind: Any, function: Any) -> int:
        made = kind(function)
        self._kept.append(made)
        return int(ctypes.cast(made, ctypes.c_void_p).value or 0)

    def _new_headers(self, count: int) -> int:
        self._lists[len(self._lists) + 1] = []
        return len(self._lists)

    def _add_header(self, headers: int, name: int, name_length: int, value: int, length: int) -> int:
        content = ctypes.string_at(value, length) if value else None
        self._lists[headers].append((ctypes.string_at(name, name_length), content))
        return 0

    def _produce(self, producer: int, units: int, count: int) -> int:
        assert producer == 99
        if self._full == len(self.sent):
            self._full = None
            return 4711
        told: dict[str, Any] = {}
        for unit in range(count):
            kind, first, second = (ctypes.c_int64 * 3).from_address(units + unit * UNIT_WORDS * 8)
            told[str(kind)] = (
                (ctypes.string_at(first, second) if first else None) if kind in (KEY, VALUE)
                else self._lists[first] if kind == HEADERS
                else first
            )  # fmt: skip
        self.sent.append(told)
        return 0


def given() -> tuple[list[Any], list[Any]]:
    """The columns of `ROWS` as the kernel takes them, and what holds their bytes."""
    kept: list[Any] = []

    def place(content: bytes | None) -> tuple[int, int]:
        if content is None:
            return 0, NONE
        kept.append(ctypes.create_string_buffer(content, len(content) + 1))
        return ctypes.addressof(kept[-1]), len(content)

    keys, values = [place(row[1]) for row in ROWS], [place(row[2]) for row in ROWS]
    headers = np.zeros(sum(len(row[4]) for row in ROWS), HEADER_ROW)
    for number, (name, value) in enumerate(pair for row in ROWS for pair in row[4]):
        headers[number] = (*place(name), *place(value))
    words = [
        [row[0] for row in ROWS],
        [each[0] for each in keys], [each[1] for each in keys],
        [each[0] for each in values], [each[1] for each in values],
        [row[3] for row in ROWS],
        np.cumsum([0, *(len(row[4]) for row in ROWS)]),
    ]  # fmt: skip
    return [*(np.array(column, np.int64) for column in words), headers], kept


def expected() -> list[dict[str, Any]]:
    found = []
    for partition, key, value, time, headers in ROWS:
        told = {TOPIC: 55, FLAGS: 2, PARTITION: partition, KEY: key, VALUE: value}
        told |= {} if time == NONE else {TIMESTAMP: time}
        told |= {HEADERS: headers} if headers else {}
        found.append({str(kind): what for kind, what in told.items()})
    return found


@pytest.mark.parametrize("full", [None, 0, 2])
@pytest.mark.parametrize("form", ["compiled", "plain"])
def test_every_row_is_told_whole_and_goes_on_where_it_was_refused(form: str, full: int | None) -> None:
    client, (columns, _kept) = Client(full), given()
    units, failed = np.zeros(UNIT_WORDS * MOST_UNITS, np.int64), np.zeros(1, np.int64)
    units[:2], units[UNIT_WORDS : UNIT_WORDS + 2] = (TOPIC, 55), (FLAGS, 2)
    run = send_rows if form == "compiled" else send_rows.py_func
    functions = (client.produce, client.new_headers, client.add_header, client.drop_headers)
    row = run(99, *functions, failed, units, *columns, 0)
    if full is not None:
        assert (row, failed[0]) == (full, 4711)
        assert len(client.dropped) == 1  # headers of a message that was not taken
        row = run(99, *functions, failed, units, *columns, row)
    assert (row, failed[0]) == (len(ROWS), 0)
    assert client.sent == expected()
