"""The pass over one partition, in which every check sees each batch once.

Owns the order of the checks and those that need only batch headers: offsets, leader epochs, and the evidence of
compaction. Where the batches come from is not its business: one walk over the files, or what several walks over parts
of them brought back (`ranges`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.errors import CorruptError
from tidegate.files import File, Files
from tidegate.log.format.batch import CONTROL_BIT, DELETE_HORIZON_BIT
from tidegate.log.partitions.epochs import LeaderEpochs
from tidegate.log.segments.file_names import LOG, SNAPSHOT, offset_file, offsets_of
from tidegate.log.segments.seals import check_seals, reseal_command
from tidegate.log.verify.findings import Severity
from tidegate.log.verify.folders import Compaction
from tidegate.log.verify.indexes import IndexCheck
from tidegate.log.verify.parsing import RecordTap, Unparsed, parse_records
from tidegate.log.verify.producers import COORDINATED_TOPICS, SequenceCheck
from tidegate.log.verify.ranges import GatheredRun, GatheredScan, RangeEvidence
from tidegate.log.verify.report import PartitionReport
from tidegate.log.verify.scan import SegmentScan, SoundMessage, SoundRun
from tidegate.log.verify.tracks import Sent
from tidegate.log.verify.transactions import Growing, TransactionCheck, check_snapshot

Progress = Callable[[int, int, int], None]
"""Called with bytes, records and faults that came since the last call."""

Gathered = Mapping[int, Sequence[RangeEvidence] | None]
"""The evidence of each log segment, by its base offset; None for one that is to be walked."""

_MAX_OFFSET = 2**63 - 1
_MAX_GAPS = 10_000


class Audit:
    """The pass over one partition; a `tap` gets the records of all it walks itself."""

    def __init__(
        self,
        report: PartitionReport,
        files: Files,
        deep: bool,
        progress: Progress | None = None,
        *,
        tap: RecordTap | None = None,
        gathered: Gathered | None = None,
    ) -> None:
        self.is_regular = True
        """Nothing is damaged, torn, skipped or out of order, so that a reader meets what was walked over."""
        self._tap, self._gathered = tap, gathered
        self._report = report
        self._target = report.target
        self._folder = report.target.folder
        self._findings = report.findings
        self._files = files
        self._deep = deep
        self._progress = progress or _silent
        self._last: tuple[int, Path] | None = None  # last offset so far, and the file it is in
        self._gaps: list[tuple[Path, int, int, int]] = []
        self._more_gaps = 0
        self._epochs = self._read_epochs()

    def run(self) -> None:
        if not self._files.exists(self._folder):
            self._findings.add(
                "corrupt",
                self._folder,
                "the topic has this partition, but its folder is gone",
                "restore it from a backup, or delete the topic",
                offset=self._target.log_start,
            )
            return
        bases = self._bases()
        if not bases:  # never written to
            return
        beginning = bases[0] == 0 and self._target.log_start == 0
        self._sequences = SequenceCheck(
            self._findings,
            compacted=self._report.compaction is Compaction.YES,
            has_beginning=beginning,
            counts=self._target.place.topic not in COORDINATED_TOPICS,
            read_back=self._read_back,
        )
        self._transactions = TransactionCheck(self._findings, files=self._files)
        for number, base in enumerate(bases):
            limit = bases[number + 1] if number + 1 < len(bases) else _MAX_OFFSET
            self._segment(base, limit, is_last=number + 1 == len(bases))
        self._sequences.finish()
        self._transactions.finish(offset_file(self._folder, bases[-1], LOG))
        if self._report.next_offset not in bases:
            self._snapshot(self._report.next_offset)
        self._report_gaps()
        self._seals()
        self._report.segments = len(bases)
        self._report.first_offset = max(bases[0], self._target.log_start)
        self._report.records_with_sequence = self._sequences.records_with_sequence
        self._report.producers = len(self._sequences.tracks)

    def _bases(self) -> list[int]:
        return segment_bases(self._folder, self._files) if self._gathered is None else sorted(self._gathered)

    def _irregular(self) -> None:
        self.is_regular = False
        if self._tap is not None:
            self._tap.spoiled()

    def _scan(self, file: File, base: int, limit: int, is_last: bool) -> SegmentScan | GatheredScan:
        gathered = None if self._gathered is None else self._gathered.get(base)
        if gathered is not None:
            return GatheredScan(gathered, self._findings, file.size())
        return SegmentScan(file, base, limit, is_last, self._target.acknowledged, self._findings)

    def _segment(self, base: int, limit: int, *, is_last: bool) -> None:
        path = offset_file(self._folder, base, LOG)
        self._snapshot(base)
        indexes = IndexCheck(self._folder, base, self._findings, is_last=is_last, files=self._files)
        with self._files.open(path) as file:
            scan = self._scan(file, base, limit, is_last)
            done, known, faults = 0, 0, self._findings.faults
            for piece in scan:
                self._sequences.damaged.extend(scan.damaged[known:])
                if known < len(scan.damaged):
                    self._irregular()
                known = len(scan.damaged)
                if isinstance(piece, SoundMessage):
                    self._message(piece, path)
                else:
                    self._run(piece, path, base, limit)
                    indexes.run(piece)
                self._progress(scan.position - done, 0, self._findings.faults - faults)
                done, faults = scan.position, self._findings.faults
            size = file.size()
            self._progress(size - done, 0, self._findings.faults - faults)
        self._sequences.damaged.extend(scan.damaged[known:])
        if scan.is_torn or scan.damaged:
            self._irregular()
        self._report.bytes += size
        self._report.next_offset = max(self._report.next_offset, scan.next_offset)
        indexes.finish(scan.next_offset, is_torn=scan.is_torn or bool(scan.damaged))
        self._transactions.segment_ended(
            self._folder,
            base,
            self._target.log_start,
            compacted=self._report.compaction is Compaction.YES,
            growing=Growing(path, scan.next_offset, scan.position) if is_last else None,
        )

    def _run(self, run: SoundRun | GatheredRun, path: Path, base: int, limit: int) -> None:
        table = run.table
        data = (table.attributes & CONTROL_BIT) == 0
        records = int(table.count[data].sum())
        self._report.batches += len(table)
        self._report.records += records
        self._progress(0, records, 0)
        self._notice_compaction(run)
        self._check_offsets(run, path, base, limit)
        self._check_epochs(run, path)
        self._sequences.window(run, path)
        self._transactions.run(run, path)
        if self._deep:
            self._check_records(run, path)

    def _message(self, message: SoundMessage, path: Path) -> None:
        self._irregular()
        self._report.batches += 1
        self._report.records += len(message.inner)
        first = message.inner[0].offset
        if self._last is not None and first <= self._last[0]:
            self._bad_offset(path, message.position, first, f"offset {first} follows {self._last[0]}")
        self._last = (message.outer.offset, path)

    # -- offsets ---------------------------------------------------------------------------------

    def _check_offsets(self, run: SoundRun | GatheredRun, path: Path, base: int, limit: int) -> None:
        table = run.table
        lasts = table.last_offset
        before = np.concatenate(([self._last[0] if self._last is not None else base - 1], lasts[:-1]))
        steps = table.base_offset - before
        for row in np.flatnonzero((steps <= 0) | (table.last_offset_delta < 0)).tolist():
            first, position = int(table.base_offset[row]), run.position + int(table.position[row])
            self._bad_offset(
                path, position, first, f"offsets {first} to {int(lasts[row])} follow {int(before[row])}"
            )
        outside = np.flatnonzero((table.base_offset < base) | (lasts >= limit) | (lasts - base >= 2**31))
        for row in outside.tolist():
            first, position = int(table.base_offset[row]), run.position + int(table.position[row])
            self._bad_offset(
                path, position, first, f"offsets {first} to {int(lasts[row])} are not of log segment {base}"
            )
        if self._report.compaction is not Compaction.YES:
            for row in np.flatnonzero(steps > 1).tolist():
                if self._last is None and row == 0:
                    continue  # a log segment's base may lie before its first batch
                self._irregular()
                position = run.position + int(table.position[row])
                if len(self._gaps) < _MAX_GAPS:
                    self._gaps.append((path, position, int(before[row]) + 1, int(table.base_offset[row])))
                else:
                    self._more_gaps += 1
        if len(table):
            self._last = (int(lasts[-1]), path)

    def _bad_offset(self, path: Path, position: int, offset: int, what: str) -> None:
        self._irregular()
        self._findings.add(
            "offset",
            path,
            what,
            "restore the file from a replica or backup; readers may loop or skip here",
            position=position,
            offset=offset,
        )

    def _notice_compaction(self, run: SoundRun | GatheredRun) -> None:
        if self._report.compaction is not Compaction.UNKNOWN:
            return
        table = run.table
        thinned = table.count < table.last_offset_delta + 1
        if thinned.any() or (table.attributes & DELETE_HORIZON_BIT).any():
            self._report.compaction = Compaction.YES
            self._report.compaction_because = "batches hold fewer records than offsets"
            self._sequences.assume_compacted()

    def _report_gaps(self) -> None:
        """Skipped offsets: loss where compaction is ruled out, a warning where it may have been."""
        if self._report.compaction is Compaction.YES:
            return
        certain = self._report.compaction is Compaction.NO
        severity = Severity.FAULT if certain else Severity.WARNING
        damaged = {first for first, _ in self._sequences.damaged}
        for path, position, first, following in self._gaps:
            if first in damaged:
                continue  # told already, as damage
            self._findings.add(
                "offset-gap",
                path,
                f"offsets {first} to {following - 1} are not there"
                + ("" if certain else " (compaction may have removed them)"),
                "look for a log segment that was removed by hand, or restore the partition",
                severity=severity,
                position=position,
                offset=first,
            )
        if self._more_gaps:
            self._findings.counts["offset-gap", severity] += self._more_gaps

    # -- what else a batch says ------------------------------------------------------------------

    def _check_epochs(self, run: SoundRun | GatheredRun, path: Path) -> None:
        starts, epochs = self._epochs
        table = run.table
        if not len(starts):
            return
        at = np.searchsorted(starts, table.base_offset, side="right") - 1
        known = (at >= 0) & (table.leader_epoch >= 0)
        wrong = known & (epochs[np.maximum(at, 0)] != table.leader_epoch)
        for row in np.flatnonzero(wrong).tolist():
            self._findings.add(
                "leader-epoch",
                path,
                f"leader epoch {int(table.leader_epoch[row])}, by the checkpoint {int(epochs[at[row]])}",
                "compare with a replica; these bytes are outside the batch's CRC",
                severity=Severity.WARNING,
                position=run.position + int(table.position[row]),
                offset=int(table.base_offset[row]),
            )

    def _read_epochs(self) -> tuple[Any, Any]:
        path = self._folder / "leader-epoch-checkpoint"
        nothing = (np.empty(0, np.int64), np.empty(0, np.int64))
        if not self._files.exists(path):
            return nothing
        try:
            entries = LeaderEpochs(path, files=self._files).entries
        except CorruptError as error:
            self._findings.add(
                "checkpoint",
                path,
                str(error),
                "it is rebuilt when the log is recovered",
                severity=Severity.WARNING,
                position=error.position,
            )
            return nothing
        return (
            np.array([entry.start_offset for entry in entries], np.int64),
            np.array([entry.epoch for entry in entries], np.int64),
        )

    def _check_records(self, run: SoundRun | GatheredRun, path: Path) -> None:
        found = run.unparsed if isinstance(run, GatheredRun) else parse_records(run, path, self._tap)
        for unparsed in found:
            self._unparsed(unparsed, path)

    def _unparsed(self, found: Unparsed, path: Path) -> None:
        self._irregular()
        self._findings.add(
            "corrupt",
            path,
            f"the CRC is right but the records do not parse: {found.reason}",
            "whoever wrote this batch wrote it wrong; find that producer",
            position=found.position,
            offset=found.offset,
        )

    # -- files beside the log --------------------------------------------------------------------

    def _snapshot(self, offset: int) -> None:
        path = offset_file(self._folder, offset, SNAPSHOT)
        if self._files.exists(path):
            thinned = self._report.compaction is Compaction.YES or self._findings.has("corrupt")
            check_snapshot(
                path, offset, self._sequences.tracks, self._findings, thinned=thinned, files=self._files
            )

    def _seals(self) -> None:
        for mismatch in check_seals(self._files, self._folder):
            self._findings.add(
                "seal",
                mismatch.path,
                mismatch.message,
                f"restore the file; if another program changed it on purpose: {reseal_command(self._folder)}",
                position=mismatch.position,
            )

    def _read_back(self, sent: Sent) -> bytes:
        with self._files.open(sent.path) as file:
            return file.read_at(sent.position, sent.size)


def segment_bases(folder: Path, files: Files) -> list[int]:
    """The base offsets of a partition's log segments, in order."""
    return offsets_of(files.list(folder), LOG)


def _silent(_bytes: int, _records: int, _faults: int) -> None:
    """Nobody watches."""
