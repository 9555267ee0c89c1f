"""The caches of runs: bytes rise and fall exactly with hot copies, tasks and tenants apart, ids never again."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import InternalError, OverloadError
from tidegate.storage.config import StorageConfig
from tidegate.storage.index.entries import Tenant
from tidegate.storage.memory.caches import RunCache
from tidegate.storage.memory.pool import WorkerMemoryPool
from tidegate.storage.runs.building import build_runs
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Merge, StoreSpec
from tidegate.testing.storage import batch_of

SPEC = StoreSpec("events", Merge.APPEND, pa.schema([("value", pa.int64())]))


def run_of(rows: int = 10, keys: int = 3) -> Run:
    batch = batch_of(SPEC, [{"key": b"k%d" % (i % keys), "ts": i, "value": i} for i in range(rows)])
    return build_runs(SPEC, batch, first_seq=0, max_rows=1 << 20)[0]


@pytest.fixture
def pool() -> WorkerMemoryPool:
    return WorkerMemoryPool(StorageConfig.for_tests(memory_timeout_ms=10), ManualClock())


@pytest.fixture
def buffer(pool: WorkerMemoryPool) -> RunCache:
    return RunCache(Tenant.WRITE_BUFFER, pool)


@pytest.mark.parametrize(
    "tenant", [pytest.param(Tenant.WRITE_BUFFER, id="WS-T1"), pytest.param(Tenant.BASE_RUNS, id="WS-T1-base")]
)
def test_bytes_rise_with_puts_and_fall_back_to_zero(pool: WorkerMemoryPool, tenant: Tenant) -> None:
    cache, runs = RunCache(tenant, pool), [run_of(10), run_of(20)]
    hots = [cache.put("t", run) for run in runs]
    assert cache.bytes("t") == pool.total == sum(run.nbytes for run in runs)
    assert cache.get("t", hots[0].id) is hots[0] and hots[0].run is runs[0]
    assert [cache.remove("t", hot) for hot in hots] == [run.nbytes for run in runs]
    assert cache.bytes("t") == pool.total == 0
    assert cache.get("t", hots[0].id) is None
    assert hots[0].run.row_count == 10, "who holds the copy keeps its rows"


def test_removing_again_gives_nothing_back_twice(buffer: RunCache) -> None:
    """WS-INV-15."""
    keep, gone = buffer.put("t", run_of()), buffer.put("t", run_of())
    assert buffer.remove("t", gone) > 0
    assert buffer.remove("t", gone) == buffer.remove_all("t", [gone, gone]) == 0
    assert buffer.bytes("t") == keep.run.nbytes


def test_a_smaller_copy_takes_the_place_of_a_larger_one(buffer: RunCache) -> None:
    whole = buffer.put("t", run_of(100))
    part = buffer.replace("t", whole, run_of(10), complete=False)
    assert part is not None and not part.complete and part.id != whole.id
    assert buffer.bytes("t") == part.run.nbytes
    grown = buffer.replace("t", part, run_of(50), complete=True)
    assert grown is not None and buffer.bytes("t") == grown.run.nbytes
    assert buffer.replace("t", grown, None) is None
    assert buffer.bytes("t") == 0 and buffer.count("t") == 0
    with pytest.raises(InternalError, match="task t"):
        buffer.replace("t", grown, None)


def test_clearing_one_task_leaves_the_others_and_starts_no_id_again(
    buffer: RunCache, pool: WorkerMemoryPool
) -> None:
    mine, other = buffer.put("t", run_of()), buffer.put("u", run_of())
    assert buffer.clear("t") == mine.run.nbytes
    assert (buffer.bytes("t"), buffer.bytes("u")) == (0, other.run.nbytes)
    assert buffer.put("t", run_of()).id > other.id > mine.id
    assert RunCache(Tenant.BASE_RUNS, pool).put("t", run_of()).id > other.id


def test_copies_of_another_cache_are_refused(buffer: RunCache, pool: WorkerMemoryPool) -> None:
    base = RunCache(Tenant.BASE_RUNS, pool).put("t", run_of())
    for act in (lambda: buffer.remove("t", base), lambda: buffer.remove_all("t", [base])):
        with pytest.raises(InternalError, match="belongs to base_runs"):
            act()
    assert pool.used("t", Tenant.BASE_RUNS) == base.run.nbytes


def test_at_the_worker_total_a_put_fails_clean_and_an_output_of_maintenance_does_not(
    pool: WorkerMemoryPool,
) -> None:
    cache = RunCache(Tenant.WRITE_BUFFER, pool)
    pool.reserve_over_limit("t", Tenant.BASE_RUNS, pool.limit)
    with pytest.raises(OverloadError):
        cache.put("t", run_of())
    assert cache.count("t") == 0 and pool.total == pool.limit
    hot = cache.put("t", run_of(), over_limit=True)
    assert pool.over_total == hot.run.nbytes
