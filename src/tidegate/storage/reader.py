"""The read path of operators: plan, then load, join or scan.

A plan holds validated requests: keys, and bounds `All()` or `Time(start, end)` (both inclusive, milliseconds). It names
buckets, not runs: the runs are captured when the plan is loaded, in the critical section that pins them.

A load captures buckets and pins packs in one critical section of the index, and takes a scratch permit if a stored run
must be read; it holds only pins while it waits for that. On an error it releases everything taken so far. A read of hot
rows takes no pin, no permit and no lock: the table built from the buckets is reused until the index changes. Keys that
are read count as accessed; scans touch no key.

Thread rule: safe from any thread; so is each load, by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError, OverloadError
from tidegate.storage.index import Bucket, BucketIndex, BucketIndexState
from tidegate.storage.lookup import (
    Joined,
    Loaded,
    RunLoader,
    Span,
    find_keys,
    find_point,
    join_buckets,
    span_of,
)
from tidegate.storage.maintenance.retirement import BatchPins
from tidegate.storage.memory.key_lru import KeyLru
from tidegate.storage.pack import PackCache
from tidegate.storage.ranges import (
    Answer,
    Holding,
    LoadedPoint,
    LoadedRanges,
    columns_of,
    keyed_schema,
)
from tidegate.storage.runs.columns import UInt64s, hash_keys
from tidegate.storage.scan import BATCH_ROWS, RangeScan, scan_buckets
from tidegate.storage.scratch import ScratchLimiter
from tidegate.storage.spec import EARLIEST, LATEST, Merge

# -- plans -------------------------------------------------------------------------------------------


class All(NamedTuple):
    """No bounds."""


class Time(NamedTuple):
    """Rows from `start` to `end`, both inclusive."""

    start: int
    end: int


Bounds: TypeAlias = All | Time
Keys: TypeAlias = bytes | Sequence[bytes] | pa.Array


class RangeRequest(NamedTuple):
    """Rows of some keys inside some bounds.

    `keys` is one key or several (a binary column costs nothing to pass); every key is a scan. `hashes` saves
    hashing them again where the caller already has XXH64 of every key.
    """

    keys: Keys
    bounds: Bounds = All()
    hashes: UInt64s | None = None


@dataclass(slots=True, eq=False)
class RangesLoadPlan:
    """Requests against one store of one task."""

    task: str
    index: BucketIndex
    requests: Sequence[RangeRequest]


def time_span(bounds: Bounds) -> tuple[int, int]:
    """The first and last ts within the bounds."""
    return (bounds.start, bounds.end) if isinstance(bounds, Time) else (EARLIEST, LATEST)


def key_column(keys: Keys) -> pa.Array:
    """The keys of a request as a binary column."""
    if isinstance(keys, bytes):
        return pa.array([keys], pa.binary())
    column = keys if isinstance(keys, pa.Array) else pa.array(keys, pa.binary())
    if column.type != pa.binary():
        column = column.cast(pa.binary())
    if column.null_count:
        raise InvalidError(f"{column.null_count} of {len(column)} keys are null; no row has a null key")
    return column


def check_requests(requests: Sequence[RangeRequest]) -> None:
    """Raise `InvalidError` for invalid requests."""
    for number, (keys, bounds, hashes) in enumerate(requests):
        start, end = time_span(bounds)
        if not EARLIEST <= start <= LATEST >= end >= EARLIEST:
            raise InvalidError(f"request {number}: bounds {start} to {end} are not 64-bit milliseconds")
        if hashes is not None and len(hashes) != (1 if isinstance(keys, bytes) else len(keys)):
            raise InvalidError(f"request {number}: there are {len(hashes)} hashes, and not one for each key")


# -- reader ------------------------------------------------------------------------------------------


class StorageReader:
    """Reads rows of any store of any task of this worker."""

    def __init__(
        self,
        packs: PackCache,
        pins: BatchPins,
        scratch: ScratchLimiter,
        key_lru: Callable[[str], KeyLru],
        overloaded: Callable[[str, str | None], None] = lambda task, reason: None,
        loaded: Loaded = lambda task, runs, nbytes, store, buckets: None,
    ) -> None:
        self._packs = packs
        self._pins = pins
        self._scratch = scratch
        self._key_lru = key_lru
        self._overloaded = overloaded
        self._loaded = loaded

    def plan(self, task: str, state: BucketIndexState, requests: Sequence[RangeRequest]) -> RangesLoadPlan:
        """Validate the requests and return a plan; no IO, and nothing is held."""
        check_requests(requests)
        return RangesLoadPlan(task, state.index, requests)

    def load(self, plan: RangesLoadPlan) -> LoadedRanges:
        """Read the rows of the plan; close the result."""
        requests = plan.requests
        if len(requests) == 1:
            request = requests[0]
            key = request.keys
            if type(key) is bytes and request.hashes is None:
                return self._load_point(plan, request, key)
        return self._load_ranges(plan)

    def scan(
        self,
        task: str,
        state: BucketIndexState,
        bounds: Bounds = All(),  # noqa: B008  (an immutable value)
        *,
        batch_rows: int = BATCH_ROWS,
        columns: Sequence[str] | None = None,
    ) -> RangeScan:
        """Scan every key's rows inside the bounds, in batches of about `batch_rows`; close the result.

        Columns are key, ts, seq and payload, or the given ones; others are not built.
        """
        if batch_rows < 1:
            raise InvalidError(f"a scan in batches of {batch_rows} rows; ask for at least one")
        index = state.index
        names = columns_of(keyed_schema(index.spec.visible), columns).names
        first, last = time_span(bounds)
        taken = Holding(self._scratch)
        try:
            buckets = self._capture(task, index, first, last, taken)
            load = self._loader(task, index, taken, is_sweep=True)
            batches = scan_buckets(index.spec, _each_once(buckets), load, first, last, batch_rows, names)
            return RangeScan(batches, taken)
        except BaseException:
            taken.release()
            raise

    def join(
        self,
        task: str,
        state: BucketIndexState,
        keys: pa.BinaryArray,
        hashes: UInt64s,
        bounds: Bounds = All(),  # noqa: B008  (an immutable value)
    ) -> Joined:
        """Return the rows of very many keys, most without rows; keys ascend by their hashes and are distinct.

        Rows are copied, and nothing is held afterwards. Only keys that have rows count as accessed.
        """
        index, taken = state.index, Holding(self._scratch)
        first, last = time_span(bounds)
        try:
            buckets = self._capture(task, index, first, last, taken)
            load = self._loader(task, index, taken)
            joined = join_buckets(index.spec, index.spec.visible, buckets, keys, hashes, first, last, load)
            if len(numbers := joined.numbers):
                self._key_lru(task).touch(hashes[numbers[np.flatnonzero(np.diff(numbers, prepend=-1))]])
            return joined
        finally:
            taken.release()

    # ── one key ──────────────────────────────────────────────────────────────────────────────────────────────

    def _load_point(self, plan: RangesLoadPlan, request: RangeRequest, key: bytes) -> LoadedRanges:
        index, bounds = plan.index, request.bounds
        spec = index.spec
        first, last = bounds if type(bounds) is Time else (EARLIEST, LATEST)
        width = spec.bucket_ms
        span: Span | None = index.recall(first // width * width, last // width * width)
        if span is None or span.has_stored:
            return self._load_cold_point(plan, span, key, first, last)
        found, key_hash = find_point(span, spec, key, first, last, self._scratch)
        if found is None:  # unreachable: no run of the span is only stored
            return self._load_cold_point(plan, None, key, first, last)
        self._key_lru(plan.task).touch_one(key_hash)
        holding = Holding(self._scratch)
        return LoadedPoint(index.spec.visible, spec.merge is Merge.LAST, key, found, holding)

    def _load_cold_point(
        self, plan: RangesLoadPlan, span: Span | None, key: bytes, first: int, last: int
    ) -> LoadedRanges:
        """Read one key that may need stored runs."""
        index, taken = plan.index, Holding(self._scratch)
        spec = index.spec
        try:
            version = index.version
            buckets = self._capture(plan.task, index, first, last, taken)
            if span is None or span.buckets != buckets:
                span = span_of(buckets)
                width = spec.bucket_ms
                index.remember(version, first // width * width, last // width * width, span)
            found, key_hash = find_point(span, spec, key, first, last, self._scratch)
            if found is None:
                hashed, load = np.array([key_hash], np.uint64), self._loader(plan.task, index, taken)
                ((_, found),) = find_keys(span, spec, key_column(key), hashed, first, last, load)
            self._key_lru(plan.task).touch_one(key_hash)
            return LoadedPoint(index.spec.visible, spec.merge is Merge.LAST, key, found, taken)
        except BaseException:
            taken.release()
            raise

    # ── many ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _load_ranges(self, plan: RangesLoadPlan) -> LoadedRanges:
        """Capture once for all requests: the buckets between the earliest and the latest bound."""
        index, taken = plan.index, Holding(self._scratch)
        try:
            answers: list[Answer] = []
            if plan.requests:
                spans = [time_span(request.bounds) for request in plan.requests]
                first, last = min(span[0] for span in spans), max(span[1] for span in spans)
                buckets = self._capture(plan.task, index, first, last, taken)
                load = self._loader(plan.task, index, taken)
                keys = [key_column(request.keys) for request in plan.requests]
                hashes = [
                    hash_keys(column) if request.hashes is None else request.hashes
                    for request, column in zip(plan.requests, keys, strict=True)
                ]
                every = hashes[0] if len(hashes) == 1 else np.concatenate(hashes)
                if len(every):
                    self._key_lru(plan.task).touch(every)
                for (start, end), column, numbers in zip(spans, keys, hashes, strict=True):
                    lowest = index.spec.bucket_of(start)
                    span = span_of([bucket for bucket in buckets if lowest <= bucket.start <= end])
                    found = find_keys(span, index.spec, column, numbers, start, end, load)
                    answers.append(Answer(column, list(found)))
            return LoadedRanges(index.spec, index.spec.visible, answers, taken)
        except BaseException:
            taken.release()
            raise

    # ── capturing and loading ────────────────────────────────────────────────────────────────────────────────

    def _capture(self, task: str, index: BucketIndex, first: int, last: int, taken: Holding) -> list[Bucket]:
        """The buckets within the bounds; their stored runs are pinned before they can be retired."""
        buckets, lease = index.capture(
            index.spec.bucket_of(first), last, lambda refs: self._pins.pin(task, refs)
        )
        if lease is not None:
            taken.add(lease.close)
        return buckets

    def _loader(self, task: str, index: BucketIndex, taken: Holding, *, is_sweep: bool = False) -> RunLoader:
        def admit() -> None:
            try:
                taken.need_scratch()
            except OverloadError as error:
                self._overloaded(task, error.reason)
                raise

        return RunLoader(self._packs, task, index.spec, admit, self._loaded, self._scratch, is_sweep=is_sweep)


def _each_once(buckets: list[Bucket]) -> Iterator[Bucket]:
    """The buckets in order, each released when the next is asked for."""
    buckets.reverse()
    while buckets:
        yield buckets.pop()
