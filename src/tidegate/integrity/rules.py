"""What a receiver is told about a partition before it looks at records: the settings of both validators.

Owns `ValidationRules`; what they mean is said where they are used: `judge`, `tolerance`, `policy`.

Thread rule: values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from tidegate.errors import InvalidError
from tidegate.integrity.state import Phase
from tidegate.integrity.tolerance import Tolerance

DEFAULT_MOST_PRODUCERS: Final = 2_000_000


class OnFault(Enum):
    """What a fatal verdict does: the partition stops, or goes on with the record kept or set aside."""

    STOP = "stop"
    WARN = "warn"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True)
class ValidationRules:
    """How the records of one partition are judged.

    `during_push` and `otherwise` say what a fault does before a push has ended, and after it or where there is
    none. `head_may_be_gone`: the log no longer begins at its first record, so unknown producers may be met in
    the middle of a chain. `strict` makes a record without metadata a fault. `batch_only`: nothing but a push
    belongs here. `payloads=False` trusts the data records' own checksums and reads no payload.
    """

    during_push: OnFault = OnFault.STOP
    otherwise: OnFault = OnFault.WARN
    tolerance: Tolerance = field(default_factory=Tolerance)
    head_may_be_gone: bool = False
    strict: bool = False
    batch_only: bool = False
    payloads: bool = True
    max_producers: int = DEFAULT_MOST_PRODUCERS

    def __post_init__(self) -> None:
        if not 1 <= self.max_producers <= 2**29:
            raise InvalidError(f"max_producers={self.max_producers}: choose 1 to {2**29}")

    def action(self, phase: Phase) -> OnFault:
        return self.otherwise if phase.is_settled else self.during_push

    def forces(self, phase: Phase) -> bool:
        """Whether the state moves on after a fault."""
        return self.action(phase) is not OnFault.STOP

    def gone(self, phase: Phase) -> bool:
        """Whether an unknown producer may be met in the middle."""
        return phase.is_settled and (self.head_may_be_gone or phase is Phase.PUSHED)
