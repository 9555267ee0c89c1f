"""Where reading starts and stops, as people say it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.log.reader import (
    EARLIEST,
    LATEST,
    Position,
    PositionKind,
    parse_position,
    parse_positions,
    parse_range,
)

NOW = 1_767_229_200_000  # 2026-01-01T01:00Z
TEN = 1_767_261_600_000  # 2026-01-01T10:00Z


def at(time_ms: int) -> Position:
    return Position(PositionKind.TIME, time_ms)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("earliest", EARLIEST),
        ("start", EARLIEST),
        ("Beginning", EARLIEST),
        ("latest", LATEST),
        ("end", LATEST),
        (42, Position(PositionKind.OFFSET, 42)),
        ("42", Position(PositionKind.OFFSET, 42)),
        (0, Position(PositionKind.OFFSET, 0)),
        (-5, Position(PositionKind.BEFORE_END, 5)),
        ("-5", Position(PositionKind.BEFORE_END, 5)),
        ("@1767261600000", at(TEN)),
        ("@2026-01-01T10:00Z", at(TEN)),
        ("@2026-01-01T10:00", at(TEN)),
        ("@-1h", at(NOW - 3_600_000)),
        (datetime(2026, 1, 1, 10, tzinfo=UTC), at(TEN)),
        (EARLIEST, EARLIEST),
    ],
)
def test_one_place(said: object, meant: Position) -> None:
    assert parse_position(said, now_ms=NOW) == meant  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "start", "stop"),
    [
        ("start", EARLIEST, None),
        ("-3", Position(PositionKind.BEFORE_END, 3), None),
        ("3:9", Position(PositionKind.OFFSET, 3), Position(PositionKind.OFFSET, 9)),
        (":end", EARLIEST, LATEST),
        ("5:", Position(PositionKind.OFFSET, 5), LATEST),
        ("@5:7", at(5), at(7)),
        ("@2026-01-01T10:00Z:2026-01-01T11:00Z", at(TEN), at(TEN + 3_600_000)),
        ("@2026-01-01T10:00:@2026-01-01T11:00", at(TEN), at(TEN + 3_600_000)),
        ("@2026-01-01T10:00:00", at(TEN), None),
        ("@-2h:-1h", at(NOW - 7_200_000), at(NOW - 3_600_000)),
    ],
)
def test_a_range_of_the_command_line(said: str, start: Position, stop: Position | None) -> None:
    assert parse_range(said, now_ms=NOW) == (start, stop)


@pytest.mark.parametrize("said", ["", "soon", "@", "@yesterday", "1.5", "@1:x", "1:x", "9" * 30])
def test_what_cannot_be_understood_is_said_so(said: str) -> None:
    with pytest.raises(InvalidError):
        parse_range(said, now_ms=NOW)


def test_each_partition_its_own() -> None:
    assert parse_positions({0: 5, 1: "end"}, (0, 1)) == {0: Position(PositionKind.OFFSET, 5), 1: LATEST}
    assert parse_positions("start", (3, 4)) == {3: EARLIEST, 4: EARLIEST}
    for wrong in ({0: 1}, {0: 1, 1: 2, 2: 3}):
        with pytest.raises(InvalidError):
            parse_positions(wrong, (0, 1))


@given(st.text(max_size=30))
def test_any_text_is_a_range_or_one_clear_error(text: str) -> None:
    try:
        parse_range(text, now_ms=NOW)
    except InvalidError:
        pass
