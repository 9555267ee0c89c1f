"""From records of a topic to rows of a table: keys taken apart, bad ones set aside, expired ones left out.

Whole columns at a time. The outcome does not depend on how the topic was cut into batches: each record is judged
with the observed time up to and with itself, carried from batch to batch.

    no key                      skipped, counted
    key of another format       `WindowedKeyFormatError`, or a dead letter (on_bad_key="skip")
    value its serde cannot read `CorruptError`, or a dead letter (on_bad_value="skip")
    window in a dead segment    not stored and not forwarded, counted as expired
    null value                  a deletion of exactly this window

Observed time is the largest window start (session end) of all records with a good key and value, deletions
included. Thread rule: pure functions, but for the dead letters handed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import WindowedKeyFormatError
from tidegate.tables.building.partition_state import PAYLOAD, Counts
from tidegate.tables.building.shape import TableRules
from tidegate.tables.serdes.dead_letters import DeadLetterPolicy, DeadLetters
from tidegate.tables.serdes.plain import Bytes
from tidegate.windows.keys.columns import decode_keys

Int64s = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
NONE = np.empty(0, np.int64)

ROWS = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("ts", pa.int64(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("deleted", pa.bool_(), nullable=False),
        *PAYLOAD,
    ]
)


@dataclass(frozen=True, slots=True)
class Letters:
    """Where bad keys and bad values go; their policies differ."""

    keys: DeadLetters
    values: DeadLetters

    @classmethod
    def of(cls, rules: TableRules) -> Letters:
        topic = rules.shape.topic
        return cls(DeadLetters(topic, rules.on_bad_key), DeadLetters(topic, rules.consumed.on_bad_value))


class Seen(NamedTuple):
    """Window and offset of every record that could be read, and which of them came when the window had expired."""

    ts: Int64s
    offsets: Int64s
    expired: Int64s


@dataclass(frozen=True, slots=True)
class Taken:
    """The rows to write for a batch, and what became of its records."""

    rows: pa.RecordBatch
    observed_ms: int
    newest_ms: int
    counts: Counts
    seen: Seen


@dataclass(slots=True)
class _Keys:
    """Keys of a batch, taken apart; `ts` and `seq` as rows have them."""

    inner: pa.Array
    ts: Int64s
    seq: Int64s
    good: Flags


def take_records(
    rules: TableRules, batch: pa.RecordBatch, observed_ms: int, newest_ms: int, letters: Letters
) -> Taken:
    """The rows of one partition's next records."""
    counts = Counts()
    raw_keys, values = batch.column("key"), batch.column("value")
    offsets: Int64s = batch.column("offset").to_numpy()
    keys = _keys(rules, batch, raw_keys, offsets, letters, counts)
    keep = _without_bad_values(rules, batch, keys, offsets, letters, counts)
    times = _times(batch.column("timestamp"))
    seen = Seen(NONE, NONE, NONE)
    if rules.shape.is_windowed:
        seen, keep, observed_ms = _without_expired(rules, keys, keep, offsets, observed_ms)
        counts.expired = _count_expired(rules, values, np.searchsorted(offsets, seen.offsets[seen.expired]))
    if len(times):
        newest_ms = max(newest_ms, int(times.max()))
    rows = pa.RecordBatch.from_arrays(
        [
            keys.inner,
            pa.array(keys.ts),
            pa.array(keys.seq),
            values.is_null(),
            values,
            pa.array(times),
            pa.array(offsets),
        ],
        schema=ROWS,
    )
    if not keep.all():
        rows = rows.filter(pa.array(keep))
    counts.deleted = rows.column("deleted").true_count
    counts.applied = rows.num_rows - counts.deleted
    return Taken(rows, observed_ms, newest_ms, counts, seen)


def _keys(
    rules: TableRules,
    batch: pa.RecordBatch,
    raw_keys: pa.Array,
    offsets: Int64s,
    letters: Letters,
    counts: Counts,
) -> _Keys:
    shape, rows = rules.shape, batch.num_rows
    if not shape.is_windowed:
        good = np.ones(rows, np.bool_)
        if raw_keys.null_count:
            good = raw_keys.is_valid().to_numpy(zero_copy_only=False)
            counts.null_keys = raw_keys.null_count
        zeros = np.zeros(rows, np.int64)
        keys, bad, reasons = _Keys(raw_keys, zeros, zeros, good), np.empty(0, np.int64), []
    else:
        size_ms = shape.size_ms if shape.kind == "window" else None
        decoded = decode_keys(raw_keys, rules.key_format, size_ms=size_ms, checks=rules.checks)
        bad = np.flatnonzero(decoded.bad) if decoded.bad_rows else np.empty(0, np.int64)
        if len(bad) and letters.keys.policy is DeadLetterPolicy.FAIL:
            partition = batch.column("partition")[0].as_py()
            decoded.require_good(offsets=offsets, topic=shape.topic, partition=partition)
        reasons = [decoded.reason(int(row)) for row in bad]
        good = decoded.good
        counts.null_keys = rows - int(np.count_nonzero(good)) - len(bad)
        if shape.kind == "session":
            keys = _Keys(decoded.inner, decoded.end, decoded.start, good)
        else:
            keys = _Keys(decoded.inner, decoded.start, np.zeros(rows, np.int64), good)
    unreadable, why = _unreadable_keys(rules, keys)
    if len(unreadable):
        if letters.keys.policy is DeadLetterPolicy.FAIL:
            raise WindowedKeyFormatError(
                f"topic {shape.topic} partition {batch.column('partition')[0].as_py()} offset "
                f"{int(offsets[unreadable[0]])}: the key cannot be read as {rules.key!r}: {why[0]}. Give the serde "
                "its producer used, or set such records aside with on_bad_key='skip'"
            )
        keys.good = keys.good.copy()
        keys.good[unreadable] = False
        bad, reasons = np.concatenate([bad, unreadable]), [*reasons, *why]
    if len(bad):
        counts.bad_keys = len(bad)
        _set_aside(letters.keys, bad, reasons, batch, offsets)
    return keys


def _unreadable_keys(rules: TableRules, keys: _Keys) -> tuple[Int64s, list[str]]:
    if type(rules.key) is Bytes:
        return np.empty(0, np.int64), []
    decoded = rules.key.decode_column(keys.inner)
    return decoded.bad_rows, list(decoded.reasons)


def _without_bad_values(
    rules: TableRules,
    batch: pa.RecordBatch,
    keys: _Keys,
    offsets: Int64s,
    letters: Letters,
    counts: Counts,
) -> Flags:
    if type(rules.value) is Bytes:
        return keys.good
    decoded = rules.value.decode_column(batch.column("value"))
    if len(decoded.bad_rows) == 0:
        return keys.good
    mine = keys.good[decoded.bad_rows]
    bad = decoded.bad_rows[mine]
    _set_aside(
        letters.values,
        bad,
        [reason for reason, is_mine in zip(decoded.reasons, mine, strict=True) if is_mine],
        batch,
        offsets,
    )
    counts.bad_values = len(bad)
    keep = keys.good.copy()
    keep[bad] = False
    return keep


def _without_expired(
    rules: TableRules, keys: _Keys, keep: Flags, offsets: Int64s, observed_ms: int
) -> tuple[Seen, Flags, int]:
    """What was seen, the rows whose time segment was alive when they came, and the observed time after them."""
    ts = keys.ts
    if not keep.all():
        ts, offsets = ts[keep], offsets[keep]
    if not len(ts):
        return Seen(NONE, NONE, NONE), keep, observed_ms
    live, observed_ms = rules.shape.expiry.judge(ts, observed_ms)
    if live is None:
        return Seen(ts, offsets, NONE), keep, observed_ms
    kept = keep.copy()
    kept[keep] = live
    return Seen(ts, offsets, np.flatnonzero(~live)), kept, observed_ms


def _count_expired(rules: TableRules, values: pa.Array, expired: Int64s) -> int:
    """Removing an expired session is nothing, and is not counted."""
    if rules.shape.kind != "session" or not len(expired):
        return len(expired)
    return len(expired) - int(values.take(pa.array(expired)).null_count)


def _set_aside(
    letters: DeadLetters, bad: Int64s, reasons: list[str], batch: pa.RecordBatch, offsets: Int64s
) -> None:
    letters.add(
        bad,
        reasons,
        offsets=offsets,
        partitions=batch.column("partition").to_numpy(),
        keys=batch.column("key"),
        values=batch.column("value"),
    )


def _times(column: pa.Array) -> Int64s:
    numbers = column.view(pa.int64()) if column.type != pa.int64() else column
    if numbers.null_count:
        numbers = pc.fill_null(numbers, -1)
    times: Int64s = numbers.to_numpy()
    return times
