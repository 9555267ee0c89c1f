"""Range summaries: merging is associative, and what they flag is what the serial validator finds first."""

from __future__ import annotations

import itertools
import random
from functools import reduce
from typing import Any

import numpy as np
import pytest

from tidegate.errors import InvalidError
from tidegate.integrity.columns import computed_checksums, read_columns, source_of, times_of
from tidegate.integrity.header import ChecksumType, Stamp
from tidegate.integrity.summary import NOWHERE, RangeSummary, extend, merge, summarise
from tidegate.integrity.validator import OnError, PartitionValidator, ValidationRules
from tidegate.integrity.verdicts import Verdict
from tidegate.kernels.range_summaries import RUN_ROW, STATE_SIZE, add_field_sums, fold_runs

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


def batches(streams: Any, chance: random.Random, rows: list[Any]) -> list[Any]:
    cuts = sorted(chance.randrange(len(rows) + 1) for _ in range(chance.randint(0, 5)))
    edges = [0, *cuts, len(rows)]
    return [streams.batch_of(rows[first:stop], first) for first, stop in itertools.pairwise(edges)]


def in_any_grouping(chance: random.Random, parts: list[RangeSummary]) -> RangeSummary:
    while len(parts) > 1:
        at = chance.randrange(len(parts) - 1)
        parts[at : at + 2] = [merge(parts[at], parts[at + 1])]
    return parts[0]


def serial_departures(streams: Any, rows: list[Any]) -> dict[bytes, int]:
    """Producers with a record that is not OK, by the validator, with the first such offset."""
    rules = ValidationRules(during_push=OnError.KEEP, otherwise=OnError.KEEP)
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
        parts = batches(streams, chance, rows)
        assert in_any_grouping(chance, [summarise(part) for part in parts]) == whole
        assert reduce(extend, parts, RangeSummary()) == whole
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


@pytest.mark.parametrize("kind", list(ChecksumType))
def test_the_sum_of_fields_is_kept_only_where_it_can_matter(streams: Any, kind: ChecksumType) -> None:
    rows = streams.Pen(1, kind).chain_of(6)
    certified = summarise(streams.batch_of(rows)).runs[rows[0].stamp.guid][0]
    assert bool(certified.field_sum) == (kind is ChecksumType.ADHASH)
    assert not kind or certified.end.checksum in (certified.field_sum, certified.crc_sum)
    for cut in range(1, len(rows)):
        head, tail = streams.batch_of(rows[:cut]), streams.batch_of(rows[cut:], cut)
        (run,) = summarise(tail).runs[rows[0].stamp.guid]  # where the end names the type, the start need not
        assert bool(run.field_sum) == (kind is ChecksumType.ADHASH and cut < len(rows) - 1)
        assert extend(summarise(head), tail).runs == merge(summarise(head), summarise(tail)).runs
    (middle,) = summarise(streams.batch_of(rows[2:4], 2)).runs[rows[0].stamp.guid]
    assert middle.field_sum, "neither start nor end is known: it may turn out to matter"


def test_a_range_of_nothing_but_seams_has_a_run_for_each_record(streams: Any) -> None:
    pens = [streams.Pen(1 + number) for number in range(200)]
    for pen in pens:
        pen.chain = 0
    rows = [pens[number % 200].put(sequence=number) for number in range(1500)]
    summary = summarise(streams.batch_of(rows))
    assert sum(len(runs) for runs in summary.runs.values()) == 1500 and len(summary.runs) == 200
    assert summary.departures() == serial_departures(streams, rows)


def test_the_uncompiled_kernels_give_the_same_and_stay_inside_their_buffers(streams: Any) -> None:
    chance = random.Random(5)
    for _ in range(20):
        rows = sound(streams, chance)
        for _ in range(3):
            damage(streams, chance, rows)
        batch = streams.batch_of(rows)
        columns = read_columns(batch.column("headers"))
        crcs, offsets = computed_checksums(batch, columns), batch.column("offset").to_numpy()
        found = []
        for plain in (False, True):
            fold, sums = (
                getattr(one, "py_func", one) if plain else one for one in (fold_runs, add_field_sums)
            )
            runs, index = np.zeros(len(rows), RUN_ROW), np.full(256, -1, np.int32)
            state, numbers = np.zeros(STATE_SIZE, np.int64), np.empty(len(rows), np.int32)
            with np.errstate(over="ignore"):
                times = times_of(batch)
                assert fold(columns.rows, crcs, offsets, times, 0, runs, index, state, numbers) == len(rows)
                source = source_of(key=batch.column("key"), value=batch.column("value"))
                sums(source, columns.rows, numbers, np.ones(len(rows), np.uint8), runs)
            found.append((runs.tolist(), index.tolist(), state.tolist(), numbers.tolist()))
        assert found[0] == found[1]


def test_ranges_out_of_order_or_twice_are_refused(streams: Any) -> None:
    rows = streams.Pen().chain_of(3)
    left, right = summarise(streams.batch_of(rows[:2])), summarise(streams.batch_of(rows[2:], 2))
    for first, second in ((right, left), (left, left)):
        with pytest.raises(InvalidError, match="in order"):
            merge(first, second)
