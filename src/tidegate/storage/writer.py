"""The write path: rows become runs in memory, charged and counted, for the operator to put in its index.

`append` never touches an index. It builds the runs, takes their room from the backlog (here the caller waits when
consumers are behind), evicts the coldest keys where the write buffer would go above its soft max, takes the runs'
bytes from the pool, and hands back an `AppendBatch` for each; `index.insert` makes them visible. Where the backlog is
full, what can be merged in memory is merged first.

A1  an append that is refused has changed nothing: what was taken is given back, no number is used up, and what was
    evicted on the way only changed its place.

Runs are built before the backlog is asked: only then is it known what they weigh, and for `last` and `fold` that
may be a hundredth of the rows handed in.

Thread rule: one appending thread for each task; the rest from any thread. No lock is held while waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pyarrow as pa

from tidegate.errors import InvalidError, OverloadError
from tidegate.storage.index import AppendBatch, BucketIndexState, HotCopy, Pruned
from tidegate.storage.parts import AttachedStore, StorageParts, TaskStorage
from tidegate.storage.runs.build import FoldedRows, SortedRows, build_runs, build_sorted_runs
from tidegate.storage.runs.run import Run
from tidegate.storage.spec import Cursor, Merge


class StorageWriter:
    """What operators write with. Cheap to make, holds nothing of its own."""

    def __init__(
        self, parts: StorageParts, relieve: Callable[[str, int], int], reclaim: Callable[[str], bool]
    ) -> None:
        self._parts = parts
        self._relieve = relieve
        self._reclaim = reclaim

    def append(
        self, task: str, state: BucketIndexState, rows: pa.RecordBatch, *, timeout_ms: int | None = None
    ) -> list[AppendBatch]:
        """Accept rows, waiting for backlog room; the runs to insert into `state.index`, by ascending bucket.

        Columns: `key`, `ts`, and by kind `seq`, `deleted`, payload or inputs. `OverloadError` when no room came
        in time (`timeout_ms`, else the configured bound); then nothing was accepted.
        """
        storage = self._parts.tasks.get(task)
        storage.check()
        store = storage.store_of(state)
        if rows.num_rows == 0:
            return []
        runs = self._build(store, rows)
        return self.accept(storage, store, runs, rows.num_rows, timeout_ms=timeout_ms)

    def append_folded(
        self, task: str, state: BucketIndexState, rows: pa.RecordBatch, *, timeout_ms: int | None = None
    ) -> tuple[list[AppendBatch], FoldedRows | None]:
        """`append` to a fold store; also all that the runs hold, in one piece, unless the batch had to be cut."""
        storage = self._parts.tasks.get(task)
        storage.check()
        store = storage.store_of(state)
        if rows.num_rows == 0:
            return [], None
        whole: list[FoldedRows] = []
        runs = self._build(store, rows, whole)
        batches = self.accept(storage, store, runs, rows.num_rows, timeout_ms=timeout_ms)
        return batches, whole[0] if len(whole) == 1 else None

    def append_sorted(
        self, task: str, state: BucketIndexState, rows: SortedRows, *, timeout_ms: int | None = None
    ) -> list[AppendBatch]:
        """`append` to a `last` store for rows that ascend by (hash of the key, key, ts)."""
        storage = self._parts.tasks.get(task)
        storage.check()
        store, config, count = storage.store_of(state), self._parts.config, len(rows.order)
        step = max(1, count * config.max_batch_bytes // max(rows.nbytes, config.max_batch_bytes))
        runs: list[Run] = []
        for start in range(0, max(count, 1), step):
            piece = rows if step >= count else rows.slice(start, start + step)
            runs += build_sorted_runs(store.spec, piece, max_rows=config.max_run_rows)
        return self.accept(storage, store, runs, count, timeout_ms=timeout_ms) if runs else []

    def accept(
        self,
        storage: TaskStorage,
        store: AttachedStore,
        runs: Sequence[Run],
        numbers: int,
        *,
        timeout_ms: int | None = None,
        forced: bool = False,
    ) -> list[AppendBatch]:
        """Charge and cache runs that are built; `forced` for state blobs, whose flush must never wait."""
        parts, task = self._parts, storage.task
        charge = sum(run.nbytes for run in runs)
        try:
            batches = self._take_in(storage, runs, charge, timeout_ms, forced=forced)
        except OverloadError as error:
            parts.stats.overloaded(task, error.reason)
            raise
        if store.spec.merge is Merge.APPEND:
            store.next_seq += numbers
        parts.stats.appended(task, rows=numbers, nbytes=charge)
        return batches

    def undo(self, task: str, batches: Iterable[AppendBatch]) -> None:
        """Give back what `append` accepted and the operator did not insert."""
        storage = self._parts.tasks.get(task)
        batches = list(batches)
        self._parts.drop_hot(storage, [each.hot for each in batches])
        self._parts.backlog.release(sum(each.charge for each in batches), task=task)

    # -- progress --------------------------------------------------------------------------------

    def prune(self, task: str, state: BucketIndexState, cutoff: int) -> Pruned:
        """Drop every run that lies before `cutoff`: out of the index, then retired, dropped and released."""
        return self._gone(task, state.index.prune(cutoff))

    def drop_segments(self, task: str, state: BucketIndexState, before_ts: int) -> Pruned:
        """Drop whole time segments that end at or before `before_ts`."""
        return self._gone(task, state.index.drop_segments(before_ts))

    def nothing_left_to_prune(self, task: str) -> None:
        """Say that all was processed and nothing could be pruned, so that a full backlog is told, not waited for."""
        self._parts.backlog.nothing_left_to_prune(task)

    # -- memory ----------------------------------------------------------------------------------

    def is_over_limit(self, task: str) -> bool:
        """Whether the task's write buffer is above its soft max; exactly the soft max is not."""
        return self._parts.write_buffer.is_over_limit(task)

    def relieve(self, task: str) -> int:
        """Bring the task's memory below its limits now, on this thread; the bytes that came free."""
        self._parts.tasks.get(task).check()
        return self._relieve(task, 0)

    # -- inside ----------------------------------------------------------------------------------

    def _build(
        self, store: AttachedStore, rows: pa.RecordBatch, whole: list[FoldedRows] | None = None
    ) -> list[Run]:
        config = self._parts.config
        largest = config.max_batch_bytes
        seq = store.next_seq if store.spec.merge is Merge.APPEND else None
        # The size of the buffers is quick to know and at least that of the rows: mostly that is enough.
        if rows.get_total_buffer_size() <= largest or (nbytes := rows.nbytes) <= largest:
            return build_runs(store.spec, rows, first_seq=seq, max_rows=config.max_run_rows, whole=whole)
        if rows.num_rows == 1 and nbytes > config.largest_append_bytes:
            raise InvalidError(
                f"store {store.spec.name}: one row of {nbytes} bytes is more than the "
                f"{config.largest_append_bytes} bytes between worker_total_bytes and memory_ceiling_bytes"
            )
        step = max(1, rows.num_rows * largest // nbytes)
        runs: list[Run] = []
        for start in range(0, rows.num_rows, step):
            piece = rows.slice(start, step)
            first = None if seq is None else seq + start
            runs += build_runs(store.spec, piece, first_seq=first, max_rows=config.max_run_rows, whole=whole)
        return runs

    def _take_in(
        self, storage: TaskStorage, runs: Sequence[Run], charge: int, timeout_ms: int | None, *, forced: bool
    ) -> list[AppendBatch]:
        """The runs with their room in the backlog and in the pool: for all of them, or for none."""
        parts, task = self._parts, storage.task
        if forced:
            parts.backlog.force(charge, task=task)
        else:
            parts.backlog.acquire(charge, timeout_ms, task=task, make_room=partial(self._reclaim, task))
        try:
            if not forced and parts.write_buffer.is_over_limit(task, charge):
                for run in runs:  # the keys that are written are not those to evict
                    storage.key_lru.touch(run.hashes)
                self._relieve(task, charge)
            hot = parts.write_buffer.put_all(task, runs, forced=forced)
            return [_append_batch(run, copy) for run, copy in zip(runs, hot, strict=True)]
        except BaseException:
            parts.backlog.release(charge, task=task)
            raise

    def _gone(self, task: str, pruned: Pruned) -> Pruned:
        storage = self._parts.tasks.get(task)
        self._parts.retire(storage, pruned.stored)
        self._parts.drop_hot(storage, pruned.hot)
        self._parts.backlog.release(pruned.charge, task=task)
        self._parts.stats.pruned(task, rows=pruned.rows, nbytes=pruned.charge)
        return pruned


def _append_batch(run: Run, hot: HotCopy) -> AppendBatch:
    min_ts, max_ts, seq = run.min_ts, run.max_ts, run.seq
    lowest = highest = 0
    if seq.any():
        lowest, highest = int(seq[run.ts == min_ts].min()), int(seq[run.ts == max_ts].max())
    return AppendBatch(
        bucket=run.bucket,
        hot=hot,
        rows=run.row_count,
        nbytes=run.nbytes,
        charge=run.nbytes,
        min_ts=min_ts,
        max_ts=max_ts,
        min_cursor=Cursor(min_ts, lowest),
        max_cursor=Cursor(max_ts, highest),
    )
