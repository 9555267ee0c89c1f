"""The memory pool: exact ledgers, soft limits that do not stop, a total that does, relief that respects reserves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from threads import Beside, until
from tidegate.clock import Clock, ManualClock, SystemClock
from tidegate.errors import InternalError, InvalidError, OverloadError
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import Tenant
from tidegate.storage.memory.pool import ReliefShare, WorkerMemoryPool

BUFFER, BASE, STATE = Tenant.WRITE_BUFFER, Tenant.BASE_RUNS, Tenant.STATE_CACHE


def config_of(total: int = 1000, reserve: int = 100, soft: int = 300, **changes: Any) -> StorageConfig:
    tenant = {"reserve_bytes": reserve, "soft_max_bytes": soft}
    tenants = {
        "write_buffer": tenant,
        "base_runs": tenant,
        "state_cache": {"reserve_bytes": 0, "soft_max_bytes": 50},
    }
    return StorageConfig.for_tests(**{"worker_total_bytes": total, **tenants, **changes})


def pool_of(clock: Clock | None = None, **changes: Any) -> WorkerMemoryPool:
    return WorkerMemoryPool(config_of(**changes), clock or ManualClock())


@pytest.mark.parametrize("excess", [pytest.param(0, id="WS-T40"), pytest.param(1, id="WS-T40-one-more")])
def test_exactly_the_soft_max_calls_for_no_relief(excess: int) -> None:
    pool = pool_of()
    pool.reserve("t", BUFFER, 300 + excess)
    assert pool.is_above_soft("t", BUFFER) == bool(excess)
    assert pool.relief_need("t", BUFFER) == (301 - 210 if excess else 0)


@pytest.mark.parametrize("tenant", [pytest.param(each, id=f"WS-T46-{each}") for each in Tenant])
def test_above_the_soft_max_a_writer_goes_on(tenant: Tenant) -> None:
    """Relief that does not reach its target stops nobody; only the worker total does."""
    pool = pool_of()
    pool.set_relief(lambda shares: 0)
    pool.reserve("t", tenant, 500)
    pool.reserve("t", tenant, 500)
    assert pool.is_above_soft("t", tenant) and pool.relief_need("t", tenant) > 0


@pytest.mark.parametrize(
    "need", [pytest.param(200, id="WS-T47"), pytest.param(2000, id="WS-T47-more-than-there-is")]
)
def test_only_what_is_above_a_reserve_is_taken(need: int) -> None:
    """Task a is at its reserve, b over its soft max: only b gives."""
    pool = pool_of()
    pool.reserve("a", BUFFER, 100)
    pool.reserve("b", BUFFER, 600)
    shares = pool.shares(need)
    assert {share.task for share in shares} == {"b"}
    assert sum(share.nbytes for share in shares) == min(need, 500)


def test_those_over_their_soft_max_give_first_and_the_largest_excess_first() -> None:
    pool = pool_of(total=4000)
    for task, tenant, nbytes in (
        ("a", BUFFER, 290), ("b", BUFFER, 400), ("c", BUFFER, 350), ("c", STATE, 51),
    ):  # fmt: skip
        pool.reserve(task, tenant, nbytes)
    assert pool.shares(100) == [ReliefShare("b", BUFFER, 100)]
    assert pool.shares(151) == [
        ReliefShare("b", BUFFER, 100),
        ReliefShare("c", BUFFER, 50),
        ReliefShare("c", STATE, 1),
    ]
    beyond = {(share.task, share.tenant): share.nbytes for share in pool.shares(10_000)}
    assert beyond == {("a", BUFFER): 190, ("b", BUFFER): 300, ("c", BUFFER): 250, ("c", STATE): 51}


def fill(pool: WorkerMemoryPool) -> None:
    """Four tasks, each under its soft max, together exactly the worker total."""
    for task in "abcd":
        pool.reserve(task, BUFFER, 250)


@pytest.mark.parametrize(
    "given_back", [pytest.param(True, id="WS-T48-relief"), pytest.param(False, id="WS-T48-error")]
)
def test_at_the_worker_total_others_are_relieved_then_waited_for_then_an_error_says_so(
    given_back: bool,
) -> None:
    clock = ManualClock()
    pool = pool_of(clock, memory_timeout_ms=700)
    fill(pool)
    asked: list[list[ReliefShare]] = []

    def relief(shares: list[ReliefShare]) -> int:
        asked.append(shares)
        for share in shares if given_back else ():
            pool.release(share.task, share.tenant, share.nbytes)  # P2: without the pool's lock, or this hangs
        return sum(share.nbytes for share in shares)

    pool.set_relief(relief)
    if given_back:
        pool.reserve("a", BUFFER, 40)
        assert pool.total == 1000 and clock.monotonic_ms() == 0
    else:
        with pytest.raises(OverloadError, match="raise worker_total_bytes") as caught:
            pool.reserve("a", BUFFER, 40)
        assert caught.value.reason == "worker_memory"
        assert clock.monotonic_ms() == 700 and pool.total == 1000 and pool.waiting == 0
    assert [sum(share.nbytes for share in shares) for shares in asked] == [40]


@pytest.mark.parametrize(
    "give_back", [pytest.param("release", id="WS-T48-wait"), pytest.param("detach", id="WS-T48-detach")]
)
def test_who_waits_for_the_total_goes_on_when_memory_comes_back(give_back: str) -> None:
    pool = pool_of(SystemClock(), memory_timeout_ms=600_000)
    fill(pool)
    waiter = Beside(lambda: pool.reserve("a", STATE, 100))
    until(lambda: pool.waiting == 1)
    if give_back == "release":
        pool.release("b", BUFFER, 99)
        assert not waiter.is_done and not pool.try_reserve("c", STATE, 1), "nobody overtakes"
        pool.release("b", BUFFER, 1)
    else:
        assert pool.detach("b") == {BUFFER: 250}
    waiter.result()
    assert pool.used("a", STATE) == 100 and pool.waiting == 0 and pool.waits == 1


def test_more_than_the_whole_worker_has_is_refused_at_once() -> None:
    with pytest.raises(InvalidError, match="worker_total_bytes"):
        pool_of().reserve("t", BUFFER, 1001)


def test_reserving_over_the_limit_never_waits_and_shows() -> None:
    pool = pool_of()
    pool.reserve_over_limit("t", BASE, 1200)
    assert (pool.total, pool.limit) == (1200, 1000)
    assert not pool.try_reserve("t", STATE, 1)


def test_one_task_more_than_configured_is_refused_so_that_reserves_stay_true() -> None:
    pool = pool_of(max_tasks=2)
    pool.attach("a")
    pool.reserve("b", BUFFER, 1)
    with pytest.raises(InvalidError, match="max_tasks 2"):
        pool.reserve("c", BUFFER, 1)
    pool.detach("a")
    pool.reserve("c", BUFFER, 1)


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda pool: pool.release("t", BUFFER, 11), id="WS-INV-15-release"),
        pytest.param(lambda pool: pool.release("t", BASE, 1), id="WS-INV-15-wrong-tenant"),
        pytest.param(lambda pool: pool.release("u", BUFFER, 1), id="WS-INV-15-wrong-task"),
        pytest.param(lambda pool: pool.release("t", BUFFER, -1), id="WS-INV-15-negative"),
    ],
)
def test_giving_back_more_than_was_taken_raises_and_changes_nothing(
    act: Callable[[WorkerMemoryPool], None],
) -> None:
    pool = pool_of()
    pool.reserve("t", BUFFER, 10)
    with pytest.raises(InternalError):
        act(pool)
    assert pool.total == pool.used("t") == pool.used("t", BUFFER) == 10


def test_an_over_release_names_task_and_tenant() -> None:
    with pytest.raises(InternalError, match=r"task pipe/op/3 .* of base_runs"):
        pool_of().release("pipe/op/3", BASE, 1)


STEP = st.tuples(
    st.sampled_from("abc"), st.sampled_from(list(Tenant)), st.integers(0, 400), st.integers(0, 4)
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_the_total_is_always_the_sum_of_all_tenants(steps: list[tuple[str, Tenant, int, int]]) -> None:
    """WS-INV-15 against a plain dict."""
    pool = pool_of(memory_timeout_ms=5)
    model: dict[tuple[str, Tenant], int] = {}
    for task, tenant, nbytes, action in steps:
        held = model.get((task, tenant), 0)
        if action == 0 and pool.try_reserve(task, tenant, nbytes):
            assert sum(model.values()) + nbytes <= 1000 or nbytes == 0
            model[task, tenant] = held + nbytes
        elif action == 1:
            pool.reserve_over_limit(task, tenant, nbytes)
            model[task, tenant] = held + nbytes
        elif action == 2 and nbytes <= held:
            pool.release(task, tenant, nbytes)
            model[task, tenant] = held - nbytes
        elif action == 3 and nbytes <= held:
            pool.release(task, tenant, nbytes)
            pool.reserve_over_limit(task, BASE, nbytes)
            model[task, tenant] = held - nbytes
            model[task, BASE] = model.get((task, BASE), 0) + nbytes
        elif action == 4 and nbytes < 20:
            assert sum(pool.detach(task).values()) == sum(
                v for (owner, _), v in model.items() if owner == task
            )
            model = {key: value for key, value in model.items() if key[0] != task}
        assert pool.total == sum(model.values())
        assert all(pool.used(task, tenant) == value for (task, tenant), value in model.items())


def test_many_threads_leave_the_ledger_exact() -> None:
    """WS-INV-15 under contention: eight threads, no waiter is lost, nothing is left."""
    pool = pool_of(SystemClock(), memory_timeout_ms=600_000, max_tasks=4)

    def work(task: str) -> None:
        for number in range(300):
            nbytes = (number * 37) % 400
            pool.reserve(task, BUFFER, nbytes)
            pool.reserve_over_limit(task, BASE, nbytes // 2)
            pool.release(task, BUFFER, nbytes)
            pool.release(task, BASE, nbytes // 2)

    for thread in [Beside(lambda task=task: work(task)) for task in "abcdabcd"]:
        thread.result()
    assert pool.total == 0 and pool.waiting == 0
