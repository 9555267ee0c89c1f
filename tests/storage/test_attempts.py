"""Several processes on one task: each goes on from the token it is given, and only their master deletes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from backend_faults import BackendRecorder, WatchedBackend
from maintenance_steps import compacting, deleting, dumping, repacking
from tidegate.clock import ManualClock
from tidegate.errors import InvalidError
from tidegate.randomness import SeededRandomness
from tidegate.storage.backends.base import MissingObjectError
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import BucketIndex, PlainState
from tidegate.storage.runtime import WorkerStorageRuntime
from tidegate.storage.spec import Merge
from tidegate.storage.state import BytesCodec
from workers import TASK, Row, Worker, rows_batch, store

ATTEMPT = """
import sys
from pathlib import Path
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.runtime import WorkerStorageRuntime
from workers import TASK, rows_batch, store

folder, token, first = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3])
with WorkerStorageRuntime.open(StorageConfig.for_tests(deleted_by="master"), FolderBackend(folder)) as runtime:
    runtime.apply_checkpoint(TASK, token)
    events = store()
    runtime.attach(TASK, events)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(first, first + 5):
        rows = [(b"k%d" % (at % 7), 1000 + at, at) for at in range(100 * number, 100 * number + 100)]
        batch = rows_batch(events.index.spec.merge, rows)
        events.index.insert(runtime.writer().append(TASK, events, batch))
        runtime.maintain(TASK, 1000)
        last = runtime.checkpoint(TASK)
    while not runtime.maintain(TASK, 1000):
        pass
    print(last.hex(), flush=True)
"""


class Extra(PlainState):
    """A state with something of its own in the checkpoint."""

    def __init__(self, index: BucketIndex) -> None:
        super().__init__(index)
        self.position = b"0"

    def encode_progress(self) -> bytes:
        return self.position

    def restore_progress(self, data: bytes) -> None:
        self.position = data or b"0"


def rows(count: int, *, start: int = 0, ts: int = 1000) -> list[Row]:
    return [(b"k%d" % (position % 7), ts + position, position) for position in range(start, start + count)]


def restored(backend: object, token: bytes) -> list[Row]:
    """What a fresh process finds at the token."""
    worker = Worker(backend=backend, deleted_by="master")  # type: ignore[arg-type]
    worker.runtime.apply_checkpoint(TASK, token)
    return worker.rows(worker.attach(store()))


# ── two attempts at once ─────────────────────────────────────────────────────────────────────────────────────


def test_two_processes_go_on_from_one_token_and_neither_hurts_the_other_or_the_base(tmp_path: Path) -> None:
    backend = FolderBackend(tmp_path)
    worker = Worker(backend=backend, deleted_by="master")
    events = worker.attach(store())
    worker.append(events, rows(100))
    base = worker.runtime.checkpoint(TASK)
    before = {name: backend.read(name).to_pybytes() for name in worker.objects()}
    attempts = [
        subprocess.Popen(
            [sys.executable, "-c", ATTEMPT, str(tmp_path), base.hex(), str(first)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for first in (1, 11)
    ]  # fmt: skip
    try:
        for attempt in attempts:
            assert attempt.stdout is not None
            assert attempt.stdout.readline() == "ready\n"
        for attempt in attempts:
            assert attempt.stdin is not None
            attempt.stdin.write("go\n")
            attempt.stdin.flush()
        tokens = [bytes.fromhex(attempt.communicate(timeout=600)[0].strip()) for attempt in attempts]
    finally:
        for attempt in attempts:
            attempt.kill()
            attempt.wait()
    assert {name: backend.read(name).to_pybytes() for name in before} == before
    assert restored(backend, base) == sorted(rows(100))
    for token, first in zip(tokens, (100, 1100), strict=True):
        assert restored(backend, token) == sorted(rows(100) + rows(500, start=first))
    # The master takes the second: what only the first made goes, also in a process that never had the task.
    with WorkerStorageRuntime.open(StorageConfig(deleted_by="master"), FolderBackend(tmp_path)) as master:
        assert master.collect_garbage(TASK, [base, *tokens], grace_ms=3_600_000).removed == ()
        assert master.collect_garbage(TASK, [tokens[1]], grace_ms=0).removed
    assert restored(backend, tokens[1]) == sorted(rows(100) + rows(500, start=1100))
    with pytest.raises(MissingObjectError):
        restored(backend, tokens[0])


@pytest.mark.parametrize("seed", range(12))
def test_whatever_attempts_do_each_committed_token_brings_its_rows_back(seed: int) -> None:
    """Attempts in two processes, some given up half-way, a driver that commits one of them and collects at times."""
    chance, clock = SeededRandomness(seed), ManualClock()
    backend = MemoryBackend(clock=clock, randomness=SeededRandomness(seed + 100))
    workers = [
        Worker(backend=backend, clock=clock, seed=seed * 10 + number, deleted_by="master", max_run_rows=64)
        for number in range(2)
    ]
    merge = [Merge.APPEND, Merge.LAST][seed % 2]
    states = [worker.attach(store(merge)) for worker in workers]
    blobs = [worker.runtime.state_handle(TASK, "seen", BytesCodec()) for worker in workers]
    committed: list[tuple[bytes | None, list[Row], int]] = [(None, [], 0)]
    for turn in range(1, 25):
        token, known, blob = committed[-1]
        results = []
        for number in [[0], [1], [0, 1], [1, 0]][chance.below(4)]:
            worker, events = workers[number], states[number]
            if not worker.runtime.is_at(TASK, token):
                worker.runtime.apply_checkpoint(TASK, token)
            assert worker.runtime.is_at(TASK, token)
            assert worker.rows(events) == known
            assert (blobs[number].get(b"n") or b"0") == b"%d" % blob
            places = range(41 * turn, 41 * turn + 1 + chance.below(40))
            new = [(b"k%d" % (place % 7), place * 37 % 5003, place) for place in places]
            worker.append(events, new)
            blobs[number].put(b"n", b"%d" % turn)
            if chance.below(3) == 0:
                worker.runtime.maintain(TASK, 1000)
            if chance.below(4) == 0:
                continue  # given up: dirty, and not told
            after = worker.runtime.checkpoint(TASK)
            if chance.below(3) == 0:
                worker.runtime.maintain(TASK, 1000)
            results.append((after, sorted([*known, *new]), turn))
        if results:
            committed.append(results[chance.below(len(results))])
        if chance.below(3) == 0:
            clock.advance("2h")
            kept = [token for token, _, _ in committed[-2:] if token is not None]
            workers[chance.below(2)].runtime.collect_garbage(TASK, kept)
    fresh = Worker(backend=backend, deleted_by="master")
    for token, known, _ in committed[-2:]:
        fresh.runtime.apply_checkpoint(TASK, token)
        if token is not None and not fresh.parts.tasks.get(TASK).stores:
            fresh_state = fresh.attach(store(merge))
        assert fresh.rows(fresh_state) == known


# ── who deletes ──────────────────────────────────────────────────────────────────────────────────────────────


def test_with_a_master_a_worker_deletes_nothing_whatever_it_does() -> None:
    recorder, clock = BackendRecorder(), ManualClock()
    backend = WatchedBackend(MemoryBackend(clock=clock), recorder)
    worker = Worker(backend=backend, clock=clock, deleted_by="master", retained_checkpoints=1)
    events = worker.attach(store())
    tokens, contents = [], []
    for number in range(12):
        worker.append(events, rows(50, start=50 * number, ts=100 * number))
        for bucket in events.index.all_buckets():
            worker.run(compacting(worker.runtime, TASK, events, bucket))
        worker.runtime.writer().prune(TASK, events, 60 * number)
        tokens.append(worker.runtime.checkpoint(TASK))
        contents.append(worker.rows(events))
        worker.run(dumping(worker.runtime, TASK, events, events.index.all_buckets(), evict=True))
        worker.run(repacking(worker.runtime, TASK))
        worker.run(deleting(worker.runtime, TASK))
    worker.runtime.writer().prune(TASK, events, 10**9)
    while not worker.runtime.maintain(TASK, 1000):
        pass
    worker.runtime.detach(TASK)
    assert not [effect for effect in recorder.effects if effect.kind == "delete"]
    for token, content in zip(tokens, contents, strict=True):
        assert restored(worker.backend, token) == content
    assert worker.runtime.collect_garbage(TASK, tokens[-1:], grace_ms=0).removed
    assert restored(worker.backend, tokens[-1]) == contents[-1]


def test_dead_packs_are_not_remembered_where_nobody_deletes_them() -> None:
    worker = Worker(deleted_by="master")
    events = worker.attach(store())
    for number in range(10):
        worker.append(events, rows(20, start=20 * number, ts=2000 * number))
        worker.runtime.checkpoint(TASK)
        worker.runtime.writer().prune(TASK, events, 2000 * (number + 1))
    worker.runtime.checkpoint(TASK)
    assert worker.parts.use.reclaimable(TASK) == 0
    assert worker.parts.use.packs(TASK) == worker.parts.holds.packs(TASK) == frozenset()
    assert len(worker.objects(".pack")) == 10


def test_collecting_reads_manifests_only_and_each_once() -> None:
    recorder, clock = BackendRecorder(), ManualClock()
    worker = Worker(backend=MemoryBackend(clock=clock), clock=clock, deleted_by="master")
    events = worker.attach(store())
    tokens = []
    for number in range(30):
        worker.append(events, rows(10, start=10 * number, ts=1000 * number))
        tokens.append(worker.runtime.checkpoint(TASK))
    master = Worker(backend=WatchedBackend(worker.backend, recorder), clock=clock, deleted_by="master")
    report = master.runtime.collect_garbage(TASK, tokens[-8:], grace_ms=0)
    assert report.removed
    reads = [effect.name for effect in recorder.effects if effect.kind == "read"]
    assert reads
    assert all(name.endswith(".manifest") for name in reads)
    assert len(reads) == len(set(reads))
    for token, known in zip(tokens[-8:], range(230, 310, 10), strict=True):
        fresh = Worker(backend=worker.backend)
        fresh.runtime.apply_checkpoint(TASK, token)
        assert len(fresh.rows(fresh.attach(store()))) == known


@pytest.mark.parametrize("deleter", ["", "nobody", 1, True])
def test_who_deletes_is_the_worker_or_the_master(deleter: object) -> None:
    with pytest.raises(InvalidError, match="deleted_by"):
        StorageConfig.for_tests(deleted_by=deleter)


# ── where a task is ──────────────────────────────────────────────────────────────────────────────────────────


def append(worker: Worker, events: Extra) -> None:
    worker.append(events, rows(1, start=77))


def prune(worker: Worker, events: Extra) -> None:
    worker.runtime.writer().prune(TASK, events, 10**9)


def put(worker: Worker, events: Extra) -> None:
    worker.runtime.state_handle(TASK, "seen", BytesCodec()).put(b"k", b"new")


def delete(worker: Worker, events: Extra) -> None:
    worker.runtime.state_handle(TASK, "seen", BytesCodec()).delete(b"k")


def progress(worker: Worker, events: Extra) -> None:
    events.position = b"1"


def undone(worker: Worker, events: Extra) -> None:
    writer = worker.runtime.writer()
    writer.undo(TASK, writer.append(TASK, events, rows_batch(Merge.APPEND, rows(3))))


def detach(worker: Worker, events: Extra) -> None:
    worker.runtime.detach(TASK, events)
    worker.attach(store())


CHANGES = [append, prune, put, delete, progress, undone, detach]


def compact(worker: Worker, events: Extra) -> None:
    for bucket in events.index.all_buckets():
        worker.run(compacting(worker.runtime, TASK, events, bucket))


def evict(worker: Worker, events: Extra) -> None:
    worker.run(dumping(worker.runtime, TASK, events, events.index.all_buckets(), evict=True))


def read(worker: Worker, events: Extra) -> None:
    worker.rows(events)
    worker.runtime.state_handle(TASK, "seen", BytesCodec()).get(b"k")


def prune_nothing(worker: Worker, events: Extra) -> None:
    worker.runtime.writer().prune(TASK, events, 0)


KEEPS = [compact, evict, read, prune_nothing]


def at_a_token(*, fresh: bool, deleted_by: str = "master") -> tuple[Worker, Extra, bytes]:
    """A task at its checkpoint: because it made it, or because it was restored."""
    clock = ManualClock()
    worker = Worker(backend=MemoryBackend(clock=clock), clock=clock, deleted_by=deleted_by)
    events = Extra(store().index)
    worker.attach(events)
    worker.append(events, rows(10))
    worker.append(events, rows(10, start=10))
    worker.runtime.state_handle(TASK, "seen", BytesCodec()).put(b"k", b"old")
    token = worker.runtime.checkpoint(TASK)
    if fresh:
        worker = Worker(backend=worker.backend, clock=clock, deleted_by=deleted_by, seed=5)
        worker.runtime.apply_checkpoint(TASK, token)
        assert worker.runtime.is_at(TASK, token), "before its stores are attached"
        events = Extra(store().index)
        worker.attach(events)
        worker.runtime.state_handle(TASK, "seen", BytesCodec())
    return worker, events, token


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_task_that_changed_is_not_at_its_token_and_goes_back_to_it(
    change: Callable[[Worker, Extra], None], fresh: bool
) -> None:
    worker, events, token = at_a_token(fresh=fresh)
    assert worker.runtime.is_at(TASK, token)
    assert not worker.runtime.is_at(TASK, None)
    change(worker, events)
    assert not worker.runtime.is_at(TASK, token)
    worker.runtime.apply_checkpoint(TASK, token)
    assert worker.runtime.is_at(TASK, token)
    attached = worker.parts.tasks.get(TASK).stores["events"].state
    assert worker.rows(attached) == sorted(rows(20))  # type: ignore[arg-type]
    assert worker.runtime.state_handle(TASK, "seen", BytesCodec()).get(b"k") == b"old"
    assert events.position == b"0" or change is detach
    assert worker.parts.backlog.used == worker.runtime.charge_of(TASK)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("keep", KEEPS)
def test_maintenance_and_reading_leave_a_task_at_its_token(
    keep: Callable[[Worker, Extra], None], fresh: bool
) -> None:
    worker, events, token = at_a_token(fresh=fresh)
    keep(worker, events)
    assert worker.runtime.is_at(TASK, token)
    recorded = worker.counter("restores")
    worker.runtime.apply_checkpoint(TASK, token)
    assert worker.counter("restores") == recorded, "nothing to restore"
    assert worker.rows(events) == sorted(rows(20))


def test_a_task_goes_back_to_the_beginning() -> None:
    worker = Worker(deleted_by="master")
    assert worker.runtime.is_at("never seen", None)
    events = Extra(store().index)
    worker.attach(events)
    assert worker.runtime.is_at(TASK, None)
    append(worker, events)
    events.position = b"9"
    first = worker.runtime.checkpoint(TASK)
    append(worker, events)
    assert not worker.runtime.is_at(TASK, None)
    worker.runtime.apply_checkpoint(TASK, None)
    assert worker.runtime.is_at(TASK, None)
    assert worker.rows(events) == []
    assert events.position == b"0"
    assert worker.parts.backlog.used == worker.runtime.charge_of(TASK) == 0
    worker.append(events, rows(3))
    second = worker.runtime.checkpoint(TASK)
    assert restored(worker.backend, first) == rows(1, start=77)
    assert restored(worker.backend, second) == sorted(rows(3))


def test_packs_that_no_checkpoint_names_are_not_built_on_when_their_grace_is_half_over() -> None:
    worker, events, token = at_a_token(fresh=False)
    compact(worker, events)
    evict(worker, events)  # the merged run is in a pack that the token does not name
    assert worker.runtime.is_at(TASK, token)
    worker.clock.advance("40m")  # of an hour
    assert not worker.runtime.is_at(TASK, token)
    worker.clock.advance("40m")
    master = Worker(backend=worker.backend, clock=worker.clock)
    assert len(master.runtime.collect_garbage(TASK, [token]).removed) == 1
    worker.runtime.apply_checkpoint(TASK, token)
    assert worker.rows(events) == sorted(rows(20))
    append(worker, events)
    after = worker.runtime.checkpoint(TASK)
    worker.clock.advance("10h")
    assert worker.runtime.is_at(TASK, after), "all its packs are named"


# ── checkpoints of nothing new ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("deleted_by", ["master", "worker"])
def test_a_checkpoint_of_nothing_new_is_the_last_one_again(deleted_by: str) -> None:
    recorder = BackendRecorder()
    worker = Worker(backend=WatchedBackend(MemoryBackend(), recorder), deleted_by=deleted_by)
    events = Extra(store().index)
    worker.attach(events)
    append(worker, events)
    put(worker, events)
    token = worker.runtime.checkpoint(TASK)
    recorder.effects.clear()
    assert worker.runtime.checkpoint(TASK) == token
    read(worker, events)
    assert worker.runtime.checkpoint(TASK) == token
    assert not [effect for effect in recorder.effects if effect.mutates]
    for change in (append, progress, put, compact):
        change(worker, events)
        after = worker.runtime.checkpoint(TASK)
        assert after != token
        token = after
    worker.attach(store(name="another"))
    assert worker.runtime.checkpoint(TASK) != token, "the checkpoint has a store more"


def test_a_token_given_twice_is_held_until_it_is_released_twice() -> None:
    worker = Worker(retained_checkpoints=8)
    events = worker.attach(store())
    worker.append(events, rows(10))
    first = worker.runtime.checkpoint(TASK)
    assert worker.runtime.checkpoint(TASK) == first
    worker.runtime.release_checkpoint(TASK, first)
    worker.runtime.writer().prune(TASK, events, 10**9)
    worker.run(deleting(worker.runtime, TASK))
    assert restored(worker.backend, first) == sorted(rows(10))
    worker.runtime.release_checkpoint(TASK, first)
    worker.run(deleting(worker.runtime, TASK))
    assert worker.objects(".pack") == []


def test_a_released_checkpoint_is_not_given_again() -> None:
    worker = Worker()
    events = worker.attach(store())
    worker.append(events, rows(10))
    first = worker.runtime.checkpoint(TASK)
    worker.runtime.release_checkpoint(TASK, first)
    second = worker.runtime.checkpoint(TASK)
    assert second != first
    worker.runtime.writer().prune(TASK, events, 10**9)
    worker.run(deleting(worker.runtime, TASK))
    assert restored(worker.backend, second) == sorted(rows(10))
