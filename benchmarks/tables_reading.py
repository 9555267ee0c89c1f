"""How fast are single windows of a table read, by one reader and by sixteen, and how soon after it is opened?

Back of the envelope: a read of one key finds its run by a hash (2 µs), makes a batch of its rows (20 µs) and Python
values of them (20 µs), and looks into every task: about 100 µs for two tasks. Opening reads the newest commit and the
metadata of its runs, no rows: some files of some KiB, 10 ms. Sixteen readers that each wait 5 ms for a disk compute
16 × 100 µs in that time, on a part of one core: they are 16 times as fast as one.

The tables are an app's windows and the same windows read from the topic that the app writes. Waits are put in front of
every stored run that a read needs. Answers are compared with what was written.

    python benchmarks/tables_reading.py [--full] [--json] [--windows N]
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa

import tidegate as tg
from _report import Report, best_of, demand, rate_of
from tidegate.storage.pack import PackCache

MINUTE = 60_000
START_MS = 1_700_000_040_000
WINDOWS_OF_A_KEY = 100
PARTITIONS = 2
READERS = 16
WAIT_SECONDS = 0.005
AT_ONCE = 1_000_000


def build(folder: Path, windows: int) -> int:
    """Write one record for each window and run the app; return the number of keys."""
    keys = windows // WINDOWS_OF_A_KEY
    with tg.Log(folder / "log", durability="os") as log:
        log.create_topic("clicks", PARTITIONS)
        writer = log.writer("clicks")
        for start in range(0, windows, AT_ONCE):
            numbers = np.arange(start, min(start + AT_ONCE, windows))
            names = pa.array([f"user-{number:07d}" for number in (numbers % keys).tolist()])
            values = pa.array([f'{{"n":{number}}}' for number in numbers.tolist()])
            times = START_MS + numbers // keys * MINUTE
            writer.write(pa.table({"key": names, "value": values, "timestamp": times}))
    app_of(folder).run("local", until="caught_up")
    return keys


def app_of(folder: Path) -> tg.App:
    app = tg.App("clicks", data=folder)
    minutes = app.stream("clicks", value=tg.Json(n="long")).window(tg.Tumbling("1m", retention="7d"))
    minutes.agg(n=tg.sum("n")).to_table("totals")
    minutes.agg(n=tg.sum("n")).to_topic("totals-topic", key_format="changelog")
    return app


class Windows:
    """A table with the number of each window as its value."""

    def __init__(self, table: Any, keys: int, value_of: Any) -> None:
        self.table, self._keys, self._value_of = table, keys, value_of

    def get(self, chance: random.Random) -> None:
        key, minute = chance.randrange(self._keys), chance.randrange(WINDOWS_OF_A_KEY)
        found = self.table.get(f"user-{key:07d}", START_MS + minute * MINUTE)
        demand(
            found is not None and self._value_of(found) == minute * self._keys + key,
            f"{key} {minute}: {found}",
        )

    def reads(self, count: int, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(count):
            self.get(chance)


@contextmanager
def waits() -> Iterator[None]:
    """Let every load of a stored run wait as for a disk."""
    original = PackCache.load

    def load(cache: PackCache, *place: Any) -> Any:
        time.sleep(WAIT_SECONDS)
        return original(cache, *place)

    with patch.object(PackCache, "load", load):
        yield


def figures(report: Report, name: str, opened: Any, keys: int, value_of: Any) -> None:
    """Open the table, then read it alone, with waits, and side by side."""
    first: list[float] = []
    for seed in range(5):
        began = perf_counter()
        table = opened()
        Windows(table, keys, value_of).get(random.Random(seed))
        first.append(perf_counter() - began)
        table.close()
    met = min(first) <= 0.1
    report.figure(f"{name}: open and read one window", f"{min(first) * 1000:.0f} ms", "", "≤ 100 ms", met)
    table = opened()
    try:
        windows, count = Windows(table, keys, value_of), 2_000
        windows.reads(200, 1)
        alone = count / best_of(3, lambda: windows.reads(count, 2))
        report.figure(
            f"{name}: windows read by key and start", f"{rate_of(alone)}", f"{1e6 / alone:.0f} µs each"
        )
        with waits(), ThreadPoolExecutor(READERS) as pool:
            one = 100 / best_of(2, lambda: windows.reads(100, 3), perf_counter)

            def together() -> None:
                list(pool.map(lambda seed: windows.reads(100, seed), range(READERS)))

            many = READERS * 100 / best_of(2, together, perf_counter)
        ratio = many / one
        report.figure(
            f"{name}: {READERS} readers that wait {WAIT_SECONDS * 1000:.0f} ms", rate_of(many),
            f"{ratio:.1f}× one's {rate_of(one)}", "≥ 6×", ratio >= 6,
        )  # fmt: skip
    finally:
        table.close()


def main() -> None:
    report = Report("How fast are single windows of a table read?", windows=1_000_000)
    count = report.numbers["windows"] * (10 if report.full else 1)
    folder = Path(tempfile.mkdtemp(prefix="tidegate-tables-", dir="."))
    try:
        keys = build(folder, count)
        app = app_of(folder)
        figures(report, "of an app", lambda: app.open_table("totals"), keys, lambda value: value["n"])
        consumed = tg.Consumed(tg.String(), tg.Json(n="long"))

        def followed(*, read_only: bool = True) -> Any:
            return tg.windowed_table(
                folder / "log", "totals-topic", "1m", state=folder / "table", consumed=consumed, retention="7d",
                read_only=read_only,
            )  # fmt: skip

        followed(read_only=False).close()
        figures(report, "over a topic", followed, keys, lambda value: value["n"])
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
