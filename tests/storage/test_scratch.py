"""Scratch permits: a bounded number of operations, shared by the views of one load, given back exactly once."""

from __future__ import annotations

from typing import Any

import pytest

from threads import Beside, until
from tidegate.clock import Clock, ManualClock, SystemClock
from tidegate.errors import OverloadError
from tidegate.storage import scratch
from tidegate.storage.scratch import Scratch, ScratchLimiter


def limiter_of(clock: Clock | None = None, **changes: Any) -> ScratchLimiter:
    settings = {"reader_slots": 1, "maintenance_slots": 1, "timeout_ms": 600_000} | changes
    return ScratchLimiter(clock or ManualClock(), **settings)


@pytest.mark.parametrize("kind", [pytest.param(each, id=f"WS-T57-{each}") for each in Scratch])
def test_a_second_load_waits_until_the_last_view_of_the_first_is_closed(kind: Scratch) -> None:
    limiter = limiter_of(SystemClock())
    first = limiter.permit(kind)
    views = [limiter.permit(kind) for _ in range(3)]
    first.close()
    second = Beside(lambda: limiter.permit(kind))
    until(lambda: limiter.waiting(kind) == 1)
    for view in views[:2]:
        view.close()
    assert limiter.waiting(kind) == 1 and limiter.in_use(kind) == 1
    views[2].close()
    second.result().close()
    assert limiter.in_use(kind) == 0 and limiter.waiting(kind) == 0


@pytest.mark.parametrize("depth", [pytest.param(3, id="WS-T58")])
def test_a_load_inside_a_load_is_granted_on_the_held_permit(depth: int) -> None:
    """On one slot and one thread: no deadlock, and the slot is free only when all are closed."""
    limiter = limiter_of()
    permits = [limiter.permit() for _ in range(depth)]
    assert limiter.in_use(Scratch.READER) == 1
    permits[0].close()
    permits[1].close()
    assert limiter.in_use(Scratch.READER) == 1
    permits[2].close()
    assert limiter.in_use(Scratch.READER) == 0


def test_another_threads_load_is_not_let_in_on_my_permit() -> None:
    limiter = limiter_of(ManualClock(), timeout_ms=300)
    with limiter.permit():
        other = Beside(limiter.permit)
        with pytest.raises(OverloadError, match="max_inflight_loads") as caught:
            other.result()
    assert caught.value.reason == "scratch"


def test_maintenance_has_slots_of_its_own() -> None:
    limiter = limiter_of()
    with limiter.permit(Scratch.READER), limiter.permit(Scratch.MAINTENANCE):
        assert [limiter.in_use(kind) for kind in Scratch] == [1, 1]
    assert [limiter.in_use(kind) for kind in Scratch] == [0, 0]


def test_trying_never_waits_and_never_shares() -> None:
    limiter = limiter_of(maintenance_slots=2)
    taken = [limiter.try_permit(Scratch.MAINTENANCE) for _ in range(3)]
    assert [permit is None for permit in taken] == [False, False, True]
    assert limiter.in_use(Scratch.MAINTENANCE) == 2


@pytest.mark.parametrize(
    "closes", [pytest.param(1, id="WS-INV-13-once"), pytest.param(3, id="WS-INV-13-again")]
)
def test_a_permit_is_given_back_exactly_once(closes: int) -> None:
    limiter = limiter_of(reader_slots=2)
    permit, other = limiter.permit(), Beside(limiter.permit).result()
    for _ in range(closes):
        permit.close()
    assert limiter.in_use(Scratch.READER) == 1
    other.close()
    assert limiter.in_use(Scratch.READER) == 0


def test_closing_one_view_again_does_not_close_another() -> None:
    """WS-INV-13: each holder counts once, however often it is closed."""
    limiter = limiter_of()
    permit = limiter.permit()
    view = limiter.permit()
    for _ in range(3):
        permit.close()
    assert limiter.in_use(Scratch.READER) == 1
    view.close()
    assert limiter.in_use(Scratch.READER) == 0


def test_an_error_gives_the_permit_back() -> None:
    """WS-INV-13: also on the way out of a failure."""
    limiter = limiter_of()
    with pytest.raises(ZeroDivisionError), limiter.permit(), limiter.permit():
        raise ZeroDivisionError
    assert limiter.in_use(Scratch.READER) == 0


def test_a_hundred_loads_on_three_slots_never_exceed_them() -> None:
    limiter = limiter_of(SystemClock(), reader_slots=3)
    most: list[int] = []

    def load() -> None:
        for _ in range(50):
            with limiter.permit():
                shared = limiter.permit()
                most.append(limiter.in_use(Scratch.READER))
            shared.close()

    for thread in [Beside(load) for _ in range(8)]:
        thread.result()
    assert max(most) <= 3 and limiter.in_use(Scratch.READER) == 0


# -- bytes ---------------------------------------------------------------------------------------

MIB = 1 << 20


def test_bytes_that_can_never_be_had_are_refused_at_once_with_what_they_are_for() -> None:
    limiter = limiter_of(working_bytes=10 * MIB)
    with limiter.hold(10 * MIB, str):
        pass
    with pytest.raises(
        OverloadError, match=r"the window of ann needs about 11 MiB.*memory_ceiling_bytes"
    ) as told:
        limiter.hold(11 * MIB, lambda: "the window of ann").__enter__()
    assert told.value.reason == "window_state"


def test_who_asks_for_bytes_waits_for_those_who_hold_some() -> None:
    limiter = limiter_of(SystemClock(), working_bytes=10 * MIB)
    order: list[str] = []

    def second() -> None:
        with limiter.hold(6 * MIB, str):
            order.append("second")

    with limiter.hold(6 * MIB, str):
        beside = Beside(second)
        until(lambda: len(limiter._bytes_line) == 1)
        order.append("first")
    beside.result()
    assert order == ["first", "second"]


def test_a_thread_that_holds_bytes_never_waits_for_its_own() -> None:
    limiter = limiter_of(timeout_ms=0, working_bytes=10 * MIB)
    with limiter.hold(6 * MIB, str), limiter.hold(6 * MIB, str):
        pass
    with limiter.hold(10 * MIB, str):
        pass


def test_a_wait_for_bytes_ends() -> None:
    limiter = limiter_of(SystemClock(), timeout_ms=0, working_bytes=10 * MIB)

    def second() -> str | None:
        try:
            with limiter.hold(6 * MIB, lambda: "a merge"):
                return "had"
        except OverloadError as error:
            return error.reason

    with limiter.hold(6 * MIB, str):
        assert Beside(second).result() == "scratch"


@pytest.mark.parametrize(("share", "is_returned"), [(8, True), (9, False)])
def test_a_large_merge_returns_freed_memory_when_it_ends(
    share: int, is_returned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4: an eighth of working memory and more is large."""
    limiter = limiter_of(working_bytes=2 * MIB * share)
    told: list[str] = []

    class Pool:
        def release_unused(self) -> None:
            told.append("released")

    monkeypatch.setattr(scratch.pa, "default_memory_pool", Pool)
    with pytest.raises(ZeroDivisionError), limiter.hold(2 * MIB, str):
        told.append("merged")
        raise ZeroDivisionError
    assert told == ["merged", "released"] if is_returned else told == ["merged"]
