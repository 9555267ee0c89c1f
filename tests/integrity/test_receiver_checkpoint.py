"""A receiver's state as bytes, when it is written, and who is too old to be in it."""

from __future__ import annotations

from typing import Any

import pytest

from tidegate.errors import CorruptError, InvalidError
from tidegate.integrity import state as state_module
from tidegate.integrity.replica import CheckpointCadence
from tidegate.integrity.state import (
    FUTURE_GUARD_MS,
    NEVER,
    PartitionState,
    Phase,
    Producer,
    ProducerTable,
    decode_state,
    effective_max_age_ms,
    encode_state,
    restore_checkpoint,
    take_checkpoint,
)
from tidegate.integrity.validator import ValidationRules
from tidegate.integrity.verdicts import Rule, Verdict

NOW = 1_800_000_000_000
MAX_AGE = 1000
DAY = 86_400_000


def producer(number: int, time: int, **fields: Any) -> Producer:
    known: dict[str, Any] = {"chain": 0, "sequence": 1, "registered": True, "producer_time": time, **fields}
    return Producer(bytes([number]) * 16, **known)


def state_of(*producers: Producer) -> PartitionState:
    state = PartitionState()
    for one in producers:
        state.producers.put(one)
    return state


def numbers(state: PartitionState) -> list[int]:
    return sorted(one.guid[0] for one in state.producers)


def full_state() -> PartitionState:
    state = state_of(
        producer(1, 5, checksum=2**64 - 1, stamp_sum=7, records=9, data_records=-1, checksum_type=5),
        producer(200, -1, ended=True, final=True, registered=False, log_time=3, offset=2**62),
        producer(3, 2**62, chain=2**31 - 1, sequence=2**31 - 1, tainted=True, checksum_type=4),
    )
    state.phase, state.next_offset, state.end_of_push = Phase.PUSHED, 2**40, 17
    return state


def test_a_state_comes_back_as_it_was() -> None:
    state = full_state()
    again = decode_state(encode_state(state))
    assert again == state
    assert {one.guid: one for one in again.producers} == {one.guid: one for one in state.producers}
    assert decode_state(encode_state(PartitionState())) == PartitionState()


def test_the_bytes_do_not_depend_on_the_order_producers_came_in() -> None:
    one, two = producer(1, 5), producer(2, 6)
    assert encode_state(state_of(one, two)) == encode_state(state_of(two, one))


def test_a_small_state_has_the_bytes_that_are_documented() -> None:
    state = state_of(producer(1, 2, checksum=3, stamp_sum=4, records=5, data_records=6, checksum_type=5))
    state.next_offset = 7
    data = encode_state(state)
    assert data[:26].hex() == "5447495601000000000000000007ffffffffffffffff00000001"
    row = data[26:-4]
    assert row[:16] == b"\x01" * 16
    assert [int.from_bytes(row[at : at + 8], "big") for at in range(16, 56, 8)] == [3, 4, 5, 6, 2]
    assert row[-2:] == b"\x01\x05"


def test_any_damaged_byte_or_length_is_seen() -> None:
    data = encode_state(full_state())
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CorruptError, match="checkpoint"):
            decode_state(bytes(damaged))
    for length in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(CorruptError):
            decode_state(data[:length])
    with pytest.raises(CorruptError):
        decode_state(data + b"\0")


def test_the_same_producer_twice_is_refused_even_with_a_right_checksum() -> None:
    state = state_of(producer(1, 5), producer(2, 5))
    state.producers.rows["guid_high"][:2] = 1
    state.producers.rows["guid_low"][:2] = 1
    with pytest.raises(CorruptError, match="no receiver writes"):
        decode_state(encode_state(state))


@pytest.mark.parametrize("row", ["DIV-20"])
def test_producers_expire_by_the_newest_one_and_never_by_the_wall_clock(row: str) -> None:
    state = state_of(producer(1, 5000), producer(2, 5100))
    take_checkpoint(state, max_age_ms=MAX_AGE, now_ms=10**12)
    assert numbers(state) == [1, 2]
    state.producers.put(producer(2, 6001))
    data = take_checkpoint(state, max_age_ms=MAX_AGE, now_ms=10**12)
    assert numbers(state) == numbers(decode_state(data)) == [2]


@pytest.mark.parametrize("row", ["DIV-22"])
def test_partitions_expire_independently(row: str) -> None:
    current, lagging = state_of(producer(1, 10), producer(2, 9999)), state_of(producer(1, 10))
    take_checkpoint(current, now_ms=NOW, max_age_ms=MAX_AGE)
    take_checkpoint(lagging, now_ms=NOW, max_age_ms=MAX_AGE)
    assert (numbers(current), numbers(lagging)) == ([2], [1])


@pytest.mark.parametrize("row", ["DIV-23"])
def test_a_maximum_age_of_minus_one_is_never_and_a_rewind_lengthens_it(row: str) -> None:
    state = state_of(producer(1, 0), producer(2, 10**12))
    take_checkpoint(state, now_ms=NOW, max_age_ms=effective_max_age_ms(-1, DAY))
    assert numbers(state) == [1, 2]
    assert effective_max_age_ms(MAX_AGE, DAY) == DAY
    assert effective_max_age_ms(2 * DAY, DAY) == 2 * DAY
    assert effective_max_age_ms(MAX_AGE) == MAX_AGE
    with pytest.raises(InvalidError):
        effective_max_age_ms(-2)


@pytest.mark.parametrize("row", ["DIV-24"])
def test_a_restore_drops_the_old_and_keeps_the_one_exactly_at_the_limit(row: str) -> None:
    state = state_of(producer(1, 3999), producer(2, 4000), producer(3, 5000))
    restored = restore_checkpoint(encode_state(state), now_ms=NOW, max_age_ms=MAX_AGE)
    assert numbers(restored) == numbers(decode_state(encode_state(restored))) == [2, 3]


@pytest.mark.parametrize("row", ["DIV-25"])
def test_without_any_time_nobody_expires_and_a_copy_shares_nothing(row: str) -> None:
    state = state_of(producer(1, -1), producer(2, -1))
    copy = state.copy()
    copy.expire(MAX_AGE, now_ms=NOW)
    assert numbers(copy) == [1, 2]
    copy.producers.put(producer(1, 77, sequence=50))
    copy.producers.put(producer(9, 77))
    found = state.producers.get(b"\x01" * 16)
    assert found is not None and found.sequence == 1
    assert numbers(state) == [1, 2]


def test_a_clock_that_runs_ahead_does_not_expire_the_others() -> None:
    now = 10**12
    state = state_of(producer(1, now), producer(2, now + FUTURE_GUARD_MS + 1))
    take_checkpoint(state, max_age_ms=MAX_AGE, now_ms=now)
    assert numbers(state) == [1, 2]


@pytest.mark.parametrize("row", ["DIV-21"])
def test_whoever_was_forgotten_and_speaks_again_is_accepted_and_during_a_push_nobody_is_forgotten(
    row: str, streams: Any
) -> None:
    for phase, rule in ((Phase.PUSHING, Rule.B1), (Phase.PUSHED, Rule.A3), (Phase.LIVE, Rule.A3)):
        old, new = streams.Pen(1, time=1000), streams.Pen(2, time=5000)
        both = streams.Both(state=PartitionState(phase=phase, end_of_push=0))
        both.feed([old.start(), old.put(), new.start()])
        restored = restore_checkpoint(encode_state(both.vector.state), now_ms=NOW, max_age_ms=MAX_AGE)
        again = decode_state(encode_state(restored))
        assert again.forgot == restored.forgot == (phase is not Phase.PUSHING)
        (found,) = streams.Both(state=again).feed([old.put()])
        assert (found.verdict, found.rule) == (Verdict.OK, rule)


def test_above_the_most_that_are_remembered_ended_producers_go_first_and_the_oldest_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_module, "MOST_REMEMBERED", 6)
    ended = [
        Producer(bytes([n]) * 16, 0, 1, True, ended=True, final=True, producer_time=n) for n in range(1, 6)
    ]
    alive = [Producer(bytes([n]) * 16, 0, 1, True, producer_time=1) for n in range(11, 15)]
    state = state_of(*ended, *alive)
    assert state.expire(NEVER, now_ms=NOW) == 0
    assert state.expire(MAX_AGE, now_ms=NOW) == 3
    assert numbers(state) == [4, 5, 11, 12, 13, 14]
    many = state_of(*ended[:1], *alive, *(producer(n, 1) for n in range(20, 30)))
    many.expire(MAX_AGE, now_ms=NOW)
    assert numbers(many) == [
        11,
        12,
        13,
        14,
        *range(20, 30),
    ]  # who may still speak is never forgotten for room


@pytest.mark.parametrize("row", ["DIV-27"])
def test_after_a_crash_records_newer_than_the_checkpoint_are_accepted_again(row: str, streams: Any) -> None:
    rows = streams.Pen().chain_of(6)
    both = streams.Both()
    both.feed(rows[:3])
    data = encode_state(both.vector.state)
    both.feed(rows[3:6])
    restored = streams.Both(state=decode_state(data))
    assert restored.offset == 3
    assert restored.verdicts(rows[3:]) == ["OK"] * 5


@pytest.mark.parametrize("row", ["DIV-32"])
def test_control_records_are_checkpointed_and_chains_are_not(row: str, streams: Any) -> None:
    pen, task = streams.Pen(), streams.Pen(2)
    rows = [pen.start(), pen.start_push(), *task.chain_of(3), pen.end_push(), pen.end()]
    both = streams.Both(ValidationRules())
    cadence = CheckpointCadence(pushing_bytes=2**60, settled_bytes=2**60)
    due = []
    for row in rows:
        both.feed([row])
        phase = both.vector.state.phase
        if cadence.is_due(both.judged[0], 100, phase, streams.NOW):
            due.append(row)
            cadence.taken(streams.NOW)
    assert due == [rows[1], rows[-2]]


def test_a_checkpoint_is_due_by_bytes_and_by_time(streams: Any) -> None:
    both, pen = streams.Both(), streams.Pen()
    both.feed([pen.start()])
    judged = both.judged[0]
    cadence = CheckpointCadence(pushing_bytes=100, settled_bytes=50)
    assert [cadence.is_due(judged, 40, Phase.PUSHING, 0) for _ in range(3)] == [False, False, True]
    cadence.taken(0)
    assert [cadence.is_due(judged, 40, Phase.LIVE, 0) for _ in range(2)] == [False, True]
    off = CheckpointCadence(pushing_bytes=-1, settled_bytes=-1, max_interval_ms=10)
    assert [off.is_due(judged, 2**40, Phase.LIVE, now) for now in (0, 9, 10)] == [False, False, True]


def test_a_table_finds_its_producers_after_growing_and_forgetting() -> None:
    state = PartitionState()
    for number in range(200):
        state.producers.put(Producer(number.to_bytes(16, "big"), 0, number, True, producer_time=number))
    assert state.expire(99, now_ms=NOW) == 100
    assert len(state.producers) == 100
    assert (99).to_bytes(16, "big") not in state.producers
    found = state.producers.get((150).to_bytes(16, "big"))
    assert found is not None and found.sequence == 150
    assert state.newest_time == 199
    assert ProducerTable() != object()
