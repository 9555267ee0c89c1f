"""Waiting while somebody else is in the way: as long as told, and no longer."""

from __future__ import annotations

import pytest

from tidegate.clock import ManualClock
from tidegate.errors import ConflictError, UnavailableError
from tidegate.waiting import waiting


class Busy:
    """Taken by somebody else until a moment."""

    def __init__(self, clock: ManualClock, until_ms: int) -> None:
        self.clock, self.until_ms, self.asked = clock, until_ms, 0

    def take(self) -> str:
        self.asked += 1
        if self.clock.monotonic_ms() < self.until_ms:
            raise ConflictError("somebody has it")
        return "mine"


def test_what_is_let_go_in_time_is_taken() -> None:
    clock = ManualClock()
    busy = Busy(clock, 90)
    assert waiting(clock, 100, busy.take, pause_ms=20) == "mine"
    assert (clock.monotonic_ms(), busy.asked) == (100, 6)


def test_what_is_free_is_taken_without_a_pause() -> None:
    clock = ManualClock()
    assert waiting(clock, 0, Busy(clock, 0).take) == "mine"
    assert clock.monotonic_ms() == 0


def test_patience_ends_and_the_answer_names_who_has_it() -> None:
    clock = ManualClock()
    busy = Busy(clock, 1000)
    with pytest.raises(ConflictError, match="somebody has it"):
        waiting(clock, 100, busy.take, pause_ms=20)
    assert (clock.monotonic_ms(), busy.asked) == (100, 6)


def test_another_error_is_not_waited_for() -> None:
    clock = ManualClock()

    def broken() -> None:
        raise UnavailableError("the disk is gone")

    with pytest.raises(UnavailableError):
        waiting(clock, 100, broken)
    assert clock.monotonic_ms() == 0
