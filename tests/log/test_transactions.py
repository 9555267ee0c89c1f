"""Transactions: markers, coordinators, what is unstable until when, and lateness."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from log_partitions import PID
from log_partitions import ProducerBench as Bench
from tidegate.errors import FencedError, InvalidError, TidegateError
from tidegate.log.producer_state import CompletedTxn


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def refused(act: Callable[[], object], kind: type[TidegateError], name: str) -> None:
    with pytest.raises(kind) as caught:
        act()
    assert caught.value.kafka_name == name


@pytest.mark.parametrize(
    "txn", [pytest.param(True, id="LS-P4"), pytest.param(False, id="LS-P4-no-transaction")]
)
def test_an_abort_marker_of_a_higher_epoch_bumps_it_and_clears_the_batches(bench: Bench, txn: bool) -> None:
    bench.append(0, 0, txn=txn)
    completed = bench.marker(1, epoch=1, abort=True)
    assert completed == (CompletedTxn(PID, 0, 1) if txn else None)
    entry = bench.entry()
    assert (entry.epoch, entry.batches, entry.txn_first_offset) == (1, (), None)
    assert (entry.first_offset, entry.last_offset, entry.first_sequence) == (-1, -1, -1)
    assert bench.states.remove_expired(bench.clock.now_ms()) == 0
    bench.append(0, 2, epoch=1)
    assert bench.entry().first_sequence == 0


@pytest.mark.parametrize("reload", [pytest.param(False, id="LS-P5"), pytest.param(True, id="LS-P5-reloaded")])
def test_an_older_coordinator_is_fenced(bench: Bench, reload: bool) -> None:
    bench.append(0, 99, epoch=5, txn=True)
    for offset, coordinator_epoch in ((100, 1), (101, 1), (102, 2)):
        bench.marker(offset, epoch=5, coordinator_epoch=coordinator_epoch)
        assert bench.entry().coordinator_epoch == coordinator_epoch
    if reload:
        bench.states.take_snapshot()
        bench = bench.reloaded(0, 103)
    refused(
        lambda: bench.marker(103, epoch=5, coordinator_epoch=1), FencedError, "TRANSACTION_COORDINATOR_FENCED"
    )


def test_a_marker_of_an_old_epoch_is_fenced(bench: Bench) -> None:
    bench.append(0, 99, epoch=5, txn=True)
    refused(lambda: bench.marker(100, epoch=3), FencedError, "INVALID_PRODUCER_EPOCH")
    assert bench.states.first_undecided_offset == 99


def test_a_marker_keeps_the_batches_of_its_epoch(bench: Bench) -> None:
    bench.append(0, 9)
    bench.append(1, 16, count=5, txn=True)
    bench.append(6, 26, count=5, txn=True)
    assert bench.states.first_undecided_offset == 16
    completed = bench.marker(40, coordinator_epoch=15)
    assert completed == CompletedTxn(PID, 16, 40)
    entry = bench.entry()
    assert (entry.last_sequence, entry.txn_first_offset, entry.coordinator_epoch) == (10, None, 15)
    assert [batch.last_offset for batch in entry.batches] == [9, 20, 30]


def test_a_record_outside_the_open_transaction_is_refused(bench: Bench) -> None:
    bench.append(0, 0, txn=True)
    refused(lambda: bench.append(1, 1), InvalidError, "INVALID_TXN_STATE")
    bench.append(1, 1, txn=True)
    assert bench.entry().txn_first_offset == 0


STEPS_OF_P9 = [
    (lambda bench: bench.append(0, 99, epoch=5, txn=True), 99, 99),
    (lambda bench: bench.append(0, 105, pid=2, epoch=5, txn=True), 99, 99),
    (lambda bench: bench.marker(109, epoch=5), 99, 105),
    (lambda bench: bench.states.on_high_watermark(100), 99, 105),
    (lambda bench: bench.states.on_high_watermark(110), 105, 105),
    (lambda bench: bench.marker(112, pid=2, epoch=5, abort=True), 105, None),
    (lambda bench: bench.states.on_high_watermark(113), None, None),
]


@pytest.mark.parametrize("steps", [pytest.param(STEPS_OF_P9, id="LS-P9")])
def test_the_first_unstable_offset_waits_for_markers_and_the_high_watermark(
    bench: Bench, steps: list[tuple[Callable[[Bench], object], int | None, int | None]]
) -> None:
    assert bench.states.first_unstable_offset is None
    for step, unstable, undecided in steps:
        step(bench)
        assert bench.states.first_unstable_offset == unstable
        assert bench.states.first_undecided_offset == undecided


def test_the_high_watermark_must_pass_the_marker_itself(bench: Bench) -> None:
    bench.append(0, 99, txn=True)
    bench.marker(109)
    bench.states.on_high_watermark(109)
    assert bench.states.first_unstable_offset == 99
    assert not bench.states.is_empty
    bench.states.on_high_watermark(110)
    assert bench.states.first_unstable_offset is None


def test_the_stable_offset_of_an_ended_transaction_is_the_earliest_other_open_one(bench: Bench) -> None:
    states = bench.states
    for pid, offset in ((1, 1000), (2, 1025), (3, 1057)):
        bench.append(0, offset, pid=pid, txn=True)
    first = CompletedTxn(1, 1000, 1072)
    assert states.last_stable_offset(first) == 1025
    states.complete_txn(first)
    third = CompletedTxn(3, 1057, 1092)
    assert states.last_stable_offset(third) == 1025
    states.complete_txn(third)
    second = CompletedTxn(2, 1025, 1112)
    assert states.last_stable_offset(second) == 1113
    states.complete_txn(second)
    assert states.first_unstable_offset == 1000
    states.on_high_watermark(1113)
    assert states.first_unstable_offset is None
    refused(lambda: states.complete_txn(second), InvalidError, "INVALID_TXN_STATE")


def test_open_transactions_survive_a_snapshot_in_offset_order(bench: Bench) -> None:
    bench.append(0, 50, pid=9, txn=True)
    bench.append(0, 60, pid=3, txn=True)
    bench.states.take_snapshot()
    again = bench.reloaded(0, 61)
    assert again.states.first_unstable_offset == 50
    again.marker(70, pid=9)
    again.states.on_high_watermark(71)
    assert again.states.first_unstable_offset == 60


@pytest.mark.parametrize("fully", [False, True])
def test_truncation_forgets_open_transactions(bench: Bench, fully: bool) -> None:
    bench.append(0, 100, txn=True)
    if fully:
        bench.states.truncate_fully_and_start_at(150)
    else:
        bench.states.truncate_and_reload(0, 80, bench.clock.now_ms())
    assert (bench.states.first_unstable_offset, bench.states.is_empty) == (None, True)
    assert bench.states.map_end_offset == (150 if fully else 0)


def test_truncation_brings_an_open_transaction_back(bench: Bench) -> None:
    states = bench.states
    bench.append(0, 99, txn=True)
    states.take_snapshot()
    bench.marker(105)
    states.on_high_watermark(106)
    states.take_snapshot()
    bench.append(1, 106)
    states.truncate_and_reload(0, 106, bench.clock.now_ms())
    assert states.first_unstable_offset is None
    states.truncate_and_reload(0, 100, bench.clock.now_ms())
    assert states.first_unstable_offset == 99
