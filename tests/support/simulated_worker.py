"""One worker storage runtime and the naive oracle beside it, driven step by step from a schedule.

The worker has several tasks, each with an `append`, a `last` and a `fold` store and per-key state blobs. They have
few keys (two of them with one hash), few buckets and limits of a few hundred bytes, so that a short schedule meets
collisions, buckets under maintenance and keys just evicted. A step does something to both and compares what can be
compared. Maintenance operations are generators: steps start them, advance them by one phase, run them through or
close them, so that any of them is half-way while rows arrive, are read, pruned and checkpointed. A crash discards the
runtime and keeps the backend.

What an operator may not do, a schedule does not do either: a task appends and prunes nothing during its own
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from maintenance_steps import compacting, deleting, dumping, rehydrating, relieving
from schedules import Step
from storage_oracles import (
    Contents,
    StoreOracle,
    batch_of,
    keys_of_one_hash,
    rows_of,
    scan_all,
)
from tidegate.clock import ManualClock
from tidegate.metrics import Metrics
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import BucketIndex, PlainState
from tidegate.storage.maintenance.operations import WAITING
from tidegate.storage.ranges import keyed_schema
from tidegate.storage.reader import All, Bounds, RangeRequest, Time
from tidegate.storage.runs.aggregates import Count, Max, Min, Sum
from tidegate.storage.runtime import WorkerStorageRuntime
from tidegate.storage.spec import Merge, StoreSpec
from tidegate.storage.state import BytesCodec

BUCKET_MS = 100
BUCKETS = 3
TASKS = ("job/count/0", "job/count/1")
KEYS = [b"", b"a", b"bb", b"key-3", b"key-4", *keys_of_one_hash(2)]
NAMESPACE = "operator"
_PAYLOAD = pa.schema([pa.field("value", pa.int64()), pa.field("note", pa.string())])
SPECS = (
    StoreSpec("events", Merge.APPEND, _PAYLOAD, bucket_ms=BUCKET_MS, segment_ms=2 * BUCKET_MS),
    StoreSpec("latest", Merge.LAST, _PAYLOAD, bucket_ms=BUCKET_MS),
    StoreSpec(
        "totals",
        Merge.FOLD,
        aggregates=(
            Count("n"),
            Sum("total", "value", pa.int64()),
            Sum("weight", "weight"),
            Min("low", "value", pa.int64()),
            Max("high", "value", pa.int64()),
        ),
        bucket_ms=BUCKET_MS,
    ),
)
_LITTLE = {"reserve_bytes": 0, "soft_max_bytes": 400}
CONFIGS = (
    StorageConfig.for_tests(),
    StorageConfig.for_tests(  # always under pressure: keys are evicted all the time
        write_buffer=_LITTLE, base_runs=_LITTLE, state_cache={"reserve_bytes": 0, "soft_max_bytes": 600},
        low_watermark_permille=500, hot_bucket_count=0, max_deltas=2,
    ),
    StorageConfig.for_tests(  # everything is in many pieces: batches, runs, merges
        max_run_rows=5, max_batch_bytes=400, hot_bucket_count=1, max_deltas=3, max_open_packs=2,
    ),
)  # fmt: skip
WEIGHTS: Mapping[str, int] = {
    "append": 22, "state": 6, "prune": 4, "read": 8, "hold": 3, "let_go": 3,
    "compact": 5, "dump": 5, "evict": 5, "rehydrate": 10, "relieve": 5, "delete": 3, "begin_checkpoint": 2,
    "advance": 16, "run_through": 6, "cancel": 3,
    "checkpoint": 6, "crash": 3, "restore": 3, "release": 2, "collect_garbage": 2, "maintain": 3,
}  # fmt: skip


@dataclass
class SimulatedStore:
    """One store, real and naive."""

    state: PlainState
    oracle: StoreOracle


@dataclass
class Saved:
    """A checkpoint: its token and what must come back with it."""

    token: bytes
    oracles: dict[str, StoreOracle]
    blobs: dict[bytes, bytes]


@dataclass
class SimulatedTask:
    """One task: its stores, its blobs and the checkpoints kept for it."""

    name: str
    stores: dict[str, SimulatedStore] = field(default_factory=dict)
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    handle: Any = None
    kept: list[Saved] = field(default_factory=list)

    def saved(self, token: bytes) -> Saved:
        copies = {name: store.oracle.copy() for name, store in self.stores.items()}
        return Saved(token, copies, dict(self.blobs))


@dataclass
class Underway:
    """An operation that stands between two of its phases."""

    kind: str
    task: SimulatedTask
    operation: Generator[str, None, Any]
    saved: Saved | None = None


@dataclass
class Held:
    """A read that was begun and not ended: it must show the rows of when it was begun."""

    opened: Iterator[pa.RecordBatch]
    store: SimulatedStore
    expected: Contents
    unsure: set[Any]


def random_rows(spec: StoreSpec, randomness: SeededRandomness, count: int) -> list[dict[str, Any]]:
    """Rows in no order, with equal timestamps, nulls, tombstones and the odd key twice."""
    rows = []
    for _ in range(count):
        row: dict[str, Any] = {
            "key": KEYS[randomness.below(len(KEYS))],
            "ts": randomness.below(BUCKETS * BUCKET_MS) - BUCKET_MS,
            "value": None if randomness.below(8) == 0 else randomness.below(1000) - 500,
            "weight": randomness.below(10**6) / 7 - 10**4,
            "note": None if randomness.below(3) == 0 else "n" * randomness.below(4),
        }
        if spec.merge is not Merge.APPEND:
            row["ts"] = row["ts"] // 25 * 25  # few identities, written often
            row["seq"] = randomness.below(2)
        if spec.merge is Merge.LAST:
            row["deleted"] = randomness.below(4) == 0
        rows.append(row)
    return rows


class SimulatedWorker:
    """See the module."""

    def __init__(
        self,
        seed: int,
        backend: StorageBackend,
        *,
        config: StorageConfig | None = None,
        specs: Sequence[StoreSpec] = SPECS,
        tasks: Sequence[str] = TASKS,
    ) -> None:
        self.backend = backend
        self.config = config if config is not None else CONFIGS[seed % len(CONFIGS)]
        self.specs = specs
        # Long after anything is written by a backend's own clock: no grace protects what a live worker needs.
        self.clock = ManualClock(now_ms=4_102_444_800_000)
        self.randomness = SeededRandomness(seed)
        self.metrics = Metrics()
        self.tasks = [SimulatedTask(name) for name in tasks]
        self.underway: list[Underway] = []
        self.held: list[Held] = []
        self.done = self.finished = 0
        self.open()

    # -- life -------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """A new process on what the last one left behind."""
        self.runtime = WorkerStorageRuntime.open(
            self.config,
            self.backend,
            clock=self.clock,
            scheduler=ManualScheduler(self.clock),
            randomness=self.randomness,
            metrics=self.metrics,
        )
        self.reader, self.writer = self.runtime.reader(), self.runtime.writer()
        for task in self.tasks:
            task.stores = {}
            for spec in self.specs:
                state = PlainState(BucketIndex(spec))
                self.runtime.attach(task.name, state)
                task.stores[spec.name] = SimulatedStore(state, StoreOracle(spec))
            task.handle = self.runtime.state_handle(task.name, NAMESPACE, BytesCodec())
            task.blobs = {}

    def crash(self) -> None:
        """The process dies, the backend stays; every task comes back with its last token."""
        self.underway.clear()
        self.held.clear()
        self.open()
        for task in self.tasks:
            if task.kept:
                self.restore(task, task.kept[-1], task.kept[:-1])

    def restore(self, task: SimulatedTask, saved: Saved, retained: Sequence[Saved] = ()) -> None:
        older = [each.token for each in retained]
        self.runtime.apply_checkpoint(task.name, saved.token, retained=older)
        for name, oracle in saved.oracles.items():
            task.stores[name].oracle = oracle.copy()
        task.blobs = dict(saved.blobs)

    def settle(self) -> None:
        """Views are looked at once more and let go; operations that stand half-way are given up."""
        for held in self.held:
            self._check_held(held)
        self.held.clear()
        for each in self.underway:
            each.operation.close()
        self.underway.clear()

    def finish(self) -> None:
        """Everything is let go, compared, pruned; nothing may be left in any budget."""
        self.settle()
        self.check_everything()
        for task in self.tasks:
            for store in task.stores.values():
                self.writer.prune(task.name, store.state, 1 << 50)
                store.oracle.prune(1 << 50)
            for key in list(task.blobs):
                task.handle.delete(key)
            task.blobs.clear()
        self.check_everything()
        for task in self.tasks:
            self.runtime.checkpoint(task.name)  # deleted blobs become tombstones in the state's store
            self.runtime.maintain(task.name, 10**6)  # which maintenance takes away
        self.check_budgets()

    # -- steps ------------------------------------------------------------------------------------------------

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            getattr(self, f"_{step.name}")(step)
            self.done += 1

    def _task(self, step: Step) -> SimulatedTask:
        """Mostly the first one: what meets often finds more."""
        return self.tasks[-1 if step.a % 4 == 1 else 0]

    def _store(self, step: Step) -> tuple[SimulatedTask, SimulatedStore]:
        task = self._task(step)
        return task, task.stores[self.specs[step.a // 7 % len(self.specs)].name]

    def _is_checkpointing(self, task: SimulatedTask) -> bool:
        return any(each.kind == "checkpoint" and each.task is task for each in self.underway)

    def _append(self, step: Step) -> None:
        task, store = self._store(step)
        if not self._is_checkpointing(task):
            self.write(task, store, random_rows(store.oracle.spec, SeededRandomness(step.b), 1 + step.c % 12))

    def write(self, task: SimulatedTask, store: SimulatedStore, rows: list[dict[str, Any]]) -> None:
        batch = batch_of(store.oracle.spec, rows)
        parts = self.writer.append(task.name, store.state, batch)
        store.state.index.insert(parts)
        store.oracle.append(batch)

    def _state(self, step: Step) -> None:
        task = self._task(step)
        key = KEYS[step.b % len(KEYS)]
        if self._is_checkpointing(task):
            return
        if step.c % 4 == 0:
            task.handle.delete(key)
            task.blobs.pop(key, None)
        elif step.c % 4 == 1:
            self._compare_blob(task, key)
        else:
            blob = b"blob %d" % step.c
            task.handle.put(key, blob)
            task.blobs[key] = blob

    def _prune(self, step: Step) -> None:
        task, store = self._store(step)
        if self._is_checkpointing(task):
            return
        cutoff = (step.b % (BUCKETS + 1) - 1) * BUCKET_MS + (step.c % BUCKET_MS if step.c % 3 == 0 else 0)
        self.writer.prune(task.name, store.state, cutoff)
        store.oracle.prune(cutoff)

    def _read(self, step: Step) -> None:
        task, store = self._store(step)
        keys, bounds = self._wanted(step)
        found = pa.Table.from_batches(self._open(task, store, keys, bounds), schema=_schema(store))
        self._compare(
            store, rows_of(found, store.oracle.spec), self._expected(store, keys, bounds), keys, bounds
        )

    def _hold(self, step: Step) -> None:
        if len(self.held) >= 2:
            return
        task, store = self._store(step)
        keys, bounds = self._wanted(step)
        opened = self._open(task, store, keys, bounds)
        expected = self._expected(store, keys, bounds)
        self.held.append(Held(opened, store, expected, set(store.oracle.unsure)))

    def _let_go(self, step: Step) -> None:
        if self.held:
            self._check_held(self.held.pop(step.a % len(self.held)))

    def _check_held(self, held: Held) -> None:
        table = pa.Table.from_batches(held.opened, schema=_schema(held.store))
        found = rows_of(table, held.store.oracle.spec)
        then = StoreOracle(held.store.oracle.spec, unsure=held.unsure)
        if wrong := then.difference(found, held.expected):
            raise AssertionError(f"held view of {then.spec.name}: {wrong}")

    def _wanted(self, step: Step) -> tuple[list[bytes] | None, Bounds]:
        """Some keys, or None for every key, and bounds."""
        keys = [KEYS[(step.b + at) % len(KEYS)] for at in range(1 + step.b % 3)]
        start = step.c % (BUCKETS * BUCKET_MS) - BUCKET_MS
        bounds = Time(start, start + step.b % (2 * BUCKET_MS))
        return (keys if step.c % 5 in (1, 2, 4) else None), (All() if step.c % 5 in (0, 1) else bounds)

    def _open(
        self, task: SimulatedTask, store: SimulatedStore, keys: list[bytes] | None, bounds: Bounds
    ) -> Iterator[pa.RecordBatch]:
        """Begin to read now; the rows come when asked for, and reading them gives everything back."""
        if keys is None:
            return self.reader.scan(task.name, store.state, bounds)
        loaded = self.reader.load(self.reader.plan(task.name, store.state, [RangeRequest(keys, bounds)]))

        def batches() -> Iterator[pa.RecordBatch]:
            with loaded:
                yield from loaded.batches(_schema(store).names)

        return batches()

    def _expected(self, store: SimulatedStore, keys: list[bytes] | None, bounds: Bounds) -> Contents:
        start, end = bounds if isinstance(bounds, Time) else (None, None)
        return store.oracle.contents(keys, start, end)

    # -- maintenance ------------------------------------------------------------------------------------------

    def _bucket(self, store: SimulatedStore, step: Step) -> int | None:
        buckets = store.state.index.all_buckets()
        return buckets[step.b % len(buckets)] if buckets else None

    def _compact(self, step: Step) -> None:
        task, store = self._store(step)
        if (bucket := self._bucket(store, step)) is not None:
            whole = step.c % 2 == 0
            operation = compacting(self.runtime, task.name, store.state, bucket, whole=whole)
            self._begin("compact", task, operation, at_once=step.c % 3 == 0)

    def _dump(self, step: Step, *, evict: bool = False) -> None:
        task, store = self._store(step)
        buckets = store.state.index.all_buckets()
        chosen = buckets if step.b % 3 == 0 else buckets[step.b % 2 :: 2]
        if chosen:
            operation = dumping(self.runtime, task.name, store.state, chosen, evict=evict)
            self._begin("dump", task, operation, at_once=step.c % 3 == 0)

    def _evict(self, step: Step) -> None:
        self._dump(step, evict=True)

    def _rehydrate(self, step: Step) -> None:
        task, store = self._store(step)
        index = store.state.index
        found = [bucket for start in index.all_buckets() if (bucket := index.snapshot(start)) is not None]
        cold = [bucket.start for bucket in found if any(not run.is_hot for run in bucket.runs)]
        if cold:
            operation = rehydrating(self.runtime, task.name, store.state, cold[step.b % len(cold)])
            self._begin("rehydrate", task, operation, at_once=step.c % 2 == 0)

    def _relieve(self, step: Step) -> None:
        task = self._task(step)
        self._begin("relieve", task, relieving(self.runtime, task.name))

    def _delete(self, step: Step) -> None:
        task = self._task(step)
        self._begin("delete", task, deleting(self.runtime, task.name))

    def _begin_checkpoint(self, step: Step) -> None:
        task = self._task(step)
        if not self._is_checkpointing(task):
            self._begin("checkpoint", task, self.runtime.checkpointing(task.name), task.saved(b""))

    def _begin(
        self,
        kind: str,
        task: SimulatedTask,
        operation: Generator[str, None, Any],
        saved: Saved | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        each = Underway(kind, task, operation, saved)
        self.underway.append(each)
        if at_once:
            self.drive(each)
        else:
            self._next(each)

    def _next(self, each: Underway) -> str | None:
        """One phase further; None at the end."""
        try:
            return next(each.operation)
        except StopIteration as ended:
            self.underway.remove(each)
            self.finished += 1
            if each.saved is not None:
                each.saved.token = ended.value
                each.task.kept.append(each.saved)
                del each.task.kept[: -self.config.retained_checkpoints]
            return None
        except BaseException:
            self.underway.remove(each)
            raise

    def _advance(self, step: Step) -> None:
        if self.underway:
            self._next(self.underway[step.a % len(self.underway)])

    def _run_through(self, step: Step) -> None:
        if self.underway:
            self.drive(self.underway[step.a % len(self.underway)])

    def drive(self, each: Underway) -> None:
        """To its end; what it waits for is advanced in turn."""
        for _ in range(1000):
            phase = self._next(each)
            if phase is None:
                return
            if phase == WAITING:
                for other in [other for other in self.underway if other is not each]:
                    self._next(other)
                for held in self.held:
                    self._check_held(held)
                self.held.clear()
                for task in self.tasks:
                    self.runtime.maintain(task.name, 50)  # an unfinished pass may be what it waits for
        raise AssertionError(f"{each.kind} of {each.task.name} never ends")

    def _cancel(self, step: Step) -> None:
        if self.underway:
            self.underway.pop(step.a % len(self.underway)).operation.close()

    def _maintain(self, step: Step) -> None:
        self.runtime.maintain(self._task(step).name, 1 + step.b % 50)

    # -- checkpoints ------------------------------------------------------------------------------------------

    def _checkpoint(self, step: Step) -> None:
        task = self._task(step)
        if not self._is_checkpointing(task):
            each = Underway("checkpoint", task, self.runtime.checkpointing(task.name), task.saved(b""))
            self.underway.append(each)
            self.drive(each)

    def _crash(self, step: Step) -> None:
        self.crash()

    def _restore(self, step: Step) -> None:
        """Back to one of the kept checkpoints, in the same process; later ones are given up."""
        task = self._task(step)
        if not task.kept or self._is_checkpointing(task):
            return
        chosen = step.b % len(task.kept)
        for later in task.kept[chosen + 1 :]:
            self.runtime.release_checkpoint(task.name, later.token)
        del task.kept[chosen + 1 :]
        self.restore(task, task.kept[chosen], task.kept[:chosen])

    def _release(self, step: Step) -> None:
        task = self._task(step)
        if len(task.kept) > 1:
            self.runtime.release_checkpoint(task.name, task.kept.pop(0).token)

    def _collect_garbage(self, step: Step) -> None:
        task = self._task(step)
        self.runtime.collect_garbage(task.name, [saved.token for saved in task.kept])

    # -- comparing --------------------------------------------------------------------------------------------

    def check_everything(self) -> None:
        """Every row of every store and every blob, against the oracle; counts against the rows."""
        for task in self.tasks:
            for store in task.stores.values():
                found = rows_of(scan_all(self.reader, task.name, store.state), store.oracle.spec)
                self._compare(store, found, store.oracle.contents(), None, All())
                rows = store.state.index.total_rows
                if rows < len(found) or (store.oracle.spec.merge is Merge.APPEND and rows != len(found)):
                    raise AssertionError(f"{store.oracle.spec.name}: index counts {rows}, has {len(found)}")
            for key in KEYS:
                self._compare_blob(task, key)

    def _compare(
        self,
        store: SimulatedStore,
        found: Contents,
        expected: Contents,
        keys: list[bytes] | None,
        bounds: Bounds,
    ) -> None:
        if wrong := store.oracle.difference(found, expected):
            raise AssertionError(f"{store.oracle.spec.name}, {keys or 'every key'}, {bounds}: {wrong}")

    def _compare_blob(self, task: SimulatedTask, key: bytes) -> None:
        found = task.handle.get(key)
        if found != task.blobs.get(key):
            raise AssertionError(f"state of {key!r} is {found!r}, should be {task.blobs.get(key)!r}")

    def check_budgets(self) -> None:
        """Backlog, pool, permits and pins as if nothing had ever been here.

        Only deleted state blobs may still weigh something: the mark that one is gone lies over it until the
        two are merged. What is left in the backlog must be exactly that.
        """
        left = {
            "rows": sum(
                store.state.index.total_charge for task in self.tasks for store in task.stores.values()
            ),
            "backlog": self.runtime.backlog.used
            - sum(self.runtime.charge_of(task.name) for task in self.tasks),
            "pool": self.runtime.pool.total,
            **self.runtime.leaks()._asdict(),
        }
        if any(left.values()):
            raise AssertionError(f"left over after everything was pruned: {left}")


def run_schedule(seed: int, steps: Sequence[Step], backend: Callable[[], StorageBackend]) -> None:
    """One schedule from an empty backend to empty budgets."""
    worker = SimulatedWorker(seed, backend())
    worker.run(steps)
    worker.finish()
    if any(leaks := worker.runtime.close()):
        raise AssertionError(f"never given back: {leaks}")


def _schema(store: SimulatedStore) -> pa.Schema:
    return keyed_schema(store.state.index.spec.visible)
