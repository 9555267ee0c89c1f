"""Ranges of a partition summed up apart and put together: an audit in parallel, by an associative merge.

Owns `RangeSummary`: what is left of a range of records once its payloads are read. Ranges may be cut anywhere and
summed up anywhere; `merge` puts neighbours together, in whatever grouping, to what one pass over all of them
gives. Cut into ranges, a record cannot be judged (its producer's state lies in the range before), so that a
summary answers less than the validator, but exactly:

`departures` are the producers with any record that the validator, live and tolerating nothing, finds not OK, each
with the offset of the first such record. Everything before it is proven, checksums of chains included; what is
behind it, and whether compaction or an aged-out head explains it, is for `PartitionValidator`, over the flagged
producers' partitions only. A partition with records of a push (`has_push`) has a manifest, which is checked there.

A summary keeps one `Run` for every stretch of a producer's records that follow each other without a seam: one per
chain, and one more for each gap or repeat. Sums are modulo 2^64.

Invariants:
M1  merge(merge(a, b), c) == merge(a, merge(b, c)), and `RangeSummary()` changes nothing;
M2  merge(summarise(left), summarise(right)) == summarise(left and right as one batch).

Thread rule: values and pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.errors import InvalidError
from tidegate.integrity.checksum import computed_checksums, computed_field_sums
from tidegate.integrity.columns import MALFORMED, MANAGED, UNMANAGED, IntegrityColumns, read_columns
from tidegate.integrity.header import ChecksumType, ControlType, EndOfChain, RecordKind
from tidegate.integrity.judge import CONTROL_TYPES

NOWHERE: Final = 2**63 - 1
"""The offset of what did not happen."""
_SUMMED: Final = 2**64
_DATA: Final = (RecordKind.PUT, RecordKind.DELETE, RecordKind.UPDATE)


class Run(NamedTuple):
    """Records of one producer in one chain, each following the last; a chain's end ends its run."""

    chain: int
    first_sequence: int
    last_sequence: int
    first_offset: int
    last_offset: int
    announced: int
    """The checksum type when the run opens its chain, -1 when it does not."""
    records: int
    crc_sum: int
    field_sum: int
    stamp_sum: int
    """The four over all records but the chain's end."""
    bad_offset: int
    """The first record that is wrong by itself: its checksum, or a kind nobody knows."""
    end: EndOfChain | None

    def joined(self, after: Run) -> Run | None:
        """With the run behind it, None where there is a seam."""
        follows = after.chain == self.chain and after.first_sequence == self.last_sequence + 1
        if not follows or self.end is not None:
            return None
        return self._replace(
            last_sequence=after.last_sequence,
            last_offset=after.last_offset,
            records=self.records + after.records,
            crc_sum=(self.crc_sum + after.crc_sum) % _SUMMED,
            field_sum=(self.field_sum + after.field_sum) % _SUMMED,
            stamp_sum=(self.stamp_sum + after.stamp_sum) % _SUMMED,
            bad_offset=min(self.bad_offset, after.bad_offset),
            end=after.end,
        )

    def certified(self) -> EndOfChain:
        """What the chain's end says when nothing is wrong; only for a run that opens its chain."""
        sums = {ChecksumType.ADHASH2: self.crc_sum, ChecksumType.ADHASH: self.field_sum}
        kind = ChecksumType(self.announced)
        return EndOfChain(kind, sums.get(kind, 0), self.records, self.stamp_sum)


@dataclass(frozen=True, slots=True)
class RangeSummary:
    """A range of one partition; `runs` are each producer's by GUID, in order of offsets."""

    runs: dict[bytes, tuple[Run, ...]] = field(default_factory=dict)
    records: int = 0
    unmanaged: int = 0
    malformed: int = 0
    first_malformed: int = NOWHERE
    has_push: bool = False
    first_offset: int = NOWHERE
    last_offset: int = -1
    bad_heartbeats: dict[bytes, int] = field(default_factory=dict)
    """Producers of heartbeats that do not match their checksum, with the first one's offset."""

    def departures(self) -> dict[bytes, int]:
        """Producers that are not wholly OK, with the offset of the first record that is not."""
        found = ((guid, _departure(runs)) for guid, runs in self.runs.items())
        return _earliest({guid: offset for guid, offset in found if offset is not None}, self.bad_heartbeats)

    @property
    def is_clean(self) -> bool:
        """Whether every record with metadata is proven."""
        return not self.malformed and not self.departures()


def merge(left: RangeSummary, right: RangeSummary) -> RangeSummary:
    """The summary of two ranges, `left` in front of `right`."""
    if left.last_offset >= right.first_offset:
        raise InvalidError(
            f"the left range ends at offset {left.last_offset}, the right one begins at {right.first_offset}: "
            f"merge them in order, and none twice"
        )
    runs = dict(left.runs)
    for guid, behind in right.runs.items():
        runs[guid] = _concatenated(runs.get(guid, ()), behind)
    return RangeSummary(
        runs,
        left.records + right.records,
        left.unmanaged + right.unmanaged,
        left.malformed + right.malformed,
        min(left.first_malformed, right.first_malformed),
        left.has_push or right.has_push,
        min(left.first_offset, right.first_offset),
        max(left.last_offset, right.last_offset),
        _earliest(left.bad_heartbeats, right.bad_heartbeats),
    )


def summarise(batch: pa.RecordBatch) -> RangeSummary:
    """Sum up records of one partition, in order of offsets."""
    offsets: NDArray[np.int64] = batch.column("offset").to_numpy()
    if not len(offsets):
        return RangeSummary()
    if not (offsets[1:] > offsets[:-1]).all():
        raise InvalidError("offsets do not ascend; give one partition's records in order")
    columns = read_columns(batch.column("headers"))
    malformed = np.flatnonzero(columns.state == MALFORMED)
    crcs, sums = computed_checksums(batch, columns), computed_field_sums(batch, columns)
    heartbeats = columns.is_heartbeat & columns.is_control & (columns.control == ControlType.START_OF_CHAIN)
    bad_heartbeats: dict[bytes, int] = {}
    for row in np.flatnonzero(heartbeats & (crcs != columns.crc)).tolist():
        bad_heartbeats.setdefault(columns.guid(row), int(offsets[row]))
    judged = np.flatnonzero((columns.state == MANAGED) & ~heartbeats)
    controls = columns.control[judged[columns.kind[judged] == RecordKind.CONTROL]]
    runs: dict[bytes, tuple[Run, ...]] = {}
    if len(judged):
        order = judged[np.lexsort((judged, columns.guid_low[judged], columns.guid_high[judged]))]
        for guid, run in _runs(columns[order], offsets[order], crcs[order], sums[order]):
            runs[guid] = (*runs.get(guid, ()), run)
    return RangeSummary(
        runs,
        len(offsets),
        int((columns.state == UNMANAGED).sum()),
        len(malformed),
        int(offsets[malformed[0]]) if len(malformed) else NOWHERE,
        bool(np.isin(controls, (ControlType.START_OF_PUSH, ControlType.END_OF_PUSH)).any()),
        int(offsets[0]),
        int(offsets[-1]),
        bad_heartbeats,
    )


# -- inside ----------------------------------------------------------------------------------------


def _earliest(one: dict[bytes, int], other: dict[bytes, int]) -> dict[bytes, int]:
    return one | {guid: min(offset, one.get(guid, NOWHERE)) for guid, offset in other.items()}


def _concatenated(left: tuple[Run, ...], right: tuple[Run, ...]) -> tuple[Run, ...]:
    joined = left[-1].joined(right[0]) if left and right else None
    return left + right if joined is None else (*left[:-1], joined, *right[1:])


def _runs(
    columns: IntegrityColumns,
    offsets: NDArray[np.int64],
    crcs: NDArray[np.uint32],
    sums: NDArray[np.uint64],
) -> Iterator[tuple[bytes, Run]]:
    """The runs of records sorted by producer, then offset."""
    rows, control = columns.rows, columns.is_control
    is_end = control & (columns.control == ControlType.END_OF_CHAIN)
    opens = control & (columns.control == ControlType.START_OF_CHAIN) & (columns.sequence == 0)
    known = np.where(control, np.isin(columns.control, list(CONTROL_TYPES)), np.isin(columns.kind, _DATA))
    seam = np.ones(len(rows), np.bool_)
    seam[1:] = (
        (rows["guid_high"][1:] != rows["guid_high"][:-1])
        | (rows["guid_low"][1:] != rows["guid_low"][:-1])
        | (rows["chain"][1:] != rows["chain"][:-1])
        | (rows["sequence"][1:].astype(np.int64) != rows["sequence"][:-1].astype(np.int64) + 1)
        | is_end[:-1]
    )
    starts = np.flatnonzero(seam)
    stamps = rows["timestamp"].view(np.uint64) + (rows["flags"].astype(np.uint64) << np.uint64(56))
    records = np.add.reduceat((~is_end).astype(np.int64), starts)
    crc_sums, field_sums, stamp_sums = (
        np.add.reduceat(np.where(is_end, np.uint64(0), each.astype(np.uint64)), starts)
        for each in (rows["crc"], sums, stamps)
    )
    bad = np.minimum.reduceat(np.where((crcs != rows["crc"]) | ~known, offsets, NOWHERE), starts)
    lasts = np.append(starts[1:], len(rows)) - 1
    for number, (first, last) in enumerate(zip(starts.tolist(), lasts.tolist(), strict=True)):
        yield (
            columns.guid(first),
            Run(
                int(rows["chain"][first]),
                int(rows["sequence"][first]),
                int(rows["sequence"][last]),
                int(offsets[first]),
                int(offsets[last]),
                int(rows["announced_type"][first]) if opens[first] else -1,
                int(records[number]),
                int(crc_sums[number]),
                int(field_sums[number]),
                int(stamp_sums[number]),
                int(bad[number]),
                _end(rows[last]) if is_end[last] else None,
            ),
        )


def _end(row: Any) -> EndOfChain:
    return EndOfChain(
        ChecksumType(int(row["certified_type"])),
        int(row["certified_checksum"]),
        int(row["certified_records"]),
        int(row["certified_stamp_sum"]),
    )


def _departure(runs: tuple[Run, ...]) -> int | None:
    """Where a producer's records first leave the path of one whose every chain is whole; None when never."""
    chain: Run | None = None
    for run in runs:
        chain = _next(chain, run)
        if chain is None:
            return run.first_offset
        at_end = run.last_offset if run.end is not None and run.end != chain.certified() else NOWHERE
        found = min(run.bad_offset, at_end)
        if found != NOWHERE:
            return found
    return None


def _next(chain: Run | None, run: Run) -> Run | None:
    """The chain so far with the run behind it; None when the run does not belong there."""
    if run.announced >= 0:
        is_first = chain is None and run.chain == 0
        is_next = chain is not None and chain.end is not None and run.chain == chain.chain + 1
        return run if is_first or is_next else None
    if chain is None or chain.announced != ChecksumType.NONE:
        return None
    return chain._replace(end=None).joined(run)  # a chain that sums up nothing may go on behind its end
