"""Walk ranges of a partition's files separately, and combine the results into those of a single walk.

The checks of an audit need every batch's header in order, but the expensive work (reading, CRCs, decompressing
and parsing records) can be done in any order. So each range is walked by any process (`scan_range`), which
returns its headers and the damage it found: `RangeEvidence`. `GatheredScan` yields them window by window, as a
single `SegmentScan` would, so the checks are the same.

A range that does not begin at the start of a file begins at a guessed byte and searches for a sound batch from there.
G1  evidence counts only if the walk before it ended at the byte where it begins; otherwise that range is walked
    again from there (a batch inside a record's value looks sound, too; damage may cross the boundary).
G2  windows are those of a single walk: each begins where the last one or damage ended, and holds whole batches.
G3  a log segment with messages of old formats is walked as a whole.

Thread rule: values and pure functions; different ranges anywhere, at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidegate.files import Files
from tidegate.kernels.record_batch import HEADER_ROW
from tidegate.log.batch_file import next_sound_batch
from tidegate.log.dump.records import WINDOW_BYTES
from tidegate.log.format.partition_files import INDEX, offset_file
from tidegate.log.verify.findings import Finding, Findings
from tidegate.log.verify.scan import RecordTap, SegmentScan, SoundMessage, Unparsed, parse_records

if TYPE_CHECKING:
    from tidegate.log.format.decode import BatchTable


@dataclass(frozen=True, slots=True)
class RangeOrder:
    """The bytes of one log segment to walk, and the known facts of the segment.

    `start` is a guess unless it is 0 or `exact`; the walk ends with the batch that reaches `stop` (None: the end).
    """

    path: Path
    base_offset: int
    limit_offset: int
    is_last: bool
    acknowledged: int
    start: int = 0
    stop: int | None = None
    exact: bool = False
    next_offset: int | None = None
    deep: bool = True


class Damage(NamedTuple):
    """A finding of `SegmentScan` after the first `rows` batches, and the offsets it hides."""

    rows: int
    finding: Finding
    hidden: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class RangeEvidence:
    """The result of a walk; `start` is None if there was no sound batch."""

    order: RangeOrder
    start: int | None = None
    end: int = 0
    next_offset: int = 0
    rows: NDArray[Any] = field(default_factory=lambda: np.zeros(0, HEADER_ROW))
    """The headers of sound batches; `position` is the byte in the file."""
    controls: dict[int, bytes] = field(default_factory=dict)
    unparsed: list[Unparsed] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)
    is_torn: bool = False
    has_messages: bool = False

    @property
    def is_sound(self) -> bool:
        return not self.damages and not self.unparsed and not self.is_torn and not self.has_messages


class _Noted(Findings):
    """All findings of a walk in order, each with the number of batches before it."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, Finding]] = []
        self.rows = 0

    def put(self, finding: Finding) -> None:
        self.told.append((self.rows, finding))


def scan_range(order: RangeOrder, *, files: Files, tap: RecordTap | None = None) -> RangeEvidence:
    """Walk a range and return its evidence; `tap` receives its records."""
    evidence = RangeEvidence(order, end=order.start, next_offset=order.base_offset)
    with files.open(order.path) as file:
        noted = _Noted()
        scan = SegmentScan(
            file, order.base_offset, order.limit_offset, order.is_last, order.acknowledged, noted
        )
        scan.stop = order.stop
        if order.next_offset is not None:
            scan.next_offset = order.next_offset
        scan.position = order.start
        if order.start and not order.exact:
            first = next_sound_batch(
                file, order.start, file.size(), min_offset=order.base_offset, below=order.limit_offset
            )
            if first is None:
                return evidence
            scan.position = first[0]
        evidence.start = scan.position
        _walk(scan, noted, evidence, tap)
    if tap is not None and not evidence.is_sound:
        tap.spoiled()
    return evidence


def _walk(scan: SegmentScan, noted: _Noted, evidence: RangeEvidence, tap: RecordTap | None) -> None:
    tables: list[NDArray[Any]] = []
    hidden = told = 0
    for piece in scan:
        told, hidden = _take_damage(scan, noted, evidence, told, hidden)
        if isinstance(piece, SoundMessage):
            evidence.has_messages = True
            break
        rows = piece.table.rows.copy()
        rows["position"] += piece.position
        tables.append(rows)
        noted.rows += len(rows)
        controls = np.flatnonzero(piece.table.is_control)
        for at, size in zip(
            piece.table.position[controls].tolist(), piece.table.size[controls].tolist(), strict=True
        ):
            evidence.controls[piece.position + at] = bytes(piece.control(at, size))
        if evidence.order.deep:
            evidence.unparsed += parse_records(piece, evidence.order.path, tap)
    _take_damage(scan, noted, evidence, told, hidden)
    evidence.rows = np.concatenate(tables) if tables else evidence.rows
    evidence.end, evidence.next_offset, evidence.is_torn = scan.position, scan.next_offset, scan.is_torn


def _take_damage(
    scan: SegmentScan, noted: _Noted, evidence: RangeEvidence, told: int, hidden: int
) -> tuple[int, int]:
    """Add the findings since the last call; a batch comes after all damage before it."""
    for number, said in enumerate(noted.told[told:]):
        places = tuple(scan.damaged[hidden:]) if number == 0 else ()
        evidence.damages.append(Damage(*said, places))
    return len(noted.told), len(scan.damaged)


# -- combining evidence ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GatheredRun:
    """A run whose bytes are elsewhere: headers, the bytes of its control batches, batches that did not parse."""

    position: int
    table: BatchTable
    size_bytes: int
    controls: dict[int, bytes]
    unparsed: list[Unparsed]

    def control(self, position: int, size: int) -> bytes:
        return self.controls[self.position + position]


class GatheredScan:
    """One log segment, rebuilt from its evidence; iterates like `SegmentScan`."""

    def __init__(self, parts: Sequence[RangeEvidence], findings: Findings, size: int) -> None:
        self._parts, self._findings = parts, findings
        self.size = size
        self.position = 0
        self.next_offset = parts[-1].next_offset if parts else 0
        self.is_torn = any(part.is_torn for part in parts)
        self.damaged: list[tuple[int, int]] = []

    def __iter__(self) -> Iterator[GatheredRun]:
        rows = np.concatenate([part.rows for part in self._parts])
        controls = {at: data for part in self._parts for at, data in part.controls.items()}
        unparsed = [each for part in self._parts for each in part.unparsed]
        before, damages = 0, list[Damage]()
        for part in self._parts:
            damages += [damage._replace(rows=damage.rows + before) for damage in part.damages]
            before += len(part.rows)
        done = 0
        for damage in damages:
            yield from self._stretch(rows[done : damage.rows], controls, unparsed)
            done = damage.rows
            self.damaged += damage.hidden
            self._findings.put(damage.finding)
        yield from self._stretch(rows[done:], controls, unparsed)
        self.position = self._parts[-1].end

    def _stretch(
        self, rows: NDArray[Any], controls: dict[int, bytes], unparsed: list[Unparsed]
    ) -> Iterator[GatheredRun]:
        """Yield the batches of an undamaged stretch in windows (G2)."""
        from tidegate.log.format.decode import BatchTable

        ends = rows["position"] + rows["length"] + 12
        first = 0
        while first < len(rows):
            start = int(rows["position"][first])
            limit = max(start + WINDOW_BYTES, int(ends[first]))
            stop = int(np.searchsorted(ends, limit, side="right"))
            window = rows[first:stop].copy()
            window["position"] -= start
            end = int(ends[stop - 1])
            here = [each for each in unparsed if start <= each.position < end] if unparsed else []
            self.position = end
            yield GatheredRun(start, BatchTable(window, end - start), end - start, controls, here)
            first = stop


class Gathered(NamedTuple):
    """Evidence that counts: its range number, and whether it is as given and not from a new walk."""

    number: int
    evidence: RangeEvidence
    stood: bool


def gather(given: Sequence[RangeEvidence], again: Callable[[RangeOrder], RangeEvidence]) -> list[Gathered]:
    """Return the evidence of one log segment as a single walk would find it (G1); `again` repeats a walk."""
    used: list[Gathered] = []
    position, next_offset = 0, None
    for number, part in enumerate(given):
        stop = part.order.stop
        if stop is not None and position >= stop:  # the range before extends beyond it
            empty = RangeEvidence(part.order, position, position, next_offset or part.order.base_offset)
            used.append(Gathered(number, empty, not len(part.rows)))
            continue
        stood = part.start == position
        if not stood:
            part = again(replace(part.order, start=position, exact=True, next_offset=next_offset))
        used.append(Gathered(number, part, stood))
        position, next_offset = part.end, part.next_offset
    return used


# -- planning --------------------------------------------------------------------------------------


def cut_evenly(folder: Path, base: int, size: int, pieces: int, *, files: Files) -> list[int]:
    """Return start bytes of about `pieces` ranges of similar length: entries of the index, as far as it reaches."""
    hints = _index_positions(offset_file(folder, base, INDEX), files)
    cuts: list[int] = []
    for number in range(1, pieces):
        wanted = size * number // pieces
        at = int(np.searchsorted(hints, wanted))
        near = int(hints[at]) if at < len(hints) and hints[at] - wanted < size // (2 * pieces) else wanted
        if near > (cuts[-1] if cuts else 0) and near < size:
            cuts.append(near)
    return cuts


def _index_positions(path: Path, files: Files) -> NDArray[np.int64]:
    """Return the positions of an index as hints; none if they do not ascend."""
    if not files.exists(path):
        return np.zeros(0, np.int64)
    data = files.read(path, limit=2**31 - 1)
    entries = np.frombuffer(data[: len(data) - len(data) % 8], ">i4").reshape(-1, 2)
    positions: NDArray[np.int64] = entries[:, 1].astype(np.int64)
    positions = positions[: int(np.flatnonzero(positions)[-1]) + 1] if positions.any() else positions[:0]
    return positions if (np.diff(positions) > 0).all() else positions[:0]
