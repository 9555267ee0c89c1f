"""Range summaries: merging is associative, and what they flag is what the serial validator finds first."""

from __future__ import annotations

import itertools
import random
from functools import reduce
from typing import Any

import pytest

from tidegate.errors import InvalidError
from tidegate.integrity.header import ChecksumType, Stamp
from tidegate.integrity.rules import OnFault, ValidationRules
from tidegate.integrity.summary import NOWHERE, RangeSummary, merge, summarise
from tidegate.integrity.validator import PartitionValidator
from tidegate.integrity.verdicts import Verdict

STREAMS = 1_200
GROUPS = 6


def sound(streams: Any, chance: random.Random) -> list[Any]:
    """The chains of a few producers, interleaved."""
    parts = []
    for number in range(chance.randint(1, 4)):
        pen = streams.Pen(number + 1, chance.choice(list(ChecksumType)))
        parts.append([row for _ in range(chance.randint(1, 4)) for row in pen.chain_of(chance.randint(0, 6))])
    rows = []
    while any(parts):
        rows.append(chance.choice([part for part in parts if part]).pop(0))
    return rows


def damage(streams: Any, chance: random.Random, rows: list[Any]) -> None:
    at = chance.randrange(len(rows))
    row = rows[at]
    match chance.randrange(9):
        case 0 if len(rows) > 1:
            del rows[at]
        case 1:
            rows.insert(chance.randint(at, len(rows)), row)
        case 2:
            other = chance.randrange(len(rows))
            rows[at], rows[other] = rows[other], rows[at]
        case 3:
            rows[at] = row._replace(value=b"changed")
        case 4 if row.stamp is not None:
            data = bytearray(row.stamp.to_bytes())
            data[chance.randrange(1, 40)] ^= 1 << chance.randrange(8)
            rows[at] = row._replace(stamp=Stamp.from_bytes(bytes(data)))
        case 5 if row.payload:
            place = chance.randrange(len(row.payload))
            rows[at] = row._replace(payload=row.payload[:place] + b"\x05" + row.payload[place + 1 :])
        case 6:
            rows.insert(at, streams.Row(None, b"k", b"v"))
        case 7:
            rows.insert(at, streams.Pen().heartbeat())
        case 8 if row.stamp is not None and row.stamp.is_end_of_chain:
            rows.insert(at + 1, row.stamped(kind=0, control=255, sequence=row.stamp.sequence + 1))
        case _:
            rows.insert(at, streams.Row(None, b"k", b"v", extra=(("div", b"short"),)))


def pieces(streams: Any, chance: random.Random, rows: list[Any]) -> list[RangeSummary]:
    cuts = sorted(chance.randrange(len(rows) + 1) for _ in range(chance.randint(0, 5)))
    edges = [0, *cuts, len(rows)]
    return [summarise(streams.batch_of(rows[first:stop], first)) for first, stop in itertools.pairwise(edges)]


def in_any_grouping(chance: random.Random, parts: list[RangeSummary]) -> RangeSummary:
    while len(parts) > 1:
        at = chance.randrange(len(parts) - 1)
        parts[at : at + 2] = [merge(parts[at], parts[at + 1])]
    return parts[0]


def serial_departures(streams: Any, rows: list[Any]) -> dict[bytes, int]:
    """Producers with a record that is not OK, by the validator, with the first such offset."""
    rules = ValidationRules(during_push=OnFault.WARN, otherwise=OnFault.WARN)
    judged = PartitionValidator("orders", 0, rules=rules).validate(streams.batch_of(rows), streams.NOW)
    found: dict[bytes, int] = {}
    for offset, verdict in enumerate(judged.verdicts.tolist()):
        if judged.columns.state[offset] == 1 and verdict not in (Verdict.OK, Verdict.HEARTBEAT):
            found.setdefault(judged.columns.guid(offset), offset)
    return found


@pytest.mark.parametrize("group", range(GROUPS))
def test_merged_ranges_equal_one_pass_and_flag_what_the_validator_finds_first(
    streams: Any, group: int
) -> None:
    chance = random.Random(group)
    flagged = clean = 0
    for _ in range(STREAMS // GROUPS):
        rows = sound(streams, chance)
        for _ in range(chance.choice([0, 0, 1, 1, 2, 3, 8])):
            damage(streams, chance, rows)
        whole = summarise(streams.batch_of(rows))
        assert in_any_grouping(chance, pieces(streams, chance, rows)) == whole
        if whole.has_push:  # a damaged byte made one
            continue
        assert whole.departures() == serial_departures(streams, rows)
        flagged, clean = flagged + (not whole.is_clean), clean + whole.is_clean
    assert flagged > 50 and clean > 30, "both kinds of streams were met"


def test_nothing_is_the_neutral_element(streams: Any) -> None:
    some = summarise(streams.batch_of(streams.Pen().chain_of(3)))
    assert merge(RangeSummary(), some) == some == merge(some, RangeSummary())
    assert summarise(streams.batch_of([])) == RangeSummary()


def test_clean_chains_cost_one_run_each_however_they_are_cut(streams: Any) -> None:
    pen = streams.Pen()
    rows = [*pen.chain_of(10), *pen.chain_of(5)]
    parts = [summarise(streams.batch_of([row], offset)) for offset, row in enumerate(rows)]
    whole = reduce(merge, parts)
    assert [len(runs) for runs in whole.runs.values()] == [2]
    assert whole.is_clean and whole.records == len(rows) and whole.first_malformed == NOWHERE


def test_ranges_out_of_order_or_twice_are_refused(streams: Any) -> None:
    rows = streams.Pen().chain_of(3)
    left, right = summarise(streams.batch_of(rows[:2])), summarise(streams.batch_of(rows[2:], 2))
    for first, second in ((right, left), (left, left)):
        with pytest.raises(InvalidError, match="in order"):
            merge(first, second)
