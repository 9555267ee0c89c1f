"""The read path of operators: plan, then load, join or scan.

A plan holds validated requests: keys, and bounds `All()` or `Time(start, end)` (both inclusive, milliseconds). It names
buckets, not runs: the runs are captured when the plan is loaded, in the critical section that pins them.

A load captures buckets and pins packs in one critical section of the index, takes a scratch permit if a stored run
must be read, searches and merges. It never waits while the index is locked, and holds only pins while it waits
for scratch. On an error it releases everything taken so far.

A read of hot rows takes no pin, no permit and no lock: buckets are immutable values, and the table built from them is
reused by later readers until the index changes.

Keys that are read count as accessed (one call per load), and stay in use until the load is closed, so that relief
evicts other keys. Scans touch no key.

Thread rule: safe from any thread; so is each load, by one thread at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from tidegate.storage.maintenance.retirement import BatchPins, Lease
from tidegate.storage.memory.scratch import Permit, Scratch, ScratchLimiter
from tidegate.storage.pack import PackCache
from tidegate.storage.ranges import (
    Answer,
    Holding,
    KeyHolding,
    KeyUse,
    LoadedPoint,
    LoadedRanges,
    columns_of,
    keyed_schema,
    release_all,
    result_schema,
)
from tidegate.storage.runs.columns import UInt64s, hash_keys
from tidegate.storage.scan import BATCH_ROWS, RangeScan, scan_buckets
from tidegate.storage.spec import Merge

# -- plans -------------------------------------------------------------------------------------------

EARLIEST = -(2**63)
LATEST = 2**63 - 1


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


class RangesLoadPlan:
    """Requests against one store of one task."""

    __slots__ = ("index", "requests", "task")

    def __init__(self, task: str, index: BucketIndex, requests: Sequence[RangeRequest]) -> None:
        self.task = task
        self.index = index
        self.requests = requests


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


def _fits(bounds: Time) -> bool:
    start, end = bounds
    return EARLIEST <= start <= LATEST >= end >= EARLIEST


def check_requests(requests: Sequence[RangeRequest]) -> None:
    """Raise `InvalidError` for invalid requests."""
    for number, request in enumerate(requests):
        bounds = request.bounds
        if type(bounds) is Time and request.hashes is None and _fits(bounds):
            continue  # the most common request
        if isinstance(bounds, Time) and not _fits(bounds):
            raise InvalidError(
                f"request {number}: bounds {bounds.start} to {bounds.end} are not 64-bit milliseconds"
            )
        if request.hashes is not None:
            count = 1 if isinstance(request.keys, bytes) else len(request.keys)
            if len(request.hashes) != count:
                raise InvalidError(
                    f"request {number}: {len(request.hashes)} hashes do not go with {count} keys"
                )


# -- reader ------------------------------------------------------------------------------------------


class StorageReader:
    """Reads rows of any store of any task of this worker."""

    def __init__(
        self,
        packs: PackCache,
        pins: BatchPins,
        scratch: ScratchLimiter,
        key_use: Callable[[str], KeyUse | None] = lambda task: None,
        overloaded: Callable[[str, str | None], None] = lambda task, reason: None,
        loaded: Loaded = lambda task, runs, nbytes, store, buckets: None,
    ) -> None:
        self._packs = packs
        self._pins = pins
        self._scratch = scratch
        self._key_use = key_use
        self._overloaded = overloaded
        self._loaded = loaded
        self._schemas: dict[int, tuple[pa.Schema, pa.Schema]] = {}

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
        names = columns_of(keyed_schema(self._schema(index)), columns).names
        first, last = time_span(bounds)
        taken = _Taken(self._scratch)
        try:
            buckets = self._capture(task, index, first, last, taken)
            load = self._loader(task, index, taken, is_sweep=True)
            batches = scan_buckets(index.spec, _each_once(buckets), load, first, last, batch_rows, names)
            return RangeScan(batches, taken.holding(), taken)
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
        index, taken = state.index, _Taken(self._scratch)
        first, last = time_span(bounds)
        try:
            buckets = self._capture(task, index, first, last, taken)
            load = self._loader(task, index, taken)
            joined = join_buckets(index.spec, self._schema(index), buckets, keys, hashes, first, last, load)
            use = self._key_use(task)
            if use is not None and len(joined.numbers):
                numbers = joined.numbers
                use.touch(hashes[numbers[np.flatnonzero(np.diff(numbers, prepend=-1))]])
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
        use = self._key_use(plan.task)
        holding = Holding() if use is None else KeyHolding(use, key_hash)
        return LoadedPoint(self._schema(index), spec.merge is Merge.LAST, key, found, holding)

    def _load_cold_point(
        self, plan: RangesLoadPlan, span: Span | None, key: bytes, first: int, last: int
    ) -> LoadedRanges:
        """Read one key that may need stored runs."""
        index, taken = plan.index, _Taken(self._scratch)
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
            use = self._key_use(plan.task)
            if use is not None:
                use.begin_use(key_hash)
                taken.add(partial(use.end_use, key_hash))
            return LoadedPoint(self._schema(index), spec.merge is Merge.LAST, key, found, taken.holding())
        except BaseException:
            taken.release()
            raise

    # ── many ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _load_ranges(self, plan: RangesLoadPlan) -> LoadedRanges:
        """Capture once for all requests: the buckets between the earliest and the latest bound."""
        index, taken = plan.index, _Taken(self._scratch)
        try:
            answers: list[Answer] = []
            if plan.requests:
                spans = [time_span(request.bounds) for request in plan.requests]
                first, last = min(span[0] for span in spans), max(span[1] for span in spans)
                captured = _Captured(index, self._capture(plan.task, index, first, last, taken))
                load = self._loader(plan.task, index, taken)
                keys = [key_column(request.keys) for request in plan.requests]
                hashes = [
                    hash_keys(column) if request.hashes is None else request.hashes
                    for request, column in zip(plan.requests, keys, strict=True)
                ]
                self._use_keys(plan.task, hashes, taken)
                for (start, end), column, numbers in zip(spans, keys, hashes, strict=True):
                    span = captured.span(start, end)
                    found = find_keys(span, index.spec, column, numbers, start, end, load)
                    answers.append(Answer(column, list(found)))
            return LoadedRanges(index.spec, self._schema(index), answers, taken.holding())
        except BaseException:
            taken.release()
            raise

    def _use_keys(self, task: str, hashes: Sequence[UInt64s], taken: _Taken) -> None:
        use = self._key_use(task)
        if use is None:
            return
        every = hashes[0] if len(hashes) == 1 else np.concatenate(hashes)
        if len(every):
            use.touch(every)
            use.hold(every)
            taken.add(lambda: use.unhold(every))

    # ── capturing and loading ────────────────────────────────────────────────────────────────────────────────

    def _capture(self, task: str, index: BucketIndex, first: int, last: int, taken: _Taken) -> list[Bucket]:
        """The buckets within the bounds; their stored runs are pinned before they can be retired."""
        buckets, lease = index.capture(
            index.spec.bucket_of(first), last, lambda refs: self._pins.pin(task, refs)
        )
        taken.add_lease(lease)
        return buckets

    def _loader(self, task: str, index: BucketIndex, taken: _Taken, *, is_sweep: bool = False) -> RunLoader:
        def admit() -> None:
            try:
                taken.need_scratch()
            except OverloadError as error:
                self._overloaded(task, error.reason)
                raise

        return RunLoader(self._packs, task, index.spec, admit, self._loaded, self._scratch, is_sweep=is_sweep)

    def _schema(self, index: BucketIndex) -> pa.Schema:
        known = self._schemas.get(id(index.spec))
        if known is None or known[0] is not index.spec.rows:
            known = self._schemas[id(index.spec)] = (index.spec.rows, result_schema(index.spec))
        return known[1]


class _Captured:
    """The buckets of one critical section, and the lookup tables built from parts of them."""

    def __init__(self, index: BucketIndex, buckets: Sequence[Bucket]) -> None:
        self._index = index
        self._buckets = buckets
        self._starts = [bucket.start for bucket in buckets]
        self._spans: dict[tuple[int, int], Span] = {}

    def span(self, first: int, last: int) -> Span:
        width = self._index.spec.bucket_ms
        key = (first // width, last // width)
        span = self._spans.get(key)
        if span is None:
            start = bisect_left(self._starts, self._index.spec.bucket_of(first))
            span = self._spans[key] = span_of(self._buckets[start : bisect_right(self._starts, last)])
        return span


class _Taken:
    """The resources a load holds so far."""

    __slots__ = ("_holding", "_permit", "_releases", "_rests", "_scratch")

    def __init__(self, scratch: ScratchLimiter) -> None:
        self._scratch = scratch
        self._permit: Permit | None = None
        self._rests = False
        self._holding: Holding | None = None
        self._releases: list[Callable[[], None]] = []

    def add(self, release: Callable[[], None]) -> None:
        self._releases.append(release)

    def add_lease(self, lease: Lease | None) -> None:
        if lease is not None:
            self._releases.append(lease.close)

    def need_scratch(self) -> None:
        """Take the load's scratch permit, when the first stored run is read."""
        if self._holding is not None and not self._holding.is_open:
            raise InvalidError("this load is closed, and its packs may be gone: load again")
        if self._permit is None:
            self._permit = self._scratch.permit(Scratch.READER)
            if self._give_back not in self._releases:
                self._releases.append(self._give_back)

    def rest(self) -> None:
        """Release the permit until more is read."""
        if self._permit is not None:
            self._rests = True
            self._give_back()

    def go_on(self) -> None:
        """Take a permit again if it was released."""
        if self._rests:
            self._rests = False
            self.need_scratch()

    def _give_back(self) -> None:
        permit, self._permit = self._permit, None
        if permit is not None:
            permit.close()

    def holding(self) -> Holding:
        """Transfer everything to a `Holding`, which also gets what is taken later."""
        self._holding = Holding(self._releases)
        return self._holding

    def release(self) -> None:
        releases, self._releases = self._releases, []
        release_all(releases)


def _each_once(buckets: list[Bucket]) -> Iterator[Bucket]:
    """The buckets in order, each released when the next is asked for."""
    buckets.reverse()
    while buckets:
        yield buckets.pop()
