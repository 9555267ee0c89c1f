"""Rounds on real Spark: the results of the local engine byte for byte, in processes that are met again."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle

import pipelines
import tidegate as tg
from meddling import Meddling
from pipelines import COPARTITIONED, NOON, every_kind, records, run_all, stored
from tidegate.clock import ManualClock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.pipeline.messages import RoundOrder, TaskOrder, Tick
from tidegate.pipeline.settings import WorkerSetup
from tidegate.spark.engine import SparkEngine

ROWS = 2400
TOPICS = (*COPARTITIONED, "by-shop")
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Spark's workers cannot import tests


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An app that was made and has records before it, and has not run yet."""
    folder = tmp_path_factory.mktemp("engine") / "before"
    pipelines.create(folder)
    pipelines.write_orders(folder, ROWS)
    return folder


@pytest.fixture(scope="module")
def local(before: Path) -> Path:
    """The same after a run of the local engine."""
    folder = before.parent / "local"
    shutil.copytree(before, folder)
    run_all(every_kind(folder), "local")
    return folder


@pytest.fixture
def folder(before: Path, tmp_path: Path) -> Path:
    shutil.copytree(before, tmp_path / "app")
    return tmp_path / "app"


def shops(folder: Path) -> list[dict[str, Any]]:
    """The table that is no topic."""
    with every_kind(folder) as app, app.open_table("shops") as table:
        found: list[dict[str, Any]] = table.to_arrow().to_pylist()
    return sorted(found, key=repr)


def watched(made: list[SparkEngine], spark: Any, setup: WorkerSetup) -> SparkEngine:
    made.append(SparkEngine(spark, setup))
    return made[-1]


def test_every_kind_of_window_and_both_plans_give_the_bytes_of_the_local_engine(
    spark: Any, folder: Path, local: Path
) -> None:
    summary = run_all(every_kind(folder), spark)
    assert (summary.engine, summary.caught_up, summary.closed) == ("spark", True, True)
    assert stored(folder, *TOPICS) == stored(local, *TOPICS)
    assert shops(folder) == shops(local) != []


def over_changes(folder: Path) -> tg.App:
    """Windows over the changes of windows, by their key and by another."""
    app = tg.App("again", log=folder / "log", state=folder / "again")
    stream = app.stream("orders", value=pipelines.ORDER)
    stream.window(tg.Tumbling("1m", grace="5m")).agg(n=tg.count()).to_topic(
        "minutes", value=tg.Json(n="int64")
    )
    changes = app.changes("minutes", window_size="1m", value=tg.Json(n="int64")).filter("n <> 2")
    made = {"minutes": tg.count(), "n": tg.sum("n"), "mean": tg.mean("n")}
    changes.window(tg.Tumbling("1h", retention="1d")).agg(**made).to_table("by-key")
    changes.key_by("n % 3", shards=3).window(tg.Tumbling("1h", retention="1d")).agg(**made).to_table(
        "by-count"
    )
    return app


def test_windows_over_changes_are_those_of_the_local_engine(spark: Any, folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "other")
    found = []
    for place, engine, size in ((folder, spark, 700), (folder.parent / "other", "local", 90)):
        app = over_changes(place)
        app.run(engine, until="caught_up", round_records=size)
        tables = []
        for name in ("by-key", "by-count"):
            with app.open_table(name) as table:
                rows = table.to_arrow().drop_columns(["timestamp"]).to_pylist()
            tables.append(sorted(rows, key=repr))
            assert app.late(name).num_rows == 0
        found.append(tables)
    assert found[0] == found[1] and all(found[0])


def test_the_tumbling_windows_are_those_of_a_plain_loop_over_the_records(local: Path, before: Path) -> None:
    """What both engines agree on is also right: first of each order, by minute, what came too late left out."""
    kept: dict[int, dict[tuple[str, int], tuple[int, float]]] = defaultdict(dict)
    from tidegate.log.log import Log

    with Log(before / "log", read_only=True) as log:
        rows = log.reader("orders").read_all()
    stream_time, seen = defaultdict(lambda: -1), dict[tuple[int, str, int], int]()
    values = pipelines.ORDER
    for row in rows.to_pylist():
        if row["value"] in (None, b""):
            continue
        value = values.decode(row["value"])
        partition, key, ts = row["partition"], row["key"].decode(), _ms(row["timestamp"])
        stream_time[partition] = now = max(stream_time[partition], ts)
        first = seen.get((partition, key, value["order"]))
        if (first is not None and abs(ts - first) <= 900_000) or ts < now - 900_000:
            continue
        seen[partition, key, value["order"]] = ts
        start = ts // 60_000 * 60_000
        if start + 60_000 + 300_000 <= now:
            continue
        count, amount = kept[partition].get((key, start), (0, 0.0))
        kept[partition][key, start] = (count + 1, amount + value["amount"])
    expected = {window: row for each in kept.values() for window, row in each.items()}
    with every_kind(local) as app, app.windowed_table("tumbling") as table:
        found = {
            (row.key, row.window.start): (row.value["orders"], row.value["amount"]) for row in table.all()
        }
    assert found == expected


def _ms(value: Any) -> int:
    return value if isinstance(value, int) else round(value.timestamp() * 1000)


def test_rounds_may_go_from_one_engine_to_the_other_at_any_time(
    spark: Any, folder: Path, local: Path
) -> None:
    for engine in ("local", spark, "local", spark):
        clock = ManualClock(NOON)
        with every_kind(folder).start(engine, round_records=6000, clock=clock) as run:
            deadline, first = time.monotonic() + 300, run.progress.round
            while (
                run.progress.round <= first
                and not run.progress.caught_up
                and run.is_running
                and time.monotonic() < deadline
            ):
                run.join("20ms")
    run_all(every_kind(folder), spark)
    assert records(folder, *COPARTITIONED) == records(local, *COPARTITIONED)
    assert shops(folder) == shops(local)


def test_a_slot_meets_the_same_process_in_every_round(spark: Any, folder: Path, local: Path) -> None:
    met: list[tuple[str, ...]] = []
    made: list[SparkEngine] = []
    app = every_kind(folder)
    run = app.start(
        partial(watched, made, spark),
        until="caught_up",
        round_records=2400,
        clock=ManualClock(NOON),
        progress=lambda _: met.append(tuple(outcome.process for outcome in made[0].outcomes)),
    )
    assert run.await_termination().rounds >= 8
    rounds = [processes for processes in met if len(processes) == 2]
    assert len(rounds) >= 5
    assert len(set(rounds)) == 1 and len(set(rounds[0])) == 2
    exchange = made[0]._exchange
    assert exchange is not None and list(exchange.iterdir()) == [], "blobs go with their round"
    assert records(folder, "unlimited").keys() == records(local, "unlimited").keys()


def test_two_apps_side_by_side_on_one_session_keep_their_own_processes(
    spark: Any, folder: Path, tmp_path: Path
) -> None:
    """Results are exact, no process changes apps, and no job of the user's runs with the environment of a slot."""
    other, alone = tmp_path / "other", tmp_path / "alone"
    shutil.copytree(folder, other)
    shutil.copytree(folder, alone)
    run_all(every_kind(alone), "local", round_records=2400)
    met: dict[Path, list[tuple[str, ...]]] = {folder: [], other: []}
    leaked: list[str | None] = []

    def environment(_: Any) -> list[str | None]:
        import os

        return [os.environ.get("TIDEGATE_SLOT")]

    def started(here: Path) -> Any:
        made: list[SparkEngine] = []
        return every_kind(here).start(
            partial(watched, made, spark), until="caught_up", close=True, round_records=2400,
            clock=ManualClock(NOON), progress=lambda _: met[here].append(tuple(o.process for o in made[0].outcomes)),
        )  # fmt: skip

    runs = [started(here) for here in met]
    while any(run.is_running for run in runs):
        leaked += spark.sparkContext.parallelize([0], 1).mapPartitions(environment).collect()
    for run in runs:
        run.await_termination()
    processes = {here: {each for each in rounds if len(each) == 2} for here, rounds in met.items()}
    assert [len(each) for each in processes.values()] == [1, 1], "a slot meets its own process in every round"
    assert len({each for pair in processes.values() for (one, two) in pair for each in (one, two)}) == 4
    assert set(leaked) == {None}
    for here in met:
        assert stored(here, *TOPICS) == stored(alone, *TOPICS)
        assert shops(here) == shops(alone)


def test_a_run_uses_the_processes_of_the_run_before_it(spark: Any, tmp_path: Path, folder: Path) -> None:
    """A process takes a second or two to load what a task needs; only runs side by side have their own."""
    met: list[set[str]] = []
    for number in range(3):
        here = tmp_path / str(number)
        shutil.copytree(folder, here)
        made: list[SparkEngine] = []
        seen: set[str] = set()

        def note(_: Any, made: list[SparkEngine] = made, seen: set[str] = seen) -> None:
            seen.update(each.process for each in made[0].outcomes)

        every_kind(here).run(
            partial(watched, made, spark), until="caught_up", clock=ManualClock(NOON), progress=note
        )
        met.append(seen)
    assert len(met[0]) == 2 and met[0] == met[1] == met[2]


def test_the_word_spark_runs_on_the_session_that_is_open(spark: Any, folder: Path, local: Path) -> None:
    summary = every_kind(folder).run("spark", trigger="once", clock=ManualClock(NOON))
    assert summary.engine == "spark" and summary.caught_up
    assert records(folder, "unlimited").keys() == records(local, "unlimited").keys()


@pytest.fixture
def meddled(tmp_path: Path) -> Path:
    """A small app whose records pass a function that does as it is asked."""
    folder = tmp_path / "meddled"
    pipelines.create(folder, change=Meddling(folder / "requests"))
    pipelines.write_orders(folder, 300)
    return folder


def test_what_a_task_raises_once_is_tried_again_by_spark_and_leaves_no_trace(
    spark: Any, tmp_path: Path, meddled: Path
) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(meddled, twin)
    run_all(every_kind(twin, Meddling(twin / "requests")), "local", round_records=1500)
    meddling = Meddling(meddled / "requests")
    for step in ("records", "checkpoint", "token"):
        meddling.ask(step, "raise")
    run_all(every_kind(meddled, meddling), spark, round_records=1500)
    assert len(meddling.done) == 3
    assert records(meddled, *TOPICS) == records(twin, *TOPICS)


class FailsAlways(Meddling):
    """The same definition to whoever compares them by name."""

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.num_rows:
            raise ZeroDivisionError("nothing helps")
        return super().__call__(batch)


def test_what_a_function_always_raises_stops_the_partitions_and_is_told(spark: Any, tmp_path: Path) -> None:
    change = FailsAlways(tmp_path / "requests")
    pipelines.create(tmp_path / "app", change=change)
    pipelines.write_orders(tmp_path / "app", 100)
    summary = run_all(every_kind(tmp_path / "app", change), spark)
    assert summary.exit_code == 5 and summary.stopped
    for each in summary.stopped:
        assert each.reason == "failed" and "failed with ZeroDivisionError: nothing helps" in each.message


def setup_of(folder: Path, change: Any = None) -> WorkerSetup:
    app = every_kind(folder, change)
    partitions = {"orders": 2} | dict.fromkeys(COPARTITIONED, 2) | {"by-shop": 3}
    return WorkerSetup(app.name, app.flows, app.log, app.state, app.storage, partitions=partitions)


def test_an_error_raised_on_purpose_keeps_its_class(spark: Any, folder: Path) -> None:
    engine = SparkEngine(spark, setup_of(folder))
    order = RoundOrder("every-kind", 1, 1, Tick(NOON), (), (TaskOrder("tumbling", 0, b"no token"),))
    with pytest.raises(Exception) as caught:
        engine.run(order)
    assert type(caught.value).__module__ == "tidegate.errors"
    assert not isinstance(caught.value, UnavailableError)


def test_a_round_can_be_ended_from_another_thread(spark: Any, meddled: Path) -> None:
    meddling = Meddling(meddled / "requests", stall_s=60)
    meddling.ask("records", "stall")
    made: list[SparkEngine] = []
    run = every_kind(meddled, meddling).start(
        partial(watched, made, spark), until="caught_up", clock=ManualClock(NOON), attempts=1
    )
    deadline = time.monotonic() + 300
    while not meddling.done and time.monotonic() < deadline and run.is_running:
        run.join("20ms")
    threading.Thread(target=made[0].close).start()
    with pytest.raises(UnavailableError, match="cancelled"):
        run.await_termination("50s")


def test_jobs_are_named_after_the_app_and_its_round(spark: Any, folder: Path) -> None:
    groups: list[str] = []
    made: list[SparkEngine] = []
    tracker = spark.sparkContext.statusTracker()

    def note(progress: Any) -> None:
        group = f"tidegate every-kind {2}.{progress.round}"
        groups.extend(group for _ in tracker.getJobIdsForGroup(group))

    every_kind(folder).run(
        partial(watched, made, spark),
        until="caught_up",
        round_records=20_000,
        clock=ManualClock(NOON),
        progress=note,
    )
    assert groups
    assert spark.sparkContext.getLocalProperty("spark.jobGroup.id") is None


def test_a_connect_session_is_told_that_it_cannot(folder: Path) -> None:
    kind = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})
    with pytest.raises(InvalidError, match="Spark Connect session cannot run a pipeline"):
        SparkEngine(kind(), setup_of(folder))
