"""A store laid out by hand: which runs it has, and where each lies, is the test's choice.

It wires the index, the caches, pins, packs and a reader as a worker does, without writer or maintenance, so that
a test of reading can put any run anywhere. Rows go to a `StoreOracle` too.

Thread rule: none; one test, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from tidegate.clock import Clock, SystemClock
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.storage.backends.sealed import pack_name
from tidegate.storage.index import AppendBatch, BucketIndex, HotCopy, PlainState, RunEntry, Tenant
from tidegate.storage.maintenance.retirement import BatchPins
from tidegate.storage.memory.key_lru import KeyLru
from tidegate.storage.memory.scratch import Scratch, ScratchLimiter
from tidegate.storage.pack import PackCache, write_pack
from tidegate.storage.reader import All, Bounds, RangeRequest, StorageReader
from tidegate.storage.runs.build import build_runs
from tidegate.storage.runs.columns import UInt64s, hash_keys
from tidegate.storage.runs.merge import merge_runs, select_keys
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Cursor, Merge, StoreSpec
from tidegate.testing.storage import StoreOracle, scan_all

TASK = "app/op/0"
PLENTY = 2**31 - 1


def part_of(run: Run, hot: HotCopy) -> AppendBatch:
    """A run as a writer would hand it to the index."""
    lowest, highest = np.lexsort((run.seq, run.ts))[[0, -1]]
    return AppendBatch(
        bucket=run.bucket,
        hot=hot,
        rows=run.row_count,
        nbytes=run.nbytes,
        charge=run.nbytes,
        min_ts=run.min_ts,
        max_ts=run.max_ts,
        min_cursor=Cursor(int(run.ts[lowest]), int(run.seq[lowest])),
        max_cursor=Cursor(int(run.ts[highest]), int(run.seq[highest])),
    )


class LaidStore:
    """One store of one task, its reader, and an oracle beside it."""

    def __init__(
        self,
        spec: StoreSpec,
        backend: StorageBackend | None = None,
        *,
        clock: Clock | None = None,
        reader_slots: int = 4,
        scratch_timeout_ms: int = 5_000,
    ) -> None:
        self.spec = spec
        self.backend = MemoryBackend() if backend is None else backend
        self.index = BucketIndex(spec)
        self.state = PlainState(self.index)
        self.oracle = StoreOracle(spec)
        self.pins = BatchPins()
        self.packs = PackCache(self.backend)
        self.key_lru = KeyLru(TASK)
        self.scratch = ScratchLimiter(
            clock or SystemClock(),
            reader_slots=reader_slots,
            maintenance_slots=1,
            timeout_ms=scratch_timeout_ms,
        )
        self.reader = StorageReader(self.packs, self.pins, self.scratch, lambda task: self.key_lru)
        self._next_id = 1
        self._next_pack = 1

    def hot(self, run: Run, *, complete: bool = True) -> HotCopy:
        """A hot copy with an id of its own."""
        self._next_id += 1
        return HotCopy(Tenant.WRITE_BUFFER, self._next_id, run, complete)

    def append(
        self, rows: pa.RecordBatch, *, hashes: UInt64s | None = None, max_rows: int = PLENTY
    ) -> list[RunEntry]:
        """Accept a batch: new hot runs after all others."""
        first_seq = self.oracle.next_seq if self.spec.merge is Merge.APPEND else None
        runs = build_runs(self.spec, rows, first_seq=first_seq, max_rows=max_rows, hashes=hashes)
        self.oracle.append(rows)
        return self.index.insert([part_of(run, self.hot(run)) for run in runs])

    def entries(self) -> list[RunEntry]:
        return [run for bucket in self.index.query(-(2**63), 2**63) for run in bucket.runs]

    def dump(self, starts: Iterable[int] | None = None) -> None:
        """Give every run of these buckets that has none a stored place."""
        for start in self.index.unstored_buckets() if starts is None else starts:
            bucket = self.index.snapshot(start)
            waiting = [run for run in bucket.runs if run.stored is None] if bucket is not None else []
            if bucket is None or not waiting:
                continue
            name = pack_name(TASK, self.spec.name, self.spec.segment_of(start), str(self._next_pack))
            self._next_pack += 1
            runs = [run.hot.run for run in waiting if run.hot is not None]
            refs = write_pack(self.backend, TASK, self.spec, self.spec.segment_of(start), runs, name)
            pairs = [(run, replace(run, stored=ref)) for run, ref in zip(waiting, refs, strict=True)]
            if not self.index.set_places(start, bucket.data_version, bucket.layout_version, pairs):
                raise RuntimeError("somebody else changed a store laid out by hand")

    def place(self, start: int, change: Callable[[RunEntry], RunEntry]) -> bool:
        """Change the places of every run of a bucket."""
        bucket = self.index.snapshot(start)
        if bucket is None:
            return False
        pairs = [(run, change(run)) for run in bucket.runs]
        return self.index.set_places(start, bucket.data_version, bucket.layout_version, pairs)

    def evict(self, keys: Sequence[bytes] | None = None, starts: Iterable[int] | None = None) -> None:
        """Take hot copies away: all of them, or these keys' rows only. Whatever is not stored is stored first."""
        starts = self.index.hot_buckets() if starts is None else list(starts)
        self.dump(starts)
        chosen = None if keys is None else np.sort(hash_keys(pa.array(keys, pa.binary())))
        for start in starts:
            self.place(start, lambda run: replace(run, hot=self._left(run, chosen)))

    def _left(self, run: RunEntry, chosen: UInt64s | None) -> HotCopy | None:
        if run.hot is None or chosen is None:
            return None
        kept = select_keys(run.hot.run, chosen, keep=False)
        if kept is None:
            return None
        complete = run.hot.complete and kept.row_count == run.rows
        return run.hot if complete else self.hot(kept, complete=False)

    def run_of(self, entry: RunEntry) -> Run:
        """The whole run, from wherever it lies."""
        if entry.hot is not None and entry.hot.complete:
            return entry.hot.run
        if entry.stored is None:
            raise RuntimeError(f"a run of bucket {entry.bucket} is nowhere")
        return self.packs.load(TASK, self.spec, entry.stored)

    def compact(self, start: int) -> None:
        """Merge all runs of a bucket into one hot base."""
        bucket = self.index.snapshot(start)
        if bucket is None:
            return
        runs = [self.run_of(run) for run in bucket.runs]
        merged = merge_runs(self.spec, runs, max_rows=PLENTY, drop_tombstones=True, join=True)
        order = bucket.runs[-1].order
        new = [
            RunEntry(
                start, order, each.row_count, each.key_count, each.nbytes, each.nbytes, each.min_ts, each.max_ts,
                base=True, hot=self.hot(each),
            )
            for each in merged
        ]  # fmt: skip
        if not self.index.publish(start, bucket.data_version, bucket.layout_version, bucket.runs, new):
            raise RuntimeError("somebody else changed a store laid out by hand")

    def table(self, *requests: RangeRequest) -> pa.Table:
        """What the reader answers."""
        with self.reader.load(self.reader.plan(TASK, self.state, list(requests))) as loaded:
            return loaded.to_table()

    def scan(self, bounds: Bounds = All()) -> pa.Table:  # noqa: B008  (an immutable value)
        """Every key's rows inside the bounds."""
        return scan_all(self.reader, TASK, self.state, bounds)

    def is_idle(self) -> bool:
        """Whether nothing is pinned, held or permitted any more."""
        permits = sum(self.scratch.in_use(kind) for kind in Scratch)
        return self.pins.open_leases() + permits + self.key_lru.held == 0
