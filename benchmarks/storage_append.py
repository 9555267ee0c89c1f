"""How fast do rows come in: appended as they are, and folded into counts and sums?

Back of the envelope: a row of 12-byte key, two numbers and a value is hashed (5 ns), its batch grouped by key
and sorted (50 ns with everything in the second-level cache), gathered once (10 ns a column): about 100 ns a row
against 200 ns allowed. Folding adds two passes over groups and writes a tenth of the rows.

Peers, in the same run, with the same rows: RocksDB's WriteBatch and one lmdb transaction. Their pairs of bytes
are built before the clock starts.

    python benchmarks/storage_append.py [--full] [--json]
"""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from _report import Report, best_of, demand
from _storage import (
    TASK,
    LmdbPeer,
    RocksPeer,
    Store,
    batches,
    events_spec,
    pairs,
    scratch_folder,
    totals_spec,
)
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.spec import StoreSpec

ROWS, KEYS, BATCH = 1_000_000, 100_000, 100_000


def seconds_of(spec: StoreSpec, given: list[pa.RecordBatch], repetitions: int) -> tuple[float, Store]:
    """Best time of each batch over several runs, added up; the last run's store."""
    best = np.full(len(given), np.inf)
    for _ in range(repetitions):
        store = Store(spec, MemoryBackend())
        gc.collect()
        times = [best_of(1, partial(store.append, batch)) for batch in given]
        best = np.minimum(best, times)
    return float(best.sum()), store


def read_back(store: Store) -> pa.Table:
    with store.reader.scan(TASK, store.state) as scan:
        return pa.Table.from_batches(scan)


def check_append(store: Store, rows: pa.Table) -> None:
    found = read_back(store)
    demand(found.num_rows == rows.num_rows, f"{found.num_rows} rows of {rows.num_rows} are there")
    demand(pc.sum(found["value"]) == pc.sum(rows["value"]), "values")
    demand(pc.sum(found["ts"]) == pc.sum(rows["ts"]), "times")
    demand(len(pc.unique(found["seq"])) == rows.num_rows, "row numbers")


def check_fold(store: Store, rows: pa.Table) -> None:
    found = read_back(store)
    expected = rows.group_by(["key", "ts"]).aggregate([("value", "count"), ("value", "sum")])
    both = expected.join(
        pa.table(
            {
                "key": found["key"].cast(pa.binary()),
                "ts": found["ts"],
                "n": found["count"],
                "t": found["total"],
            }
        ),
        ["key", "ts"],
    )
    demand(found.num_rows == expected.num_rows, f"{found.num_rows} totals, should be {expected.num_rows}")
    demand(pc.all(pc.equal(both["n"], both["value_count"])).as_py(), "counts")
    demand(pc.all(pc.equal(both["t"].cast(pa.int64()), both["value_sum"])).as_py(), "sums")


def main() -> None:
    report = Report("How fast do rows come into worker storage?")
    repetitions = 7 if report.full else 4
    given = list(batches(ROWS, KEYS, BATCH))
    pieces = [pairs(batch, number * BATCH) for number, batch in enumerate(given)]
    peers = {}
    for kind in (RocksPeer, LmdbPeer):
        with scratch_folder(2 << 30) as folder:
            peer = kind(folder / "db")
            whole = [[pair for piece in pieces for pair in piece]] if kind is LmdbPeer else pieces
            seconds = sum(best_of(1, partial(peer.write, piece)) for piece in whole)
            demand(peer.count() == ROWS, f"{peer.name} has {peer.count()} rows")
            peer.close()
        peers[kind] = ROWS / seconds
        report.figure(f"{kind.name}, batch API", f"{ROWS / seconds / 1e6:.2f} M rows/s")

    seconds, store = seconds_of(events_spec(), given, repetitions)
    check_append(store, pa.Table.from_batches(given))
    speed = ROWS / seconds
    report.figure(
        "append, 1 M rows, 100 k keys", f"{speed / 1e6:.2f} M rows/s", "", ">= 5 M rows/s", speed >= 5e6
    )
    for kind, least in ((RocksPeer, 10), (LmdbPeer, 7)):
        ratio = speed / peers[kind]
        report.figure(f"append against {kind.name}", f"{ratio:.1f}x", "", f">= {least}x", ratio >= least)

    windows = [
        batch.set_column(1, "ts", pc.multiply(pc.divide(batch["ts"], 60_000), 60_000)) for batch in given
    ]
    seconds, store = seconds_of(totals_spec(), windows, repetitions)
    check_fold(store, pa.Table.from_batches(windows))
    speed = ROWS / seconds
    report.figure(
        "fold: count and sum by key and minute",
        f"{speed / 1e6:.2f} M rows/s",
        "",
        ">= 5 M rows/s",
        speed >= 5e6,
    )


if __name__ == "__main__":
    main()
