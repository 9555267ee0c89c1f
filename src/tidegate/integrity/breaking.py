"""A copy of a topic with one known damage in it: to see that a check, or a pipeline, notices.

Owns reading the original, carrying out a plan of `damage`, and telling what was done. The copy goes through the
ordinary reader and writer, so its files are sound; what is wrong with it only the records' own metadata tell,
which travel in the headers.

K1  the original is read and nothing else; the copy's folder must not exist before.
K2  the same seed, topic and kind give the same damage.
K3  everything is read and planned once before the copy's folder is made.

The copy begins at the original's first offset and has no gaps: offsets that compaction or a transaction left
out are closed up. How far compaction had come is told in the copy, too, so that its gaps are judged alike.
Memory: some 100 bytes per record for the survey, and one read's records.

Thread rule: one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tidegate.errors import ConflictError, InvalidError
from tidegate.integrity.columns import STAMP_ROW, IntegrityColumns, control_payload, read_columns, times_of
from tidegate.integrity.damage import DamageKind, Plan, Slot, Survey, choose
from tidegate.integrity.header import HEADER_KEY, ControlType, Stamp
from tidegate.integrity.manifest import Manifest
from tidegate.integrity.outlet import SCHEMA
from tidegate.integrity.tolerance import UNKNOWN_BOUND, tolerance_of
from tidegate.log.checkpoints import CleanerCheckpoint
from tidegate.log.log import Log
from tidegate.randomness import SeededRandomness

_KEPT: Final = ("cleanup.policy", "min.compaction.lag.ms", "compression.type")
"""Settings the copy takes over: those that say which gaps are fine. Others could refuse or change a record."""

_LARGEST_BATCH: Final = 2**31 - 1  # what was small by compression must fit without it


@dataclass(frozen=True, slots=True)
class Damage:
    """What was done. `before` are offsets of the original, `after` where those records stand in the copy."""

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
    """The producers of a manifest; none where it cannot be read, which is damage that was there before."""
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
