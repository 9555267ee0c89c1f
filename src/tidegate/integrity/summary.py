"""Summaries of partition ranges with an associative merge, for the parallel audit.

Ranges may be cut anywhere and summarised in any process; `merge` joins neighbours, in any grouping, to the summary of
one pass over all of them. The state of a producer lies in the range before, so a summary answers less than the
validator, but exactly: `departures` are the producers with any record that the validator, live and tolerating nothing,
finds not OK, each with the offset of the first such record. Everything before it is proven, checksums of chains
included. `PartitionValidator` decides about the rest, and about the manifest of a push (`has_push`).

A summary keeps one `Run` for every sequence of a producer's records without a gap: one per chain, and one more for
each gap or duplicate. Sums are modulo 2^64. ADHASH's sum reads every payload a second time, so it is computed only
where it can matter (`_sums_fields`) and is 0 elsewhere, on both sides of a merge. To read a range batch by batch, call
`extend`: it knows the chains opened so far.

M1  merge(merge(a, b), c) == merge(a, merge(b, c)), and `RangeSummary()` changes nothing;
M2  merge(summarise(left), summarise(right)) == summarise(left and right as one batch);
M3  extend(summary, batch) == merge(summary, summarise(batch)).

Thread rule: values and pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.errors import InvalidError
from tidegate.integrity.columns import IntegrityColumns, computed_checksums, read_columns, source_of, times_of
from tidegate.integrity.header import FINAL, MAX_SEQUENCE, ChecksumType, EndOfChain
from tidegate.kernels.range_summaries import (
    BAD_HEARTBEAT,
    COUNT,
    FIRST_MALFORMED,
    HAS_PUSH,
    MALFORMED_COUNT,
    NO_RUN,
    NOWHERE,
    RUN_ROW,
    STATE_SIZE,
    UNMANAGED_COUNT,
    add_field_sums,
    fold_runs,
    index_runs,
)

__all__ = ["NOWHERE", "RangeSummary", "Run", "extend", "merge", "summarise"]

_SUMMED: Final = 2**64
_HEADLESS: Final = -1
_ADHASH: Final = int(ChecksumType.ADHASH)
_FEWEST_RUNS: Final = 256


class Run(NamedTuple):
    """Consecutive records of one producer in one chain; a chain's end ends its run."""

    chain: int
    first_sequence: int
    last_sequence: int
    first_offset: int
    last_offset: int
    announced: int
    """The checksum type if the run opens its chain, else -1."""
    records: int
    crc_sum: int
    field_sum: int
    stamp_sum: int
    """The sums and the count cover all records but the chain's end; `field_sum` is 0 where it cannot matter."""
    data_records: int
    newest_time: int
    """The newest producer time, -1 without any."""
    log_time: int
    """The log timestamp of the last record."""
    bad_offset: int
    """Offset of the first record that is faulty by itself: wrong checksum or unknown kind."""
    end: EndOfChain | None
    final: bool = False
    """Whether the end declares that its producer sends nothing more."""

    def joined(self, after: Run) -> Run | None:
        """This run joined with the following one; None where there is a gap."""
        if not self.goes_on_at(after.chain, after.first_sequence):
            return None
        field_sum = 0
        if _sums_fields(self.announced, after.end):
            field_sum = (self.field_sum + after.field_sum) % _SUMMED
        return Run(  # not `_replace`, which is slow: a merge joins a run for each producer
            self.chain,
            self.first_sequence,
            after.last_sequence,
            self.first_offset,
            after.last_offset,
            self.announced,
            self.records + after.records,
            (self.crc_sum + after.crc_sum) % _SUMMED,
            field_sum,
            (self.stamp_sum + after.stamp_sum) % _SUMMED,
            self.data_records + after.data_records,
            max(self.newest_time, after.newest_time),
            after.log_time,
            min(self.bad_offset, after.bad_offset),
            after.end,
            after.final,
        )

    def goes_on_at(self, chain: int, sequence: int) -> bool:
        """Whether a record with this numbering follows without a gap."""
        return chain == self.chain and sequence == self.last_sequence + 1 and self.end is None

    def certified(self) -> EndOfChain:
        """The expected content of the chain's end; only for a run that opens its chain."""
        sums = {ChecksumType.ADHASH2: self.crc_sum, ChecksumType.ADHASH: self.field_sum}
        kind = ChecksumType(self.announced)
        return EndOfChain(kind, sums.get(kind, 0), self.records, self.stamp_sum)


@dataclass(frozen=True, slots=True)
class RangeSummary:
    """The summary of a range of one partition; `runs` are by GUID, each producer's in order of offsets."""

    runs: dict[bytes, tuple[Run, ...]] = field(default_factory=dict)
    records: int = 0
    unmanaged: int = 0
    malformed: int = 0
    first_malformed: int = NOWHERE
    has_push: bool = False
    first_offset: int = NOWHERE
    last_offset: int = -1
    bad_heartbeats: dict[bytes, int] = field(default_factory=dict)
    """Producers of heartbeats with a wrong checksum, with the offset of the first one."""
    heartbeats: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    """Producers of sound heartbeats: offset of the first one, and their number."""

    def departures(self) -> dict[bytes, int]:
        """Producers with a record that is not OK, with the offset of the first one."""
        found = ((guid, _departure(runs)) for guid, runs in self.runs.items())
        return _earliest({guid: offset for guid, offset in found if offset is not None}, self.bad_heartbeats)

    @property
    def is_clean(self) -> bool:
        """Whether every record with metadata is proven."""
        return not self.malformed and not self.departures()


def merge(left: RangeSummary, right: RangeSummary) -> RangeSummary:
    """Return the summary of two adjacent ranges, `left` before `right`."""
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
        _counted(left.heartbeats, right.heartbeats),
    )


def summarise(batch: pa.RecordBatch) -> RangeSummary:
    """Summarise records of one partition, in order of offsets."""
    return extend(RangeSummary(), batch)


def extend(summary: RangeSummary, batch: pa.RecordBatch, *, spares_fields: bool = False) -> RangeSummary:
    """Return the summary of a range and the records after it, at less cost than a merge (M3).

    With `spares_fields` ADHASH's sum is also left out in chains whose start lies before the range. The caller must
    then read such a chain again if it turns out to be ADHASH's.
    """
    offsets: NDArray[np.int64] = batch.column("offset").to_numpy()
    if not len(offsets):
        return summary
    if not (offsets[1:] > offsets[:-1]).all():
        raise InvalidError("offsets do not ascend; give one partition's records in order")
    columns = read_columns(batch.column("headers"))
    folded = _Folded(columns, computed_checksums(batch, columns), offsets, times_of(batch))
    bad_heartbeats: dict[bytes, int] = {}
    heartbeats: dict[bytes, tuple[int, int]] = {}
    for row in np.flatnonzero(folded.numbers < NO_RUN).tolist():
        guid, offset = columns.guid(row), int(offsets[row])
        if folded.numbers[row] == BAD_HEARTBEAT:
            bad_heartbeats.setdefault(guid, offset)
        else:
            first, count = heartbeats.get(guid, (offset, 0))
            heartbeats[guid] = first, count + 1
    state = folded.state
    behind = RangeSummary(
        folded.runs(summary, batch, _ADHASH if spares_fields else _HEADLESS),
        len(offsets),
        int(state[UNMANAGED_COUNT]),
        int(state[MALFORMED_COUNT]),
        int(state[FIRST_MALFORMED]),
        bool(state[HAS_PUSH]),
        int(offsets[0]),
        int(offsets[-1]),
        bad_heartbeats,
        heartbeats,
    )
    return merge(summary, behind) if summary.records else behind


# -- inside ----------------------------------------------------------------------------------------


def _earliest(one: dict[bytes, int], other: dict[bytes, int]) -> dict[bytes, int]:
    return one | {guid: min(offset, one.get(guid, NOWHERE)) for guid, offset in other.items()}


def _counted(
    one: dict[bytes, tuple[int, int]], other: dict[bytes, tuple[int, int]]
) -> dict[bytes, tuple[int, int]]:
    counted = dict(one)
    for guid, (first, count) in other.items():
        earlier, before = one.get(guid, (first, 0))
        counted[guid] = earlier, before + count
    return counted


def _concatenated(left: tuple[Run, ...], right: tuple[Run, ...]) -> tuple[Run, ...]:
    joined = left[-1].joined(right[0]) if left and right else None
    return left + right if joined is None else (*left[:-1], joined, *right[1:])


class _Folded:
    """The runs of one batch as the kernel returns them; `numbers` has each record's run."""

    def __init__(
        self,
        columns: IntegrityColumns,
        crcs: NDArray[np.uint32],
        offsets: NDArray[np.int64],
        times: NDArray[np.int64],
    ) -> None:
        self._columns = columns
        self.numbers = np.empty(len(columns), np.int32)
        self.state = np.zeros(STATE_SIZE, np.int64)
        self.state[FIRST_MALFORMED] = NOWHERE
        self._room = np.zeros(min(_FEWEST_RUNS, len(columns)), RUN_ROW)
        row = 0
        while row < len(columns):
            index = np.empty(1 << (2 * len(self._room)).bit_length(), np.int32)
            index_runs(self._room, int(self.state[COUNT]), index)
            row = int(
                fold_runs(
                    columns.rows, crcs, offsets, times, row, self._room, index, self.state, self.numbers
                )
            )
            if row < len(columns):
                self._room = np.concatenate((self._room, np.zeros(len(self._room), RUN_ROW)))

    @property
    def rows(self) -> NDArray[Any]:
        """A view of the runs."""
        return self._room[: int(self.state[COUNT])]

    def runs(
        self, summary: RangeSummary, batch: pa.RecordBatch, headless: int
    ) -> dict[bytes, tuple[Run, ...]]:
        """Each producer's runs, in order of offsets, with sums of fields where they can matter after `summary`."""
        guids: list[bytes] = []
        runs: list[Run] = []
        chosen: list[int] = []
        for high, low, is_first, *fields, end_row in self.rows.tolist():
            end = None if end_row == NO_RUN else _end(self._columns.rows[end_row])
            guid = high.to_bytes(8, "big") + low.to_bytes(8, "big")
            final = end is not None and bool(self._columns.rows[end_row]["flags"] & FINAL)
            run = Run._make((*fields, end, final))
            before = summary.runs.get(guid) if is_first else None
            goes_on = before is not None and before[-1].goes_on_at(run.chain, run.first_sequence)
            announced = before[-1].announced if before is not None and goes_on else run.announced
            if _sums_fields(announced, end, headless):
                chosen.append(len(runs))
            guids.append(guid)
            runs.append(run)
        if chosen:
            self._add_field_sums(batch, chosen)
            sums = self.rows["field_sum"].tolist()
            for number in chosen:
                runs[number] = runs[number]._replace(field_sum=sums[number])
        found: dict[bytes, list[Run]] = {}
        for guid, run in zip(guids, runs, strict=True):
            found.setdefault(guid, []).append(run)
        return {guid: tuple(each) for guid, each in found.items()}

    def _add_field_sums(self, batch: pa.RecordBatch, chosen: list[int]) -> None:
        wanted = np.zeros(len(self.rows), np.uint8)
        wanted[chosen] = 1
        source = source_of(key=batch.column("key"), value=batch.column("value"))
        add_field_sums(source, self._columns.rows, self.numbers, wanted, self.rows)


def _sums_fields(announced: int, end: EndOfChain | None, headless: int = _HEADLESS) -> bool:
    """Whether ADHASH's sum can still matter: the chain's start and its end, where known, say ADHASH.

    Where this holds for two joined runs it holds for each of them, so that a merge has the sums it needs.
    """
    return announced in (headless, _ADHASH) and (end is None or end.checksum_type == _ADHASH)


def _end(row: Any) -> EndOfChain:
    return EndOfChain(
        ChecksumType(int(row["certified_type"])),
        int(row["certified_checksum"]),
        int(row["certified_records"]),
        int(row["certified_stamp_sum"]),
    )


def _departure(runs: tuple[Run, ...]) -> int | None:
    """The offset of the first record that is not part of an unbroken series of whole chains; None without one."""
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
    """The chain extended by the following run; None when that run does not continue it."""
    if run.announced >= 0:
        is_first = chain is None and run.chain == 0
        is_ended = chain is not None and (chain.end is not None or chain.last_sequence == MAX_SEQUENCE)
        is_next = chain is not None and is_ended and run.chain == chain.chain + 1
        return run if is_first or is_next else None
    if chain is None or chain.announced != ChecksumType.NONE:
        return None
    return chain._replace(end=None).joined(run)  # a chain without a checksum may continue after its end
