"""Kernels over the C client's messages: what lies there, against the same walk in plain Python."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tidegate.kernels.librdkafka import (
    HEADER_ROW,
    MESSAGE_ROW,
    NONE,
    copy_values,
    let_go,
    look_at_headers,
    look_at_messages,
)

Header = tuple[bytes, bytes | None]
Message = tuple[int, int, int, int | None, bytes | None, bytes | None, list[Header]]

MESSAGES: list[Message] = [
    (0, 3, 17, 1_700_000_000_000, b"key", b"value", [(b"a", b"1"), (b"", b""), (b"a", None)]),
    (0, 3, 18, None, None, b"", []),
    (-191, 3, 19, None, None, None, []),
    (0, 0, 1 << 40, 0, b"", None, [(b"name", b"\0\xff" * 40)]),
]


class Structure(ctypes.Structure):
    """The library's message, as its header file has it."""

    _fields_ = [
        ("error", ctypes.c_int32),
        ("topic", ctypes.c_void_p),
        ("partition", ctypes.c_int32),
        ("value", ctypes.c_void_p),
        ("value_length", ctypes.c_size_t),
        ("key", ctypes.c_void_p),
        ("key_length", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("private", ctypes.c_void_p),
    ]


class Client:
    """Functions that answer as the library's do, of messages laid out by hand."""

    def __init__(self, messages: list[Message]) -> None:
        self._kept: list[Any] = []
        self.structures = [self._structure(message) for message in messages]
        self.addresses = np.array([ctypes.addressof(each) for each in self.structures], np.int64)
        self._messages = dict(zip(self.addresses.tolist(), messages, strict=True))
        self.destroyed: list[int] = []
        word, place = ctypes.c_int64, ctypes.POINTER(ctypes.c_int64)
        kind = ctypes.POINTER(ctypes.c_int32)
        self.timestamp_of = self._function(ctypes.CFUNCTYPE(word, word, kind), self._timestamp_of)
        self.headers_of = self._function(ctypes.CFUNCTYPE(ctypes.c_int32, word, place), self._headers_of)
        self.count_of = self._function(ctypes.CFUNCTYPE(word, word), self._count_of)
        self.header_at = self._function(
            ctypes.CFUNCTYPE(ctypes.c_int32, word, word, place, place, place), self._header_at
        )
        self.destroy = self._function(ctypes.CFUNCTYPE(None, word), self.destroyed.append)

    def _function(self, kind: Any, function: Any) -> int:
        made = kind(function)
        self._kept.append(made)
        return int(ctypes.cast(made, ctypes.c_void_p).value or 0)

    def _bytes(self, content: bytes | None) -> int | None:
        if content is None:
            return None
        made = ctypes.create_string_buffer(content, len(content) + 1)
        self._kept.append(made)
        return ctypes.addressof(made)

    def _structure(self, message: Message) -> Structure:
        error, partition, offset, _, key, value, _ = message
        return Structure(
            error, None, partition, self._bytes(value), len(value or b""), self._bytes(key), len(key or b""),
            offset, None,
        )  # fmt: skip

    def _timestamp_of(self, message: int, kind: Any) -> int:
        time = self._messages[message][3]
        kind[0] = 0 if time is None else 1
        return -1 if time is None else time

    def _headers_of(self, message: int, found: Any) -> int:
        if not self._messages[message][6]:
            return -156  # "no entry", and nothing written
        found[0] = message
        return 0

    def _count_of(self, headers: int) -> int:
        return len(self._messages[headers][6])

    def _header_at(self, headers: int, index: int, name: Any, value: Any, size: Any) -> int:
        key, content = self._messages[headers][6][index]
        name[0], value[0], size[0] = self._bytes(key), self._bytes(content) or 0, len(content or b"")
        return 0


@pytest.fixture(params=["compiled", "plain"])
def run(request: pytest.FixtureRequest) -> Any:
    return (lambda kernel: kernel) if request.param == "compiled" else (lambda kernel: kernel.py_func)


def told(rows: Any, name: str) -> list[bytes | None]:
    return [
        None if length == NONE else ctypes.string_at(address, length)
        for address, length in zip(rows[name].tolist(), rows[f"{name}_length"].tolist(), strict=True)
    ]


def test_messages_are_what_the_library_laid_out(run: Any) -> None:
    client, rows = Client(MESSAGES), np.zeros(len(MESSAGES), MESSAGE_ROW)
    headers = run(look_at_messages)(
        client.addresses, client.timestamp_of, client.headers_of, client.count_of, np.zeros(1, np.int64), rows
    )
    assert headers == 4
    assert rows["error"].tolist() == [0, 0, -191, 0]
    assert rows["partition"].tolist() == [3, 3, 3, 0]
    assert rows["offset"].tolist() == [17, 18, 19, 1 << 40]
    assert rows["timestamp"].tolist() == [1_700_000_000_000, NONE, NONE, 0]
    assert told(rows, "key") == [b"key", None, None, b""]
    assert told(rows, "value") == [b"value", b"", None, None]
    assert rows["header_count"].tolist() == [3, 0, 0, 1]


def test_headers_are_in_their_order_with_nulls_apart_from_nothing(run: Any) -> None:
    client, entries = Client(MESSAGES), np.zeros(4, HEADER_ROW)
    chosen = client.addresses[[0, 1, 3]]
    run(look_at_headers)(chosen, np.array([3, 0, 1]), client.header_at, np.zeros(3, np.int64), entries)
    assert told(entries, "name") == [b"a", b"", b"a", b"name"]
    assert told(entries, "value") == [b"1", b"", None, b"\0\xff" * 40]


def test_values_are_copied_to_their_places(run: Any) -> None:
    parts = [b"one", b"", b"three" * 100, b"4"]
    kept = [ctypes.create_string_buffer(part, len(part) + 1) for part in parts]
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int32)
    content = np.zeros(ends[-1], np.uint8)
    run(copy_values)(np.array([ctypes.addressof(each) for each in kept], np.int64), ends, content)
    assert content.tobytes() == b"".join(parts)


def test_every_message_is_given_back_once(run: Any) -> None:
    client = Client(MESSAGES)
    run(let_go)(client.addresses, client.destroy)
    assert client.destroyed == client.addresses.tolist()
