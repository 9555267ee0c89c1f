"""Every kind of window, on random streams, against the slow way (WS-T89).

The vector operators must answer what `window_oracles` answers record by record: the table a reader of the
updates ends up with, every final window once and in order, every late record and how late it was. Wherever the
stream is cut into batches, whatever maintenance does in between (dumps, evictions, compactions), and wherever the
process dies and goes on from a checkpoint.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.storage.backends.memory import MemoryBackend
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Hopping, Session, Sliding, Tumbling, Unlimited, WindowKind
from tidegate.windows.operators.base import Moment, Output, WindowRows
from tidegate.windows.operators.session import SessionOperator
from tidegate.windows.operators.sliding import SlidingOperator
from tidegate.windows.operators.windows import WindowOperator
from window_oracles import CLOSE, UPDATE, Record, Row, WindowOracle, ms, oracle_of
from workers import Worker

TASK = "app/orders/0"
VALUES = pa.schema([pa.field("key", pa.int64())])  # a user's column called `key` is the user's
AGGREGATES = resolve(
    {
        "n": agg.count(),
        "total": agg.sum("key"),
        "low": agg.min("key"),
        "high": agg.max("key"),
        "first": agg.first("key"),
        "last": agg.last("key"),
    },
    VALUES,
)
KINDS = ("tumbling", "hopping", "unlimited", "sliding", "session")
Result = tuple[Any, ...]


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────


def events(records: list[Record]) -> EventBatch:
    """Records as operators take them."""
    return EventBatch(
        key=pa.array([record.key for record in records], pa.binary()),
        ts=np.array([record.ts for record in records], np.int64),
        offset=np.array([record.offset for record in records], np.int64),
        partition=np.array([record.partition for record in records], np.int32),
        stream_time=np.full(len(records), -1, np.int64),
        values=pa.RecordBatch.from_arrays(
            [pa.array([record.value for record in records], pa.int64())], schema=VALUES
        ),
    )


@st.composite
def streams(draw: Any, keys: int = 4, partitions: int = 2) -> list[Record]:
    """Times that go on, stand still, jump ahead and fall back; few keys, some records without one."""
    unit = draw(st.sampled_from([1, 7, 40_000]))
    steps = st.one_of(st.integers(-12, 12), st.integers(0, 4), st.integers(-60, 60))
    at, records = draw(st.integers(0, 30)), []
    for offset in range(draw(st.integers(0, 45))):
        at = max(0, at + draw(steps))
        key = draw(st.integers(-1, 4 * keys))
        records.append(
            Record(
                key=None if key < 0 else b"key-%d" % (key % keys),
                ts=-1 if draw(st.integers(0, 60)) == 60 else at * unit + draw(st.integers(0, 1)),
                value=draw(st.one_of(st.none(), st.integers(-5, 5))),
                offset=100 + offset,
                partition=draw(st.integers(0, partitions - 1)),
            )
        )
        if draw(st.integers(0, 12)) == 0:
            at = max(0, at - 20)
    return records


@st.composite
def kinds(draw: Any, name: str) -> WindowKind:
    unit = draw(st.sampled_from([1, 7, 40_000]))
    width = draw(st.integers(1, 12)) * unit
    grace = draw(st.sampled_from([0, 1, unit, 5 * unit, 30 * unit, 500 * unit]))
    extra = draw(st.sampled_from([None, 1, 10 * unit]))
    if name == "tumbling":
        return Tumbling(ms(width), grace=ms(grace))
    if name == "hopping":
        advance = max(1, width // draw(st.integers(1, 4)))
        return Hopping(ms(width), ms(draw(st.integers(1, width)) if unit == 1 else advance), grace=ms(grace))
    if name == "sliding":
        return Sliding(ms(width), grace=ms(grace))
    if name == "session":
        return Session(
            ms(width), grace=ms(grace), retention=ms(None if extra is None else width + grace + extra)
        )
    return Unlimited(draw(st.integers(0, 10 * unit)))


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────


def operator_of(worker: Worker, kind: WindowKind, emit: str) -> Any:
    made = {Session: SessionOperator, Sliding: SlidingOperator}.get(type(kind), WindowOperator)
    return made(worker.runtime, TASK, "windows", kind, AGGREGATES, emit=emit)


class Run:
    """One operator fed batch by batch; it may die and go on from its last checkpoint."""

    def __init__(self, kind: WindowKind, emit: str) -> None:
        self.kind, self.emit = kind, emit
        self.backend = MemoryBackend()
        self.outputs: list[Output] = []
        self.saved: tuple[bytes, int] | None = None
        self.lives = 0
        self.start()

    def start(self) -> None:
        self.lives += 1
        self.worker = Worker(backend=self.backend, seed=self.lives)
        self.operator = operator_of(self.worker, self.kind, self.emit)

    def process(self, records: list[Record]) -> None:
        self.outputs.append(self.operator.process(events(records), Moment(now_ms=0)))

    def checkpoint(self) -> None:
        self.saved = (self.worker.runtime.checkpoint(TASK), len(self.outputs))

    def crash(self) -> int:
        """Forget everything after the last checkpoint; the number of batches that count as done."""
        token, done = self.saved or (None, 0)
        self.start()
        if token is not None:
            self.worker.runtime.apply_checkpoint(TASK, token)
        del self.outputs[done:]
        return done

    def squeeze(self, how: int) -> None:
        """What storage may do at any time."""
        runtime = self.worker.runtime
        for state in self.operator.states:
            buckets = state.index.all_buckets()
            if buckets and how & 1:
                self.worker.run(runtime.dumping(TASK, state, buckets, evict=bool(how & 2)))
            if buckets and how & 4:
                self.worker.run(runtime.compacting(TASK, state, buckets[how % len(buckets)]))
        if how & 8:
            runtime.maintain(TASK, 10**6)

    def finish(self) -> None:
        self.outputs.append(self.operator.tick(Moment(now_ms=0, closing=True)))

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return [row for output in self.outputs for row in rows_of(output.rows)]

    @property
    def table(self) -> dict[tuple[bytes, int, int], Result]:
        known: dict[tuple[bytes, int, int], Result] = {}
        for key, start, end, is_deleted, result in self.rows:
            if is_deleted:
                assert (key, start, end) in known, "a window is deleted that nobody was told of"
                del known[key, start, end]
            else:
                known[key, start, end] = result
        return known

    @property
    def late(self) -> list[tuple[int, int, int]]:
        found: list[tuple[int, int, int]] = []
        for output in self.outputs:
            if output.late is not None:
                late = output.late
                found += zip(
                    late.events.offset.tolist(),
                    late.window_start.tolist(),
                    late.how_late_ms.tolist(),
                    strict=True,
                )
        return found


def rows_of(rows: WindowRows) -> list[tuple[Any, ...]]:
    deleted = [False] * len(rows) if rows.deleted is None else rows.deleted.tolist()
    values = [tuple(row.values()) for row in rows.values.to_pylist()]
    notes = zip(
        rows.ts.tolist(),
        rows.count.tolist(),
        rows.min_offset.tolist(),
        rows.max_offset.tolist(),
        values,
        strict=True,
    )
    columns = (rows.key.to_pylist(), rows.window_start.tolist(), rows.window_end.tolist(), deleted, notes)
    return list(zip(*columns, strict=True))


def result_of(ts: int, records: tuple[Record, ...]) -> Result:
    """What the aggregates make of a window's records, in plain Python."""
    offsets = [record.offset for record in records]
    values = [record.value for record in records if record.value is not None]
    by_time = sorted(records, key=lambda record: (record.ts, record.partition, record.offset))
    return (
        ts, len(records), min(offsets), max(offsets),
        (len(records), sum(values) if values else None, min(values, default=None), max(values, default=None),
         by_time[0].value, by_time[-1].value),
    )  # fmt: skip


def expected_row(row: Row) -> tuple[Any, ...]:
    return row.key, row.start, row.end, False, result_of(row.ts, row.records)


def cut(records: list[Record], places: list[int]) -> list[list[Record]]:
    edges = sorted({0, len(records), *(place % (len(records) + 1) for place in places)})
    return [records[start:stop] for start, stop in itertools.pairwise(edges)]


def check(run: Run, oracle: WindowOracle) -> None:
    assert sorted(run.late) == sorted(tuple(line) for line in oracle.late)
    if run.emit == UPDATE:
        assert run.table == {window: result_of(ts, records) for window, (ts, records) in oracle.table.items()}
        return
    assert run.rows == sorted((expected_row(row) for row in oracle.rows), key=lambda row: (row[2], row[0]))


def emits(name: str) -> Any:
    return st.just(UPDATE) if name == "unlimited" else st.sampled_from([UPDATE, CLOSE])


# ── tests ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [pytest.param(name, id=f"WS-T89-{name}") for name in KINDS])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_operator_equals_the_oracle_whatever_happens(name: str, data: Any) -> None:
    kind, emit = data.draw(kinds(name)), data.draw(emits(name))
    records = data.draw(streams(partitions=data.draw(st.integers(1, 2))))
    batches = cut(records, data.draw(st.lists(st.integers(0, 60), max_size=8)))
    run = Run(kind, emit)
    done, crashes = 0, 0
    while done < len(batches):
        run.process(batches[done])
        done += 1
        what = data.draw(st.integers(0, 40))
        run.squeeze(what & 15)
        if what % 5 == 1:
            run.checkpoint()
        elif what % 5 == 2 and crashes < 3:
            done, crashes = run.crash(), crashes + 1
    settle(run, records)


@pytest.mark.parametrize("name", [pytest.param(name, id=f"WS-T89-{name}") for name in KINDS])
@pytest.mark.parametrize("seed", range(4))
def test_a_long_stream_equals_the_oracle(name: str, seed: int) -> None:
    """Hundreds of records over hours, disordered more than the grace allows; evicted and killed at random."""
    chance = np.random.default_rng(seed)
    emit = CLOSE if seed % 2 and name != "unlimited" else UPDATE
    kind = {
        "tumbling": Tumbling("5m", grace="1m"),
        "hopping": Hopping("5m", "1m", grace="1m"),
        "unlimited": Unlimited(60_000),
        "sliding": Sliding("5m", grace="1m"),
        "session": Session("2m", grace="1m"),
    }[name]
    base = np.sort(chance.integers(0, 3 * 3_600_000, 260))
    times = np.maximum(0, base - chance.integers(0, 150_000, 260))
    records = [
        Record(b"key-%d" % chance.integers(0, 4), int(ts), int(chance.integers(-9, 9)), offset)
        for offset, ts in enumerate(times)
    ]
    batches = cut(records, chance.integers(0, 260, 25).tolist())
    run, done = Run(kind, emit), 0
    while done < len(batches):
        run.process(batches[done])
        done += 1
        run.squeeze(int(chance.integers(16)))
        if chance.integers(4) == 0:
            run.checkpoint()
        elif chance.integers(3) == 0 and run.lives < 6:
            done = run.crash()
    assert run.lives > 1
    settle(run, records)


def settle(run: Run, records: list[Record]) -> None:
    """Hold everything against the oracle, then the end of the input."""
    oracle = oracle_of(run.kind, run.emit).run(records)
    if isinstance(run.kind, Session | Sliding):
        check_kept(run, oracle)
    run.finish()
    oracle.finish()
    check(run, oracle)


def check_kept(run: Run, oracle: WindowOracle) -> None:
    """What the operator's own table answers: all windows that retention keeps."""
    floor, kind = oracle.clock.floor, run.kind
    if isinstance(kind, Session):
        oldest = floor - max(kind.retention_ms, kind.gap_ms + kind.grace_ms + 1) + 1
    else:
        oldest = floor - kind.retention_ms + 1 + kind.difference_ms
    found = {(key, start, end): result for key, start, end, _, result in rows_of(run.operator.windows())}
    assert found == {
        window: result_of(oracle._time_of(window), tuple(members))
        for window, members in oracle.windows.items()
        if window[2] >= max(0, oldest)
    }


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_windows_of_some_keys_are_those_among_all_windows(name: str, data: Any) -> None:
    """Bounds are on a window's start, for sessions and sliding windows on its end, as `windows` has them."""
    run = Run(data.draw(kinds(name)), data.draw(emits(name)))
    for batch in cut(data.draw(streams()), data.draw(st.lists(st.integers(0, 60), max_size=5))):
        run.process(batch)
        run.squeeze(data.draw(st.integers(0, 15)))
    names = data.draw(st.lists(st.sampled_from([b"key-%d" % n for n in range(6)]), unique=True))
    edge = st.one_of(st.integers(0, 60), st.integers(0, 60).map(lambda n: n * 40_000))
    first, last = data.draw(edge), data.draw(st.one_of(st.just(2**63 - 1), edge))
    every = rows_of(run.operator.windows(first, last)) if first <= last else []
    found = rows_of(run.operator.windows_of(pa.array(names, pa.binary()), first, last))
    assert sorted(found) == sorted(row for row in every if row[0] in names)
