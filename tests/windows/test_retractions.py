"""Changes of a table's rows, added up: windows hold what the rows that are left hold, to the last digit."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.errors import InvalidError
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch, RowChanges
from tidegate.windows.kinds import Hopping, Tumbling, Unlimited
from tidegate.windows.operators.base import Moment, Output
from tidegate.windows.operators.layout import window_layout
from tidegate.windows.operators.retractions import Retractions
from tidegate.windows.operators.windows import WindowOperator
from workers import TASK, Worker

VALUES = pa.schema([("d", pa.float64()), ("i", pa.int64()), ("e", pa.decimal128(12, 2))])
AGGREGATES = {
    "n": agg.count(), "n_d": agg.count("d"), "d": agg.sum("d"), "i": agg.sum("i"), "e": agg.sum("e"),
    "mean_d": agg.mean("d"), "mean_i": agg.mean("i"),
}  # fmt: skip


class Change(NamedTuple):
    """A row's new content: whose it is and its values; of=None: the row is gone."""

    row: int
    of: int | None
    d: float | None
    i: int | None
    e: Decimal | None


def time_of(row: int) -> int:
    return row % 7 * 5


def batch(changes: list[Change], first_offset: int) -> EventBatch:
    count = len(changes)
    there = [each.of is not None for each in changes]
    return EventBatch(
        key=pa.array([None if each.of is None else b"%d" % each.of for each in changes], pa.binary()),
        ts=np.array([time_of(each.row) for each in changes], np.int64),
        offset=np.arange(first_offset, first_offset + count, dtype=np.int64),
        partition=np.zeros(count, np.int32),
        stream_time=np.zeros(count, np.int64),
        values=pa.RecordBatch.from_arrays(
            [pa.array([getattr(each, one.name) for each in changes], one.type) for one in VALUES],
            schema=VALUES,
        ),
        changes=RowChanges(
            pa.array([b"row-%d" % each.row for each in changes], pa.binary()),
            np.array(there, np.int64),
            np.zeros(count, np.int64),
        ),
    )


def changes() -> Any:
    doubles = st.one_of(
        st.none(),
        st.sampled_from([0.1, -0.1, 1e300, -1e300, 1e-300, math.nan, math.inf, -math.inf, 3.0]),
        st.floats(allow_nan=False, allow_infinity=False, width=64, min_value=-1e15, max_value=1e15),
    )
    whole = st.one_of(st.none(), st.sampled_from([-(2**63), 2**62, 1, -1]), st.integers(-1000, 1000))
    exact = st.one_of(st.none(), st.decimals(-999, 999, places=2))
    set_to = st.builds(Change, st.integers(0, 11), st.integers(0, 2), doubles, whole, exact)
    gone = st.builds(lambda row: Change(row, None, None, None, None), st.integers(0, 11))
    return st.lists(st.one_of(set_to, set_to, gone), max_size=40)


def expected(made: list[Change], kind: Any) -> dict[tuple[bytes, int], dict[str, Any]]:
    """The windows of the rows that are left, of fractions that are rounded once."""
    last = {each.row: each for each in made}
    windows: dict[tuple[bytes, int], list[Change]] = {}
    for each in last.values():
        if each.of is not None:
            for start in kind.starts(time_of(each.row)) if isinstance(kind, Hopping) else [kind.start_ms]:
                windows.setdefault((b"%d" % each.of, start), []).append(each)
    return {window: results(held) for window, held in windows.items()}


def results(held: list[Change]) -> dict[str, Any]:
    d, i, e = ([getattr(row, name) for row in held if getattr(row, name) is not None] for name in "die")
    return {
        "n": len(held), "n_d": len(d), "d": summed(d), "i": sum(i) if i else None, "e": sum(e) if e else None,
        "mean_d": None if not d else averaged(d), "mean_i": float(sum(i)) / len(i) if i else None,
    }  # fmt: skip


def summed(values: list[float]) -> float | None:
    if not values:
        return None
    rest = [each for each in values if not math.isfinite(each)]
    if rest:
        return sum(rest)
    return float(sum(map(Fraction, values)))


def averaged(values: list[float]) -> float:
    total = summed(values)
    assert total is not None
    return total / len(values)


def said(rows: list[dict[str, Any]]) -> list[str]:
    """As text, so that NaN equals itself."""
    return [str({name: repr(value) for name, value in row.items()}) for row in rows]


class Run:
    def __init__(self, kind: Any, emit: str) -> None:
        self.kind, self.emit = kind, emit
        self.backend, self.life, self.token = MemoryBackend(), 0, None
        self.outputs: list[Output] = []
        self.start()

    def start(self) -> None:
        self.life += 1
        self.worker = Worker(backend=self.backend, seed=self.life)
        runtime = self.worker.runtime
        self.rows = Retractions(runtime, TASK, "windows", VALUES, window_layout(self.kind))
        wanted = resolve(AGGREGATES, VALUES, retractable=True)
        self.operator = WindowOperator(
            runtime, TASK, "windows", self.kind, wanted, emit=self.emit, stamped=True, values=VALUES
        )
        if self.token is not None:
            runtime.apply_checkpoint(TASK, self.token)

    def restart(self) -> None:
        self.token = self.worker.runtime.checkpoint(TASK)
        self.start()

    def process(self, made: list[Change], first_offset: int) -> None:
        events = self.rows.process(batch(made, first_offset))
        self.outputs.append(self.operator.process(events, Moment(0)))

    def finish(self) -> None:
        self.outputs.append(self.operator.tick(Moment(0, closing=True)))

    @property
    def sent(self) -> dict[tuple[bytes, int], dict[str, Any]]:
        known: dict[tuple[bytes, int], dict[str, Any]] = {}
        for output in self.outputs:
            rows: Any = output.rows
            deleted = [False] * len(rows) if rows.deleted is None else rows.deleted.tolist()
            found = zip(
                rows.key.to_pylist(),
                rows.window_start.tolist(),
                deleted,
                rows.values.to_pylist(),
                strict=True,
            )
            for key, start, is_deleted, value in found:
                known.pop((key, start), None)
                if not is_deleted:
                    known[key, start] = value
        return known

    @property
    def table(self) -> dict[tuple[bytes, int], dict[str, Any]]:
        rows = self.operator.windows()
        assert rows.deleted is None
        found = zip(rows.key.to_pylist(), rows.window_start.tolist(), rows.values.to_pylist(), strict=True)
        return {(key, start): value for key, start, value in found}


@settings(max_examples=150, deadline=None)
@given(
    made=changes(),
    cuts=st.lists(st.integers(0, 40), max_size=5),
    restarts=st.sets(st.integers(0, 5)),
    kind=st.sampled_from(
        [
            Tumbling("10ms", grace="1s"),
            Hopping("20ms", "5ms", grace="1s"),
            Hopping("12ms", "8ms", grace="1s"),
            Unlimited(),
        ]
    ),
    emit=st.sampled_from(["update", "close"]),
)
def test_windows_hold_what_the_rows_that_are_left_hold(
    made: list[Change], cuts: list[int], restarts: set[int], kind: Any, emit: str
) -> None:
    if isinstance(kind, Unlimited):
        emit = "update"
    try:
        wanted = expected(made, kind)
    except OverflowError:
        return
    if any(abs(row["i"] or 0) >= 2**63 for row in wanted.values()):
        return  # a sum that does not fit is an error when it is read, as without changes
    run = Run(kind, emit)
    edges = sorted({0, len(made), *(place for place in cuts if place < len(made))})
    try:
        for number, (start, stop) in enumerate(itertools.pairwise(edges)):
            if number in restarts:
                run.restart()
            run.process(made[start:stop], start)
    except InvalidError as error:
        assert "does not fit" in str(error)  # on the way, on update
        return
    found = run.table
    assert sorted(found) == sorted(wanted)
    assert said([found[window] for window in sorted(found)]) == said(
        [wanted[window] for window in sorted(found)]
    )
    run.finish()
    sent = run.sent
    assert said([sent[window] for window in sorted(sent)]) == said(
        [wanted[window] for window in sorted(wanted)]
    )


def test_a_change_that_is_late_changes_nothing_and_is_told_once() -> None:
    run = Run(Tumbling("10ms", retention="1s"), "update")
    run.process([Change(0, 1, 2.0, 1, None), Change(1, 1, 3.0, 1, None)], 0)
    late = batch([Change(0, 1, 5.0, 7, None)], 2)
    late = EventBatch(
        late.key, late.ts, late.offset, late.partition, np.array([10], np.int64), late.values, late.changes
    )
    output = run.operator.process(run.rows.process(late), Moment(0))
    assert output.late is not None and len(output.late) == 1
    assert output.late.events.values.to_pylist() == [{"d": 5.0, "i": 7, "e": None}]
    assert output.counters["late_records"] == 1
    assert {window: row["i"] for window, row in run.table.items()} == {(b"1", 0): 2}


def test_rows_are_forgotten_when_no_window_takes_their_changes() -> None:
    run = Run(Tumbling("1m"), "update")
    for day in range(5):
        ts = day * 86_400_000
        one = batch([Change(0, 1, 1.0, 1, None)], day)
        row = pa.array([b"row-%d" % day], pa.binary())
        that_day, set_then = np.array([ts]), RowChanges(row, np.ones(1, np.int64), np.array([ts]))
        moved = EventBatch(one.key, that_day, one.offset, one.partition, that_day, one.values, set_then)
        run.operator.process(run.rows.process(moved), Moment(0))
        run.rows.drop_before(run.operator.clocks.floor - 60_000)
    assert len(run.rows.state.index.all_buckets()) == 1


@pytest.mark.parametrize(
    "kind", ["min", "max", "first", "last", "count_distinct", "approx_count_distinct", "collect"]
)
def test_what_cannot_be_undone_is_refused(kind: str) -> None:
    with pytest.raises(InvalidError, match="cannot be undone; count, sum, mean can"):
        resolve([getattr(agg, kind)("i")], VALUES, retractable=True)
