"""Records in any order (R-24): inside the grace the result is that of the sorted stream; outside, none is lost unseen.

Many streams go through one operator at once, each a partition with a clock and a key of its own, cut into batches
anywhere. The slow way (`window_oracles`) says what each must come to.
"""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from task_rig import TaskRig
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.topology import Aggregate, Source, To
from tidegate.tables.serdes.base import Bytes, Long
from tidegate.windows.aggregates import definitions as agg
from tidegate.windows.aggregates.folds import resolve
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Hopping, Session, Sliding, Tumbling, WindowKind
from tidegate.windows.operators.base import Moment
from tidegate.windows.operators.late import LateSettings
from tidegate.windows.operators.session import SessionOperator
from tidegate.windows.operators.sliding import SlidingOperator
from tidegate.windows.operators.windows import WindowOperator
from window_oracles import Record, ms, oracle_of
from workers import Worker

TASK = "app/any-order/0"
RECORDS = 24  # of each stream
TOGETHER = 250  # streams in one operator
GRACE = 400
KINDS: dict[str, WindowKind] = {
    "tumbling": Tumbling("300ms", grace=ms(GRACE)),
    "hopping": Hopping("300ms", "100ms", grace=ms(GRACE)),
    "sliding": Sliding("200ms", grace=ms(GRACE)),
    "session": Session("150ms", grace=ms(GRACE)),
}
VALUES = pa.schema([pa.field("value", pa.int64())])
AGGREGATES = resolve({"n": agg.count(), "total": agg.sum("value")}, VALUES)


def disordered(chance: np.random.Generator, limit: int) -> list[Record]:
    """Streams, each up to `limit` ms out of order, mixed; every one begins at zero, where all clocks start."""
    records: list[Record] = []
    whose = np.repeat(np.arange(TOGETHER), RECORDS)
    chance.shuffle(whose)
    times = np.sort(chance.integers(0, 3000, (TOGETHER, RECORDS)), axis=1)
    times[:, 0] = 0
    newest, place = np.zeros(TOGETHER, np.int64), Counter[int]()
    for number in range(TOGETHER):
        records.append(Record(b"s%d" % number, 0, 1, len(records), number))
    for number in whose.tolist():
        at = int(times[number, place[number]])
        place[number] += 1
        newest[number] = max(newest[number], at)
        late = int(chance.integers(0, limit + 1))
        ts = max(0, int(newest[number]) - late)
        records.append(Record(b"s%d" % number, ts, int(chance.integers(100)), len(records), number))
    return records


def answered(kind: WindowKind, records: list[Record], cuts: list[int]) -> tuple[dict[Any, Any], Counter[str]]:
    """What the operator says of these records: its table, and of each key how many were late."""
    made = {Session: SessionOperator, Sliding: SlidingOperator}.get(type(kind), WindowOperator)
    worker = Worker(seed=1)
    operator: Any = made(worker.runtime, TASK, "windows", kind, AGGREGATES, emit="update")
    table: dict[Any, Any] = {}
    late: Counter[str] = Counter()
    for start, stop in zip([0, *cuts], [*cuts, len(records)], strict=True):
        part = records[start:stop]
        events = EventBatch(
            key=pa.array([record.key for record in part], pa.binary()),
            ts=np.array([record.ts for record in part], np.int64),
            offset=np.array([record.offset for record in part], np.int64),
            partition=np.array([record.partition for record in part], np.int32),
            stream_time=np.full(len(part), -1, np.int64),
            values=pa.record_batch([pa.array([record.value for record in part], pa.int64())], schema=VALUES),
        )
        output = operator.process(events, Moment(now_ms=0))
        if output.late is not None:
            late.update(output.late.events.key.to_pylist())
        rows = output.rows
        gone = [False] * len(rows) if rows.deleted is None else rows.deleted.tolist()
        windows = zip(rows.key.to_pylist(), rows.window_start.tolist(), rows.window_end.tolist(), strict=True)
        values = rows.values.to_pylist()
        for window, value, is_gone in zip(windows, values, gone, strict=True):
            if is_gone:
                table.pop(window)
            else:
                table[window] = (value["n"], value["total"])
    return table, late


def brute_force(kind: WindowKind, records: list[Record]) -> tuple[dict[Any, Any], Counter[Any]]:
    oracle = oracle_of(kind, "update").run(records)
    by_offset = {record.offset: record.key for record in records}
    table = {
        window: (len(members), sum(each.value or 0 for each in members))
        for window, (_, members) in oracle.table.items()
    }
    return table, Counter(by_offset[line.offset] for line in oracle.late)


def check(name: str, seed: int, *, limit: int) -> tuple[int, int]:
    chance = np.random.default_rng(seed)
    records = disordered(chance, limit)
    cuts = sorted({TOGETHER, *chance.integers(TOGETHER, len(records), 5).tolist()})
    table, late = answered(KINDS[name], records, cuts)
    expected, set_aside = brute_force(KINDS[name], records)
    assert table == expected, f"{name}, seed {seed}"
    assert late == set_aside, f"{name}, seed {seed}"
    if limit <= GRACE:
        assert not late
        ordered = [*records[:TOGETHER], *sorted(records[TOGETHER:], key=lambda record: record.ts)]
        assert answered(KINDS[name], ordered, [TOGETHER])[0] == table, f"{name}, seed {seed}: sorted"
    elif name == "tumbling":  # there each record is in one window: taken or set aside, and nothing else
        assert sum(n for n, _ in table.values()) + sum(late.values()) == len(records)
    return TOGETHER, len(late)


@pytest.mark.parametrize("name", [pytest.param(name, id=f"R-24-{name}") for name in KINDS])
def test_any_order_inside_the_grace_gives_the_sorted_result_and_outside_all_is_counted(
    name: str, tally: Any
) -> None:
    streams = told = 0
    for seed in range(8):
        found, late = check(name, seed, limit=GRACE if seed % 2 else 3 * GRACE)
        streams, told = streams + found, told + late
    tally(streams, detected=told, seeds=[0, 8], records=RECORDS + 1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [pytest.param(name, id=f"R-24-soak-{name}") for name in KINDS])
def test_twenty_thousand_streams(name: str, tally: Any) -> None:
    streams = told = 0
    for seed in range(100, 120):
        found, late = check(name, seed, limit=GRACE if seed % 2 else 3 * GRACE)
        streams, told = streams + found, told + late
    tally(streams, detected=told, seeds=[100, 120], records=RECORDS + 1)


def flood(folder: Path, rounds: int, rows: int) -> dict[str, int]:
    """Records that are all too late: what state and memory come to, at first and at the end."""
    step = Aggregate(
        Tumbling("1000ms", grace="500ms"),
        (agg.count().named("n"),),
        late=LateSettings("1h", max_bytes=64 << 10),
    )
    flow = Flow(Source("events", Bytes(), Long()), (step,), (To("results"),))
    keys = pa.array([b"k%d" % (number % 50) for number in range(rows)], pa.binary())
    values = pa.array([number.to_bytes(8, "big") for number in range(rows)], pa.binary())
    chance, seen = np.random.default_rng(7), Counter[str]()
    held: list[tuple[int, int]] = []
    with TaskRig(folder, flow) as rig, rig.log.writer("events") as writer:
        now = np.full(rows, 100_000_000, np.int64) + np.arange(rows) % 1000
        writer.write(pa.table({"key": keys, "timestamp": now, "value": values}), partition=0)
        rig.round()
        for _ in range(rounds):
            late = chance.integers(0, 99_000_000, rows)
            writer.write(pa.table({"key": keys, "timestamp": late, "value": values}), partition=0)
            done = rig.round()
            for counters in (done.tasks[0].counters, done.sources[0].counters):
                seen.update(counters)
            held.append((done.tasks[0].backlog_bytes, rss_bytes()))
    return {
        "late": seen["windows.late_records"],
        "state_first": held[1][0],
        "state_last": held[-1][0],
        "rss_first": held[len(held) // 2][1],
        "rss_last": held[-1][1],
    }


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("rounds", [pytest.param(10, id="R-24-flood")])
def test_a_flood_of_late_records_leaves_state_and_memory_as_they_were(
    tmp_path: Path, rounds: int, tally: Any
) -> None:
    rows = 50_000
    found = flood(tmp_path, rounds, rows)
    assert found["late"] == rounds * rows, found
    assert found["state_last"] <= found["state_first"] + (64 << 10), found
    assert found["rss_last"] - found["rss_first"] < 48 << 20, found
    tally(rounds * rows, detected=rounds * rows, **found)
