"""Does state ten times larger than the pool fit: at what speed, and in how much memory?

Rows of about 100 bytes are appended to a store on a folder, batch after batch; nothing is pruned, so all of it stays
reachable; whenever the write buffer is over its limit it is relieved on the spot, by writing. The same rows once
more with a pool that holds them all and writes nothing. Each run is a process of its own, whose anonymous memory
(RssAnon) is sampled all the while; mapped files do not count, the operating system takes those back when it likes.

Back of the envelope: 5 GB leave through the page cache at 1 GB/s or more, beside appending at 2 M rows/s
(200 MB/s): half the speed of the run in memory is generous.

    python benchmarks/storage_bounded.py [--rows 50000000] [--pool-mib 512] [--json]
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from _report import MIB, Report, demand
from _storage import (
    GIB,
    MINUTE,
    START_MS,
    TASK,
    Store,
    anonymous_bytes,
    batches,
    events_spec,
    key_names,
    roomy,
    scratch_folder,
)
from tidegate.files import Files
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.reader import RangeRequest, Time

KEYS, BATCH = 100_000, 250_000
FILLER = 64
ROW_BYTES = 100
PAYLOAD = pa.schema([pa.field("value", pa.int64()), pa.field("note", pa.binary(FILLER))])
SCRATCH = 128 * MIB
ALLOWANCE = 300 * MIB


class Sampler(threading.Thread):
    """The most anonymous memory this process ever had."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.01):
            self.most = max(self.most, anonymous_bytes())


def run(rows: int, pool_bytes: int, folder: Path) -> dict[str, float]:
    """One run; what a process prints for its parent."""
    config = roomy(
        pool_bytes,
        max_batch_bytes=SCRATCH // 2,
        max_run_rows=BATCH,
        **{
            tenant: {"reserve_bytes": 0, "soft_max_bytes": pool_bytes * share // 100}
            for tenant, share in (("write_buffer", 60), ("base_runs", 30), ("state_cache", 10))
        },
    )
    store = Store(events_spec(5 * MINUTE, PAYLOAD), FolderBackend(folder, files=Files()), config)
    note = pa.array(np.random.default_rng(1).bytes(FILLER) for _ in range(1)).cast(pa.binary(FILLER))
    before, sampler = anonymous_bytes(), Sampler()
    sampler.start()
    seconds, total = 0.0, 0
    for batch in batches(rows, KEYS, BATCH):
        batch = batch.append_column("note", note.take(pa.array(np.zeros(batch.num_rows, np.int32))))
        total += pc.sum(batch["value"]).as_py()
        started = perf_counter()
        store.append(batch)
        if store.writer.is_over_limit(TASK):
            store.writer.relieve(TASK)
        seconds += perf_counter() - started
    nbytes = store.state.index.total_bytes
    found = 0
    with store.reader.scan(TASK, store.state, Time(START_MS, START_MS + rows * MINUTE)) as scan:
        for piece in scan:
            found += pc.sum(piece["value"]).as_py()
    demand(store.state.index.total_rows == rows, f"{store.state.index.total_rows} rows are there")
    demand(found == total, "the sum of all values")
    key = key_names(1)[0].as_py()
    with store.reader.load(store.reader.plan(TASK, store.state, [RangeRequest(key)])) as loaded:
        demand(loaded.to_table().num_rows > 0, "the first key has rows")
    sampler.done.set()
    return {
        "seconds": seconds,
        "state": nbytes,
        "anonymous": sampler.most - before,
        "pool": store.runtime.pool.total,
    }


def in_child(rows: int, pool_bytes: int) -> dict[str, float]:
    with scratch_folder(rows * ROW_BYTES * 3) as folder:
        command = [sys.executable, __file__, "child", str(rows), str(pool_bytes), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
    demand(done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def disk_bytes_per_second(total: int) -> float:
    """What this disk takes, in synced files as large as a pack: the bound of everything that spills."""
    data = memoryview(np.random.default_rng(1).bytes(64 * MIB))
    count = max(2, min(16, total // len(data)))
    with scratch_folder(count * len(data)) as folder:
        started = perf_counter()
        for number in range(count):
            with Files().open(folder / str(number), new=True) as file:
                file.write_at(0, data)
                file.sync()
        return count * len(data) / (perf_counter() - started)


def main() -> None:
    report = Report("Does state larger than memory fit?", rows=2_000_000, pool_mib=0)
    rows = 50_000_000 if report.full else report.numbers["rows"]
    pool = report.numbers["pool_mib"] * MIB or max(24 * MIB, rows * ROW_BYTES // 10 // MIB * MIB)
    bounded = in_child(rows, pool)
    roomy_run = in_child(rows, max(rows * 3 * ROW_BYTES, GIB))
    state = bounded["state"]
    what = f"{rows / 1e6:g} M rows, {state / GIB:.1f} GiB of state"
    report.figure(f"in memory, {what}", f"{rows / roomy_run['seconds'] / 1e6:.2f} M rows/s")
    disk = disk_bytes_per_second(int(state))
    report.figure(
        "this disk alone, synced files of 64 MiB",
        f"{disk / 1e6:.0f} MB/s",
        f"{disk * rows / state / 1e6:.1f} M such rows/s",
    )
    share = roomy_run["seconds"] / bounded["seconds"]
    report.figure(
        f"pool of {pool // MIB} MiB, {what}",
        f"{rows / bounded['seconds'] / 1e6:.2f} M rows/s",
        f"{share:.2f} of in memory",
        ">= 0.5",
        share >= 0.5,
    )
    limit = pool + SCRATCH + ALLOWANCE
    report.figure(
        "anonymous memory at its most",
        f"{bounded['anonymous'] / MIB:.0f} MiB",
        f"{bounded['anonymous'] / state:.2f} of the state",
        f"<= {limit // MIB} MiB",
        bounded["anonymous"] <= limit,
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(run(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]) / "store")))
    else:
        main()
