"""What the benchmarks share: timing, the data set, and how a figure is printed. Not a benchmark itself.

A figure goes to stdout as a line of text, or with --json as one object a line for `scripts/bench`. Timings are
the best of several runs: on a shared machine the fastest one is the least disturbed. Work that only computes is
timed by the thread's processor time, so that waiting for a core does not count; caches and memory are shared
all the same, and the load printed beside the figures says how much.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.kernels.__main__ import warm

MIB = 1 << 20


class Report:
    """The figures of one benchmark, as they come."""

    def __init__(self, question: str, **numbers: int) -> None:
        """`numbers` are options of this benchmark, with the values they have when not given."""
        parser = argparse.ArgumentParser(description=question)
        parser.add_argument("--json", action="store_true", help="one object a line")
        parser.add_argument("--full", action="store_true", help="more data, more repetitions")
        for name, default in numbers.items():
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
        options = parser.parse_args()
        self.numbers: dict[str, int] = {name: getattr(options, name) for name in numbers}
        self.as_json: bool = options.json
        self.full: bool = options.full
        warm()  # a process that has been at work for a second has loaded its kernels, and compiling is no figure
        if not self.as_json:
            sys.stdout.write(f"{question}\n{load_line()}\n")

    def figure(
        self, what: str, figure: str, ratio: str = "", target: str = "", met: bool | None = None
    ) -> None:
        if self.as_json:
            row = {"what": what, "figure": figure, "ratio": ratio, "target": target, "met": met}
            line = json.dumps(row)
        else:
            verdict = {True: "met", False: "NOT MET", None: ""}[met]
            line = f"  {what:<44} {figure:>18}  {ratio:<28} {target:<22} {verdict}".rstrip()
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def load_line() -> str:
    return f"load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores"


def rate_of(rate: float) -> str:
    return f"{rate / 1e6:.2f} M/s" if rate >= 1e6 else f"{rate / 1e3:.{0 if rate >= 1e4 else 1}f} k/s"


def family_seconds() -> float:
    """Processor seconds of this process and of all that it started and that live: Spark's JVM and its workers, too."""
    spent: dict[int, float] = {}
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone meanwhile
            fields = stat.read_text().rpartition(")")[2].split()
            spent[int(stat.parent.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            parents[int(stat.parent.name)] = int(fields[1])
    total = 0.0
    for each in spent:
        above = each
        while above not in (0, os.getpid()):
            above = parents.get(above, 0)
        total += spent[each] if above else 0.0
    return total


def best_of(repetitions: int, run: Callable[[], Any], clock: Callable[[], float] = thread_time) -> float:
    """Seconds of the fastest run; give `perf_counter` as the clock for work that waits, such as for a disk."""
    fastest = float("inf")
    for _ in range(repetitions):
        started = clock()
        run()
        fastest = min(fastest, clock() - started)
    return fastest


def demand(fact: bool, what: str) -> None:
    """The benchmark's own check: a figure for a wrong result is worth nothing."""
    if not fact:
        sys.exit(f"the output is wrong: {what}")


def events(rows: int, value_bytes: int = 100) -> pa.Table:
    """Events as JSON of exactly `value_bytes`, no key, one every millisecond; they compress about fourfold."""
    generator = np.random.default_rng(7)
    template = b'{"order_id":"00000000","customer":"0000","amount":00000.00,"currency":"EUR","status":"'
    template = (template + b"delivered" + b" " * value_bytes)[: value_bytes - 2] + b'"}'
    values = np.tile(np.frombuffer(template, np.uint8), (rows, 1))
    digits = [index for index, byte in enumerate(template) if byte == ord("0")]
    values[:, digits] += generator.integers(0, 10, (rows, len(digits)), dtype=np.uint8)
    leading = template.index(b":0000") + 1  # JSON knows no number that begins with 0
    values[:, leading] = ord("1") + (values[:, leading] - ord("0")) % 9
    ends = np.arange(rows + 1, dtype=np.int32) * value_bytes
    value = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(values)])
    return pa.table({"value": value, "timestamp": pa.array(1_767_225_600_000 + np.arange(rows))})
