"""Time as a port."""

from __future__ import annotations

import threading
import time

from tidegate.clock import Clock, ManualClock, SystemClock


def test_the_system_clock_tells_the_machines_time() -> None:
    clock: Clock = SystemClock()
    before = time.time() * 1000
    assert abs(clock.now_ms() - before) < 5_000
    assert isinstance(clock.now_ms(), int)


def test_monotonic_time_of_the_system_never_goes_back() -> None:
    clock = SystemClock()
    readings = [clock.monotonic_ms() for _ in range(1000)]
    assert readings == sorted(readings)


def test_the_system_clock_sleeps_at_least_as_long_as_asked_and_not_for_negative_times() -> None:
    clock = SystemClock()
    start = time.monotonic()
    clock.sleep_ms(-5)
    clock.sleep_ms(20)
    assert time.monotonic() - start >= 0.015


def test_a_manual_clock_stands_still_until_it_is_advanced() -> None:
    clock = ManualClock()
    assert (clock.now_ms(), clock.monotonic_ms()) == (1_767_225_600_000, 0)
    clock.advance("5m")
    clock.advance(1)
    assert (clock.now_ms(), clock.monotonic_ms()) == (1_767_225_900_001, 300_001)


def test_sleeping_on_a_manual_clock_lets_its_time_pass_at_once() -> None:
    clock: Clock = ManualClock(0)
    clock.sleep_ms(3_600_000)
    clock.sleep_ms(-1)
    assert clock.now_ms() == clock.monotonic_ms() == 3_600_000


def test_a_jump_moves_the_wall_clock_but_not_monotonic_time() -> None:
    clock = ManualClock(1000)
    clock.set_now_ms(10)
    assert (clock.now_ms(), clock.monotonic_ms()) == (10, 0)
    clock.set_now_ms(10**12)
    assert (clock.now_ms(), clock.monotonic_ms()) == (10**12, 0)


def test_a_manual_clock_loses_no_step_when_threads_share_it() -> None:
    clock = ManualClock(0)
    threads = [threading.Thread(target=lambda: [clock.advance(1) for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.now_ms() == clock.monotonic_ms() == 8000
