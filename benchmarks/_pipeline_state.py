"""What much state costs a pipeline: rounds late in a run, and a restart with all of it. Not a benchmark itself.

Rounds are compared that have the same number of records and do the same kinds of work: those from the fifth on (two
hours of event time, after which ids are forgotten and windows close in every round) with those when ten times as
many windows are there. Some rounds come in bursts that cost several times as much: many late rounds are looked at,
so that a burst is not all there is, and the ratio of the means, in which bursts count in full, is printed beside
that of the medians.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import pyarrow as pa

from _pipeline_app import Round, app_over, check, run, scratch, session, write_log
from _pipeline_data import Answer, answer_of, fixed_values, made_events
from _report import Report, demand, load_line

ROUNDS = 85
EARLY, LATE = slice(4, 9), slice(58, 81)  # the seventh and the seventieth in the middle
LEAST_ROWS = ROUNDS * 100_000  # so that five rounds are two hours
MORE = 100_000


def growth(report: Report, spark: Any, rows: int) -> None:
    rows = max(rows, LEAST_ROWS)
    events = made_events(rows, "spread")
    with scratch(events, fixed_values(events)) as folder:
        app = app_over(folder, fixed=True)
        size = rows // ROUNDS
        rounds = run(app, spark, size).rounds
        answer = answer_of(events)
        check(app, answer)
        _compared(report, rounds[EARLY], rounds[LATE], size)
        _restarts(report, folder, events, answer)


def _compared(report: Report, early: list[Round], late: list[Round], size: int) -> None:
    for each in (*early, *late):
        demand(
            abs(each.records - size) <= size / 50, f"a round of {each.records} records among those of {size}"
        )
    before, after = ([each.seconds for each in some] for some in (early, late))
    ratio, of_means = median(after) / median(before), mean(after) / mean(before)
    report.figure(
        f"10× more state, a round of {size // 1000} k",
        f"{ratio:.2f}×",
        f"{median(before) * 1e3:.0f}, {median(after) * 1e3:.0f} ms; means {of_means:.2f}×; {load_line()}",
        "at most 1.3×",
        ratio <= 1.3,
    )


def _restarts(report: Report, folder: Path, events: pa.Table, answer: Answer) -> None:
    """With all of the state and with none, in turn, each time with the same records to work on."""
    took: dict[bool, list[float]] = {True: [], False: []}
    written = [events]
    for number in range(3 if report.full else 1):
        more = made_events(MORE, "spread", after=events.num_rows + number * MORE)
        with scratch(more, fixed_values(more)) as empty:
            took[False].append(_restarted(empty))
            check(app_over(empty, fixed=True), answer_of(more))
        write_log(folder, more, fixed_values(more))
        written.append(more)
        took[True].append(_restarted(folder))
    check(app_over(folder, fixed=True), answer_of(pa.concat_tables(written)))
    without, more_s = median(took[False]), median(took[True]) - median(took[False])
    report.figure(
        f"restart with {len(answer.windows) / 1e6:.1f} M windows",
        f"{more_s:+.1f} s",
        f"{without:.1f} s without; {load_line()}",
        "at most 5 s more",
        more_s <= 5,
    )


def _restarted(folder: Path) -> float:
    """Seconds from no session at all to the end of the first round."""
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        running.stop()
    began = perf_counter()
    run(app_over(folder, fixed=True), session(), None)
    return perf_counter() - began
