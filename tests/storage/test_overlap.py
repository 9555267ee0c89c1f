"""A remote backend is asked several things at once: loads bring their packs together, and deletes go side by side."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from maintenance_steps import deleting, dumping, rehydrating
from threads import PATIENCE_S
from tidegate.errors import CorruptError, UnavailableError
from tidegate.storage.backends.base import MissingObjectError, Part, overlap
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.index import PlainState
from tidegate.storage.reader import RangeRequest
from workers import TASK, Worker, store

PACKS = 8


class FarAway(MemoryBackend):
    """A backend whose every read (or delete, or put of a pack) waits until `together` of them are under way."""

    is_remote = True

    def __init__(self) -> None:
        super().__init__()
        self.together: threading.Barrier | None = None
        self.refused: dict[str, BaseException] = {}
        self.calls: list[str] = []
        self.most = 0
        self._under_way = 0
        self._count = threading.Lock()

    def wait_for(self, together: int) -> None:
        self.together, self.most, self.calls = threading.Barrier(together, timeout=PATIENCE_S), 0, []

    def read(self, name: str) -> pa.Buffer:
        self._meet(name)
        return super().read(name)

    def put(self, name: str, parts: Sequence[Part]) -> None:
        if "/packs/" in name:
            self._meet(name)
        super().put(name, parts)

    def delete(self, name: str) -> None:
        self._meet(name)
        super().delete(name)

    def _meet(self, name: str) -> None:
        with self._count:
            self.calls.append(name)
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        try:
            if self.together is not None:
                self.together.wait()
            if name in self.refused:
                raise self.refused[name]
        finally:
            with self._count:
                self._under_way -= 1


def far_worker(backend: FarAway, **settings: Any) -> tuple[Worker, PlainState]:
    """A worker with eight buckets, each only in a pack of its own."""
    worker = Worker(backend=backend, **settings)
    state = worker.attach(store())
    for bucket in range(PACKS):
        worker.append(state, [(b"k%d" % key, 1000 * bucket + key, bucket) for key in range(3)])
    assert worker.run(dumping(worker.runtime, TASK, state, state.index.all_buckets(), evict=True)) == PACKS
    assert len(worker.objects("packs")) == PACKS
    return worker, state


def test_a_checkpoint_puts_what_several_stores_have_together() -> None:
    """While one store's pack is on its way, or being synced, the next one's is made."""
    backend = FarAway()
    worker = Worker(backend=backend, load_io_parallelism=4)
    states = [worker.attach(store(name=name)) for name in ("ids", "windows", "late")]
    for state in states:
        worker.append(state, [(b"k%d" % key, 1000 + key, key) for key in range(3)])
    backend.wait_for(3)
    token = worker.runtime.checkpoint(TASK)
    assert (backend.most, len(backend.calls)) == (3, 3)
    backend.together = None
    worker.runtime.apply_checkpoint(TASK, token)
    assert [read_all(worker, state) for state in states] == [3, 3, 3]


def read_all(worker: Worker, state: PlainState) -> int:
    reader = worker.runtime.reader()
    with reader.load(reader.plan(TASK, state, [RangeRequest([b"k0", b"k1", b"k2"])])) as loaded:
        return int(loaded.to_table().num_rows)


@pytest.mark.parametrize("at_once", [2, 4, 8])
def test_a_load_brings_its_packs_together_and_never_more_than_the_bound(at_once: int) -> None:
    backend = FarAway()
    worker, state = far_worker(backend, load_io_parallelism=at_once)
    backend.wait_for(at_once)
    assert read_all(worker, state) == 3 * PACKS
    assert backend.most == at_once and len(backend.calls) == PACKS
    backend.wait_for(1)
    assert read_all(worker, state) == 3 * PACKS and not backend.calls, "what is open is not read again"
    assert not any(worker.runtime.leaks())


def test_a_load_of_more_packs_than_may_be_open_brings_them_in_turns() -> None:
    backend = FarAway()
    worker, state = far_worker(backend, max_open_packs=4, load_io_parallelism=16)
    backend.wait_for(4)
    assert read_all(worker, state) == 3 * PACKS
    assert backend.most == 4 and len(backend.calls) == PACKS, "each once: none was closed before its turn"
    assert len(worker.runtime._parts.packs) == 4


def test_a_scan_opens_the_packs_of_the_next_buckets_together() -> None:
    backend = FarAway()
    worker, state = far_worker(backend, load_io_parallelism=4)
    backend.wait_for(4)
    assert len(worker.rows(state)) == 3 * PACKS
    assert backend.most == 4 and len(backend.calls) == PACKS
    worker.runtime._parts.packs.close()
    backend.wait_for(4)
    with worker.runtime.reader().scan(TASK, state) as scan:
        next(scan)
        assert len(backend.calls) == 4, "only so far ahead"
    assert not any(worker.runtime.leaks())


def test_one_key_and_maintenance_bring_packs_together_too() -> None:
    backend = FarAway()
    worker = Worker(backend=backend, load_io_parallelism=3)
    state = worker.attach(store())
    for batch in range(3):
        worker.append(state, [(b"k", 1000 + batch, batch)])
        worker.run(dumping(worker.runtime, TASK, state, [1000], evict=True))
    reader = worker.runtime.reader()
    backend.wait_for(3)
    with reader.load(reader.plan(TASK, state, [RangeRequest(b"k")])) as loaded:
        assert loaded.to_table().num_rows == 3
    worker.runtime._parts.packs.close()
    backend.wait_for(3)
    assert len(worker.rows(state)) == 3, "a scan, bucket by bucket"
    worker.runtime._parts.packs.close()
    backend.wait_for(3)
    assert worker.run(rehydrating(worker.runtime, TASK, state, 1000))
    assert backend.most == 3


def test_a_near_backend_is_read_on_the_callers_thread() -> None:
    backend = FarAway()
    backend.is_remote = False
    worker, state = far_worker(backend)
    backend.wait_for(1)
    assert read_all(worker, state) == 3 * PACKS
    assert backend.most == 1


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (UnavailableError("away"), UnavailableError),
        (MissingObjectError("gone", name="p"), MissingObjectError),
        (CorruptError("bad"), CorruptError),
    ],
)
def test_an_error_among_several_reads_is_raised_as_it_is_and_everything_is_given_back(
    error: Exception, raised: type[Exception]
) -> None:
    backend = FarAway()
    worker, state = far_worker(backend, load_io_parallelism=4)
    backend.refused = {worker.objects("packs")[5]: error}
    with pytest.raises(raised):
        read_all(worker, state)
    assert not any(worker.runtime.leaks())
    backend.refused = {}
    assert read_all(worker, state) == 3 * PACKS


@pytest.mark.parametrize("at_once", [3, 8])
def test_deletes_go_side_by_side_and_those_that_fail_stay_queued(at_once: int) -> None:
    backend = FarAway()
    worker, state = far_worker(backend, delete_parallelism=at_once, delete_backoff_ms=1000)
    packs = worker.objects("packs")
    backend.refused = {packs[1]: UnavailableError("away"), packs[6]: OSError("reset")}
    worker.runtime.writer().prune(TASK, state, 10**6)
    backend.wait_for(1)
    backend.together = threading.Barrier(2, timeout=PATIENCE_S)
    worker.run(deleting(worker.runtime, TASK))
    assert 2 <= backend.most <= at_once and sorted(backend.calls) == packs
    assert (
        set(worker.objects("packs"))
        == set(worker.runtime._parts.retirement.retired(TASK))
        == {packs[1], packs[6]}
    )
    assert (worker.counter("deleted_packs"), worker.counter("failed_deletes")) == (6, 2)
    backend.refused = {}
    worker.clock.advance(1000)
    worker.run(deleting(worker.runtime, TASK))
    assert not worker.objects("packs") and not worker.runtime._parts.retirement.retired(TASK)


@pytest.mark.parametrize(("at_once", "begins"), [(1, {0}), (2, {0, 1})])
def test_after_an_error_no_further_call_begins_and_the_first_is_raised(
    at_once: int, begins: set[int]
) -> None:
    begun: set[int] = set()
    together = threading.Barrier(at_once, timeout=PATIENCE_S)

    def call(item: int) -> None:
        begun.add(item)
        together.wait()
        raise UnavailableError(f"call {item}")

    with pytest.raises(UnavailableError, match="call 0"):
        overlap(call, range(at_once), at_most=at_once)
    assert begun == begins
    begun.clear()

    def fail(item: int) -> None:
        begun.add(item)
        raise UnavailableError(f"call {item}")

    with pytest.raises(UnavailableError):
        overlap(fail, range(1000 * at_once), at_most=at_once)
    assert len(begun) < 1000 * at_once
