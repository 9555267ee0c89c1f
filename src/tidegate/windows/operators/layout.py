"""The bucket and time segment widths of an operator's store.

A store keeps the widths it was created with. If a definition changes, for example to a longer grace or retention,
the operator continues with the existing widths: it is given the earlier layout. Aggregates may be appended: earlier
states then have the state of zero records for them (`grown`).

Thread rule: values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage import EarlierShape, Merge, StoreSpec
from tidegate.windows.aggregates.folds import Folds
from tidegate.windows.events import no_events
from tidegate.windows.kinds import Deduplicate, Hopping, Session, Sliding, Unlimited, WindowKind

LEAST_BUCKET_MS = 60_000
DEDUPE_SEGMENTS = 8  # segments of horizon and grace: an eighth is kept too long; 16 made checkpoints slower


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Widths in milliseconds, and the shape of earlier states."""

    bucket_ms: int
    segment_ms: int
    grown_from: tuple[
        int, ...
    ] = ()  # the numbers of aggregates of earlier states, where some were appended since


def window_layout(kind: WindowKind) -> StateLayout:
    """Return the layout of a new operator: fewer, larger buckets are fewer runs in every batch and every checkpoint.

    Tumbling and hopping windows: at least a minute, a quarter of a window and an eighth of the retention, whole
    panes. Session and sliding windows: at least a minute and a quarter of the time a record can affect. Time
    segments are half of what is kept.
    """
    match kind:
        case Unlimited():
            return StateLayout(LEAST_BUCKET_MS, LEAST_BUCKET_MS)
        case Hopping():
            pane = kind.pane_ms
            widest = max(LEAST_BUCKET_MS, kind.size_ms // 4, kind.retention_ms // 8, pane)
            bucket = -(-widest // pane) * pane
            kept = kind.retention_ms
        case Session():
            reach = kind.gap_ms + kind.grace_ms
            bucket = max(LEAST_BUCKET_MS, reach // 4)
            kept = max(kind.retention_ms, reach + 1)
        case Sliding():
            bucket = max(LEAST_BUCKET_MS, kind.difference_ms // 4)
            kept = kind.retention_ms
    interval = max(kept // 2, LEAST_BUCKET_MS)
    return StateLayout(bucket, -(-interval // bucket) * bucket)


def dedupe_layout(rule: Deduplicate) -> StateLayout:
    """Return the layout of a new deduplication: an eighth of what is kept, but at least a minute."""
    bucket = max(LEAST_BUCKET_MS, -(-rule.retention_ms // DEDUPE_SEGMENTS))
    return StateLayout(bucket, bucket)


def grown(spec: StoreSpec, folds: Folds, layout: StateLayout, values: pa.Schema | None) -> StoreSpec:
    """Return the store of an operator's states, which also reads states without the aggregates appended since.

    The columns of states are the store's last ones, in the order of the aggregates; `values` are the user's columns.
    """
    if not layout.grown_from:
        return spec
    if values is None:
        raise InvalidError(
            "aggregates were appended to a store with rows: give `values`, the schema of the columns"
        )
    inputs = pa.RecordBatch.from_pydict(folds.inputs(no_events(values)))

    def shape(count: int) -> EarlierShape:
        kept, added = folds.stored[: count + 1], folds.stored[count + 1 :]  # the notes come first
        if not added:
            raise InvalidError(
                f"store {spec.name}: earlier states have {count} aggregates, as many as there are now"
            )

        def grow(rows: pa.RecordBatch) -> pa.RecordBatch:
            none = np.empty(0, np.int32)
            states = [state for each in added for state in each.partial(inputs, none, rows.num_rows)]
            return pa.RecordBatch.from_arrays([*rows.columns, *states], schema=spec.rows)

        lacking = sum(len(each.state) for each in added)
        payload = pa.schema(list(spec.payload)[: len(spec.payload) - lacking])
        is_fold = spec.merge is Merge.FOLD
        before = StoreSpec(
            spec.name,
            spec.merge,
            payload=pa.schema([]) if is_fold else payload,
            aggregates=kept if is_fold else (),
            bucket_ms=spec.bucket_ms,
            segment_ms=spec.segment_ms,
        )
        return EarlierShape(before, grow)

    return spec.grown_from([shape(count) for count in layout.grown_from])
