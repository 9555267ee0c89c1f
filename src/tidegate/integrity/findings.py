"""One fault, with all that helps to find its cause.

A `Finding` is a value with the facts; its text is made only when somebody reads it, because a flood of faults
must not cost more than counting them.

Thread rule: values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidegate.errors import IntegrityError
from tidegate.integrity.header import Stamp
from tidegate.integrity.verdicts import Rule, Verdict


@dataclass(frozen=True, slots=True)
class Finding:
    """A fatal verdict: where, whose, and what was known before. None where nothing was known."""

    topic: str
    partition: int
    verdict: Verdict
    rule: Rule
    offset: int
    log_time: int
    stamp: Stamp | None
    previous_chain: int | None = None
    previous_sequence: int | None = None
    previous_offset: int | None = None
    registered: bool | None = None
    detail: str = ""

    @classmethod
    def of(
        cls,
        topic: str,
        partition: int,
        verdict: Verdict,
        rule: Rule,
        *,
        offset: int,
        log_time: int,
        stamp: Stamp | None,
        before: Any,
        record: Any,
        computed_crc: int,
        shortfall: str,
    ) -> Finding:
        """From the rows of the kernel: `before` is the producer's state in front of the record, or None."""
        detail = shortfall
        if stamp is not None and computed_crc != stamp.crc:
            detail = f"its checksum is {computed_crc:08x}, its header says {stamp.crc:08x}"
        elif rule is Rule.U4:
            detail = (
                "the partition has as many producers as it may; a shorter max_age forgets silent ones earlier"
            )
        elif rule is Rule.C6 and before is not None:
            detail = _broken_chain(before, record)
        if before is None:
            return cls(topic, partition, verdict, rule, offset, log_time, stamp, detail=detail)
        return cls(
            topic,
            partition,
            verdict,
            rule,
            offset,
            log_time,
            stamp,
            previous_chain=int(before["chain"]),
            previous_sequence=int(before["sequence"]),
            previous_offset=int(before["offset"]),
            registered=bool(before["registered"]),
            detail=detail,
        )

    @property
    def producer(self) -> str | None:
        """The producer's GUID in hexadecimal digits."""
        return None if self.stamp is None else self.stamp.guid.hex()

    def __str__(self) -> str:
        where = f"{self.topic}-{self.partition} offset {self.offset}"
        parts = [f"{self.verdict.name} ({self.rule.name}) at {where}"]
        if self.stamp is not None:
            stamp = self.stamp
            parts.append(f"producer {stamp.guid.hex()} chain {stamp.chain} sequence {stamp.sequence}")
            parts.append(f"kind {stamp.kind}, producer time {stamp.timestamp}, log time {self.log_time}")
        if self.previous_offset is None:
            parts.append("nothing was known of this producer")
        else:
            parts.append(
                f"last good offset {self.previous_offset}, chain {self.previous_chain} sequence "
                f"{self.previous_sequence}, {'registered' if self.registered else 'not registered'}"
            )
        if self.detail:
            parts.append(self.detail)
        return "; ".join(parts)

    def error(self) -> IntegrityError:
        """As the exception that ends an ingestion."""
        return IntegrityError(
            str(self),
            topic=self.topic,
            partition=self.partition,
            offset=self.offset,
            producer=self.producer,
            kind=self.verdict.label,
        )


def _broken_chain(before: Any, record: Any) -> str:
    """What the end of a chain certifies and what came; equal contents mean that only headers were changed."""
    came, certified = int(before["checksum"]), int(record["certified_checksum"])
    counts = int(before["records"]), int(record["certified_records"])
    if (came, counts[0]) == (certified, counts[1]):
        return (
            f"keys and values of all {counts[0]} records are as certified, but their headers (numbers, producer's "
            "times) do not sum up to what the chain's end certifies"
        )
    return (
        f"the chain's records sum up to {came:016x} ({counts[0]} records), its end certifies {certified:016x} "
        f"({counts[1]} records)"
    )
