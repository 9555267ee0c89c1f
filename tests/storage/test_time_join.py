"""A time-bounded join on nothing but the facade: any operator can plug in.

`TimeJoin` keeps both sides' rows in two `append` stores of its own and joins rows of one key whose times are at
most `within` apart, each pair once, when the later of the two arrives. It owns its state (an index and a
watermark in the checkpoint), uses `reader()`, `writer()` and `attach` only, and knows nothing of buckets in
memory, packs or eviction.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from maintenance_steps import compacting, dumping
from tidegate.clock import ManualClock
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import BucketIndex, Tenant
from tidegate.storage.reader import RangeRequest, Time
from tidegate.storage.runtime import WorkerStorageRuntime
from tidegate.storage.spec import Merge, StoreSpec

TASK = "shop/join/0"
WITHIN = 40
SIDES = ("orders", "payments")
ROW = tuple[bytes, int, int]  # key, ts, value
PAIR = tuple[bytes, int, int, int, int]  # key, order's ts and value, payment's ts and value


class JoinSide:
    """The rows of one side, and how far its stream has come: what storage sees of the operator."""

    def __init__(self, name: str) -> None:
        self.index = BucketIndex(
            StoreSpec(name, Merge.APPEND, pa.schema([("value", pa.int64())]), bucket_ms=100)
        )
        self.watermark = -(2**63)

    def encode_progress(self) -> bytes:
        return self.watermark.to_bytes(8, "big", signed=True)

    def restore_progress(self, data: bytes) -> None:
        self.watermark = int.from_bytes(data, "big", signed=True)


class TimeJoin:
    """Joins two streams; a row older than its watermark is late and dropped."""

    def __init__(self, runtime: WorkerStorageRuntime) -> None:
        self.runtime = runtime
        self.reader, self.writer = runtime.reader(), runtime.writer()
        self.sides = {name: JoinSide(name) for name in SIDES}
        for side in self.sides.values():
            runtime.attach(TASK, side)

    def on_batch(self, name: str, batch: pa.RecordBatch) -> pa.Table:
        """New rows of one side; the pairs they complete."""
        side = self.sides[name]
        other = self.sides[SIDES[1 - SIDES.index(name)]]
        batch = batch.filter(pc.greater_equal(batch.column("ts"), side.watermark))
        side.index.insert(self.writer.append(TASK, side, batch))
        if not batch.num_rows:
            return self._pairs(name, batch, None)
        keys = pc.unique(batch.column("key")).to_pylist()
        span = Time(pc.min(batch.column("ts")).as_py() - WITHIN, pc.max(batch.column("ts")).as_py() + WITHIN)
        with self.reader.load(self.reader.plan(TASK, other, [RangeRequest(keys, span)])) as loaded:
            return self._pairs(name, batch, loaded.to_table())

    def _pairs(self, name: str, batch: pa.RecordBatch, found: pa.Table | None) -> pa.Table:
        mine = pa.table(batch).rename_columns(["key", "ts", "value"])
        if found is None:
            found = mine.slice(0, 0)
        theirs = pa.table({column: found.column(column) for column in ("key", "ts", "value")})
        left, right = (mine, theirs) if name == SIDES[0] else (theirs, mine)
        joined = left.cast(mine.schema).join(
            right.cast(mine.schema), "key", join_type="inner", left_suffix=".left", right_suffix=".right"
        )
        apart = pc.abs(pc.subtract(joined.column("ts.left"), joined.column("ts.right")))
        return joined.filter(pc.less_equal(apart, WITHIN))

    def on_watermark(self, watermark: int) -> None:
        """No row older than this comes on either side: what nothing can join any more goes."""
        for side in self.sides.values():
            if watermark > side.watermark:
                side.watermark = watermark
                self.writer.prune(TASK, side, watermark - WITHIN)


def open_runtime(backend: MemoryBackend, clock: ManualClock, seed: int = 1) -> WorkerStorageRuntime:
    return WorkerStorageRuntime.open(
        StorageConfig.for_tests(),
        backend,
        clock=clock,
        scheduler=ManualScheduler(clock),
        randomness=SeededRandomness(seed),
    )


def stream(seed: int, rounds: int) -> list[tuple[str, list[ROW], int]]:
    """Batches of both sides around a moving time, with the watermark after each; some rows are late."""
    generator = np.random.default_rng(seed)
    found = []
    for number in range(rounds):
        now = number * 30
        rows = [
            (
                b"key-%d" % generator.integers(0, 5),
                int(now + generator.integers(-60, 60)),
                int(generator.integers(1000)),
            )
            for _ in range(generator.integers(0, 12))
        ]
        found.append((SIDES[int(generator.integers(2))], rows, now - 50))
    return found


def brute_force(batches: list[tuple[str, list[ROW], int]]) -> list[PAIR]:
    """Every row that was not late with every row of the other side."""
    kept: dict[str, list[ROW]] = {name: [] for name in SIDES}
    watermark = -(2**63)
    for name, rows, after in batches:
        kept[name] += [row for row in rows if row[1] >= watermark]
        watermark = max(watermark, after)
    orders, payments = kept["orders"], kept["payments"]
    return sorted(
        (key, ts, value, other_ts, other_value)
        for key, ts, value in orders
        for other_key, other_ts, other_value in payments
        if key == other_key and abs(ts - other_ts) <= WITHIN
    )


def batch_from(rows: list[ROW]) -> pa.RecordBatch:
    keys, times, values = zip(*rows, strict=True) if rows else ((), (), ())
    return pa.RecordBatch.from_arrays(
        [pa.array(keys, pa.binary()), pa.array(times, pa.int64()), pa.array(values, pa.int64())],
        names=["key", "ts", "value"],
    )


def pairs_of(table: pa.Table) -> list[PAIR]:
    columns = ("key", "ts.left", "value.left", "ts.right", "value.right")
    return list(zip(*(table.column(name).to_pylist() for name in columns), strict=True))


def squeeze(runtime: WorkerStorageRuntime, join: TimeJoin, chance: np.random.Generator) -> None:
    """What storage may do at any time: dump and evict, compact, relieve."""
    for side in join.sides.values():
        buckets = side.index.all_buckets()
        if buckets and chance.integers(2):
            for _ in dumping(runtime, TASK, side, buckets, evict=bool(chance.integers(2))):
                pass
        if buckets and chance.integers(2):
            for _ in compacting(runtime, TASK, side, buckets[int(chance.integers(len(buckets)))]):
                pass


@pytest.mark.parametrize("seed", range(12))
def test_a_join_on_the_facade_equals_brute_force(seed: int) -> None:
    clock, backend = ManualClock(), MemoryBackend()
    runtime = open_runtime(backend, clock)
    join, batches, chance = TimeJoin(runtime), stream(seed, 40), np.random.default_rng(seed)
    found: list[PAIR] = []
    for name, rows, watermark in batches:
        found += pairs_of(join.on_batch(name, batch_from(rows)))
        join.on_watermark(watermark)
        squeeze(runtime, join, chance)
    assert sorted(found) == brute_force(batches)
    assert found, "a stream without a pair shows nothing"


@pytest.mark.parametrize("seed", range(6))
def test_a_join_goes_on_after_a_crash_as_if_nothing_had_happened(seed: int) -> None:
    clock, backend = ManualClock(), MemoryBackend()
    runtime = open_runtime(backend, clock)
    join, batches, chance = TimeJoin(runtime), stream(seed + 100, 40), np.random.default_rng(seed)
    found: list[PAIR] = []
    saved, token = 0, None
    emitted: list[list[PAIR]] = []
    position = 0
    while position < len(batches):
        name, rows, watermark = batches[position]
        emitted[position:] = [pairs_of(join.on_batch(name, batch_from(rows)))]
        join.on_watermark(watermark)
        position += 1
        if position % 7 == 0 and position > saved:
            token, saved = runtime.checkpoint(TASK), position
        elif token is not None and chance.integers(6) == 0:  # the process dies; its input is replayed
            runtime = open_runtime(backend, clock, seed=position + 1000)
            join = TimeJoin(runtime)
            runtime.apply_checkpoint(TASK, token)
            position = saved
    for pairs in emitted:
        found += pairs
    assert sorted(found) == brute_force(batches)


def test_a_join_gives_back_what_can_no_longer_join() -> None:
    clock = ManualClock()
    runtime = open_runtime(MemoryBackend(), clock)
    join = TimeJoin(runtime)
    most = 0
    for number in range(60):
        for name in SIDES:
            rows = [(b"key", number * 50 + offset, offset) for offset in range(50)]
            join.on_batch(name, batch_from(rows))
        join.on_watermark(number * 50)
        most = max(most, *(side.index.total_rows for side in join.sides.values()))
    assert most <= 300, "state follows the bound of the join, not the stream"
    join.on_watermark(10**9)
    assert runtime.backlog.used == 0
    assert runtime.pool.total == runtime.pool.used(TASK, Tenant.STATE_CACHE) <= 64, "the sides' progress"
