"""What a simulated worker works on: tasks with stores of every kind, small limits, and how often each step is drawn.

Few keys (two of them with one hash), few buckets and limits of a few hundred bytes, so that a short schedule meets
itself: rows of one identity, buckets under maintenance, keys just evicted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tidegate.randomness import SeededRandomness
from tidegate.storage.config import StorageConfig
from tidegate.storage.index import PlainState
from tidegate.storage.runs.aggregates import Count, Max, Min, Sum
from tidegate.storage.spec import Merge, StoreSpec
from tidegate.testing.storage import Contents, StoreOracle, keys_of_one_hash

BUCKET_MS = 100
BUCKETS = 3
TASKS = ("job/count/0", "job/count/1")
KEYS = [b"", b"a", b"bb", b"key-3", b"key-4", *keys_of_one_hash(2)]
NAMESPACE = "operator"
_PAYLOAD = pa.schema([pa.field("value", pa.int64()), pa.field("note", pa.string())])
SPECS = (
    StoreSpec("events", Merge.APPEND, _PAYLOAD, bucket_ms=BUCKET_MS, segment_ms=2 * BUCKET_MS),
    StoreSpec("latest", Merge.LAST, _PAYLOAD, bucket_ms=BUCKET_MS),
    StoreSpec(
        "totals",
        Merge.FOLD,
        aggregates=(
            Count("n"),
            Sum("total", "value", pa.int64()),
            Sum("weight", "weight"),
            Min("low", "value", pa.int64()),
            Max("high", "value", pa.int64()),
        ),
        bucket_ms=BUCKET_MS,
    ),
)
_LITTLE = {"reserve_bytes": 0, "soft_max_bytes": 400}
CONFIGS = (
    StorageConfig.for_tests(),
    StorageConfig.for_tests(  # always under pressure: keys are evicted all the time
        write_buffer=_LITTLE, base_runs=_LITTLE, state_cache={"reserve_bytes": 0, "soft_max_bytes": 600},
        low_watermark_permille=500, hot_bucket_count=0, max_deltas=2,
    ),
    StorageConfig.for_tests(  # everything is in many pieces: batches, runs, merges
        max_run_rows=5, max_batch_bytes=400, hot_bucket_count=1, max_deltas=3, max_open_packs=2,
    ),
)  # fmt: skip
WEIGHTS: Mapping[str, int] = {
    "append": 22, "state": 6, "prune": 4, "read": 8, "hold": 3, "let_go": 3,
    "compact": 5, "dump": 5, "evict": 5, "rehydrate": 10, "relieve": 5, "delete": 3, "begin_checkpoint": 2,
    "advance": 16, "run_through": 6, "cancel": 3,
    "checkpoint": 6, "crash": 3, "restore": 3, "release": 2, "collect_garbage": 2, "maintain": 3,
}  # fmt: skip


@dataclass
class SimulatedStore:
    """One store, real and naive."""

    state: PlainState
    oracle: StoreOracle


@dataclass
class Saved:
    """A checkpoint: its token and what must come back with it."""

    token: bytes
    oracles: dict[str, StoreOracle]
    blobs: dict[bytes, bytes]


@dataclass
class SimulatedTask:
    """One task: its stores, its blobs and the checkpoints kept for it."""

    name: str
    stores: dict[str, SimulatedStore] = field(default_factory=dict)
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    handle: Any = None
    kept: list[Saved] = field(default_factory=list)

    def saved(self, token: bytes) -> Saved:
        copies = {name: store.oracle.copy() for name, store in self.stores.items()}
        return Saved(token, copies, dict(self.blobs))


@dataclass
class Underway:
    """An operation that stands between two of its phases."""

    kind: str
    task: SimulatedTask
    operation: Generator[str, None, Any]
    saved: Saved | None = None


@dataclass
class Held:
    """A read that was begun and not ended: it must show the rows of when it was begun."""

    opened: Iterator[pa.RecordBatch]
    store: SimulatedStore
    expected: Contents
    unsure: set[Any]


def random_rows(spec: StoreSpec, randomness: SeededRandomness, count: int) -> list[dict[str, Any]]:
    """Rows in no order, with equal timestamps, nulls, tombstones and the odd key twice."""
    rows = []
    for _ in range(count):
        row: dict[str, Any] = {
            "key": KEYS[randomness.below(len(KEYS))],
            "ts": randomness.below(BUCKETS * BUCKET_MS) - BUCKET_MS,
            "value": None if randomness.below(8) == 0 else randomness.below(1000) - 500,
            "weight": randomness.below(10**6) / 7 - 10**4,
            "note": None if randomness.below(3) == 0 else "n" * randomness.below(4),
        }
        if spec.merge is not Merge.APPEND:
            row["ts"] = row["ts"] // 25 * 25  # few identities, written often
            row["seq"] = randomness.below(2)
        if spec.merge is Merge.LAST:
            row["deleted"] = randomness.below(4) == 0
        rows.append(row)
    return rows
