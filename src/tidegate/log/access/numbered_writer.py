"""What the integrity room adds to a log's writer (`integrity=True`) and takes out of its reader's batches.

Imports point the other way, from `integrity` to `log`; for the user's sake these two calls go by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def numbered(writer: Any, integrity: bool | Mapping[str, Any], **ports: Any) -> Any:
    """A `Sender` around `writer`; a mapping holds the sender's own settings."""
    settings = {} if isinstance(integrity, bool) else dict(integrity)
    return import_module("tidegate.integrity.sender").Sender(writer, **{**ports, **settings})


def data_records(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The records of a batch without Tidegate's own: starts and ends of chains and pushes, heartbeats."""
    if not len(batch.column("headers").flatten()):
        return batch
    data: pa.RecordBatch = import_module("tidegate.integrity.columns").without_control(batch)
    return data
