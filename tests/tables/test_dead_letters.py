"""Records that cannot be read: set aside with where and why, left out, or the end of the work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidegate as tg
from table_records import Said, write_records
from tidegate.errors import CorruptError, InvalidError
from tidegate.log.log import Log
from tidegate.tables.dead_letters import DEAD_LETTER_SCHEMA

RECORDS = [
    Said(b"a", b'{"n":1}', 0),
    Said(b"b", b"?", 0),
    Said(b"c", None, 0),
    Said(b"d", b'{"n":"x"}', 0),
    Said(None, b"no key", 0),
]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with Log(tmp_path / "log", durability="os") as opened:
        write_records(opened, "orders", RECORDS)
        yield opened


def opened(log: Log, tmp_path: Path, **settings: Any) -> Any:
    consumed = tg.Consumed(tg.String(), tg.Json(n="int"), **settings)
    return tg.table(log, "orders", state=tmp_path / "state", consumed=consumed)


def test_bad_rows_are_set_aside_with_where_and_why_and_stay(log: Log, tmp_path: Path) -> None:
    for _ in range(2):
        with opened(log, tmp_path, on_value_error="keep") as table:
            assert [(row.key, row.value) for row in table.all()] == [("a", {"n": 1})]
            letters = table.dead_letters()
            assert letters.schema == DEAD_LETTER_SCHEMA
            assert letters.to_pylist() == [
                {
                    "offset": 1,
                    "partition": 0,
                    "reason": "not JSON: Expecting value at byte 0",
                    "key": b"b",
                    "value": b"?",
                },
                {
                    "offset": 3,
                    "partition": 0,
                    "reason": "field 'n': \"x\" where int64 is expected",
                    "key": b"d",
                    "value": b'{"n":"x"}',
                },
            ]
            assert (table.counts.bad_values, table.counts.null_keys, table.counts.letters_not_kept) == (
                2,
                1,
                0,
            )


def test_with_policy_fail_the_first_one_stops_the_work_and_says_where(log: Log, tmp_path: Path) -> None:
    with pytest.raises(
        CorruptError, match=r"topic orders partition 0 offset 1 .*not JSON.*1 more.*'keep'"
    ) as caught:
        opened(log, tmp_path)
    assert caught.value.offset == 1


def test_dropped_ones_are_counted_and_not_kept(log: Log, tmp_path: Path) -> None:
    with opened(log, tmp_path, on_value_error="drop") as table:
        assert len(table.all()) == 1 and table.dead_letters().num_rows == 0
        assert (table.counts.bad_values, table.counts.letters_not_kept) == (2, 0)


def test_those_beyond_the_limit_of_bytes_are_counted(log: Log, tmp_path: Path) -> None:
    with opened(log, tmp_path, on_value_error="keep", dead_letter_bytes=110) as table:
        assert [each["offset"] for each in table.dead_letters().to_pylist()] == [1]
        assert (table.counts.bad_values, table.counts.letters_not_kept) == (2, 1)


def test_unknown_policies_are_invalid() -> None:
    with pytest.raises(InvalidError, match="'fail', 'drop' or 'keep'"):
        tg.Consumed(on_value_error="ignore")
