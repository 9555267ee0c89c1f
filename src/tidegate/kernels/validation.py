"""Validate whole batches: the table of producers, the validation rules, and the loop over records.

The index of producers is an open-addressing table of row numbers by GUID: its size is a power of two, free slots are
EMPTY, and it is always larger than the rows, so that a probe ends.

A producer numbers its records by chain, and in each chain by sequence 0, 1, 2, … The first record of a chain is its
*start*, the last its *end*, which carries the checksum of all records before it. A producer of *headers only* writes
neither: its first data record opens its chain, which ends at the highest sequence; where a gap would be tolerated its
chain may also be entered in the middle. Two conditions relax the rules:

- *settled* (E): the push has ended, or the topic never had one. Where the head of the log may then be *gone*,
  a producer may first appear in the middle of a chain;
- *tolerated* (T): compaction may have removed records here, see `integrity.verdicts`.

The first match wins, in this order: chain (A), sequence (B), the record's own checksum (D), the chain's checksum (C).
When a fault *forces*, the state advances as if the record were sound; otherwise the partition stops. A record is
validated on a scratch copy of its producer's row, which replaces the row only if the rule says so; a record that simply
continues its chain takes a fast path, in place. `tests/support/validation_rules.py` has the rules in plain Python.

J1  a fault that does not force changes nothing: the true next record is still accepted afterwards;
J2  DUPLICATE never changes anything, and neither does a record at a known position that does not match its own
    checksum: that is CORRUPT and not a duplicate (other writers may copy headers to their own records);
J3  one loss is one finding: after a gap or fault a chain is tainted, and its end is accepted without a test of its
    checksum; and a forced end does end its chain, so that the next chain is not reported missing.

`validate_batch` returns the first row it has not validated, and in `state` the reason:

    DONE          no more rows
    STOPPED       this row has a fault that stops the partition; its verdict is set, the state is as before it
    NO_ROOM       a new producer, and no free row: grow the rows and call again
    NEEDS_SUMS    a chain with an ADHASH checksum, and `field_sums` is empty: compute them and call again
    PUSH_ENDS     this row ends the push: compare its manifest, set `checked` to its offset, and call again
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types

from tidegate.kernels.integrity import (
    CONTROL,
    END_OF_CHAIN,
    END_OF_PUSH,
    HEADERS_ONLY,
    MALFORMED,
    MANAGED,
    STAMP_ROW,
    START_OF_CHAIN,
    START_OF_PUSH,
    UNMANAGED,
)
from tidegate.kernels.jit import (
    BYTES,
    INT32S,
    INT64,
    INT64S,
    READ_INT64S,
    UINT32S,
    UINT64S,
    helper,
    kernel,
    load,
    pointer,
    rows_of,
    store,
)

# -- validation rules ------------------------------------------------------------------------------

LIVE, PUSHING, PUSHED = 0, 1, 2
# Verdicts, rules and notes, as in integrity/verdicts.py.
OK, DUPLICATE, MISSING, CORRUPT, UNREGISTERED_PRODUCER = 0, 1, 2, 3, 4
AFTER_END, UNSUPPORTED, IS_UNMANAGED, IS_HEARTBEAT = 5, 6, 7, 8
A1, A2, A3, A4, A5, A7, A8, A9, A10, A11, A12, A13 = 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13
B1, B2, B3, B4, B5, C3, C4, C5, C6, D1 = 21, 22, 23, 24, 25, 33, 34, 35, 36, 41
U1, U2, U3, U4, M1 = 51, 52, 53, 54, 61
TOLERATED, TOLERATED_SUSPECT, UNREGISTERED, TAINTED, IGNORED, UNEXPECTED = 1, 2, 4, 8, 16, 32
DURING_PUSH: Final = 64
DAMAGED: Final = 128
NO_TIME: Final = -1
UPDATE: Final = 3
ADHASH: Final = 4
ADHASH2: Final = 5
FINAL_FLAG: Final = 1
UNCOUNTED: Final = -1
MAX_SEQUENCE: Final = 2**31 - 1


class Settings(NamedTuple):
    """What does not change within a batch; truths are 0 and 1. `stops_…` are sets of verdicts, a bit for each."""

    now_ms: int
    compaction_lag_ms: int
    compacted_below: int
    """The offset below which compaction may have removed records, -1 unknown."""
    incoming_anchor: int
    always_tolerates: int
    head_may_be_gone: int
    stops_pushing: int
    stops_settled: int
    strict: int
    batch_only: int
    max_producers: int
    checked: int
    """The end of push whose manifest has been compared, -1 none."""
    is_short: int
    """… and does not agree."""


class PhaseRules(NamedTuple):
    settled: bool
    gone: bool
    forces: bool
    stops: int


class Outcome(NamedTuple):
    """`keeps`: the producer's row, as changed, is its new state."""

    verdict: int
    rule: int
    note: int
    keeps: bool


SETTINGS = types.NamedUniTuple(INT64, len(Settings._fields), Settings)


@helper
def tolerates(
    known: bool, known_time: int, known_offset: int, log_time: int, offset: int, settings: Settings
) -> int:
    if settings.always_tolerates:
        return TOLERATED
    lag, bound = settings.compaction_lag_ms, settings.compacted_below
    if lag < 0:
        return 0
    first_missing = known_offset + 1 if known else 0
    if bound >= 0 and first_missing >= bound:
        return 0
    incoming_is_old = log_time >= 0 and settings.now_ms - log_time >= lag
    if not settings.incoming_anchor and known and known_time >= 0:
        if settings.now_ms - known_time < lag:
            return 0
    elif not incoming_is_old:
        return 0
    if 0 <= bound <= offset or not incoming_is_old:
        return TOLERATED | TOLERATED_SUSPECT
    return TOLERATED


@helper
def is_supported(record: Any) -> Any:
    if record["kind"] != CONTROL:
        return record["kind"] <= UPDATE
    return record["control"] <= 8 and record["control"] != 4


@helper
def ends(record: Any) -> Any:
    return record["kind"] == CONTROL and record["control"] == END_OF_CHAIN


@helper
def is_headers_only(record: Any) -> Any:
    return record["kind"] != CONTROL and (record["flags"] & HEADERS_ONLY) != 0


@helper
def opens(record: Any) -> Any:
    is_start = record["kind"] == CONTROL and record["control"] == START_OF_CHAIN
    return record["sequence"] == 0 and (is_start or is_headers_only(record))


@helper
def step(producer: Any, record: Any, offset: int, log_time: int) -> None:
    """What `entered` and `moved` share."""
    producer["sequence"] = record["sequence"]
    if record["kind"] != CONTROL and producer["data_records"] != UNCOUNTED:
        producer["data_records"] += 1
    if record["timestamp"] > producer["producer_time"]:
        producer["producer_time"] = record["timestamp"]
    producer["log_time"] = log_time
    producer["offset"] = offset
    if is_headers_only(record):
        producer["registered"] = 1


@helper
def enter(producer: Any, known: bool, record: Any, offset: int, log_time: int) -> None:
    registered = opens(record) or is_headers_only(record)
    if not known:
        producer["guid_high"], producer["guid_low"] = record["guid_high"], record["guid_low"]
        producer["data_records"], producer["producer_time"] = 0, NO_TIME
    producer["chain"] = record["chain"]
    producer["registered"] = registered
    producer["checksum_type"] = record["announced_type"] if registered else 0
    producer["checksum"], producer["stamp_sum"], producer["records"] = 0, 0, 0
    producer["ended"], producer["final"], producer["tainted"] = 0, 0, 0
    step(producer, record, offset, log_time)


@helper
def add(producer: Any, record: Any, field_sums: Any, row: int) -> None:
    kind = producer["checksum_type"]
    if kind == ADHASH2:
        producer["checksum"] += np.uint64(record["crc"])
    elif kind == ADHASH:
        producer["checksum"] += np.uint64(load(field_sums, row))
    flags = np.uint64(record["flags"]) << np.uint64(56)
    producer["stamp_sum"] += np.uint64(record["timestamp"]) + flags
    producer["records"] += 1
    if record["sequence"] == MAX_SEQUENCE:
        producer["ended"] = 1


@helper
def end(producer: Any, record: Any) -> None:
    producer["ended"] = 1
    producer["final"] = record["flags"] & FINAL_FLAG


@helper
def force(producer: Any, record: Any, field_sums: Any, row: int) -> None:
    if ends(record):
        end(producer, record)
    elif producer["registered"] and not producer["ended"]:
        add(producer, record, field_sums, row)


@helper
def first_contact(
    record: Any, log_time: int, offset: int, phase_rules: PhaseRules, settings: Settings
) -> Outcome:
    if record["chain"] == 0 and opens(record):
        return Outcome(OK, A1, 0, True)
    note = 0
    if not phase_rules.gone and is_headers_only(record):
        note = tolerates(False, NO_TIME, -1, log_time, offset, settings)
    if phase_rules.gone or note:
        return Outcome(OK, A3 if record["chain"] == 0 else A5, note, True)
    return Outcome(UNREGISTERED_PRODUCER, A2 if record["chain"] == 0 else A4, 0, phase_rules.forces)


@helper
def place(
    producer: Any, record: Any, log_time: int, offset: int, phase_rules: PhaseRules, settings: Settings
) -> Outcome:
    """Of another chain than the present one."""
    if record["chain"] < producer["chain"]:
        return Outcome(DUPLICATE, A13, 0, False)
    if record["chain"] == producer["chain"] + 1 and producer["ended"]:
        if opens(record):
            return Outcome(OK, A7, 0, True)
        note = 0
        if is_headers_only(record):
            note = tolerates(True, producer["log_time"], producer["offset"], log_time, offset, settings)
        if note:
            return Outcome(OK, A10, note, True)
        return Outcome(UNREGISTERED_PRODUCER, A8, 0, phase_rules.forces)
    note = tolerates(True, producer["log_time"], producer["offset"], log_time, offset, settings)
    if not note:
        return Outcome(MISSING, A12, 0, phase_rules.forces)
    if opens(record):
        return Outcome(OK, A9, note, True)
    if phase_rules.settled:
        return Outcome(OK, A10, note, True)
    return Outcome(UNREGISTERED_PRODUCER, A11, 0, phase_rules.forces)


@helper
def same_chain(
    producer: Any, record: Any, log_time: int, offset: int, phase_rules: PhaseRules, settings: Settings
) -> Outcome:
    sequence, last = np.int64(record["sequence"]), np.int64(producer["sequence"])
    if sequence <= last:
        return Outcome(DUPLICATE, B2, 0, False)
    if sequence == last + 1:
        return Outcome(OK, B1, 0, True)
    if phase_rules.settled and not producer["registered"] and not is_headers_only(record):
        return Outcome(OK, B3, 0, True)
    note = tolerates(True, producer["log_time"], producer["offset"], log_time, offset, settings)
    if note:
        return Outcome(OK, B4, note, True)
    return Outcome(MISSING, B5, 0, phase_rules.forces)


@helper
def end_chain(
    known: bool, known_time: int, known_offset: int, producer: Any, placed: Outcome, record: Any, log_time: int,
    offset: int, forces: bool, settings: Settings,
) -> Outcome:  # fmt: skip
    tainted = producer["tainted"]
    end(producer, record)
    if not producer["registered"]:
        return Outcome(OK, placed.rule, placed.note | UNREGISTERED, True)
    if tainted:
        return Outcome(OK, placed.rule, placed.note | TAINTED, True)
    if (
        record["certified"]
        and record["certified_type"] == producer["checksum_type"]
        and record["certified_records"] == producer["records"]
        and record["certified_stamp_sum"] == producer["stamp_sum"]
        and record["certified_checksum"] == producer["checksum"]
    ):
        return Outcome(OK, C4, placed.note, True)
    note = tolerates(known, known_time, known_offset, log_time, offset, settings)
    if note:
        return Outcome(OK, C5, placed.note | note, True)
    return Outcome(CORRUPT, C6, 0, forces)


@helper
def validate_record(
    known: bool, producer: Any, record: Any, computed: Any, field_sums: Any, row: int, offset: int,
    log_time: int, phase_rules: PhaseRules, settings: Settings,
) -> Outcome:  # fmt: skip
    """One record; `producer` becomes its state afterwards, for the caller to keep or not."""
    forces = phase_rules.forces
    known_time = producer["log_time"] if known else NO_TIME
    known_offset = producer["offset"] if known else -1
    is_same = known and record["chain"] == producer["chain"]
    if not is_supported(record):
        if not is_same or record["sequence"] != np.int64(producer["sequence"]) + 1:
            return Outcome(UNSUPPORTED, U1, 0, False)
        step(producer, record, offset, log_time)
        producer["tainted"] = 1
        return Outcome(UNSUPPORTED, U1, 0, forces)
    if is_same:
        placed = same_chain(producer, record, log_time, offset, phase_rules, settings)
        if placed.verdict == DUPLICATE:
            return placed if computed == record["crc"] else Outcome(CORRUPT, D1, 0, False)
        step(producer, record, offset, log_time)
        if placed.rule == B4 or placed.rule == B5:
            producer["tainted"] = 1
    else:
        if known:
            placed = place(producer, record, log_time, offset, phase_rules, settings)
            if placed.verdict == DUPLICATE:
                return placed if computed == record["crc"] else Outcome(CORRUPT, D1, 0, False)
        else:
            placed = first_contact(record, log_time, offset, phase_rules, settings)
        enter(producer, known, record, offset, log_time)
    if placed.rule != B1 and placed.rule != A7 and placed.rule != A1:
        producer["data_records"] = UNCOUNTED
    if placed.verdict != OK:
        force(producer, record, field_sums, row)
        return placed
    if computed != record["crc"]:
        producer["tainted"] = 1
        force(producer, record, field_sums, row)
        return Outcome(CORRUPT, D1, 0, forces)
    if ends(record):
        return end_chain(
            known, known_time, known_offset, producer, placed, record, log_time, offset, forces, settings
        )
    if not producer["registered"]:
        return Outcome(OK, placed.rule, placed.note | UNREGISTERED, True)
    if producer["ended"] and producer["checksum_type"] != 0:
        note = tolerates(known, known_time, known_offset, log_time, offset, settings)
        if note:
            return Outcome(OK, placed.rule, placed.note | note, True)
        return Outcome(AFTER_END, C3, 0, forces)
    add(producer, record, field_sums, row)
    return placed


@helper
def continues(producer: Any, record: Any, computed: Any) -> bool:
    """A sound data record, next in an open chain: B1, and nothing else to look at."""
    return (
        record["chain"] == producer["chain"]
        and record["sequence"] == np.int64(producer["sequence"]) + 1
        and record["kind"] <= UPDATE
        and record["kind"] != CONTROL
        and computed == record["crc"]
        and producer["registered"]
        and not producer["ended"]
    )


# -- table of producers ----------------------------------------------------------------------------

PRODUCER_ROW: Final = np.dtype(
    [
        ("guid_high", "u8"),
        ("guid_low", "u8"),
        ("checksum", "u8"),
        ("stamp_sum", "u8"),
        ("records", "i8"),
        ("data_records", "i8"),
        ("producer_time", "i8"),
        ("log_time", "i8"),
        ("offset", "i8"),
        ("chain", "i4"),
        ("sequence", "i4"),
        ("registered", "u1"),
        ("ended", "u1"),
        ("final", "u1"),
        ("tainted", "u1"),
        ("checksum_type", "u1"),
    ],
    align=True,
)
PRODUCERS = rows_of(PRODUCER_ROW)
EMPTY: Final = -1


@helper
def first_place(high: Any, low: Any, mask: int) -> Any:
    """Where in the index a GUID is looked for first."""
    mixed = (high ^ (low >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ low ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return np.int64(mixed >> np.uint64(33)) & mask


@helper
def find_place(producers: Any, index: Any, mask: int, high: Any, low: Any) -> Any:
    """The place in the index that has this GUID, or the free one it would get."""
    place = first_place(high, low, mask)
    while True:
        slot = load(index, place)
        if slot == EMPTY:
            return place
        if producers[slot]["guid_high"] == high and producers[slot]["guid_low"] == low:
            return place
        place = (place + 1) & mask


@kernel(INT64(PRODUCERS, INT32S, types.uint64, types.uint64))
def find_producer(producers: Any, index: Any, high: Any, low: Any) -> int:
    """The row of a producer, EMPTY when unknown; the index is a power of two and larger than the rows."""
    places = pointer(index)
    return load(places, find_place(producers, places, len(index) - 1, high, low))


@helper
def fill_index(rows: Any, count: Any, index: Any) -> None:
    """Index the first `count` rows by GUID; of several rows of a producer, the last."""
    index[:] = EMPTY
    places, mask = pointer(index), len(index) - 1
    for slot in range(count):
        high, low = rows[slot]["guid_high"], rows[slot]["guid_low"]
        store(places, find_place(rows, places, mask, high, low), slot)


@kernel(types.void(PRODUCERS, INT64, INT32S))
def index_producers(producers: Any, count: int, index: Any) -> None:
    """Fill the index from the first `count` rows."""
    fill_index(producers, count, index)


# -- validating batches ----------------------------------------------------------------------------

HEARTBEAT_FLAG: Final = 2
NOT_YET: Final = 255
DONE, STOPPED, NO_ROOM, NEEDS_SUMS, PUSH_ENDS = 0, 1, 2, 3, 4
# Places in the `state` array: the part of a partition's state that is not one producer's.
PHASE, COUNT, PUSH_END, REASON, FAULTS, TOLD = 0, 1, 2, 3, 4, 5
TOLD_OF: Final = 6  # one place for each verdict
STATE_SIZE: Final = TOLD_OF + 9
KINDS_OF_FAULTS: Final = 6


@helper
def phase_rules_of(phase: int, settings: Settings) -> PhaseRules:
    settled = phase != PUSHING
    gone = settled and (settings.head_may_be_gone != 0 or phase == PUSHED)
    # A fault that stops the partition changes nothing, whatever its outcome says: the state is not written then.
    return PhaseRules(settled, gone, True, settings.stops_settled if settled else settings.stops_pushing)


@helper
def push_moves(record: Any, computed: Any, outcome: Outcome, offset: int, forces: bool, state: Any) -> int:
    """A start or end of push that counts moves the phase; the note of one that does not."""
    if record["kind"] != CONTROL or record["control"] > END_OF_PUSH or computed != record["crc"]:
        return 0
    verdict = outcome.verdict
    is_sound = verdict == OK or (forces and verdict in (MISSING, UNREGISTERED_PRODUCER))
    if not is_sound:
        return 0
    if record["control"] == START_OF_PUSH:
        if state[PHASE] != LIVE:
            return IGNORED
        state[PHASE] = PUSHING
        return 0
    if state[PHASE] == PUSHED:
        return IGNORED
    state[PHASE], state[PUSH_END] = PUSHED, offset
    return 0


@helper
def skip_rules(record: Any, computed: Any, settings: Settings) -> Outcome:
    """The outcome of records that no producer's state is asked about; NOT_YET for the others."""
    if record["state"] == UNMANAGED:
        return Outcome(IS_UNMANAGED, U3 if settings.strict else 0, 0, False)
    if record["state"] == MALFORMED:
        return Outcome(UNSUPPORTED, U2, 0, False)
    is_start = record["kind"] == CONTROL and record["control"] == START_OF_CHAIN
    if is_start and record["flags"] & HEARTBEAT_FLAG:
        if computed == record["crc"]:
            return Outcome(IS_HEARTBEAT, 0, 0, False)
        return Outcome(CORRUPT, D1, 0, False)
    return Outcome(NOT_YET, 0, 0, False)


@helper
def is_fault(outcome: Outcome) -> bool:
    return MISSING <= outcome.verdict <= UNSUPPORTED or outcome.rule == U3


@helper
def is_gap(outcome: Outcome) -> bool:
    return outcome.verdict == MISSING or outcome.verdict == UNREGISTERED_PRODUCER


@helper
def stops(outcome: Outcome, note: int, phase_rules: PhaseRules) -> bool:
    if note & DAMAGED and (phase_rules.stops >> CORRUPT) & 1 != 0:
        return True
    return (phase_rules.stops >> outcome.verdict) & 1 != 0


@helper
def is_kept(record: Any, outcome: Outcome, note: int) -> int:
    """Whether a record is data to go on with: a faulty one never is, one behind a gap is."""
    if note & (UNEXPECTED | DAMAGED) or (record["state"] == MANAGED and record["kind"] == CONTROL):
        return 0
    if is_fault(outcome):
        return 1 if is_gap(outcome) else 0
    return 0 if outcome.verdict == DUPLICATE else 1


@kernel(
    INT64(
        rows_of(STAMP_ROW), UINT32S, UINT64S, READ_INT64S, READ_INT64S, INT64, SETTINGS,
        PRODUCERS, INT32S, PRODUCERS, INT64S, BYTES, BYTES, BYTES, BYTES, PRODUCERS, INT64S,
    )
)  # fmt: skip
def validate_batch(
    records: Any, crcs: Any, field_sums: Any, offsets: Any, log_times: Any, start: int, settings: Settings,
    producers: Any, index: Any, scratch: Any, state: Any, verdicts: Any, rules: Any, notes: Any,
    kept: Any, before: Any, fault_rows: Any,
) -> int:  # fmt: skip
    """Judge rows from `start`. `before` gets the producer's state in front of the first faults, for reports.

    `kept` gets 1 for data records to go on with; `scratch` is one row.
    """
    places, mask = pointer(index), len(index) - 1
    into_verdicts, into_rules, into_notes = pointer(verdicts), pointer(rules), pointer(notes)
    into_kept, sums, has_sums = pointer(kept), pointer(field_sums), len(field_sums) == len(records)
    computed, at_offsets, at_times = pointer(crcs), pointer(offsets), pointer(log_times)
    phase_rules = phase_rules_of(state[PHASE], settings)
    slot, high, low = EMPTY, np.uint64(0), np.uint64(0)
    for row in range(start, len(records)):
        record = records[row]
        offset, log_time, crc = load(at_offsets, row), load(at_times, row), load(computed, row)
        known, free, note = False, 0, 0
        outcome = skip_rules(record, crc, settings)
        is_judged = outcome.verdict == NOT_YET
        if is_judged:
            if slot == EMPTY or record["guid_high"] != high or record["guid_low"] != low:
                high, low = record["guid_high"], record["guid_low"]
                free = find_place(producers, places, mask, high, low)
                slot = load(places, free)
            known = slot != EMPTY
            if not has_sums:
                sums_fields = known and producers[slot]["checksum_type"] == ADHASH
                if sums_fields or record["announced_type"] == ADHASH:
                    state[REASON] = NEEDS_SUMS
                    return row
            if settings.batch_only and state[PHASE] == PUSHED and record["kind"] != CONTROL:
                note = UNEXPECTED
            if known and continues(producers[slot], record, crc):
                producer = producers[slot]
                step(producer, record, offset, log_time)
                add(producer, record, sums, row)
                store(into_verdicts, row, OK)
                store(into_rules, row, B1)
                store(into_notes, row, note)
                store(into_kept, row, 0 if note else 1)
                continue
            ends_push = record["kind"] == CONTROL and record["control"] == END_OF_PUSH
            ends_push = ends_push and state[PHASE] != PUSHED
            if ends_push and settings.checked != offset:
                state[REASON] = PUSH_ENDS
                return row
            if not known and state[COUNT] >= settings.max_producers:
                outcome = Outcome(UNREGISTERED_PRODUCER, U4, 0, False)
            else:
                if known:
                    scratch[0] = producers[slot]
                outcome = validate_record(
                    known, scratch[0], record, crc, sums, row, offset, log_time, phase_rules, settings
                )
                if ends_push and settings.is_short and outcome.verdict == OK:
                    outcome = Outcome(MISSING, M1, 0, phase_rules.forces)
                if outcome.keeps and not known and state[COUNT] >= len(producers):
                    state[REASON] = NO_ROOM
                    return row
        store(into_verdicts, row, outcome.verdict)
        store(into_rules, row, outcome.rule)
        note = outcome.note if outcome.verdict == DUPLICATE else outcome.note | note
        if is_fault(outcome):
            if not phase_rules.settled:
                note |= DURING_PUSH
            if is_judged and is_gap(outcome) and crc != record["crc"]:
                note |= DAMAGED
            is_last = stops(outcome, note, phase_rules)
            kind = TOLD_OF + outcome.verdict
            # the first of each kind, however many of another there are; and always the one that stops
            if state[kind] < max(1, len(before) // KINDS_OF_FAULTS) or is_last:
                told = min(state[TOLD], len(before) - 1)
                state[TOLD], state[kind] = told + 1, state[kind] + 1
                fault_rows[told] = row
                if known:
                    before[told] = producers[slot]
                else:
                    before[told]["chain"] = -1
            state[FAULTS] += 1
            if is_last:
                store(into_notes, row, DURING_PUSH if not phase_rules.settled else 0)
                store(into_kept, row, 0)
                state[REASON] = STOPPED
                return row
        if outcome.keeps:
            if not known:
                slot = state[COUNT]
                store(places, free, slot)
                state[COUNT] += 1
            producers[slot] = scratch[0]
        store(into_kept, row, is_kept(record, outcome, note))
        if is_judged:
            note |= push_moves(record, crc, outcome, offset, phase_rules.forces, state)
            phase_rules = phase_rules_of(state[PHASE], settings)
        store(into_notes, row, note)
    state[REASON] = DONE
    return len(records)
