"""How fast is a pipeline on Spark, from a log to a committed table, and who else is how fast at the same job?

Back of the envelope, for an event: the chain of `windows_chain.py` takes 300 to 450 ns of a core, validation of
producers 50; on two cores 4 to 5 M events/s. A round costs Spark's floor (20 to 30 ms on a quiet machine) and the
syncs of two tasks and a commit (10 to 20 ms): at 250 k events a round that is half of it, at 4 M a tenth.

The job: producers' numbering followed, duplicates of an order dropped within an hour, count and sum for each key and
minute, committed. Four sets of events: `spread` puts nearly one event into each window and never aggregates, `few` has
500 keys, `some` about ten events a window, `hot` half of all events under one key. Every output is checked against
numpy's before its figure is printed. Each figure is one run, with the load of the machine beside it; figures of one run
of this file can be compared with each other and with nothing else.

    python benchmarks/pipeline.py [--rows 2000000] [--peers 1] [--full] [--json]        --full: 16 M events
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import tidegate as tg
from _report import Report, demand, load_line
from _spark_peer import IN_HEAP, ROCKSDB, run_stream, write_files
from _storage import key_names, scratch_folder
from tidegate.pipeline.rounds.orders import RoundOrder, Tick
from tidegate.pipeline.tasks.setup import WorkerSetup
from tidegate.spark.engine import SparkEngine
from tidegate.spark.rounds.work import work_on

START, MINUTE, PARTITIONS = 1_767_225_600_000, 60_000, 2
FIXED = np.dtype([("order_id", "<i8"), ("amount", "<f8")])
COLUMNS = pa.schema([("order_id", pa.int64()), ("amount", pa.float64())])
COPY_WITHIN = 100_000
SETS = {"spread": (50_000, 18), "few": (500, 18), "some": (50_000, 0), "hot": (50_000, 18)}
PEER_ROWS = 500_000  # Spark's own stream is slower by a factor of ten and more: it gets less to do


@dataclass(frozen=True)
class Answer:
    """What any of them must come to."""

    windows: int
    events: int
    amount: float


def made_events(rows: int, kind: str) -> pa.Table:
    """Columns key, ts, order_id, amount, in the order of the log; a tenth are copies of earlier rows."""
    chance = np.random.default_rng(7)
    keys, step = SETS[kind]
    copies = rows // 10
    first = rows - copies
    sources = np.sort(chance.choice(first, copies, replace=False))
    place = np.concatenate([np.arange(first), sources + chance.integers(1, COPY_WITHIN, copies)])
    origin = np.concatenate([np.arange(first), sources])[np.argsort(place, kind="stable")]
    chosen = chance.integers(0, keys, first)
    if kind == "hot":
        chosen[chance.random(first) < 0.5] = 0
    if kind == "some":  # ten events of a key come within a minute
        chosen = (np.arange(first) // 10 * 7919 % keys).astype(np.int64)
        step = 1
    ts = START + np.arange(first) * max(1, step) + chance.integers(0, 1000, first)
    columns = {
        "key": key_names(keys).take(pa.array(chosen)),
        "ts": pa.array(ts),
        "order_id": pa.array(np.arange(first) + 10**9),
        "amount": pa.array(chance.integers(1, 10**6, first) / 4.0),  # sums of these are exact in any order
    }
    return pa.table(columns).take(pa.array(origin)).combine_chunks()


def answer_of(events: pa.Table) -> Answer:
    order = events["order_id"].to_numpy()
    _, first = np.unique(order, return_index=True)
    keys = pc.dictionary_encode(events["key"].combine_chunks()).indices.to_numpy().astype(np.int64)
    windows = keys[first] << 32 | (events["ts"].to_numpy()[first] - START) // MINUTE
    return Answer(len(np.unique(windows)), len(first), float(events["amount"].to_numpy()[first].sum()))


def json_values(events: pa.Table) -> pa.Array:
    texts = [events["order_id"].cast(pa.string()).chunk(0), events["amount"].cast(pa.string()).chunk(0)]
    joined = pc.binary_join_element_wise(
        '{"order_id":', texts[0], ',"amount":', texts[1], ',"currency":"EUR","status":"delivered"}', ""
    )
    return joined.cast(pa.binary())


def fixed_values(events: pa.Table) -> pa.Array:
    both = np.empty(events.num_rows, FIXED)
    for name in FIXED.names or ():
        both[name] = events[name].to_numpy()
    ends = np.arange(events.num_rows + 1, dtype=np.int32) * FIXED.itemsize
    return pa.Array.from_buffers(pa.binary(), events.num_rows, [None, pa.py_buffer(ends), pa.py_buffer(both)])


def from_fixed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Sixteen bytes as a number and a double."""
    values = batch.column("value")
    _, bounds, content = values.buffers()
    if not len(values):
        return pa.RecordBatch.from_arrays([pa.array([], each.type) for each in COLUMNS], schema=COLUMNS)
    first = np.frombuffer(bounds, np.int32)[values.offset]
    both = np.frombuffer(content, FIXED, len(values), first)
    return pa.RecordBatch.from_arrays(
        [pa.array(np.ascontiguousarray(both[name])) for name in FIXED.names or ()], schema=COLUMNS
    )


def write_log(folder: Path, events: pa.Table, values: pa.Array) -> None:
    """An embedded log, its records numbered and check-summed as a sender does it."""
    with tg.Log(folder / "log", durability="os") as log:
        if "orders" not in log.topics():
            log.create_topic("orders", PARTITIONS)
        with log.writer("orders", integrity=True) as sender:
            sender.write(pa.table({"key": events["key"], "value": values, "timestamp": events["ts"]}))


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
        stream.deduplicate("order_id", within="1h")
        .window(tg.Tumbling("1m", grace="1h", retention="10d"))  # all of them can be read at the end
        .aggregate(n=tg.count(), total=tg.sum("amount"))
        .table("windows")
    )
    return app


def check(app: tg.App, answer: Answer) -> None:
    with app.read("windows") as table:
        found = table.to_arrow()
    counted, amount = pc.sum(found["n"]).as_py(), pc.sum(found["total"]).as_py()
    demand(
        (found.num_rows, counted) == (answer.windows, answer.events) and abs(amount - answer.amount) < 1,
        f"{found.num_rows} windows of {counted} events instead of {answer}",
    )


@dataclass(frozen=True)
class Ran:
    seconds: float
    rounds: list[float]


def run(app: tg.App, engine: Any, round_records: int | None) -> Ran:
    """From the start of the run to its end, and what passed between the ends of rounds."""
    marks = [perf_counter()]
    app.run(
        engine,
        until="caught_up",
        round_records=round_records,
        progress=lambda _: marks.append(perf_counter()),
    )
    return Ran(perf_counter() - marks[0], np.diff(marks).tolist())


@contextmanager
def scratch(events: pa.Table, values: pa.Array) -> Iterator[Path]:
    with scratch_folder() as folder:
        write_log(folder, events, values)
        yield folder


def warm(spark: Any) -> None:
    """Python workers started, kernels and this file loaded in them: figures are of a stream that runs."""
    events = made_events(20_000, "spread")
    for make in (json_values, fixed_values):
        with scratch(events, make(events)) as folder:
            run(app_over(folder, fixed=make is fixed_values), spark, 5000)


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
    return median(took[-20:])


def duckdb_rate(events: pa.Table, answer: Answer, folder: Path) -> float:
    """The whole job as one batch query over Parquet, two threads, nothing kept."""
    pq.write_table(events, folder / "events.parquet")
    connection = duckdb.connect(config={"threads": 2})
    query = f"""
        select key, ts // {MINUTE} as minute, count(*) as n, sum(amount) as total from (
            select key, order_id, min_by(ts, place) as ts, min_by(amount, place) as amount
            from (select *, file_row_number as place from read_parquet('{folder}/events.parquet', file_row_number=true))
            group by key, order_id
        ) group by all"""
    began = perf_counter()
    found = connection.sql(query).arrow()
    seconds = perf_counter() - began
    table = found.read_all() if hasattr(found, "read_all") else found
    demand((table.num_rows, pc.sum(table["n"]).as_py()) == (answer.windows, answer.events), "DuckDB's answer")
    return events.num_rows / seconds


def peers(report: Report, spark: Any, ours: float) -> None:
    events = made_events(PEER_ROWS, "spread")
    answer = answer_of(events)
    for name, provider in (("in-heap state", IN_HEAP), ("RocksDB state", ROCKSDB)):
        with scratch_folder() as folder:
            write_files(events, folder / "files", 125_000)
            seconds, windows, counted, _ = run_stream(
                spark, folder / "files", folder / "checkpoint", provider
            )
            demand((windows, counted) == (answer.windows, answer.events), f"Spark's answer with {name}")
        rate = (PEER_ROWS - 125_000) / seconds
        report.figure(
            f"Spark's own stream, {name}", rate_of(rate), f"ours is {ours / rate:.0f}×", load_line()
        )


def rate_of(rate: float) -> str:
    return f"{rate / 1e6:.2f} M/s" if rate >= 1e6 else f"{rate / 1e3:.0f} k/s"


def section(
    report: Report,
    spark: Any,
    kind: str,
    rows: int,
    make: Callable[[pa.Table], pa.Array],
    rounds: list[int | None],
) -> float:
    """One set of events: adaptive and fixed rounds on Spark, the engine in this process, DuckDB."""
    events = made_events(rows, kind)
    answer, values, fixed = answer_of(events), make(events), make is fixed_values
    name = f"{kind}, {'fixed width' if fixed else 'JSON'}"
    with scratch_folder() as folder:
        batch = duckdb_rate(events, answer, folder)
    report.figure(f"{name}: DuckDB, one batch query", rate_of(batch), "", load_line())
    best = 0.0
    for size in rounds:
        for engine, who in ((spark, "Spark"), ("local", "in process")):
            if engine == "local" and size not in (None, 1_000_000):
                continue
            with scratch(events, values) as folder:
                app = app_over(folder, fixed=fixed)
                ran = run(app, engine, size)
                check(app, answer)
            rate = rows / ran.seconds
            if engine is spark:
                best = max(best, rate)
            what = "adaptive rounds" if size is None else f"rounds of {size // 1000} k"
            wanted = {None: 2.5e6, 250_000: 1e6, 1_000_000: 2e6, 4_000_000: 2.5e6}.get(size)
            target, met = (
                ("", None) if engine == "local" or wanted is None else (rate_of(wanted), rate >= wanted)
            )
            report.figure(
                f"{name}: {who}, {what}",
                rate_of(rate),
                f"{rate / batch:.2f} of DuckDB; {load_line()}",
                target,
                met,
            )
    return best


def growth(report: Report, spark: Any, rows: int) -> None:
    """Rounds late in a run against rounds when a tenth of the state was there; then a restart with all of it."""
    events = made_events(rows, "spread")
    answer, values = answer_of(events), fixed_values(events)
    size = max(1, rows // 40)
    with scratch(events, values) as folder:
        app = app_over(folder, fixed=True)
        took = run(app, spark, size).rounds
        check(app, answer)
        early, late = median(took[3:6]), median(took[-6:-2])
        report.figure(
            "10× more state, a round",
            f"{late / early:.2f}×",
            f"{late * 1e3:.0f} ms",
            "at most 1.3×",
            late / early <= 1.3,
        )
        more = made_events(max(1000, size), "few")
        write_log(folder, more, fixed_values(more))
        with_state = restarted(folder)
    with scratch(more, fixed_values(more)) as empty:
        without = restarted(empty)
    report.figure(
        f"restart with {answer.windows / 1e6:.1f} M windows",
        f"+{with_state - without:.1f} s",
        f"{without:.1f} s without",
        "at most 5 s more",
        with_state - without <= 5,
    )


def restarted(folder: Path) -> float:
    """Seconds from no session at all to the end of the first round."""
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        running.stop()
    began = perf_counter()
    spark = session()
    run(app_over(folder, fixed=True), spark, None)
    return perf_counter() - began


def session() -> Any:
    import tidegate.spark

    spark = tidegate.spark.session("bench", master="local[2,4]")
    spark.sparkContext.setLogLevel("OFF")
    return spark


def main() -> None:
    report = Report("How fast is a pipeline on Spark?", rows=2_000_000, peers=1)
    rows = 16_000_000 if report.full else report.numbers["rows"]
    spark = session()
    warm(spark)
    with scratch_folder() as folder:
        with tg.Log(folder / "log") as log:
            log.create_topic("orders", PARTITIONS)
        report.figure(
            "a round with nothing to do (Spark's floor)", f"{floor_ms(spark, folder):.0f} ms", "", load_line()
        )
    sizes: list[int | None] = [None, *(size for size in (250_000, 1_000_000, 4_000_000) if size <= rows)]
    best = section(report, spark, "spread", rows, fixed_values, sizes)
    section(report, spark, "spread", rows, json_values, sizes)
    for kind in ("few", "some", "hot"):
        section(report, spark, kind, rows, json_values, [None])
    events = made_events(rows, "spread")
    with scratch(events, json_values(events)) as folder:
        app = app_over(folder, rekeyed=True)
        ran = run(app, spark, None)
        check(app, answer_of(events))
    report.figure("spread, JSON: re-keyed, adaptive rounds", rate_of(rows / ran.seconds), "", load_line())
    if report.numbers["peers"]:
        peers(report, spark, best)
    growth(report, spark, rows)
    shutil.rmtree("spark-warehouse", ignore_errors=True)


if __name__ == "__main__":
    main()
