"""Data integrity validation: number and checksum producers' records; detect loss, change and duplicates.

The public names are imported lazily, on first access.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.integrity.certificates import check_certificate, parse_certificate
    from tidegate.integrity.columns import IntegrityColumns, read_columns, without_control
    from tidegate.integrity.compare import compare_topics
    from tidegate.integrity.control_records import Push, send_heartbeat, sorted_sender, stable_guid
    from tidegate.integrity.digests import TopicAt
    from tidegate.integrity.fault_injection import DamageKind, break_topic
    from tidegate.integrity.partition_audit import audit_topic
    from tidegate.integrity.replica import CheckpointCadence, Replica, Role
    from tidegate.integrity.report import AuditReport
    from tidegate.integrity.sender import ChainLimits, ChainState, Sender
    from tidegate.integrity.state import Manifest, PartitionState, Sent, restore_checkpoint, take_checkpoint
    from tidegate.integrity.summary import RangeSummary, extend, merge, summarise
    from tidegate.integrity.validator import Judged, OnError, PartitionValidator, ValidationRules
    from tidegate.integrity.verdicts import Finding, Tolerance, Verdict

_HOMES = {
    "certificates": ("check_certificate", "parse_certificate"),
    "columns": ("IntegrityColumns", "read_columns", "without_control"),
    "control_records": ("Push", "send_heartbeat", "sorted_sender", "stable_guid"),
    "compare": ("compare_topics",),
    "digests": ("TopicAt",),
    "fault_injection": ("DamageKind", "break_topic"),
    "partition_audit": ("audit_topic",),
    "replica": ("CheckpointCadence", "Replica", "Role"),
    "report": ("AuditReport",),
    "sender": ("ChainLimits", "ChainState", "Sender"),
    "state": ("Manifest", "PartitionState", "Sent", "restore_checkpoint", "take_checkpoint"),
    "summary": ("RangeSummary", "extend", "merge", "summarise"),
    "validator": ("Judged", "OnError", "PartitionValidator", "ValidationRules"),
    "verdicts": ("Finding", "Tolerance", "Verdict"),
}

__all__ = [
    "AuditReport",
    "ChainLimits",
    "ChainState",
    "CheckpointCadence",
    "DamageKind",
    "Finding",
    "IntegrityColumns",
    "Judged",
    "Manifest",
    "OnError",
    "PartitionState",
    "PartitionValidator",
    "Push",
    "RangeSummary",
    "Replica",
    "Role",
    "Sender",
    "Sent",
    "Tolerance",
    "TopicAt",
    "ValidationRules",
    "Verdict",
    "audit_topic",
    "break_topic",
    "check_certificate",
    "compare_topics",
    "extend",
    "merge",
    "parse_certificate",
    "read_columns",
    "restore_checkpoint",
    "send_heartbeat",
    "sorted_sender",
    "stable_guid",
    "summarise",
    "take_checkpoint",
    "without_control",
]


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'tidegate.integrity' has no attribute {name!r}")
    value = getattr(import_module(f"tidegate.integrity.{home}"), name)
    globals()[name] = value
    return value
