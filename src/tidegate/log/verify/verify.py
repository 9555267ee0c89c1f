"""Verify a Kafka data folder from the evidence in its log files. Reads only.

`verify` finds the partitions and passes each batch once through all checks (`Audit`): `scan` (CRC, lengths,
magic), `index_checks`, `producer_checks` (sequences, transactions, snapshots), and here offsets, leader epochs
and the evidence of compaction. The batches come from one scan of the files, or from several scans of ranges
(`ranges`). `Report` states what was read, what was found, and how much that proves.

A CRC covers a batch from its attributes on: a flip in the leader epoch shows only against the checkpoint, one in the
base offset only against its neighbours or a seal. Gaps between batches, fewer records than offsets, empty
batches and sequences with gaps are no faults in a compacted partition.

Thread rule: one partition, one thread; different partitions may be verified at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.errors import CorruptError
from tidegate.files import File, Files
from tidegate.log.checkpoints import LeaderEpochs
from tidegate.log.format.batch import CONTROL_BIT, DELETE_HORIZON_BIT
from tidegate.log.format.partition_files import LOG, SNAPSHOT, offset_file, offsets_of
from tidegate.log.seals import check_seals, reseal_command
from tidegate.log.verify.findings import Findings, Severity
from tidegate.log.verify.index_checks import IndexCheck, Sent
from tidegate.log.verify.producer_checks import (
    COORDINATED_TOPICS,
    Growing,
    SequenceCheck,
    TransactionCheck,
    check_snapshot,
)
from tidegate.log.verify.ranges import GatheredRun, GatheredScan, RangeEvidence
from tidegate.log.verify.scan import (
    Compaction,
    PartitionTarget,
    RecordTap,
    SegmentScan,
    SoundMessage,
    SoundRun,
    Unparsed,
    find_partitions,
    parse_records,
)


@dataclass(slots=True)
class PartitionReport:
    """The content of one partition and the findings in it."""

    target: PartitionTarget
    findings: Findings = field(default_factory=Findings)
    segments: int = 0
    bytes: int = 0
    batches: int = 0
    records: int = 0
    records_with_sequence: int = 0
    producers: int = 0
    first_offset: int | None = None
    next_offset: int = 0
    compaction: Compaction = field(init=False)
    compaction_because: str = field(init=False)

    def __post_init__(self) -> None:
        self.compaction, self.compaction_because = self.target.compaction, self.target.compaction_because

    def as_dict(self) -> dict[str, Any]:
        return {
            "topic": self.target.place.topic,
            "partition": self.target.place.partition,
            "folder": str(self.target.folder),
            "segments": self.segments,
            "bytes": self.bytes,
            "batches": self.batches,
            "records": self.records,
            "records_with_sequence": self.records_with_sequence,
            "producers": self.producers,
            "first_offset": self.first_offset,
            "next_offset": self.next_offset,
            "compacted": self.compaction.value,
            "compacted_because": self.compaction_because,
            "faults": self.findings.faults,
        }


@dataclass(slots=True)
class Report:
    """The audit of several partitions; `general` holds findings that belong to none of them."""

    partitions: list[PartitionReport] = field(default_factory=list)
    general: Findings = field(default_factory=Findings)
    not_shown: str = ""
    """What could not be looked at, where a broker was asked instead of its files."""

    @property
    def records(self) -> int:
        return sum(partition.records for partition in self.partitions)

    @property
    def records_checked(self) -> int:
        """Records whose producer sequence proves something: they have one, and the partition is not compacted."""
        return sum(
            partition.records_with_sequence
            for partition in self.partitions
            if partition.compaction is not Compaction.YES
        )

    @property
    def records_compacted(self) -> int:
        return sum(
            partition.records for partition in self.partitions if partition.compaction is Compaction.YES
        )

    def all_findings(self) -> Findings:
        merged = Findings()
        for findings in (self.general, *(partition.findings for partition in self.partitions)):
            merged.merge(findings)
        return merged

    @property
    def evidence(self) -> str:
        """Return the sentence that says how much a clean report proves."""
        if self.not_shown:
            return self.not_shown
        if self.records == 0:
            return "no records to check"
        unnumbered = self.records - self.records_checked - self.records_compacted
        parts = [f"checked {_share(self.records_checked, self.records)} of records by producer sequence"]
        if unnumbered:
            parts.append(f"{_share(unnumbered, self.records)} carry no sequence")
        if self.records_compacted:
            compacted = _share(self.records_compacted, self.records)
            parts.append(f"{compacted} are in compacted partitions, where holes prove nothing")
        return "; ".join([*parts, "all batches by CRC"])

    def _repr_html_(self) -> str:
        from tidegate.notebook import facts_html, grid_html

        findings = self.all_findings()
        facts = {"records": f"{self.records:,}", "faults": findings.faults, "evidence": self.evidence}
        rows = [
            (each.severity.value, each.kind, each.path, each.offset, each.message) for each in findings.kept
        ]
        shown = facts_html("what verify found", facts)
        return shown + grid_html(
            ("severity", "kind", "file", "offset", "what"), rows, total=findings.total, noun="findings"
        )

    def as_dict(self) -> dict[str, Any]:
        findings = self.all_findings()
        return {
            "partitions": [partition.as_dict() for partition in self.partitions],
            "records": self.records,
            "records_checked": self.records_checked,
            "records_compacted": self.records_compacted,
            "evidence": self.evidence,
            **({"not_shown": self.not_shown} if self.not_shown else {}),
            "counts": {
                kind: sum(count for (name, _), count in findings.counts.items() if name == kind)
                for kind in sorted({kind for kind, _ in findings.counts})
            },
            "faults": findings.faults,
            "findings": [finding.as_dict() for finding in findings.kept],
        }


def _share(part: int, whole: int) -> str:
    """Return a percentage that shows 0 only for none and 100 only for all."""
    percent = 100 * part / whole
    if part in (0, whole) or 1 <= percent <= 99:
        return f"{percent:.0f} %"
    return "under 1 %" if percent < 1 else "over 99 %"


Progress = Callable[[int, int, int], None]
"""Called with bytes, records and faults that came since the last call."""

Gathered = Mapping[int, Sequence[RangeEvidence] | None]
"""The evidence of each log segment, by its base offset; None for one that is to be walked."""

_MAX_OFFSET = 2**63 - 1
_MAX_GAPS = 10_000


class Audit:
    """The audit of one partition; a `tap` receives the records of everything that it walks itself."""

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
        """Report skipped offsets: loss where compaction is ruled out, a warning where it is possible."""
        if self._report.compaction is Compaction.YES:
            return
        certain = self._report.compaction is Compaction.NO
        severity = Severity.FAULT if certain else Severity.WARNING
        damaged = {first for first, _ in self._sequences.damaged}
        for path, position, first, following in self._gaps:
            if first in damaged:
                continue  # already reported as damage
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

    # -- other batch checks ----------------------------------------------------------------------

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

    # -- other files -----------------------------------------------------------------------------

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
    """Return the base offsets of a partition's log segments, in order."""
    return offsets_of(files.list(folder), LOG)


def _silent(_bytes: int, _records: int, _faults: int) -> None:
    """Ignore progress."""


def verify(
    where: str,
    *,
    log: Path,
    files: Files | None = None,
    deep: bool = True,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Report:
    """Audit a partition folder, a whole log folder, or a topic of the log at `log`; return the report.

    A `report` that is passed in is filled during the audit, so that an interrupted audit leaves its results there.
    """
    files = files if files is not None else Files()
    report = report if report is not None else Report()
    for target in find_partitions(where, log, report.general, files=files):
        partition = PartitionReport(target)
        report.partitions.append(partition)
        Audit(partition, files, deep, progress).run()
    return report


def size_of(where: str, *, log: Path, files: Files) -> int:
    """Return how many bytes of `.log` files an audit would read."""
    total = 0
    for target in find_partitions(where, log, Findings(), files=files):
        for name in files.list(target.folder) if files.exists(target.folder) else ():
            found = files.stat(target.folder / name) if name.endswith(".log") else None
            total += found.size if found is not None else 0
    return total
