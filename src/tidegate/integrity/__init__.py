"""Data integrity validation: number and checksum producers' records; detect loss, change and duplicates.

The public names are imported lazily, on first access.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.integrity.certificates import check_certificate, parse_certificate
    from tidegate.integrity.columns import IntegrityColumns, read_columns, without_control
    from tidegate.integrity.compare import compare
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
    "AuditReport": "report",
    "ChainLimits": "sender",
    "ChainState": "sender",
    "CheckpointCadence": "replica",
    "DamageKind": "fault_injection",
    "Finding": "verdicts",
    "IntegrityColumns": "columns",
    "Judged": "validator",
    "Manifest": "state",
    "OnError": "validator",
    "PartitionState": "state",
    "PartitionValidator": "validator",
    "Push": "control_records",
    "RangeSummary": "summary",
    "Replica": "replica",
    "Role": "replica",
    "Sender": "sender",
    "Sent": "state",
    "Tolerance": "verdicts",
    "TopicAt": "digests",
    "ValidationRules": "validator",
    "Verdict": "verdicts",
    "audit_topic": "partition_audit",
    "break_topic": "fault_injection",
    "check_certificate": "certificates",
    "compare": "compare",
    "extend": "summary",
    "merge": "summary",
    "parse_certificate": "certificates",
    "read_columns": "columns",
    "restore_checkpoint": "state",
    "send_heartbeat": "control_records",
    "sorted_sender": "control_records",
    "stable_guid": "control_records",
    "summarise": "summary",
    "take_checkpoint": "state",
    "without_control": "columns",
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
    "compare",
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
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidegate.integrity' has no attribute {name!r}")
    value = getattr(import_module(f"tidegate.integrity.{home}"), name)
    globals()[name] = value
    return value
