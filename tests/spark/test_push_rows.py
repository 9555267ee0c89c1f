"""Pushes, damaged, repeated and killed: a version is complete and proven, or it is never shown. No Spark in here."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from push_kit import (
    compact,
    damage,
    ingest_here,
    keys_of,
    order_of,
    part_of,
    push_here,
    rows,
    sorted_batches,
    stamps,
)

from backend_faults import BackendEffect, WatchedBackend
from tidegate.clock import SystemClock
from tidegate.errors import CommitGoneError, ConflictError, UnavailableError
from tidegate.integrity import Sender
from tidegate.integrity.control_records import Push
from tidegate.integrity.fault_injection import DamageKind, break_topic
from tidegate.integrity.header import CONTROL_KEY_PREFIX, ControlType
from tidegate.log.log import Log
from tidegate.spark.push_rows import send_partition
from tidegate.storage import open_backend
from tidegate.tables.commits import load_commits
from tidegate.tables.versions.catalog import PushFailedError, State, Versions
from tidegate.tables.versions.push import VersionPush, delete_version
from tidegate.tables.versions.reader import versioned_table

LOST = (DamageKind.DROP, DamageKind.TRUNCATE_TAIL, DamageKind.FORGET_PRODUCER)


def shown(folder: Path) -> dict[str, str]:
    with versioned_table("users", state=folder / "state") as table:
        return {row.key: row.value for row in table.all()}


def expected(count: int, text: str = "v") -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in rows(count, text)}


def versions_of(folder: Path) -> Versions:
    return Versions(open_backend(str(folder / "state")), "users")


def test_a_push_is_shown_whole_and_an_open_reader_moves_on_to_the_next(tmp_path: Path) -> None:
    assert push_here(tmp_path, rows(300, "old")).is_current
    assert shown(tmp_path) == expected(300, "old")
    with versioned_table("users", state=tmp_path / "state") as reader:
        going_on = reader.batches(batch_rows=100)
        seen = next(going_on).num_rows
        push_here(tmp_path, rows(200, "new"))
        assert reader.refresh().number == 2
        assert (reader.get("key-00007"), reader.get("key-00250")) == ("new-7", None)
        assert (
            seen + sum(batch.num_rows for batch in going_on) == 300
        )  # what was begun goes on with what it began
    assert shown(tmp_path) == expected(200, "new")


def test_an_answer_is_read_with_the_serdes_of_the_version_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 1 has text, version 2 numbers: a key is encoded, and rows are decoded, as the version shown has them."""
    numbers = [(number.to_bytes(8, "big"), (number * 10).to_bytes(8, "big")) for number in range(100)]
    push_here(tmp_path, rows(100))
    with versioned_table("users", state=tmp_path / "state") as reader:
        scan = reader.batches(batch_rows=10)
        seen = next(scan).to_pylist()
        push_here(tmp_path, numbers, serdes=("Long()", "Long()"))
        monkeypatch.setattr(
            reader._follower, "_looked_ms", None
        )  # the next question looks, and finds version 2
        assert reader.get(7) == 70
        assert {row.key: row.value for row in reader.fetch_many([1, 2])} == {1: 10, 2: 20}
        assert reader.sql("select sum(value) s from rows")["s"].to_pylist() == [49_500]
        assert str(reader.to_arrow().schema.field("value").type) == "int64"
        seen += [row for batch in scan for row in batch.to_pylist()]
        assert {row["key"]: row["value"] for row in seen} == expected(100)
        versions_of(tmp_path).swap(1)
        monkeypatch.setattr(reader._follower, "_looked_ms", None)
        assert [row.value for row in reader.fetch_range("key-00005", "key-00006")] == ["v-5", "v-6"]


def test_a_version_that_is_deleted_under_a_scan_is_told_and_a_query_takes_the_next(tmp_path: Path) -> None:
    push_here(tmp_path, rows(300, "old"))
    with versioned_table("users", state=tmp_path / "state") as reader:
        scan = reader.batches(batch_rows=10)
        next(scan)
        view = reader._shown
        assert view is not None
        push_here(tmp_path, rows(300, "new"))
        push_here(tmp_path, rows(300, "newest"))
        versions = versions_of(tmp_path)
        with Log(tmp_path / "log") as log:
            delete_version(versions, log, 1)
        view.source.runtime._parts.packs.close()
        with pytest.raises(
            CommitGoneError, match="users_v1 was deleted while it was read; read the table again"
        ):
            list(scan)
        assert reader.get("key-00007") == "newest-7"


def test_of_rows_with_one_key_the_largest_value_counts(tmp_path: Path) -> None:
    given = [(b"a", b"1"), (b"b", b"5"), (b"a", b"3"), (b"a", b"2"), (b"b", b"4")]
    assert push_here(tmp_path, given).version.rows == 2
    assert shown(tmp_path) == {"a": "3", "b": "5"}


def test_rows_without_a_key_are_all_counted_by_one_task_before_anything_is_sent(tmp_path: Path) -> None:
    given = [(None, b"x"), *rows(100), (None, b"y"), (None, b"z")]

    def look(push: VersionPush) -> None:
        answer = send_partition(order_of(push), 0, 9, sorted_batches(given, 0, 2), clock=SystemClock())
        assert (answer.without_key, answer.sent) == (3, None)
        raise InterruptedError("seen")

    with pytest.raises(InterruptedError):
        push_here(tmp_path, given, touch={"started": look})


@pytest.mark.parametrize("row", ["DIV-12"])
def test_whichever_record_is_lost_it_is_missed_by_its_number(tmp_path: Path, row: str) -> None:
    version = push_here(tmp_path, rows(5), partitions=1).version
    with Log(tmp_path / "log", read_only=True) as log:
        for offset in range(3, 8):  # behind the driver's start and start of push, and the task's start
            copy = tmp_path / f"log-{offset}"
            break_topic(log, version.topic, DamageKind.DROP, into=copy, offset=offset)
            with Log(copy, read_only=True) as broken:
                backend = open_backend(str(tmp_path / f"state-{offset}"))
                (found,) = ingest_here(broken, backend, version, [0])
                commits = load_commits(backend, version.shape(0).name)
            assert found.fault is not None
            assert (found.fault.kind, found.fault.offset) == ("missing", offset)
            assert (
                f"sequence {offset - 2} of chain 0 of producer {found.fault.producer}" in found.fault.message
            )
            assert not found.result.is_complete
            assert (
                commits is not None and len(commits[0].commits) == 1
            )  # that of the start of push, and none behind


@pytest.mark.parametrize("row", ["DIV-14"])
def test_repeated_records_are_stored_once(tmp_path: Path, row: str) -> None:
    def repeat(push: VersionPush) -> None:
        damage(tmp_path / "log", push.version.topic, DamageKind.REPEAT, tmp_path / "copy", count=3)

    report = push_here(tmp_path, rows(200), touch={"ended": repeat})
    assert report.version.verdicts["duplicate"] == 3
    assert shown(tmp_path) == expected(200)


@pytest.mark.parametrize("row", ["DIV-16"])
def test_gaps_of_a_compacted_topic_are_fine_where_compaction_has_been(tmp_path: Path, row: str) -> None:
    settings = {"cleanup.policy": "compact", "min.compaction.lag.ms": 0, "min.cleanable.dirty.ratio": 0.01}

    def overwrite(push: VersionPush) -> None:
        """Another sender writes four keys behind the end of the push; compaction takes the push's records of them."""
        with Log(tmp_path / "log") as log, log.writer(push.version.topic, integrity=True) as sender:
            keys = [key for key, _ in rows(100)[10:50:10]]
            sender.write(pa.table({"key": keys, "value": [b"later"] * 4}))
        before = sum(len(keys_of(tmp_path / "log", push.version.topic, number)) for number in (0, 1))
        compact(tmp_path / "log", push.version.topic)
        after = sum(len(keys_of(tmp_path / "log", push.version.topic, number)) for number in (0, 1))
        assert before - after == 4

    report = push_here(tmp_path, rows(100), touch={"ended": overwrite}, topic_settings=settings)
    assert report.is_current and report.version.rows == 96


@pytest.mark.parametrize("lag_ms", [0, 86_400_000])
@pytest.mark.parametrize("row", ["DIV-16"])
def test_gaps_of_a_compacted_topic_are_loss_where_compaction_has_not_been(
    tmp_path: Path, row: str, lag_ms: int
) -> None:
    settings = {"cleanup.policy": "compact", "min.compaction.lag.ms": lag_ms}
    drop = {"ended": lambda push: _damaged(tmp_path, push, DamageKind.DROP)}
    with pytest.raises(PushFailedError, match="missing"):
        push_here(tmp_path, rows(100), touch=drop, topic_settings=settings)


def _damaged(folder: Path, push: VersionPush, kind: DamageKind) -> None:
    damage(folder / "log", push.version.topic, kind, folder / f"copy-{push.version.number}-{kind.value}")


@pytest.mark.parametrize("row", ["DIV-31"])
def test_a_partition_whose_rows_cannot_be_stored_is_not_committed_and_the_other_one_is(
    tmp_path: Path, row: str
) -> None:
    version = push_here(tmp_path, rows(100), swap=False).version

    def refuse(effect: BackendEffect) -> None:
        if effect.kind == "put" and ".pack" in effect.name and "users_v1-1" in effect.name:
            raise UnavailableError("no room for packs of partition 1")

    backend = WatchedBackend(open_backend(str(tmp_path / "elsewhere")), refuse)
    with Log(tmp_path / "log", read_only=True) as log:
        good, bad = ingest_here(log, backend, version, [0, 1])
        assert good.result.is_complete and good.fault is None
        assert bad.fault is not None and bad.fault.kind == "UnavailableError"
        found = load_commits(backend, version.shape(1).name)
        assert found is not None
        assert [commit.positions[1] for commit in found[0].commits] == [2]  # the start of push, no row yet
        backend.watch = lambda _: None
        (again,) = ingest_here(log, backend, version, [1])  # the same process or another goes on from there
    asked = ("rows", "records", "next_offset", "end_of_push", "is_complete")
    assert all(getattr(again.result, name) == getattr(version.results[1], name) for name in asked)


@pytest.mark.parametrize("row", ["DIV-32"])
def test_a_partition_is_committed_at_its_start_and_end_of_push_and_nowhere_else(
    tmp_path: Path, row: str
) -> None:
    version = push_here(tmp_path, rows(500)).version
    backend = open_backend(str(tmp_path / "state"))
    for partition in range(2):
        found = load_commits(backend, version.shape(partition).name)
        assert found is not None
        offsets = [commit.positions[partition] for commit in found[0].commits]
        assert offsets == [2, version.results[partition].end_of_push + 1]


@pytest.mark.parametrize("row", ["DIV-37+DIV-38+DIV-40"])
def test_in_each_partition_every_sender_numbers_without_a_gap_and_ends_once(tmp_path: Path, row: str) -> None:
    version = push_here(tmp_path, [(b"a", b"1"), (b"b", b"2"), *rows(1000)], partitions=3).version
    for partition in range(3):
        found = stamps(tmp_path / "log", version.topic, partition)
        producers = {(int(each["guid_high"]), int(each["guid_low"])) for each in found}
        assert len(producers) == 2  # the driver's and the task's: nothing ended by time, however long it took
        for high, low in producers:
            mine = found[(found["guid_high"] == high) & (found["guid_low"] == low)]
            assert mine["sequence"].tolist() == list(range(len(mine)))
            assert (mine["control"] == ControlType.END_OF_CHAIN).sum() == 1


@pytest.mark.parametrize("row", ["DIV-41+DIV-42+DIV-43"])
def test_attempts_that_died_or_came_late_are_repeats_of_the_one_that_counts(tmp_path: Path, row: str) -> None:
    given = rows(400)

    def die(push: VersionPush) -> None:
        for partition in range(2):
            batches = part_of(sorted_batches(given, partition, 2), 2)
            with pytest.raises(ConnectionAbortedError):
                send_partition(order_of(push), partition, 77, batches, clock=SystemClock())

    def again(push: VersionPush) -> None:
        send_partition(order_of(push), 0, 78, sorted_batches(given, 0, 2, size=7), clock=SystemClock())

    report = push_here(tmp_path, given, touch={"started": die, "sent": again})
    assert report.version.verdicts["duplicate"] > 200
    assert shown(tmp_path) == expected(400)
    for partition in range(
        2
    ):  # no two attempts share the key of a control record, so compaction keeps every start
        keys = keys_of(tmp_path / "log", report.version.topic, partition)
        control = [key for key in keys if key.startswith(CONTROL_KEY_PREFIX)]
        assert len(control) == len(set(control)) > 4


@pytest.mark.parametrize("row", ["DIV-41"])
def test_an_attempt_that_is_still_at_its_partition_is_waited_for_and_not_for_ever(
    tmp_path: Path, row: str
) -> None:
    def linger(push: VersionPush) -> None:
        held = Log(tmp_path / "log")
        held.open_partition(push.version.topic, 1)
        slow.append(held)
        if push.version.number == 1:
            threading.Timer(0.3, held.close).start()

    slow: list[Log] = []
    assert push_here(tmp_path, rows(50), touch={"sent": linger}).is_current
    with pytest.raises(ConflictError, match="users_v2-1 is being written"):
        push_here(tmp_path, rows(50, "new"), touch={"sent": linger}, patience_ms=100)
    slow[1].close()
    assert versions_of(tmp_path).list().versions[1].state is State.FAILED
    assert shown(tmp_path) == expected(50)


@pytest.mark.parametrize("row", ["DIV-42"])
@pytest.mark.parametrize("key", [b"intruder", None])
def test_rows_that_no_manifest_lists_fail_the_version(tmp_path: Path, row: str, key: bytes | None) -> None:
    def intrude(push: VersionPush) -> None:
        with Log(tmp_path / "log") as log, Sender(log.writer(push.version.topic), partitions=2) as stranger:
            stranger.write(pa.table({"key": pa.array([key], pa.binary()), "value": [b"x"]}), partition=1)

    with pytest.raises(PushFailedError, match="1 records that the push did not send") as failed:
        push_here(tmp_path, rows(50), touch={"sent": intrude})
    assert [fault.kind for fault in failed.value.report.version.faults] == ["unlisted"]


@pytest.mark.parametrize("row", ["DIV-11+DIV-15+DIV-46"])
def test_what_comes_behind_the_end_of_push_is_counted_and_changes_nothing(tmp_path: Path, row: str) -> None:
    def go_on(push: VersionPush) -> None:
        with Log(tmp_path / "log") as log:
            sender = Sender(log.writer(push.version.topic), partitions=2)
            Push(sender).start()
            Push(sender).end({})
            for number in range(20):
                sender.write(pa.table({"key": [b"key-%05d" % number], "value": [b"later"]}), partition=0)
            sender.close()
        damage(
            tmp_path / "log", push.version.topic, DamageKind.FLIP, tmp_path / "flip", partition=0, offset=60
        )
        damage(
            tmp_path / "log", push.version.topic, DamageKind.DROP, tmp_path / "drop", partition=0, offset=66
        )

    report = push_here(tmp_path, rows(90), touch={"ended": go_on})
    assert report.is_current
    assert shown(tmp_path) == expected(90)
    assert report.version.verdicts["unexpected"] >= 15
    assert report.version.verdicts["corrupt"] >= 1 and report.version.verdicts["missing"] >= 1


def test_a_version_is_swapped_rolled_back_and_deleted_by_its_number(tmp_path: Path) -> None:
    for text in ("one", "two", "three"):
        push_here(tmp_path, rows(20, text))
    versions = versions_of(tmp_path)
    assert versions.list().current == 3
    assert versions.rollback().current == 2
    assert shown(tmp_path) == expected(20, "two")
    assert versions.rollback().current == 3
    versions.swap(1)
    assert shown(tmp_path) == expected(20, "one")
    with pytest.raises(ConflictError, match="the one readers see"):
        versions.retire(1)
    from tidegate.tables.versions.push import delete_version

    with Log(tmp_path / "log") as log:
        assert delete_version(versions, log, 2) > 0
        assert "users_v2" not in log.topics()
    assert [each.number for each in versions.list().versions] == [1, 3]
    assert not list(versions.backend.list("users_v2-0"))
    assert push_here(tmp_path, rows(20, "four")).version.number == 4
    assert [swap.reason for swap in versions.list().swaps] == [
        "push", "push", "push", "rollback", "rollback", "swap", "push",
    ]  # fmt: skip


def test_versions_beyond_those_retained_are_retired_and_deleted_once_readers_had_their_time(
    tmp_path: Path,
) -> None:
    for text in ("one", "two", "three", "four"):
        push_here(tmp_path, rows(10, text), retain=2)
    known = versions_of(tmp_path).list()
    assert {each.number: each.state for each in known.versions} == {
        1: State.RETIRED, 2: State.RETIRED, 3: State.READY, 4: State.READY,
    }  # fmt: skip
    from tidegate.tables.versions.push import collect

    with Log(tmp_path / "log") as log:
        assert collect(versions_of(tmp_path), log) == []
        assert collect(versions_of(tmp_path), log, grace_ms=0) == [1, 2]
        assert log.topics() == ["users_v3", "users_v4"]


def test_an_older_push_that_ends_later_does_not_take_the_newer_ones_place(tmp_path: Path) -> None:
    def overtake(_: VersionPush) -> None:
        push_here(tmp_path, rows(10, "newer"))

    report = push_here(tmp_path, rows(10, "older"), touch={"started": overtake})
    assert (report.is_current, report.current, report.version.state) == (False, 2, State.READY)
    assert shown(tmp_path) == expected(10, "newer")


@pytest.mark.parametrize(
    "step", ["created", "topic", "started", "sent", "ended", "ingested", "ready", "swapped"]
)
def test_killed_at_any_step_a_push_leaves_the_old_version_or_the_whole_new_one(
    tmp_path: Path, step: str
) -> None:
    push_here(tmp_path, rows(60, "old"))
    kit = Path(__file__).with_name("push_kit.py")
    died = subprocess.run([sys.executable, str(kit), str(tmp_path), step], capture_output=True, timeout=600)
    assert died.returncode == -9, died.stderr.decode()[-2000:]
    assert shown(tmp_path) == (expected(120, "new") if step == "swapped" else expected(60, "old"))
    report = push_here(tmp_path, rows(30, "next"))
    assert report.version.number == 3 and shown(tmp_path) == expected(30, "next")
    second = versions_of(tmp_path).list().get(2)
    if step in ("ready", "swapped"):
        assert second.state is State.READY
    else:
        assert (second.state, second.faults[0].kind) == (State.FAILED, "abandoned")


def test_a_push_taken_for_dead_cannot_bring_its_version_in(tmp_path: Path) -> None:
    def give_up(push: VersionPush) -> None:
        push.versions.mark(push.version.number, State.FAILED)

    with pytest.raises(ConflictError, match="is failed and cannot become ready"):
        push_here(tmp_path, rows(20), touch={"ended": give_up})
    assert versions_of(tmp_path).list().current == 0
