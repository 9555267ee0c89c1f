"""Decode records of a topic into rows of a table: split windowed keys, set bad records aside, add the observed time.

Whole columns at a time. The outcome does not depend on how the topic was cut: the store judges each record with the
observed time up to and with itself: the largest window start (session end) of records with a good key and value.

    no key                      skipped, counted
    bad key, bad value          `WindowedKeyFormatError`, `CorruptError`, or a dead letter ("keep")
    window in a dead segment    not stored and not forwarded, counted as expired
    null value                  a deletion of exactly this window

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.dropped_records import warn_dropped
from tidegate.errors import CorruptError, WindowedKeyFormatError
from tidegate.integrity.validator import OnError
from tidegate.tables.dead_letters import letters_of
from tidegate.tables.options import TableRules, TableShape
from tidegate.tables.serdes.base import Bytes
from tidegate.tables.snapshot import PAYLOAD, Counts, PartitionState
from tidegate.windows.keys import decode_keys
from tidegate.windows.stores.segmented_store import PutResult

Int64s = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
NONE = np.empty(0, np.int64)
WHY: Final = {
    "null_keys": "has no key, and is left out",
    "bad_keys": "has a key that cannot be read, and is a dead letter now",
    "bad_values": "has a value that cannot be read, and is a dead letter now",
    "expired": "is expired: its window lies beyond the retention",
    "faulty": "is faulty, and left out",
}
"""What warnings say about records, by the names of `Counts`."""

ROWS = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("ts", pa.int64(), nullable=False),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("deleted", pa.bool_(), nullable=False),
        *PAYLOAD,
    ]
)


class Seen(NamedTuple):
    """Window and offset of every readable record, and which of them arrived after the window had expired."""

    ts: Int64s
    offsets: Int64s
    expired: Int64s


@dataclass(frozen=True, slots=True)
class Taken:
    """The rows to store for a batch, and the outcome of its other records."""

    rows: pa.RecordBatch
    stream_time: int | Int64s
    """The observed time up to and with each row, or of all."""
    newest_ms: int
    counts: Counts
    dropped: dict[str, Int64s]
    """What became of records that are in no row → their offsets; by the names of `Counts`."""
    letters: list[pa.RecordBatch]
    """Records to be kept as dead letters: bad keys, then bad values."""

    @property
    def observed_ms(self) -> int:
        """The observed time after the batch."""
        return self.stream_time if isinstance(self.stream_time, int) else int(self.stream_time[-1])


@dataclass(slots=True)
class _Keys:
    """The decoded keys of a batch; `ts` and `seq` as rows have them."""

    inner: pa.Array
    ts: Int64s
    seq: Int64s
    good: Flags


def take_records(rules: TableRules, batch: pa.RecordBatch, observed_ms: int, newest_ms: int) -> Taken:
    """Decode one partition's next records into rows."""
    decoding, values = _Decoding(rules, batch), batch.column("value")
    keys = decoding.keys()
    keep = decoding.keep(keys)
    times = _times(batch.column("timestamp"))
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
            pa.array(decoding.offsets),
        ],
        schema=ROWS,
    )
    if not keep.all():
        rows = rows.filter(pa.array(keep))
    stream_time: int | Int64s = observed_ms
    if rules.shape.is_windowed and rows.num_rows:
        stream_time = rules.shape.expiry.own_time(rows.column("ts").to_numpy(), observed_ms)
    return Taken(rows, stream_time, newest_ms, decoding.counts, decoding.dropped, decoding.letters)


def count_put(shape: TableShape, taken: Taken, result: PutResult) -> tuple[pa.RecordBatch, Seen]:
    """Count the outcomes of a batch's rows: stored rows, and the cells of all readable ones."""
    rows, counts, expired = taken.rows, taken.counts, NONE
    offsets: Int64s = rows.column("offset").to_numpy()
    seen = Seen(rows.column("ts").to_numpy(), offsets, NONE) if shape.is_windowed else Seen(NONE, NONE, NONE)
    if result.dropped:
        expired = np.flatnonzero(~result.accepted)
        seen, told = seen._replace(expired=expired), expired
        if shape.kind == "session":  # removing an expired session is nothing
            is_value = ~rows.column("deleted").to_numpy(zero_copy_only=False)
            told = expired[is_value[expired]]
        counts.expired, taken.dropped["expired"] = len(told), offsets[told]
        rows = rows.filter(pa.array(result.accepted))
    counts.deleted = rows.column("deleted").true_count
    counts.applied = rows.num_rows - counts.deleted
    return rows, seen


def warn_about(rules: TableRules, state: PartitionState, dropped: Mapping[str, Int64s]) -> None:
    """Log records that gave no row, before they are counted in the partition's state."""
    shape = rules.shape
    policies = {"bad_keys": rules.on_key_error, "bad_values": rules.consumed.on_value_error}
    for outcome, offsets in dropped.items():
        why, before = WHY[outcome], getattr(state.counts, outcome)
        if policies.get(outcome) == OnError.DROP:
            why = why.replace("is a dead letter now", "is left out")
        numbers = np.broadcast_to(np.int32(state.partition), len(offsets))
        warn_dropped(f"table {shape.name}", why, shape.topic, numbers, offsets, before=before)


class _Decoding:
    """One batch while it is decoded, and the outcome of the records that give no row."""

    def __init__(self, rules: TableRules, batch: pa.RecordBatch) -> None:
        self.rules, self.batch = rules, batch
        self.offsets: Int64s = batch.column("offset").to_numpy()
        self.counts, self.dropped, self.letters = Counts(), dict[str, Int64s](), list[pa.RecordBatch]()

    @property
    def partition(self) -> int:
        return int(self.batch.column("partition")[0].as_py())

    def place(self, row: int) -> str:
        """Return where a record lies, in words."""
        return f"topic {self.rules.shape.topic} partition {self.partition} offset {int(self.offsets[row])}"

    def keys(self) -> _Keys:
        shape, rows, raw_keys = self.rules.shape, self.batch.num_rows, self.batch.column("key")
        if not shape.is_windowed:
            good = np.ones(rows, np.bool_)
            if raw_keys.null_count:
                good = raw_keys.is_valid().to_numpy(zero_copy_only=False)
                self.counts.null_keys, self.dropped["null_keys"] = raw_keys.null_count, self.offsets[~good]
            zeros = np.zeros(rows, np.int64)
            keys, bad, reasons = _Keys(raw_keys, zeros, zeros, good), np.empty(0, np.int64), []
        else:
            size_ms = shape.size_ms if shape.kind == "window" else None
            decoded = decode_keys(raw_keys, self.rules.key_format, size_ms=size_ms, checks=self.rules.checks)
            bad = np.flatnonzero(decoded.bad) if decoded.bad_rows else np.empty(0, np.int64)
            if len(bad) and self.rules.on_key_error == OnError.FAIL:
                decoded.require_good(offsets=self.offsets, topic=shape.topic, partition=self.partition)
            reasons = [decoded.reason(int(row)) for row in bad]
            good = decoded.good
            self.counts.null_keys = rows - int(np.count_nonzero(good)) - len(bad)
            if self.counts.null_keys:
                self.dropped["null_keys"] = self.offsets[~good & ~decoded.bad]
            if shape.kind == "session":
                keys = _Keys(decoded.inner, decoded.end, decoded.start, good)
            else:
                keys = _Keys(decoded.inner, decoded.start, np.zeros(rows, np.int64), good)
        decoded_keys = None if type(self.rules.key) is Bytes else self.rules.key.decode_column(keys.inner)
        if decoded_keys is not None and len(decoded_keys.bad_rows):
            unreadable, why = decoded_keys.bad_rows, decoded_keys.reasons
            if self.rules.on_key_error == OnError.FAIL:
                raise WindowedKeyFormatError(
                    f"{self.place(unreadable[0])}: the key cannot be read as {self.rules.key!r}: {why[0]}. Give the "
                    "serde its producer used, or set such records aside with on_key_error='keep'"
                )
            keys.good = keys.good.copy()
            keys.good[unreadable] = False
            bad, reasons = np.concatenate([bad, unreadable]), [*reasons, *why]
        if len(bad):
            self.counts.bad_keys, self.dropped["bad_keys"] = len(bad), self.offsets[np.sort(bad)]
            if self.rules.on_key_error == OnError.KEEP:
                self.letters.append(letters_of(self.batch, bad, reasons))
        return keys

    def keep(self, keys: _Keys) -> Flags:
        """Return which records have a good key and a good value."""
        if type(self.rules.value) is Bytes:
            return keys.good
        decoded = self.rules.value.decode_column(self.batch.column("value"))
        if len(decoded.bad_rows) == 0:
            return keys.good
        mine = keys.good[decoded.bad_rows]
        bad = decoded.bad_rows[mine]
        if not len(bad):
            return keys.good
        reasons = [reason for reason, is_mine in zip(decoded.reasons, mine, strict=True) if is_mine]
        policy = self.rules.consumed.on_value_error
        if policy == OnError.FAIL:
            more = f" (and {len(bad) - 1} more in this batch)" if len(bad) > 1 else ""
            raise CorruptError(
                f"{self.place(bad[0])} cannot be read: {reasons[0]}{more}. Mend the producer, declare the value as it "
                "is, or set such records aside with Consumed(…, on_value_error='keep')",
                offset=int(self.offsets[bad[0]]),
                kafka_name=None,
            )
        if policy == OnError.KEEP:
            self.letters.append(letters_of(self.batch, bad, reasons))
        self.counts.bad_values, self.dropped["bad_values"] = len(bad), self.offsets[bad]
        keep = keys.good.copy()
        keep[bad] = False
        return keep


def _times(column: pa.Array) -> Int64s:
    numbers = column.view(pa.int64()) if column.type != pa.int64() else column
    if numbers.null_count:
        numbers = pc.fill_null(numbers, -1)
    times: Int64s = numbers.to_numpy()
    return times
