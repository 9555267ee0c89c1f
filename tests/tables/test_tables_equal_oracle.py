"""Random topics, random cuts, restarts and memory pressure: every kind of table equals one built record by record."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from table_records import Said, session_record, window_record, write_records
from tidegate.clock import ManualClock
from tidegate.log.log import Log
from tidegate.scheduling import ManualScheduler
from tidegate.storage import StorageConfig
from tidegate.tables.factories import sessioned_table, windowed_table
from tidegate.tables.factories import table as key_table
from tidegate.tables.ingest.materializer import Cadence
from window_oracles import ms

MINUTE = 60_000
RETENTION = 4 * MINUTE
SEGMENT = 2 * MINUTE

moments = st.integers(0, 30).map(lambda half: half * MINUTE // 2)
values = st.one_of(st.none(), st.binary(max_size=3))
keys = st.sampled_from([b"", b"a", b"aa", b"b", b"\xff"])
rows = st.lists(st.tuples(keys, moments, st.integers(0, 3 * MINUTE), values), max_size=40)
cuts = st.lists(st.tuples(st.integers(1, 12), st.booleans()), min_size=1, max_size=6)


class Oracle:
    """The rules of a table, one record after the other."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.rows: dict[tuple[bytes, int, int], bytes] = {}
        self.observed = -1
        self.expired = 0

    def take(self, key: bytes, start: int, length: int, value: bytes | None) -> None:
        if self.kind == "key":
            identity = (key, 0, 0)
            if not key:
                self._set(identity, value)
                return
        elif self.kind == "session":
            identity = (key, start, start + length)
        else:
            identity = (key, start, start + MINUTE)
        if self.kind != "key":
            ts = identity[2] if self.kind == "session" else start
            self.observed = max(self.observed, ts)
            if ts // SEGMENT < max(0, self.observed - RETENTION) // SEGMENT:
                self.expired += self.kind == "window" or value is not None
                return
        self._set(identity, value)

    def _set(self, identity: tuple[bytes, int, int], value: bytes | None) -> None:
        if value is None:
            self.rows.pop(identity, None)
        else:
            self.rows[identity] = value

    def answer(self) -> dict[tuple[bytes, int, int], bytes]:
        if self.kind == "key":
            return self.rows
        at = 2 if self.kind == "session" else 1
        return {each: value for each, value in self.rows.items() if each[at] > self.observed - RETENTION}


def said(kind: str, key: bytes, start: int, length: int, value: bytes | None) -> Said:
    if kind == "window":
        return window_record(key, start, value)
    if kind == "session":
        return session_record(key, start, start + length, value)
    return Said(key, value, start)


def opened(log: Log, kind: str, state: Path, clock: ManualClock) -> Any:
    common: dict[str, Any] = {
        "state": state,
        "storage": StorageConfig.for_tests(
            retained_checkpoints=12,
            write_buffer={"reserve_bytes": 64, "soft_max_bytes": 256},
            max_run_rows=3,
        ),
        "scheduler": ManualScheduler(clock),
        "cadence": Cadence(read_bytes=128, buffer_bytes=64, commit_bytes=1000),
    }
    if kind == "window":
        return windowed_table(log, "topic", ms(MINUTE), retention=ms(RETENTION), **common)
    if kind == "session":
        return sessioned_table(log, "topic", retention=ms(RETENTION), **common)
    return key_table(log, "topic", **common)


def found(table: Any) -> dict[tuple[bytes, int, int], bytes]:
    return {
        (row.key, row.window.start if row.window else 0, row.window.end if row.window else 0): row.value
        for row in table.all()
    }


@pytest.mark.parametrize("kind", ["window", "session", "key"])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rows=rows, cuts=cuts)
def test_a_table_equals_the_oracle_whatever_the_cuts_and_restarts(
    kind: str, rows: list[tuple[bytes, int, int, bytes | None]], cuts: list[tuple[int, bool]]
) -> None:
    oracle, clock = Oracle(kind), ManualClock()
    with (
        tempfile.TemporaryDirectory() as folder,
        Log(Path(folder) / "log", durability="os", clock=clock) as log,
    ):
        log.create_topic("topic")
        table = opened(log, kind, Path(folder) / "state", clock)
        told: dict[tuple[bytes, int, int], bytes] = {}
        at = number = 0
        while at < len(rows):
            count, restarts = cuts[number % len(cuts)]
            part = rows[at : at + count]
            write_records(log, "topic", [said(kind, *row) for row in part], batch_records=2)
            if restarts:
                table.close()
                table = opened(log, kind, Path(folder) / "state", clock)
            with table.changes() as changes:
                table.catch_up()
                if not restarts:
                    _apply(told, changes.take(), kind)
            for row in part:
                oracle.take(*row)
            if restarts:
                told = dict(oracle.rows)
            at, number = at + count, number + 1
            assert found(table) == oracle.answer()
            for key in {row[0] for row in part}:
                if kind != "key":
                    mine = {each: v for each, v in oracle.answer().items() if each[0] == key}
                    assert {(r.key, r.window.start, r.window.end): r.value for r in table.fetch(key)} == mine
        assert table.counts.expired == oracle.expired
        assert told == oracle.rows, "the changes told add up to the table"
        table.close()
        with opened(log, kind, Path(folder) / "state", clock) as again:
            assert found(again) == oracle.answer()


def _apply(told: dict[tuple[bytes, int, int], bytes], changes: Any, kind: str) -> None:
    for change in changes:
        window = change.window
        identity = (change.key, window.start if window else 0, window.end if window else 0)
        assert told.get(identity) == change.old, "the old value is the one before"
        if change.new is None:
            told.pop(identity, None)
        else:
            told[identity] = change.new
