"""Chains without control records: what `.to_topic()` writes, so that nothing but results is in a changelog topic."""

from __future__ import annotations

import random
import struct
import zlib
from typing import Any

import pyarrow as pa
import pytest

from tidegate.errors import InvalidError
from tidegate.integrity.columns import read_columns
from tidegate.integrity.header import HEADERS_ONLY, MAX_SEQUENCE, ControlType
from tidegate.integrity.sender import Chains, ChainState
from tidegate.integrity.state import PartitionState
from tidegate.integrity.summary import merge, summarise
from tidegate.integrity.validator import PartitionValidator, ValidationRules
from tidegate.integrity.verdicts import Note, Rule, Tolerance, Verdict
from tidegate.log.format.records import RECORD_SCHEMA, RecordColumns

GUID = bytes(range(16))
DAY = 86_400_000


def rows_of(count: int, first: int = 0) -> RecordColumns:
    numbers = range(first, first + count)
    return RecordColumns(
        pa.array([b"k%d" % number for number in numbers]),
        pa.array([None if number % 7 == 3 else b"value %d" % number for number in numbers], pa.binary()),
        pa.array(list(numbers), pa.int64()),
        None,
    )


def batch_of(pieces: list[RecordColumns], first: int = 0) -> pa.RecordBatch:
    table = pa.concat_tables(
        [
            pa.table({"timestamp": one.timestamp, "key": one.key, "value": one.value, "headers": one.headers})
            for one in pieces
        ]
    ).combine_chunks()
    count = table.num_rows
    columns = {
        "topic": pa.array(["orders"] * count).dictionary_encode(),
        "partition": pa.array([0] * count, pa.int32()),
        "offset": pa.array(range(first, first + count), pa.int64()),
        **{name: table.column(name).combine_chunks() for name in table.column_names},
    }
    return pa.RecordBatch.from_arrays(
        [columns[field.name].cast(field.type) for field in RECORD_SCHEMA], schema=RECORD_SCHEMA
    )


def verdicts_of(batch: pa.RecordBatch, **rules: Any) -> list[str]:
    validator = PartitionValidator("orders", 0, rules=ValidationRules(**rules))
    return [Verdict(one).name for one in validator.validate(batch, 0).verdicts.tolist()]


def test_only_the_rows_are_sent_and_every_one_is_proven() -> None:
    chains = Chains(GUID, headers_only=True)
    state, pieces = ChainState(), []
    for first in (0, 5, 6):
        planned = chains.data(state, rows_of(5, first), now_ms=first * 600_000)  # no chain ends by its age
        state, pieces = planned.after, pieces + planned.pieces
    ended = chains.end(state, 9)
    assert ended.pieces == [] and ended.after == state
    batch = batch_of(pieces)
    columns = read_columns(batch.column("headers"))
    assert batch.num_rows == 15 and not columns.is_control.any()
    assert columns.sequence.tolist() == list(range(15))
    assert set(columns.chain.tolist()) == {0} and set(columns.flags.tolist()) == {HEADERS_ONLY}
    assert verdicts_of(batch) == ["OK"] * 15


def test_golden_bytes() -> None:
    rows = RecordColumns(
        pa.array([b"key"]), pa.array([b"value"], pa.binary()), pa.array([7], pa.int64()), None
    )
    (piece,) = Chains(GUID, headers_only=True).data(ChainState(), rows, 1_800_000_000_000).pieces
    (header,) = piece.headers.to_pylist()[0]
    fixed = "0100ff08" + GUID.hex() + "00000000" + "00000000" + "000001a3185c5000"
    covered = struct.pack(">ii", 0, 3) + b"key" + struct.pack(">i", 0) + b"value"
    crc = zlib.crc32(covered + struct.pack(">iq", 8, 1_800_000_000_000))
    assert header == {"key": "div", "value": bytes.fromhex(fixed) + crc.to_bytes(4, "big")}
    assert f"{crc:08x}" == "8472c9c9"


def test_the_numbering_goes_on_in_the_next_chain_behind_the_last_sequence_there_is() -> None:
    chains = Chains(GUID, headers_only=True)
    first = chains.data(ChainState(), rows_of(1), 0)
    state = first.after._replace(sequence=MAX_SEQUENCE - 1)
    planned = chains.data(ChainState.from_bytes(state.to_bytes()), rows_of(5), 0)
    columns = read_columns(batch_of(planned.pieces).column("headers"))
    assert columns.chain.tolist() == [0, 0, 1, 1, 1]
    assert columns.sequence.tolist() == [MAX_SEQUENCE - 1, MAX_SEQUENCE, 0, 1, 2]
    known = PartitionState()
    validator = PartitionValidator("orders", 0, state=known)
    validator.validate(batch_of(first.pieces), 0)
    known.producers.rows["sequence"] = MAX_SEQUENCE - 2
    batch = batch_of(planned.pieces, first=1)
    rules = validator.validate(batch, 0).rules.tolist()
    assert [Rule(one) for one in rules] == [Rule.B1, Rule.B1, Rule.A7, Rule.B1, Rule.B1]


def test_a_chain_that_an_older_release_opened_or_ended_is_gone_on_with() -> None:
    older, newer = Chains(GUID), Chains(GUID, headers_only=True)
    for ends in (False, True):
        before = older.data(ChainState(), rows_of(3), 0)
        pieces, state = before.pieces, before.after
        if ends:
            ended = older.end(state, 0)
            pieces, state = pieces + ended.pieces, ended.after
        after = newer.data(state, rows_of(4, 3), 1)
        batch = batch_of(pieces + after.pieces)
        assert set(verdicts_of(batch)) == {"OK"}
        without = batch.take([row for row in range(batch.num_rows) if row != batch.num_rows - 2])
        assert verdicts_of(without)[-1] == "MISSING"


def test_a_sender_of_headers_only_has_no_control_records_to_send() -> None:
    with pytest.raises(InvalidError, match="no control records"):
        Chains(GUID, headers_only=True).control(ChainState(), ControlType.VERSION_SWAP, None, 0)


@pytest.mark.parametrize("row", range(1, 11))
def test_each_lost_record_but_the_last_is_seen(row: int, streams: Any) -> None:
    pen = streams.Pen(headers_only=True)
    rows = pen.bare_chain_of(12)
    del rows[row]
    assert streams.Both().verdicts(rows)[row] == "MISSING"


def test_without_its_first_record_a_producer_is_unregistered(streams: Any) -> None:
    rows = streams.Pen(headers_only=True).bare_chain_of(4)
    assert streams.Both().verdicts(rows[1:]) == ["UNREGISTERED_PRODUCER", "OK", "OK"]


def test_every_byte_of_a_header_is_covered(streams: Any) -> None:
    """The clock and the flags, too, which only the end of a chain covers elsewhere."""
    from tidegate.integrity.header import Stamp

    rows = streams.Pen(headers_only=True).bare_chain_of(4)
    for byte in range(1, 40):
        for bit in range(8):
            data = bytearray(rows[1].stamp.to_bytes())
            data[byte] ^= 1 << bit
            damaged = [rows[0], rows[1]._replace(stamp=Stamp.from_bytes(bytes(data))), *rows[2:]]
            assert set(streams.Both().verdicts(damaged)) != {"OK"}, (byte, bit)


def test_compaction_may_take_the_first_record_and_gaps_behind_it_are_still_seen(streams: Any) -> None:
    pen = streams.Pen(headers_only=True, time=streams.NOW - 2 * DAY)
    old = pen.bare_chain_of(6)
    pen.time = streams.NOW
    young = pen.puts(4)
    rules = ValidationRules(tolerance=Tolerance(DAY))
    found = streams.Both(rules).feed([old[2], old[5], *young[:2], young[3]])
    assert [one.verdict.name for one in found] == ["OK", "OK", "OK", "OK", "MISSING"]
    assert [one.rule for one in found[:2]] == [Rule.A3, Rule.B4]
    assert all(one.note is Note.TOLERATED for one in found[:2])


def test_a_head_that_aged_out_does_not_hide_gaps_behind_it(streams: Any) -> None:
    rows = streams.Pen(headers_only=True).bare_chain_of(9)
    both = streams.Both(ValidationRules(head_may_be_gone=True))
    assert both.verdicts([*rows[3:5], *rows[6:]]) == ["OK", "OK", "MISSING", "OK", "OK"]


def test_records_that_share_a_header_but_not_their_content_are_no_duplicates(streams: Any) -> None:
    """As Kafka Streams forwards the headers of its input to all that it makes of it."""
    for headers_only in (False, True):
        pen = streams.Pen(headers_only=headers_only)
        rows = pen.bare_chain_of(3) if headers_only else [pen.start(), *pen.puts(3)]
        data = rows[-3:]
        forwarded = [one._replace(value=b"other %d" % number) for one in data for number in range(3)]
        both = streams.Both()
        assert both.verdicts([*rows[:-3], *forwarded]) == ["OK"] * (len(rows) - 3) + ["CORRUPT"] * 9
        again = streams.Both()
        assert again.verdicts([*rows, *data]) == ["OK"] * len(rows) + ["DUPLICATE"] * 3
        assert streams.Both(ValidationRules(payloads=False)).verdicts([*rows, *forwarded])[-1] == "DUPLICATE"


@pytest.mark.parametrize("bound", [0, 3, 4, 6, 100])
def test_nothing_is_tolerated_where_compaction_has_not_been(streams: Any, bound: int) -> None:
    pen = streams.Pen(headers_only=True, time=streams.NOW - 2 * DAY)
    rows = pen.bare_chain_of(8)
    rules = ValidationRules(tolerance=Tolerance(0, compacted_below=lambda: bound))
    (*_, found, _) = streams.Both(rules).feed([*rows[:4], *rows[6:]])
    if bound < 5:  # the record in front of the gap lies at offset 3
        assert (found.verdict, found.note) == (Verdict.MISSING, Note.NONE)
    else:
        assert found.verdict is Verdict.OK and Note.TOLERATED in found.note


def test_a_gap_that_reaches_beyond_what_was_compacted_is_suspect(streams: Any) -> None:
    pen = streams.Pen(headers_only=True, time=streams.NOW - 2 * DAY)
    rows = pen.bare_chain_of(8)
    (other,) = streams.Pen(2, headers_only=True).bare_chain_of(1)
    suspect = Note.TOLERATED | Note.TOLERATED_SUSPECT
    for bound, expected in ((3, Note.NONE), (4, suspect), (5, Note.TOLERATED)):
        rules = ValidationRules(tolerance=Tolerance(0, compacted_below=lambda bound=bound: bound))
        found = streams.Both(rules).feed([*rows[:3], other, *rows[6:]])  # the gap is from offset 3 to 4
        assert found[4].note is expected


@pytest.mark.parametrize("seed", range(8))
def test_ranges_of_such_chains_merge_to_what_one_pass_gives(streams: Any, seed: int) -> None:
    chance = random.Random(seed)
    pens = [streams.Pen(number + 1, headers_only=True) for number in range(3)]
    parts = [pen.bare_chain_of(chance.randint(1, 9)) for pen in pens]
    rows = []
    while any(parts):
        rows.append(chance.choice([part for part in parts if part]).pop(0))
    if chance.random() < 0.6:
        del rows[chance.randrange(len(rows))]
    cut = chance.randrange(len(rows) + 1)
    left, right = streams.batch_of(rows[:cut]), streams.batch_of(rows[cut:], cut)
    whole = summarise(streams.batch_of(rows))
    assert merge(summarise(left), summarise(right)) == whole
    both = streams.Both()
    faults = {
        row.stamp.guid
        for row, one in zip(rows, both.feed(rows), strict=True)
        if one.verdict is not Verdict.OK
    }
    assert set(whole.departures()) == faults
