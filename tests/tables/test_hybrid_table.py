"""A pushed version goes on with a live topic: real topics, commits and replicas, one row of behaviour after another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hybrid_stage import DAY, LIVE, VERSION, Stage, faults, lose_one, producers, rows
from tidegate import Consumed, String
from tidegate import table as table_of
from tidegate.clock import ManualClock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.integrity import Manifest
from tidegate.integrity.control_records import TopicSwitch
from tidegate.integrity.replica import Role
from tidegate.storage import open_backend
from tidegate.tables.hybrid.status import freshest_replica
from tidegate.tables.hybrid.table import hybrid_table
from tidegate.tables.versions.catalog import State, Versions
from tidegate.tables.versions.push import delete_version


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def controls(stage: Stage, control: int) -> list[dict[str, Any]]:
    found = []
    with stage.log.reader(VERSION, [0], control_records=True) as reader:
        for batch in reader:
            for row in batch.to_pylist():
                headers = {each["key"]: each["value"] for each in row["headers"]}
                if headers["div"][1] == 2 and headers["div"][2] == control:
                    found.append(row | {"payload": headers.get("divc")})
    return found


# -- going on ---------------------------------------------------------------------------------------------------


def test_the_switch_is_a_control_record_and_the_live_topic_is_read_from_the_rewind_on(stage: Stage) -> None:
    live = stage.sender(LIVE)
    stage.write(live, early="before the rewind")
    stage.clock.advance(2 * DAY)
    stage.write(live, alice="rewound")
    stage.clock.advance(DAY // 2)
    stage.push(alice="pushed", bob="pushed", early="pushed")
    pushed_ms = stage.clock.now_ms()
    table = stage.replica("a")
    stage.settle(table)
    stage.write(live, carol="live", bob=None)
    stage.settle(table)
    assert rows(table) == {"alice": "rewound", "carol": "live", "early": "pushed"}
    assert table.roles == {0: Role.LEADER}
    record, later = controls(stage, 7)
    assert TopicSwitch.from_bytes(record["payload"]) == TopicSwitch(
        LIVE, pushed_ms - DAY, 2, topic_id=stage.log.topic_states([LIVE])[LIVE].topic_id
    )
    said = TopicSwitch.from_bytes(later["payload"])
    assert (said.start_ms, said.offset) == (pushed_ms - DAY, 5) and said.state, (
        "and how far, when it fell silent"
    )
    assert table.get("alice") == "rewound" and table.get("bob") is None


def test_a_scan_of_a_replica_does_not_see_what_it_drains_meanwhile(stage: Stage) -> None:
    live = stage.sender(LIVE)
    keys = [f"k{number:03}" for number in range(60)]
    stage.push(**dict.fromkeys(keys, "pushed"))
    table = stage.replica("a")
    stage.settle(table)
    scan = table.batches(batch_rows=10)
    seen = [row["value"] for row in next(scan).to_pylist()]
    stage.write(live, **dict.fromkeys(keys, "live"))
    stage.settle(table)
    seen += [row["value"] for batch in scan for row in batch.to_pylist()]
    assert seen == ["pushed"] * 60
    assert set(rows(table).values()) == {"live"}


def test_rewinding_from_the_start_of_the_push(stage: Stage) -> None:
    live = stage.sender(LIVE)
    stage.write(live, alice="an hour before")
    stage.clock.advance("1h")
    stage.pushing.start()
    started_ms = stage.clock.now_ms()
    stage.clock.advance("6h")
    task = stage.sender(VERSION)
    stage.write(task, alice="pushed")
    stage.end_push(task)
    table = stage.replica("a", rewind="90m", rewind_from="start")
    stage.settle(table)
    assert rows(table) == {"alice": "an hour before"}
    assert TopicSwitch.from_bytes(controls(stage, 7)[0]["payload"]).start_ms == started_ms - 90 * 60_000


def test_a_standby_is_warm_and_takes_over_where_the_leader_ended(stage: Stage) -> None:
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    first, second = stage.replica("a"), stage.replica("b")
    stage.settle(first, second)
    stage.write(live, alice="1")
    stage.settle(first, second)
    assert (first.roles[0], second.roles[0]) == (Role.LEADER, Role.STANDBY)
    assert rows(first) == rows(second) == {"alice": "1"}
    first.close()
    stage.write(live, alice="2", bob="2")
    stage.settle(second)
    assert second.roles[0] is Role.LEADER and rows(second) == {"alice": "2", "bob": "2"}
    upstream = second.serving.leading[0].following.upstream
    assert (upstream.epoch, upstream.copied) == (2, 3)
    second.commit()
    assert freshest_replica(second._backend, VERSION) == f"{VERSION}.b"


def test_a_live_topic_that_falls_silent_behind_repeats_leaves_no_lag(stage: Stage) -> None:
    stage.push(alice="pushed")
    stage.write(stage.sender(LIVE), alice="1", bob="2")
    first, second = stage.replica("a"), stage.replica("b")
    stage.settle(first, second)
    with stage.log.reader(LIVE, control_records=True) as reader:
        again = pa.Table.from_batches(list(reader)).slice(1).select(["key", "value", "timestamp", "headers"])
    stage.log.writer(LIVE).write(again, partition=0)
    while first.step() or second.step():
        pass
    (standby,) = second.status().partitions
    assert (standby.live_lag, standby.copied) == (2, 2), "nobody has told it that they are repeats"
    switches = len(controls(stage, 7))
    stage.settle(first, second)
    assert [each.live_lag for table in (first, second) for each in table.status().partitions] == [0, 0]
    assert len(controls(stage, 7)) == switches + 1, "said once, and not again while it is silent"
    assert rows(first) == rows(second) == {"alice": "1", "bob": "2"}


def test_a_leader_that_does_not_know_that_it_was_replaced_is_ignored(stage: Stage) -> None:
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    zombie = stage.replica("a", clock=ManualClock())  # whose clock stands: its lease never needs renewing
    stage.settle(zombie)
    stage.clock.advance("1h")
    second = stage.replica("b")
    stage.settle(second)
    assert (zombie.roles[0], second.roles[0]) == (Role.LEADER, Role.LEADER)
    stage.write(live, alice="1")
    stage.settle(second)
    leading = zombie.serving.leading[0]
    assert leading.step(), "it copies the record too, being a leader as far as it knows"
    stage.settle(second)
    assert rows(second) == {"alice": "1"}
    assert second.counts.fenced > 0 and second.serving.leading[0].following.upstream.copied == 1
    stage.settle(zombie, second)
    assert zombie.roles[0] is Role.STANDBY and rows(zombie) == rows(second)


def test_bytes_that_a_live_producer_sent_twice_are_copied_once_by_whoever_leads(stage: Stage) -> None:
    stage.push(alice="pushed")
    live = stage.sender(LIVE)
    first = stage.replica("a")
    stage.settle(first)
    stage.write(live, alice="1")
    stage.write(live, alice="2")
    stage.settle(first)
    first.close()
    with stage.log.reader(LIVE, [0], control_records=True) as reader:
        again = next(iter(reader)).slice(0, 2)  # the start of the chain and the first value
    names = ("key", "value", "timestamp", "headers")
    plain = pa.RecordBatch.from_arrays([again.column(name) for name in names], list(names))
    stage.log.writer(LIVE).write(plain, partition=0)
    second = stage.replica("b")
    stage.settle(second)
    assert rows(second) == {"alice": "2"}
    assert second.serving.leading[0].following.upstream.copied == 2


# -- refused ----------------------------------------------------------------------------------------------------


def test_what_cannot_be_served_is_refused_before_anything_is_made(stage: Stage) -> None:
    stage.log.create_topic("narrow", 1)
    stage.log.create_topic("wide", 2)
    stage.log.create_topic("compacted_v1", 1, {"cleanup.policy": "compact"})
    for name, settings, match in (
        (VERSION, {"live": "wide"}, "partitions"),
        (VERSION, {"live": VERSION}, "own live topic"),
        (VERSION, {"live": LIVE, "partitions": [3]}, "no partition 3"),
        (VERSION, {"live": LIVE, "rewind_from": "middle"}, "rewind_from"),
        ("compacted_v1", {"live": LIVE}, "compacted"),
        ("nowhere", {"live": LIVE}, "nowhere"),
    ):
        with pytest.raises(InvalidError, match=match):
            hybrid_table(stage.log, name, state=stage.folder / "state", **settings)  # type: ignore[arg-type]
    stage.replica("a")
    with pytest.raises(UnavailableError, match="served by process"):
        stage.replica("a")


def test_a_version_that_failed_is_not_served_and_a_table_means_its_current_one(stage: Stage) -> None:
    stage.push(alice="pushed")
    first = stage.replica("a")
    versions = Versions(first._backend, "users", clock=stage.clock)
    made = versions.create("push-1", partitions=1, key_serde="String()", value_serde="String()")
    assert made.topic == VERSION
    with pytest.raises(InvalidError, match="no version that readers see"):
        hybrid_table(stage.log, "users", live=LIVE, state=first._backend)
    for state in (State.INGESTING, State.READY):
        versions.mark(1, state)
    versions.swap(1)
    second = hybrid_table(stage.log, "users", live=LIVE, state=first._backend, replica="b", hold=0)
    stage.tables.append(second)
    stage.settle(second)
    assert second.version == VERSION and rows(second) == {"alice": "pushed"}
    second.commit()
    second.close()
    first.close()
    backend = open_backend(stage.folder / "state")
    versions = Versions(backend, "users", clock=stage.clock)
    versions.create("push-2", partitions=1, key_serde="String()", value_serde="String()")
    versions.mark(2, State.FAILED)
    with pytest.raises(InvalidError, match="failed"):
        hybrid_table(stage.log, "users_v2", live=LIVE, state=backend)
    versions.create("push-3", partitions=1, key_serde="String()", value_serde="String()")
    for state in (State.INGESTING, State.READY):
        versions.mark(3, state)
    versions.swap(3)
    assert delete_version(versions, stage.log, 1) > 0
    assert [each.name for each in backend.list("") if VERSION in each.name] == []
    backend.close()


def test_another_live_topic_than_the_first_leaders_is_refused_by_the_next(stage: Stage) -> None:
    stage.push(alice="pushed")
    stage.log.create_topic("other", 1)
    first = stage.replica("a")
    stage.settle(first)
    first.close()
    second = hybrid_table(stage.log, VERSION, live="other", state=stage.folder / "state", replica="b", hold=0)
    stage.tables.append(second)
    stage.settle(second)
    assert second.roles[0] is Role.STANDBY
    assert f"follows the live topic {LIVE}" in second.status().partitions[0].error


# -- rows of behaviour ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["DIV-21+DIV-24"])
def test_nobody_is_forgotten_during_a_push_and_silent_ones_are_after_it(row: str, stage: Stage) -> None:
    stage.pushing.start()
    old, edge, fresh = (stage.sender(VERSION) for _ in range(3))
    stage.write(old, old="1")
    stage.clock.advance("5s")
    stage.write(edge, edge="1")
    stage.clock.advance("5s")
    stage.write(fresh, fresh="1")
    table = stage.replica("a")
    stage.settle(table)
    table.close()
    table = stage.replica("a", max_age="5s", rewind=0)
    everyone = {old.guid, edge.guid, fresh.guid, stage.driver.guid}
    assert producers(table) == everyone, "the end of the push lists who took part, and the driver sends it"
    stage.write(old, old="2")
    stage.end_push(old, edge, fresh)
    stage.settle(table)
    assert rows(table) == {"old": "2", "edge": "1", "fresh": "1"} and faults(table) == 0
    stage.clock.advance("10s")
    live = stage.sender(LIVE)
    stage.write(live, live="1")
    stage.settle(table)
    table.commit()
    assert not producers(table) & everyone, "the leader speaks, and the push is over"
    assert rows(table)["live"] == "1" and faults(table) == 0


@pytest.mark.parametrize("row", ["DIV-22"])
def test_partitions_expire_producers_independently(row: str, tmp_path: Path) -> None:
    stage = Stage(tmp_path, partitions=2)
    slow = stage.sender(LIVE)
    stage.write(slow, partition=0, zero="1")
    stage.write(slow, partition=1, one="1")
    stage.clock.advance("20s")
    late = stage.sender(LIVE)
    stage.write(late, partition=0, zero="2")
    consumed = Consumed(String(), String(), max_age="5s")
    with table_of(stage.log, LIVE, state=tmp_path / "tables", consumed=consumed) as table:
        table.commit()
        (zero, one) = (
            {each.guid for each in table._builder.validations[number].replica.drainer.state.producers}
            for number in (0, 1)
        )
        assert zero == {late.guid}
        assert one == {slow.guid}, "partition 1 lags: nobody is old there"
        stage.write(slow, partition=0, zero="3")  # in the middle of a numbering that is forgotten
        table.catch_up()
        assert table.get("zero") == "3"
        assert table._builder.validations[0].replica.faults.faults == 0
    stage.close()


@pytest.mark.parametrize("row", ["DIV-26+DIV-27"])
def test_a_restart_in_the_middle_of_a_chain_goes_on_to_its_end(row: str, stage: Stage) -> None:
    stage.pushing.start()
    task = stage.sender(VERSION)
    stage.write(task, alice="1", bob="1")
    table = stage.replica("a")
    stage.settle(table)
    table.commit()
    saved = table.position[0]
    stage.write(task, alice="2")
    stage.settle(table)
    table.close(save=False)  # what came since the commit is drained again
    stage.write(task, carol="3")
    stage.end_push(task)
    table = stage.replica("a")
    assert table.position[0] == saved
    stage.settle(table)
    assert rows(table) == {"alice": "2", "bob": "1", "carol": "3"}
    assert faults(table) == 0 and table.roles[0] is Role.LEADER
    assert table.counts.repeated == 0


@pytest.mark.parametrize("row", ["DIV-31+DIV-13"])
def test_a_failed_partition_is_not_saved_and_the_others_are(row: str, tmp_path: Path) -> None:
    stage = Stage(tmp_path, partitions=2)
    stage.pushing.start()
    task = stage.sender(VERSION)
    table = stage.replica("a")
    stage.write(task, partition=0, zero="1")
    stage.write(task, partition=1, one="1")
    stage.settle(table)
    table.commit()
    saved = table.position
    stage.write(task, partition=1, one="2")
    lose_one(task)
    stage.write(task, partition=0, zero="2")
    stage.settle(table)
    statuses = {each.partition: each for each in table.status().partitions}
    assert statuses[0].role == "offline" and "MISSING" in statuses[0].error
    assert statuses[1].role == "standby" and statuses[1].error == ""
    table.close()
    again = stage.replica("a")
    assert again.position[0] == saved[0] and again.position[1] > saved[1]
    assert rows(again) == {"zero": "1", "one": "2"}
    stage.close()


@pytest.mark.parametrize("row", ["DIV-32"])
def test_the_start_and_the_end_of_the_push_are_committed_and_chains_are_not(row: str, stage: Stage) -> None:
    table = stage.replica("a")
    commits = [len(table.commits())]
    stage.pushing.start()
    stage.settle(table)
    commits.append(len(table.commits()))
    task = stage.sender(VERSION)
    for number in range(3):
        stage.write(task, alice=str(number))
        stage.settle(table)
    task.close()
    stage.settle(table)
    commits.append(len(table.commits()))
    stage.pushing.end({0: Manifest.of(list(task.sent().values()))})
    stage.free()
    while table.position[0] < 9 and table.step():
        pass
    commits.append(len(table.commits()))
    assert commits == [1, 2, 2, 3]
    stage.settle(table)
    assert len(table.commits()) == 4, "and so is the topic switch"
