"""What a reader wants: requests of keys and bounds, and the plan made of them. Nothing here reads.

A plan names buckets, not runs: which runs they have is settled when it is loaded, in the same critical section
that pins them, so nothing it relies on can go away in between.

Bounds:
    All()                 every row
    Time(start, end)      start ≤ ts ≤ end, both inclusive, milliseconds
    RowsTail(end_ts, n)   the last n rows of each key with ts ≤ end_ts

Thread rule: values; use them anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage.index.bucket_index import BucketIndex
from tidegate.storage.index.entries import RunEntry
from tidegate.storage.runs.hashing import UInt64s

EARLIEST = -(2**63)
LATEST = 2**63 - 1


class AllKeys(Enum):
    """Instead of keys: every key the store has."""

    ALL = "all"


ALL = AllKeys.ALL


class All(NamedTuple):
    """No bounds."""


class Time(NamedTuple):
    """Rows from `start` to `end`, both inclusive."""

    start: int
    end: int


class RowsTail(NamedTuple):
    """The last `rows` rows of each key up to and with `end_ts`."""

    end_ts: int
    rows: int


Bounds: TypeAlias = All | Time | RowsTail
Keys: TypeAlias = bytes | Sequence[bytes] | pa.Array | AllKeys


class RangeRequest(NamedTuple):
    """Rows of some keys inside some bounds.

    `keys` is one key, several (a binary column costs nothing to pass), or `ALL`. `hashes` saves hashing them
    again where the caller already has XXH64 of every key.
    """

    keys: Keys
    bounds: Bounds = All()
    hashes: UInt64s | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a load would touch, from metadata alone, as of the moment it was asked."""

    buckets: int
    runs: int
    stored_runs: int
    stored_bytes: int
    packs: frozenset[str]


class RangesLoadPlan:
    """Requests against one store of one task."""

    __slots__ = ("index", "requests", "task")

    def __init__(self, task: str, index: BucketIndex, requests: Sequence[RangeRequest]) -> None:
        self.task = task
        self.index = index
        self.requests = requests

    def estimate(self) -> Estimate:
        """Runs in reach of the requests, each once. A tail counts the buckets sure to cover it for one key."""
        index = self.index
        found: dict[int, RunEntry] = {}
        buckets: set[int] = set()
        for request in self.requests:
            first, last = time_span(request.bounds)
            starts = None
            if isinstance(request.bounds, RowsTail):
                starts = set(index.rows_tail(request.bounds.end_ts, request.bounds.rows))
            for bucket in index.buckets(first, last):
                if starts is not None and bucket.start not in starts:
                    continue
                buckets.add(bucket.start)
                for run in bucket.runs:
                    if run.max_ts >= first and run.min_ts <= last:
                        found[id(run)] = run
        stored = [run for run in found.values() if not run.is_hot]
        return Estimate(
            buckets=len(buckets),
            runs=len(found),
            stored_runs=len(stored),
            stored_bytes=sum(run.nbytes for run in stored),
            packs=frozenset(run.stored.pack for run in stored if run.stored is not None),
        )


def time_span(bounds: Bounds) -> tuple[int, int]:
    """The first and last ts the bounds allow."""
    if isinstance(bounds, Time):
        return bounds.start, bounds.end
    return EARLIEST, bounds.end_ts if isinstance(bounds, RowsTail) else LATEST


def key_column(keys: Keys) -> pa.Array:
    """The keys of a request as a binary column."""
    if isinstance(keys, bytes):
        return pa.array([keys], pa.binary())
    if isinstance(keys, AllKeys):
        raise InvalidError("all keys are not a list of keys; use a scan or an ALL request")
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
    """Refuse what cannot mean anything."""
    for number, request in enumerate(requests):
        bounds = request.bounds
        if type(bounds) is Time and request.hashes is None and _fits(bounds):
            continue  # what most reads ask
        if isinstance(bounds, RowsTail):
            if bounds.rows < 0:
                raise InvalidError(f"request {number}: a tail of {bounds.rows} rows; ask for 0 or more")
            if request.keys is ALL:
                raise InvalidError(
                    f"request {number}: the last {bounds.rows} rows of every key are not kept together; name the keys"
                )
        elif isinstance(bounds, Time) and not _fits(bounds):
            raise InvalidError(
                f"request {number}: bounds {bounds.start} to {bounds.end} are not 64-bit milliseconds"
            )
        if request.hashes is not None:
            count = 0 if request.keys is ALL else 1 if isinstance(request.keys, bytes) else len(request.keys)
            if len(request.hashes) != count:
                raise InvalidError(
                    f"request {number}: {len(request.hashes)} hashes do not go with {count} keys"
                )
