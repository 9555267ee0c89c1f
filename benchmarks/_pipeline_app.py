"""The app of `pipeline.py`: its log, its definition, a timed run, its table checked. Not a benchmark itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import tidegate as tg
from _pipeline_data import COLUMNS, MINUTE, START, Answer, fixed_values, from_fixed, json_values, made_events
from _report import demand
from _storage import scratch_folder
from tidegate.pipeline.messages import RoundOrder, Tick
from tidegate.pipeline.settings import WorkerSetup
from tidegate.spark.engine import SparkEngine
from tidegate.spark.round_task import work_on

PARTITIONS = 2


def session() -> Any:
    import tidegate.spark

    here = {"spark.executorEnv.PYTHONPATH": str(Path(__file__).resolve().parent)}  # where `from_fixed` lives
    spark = tidegate.spark.session("bench", master="local[2,4]", config=here)
    spark.sparkContext.setLogLevel("OFF")
    return spark


def write_log(folder: Path, events: pa.Table, values: pa.Array) -> None:
    """An embedded log, its records numbered and check-summed as a sender does it."""
    with tg.Log(folder / "log", durability="os") as log:
        if "orders" not in log.topics():
            log.create_topic("orders", PARTITIONS)
        with log.writer("orders", integrity=True) as sender:
            sender.write(pa.table({"key": events["key"], "value": values, "timestamp": events["ts"]}))


@contextmanager
def scratch(events: pa.Table, values: pa.Array) -> Iterator[Path]:
    with scratch_folder() as folder:
        write_log(folder, events, values)
        yield folder


def app_over(folder: Path, *, fixed: bool = False, rekeyed: bool = False) -> tg.App:
    app = tg.App("bench", data=folder)
    stream = app.stream(
        "orders", value=None if fixed else tg.Json(order_id="int64", amount="double")
    ).validate()
    if fixed:
        stream = stream.map(from_fixed, COLUMNS)
    if rekeyed:
        stream = stream.key_by("key", shards=PARTITIONS)
    (
        stream.drop_duplicates("order_id", within="1h")
        .window(tg.Tumbling("1m", grace="1h", retention="10d"))  # all of them can be read at the end
        .agg(n=tg.count(), total=tg.sum("amount"))
        .to_table("windows")
    )
    return app


@dataclass(frozen=True)
class Round:
    records: int
    seconds: float


@dataclass(frozen=True)
class Ran:
    seconds: float
    rounds: list[Round]


def run(app: tg.App, engine: Any, round_records: int | None) -> Ran:
    """From the start of the run to its end, and what passed between the ends of rounds."""
    marks = [(0, perf_counter())]
    app.run(
        engine,
        until="caught_up",
        round_records=round_records,
        progress=lambda now: marks.append((now.records, perf_counter())),
    )
    ended = perf_counter()
    rounds = [
        Round(now[0] - before[0], now[1] - before[1]) for before, now in pairwise(marks) if now[0] > before[0]
    ]
    return Ran(ended - marks[0][1], rounds)


def check(app: tg.App, answer: Answer) -> None:
    with app.open_table("windows") as table:
        found = table.to_arrow()
    minute = pc.divide(found["window_start"].cast(pa.int64()), MINUTE)
    fault = answer.fault_in(found.append_column("minute", minute))
    demand(fault is None, f"Tidegate's: {fault}")


def warm(spark: Any, *, rekeyed: bool = False) -> None:
    """Python workers started, kernels and these files loaded in them: figures are of a stream that runs.

    To be done again after a minute without work: Spark ends idle workers.
    """
    events = made_events(20_000, "spread")
    for make in (json_values, fixed_values):
        with scratch(events, make(events)) as folder:
            run(app_over(folder, fixed=make is fixed_values, rekeyed=rekeyed), spark, 5000)


def floor_ms(spark: Any, folder: Path) -> float:
    """A round whose tasks find nothing to do, once the JVM has compiled what it needs for one."""
    app = app_over(folder)
    setup = WorkerSetup(
        app.name, app.flows, app.log, app.state, app.storage, partitions={"orders": PARTITIONS}
    )
    engine = SparkEngine(spark, setup)
    order = RoundOrder("bench", 1, 1, Tick(START), (), ())
    took: list[float] = []
    for _ in range(100):
        began = perf_counter()
        engine._slots.on_each(
            {slot: partial(work_on, engine._assigned(order, [], [])) for slot in range(engine.slots)}
        ).collect()
        took.append((perf_counter() - began) * 1000)
    engine.close()  # leaves its warm processes to the runs that follow
    return median(took[-20:])
