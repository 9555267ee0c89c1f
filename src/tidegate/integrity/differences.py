"""How two lists of records differ, told record by record.

Both lists hold the same stretch of two topics. Equal records are matched first with first, second with second. Of the
rest:

    moved      on both sides, but elsewhere: out of order, in another stretch, or in another partition
    duplicate  on side B once more than on side A
    missing    on side A, and not (or not so often) on side B
    extra      on side B, and not on side A
    changed    a missing and an extra record with the same key, the first with the first of that key

Thread rule: values and pure functions.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.integrity.digests import Parts, hashes_of

LONGEST_KEY: Final = 60


class Kind(Enum):
    """What became of a record."""

    CHANGED = "changed"
    MISSING = "missing"
    EXTRA = "extra"
    DUPLICATE = "duplicate"
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class Difference:
    """One record: its offset on each side, None where it is not there."""

    kind: Kind
    partition: int
    a: int | None
    b: int | None
    key: str | None
    hash: int
    key_hash: int
    other_partition: int | None = None

    def as_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "kind": self.kind.value,
            "partition": self.partition,
            "offset_a": self.a,
            "offset_b": self.b,
            "key": self.key,
        }
        if self.other_partition is not None and self.other_partition != self.partition:
            told["partition_b"] = self.other_partition
        return told


class Side(NamedTuple):
    """Records of one topic as numbers, in order; keys are shortened for people."""

    hashes: NDArray[np.uint64]
    key_hashes: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    partitions: NDArray[np.int32]
    keys: pa.Array

    @classmethod
    def read(
        cls,
        batches: Iterable[pa.RecordBatch],
        parts: Parts,
        partition: int,
        *,
        buckets: tuple[int, NDArray[np.int64]] | None = None,
    ) -> Side:
        """All records, or those whose keys fall into some of so many `buckets`."""
        read = []
        for batch in batches:
            hashes, keys = hashes_of(batch, parts), hashes_of(batch, Parts.KEY)
            offsets = batch.column("offset").to_numpy()
            names = pc.binary_slice(batch.column("key"), 0, LONGEST_KEY)
            if buckets is not None:
                chosen = np.isin((keys % np.uint64(buckets[0])).astype(np.int64), buckets[1])
                hashes, keys, offsets = hashes[chosen], keys[chosen], offsets[chosen]
                names = names.filter(pa.array(chosen))
            read.append(cls(hashes, keys, offsets, np.full(len(hashes), partition, np.int32), names))
        return cls.joined(read)

    @classmethod
    def joined(cls, parts: Sequence[Side]) -> Side:
        if not parts:
            none = np.zeros(0, np.uint64)
            return cls(none, none, np.zeros(0, np.int64), np.zeros(0, np.int32), pa.array([], pa.binary()))
        return cls(
            np.concatenate([each.hashes for each in parts]),
            np.concatenate([each.key_hashes for each in parts]),
            np.concatenate([each.offsets for each in parts]),
            np.concatenate([each.partitions for each in parts]),
            pa.concat_arrays([each.keys for each in parts]),
        )

    def key(self, row: int) -> str | None:
        value = self.keys[row].as_py()
        return None if value is None else value.decode("utf-8", "backslashreplace")


def classify(a: Side, b: Side) -> list[Difference]:
    """The differences of two stretches of one partition, in order of offsets."""
    pairs, only_a, only_b = _matched(a, b)
    found = list(_moved(a, b, pairs))
    found += _unmatched(a, b, only_a, only_b)
    return sorted(found, key=_place)


def unordered(a: Side, b: Side) -> list[Difference]:
    """The differences of two sets of records, wherever they lie."""
    _, only_a, only_b = _matched(a, b)
    return sorted(_unmatched(a, b, only_a, only_b), key=_place)


def pair_moved(found: Sequence[Difference]) -> list[Difference]:
    """Records missing in one place and extra in another are one record that moved."""
    extra: dict[int, list[int]] = {}
    for number, each in enumerate(found):
        if each.kind in (Kind.EXTRA, Kind.DUPLICATE):
            extra.setdefault(each.hash, []).append(number)
    gone: set[int] = set()
    moved: dict[int, Difference] = {}
    for number, each in enumerate(found):
        if each.kind is Kind.MISSING and extra.get(each.hash):
            other = extra[each.hash].pop(0)
            gone.add(other)
            moved[number] = replace(
                each, kind=Kind.MOVED, b=found[other].b, other_partition=found[other].partition
            )
    return [moved.get(number, each) for number, each in enumerate(found) if number not in gone]


def _place(difference: Difference) -> tuple[int, int, int]:
    a, b = difference.a, difference.b
    return difference.partition, -1 if a is None else a, -1 if b is None else b


def _matched(a: Side, b: Side) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Rows of equal records, the n-th with the n-th (two columns, by A's row); and the rows left on each side."""
    left, right = _numbered(a.hashes), _numbered(b.hashes)
    _, rows_a, rows_b = np.intersect1d(left, right, assume_unique=True, return_indices=True)
    order = np.argsort(rows_a)
    pairs = np.stack((rows_a[order], rows_b[order]), axis=1)
    only_a = np.setdiff1d(np.arange(len(left)), rows_a)
    only_b = np.setdiff1d(np.arange(len(right)), rows_b)
    return pairs, only_a, only_b


def _numbered(hashes: NDArray[np.uint64]) -> NDArray[Any]:
    """Each hash with how many equal ones stand before it: no two are the same."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))[: len(ordered)]
    lengths = np.diff(np.append(starts, len(ordered)))
    numbered = np.empty(len(hashes), [("hash", "u8"), ("number", "i8")])
    numbered["hash"] = hashes
    numbered["number"][order] = np.arange(len(ordered)) - np.repeat(starts, lengths)
    return numbered


def _moved(a: Side, b: Side, pairs: NDArray[np.int64]) -> Iterator[Difference]:
    if (np.diff(pairs[:, 1]) > 0).all():
        return
    kept = np.zeros(len(pairs), np.bool_)
    kept[longest_rising(pairs[:, 1].tolist())] = True
    for i, j in pairs[~kept].tolist():
        yield Difference(
            Kind.MOVED,
            int(a.partitions[i]),
            int(a.offsets[i]),
            int(b.offsets[j]),
            a.key(i),
            int(a.hashes[i]),
            int(a.key_hashes[i]),
        )


def _unmatched(a: Side, b: Side, only_a: NDArray[np.int64], only_b: NDArray[np.int64]) -> list[Difference]:
    known = set(a.hashes.tolist()) if len(only_b) else set()
    extra: dict[int, list[Difference]] = {}
    found: list[Difference] = []
    for row in only_b.tolist():
        is_again = int(b.hashes[row]) in known
        each = Difference(
            Kind.DUPLICATE if is_again else Kind.EXTRA,
            int(b.partitions[row]),
            None,
            int(b.offsets[row]),
            b.key(row),
            int(b.hashes[row]),
            int(b.key_hashes[row]),
        )
        if is_again:
            found.append(each)
        else:
            extra.setdefault(each.key_hash, []).append(each)
    for row in only_a.tolist():
        each = Difference(
            Kind.MISSING,
            int(a.partitions[row]),
            int(a.offsets[row]),
            None,
            a.key(row),
            int(a.hashes[row]),
            int(a.key_hashes[row]),
        )
        if waiting := extra.get(each.key_hash):
            other = waiting.pop(0)
            each = replace(each, kind=Kind.CHANGED, b=other.b, other_partition=other.partition)
        found.append(each)
    return found + [each for waiting in extra.values() for each in waiting]


def longest_rising(numbers: Sequence[int]) -> list[int]:
    """The places of a longest rising subsequence."""
    tails: list[int] = []
    places: list[int] = []
    before: list[int] = []
    for at, number in enumerate(numbers):
        length = bisect_left(tails, number)
        before.append(places[length - 1] if length else -1)
        if length == len(tails):
            tails.append(number)
            places.append(at)
        else:
            tails[length], places[length] = number, at
    found: list[int] = []
    at = places[-1] if places else -1
    while at >= 0:
        found.append(at)
        at = before[at]
    return found[::-1]
