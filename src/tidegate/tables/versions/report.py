"""Why a version failed, in words: which record of which producer is missing, changed or late, and what to look at.

Owns turning a finding of the validator into a `Fault`. A gap is looked into: the records that are missing may stand
further back in the partition, and then they are late and not lost.

Thread rule: pure but for reading the log.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tidegate.errors import IntegrityError
from tidegate.integrity.columns import IntegrityColumns, read_columns
from tidegate.integrity.state import PartitionState
from tidegate.integrity.verdicts import Finding, Rule, Verdict
from tidegate.kernels.integrity import MANAGED
from tidegate.tables.versions.record import Fault, TableVersion

UNFINISHED: Final = "unfinished"
LATE: Final = "late"
UNLISTED: Final = "unlisted"
COMPACTED: Final = "compacted"


@dataclass(frozen=True, slots=True)
class PushReport:
    """What a push came to. `current` is the version that readers see now, 0 for none."""

    table: str
    version: TableVersion
    is_current: bool
    current: int
    log: str

    def to_dict(self) -> dict[str, Any]:
        """For programs: the version as it is recorded, and what readers see."""
        found: dict[str, Any] = {"table": self.table, "is_current": self.is_current, "current": self.current}
        found |= msgspec.to_builtins(self.version)
        if self.version.faults:
            found["look_closer"] = look_closer(self.version, self.version.faults, self.log)
        return found

    def __str__(self) -> str:
        version = self.version
        if version.faults:
            shown = f"version {self.current} is still shown" if self.current else "nothing is shown yet"
            told = [f"{version.name} failed and is not shown; {shown}."]
            told += [
                f"partition {fault.partition}: {fault.kind}: {fault.message}" for fault in version.faults
            ]
            return "\n".join([*told, "Look closer with:", *look_closer(version, version.faults, self.log)])
        state = "is shown now" if self.is_current else f"is ready; version {self.current or 'none'} is shown"
        return f"{version.name} {state}: {version.rows} rows in {version.partitions} partitions, all as they were sent"


class PushFailedError(IntegrityError):
    """A push whose version failed and is not shown; `report` says why."""

    def __init__(self, report: PushReport) -> None:
        fault = report.version.faults[0]
        super().__init__(
            str(report),
            topic=report.version.topic,
            partition=fault.partition,
            offset=fault.offset,
            producer=fault.producer or None,
            kind=fault.kind,
        )
        self.report = report


def fault_of(
    log: Any, version: TableVersion, partition: int, state: PartitionState, finding: Finding | None
) -> Fault:
    """What stopped a partition; without a finding, its end of push never came."""
    place = f"{version.topic}-{partition}"
    if finding is None:
        said = (
            f"{place} has no end of push up to offset {state.next_offset}: its last records are missing, or the push "
            "was not finished"
        )
        return Fault(partition, UNFINISHED, said, state.next_offset)
    kind, said = finding.verdict.label, str(finding)
    if finding.verdict is Verdict.MISSING and finding.rule is not Rule.M1 and finding.stamp is not None:
        gap, late_at = _gap(finding), None
        if gap is not None:
            late_at = _found_later(log, finding, *gap)
            first, last = gap
            which = f"sequence {first}" if first == last else f"sequences {first} to {last}"
            said = (
                f"{which} of chain {finding.stamp.chain} of producer {finding.producer} "
                f"{'is' if first == last else 'are'} missing in front of offset {finding.offset}; {said}"
            )
        if late_at is not None:
            kind = LATE
            said = f"came late, at offset {late_at}, out of its producer's order: {said}"
    elif finding.verdict is Verdict.CORRUPT:
        said = f"changed on the way: {said}"
    return Fault(partition, kind, said, finding.offset, finding.producer or "")


def lone_repeat(
    log: Any, topic: str, partition: int, repeats: IntegrityColumns, offsets: NDArray[np.int64]
) -> int | None:
    """The offset of a repeat whose first copy is not in the partition any more; None where every one is.

    Compaction keeps the last record of a key. Where that is a repeat, which nobody takes, the key would be lost
    unseen; and whether a later value went with the first copy, nobody can say.
    """
    wanted, place = np.unique(_identities(repeats), return_index=True)
    own = offsets[place]
    seen = own.copy()
    with log.reader(topic, [partition], stop={partition: int(own.max())}, control_records=True) as reader:
        for batch in reader:
            found = _identities(read_columns(batch.column("headers")))
            at = np.minimum(np.searchsorted(wanted, found), len(wanted) - 1)
            same = wanted[at] == found
            np.minimum.at(seen, at[same], batch.column("offset").to_numpy()[same])
    alone = own[seen == own]
    return int(alone.min()) if len(alone) else None


def _identities(columns: IntegrityColumns) -> NDArray[Any]:
    """What tells records of senders apart: producer, chain and sequence, as values that can be compared."""
    rows = np.zeros(len(columns), [(name, ">u8") for name in ("high", "low", "chain", "sequence")])
    rows["high"], rows["low"] = columns.guid_high, columns.guid_low
    rows["chain"], rows["sequence"] = columns.chain, columns.sequence
    return rows.view("S32")


def look_closer(version: TableVersion, faults: Sequence[Fault], log: str) -> list[str]:
    """The commands that show more of each fault."""
    where = shlex.quote(log)
    commands = [f"tidegate verify {version.topic} --log {where}"]
    for fault in faults:
        if fault.partition >= 0 and fault.offset >= 0:
            start = max(0, fault.offset - 2)
            commands.append(
                f"tidegate consume {version.topic} --log {where} -p {fault.partition} --offset {start} -n 5 "
                "--control-records --format jsonl"
            )
    return commands


def _gap(finding: Finding) -> tuple[int, int] | None:
    """The sequences that are missing, where they are all of the record's own chain."""
    stamp = finding.stamp
    if stamp is None:
        return None
    if finding.previous_chain == stamp.chain and finding.previous_sequence is not None:
        return finding.previous_sequence + 1, stamp.sequence - 1
    return (0, stamp.sequence - 1) if stamp.sequence else None


def _found_later(log: Any, finding: Finding, first: int, last: int) -> int | None:
    """The offset of the first missing record behind the gap, if it is there."""
    stamp = finding.stamp
    if stamp is None:
        return None
    high, low = np.frombuffer(stamp.guid, ">u8")
    start = {finding.partition: finding.offset}
    with log.reader(finding.topic, [finding.partition], start=start, control_records=True) as reader:
        end = reader.end_offsets()[finding.partition]
        while reader.positions()[finding.partition] < end:
            batch = reader.poll(1000)
            if batch is None:
                continue
            columns = read_columns(batch.column("headers"))
            wanted = (
                (columns.state == MANAGED)
                & (columns.guid_high == high)
                & (columns.guid_low == low)
                & (columns.chain == stamp.chain)
                & (columns.sequence >= first)
                & (columns.sequence <= last)
            )
            if wanted.any():
                return int(batch.column("offset")[int(np.flatnonzero(wanted)[0])].as_py())
    return None
