"""Rows of behaviour of replicas behind a push, whoever pushed: collected by the tests that give a `stage`.

`stage.push` leaves a version topic with a whole push in it, alice's row; what follows is the replicas' business.
"""

from __future__ import annotations

import logging

import pytest

from hybrid_stage import DAY, LIVE, VERSION, Stage, faults, lose_one, producers, rows
from tidegate.integrity import send_heartbeat
from tidegate.integrity.replica import Role
from tidegate.integrity.verdicts import Verdict


@pytest.mark.parametrize("row", ["DIV-20"])
def test_idle_producers_stay_until_another_one_speaks_later(row: str, stage: Stage) -> None:
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    first, second = (stage.replica(name, max_age="1m", rewind=0) for name in ("a", "b"))
    stage.settle(first, second)
    stage.write(live, alice="1")
    stage.settle(first, second)
    known = producers(second)
    assert len(known) == 3  # the driver, the task, the first leader
    stage.clock.advance("2m")
    second.commit()
    assert producers(second) == known, "the wall clock expires nobody"
    first.close()
    stage.clock.advance("2m")
    stage.settle(second)
    stage.write(live, alice="2")
    stage.settle(second)
    second.commit()
    assert not known & producers(second) and len(producers(second)) == 1
    assert rows(second) == {"alice": "2"} and faults(second) == 0


@pytest.mark.parametrize("row", ["DIV-23"])
def test_producers_are_kept_for_the_rewind_at_least_and_for_ever_by_default(row: str, stage: Stage) -> None:
    stage.push(alice="pushed")
    ages = {}
    for name, settings in {"a": {}, "b": {"max_age": "5s"}, "c": {"max_age": "3d"}}.items():
        table = stage.replica(name, **settings)
        ages[name] = table.serving.leading[0].following.replica.max_age_ms
    assert ages == {"a": -1, "b": DAY, "c": 3 * DAY}


@pytest.mark.parametrize("row", ["DIV-28"])
def test_leaving_drops_the_state_and_leaves_the_commit_as_it_is(row: str, stage: Stage) -> None:
    stage.push(alice="pushed")
    table = stage.replica("a", follow=False)
    stage.settle(table)
    table.commit()
    before = table.commits()
    stage.write(stage.sender(LIVE), alice="1")
    while (
        table.step()
    ):  # not until it falls silent: the leader would say how far it is, and that is committed
        pass
    replica = table.serving.leading[0].following.replica
    table.close(save=False)
    assert replica.role is Role.OFFLINE
    again = stage.replica("a")
    assert again.commits() == before
    stage.settle(again)
    assert rows(again) == {"alice": "1"}


@pytest.mark.parametrize("row", ["DIV-25+DIV-29"])
def test_a_promotion_in_the_middle_of_a_live_chain_goes_on_with_what_the_drainer_knows(
    row: str, stage: Stage
) -> None:
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    first, second = stage.replica("a"), stage.replica("b")
    stage.settle(first, second)
    stage.write(live, alice="1")
    stage.settle(first, second)
    before = first.serving.leading[0].following.replica.consumer.state
    first.close()  # which says how far it was
    stage.settle(second)
    leading = second.serving.leading[0]
    assert leading.following.upstream.state, "the drainer was told of the live producers"
    consumer = leading.following.replica.consumer.state
    assert consumer == before and consumer is not before
    held = leading.following.upstream.state
    stage.write(live, alice="2")
    live.close()  # the end of the chain: its checksum covers what the other leader read
    while second.step():
        pass
    assert leading.following.upstream.state == held, "a copy: the drainer's stays until it is told again"
    stage.settle(second)
    assert leading.following.upstream.state != held, "which it is when the live topic has fallen silent"
    counts = leading.live_faults
    assert counts.faults == 0 and counts.verdicts[Verdict.OK] == 2 and rows(second) == {"alice": "2"}


@pytest.mark.parametrize("row", ["DIV-30"])
def test_demoted_and_promoted_again_it_clones_again(row: str, stage: Stage) -> None:
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    first, second = stage.replica("a"), stage.replica("b")
    stage.settle(first, second)
    stage.write(live, alice="1")
    stage.settle(first, second)
    stale = first.serving.leading[0].following.replica.consumer.state
    first.serving.leading[0].stop()
    while second.roles[0] is not Role.LEADER:
        second.step()
        stage.clock.advance("1s")
    stage.write(live, alice="2")
    while second.step():
        pass
    second.serving.leading[0].stop()
    stage.settle(first)
    assert first.roles[0] is Role.LEADER
    renewed = first.serving.leading[0].following.replica.consumer.state
    assert renewed is not stale and renewed.next_offset == 3
    stage.write(live, alice="3")
    stage.settle(first, second)
    assert rows(first) == rows(second) == {"alice": "3"} and faults(first) + faults(second) == 0


@pytest.mark.parametrize("row", ["DIV-33"])
def test_heartbeats_are_no_data_and_no_state(row: str, stage: Stage) -> None:
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    table = stage.replica("a")
    stage.settle(table)
    stage.write(live, alice="1")
    send_heartbeat(stage.log.writer(LIVE), [0], clock=stage.clock)
    send_heartbeat(stage.log.writer(VERSION), [0], clock=stage.clock)
    stage.free()
    stage.write(live, bob="1")
    stage.settle(table)
    assert rows(table) == {"alice": "1", "bob": "1"} and faults(table) == 0
    consumer = table.serving.leading[0].following.replica.consumer.state
    assert {each.guid for each in consumer.producers} == {live.guid}
    assert table.counts.fenced == 0


@pytest.mark.parametrize("row", ["DIV-47"])
def test_a_gap_in_the_live_topic_is_told_by_the_leader_and_nowhere_else(
    row: str, stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    first, second = stage.replica("a"), stage.replica("b")
    stage.write(live, alice="1")
    stage.settle(first, second)
    lose_one(live)
    with caplog.at_level(logging.WARNING):
        stage.write(live, bob="after the gap")
        stage.settle(first, second)
    assert rows(first) == rows(second) == {"alice": "1", "bob": "after the gap"}
    assert first.serving.leading[0].live_faults.verdicts[Verdict.MISSING] == 1
    assert first.status().partitions[0].faults == second.status().partitions[0].faults == 0
    assert "MISSING" in caplog.text and LIVE in caplog.text
