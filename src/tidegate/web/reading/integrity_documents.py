"""What is asked about integrity, and what is answered."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from tidegate.web.reading.copying import Copy
from tidegate.web.reading.numbers import Detail, Moment, Name, Offset, Share, metric

FIRST_LOOK_MS: Final = 150
ProducerRecords: TypeAlias = Annotated[int, metric("tidegate_audit_producer_records")]
ProducerFaults: TypeAlias = Annotated[int, metric("tidegate_audit_producer_faults")]
ProducerDuplicates: TypeAlias = Annotated[int, metric("tidegate_audit_producer_duplicates")]
OpenChains: TypeAlias = Annotated[int, metric("tidegate_audit_open_chains")]


class CellShown(msgspec.Struct, frozen=True):
    """What one producer has in one partition; `first_offset` is that of its first fault."""

    partition: Name
    records: ProducerRecords
    faults: ProducerFaults
    duplicates: ProducerDuplicates
    first_offset: Offset | None


class ProducerShown(msgspec.Struct, frozen=True):
    """One producer over all partitions."""

    producer: str
    records: ProducerRecords
    faults: ProducerFaults
    duplicates: ProducerDuplicates
    cells: list[CellShown]
    is_measured: bool = True
    """Whether its cells are among the metrics, where there is room for so many of a topic."""


class FaultShown(msgspec.Struct, frozen=True):
    """One record that is not as its producer said."""

    kind: str
    partition: Name
    offset: Offset
    producer: str
    message: str
    detail: str
    remedy: str
    is_fault: bool
    missing: Detail | None = None
    """How many records of its producer are not there; their numbers, first and last."""
    missing_first: Name | None = None
    missing_last: Name | None = None


class GapShown(msgspec.Struct, frozen=True):
    """Gaps that are no fault, and why."""

    partition: Name
    count: Annotated[int, metric("tidegate_audit_gaps")]
    first_offsets: list[Offset]
    reason: str


class DamageShown(msgspec.Struct, frozen=True):
    """A place that could not be read; null: nothing behind it was read."""

    partition: Name
    offset: Offset
    resumed_at: Offset | None


class IntegrityDocument(msgspec.Struct, frozen=True):
    """What an audit found, so far or in the end. `state` is running, done, cut or failed."""

    topic: str
    state: str
    sentence: str
    evidence: str
    began_ms: Moment
    took_ms: Annotated[int, metric("tidegate_audit_seconds")]
    records: Annotated[int, metric("tidegate_audit_records")]
    total: Annotated[int, metric("tidegate_audit_log_records")]
    records_with_metadata: Annotated[int, metric("tidegate_audit_metadata_records")]
    metadata_share: Share | None
    """The part of the records that carries metadata; null where none was read."""
    verdicts: dict[str, Annotated[int, metric("tidegate_audit_verdicts")]]
    partitions: list[Name]
    producers: list[ProducerShown]
    producers_total: Annotated[int, metric("tidegate_audit_producers")]
    faults: list[FaultShown]
    faults_total: Annotated[int, metric("tidegate_audit_faults")]
    open_chains: OpenChains
    """Producers' chains that have no end yet."""
    open_chains_of: dict[str, OpenChains]
    """The same by partition, where there are any."""
    damage: list[DamageShown]
    damaged_places: Annotated[int, metric("tidegate_audit_damaged_places")]
    gaps: list[GapShown]
    compacted_below: dict[str, Offset]
    """By partition, the offset below which compaction may have removed records, where it is known."""
    doubts: list[str]
    """Where loss would not show, partition by partition, and why."""
    notes: list[str]
    by_hand: Copy


class IntegrityQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`again` begins a new audit, `wait_ms` waits so long for its end."""

    again: bool = False
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=20_000)] = FIRST_LOOK_MS
