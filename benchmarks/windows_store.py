"""How fast are puts and fetches of a window store, beside a RocksDB that holds the same windows?

Back of the envelope: a batch put hashes and groups its rows, about 0.4 µs a row with its share of Arrow; RocksDB
through Python takes one call a row into a write batch and a skip list, 3 to 4 µs. A fetch of many keys searches sorted
directories, 0.3 µs a key; a get of RocksDB is a call of its own, 5 µs and more. One fetch is a read plan, a search
in compiled code and a few Python objects: some 20 µs.

    .venv/bin/python benchmarks/windows_store.py [--full] [--json] [--rows N] [--keys N]

RocksDB gets the same keys (as Kafka Streams lays them out: key, window start, sequence) and values, made before the
clock starts, in write batches and without syncing; its time segments are one database. Both are timed by the thread's
processor time, so RocksDB's background work is not counted against it.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
import pyarrow as pa

from _report import Report, best_of, demand
from _storage import START_MS, TASK, RocksPeer, key_names, roomy, scratch_folder
from tidegate.storage import WorkerStorageRuntime, open_backend
from tidegate.storage.maintenance.dump import dump
from tidegate.windows.keys import KeyFormat, encode_keys
from tidegate.windows.stores.window_store import WindowStore

WINDOW_MS = 60_000
SPAN = 30  # windows that puts go to, in the end
BATCH = 250_000


def open_store(folder: str) -> tuple[WorkerStorageRuntime, WindowStore]:
    runtime = WorkerStorageRuntime.open(roomy(), open_backend(folder))
    return runtime, WindowStore(runtime.context(TASK), "windows", retention="1h", window_size=WINDOW_MS)


def puts(rows: int, keys: int) -> list[tuple[pa.Array, np.ndarray, pa.Array, np.ndarray]]:
    """Batches of (key, window start, value, timestamp): time moves on, and a third of the rows are a bit late."""
    generator = np.random.default_rng(11)
    names = key_names(keys)
    found = []
    for first in range(0, rows, BATCH):
        count = min(BATCH, rows - first)
        now = START_MS + (first + np.arange(count)) * (SPAN * WINDOW_MS) // rows
        ts = now - np.where(generator.random(count) < 0.33, generator.integers(0, 2 * WINDOW_MS, count), 0)
        ts = np.maximum(ts, START_MS)
        values = generator.integers(0, 1 << 40, count).astype(">i8").view("S8")
        content = pa.py_buffer(values.tobytes())
        bounds = pa.py_buffer(np.arange(count + 1, dtype=np.int32) * 8)
        column = pa.Array.from_buffers(pa.binary(), count, [None, bounds, content])
        found.append(
            (
                names.take(pa.array(generator.integers(0, keys, count))),
                ts // WINDOW_MS * WINDOW_MS,
                column,
                ts,
            )
        )
    return found


def put_all(store: WindowStore, batches: list[tuple[pa.Array, np.ndarray, pa.Array, np.ndarray]]) -> None:
    for keys, starts, values, stamps in batches:
        store.put_all(keys, starts, values, value_ts=stamps)


def main() -> None:
    report = Report("window store puts and fetches beside RocksDB", rows=1_000_000, keys=50_000)
    rows, keys = report.numbers["rows"], report.numbers["keys"]
    if report.full:
        rows, keys = 4 * rows, 4 * keys
    batches = puts(rows, keys)
    pairs = []
    for names, starts, values, _ in batches:
        stored = encode_keys(names, starts, KeyFormat.CHANGELOG)
        pairs.append(list(zip(stored.to_pylist(), values.to_pylist(), strict=True)))
    expected = {key: value for batch in pairs for key, value in batch}
    repetitions = 5 if report.full else 3

    with scratch_folder() as folder:
        # -- puts, checked first ------------------------------------------------------------------
        runtime, store = open_store(str(folder / "ours"))
        put_all(store, batches)
        table = pa.Table.from_batches(store.batches()).combine_chunks()
        held = encode_keys(table["key"], table["window_start"].to_numpy(), KeyFormat.CHANGELOG)
        demand(
            dict(zip(held.to_pylist(), table["value"].to_pylist(), strict=True)) == expected,
            "not what was put",
        )
        demand(store.dropped_records == 0, "puts were dropped")

        turn = iter(range(1000))

        def ours() -> None:
            again, fresh = open_store(str(folder / f"ours-{next(turn)}"))
            put_all(fresh, batches)
            again.close()

        def theirs() -> None:
            peer = RocksPeer(folder / f"rocks-{next(turn)}")
            for batch in pairs:
                peer.write(batch)
            peer.close()

        def one_by_one() -> None:
            peer = RocksPeer(folder / f"rocks-{next(turn)}")
            for batch in pairs[:1]:
                for key, value in batch:
                    peer.db[key] = value
            peer.close()

        put_s, rocks_s = best_of(repetitions, ours), best_of(repetitions, theirs)
        single_s = best_of(1, one_by_one) * rows / len(pairs[0])
        report.figure("batch put", f"{rows / put_s / 1e6:.2f} M rows/s")
        report.figure(
            "RocksDB, write batches",
            f"{rows / rocks_s / 1e6:.2f} M rows/s",
            f"ours is {rocks_s / put_s:.1f}x",
            "at least 10x",
            rocks_s / put_s >= 10,
        )
        report.figure(
            "RocksDB, put by put (as a state store does)",
            f"{rows / single_s / 1e6:.2f} M rows/s",
            f"ours is {single_s / put_s:.1f}x",
        )

        # -- fetches ------------------------------------------------------------------------------
        peer = RocksPeer(folder / "rocks-read")
        for batch in pairs:
            peer.write(batch)
        start = int(batches[-1][1][-1])
        there = pa.concat_arrays(
            [names.filter(pa.array(at == start)) for names, at, _, _ in batches]
        ).unique()
        some = np.random.default_rng(3).permutation(len(there))[:10_000]
        demand(len(some) == 10_000, "the newest window has too few keys")
        wanted = there.take(pa.array(some))
        stored = encode_keys(wanted, np.full(len(wanted), start), KeyFormat.CHANGELOG).to_pylist()
        answer = [expected[key] for key in stored]
        found = store.fetch_keys(wanted, start, start)["value"].to_pylist()
        demand(found == answer == [peer.get(key) for key in stored], "fetches differ")

        def gets() -> None:
            for key in stored:
                peer.get(key)

        def fetch() -> pa.RecordBatch:
            return store.fetch_keys(wanted, start, start)

        fetch_s, get_s = best_of(5 * repetitions, fetch), best_of(repetitions, gets)
        report.figure("10 000 keys in one fetch", f"{fetch_s * 1e3:.2f} ms")
        report.figure(
            "RocksDB, 10 000 gets, as it was written",
            f"{get_s * 1e3:.1f} ms",
            f"ours is {get_s / fetch_s:.1f}x",
            "at least 10x",
            get_s / fetch_s >= 10,
        )
        peer.db.flush()
        flushed_s = best_of(repetitions, gets)
        report.figure(
            "RocksDB, 10 000 gets, flushed and cached",
            f"{flushed_s * 1e3:.1f} ms",
            f"ours is {flushed_s / fetch_s:.1f}x",
        )
        peer.close()
        one_by_one_fetches(report, store, wanted, start, answer, "in memory", "at most 50 µs")
        for _ in dump(
            runtime._parts.tasks.get(TASK),
            [(runtime._store(TASK, store.state), store.state.index.all_buckets())],
            evict=True,
        ):
            pass
        one_by_one_fetches(report, store, wanted, start, answer, "evicted", "")
        evicted_s = best_of(5 * repetitions, fetch)
        report.figure("10 000 keys in one fetch, evicted", f"{evicted_s * 1e3:.2f} ms")
        runtime.close()


def one_by_one_fetches(
    report: Report,
    store: WindowStore,
    wanted: pa.Array,
    start: int,
    answer: list[bytes],
    where: str,
    target: str,
) -> None:
    names = wanted.to_pylist()
    for name in names[:500]:
        store.fetch(name, start)
    taken, values = [], []
    for name in names[:5000]:
        began = perf_counter()
        value = store.fetch(name, start)
        taken.append(perf_counter() - began)
        values.append(value)
    demand(values == answer[:5000], "single fetches differ")
    p50, p99 = np.percentile(taken, [50, 99]) * 1e6
    met = bool(p50 <= 50) if target else None
    report.figure(f"one fetch, {where}, p50", f"{p50:.1f} µs", f"p99 {p99:.1f} µs", target, met)


if __name__ == "__main__":
    main()
