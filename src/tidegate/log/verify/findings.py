"""Kinds of audit findings with their severities, and a bounded collection of findings.

Only faults make a run fail, unless `--fail-on` names other kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from tidegate.errors import InvalidError

MAX_KEPT_PER_KIND: Final = 100

KINDS: Final = {
    "corrupt": "fault: bytes that are not a sound batch: CRC, length, magic, records that do not parse",
    "offset": "fault: offsets decrease, overlap or lie outside their log segment",
    "missing": "fault: a producer's sequence has a gap: records were lost before or after they were stored",
    "order": "fault: a producer's records are stored in another order than they were sent",
    "epoch": "fault: a batch of an older producer epoch after a newer one",
    "index": "fault: an index gives readers wrong positions",
    "snapshot": "fault: producer state that is damaged or contradicts the log",
    "seal": "fault: a sealed file changed afterwards",
    "unregistered": "fault: integrity metadata: a producer whose first records are missing",
    "after-end": "fault: integrity metadata: a record after the end of its producer's chain",
    "unsupported": "fault: integrity metadata that cannot be read: damaged, or of another release",
    "offset-gap": "fault or warning: offsets are skipped; a warning where compaction cannot be ruled out",
    "checkpoint": "warning: a checkpoint file that does not parse or contradicts the log",
    "leader-epoch": "warning: a batch's leader epoch is not the checkpoint's (its bytes are outside the CRC)",
    "tail": "warning or notice: the log ends in part of a batch, as after a crash; a notice where it is zeros",
    "suspect": "warning: a gap that compaction may explain, but before a record that it has not reached",
    "duplicate": "notice: records that were written twice, with the cause",
    "tolerated": "notice: integrity metadata: a gap that compaction explains; `--fail-on` can name it",
    "head": "notice: a producer's first records aged out before the log's first offset",
    "restart": "notice: a producer began at sequence 0 again within an epoch",
    "open-transaction": "notice: a transaction without an end",
}
"""Kind of finding → its severity and what it means."""

_ALIASES: Final = {
    "gap": ("missing", "offset-gap"),
    "crc": ("corrupt",),
    "sequence": ("missing", "order", "epoch"),
}


class Severity(Enum):
    """The severity of a finding; reports print the value."""

    FAULT = "fault"
    WARNING = "warning"
    NOTICE = "notice"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding: what, where (file, byte, offset, producer), and what to do about it."""

    kind: str
    severity: Severity
    path: Path
    position: int | None
    offset: int | None
    producer: str | None
    message: str
    remedy: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"severity": self.severity.value, "path": str(self.path)}


@dataclass(slots=True)
class Findings:
    """Findings in the order found; beyond a limit for each kind they are only counted, to bound memory."""

    kept: list[Finding] = field(default_factory=list)
    counts: Counter[tuple[str, Severity]] = field(default_factory=Counter)

    def add(
        self,
        kind: str,
        path: Path,
        message: str,
        remedy: str,
        *,
        severity: Severity = Severity.FAULT,
        position: int | None = None,
        offset: int | None = None,
        producer: str | None = None,
    ) -> None:
        self.put(Finding(kind, severity, path, position, offset, producer, message, remedy))

    def put(self, finding: Finding) -> None:
        self.counts[finding.kind, finding.severity] += 1
        if self.counts[finding.kind, finding.severity] <= MAX_KEPT_PER_KIND:
            self.kept.append(finding)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def faults(self) -> int:
        return sum(count for (_, severity), count in self.counts.items() if severity is Severity.FAULT)

    def failing(self, fail_on: frozenset[str] | None) -> int:
        """Return how many findings make the run fail: faults by default, else those of the named kinds."""
        if fail_on is None:
            return self.faults
        return sum(count for (kind, _), count in self.counts.items() if kind in fail_on)

    def has(self, kind: str) -> bool:
        return any(name == kind for name, _ in self.counts)

    def withdraw(self, *kinds: str) -> None:
        """Remove findings that later evidence explains."""
        self.kept = [finding for finding in self.kept if finding.kind not in kinds]
        self.counts = Counter({key: count for key, count in self.counts.items() if key[0] not in kinds})

    def merge(self, other: Findings) -> None:
        self.kept += other.kept
        self.counts.update(other.counts)


def parse_fail_on(words: Iterable[str]) -> frozenset[str] | None:
    """Parse `--fail-on` into kinds: names of the table above, `gap`, `crc`, `sequence`, `any`, `none`, `fault`."""
    chosen: set[str] = set()
    for word in words:
        for name in filter(None, (part.strip().lower() for part in word.split(","))):
            if name == "fault":
                return None
            if name == "any":
                chosen.update(KINDS)
            elif name in _ALIASES:
                chosen.update(_ALIASES[name])
            elif name in KINDS:
                chosen.add(name)
            elif name != "none":
                known = ", ".join((*KINDS, *_ALIASES, "any", "none", "fault"))
                raise InvalidError(f"--fail-on {name}: there are {known}")
    return frozenset(chosen)
