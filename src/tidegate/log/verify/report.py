"""The report of an audit: what was looked at, what was found, how much that proves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tidegate.log.verify.findings import Findings
from tidegate.log.verify.folders import Compaction, PartitionTarget


@dataclass(slots=True)
class PartitionReport:
    """What one partition holds and what was found in it."""

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
        """Records whose producer sequence proves something: it exists, and compaction did not thin it out."""
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
        """The sentence that says how much a clean report proves."""
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
    """A percentage that never rounds something to nothing or almost all to all."""
    percent = 100 * part / whole
    if part in (0, whole) or 1 <= percent <= 99:
        return f"{percent:.0f} %"
    return "under 1 %" if percent < 1 else "over 99 %"
