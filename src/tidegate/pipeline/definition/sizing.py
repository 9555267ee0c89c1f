"""What a flow's state is expected to take, and how much a budget holds: arithmetic, with what it assumes.

    windows of time    (key, pane) pairs that have records, for the retention        rows a second × retention
    sessions           at most one a record, at least one a key                      sessions a second × retention
    sliding            every record                                                  records a second × retention
    deduplication      every accepted id                                             records a second × (within +
    grace) late table         at most its own limit, in every task

A row takes its columns' widths, its key, its place in time (16 bytes) and its line in the directory (16 bytes).
Values without a fixed width are reckoned at `LOOSE_BYTES`. Compaction, checkpoints and packs that wait to be
deleted need about as much again on disk for a while.

Thread rule: pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.sampling import Sample
from tidegate.pipeline.definition.steps import Aggregate, Dedupe
from tidegate.windows.aggregates.folds import Notes, resolve
from tidegate.windows.kinds import Hopping, Session, Sliding, Unlimited

PLACE_BYTES = 16
DIRECTORY_BYTES = 16
PRINT_BYTES = 16  # an id's fingerprint
ID_BYTES = PRINT_BYTES + PLACE_BYTES + DIRECTORY_BYTES + 1 + 12
LOOSE_BYTES = 64
ASSUMED = Sample(0, 60_000, 1, 1000.0, 10_000, 16.0, None)
SAMPLED_MS = 60_000


@dataclass(frozen=True)
class StateSize:
    """The expected state of one operator: rows it keeps, bytes a row, and the formula in words."""

    operator: str
    rows: float
    row_bytes: int
    formula: str
    late_bytes: int  # most that its late table takes, in each task

    @property
    def size(self) -> int:
        return int(self.rows * self.row_bytes)


def state_sizes(flow: Flow, sample: Sample | None) -> list[StateSize]:
    """What every operator of a flow is expected to keep, all tasks together."""
    seen = ASSUMED if sample is None else sample
    sizes = []
    for place, name in flow.operators.items():
        step = flow.steps[place]
        if isinstance(step, Dedupe):
            sizes.append(_dedupe(name, step, seen))
        elif isinstance(step, Aggregate):
            sizes.append(_windows(name, step, flow.schemas[place], seen))
    return sizes


def row_bytes(step: Aggregate, schema: pa.Schema, key_bytes: float) -> int:
    """What one stored row of windows takes."""
    states = [*Notes().state, *resolve(step.aggregates, schema).state_schema]
    return int(sum(_width(each.type) for each in states) + PLACE_BYTES + DIRECTORY_BYTES + key_bytes)


def _dedupe(name: str, step: Dedupe, seen: Sample) -> StateSize:
    kept_s = step.rule.retention_ms / 1000
    rows = seen.records_per_second * kept_s
    formula = f"{_rate(seen.records_per_second)} ids/s × {_seconds(kept_s)} (within + grace)"
    return StateSize(name, rows, ID_BYTES, formula, 0 if step.late is None else step.late.max_bytes)


def _windows(name: str, step: Aggregate, schema: pa.Schema, seen: Sample) -> StateSize:
    width, kind = row_bytes(step, schema, seen.key_bytes), step.kind
    late = 0 if step.late is None else step.late.max_bytes
    if isinstance(kind, Unlimited):
        return StateSize(name, seen.keys, width, f"{seen.keys:,} keys, one window each, never dropped", late)
    kept_s = kind.retention_ms / 1000
    match kind:
        case Hopping():
            pane_s = kind.pane_ms / 1000
            fresh = _panes_a_second(kind, seen)
            formula = (
                f"{_rate(fresh)} (key, pane of {_seconds(pane_s)}) pairs/s × {_seconds(kept_s)} retention"
            )
        case Session():
            fresh = min(seen.records_per_second, seen.keys / max(1.0, kind.gap_ms / 1000))
            formula = f"{_rate(fresh)} sessions/s (each key once a gap) × {_seconds(kept_s)} retention"
        case Sliding():
            fresh = seen.records_per_second
            formula = f"{_rate(fresh)} records/s × {_seconds(kept_s)} retention"
    return StateSize(name, fresh * kept_s, width, formula, late)


def _panes_a_second(kind: Hopping, seen: Sample) -> float:
    """How many panes of keys begin in a second: as sampled, at most a record each; unsampled, every key in every
    pane."""
    if seen.panes_per_second is not None:
        return seen.panes_per_second * min(1.0, SAMPLED_MS / kind.pane_ms)
    return min(seen.records_per_second, seen.keys * 1000 / kind.pane_ms)


def _width(kind: pa.DataType) -> float:
    if pa.types.is_boolean(kind):
        return 1
    if pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind):
        return float(kind.bit_width / 8)
    if pa.types.is_struct(kind):
        return sum(_width(kind.field(place).type) for place in range(kind.num_fields))
    return LOOSE_BYTES


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _seconds(number: float) -> str:
    return f"{number:,.0f} s" if number >= 1 else f"{number:.3g} s"
