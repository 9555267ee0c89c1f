"""What a receiver is told about a partition before it looks at records: the settings of both validators.

Owns `ValidationRules` and `OnError`; what else they mean is said where they are used: `judge`, `tolerance`, `policy`.

Two kinds of faults are told apart. A *faulty record* (CORRUPT, AFTER_END, UNSUPPORTED) is not what its producer sent,
so it never goes on: it stops the partition, is dropped, or is set aside. A *gap* (MISSING, UNREGISTERED_PRODUCER)
is about records that are not there: it stops the partition or is counted, and the record that shows it goes on, unless
that record does not match its own checksum (Note.DAMAGED) and so is a faulty one, too.

Thread rule: values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

from tidegate.errors import InvalidError
from tidegate.integrity.state import Phase
from tidegate.integrity.tolerance import Tolerance
from tidegate.integrity.verdicts import FATAL, Verdict

DEFAULT_MOST_PRODUCERS: Final = 2_000_000
OLD_WORDS: Final = {"stop": "fail", "warn": "keep", "quarantine": "keep", "skip": "drop"}


class OnError(StrEnum):
    """What a fault does: the partition stops (FAIL), or goes on without the faulty record, which is only counted
    (DROP) or set aside as a dead letter, too (KEEP). After a gap there is no faulty record: DROP and KEEP count it."""

    FAIL = "fail"
    DROP = "drop"
    KEEP = "keep"

    @classmethod
    def of(cls, word: str) -> OnError:
        """The policy of this word; an old spelling is refused with the new one."""
        try:
            return cls(word)
        except ValueError:
            instead = f": say {OLD_WORDS[word]!r}" if word in OLD_WORDS else ""
            raise InvalidError(f"{word!r}{instead}; choose 'fail', 'drop' or 'keep'") from None


def require_new_names(
    call: str,
    given: Mapping[str, object],
    new: Mapping[str, str],
    words: Mapping[str, str] = OLD_WORDS,
) -> None:
    """Refuse keywords of a call that have another name now, and name it; `words` are the old words for its values."""
    for name, said in given.items():
        if name not in new:
            raise TypeError(f"{call.partition('(')[0]}() got an unexpected keyword argument {name!r}")
        word = words.get(said, said) if isinstance(said, str) else said
        raise InvalidError(f"{call}{name}={said!r}) has another name now: {call}{new[name]}={word!r})")


Policy: TypeAlias = OnError | Mapping[Verdict, OnError]
"""One answer to every fault, or one for each verdict; a verdict that is not named is KEEP."""


def policy_of(said: str | Mapping[str, str]) -> Policy:
    """A policy from words: `"keep"`, or `{"missing": "fail", "corrupt": "drop"}`."""
    if isinstance(said, str):
        return OnError.of(said)
    known = {verdict.label: verdict for verdict in sorted(FATAL)}
    for label in said:
        if label not in known:
            raise InvalidError(f"{label!r} is no kind of fault; choose from {', '.join(known)}")
    return {known[label]: OnError.of(word) for label, word in said.items()}


@dataclass(frozen=True, slots=True)
class ValidationRules:
    """How the records of one partition are judged.

    `during_push` and `otherwise` say what a fault does before a push has ended, and after it or where there is
    none. `head_may_be_gone`: the log no longer begins at its first record, so unknown producers may be met in
    the middle of a chain. `strict` makes a record without metadata a fault. `batch_only`: nothing but a push
    belongs here. `payloads=False` trusts the data records' own checksums and reads no payload.
    """

    during_push: Policy = OnError.FAIL
    otherwise: Policy = OnError.KEEP
    tolerance: Tolerance = field(default_factory=Tolerance)
    head_may_be_gone: bool = False
    strict: bool = False
    batch_only: bool = False
    payloads: bool = True
    max_producers: int = DEFAULT_MOST_PRODUCERS

    def __post_init__(self) -> None:
        if not 1 <= self.max_producers <= 2**29:
            raise InvalidError(f"max_producers={self.max_producers}: choose 1 to {2**29}")

    def action(self, verdict: Verdict, phase: Phase) -> OnError:
        """What this fault does; a record without metadata where all must have it counts as UNSUPPORTED."""
        policy = self.otherwise if phase.is_settled else self.during_push
        if isinstance(policy, OnError):
            return policy
        return policy.get(Verdict.UNSUPPORTED if verdict is Verdict.UNMANAGED else verdict, OnError.KEEP)

    def verdicts_with(self, action: OnError, phase: Phase) -> int:
        """The fatal verdicts with this policy, as a set of bits."""
        judged = (*FATAL, Verdict.UNMANAGED)
        return sum(1 << verdict for verdict in judged if self.action(verdict, phase) is action)
