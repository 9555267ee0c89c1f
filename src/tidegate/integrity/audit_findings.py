"""The metadata audit's faults among the findings of `verify`: one list, one exit code, one `--fail-on`.

Owns the names and the advice of verdicts there. Duplicates and gaps that compaction explains are notices, gaps that it
explains only perhaps are warnings.

Thread rule: pure but for the folder it lists.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tidegate.files import Files
from tidegate.integrity.audit_report import PartitionAudit
from tidegate.integrity.findings import Finding
from tidegate.integrity.verdicts import FATAL, Rule, Verdict
from tidegate.log.verify.findings import Findings, Severity

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
    """What to do about it. The end of a chain tells of the records before it, not of itself."""
    return CHAIN_REMEDY if finding.rule is Rule.C6 else REMEDY[finding.verdict]


def add_findings(audit: PartitionAudit, folder: Path, findings: Findings, *, files: Files) -> None:
    """Put what `audit` found of the partition in `folder` among `findings`; counts are complete."""
    if not audit.total.records:
        return
    names = [name for name in files.list(folder) if name.endswith(".log") and name[:-4].isdigit()]
    segments = sorted((int(name[:-4]), folder / name) for name in names)
    bases = [base for base, _ in segments]

    def path_of(offset: int) -> Path:
        place = bisect_right(bases, offset) - 1
        return segments[place][1] if place >= 0 else folder

    add_findings_at(audit, path_of, findings)


def add_findings_at(audit: PartitionAudit, path_of: Callable[[int], Path], findings: Findings) -> None:
    """The same where `path_of` an offset is known otherwise."""
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
