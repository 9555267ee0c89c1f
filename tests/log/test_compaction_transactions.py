"""Transactions followed through a cleaning: what was aborted, and which markers may go."""

from __future__ import annotations

from tidegate.log.compaction_filter import CleanedTransactions
from tidegate.log.format.batch import ControlType
from tidegate.log.indexes import AbortedTxn

ABORTED = AbortedTxn(producer_id=1, first_offset=10, last_offset=20, last_stable_offset=21)


def test_data_of_an_announced_transaction_is_aborted_until_its_marker() -> None:
    tracked = CleanedTransactions()
    tracked.announce([ABORTED])
    assert not tracked.data(producer_id=1, last_offset=5)
    assert tracked.marker(ControlType.COMMIT, producer_id=1, last_offset=6) == (False, None)
    assert tracked.data(producer_id=1, last_offset=12)
    assert not tracked.data(producer_id=2, last_offset=13)
    assert tracked.marker(ControlType.ABORT, producer_id=1, last_offset=20) == (False, ABORTED)
    assert not tracked.data(producer_id=1, last_offset=25)


def test_marker_may_go_when_no_data_of_its_transaction_was_met() -> None:
    tracked = CleanedTransactions()
    tracked.announce([ABORTED])
    assert tracked.marker(ControlType.ABORT, producer_id=1, last_offset=20) == (True, None)
    assert tracked.marker(ControlType.COMMIT, producer_id=3, last_offset=21) == (True, None)


def test_transaction_announced_twice_is_one_transaction() -> None:
    tracked = CleanedTransactions()
    tracked.announce([ABORTED])
    assert tracked.data(producer_id=1, last_offset=10)
    tracked.announce([ABORTED])  # it reaches into the next log segment
    assert tracked.data(producer_id=1, last_offset=15)
    assert tracked.marker(ControlType.ABORT, producer_id=1, last_offset=20) == (False, ABORTED)


def test_emptied_marker_may_go_and_other_control_records_may_not() -> None:
    tracked = CleanedTransactions()
    assert tracked.marker(None, producer_id=1, last_offset=1) == (True, None)
    assert tracked.marker(ControlType.LEADER_CHANGE, producer_id=1, last_offset=2) == (False, None)


def test_interleaved_producers_are_kept_apart() -> None:
    tracked = CleanedTransactions()
    other = AbortedTxn(producer_id=2, first_offset=11, last_offset=30, last_stable_offset=31)
    tracked.announce([other, ABORTED])
    assert tracked.data(producer_id=1, last_offset=10)
    assert tracked.data(producer_id=2, last_offset=11)
    assert not tracked.data(producer_id=3, last_offset=12)
    assert tracked.marker(ControlType.ABORT, producer_id=1, last_offset=20) == (False, ABORTED)
    assert tracked.data(producer_id=2, last_offset=21)
    assert tracked.marker(ControlType.COMMIT, producer_id=3, last_offset=22) == (False, None)
    assert tracked.marker(ControlType.ABORT, producer_id=2, last_offset=30) == (False, other)
