"""What holds of worker storage at all times, one test each.

Many of these are shown at length elsewhere; here each stands by its number, as short as it can be and still
fail when it is broken.
"""

from __future__ import annotations

import ast
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from backend_faults import BackendEffect, RefuseAt, WatchedBackend
from maintenance_steps import compacting, deleting, dumping, rehydrating, relieving
from schedules import draw
from simulated_worker import (
    CONFIGS,
    KEYS,
    WEIGHTS,
    SimulatedStore,
    SimulatedTask,
    SimulatedWorker,
)
from storage_oracles import fold, keys_of_one_hash, rows_of, scan_all
from tidegate.errors import InternalError, InvalidError, UnavailableError
from tidegate.storage.backends.base import MissingObjectError
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import Bucket, Tenant
from tidegate.storage.manifest import Token, reachable
from tidegate.storage.reader import RangeRequest, Time
from tidegate.storage.runs.columns import hash_keys
from tidegate.storage.runs.run import Run
from tidegate.storage.scratch import Scratch
from tidegate.storage.spec import Cursor, Merge

PATIENCE_S = 300


def numbered(row: str) -> Any:
    return pytest.mark.parametrize("_invariant", [pytest.param(None, id=row)])


def a_worker(backend: Any = None, seed: int = 1) -> tuple[SimulatedWorker, SimulatedTask]:
    """With room for what is written: an append evicts nothing by itself, tests say what is."""
    roomy = CONFIGS[0]
    config = replace(CONFIGS[seed % len(CONFIGS)], write_buffer=roomy.write_buffer, base_runs=roomy.base_runs)
    worker = SimulatedWorker(seed, MemoryBackend() if backend is None else backend, config=config)
    return worker, worker.tasks[0]


def row(key: bytes, ts: int, value: int = 0, **more: Any) -> dict[str, Any]:
    return {"key": key, "ts": ts, "value": value, "weight": 1.0, **more}


def fill(worker: SimulatedWorker, task: SimulatedTask, *names: str, batches: int = 3) -> None:
    for name in names or tuple(task.stores):
        for number in range(batches):
            rows = [row(key, ts, number) for key in KEYS[:4] for ts in (10 + number, 110, 260 + number)]
            worker.write(task, task.stores[name], rows)


def through(operation: Any) -> Any:
    """Run an operation to its end; what it returned."""
    try:
        for _ in range(10_000):
            next(operation)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("an operation never ends")


def read(
    worker: SimulatedWorker, task: SimulatedTask, store: SimulatedStore, *requests: RangeRequest
) -> pa.Table:
    if not requests:
        return scan_all(worker.reader, task.name, store.state)
    with worker.reader.load(worker.reader.plan(task.name, store.state, list(requests))) as loaded:
        return loaded.to_table()


def buckets_of(store: SimulatedStore) -> list[Bucket]:
    found = [store.state.index.snapshot(start) for start in store.state.index.all_buckets()]
    return [bucket for bucket in found if bucket is not None]


def versions(store: SimulatedStore) -> dict[int, tuple[int, int]]:
    return {bucket.start: (bucket.data_version, bucket.layout_version) for bucket in buckets_of(store)}


def dump(worker: SimulatedWorker, task: SimulatedTask, store: SimulatedStore, *, evict: bool) -> Any:
    buckets = store.state.index.all_buckets()
    return through(dumping(worker.runtime, task.name, store.state, buckets, evict=evict))


def compact(worker: SimulatedWorker, task: SimulatedTask, store: SimulatedStore) -> None:
    for bucket in store.state.index.all_buckets():
        through(compacting(worker.runtime, task.name, store.state, bucket))


def random_worker(seed: int, length: int = 60) -> SimulatedWorker:
    worker = SimulatedWorker(seed, MemoryBackend())
    worker.run(draw(seed, length, WEIGHTS))
    worker.settle()
    return worker


@numbered("WS-INV-1")
def test_an_operator_needs_the_facade_and_nothing_else(_invariant: None) -> None:
    """The join of `test_time_join` calls reader, writer, attach and its own index; it imports no insides."""
    tree = ast.parse((Path(__file__).parent / "test_time_join.py").read_text())
    operator = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TimeJoin")
    calls = {
        ast.unparse(node.func)
        for node in ast.walk(operator)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    storage = {call for call in calls if call.split(".")[0] in ("runtime", "self", "side", "other")}
    assert storage <= {
        "runtime.reader", "runtime.writer", "runtime.attach", "self.reader.plan", "self.reader.load",
        "self.writer.append", "self.writer.prune", "side.index.insert", "self._pairs", "self.sides.values",
    }  # fmt: skip


@numbered("WS-INV-2")
def test_a_row_number_never_comes_twice(_invariant: None) -> None:
    worker, task = a_worker()
    store = task.stores["events"]
    fill(worker, task, "events")
    token = worker.runtime.checkpoint(task.name)
    task.kept.append(task.saved(token))
    dump(worker, task, store, evict=True)
    fill(worker, task, "events", batches=1)
    worker.crash()
    store = task.stores["events"]
    fill(worker, task, "events", batches=1)
    table = read(worker, task, store)
    cursors = list(zip(*(table.column(name).to_pylist() for name in ("key", "ts", "seq")), strict=True))
    assert len(cursors) == len(set(cursors)) == 4 * 12
    assert sorted(table.column("seq").to_pylist()) == list(range(4 * 12))


@numbered("WS-INV-3")
@pytest.mark.parametrize("seed", range(8))
def test_a_run_is_sorted_lies_in_its_bucket_and_is_what_its_entry_says(seed: int, _invariant: None) -> None:
    worker, checked = random_worker(seed), 0
    for task in worker.tasks:
        for store in task.stores.values():
            for bucket in buckets_of(store):
                for entry in bucket.runs:
                    copies = [entry.hot.run] if entry.hot is not None and entry.hot.complete else []
                    if entry.stored is not None:
                        copies.append(
                            worker.runtime._parts.packs.load(task.name, store.oracle.spec, entry.stored)
                        )
                    for run in copies:
                        check_run(run, bucket.start, store)
                        assert (run.row_count, run.key_count) == (entry.rows, entry.keys)
                        assert (run.min_ts, run.max_ts) == (entry.min_ts, entry.max_ts)
                        checked += 1
    assert checked or not any(store.oracle.rows for task in worker.tasks for store in task.stores.values())


def check_run(run: Run, bucket: int, store: SimulatedStore) -> None:
    keys = list(zip(run.hashes.tolist(), run.keys.to_pylist(), strict=True))
    assert keys == sorted(set(keys))
    assert run.hashes.tolist() == hash_keys(run.keys).tolist()
    starts = run.starts.tolist()
    assert starts[0] == 0 and starts == sorted(set(starts)) and starts[-1] == run.row_count
    for first, stop in pairwise(starts):
        cursors = list(zip(run.ts[first:stop].tolist(), run.seq[first:stop].tolist(), strict=True))
        assert cursors == sorted(set(cursors))
    assert {store.oracle.spec.bucket_of(int(ts)) for ts in run.ts} == {bucket} == {run.bucket}


@numbered("WS-INV-4")
@pytest.mark.parametrize("name", ["events", "latest", "totals"])
def test_a_row_in_two_places_is_one_row(name: str, _invariant: None) -> None:
    worker, task = a_worker()
    store = task.stores[name]
    fill(worker, task, name)
    for change in ("keep", "keep", "compact", "evict", "rehydrate", "write", "keep", "compact", "evict"):
        match change:
            case "keep" | "evict":
                dump(worker, task, store, evict=change == "evict")
            case "compact":
                compact(worker, task, store)
            case "rehydrate":
                for bucket in store.state.index.all_buckets():
                    through(rehydrating(worker.runtime, task.name, store.state, bucket))
            case "write":
                fill(worker, task, name, batches=2)
        found = rows_of(read(worker, task, store), store.oracle.spec)
        assert found == store.oracle.contents(), change
        places = [entry for bucket in buckets_of(store) for entry in bucket.runs]
        assert all(entry.stored is not None or entry.is_hot for entry in places)


@numbered("WS-INV-5")
@pytest.mark.parametrize("seed", range(8))
def test_counts_are_the_counts_of_what_is_there(seed: int, _invariant: None) -> None:
    worker = random_worker(seed)
    for task in worker.tasks:
        for store in task.stores.values():
            entries = [entry for bucket in buckets_of(store) for entry in bucket.runs]
            index = store.state.index
            assert index.total_rows == sum(entry.rows for entry in entries)
            assert index.total_charge == sum(entry.charge for entry in entries)
            assert all(entry.rows > 0 and entry.charge >= 0 for entry in entries)
            if store.oracle.spec.merge is Merge.APPEND:
                assert index.total_rows == read(worker, task, store).num_rows


@numbered("WS-INV-6")
def test_content_moves_one_version_and_a_publish_the_other(_invariant: None) -> None:
    worker, task = a_worker()
    store = task.stores["events"]
    fill(worker, task, "events")

    def changed(action: Any) -> tuple[bool, bool]:
        before = versions(store)
        action()
        after = versions(store)
        data = any(after[start][0] != before[start][0] for start in after if start in before)
        layout = any(after[start][1] != before[start][1] for start in after if start in before)
        assert all(
            now >= then
            for start in after
            if start in before
            for now, then in zip(after[start], before[start], strict=True)
        )
        return data, layout

    assert changed(lambda: fill(worker, task, "events", batches=1)) == (True, False)
    assert changed(lambda: read(worker, task, store)) == (False, False)
    assert changed(lambda: dump(worker, task, store, evict=False)) == (False, True)
    assert changed(lambda: dump(worker, task, store, evict=False)) == (False, False)
    assert changed(lambda: compact(worker, task, store)) == (False, True)
    assert changed(lambda: dump(worker, task, store, evict=True)) == (False, True)
    assert changed(
        lambda: [
            through(rehydrating(worker.runtime, task.name, store.state, start)) for start in versions(store)
        ]
    ) == (
        False,
        True,
    )
    low = versions(store)[0]
    worker.writer.prune(task.name, store.state, 100)
    worker.write(task, store, [row(b"a", 5)])
    assert min(versions(store)[0]) > max(low), "a bucket made again has versions nobody has seen"


@numbered("WS-INV-7")
@pytest.mark.parametrize("kind", ["compact", "dump", "evict"])
def test_a_lost_publish_changes_nothing_and_leaves_nothing(kind: str, _invariant: None) -> None:
    worker, task = a_worker()
    store = task.stores["events"]
    fill(worker, task, "events")
    pool, names = worker.runtime.pool.total, {found.name for found in worker.backend.list("")}
    start = store.state.index.all_buckets()[0]
    if kind == "compact":
        operation = compacting(worker.runtime, task.name, store.state, start)
    else:
        operation = dumping(worker.runtime, task.name, store.state, [start], evict=kind == "evict")
    next(operation)
    next(operation)
    before = worker.runtime.pool.total
    worker.write(task, store, [row(b"late", 15)])  # the content changes under it
    added = worker.runtime.pool.total - before
    entries = store.state.index.snapshot(start).runs
    assert not through(operation)
    assert store.state.index.snapshot(start).runs == entries
    assert worker.runtime.pool.total == pool + added
    through(deleting(worker.runtime, task.name))
    assert {found.name for found in worker.backend.list("")} == names
    worker.check_everything()


@numbered("WS-INV-8")
def test_a_merge_with_a_run_that_cannot_be_read_publishes_nothing(_invariant: None) -> None:
    backend = MemoryBackend()
    worker, task = a_worker(backend)
    store = task.stores["events"]
    for _ in range(10):  # many runs, so that stored ones are merged too
        fill(worker, task, "events", batches=1)
        dump(worker, task, store, evict=True)
    start = store.state.index.all_buckets()[0]
    gone = store.state.index.snapshot(start).runs[0].stored.pack
    kept = backend.read(gone).to_pybytes()
    backend.delete(gone)
    worker.runtime._parts.packs.forget(gone)
    before = versions(store)
    with pytest.raises(MissingObjectError):
        through(compacting(worker.runtime, task.name, store.state, start, whole=False))
    assert versions(store) == before
    backend.put(gone, [kept])
    worker.check_everything()


@numbered("WS-INV-9")
def test_the_new_is_there_before_the_old_goes(_invariant: None) -> None:
    named: list[set[str]] = []
    effects: list[BackendEffect] = []

    def watch(effect: BackendEffect) -> None:
        effects.append(effect)
        if effect.kind == "delete" and effect.moment == "before":
            named.append(
                {entry.stored.pack for bucket in buckets_of(store) for entry in bucket.runs if entry.stored}
            )
            assert effect.name not in named[-1], "deleted before it left the index"

    worker, task = a_worker(WatchedBackend(MemoryBackend(), watch))
    store = task.stores["events"]
    for _ in range(4):
        fill(worker, task, "events", batches=1)
        dump(worker, task, store, evict=False)
        compact(worker, task, store)
        through(deleting(worker.runtime, task.name))
    kinds = [effect.kind for effect in effects if effect.moment == "after"]
    assert "delete" in kinds and kinds.index("put") < kinds.index("delete")


@numbered("WS-INV-10")
def test_a_stored_run_stays_while_anybody_needs_it(_invariant: None) -> None:
    backend = MemoryBackend()
    worker, task = a_worker(backend)
    store = task.stores["events"]

    def packs() -> set[str]:
        return {found.name for found in backend.list("") if "/packs/" in found.name}

    fill(worker, task, "events")
    dump(worker, task, store, evict=True)
    live = packs()
    through(deleting(worker.runtime, task.name))
    assert packs() == live, "named by the index"
    token = worker.runtime.checkpoint(task.name)
    held = worker.reader.load(worker.reader.plan(task.name, store.state, [RangeRequest(KEYS)]))
    worker.writer.prune(task.name, store.state, 10**6)
    store.oracle.prune(10**6)
    worker.runtime.checkpoint(task.name)
    worker.runtime.release_checkpoint(task.name, token)
    through(deleting(worker.runtime, task.name))
    assert packs() >= live, "pinned by a view"
    assert held.to_table().num_rows == 36
    held.close()
    through(deleting(worker.runtime, task.name))
    assert not packs() & live


@numbered("WS-INV-10")
def test_a_stored_run_stays_while_a_checkpoint_names_it(_invariant: None) -> None:
    worker, task = a_worker()
    fill(worker, task)
    token = worker.runtime.checkpoint(task.name)
    task.kept.append(task.saved(token))
    for store in task.stores.values():
        worker.writer.prune(task.name, store.state, 10**6)
    for _ in range(3):
        through(deleting(worker.runtime, task.name))
    worker.restore(task, task.kept[-1])
    worker.check_everything()
    for _ in range(3):
        through(deleting(worker.runtime, task.name))
    worker.check_everything()


@numbered("WS-INV-11")
@pytest.mark.parametrize("between", ["evict", "compact", "prune", "append"])
def test_a_plan_never_meets_what_is_gone(between: str, _invariant: None) -> None:
    """Whatever happens between plan and load, and between load and reading: one consistent picture, whole."""
    worker, task = a_worker()
    store = task.stores["events"]
    fill(worker, task, "events")

    def disturb() -> None:
        match between:
            case "evict":
                dump(worker, task, store, evict=True)
            case "compact":
                compact(worker, task, store)
                dump(worker, task, store, evict=True)
            case "prune":
                worker.writer.prune(task.name, store.state, 10**6)
                store.oracle.prune(10**6)
            case "append":
                fill(worker, task, "events", batches=1)
        through(deleting(worker.runtime, task.name))

    plan = worker.reader.plan(task.name, store.state, [RangeRequest(KEYS), RangeRequest(KEYS[:3])])
    disturb()
    expected = store.oracle.contents()
    with worker.reader.load(plan) as loaded:
        disturb()
        table = loaded.to_table()
    first = table.filter(pa.compute.equal(table.column("request"), 0))
    assert rows_of(first, store.oracle.spec) == expected


@numbered("WS-INV-12")
@pytest.mark.parametrize("seed", range(10))
def test_a_view_has_exactly_its_rows_in_order(seed: int, _invariant: None) -> None:
    worker = random_worker(seed + 50)
    generator = np.random.default_rng(seed)
    for task in worker.tasks:
        for store in task.stores.values():
            if store.oracle.unsure:
                continue
            start = int(generator.integers(-100, 200))
            span = Time(start, start + int(generator.integers(0, 200)))
            plan = worker.reader.plan(task.name, store.state, [RangeRequest(KEYS, span)])
            with worker.reader.load(plan) as loaded:
                for number, key in enumerate(KEYS):
                    view = loaded.view(0, number)
                    found = [tuple(row.values()) for row in view.to_batch(["ts", "seq"]).to_pylist()]
                    expected = [(each.ts, each.seq) for each in store.oracle.contents([key], *span)]
                    assert found == expected
                    assert [view.cursor(place) for place in range(len(view))] == [
                        Cursor(*each) for each in expected
                    ]


@numbered("WS-INV-13")
def test_pins_and_permits_go_back_exactly_once(_invariant: None) -> None:
    refusal = RefuseAt(1, kinds=frozenset({"read"}), persistent=True, lifted=True)
    worker, task = a_worker(WatchedBackend(MemoryBackend(), refusal))
    store = task.stores["events"]
    fill(worker, task, "events")
    dump(worker, task, store, evict=True)
    plan = worker.reader.plan(task.name, store.state, [RangeRequest(KEYS[:2])])

    def taken() -> tuple[int, int]:
        return worker.runtime._parts.pins.open_leases(), worker.runtime.scratch.in_use(Scratch.READER)

    loaded = worker.reader.load(plan)
    view = loaded.view(0, 0)
    assert taken() == (1, 1)
    with view:
        loaded.close()
        loaded.close()
        assert taken() == (1, 1), "the view is still in use"
        assert len(view)
    assert taken() == (0, 0)
    worker.runtime._parts.packs.forget(buckets_of(store)[0].runs[0].stored.pack)
    refusal.arm()
    with pytest.raises(UnavailableError), worker.reader.load(plan) as loaded:
        loaded.to_table()
    assert taken() == (0, 0)


@numbered("WS-INV-14")
@pytest.mark.parametrize("seed", range(8))
def test_the_backlog_is_what_was_accepted_and_not_pruned(seed: int, _invariant: None) -> None:
    worker = random_worker(seed + 20)
    assert worker.runtime.backlog.used == sum(charges(worker).values())
    task = worker.tasks[0]
    store = task.stores["events"]
    fill(worker, task, "events")
    used = worker.runtime.backlog.used
    dump(worker, task, store, evict=False)
    compact(worker, task, store)
    dump(worker, task, store, evict=True)
    for bucket in store.state.index.all_buckets():
        through(rehydrating(worker.runtime, task.name, store.state, bucket))
    through(relieving(worker.runtime, task.name))
    assert worker.runtime.backlog.used == used, "only progress frees backlog"


def charges(worker: SimulatedWorker) -> dict[str, int]:
    """What each task's indexes say they hold, those of the state blobs included."""
    return {task.name: worker.runtime.charge_of(task.name) for task in worker.tasks}


@numbered("WS-INV-15")
@pytest.mark.parametrize("seed", range(8))
def test_the_pool_is_the_sum_of_what_is_held(seed: int, _invariant: None) -> None:
    worker = random_worker(seed + 30)
    pool = worker.runtime.pool
    by_tenant = {
        (task.name, tenant): pool.used(task.name, tenant) for task in worker.tasks for tenant in Tenant
    }
    assert pool.total == sum(by_tenant.values())
    assert all(used >= 0 for used in by_tenant.values())
    with pytest.raises(InternalError):
        pool.release(
            worker.tasks[0].name, Tenant.BASE_RUNS, by_tenant[worker.tasks[0].name, Tenant.BASE_RUNS] + 1
        )


@numbered("WS-INV-16")
def test_nobody_waits_with_a_lock_in_hand(_invariant: None) -> None:
    """While a put stands still half-way, the same bucket is read, appended to and pruned on another thread."""
    reached, go_on = threading.Event(), threading.Event()

    def watch(effect: BackendEffect) -> None:
        if effect.kind == "put" and effect.moment == "before" and not go_on.is_set():
            reached.set()
            assert go_on.wait(PATIENCE_S)

    worker, task = a_worker(WatchedBackend(MemoryBackend(), watch))
    store = task.stores["events"]
    fill(worker, task, "events")
    failed: list[BaseException] = []

    def dumping() -> None:
        try:
            dump(worker, task, store, evict=True)
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    thread = threading.Thread(target=dumping, daemon=True)
    thread.start()
    assert reached.wait(PATIENCE_S)
    done = threading.Event()

    def operate() -> None:
        fill(worker, task, "events", batches=1)
        worker.check_everything()
        worker.writer.prune(task.name, store.state, 100)
        store.oracle.prune(100)
        done.set()

    threading.Thread(target=operate, daemon=True).start()
    assert done.wait(PATIENCE_S), "an operation waits for a lock that a waiting one holds"
    go_on.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and not failed
    worker.check_everything()


@numbered("WS-INV-17")
def test_one_operation_a_bucket_at_a_time(_invariant: None) -> None:
    worker, task = a_worker()
    store = task.stores["events"]
    fill(worker, task, "events")
    first, second, _ = store.state.index.all_buckets()
    one = compacting(worker.runtime, task.name, store.state, first)
    next(one)
    before = store.state.index.snapshot(first)
    assert through(compacting(worker.runtime, task.name, store.state, first)) is False
    assert not through(dumping(worker.runtime, task.name, store.state, [first], evict=True))
    assert store.state.index.snapshot(first) is before
    assert through(compacting(worker.runtime, task.name, store.state, second)) is True, "others go on"
    assert through(one) is True
    worker.check_everything()


@numbered("WS-INV-18")
@pytest.mark.parametrize("seed", range(6))
def test_a_token_names_one_cut_and_all_of_it_can_be_read(seed: int, _invariant: None) -> None:
    worker = random_worker(seed + 70)
    for task in worker.tasks:
        for kept in task.kept:
            names = reachable(worker.backend, Token.decode(kept.token))
            assert names <= {found.name for found in worker.backend.list("")}
    kept = {task.name: list(task.kept) for task in worker.tasks}
    worker.clock.advance(10**9)
    worker.crash()
    for task in worker.tasks:
        for saved in kept[task.name]:
            worker.restore(task, saved)
            worker.check_everything()


@numbered("WS-INV-19")
def test_restoring_a_task_touches_no_other(_invariant: None) -> None:
    worker = SimulatedWorker(3, MemoryBackend())
    one, other = worker.tasks
    for task in (one, other):
        fill(worker, task)
        task.handle.put(b"a", task.name.encode())
        task.blobs[b"a"] = task.name.encode()
    token = one.saved(worker.runtime.checkpoint(one.name))
    fill(worker, one)
    fill(worker, other)
    store = other.stores["events"]
    dump(worker, other, store, evict=True)
    held = worker.reader.load(worker.reader.plan(other.name, store.state, [RangeRequest(KEYS[:2])]))
    pool, pins = worker.runtime.pool, worker.runtime._parts.pins.open_leases(other.name)
    before = (
        versions(store),
        worker.runtime.backlog.used_by(other.name),
        {t: pool.used(other.name, t) for t in Tenant},
    )
    worker.restore(one, token)
    after = (
        versions(store),
        worker.runtime.backlog.used_by(other.name),
        {t: pool.used(other.name, t) for t in Tenant},
    )
    assert after == before
    assert worker.runtime._parts.pins.open_leases(other.name) == pins == 1
    held.close()
    worker.check_everything()
    assert worker.runtime.backlog.used_by(one.name) == worker.runtime.charge_of(one.name)


@numbered("WS-INV-20")
def test_what_is_evicted_is_durable_first_and_loaded_later(_invariant: None) -> None:
    refusal = RefuseAt(1, kinds=frozenset({"put"}), persistent=True, lifted=True)
    nothing = {"reserve_bytes": 0, "soft_max_bytes": 1}
    config = StorageConfig.for_tests(write_buffer=nothing, base_runs=nothing, state_cache=nothing)
    worker = SimulatedWorker(1, WatchedBackend(MemoryBackend(), refusal), config=config)
    task = worker.tasks[0]
    store = task.stores["events"]
    fill(worker, task, "events", batches=1)  # more would evict what came before
    task.handle.put(b"a", b"kept")
    task.blobs[b"a"] = b"kept"
    refusal.arm()
    with pytest.raises(UnavailableError):
        through(relieving(worker.runtime, task.name))
    assert worker.runtime.pool.used(task.name, Tenant.STATE_CACHE) > 0, "what could not be stored stays"
    with pytest.raises(UnavailableError):
        dump(worker, task, store, evict=True)
    assert all(entry.is_hot for bucket in buckets_of(store) for entry in bucket.runs), "nothing left memory"
    refusal.lift()
    worker.check_everything()
    dump(worker, task, store, evict=True)
    assert not any(entry.hot for bucket in buckets_of(store) for entry in bucket.runs)
    worker.check_everything()
    through(relieving(worker.runtime, task.name))
    assert worker.runtime.pool.total == 0, "rows and state are gone from memory together"
    made: list[bytes] = []
    assert task.handle.get_or_load(b"a", lambda: made.append(b"new") or b"new") == b"kept"
    assert not made, "an evicted key is loaded, never made anew"


@numbered("WS-INV-21")
def test_an_operators_position_is_that_of_the_cut(_invariant: None) -> None:
    """A position kept in the checkpoint only moves forward, and comes back with the rows it belongs to."""
    from tidegate.storage.index import BucketIndex

    class Positioned:
        def __init__(self) -> None:
            self.index = BucketIndex(worker.specs[0])
            self.processed = Cursor(-1, -1)

        def encode_progress(self) -> bytes:
            return b"%d %d" % self.processed

        def restore_progress(self, data: bytes) -> None:
            self.processed = Cursor(*map(int, data.split())) if data else Cursor(-1, -1)

        def advance(self) -> None:
            found = read_all(self)
            last = max(Cursor(ts, seq) for ts, seq in found)
            assert last >= self.processed
            self.processed = last

    def read_all(state: Positioned) -> list[tuple[int, int]]:
        table = scan_all(worker.reader, "positioned", state)
        return list(zip(table.column("ts").to_pylist(), table.column("seq").to_pylist(), strict=True))

    worker, _ = a_worker()
    state = Positioned()
    worker.runtime.attach("positioned", state)
    batch = pa.RecordBatch.from_pydict(
        {"key": [b"a", b"b"], "ts": [10, 20], "value": [1, 2], "note": ["", ""]}
    )
    tokens = []
    for _ in range(3):
        state.index.insert(worker.writer.append("positioned", state, batch))
        state.advance()
        tokens.append((worker.runtime.checkpoint("positioned"), state.processed))
    assert [position.seq for _, position in tokens] == [1, 3, 5]
    for token, position in reversed(tokens):
        worker.runtime.apply_checkpoint("positioned", token)
        assert state.processed == position
        assert position in read_all(state), "it points at a real row"


@numbered("WS-INV-22")
@pytest.mark.parametrize("seed", range(4))
def test_a_fold_is_the_fold_of_the_rows(seed: int, _invariant: None) -> None:
    """Raw rows are the truth: what is folded as it arrives equals folding them all, whatever happened to either."""
    worker, task = a_worker(seed=seed)
    raw, folded = task.stores["events"], task.stores["totals"]
    generator = np.random.default_rng(seed)
    for _ in range(12):
        rows = [
            {
                **row(
                    KEYS[generator.integers(4)],
                    int(generator.integers(4)) * 50,
                    int(generator.integers(-9, 9)),
                ),
                "weight": 0.0,
            }
            for _ in range(6)
        ]
        worker.write(task, raw, rows)
        worker.write(task, folded, rows)
        for store in (raw, folded):
            if generator.integers(2):
                compact(worker, task, store)
            if generator.integers(2):
                dump(worker, task, store, evict=bool(generator.integers(2)))
    truth: dict[tuple[bytes, int], list[dict[str, Any]]] = {}
    for each in read(worker, task, raw).to_pylist():
        truth.setdefault((each["key"], each["ts"]), []).append({**each, "weight": 0.0})
    found = rows_of(read(worker, task, folded), folded.oracle.spec)
    assert {(key, ts): values for (key, ts, _), values in found.items()} == {
        place: fold(folded.oracle.spec, rows) for place, rows in truth.items()
    }


@numbered("WS-INV-23")
@pytest.mark.parametrize("cutoff", [-50, 0, 10, 11, 100, 110, 260, 261, 300])
@pytest.mark.parametrize("shape", ["hot", "compacted", "evicted"])
def test_a_prune_takes_nothing_at_or_after_its_cutoff(cutoff: int, shape: str, _invariant: None) -> None:
    worker, task = a_worker()
    for store in task.stores.values():
        fill(worker, task, store.oracle.spec.name)
        if shape != "hot":
            compact(worker, task, store)
        if shape == "evicted":
            dump(worker, task, store, evict=True)
        needed = store.oracle.contents(start=cutoff)
        worker.writer.prune(task.name, store.state, cutoff)
        found = rows_of(read(worker, task, store), store.oracle.spec)
        assert {identity: values for identity, values in found.items() if identity.ts >= cutoff} == needed
        edge = store.oracle.spec.bucket_of(cutoff)
        assert all(identity.ts >= edge for identity in found), "and all of the buckets before it"


@numbered("WS-INV-24")
def test_not_there_and_not_readable_are_different(_invariant: None) -> None:
    inner = MemoryBackend()
    refusal = RefuseAt(1, kinds=frozenset({"read"}), persistent=True, lifted=True)
    worker, task = a_worker(WatchedBackend(inner, refusal))
    store = task.stores["events"]
    fill(worker, task, "events")
    task.handle.put(b"a", b"blob")
    token = worker.runtime.checkpoint(task.name)
    worker.open()
    worker.runtime.apply_checkpoint(task.name, token)
    store = task.stores["events"]
    refusal.arm()
    with pytest.raises(UnavailableError):
        read(worker, task, store)
    with pytest.raises(UnavailableError):
        task.handle.get(b"a")
    task.handle.put(b"b", b"a task that is at the checkpoint already need not read it")
    with pytest.raises(UnavailableError):
        worker.runtime.apply_checkpoint(task.name, token)
    refusal.lift()
    assert read(worker, task, store, RangeRequest([b"unknown"])).num_rows == 0
    assert task.handle.get(b"unknown") is None
    worker.open()
    worker.runtime.apply_checkpoint(task.name, token)
    store = task.stores["events"]
    pack = buckets_of(store)[0].runs[0].stored.pack
    inner.delete(pack)
    with pytest.raises(MissingObjectError, match=pack.rpartition("/")[2]):
        read(worker, task, store)


@numbered("WS-INV-25")
def test_keys_of_one_hash_and_tasks_of_one_key_never_mix(_invariant: None) -> None:
    worker = SimulatedWorker(1, MemoryBackend())
    twins = keys_of_one_hash(3)
    assert len({int(number) for number in hash_keys(pa.array(twins, pa.binary()))}) == 1
    for number, task in enumerate(worker.tasks):
        for store in task.stores.values():
            for place, key in enumerate(twins):
                rows = [row(key, ts, 100 * number + 10 * place + ts, weight=0.5) for ts in (1, 2, 150)]
                worker.write(task, store, rows)
        for place, key in enumerate(twins):
            task.handle.put(key, b"%d-%d" % (number, place))
    for task in worker.tasks:
        for store in task.stores.values():
            compact(worker, task, store)
            dump(worker, task, store, evict=True)
    tokens = [worker.runtime.checkpoint(task.name) for task in worker.tasks]
    for task, token in zip(worker.tasks, tokens, strict=True):
        task.kept.append(task.saved(token))
    worker.crash()
    for number, task in enumerate(worker.tasks):
        for store in task.stores.values():
            for place, key in enumerate(twins):
                assert len(store.oracle.contents([key])) == 3
                found = rows_of(read(worker, task, store, RangeRequest(key)), store.oracle.spec)
                assert found == store.oracle.contents([key])
                assert task.handle.get(key) == b"%d-%d" % (number, place)
    with pytest.raises(InvalidError, match="task"):
        worker.runtime.apply_checkpoint(worker.tasks[0].name, tokens[1])
