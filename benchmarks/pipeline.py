"""How fast is a pipeline on Spark, from a log to a committed table, and who else is how fast at the same job?

Back of the envelope, for an event: the chain of `windows_chain.py` takes 300 to 450 ns of a core, validation of
producers 50; on two cores 4 to 5 M events/s. A round costs Spark's floor (20 to 30 ms on a quiet machine) and the
syncs of two tasks and a commit (10 to 20 ms): at 250 k events a round that is half of it, at 4 M a tenth.

The job: producers' numbering followed, duplicates of an order dropped within an hour, count and sum for each key and
minute, committed. Four sets of events: `spread` puts nearly one event into each window and never aggregates, `few`
has 500 keys, `some` about ten events a window, `hot` half of all events under one key. Every output, ours and
everybody's, is checked window by window against numpy's before its figure is printed. Peers (`_pipeline_peers.py`)
get the set `spread`; nobody but us validates producers, and only Spark and Quix keep anything on disk. Each figure
is one run, with the load of the machine beside it; figures of one run of this file can be compared with each other
and with nothing else.

    python benchmarks/pipeline.py [--rows 2000000] [--peers 1] [--full] [--json]        --full: 16 M events
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import pyarrow as pa

import tidegate as tg
from _pipeline_app import PARTITIONS, app_over, check, floor_ms, run, scratch, session, warm
from _pipeline_data import answer_of, fixed_values, json_values, made_events
from _pipeline_peers import ROCKSDB, duckdb_rate, peer_rates
from _pipeline_state import growth
from _report import Report, load_line, rate_of
from _storage import scratch_folder

MILLION = 1_000_000
WANTED = {None: 2.5e6, 250_000: 1e6, MILLION: 2e6, 4 * MILLION: 2.5e6}


@dataclass(frozen=True)
class Section:
    """One set of events: adaptive and fixed rounds on Spark, the engine in this process, DuckDB."""

    report: Report
    spark: Any
    rows: int

    def show(
        self, kind: str, make: Callable[[pa.Table], pa.Array], rounds: tuple[int | None, ...] = (None,)
    ) -> float:
        """The rate on Spark with adaptive rounds, which is what users get."""
        events = made_events(self.rows, kind)
        answer, values, fixed = answer_of(events), make(events), make is fixed_values
        name = f"{kind}, {'fixed width' if fixed else 'JSON'}"
        batch = duckdb_rate(events, answer)
        self.report.figure(f"{name}: DuckDB, one batch query", rate_of(batch), load_line())
        adaptive = 0.0
        for size in rounds:
            for engine, who in ((self.spark, "Spark"), ("local", "in process")):
                if engine == "local" and size not in (None, MILLION):
                    continue
                with scratch(events, values) as folder:
                    app = app_over(folder, fixed=fixed)
                    rate = self.rows / run(app, engine, size).seconds
                    check(app, answer)
                what = "adaptive rounds" if size is None else f"rounds of {size // 1000} k"
                beside = f"{rate / batch:.2f} of DuckDB; {load_line()}"
                if engine == "local":
                    self.report.figure(f"{name}: {who}, {what}", rate_of(rate), beside)
                    continue
                adaptive = rate if size is None else adaptive
                target = WANTED[size]
                self.report.figure(
                    f"{name}: {who}, {what}", rate_of(rate), beside, rate_of(target), rate >= target
                )
        return adaptive


def against_in_process(report: Report, spark: Any, rows: int) -> None:
    """What Spark adds to a million records: both engines in turn, three times, over the same log."""
    events = made_events(min(max(rows, 2 * MILLION), 4 * MILLION), "spread")
    values, answer = fixed_values(events), answer_of(events)
    took: dict[str, list[float]] = {"Spark": [], "in process": []}
    for _ in range(3):
        for who, engine in (("Spark", spark), ("in process", "local")):
            with scratch(events, values) as folder:
                app = app_over(folder, fixed=True)
                took[who].append(run(app, engine, MILLION).seconds / (events.num_rows / MILLION))
                check(app, answer)
    theirs, ours = median(took["in process"]), median(took["Spark"])
    report.figure(
        "Spark against in process, 1 M records",
        f"{ours - theirs:+.3f} s",
        f"{ours:.3f}, {theirs:.3f} s; {load_line()}",
        "at most 0.15 s more",
        ours - theirs <= 0.15,
    )


def rekeyed(report: Report, spark: Any, rows: int, rocksdb: float | None) -> None:
    events = made_events(rows, "spread")
    warm(spark, rekeyed=True)
    with scratch(events, json_values(events)) as folder:
        app = app_over(folder, rekeyed=True)
        rate = rows / run(app, spark, None).seconds
        check(app, answer_of(events))
    name = "spread, JSON: re-keyed, adaptive rounds"
    if rocksdb is None:
        report.figure(name, rate_of(rate), load_line())
        return
    beside = f"{rate / rocksdb:.0f}× Spark with RocksDB; {load_line()}"
    report.figure(name, rate_of(rate), beside, "at least 10×", rate >= 10 * rocksdb)


def main() -> None:
    report = Report("How fast is a pipeline on Spark?", rows=2 * MILLION, peers=1)
    rows = 16 * MILLION if report.full else report.numbers["rows"]
    spark = session()
    warm(spark)
    with scratch_folder() as folder:
        with tg.Log(folder / "log") as log:
            log.create_topic("orders", PARTITIONS)
        floor = f"{floor_ms(spark, folder):.0f} ms"
    report.figure("a round with nothing to do (Spark's floor)", floor, load_line())
    sizes = (None, *(size for size in (250_000, MILLION, 4 * MILLION) if size <= rows))
    section = Section(report, spark, rows)
    section.show("spread", fixed_values, sizes)
    ours = section.show("spread", json_values, sizes)
    for kind in ("few", "some", "hot"):
        section.show(kind, json_values)
    against_in_process(report, spark, rows)
    rates = peer_rates(report, ours) if report.numbers["peers"] else {}
    rekeyed(report, spark, rows, rates.get(ROCKSDB))
    growth(report, spark, rows)
    shutil.rmtree("spark-warehouse", ignore_errors=True)


if __name__ == "__main__":
    main()
