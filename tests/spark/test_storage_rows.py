"""What storage must do when whole jobs die, wait, collide: its numbered situations through Spark, in one session.

Workers are really killed between rounds, so that tasks are restored from their tokens and not found warm.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from task_oracles import START, expected, key_format, rows_of, said, stream
from task_rig import last_of_each, window_rows
from tidegate.clock import ManualClock
from tidegate.log.log import Log
from tidegate.pipeline.admin import app_commits, replay_app
from tidegate.pipeline.definition.app import App
from tidegate.pipeline.settings import WorkerSetup
from tidegate.spark.engine import SparkEngine
from tidegate.storage import StorageConfig, open_backend
from tidegate.tables.serdes.base import String
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates.definitions import collect, count, first, last
from tidegate.windows.aggregates.definitions import sum as sum_of
from tidegate.windows.kinds import Deduplicate, Hopping, Session, Sliding, Tumbling, WindowKind
from tidegate.windows.operators.windowed_operator import Emit
from window_oracles import ms

LATER = START + 86_400_000
EVICTING = {
    "worker_total_bytes": 8 << 20,
    "write_buffer": {"reserve_bytes": 2 << 10, "soft_max_bytes": 4 << 10},
    "base_runs": {"reserve_bytes": 2 << 10, "soft_max_bytes": 4 << 10},
    "state_cache": {"reserve_bytes": 2 << 10, "soft_max_bytes": 64 << 10},
    "max_run_rows": 64,
    "hot_bucket_count": 1,
    "max_tasks": 12,
}


class Killing:
    """A Spark engine whose Python workers can be killed between rounds, as the machine's killer of processes would."""

    def __init__(self, spark: Any, *, slots: int | None = None, after: tuple[int, ...] = ()) -> None:
        self.spark, self.slots, self.after = spark, slots, after
        self.made: SparkEngine | None = None
        self.rounds = self.killed = 0

    def __call__(self, setup: WorkerSetup) -> SparkEngine:
        self.made = SparkEngine(self.spark, setup, slots=self.slots)
        return self.made

    def kill(self) -> None:
        assert self.made is not None
        for outcome in self.made.outcomes:
            try:
                os.kill(int(outcome.process.rpartition(":")[2]), signal.SIGKILL)
                self.killed += 1
            except ProcessLookupError:
                pass  # two slots of one process

    def progress(self, _: Any) -> None:
        self.rounds += 1
        if self.rounds in self.after:
            self.kill()


def run(app: App, engine: Any, **settings: Any) -> Any:
    settings = {"until": "caught_up", "clock": ManualClock(LATER)} | settings
    if isinstance(engine, Killing):
        settings.setdefault("progress", engine.progress)
    return app.run(engine, **settings)


def write(folder: Path, topic: str, partition: int, rows: list[tuple[bytes, int, bytes]]) -> None:
    keys, times, values = zip(*rows, strict=True)
    with Log(folder / "log", durability="os") as log, log.writer(topic, integrity=True) as writer:
        table = pa.table(
            {"key": pa.array(keys, pa.binary()), "timestamp": times, "value": pa.array(values, pa.binary())}
        )
        writer.write(table, partition=partition)


def read(folder: Path, topic: str, partition: int | None = None) -> pa.Table:
    with Log(folder / "log", read_only=True) as log:
        table = log.reader(topic, None if partition is None else [partition]).read_all()
    return table.sort_by([("partition", "ascending"), ("offset", "ascending")])


def topic_of(folder: Path, name: str, partitions: int) -> None:
    with Log(folder / "log", durability="os") as log:
        log.create_topic(name, partitions)


# -- T68 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [pytest.param(2000, id="WS-T68")])
def test_a_job_killed_after_a_checkpoint_is_restored_and_replayed(
    spark: Any, tmp_path: Path, rows: int
) -> None:
    """64 keys in four partitions. After the kill it goes back two commits: what was sent since is sent again, counts
    of keys are what they were."""
    keys = 64
    topic_of(tmp_path, "events", 4)
    made = [
        (b"k%d" % (number % keys), START + number // keys * 10, b'{"n":%d}' % (number % 1000))
        for number in range(keys * rows)
    ]
    for partition in range(4):
        write(tmp_path, "events", partition, [row for row in made if int(row[0][1:]) % 4 == partition])
    app = App("shop", data=tmp_path)
    events = app.stream("events", key=String(), value=Json(n="long"))
    events.window(Tumbling("1s", grace="1h")).agg(n=count(), total=sum_of("n")).to_topic("counts")
    events.filter("n >= 0").to_topic("passed", integrity=False)
    engine, runs = Killing(spark, after=(2, 3)), list[Any]()

    def progress(seen: Any) -> None:
        engine.progress(seen)
        if engine.rounds == 5:
            runs[0].stop()

    runs.append(app.start(engine, round_records=40_000, clock=ManualClock(LATER), progress=progress))
    runs[0].await_termination("120s")
    assert engine.killed >= 2
    backend = open_backend(app.state)
    newest = app_commits(backend, "shop")[-1].round
    replay_app(backend, "shop", to_round=newest - 2, clock=ManualClock(LATER))
    assert run(app, Killing(spark, slots=1)).caught_up
    counts: Counter[tuple[str, int]] = Counter()
    totals: Counter[tuple[str, int]] = Counter()
    for key, ts, value in made:
        window = (key.decode(), ts // 1000 * 1000)
        counts[window] += 1
        totals[window] += int(value[5:-1])
    with app.open_table("counts") as table:
        found = {(row.key, row.window.start): (row.value["n"], row.value["total"]) for row in table.all()}
    assert found == {window: (counts[window], totals[window]) for window in counts}
    passed = read(tmp_path, "passed")
    times = passed["timestamp"].cast(pa.int64()).to_pylist()
    seen = Counter(zip(passed["key"].to_pylist(), times, strict=True))
    assert set(seen) == {(key, ts) for key, ts, _ in made}, "none is missing"
    assert set(seen.values()) == {1, 2}, "what came after the checkpoint twice, all else once"


# -- T69 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [pytest.param(how, id=f"WS-T69-{how}") for how in ("closing", "silence")])
def test_what_waits_is_emitted_after_a_restore_without_new_input(
    spark: Any, tmp_path: Path, how: str
) -> None:
    """The end of the input is said, or a silent partition is not waited for any more: nothing else comes."""
    topic_of(tmp_path, "events", 2)
    made = [
        (b"k%d" % (number % 9), START + number * 100, b'{"n":%d}' % (number % 5)) for number in range(600)
    ]
    write(tmp_path, "events", 0, made)
    app = App("shop", data=tmp_path)
    events = app.stream("events", key=String(), value=Json(n="long"))
    if how == "silence":
        events = events.key_by("n", shards=2)
    grace = "1h" if how == "closing" else "0s"
    events.window(Tumbling("10s", grace=ms(grace)), emit="close").agg(n=count()).to_topic("closed")
    engine = Killing(spark)
    run(app, engine, round_records=200)
    assert read(tmp_path, "closed").num_rows == 0, "all of them wait"
    engine.kill()
    assert engine.killed
    again = Killing(spark)
    settings: dict[str, Any] = {"close": True} if how == "closing" else {}
    if how == "silence":
        app.idle_after_ms = 0
    summary = run(app, again, **settings)
    assert summary.records == 0
    rows = window_rows(read(tmp_path, "closed"), *key_format(Tumbling("10s")))
    counts: Counter[tuple[bytes, int]] = Counter()
    for key, ts, value in made:
        group = key if how == "closing" else int(value[5:-1]).to_bytes(8, "big")
        counts[group, ts // 10_000 * 10_000] += 1
    if how == "silence":  # of the last window more may come
        newest = max(start for _, start in counts)
        counts = Counter({window: n for window, n in counts.items() if window[1] < newest})
    assert Counter((row[0], row[1]) for row in rows) == Counter(counts.keys()), "each window once"
    assert {(row[0], row[1]): int.from_bytes(row[4], "big") for row in rows} == dict(counts)


# -- T89, T98 ------------------------------------------------------------------------------------

RULE = Deduplicate("id", within="2000ms", grace="1500ms")
KINDS: dict[str, WindowKind] = {
    "tumbling": Tumbling("1000ms", grace="500ms"),
    "hopping": Hopping("1000ms", advance="250ms", grace="500ms"),
    "sliding": Sliding("700ms", grace="500ms"),
    "session": Session("300ms", grace="500ms"),
}
ROWS = 400


def every_window(folder: Path, storage: Any) -> App:
    app = App("windows", data=folder, storage=storage)
    value = Json(id="string", n="int64", who="string")
    events = (
        app.stream("events", key=String(), value=value)
        .validate()
        .drop_duplicates("id", within="2000ms", grace="1500ms")
    )
    for name, kind in KINDS.items():
        events.window(kind).agg(count=count(), sum=sum_of("n")).to_topic(name)
    return app


@pytest.fixture(scope="module", params=["evicting", "plenty"])
def windows(spark: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Random streams in two partitions with the same keys; workers die on the way, and the number of slots changes."""
    folder: Path = tmp_path_factory.mktemp(f"windows-{request.param}")
    topic_of(folder, "events", 2)
    for partition in range(2):
        write(folder, "events", partition, rows_of(stream(40 + partition, ROWS)))
    app = every_window(folder, StorageConfig.of(EVICTING) if request.param == "evicting" else None)
    engine, runs = Killing(spark, after=(1, 3)), list[Any]()

    def progress(seen: Any) -> None:
        engine.progress(seen)
        if engine.rounds == 4:
            runs[0].stop()

    cut = 4 * 110 if request.param == "evicting" else 4 * 150
    runs.append(app.start(engine, round_records=cut, clock=ManualClock(LATER), progress=progress))
    runs[0].await_termination("120s")
    assert engine.killed
    assert run(
        app, Killing(spark, slots=1 if request.param == "evicting" else 3), round_records=cut
    ).caught_up
    return folder


def tables(folder: Path, name: str) -> dict[int, dict[Any, Any]]:
    """What a flow says, partition by partition."""
    form, size = key_format(KINDS[name])
    return {number: last_of_each(window_rows(read(folder, name, number), form, size)) for number in range(2)}


def truth(name: str, partition: int) -> dict[Any, Any]:
    events = [(partition, place, event) for place, event in enumerate(stream(40 + partition, ROWS))]
    return said(expected(KINDS[name], Emit.UPDATE, events, RULE))


@pytest.mark.parametrize("name", [pytest.param(name, id=f"WS-T89-{name}") for name in KINDS])
def test_any_stream_evicted_restored_and_moved_gives_what_brute_force_gives(windows: Path, name: str) -> None:
    assert tables(windows, name) == {partition: truth(name, partition) for partition in range(2)}


@pytest.mark.parametrize(
    "row", [pytest.param("tasks", id="WS-T98-tasks"), pytest.param("operators", id="WS-T98-operators")]
)
def test_the_same_key_in_two_tasks_or_operators_is_two_keys(windows: Path, row: str) -> None:
    """Five keys are in both partitions and in all four flows, and no result has met another's records."""
    if row == "tasks":
        apart = tables(windows, "tumbling")
        keys = [{window[0] for window in apart[number]} for number in range(2)]
        assert keys[0] == keys[1] and len(keys[0]) == 5
        shared = set(apart[0]) & set(apart[1])
        assert shared and any(apart[0][window] != apart[1][window] for window in shared)
    else:
        sums = {name: sum(len(table) for table in tables(windows, name).values()) for name in KINDS}
        assert len(set(sums.values())) == len(KINDS), f"kinds differ in their windows: {sums}"
    for name in KINDS:
        assert tables(windows, name) == {partition: truth(name, partition) for partition in range(2)}


# -- T99 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cut", [pytest.param(10_000, id="WS-T99-one-batch"), pytest.param(21, id="WS-T99-several")]
)
def test_records_of_the_same_time_stand_in_their_order_and_count_once(
    spark: Any, tmp_path: Path, cut: int
) -> None:
    """Three hundred records at ten times in all; lists are in the order of the log, each record in them once."""
    topic_of(tmp_path, "events", 1)
    made = [(b"k%d" % (number % 3), START + number % 10, b'{"n":%d}' % number) for number in range(300)]
    write(tmp_path, "events", 0, made)
    app = App("shop", data=tmp_path)
    events = app.stream("events", key=String(), value=Json(n="long"))
    wanted = {"every": collect("n"), "first": first("n"), "last": last("n"), "n": count()}
    events.window(Tumbling("5ms", grace="1h"), emit="close").agg(**wanted).to_topic("lists")
    summary = run(app, Killing(spark), round_records=cut, close=True)
    assert summary.rounds > (10 if cut < 100 else 0)
    order = np.lexsort((np.arange(300), [ts for _, ts, _ in made]))
    lists: dict[tuple[str, int], list[int]] = {}
    for place in order.tolist():
        key, ts, _ = made[place]
        lists.setdefault((key.decode(), ts // 5 * 5), []).append(place)
    with app.open_table("lists") as table:
        rows = list(table.all())
    found = {(row.key, row.window.start): row.value for row in rows}
    assert len(rows) == len(found) == len(lists)
    for window, numbers in lists.items():
        assert found[window] == {
            "every": numbers, "first": numbers[0], "last": numbers[-1], "n": len(numbers)
        }  # fmt: skip
    sent = [value for value in read(tmp_path, "lists")["value"].to_pylist() if value]
    assert len(sent) == len(lists), "each window was sent once"
