"""Records that cannot be read: set aside with where and why, or the end of the work."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import CorruptError, InvalidError, OverloadError
from tidegate.integrity.validator import OnError
from tidegate.tables.dead_letters import DEAD_LETTER_SCHEMA, DeadLetters
from tidegate.tables.serdes.json import JsonDecoder

KEYS = pa.array([b"a", None, b"c", b"d"])
VALUES = pa.array([b'{"n":1}', b"?", None, b'{"n":"x"}'])
OFFSETS, PARTITIONS = np.arange(100, 104), np.full(4, 3, np.int32)


def add(letters: DeadLetters) -> None:
    decoded = JsonDecoder({"n": "int"}).decode(VALUES)
    letters.add(
        decoded.bad_rows, decoded.reasons, offsets=OFFSETS, partitions=PARTITIONS, keys=KEYS, values=VALUES
    )


def test_bad_rows_are_set_aside_with_where_and_why() -> None:
    letters = DeadLetters("orders", "keep")
    add(letters)
    assert len(letters) == 2
    table = letters.take()
    assert table.schema == DEAD_LETTER_SCHEMA
    assert table.to_pylist() == [
        {
            "offset": 101,
            "partition": 3,
            "reason": "not JSON: Expecting value at byte 0",
            "key": None,
            "value": b"?",
        },
        {
            "offset": 103,
            "partition": 3,
            "reason": "field 'n': \"x\" where int64 is expected",
            "key": b"d",
            "value": b'{"n":"x"}',
        },
    ]
    assert len(letters) == 0
    assert letters.take().num_rows == 0
    assert letters.total == 2


def test_with_policy_fail_the_first_one_stops_the_work_and_says_where() -> None:
    letters = DeadLetters("orders")
    with pytest.raises(
        CorruptError, match=r"topic orders partition 3 offset 101 .*not JSON.*1 more.*'keep'"
    ) as caught:
        add(letters)
    assert caught.value.offset == 101
    assert letters.total == len(letters) == 0


def test_nothing_bad_is_nothing_to_do() -> None:
    letters = DeadLetters("orders", OnError.FAIL)
    letters.add(np.empty(0, np.int64), (), offsets=OFFSETS, partitions=PARTITIONS, keys=KEYS, values=VALUES)
    assert letters.take().num_rows == 0


def test_too_many_that_wait_are_refused_and_none_is_lost() -> None:
    letters = DeadLetters("orders", "keep", limit_bytes=150)
    add(letters)
    with pytest.raises(OverloadError, match="take them") as caught:
        add(letters)
    assert caught.value.reason == "dead_letters"
    assert letters.take().num_rows == 2
    add(letters)
    assert letters.take().num_rows == 2


def test_unknown_policies_and_crooked_calls_are_invalid() -> None:
    with pytest.raises(InvalidError, match="'fail', 'drop' or 'keep'"):
        DeadLetters("orders", "ignore")
    with pytest.raises(InvalidError, match="1 reasons for 2 rows"):
        DeadLetters("o", "keep").add(
            np.array([0, 1]), ("x",), offsets=OFFSETS, partitions=PARTITIONS, keys=KEYS, values=VALUES
        )


def test_dropped_ones_are_counted_and_not_kept() -> None:
    letters = DeadLetters("orders", "drop")
    add(letters)
    assert (letters.total, len(letters), letters.take().num_rows) == (2, 0, 0)
