"""Panes: the partial states windows are made of, in a fold store.

    key = the record's key     ts = where the pane starts     seq = the first window that takes the records

`seq` is 0 for records all windows of the pane take. A record that came when some of its windows had closed is
folded under the start of the first that was open: a window reads only what lies under its own start or an earlier
one, so records that came too late for a window never change it, whenever and however often it is read.

Thread rule: values.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from tidegate.storage import Merge, StoreSpec
from tidegate.windows.aggregates.folds import Folds
from tidegate.windows.events import Int64s


class PaneRows(NamedTuple):
    """Panes with their merged states; rows of one key need not stand together."""

    keys: pa.BinaryArray
    ts: Int64s
    seq: Int64s
    states: list[pa.Array]


def pane_spec(name: str, folds: Folds, bucket_ms: int, segment_ms: int) -> StoreSpec:
    """The store of one operator's panes."""
    return StoreSpec(name, Merge.FOLD, aggregates=folds.stored, bucket_ms=bucket_ms, segment_ms=segment_ms)
