"""The worker's storage: durable rows and state larger than memory, with backpressure on the source when full.

This is the public interface for operators, pipelines and tables. Names are imported lazily, because their modules
load Arrow and compiled kernels.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidegate.storage.backends.memory import MemoryBackend
    from tidegate.storage.backends.opening import open_backend
    from tidegate.storage.backends.signed import resign, state_key_id, state_keys
    from tidegate.storage.config import StorageConfig, TenantLimits
    from tidegate.storage.index import (
        AppendBatch,
        BucketIndex,
        BucketIndexState,
        PlainState,
        ProgressState,
        Pruned,
        Tenant,
    )
    from tidegate.storage.metrics import StorageStats
    from tidegate.storage.ranges import LoadedRanges, SortedRangeView
    from tidegate.storage.reader import All, RangeRequest, RangesLoadPlan, StorageReader, Time
    from tidegate.storage.runs.aggregates import Count, Custom, First, Last, Max, Mean, Min, Sum
    from tidegate.storage.runs.build import SortedRows
    from tidegate.storage.runtime import Leaks, RuntimeContext, WorkerStorageRuntime
    from tidegate.storage.scan import BATCH_ROWS, RangeScan
    from tidegate.storage.scratch import ScratchLimiter
    from tidegate.storage.spec import Cursor, EarlierShape, Merge, StoreSpec
    from tidegate.storage.state import PROGRESS, BytesCodec, StateCodec, StateHandle
    from tidegate.storage.writer import MergedRows, StorageWriter, TouchedRows, touched_rows

_HOME = {
    "backends.memory": ("MemoryBackend",),
    "backends.opening": ("open_backend",),
    "backends.signed": ("resign", "state_key_id", "state_keys"),
    "config": ("StorageConfig", "TenantLimits"),
    "runtime": ("RuntimeContext", "WorkerStorageRuntime", "Leaks"),
    "index": (
        "BucketIndex",
        "AppendBatch",
        "Pruned",
        "Tenant",
        "BucketIndexState",
        "PlainState",
        "ProgressState",
    ),
    "scratch": ("ScratchLimiter",),
    "ranges": ("LoadedRanges", "SortedRangeView"),
    "reader": ("All", "RangeRequest", "RangesLoadPlan", "Time", "StorageReader"),
    "runs.aggregates": ("Count", "Custom", "First", "Last", "Max", "Mean", "Min", "Sum"),
    "runs.build": ("SortedRows",),
    "scan": ("BATCH_ROWS", "RangeScan"),
    "spec": ("Cursor", "EarlierShape", "Merge", "StoreSpec"),
    "state": ("PROGRESS", "BytesCodec", "StateCodec", "StateHandle"),
    "metrics": ("StorageStats",),
    "writer": ("MergedRows", "StorageWriter", "TouchedRows", "touched_rows"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "BATCH_ROWS",
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
    "First",
    "Last",
    "Leaks",
    "LoadedRanges",
    "Max",
    "Mean",
    "MemoryBackend",
    "Merge",
    "MergedRows",
    "Min",
    "PlainState",
    "ProgressState",
    "Pruned",
    "RangeRequest",
    "RangeScan",
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
    "TouchedRows",
    "WorkerStorageRuntime",
    "open_backend",
    "resign",
    "state_key_id",
    "state_keys",
    "touched_rows",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
