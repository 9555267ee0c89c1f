"""The rules of validation: one record against what is known of its producer.

A producer numbers its records: chain after chain, and in each chain sequence 0, 1, 2, … The first record of
a chain is its *start*, the last its *end*, which carries the checksum of all between. A producer of *headers only*
has neither: its first data record opens its chain, which ends with the last sequence there is. Compaction may take
that first record, too, so such a chain may be entered in its middle where a gap would be tolerated, and its gaps are
judged all the same. Two things soften the rules:

- *settled* (E): the push has ended, or the topic never had one. Where the head of the log may then be *gone*,
  a producer may be met in the middle of a chain;
- *tolerated* (T): compaction may have removed records here, see `tolerance`.

What a fault does to the state is the caller's choice: when it *forces*, the state moves on as if all were well;
otherwise the partition stops and nothing has changed. Unless said, it forces once settled.

First match wins, in this order: chain (A), sequence (B), the record's own checksum (D), the chain's
checksum (C); so a repeated record never enters a checksum.

Invariants:
J1  a fault that does not force changes nothing: the true next record is still accepted afterwards;
J2  DUPLICATE never changes anything, and neither does a record at a known place that does not match its own
    checksum: that is CORRUPT and no repeat (others may forward headers to records of their own);
J3  one loss is one finding: after a gap or a fault inside it a chain is tainted, and its end is accepted without
    its checksum; and a forced end does end its chain, so that the next chain is not called missing.

A function changes the producer's row it is given, a scratch copy, to its state after the record, and says whether that
copy is kept. `tests/support/validation_rules.py` has the same rules in plain Python, and the tests compare the two.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numba.extending import register_jitable

from tidegate.kernels.compiling import INT64
from tidegate.kernels.integrity_headers import CONTROL, END_OF_CHAIN, HEADERS_ONLY, START_OF_CHAIN
from tidegate.kernels.memory import load

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


class Footing(NamedTuple):
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


@register_jitable
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


@register_jitable
def is_supported(record: Any) -> Any:
    if record["kind"] != CONTROL:
        return record["kind"] <= UPDATE
    return record["control"] <= 8 and record["control"] != 4


@register_jitable
def ends(record: Any) -> Any:
    return record["kind"] == CONTROL and record["control"] == END_OF_CHAIN


@register_jitable
def is_headers_only(record: Any) -> Any:
    return record["kind"] != CONTROL and (record["flags"] & HEADERS_ONLY) != 0


@register_jitable
def opens(record: Any) -> Any:
    is_start = record["kind"] == CONTROL and record["control"] == START_OF_CHAIN
    return record["sequence"] == 0 and (is_start or is_headers_only(record))


@register_jitable
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


@register_jitable
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


@register_jitable
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


@register_jitable
def end(producer: Any, record: Any) -> None:
    producer["ended"] = 1
    producer["final"] = record["flags"] & FINAL_FLAG


@register_jitable
def force(producer: Any, record: Any, field_sums: Any, row: int) -> None:
    if ends(record):
        end(producer, record)
    elif producer["registered"] and not producer["ended"]:
        add(producer, record, field_sums, row)


@register_jitable
def first_contact(record: Any, log_time: int, offset: int, footing: Footing, settings: Settings) -> Outcome:
    if record["chain"] == 0 and opens(record):
        return Outcome(OK, A1, 0, True)
    note = 0
    if not footing.gone and is_headers_only(record):
        note = tolerates(False, NO_TIME, -1, log_time, offset, settings)
    if footing.gone or note:
        return Outcome(OK, A3 if record["chain"] == 0 else A5, note, True)
    return Outcome(UNREGISTERED_PRODUCER, A2 if record["chain"] == 0 else A4, 0, footing.forces)


@register_jitable
def place(
    producer: Any, record: Any, log_time: int, offset: int, footing: Footing, settings: Settings
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
        return Outcome(UNREGISTERED_PRODUCER, A8, 0, footing.forces)
    note = tolerates(True, producer["log_time"], producer["offset"], log_time, offset, settings)
    if not note:
        return Outcome(MISSING, A12, 0, footing.forces)
    if opens(record):
        return Outcome(OK, A9, note, True)
    if footing.settled:
        return Outcome(OK, A10, note, True)
    return Outcome(UNREGISTERED_PRODUCER, A11, 0, footing.forces)


@register_jitable
def same_chain(
    producer: Any, record: Any, log_time: int, offset: int, footing: Footing, settings: Settings
) -> Outcome:
    sequence, last = np.int64(record["sequence"]), np.int64(producer["sequence"])
    if sequence <= last:
        return Outcome(DUPLICATE, B2, 0, False)
    if sequence == last + 1:
        return Outcome(OK, B1, 0, True)
    if footing.settled and not producer["registered"] and not is_headers_only(record):
        return Outcome(OK, B3, 0, True)
    note = tolerates(True, producer["log_time"], producer["offset"], log_time, offset, settings)
    if note:
        return Outcome(OK, B4, note, True)
    return Outcome(MISSING, B5, 0, footing.forces)


@register_jitable
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


@register_jitable
def judge(
    known: bool, producer: Any, record: Any, computed: Any, field_sums: Any, row: int, offset: int,
    log_time: int, footing: Footing, settings: Settings,
) -> Outcome:  # fmt: skip
    """One record; `producer` becomes its state afterwards, for the caller to keep or not."""
    forces = footing.forces
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
        placed = same_chain(producer, record, log_time, offset, footing, settings)
        if placed.verdict == DUPLICATE:
            return placed if computed == record["crc"] else Outcome(CORRUPT, D1, 0, False)
        step(producer, record, offset, log_time)
        if placed.rule == B4 or placed.rule == B5:
            producer["tainted"] = 1
    else:
        if known:
            placed = place(producer, record, log_time, offset, footing, settings)
            if placed.verdict == DUPLICATE:
                return placed if computed == record["crc"] else Outcome(CORRUPT, D1, 0, False)
        else:
            placed = first_contact(record, log_time, offset, footing, settings)
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


@register_jitable
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
