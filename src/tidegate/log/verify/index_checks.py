"""Check `.index` and `.timeindex` against the batches of their log segment; also defines the state of the producer
checks.

An index is checked by what a look-up in it would return (Kafka's sanity check is part of it):

    offset index  entries grow; a position is the start of a batch; no offset at or above the entry's lies
                  before that position. (After a multi-batch append the batch's last offset may differ.)
    time index    timestamps grow, offsets do not fall; nothing before an entry's offset is as new as the
                  entry; the last entry is no newer than the newest record, or the segment expires too late.

The zero tail of an index that is still preallocated is not a finding in the last log segment; in a closed one a
broker would read it as entries.

`ProducerTrack` holds, for one producer, the batches as they were sent and the open gaps in its sequences.
Memory: the index files themselves (10 MiB each by default) and a window of headers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidegate.files import Files
from tidegate.log.format.batch import LENGTH_OVERHEAD
from tidegate.log.format.partition_files import LOG, SWAP, offset_file
from tidegate.log.verify.findings import Findings, Severity

if TYPE_CHECKING:
    from tidegate.log.verify.scan import CheckedRun


MODULO: Final = 2**31
CACHED_BATCHES: Final = 5


class Sent(NamedTuple):
    """A batch as remembered: its place, its sequence numbers, and what distinguishes its records."""

    first: int
    last: int
    offset: int
    last_offset: int
    path: Path
    position: int
    size: int
    records: int
    base_timestamp: int
    max_timestamp: int

    @property
    def likeness(self) -> tuple[int, int, int, int]:
        return self.base_timestamp, self.max_timestamp, self.records, self.size


@dataclass(slots=True)
class Gap:
    """Numbers [first, first + count) that were not seen between the offsets `after` and `offset`; reported at the end
    unless they are found later.
    """

    first: int
    count: int
    path: Path
    position: int
    offset: int
    after: int
    because: str


@dataclass(slots=True)
class ProducerTrack:
    """The state of one producer at one point of the log."""

    producer_id: int
    epoch: int
    last: int
    recent: deque[Sent] = field(default_factory=lambda: deque(maxlen=CACHED_BATCHES))
    before_bump: tuple[Sent, ...] = ()
    since_change: int = 0
    fresh: bool = True
    gaps: list[Gap] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.producer_id}/{self.epoch}"

    @property
    def last_offset(self) -> int:
        return self.recent[-1].last_offset if self.recent else -1


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Chosen rows of a table, and which of them have a sequence number that counts."""

    rows: NDArray[Any]
    numbered: NDArray[np.bool_]

    @property
    def epoch(self) -> NDArray[np.int16]:
        epoch: NDArray[np.int16] = self.rows["producer_epoch"]
        return epoch

    @property
    def first(self) -> NDArray[np.int64]:
        first: NDArray[np.int64] = self.rows["base_sequence"].astype(np.int64)
        return first

    @property
    def last(self) -> NDArray[np.int64]:
        last: NDArray[np.int64] = (self.first + self.rows["last_offset_delta"]) % MODULO
        return last

    def where(self, chosen: NDArray[np.bool_] | slice) -> BatchRows:
        return BatchRows(self.rows[chosen], self.numbered[chosen])

    def __len__(self) -> int:
        return len(self.rows)

    def sent(self, row: int, run: CheckedRun, path: Path) -> Sent:
        header = self.rows[row]
        first, base, delta = (int(header[n]) for n in ("base_sequence", "base_offset", "last_offset_delta"))
        return Sent(
            first,
            (first + delta) % MODULO,
            base,
            base + delta,
            path,
            run.position + int(header["position"]),
            int(header["length"]) + LENGTH_OVERHEAD,
            int(header["count"]),
            int(header["base_timestamp"]),
            int(header["max_timestamp"]),
        )


_REBUILD: Final = "move it away; the log rebuilds it when it is opened for writing"
_MAX_INDEX_BYTES: Final = 2**31 - 1
_OFFSET_ENTRY: Final = np.dtype([("offset", ">i4"), ("position", ">i4")])
_TIME_ENTRY: Final = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])


def index_path(folder: Path, base: int, kind: str, files: Files) -> Path:
    """Return the path of the index file that belongs to a log segment.

    If a compaction died between its renames, a new `.log` lies next to old indexes, and the new ones still have
    their `.swap` names; opening the log finishes that.
    """
    staged = offset_file(folder, base, kind, SWAP)
    is_log_in_place = not files.exists(offset_file(folder, base, LOG, SWAP))
    return staged if is_log_in_place and files.exists(staged) else offset_file(folder, base, kind)


class IndexCheck:
    """Checks both indexes of one log segment: pass it the runs in order, then call `finish`."""

    def __init__(self, folder: Path, base: int, findings: Findings, *, is_last: bool, files: Files) -> None:
        self._base = base
        self._findings = findings
        self._is_last = is_last
        self._max_timestamp = -1
        self._severity = Severity.FAULT
        self._offset_path = index_path(folder, base, ".index", files)
        self._time_path = index_path(folder, base, ".timeindex", files)
        offsets = self._load(self._offset_path, _OFFSET_ENTRY, files)
        times = self._load(self._time_path, _TIME_ENTRY, files)
        self._offsets = offsets["offset"].astype(np.int64) + base
        self._positions = offsets["position"].astype(np.int64)
        self._timestamps = times["timestamp"].astype(np.int64)
        self._time_offsets = times["offset"].astype(np.int64) + base
        self._end = 0
        self._next_entry = 0
        self._next_time = 0
        self._check_order()

    def run(self, run: CheckedRun) -> None:
        """Compare the entries that point into these batches."""
        table = run.table
        if not len(table):
            return
        self._skip_damage(run.position)
        self._check_positions(table.position + run.position, table.base_offset)
        self._end = run.position + run.size_bytes
        if (np.diff(table.last_offset) > 0).all():  # otherwise the offsets themselves are the fault
            self._check_times(table.last_offset, table.max_timestamp)

    def finish(self, next_offset: int, *, is_torn: bool) -> None:
        """End the log segment: no entry may point beyond it. A torn segment is recovered with its indexes."""
        self._severity = Severity.WARNING if is_torn else Severity.FAULT
        beyond = self._offsets[self._next_entry :]
        if len(beyond):
            number = self._next_entry
            self._bad_entry(
                number, f"points at position {self._positions[number]}, behind the last batch's start"
            )
        if len(self._timestamps):
            newest = int(self._timestamps[-1])
            if newest > self._max_timestamp:
                self._bad_time(
                    len(self._timestamps) - 1,
                    f"says {newest}, but no batch is newer than {self._max_timestamp}: the log segment would "
                    f"expire too late",
                )
            if int(self._time_offsets[-1]) >= next_offset:
                self._bad_time(
                    len(self._timestamps) - 1, f"points at offset {self._time_offsets[-1]}, behind the end"
                )

    # -- checks of the files ---------------------------------------------------------------------

    def _load(self, path: Path, entry: np.dtype[np.void], files: Files) -> NDArray[np.void]:
        if not files.exists(path):
            remedy = "open the log for writing once: it is rebuilt"
            self._bad_file(path, f"{path.name} is missing", None, remedy, Severity.WARNING)
            return np.empty(0, dtype=entry)
        data = files.read(path, limit=_MAX_INDEX_BYTES)
        whole = len(data) - len(data) % entry.itemsize
        if whole < len(data):
            self._bad_file(path, f"{len(data)} bytes are not a multiple of {entry.itemsize}", whole)
        entries = np.frombuffer(data[:whole], dtype=entry)
        count = -(-len(data.rstrip(b"\0")) // entry.itemsize)
        if count < len(entries) and not self._is_last:
            zeros = len(entries) - count
            what = (
                f"a closed log segment's index ends in {zeros} zero entries, which a broker takes for entries"
            )
            self._bad_file(path, what, count * entry.itemsize)
        return entries[:count]

    def _bad_file(
        self,
        path: Path,
        what: str,
        position: int | None,
        remedy: str = _REBUILD,
        severity: Severity = Severity.FAULT,
    ) -> None:
        self._findings.add(
            "index", path, what, remedy, severity=severity, position=position, offset=self._base
        )

    def _check_order(self) -> None:
        broken = np.flatnonzero((np.diff(self._offsets) <= 0) | (np.diff(self._positions) <= 0))
        if len(broken) or (len(self._offsets) and (self._offsets[0] < self._base or self._positions[0] < 0)):
            number = int(broken[0]) + 1 if len(broken) else 0
            self._bad_entry(number, "does not follow the entry before it")
            self._offsets, self._positions = self._offsets[:number], self._positions[:number]
        broken = np.flatnonzero((np.diff(self._timestamps) <= 0) | (np.diff(self._time_offsets) < 0))
        if len(broken) or (len(self._timestamps) and self._time_offsets[0] < self._base):
            number = int(broken[0]) + 1 if len(broken) else 0
            self._bad_time(number, "does not follow the entry before it")
            self._timestamps, self._time_offsets = self._timestamps[:number], self._time_offsets[:number]

    # -- comparing with the log ------------------------------------------------------------------

    def _skip_damage(self, start: int) -> None:
        """Skip entries between the last run and this one: they point at damage that is already reported."""
        while self._next_entry < len(self._positions) and (
            self._end <= self._positions[self._next_entry] < start
        ):
            self._next_entry += 1

    def _check_positions(self, positions: NDArray[np.int64], bases: NDArray[np.int64]) -> None:
        stop = int(np.searchsorted(self._positions, positions[-1], side="right"))
        wanted = self._positions[self._next_entry : stop]
        if not len(wanted):
            return
        at = np.minimum(np.searchsorted(positions, wanted), len(positions) - 1)
        offsets = self._offsets[self._next_entry : stop]
        for row in np.flatnonzero(positions[at] != wanted).tolist():
            self._bad_entry(self._next_entry + row, f"points at position {wanted[row]}, inside a batch")
        for row in np.flatnonzero((positions[at] == wanted) & (offsets < bases[at])).tolist():
            self._bad_entry(
                self._next_entry + row,
                f"says offset {offsets[row]}, but the batch it points at begins with {bases[at[row]]}: "
                f"a look-up would skip records",
            )
        self._next_entry = stop

    def _check_times(self, lasts: NDArray[np.int64], newest: NDArray[np.int64]) -> None:
        running = np.maximum.accumulate(np.concatenate(([self._max_timestamp], newest)))
        stop = int(np.searchsorted(self._time_offsets, lasts[-1], side="right"))
        wanted = self._time_offsets[self._next_time : stop]
        if len(wanted):
            before = running[np.searchsorted(lasts, wanted)]  # the newest of all batches that end below it
            for row in np.flatnonzero(before >= self._timestamps[self._next_time : stop]).tolist():
                self._bad_time(
                    self._next_time + row,
                    f"says nothing before offset {wanted[row]} is as new as "
                    f"{self._timestamps[self._next_time + row]}, but a batch has {before[row]}: a look-up by "
                    f"time would skip it",
                )
        self._next_time = max(stop, self._next_time)
        self._max_timestamp = int(running[-1])

    def _bad_entry(self, number: int, what: str) -> None:
        self._bad(self._offset_path, number, what, _OFFSET_ENTRY.itemsize, self._offsets)

    def _bad_time(self, number: int, what: str) -> None:
        self._bad(self._time_path, number, what, _TIME_ENTRY.itemsize, self._time_offsets)

    def _bad(self, path: Path, number: int, what: str, entry_size: int, offsets: NDArray[np.int64]) -> None:
        self._findings.add(
            "index",
            path,
            f"entry {number} {what}",
            _REBUILD,
            severity=self._severity,
            position=number * entry_size,
            offset=int(offsets[number]),
        )
