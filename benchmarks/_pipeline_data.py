"""The events of `pipeline.py`, four sets of them, and the one right answer. Not a benchmark itself.

The answer is numpy's: the first event of each order counts, for its key and minute. What anybody finds is held
against it window by window; amounts are quarters, so their sums are exact in any order and nothing has to be nearly
equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from _storage import key_names

START, MINUTE = 1_767_225_600_000, 60_000
FIXED = np.dtype([("order_id", "<i8"), ("amount", "<f8")])
COLUMNS = pa.schema([("order_id", pa.int64()), ("amount", pa.float64())])
COPY_WITHIN = 100_000
MOST_KEYS = 50_000
SETS = {"spread": (MOST_KEYS, 18), "few": (500, 18), "some": (MOST_KEYS, 0), "hot": (MOST_KEYS, 18)}


def made_events(rows: int, kind: str, after: int = 0) -> pa.Table:
    """Columns key, ts, order_id, amount, in the order of the log; a tenth are copies of earlier rows.

    `after` rows of the same kind these come later, and are other orders.
    """
    chance = np.random.default_rng(7)
    keys, step = SETS[kind]
    copies = rows // 10
    first = rows - copies
    sources = np.sort(chance.choice(first, copies, replace=False))
    place = np.concatenate([np.arange(first), sources + chance.integers(1, COPY_WITHIN, copies)])
    origin = np.concatenate([np.arange(first), sources])[np.argsort(place, kind="stable")]
    chosen = chance.integers(0, keys, first)
    if kind == "hot":
        chosen[chance.random(first) < 0.5] = 0
    if kind == "some":  # ten events of a key come within a minute
        chosen = (np.arange(first) // 10 * 7919 % keys).astype(np.int64)
        step = 1
    number = np.arange(first) + after
    columns = {
        "key": key_names(keys).take(pa.array(chosen)),
        "ts": pa.array(START + number * max(1, step) + chance.integers(0, 1000, first)),
        "order_id": pa.array(number + 10**9),
        "amount": pa.array(chance.integers(1, 10**6, first) / 4.0),
    }
    return pa.table(columns).take(pa.array(origin)).combine_chunks()


@dataclass(frozen=True)
class Answer:
    """What any of them must come to: windows by number (key and minute), with what is in each."""

    windows: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    totals: npt.NDArray[np.float64]

    def fault_in(self, found: pa.Table) -> str | None:
        """What is wrong with these windows (key, minute, n, total; any order), or None."""
        windows = _numbers(found["key"], found["minute"].to_numpy())
        order = np.argsort(windows, kind="stable")
        windows, counts = windows[order], found["n"].to_numpy()[order]
        if len(windows) != len(self.windows):
            return f"{len(windows)} windows instead of {len(self.windows)}"
        wrong = (windows != self.windows) | (counts != self.counts)
        wrong |= found["total"].to_numpy()[order] != self.totals
        return f"{wrong.sum()} of {len(windows)} windows are wrong" if wrong.any() else None


def answer_of(events: pa.Table) -> Answer:
    _, first = np.unique(events["order_id"].to_numpy(), return_index=True)
    keys, ts = events["key"].combine_chunks().take(pa.array(first)), events["ts"].to_numpy()[first]
    windows, place, counts = np.unique(_numbers(keys, ts // MINUTE), return_inverse=True, return_counts=True)
    totals = np.bincount(place, events["amount"].to_numpy()[first], len(windows))
    return Answer(windows, counts, totals)


def _numbers(keys: pa.Array | pa.ChunkedArray, minutes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A number for each key and minute; a key that was never sent is -1, and so in no answer."""
    known = pc.fill_null(pc.index_in(keys.cast(pa.binary()), value_set=key_names(MOST_KEYS)), -1)
    return known.to_numpy().astype(np.int64) << 32 | minutes


def json_values(events: pa.Table) -> pa.Array:
    texts = [events["order_id"].cast(pa.string()).chunk(0), events["amount"].cast(pa.string()).chunk(0)]
    joined = pc.binary_join_element_wise(
        '{"order_id":', texts[0], ',"amount":', texts[1], ',"currency":"EUR","status":"delivered"}', ""
    )
    return joined.cast(pa.binary())


def fixed_values(events: pa.Table) -> pa.Array:
    both = np.empty(events.num_rows, FIXED)
    for name in FIXED.names or ():
        both[name] = events[name].to_numpy()
    ends = np.arange(events.num_rows + 1, dtype=np.int32) * FIXED.itemsize
    return pa.Array.from_buffers(pa.binary(), events.num_rows, [None, pa.py_buffer(ends), pa.py_buffer(both)])


def from_fixed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Sixteen bytes as a number and a double."""
    values = batch.column("value")
    _, bounds, content = values.buffers()
    if not len(values):
        return pa.RecordBatch.from_arrays([pa.array([], each.type) for each in COLUMNS], schema=COLUMNS)
    first = np.frombuffer(bounds, np.int32)[values.offset]
    both = np.frombuffer(content, FIXED, len(values), first)
    return pa.RecordBatch.from_arrays(
        [pa.array(np.ascontiguousarray(both[name])) for name in FIXED.names or ()], schema=COLUMNS
    )
