"""Copy a topic with one known fault in it, to test that a check or a pipeline detects it.

| kind | does |
|---|---|
| drop | removes one data record, or `count` of its producer in a row |
| repeat | inserts a record again directly after itself, `count` times |
| flip | changes one bit of a record's value, or of its key where the value is empty |
| swap | exchanges key and value of two records of one producer; their headers stay |
| reorder | exchanges two neighbouring records of one producer, headers and all |
| truncate-tail | removes a producer's records from one on, or its last `count` |
| forget-producer | removes all of a producer's records, or its first `count` |
| future-clock | sets the producer's clock in one record's header a day ahead |

A `Plan` states what a validator will report for a topic that was sound before. That may be nothing: loss at a
producer's end, and of a whole producer, leaves no gap in any numbering and is detected by the manifest of a push only;
a validator tolerates loss that compaction explains (`verdicts`). The copy is made with the ordinary reader and writer,
so its files are sound. It begins at the original's first offset, has no offset gaps, and records up to which offset the
original was compacted.

K1  the original is only read; the copy's folder must not exist before.
K2  the same seed, topic and kind give the same damage.
K3  everything is read and planned once before the copy's folder is made.

Memory: about 100 bytes per record for the survey, and one read's records. Thread rule: one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.errors import ConflictError, InvalidError
from tidegate.integrity.columns import IntegrityColumns, control_payload, read_columns, times_of
from tidegate.integrity.header import HEADER_KEY, ControlType, RecordKind, Stamp
from tidegate.integrity.sender import SCHEMA
from tidegate.integrity.state import Manifest
from tidegate.integrity.verdicts import UNKNOWN_BOUND, Tolerance, Verdict, tolerance_of
from tidegate.kernels.integrity import MANAGED, STAMP_ROW
from tidegate.log.checkpoints import CleanerCheckpoint
from tidegate.log.log import Log
from tidegate.randomness import Randomness, SeededRandomness

# -- what a fault does to the records --------------------------------------------------------------

AHEAD_MS: Final = 86_400_000
_MOST_TRIES: Final = 1000


class DamageKind(Enum):
    """The kinds of faults."""

    DROP = "drop"
    REPEAT = "repeat"
    FLIP = "flip"
    SWAP = "swap"
    REORDER = "reorder"
    TRUNCATE_TAIL = "truncate-tail"
    FORGET_PRODUCER = "forget-producer"
    FUTURE_CLOCK = "future-clock"


COUNTED: Final = frozenset(
    {DamageKind.DROP, DamageKind.REPEAT, DamageKind.TRUNCATE_TAIL, DamageKind.FORGET_PRODUCER}
)
"""The kinds that take a count."""


class Slot(NamedTuple):
    """One record of the copy that differs from the original's; numbers are rows of the survey."""

    source: int
    payload_of: int | None = None  # key and value of another record
    flips: bool = False
    ahead_ms: int = 0


class Seen(NamedTuple):
    """An expected verdict and its record: `row` counts the copy's records from 0.

    `source` is the original's row of that record where the verdict depends on the producer's previous record.
    """

    row: int
    verdict: Verdict
    source: int | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """The metadata of all records of a partition, in offset order; `listed` are the producers in its push's manifest.

    `tolerance` says which gaps of the original are no faults, at the time `now_ms`; `log_times` are the records'.
    """

    partition: int
    log_start: int
    offsets: NDArray[np.int64]
    columns: IntegrityColumns
    listed: frozenset[bytes] = frozenset()
    log_times: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    tolerance: Tolerance = field(default_factory=Tolerance)
    now_ms: int = 0
    owners: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        rows = self.columns.rows
        pairs = np.stack([rows["guid_high"], rows["guid_low"]], axis=1)
        owners = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
        numbered = (self.columns.state == MANAGED) & ~self.columns.is_heartbeat
        object.__setattr__(self, "owners", np.where(numbered, owners, -1))

    @property
    def is_data(self) -> NDArray[np.bool_]:
        """Mask of numbered data records."""
        chosen: NDArray[np.bool_] = (self.owners >= 0) & (self.columns.kind != RecordKind.CONTROL)
        return chosen

    @property
    def end_of_push(self) -> int | None:
        """The row that ends the push, None without one."""
        ends = self._controls(ControlType.END_OF_PUSH)
        starts = self._controls(ControlType.START_OF_PUSH)
        return int(ends[0]) if len(ends) and len(starts) and starts[0] < ends[0] else None

    def row_at(self, offset: int) -> int:
        """The row of a numbered record."""
        row = int(np.searchsorted(self.offsets, offset))
        if row == len(self.offsets) or self.offsets[row] != offset:
            raise InvalidError(f"partition {self.partition} has no record at offset {offset}")
        if self.owners[row] < 0:
            raise InvalidError(
                f"partition {self.partition} offset {offset} carries no integrity metadata; choose a record that "
                f"was written with integrity=True"
            )
        return row

    @property
    def compacted_rows(self) -> int:
        """How many of the first rows lie where compaction may have removed records."""
        bound = self.tolerance.bound()
        return len(self.offsets) if bound == UNKNOWN_BOUND else int(np.searchsorted(self.offsets, bound))

    def is_headers_only(self, row: int) -> bool:
        """Whether the row is a record of a producer without control records."""
        return self.columns.stamp(row).is_headers_only

    def of_owner(self, row: int, start: int = 0) -> NDArray[np.int64]:
        """The rows of a record's producer, from `start` on."""
        return np.flatnonzero(self.owners[start:] == self.owners[row]) + start

    def _controls(self, control: ControlType) -> NDArray[np.int64]:
        return np.flatnonzero(
            (self.owners >= 0) & self.columns.is_control & (self.columns.control == control)
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one fault: `changed` maps a row to the records that replace it, none where it is removed."""

    kind: DamageKind
    survey: Survey
    touched: tuple[int, ...]
    """The original's rows the damage is about."""
    changed: Mapping[int, tuple[Slot, ...]]
    seen: tuple[Seen, ...] = ()
    tolerated: tuple[Seen, ...] = ()
    """What would be seen if compaction could not have done it."""

    @property
    def producer(self) -> bytes:
        """The GUID of the producer whose records it is about."""
        return self.survey.columns.guid(self.touched[0])

    @property
    def compacted_below(self) -> int:
        """The offset of the copy below which compaction may have removed records."""
        return self.survey.log_start + self.row_in_copy(self.survey.compacted_rows)

    def row_in_copy(self, row: int) -> int:
        """The row in the copy of an original row, or where it would be."""
        return row + sum(len(slots) - 1 for changed, slots in self.changed.items() if changed < row)


def choose(
    surveys: list[Survey], kind: DamageKind, *, offset: int | None, count: int | None, randomness: Randomness
) -> Plan:
    """Plan the fault at the given offset or at a random one, preferably where a validator detects it."""
    _check_count(kind, offset, count)
    if offset is not None:
        if len(surveys) != 1:
            raise InvalidError(f"offset {offset} of which partition? There are {len(surveys)}; choose one")
        return _judged(_plan(surveys[0], kind, surveys[0].row_at(offset), count))
    fallback: Plan | None = None
    first = randomness.below(len(surveys))
    for survey in surveys[first:] + surveys[:first]:
        candidates = _candidates(survey, kind, count)
        turn = randomness.below(len(candidates)) if len(candidates) else 0
        for row in np.roll(candidates, -turn)[:_MOST_TRIES].tolist():
            try:
                plan = _judged(_plan(survey, kind, row, count))
            except InvalidError:  # this kind does not fit here; try the next place
                continue
            if plan.seen:
                return plan
            fallback = fallback or plan
    if fallback is None:
        raise InvalidError(
            f"no place for {kind.value}: it takes records written with integrity=True"
            + ("" if count is None else f", and enough of them for count {count}")
        )
    return fallback


def _check_count(kind: DamageKind, offset: int | None, count: int | None) -> None:
    if count is None:
        return
    if kind not in COUNTED:
        raise InvalidError(f"{kind.value} takes no count; it strikes one place")
    if count < 1:
        raise InvalidError(f"count={count}: choose 1 or more")
    if kind is DamageKind.TRUNCATE_TAIL and offset is not None:
        raise InvalidError("truncate-tail begins at an offset or takes the last so many records; keep one")


def _candidates(survey: Survey, kind: DamageKind, count: int | None) -> NDArray[np.int64]:
    data = np.flatnonzero(survey.is_data)
    whole = kind is DamageKind.FORGET_PRODUCER or (kind is DamageKind.TRUNCATE_TAIL and count is not None)
    if whole:  # any record stands for its producer
        return np.sort(data[np.unique(survey.owners[data], return_index=True)[1]])
    return data


def _plan(survey: Survey, kind: DamageKind, row: int, count: int | None) -> Plan:
    by_producer = kind in (DamageKind.TRUNCATE_TAIL, DamageKind.FORGET_PRODUCER)
    if not by_producer and not survey.is_data[row]:
        raise InvalidError(
            f"offset {survey.offsets[row]} is a control record; {kind.value} is for data records"
        )
    if kind is DamageKind.DROP:
        return _drop(survey, row, count or 1)
    if kind is DamageKind.REPEAT:
        again = count or 1
        seen = tuple(Seen(row + number, Verdict.DUPLICATE) for number in range(1, again + 1))
        return Plan(kind, survey, (row,), {row: (Slot(row),) * (again + 1)}, seen)
    if kind is DamageKind.FLIP:
        return Plan(kind, survey, (row,), {row: (Slot(row, flips=True),)}, (Seen(row, Verdict.CORRUPT),))
    if kind is DamageKind.SWAP:
        return _swap(survey, row)
    if kind is DamageKind.REORDER:
        return _reorder(survey, row)
    if kind is DamageKind.FUTURE_CLOCK:
        return _future_clock(survey, row)
    if kind is DamageKind.TRUNCATE_TAIL:
        return _truncate_tail(survey, row, count)
    return _forget(survey, row, count)


def _drop(survey: Survey, row: int, count: int) -> Plan:
    mine = survey.of_owner(row, row)
    lost = mine[:count]
    if len(lost) < count or not _in_one_chain(survey, lost):
        raise InvalidError(f"fewer than {count} data records in a row from offset {survey.offsets[row]} on")
    return _loss(survey, DamageKind.DROP, lost, mine[count:], Verdict.MISSING)


def _truncate_tail(survey: Survey, row: int, count: int | None) -> Plan:
    mine = survey.of_owner(row)
    lost = mine[mine >= row] if count is None else mine[-count:]
    if len(lost) == len(mine):
        raise InvalidError(f"that is all its producer's {len(mine)} records; use forget-producer")
    return _loss(survey, DamageKind.TRUNCATE_TAIL, lost, mine[:0], Verdict.MISSING)


def _forget(survey: Survey, row: int, count: int | None) -> Plan:
    mine = survey.of_owner(row)
    lost = mine if count is None else mine[:count]
    return _loss(survey, DamageKind.FORGET_PRODUCER, lost, mine[len(lost) :], Verdict.UNREGISTERED_PRODUCER)


def _loss(
    survey: Survey,
    kind: DamageKind,
    lost: NDArray[np.int64],
    behind: NDArray[np.int64],
    verdict: Verdict,
) -> Plan:
    """Plan a loss: detected at the producer's next record, else at the end of a push that lists the producer."""
    rows = tuple(lost.tolist())
    plan = Plan(kind, survey, rows, dict.fromkeys(rows, ()))
    end = survey.end_of_push
    is_listed = end is not None and plan.producer in survey.listed and end not in plan.changed
    next_row = int(behind[0]) if len(behind) else None
    if survey.is_headers_only(rows[0]) and survey.of_owner(rows[0])[0] == rows[0]:
        verdict = Verdict.UNREGISTERED_PRODUCER  # the record that opens the chain is among them
    if end is not None and is_listed and rows[0] < end and (next_row is None or next_row > end):
        seen = Seen(plan.row_in_copy(end), Verdict.MISSING)
    elif next_row is not None:
        seen = Seen(plan.row_in_copy(next_row), verdict, next_row)
    else:
        return plan
    return replace(plan, seen=(seen,))


def _swap(survey: Survey, row: int) -> Plan:
    columns = survey.columns
    mine = survey.of_owner(row, row + 1)
    other = mine[(columns.kind[mine] == columns.kind[row]) & (columns.crc[mine] != columns.crc[row])]
    if columns.kind[row] != RecordKind.PUT or not len(other):
        raise InvalidError(
            f"nothing to swap offset {survey.offsets[row]} with: it takes two values of a producer"
        )
    twin = int(other[0])
    changed = {row: (Slot(row, payload_of=twin),), twin: (Slot(twin, payload_of=row),)}
    seen = (Seen(row, Verdict.CORRUPT), Seen(twin, Verdict.CORRUPT))
    return Plan(DamageKind.SWAP, survey, (row, twin), changed, seen)


def _reorder(survey: Survey, row: int) -> Plan:
    pair = survey.of_owner(row, row)[:2]
    if len(pair) < 2 or not _in_one_chain(survey, pair):
        raise InvalidError(f"no data record follows offset {survey.offsets[row]} in its chain")
    first, second = (int(number) for number in pair)
    changed = {first: (Slot(second),), second: (Slot(first),)}
    opens = survey.is_headers_only(first) and survey.of_owner(first)[0] == first
    verdict = Verdict.UNREGISTERED_PRODUCER if opens else Verdict.MISSING
    seen = (Seen(first, verdict, second), Seen(second, Verdict.DUPLICATE))
    return Plan(DamageKind.REORDER, survey, (first, second), changed, seen)


def _future_clock(survey: Survey, row: int) -> Plan:
    """Plan a wrong clock: detected at the chain's end, because a record's checksum does not cover the producer's clock.

    Without control records it does, and the record itself shows it.
    """
    if survey.is_headers_only(row):
        changed = {row: (Slot(row, ahead_ms=AHEAD_MS),)}
        return Plan(DamageKind.FUTURE_CLOCK, survey, (row,), changed, (Seen(row, Verdict.CORRUPT),))
    columns, behind = survey.columns, survey.of_owner(row, row)
    is_end = columns.is_control[behind] & (columns.control[behind] == ControlType.END_OF_CHAIN)
    ends = behind[is_end & (columns.chain[behind] == columns.chain[row])]
    seen = (Seen(int(ends[0]), Verdict.CORRUPT, int(ends[0])),) if len(ends) else ()
    changed = {row: (Slot(row, ahead_ms=AHEAD_MS),)}
    return Plan(DamageKind.FUTURE_CLOCK, survey, (row,), changed, seen)


def _judged(plan: Plan) -> Plan:
    """The plan with tolerated verdicts moved from `seen` to `tolerated`."""
    seen: list[Seen] = []
    tolerated: list[Seen] = []
    for one in plan.seen:
        (tolerated if _is_tolerated(plan, one) else seen).append(one)
    return replace(plan, seen=tuple(seen), tolerated=tuple(tolerated))


def _is_tolerated(plan: Plan, seen: Seen) -> bool:
    survey, source = plan.survey, seen.source
    if source is None:
        return False
    is_gap = plan.kind is not DamageKind.FUTURE_CLOCK
    mine = survey.of_owner(source)
    before = mine[mine < (min(plan.touched) if is_gap else source)]
    known_offset = known_time = -1
    if len(before):
        row = int(before[-1])
        known_offset, known_time = survey.log_start + plan.row_in_copy(row), int(survey.log_times[row])
    elif survey.log_start > 0:
        return True  # the producer's first records aged out, for all that a validator knows
    elif not survey.is_headers_only(source):
        return False
    tolerance = survey.tolerance
    if tolerance.bound() != UNKNOWN_BOUND:
        tolerance = replace(tolerance, compacted_below=lambda: plan.compacted_below)
    note = tolerance.note(
        survey.log_start + seen.row,
        int(survey.log_times[source]),
        survey.now_ms,
        known_offset=known_offset,
        known_time=known_time,
    )
    return bool(note)


def _in_one_chain(survey: Survey, rows: NDArray[np.int64]) -> bool:
    return bool(
        survey.is_data[rows].all() and (survey.columns.chain[rows] == survey.columns.chain[rows[0]]).all()
    )


# -- the copy --------------------------------------------------------------------------------------

_KEPT: Final = ("cleanup.policy", "min.compaction.lag.ms", "compression.type")
"""Settings the copy takes over: those that say which gaps are fine. Others could refuse or change a record."""
_LARGEST_BATCH: Final = 2**31 - 1  # the decompressed batch must fit, too


@dataclass(frozen=True, slots=True)
class Damage:
    """The applied fault. `before` are offsets in the original, `after` those of the same records in the copy."""

    kind: DamageKind
    topic: str
    partition: int
    producer: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    seen: tuple[tuple[int, str], ...]
    """Offset in the copy and verdict, of all that a validator says; empty where nothing can show it."""
    tolerated: tuple[int, ...]
    """Offsets in the copy where a validator says nothing because compaction, or age, explains what it finds."""
    into: Path

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind.value,
            "topic": self.topic,
            "partition": self.partition,
            "producer": self.producer,
            "before": list(self.before),
            "after": list(self.after),
            "seen": [{"offset": offset, "verdict": verdict} for offset, verdict in self.seen],
            "tolerated": list(self.tolerated),
            "into": str(self.into),
        }

    def __str__(self) -> str:
        after = f"now at {_places(self.after)}" if self.after else "removed"
        told = ", ".join(f"{verdict} at {offset}" for offset, verdict in self.seen)
        return (
            f"{self.kind.value}: {self.topic}-{self.partition} {_places(self.before)} of producer "
            f"{self.producer}, {after} in {self.into}; "
            f"to be seen: {told or self._why_nothing}"
        )

    @property
    def _why_nothing(self) -> str:
        if self.tolerated:
            return f"nothing at {_places(self.tolerated)}, where compaction or retention explains it"
        return "nothing, no numbering or manifest covers it"


def break_topic(
    log: Log,
    topic: str,
    kind: DamageKind,
    *,
    into: Path,
    partition: int | None = None,
    offset: int | None = None,
    count: int | None = None,
    seed: int = 0,
) -> Damage:
    """Copy `topic` into a new log folder with one damage, at `offset` or at a place chosen by `seed`."""
    _refuse_target(log, into)
    numbers = log.describe(topic).partition_numbers
    if partition is not None and partition not in numbers:
        raise InvalidError(
            f"topic {topic} has no partition {partition}", kafka_name="UNKNOWN_TOPIC_OR_PARTITION"
        )
    chosen = numbers if partition is None else (partition,)
    surveys = [_survey(log, topic, number) for number in chosen]
    plan = choose(surveys, kind, offset=offset, count=count, randomness=SeededRandomness(seed))
    changed = {
        row: [_record(log, topic, plan.survey, slot) for slot in slots] for row, slots in plan.changed.items()
    }
    _copy(log, topic, into, plan, changed)
    return _told(plan, topic, into)


# -- reading -----------------------------------------------------------------------------------------


def _survey(log: Log, topic: str, partition: int) -> Survey:
    offsets, rows = [np.zeros(0, np.int64)], [np.zeros(0, STAMP_ROW)]
    times = [np.zeros(0, np.int64)]
    listed: frozenset[bytes] = frozenset()
    log_start = log.view(topic, partition).bounds().log_start
    for batch in log.reader(topic, [partition], control_records=True):
        columns = read_columns(batch.column("headers"))
        offsets.append(batch.column("offset").to_numpy())
        rows.append(columns.rows)
        times.append(times_of(batch))
        ends = columns.is_control & (columns.control == ControlType.END_OF_PUSH)
        for row in np.flatnonzero(ends).tolist():
            listed = listed or _listed(control_payload(batch.column("headers"), row))
    columns = IntegrityColumns(np.concatenate(rows))
    tolerance = tolerance_of(log, topic, partition)
    if (bound := tolerance.bound()) != UNKNOWN_BOUND:  # asked once, after all was read
        tolerance = replace(tolerance, compacted_below=lambda: bound)
    return Survey(
        partition,
        log_start,
        np.concatenate(offsets),
        columns,
        listed,
        np.concatenate(times),
        tolerance,
        log.clock.now_ms(),
    )


def _listed(payload: bytes | None) -> frozenset[bytes]:
    """The producers of a manifest; none where it cannot be read because the original was damaged."""
    try:
        return frozenset(sent.guid for sent in Manifest.from_bytes(payload or b"").producers)
    except InvalidError:
        return frozenset()


def _record(log: Log, topic: str, survey: Survey, slot: Slot) -> pa.RecordBatch:
    """One damaged record, ready to be written."""
    record = _row(log, topic, survey, slot.source)
    if slot.payload_of is not None:
        other = _row(log, topic, survey, slot.payload_of)
        record |= {"key": other["key"], "value": other["value"]}
    if slot.flips:
        name = "value" if record["value"] else "key"
        if not record[name]:
            raise InvalidError(
                f"{topic}-{survey.partition} offset {survey.offsets[slot.source]} has neither key nor value to "
                f"flip a bit of; choose another offset or seed"
            )
        middle = len(record[name]) // 2
        flipped = bytearray(record[name])
        flipped[middle] ^= 1
        record[name] = bytes(flipped)
    if slot.ahead_ms:
        record["headers"] = [_ahead(header, slot.ahead_ms) for header in record["headers"]]
    return pa.RecordBatch.from_pylist([record], schema=SCHEMA)


def _row(log: Log, topic: str, survey: Survey, row: int) -> dict[str, Any]:
    offset = int(survey.offsets[row])
    found = log.reader(
        topic, [survey.partition], start=offset, stop=offset + 1, control_records=True
    ).read_all()
    fields: dict[str, Any] = found.select(SCHEMA.names).to_pylist()[0]
    return fields


def _ahead(header: dict[str, Any], ahead_ms: int) -> dict[str, Any]:
    if header["key"] != HEADER_KEY:
        return header
    stamp = Stamp.from_bytes(header["value"])
    return header | {"value": stamp._replace(timestamp=stamp.timestamp + ahead_ms).to_bytes()}


# -- writing -----------------------------------------------------------------------------------------


def _refuse_target(log: Log, into: Path) -> None:
    if log.files.exists(into):
        raise ConflictError(f"{into} exists already; name a folder that does not, or remove it")
    if into.resolve().is_relative_to(log.path.resolve()):
        raise InvalidError(f"{into} lies inside the log {log.path}; name a folder outside of it")


def _copy(log: Log, topic: str, into: Path, plan: Plan, changed: dict[int, list[pa.RecordBatch]]) -> None:
    description = log.describe(topic)
    settings: dict[str, Any] = {name: description.config.value(name) for name in _KEPT}
    settings["max.message.bytes"] = _LARGEST_BATCH
    with Log(into, files=log.files, clock=log.clock, durability=log.durability) as copy:
        copy.create_topic(topic, max(description.partition_numbers) + 1, settings)
        writer = copy.writer(topic)
        for number in description.partition_numbers:
            log_start = log.view(topic, number).bounds().log_start
            if log_start > 0:
                copy.partition(topic, number).truncate_fully(log_start)
            is_damaged = plan.survey.partition == number
            edits = changed if is_damaged else {}
            edited = np.array(sorted(edits), np.int64)
            row = compacted = 0
            below = log.compacted_below(topic, number)
            for batch in log.reader(topic, [number], control_records=True):
                compacted += int((batch.column("offset").to_numpy() < below()).sum())
                low, high = np.searchsorted(edited, [row, row + batch.num_rows])
                here = {place - row: edits[place] for place in edited[low:high].tolist()}
                row += batch.num_rows
                table = pa.Table.from_batches(_edited(batch.select(SCHEMA.names), here), SCHEMA)
                if table.num_rows:
                    writer.write(table, partition=number)
            if description.config.compacts:
                bound = plan.compacted_below if is_damaged else log_start + compacted
                CleanerCheckpoint(into, files=log.files, clock=log.clock).put(topic, number, bound)


def _edited(batch: pa.RecordBatch, edits: dict[int, list[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """The records of a batch, with those exchanged whose rows in it are in `edits`, in ascending order."""
    if not any(edits.values()):
        kept = np.ones(batch.num_rows, np.bool_)
        kept[list(edits)] = False
        yield _plain(batch.filter(pa.array(kept)) if edits else batch)
        return
    done = 0
    for row, records in edits.items():
        yield _plain(batch.slice(done, row - done))
        yield from records
        done = row + 1
    yield _plain(batch.slice(done))


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(batch.columns, schema=SCHEMA)


def _told(plan: Plan, topic: str, into: Path) -> Damage:
    start = plan.survey.log_start
    after: list[int] = []
    for row in (row for row in plan.touched if plan.changed[row]):
        first = start + plan.row_in_copy(row)
        after += range(first, first + len(plan.changed[row]))
    if plan.kind is DamageKind.REORDER:
        after.reverse()
    return Damage(
        kind=plan.kind,
        topic=topic,
        partition=plan.survey.partition,
        producer=plan.producer.hex(),
        before=tuple(int(plan.survey.offsets[row]) for row in plan.touched),
        after=tuple(after),
        seen=tuple((start + seen.row, seen.verdict.name) for seen in plan.seen),
        tolerated=tuple(start + seen.row for seen in plan.tolerated),
        into=into,
    )


def _places(offsets: tuple[int, ...]) -> str:
    if len(offsets) <= 3:
        return f"offset{'s' if len(offsets) > 1 else ''} {', '.join(map(str, offsets))}"
    return f"{len(offsets)} offsets from {offsets[0]} to {offsets[-1]}"
