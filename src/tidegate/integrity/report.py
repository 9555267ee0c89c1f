"""The report of a metadata audit: counts by partition and producer, and the findings for `verify`.

Counts are complete. Offsets, findings and producers are limited, which bounds memory for any damaged log; producers
beyond `MOST_PRODUCERS` are counted together as `others`. Owns the names and the remedies of verdicts among the findings
of `verify`: duplicates and gaps explained by compaction are notices, gaps that may be explained by it are warnings.

R1  a report does not depend on batch boundaries: producers are in the order of their first records, and every limit
    keeps the first entries. Counting a sound range from its summary (`take_sound`) gives the same report.

Thread rule: one thread per `PartitionAudit`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.integrity.columns import IntegrityColumns
from tidegate.integrity.summary import RangeSummary
from tidegate.integrity.validator import Judged
from tidegate.integrity.verdicts import FATAL, Finding, Note, Rule, Verdict
from tidegate.kernels.integrity import MANAGED, UNMANAGED
from tidegate.log.verify.findings import Findings, Severity

# -- counts ----------------------------------------------------------------------------------------

MOST_PRODUCERS: Final = 10_000
MOST_OFFSETS: Final = 10
MOST_TOLD: Final = 100
MOST_DOUBTS: Final = 3
OTHERS: Final = "others"
_VERDICTS: Final = len(Verdict)
_HEAD_GONE: Final = (Rule.A3, Rule.A5)


@dataclass(slots=True)
class Tally:
    """The number of records per verdict, and the first offsets of verdicts other than OK."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    first: dict[Verdict, list[int]] = field(default_factory=dict)

    def add(self, verdict: Verdict, count: int) -> None:
        if count:
            self.verdicts[verdict] += count

    def note(self, verdict: Verdict, offsets: Iterable[int]) -> None:
        """Offsets in ascending order, after all noted before."""
        kept = self.first.setdefault(verdict, [])
        kept += list(offsets)[: MOST_OFFSETS - len(kept)]

    @property
    def records(self) -> int:
        return self.verdicts.total()

    @property
    def faults(self) -> int:
        return sum(self.verdicts[verdict] for verdict in FATAL)

    def as_dict(self) -> dict[str, Any]:
        return {
            "records": self.records,
            "faults": self.faults,
            "verdicts": {
                verdict.label: self.verdicts[verdict] for verdict in Verdict if self.verdicts[verdict]
            },
            "first_offsets": {verdict.label: offsets for verdict, offsets in sorted(self.first.items())},
        }


@dataclass(slots=True)
class Expected:
    """Tolerated gaps, and the reason."""

    reason: str
    count: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, offsets: NDArray[np.int64]) -> None:
        self.count += len(offsets)
        self.first += offsets[: MOST_OFFSETS - len(self.first)].tolist()

    def as_dict(self) -> dict[str, Any]:
        return {"reason": self.reason, "count": self.count, "first_offsets": self.first}


@dataclass(slots=True)
class PartitionAudit:
    """The audit of one partition: totals, and counts per producer."""

    topic: str
    partition: int
    compaction: str = "the topic is not compacted"
    """Why gaps are, or are not, tolerated."""
    doubt: str = ""
    """Where loss would not show, and why; empty where every gap is a fault."""
    compacted_below: int = -1
    """The offset below which compaction may have removed records; -1: not known, or the topic is not compacted."""
    log_start: int = 0
    total: Tally = field(default_factory=Tally)
    managed: int = 0
    """Records that carry metadata."""
    producers: dict[str, Tally] = field(default_factory=dict)
    told: list[Finding] = field(default_factory=list)
    skipped: list[tuple[int, int | None]] = field(default_factory=list)
    """Damage that was stepped over: the offset, and the one reading went on at (None: it ended there)."""
    open_chains: int = 0
    """Producers whose last chain has no end: what followed it, if anything, left no trace."""
    unread: str | None = None
    """Why nothing was read, None when it was."""
    compacted: Expected = field(default_factory=lambda: Expected("compaction"))
    suspect: Expected = field(
        default_factory=lambda: Expected("compaction, though the record behind is young")
    )
    head: Expected = field(default_factory=lambda: Expected("the producer's first records aged out"))

    def take(self, judged: Judged, offsets: NDArray[np.int64]) -> None:
        """Count a batch; `offsets` are its records'."""
        verdicts, columns = judged.verdicts, judged.columns
        offsets = offsets[: len(verdicts)]
        for verdict, count in judged.counts.items():
            self.total.add(verdict, count)
        self.managed += int((columns.state != UNMANAGED).sum())
        notable = judged.is_fatal | (verdicts == Verdict.DUPLICATE)
        rows = np.flatnonzero(notable)
        for number, chosen in _groups(verdicts[rows].astype(np.int64)):
            self.total.note(Verdict(number), offsets[rows[chosen[:MOST_OFFSETS]]].tolist())
        self._take_producers(verdicts, columns, rows, offsets)
        suspect = (judged.notes & Note.TOLERATED_SUSPECT) != 0
        tolerated = (judged.notes & Note.TOLERATED) != 0
        self.compacted.add(offsets[tolerated & ~suspect])
        self.suspect.add(offsets[suspect])
        self.head.add(offsets[np.isin(judged.rules, _HEAD_GONE) & ~tolerated])
        self._tell(judged)

    def take_sound(self, summary: RangeSummary) -> None:
        """Count a range whose records are all sound, as `partition_audit.advance` decided."""
        beats = sum(count for _, count in summary.heartbeats.values())
        self.total.add(Verdict.UNMANAGED, summary.unmanaged)
        self.total.add(Verdict.HEARTBEAT, beats)
        self.total.add(Verdict.OK, summary.records - summary.unmanaged - beats)
        self.managed += summary.records - summary.unmanaged
        arrivals = [(runs[0].first_offset, guid) for guid, runs in summary.runs.items()]
        arrivals += [(first, guid) for guid, (first, _) in summary.heartbeats.items()]
        for _, guid in sorted(arrivals):
            self._tally(guid.hex())
        for guid, runs in summary.runs.items():
            sound = sum(run.records + (run.end is not None) for run in runs)
            self._tally(guid.hex()).add(Verdict.OK, sound)
        for guid, (_, count) in summary.heartbeats.items():
            self._tally(guid.hex()).add(Verdict.HEARTBEAT, count)

    @property
    def expected(self) -> list[Expected]:
        return [gaps for gaps in (self.compacted, self.suspect, self.head) if gaps.count]

    def as_dict(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "partition": self.partition,
            "log_start": self.log_start,
            **self.total.as_dict(),
            "records_with_metadata": self.managed,
            "open_chains": self.open_chains,
            "compaction": self.compaction,
            "doubt": self.doubt,
            "compacted_below": self.compacted_below,
            "expected_gaps": [gaps.as_dict() for gaps in self.expected],
            "skipped_damage": [{"offset": offset, "resumed_at": resumed} for offset, resumed in self.skipped],
            "unread": self.unread,
            "producers": [{"producer": name} | tally.as_dict() for name, tally in self.producers.items()],
        }

    # -- inside ----------------------------------------------------------------------------------

    def _take_producers(
        self,
        verdicts: NDArray[np.uint8],
        columns: IntegrityColumns,
        notable: NDArray[np.int64],
        offsets: NDArray[np.int64],
    ) -> None:
        managed = np.flatnonzero(columns.state == MANAGED)
        if not len(managed):
            return
        names, numbers = _producers(columns, managed)
        tallies = [self._tally(name) for name in names]
        counted = np.bincount(numbers * _VERDICTS + verdicts[managed], minlength=len(names) * _VERDICTS)
        for cell in np.flatnonzero(counted).tolist():
            tallies[cell // _VERDICTS].add(Verdict(cell % _VERDICTS), int(counted[cell]))
        known = np.isin(notable, managed)
        rows = notable[known]
        keys = numbers[np.searchsorted(managed, rows)] * _VERDICTS + verdicts[rows]
        for cell, chosen in _groups(keys):
            found = offsets[rows[chosen[:MOST_OFFSETS]]].tolist()
            tallies[cell // _VERDICTS].note(Verdict(cell % _VERDICTS), found)

    def _tally(self, name: str) -> Tally:
        if name not in self.producers and len(self.producers) >= MOST_PRODUCERS:
            name = OTHERS
        return self.producers.setdefault(name, Tally())

    def _tell(self, judged: Judged) -> None:
        if not len(judged.findings):
            return
        room = dict.fromkeys(FATAL, MOST_TOLD)
        for finding in self.told:
            room[finding.verdict] -= 1
        here = {Verdict(int(number)) for number in np.unique(judged.verdicts)} & FATAL
        if not any(room[verdict] > 0 for verdict in here):
            return
        for finding in judged.findings:
            if room.get(finding.verdict, 0) > 0:
                room[finding.verdict] -= 1
                self.told.append(finding)


@dataclass(slots=True)
class AuditReport:
    """The metadata audit of several partitions."""

    partitions: list[PartitionAudit] = field(default_factory=list)

    @property
    def records(self) -> int:
        return sum(partition.total.records for partition in self.partitions)

    @property
    def managed(self) -> int:
        return sum(partition.managed for partition in self.partitions)

    @property
    def faults(self) -> int:
        return sum(partition.total.faults for partition in self.partitions)

    @property
    def doubts(self) -> list[str]:
        """Where loss would not be detected although metadata was checked, without repeats."""
        found = [
            each.doubt
            if len(self.partitions) == 1 or "offset" not in each.doubt
            else f"{each.topic}-{each.partition}: {each.doubt}"
            for each in self.partitions
            if each.managed and each.doubt
        ]
        return list(dict.fromkeys(found))

    @property
    def evidence(self) -> str:
        """A sentence that states how much a clean report proves."""
        unread = [f"{each.topic}-{each.partition}" for each in self.partitions if each.unread is not None]
        tail = f"; not read: {', '.join(unread)}" if unread else ""
        skipped = sum(len(partition.skipped) for partition in self.partitions)
        if skipped:
            tail += f"; {skipped} damaged place{'s' * (skipped != 1)} could not be read"
        if unread and not self.records:
            return f"integrity metadata was not read: {', '.join(unread)}"
        if not self.managed:
            return f"no record carries integrity metadata{tail}"
        tail = "".join(f"; {doubt}" for doubt in self.doubts[:MOST_DOUBTS]) + tail
        open_chains = sum(partition.open_chains for partition in self.partitions)
        if open_chains:
            has = "chain has" if open_chains == 1 else "chains have"
            tail = f"; {open_chains} {has} no end yet, so loss behind would not show{tail}"
        return f"{percent(self.managed, self.records)} of records carry integrity metadata; all checked{tail}"

    def _repr_html_(self) -> str:
        from tidegate.notebook import facts_html, grid_html

        seen = [
            verdict for verdict in Verdict if any(each.total.verdicts[verdict] for each in self.partitions)
        ]
        rows = [
            [f"{each.topic}-{each.partition}", each.total.records]
            + [each.total.verdicts[verdict] for verdict in seen]
            + [min((at for offsets in each.total.first.values() for at in offsets[:1]), default=None)]
            for each in self.partitions
        ]
        columns = ["partition", "records", *(verdict.label for verdict in seen), "first not ok"]
        facts = {"records": f"{self.records:,}", "faults": self.faults, "evidence": self.evidence}
        return facts_html("integrity audit", facts) + grid_html(
            columns, rows, total=len(rows), noun="partitions"
        )

    def as_dict(self) -> dict[str, Any]:
        counts: Counter[Verdict] = Counter()
        for partition in self.partitions:
            counts.update(partition.total.verdicts)
        return {
            "records": self.records,
            "records_with_metadata": self.managed,
            "share": self.managed / self.records if self.records else None,
            "faults": self.faults,
            "verdicts": {verdict.label: counts[verdict] for verdict in Verdict if counts[verdict]},
            "evidence": self.evidence,
            "partitions": [partition.as_dict() for partition in self.partitions],
        }


def _producers(columns: IntegrityColumns, rows: NDArray[np.int64]) -> tuple[list[str], NDArray[np.int64]]:
    """The producers of some records in the order they come, and the number of each record's."""
    high, low = columns.guid_high[rows], columns.guid_low[rows]
    starts = np.flatnonzero(np.concatenate(([True], (high[1:] != high[:-1]) | (low[1:] != low[:-1]))))
    guids = np.stack((high[starts], low[starts]), axis=1).astype(">u8")
    found = pa.Array.from_buffers(pa.binary(16), len(starts), [None, pa.py_buffer(guids)]).dictionary_encode()
    numbers = found.indices.to_numpy().astype(np.int64)
    names = [guid.hex() for guid in found.dictionary.to_pylist()]
    return names, np.repeat(numbers, np.diff(np.append(starts, len(rows))))


def _groups(keys: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
    """Each key with its indices, ascending."""
    if not len(keys):
        return []
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    return [(int(keys[places[0]]), places) for places in np.split(order, cuts)]


def percent(part: int, whole: int) -> str:
    """Format a percentage without rounding it to 0 % or 100 %."""
    percent = 100 * part / whole
    if part == whole or 1 <= percent <= 99:
        return f"{percent:.0f} %"
    return "under 1 %" if percent < 1 else "over 99 %"


# -- findings --------------------------------------------------------------------------------------

BY_METADATA: Final = "by its integrity metadata: "
"""How the message of such a finding begins; all others are native evidence's."""
KIND_OF: Final = {
    Verdict.DUPLICATE: "duplicate",
    Verdict.MISSING: "missing",
    Verdict.CORRUPT: "corrupt",
    Verdict.UNREGISTERED_PRODUCER: "unregistered",
    Verdict.AFTER_END: "after-end",
    Verdict.UNSUPPORTED: "unsupported",
}
REMEDY: Final = {
    Verdict.DUPLICATE: "nothing: a receiver that validates drops it",
    Verdict.MISSING: "records between the last good offset and this one were lost; send them again from the source",
    Verdict.CORRUPT: "the record is not what its producer sent; take it from the source or from a replica",
    Verdict.UNREGISTERED_PRODUCER: "the start of this producer's records was lost; send them again from the source",
    Verdict.AFTER_END: "a record stands behind the end of its chain: two senders share a GUID, or one was replayed",
    Verdict.UNSUPPORTED: "metadata of a newer release, or damaged; read it with that release, or send the record again",
}
TOLERATED: Final = "tolerated"
SUSPECT: Final = "suspect"
GAP_REMEDY: Final = {
    TOLERATED: "nothing, if the records were superseded; compare with the source where that matters",
    SUSPECT: "compare with the source: loss could hide here",
}
CHAIN_REMEDY: Final = (
    "a record of the chain that ends here, or its header, was changed on the way; take the chain from the source or"
    " from a replica"
)


def remedy_of(finding: Finding) -> str:
    """The remedy. A fault at the end of a chain is about the records before it."""
    return CHAIN_REMEDY if finding.rule is Rule.C6 else REMEDY[finding.verdict]


def segments_of(folder: Path, names: Iterable[str]) -> Callable[[int], Path]:
    """A function from an offset to the log segment that has it, of the files in `folder`, or to the folder."""
    logs = [name for name in names if name.endswith(".log") and name[:-4].isdigit()]
    segments = sorted((int(name[:-4]), folder / name) for name in logs)
    bases = [base for base, _ in segments]

    def path_of(offset: int) -> Path:
        place = bisect_right(bases, offset) - 1
        return segments[place][1] if place >= 0 else folder

    return path_of


def add_findings(audit: PartitionAudit, path_of: Callable[[int], Path], findings: Findings) -> None:
    """Add the faults of a partition to `findings`; counts are complete. `path_of` gives the file of an offset."""
    told = dict.fromkeys(FATAL, 0)
    for finding in audit.told:
        told[finding.verdict] += 1
        findings.add(
            KIND_OF[finding.verdict],
            path_of(finding.offset),
            f"{BY_METADATA}{finding}",
            remedy_of(finding),
            offset=finding.offset,
            producer=finding.producer,
        )
    for verdict, count in told.items():
        findings.counts[KIND_OF[verdict], Severity.FAULT] += audit.total.verdicts[verdict] - count
    repeats = audit.total.first.get(Verdict.DUPLICATE, [])
    for offset in repeats:
        findings.add(
            KIND_OF[Verdict.DUPLICATE],
            path_of(offset),
            f"{BY_METADATA}a producer's record that stands here already",
            REMEDY[Verdict.DUPLICATE],
            severity=Severity.NOTICE,
            offset=offset,
        )
    findings.counts[KIND_OF[Verdict.DUPLICATE], Severity.NOTICE] += audit.total.verdicts[
        Verdict.DUPLICATE
    ] - len(repeats)
    for kind, severity, gaps in (
        (TOLERATED, Severity.NOTICE, audit.compacted),
        (SUSPECT, Severity.WARNING, audit.suspect),
    ):
        for offset in gaps.first:
            findings.add(
                kind,
                path_of(offset),
                f"{BY_METADATA}a gap in front of this record, tolerated: {gaps.reason}",
                GAP_REMEDY[kind],
                severity=severity,
                offset=offset,
            )
        findings.counts[kind, severity] += gaps.count - len(gaps.first)
    findings.counts = +findings.counts
