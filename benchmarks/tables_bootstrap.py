"""How fast does a windowed table come up from its topic?

Back of the envelope, for each record: decoding the log 60 ns, looking for numbering in headers that are not there
5 ns (twice), taking the key apart 15 ns, hashing, sorting and gathering the rows of a run 120 ns, packing and writing
60 bytes for the commit 30 ns: about 250 ns, 4 M records/s.

A changelog of counts: 1-minute windows of 50 k keys (or 500), each record a key with its window and an 8-byte
count. One thread does everything; commits are written and synced. The answer is checked against the last record of
each window. Processor time of the whole process counts, so helpers' threads are not free.

    python benchmarks/tables_bootstrap.py [--full] [--json] [--records N]
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from _report import Report, demand
from tidegate.log.log import Log
from tidegate.tables.factories import windowed_table
from tidegate.tables.options import Consumed
from tidegate.tables.serdes.base import Bytes, Long
from tidegate.windows.keys import KeyFormat, encode_keys

MINUTE = 60_000
START_MS = 1_700_000_040_000
TARGET = 3_000_000


def changelog(records: int, keys: int, seed: int = 7) -> pa.Table:
    """Records in time order, 2 M in an hour; the value is the record's number."""
    generator = np.random.default_rng(seed)
    owner = generator.integers(0, keys, records)
    times = START_MS + np.arange(records) * 3_600_000 // 2_000_000
    names = pa.array([b"user-%07d" % number for number in range(keys)], pa.binary())
    inner = names.take(pa.array(owner))
    key = encode_keys(inner, times // MINUTE * MINUTE, KeyFormat.CHANGELOG)
    value = Long().encode_column(pa.array(np.arange(records, dtype=np.int64)))
    return pa.table({"key": key, "value": value, "timestamp": pa.array(times, pa.timestamp("ms", "UTC"))})


def expected(given: pa.Table) -> tuple[int, int]:
    """How many windows there are, and the sum of their last values."""
    numbered = pa.table({"key": given["key"], "number": pa.array(np.arange(given.num_rows))})
    last = numbered.group_by("key").aggregate([("number", "max")])
    return last.num_rows, pc.sum(last["number_max"]).as_py()


def bootstrap(log: Log, state: Path, answer: tuple[int, int]) -> tuple[float, float]:
    shutil.rmtree(state, ignore_errors=True)
    wall, processor = perf_counter(), process_time()
    table = windowed_table(log, "counts-changelog", "1m", state=state, consumed=Consumed(Bytes(), Long()))
    wall, processor = perf_counter() - wall, process_time() - processor
    with table:
        rows, total = 0, 0
        for batch in table.batches():
            rows += batch.num_rows
            total += pc.sum(batch.column("value")).as_py()
        demand((rows, total) == answer, f"{rows} windows summing to {total}, not {answer}")
        demand(table.commits()[-1].positions == table.position, "not all is committed")
    return wall, processor


def main() -> None:
    report = Report("How fast does a windowed table come up from its topic?", records=2_000_000)
    records = report.numbers["records"] * (5 if report.full else 1)
    folder = Path(tempfile.mkdtemp(prefix="tidegate-bootstrap-"))
    try:
        for keys in (50_000, 500):
            given = changelog(records, keys)
            answer = expected(given)
            with Log(folder / f"log-{keys}", durability="os") as log:
                log.create_topic("counts-changelog")
                with log.writer("counts-changelog") as writer:
                    writer.write(given)
            with Log(folder / f"log-{keys}", read_only=True) as log:
                runs = [bootstrap(log, folder / "state", answer) for _ in range(3)]
            wall, processor = min(run[0] for run in runs), min(run[1] for run in runs)
            rate = records / processor
            report.figure(
                f"{keys} keys, {answer[0]} windows",
                f"{rate / 1e6:.2f} M records/s",
                f"{records / wall / 1e6:.2f} M/s of wall time",
                "3 M/s per core",
                rate >= TARGET,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
