"""The worker's storage: rows and state that outgrow memory, survive death and slow their source when full.

This is the facade: what operators, pipelines and tables may use. Names are loaded when first asked for, because
what stands behind them brings Arrow and compiled kernels along.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.storage.backends.opening import open_backend
    from tidegate.storage.backends.signed import resign
    from tidegate.storage.backends.state_keys import state_key_id, state_keys
    from tidegate.storage.config import StorageConfig, TenantLimits
    from tidegate.storage.context import RuntimeContext
    from tidegate.storage.index.bucket_index import BucketIndex
    from tidegate.storage.index.entries import AppendBatch, Pruned, Tenant
    from tidegate.storage.index.state import BucketIndexState, ExtraState, PlainState
    from tidegate.storage.memory.scratch import ScratchLimiter
    from tidegate.storage.reading.loaded import LoadedRanges
    from tidegate.storage.reading.plan import All, RangeRequest, RangesLoadPlan, Time
    from tidegate.storage.reading.reader import StorageReader
    from tidegate.storage.reading.view import SortedRangeView
    from tidegate.storage.runs.aggregates import Count, Custom, First, Last, Max, Mean, Min, Sum
    from tidegate.storage.runs.sorted_rows import SortedRows
    from tidegate.storage.runtime import WorkerStorageRuntime
    from tidegate.storage.spec import Cursor, EarlierShape, Merge, StoreSpec
    from tidegate.storage.state.handle import StateHandle
    from tidegate.storage.state.named import PROGRESS
    from tidegate.storage.state.ports import BytesCodec, StateCodec
    from tidegate.storage.stats import StorageStats
    from tidegate.storage.wiring import Leaks
    from tidegate.storage.writer import StorageWriter

_HOME = {
    "backends.opening": ("open_backend",),
    "backends.signed": ("resign",),
    "backends.state_keys": ("state_key_id", "state_keys"),
    "config": ("StorageConfig", "TenantLimits"),
    "context": ("RuntimeContext",),
    "index.bucket_index": ("BucketIndex",),
    "index.entries": ("AppendBatch", "Pruned", "Tenant"),
    "index.state": ("BucketIndexState", "ExtraState", "PlainState"),
    "memory.scratch": ("ScratchLimiter",),
    "reading.loaded": ("LoadedRanges",),
    "reading.plan": ("All", "RangeRequest", "RangesLoadPlan", "Time"),
    "reading.reader": ("StorageReader",),
    "reading.view": ("SortedRangeView",),
    "runs.aggregates": ("Count", "Custom", "First", "Last", "Max", "Mean", "Min", "Sum"),
    "runs.sorted_rows": ("SortedRows",),
    "runtime": ("WorkerStorageRuntime",),
    "spec": ("Cursor", "EarlierShape", "Merge", "StoreSpec"),
    "state.handle": ("StateHandle",),
    "state.named": ("PROGRESS",),
    "state.ports": ("BytesCodec", "StateCodec"),
    "stats": ("StorageStats",),
    "wiring": ("Leaks",),
    "writer": ("StorageWriter",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "PROGRESS",
    "All",
    "AppendBatch",
    "BucketIndex",
    "BucketIndexState",
    "BytesCodec",
    "Count",
    "Cursor",
    "Custom",
    "EarlierShape",
    "ExtraState",
    "First",
    "Last",
    "Leaks",
    "LoadedRanges",
    "Max",
    "Mean",
    "Merge",
    "Min",
    "PlainState",
    "Pruned",
    "RangeRequest",
    "RangesLoadPlan",
    "RuntimeContext",
    "ScratchLimiter",
    "SortedRangeView",
    "SortedRows",
    "StateCodec",
    "StateHandle",
    "StorageConfig",
    "StorageReader",
    "StorageStats",
    "StorageWriter",
    "StoreSpec",
    "Sum",
    "Tenant",
    "TenantLimits",
    "Time",
    "WorkerStorageRuntime",
    "open_backend",
    "resign",
    "state_key_id",
    "state_keys",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
