"""The lease and the list of commits: one owner, an end, a fence, and bytes that are not theirs."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import msgspec
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import CorruptError, FencedError, InvalidError
from tidegate.randomness import SystemRandomness
from tidegate.storage import open_backend
from tidegate.tables.commits import Commits, Held, Lease, commits_name, load_commits, read_lease
from tidegate.tables.options import TableShape, table_rules
from tidegate.tables.snapshot import PartitionState

SHAPE: TableShape = table_rules("window", "topic", (0,), size="10ms").shape


@pytest.fixture
def backend() -> Any:
    return open_backend("memory://")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def lease(backend: Any, clock: ManualClock) -> Lease:
    return Lease(backend, "tables/t/lease", clock=clock, randomness=SystemRandomness(), ttl_ms=9000)


def test_of_many_that_try_at_once_one_gets_it(backend: Any, clock: ManualClock) -> None:
    outcomes: list[Held | None] = []
    gate = threading.Barrier(8)

    def attempt() -> None:
        mine = lease(backend, clock)
        gate.wait()
        outcomes.append(mine.acquire())

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(None) == 1


def test_a_lease_ends_and_its_epoch_grows(backend: Any, clock: ManualClock) -> None:
    first, second = lease(backend, clock), lease(backend, clock)
    assert first.acquire() is None
    held = second.acquire()
    assert held is not None
    assert (held.epoch, held.pid, held.host) == (1, os.getpid(), socket.gethostname())
    clock.advance("4s")
    first.keep()  # renewed until 13 s
    clock.advance("7s")
    assert second.acquire() is not None
    clock.advance("3s")
    assert second.acquire() is None
    assert second.epoch == 2
    with pytest.raises(FencedError):
        first.keep(force=True)
    first.release()  # gives nothing up that is not its own
    assert lease(backend, clock).acquire() is not None
    second.release()
    third = lease(backend, clock)
    assert third.acquire() is None
    assert third.epoch == 3


def test_a_dead_process_of_this_machine_holds_nothing(backend: Any, clock: ManualClock) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    gone = Held(4, "somebody", socket.gethostname(), pid, clock.now_ms() + 60_000)
    backend.publish("tables/t/lease", msgspec.msgpack.encode(gone), expected=None)
    mine = lease(backend, clock)
    assert mine.acquire() is None
    assert mine.epoch == 5


def test_a_process_of_another_machine_is_waited_for(backend: Any, clock: ManualClock) -> None:
    away = Held(4, "somebody", "elsewhere", 1, clock.now_ms() + 60_000)
    backend.publish("tables/t/lease", msgspec.msgpack.encode(away), expected=None)
    assert lease(backend, clock).acquire() == away
    clock.advance("61s")
    assert lease(backend, clock).acquire() is None


def test_a_new_builder_fences_the_one_before(backend: Any) -> None:
    old, new = Commits(backend, SHAPE, 1, ""), Commits(backend, SHAPE, 2, "")
    assert old.take_over() == ()
    first = old.add(b"token", {0: 5}, 3, 0)
    assert new.take_over() == (first,)
    with pytest.raises(FencedError):
        old.add(b"token", {0: 9}, 4, 0)
    with pytest.raises(FencedError):
        Commits(backend, SHAPE, 1, "").take_over()
    assert new.add(b"token", {0: 7}, 4, 0).number == 2


def test_another_shape_is_refused(backend: Any) -> None:
    Commits(backend, SHAPE, 1, "").take_over()
    other = msgspec.structs.replace(SHAPE, retention_ms=SHAPE.retention_ms + 1)
    with pytest.raises(InvalidError, match="retention_ms"):
        Commits(backend, other, 2, "").take_over()


@pytest.mark.parametrize("content", [b"", b"\x00\x01", b"\x84nonsense"])
def test_bytes_of_something_else_are_never_read_as_ours(backend: Any, content: bytes) -> None:
    backend.publish(commits_name("t"), content, expected=None)
    backend.publish("tables/t/lease", content, expected=None)
    with pytest.raises(CorruptError, match="cannot be read"):
        load_commits(backend, "t")
    with pytest.raises(CorruptError, match="cannot be read"):
        read_lease(backend, "tables/t/lease")
    if content:
        with pytest.raises(CorruptError, match="cannot be read"):
            PartitionState(SHAPE, 0).restore_progress(content)


def test_progress_comes_back_as_it_was() -> None:
    state = PartitionState(SHAPE, 0)
    state.next_offset, state.observed_ms, state.newest_ms, state.drainer = 7, 50, 60, b"drainer"
    state.counts.applied = 3
    again = PartitionState(SHAPE, 0)
    again.restore_progress(state.encode_progress())
    assert (again.next_offset, again.observed_ms, again.newest_ms, again.drainer) == (7, 50, 60, b"drainer")
    assert again.counts == state.counts
