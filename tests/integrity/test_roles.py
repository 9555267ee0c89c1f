"""Two validators, three roles: what is cloned, cleared, stored and never saved."""

from __future__ import annotations

import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tidegate.errors import ConflictError, IntegrityError, InvalidError
from tidegate.integrity.replica import Replica, Role
from tidegate.integrity.state import PartitionState, decode_state
from tidegate.integrity.validator import OnError, ValidationRules
from tidegate.integrity.verdicts import Verdict

NOW = 1_800_000_000_000
STRICT = ValidationRules(otherwise=OnError.FAIL)


class Shelf:
    """A store that may fail."""

    def __init__(self) -> None:
        self.values: list[bytes] = []
        self.fails = False

    def __call__(self, batch: Any, judged: Any) -> None:
        if self.fails:
            raise OSError("disk full")
        self.values += batch.column("value").to_pylist()


def standby(**settings: Any) -> Replica:
    replica = Replica("orders", 0, **settings)
    replica.to_standby(now_ms=NOW)
    return replica


@pytest.mark.parametrize("row", ["DIV-13+DIV-31"])
def test_a_failed_partition_is_never_checkpointed_and_the_healthy_one_is(row: str, streams: Any) -> None:
    bad, good, shelf = standby(rules=STRICT), standby(rules=STRICT), Shelf()
    rows = streams.Pen().chain_of(3)
    judged = bad.drain(streams.batch_of(rows[:2] + rows[3:]), streams.NOW, shelf)
    assert judged.stop_at == 2
    assert shelf.values == [b"value 0"]
    assert bad.checkpoint(now_ms=NOW) is None
    with pytest.raises(IntegrityError, match="MISSING"):
        bad.drain(streams.batch_of(rows[3:], 3), streams.NOW, shelf)
    good.drain(streams.batch_of(rows), streams.NOW, shelf)
    data = good.checkpoint(now_ms=NOW)
    assert data is not None and decode_state(data).next_offset == 5


@pytest.mark.parametrize("row", ["DIV-31"])
def test_when_storing_fails_state_and_offset_stay(row: str, streams: Any) -> None:
    replica, shelf = standby(), Shelf()
    pen = streams.Pen()
    replica.drain(streams.batch_of([pen.start(), pen.put()]), streams.NOW, shelf)
    before = replica.checkpoint(now_ms=NOW)
    second = streams.batch_of([pen.put()], 2)
    shelf.fails = True
    with pytest.raises(OSError, match="disk full"):
        replica.drain(second, streams.NOW, shelf)
    assert replica.checkpoint(now_ms=NOW) == before
    shelf.fails = False
    assert replica.drain(second, streams.NOW, shelf).verdicts.tolist() == [Verdict.OK]


@pytest.mark.parametrize("row", ["DIV-28"])
def test_going_offline_drops_the_state_and_leaves_the_checkpoint(row: str, streams: Any) -> None:
    replica, shelf = standby(), Shelf()
    pen = streams.Pen()
    replica.drain(streams.batch_of([pen.start(), pen.put()]), streams.NOW, shelf)
    saved = replica.checkpoint(now_ms=NOW)
    later = [pen.put(), pen.end()]
    replica.drain(streams.batch_of(later, 2), streams.NOW, shelf)
    replica.to_offline()
    with pytest.raises(ConflictError, match="offline"):
        replica.drain(streams.batch_of(later, 2), streams.NOW, shelf)
    assert replica.to_standby(saved, now_ms=NOW) == 2
    judged = replica.drain(streams.batch_of(later, 2), streams.NOW, shelf)
    assert judged.verdicts.tolist() == [Verdict.OK, Verdict.OK]


@pytest.mark.parametrize("row", ["DIV-29"])
def test_a_promotion_in_the_middle_goes_on_from_the_drainers_state(row: str, streams: Any) -> None:
    replica, shelf = standby(rules=STRICT), Shelf()
    pen = streams.Pen()
    replica.drain(streams.batch_of([pen.start(), pen.put()]), streams.NOW, shelf)
    next_rows = streams.batch_of([pen.put(), pen.end()], 2)
    assert replica.consume(next_rows, streams.NOW) is None
    replica.to_leader(now_ms=NOW)
    assert replica.consumer.state == replica.drainer.state
    judged = replica.consume(next_rows, streams.NOW)
    assert judged is not None and judged.stop_at is None
    assert replica.drainer.state.next_offset == 2
    blind = Replica("orders", 0, rules=STRICT)
    blind.to_standby(now_ms=NOW)
    blind.to_leader(now_ms=NOW)
    assert blind.consume(next_rows, streams.NOW).stop_at == 0  # type: ignore[union-attr]


def test_the_checkpoint_is_the_drainers_however_far_ahead_the_consumer_is(streams: Any) -> None:
    replica, shelf = standby(), Shelf()
    replica.to_leader(now_ms=NOW)
    rows = streams.Pen().chain_of(1998)
    replica.consume(streams.batch_of(rows), streams.NOW)
    replica.drain(streams.batch_of(rows[:1000]), streams.NOW, shelf)
    saved = replica.checkpoint(now_ms=NOW)
    assert replica.consumer.state.next_offset == 2000
    assert saved is not None and decode_state(saved).next_offset == 1000
    assert next(iter(decode_state(saved).producers)).sequence == 999
    assert len(shelf.values) == 999


@pytest.mark.parametrize("row", ["DIV-30"])
def test_a_second_promotion_clones_again(row: str, streams: Any) -> None:
    replica, shelf = standby(rules=STRICT), Shelf()
    rows = streams.Pen().chain_of(6)
    replica.to_leader(now_ms=NOW)
    replica.consume(streams.batch_of(rows[:2]), streams.NOW)
    assert replica.to_standby(now_ms=NOW) == 0
    replica.drain(streams.batch_of(rows[:5]), streams.NOW, shelf)
    stale = replica.consumer.state
    replica.to_leader(now_ms=NOW)
    assert replica.consumer.state is not stale
    judged = replica.consume(streams.batch_of(rows[5:], 5), streams.NOW)
    assert judged is not None and judged.verdicts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("row", ["DIV-47"])
def test_behind_conflict_resolution_gaps_are_fine_and_in_front_of_it_they_are_not(
    row: str,
    streams: Any,
) -> None:
    replica, shelf = standby(rules=STRICT, tolerates_conflicts=True), Shelf()
    replica.to_leader(now_ms=NOW)
    rows = streams.Pen().chain_of(5)
    gapped = streams.batch_of(rows[:2] + rows[4:])
    assert replica.drain(gapped, streams.NOW, shelf).stop_at is None
    assert replica.consume(gapped, streams.NOW).stop_at == 2  # type: ignore[union-attr]


def test_expired_producers_leave_at_restore_promotion_and_checkpoint(streams: Any) -> None:
    old, new = streams.Pen(1, time=1000), streams.Pen(2, time=9000)
    replica, shelf = standby(max_age_ms=100), Shelf()
    replica.drain(streams.batch_of([old.start(), new.start()]), streams.NOW, shelf)
    assert len(replica.drainer.state.producers) == 2
    replica.to_leader(now_ms=NOW)
    assert len(replica.consumer.state.producers) == 1
    replica.to_standby(now_ms=NOW)
    replica.drain(streams.batch_of([old.put()], 2), streams.NOW, shelf)
    assert replica.checkpoint(now_ms=NOW) is not None
    assert len(replica.drainer.state.producers) == 1


@pytest.mark.parametrize(
    ("steps", "last"),
    [
        ((), "to_leader"),
        ((), "to_offline"),
        (("to_standby",), "to_standby"),
        (("to_standby", "to_leader"), "to_offline"),
        (("to_standby", "to_leader"), "to_leader"),
    ],
)
def test_roles_change_one_step_at_a_time(steps: tuple[str, ...], last: str) -> None:
    replica = Replica("orders", 0)
    now = {"to_standby": {"now_ms": NOW}, "to_leader": {"now_ms": NOW}}
    for step in steps:
        getattr(replica, step)(**now[step])
    role = replica.role
    with pytest.raises(ConflictError, match="cannot become"):
        getattr(replica, last)(**now.get(last, {}))
    assert replica.role is role


def test_a_new_replica_is_offline_and_has_no_validators() -> None:
    replica = Replica("orders", 3)
    assert replica.role is Role.OFFLINE
    with pytest.raises(ConflictError, match="never was a leader"):
        replica.consumer  # noqa: B018
    assert replica.to_standby(now_ms=NOW) == PartitionState().next_offset


@pytest.mark.parametrize("row", ["DIV-23"])
def test_a_hybrid_table_keeps_producers_for_at_least_the_time_it_rewinds_by(row: str, streams: Any) -> None:
    for configured, rewind, kept in ((100, 9000, 2), (100, None, 1), (9000, 100, 2), (-1, 100, 2)):
        old, new = streams.Pen(1, time=1000), streams.Pen(2, time=9000)
        replica = standby(max_age_ms=configured, rewind_ms=rewind)
        replica.drain(streams.batch_of([old.start(), new.start()]), streams.NOW, Shelf())
        assert replica.checkpoint(now_ms=NOW) is not None
        assert len(replica.drainer.state.producers) == kept, (configured, rewind)
    for wrong in ({"max_age_ms": -2}, {"rewind_ms": -1}):
        with pytest.raises(InvalidError, match="choose 0 or more"):
            Replica("orders", 0, **wrong)


def test_consumer_and_drainer_in_two_threads_end_in_the_same_state(streams: Any) -> None:
    """The consumer runs ahead as far as the buffer lets it; checkpoints meanwhile are the drainer's."""
    replica, shelf = standby(), Shelf()
    replica.to_leader(now_ms=NOW)
    pen = streams.Pen()
    rows = [row for _ in range(40) for row in pen.chain_of(48)]
    batches = [streams.batch_of(rows[first : first + 37], first) for first in range(0, len(rows), 37)]
    buffer: queue.Queue[Any] = queue.Queue(maxsize=5)
    offsets = []

    def consume() -> None:
        for batch in batches:
            judged = replica.consume(batch, streams.NOW)
            assert judged is not None and not judged.is_fatal.any()
            buffer.put(batch)
        buffer.put(None)

    with ThreadPoolExecutor(1) as pool:
        consuming = pool.submit(consume)
        while (batch := buffer.get(timeout=300)) is not None:
            replica.drain(batch, streams.NOW, shelf)
            saved = replica.checkpoint(now_ms=NOW)
            assert saved is not None
            offsets.append(decode_state(saved).next_offset)
        consuming.result()
    assert offsets == [min(first + 37, len(rows)) for first in range(0, len(rows), 37)]
    assert replica.consumer.state == replica.drainer.state
    assert len(shelf.values) == 40 * 48
