"""Faults are all counted and few are told."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tidegate.errors import IntegrityError
from tidegate.integrity.state import PartitionState, Phase
from tidegate.integrity.validator import FaultLog, Throttle, ValidationRules, stopping_error
from tidegate.integrity.verdicts import Verdict


def faulty(streams: Any, count: int) -> Any:
    both, pen = streams.Both(), streams.Pen()
    rows = [pen.start(), *(row._replace(value=b"changed") for row in pen.puts(count))]
    both.feed(rows)
    return both.judged[0]


@pytest.mark.parametrize("row", ["DIV-48"])
def test_a_thousand_faults_in_a_minute_are_one_line_and_a_thousand_counts(
    row: str, streams: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log, judged = FaultLog(), faulty(streams, 1)
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            log.take(judged, streams.NOW + number)
    assert log.verdicts[Verdict.CORRUPT] == log.faults == 1000
    assert len(caplog.records) == 1
    assert "CORRUPT (D1) at orders-0 offset 1" in caplog.text


def test_the_next_line_says_how_many_were_not_told(streams: Any, caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog()
    with caplog.at_level(logging.WARNING):
        for now in (0, 30_000, 60_000):
            log.take(faulty(streams, 5), now)
    assert ["and 4 more" in caplog.messages[0], "and 9 more" in caplog.messages[1]] == [True, True]


def test_kinds_of_fault_are_throttled_apart_and_a_clock_set_back_does_not_silence() -> None:
    throttle = Throttle()
    assert throttle.held_back("missing", 100_000) == 0
    assert throttle.held_back("corrupt", 100_000) == 0
    assert throttle.held_back("missing", 100_001) is None
    assert throttle.held_back("missing", 5) == 1


def test_ignored_records_are_told_and_are_no_faults(streams: Any, caplog: pytest.LogCaptureFixture) -> None:
    both, pen = streams.Both(ValidationRules(batch_only=True)), streams.Pen()
    both.feed([pen.start(), pen.start_push(), pen.end_push(), pen.end_push(), pen.put()])
    log = FaultLog()
    with caplog.at_level(logging.WARNING):
        log.take(both.judged[0], streams.NOW)
    assert sum(log.verdicts.values()) == 5 and not log.faults
    assert "ignored" in caplog.text


def test_a_stopped_partition_has_an_error_that_names_everything(streams: Any) -> None:
    both, pen = streams.Both(state=PartitionState(phase=Phase.PUSHING)), streams.Pen(7)
    both.feed([pen.start(), pen.put()])
    assert stopping_error(both.judged[0]) is None
    both.feed([pen.put(sequence=9)])
    error = stopping_error(both.judged[0])
    assert isinstance(error, IntegrityError)
    assert (error.topic, error.partition, error.offset, error.kind) == ("orders", 0, 2, "missing")
    assert error.producer == "07" * 16
    for fact in ("B5", "chain 0 sequence 9", "last good offset 1", "chain 0 sequence 1", "registered"):
        assert fact in str(error)


def test_the_fault_that_stops_is_told_even_after_a_flood(streams: Any) -> None:
    both, pen = streams.Both(), streams.Pen()
    rows = [pen.start(), *(row._replace(value=b"changed") for row in pen.puts(1200)), pen.start_push()]
    pen.sequence += 5
    both.feed([*rows, pen.put()])
    error = stopping_error(both.judged[0])
    assert error is not None and error.offset == 1202
    assert len(both.judged[0].findings) == 1000 // 6 + 1, "the first of each kind, and the one that stopped"


def test_records_without_metadata_count_as_faults_only_where_they_are_rejected(
    streams: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for strict in (False, True):
        both = streams.Both(ValidationRules(strict=strict))
        both.feed([streams.Row(None, b"k", b"v")] * 3)
        log = FaultLog()
        with caplog.at_level(logging.WARNING):
            log.take(both.judged[0], streams.NOW)
        assert log.verdicts[Verdict.UNMANAGED] == 3
        assert log.faults == (3 if strict else 0)
        assert ("UNMANAGED (U3)" in caplog.text) is strict
