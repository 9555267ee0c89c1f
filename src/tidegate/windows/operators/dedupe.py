"""Deduplication: forward the first record of an event by arrival, and drop its copies within D.

A record's identity is (record key, id); without a key it is the id alone. For each record, in the order records come
(T: stream time of its partition, with it; t: its own time):

    1  late when t < T − grace: dropped, or forwarded unchecked, and counted either way;
       what was late with a shorter grace stays late when it becomes longer, because ids it could match are gone
    2  a replay when its own offset was accepted at t: forwarded again, also when it is late now
    3  a duplicate when its identity was accepted less than D before or after t; `refresh` counts it as accepted
    4  else new: it is forwarded, and its identity is kept, for D + grace of stream time

State: a window store, key = fingerprint of the identity (128 bits under a random secret of the operator), ts = t,
payload = offset (inverted for a refresh) and source partition. The checkpoint has the secret, columns, types and
progress; one whose ids were made of other columns is refused. Thread rule: one operator belongs to its task's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.durations import DurationLike, milliseconds
from tidegate.errors import InvalidError
from tidegate.kernels.dedupe import (
    DUPLICATE,
    LATE,
    NEW,
    NO_ID,
    PRINT_BYTES,
    REPLAY,
    arrange_rows,
    decide,
    fingerprint_pairs,
    gather_prints,
    list_chosen,
    list_kept,
)
from tidegate.randomness import Randomness, SystemRandomness
from tidegate.storage import (
    Merge,
    SortedRows,
    StoreSpec,
    WorkerStorageRuntime,
)
from tidegate.storage.runs.columns import UInt64s, binary_parts, int64_column, sorted_marks, words
from tidegate.windows.aggregates.collections import one_of_equals, refuse_incomparable
from tidegate.windows.events import NO_TIME, EventBatch, Int64s, keep_events, no_events, only_column
from tidegate.windows.keys import binary_column, make_binary, room_for
from tidegate.windows.kinds import LATEST, Deduplicate
from tidegate.windows.operators.base import LateRows, Moment, Output, Places
from tidegate.windows.operators.clock import OperatorState, Progress, StreamClocks, decode, encode
from tidegate.windows.operators.late import LATE as LATE_REASON
from tidegate.windows.operators.late import LateSettings, LateTable
from tidegate.windows.operators.layout import dedupe_layout
from tidegate.windows.operators.windowed_operator import TaskOperator
from tidegate.windows.stores.segments import EARLIEST
from tidegate.windows.stores.window_store import WindowStore

# --- ids

_BINARY = pa.binary()


def check_columns(columns: Sequence[str], schema: pa.Schema) -> None:
    """Refuse columns that do not exist, or whose type cannot be an id."""
    for name in columns:
        places = schema.get_all_field_indices(name)
        if len(places) != 1:
            raise InvalidError(f"drop_duplicates: no single column {name!r} among {schema.names}")
        type_ = schema.field(places[0]).type
        try:
            refuse_incomparable(type_.value_type if pa.types.is_dictionary(type_) else type_)
        except InvalidError as error:
            raise InvalidError(
                f"drop_duplicates: column {name}: {error}; the columns are {schema.names}"
            ) from None


def id_column(columns: Sequence[pa.Array]) -> pa.BinaryArray:
    """Return the ids of records; null where one of the columns is."""
    plain = [_as_bytes(column) for column in columns]
    if len(plain) == 1:
        return plain[0]
    parts: list[pa.Array] = []
    for column in plain:
        lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
        parts += [_fixed(np.ascontiguousarray(lengths, "<i4").view(np.uint8), 4), column]
    return pc.binary_join_element_wise(*parts, b"")


def _as_bytes(column: pa.Array) -> pa.BinaryArray:
    type_ = column.type
    if pa.types.is_dictionary(type_):
        column, type_ = column.dictionary_decode(), type_.value_type
    if type_ == _BINARY:
        return column
    if pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_large_binary(type_):
        return column.cast(_BINARY)
    if pa.types.is_boolean(type_):
        column, type_ = column.cast(pa.uint8()), pa.uint8()
    if not (
        pa.types.is_primitive(type_) or pa.types.is_decimal(type_) or pa.types.is_fixed_size_binary(type_)
    ):
        raise InvalidError(f"values of type {type_} cannot be an id; cast the column to text or bytes")
    column, width = one_of_equals(column), type_.bit_width // 8
    if not len(column):
        return pa.array([], _BINARY)
    data = np.frombuffer(column.buffers()[1], np.uint8)[column.offset * width :][: len(column) * width]
    present = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
    return _fixed(data, width, present)


def _fixed(
    data: np.ndarray[tuple[int], np.dtype[np.uint8]], width: int, present: object = None
) -> pa.BinaryArray:
    """Return fixed-width values, concatenated in `data`."""
    rows = len(data) // width
    room_for(len(data), "a column of ids")
    return make_binary(np.arange(0, (rows + 1) * width, width, dtype=np.int32), data, present)  # type: ignore[arg-type]


# --- state


class _Extra(msgspec.Struct, array_like=True):
    secret: bytes
    columns: list[str]
    types: list[str]
    progress: Progress


class DedupeState(OperatorState):
    """The ids' index; the secret, the clocks and the counters are the operator's progress."""

    def __init__(
        self,
        spec: StoreSpec,
        clocks: StreamClocks,
        secret: bytes,
        shape: tuple[list[str], list[str]],
    ) -> None:
        super().__init__(spec, clocks)
        self._shape = shape
        self.secret = secret

    @property
    def stream_time(self) -> int:
        """The stream time that no source partition is behind."""
        return self.clocks.floor

    def encode_progress(self) -> bytes:
        self.progress.clocks = self.clocks.saved()
        return encode(_Extra(self.secret, *self._shape, self.progress))

    def roll_back(self, data: bytes) -> None:
        if not data:
            self.progress = Progress()
            return
        extra = decode(data, _Extra, f"store {self._index.spec.name}: a deduplication's progress")
        if (extra.columns, extra.types) != self._shape:
            raise InvalidError(
                f"store {self._index.spec.name}: the checkpoint's ids were made of {extra.columns} {extra.types},"
                f" now of {self._shape[0]} {self._shape[1]}: they cannot be compared; start anew under another name"
            )
        self.secret, self.progress = extra.secret, extra.progress
        self.clocks.restore(extra.progress.clocks)


def ids_spec(name: str, bucket_ms: int) -> StoreSpec:
    """Return the store of accepted identities; a time segment is one bucket."""
    payload = pa.schema(
        [pa.field("offset", pa.int64(), nullable=False), pa.field("partition", pa.int32(), nullable=False)]
    )
    return StoreSpec(name, Merge.LAST, payload=payload, bucket_ms=bucket_ms)


# --- the operator

Int32s = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
KEYLESS = np.uint64(
    0x6B65796C65737300
)  # separates the secret of records without a key from that of the others
_NO_FLAGS = np.empty(0, np.bool_)
_COUNTED = {"new": NEW, "replays": REPLAY, "duplicates": DUPLICATE, "late": LATE, "no_id": NO_ID}


class DedupeOperator(TaskOperator):
    """Deduplicates the records of one task."""

    def __init__(
        self,
        runtime: WorkerStorageRuntime,
        task: str,
        name: str,
        definition: Deduplicate,
        values: pa.Schema,
        *,
        partitions: Sequence[int] = (),
        late_table: LateSettings | None = None,
        idle_close: int | DurationLike | None = None,
        stamped: bool = False,
        ahead_ms: int | None = None,
        randomness: Randomness | None = None,
        bucket_ms: int | None = None,
    ) -> None:
        """Attach the operator's stores to the task; `values` is the schema of the user's columns.

        `partitions`, `idle_close` and `stamped` are those of windows: which partitions to wait for, how long a
        silent one is waited for, and whether stream times come from before a shuffle. Records further than
        `ahead_ms` ahead of the round's time advance no clock, as with a window's future guard. `bucket_ms` is how
        much stream time is dropped at a time: an eighth of what is kept, but at least a minute.
        """
        check_columns(definition.columns, values)
        self.name = name
        self.definition = definition
        self._values = values
        self._runtime, self._task, self._is_stamped = runtime, task, stamped
        self._idle_ms = None if idle_close is None else milliseconds(idle_close)
        self._ahead_ms = ahead_ms
        chance = randomness or SystemRandomness()
        secret = b"".join(chance.below(2**64).to_bytes(8, "little") for _ in range(2))
        width = dedupe_layout(definition).bucket_ms if bucket_ms is None else bucket_ms
        types = [str(values.field(column).type) for column in definition.columns]
        context = runtime.context(task)
        self._state = state = DedupeState(
            ids_spec(name, width),
            StreamClocks(partitions),
            secret,
            (list(definition.columns), types),
        )
        self._store = WindowStore(context, state, retention=definition.retention_ms)
        self.late_table = None
        if late_table is not None:
            self.late_table = LateTable(context, name, values, late_table, lambda: state.stream_time)

    def process(self, batch: EventBatch, moment: Moment) -> Output:
        """Process the next records of the stream.

        If storage has no room for their ids (`OverloadError`), nothing was stored and no clock has advanced: pass
        the same batch again.
        """
        if not len(batch):
            return self.tick(moment)
        saved = self._state.encode_progress()
        try:
            judged = self._judge(batch, moment)
            counts = [int(np.count_nonzero(judged.verdicts == verdict)) for verdict in range(NO_ID + 1)]
            counters = {name: counts[verdict] for name, verdict in _COUNTED.items() if counts[verdict]}
            for name, number in counters.items():
                self._state.progress.count(name, number)
            late = None
            if counts[LATE] and self.definition.late == "drop":
                late = self._late_rows(judged)
            self._keep(late, partial(self._put, batch, judged))
        except BaseException:
            self._state.roll_back(saved)
            raise
        self._pass_time(moment)
        self._drop_old()
        goes_on = judged.verdicts != DUPLICATE
        if late is not None:
            goes_on &= judged.verdicts != LATE
        places = {"late": Places.of(batch, judged.verdicts == LATE)} if counts[LATE] else {}
        return Output(keep_events(judged.events, goes_on), late, counters, places)

    def tick(self, moment: Moment) -> Output:
        """Advance time in a round without records: ids that no record can match any more are dropped."""
        self._pass_time(moment)
        self._drop_old()
        return Output(no_events(self._values), None, {})

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────

    def _judge(self, batch: EventBatch, moment: Moment) -> _Judged:
        """Return stream time, verdict and identity of every record."""
        ids = id_column([only_column(batch.values, name) for name in self.definition.columns])
        has_id = ids.is_valid().to_numpy(zero_copy_only=False) if ids.null_count else None
        counted = batch
        if has_id is not None or batch.key.null_count:
            flags = np.ones(len(batch), np.bool_) if has_id is None else has_id
            counted = replace(batch, key=_masked(batch.key, flags))
        latest = LATEST if self._ahead_ms is None else min(moment.now_ms + self._ahead_ms, LATEST)
        floor, closed = self.clocks.floor, self._state.progress.closed
        stamped = self.clocks.stamp(counted, moment.now_ms, latest=latest, trusted=self._is_stamped)
        if closed != NO_TIME and (least := min(closed + self.definition.grace_ms, LATEST)) > floor:
            np.maximum(stamped.judged, least, out=stamped.judged)  # the grace became longer since
        groups = self._group(batch.key, ids, has_id)
        verdicts = np.zeros(len(batch), np.uint8)
        if has_id is not None:
            verdicts[~has_id] = NO_ID
        new = self._decide(batch, stamped.judged, groups, verdicts)
        events = replace(batch, stream_time=stamped.stream_time)
        return _Judged(events, verdicts, stamped.judged, groups, *new)

    def _group(self, key: pa.BinaryArray, ids: pa.BinaryArray, has_id: Flags | None) -> _Groups:
        """Group rows by identity, in the order of runs."""
        secret = np.frombuffer(self._state.secret, "<u8")
        prints, marks = np.empty((len(key), 2), np.uint64), np.empty(len(key), np.uint64)
        row_bits = max(len(key) - 1, 1).bit_length()
        if key.null_count:
            count = _fingerprint_keyless(key, ids, has_id, secret, row_bits, prints, marks)
        else:
            mask = _NO_FLAGS if has_id is None else has_id
            count = fingerprint_pairs(
                *binary_parts(key), *binary_parts(ids), mask, *secret, row_bits, prints, marks
            )
        marks = sorted_marks(marks[:count], 0, row_bits)
        rows, starts = np.empty(count, np.int32), np.empty(count + 1, np.int32)
        found = arrange_rows(marks, row_bits, prints.reshape(-1).view(np.uint8), rows, starts)
        starts = starts[: found + 1]
        group_prints, hashes = np.empty(2 * found, np.uint64), np.empty(found, np.uint64)
        gather_prints(rows, starts, prints.reshape(-1), group_prints, hashes)
        return _Groups(rows, starts, hashes, group_prints.view(np.uint8))

    def _decide(
        self, batch: EventBatch, judged: Int64s, groups: _Groups, verdicts: npt.NDArray[np.uint8]
    ) -> tuple[Int32s, Int32s]:
        """Set the verdicts; for ids to keep, the group and the row, or for a refresh -row - 1."""
        definition, count = self.definition, len(groups.hashes)
        if not count:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        ts = np.ascontiguousarray(batch.ts)
        earliest = int(ts.min())
        known = self._store.fetch_batch(
            _fixed(groups.prints, PRINT_BYTES),
            max(earliest - definition.within_ms + 1, EARLIEST),
            min(int(ts.max()) + definition.within_ms - 1, LATEST),
            hashes=groups.hashes,
        )
        late = _NO_FLAGS
        if earliest < int(judged.max()) - definition.grace_ms:
            late = ts < judged - definition.grace_ms
        room_for_all = np.empty(count, np.int32)
        found, largest = list_chosen(groups.rows, groups.starts, known.numbers, late, room_for_all)
        chosen = room_for_all[:found]
        if len(chosen):
            largest += _most_alike(known.numbers)
            room = (np.empty(largest, np.int64), np.empty(largest, np.int64))
            places = (np.empty(largest, np.int32), np.empty(largest, np.int32))
            decide(
                groups.rows, groups.starts, chosen, late, ts,
                np.ascontiguousarray(judged), np.ascontiguousarray(batch.offset),
                np.ascontiguousarray(batch.partition),
                known.numbers, words(known.rows.column("ts")), words(known.rows.column("offset")),
                known.rows.column("partition").to_numpy(),
                definition.within_ms, definition.retention_ms, int(definition.refresh),
                *room, *places, verdicts,
            )  # fmt: skip
        new_groups, new_rows = np.empty(len(groups.rows), np.int32), np.empty(len(groups.rows), np.int32)
        kept = list_kept(groups.rows, groups.starts, new_groups, new_rows)
        return new_groups[:kept], new_rows[:kept]

    def _put(self, batch: EventBatch, judged: _Judged) -> None:
        """Store ids; the store leaves out those that expired because time advanced inside the batch."""
        if len(judged.new_rows):
            self._store.put_batch(self._ids(batch, judged), stream_time=self.clocks.floor)

    def _ids(self, batch: EventBatch, judged: _Judged) -> SortedRows:
        groups, new_rows = judged.groups, judged.new_rows
        offset = np.ascontiguousarray(batch.offset)
        if self.definition.refresh:
            is_refresh = new_rows < 0
            new_rows = np.where(is_refresh, -1 - new_rows, new_rows)
            offset = offset.copy()
            offset[new_rows[is_refresh]] ^= -1
        columns = {
            "ts": int64_column(np.ascontiguousarray(batch.ts)),
            "offset": int64_column(offset),
            "partition": pa.array(batch.partition),
        }
        return SortedRows(
            _fixed(groups.prints, PRINT_BYTES),
            groups.hashes,
            pa.RecordBatch.from_pydict(columns),
            judged.new_groups,
            new_rows,
        )

    def _late_rows(self, judged: _Judged) -> LateRows:
        rows = np.flatnonzero(judged.verdicts == LATE)
        events = replace(judged.events.take(rows), stream_time=judged.times[rows])
        how_late = judged.times[rows] - self.definition.grace_ms - events.ts
        reasons = pa.repeat(pa.scalar(LATE_REASON), len(rows))
        return LateRows(events, np.full(len(rows), NO_TIME, np.int64), how_late, reasons)

    def _drop_old(self) -> None:
        super()._drop_old()
        progress = self._state.progress
        progress.closed = max(progress.closed, self.clocks.floor - self.definition.grace_ms)


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Rows of one identity together: `rows` by group, where each group starts, its hash and fingerprint."""

    rows: Int32s
    starts: Int32s
    hashes: UInt64s
    prints: npt.NDArray[np.uint8]


class _Judged(NamedTuple):
    """A batch with its stream times: for each record its verdict and the time it was judged with; and the ids to
    keep."""

    events: EventBatch
    verdicts: npt.NDArray[np.uint8]
    times: Int64s
    groups: _Groups
    new_groups: Int32s
    new_rows: Int32s  # -row - 1 for a refresh


def _most_alike(numbers: Int64s) -> int:
    """Return how often the most frequent of ascending numbers occurs."""
    if not len(numbers):
        return 0
    changes = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 1, append=numbers[-1] + 1))
    return int(np.diff(changes).max())


def _fingerprint_keyless(
    key: pa.BinaryArray,
    ids: pa.BinaryArray,
    has_id: Flags | None,
    secret: UInt64s,
    row_bits: int,
    prints: UInt64s,
    marks: UInt64s,
) -> int:
    """`fingerprint_pairs` for records some of which have no key: theirs are made of the id alone, under another
    secret, so that no key, not even the empty one, equals a missing key."""
    has_key: Flags = key.is_valid().to_numpy(zero_copy_only=False)
    wanted = np.ones(len(key), np.bool_) if has_id is None else has_id
    parts = (*binary_parts(pc.fill_null(key, b"")), *binary_parts(ids))
    count = fingerprint_pairs(*parts, wanted & has_key, *secret, row_bits, prints, marks)
    found = fingerprint_pairs(*parts, wanted & ~has_key, *(secret ^ KEYLESS), row_bits, prints, marks[count:])
    return int(count + found)


def _masked(key: pa.BinaryArray, mask: Flags) -> pa.BinaryArray:
    """Return the keys where the mask is true, null elsewhere: other records advance no clock."""
    column = binary_column(key)
    return make_binary(np.ascontiguousarray(column.bounds), column.content, mask)
