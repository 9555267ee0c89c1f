"""Pins, live runs, checkpoint holds and the queue: a pack is deleted once nobody needs it, and not before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from threads import Beside
from tidegate.clock import ManualClock
from tidegate.errors import InternalError, UnavailableError
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import StoredRef
from tidegate.storage.maintenance.retirement import (
    BatchPins,
    BatchRetirementQueue,
    CheckpointHolds,
    Deletion,
    Lease,
    PackUse,
)


class Shelves(MemoryBackend):
    """A backend that deletes, or fails as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[str] = []
        self.errors: list[BaseException] = []

    def delete(self, name: str) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.deleted.append(name)


class Yard:
    """A queue with everything around it."""

    def __init__(self) -> None:
        self.backend, self.pins, self.holds, self.clock = (
            Shelves(),
            BatchPins(),
            CheckpointHolds(),
            ManualClock(),
        )
        config = StorageConfig.for_tests(delete_backoff_ms=1000, delete_backoff_max_ms=3000)
        self.queue = BatchRetirementQueue(config, self.backend, self.pins, self.holds, self.clock)

    def pin(self, *packs: str) -> Lease:
        return self.pins.pin("t", [StoredRef(pack, 0) for pack in packs])


@pytest.fixture
def yard() -> Yard:
    return Yard()


@pytest.mark.parametrize(
    "refs",
    [
        pytest.param([StoredRef("p", 0), StoredRef("p", 1)], id="WS-T2"),
    ],
)
def test_a_lease_pins_until_it_is_closed(refs: list[StoredRef]) -> None:
    pins = BatchPins()
    with pins.pin("t", refs) as lease:
        assert lease.packs == pins.pinned("t") == {"p"}
        assert pins.pinned("u") == frozenset(), "pins are a task's own"
        assert pins.open_leases() == 1
    assert pins.pinned("t") == frozenset() and pins.open_leases() == 0


@pytest.mark.parametrize("leases", [pytest.param(2, id="WS-T3"), pytest.param(5, id="WS-T3-five")])
def test_nothing_is_deleted_until_the_last_of_several_leases_is_closed(yard: Yard, leases: int) -> None:
    held = [yard.pin("p") for _ in range(leases)]
    yard.queue.retire("t", ["p"])
    for lease in held:
        assert yard.pins.pinned("t") == {"p"}
        assert yard.queue.delete_once("t", 10) == Deletion((), ())
        lease.close()
    assert yard.queue.delete_once("t", 10).deleted == ("p",)


@pytest.mark.parametrize("others", [pytest.param([], id="WS-T4"), pytest.param(["q"], id="WS-T4-others-go")])
def test_a_pinned_pack_waits_in_the_queue(yard: Yard, others: list[str]) -> None:
    lease = yard.pin("p")
    yard.queue.retire("t", ["p", *others])
    assert list(yard.queue.delete_once("t", 10).deleted) == others
    assert yard.queue.waiting("t") == {"pinned": 1, "held": 0, "retrying": 0, "ready": 0}
    lease.close()
    assert yard.queue.delete_once("t", 10).deleted == ("p",)
    assert yard.queue.delete_once("t", 10).deleted == ()
    assert yard.backend.deleted == [*others, "p"]


@pytest.mark.parametrize(
    "error",
    [pytest.param(UnavailableError("down"), id="WS-T5"), pytest.param(OSError("disk"), id="WS-T5-os-error")],
)
def test_a_failed_delete_stays_queued_and_is_tried_again_after_a_pause(
    yard: Yard, error: BaseException
) -> None:
    yard.queue.retire("t", ["p", "q"])
    yard.backend.errors = [error]
    assert yard.queue.delete_once("t", 10) == Deletion(("q",), ("p",))
    assert yard.queue.delete_once("t", 10) == Deletion((), ()), "not before its pause is over"
    assert yard.queue.waiting("t")["retrying"] == 1
    yard.clock.advance(1000)
    assert yard.queue.delete_once("t", 10).deleted == ("p",)
    assert yard.queue.retired("t") == []


def test_pauses_grow_up_to_a_bound(yard: Yard) -> None:
    """WS-T5: 1 s, 2 s, then 3 s each."""
    yard.queue.retire("t", ["p"])
    for pause_ms in (1000, 2000, 3000, 3000):
        yard.backend.errors = [UnavailableError("down")]
        assert yard.queue.delete_once("t", 1).failed == ("p",)
        yard.clock.advance(pause_ms - 1)
        assert yard.queue.delete_once("t", 1) == Deletion((), ())
        yard.clock.advance(1)
    assert yard.queue.delete_once("t", 1).deleted == ("p",)


def test_an_error_no_retry_cures_is_raised_and_forgets_nothing(yard: Yard) -> None:
    yard.queue.retire("t", ["p", "q", "r"])
    yard.backend.errors = [ZeroDivisionError("a fault of the program")]
    with pytest.raises(ZeroDivisionError):
        yard.queue.delete_once("t", 10)
    yard.clock.advance(1000)
    assert yard.queue.delete_once("t", 10).deleted == ("p", "q", "r")


@pytest.mark.parametrize(
    ("budget", "deleted"), [pytest.param(0, 0, id="WS-T6-budget-0"), pytest.param(1, 1, id="WS-T6-budget-1")]
)
def test_retiring_twice_is_one_entry_and_a_budget_is_kept(yard: Yard, budget: int, deleted: int) -> None:
    yard.queue.retire("t", ["p"])
    yard.queue.retire("t", ["p", "p"])
    assert yard.queue.retired("t") == ["p"]
    assert len(yard.queue.delete_once("t", budget).deleted) == deleted
    assert len(yard.queue.delete_once("t", 10).deleted) == 1 - deleted


def test_a_budget_counts_deletable_packs_only_oldest_first(yard: Yard) -> None:
    yard.queue.retire("t", [f"p{i}" for i in range(5)])
    lease = yard.pin("p0")
    assert yard.queue.delete_once("t", 2).deleted == ("p1", "p2")
    lease.close()
    assert yard.queue.delete_once("t", 2).deleted == ("p0", "p3")


def test_tasks_are_apart(yard: Yard) -> None:
    yard.queue.retire("t", ["p"])
    yard.queue.retire("u", ["q"])
    yard.queue.clear("t")
    assert yard.queue.delete_once("t", 10).deleted == ()
    assert yard.queue.delete_once("u", 10).deleted == ("q",)


@pytest.mark.parametrize(
    "order",
    [pytest.param("in order", id="WS-INV-10-holds"), pytest.param("reversed", id="WS-INV-10-reversed")],
)
def test_a_pack_outlives_every_checkpoint_that_needs_it(yard: Yard, order: str) -> None:
    yard.holds.hold("t", 7, ["p", "q"])
    yard.holds.hold("t", 8, ["q"])
    yard.holds.hold("t", 8, ["r", "q"])
    yard.queue.retire("t", ["p", "q", "r"])
    assert yard.queue.delete_once("t", 10).deleted == ()
    assert yard.queue.waiting("t")["held"] == 3 and yard.holds.packs("t") == {"p", "q", "r"}
    first, second = (7, 8) if order == "in order" else (8, 7)
    yard.holds.release("t", first)
    assert yard.queue.delete_once("t", 10).deleted == (("p",) if first == 7 else ("r",))
    yard.holds.release("t", second)
    assert len(yard.queue.delete_once("t", 10).deleted) == 2
    assert yard.holds.packs("t") == frozenset()


def refs(pack: str, *sizes: int) -> list[StoredRef]:
    return [StoredRef(pack, slot, nbytes) for slot, nbytes in enumerate(sizes)]


def test_live_runs_are_counted_down_to_the_packs_to_retire() -> None:
    use = PackUse()
    p, q = refs("p", 10, 60, 30), refs("q", 5)
    use.add("t", [*p, *q])
    use.add("u", refs("p", 1))
    assert use.remove("t", [p[1], p[2]]) == []
    assert use.packs("t") == {"p", "q"} and use.reclaimable("t") == 90
    assert use.sparse("t", 100) == [] and use.sparse("t", 101) == ["p"], "by bytes, and below the share"
    assert use.remove("t", [p[0], *q]) == ["p", "q"]
    assert use.packs("t") == frozenset() and use.sparse("t", 1000) == [] and use.packs("u") == {"p"}
    assert use.reclaimable("t") == 105, "dead until it is deleted"
    use.forget("t", ["p"])
    assert use.reclaimable("t") == 5


def test_of_a_restored_pack_the_size_is_what_checkpoints_name_of_it() -> None:
    use = PackUse()
    p = refs("p", 10, 90)
    use.add("t", p[:1])
    use.see("t", p)
    use.see("t", refs("gone", 7))
    assert use.sparse("t", 300) == ["p"] and use.packs("t") == {"p"} and use.reclaimable("t") == 97
    use.forget_dead("t")
    assert use.reclaimable("t") == 90


@pytest.mark.parametrize("pack", [["p", "p"], ["q"], ["q", "p"]])
def test_a_run_that_goes_out_of_use_twice_is_an_internal_error_and_changes_nothing(pack: list[str]) -> None:
    use = PackUse()
    use.add("t", refs("p", 1))
    with pytest.raises(InternalError, match="of task t"):
        use.remove("t", [StoredRef(name, 0, 1) for name in pack])
    assert use.packs("t") == {"p"} and use.reclaimable("t") == 0


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(lambda lease: lease.close(), id="WS-INV-13-lease-once"),
        pytest.param(lambda lease: [lease.close(), lease.close()], id="WS-INV-13-lease-twice"),
        pytest.param(lambda lease: Beside(lease.close).result(), id="WS-INV-13-lease-other-thread"),
    ],
)
def test_a_lease_unpins_exactly_once(leave: Callable[[object], object]) -> None:
    pins = BatchPins()
    other, lease = pins.pin("t", refs("p", 1)), pins.pin("t", refs("p", 1))
    leave(lease)
    assert pins.pinned("t") == {"p"} and pins.open_leases("t") == 1
    other.close()
    assert pins.pinned("t") == frozenset() and pins.open_leases("t") == 0


def test_many_threads_leave_no_pin() -> None:
    """WS-INV-13: counting up, down and vanishing are one step."""
    pins = BatchPins()

    def work() -> None:
        for number in range(400):
            with pins.pin("t", [*refs(f"p{number % 3}", 1), *refs("shared", 1)]):
                assert "shared" in pins.pinned("t")

    for thread in [Beside(work) for _ in range(6)]:
        thread.result()
    assert pins.pinned("t") == frozenset() and pins.open_leases() == 0
