"""The integrity decision table over whole batches: and what is done around it: unmanaged records, pushes, stops.

Walks records in offset order with one state row per producer, found by GUID. A row is judged on a scratch copy of
its producer, which takes the producer's place only if the verdict says so; a record that simply continues its
chain takes a short way, in place.

`judge_records` answers the first row it has not judged, and in `state` why it stopped there:

    DONE          there are no more
    STOPPED       this row has a fault that stops the partition; its verdict is set, the state is as before it
    NO_ROOM       a new producer, and no free row: grow the rows and go on
    NEEDS_SUMS    a chain summed up by ADHASH, and `field_sums` is empty: compute them and go on
    PUSH_ENDS     this row ends the push: compare its manifest, set `checked` to its offset, and go on
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import BYTES, INT32S, INT64, INT64S, READ_INT64S, kernel, rows_of
from tidegate.kernels.decision_table import (
    ADHASH,
    B1,
    CORRUPT,
    D1,
    DAMAGED,
    DUPLICATE,
    DURING_PUSH,
    IGNORED,
    IS_HEARTBEAT,
    IS_UNMANAGED,
    LIVE,
    M1,
    MISSING,
    OK,
    PUSHED,
    PUSHING,
    SETTINGS,
    U2,
    U3,
    U4,
    UNEXPECTED,
    UNREGISTERED_PRODUCER,
    UNSUPPORTED,
    Footing,
    Outcome,
    Settings,
    add,
    continues,
    judge,
    step,
)
from tidegate.kernels.integrity_headers import (
    CONTROL,
    END_OF_PUSH,
    MALFORMED,
    MANAGED,
    STAMP_ROW,
    START_OF_CHAIN,
    START_OF_PUSH,
    UNMANAGED,
)
from tidegate.kernels.memory import load, pointer, store
from tidegate.kernels.producer_index import EMPTY, PRODUCERS, find_place

UINT32S = types.Array(types.uint32, 1, "C")
UINT64S = types.Array(types.uint64, 1, "C")
HEARTBEAT_FLAG: Final = 2
NOT_YET: Final = 255
DONE, STOPPED, NO_ROOM, NEEDS_SUMS, PUSH_ENDS = 0, 1, 2, 3, 4
# Places in the `state` array: the part of a partition's state that is not one producer's.
PHASE, COUNT, PUSH_END, REASON, FAULTS, TOLD = 0, 1, 2, 3, 4, 5
TOLD_OF: Final = 6  # one place for each verdict
STATE_SIZE: Final = TOLD_OF + 9
KINDS_OF_FAULTS: Final = 6


@register_jitable
def footing_in(phase: int, settings: Settings) -> Footing:
    settled = phase != PUSHING
    gone = settled and (settings.head_may_be_gone != 0 or phase == PUSHED)
    # A fault that stops the partition changes nothing, whatever its outcome says: the state is not written then.
    return Footing(settled, gone, True, settings.stops_settled if settled else settings.stops_pushing)


@register_jitable
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


@register_jitable
def without_judging(record: Any, computed: Any, settings: Settings) -> Outcome:
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


@register_jitable
def is_fault(outcome: Outcome) -> bool:
    return MISSING <= outcome.verdict <= UNSUPPORTED or outcome.rule == U3


@register_jitable
def is_gap(outcome: Outcome) -> bool:
    return outcome.verdict == MISSING or outcome.verdict == UNREGISTERED_PRODUCER


@register_jitable
def stops(outcome: Outcome, note: int, footing: Footing) -> bool:
    if note & DAMAGED and (footing.stops >> CORRUPT) & 1 != 0:
        return True
    return (footing.stops >> outcome.verdict) & 1 != 0


@register_jitable
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
def judge_records(
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
    footing = footing_in(state[PHASE], settings)
    slot, high, low = EMPTY, np.uint64(0), np.uint64(0)
    for row in range(start, len(records)):
        record = records[row]
        offset, log_time, crc = load(at_offsets, row), load(at_times, row), load(computed, row)
        known, free, note = False, 0, 0
        outcome = without_judging(record, crc, settings)
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
                outcome = judge(
                    known, scratch[0], record, crc, sums, row, offset, log_time, footing, settings
                )
                if ends_push and settings.is_short and outcome.verdict == OK:
                    outcome = Outcome(MISSING, M1, 0, footing.forces)
                if outcome.keeps and not known and state[COUNT] >= len(producers):
                    state[REASON] = NO_ROOM
                    return row
        store(into_verdicts, row, outcome.verdict)
        store(into_rules, row, outcome.rule)
        note = outcome.note if outcome.verdict == DUPLICATE else outcome.note | note
        if is_fault(outcome):
            if not footing.settled:
                note |= DURING_PUSH
            if is_judged and is_gap(outcome) and crc != record["crc"]:
                note |= DAMAGED
            is_last = stops(outcome, note, footing)
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
                store(into_notes, row, DURING_PUSH if not footing.settled else 0)
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
            note |= push_moves(record, crc, outcome, offset, footing.forces, state)
            footing = footing_in(state[PHASE], settings)
        store(into_notes, row, note)
    state[REASON] = DONE
    return len(records)
