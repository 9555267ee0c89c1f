"""Readers that start anywhere: gaps only."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.integrity.header import Stamp
from tidegate.integrity.replica import StatelessReader
from tidegate.integrity.verdicts import Verdict

HOUR = 3_600_000
NOW = 1_800_000_000_000


def put(sequence: int, chain: int = 0) -> Stamp:
    return Stamp(0, 255, 0, b"g" * 16, chain, sequence, 0, 0)


@pytest.mark.parametrize("row", ["DIV-18"])
def test_a_gap_is_missing_while_the_record_before_it_is_young(row: str) -> None:
    reader = StatelessReader(compaction_lag_ms=24 * HOUR)
    stream = [(100, 28), (101, 27), (103, 20), (105, 10)]
    found = [reader.look(put(sequence), NOW - age * HOUR, NOW).name for sequence, age in stream]
    assert found == ["OK", "OK", "OK", "MISSING"]


@pytest.mark.parametrize("row", ["DIV-19"])
def test_a_skipped_chain_is_missing_whatever_its_age_and_told_once(row: str) -> None:
    told: list[tuple[int, int]] = []
    reader = StatelessReader(
        compaction_lag_ms=24 * HOUR, on_gap=lambda stamp, seen: told.append((seen.chain, stamp.chain))
    )
    old = NOW - 1000 * HOUR
    assert reader.look(put(5), old, NOW) is Verdict.OK
    assert reader.look(put(0, chain=2), old, NOW) is Verdict.MISSING
    assert reader.look(put(1, chain=2), old, NOW) is Verdict.OK
    assert told == [(0, 2)]


@pytest.mark.parametrize("row", ["DIV-19"])
def test_without_a_lag_every_gap_inside_a_chain_is_tolerated(row: str) -> None:
    reader = StatelessReader(compaction_lag_ms=0)
    assert [reader.look(put(sequence), NOW, NOW).name for sequence in (1, 9, 50)] == ["OK"] * 3


def test_what_is_lower_than_seen_is_a_duplicate_and_heartbeats_are_left_out(streams: Any) -> None:
    reader = StatelessReader(compaction_lag_ms=HOUR)
    pen = streams.Pen()
    rows = [*pen.chain_of(2), *pen.chain_of(1)]
    assert [reader.look(row.stamp, NOW, NOW).name for row in rows] == ["OK"] * 7
    assert [reader.look(row.stamp, NOW, NOW).name for row in rows] == ["DUPLICATE"] * 7
    assert reader.look(pen.heartbeat().stamp, NOW, NOW) is Verdict.HEARTBEAT


def test_a_next_chain_before_the_end_of_the_last_is_missing(streams: Any) -> None:
    reader = StatelessReader(compaction_lag_ms=HOUR)
    pen = streams.Pen()
    rows = [*pen.chain_of(2)[:-1], *pen.chain_of(1)]
    assert [reader.look(row.stamp, NOW, NOW).name for row in rows][3] == "MISSING"


def test_a_gap_after_a_record_without_a_time_is_missing() -> None:
    reader = StatelessReader(compaction_lag_ms=HOUR)
    assert [reader.look(put(sequence), -1, NOW).name for sequence in (1, 3)] == ["OK", "MISSING"]
