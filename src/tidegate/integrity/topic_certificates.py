"""The certificate of a topic: audited first, so that it says what was found, then digested.

Thread rule: one thread; a runner's workers are its own business.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidegate.integrity.audit_report import AuditReport
from tidegate.integrity.auditing import Runner, audit
from tidegate.integrity.broker_audit import audit_broker
from tidegate.integrity.certificates import make_certificate, range_members
from tidegate.integrity.reading_ranges import TopicAt
from tidegate.integrity.verdicts import FATAL
from tidegate.log.log import folder_path, is_kafka


def certify_topic(
    url: str,
    topic: str,
    *,
    now_ms: int,
    client: Mapping[str, str] | None = None,
    runner: Runner | None = None,
    base: str | None = None,
    key: bytes | None = None,
) -> dict[str, Any]:
    """Audit a topic and certify all of it that can be read now."""
    source = TopicAt(url, topic, client or {})
    if is_kafka(url):
        full = audit_broker(url, topic, client=client, now_ms=now_ms, runner=runner)
    else:
        full = audit(topic, log=Path(folder_path(url)), now_ms=now_ms, runner=runner)
    ranges = range_members(source, source.extents(), runner=runner)
    native = [
        {
            "kind": kind,
            "partition": partition.target.place.partition,
            "count": sum(count for (name, _), count in partition.findings.counts.items() if name == kind),
        }
        for partition in full.native.partitions
        for kind in sorted({name for name, _ in partition.findings.counts})
    ]
    metadata = full.metadata or AuditReport()
    subject = {"kind": "topic", "topic": topic, "evidence": f"{full.native.evidence}; {metadata.evidence}"}
    return make_certificate(
        subject,
        ranges,
        made_ms=now_ms,
        tolerated=tolerated_of(metadata),
        faults=[*native, *faults_of(metadata)],
        base=base,
        key=key,
    )


def tolerated_of(metadata: AuditReport) -> list[dict[str, Any]]:
    """Gaps that are no fault, and why."""
    return [
        {"topic": each.topic, "partition": each.partition, **gaps.as_dict()}
        for each in metadata.partitions
        for gaps in each.expected
    ]


def faults_of(metadata: AuditReport) -> list[dict[str, Any]]:
    """Verdicts that are faults, by partition and producer."""
    return [
        {
            "kind": verdict.label,
            "partition": each.partition,
            "producer": name,
            "count": tally.verdicts[verdict],
            "first_offsets": tally.first.get(verdict, []),
        }
        for each in metadata.partitions
        for name, tally in each.producers.items()
        for verdict in sorted(FATAL)
        if tally.verdicts[verdict]
    ]
