"""The caches of runs: bytes rise and fall exactly with hot copies, tasks and tenants apart, ids never again."""

from __future__ import annotations

import pyarrow as pa
import pytest

from storage_oracles import batch_of
from tidegate.clock import ManualClock
from tidegate.errors import InternalError, OverloadError
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import HotCopy, Tenant
from tidegate.storage.memory.pool import BaseRuns, WorkerMemoryPool, WriteBuffer
from tidegate.storage.runs.build import build_runs
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Merge, StoreSpec

SPEC = StoreSpec("events", Merge.APPEND, pa.schema([("value", pa.int64())]))


def run_of(rows: int = 10, keys: int = 3) -> Run:
    batch = batch_of(SPEC, [{"key": b"k%d" % (i % keys), "ts": i, "value": i} for i in range(rows)])
    return build_runs(SPEC, batch, first_seq=0, max_rows=1 << 20)[0]


@pytest.fixture
def pool() -> WorkerMemoryPool:
    return WorkerMemoryPool(StorageConfig.for_tests(memory_timeout_ms=10), ManualClock())


@pytest.fixture
def buffer(pool: WorkerMemoryPool) -> WriteBuffer:
    return WriteBuffer(pool)


@pytest.mark.parametrize(
    "cache_of", [pytest.param(WriteBuffer, id="WS-T1"), pytest.param(BaseRuns, id="WS-T1-base")]
)
def test_bytes_rise_with_puts_and_fall_back_to_zero(
    pool: WorkerMemoryPool, cache_of: type[WriteBuffer] | type[BaseRuns]
) -> None:
    cache, runs = cache_of(pool), [run_of(10), run_of(20)]
    hots = (
        cache.put_all("t", runs) if isinstance(cache, WriteBuffer) else [cache.put("t", run) for run in runs]
    )
    assert pool.used("t", cache.tenant) == pool.total == sum(run.nbytes for run in runs)
    assert [hot.run for hot in hots] == runs and cache.count("t") == 2
    assert [cache.remove("t", hot) for hot in hots] == [run.nbytes for run in runs]
    assert pool.total == cache.count("t") == 0
    assert hots[0].run.row_count == 10, "who holds the copy keeps its rows"


def test_removing_again_gives_nothing_back_twice(buffer: WriteBuffer, pool: WorkerMemoryPool) -> None:
    """WS-INV-15."""
    keep, gone = buffer.put_all("t", [run_of(), run_of()])
    assert buffer.remove("t", gone) > 0
    assert buffer.remove("t", gone) == buffer.remove_all("t", [gone, gone]) == 0
    assert pool.used("t", Tenant.WRITE_BUFFER) == keep.run.nbytes


@pytest.mark.parametrize("cache_of", [WriteBuffer, BaseRuns])
def test_a_shrunk_copy_stands_beside_the_whole_one_until_that_is_removed(
    pool: WorkerMemoryPool, cache_of: type[WriteBuffer] | type[BaseRuns]
) -> None:
    cache = cache_of(pool)
    whole = put(cache, run_of(100))
    part = cache.shrink("t", whole, run_of(10))
    assert not part.complete and part.id != whole.id and part.tenant is cache.tenant
    assert pool.total == part.run.nbytes + whole.run.nbytes
    assert cache.remove("t", whole) == whole.run.nbytes
    assert pool.total == part.run.nbytes and cache.count("t") == 1


def put(cache: WriteBuffer | BaseRuns, run: Run, task: str = "t") -> HotCopy:
    return cache.put_all(task, [run])[0] if isinstance(cache, WriteBuffer) else cache.put(task, run)


def test_clearing_one_task_leaves_the_others_and_starts_no_id_again(
    buffer: WriteBuffer, pool: WorkerMemoryPool
) -> None:
    mine, other = put(buffer, run_of()), put(buffer, run_of(), "u")
    assert buffer.clear("t") == mine.run.nbytes
    assert (buffer.count("t"), buffer.count("u"), pool.total) == (0, 1, other.run.nbytes)
    assert put(buffer, run_of()).id > other.id > mine.id
    assert BaseRuns(pool).put("t", run_of()).id > other.id


def test_copies_of_another_cache_are_refused(buffer: WriteBuffer, pool: WorkerMemoryPool) -> None:
    base = BaseRuns(pool).put("t", run_of())
    for act in (
        lambda: buffer.remove("t", base),
        lambda: buffer.remove_all("t", [base]),
        lambda: buffer.shrink("t", base, run_of()),
    ):
        with pytest.raises(InternalError, match="belongs to base_runs"):
            act()
    assert pool.total == pool.used("t", Tenant.BASE_RUNS) == base.run.nbytes


def test_at_the_worker_total_rows_are_refused_all_together_and_bases_are_not(
    buffer: WriteBuffer, pool: WorkerMemoryPool
) -> None:
    runs = [run_of(), run_of()]
    pool.reserve_over_limit("t", Tenant.BASE_RUNS, pool.limit - runs[0].nbytes)
    with pytest.raises(OverloadError):
        buffer.put_all("t", runs)
    assert buffer.count("t") == 0 and pool.total == pool.limit - runs[0].nbytes
    assert len(buffer.put_all("t", runs, forced=True)) == 2
    assert BaseRuns(pool).put("t", run_of()).complete


def test_the_buffer_is_over_its_limit_strictly_above_it_with_what_is_to_come(
    buffer: WriteBuffer, pool: WorkerMemoryPool
) -> None:
    most = StorageConfig.for_tests().limits(Tenant.WRITE_BUFFER).soft_max_bytes
    hot = put(buffer, run_of())
    left = most - hot.run.nbytes
    assert not buffer.is_over_limit("t", left) and buffer.is_over_limit("t", left + 1)
    assert not buffer.is_over_limit("u", most), "limits are a task's own"


def test_base_runs_have_room_up_to_the_low_watermarks_of_task_and_worker(pool: WorkerMemoryPool) -> None:
    config = StorageConfig.for_tests()
    bases, most = BaseRuns(pool), config.relief_target(Tenant.BASE_RUNS)
    total = pool.limit * config.low_watermark_permille // 1000
    assert bases.has_room("t", min(most, total)) and not bases.has_room("t", most + 1)
    pool.reserve_over_limit("u", Tenant.STATE_CACHE, total - 10)
    assert bases.has_room("t", 10) and not bases.has_room("t", 11)
