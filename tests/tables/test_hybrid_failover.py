"""What a leader knew of the live producers is known to the next one, also when the live topic has let go of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_stage import LIVE, VERSION, Stage, lose_one, rows
from tidegate.errors import TidegateWarning
from tidegate.integrity.columns import computed_checksums, read_columns
from tidegate.integrity.control_records import TopicSwitch
from tidegate.integrity.header import RecordKind, Stamp
from tidegate.integrity.replica import Role
from tidegate.integrity.verdicts import Verdict
from tidegate.log.log import Log
from tidegate.log.retention import apply_retention
from tidegate.tables.hybrid.replica import Upstream, decode_upstream, encode_upstream
from tidegate.tables.hybrid.table import HybridTable

HOUR = 3_600_000
NAMES = ("key", "value", "timestamp", "headers")


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    made.log.alter_topic(LIVE, {"retention.ms": HOUR})
    yield made
    made.close()


def written(stage: Stage) -> pa.RecordBatch:
    """What is in the live topic, as a producer would send it again."""
    with stage.log.reader(LIVE, [0], control_records=True) as reader:
        table = pa.Table.from_batches(list(reader)).select(list(NAMES))
    return table.combine_chunks().to_batches()[0]


def crash(table: HybridTable) -> None:
    """Its partitions are led no more, and nothing is said; it is not stepped again."""
    for each in table.serving.leading.values():
        each.stop(graceful=False)


def pass_time(stage: Stage, ms: int, *tables: HybridTable) -> None:
    """Let time go by in small steps, as it does, and let the live topic's retention do its work."""
    for _ in range(100):
        stage.clock.advance(ms // 100)
        for table in tables:
            while table.step():
                pass
    retain(stage)


def retain(stage: Stage) -> None:
    apply_retention(stage.log.open_partition(LIVE, 0).log, stage.clock.now_ms())


def first_offset(stage: Stage) -> int:
    with stage.log.reader(LIVE, [0]) as reader:
        return int(reader.positions()[0])


def live_counts(table: HybridTable) -> Any:
    return table.serving.leading[0].live_faults


def send(stage: Stage, records: pa.RecordBatch) -> None:
    stage.log.writer(LIVE).write(records, partition=0)


# -- a stale value does not come back -----------------------------------------------------------------------------


@pytest.mark.parametrize("max_age", [None, "7d"])
@pytest.mark.parametrize("dies", [True, False], ids=["crash", "stop"])
def test_a_record_sent_again_after_retention_and_a_failover_changes_nothing(
    stage: Stage, max_age: str | None, dies: bool
) -> None:
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    first, second = (stage.replica(name, max_age=max_age) for name in ("a", "b"))
    stage.settle(first, second)
    stage.write(live, alice="old")
    again = written(stage)
    stage.write(live, alice="new")
    stage.settle(first, second)
    pass_time(stage, 3 * HOUR, first, second)
    assert first_offset(stage) == 3, "the live topic holds none of it any more"
    crash(first) if dies else first.close()
    send(stage, again)
    stage.settle(second)
    assert second.roles[0] is Role.LEADER
    assert rows(second) == {"alice": "new"}
    assert live_counts(second).verdicts[Verdict.DUPLICATE] == 2  # the start of the chain, and the old value


def test_a_busy_live_topic_is_remembered_too(stage: Stage) -> None:
    """One that never falls silent for a second: the bound is on time, whatever comes in."""
    stage.log.alter_topic(LIVE, {"segment.ms": HOUR // 4})
    stage.push(alice="pushed")
    old, live = stage.sender(LIVE), stage.sender(LIVE)
    first, second = stage.replica("a"), stage.replica("b")
    stage.settle(first, second)
    stage.write(old, alice="old")
    again = written(stage)
    stage.write(old, alice="new")
    for number in range(400):
        stage.clock.advance(HOUR // 200)
        stage.write(live, bob=str(number))
        while first.step() or second.step():
            pass
    retain(stage)
    assert first_offset(stage) > 3
    crash(first)
    send(stage, again)
    stage.settle(second)
    assert rows(second) == {"alice": "new", "bob": "399"}


@pytest.mark.parametrize("dies", [True, False], ids=["crash", "stop"])
def test_more_producers_than_one_record_can_hold_are_all_remembered(stage: Stage, dies: bool) -> None:
    stage.push(alice="pushed")
    first, second = stage.replica("a"), stage.replica("b")
    stage.settle(first, second)
    live = stage.sender(LIVE)
    stage.write(live, alice="old")
    again = written(stage)
    send(stage, many_producers(stage, again, 7_000))
    stage.write(live, alice="new")
    stage.settle(first, second)
    state = first.serving.leading[0].following.replica.consumer.state
    assert len(state.producers) == 7_001
    if dies:
        pass_time(stage, 3 * HOUR, first, second)
        crash(first)
    else:
        first.close()
        stage.clock.advance(3 * HOUR)
        retain(stage)
    assert first_offset(stage) > 7_000
    send(stage, again)
    stage.settle(second)
    assert second.roles[0] is Role.LEADER
    assert rows(second) == {"alice": "new"} | {f"k{number}": "old" for number in range(7_000)}
    assert second.serving.leading[0].following.replica.consumer.state.producers == state.producers


def many_producers(stage: Stage, like: pa.RecordBatch, count: int) -> pa.RecordBatch:
    """One record of each of so many producers, none of which began its chain here."""
    now_ms = stage.clock.now_ms()

    def row(crcs: list[int]) -> pa.RecordBatch:
        stamps = [
            Stamp(RecordKind.PUT, 255, 0, number.to_bytes(16, "big"), 0, 1, now_ms, crcs[number])
            for number in range(count)
        ]
        headers = [[{"key": "div", "value": stamp.to_bytes()}] for stamp in stamps]
        return pa.RecordBatch.from_arrays(
            [
                pa.array([f"k{number}".encode() for number in range(count)], pa.binary()),
                pa.array([b"old"] * count, pa.binary()),
                pa.array([now_ms] * count, pa.int64()).cast(like.schema.field("timestamp").type),
                pa.array(headers, like.schema.field("headers").type),
            ],
            schema=like.schema,
        )

    unsigned = row([0] * count)
    return row(computed_checksums(unsigned, read_columns(unsigned.column("headers"))).tolist())


# -- a live topic that was created again ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["while it is led", "between two leaders"])
def test_a_live_topic_that_was_created_again_is_not_read_on(stage: Stage, when: str) -> None:
    """Offsets count in one topic: those of another with the same name would leave records out."""
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    first, second = stage.replica("a"), stage.replica("b")
    stage.write(live, alice="1", bob="1")
    stage.settle(first, second)
    if when == "between two leaders":
        first.close()
    live.close()
    stage.log.delete_topic(LIVE)
    stage.log.create_topic(LIVE, 1)
    stage.write(stage.sender(LIVE), alice="2", bob="2", carol="2", dave="2", erin="2", fred="2")
    replicas = [second] if when == "between two leaders" else [first, second]
    stage.settle(*replicas)
    for each in replicas:
        assert rows(each) == {"alice": "1", "bob": "1"} and each.roles[0] is Role.STANDBY
    assert any("was deleted and created again" in each.status().partitions[0].error for each in replicas)


# -- what aged out ------------------------------------------------------------------------------------------------


def test_what_aged_out_after_it_was_copied_is_no_loss_and_is_told_as_what_it_is(stage: Stage) -> None:
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    first, second = stage.replica("a"), stage.replica("b")
    stage.settle(first, second)
    stage.write(live, alice="1")
    while first.step() or second.step():
        pass
    stage.write(live, alice="2")
    while first.step() or second.step():
        pass
    crash(first)  # at once: the next leader comes when the live topic has let go of all of it
    stage.clock.advance(3 * HOUR)
    retain(stage)
    with pytest.warns(
        TidegateWarning, match="offsets 0 to 2 of user-updates-0 aged out after they were copied"
    ):
        stage.settle(second)
    (status,) = second.status().partitions
    assert (status.live_lost, status.live_unknown) == (0, 3)
    stage.write(live, alice="3")
    stage.settle(second)
    assert rows(second) == {"alice": "3"} and live_counts(second).faults == 0, "nothing is missing"
    third = stage.replica("c")
    crash(second)
    stage.settle(third)  # which is told nothing: warnings are errors here
    assert third.status().partitions[0].live_unknown == 0


def test_what_aged_out_before_it_was_copied_is_lost_and_is_told_once(stage: Stage) -> None:
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    first, second = stage.replica("a"), stage.replica("b")
    stage.settle(first, second)
    stage.write(live, alice="1")
    stage.settle(first, second)
    crash(first)
    stage.write(live, alice="2", bob="2")
    stage.clock.advance(3 * HOUR)
    retain(stage)
    with pytest.warns(
        TidegateWarning, match="offsets 2 to 3 of user-updates-0 aged out before they were copied"
    ):
        stage.settle(second)
    (status,) = second.status().partitions
    assert (status.live_lost, status.live_unknown) == (2, 0)
    stage.write(live, alice="3")
    stage.settle(second)
    assert rows(second) == {"alice": "3"} and live_counts(second).verdicts[Verdict.MISSING] == 1
    third = stage.replica("c")
    crash(second)
    stage.settle(third)
    (status,) = third.status().partitions
    assert (status.live_lost, status.live_unknown, status.live_faults) == (0, 0, 0)


@pytest.mark.parametrize("last", ["copied", "control"])
def test_a_fault_is_told_by_the_leader_that_met_it_and_not_again_by_the_next(
    stage: Stage, caplog: pytest.LogCaptureFixture, last: str
) -> None:
    """Also one at a record that is not copied, such as the end of a chain."""
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    first, second = stage.replica("a"), stage.replica("b")
    stage.settle(first, second)
    stage.write(live, alice="1")
    lose_one(live)
    if last == "copied":
        stage.write(live, bob="after the gap")
    else:
        live.close()
    while first.step() or second.step():
        pass
    assert live_counts(first).verdicts[Verdict.MISSING] == 1
    crash(first)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        stage.settle(second)
    assert second.roles[0] is Role.LEADER
    assert live_counts(second).faults == 0 and "MISSING" not in caplog.text
    assert rows(second) == {"alice": "1"} | ({"bob": "after the gap"} if last == "copied" else {})


# -- states in parts ----------------------------------------------------------------------------------------------

STATE = st.tuples(st.binary(max_size=12), st.integers(1, 5), st.sets(st.integers(0, 11), max_size=2))
"""A state, how many bytes a part may have, and which of its parts never arrive."""


@given(st.lists(STATE, max_size=6), st.integers(0, 20))
def test_the_last_state_of_which_all_parts_came_counts(
    states: list[tuple[bytes, int, set[int]]], saved_after: int
) -> None:
    upstream = Upstream().switched(TopicSwitch(LIVE, 0, 0))
    expected, records = (0, b""), 0
    for number, (state, most, lost) in enumerate(states, 1):
        parts = TopicSwitch(LIVE, 0, number, state).in_parts(most, generation=number)
        for each in parts:
            if each.part not in lost:
                upstream = upstream.switched(TopicSwitch.from_bytes(each.to_bytes()))
                records += 1
                if (
                    records == saved_after
                ):  # between any two records a replica may commit, and go on from there
                    upstream = decode_upstream(encode_upstream(upstream), "here")
        if not lost & set(range(len(parts))):
            expected = (number, state)
    assert (upstream.state_offset, upstream.state) == expected


def test_what_an_older_release_committed_is_read() -> None:
    fields = (1, 3, b"g" * 16, 42, LIVE, 5, 6, 7, 6, b"state", 9)
    found = decode_upstream(msgspec.msgpack.encode(fields), "here")
    assert (found.epoch, found.topic, found.next_offset, found.state, found.copied) == (
        3,
        LIVE,
        7,
        b"state",
        9,
    )
    assert decode_upstream(encode_upstream(found), "here") == found


# -- live records that are damaged ----------------------------------------------------------------------------------


def live_records(stage: Stage, damaged: str, lost: str | None) -> None:
    """Four updates of one producer in the live topic; one has another value than was sent, one may be lost."""
    with Log(stage.folder / "sent", durability="os", clock=stage.clock) as sent:
        sent.create_topic(LIVE)
        with sent.writer(LIVE, integrity=True) as sender:
            keys = ["alice", "bob", "carol", "dave"]
            sender.write(pa.table({"key": keys, "value": [f"{key} sent" for key in keys]}))
        records = sent.reader(LIVE, control_records=True).read_all()
    schema = pa.schema([records.schema.field(name) for name in ("key", "value", "headers", "timestamp")])
    rows = [{name: row[name] for name in schema.names} for row in records.to_pylist()]
    for row in rows:
        if row["key"] == damaged.encode():
            row["value"] = b"nobody sent this"
    kept = [row for row in rows if lost is None or row["key"] != lost.encode()]
    with stage.log.writer(LIVE) as writer:
        writer.write(pa.Table.from_pylist(kept, schema))
    stage.free()


@pytest.mark.parametrize("lost", [None, "bob"], ids=["alone", "behind a gap"])
def test_a_damaged_live_record_is_left_out_and_told(
    stage: Stage, lost: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    stage.push(alice="pushed", carol="pushed")
    first, second = stage.replica("a"), stage.replica("b")
    stage.settle(first, second)
    with caplog.at_level(logging.WARNING):
        live_records(stage, "carol", lost)
        stage.settle(first, second)
    right = {"alice": "alice sent", "carol": "pushed", "dave": "dave sent"} | (
        {} if lost else {"bob": "bob sent"}
    )
    assert rows(first) == rows(second) == right
    copied = stage.log.reader(VERSION).read_all().column("value").to_pylist()
    assert b"nobody sent this" not in copied and copied.count(b"dave sent") == 1
    leader, standby = first.status().partitions[0], second.status().partitions[0]
    assert leader.live_faults > 0 and standby.live_faults == leader.faults == standby.faults == 0
    counts = first.serving.leading[0].live_faults.verdicts
    assert (counts[Verdict.MISSING], counts[Verdict.CORRUPT]) == ((1, 0) if lost else (0, 1))
    assert ("MISSING" if lost else "CORRUPT") in caplog.text and LIVE in caplog.text
    crash(first)  # and the next leader neither copies it nor tells it again
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        stage.settle(second)
    assert second.roles[0] is Role.LEADER and rows(second) == right
    assert second.status().partitions[0].live_faults == 0 and "CORRUPT" not in caplog.text
