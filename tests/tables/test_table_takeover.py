"""A table whose builder is gone: whoever follows it, or waits for more of it, goes on building it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from table_records import window_record, windows_in, write_records
from tidegate.clock import ManualClock, SystemClock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.log.log import Log
from tidegate.tables.commits import Successor
from tidegate.tables.factories import WindowedTable, windowed_table

TOPIC = "windows-changelog"


def write(log: Log, first: int, count: int) -> None:
    said = [window_record(b"key-%d" % (n % 7), n // 7 * 10, b"%d" % n) for n in range(first, first + count)]
    write_records(log, TOPIC, said)


def expected(count: int) -> dict[Any, Any]:
    return {
        (b"key-%d" % (n % 7), n // 7 * 10, n // 7 * 10 + 10): (b"%d" % n, n // 7 * 10) for n in range(count)
    }


def opened(log: Log, tmp_path: Path, **settings: Any) -> WindowedTable:
    return windowed_table(log, TOPIC, "10ms", state=tmp_path / "state", **settings)


def dies(table: WindowedTable) -> None:
    """As after kill -9: nothing is committed, given back or told."""
    builder = table._builder
    assert builder is not None
    builder._tail.close()
    builder.source.runtime.close()
    table._closed = True


def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    clock, deadline = SystemClock(), time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        clock.sleep_ms(20)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def log(tmp_path: Path, clock: ManualClock) -> Any:
    with Log(tmp_path / "log", durability="os", clock=clock) as opened_log:
        opened_log.create_topic(TOPIC)
        yield opened_log


def test_whoever_waits_for_a_table_that_nobody_builds_builds_it(
    log: Log, tmp_path: Path, clock: ManualClock
) -> None:
    write(log, 0, 20)
    first = opened(log, tmp_path)
    with opened(log, tmp_path) as second:
        assert (first.role, second.role) == ("builder", "reader")
        dies(first)
        write(log, 20, 20)
        assert windows_in(second) == expected(20), "asking takes nothing over"
        assert second.role == "reader"
        clock.advance("11s")  # the dead one's lease ends
        second.catch_up()
        assert second.role == "builder"
        assert windows_in(second) == expected(40)
        assert second.position == {0: 40}
        assert second.commits()[-1].positions == {0: 40}
        with opened(log, tmp_path) as third:
            assert third.role == "reader"
            assert windows_in(third) == expected(40)


def test_waiting_for_a_position_takes_over_too(log: Log, tmp_path: Path, clock: ManualClock) -> None:
    write(log, 0, 20)
    first = opened(log, tmp_path)
    with opened(log, tmp_path) as second:
        write(log, 20, 20)
        with pytest.raises(UnavailableError):
            second.get(b"key-0", 0, at_least={0: 40}, timeout=50)
        assert second.role == "reader", "the first one lives, and builds when it likes"
        dies(first)
        assert second.get(b"key-4", 50, at_least={0: 40}, timeout="20s") == b"39"
        assert second.role == "builder"


def test_a_read_only_table_never_takes_over(log: Log, tmp_path: Path, clock: ManualClock) -> None:
    write(log, 0, 20)
    first = opened(log, tmp_path)
    with opened(log, tmp_path, read_only=True, follow=True) as second:
        dies(first)
        write(log, 20, 20)
        clock.advance("1m")
        with pytest.raises(UnavailableError, match="look whether the process that builds it runs"):
            second.catch_up(50)
        assert second.role == "reader"
        assert windows_in(second) == expected(20)


def test_a_builder_that_closes_hands_over_at_once(tmp_path: Path) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic(TOPIC)
        write(log, 0, 20)
        first = opened(log, tmp_path)
        with opened(log, tmp_path, follow=True) as second:
            assert second.role == "reader"
            first.close()
            until(lambda: second.role == "builder", "the second one to take over")
            with second.changes() as changes:
                write(log, 20, 20)
                second.catch_up("20s")
                assert len(changes.take("10s")) > 0, "a table taken over tells its changes"
            assert windows_in(second) == expected(40)


def test_a_table_that_cannot_be_taken_over_says_why_to_whoever_waits() -> None:
    asked = []

    def attempt() -> None:
        asked.append(1)
        raise UnavailableError("later") if len(asked) < 3 else InvalidError("another shape")

    successor = Successor(attempt, 1, SystemClock())
    successor.start()
    until(lambda: successor.error is not None, "the watch to end")
    assert len(asked) == 3, "what passes by itself is tried again"
    with pytest.raises(InvalidError, match="another shape"):
        successor.check()
    successor.stop()


def test_no_lease_is_left_behind_by_settings_that_are_refused(log: Log, tmp_path: Path) -> None:
    from tidegate.storage import StorageConfig

    with pytest.raises(InvalidError, match="retained_checkpoints"):
        opened(log, tmp_path, storage=StorageConfig(retained_checkpoints=2))
    with opened(log, tmp_path) as table:
        assert table.role == "builder"


# -- real processes ------------------------------------------------------------------------------

FOLLOWER = """
import sys
from tidegate.clock import SystemClock
from tidegate.tables.factories import windowed_table
from tidegate.tables.ingest.materializer import Cadence
table = windowed_table(sys.argv[1], "windows-changelog", "10ms", state=sys.argv[2], follow=True, bootstrap=False,
                       cadence=Cadence(commit_interval_ms=20))
role, clock = "", SystemClock()
while True:
    if table.role != role:
        role = table.role
        print(role, flush=True)
    clock.sleep_ms(5)
"""


def start_follower(tmp_path: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-c", textwrap.dedent(FOLLOWER), str(tmp_path / "log"), str(tmp_path / "state"),
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def test_a_following_process_goes_on_when_the_builder_is_killed(tmp_path: Path) -> None:
    """Two processes follow one table; the one that builds it is killed -9, and the other builds on."""
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic(TOPIC)
        write(log, 0, 50)
        builder = start_follower(tmp_path)
        follower: subprocess.Popen[str] | None = None
        try:
            assert said(builder) == "builder"
            follower = start_follower(tmp_path)
            assert said(follower) == "reader"
            with opened(log, tmp_path, read_only=True) as watching:
                watching.catch_up("60s")
                assert windows_in(watching) == expected(50)
                end(builder)
                write(log, 50, 50)
                assert said(follower) == "builder"
                watching.catch_up("60s")
                assert watching.role == "reader"
                assert windows_in(watching) == expected(100)
                write(log, 100, 50)
                watching.catch_up("60s")
                assert windows_in(watching) == expected(150)
        finally:
            end(builder)
            if follower is not None:
                end(follower)
