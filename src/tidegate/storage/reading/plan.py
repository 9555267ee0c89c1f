"""What a reader wants: requests of keys and bounds, and the plan made of them. Nothing here reads.

A plan names buckets, not runs: which runs they have is settled when it is loaded, in the same critical section
that pins them, so nothing it relies on can go away in between.

Bounds:
    All()                 every row
    Time(start, end)      start ≤ ts ≤ end, both inclusive, milliseconds

Thread rule: values; use them anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage.index.bucket_index import BucketIndex
from tidegate.storage.runs.hashing import UInt64s

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
    """The first and last ts the bounds allow."""
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
    """Refuse what cannot mean anything."""
    for number, request in enumerate(requests):
        bounds = request.bounds
        if type(bounds) is Time and request.hashes is None and _fits(bounds):
            continue  # what most reads ask
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
