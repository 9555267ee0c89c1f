"""Data integrity validation: producers' records numbered and check-summed; loss, change and repeat seen.

The public names, each loaded when first touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.integrity.audit import audit_topic
    from tidegate.integrity.audit_report import AuditReport
    from tidegate.integrity.chains import ChainLimits, ChainState
    from tidegate.integrity.checkpoint import restore_checkpoint, take_checkpoint
    from tidegate.integrity.columns import IntegrityColumns, read_columns, without_control
    from tidegate.integrity.findings import Finding
    from tidegate.integrity.lifecycle import Push, send_heartbeat, sorted_sender, stable_guid
    from tidegate.integrity.manifest import Manifest, Sent
    from tidegate.integrity.roles import CheckpointCadence, Replica, Role
    from tidegate.integrity.rules import OnError, ValidationRules
    from tidegate.integrity.sender import Sender
    from tidegate.integrity.state import PartitionState
    from tidegate.integrity.summary import RangeSummary, extend, merge, summarise
    from tidegate.integrity.tolerance import Tolerance
    from tidegate.integrity.validator import Judged, PartitionValidator
    from tidegate.integrity.verdicts import Verdict

_HOMES = {
    "AuditReport": "audit_report",
    "ChainLimits": "chains",
    "ChainState": "chains",
    "CheckpointCadence": "roles",
    "Finding": "findings",
    "IntegrityColumns": "columns",
    "Judged": "validator",
    "Manifest": "manifest",
    "OnError": "rules",
    "PartitionState": "state",
    "PartitionValidator": "validator",
    "Push": "lifecycle",
    "RangeSummary": "summary",
    "Replica": "roles",
    "Role": "roles",
    "Sender": "sender",
    "Sent": "manifest",
    "Tolerance": "tolerance",
    "ValidationRules": "rules",
    "Verdict": "verdicts",
    "audit_topic": "audit",
    "extend": "summary",
    "merge": "summary",
    "read_columns": "columns",
    "restore_checkpoint": "checkpoint",
    "send_heartbeat": "lifecycle",
    "sorted_sender": "lifecycle",
    "stable_guid": "lifecycle",
    "summarise": "summary",
    "take_checkpoint": "checkpoint",
    "without_control": "columns",
}

__all__ = [
    "AuditReport",
    "ChainLimits",
    "ChainState",
    "CheckpointCadence",
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
    "ValidationRules",
    "Verdict",
    "audit_topic",
    "extend",
    "merge",
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
