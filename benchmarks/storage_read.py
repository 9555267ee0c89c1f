"""How fast is a read: one key that is in memory, ten thousand keys in one plan, everything after an eviction?

Back of the envelope: a point read is a plan, a lock, a binary search in one directory and a slice: 10 µs of
Python against 20 µs allowed. Many keys in one plan are one kernel call: memory latency for each key (100 ns, twice)
and a gather of its rows. After an eviction the file is mapped, its checksum taken (13 GB/s) and its columns sliced.

Peers, in the same run: RocksDB's and lmdb's `get` of one row, and a plain Arrow file of the same rows: mapped when
two columns are summed, read into memory when whole rows are made.

    python benchmarks/storage_read.py [--full] [--json]
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from _report import Report, best_of, demand
from _storage import (
    MINUTE,
    START_MS,
    TASK,
    LmdbPeer,
    RocksPeer,
    Store,
    batches,
    events_spec,
    key_names,
    pairs,
    scratch_folder,
)
from tidegate.files import Files
from tidegate.storage import pack
from tidegate.storage.backends.folder import FolderBackend
from tidegate.storage.reader import RangeRequest, Time
from tidegate.storage.slots import read_slot

ROWS, KEYS, BATCH = 1_000_000, 100_000, 100_000
HOUR = 60 * MINUTE
POINTS = 2_000


def point_read(store: Store, key: bytes, span: Time) -> int:
    with store.reader.load(store.reader.plan(TASK, store.state, [RangeRequest(key, span)])) as loaded:
        return len(loaded.view(0))


def many_reads(store: Store, keys: list[bytes], span: Time) -> int:
    return sum(point_read(store, key, span) for key in keys)


def measure_points(report: Report, store: Store, rows: pa.Table, what: str, limit_us: float | None) -> float:
    generator = np.random.default_rng(3)
    keys = key_names(KEYS).take(pa.array(generator.integers(0, KEYS, POINTS))).to_pylist()
    span = Time(START_MS, START_MS + HOUR - 1)
    wanted = rows.filter(pc.is_in(rows["key"], pa.array(list(set(keys)), pa.binary())))
    counts = dict(zip(*(column.to_pylist() for column in _counts(wanted)), strict=True))
    found = many_reads(store, keys, span)
    demand(found == sum(counts.get(key, 0) for key in keys), f"{what}: {found} rows")
    micros = best_of(7, partial(many_reads, store, keys, span)) / POINTS * 1e6
    target = "" if limit_us is None else f"< {limit_us} us"
    report.figure(what, f"{micros:.1f} us", "", target, None if limit_us is None else micros < limit_us)
    return micros


def _counts(rows: pa.Table) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    grouped = rows.group_by("key").aggregate([("ts", "count")])
    return grouped["key"], grouped["ts_count"]


def measure_plan(report: Report, store: Store, rows: pa.Table, what: str) -> None:
    keys = key_names(KEYS).take(pa.array(np.random.default_rng(5).choice(KEYS, 10_000, replace=False)))
    span = Time(START_MS, START_MS + HOUR - 1)

    def read() -> pa.Table:
        with store.reader.load(store.reader.plan(TASK, store.state, [RangeRequest(keys, span)])) as loaded:
            return loaded.to_table()

    table = read()
    expected = rows.filter(pc.is_in(rows["key"], keys))
    demand(table.num_rows == expected.num_rows, f"{what}: {table.num_rows} rows")
    demand(pc.sum(table["value"]) == pc.sum(expected["value"]), f"{what}: values")
    speed = table.num_rows / best_of(5, read)
    report.figure(what, f"{speed / 1e6:.2f} M rows/s", "", ">= 2 M rows/s", speed >= 2e6)


def measure_evicted(report: Report, store: Store, rows: pa.Table, folder: Path) -> None:
    """Two columns (nothing needs to be copied) and whole rows (both sides copy), against a plain Arrow file."""
    store.evict()
    demand(store.runtime.pool.total == 0, "evicted rows are still in memory")
    expected = (pc.sum(rows["ts"]).as_py(), pc.sum(rows["value"]).as_py())
    plain = folder / "plain.arrow"
    with pa.OSFile(str(plain), "wb") as sink, pa.ipc.new_file(sink, rows.schema) as file:
        file.write_table(rows.combine_chunks())

    def ours(columns: list[str] | None, *, again: bool) -> pa.Table:
        if not again:  # as in a new process: packs are opened and their checksums taken
            for bucket in store.state.index.all_buckets():
                for run in store.state.index.snapshot(bucket).runs:  # type: ignore[union-attr]
                    store.runtime._parts.packs.forget(run.stored.pack)  # type: ignore[union-attr]
        with store.reader.scan(TASK, store.state, columns=columns) as scan:
            return summed(pa.Table.from_batches(scan))

    def mapped() -> pa.Table:
        with pa.memory_map(str(plain)) as source:
            return summed(pa.ipc.open_file(source).read_all())

    def copied() -> pa.Table:
        with pa.OSFile(str(plain)) as source:
            return summed(pa.ipc.open_file(source).read_all())

    def summed(table: pa.Table) -> pa.Table:
        demand((pc.sum(table["ts"]).as_py(), pc.sum(table["value"]).as_py()) == expected, "evicted rows")
        return table

    demand(sorted(ours(None, again=True)["key"].to_pylist()) == sorted(rows["key"].to_pylist()), "keys")
    # The first read verifies every byte of the slots it needs, the mapped peer touches two columns of many: no target.
    for what, columns, again, peer in (
        ("two columns, first read after eviction", ["ts", "value"], False, mapped),
        ("two columns, read again", ["ts", "value"], True, mapped),
        ("whole rows with keys, first read after eviction", None, False, copied),
    ):
        plain_seconds = best_of(7, peer, perf_counter)
        seconds = best_of(7, partial(ours, columns, again=again), perf_counter)
        ratio = seconds / plain_seconds
        shown = f"{ratio:.1f}x a plain file {peer.__name__}"
        speed = f"{ROWS / seconds / 1e6:.0f} M rows/s"
        if peer is mapped and not again:
            report.figure(what, speed, shown)
        else:
            report.figure(what, speed, shown, "<= 3x", ratio <= 3)

    def unvalidated() -> pa.Table:
        with patch.object(
            pack,
            "read_slot",
            lambda slot, schema, bucket, *, checked: read_slot(slot, schema, bucket, checked=True),
        ):
            return ours(None, again=False)

    seconds = best_of(7, partial(ours, None, again=False), perf_counter)
    ratio = seconds / best_of(7, unvalidated, perf_counter)
    report.figure("validation of every slot at its first read", "", f"{ratio:.2f}x a first read without it")


def measure_peers(report: Report, given: list[pa.RecordBatch], micros: float) -> None:
    rows = [pair for number, batch in enumerate(given) for pair in pairs(batch, number * BATCH)]
    keys = [rows[place][0] for place in np.random.default_rng(9).integers(0, len(rows), POINTS)]
    for kind in (RocksPeer, LmdbPeer):
        with scratch_folder(2 << 30) as folder:
            peer = kind(folder / "db")
            peer.write(rows)
            demand(all(peer.get(key) is not None for key in keys), f"{peer.name} misses rows")
            seconds = best_of(7, lambda peer=peer: [peer.get(key) for key in keys]) / POINTS
            peer.close()
        report.figure(
            f"{kind.name} get of one row",
            f"{seconds * 1e6:.1f} us",
            f"ours takes {micros / seconds / 1e6:.0f}x",
        )


def main() -> None:
    report = Report("How fast are reads from worker storage?")
    given = list(batches(ROWS, KEYS, BATCH))
    rows = pa.Table.from_batches(given)
    with scratch_folder(2 << 30) as folder:
        store = Store(events_spec(HOUR), FolderBackend(folder / "store", files=Files()))
        for batch in given:
            store.append(batch)
        measure_points(report, store, rows, "point read, key's last hour, 10 runs", None)
        measure_plan(report, store, rows, "10 k keys in one plan, 10 runs")
        store.compact()
        micros = measure_points(report, store, rows, "point read, key's last hour, hot", 20)
        measure_plan(report, store, rows, "10 k keys in one plan")
        measure_peers(report, given, micros)
        measure_evicted(report, store, rows, folder)
        measure_points(report, store, rows, "point read after eviction", None)


if __name__ == "__main__":
    main()
