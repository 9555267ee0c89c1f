"""What the storage benchmarks share: the data set, the peers and a runtime. Not a benchmark itself.

Rows are events of one integer each, over many keys, in batches whose time moves on. Both peers get the same
rows as key-value pairs built before the clock starts (key, event time and number in one key, so that a key's
rows lie together), through their batch calls and without syncing; what their background threads do afterwards
is not counted against them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import pyarrow as pa
from rocksdict import AccessType, Options, Rdict, WriteBatch

from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import BucketIndex, PlainState
from tidegate.storage.maintenance import compaction
from tidegate.storage.maintenance.dump import dump
from tidegate.storage.runs.aggregates import Count, Sum
from tidegate.storage.runtime import WorkerStorageRuntime
from tidegate.storage.spec import Merge, StoreSpec

START_MS = 1_767_225_600_000
MINUTE = 60_000
GIB = 1 << 30


TASK = "bench/rows/0"
VALUE = pa.schema([pa.field("value", pa.int64())])


def events_spec(bucket_ms: int = MINUTE, payload: pa.Schema = VALUE) -> StoreSpec:
    return StoreSpec("events", Merge.APPEND, payload, bucket_ms=bucket_ms)


def totals_spec(bucket_ms: int = MINUTE) -> StoreSpec:
    aggregates = (Count("count"), Sum("total", "value", pa.int64()))
    return StoreSpec("totals", Merge.FOLD, aggregates=aggregates, bucket_ms=bucket_ms)


def roomy(pool_bytes: int = 16 * GIB, **changes: object) -> StorageConfig:
    """Limits that nothing here meets, unless told otherwise."""
    tenant = {"reserve_bytes": 0, "soft_max_bytes": pool_bytes}
    settings: dict[str, object] = {
        "memory_ceiling_bytes": pool_bytes + GIB,
        "worker_total_bytes": pool_bytes,
        "write_buffer": tenant,
        "base_runs": tenant,
        "state_cache": tenant,
        "backlog_limit_bytes": 1 << 40,
        "max_batch_bytes": 256 << 20,
        "max_run_rows": 1 << 22,
    }
    return StorageConfig.of(settings | changes)


class Store:
    """One store on a runtime of its own."""

    def __init__(self, spec: StoreSpec, backend: StorageBackend, config: StorageConfig | None = None) -> None:
        self.runtime = WorkerStorageRuntime.open(roomy() if config is None else config, backend)
        self.state = PlainState(BucketIndex(spec))
        self.runtime.attach(TASK, self.state)
        self.reader, self.writer = self.runtime.reader(), self.runtime.writer()

    def append(self, batch: pa.RecordBatch) -> None:
        self.state.index.insert(self.writer.append(TASK, self.state, batch))

    def compact(self) -> None:
        for bucket in self.state.index.all_buckets():
            for _ in compaction.compact(self.runtime._store(TASK, self.state), bucket, whole=True):
                pass

    def evict(self) -> None:
        buckets = self.state.index.all_buckets()
        for _ in dump(
            self.runtime._parts.tasks.get(TASK),
            [(self.runtime._store(TASK, self.state), buckets)],
            evict=True,
        ):
            pass


def key_names(count: int) -> pa.Array:
    """`user-0000000`, …: twelve bytes each."""
    return pa.array(np.char.add("user-", np.char.zfill(np.arange(count).astype("U7"), 7))).cast(pa.binary())


def batches(
    rows: int, keys: int, batch_rows: int, batch_ms: int = MINUTE, seed: int = 7
) -> Iterator[pa.RecordBatch]:
    """Columns key, ts, value; batch i lies in [i, i+1) * batch_ms, its rows in no order."""
    generator = np.random.default_rng(seed)
    names = key_names(keys)
    for number in range(-(-rows // batch_rows)):
        count = min(batch_rows, rows - number * batch_rows)
        yield pa.RecordBatch.from_arrays(
            [
                names.take(pa.array(generator.integers(0, keys, count))),
                pa.array(START_MS + number * batch_ms + generator.integers(0, batch_ms, count)),
                pa.array(generator.integers(0, 1_000_000, count)),
            ],
            names=["key", "ts", "value"],
        )


def pairs(batch: pa.RecordBatch, first_seq: int) -> list[tuple[bytes, bytes]]:
    """The same rows for a key-value store: (key + ts + seq, value), numbers big-endian so that they sort."""
    keys = np.array(batch.column("key").to_pylist(), "S12").view(np.uint8).reshape(-1, 12)
    numbers = np.empty((batch.num_rows, 2), ">i8")
    numbers[:, 0] = batch.column("ts").to_numpy()
    numbers[:, 1] = np.arange(first_seq, first_seq + batch.num_rows)
    joined = np.hstack([keys, numbers.view(np.uint8)]).tobytes()
    values = batch.column("value").to_numpy().astype(">i8").tobytes()
    return [
        (joined[28 * row : 28 * row + 28], values[8 * row : 8 * row + 8]) for row in range(batch.num_rows)
    ]


class RocksPeer:
    """RocksDB through rocksdict, bytes only, no write-ahead log sync."""

    name = "RocksDB"

    def __init__(self, folder: Path) -> None:
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        self.db = Rdict(str(folder), options, access_type=AccessType.read_write())

    def write(self, rows: list[tuple[bytes, bytes]]) -> None:
        together = WriteBatch(raw_mode=True)
        for key, value in rows:
            together.put(key, value)
        self.db.write(together)

    def get(self, key: bytes) -> bytes | None:
        return self.db.get(key)

    def count(self) -> int:
        return sum(1 for _ in self.db.keys())  # noqa: SIM118 - not a dict

    def close(self) -> None:
        self.db.close()


class LmdbPeer:
    """lmdb, everything in one transaction."""

    name = "lmdb"

    def __init__(self, folder: Path) -> None:
        self.environment = lmdb.open(str(folder), map_size=8 * GIB, sync=False, metasync=False, writemap=True)

    def write(self, rows: list[tuple[bytes, bytes]]) -> None:
        with self.environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            cursor.putmulti(rows)

    def get(self, key: bytes) -> bytes | None:
        with self.environment.begin() as transaction:
            return transaction.get(key)

    def count(self) -> int:
        return int(self.environment.stat()["entries"])

    def close(self) -> None:
        self.environment.close()


@contextmanager
def scratch_folder(needed_bytes: int = 0) -> Iterator[Path]:
    """A folder on the disk this is run from, gone afterwards; refused when there is no room for it."""
    free = shutil.disk_usage(".").free
    if free < needed_bytes:
        raise SystemExit(f"needs {needed_bytes / GIB:.1f} GiB of disk here, {free / GIB:.1f} GiB are free")
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        yield Path(folder).resolve()


def anonymous_bytes() -> int:
    """RssAnon of this process: heap and stacks, not mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("/proc/self/status has no RssAnon: run this on Linux")
