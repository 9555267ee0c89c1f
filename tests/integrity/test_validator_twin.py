"""DIV-49: vector and scalar validator agree on damaged streams, wherever they are cut."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tidegate.integrity.checkpoint import decode_state, encode_state
from tidegate.integrity.checksum import record_checksum
from tidegate.integrity.header import ChecksumType, Stamp
from tidegate.integrity.manifest import Manifest, Sent
from tidegate.integrity.rules import OnFault, ValidationRules
from tidegate.integrity.scalar import ScalarValidator
from tidegate.integrity.tolerance import Tolerance
from tidegate.integrity.verdicts import Note, Rule

STREAMS = 2_400
GROUPS = 12
LAG = 1000


def sound_rows(streams: Any, chance: random.Random, *, early_end: bool = False) -> list[Any]:
    """Some producers' chains, interleaved, inside a push or not; its end may come too early, or again."""
    pens = [
        streams.Pen(number + 1, chance.choice(list(ChecksumType))) for number in range(chance.randint(1, 4))
    ]
    parts = []
    for pen in pens:
        rows = []
        for _ in range(chance.randint(1, 4)):
            pen.time = streams.NOW - chance.choice([0, 10, LAG - 1, LAG, LAG + 1, 5 * LAG])
            rows += pen.chain_of(chance.randint(0, 6))
        parts.append(rows)
    sent = tuple(
        Sent(pen.guid, pen.chain, pen.sequence - 1, pen.checksum, pen.data)
        for pen in sorted(pens, key=lambda pen: pen.guid)
    )
    rows = []
    while any(parts):
        part = chance.choice([part for part in parts if part])
        rows.append(part.pop(0))
    if chance.random() < 0.6:
        driver = streams.Pen(99)
        head, tail = [driver.start(), driver.start_push()], [driver.end_push(Manifest(sent))]
        if early_end and chance.random() < 0.3:
            tail += [driver.start_push(), driver.end_push(Manifest(sent))]
        tail.append(driver.end())
        place = (
            chance.randint(len(rows) // 2, len(rows)) if early_end and chance.random() < 0.4 else len(rows)
        )
        rows = [*head, *rows[:place], *tail, *rows[place:]]
    return rows


def damaged_header(chance: random.Random, row: Any) -> Any:
    if row.stamp is None:
        return row
    data = bytearray(row.stamp.to_bytes())
    data[chance.randrange(1, 40)] ^= 1 << chance.randrange(8)
    return row._replace(stamp=Stamp.from_bytes(bytes(data)))


def data_after(streams: Any, end: Any) -> Any:
    """A data record that follows the end of its chain."""
    crc = record_checksum(0, b"k", b"v")
    stamp = end.stamp._replace(kind=0, control=255, flags=0, sequence=end.stamp.sequence + 1, crc=crc)
    return streams.Row(stamp, b"k", b"v", time=end.time)


def damage(streams: Any, chance: random.Random, rows: list[Any]) -> None:
    """One thing that goes wrong on the way."""
    at = chance.randrange(len(rows))
    row = rows[at]
    match chance.randrange(13):
        case 0:
            del rows[at]
        case 1:
            rows.insert(chance.randint(at, len(rows)), row)
        case 2:
            other = chance.randrange(len(rows))
            rows[at], rows[other] = rows[other], rows[at]
        case 3:
            rows[at] = row._replace(value=b"changed")
        case 4 | 5:
            rows[at] = damaged_header(chance, row)
        case 6:
            if row.payload:
                place = chance.randrange(len(row.payload))
                rows[at] = row._replace(payload=row.payload[:place] + b"\x05" + row.payload[place + 1 :])
        case 7:
            rows.insert(at, streams.Row(None, b"k", b"v"))
        case 8:
            rows.insert(at, streams.Pen().heartbeat())
        case 9:
            rows.insert(at, streams.Row(None, b"k", b"v", extra=(("div", b"short"),)))
        case 10:
            del rows[at : at + chance.randint(1, 8)]
        case 11:
            rows[at] = row._replace(time=chance.choice([-1, 0, streams.NOW + LAG, 2**52]))
        case 12:
            ends = [place for place, one in enumerate(rows) if one.stamp and one.stamp.is_end_of_chain]
            if ends:
                rows.insert((at := chance.choice(ends)) + 1, data_after(streams, rows[at]))
    if not rows:
        rows.append(row)


def rules_of(chance: random.Random) -> ValidationRules:
    actions = list(OnFault)
    lag = chance.choice([-1, -1, 0, LAG])
    return ValidationRules(
        during_push=chance.choice(actions),
        otherwise=chance.choice([OnFault.WARN, *actions]),
        tolerance=Tolerance(lag, chance.choice(["previous", "incoming"]), chance.random() < 0.1),
        head_may_be_gone=chance.random() < 0.3,
        strict=chance.random() < 0.2,
        batch_only=chance.random() < 0.3,
        payloads=chance.random() < 0.8,
        max_producers=chance.choice([2, 3, 1000, 1000]),
    )


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("row", ["DIV-49"])
def test_vector_equals_scalar_on_damaged_streams_cut_anywhere(row: str, streams: Any, group: int) -> None:
    chance = random.Random(group)
    for _ in range(STREAMS // GROUPS):
        rows = sound_rows(streams, chance, early_end=True)
        for _ in range(chance.choice([0, 1, 1, 2, 2, 3, 8])):
            damage(streams, chance, rows)
        both = streams.Both(rules_of(chance))
        while rows:  # a partition that stopped is resumed behind the record that stopped it
            cuts = [chance.randrange(len(rows) + 1) for _ in range(chance.randint(0, 3))]
            judged = both.feed(rows, cuts)
            rows = rows[len(judged) :]


def test_the_damaged_streams_reach_every_row_of_the_decision_table(streams: Any) -> None:
    chance, rules, notes = random.Random(3), set(), Note.NONE
    for _ in range(1500):
        rows = sound_rows(streams, chance, early_end=True)
        for _ in range(chance.choice([1, 2, 3, 8])):
            damage(streams, chance, rows)
        validator = ScalarValidator(rules_of(chance))
        for arrival in streams.arrivals(rows):
            found = validator.look(arrival, streams.NOW)
            rules.add(found.rule)
            notes |= found.note
    assert rules == set(Rule)
    assert notes == ~Note.NONE


@pytest.mark.parametrize("seed", range(6))
def test_sound_streams_raise_nothing_wherever_they_are_cut(streams: Any, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        rows = sound_rows(streams, chance)
        cuts = [chance.randrange(len(rows) + 1) for _ in range(3)]
        found = streams.Both(ValidationRules(head_may_be_gone=True)).feed(rows, cuts)
        assert not [one for one in found if one.verdict.is_fatal]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("row", ["DIV-26"])
def test_a_checkpoint_at_every_record_restored_and_continued_ends_in_the_same_state(
    row: str, streams: Any, seed: int
) -> None:
    chance = random.Random(seed)
    rows = sound_rows(streams, chance)
    for _ in range(seed // 2):
        damage(streams, chance, rows)
    rules = ValidationRules(during_push=OnFault.WARN)
    whole = streams.Both(rules)
    expected = whole.feed(rows)
    for cut in range(len(rows) + 1):
        first = streams.Both(rules)
        found = first.feed(rows[:cut])
        restored = decode_state(encode_state(first.vector.state))
        rest = streams.Both(rules, restored)
        assert found + rest.feed(rows[cut:]) == expected
        assert rest.vector.state == whole.vector.state
