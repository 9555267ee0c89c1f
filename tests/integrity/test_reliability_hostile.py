"""R-29: metadata written to do harm harms its own partition only, and is never an error or unbounded memory."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tidegate.errors import TidegateError
from tidegate.integrity import state as state_module
from tidegate.integrity.columns import checksum_of
from tidegate.integrity.header import FINAL, ChecksumType, ControlType, EndOfChain, RecordKind, Stamp
from tidegate.integrity.replica import Replica
from tidegate.integrity.state import (
    DEFAULT_MAX_AGE_MS,
    Manifest,
    PartitionState,
    Phase,
    Sent,
    decode_state,
    encode_state,
    restore_checkpoint,
    take_checkpoint,
)
from tidegate.integrity.validator import OnError, PartitionValidator, ValidationRules
from tidegate.integrity.verdicts import Rule, Verdict
from tidegate.log.format.records import HEADERS_TYPE, RECORD_SCHEMA

HEADERS = 20_000
SOAK_HEADERS = 5_000_000
GROUPS = 4
NOW = 1_800_000_000_000
OF_ONE_BATCH = 250
CAP = 300
FLOOD = 1_000_000
MINUTE = 60_000
EDGES = (0, 1, 2**31 - 1, -1, -(2**31), 7)


def hostile(streams: Any, chance: random.Random, sound: list[Any]) -> Any:
    """A record whose metadata was made to do harm."""
    row = chance.choice(sound)
    stamp = row.stamp
    match chance.randrange(7):
        case 0:  # any bytes, of any length
            data = chance.randbytes(chance.choice([0, 1, 39, 40, 40, 41, 255]))
        case 1:  # another version
            data = bytes([chance.choice([0, 2, 3, 255])]) + stamp.to_bytes()[1:]
        case 2:  # numbers at their edges, with a checksum that is right
            chain, sequence = chance.choice(EDGES), chance.choice(EDGES)
            stamp = stamp._replace(chain=chain, sequence=sequence, guid=chance.randbytes(16))
            data = stamp._replace(crc=checksum_of(stamp, row.key, row.value, row.payload)).to_bytes()
        case 3:  # jumps between a known producer's chains
            data = stamp._replace(chain=chance.randrange(2**31), sequence=chance.randrange(3)).to_bytes()
        case 4:  # control records of others, and ones nobody knows
            control = chance.choice([*ControlType, 4, 9, 200])
            stamp = stamp._replace(kind=RecordKind.CONTROL, control=control, guid=chance.randbytes(16))
            data = stamp._replace(crc=checksum_of(stamp, row.key, row.value, row.payload)).to_bytes()
        case 5:  # clocks at their edges
            data = stamp._replace(timestamp=chance.choice([-(2**63), -1, 0, 2**63 - 1])).to_bytes()
        case _:  # some bytes changed
            bent = bytearray(stamp.to_bytes())
            for _ in range(chance.randint(1, 6)):
                bent[chance.randrange(40)] = chance.randrange(256)
            data = bytes(bent)
    payload = chance.choice(
        [row.payload, row.payload, None, b"", b"\x01", b"\x01" * 22, chance.randbytes(30)]
    )
    repeats = chance.choice([1, 1, 1, 1, 2])
    return row._replace(stamp=None, payload=payload, extra=(("div", data),) * repeats)


def healthy_push(streams: Any) -> list[Any]:
    driver, pen = streams.Pen(99), streams.Pen(1)
    rows = [driver.start(), driver.start_push(), *pen.chain_of(6)]
    sent = Sent(pen.guid, pen.chain, pen.sequence - 1, pen.checksum, pen.data)
    return [*rows, driver.end_push(Manifest((sent,))), driver.end()]


def attack(streams: Any, seed: str, count: int) -> Counter[Verdict]:
    """Throw hostile records at partitions that stop and that go on, between healthy ones; the verdicts given."""
    chance, met = random.Random(seed), Counter[Verdict]()
    healthy = healthy_push(streams)
    while met.total() < count:  # a partition that stops has looked at fewer
        rules = ValidationRules(
            during_push=chance.choice(list(OnError)),
            otherwise=chance.choice(list(OnError)),
            head_may_be_gone=chance.random() < 0.5,
            strict=chance.random() < 0.2,
            max_producers=CAP,
        )
        replicas = [Replica("orders", number, rules=rules, max_age_ms=1000) for number in range(3)]
        for replica in replicas:
            replica.to_standby(now_ms=NOW)
        stored: list[int] = [0, 0, 0]
        sound = [*streams.Pen(5).chain_of(4), *healthy]
        attacking = [hostile(streams, chance, sound) for _ in range(OF_ONE_BATCH)]
        attacked = [*healthy[:5], *attacking]
        for number, rows in ((0, healthy[:4]), (1, attacked), (2, healthy), (0, healthy[4:])):
            replica = replicas[number]
            batch = streams.batch_of(rows, replica.drainer.state.next_offset)

            def keep(kept: Any, judged: Any, number: int = number, stored: list[int] = stored) -> None:
                stored[number] += kept.num_rows
                if number == 1:
                    met.update(map(Verdict, judged.verdicts.tolist()))
                    assert all(str(found) for found in judged.findings)

            replica.drain(batch, streams.NOW, keep)
        for number in (0, 2):
            assert replicas[number].error is None and stored[number] == 6
            assert replicas[number].drainer.state.phase is Phase.PUSHED
            assert replicas[number].faults.faults == 0
        state = replicas[1].drainer.state
        assert len(state.producers) <= CAP
        assert decode_state(encode_state(state)) == state
        assert (replicas[1].checkpoint(now_ms=streams.NOW) is None) == (replicas[1].error is not None)
    return met


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("row", ["R-29"])
def test_hostile_metadata_harms_its_own_partition_only(row: str, streams: Any, group: int) -> None:
    met = attack(streams, f"{row} {group}", HEADERS // GROUPS)
    fatal = {verdict for verdict in Verdict if verdict.is_fatal}
    assert fatal - {Verdict.AFTER_END} <= set(met)


@pytest.mark.soak
@pytest.mark.parametrize("row", ["R-29"])
def test_very_much_hostile_metadata(row: str, streams: Any) -> None:
    attack(streams, f"{row} soak", SOAK_HEADERS)


# -- a million producers ---------------------------------------------------------------------------


def flood(first: int, count: int, time_ms: int, *, ends: bool = False) -> pa.RecordBatch:
    """Records of `count` producers that were never met before, each in the middle of a chain, or its final end."""
    key, value = b"k1234", b"v"
    stamp = Stamp(RecordKind.PUT, 255, 0, bytes(16), 3, 7, time_ms, 0)
    if ends:
        stamp = Stamp(RecordKind.CONTROL, ControlType.END_OF_CHAIN, FINAL, bytes(16), 3, 7, time_ms, 0)
    payload = EndOfChain(ChecksumType.NONE, 0, 0, 0).to_bytes() if ends else None
    stamp = stamp._replace(crc=checksum_of(stamp, key, value, payload))
    stamps = np.tile(np.frombuffer(stamp.to_bytes(), np.uint8), (count, 1))
    numbers = np.arange(first, first + count, dtype=np.uint64)
    halves = (numbers * np.uint64(0x9E3779B97F4A7C15), numbers)
    stamps[:, 4:20] = np.stack(halves, axis=1).astype(">u8").view(np.uint8)
    ends = pa.py_buffer(np.arange(count + 1, dtype=np.int32) * 40)
    div = pa.Array.from_buffers(pa.binary(), count, [None, ends, pa.py_buffer(stamps)])
    struct = HEADERS_TYPE.value_type
    names, width = ["div"], 1
    if payload is not None:
        names, width = ["div", "divc"], 2
        every_second = pa.array(np.arange(2 * count) // 2 + np.arange(2 * count) % 2 * count)
        div = pa.concat_arrays([div, pa.array([payload] * count, pa.binary())]).take(every_second)
    items = pa.StructArray.from_arrays(
        [pa.array(names * count), div], fields=[struct.field(0), struct.field(1)]
    )
    headers = pa.ListArray.from_arrays(
        pa.array(np.arange(count + 1, dtype=np.int32) * np.int32(width)), items
    ).cast(HEADERS_TYPE)
    zeros = pa.array(np.zeros(count, np.int32))
    times = pa.array(np.full(count, time_ms)).cast(RECORD_SCHEMA.field("timestamp").type)
    offsets = pa.array(np.arange(first, first + count))
    columns = [
        pa.DictionaryArray.from_arrays(zeros, pa.array(["orders"])),
        *(zeros, offsets, times),
        *(pa.array([each] * count, pa.binary()) for each in (key, value)),
        headers,
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)


@pytest.mark.parametrize("row", ["R-29"])
def test_a_million_producers_are_held_found_again_saved_and_expired(row: str, streams: Any) -> None:
    rules = ValidationRules(head_may_be_gone=True)
    validator = PartitionValidator("orders", 0, rules=rules)
    step = FLOOD // 10
    for number in range(10):
        judged = validator.validate(flood(number * step, step, streams.NOW + number * 1000), streams.NOW)
        assert judged.counts[Verdict.OK] == step
    assert len(validator.state.producers) == FLOOD
    again = flood(0, step, streams.NOW)
    again = again.set_column(2, RECORD_SCHEMA.field("offset"), pa.array(np.arange(FLOOD, FLOOD + step)))
    assert validator.validate(again, streams.NOW).counts[Verdict.DUPLICATE] == step
    data = take_checkpoint(validator.state, now_ms=NOW)
    assert len(data) < FLOOD * 100
    kept = restore_checkpoint(data, now_ms=NOW, max_age_ms=1999)
    assert len(kept.producers) == 2 * step, "those of the last two seconds"
    assert kept.next_offset == validator.state.next_offset


@pytest.mark.parametrize("row", ["R-29"])
def test_a_flood_of_a_million_producers_stays_under_the_cap_and_says_so(row: str, streams: Any) -> None:
    rules = ValidationRules(head_may_be_gone=True, max_producers=10_000)
    validator, step, told = PartitionValidator("orders", 0, rules=rules), FLOOD // 4, Counter[Verdict]()
    for number in range(4):
        judged = validator.validate(flood(number * step, step, streams.NOW), streams.NOW)
        told.update({verdict: count for verdict, count in judged.counts.items() if count})
        assert len(validator.state.producers) == 10_000 and len(judged.findings) <= 1000
    assert told == {Verdict.OK: 10_000, Verdict.UNREGISTERED_PRODUCER: FLOOD - 10_000}
    assert set(judged.rules.tolist()) == {Rule.U4}
    size = validator.state.producers.rows.nbytes + validator.state.producers.index.nbytes
    assert size < 8 << 20


@pytest.mark.parametrize("goes_by", ["end", "age", "number"])
@pytest.mark.parametrize(
    "each_minute", [1_000, pytest.param(100_000, marks=pytest.mark.soak)], ids=["small", "full"]
)
@pytest.mark.parametrize("row", ["R-29"])
def test_ten_minutes_of_new_producers_leave_a_bounded_state_and_the_others_alone(
    row: str, streams: Any, each_minute: int, goes_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended producers are forgotten first, silent ones by age or by number; with crashes, and a clock a day ahead."""
    monkeypatch.setattr(state_module, "MOST_REMEMBERED", each_minute)
    monkeypatch.setattr(state_module, "MOST_SILENT", 5 * each_minute)
    ends = goes_by == "end"
    max_age_ms = 2 * MINUTE if goes_by == "age" else DEFAULT_MAX_AGE_MS
    most = {"end": 2, "age": 4, "number": 5}[goes_by] * each_minute + 10
    rules, saved = ValidationRules(head_may_be_gone=True), None
    steady, ahead, rare = streams.Pen(1), streams.Pen(2), streams.Pen(3)
    opened = [steady.start(), ahead.start(), rare.start(), rare.put()]
    sizes, faults = [], 0
    for minute in range(10):
        now_ms = NOW + minute * MINUTE
        replica = Replica("orders", 0, rules=rules, max_age_ms=max_age_ms)  # the process before died
        first = replica.to_standby(saved, now_ms=now_ms)
        steady.time, ahead.time, rare.time = now_ms, now_ms + 24 * 60 * MINUTE, now_ms
        rows = [
            *(opened if minute == 0 else ()),
            steady.put(),
            ahead.put(),
            *([rare.put()] if minute == 9 else ()),
        ]
        spoken = streams.batch_of(rows, first)
        judged = replica.drain(spoken, now_ms, lambda *_: None)
        assert set(judged.verdicts.tolist()) == {Verdict.OK}, (
            "whoever is forgotten speaks again, and is no fault"
        )
        replica.drain(flood(first + len(rows), each_minute, now_ms, ends=ends), now_ms, lambda *_: None)
        faults += replica.faults.faults
        saved = replica.checkpoint(now_ms=now_ms)
        assert saved is not None
        state = replica.drainer.state
        assert steady.guid in state.producers and ahead.guid in state.producers
        sizes.append(len(saved))
        assert len(state.producers) <= most and len(saved) <= most * 90
        assert state.producers.rows.nbytes + state.producers.index.nbytes <= 3 * most * 130
    assert faults == 0
    assert len(set(sizes[5:-1])) == 1, "it does not grow"


@pytest.mark.parametrize("row", ["R-29"])
def test_a_push_ends_against_a_hundred_thousand_producers(row: str, streams: Any) -> None:
    driver = streams.Pen(99)
    validator = PartitionValidator("orders", 0, rules=ValidationRules(during_push=OnError.KEEP))
    validator.validate(streams.batch_of([driver.start(), driver.start_push()]), streams.NOW)
    validator.validate(flood(2, 100_000, streams.NOW), streams.NOW)
    row = validator.state.producers.known[1]
    guid = int(row["guid_high"]).to_bytes(8, "big") + int(row["guid_low"]).to_bytes(8, "big")
    listed = Sent(guid, 3, 7, 0, 1)
    missing = Sent(b"\xff" * 16, 0, 4, 0, 3)
    for manifest, verdict in (
        (Manifest((listed,)), Verdict.OK),
        (Manifest((listed, missing)), Verdict.MISSING),
    ):
        fork = PartitionValidator("orders", 0, rules=validator.rules, state=validator.state.copy())
        pen = streams.Pen(99)
        pen.chain, pen.sequence = driver.chain, driver.sequence
        judged = fork.validate(streams.batch_of([pen.end_push(manifest)], 200_000), streams.NOW)
        assert judged.verdicts.tolist() == [verdict]


@pytest.mark.parametrize("row", ["R-29"])
def test_clocks_that_jump_back_or_to_the_end_of_time_expire_nobody_else(row: str, streams: Any) -> None:
    pens = [streams.Pen(number, time=streams.NOW) for number in (1, 2, 3)]
    rows = [pen.start() for pen in pens]
    pens[0].time, pens[1].time, pens[2].time = streams.NOW - 10**9, 2**63 - 1, -(2**63)
    rows += [pen.put()._replace(time=streams.NOW) for pen in pens]
    both = streams.Both()
    assert both.verdicts(rows) == ["OK"] * 6, "a clock says nothing about order"
    state: PartitionState = both.vector.state
    assert state.producers.get(pens[0].guid).producer_time == streams.NOW, "it never goes back"
    for now_ms in (streams.NOW, streams.NOW - 10**12):
        kept = restore_checkpoint(encode_state(state), max_age_ms=1000, now_ms=now_ms)
        assert len(kept.producers) == 3
    with pytest.raises(TidegateError):
        decode_state(encode_state(state)[:-1])
