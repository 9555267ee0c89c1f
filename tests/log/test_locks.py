"""Who may write: one process a partition, brokers kept out, the dead forgotten, forks refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock, SystemClock
from tidegate.errors import ConflictError
from tidegate.files import Files
from tidegate.log.locks import changing_folder, lock_against_brokers, lock_partition
from tidegate.log.log import Log

HOLD_AND_WAIT = """
import sys, pyarrow as pa
from tidegate.log.log import Log
log = Log(sys.argv[1], durability="os")
log.writer("orders").write(pa.table({"value": [b"from another process"]}), partition=0)
print("written", flush=True)
sys.stdin.readline()
log.close()
print("closed", flush=True)
"""

BROKER = """
import sys, fcntl
file = open(sys.argv[1] + "/.lock", "w")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
print("locked", flush=True)
sys.stdin.readline()
"""


@contextmanager
def process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Another Python, which has said its first word."""
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline().strip()
            yield child
        finally:
            child.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("orders", 2)
    return tmp_path / "log"


def test_a_second_writer_in_another_process_fails_at_once_and_is_told_who_writes(folder: Path) -> None:
    with process(HOLD_AND_WAIT, str(folder)) as other, Log(folder, durability="os") as log:
        with pytest.raises(
            ConflictError, match=f"partition orders-0 is being written by process {other.pid}"
        ):
            log.partition("orders", 0)
        log.writer("orders").write(pa.table({"value": [b"x"]}), partition=1)
        assert log.reader("orders", [0]).read_all().num_rows == 1  # reading needs no lock
        other.communicate("go on\n", timeout=600)
        assert log.partition("orders", 0).log_end_offset == 1


def test_a_second_log_in_the_same_process_is_refused_too(folder: Path) -> None:
    with Log(folder) as first, Log(folder) as second:
        first.partition("orders", 0)
        with pytest.raises(ConflictError, match="this process"):
            second.partition("orders", 0)


def test_a_dead_writers_lock_does_not_block(folder: Path) -> None:
    with process(HOLD_AND_WAIT, str(folder)) as other:
        other.send_signal(signal.SIGKILL)
        other.wait(60)
        with Log(folder, durability="os") as log:
            assert log.partition("orders", 0).log_end_offset == 1  # the acknowledged record survived


def test_use_after_fork_is_refused_and_the_parents_lock_stays(folder: Path) -> None:
    with Log(folder, durability="os") as log:
        writer = log.writer("orders")
        writer.write(pa.table({"value": [b"parent"]}), partition=0)
        child = os.fork()
        if child == 0:  # pragma: no cover - runs in the child
            outcome = 1
            try:
                writer.write(pa.table({"value": [b"child"]}), partition=0)
            except ConflictError as error:
                outcome = 0 if "fork" in str(error) else 2
            log.close()
            os._exit(outcome)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with Log(folder) as second, pytest.raises(ConflictError):
            second.partition("orders", 0)
        writer.write(pa.table({"value": [b"parent again"]}), partition=0)
        assert log.partition("orders", 0).log_end_offset == 2


def test_a_forked_child_that_outlives_its_parent_holds_no_lock(folder: Path) -> None:
    script = HOLD_AND_WAIT.replace(
        "sys.stdin.readline()",
        "import os\nif os.fork() == 0:\n    sys.stdin.readline(); os._exit(0)\nos._exit(0)",
    )
    with process(script, str(folder)) as parent:
        parent.wait(60)
        with Log(folder, durability="os") as log:
            assert log.partition("orders", 0).log_end_offset == 1


def test_a_running_broker_keeps_us_out_and_we_keep_it_out(folder: Path) -> None:
    with process(BROKER, str(folder)), Log(folder) as log:
        with pytest.raises(ConflictError, match="in use by a Kafka broker"):
            log.partition("orders", 0)
        assert log.topics() == ["orders"]
    with Log(folder) as log:
        log.partition("orders", 0)
        refused = subprocess.run(
            [sys.executable, "-c", BROKER, str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert refused.returncode != 0
    allowed = subprocess.run(
        [sys.executable, "-c", BROKER, str(folder)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert allowed.stdout.strip() == "locked"


def test_two_logs_share_the_folder_and_both_keep_brokers_out(tmp_path: Path) -> None:
    files = Files()
    first, second = lock_against_brokers(files, tmp_path), lock_against_brokers(files, tmp_path)
    first.release()
    with pytest.raises(ConflictError):
        files.lock(tmp_path / ".lock", posix=True)
    second.release()
    files.lock(tmp_path / ".lock", posix=True).release()


def test_the_short_lock_is_waited_for_and_then_given_up_on(tmp_path: Path) -> None:
    files, clock = Files(), ManualClock()
    with changing_folder(files, tmp_path, clock):
        with (
            pytest.raises(ConflictError, match="over 3 s"),
            changing_folder(files, tmp_path, clock, wait_ms=3000),
        ):
            pass
        assert clock.monotonic_ms() >= 3000
    with changing_folder(files, tmp_path, clock):
        pass


def test_only_maintenance_is_waited_for(tmp_path: Path) -> None:
    files, clock = Files(), ManualClock()
    with lock_partition(files, tmp_path, clock), pytest.raises(ConflictError, match="written"):
        lock_partition(files, tmp_path, clock)
    assert clock.monotonic_ms() == 0
    with lock_partition(files, tmp_path, clock, briefly=True), pytest.raises(ConflictError, match="cleaned"):
        lock_partition(files, tmp_path, clock)
    assert clock.monotonic_ms() >= 5000
    lock_partition(files, tmp_path, SystemClock()).release()


def test_a_topic_can_be_created_while_another_process_writes(folder: Path) -> None:
    with process(HOLD_AND_WAIT, str(folder)), Log(folder) as log:
        log.create_topic("more", 1)
        with pytest.raises(ConflictError, match="orders-0"):
            log.delete_topic("orders")
        assert log.topics() == ["more", "orders"]
