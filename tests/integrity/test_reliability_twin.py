"""R-30: vector and scalar validator agree on twenty thousand streams, wherever they are cut.

Streams are drawn from pools of records that were encoded once: sound ones, and each of them damaged in several
ways. So a stream costs its validation and little else.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from scalar_validator import ScalarValidator
from tidegate.integrity.header import ChecksumType, Stamp
from tidegate.integrity.state import Manifest, Sent
from tidegate.integrity.validator import OnError, PartitionValidator, ValidationRules
from tidegate.integrity.verdicts import FATAL, Rule, Tolerance

LAG = 1000
STREAMS = 20_000
SOAK_STREAMS = 2_000_000
GROUPS = 8
OF_ONE_POOL = 100


def sound(streams: Any, chance: random.Random) -> list[Any]:
    """A few producers' chains, interleaved, mostly inside a push."""
    pens = [
        streams.Pen(number + 1, chance.choice(list(ChecksumType))) for number in range(chance.randint(1, 3))
    ]
    parts = []
    for pen in pens:
        part: list[Any] = []
        for _ in range(chance.randint(1, 3)):
            pen.time = streams.NOW - chance.choice([0, 10, LAG - 1, LAG, LAG + 1, 5 * LAG])
            part += pen.chain_of(chance.randint(0, 4))
        parts.append(part)
    sent = tuple(Sent(pen.guid, pen.chain, pen.sequence - 1, pen.checksum, pen.data) for pen in pens)
    rows = []
    while any(parts):
        rows.append(chance.choice([part for part in parts if part]).pop(0))
    if chance.random() < 0.7:
        driver = streams.Pen(99)
        rows = [driver.start(), driver.start_push(), *rows, driver.end_push(Manifest(sent)), driver.end()]
    return rows


def variants(streams: Any, chance: random.Random, row: Any) -> list[Any]:
    """One record, damaged in several ways: as many for each record, so that numbers can be computed."""
    data = bytearray(row.stamp.to_bytes())
    data[chance.randrange(1, 40)] ^= 1 << chance.randrange(8)
    crooked = row._replace(stamp=Stamp.from_bytes(bytes(data)))
    payload = row.payload or b"\x01\x05"
    at = chance.randrange(len(payload))
    return [
        row._replace(value=b"changed"),
        crooked,
        row._replace(payload=payload[:at] + b"\x05" + payload[at + 1 :]),
        row._replace(time=chance.choice([-1, 0, streams.NOW + LAG, 2**52])),
        row.stamped(sequence=chance.choice([0, 2**31 - 1, row.stamp.sequence + 1])),
        row.stamped(chain=chance.choice([0, 1, 2, 2**31 - 1])),
    ]


def drawn(chance: random.Random, length: int, damages: int) -> list[int]:
    """The numbers of a damaged stream's records in its pool: sound ones first, then all their variants."""
    chosen = list(range(length))
    kinds = 6
    for _ in range(chance.choice([0, 1, 1, 2, 2, 3, 6])):
        at = chance.randrange(len(chosen))
        match chance.randrange(7):
            case 0 if len(chosen) > 1:
                del chosen[at]
            case 1:
                chosen.insert(chance.randint(at, len(chosen)), chosen[at])
            case 2:
                other = chance.randrange(len(chosen))
                chosen[at], chosen[other] = chosen[other], chosen[at]
            case 3 if len(chosen) > 9:
                del chosen[at : at + chance.randint(1, 8)]
            case 4:
                chosen.insert(at, length * (1 + kinds) + chance.randrange(damages))
            case _ if chosen[at] < length:
                chosen[at] = length + kinds * chosen[at] + chance.randrange(kinds)
    return chosen


def rules_of(chance: random.Random) -> ValidationRules:
    actions = list(OnError)
    mixed = {verdict: chance.choice(actions) for verdict in FATAL if chance.random() < 0.7}
    return ValidationRules(
        during_push=chance.choice([*actions, mixed]),
        otherwise=chance.choice([OnError.KEEP, *actions, mixed, mixed]),
        tolerance=Tolerance(chance.choice([-1, -1, 0, LAG]), chance.choice(["previous", "incoming"])),
        head_may_be_gone=chance.random() < 0.3,
        strict=chance.random() < 0.1,
        batch_only=chance.random() < 0.2,
        max_producers=chance.choice([2, 1000, 1000]),
    )


def compare(streams: Any, chance: random.Random, pool: Any, chosen: list[int]) -> set[Rule]:
    """Both over one stream, the vector form in pieces; the rules that were met."""
    rules = rules_of(chance)
    scalar, vector = ScalarValidator(rules), PartitionValidator("orders", 0, rules=rules)
    expected, stopped = [], False
    for arrival in pool.arrivals(chosen):
        found = scalar.look(arrival, streams.NOW)
        expected.append((found.verdict, found.rule, found.note))
        if found.stops:
            stopped = True
            break
    cuts = sorted(chance.randrange(len(chosen) + 1) for _ in range(chance.randint(0, 2)))
    batch, told = pool.batch(chosen), []
    for first, stop in itertools.pairwise([0, *cuts, len(chosen)]):
        judged = vector.validate(batch.slice(first, stop - first), streams.NOW)
        told += zip(judged.verdicts.tolist(), judged.rules.tolist(), judged.notes.tolist(), strict=True)
        if judged.stop_at is not None:
            break
    assert told == expected
    assert (judged.stop_at is not None) == stopped
    assert (vector.state.phase, vector.state.end_of_push) == (scalar.state.phase, scalar.state.end_of_push)
    assert {one.guid: one for one in vector.state.producers} == scalar.producers
    return {rule for _, rule, _ in expected}


def compare_many(streams: Any, seed: str, count: int) -> set[Rule]:
    chance, met = random.Random(seed), set()
    for _ in range(count // OF_ONE_POOL):
        rows = sound(streams, chance)
        foreign = [streams.Row(None, b"k", b"v"), streams.Pen().heartbeat()]
        foreign.append(streams.Row(None, b"k", b"v", extra=(("div", b"short"),)))
        damaged = [one for row in rows for one in variants(streams, chance, row)]
        pool = streams.Pool([*rows, *damaged, *foreign])
        for _ in range(OF_ONE_POOL):
            met |= compare(streams, chance, pool, drawn(chance, len(rows), len(foreign)))
    return met


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("row", ["R-30"])
def test_vector_equals_scalar_on_many_streams_cut_anywhere(row: str, streams: Any, group: int) -> None:
    met = compare_many(streams, f"{row} {group}", STREAMS // GROUPS)
    assert len(met) > 20, "the streams reach most rows of the decision table"


@pytest.mark.soak
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("row", ["R-30"])
def test_vector_equals_scalar_on_very_many_streams(row: str, streams: Any, group: int) -> None:
    compare_many(streams, f"{row} soak {group}", SOAK_STREAMS // GROUPS)
