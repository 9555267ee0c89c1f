"""Checkpoint and restore of a task: one cut, small tokens, only that task, and nothing deleted too early."""

from __future__ import annotations

from itertools import count

import pytest

from backend_faults import BackendRecorder, DieAt, WatchedBackend
from maintenance_steps import compacting, deleting, dumping, relieving
from tidegate.errors import ConflictError, CorruptError, InvalidError
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.index import BucketIndex
from tidegate.storage.manifest import Token
from tidegate.storage.spec import Merge
from tidegate.storage.state import BytesCodec
from tidegate.testing.faults import SimulatedCrash
from workers import TASK, Row, Worker, store


def rows(count: int, *, start: int = 0, ts: int = 1000) -> list[Row]:
    return [(b"k%d" % (position % 7), ts + position, position) for position in range(start, start + count)]


def test_a_restore_brings_deleted_and_changed_things_back_and_takes_new_ones_away() -> None:
    """WS-T63"""
    worker = Worker()
    events = worker.attach(store())
    state = worker.runtime.state_handle(TASK, "windows", BytesCodec())
    worker.append(events, rows(20))
    state.put(b"old", b"1")
    token = worker.runtime.checkpoint(TASK)
    state.put(b"old", b"2")
    state.put(b"extra", b"3")
    worker.append(events, rows(5, start=20))
    worker.runtime.writer().prune(TASK, events, 99_000)
    worker.run(deleting(worker.runtime, TASK))
    assert worker.rows(events) == []
    worker.runtime.apply_checkpoint(TASK, token)
    assert worker.rows(events) == sorted(rows(20))
    assert (state.get(b"old"), state.get(b"extra")) == (b"1", None)
    assert worker.parts.backlog.used == worker.runtime.charge_of(TASK)


def test_a_restore_of_one_task_leaves_the_others_alone() -> None:
    """WS-T64, WS-INV-19"""
    worker = Worker()
    mine, theirs = worker.attach(store(), "mine"), worker.attach(store(), "theirs")
    their_state = worker.runtime.state_handle("theirs", "windows", BytesCodec())
    worker.append(mine, rows(20), "mine")
    token = worker.runtime.checkpoint("mine")
    worker.append(theirs, rows(30), "theirs")
    their_state.put(b"k", b"dirty and only in memory")
    worker.run(dumping(worker.runtime, "theirs", theirs, [1000], evict=False))
    worker.runtime.writer().prune("theirs", theirs, 0)
    reader = worker.runtime.reader()
    ledger = worker.parts.pool.ledger()["theirs"]
    charged = worker.parts.backlog.used_by("theirs")
    with reader.scan("theirs", theirs):
        worker.append(mine, rows(5, start=20), "mine")
        worker.runtime.apply_checkpoint("mine", token)
    assert worker.parts.pool.ledger()["theirs"] == ledger
    assert worker.parts.backlog.used_by("theirs") == charged
    assert their_state.get(b"k") == b"dirty and only in memory"
    assert worker.rows(theirs, "theirs") == sorted(rows(30))
    assert worker.rows(mine, "mine") == sorted(rows(20))
    assert worker.parts.pool.ledger()["mine"] == dict.fromkeys(worker.parts.pool.ledger()["mine"], 0)


def test_a_token_of_another_backend_or_task_is_refused_before_anything_changes(tmp_path) -> None:
    """WS-T65"""
    memory = Worker()
    folder = Worker(backend=FolderBackend(tmp_path / "state"))
    for worker, other in ((memory, folder), (folder, memory)):
        events = worker.attach(store())
        worker.append(events, rows(3))
        token = worker.runtime.checkpoint(TASK)
        with pytest.raises(InvalidError, match="backend"):
            other.runtime.apply_checkpoint(TASK, token)
        with pytest.raises(InvalidError, match="task"):
            worker.runtime.apply_checkpoint("another", token)
        with pytest.raises(CorruptError):
            worker.runtime.apply_checkpoint(TASK, token[:-1] + bytes([token[-1] ^ 1]))
        assert worker.rows(events) == sorted(rows(3))


def test_maintenance_during_a_checkpoint_never_takes_away_what_it_names() -> None:
    """WS-T66: from each step of the checkpoint on, a whole pass of maintenance runs between any two."""
    for first in range(20):
        worker = Worker(hot_bucket_count=0, retained_checkpoints=1)
        events = worker.attach(store())
        for part in range(10):
            worker.append(events, rows(10, start=part * 10))
            if part % 2:
                worker.run(dumping(worker.runtime, TASK, events, [1000], evict=True))
        operation = worker.runtime.checkpointing(TASK)
        token, taken = None, 0
        while token is None:
            try:
                next(operation)
            except StopIteration as ended:
                token = ended.value
            taken += 1
            if taken > first:
                worker.runtime.maintain(TASK, 10_000)
                worker.run(deleting(worker.runtime, TASK))
        worker.runtime.maintain(TASK, 10_000)
        later = Worker(backend=worker.backend, seed=3)
        later.runtime.apply_checkpoint(TASK, token)
        assert later.rows(later.attach(store())) == sorted(rows(100))
        assert worker.rows(events) == sorted(rows(100))
        if first >= taken:
            return
    raise AssertionError("the checkpoint has more than 20 steps")


def test_a_pack_retired_after_the_checkpoint_lives_again_after_its_restore() -> None:
    """WS-T67"""
    worker = Worker(retained_checkpoints=1)
    events = worker.attach(store())
    worker.append(events, rows(20))
    token = worker.runtime.checkpoint(TASK)
    (pack,) = worker.objects("packs")
    worker.runtime.writer().prune(TASK, events, 99_000)
    assert worker.parts.retirement.retired(TASK) == [pack]
    worker.runtime.apply_checkpoint(TASK, token)
    assert worker.parts.retirement.retired(TASK) == []
    for _ in range(3):
        worker.run(deleting(worker.runtime, TASK))
    assert worker.objects("packs") == [pack]
    assert worker.rows(events) == sorted(rows(20))


def test_what_a_checkpoint_names_is_held_until_it_is_released_or_too_old() -> None:
    """WS-INV-10"""
    worker = Worker(retained_checkpoints=2)
    events = worker.attach(store())
    tokens, packs = [], []
    for part in range(4):
        worker.append(events, rows(10, start=part * 10, ts=1000 + part * 5000))
        tokens.append(worker.runtime.checkpoint(TASK))
        packs.append(set(worker.objects("packs")))
    worker.runtime.writer().prune(TASK, events, 10_999_000)
    worker.run(deleting(worker.runtime, TASK))
    left = set(worker.objects("packs"))
    assert packs[3] <= left
    assert packs[2] <= left
    token = worker.runtime.checkpoint(TASK)  # the two before it stay until it is known to have arrived
    worker.run(deleting(worker.runtime, TASK))
    assert set(worker.objects("packs")) == packs[3]
    worker.runtime.release_checkpoint(TASK, tokens[3])
    worker.run(deleting(worker.runtime, TASK))
    assert set(worker.objects("packs")) == packs[2]
    for _ in range(2):  # with these, the third is older than the two retained
        worker.runtime.checkpoint(TASK)
    worker.run(deleting(worker.runtime, TASK))
    assert worker.objects("packs") == []
    worker.runtime.apply_checkpoint(TASK, token)
    assert worker.rows(events) == []


def test_a_checkpoint_writes_only_what_is_new() -> None:
    recorder = BackendRecorder()
    worker = Worker(backend=WatchedBackend(MemoryBackend(), recorder))
    events = worker.attach(store())
    for part in range(40):
        worker.append(events, rows(10, start=part * 10, ts=1000 * part))
    worker.runtime.checkpoint(TASK)
    recorder.effects.clear()
    worker.runtime.checkpoint(TASK)
    assert [name for name in recorder.of("put") if "packs" in name] == []
    worker.append(events, [(b"new", 41_000, 1)])
    worker.runtime.checkpoint(TASK)
    assert len([name for name in recorder.of("put") if "packs" in name]) == 1
    sizes = [each.size for each in worker.backend.list("") if "manifest" in each.name]
    assert min(sizes) * 4 < max(sizes), "what did not change is not repeated"


def test_a_restore_reads_no_pack_until_somebody_reads_rows() -> None:
    worker = Worker()
    events = worker.attach(store())
    worker.append(events, rows(50))
    token = worker.runtime.checkpoint(TASK)
    recorder = BackendRecorder()
    later = Worker(backend=WatchedBackend(worker.backend, recorder), seed=5)
    later.runtime.apply_checkpoint(TASK, token)
    fresh = later.attach(store())
    assert [name for name in recorder.of("read") if "packs" in name] == []
    assert later.parts.pool.total == 0
    assert later.rows(fresh) == sorted(rows(50))
    assert [name for name in recorder.of("read") if "packs" in name] != []


@pytest.mark.parametrize("attach_first", [True, False])
@pytest.mark.parametrize("merge", list(Merge))
def test_attaching_before_or_after_the_restore_gives_the_same(attach_first: bool, merge: Merge) -> None:
    worker = Worker()
    state = worker.attach(store(merge))
    worker.append(state, rows(30))
    worker.append(state, rows(30))
    expected = worker.rows(state)
    numbered = worker.parts.tasks.get(TASK).stores["events"].next_seq
    token = worker.runtime.checkpoint(TASK)
    later = Worker(backend=worker.backend, seed=5)
    fresh = store(merge)
    if attach_first:
        later.attach(fresh)
        later.append(fresh, rows(3))
        later.runtime.apply_checkpoint(TASK, token)
    else:
        later.runtime.apply_checkpoint(TASK, token)
        assert later.parts.backlog.used == worker.parts.backlog.used
        later.attach(fresh)
    assert later.rows(fresh) == expected
    assert later.parts.tasks.get(TASK).stores["events"].next_seq == numbered
    assert later.parts.backlog.used == worker.parts.backlog.used == fresh.index.total_charge
    assert later.parts.pool.total == 0
    later.append(fresh, [(b"k0", 1000, 77)])
    again = later.runtime.checkpoint(TASK)
    third = Worker(backend=worker.backend, seed=6)
    third.runtime.apply_checkpoint(TASK, again)
    assert third.rows(third.attach(store(merge))) == later.rows(fresh)


def test_a_store_of_another_shape_is_refused_with_what_to_do() -> None:
    worker = Worker()
    worker.append(worker.attach(store()), rows(3))
    token = worker.runtime.checkpoint(TASK)
    later = Worker(backend=worker.backend, seed=5)
    later.runtime.apply_checkpoint(TASK, token)
    with pytest.raises(InvalidError, match="another store name"):
        later.attach(store(bucket_ms=5000))
    early = Worker(backend=worker.backend, seed=6)
    wrong = early.attach(store(bucket_ms=5000))
    early.append(wrong, rows(4))
    with pytest.raises(InvalidError, match="another store name"):
        early.runtime.apply_checkpoint(TASK, token)
    assert len(early.rows(wrong)) == 4, "a refused restore changes nothing"


def test_a_restored_store_that_nobody_attaches_stays_in_later_checkpoints() -> None:
    worker = Worker()
    worker.append(worker.attach(store(name="one")), rows(5))
    worker.append(worker.attach(store(name="two")), rows(9))
    token = worker.runtime.checkpoint(TASK)
    later = Worker(backend=worker.backend, seed=5)
    later.runtime.apply_checkpoint(TASK, token)
    later.append(later.attach(store(name="one")), rows(1, start=5))
    token = later.runtime.checkpoint(TASK)
    third = Worker(backend=worker.backend, seed=6)
    third.runtime.apply_checkpoint(TASK, token)
    assert len(third.rows(third.attach(store(name="one")))) == 6
    assert len(third.rows(third.attach(store(name="two")))) == 9


def test_states_keep_their_own_extra_in_the_checkpoint() -> None:
    class Watermarked:
        def __init__(self) -> None:
            self.index: BucketIndex = store().index
            self.watermark = -1

        def encode_progress(self) -> bytes:
            return str(self.watermark).encode()

        def restore_progress(self, data: bytes) -> None:
            self.watermark = int(data or b"-1")

    worker = Worker()
    state = Watermarked()
    worker.runtime.attach(TASK, state)
    state.watermark = 4711
    token = worker.runtime.checkpoint(TASK)
    state.watermark = 9999
    worker.runtime.apply_checkpoint(TASK, token)
    assert state.watermark == 4711
    later = Worker(backend=worker.backend, seed=5)
    later.runtime.apply_checkpoint(TASK, token)
    fresh = Watermarked()
    later.runtime.attach(TASK, fresh)
    assert fresh.watermark == 4711


def test_a_named_value_is_of_the_moment_of_the_checkpoint_and_charged_as_state() -> None:
    worker = Worker()
    worker.attach(store())
    handle = worker.runtime.state_handle(TASK, "clocks", BytesCodec(), keyed=False)
    assert handle.kept("one") is None
    now = b"a"
    handle.keep("one", lambda: now)
    assert worker.runtime.is_at(TASK, None), "to begin to keep a value is no change"
    token = worker.runtime.checkpoint(TASK)
    assert worker.runtime.checkpoint(TASK) == token
    now = b"b" * 1000
    assert not worker.runtime.is_at(TASK, token)
    small, later = worker.used("state_cache"), worker.runtime.checkpoint(TASK)
    assert later != token
    assert worker.used("state_cache") - small == 999
    assert handle.kept("one") == now

    worker.runtime.apply_checkpoint(TASK, token)
    assert handle.kept("one") == now, "who keeps a value is asked again after a restore"
    for wanted, value in ((token, b"a"), (later, now)):
        other = Worker(backend=worker.backend, seed=7)
        other.runtime.apply_checkpoint(TASK, wanted)
        fresh = other.runtime.state_handle(TASK, "clocks", BytesCodec(), keyed=False)
        assert fresh.kept("one") == value
        assert fresh.kept("two") is None
        other.attach(store())
        other.append(other.attach(store(name="more")), rows(1))
        again = other.runtime.checkpoint(TASK)
        last = Worker(backend=worker.backend, seed=8)
        last.runtime.apply_checkpoint(TASK, again)
        kept = last.runtime.state_handle(TASK, "clocks", BytesCodec(), keyed=False).kept("one")
        assert kept == value, "nobody kept it in between"
        last.runtime.detach(TASK)
        assert last.runtime.pool.total == 0


def test_a_named_value_whose_checkpoint_failed_is_not_taken_for_saved() -> None:
    worker = Worker(backend=(backend := WatchedBackend(MemoryBackend(), BackendRecorder())))
    worker.attach(store())
    now = b"a"
    worker.runtime.state_handle(TASK, "clocks", BytesCodec(), keyed=False).keep("one", lambda: now)
    token = worker.runtime.checkpoint(TASK)
    now = b"b"
    backend.watch = DieAt(1)
    with pytest.raises(SimulatedCrash):
        worker.runtime.checkpoint(TASK)
    assert not worker.runtime.is_at(TASK, token)


def test_a_handle_without_keys_says_so() -> None:
    handle = Worker().runtime.state_handle(TASK, "clocks", BytesCodec(), keyed=False)
    with pytest.raises(InvalidError, match="open its handle with keyed=True"):
        handle.get(b"key")


def test_the_cut_is_one_moment_also_when_the_operator_does_not_wait() -> None:
    """WS-INV-18: rows and a state that counts them change between the steps: the token has both or neither."""
    worker = Worker()
    events = worker.attach(store())
    state = worker.runtime.state_handle(TASK, "count", BytesCodec())
    written = 0
    for budget in range(1, 12):
        operation = worker.runtime.checkpointing(TASK)
        token = None
        try:
            for _ in range(500):
                next(operation)
                if budget:
                    budget -= 1
                    worker.append(events, rows(1, start=written))
                    written += 1
                    state.put(b"rows", str(written).encode())
        except StopIteration as ended:
            token = ended.value
        assert token is not None
        later = Worker(backend=worker.backend, seed=100 + budget + written)
        later.runtime.apply_checkpoint(TASK, token)
        restored = len(later.rows(later.attach(store())))
        counted = later.runtime.state_handle(TASK, "count", BytesCodec()).get(b"rows")
        assert int(counted or b"0") == restored


def test_a_task_that_never_rests_fails_its_checkpoint_by_name() -> None:
    worker = Worker()
    events = worker.attach(store())
    operation = worker.runtime.checkpointing(TASK)
    with pytest.raises(ConflictError, match="bucket 1000 of store events"):
        for _ in range(10_000):
            worker.append(events, rows(1))
            next(operation)
    assert worker.runtime.leaks() == (0, 0, 0, 0)


def test_operations_begun_before_a_restore_give_up_and_hurt_nothing() -> None:
    """WS-INV-19"""
    worker = Worker()
    events = worker.attach(store())
    worker.append(events, rows(20))
    worker.append(events, rows(20, start=20))
    token = worker.runtime.checkpoint(TASK)
    worker.append(events, rows(20, start=40))
    for begin, until in (
        (lambda: compacting(worker.runtime, TASK, events, 1000), "placed"),
        (lambda: dumping(worker.runtime, TASK, events, [1000], evict=True), "stored"),
        (lambda: relieving(worker.runtime, TASK), None),
    ):
        operation = begin()
        for phase in operation:
            if phase == until:
                break
        worker.runtime.apply_checkpoint(TASK, token)
        worker.run(operation)
        assert worker.rows(events) == sorted(rows(40))
        assert worker.parts.pool.total == 0
        assert worker.parts.backlog.used == events.index.total_charge
        assert worker.hot_bytes() == 0
        worker.run(deleting(worker.runtime, TASK))
        assert worker.rows(events) == sorted(rows(40))
        worker.append(events, rows(20, start=40))
    assert worker.runtime.leaks() == (0, 0, 0, 0)


def test_death_at_every_backend_effect_of_a_round_restores_the_last_checkpoint_exactly() -> None:
    """WS-T97"""

    def life(backend) -> tuple[bytes, list[Row]]:
        worker = Worker(backend=backend, hot_bucket_count=0, retained_checkpoints=1, seed=next(seeds))
        worker.runtime.apply_checkpoint(TASK, base)
        events = worker.attach(store())
        for part in range(3):
            worker.append(events, rows(10, start=100 + part * 10))
            worker.runtime.maintain(TASK, 10_000)
        worker.runtime.writer().prune(TASK, events, 1020)
        token = worker.runtime.checkpoint(TASK)
        worker.runtime.maintain(TASK, 10_000)
        return token, worker.rows(events)

    def fresh() -> tuple[MemoryBackend, bytes]:
        inner = MemoryBackend()
        worker = Worker(backend=inner, seed=next(seeds))
        worker.append(worker.attach(store()), rows(100))
        return inner, worker.runtime.checkpoint(TASK)

    seeds = count()
    inner, base = fresh()
    recorder = BackendRecorder()
    _, final = life(WatchedBackend(inner, recorder))
    assert recorder.moments >= 8
    for moment in range(1, recorder.moments + 1):
        inner, base = fresh()
        try:
            life(WatchedBackend(inner, DieAt(moment)))
        except SimulatedCrash:
            pass
        later = Worker(backend=inner, seed=next(seeds))
        later.runtime.apply_checkpoint(TASK, base)
        events = later.attach(store())
        assert later.rows(events) == sorted(rows(100)), f"moment {moment}"
        report = later.runtime.collect_garbage(TASK, [base], grace_ms=0)
        assert later.rows(events) == sorted(rows(100)), f"moment {moment}: {report}"
        later.runtime.apply_checkpoint(TASK, base)
        assert later.rows(events) == sorted(rows(100))
        token, rows_after = life(inner)
        assert rows_after == final
        assert Token.decode(token).task == TASK


def test_a_fresh_process_holds_the_older_tokens_it_is_told_of() -> None:
    """WS-INV-10"""
    worker = Worker(retained_checkpoints=3)
    events = worker.attach(store())
    worker.append(events, rows(20))
    older = worker.runtime.checkpoint(TASK)
    worker.runtime.writer().prune(TASK, events, 99_000)
    worker.append(events, rows(5, ts=200_000))
    newer = worker.runtime.checkpoint(TASK)
    later = Worker(backend=worker.backend, seed=50, retained_checkpoints=3)
    later.runtime.apply_checkpoint(TASK, newer, retained=[older])
    restored = later.attach(store())
    assert len(later.rows(restored)) == 5
    named = set(worker.objects())
    later.runtime.checkpoint(TASK)
    later.runtime.maintain(TASK, 10_000)
    assert named <= set(later.objects())
    report = later.runtime.collect_garbage(TASK, [newer], grace_ms=0)
    assert report.removed == (), "what the live task holds is no garbage"
    later.runtime.apply_checkpoint(TASK, older)
    assert later.rows(restored) == sorted(rows(20))


def test_a_refused_token_leaves_background_maintenance_running() -> None:
    worker = Worker(hot_bucket_count=0)
    events = worker.attach(store())
    worker.append(events, rows(20))
    token = worker.runtime.checkpoint(TASK)
    worker.runtime.start(TASK)
    with pytest.raises(CorruptError):
        worker.runtime.apply_checkpoint(TASK, b"nonsense")
    worker.clock.advance("1s")
    assert worker.scheduler.run_due()
    assert events.index.hot_buckets() == []
    worker.runtime.apply_checkpoint(TASK, token)
    worker.append(events, rows(3, ts=50_000))
    worker.clock.advance("1s")
    worker.scheduler.run_due()
    assert events.index.hot_buckets() == []
    assert len(worker.rows(events)) == 23


def test_a_row_number_never_repeats_not_after_an_eviction_nor_a_restore() -> None:
    """WS-INV-2"""
    worker = Worker(hot_bucket_count=0)
    events = worker.attach(store())
    same = [(b"k", 1000, 7)] * 4  # one key, one ts: only the number tells the rows apart
    worker.append(events, same)
    worker.run(dumping(worker.runtime, TASK, events, [1000], evict=True))
    worker.append(events, same)
    token = worker.runtime.checkpoint(TASK)
    later = Worker(backend=worker.backend, seed=5)
    later.runtime.apply_checkpoint(TASK, token)
    fresh = later.attach(store())
    later.append(fresh, same)
    later.run(compacting(later.runtime, TASK, fresh, 1000))
    with later.runtime.reader().scan(TASK, fresh) as scan:
        numbers = [number for batch in scan for number in batch.column("seq").to_pylist()]
    assert numbers == list(range(12))
