"""The audit: what the log's own evidence says about any Kafka data folder. Reads only.

Owns the entry points; the pass over one partition is `verify_partition`'s, the checks live in `verify_scan`
(CRC, lengths, magic), `verify_producers` (sequences), `verify_indexes`, `verify_transactions`, and
`verify_findings` has the list of kinds.

Evidence and its limits: a CRC covers a batch from its attributes on, so a flip in the leader epoch shows only
against the `leader-epoch-checkpoint`, one in the base offset only against its neighbours (in a compacted
partition, where gaps are normal, one that points upwards may hide), unless a seal covers the file. Sequences
exist for idempotent producers only, and a lost last batch leaves no gap: the report says which share of the
records carried a sequence.

What compaction leaves behind is no fault: gaps between batches, fewer records than offsets, empty batches,
base timestamps that are delete horizons, sequences with holes.

Thread rule: one partition, one thread; different partitions may be audited at once.
"""

from __future__ import annotations

from pathlib import Path

from tidegate.files import Files
from tidegate.log.verify.findings import Findings
from tidegate.log.verify.folders import find_partitions
from tidegate.log.verify.partition import Audit, Progress
from tidegate.log.verify.report import PartitionReport, Report

__all__ = ["PartitionReport", "Progress", "Report", "size_of", "verify"]


def verify(
    where: str,
    *,
    log: Path,
    files: Files | None = None,
    deep: bool = True,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Report:
    """Audit a partition folder, a whole log folder, or a topic of the log at `log`.

    A `report` handed in is filled as the audit goes, so that an interrupted one is worth something, too.
    """
    files = files if files is not None else Files()
    report = report if report is not None else Report()
    for target in find_partitions(where, log, report.general, files=files):
        partition = PartitionReport(target)
        report.partitions.append(partition)
        Audit(partition, files, deep, progress).run()
    return report


def size_of(where: str, *, log: Path, files: Files) -> int:
    """How many bytes of `.log` files an audit would read."""
    total = 0
    for target in find_partitions(where, log, Findings(), files=files):
        for name in files.list(target.folder) if files.exists(target.folder) else ():
            found = files.stat(target.folder / name) if name.endswith(".log") else None
            total += found.size if found is not None else 0
    return total
