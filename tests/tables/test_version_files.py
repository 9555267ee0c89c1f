"""What belongs to a version goes with it, and nothing else does: tables with like names, topics, leases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from hybrid_stage import VERSION, Stage, rows
from tidegate.clock import ManualClock
from tidegate.errors import InvalidError
from tidegate.log.log import open_log
from tidegate.storage import open_backend
from tidegate.tables.factories import table
from tidegate.tables.hybrid.status import freshest_replica
from tidegate.tables.options import Consumed, Materialized
from tidegate.tables.serdes.base import String
from tidegate.tables.versions.catalog import State, Versions
from tidegate.tables.versions.push import PushPlan, VersionPush, delete_version

SERDES = Consumed(String(), String())


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


def retired(stage: Stage, backend: Any) -> Versions:
    """Table `users`, whose version 1 is what was pushed on this stage, and is not shown any more."""
    versions = Versions(backend, "users", clock=stage.clock)
    for number in (1, 2):
        versions.create(f"push-{number}", partitions=1, key_serde="String()", value_serde="String()")
        for state in (State.INGESTING, State.READY):
            versions.mark(number, state)
        versions.swap(number)
    return versions


@pytest.mark.parametrize(
    ("name", "topic"),
    [
        (f"{VERSION}.daily", "others"),
        (f"{VERSION}.daily", VERSION),
        (f"{VERSION}-0", "others"),
        (VERSION, VERSION),
        (f"{VERSION}0.r0", "others"),
    ],
)
def test_a_table_of_somebody_else_stays_whatever_it_is_called(stage: Stage, name: str, topic: str) -> None:
    stage.push(alice="pushed")
    stage.log.create_topic("others", 1)
    with stage.log.writer("others") as writer:
        writer.write(pa.table({"key": ["bob"], "value": ["theirs"]}), partition=0)
    replica = stage.replica("a")
    stage.settle(replica)
    backend = open_backend(stage.folder / "state")
    theirs = table(
        stage.log, topic, consumed=SERDES, materialized=Materialized(name), state=backend, clock=stage.clock
    )
    theirs.catch_up()
    expected = rows(theirs)
    assert expected
    theirs.commit()
    theirs.close()
    before = {each.name for each in backend.list(name)} | {
        each.name for each in backend.list(f"tables/{name}")
    }
    assert freshest_replica(backend, VERSION) in (f"{VERSION}.a", None)
    versions = retired(stage, backend)
    replica.close()
    assert delete_version(versions, stage.log, 1) > 0
    left = {each.name for each in backend.list("")}
    if name == VERSION:  # whose folder has the leases and the news of the version's replicas, too
        before = {each for each in before if "/replicas/" not in each and "/leader-" not in each}
    assert before <= left
    assert not any(each.startswith((f"{VERSION}.a/", f"tables/{VERSION}.a/")) for each in left)
    assert [each for each in left if f"tables/{VERSION}/replicas" in each or "/leader-" in each] == []
    backend.close()


def test_a_topic_of_somebody_else_is_neither_pushed_into_nor_deleted(tmp_path: Path) -> None:
    log_folder = str(tmp_path / "log")
    with open_log(log_folder) as log:
        log.create_topic("users_v1", 1)
    backend = open_backend(tmp_path / "state")
    plan = PushPlan(log_folder, "users", 1, "String()", "String()")
    with pytest.raises(InvalidError, match="users_v1 is there already"), VersionPush(backend, plan):
        pytest.fail("it began")
    assert Versions(backend, "users").list().versions == ()
    assert [each.name for each in backend.list("")] == []
    backend.close()


# -- leases of pushes -----------------------------------------------------------------------------------------------


def leases(backend: Any) -> list[str]:
    return [each.name for each in backend.list("tables/users/pushes")]


def test_the_lease_of_an_abandoned_push_goes_when_the_next_one_finds_it(tmp_path: Path) -> None:
    clock = ManualClock()
    backend = open_backend(tmp_path / "state", clock=clock)
    plan = PushPlan(str(tmp_path / "log"), "users", 1, "String()", "String()")
    killed = VersionPush(backend, plan, clock=clock, scheduler=Never())
    killed.__enter__()  # and no more is heard of it
    left = VersionPush(backend, plan, clock=clock, scheduler=Never())
    left._lease.acquire()  # killed before it had a version
    assert len(leases(backend)) == 2
    with VersionPush(backend, plan, clock=clock, scheduler=Never()) as busy:
        assert len(leases(backend)) == 3, "as far as anybody knows they are at work"
        clock.advance("1h")
        busy._lease.keep()
        with VersionPush(backend, plan, clock=clock, scheduler=Never()) as third:
            assert sorted(leases(backend)) == sorted(
                f"tables/users/pushes/{each.push}" for each in (busy, third)
            )
            states = {each.push: each.state for each in Versions(backend, "users").list().versions}
            assert states[killed.push] is State.FAILED and states[busy.push] is State.PUSHING
        killed._renew()
        with pytest.raises(Exception, match="taken for abandoned"):
            killed._check()
    assert leases(backend) == []
    backend.close()


def test_a_version_that_is_deleted_takes_the_lease_of_its_push_with_it(tmp_path: Path) -> None:
    clock = ManualClock()
    backend = open_backend(tmp_path / "state", clock=clock)
    with open_log(str(tmp_path / "log")) as log:
        killed = VersionPush(
            backend,
            PushPlan(str(tmp_path / "log"), "users", 1, "String()", "String()"),
            clock=clock,
            scheduler=Never(),
        )
        killed.__enter__()
        versions = Versions(backend, "users", clock=clock)
        versions.mark(1, State.FAILED)
        delete_version(versions, log, 1)
    assert leases(backend) == []
    backend.close()


class Never:
    """A scheduler whose turn never comes."""

    def every(self, *_: Any, **__: Any) -> Never:
        return self

    def cancel(self) -> None: ...

    def close(self) -> None: ...
