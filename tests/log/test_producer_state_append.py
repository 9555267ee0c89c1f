"""Producer rules: sequences, epochs, fencing, duplicates, verification."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from log_partitions import PID
from log_partitions import ProducerBench as Bench
from tidegate.errors import FencedError, InvalidError, TidegateError
from tidegate.log.producer_state import BatchMetadata, Origin

MAX = 2**31 - 1
DAY_MS = 86_400_000


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def out_of_order(act: Callable[[], object]) -> None:
    refused(act, InvalidError, "OUT_OF_ORDER_SEQUENCE_NUMBER")


def refused(act: Callable[[], object], kind: type[TidegateError], name: str) -> None:
    with pytest.raises(kind) as caught:
        act()
    assert caught.value.kafka_name == name


# -- sequences and epochs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epoch", "sequence", "outcome"),
    [
        pytest.param(0, 2, None, id="LS-P1-next"),
        pytest.param(0, 1, "OUT_OF_ORDER_SEQUENCE_NUMBER", id="LS-P1-repeated"),
        pytest.param(0, 5, "OUT_OF_ORDER_SEQUENCE_NUMBER", id="LS-P1-gap"),
        pytest.param(0, 0, "OUT_OF_ORDER_SEQUENCE_NUMBER", id="LS-P1-restart"),
        pytest.param(1, 0, None, id="LS-P1-new-epoch"),
        pytest.param(1, 2, "OUT_OF_ORDER_SEQUENCE_NUMBER", id="LS-P1-new-epoch-not-from-0"),
    ],
)
def test_a_client_must_continue_its_sequence_or_begin_an_epoch_with_0(
    bench: Bench, epoch: int, sequence: int, outcome: str | None
) -> None:
    bench.append(0, 0)
    bench.append(1, 1)
    before = bench.entry()
    if outcome is None:
        bench.append(sequence, 2, epoch=epoch)
        assert (bench.entry().epoch, bench.entry().last_sequence) == (epoch, sequence)
    else:
        refused(lambda: bench.append(sequence, 2, epoch=epoch), InvalidError, outcome)
        assert bench.entry() == before, "a refused append leaves no trace"
        assert bench.states.map_end_offset == 2


@pytest.mark.parametrize(
    "sequence", [pytest.param(0, id="LS-P1-old-epoch"), pytest.param(1, id="LS-P1-old-next")]
)
def test_an_old_epoch_is_fenced(bench: Bench, sequence: int) -> None:
    bench.append(0, 0)
    bench.append(0, 1, epoch=1)
    refused(lambda: bench.append(sequence, 2, epoch=0), FencedError, "INVALID_PRODUCER_EPOCH")
    assert bench.entry().epoch == 1


@pytest.mark.parametrize(
    ("epoch", "sequence", "outcome"),
    [
        pytest.param(0, 0, "INVALID_PRODUCER_EPOCH", id="LS-P2-old-epoch"),
        pytest.param(2, 17, "OUT_OF_ORDER_SEQUENCE_NUMBER", id="LS-P2-sequence-17"),
        pytest.param(2, 0, None, id="LS-P2-sequence-0"),
    ],
)
def test_a_marker_alone_fences_and_demands_sequence_0(
    bench: Bench, epoch: int, sequence: int, outcome: str | None
) -> None:
    assert bench.marker(27, epoch=2) is None, "no transaction was open"
    assert (bench.entry().epoch, bench.entry().last_sequence) == (2, -1)
    if outcome is None:
        bench.append(sequence, 39, epoch=epoch)
        assert bench.entry().last_sequence == 0
    else:
        with pytest.raises(TidegateError) as caught:
            bench.append(sequence, 39, epoch=epoch)
        assert caught.value.kafka_name == outcome


@pytest.mark.parametrize(
    ("sequence", "accepted"), [pytest.param(0, True, id="LS-P3-0"), pytest.param(1, False, id="LS-P3-1")]
)
def test_after_the_largest_sequence_comes_0(bench: Bench, sequence: int, accepted: bool) -> None:
    bench.append(MAX, 735, epoch=15, origin=Origin.REPLICATION)
    if accepted:
        bench.append(sequence, 1235, epoch=15)
        assert (bench.entry().first_sequence, bench.entry().last_sequence) == (MAX, 0)
    else:
        out_of_order(lambda: bench.append(sequence, 1235, epoch=15))


def test_a_batch_may_wrap_inside(bench: Bench) -> None:
    bench.append(MAX - 10, 2000, epoch=15, count=21, origin=Origin.REPLICATION)
    entry = bench.entry()
    assert (entry.first_sequence, entry.last_sequence) == (MAX - 10, 9)
    assert (entry.first_offset, entry.last_offset) == (2000, 2020)
    bench.append(10, 2021, epoch=15)


def test_an_unknown_producer_may_begin_anywhere(bench: Bench) -> None:
    bench.append(16, 735, epoch=5)
    bench.append(17, 736, epoch=5)
    assert bench.entry().last_sequence == 17


def test_several_batches_are_checked_in_order(bench: Bench) -> None:
    bench.append(6, 0)
    bench.append(7, 1, count=3)
    out_of_order(lambda: bench.append(7, 4))
    bench.append(10, 4)
    out_of_order(lambda: bench.append(11, 5, epoch=1))
    before = bench.entry()
    bench.states.check_data(bench.header(0, 5, epoch=1), Origin.CLIENT)
    assert bench.entry() == before, "checking changes nothing"
    bench.append(0, 5, epoch=1)
    out_of_order(lambda: bench.append(5, 6, epoch=1))
    assert (bench.entry().epoch, [batch.last_offset for batch in bench.entry().batches]) == (1, [5])


@pytest.mark.parametrize("origin", [Origin.COORDINATOR])
def test_a_coordinator_is_held_to_its_epoch_only(bench: Bench, origin: Origin) -> None:
    for offset in (99, 100):
        bench.append(-1, offset, epoch=5, txn=True, origin=origin)
    refused(
        lambda: bench.append(-1, 101, epoch=4, txn=True, origin=origin), FencedError, "INVALID_PRODUCER_EPOCH"
    )


def test_replication_refuses_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.append(0, 0)
    bench.append(3, 1, origin=Origin.REPLICATION)
    assert bench.entry().last_sequence == 3
    bench.append(0, 2, epoch=5, txn=True, origin=Origin.REPLICATION)
    bench.append(9, 3, epoch=5, origin=Origin.REPLICATION)
    bench.append(0, 4, epoch=4, txn=True, origin=Origin.REPLICATION)
    bench.marker(5, epoch=5, coordinator_epoch=7, origin=Origin.REPLICATION)
    bench.marker(6, epoch=3, coordinator_epoch=6, origin=Origin.REPLICATION)
    assert (bench.entry().epoch, bench.entry().coordinator_epoch) == (3, 6)
    assert len(caplog.records) == 4


def test_a_negative_producer_id_has_no_state(bench: Bench) -> None:
    with pytest.raises(InvalidError):
        bench.states.check_data(bench.header(0, 0, pid=-1), Origin.CLIENT)


# -- duplicates -------------------------------------------------------------------------------------


def test_the_last_five_batches_are_known_again_and_older_ones_are_not(bench: Bench) -> None:
    for n in range(7):
        bench.append(2 * n, 2 * n, count=2, timestamp=1000 + n)
    for n in range(7):
        duplicate = bench.states.duplicate_of(bench.header(2 * n, 99, count=2))
        assert duplicate == (BatchMetadata(2 * n + 1, 2 * n + 1, 1, 1000 + n) if n >= 2 else None)


@pytest.mark.parametrize(
    ("sequence", "count", "epoch", "pid"),
    [
        pytest.param(10, 1, 0, PID, id="head"),
        pytest.param(11, 1, 0, PID, id="tail"),
        pytest.param(8, 4, 0, PID, id="two-batches"),
        pytest.param(10, 2, 1, PID, id="other-epoch"),
        pytest.param(10, 2, 0, 2, id="other-producer"),
    ],
)
def test_only_an_exact_repetition_is_a_duplicate(
    bench: Bench, sequence: int, count: int, epoch: int, pid: int
) -> None:
    for n in range(7):
        bench.append(2 * n, 2 * n, count=2)
    assert bench.states.duplicate_of(bench.header(10, 0, count=2)) is not None
    assert bench.states.duplicate_of(bench.header(sequence, 0, count=count, epoch=epoch, pid=pid)) is None


def test_a_new_epoch_forgets_the_batches_of_the_old_one(bench: Bench) -> None:
    bench.append(0, 0)
    bench.append(0, 1, epoch=1)
    assert bench.states.duplicate_of(bench.header(0, 0)) is None
    assert bench.states.duplicate_of(bench.header(0, 0, epoch=1)) is not None
