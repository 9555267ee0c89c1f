"""What the benchmark and a peer's script hand each other. Imports nothing but Arrow: scripts run in environments of
their own.

A script is run as `SCRIPT EVENTS WINDOWS …`. EVENTS is a Parquet file with the columns key, ts (milliseconds),
order_id and amount, in the order of the log. The script makes the rows its engine takes of them, does the job
between two looks at the clock, writes its windows to WINDOWS (key, minute, n, total: any order, each window once,
its last state) and prints the seconds as its last line. Which events count is for the benchmark to know: a script
has nothing to check itself by.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, Protocol
from zlib import crc32

import pyarrow as pa
import pyarrow.parquet as pq

MINUTE, HOUR = 60_000, 3_600_000
PROCESSES, PATIENCE = 2, 600.0
SCHEMA = pa.schema([("key", pa.string()), ("minute", pa.int64()), ("n", pa.int64()), ("total", pa.float64())])

Event = tuple[str, int, int, float]
Window = tuple[str, int, int, float]


class Job(Protocol):
    """Made with its events, which is not timed; then run, which is; then asked."""

    def run(self) -> None: ...

    def windows(self) -> list[Window]: ...


def events() -> list[Event]:
    """Key, milliseconds, id of the order, amount: plain values, which is what these engines take."""
    table = pq.read_table(sys.argv[1], columns=["key", "ts", "order_id", "amount"])
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def table_of(windows: Iterable[Window]) -> pa.Table:
    columns: list[Any] = list(zip(*windows, strict=True)) or [[], [], [], []]
    return pa.table([pa.array(column) for column in columns], names=SCHEMA.names)


def hand_over(seconds: float, rows: int, windows: pa.Table) -> None:
    """`rows` is how many events the seconds are of."""
    pq.write_table(windows.select(SCHEMA.names).cast(SCHEMA), sys.argv[2])
    sys.stdout.write(json.dumps({"seconds": seconds, "rows": rows}) + "\n")


def in_two_processes(make: Callable[[list[Event]], Job]) -> None:
    """For engines that use one core a process: half of the keys each, timed from the start of both to the last end."""
    context = multiprocessing.get_context("fork")
    started, ended = (context.Barrier(PROCESSES + 1, timeout=PATIENCE) for _ in range(2))
    answers = context.SimpleQueue()
    halves: list[list[Event]] = [[] for _ in range(PROCESSES)]
    for event in events():
        halves[crc32(event[0].encode()) % PROCESSES].append(event)

    def work(mine: list[Event]) -> None:
        try:
            job = make(mine)
            started.wait()
            job.run()
            ended.wait()
        except Exception:
            traceback.print_exc()  # before the others give up: they end this process
            started.abort()
            ended.abort()
            raise
        answers.put(job.windows())

    for half in halves:
        context.Process(target=work, args=(half,), daemon=True).start()
    started.wait()
    began = perf_counter()
    ended.wait()
    seconds = perf_counter() - began
    windows = [window for _ in range(PROCESSES) for window in answers.get()]
    hand_over(seconds, sum(map(len, halves)), table_of(windows))
