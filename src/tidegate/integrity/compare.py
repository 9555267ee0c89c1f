"""Compare two topics by the content of their records, and list the differences.

Offsets differ between a topic and its mirror (transaction markers and compacted records occupy offsets), so they are
ignored. The rule: **partition by partition, the records of both sides in order**. Compared are key, value, headers
and, on request, timestamp. Topics with different numbers of partitions are compared by key: records of all partitions
are grouped into `BUCKETS` by their key's hash, and order is not compared.

Both sides are read once, in ranges, by any number of workers. A range is cut into *blocks* by content, after each
record whose hash ends in ten zero bits, so that the blocks of both sides align again after a difference. Where blocks
differ, the records between the last equal block and the next, a *stretch*, are read again and compared one by one.
The n-th of several equal records on one side is matched with the n-th on the other. The remaining records are

    moved      on both sides, but at different places: out of order, in another stretch, or in another partition
    duplicate  more often on side B than on side A
    missing    on side A, and not (or not so often) on side B
    extra      on side B, and not on side A
    changed    a missing and an extra record with the same key in one stretch, the first with the first of that key

B1  blocks do not depend on where ranges were cut: the open ends of two neighbours are joined.
B2  equal means: the same number of blocks, equal one by one. Hashes have 64 bits, sums of them are kept twice.
B3  the first read alone decides whether two topics are equal. A stretch whose content changed before the second read is
    reported as changed meanwhile; it still differs.
B4  memory is bounded: a stretch of more than `MOST_RECORDS` is reported as a range only, and so are all stretches
    after `MOST_DIFFERENCES`.

Thread rule: values and pure functions around readers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.integrity.audit import Runner, run_ranges
from tidegate.integrity.digests import Digest, Parts, ReadOrder, TopicAt, cut, digest_blocks, hashes_of
from tidegate.kernels.range_summaries import sum_blocks

# -- differences -----------------------------------------------------------------------------------

LONGEST_KEY: Final = 60


class Kind(Enum):
    """The kind of a difference."""

    CHANGED = "changed"
    MISSING = "missing"
    EXTRA = "extra"
    DUPLICATE = "duplicate"
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class Difference:
    """One differing record: its offset on each side, None where it is missing."""

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
    """Hashes and offsets of one topic's records, in order; keys are shortened for display."""

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
        """Read all records, or those whose keys fall into the chosen `buckets`."""
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

    def difference(self, row: int, kind: Kind) -> Difference:
        """A record as a difference of side A: MISSING or MOVED, or else of side B."""
        key, offset = self.keys[row].as_py(), int(self.offsets[row])
        is_a = kind in (Kind.MISSING, Kind.MOVED)
        return Difference(
            kind,
            int(self.partitions[row]),
            offset if is_a else None,
            None if is_a else offset,
            None if key is None else key.decode("utf-8", "backslashreplace"),
            int(self.hashes[row]),
            int(self.key_hashes[row]),
        )


def classify(a: Side, b: Side) -> list[Difference]:
    """The differences of two stretches of one partition, in order of offsets."""
    pairs, only_a, only_b = _matched(a, b)
    found = list(_moved(a, b, pairs))
    found += _unmatched(a, b, only_a, only_b)
    return sorted(found, key=_place)


def unordered(a: Side, b: Side) -> list[Difference]:
    """The differences of two sets of records, at any position."""
    _, only_a, only_b = _matched(a, b)
    return sorted(_unmatched(a, b, only_a, only_b), key=_place)


def paired(stretches: Sequence[Sequence[Difference]]) -> list[Difference]:
    """The differences of all stretches: a missing and an equal extra record are one that moved, then a missing and an
    extra record of one key in one stretch are one that changed."""
    numbered = [(number, each) for number, stretch in enumerate(stretches) for each in stretch]
    numbered = _paired(numbered, lambda _, each: each.hash, Kind.MOVED, (Kind.EXTRA, Kind.DUPLICATE))
    numbered = _paired(numbered, lambda number, each: (number, each.key_hash), Kind.CHANGED, (Kind.EXTRA,))
    return [each for _, each in numbered]


def _paired(
    found: Sequence[tuple[int, Difference]],
    shared: Callable[[int, Difference], Hashable],
    kind: Kind,
    others: Container[Kind],
) -> list[tuple[int, Difference]]:
    """Join each missing record with the first record of `others` that has the same `shared`, as one of `kind`."""
    waiting: dict[Hashable, deque[int]] = {}
    for at, (number, each) in enumerate(found):
        if each.kind in others:
            waiting.setdefault(shared(number, each), deque()).append(at)
    joined: dict[int, Difference | None] = {}
    for at, (number, each) in enumerate(found):
        if each.kind is Kind.MISSING and (places := waiting.get(shared(number, each))):
            other = found[place := places.popleft()][1]
            joined[at] = replace(each, kind=kind, b=other.b, other_partition=other.partition)
            joined[place] = None
    left = ((number, joined.get(at, each)) for at, (number, each) in enumerate(found))
    return [(number, each) for number, each in left if each is not None]


def _place(difference: Difference) -> tuple[int, int, int]:
    a, b = difference.a, difference.b
    return difference.partition, -1 if a is None else a, -1 if b is None else b


def _matched(a: Side, b: Side) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Match equal records, the n-th with the n-th: their rows (A's ascending), and the unmatched rows of each side."""
    left, right = _numbered(a.hashes), _numbered(b.hashes)
    _, rows_a, rows_b = np.intersect1d(left, right, assume_unique=True, return_indices=True)
    order = np.argsort(rows_a)
    pairs = np.stack((rows_a[order], rows_b[order]), axis=1)
    only_a = np.setdiff1d(np.arange(len(left)), rows_a)
    only_b = np.setdiff1d(np.arange(len(right)), rows_b)
    return pairs, only_a, only_b


def _numbered(hashes: NDArray[np.uint64]) -> NDArray[Any]:
    """Pair each hash with the number of equal ones before it, so that all pairs are distinct."""
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
        yield replace(a.difference(i, Kind.MOVED), b=int(b.offsets[j]))


def _unmatched(a: Side, b: Side, only_a: NDArray[np.int64], only_b: NDArray[np.int64]) -> list[Difference]:
    known = set(a.hashes[np.isin(a.hashes, b.hashes[only_b])].tolist())
    kinds = [Kind.DUPLICATE if number in known else Kind.EXTRA for number in b.hashes[only_b].tolist()]
    return [a.difference(row, Kind.MISSING) for row in only_a.tolist()] + [
        b.difference(row, kind) for row, kind in zip(only_b.tolist(), kinds, strict=True)
    ]


def longest_rising(numbers: Sequence[int]) -> list[int]:
    """The indices of a longest increasing subsequence."""
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


# -- comparison ------------------------------------------------------------------------------------

BLOCK_BITS: Final = 10
BUCKETS: Final = 4096
SMALLEST_RANGE: Final = 100_000
MOST_RECORDS: Final = 500_000
"""Of both sides together, that are compared one by one at a time: some 100 bytes each."""
MOST_DIFFERENCES: Final = 1_000_000
BLOCK: Final = np.dtype(
    [("records", "i8"), ("sum", "u8"), ("squares", "u8"), ("ordered", "u8"), ("first", "i8"), ("last", "i8")]
)


@dataclass(slots=True)
class Blocks:
    """The blocks of one range; `is_open`: the last one continues in the next range."""

    side: int
    partition: int
    number: int
    rows: NDArray[Any]
    is_open: bool = False


@dataclass(slots=True)
class PartitionComparison:
    """The result for one partition: records per side, counts of differences, and a few examples.

    Counts are complete unless some stretches are `untold` (too long), or `changed` while they were compared.
    """

    partition: int | None
    records: tuple[int, int] = (0, 0)
    differing: int = 0
    """Stretches whose digests differ; by key: buckets."""
    untold: int = 0
    """Of these: too long to be compared record by record."""
    changed: int = 0
    """Of these: not the same any more when they were read again."""
    counts: Counter[Kind] = field(default_factory=Counter)
    ranges: list[tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    """Differing stretches: offsets from, up to (of A), and of B."""
    examples: list[Difference] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return not self.differing

    def take(self, difference: Difference, examples: int) -> None:
        """Count a difference; it becomes an example unless there are `examples` of its kind."""
        self.counts[difference.kind] += 1
        if sum(each.kind is difference.kind for each in self.examples) < examples:
            self.examples.append(difference)

    def as_dict(self) -> dict[str, Any]:
        return {
            "partition": self.partition,
            "records": list(self.records),
            "equal": self.is_equal,
            "differences": {kind.value: self.counts[kind] for kind in Kind if self.counts[kind]},
            "differing": self.differing,
            "untold": self.untold,
            "changed_meanwhile": self.changed,
            "ranges": [{"a": list(a), "b": list(b)} for a, b in self.ranges],
            "examples": [each.as_dict() for each in self.examples],
        }


@dataclass(slots=True)
class Comparison:
    """The result of comparing two topics; `by` is `partition` or `key`."""

    by: str
    partitions: list[PartitionComparison] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return all(each.is_equal for each in self.partitions)

    @property
    def counts(self) -> Counter[Kind]:
        return sum((each.counts for each in self.partitions), Counter[Kind]())

    def as_dict(self) -> dict[str, Any]:
        return {
            "equal": self.is_equal,
            "by": self.by,
            "records": [sum(each.records[side] for each in self.partitions) for side in (0, 1)],
            "differences": {kind.value: count for kind, count in self.counts.items()},
            "partitions": [each.as_dict() for each in self.partitions],
        }


def compare_topics(
    one: TopicAt,
    other: TopicAt,
    *,
    parts: Parts = Parts.KEY | Parts.VALUE | Parts.HEADERS,
    by: str = "auto",
    runner: Runner | None = None,
    examples: int = 10,
    smallest: int = SMALLEST_RANGE,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Compare two topics; `by` is `partition`, `key` or `auto` (by key where the numbers of partitions differ)."""
    sides = one.extents(), other.extents()
    if by == "auto":
        by = "partition" if set(sides[0]) == set(sides[1]) else "key"
    pieces = 1 if runner is None else 4 * runner.workers
    orders = [
        (side, order)
        for side, (source, extents) in enumerate(zip((one, other), sides, strict=True))
        for order in cut(source, extents, pieces, smallest=smallest)
    ]
    if by == "key":
        return Comparison("key", [_compare_keys(orders, parts, runner, examples, progress)])
    found = run_ranges(runner, partial(block_range, parts), orders)
    by_place: dict[tuple[int, int], list[Blocks]] = {}
    for blocks in found:
        by_place.setdefault((blocks.side, blocks.partition), []).append(blocks)
        if progress is not None:
            progress(int(blocks.rows["records"].sum()))
    comparison = Comparison("partition")
    stretches: list[Stretch] = []
    for partition in sorted(set(sides[0]) | set(sides[1])):
        joined = [join_blocks(by_place.get((side, partition), [])) for side in (0, 1)]
        counted = int(joined[0]["records"].sum()), int(joined[1]["records"].sum())
        comparison.partitions.append(PartitionComparison(partition, counted))
        for a, b in differing(joined[0], joined[1]):
            rows = joined[0][a], joined[1][b]
            digests = _digest_of(rows[0]), _digest_of(rows[1])
            stretches.append(
                Stretch(partition, (one, other), _offsets(rows[0]), _offsets(rows[1]), digests, parts)
            )
    _explain(comparison, stretches, runner, examples)
    return comparison


# -- blocks ------------------------------------------------------------------------------------------


def block_range(parts: Parts, item: tuple[int, ReadOrder]) -> Blocks:
    """The blocks of one range; runs in any process."""
    side, order = item
    tables: list[NDArray[Any]] = []
    is_open = False
    for batch in order.batches():
        hashes = hashes_of(batch, parts)
        offsets = batch.column("offset").to_numpy()
        rows, ends_open = _cut_blocks(hashes, offsets)
        if is_open and tables:
            tables[-1][-1] = _joined(tables[-1][-1], rows[0])
            rows = rows[1:]
        if len(rows):
            tables.append(rows)
        is_open = ends_open
    rows = np.concatenate(tables) if tables else np.zeros(0, BLOCK)
    return Blocks(side, order.partition, order.number, rows, is_open)


def _cut_blocks(hashes: NDArray[np.uint64], offsets: NDArray[np.int64]) -> tuple[NDArray[Any], bool]:
    last = np.flatnonzero((hashes & np.uint64((1 << BLOCK_BITS) - 1)) == 0)
    is_open = not len(last) or int(last[-1]) != len(hashes) - 1
    edges = np.concatenate(([0], last + 1, [len(hashes)] if is_open else [])).astype(np.int64)
    rows = np.zeros(len(edges) - 1, BLOCK)
    sums = [np.zeros(len(rows), np.uint64) for _ in range(3)]
    sum_blocks(hashes, edges, *sums)
    rows["records"] = np.diff(edges)
    rows["sum"], rows["squares"], rows["ordered"] = sums
    rows["first"], rows["last"] = offsets[edges[:-1]], offsets[edges[1:] - 1]
    return rows, is_open


def _joined(left: Any, right: Any) -> Any:
    """Join two pieces of one block (B1)."""
    row = np.zeros(1, BLOCK)[0]
    row["records"] = left["records"] + right["records"]
    with np.errstate(over="ignore"):
        row["sum"] = left["sum"] + right["sum"]
        row["squares"] = left["squares"] + right["squares"]
        shift = np.uint64(2) * np.uint64(left["records"])
        row["ordered"] = left["ordered"] + right["ordered"] + shift * right["sum"]
    row["first"], row["last"] = left["first"], right["last"]
    return row


def join_blocks(ranges: Sequence[Blocks]) -> NDArray[Any]:
    """The blocks of a whole partition (B1)."""
    tables: list[NDArray[Any]] = [np.zeros(0, BLOCK)]
    is_open = False
    for part in sorted(ranges, key=lambda each: each.number):
        rows = part.rows
        if is_open and len(rows):
            tables[-1] = tables[-1].copy()
            tables[-1][-1] = _joined(tables[-1][-1], rows[0])
            rows = rows[1:]
        if len(part.rows):
            is_open = part.is_open
        if len(rows):
            tables.append(rows)
    return np.concatenate(tables)


def differing(a: NDArray[Any], b: NDArray[Any]) -> list[tuple[slice, slice]]:
    """The stretches of blocks that differ, between blocks that are equal on both sides, in order (B2)."""
    names = ["records", "sum", "squares", "ordered"]
    left, right = a[names].tolist(), b[names].tolist()
    shorter = min(len(left), len(right))
    same = np.flatnonzero(a[:shorter][names] != b[:shorter][names])
    head = int(same[0]) if len(same) else shorter
    tail = 0
    while tail < shorter - head and left[-1 - tail] == right[-1 - tail]:
        tail += 1
    stretches: list[tuple[slice, slice]] = []
    at_a, at_b = head, head
    for i, j in [*_anchors(left, right, head, tail), (len(left) - tail, len(right) - tail)]:
        while at_a < i and at_b < j and left[at_a] == right[at_b]:
            at_a, at_b = at_a + 1, at_b + 1
        stop_a, stop_b = i, j
        while stop_a > at_a and stop_b > at_b and left[stop_a - 1] == right[stop_b - 1]:
            stop_a, stop_b = stop_a - 1, stop_b - 1
        if stop_a > at_a or stop_b > at_b:
            stretches.append((slice(at_a, stop_a), slice(at_b, stop_b)))
        at_a, at_b = i, j
    return stretches


def _anchors(left: list[Any], right: list[Any], head: int, tail: int) -> list[tuple[int, int]]:
    """Pairs of equal blocks that occur once on each side, reduced to the longest common order."""
    counts = Counter(left[head : len(left) - tail]), Counter(right[head : len(right) - tail])
    place = {block: at for at, block in enumerate(right) if head <= at < len(right) - tail}
    pairs = [
        (at, place[left[at]])
        for at in range(head, len(left) - tail)
        if counts[0][left[at]] == 1 and counts[1][left[at]] == 1
    ]
    return [pairs[number] for number in longest_rising([j for _, j in pairs])]


# -- what differs --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stretch:
    """Records of one partition between equal blocks: offset ranges of both sides, and digests; picklable."""

    partition: int
    topics: tuple[TopicAt, TopicAt]
    a: tuple[int, int]
    b: tuple[int, int]
    digests: tuple[Digest, Digest]
    parts: Parts


def _offsets(blocks: NDArray[Any]) -> tuple[int, int]:
    return (int(blocks["first"][0]), int(blocks["last"][-1]) + 1) if len(blocks) else (0, 0)


def _digest_of(blocks: NDArray[Any]) -> Digest:
    with np.errstate(over="ignore"):
        return Digest(*(int(blocks[name].sum()) for name in ("records", "sum", "squares")))


def explain_stretch(stretch: Stretch) -> tuple[Stretch, list[Difference] | None, bool]:
    """Compare the records of a stretch; runs in any process.

    Returns it with its differences (None where it is too long), and whether it changed since it was first read.
    """
    if sum(each.records for each in stretch.digests) > MOST_RECORDS:
        return stretch, None, False
    sides = [
        Side.read(topic.read(stretch.partition, *offsets), stretch.parts, stretch.partition)
        for topic, offsets in zip(stretch.topics, (stretch.a, stretch.b), strict=True)
    ]
    found = tuple(digest_blocks(side.hashes, np.array([0, len(side.hashes)]))[0] for side in sides)
    return stretch, classify(*sides), found != stretch.digests


def _explain(
    comparison: Comparison, stretches: Sequence[Stretch], runner: Runner | None, examples: int
) -> None:
    found: list[list[Difference]] = []
    told = 0
    by_partition = {each.partition: each for each in comparison.partitions}
    for stretch, differences, is_changed in run_ranges(runner, explain_stretch, stretches):
        into = by_partition[stretch.partition]
        into.differing += 1
        into.changed += is_changed
        into.ranges.append((stretch.a, stretch.b))
        if differences is None or told + len(differences) > MOST_DIFFERENCES:
            into.untold += 1
        else:
            found.append(differences)
            told += len(differences)
    for each in comparison.partitions:
        each.ranges.sort()
    for difference in paired(found):
        by_partition[difference.partition].take(difference, examples)


def bucket_range(parts: Parts, item: tuple[int, ReadOrder]) -> tuple[int, NDArray[Any]]:
    """The records of a range by their keys' buckets: counts, sums and sums of squares; runs in any process."""
    side, order = item
    rows = np.zeros(BUCKETS, BLOCK)
    for batch in order.batches():
        hashes = hashes_of(batch, parts)
        chosen = (hashes_of(batch, Parts.KEY) % np.uint64(BUCKETS)).astype(np.int64)
        order_of = np.argsort(chosen, kind="stable")
        counts = np.bincount(chosen, minlength=BUCKETS)
        edges = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        sums = [np.ascontiguousarray(rows[name]) for name in ("sum", "squares")]
        sum_blocks(hashes[order_of], edges, *sums, np.zeros(BUCKETS, np.uint64))
        rows["records"] += counts
        rows["sum"], rows["squares"] = sums
    return side, rows


def _compare_keys(
    orders: Sequence[tuple[int, ReadOrder]],
    parts: Parts,
    runner: Runner | None,
    examples: int,
    progress: Callable[[int], None] | None,
) -> PartitionComparison:
    totals = [np.zeros(BUCKETS, BLOCK) for _ in range(2)]
    with np.errstate(over="ignore"):
        for side, rows in run_ranges(runner, partial(bucket_range, parts), orders):
            for name in ("records", "sum", "squares"):
                totals[side][name] += rows[name]
            if progress is not None:
                progress(int(rows["records"].sum()))
    result = PartitionComparison(None, (int(totals[0]["records"].sum()), int(totals[1]["records"].sum())))
    differ = np.flatnonzero(totals[0] != totals[1])
    result.differing = len(differ)
    sizes = np.cumsum(totals[0]["records"][differ] + totals[1]["records"][differ])
    wanted = differ[sizes <= MOST_RECORDS]
    result.untold = len(differ) - len(wanted)
    if not len(wanted):
        return result
    work = partial(_read_buckets, parts, wanted)
    read: Mapping[int, list[Side]] = {0: [], 1: []}
    for side, found in run_ranges(runner, work, orders):
        read[side].append(found)
    for side in (0, 1):
        again = Side.joined(read[side])
        edges = np.array([0, len(again.hashes)])
        result.changed += digest_blocks(again.hashes, edges)[0] != _digest_of(totals[side][wanted])
    for difference in paired([unordered(Side.joined(read[0]), Side.joined(read[1]))]):
        result.take(difference, examples)
    return result


def _read_buckets(parts: Parts, wanted: NDArray[np.int64], item: tuple[int, ReadOrder]) -> tuple[int, Side]:
    side, order = item
    buckets = (BUCKETS, wanted)
    return side, Side.read(order.batches(), parts, order.partition, buckets=buckets)
