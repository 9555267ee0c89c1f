"""Commands that move an app's position never count a record twice, nor leave state that belongs to other offsets."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from remedies import typed
from tidegate.cli.main import run as cli
from tidegate.errors import InvalidError
from tidegate.pipeline.admin import app_commits, app_status, replay_app, resume_partition
from tidegate.storage import open_backend

TEN = 1_767_261_600_000


def produce(folder: Path, *values: str, partition: int = 0, partitions: int = 1, key: str = "a") -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("clicks", partitions, if_not_exists=True)
        rows = {"key": [key] * len(values), "value": list(values), "timestamp": [TEN] * len(values)}
        log.writer("clicks").write(pa.table(rows), partition=partition)


def app_of(folder: Path, *, rekeyed: bool = False, stateful: bool = True) -> tg.App:
    app = tg.App("counts", data=folder)
    clicks = app.stream("clicks", value=tg.Json(x="int64"))
    if rekeyed:
        clicks = clicks.key_by("x", shards=2)
    if stateful:
        clicks.window(tg.Tumbling("1m", grace="1h", retention="2h")).agg(n=tg.count()).to_table("counts")
    else:
        clicks.to_topic("counts")
    return app


def counted(folder: Path, **given: bool) -> dict[object, int]:
    with app_of(folder, **given).open_table("counts") as table:
        return {row.key: row.value["n"] for row in table.fetch_all()}


def stopped_app(folder: Path, **given: bool) -> str:
    """Nine clicks, then a record that cannot be read: where it stopped."""
    produce(folder, *['{"x":1}'] * 9, "not json", '{"x":1}')
    summary = app_of(folder, **given).run("local", until="caught_up")
    assert [each.offset for each in summary.stopped] == [9]
    return str(folder / "state")


def test_going_back_under_kept_state_is_refused_with_what_to_do(tmp_path, capsys) -> None:
    """Nine records became eighteen."""
    state = stopped_app(tmp_path)
    assert counted(tmp_path) == {"a": 9}
    resume = ["app", "resume", "counts", "--partition", "counts:0", "--state", state]
    for below in ("0", "8"):
        assert cli([*resume, "--skip-to", below]) == 2
        said = capsys.readouterr().err
        assert (
            f"stopped at offset 9, and the records before it are in its state and results: going on at {below}"
            in said
        )
        assert "tidegate app replay counts" in said and "--to-round N" in said
    assert app_status(open_backend(state), "counts").positions == {"counts": {0: 9}}
    assert cli([*resume, "--skip-to", "10"]) == 0
    app_of(tmp_path).run("local", until="caught_up")
    assert counted(tmp_path) == {"a": 10}


@pytest.mark.parametrize("to", [-1, 0, 8])
@pytest.mark.parametrize("stateful", [True, False])
def test_the_api_refuses_it_too_whatever_the_flow_keeps(tmp_path, to, stateful) -> None:
    backend = open_backend(stopped_app(tmp_path, stateful=stateful))
    with pytest.raises(InvalidError, match="would count them twice"):
        resume_partition(backend, "counts", "clicks-0", skip_to=to)
    resume_partition(backend, "counts", "clicks-0", skip_to=9)


def test_both_ways_to_read_again_that_the_message_names_give_the_right_count(tmp_path) -> None:
    state = stopped_app(tmp_path)
    backend = open_backend(state)
    assert app_status(backend, "counts").round > 0
    for remedy in ("tidegate app replay counts --to-round 0", "tidegate app replay counts"):
        assert cli([*shlex.split(remedy)[1:], "--state", state, "--yes"]) == 0
        app_of(tmp_path).run("local", until="caught_up")
        assert counted(tmp_path) == {"a": 9}


def test_a_topic_that_was_made_anew_goes_on_with_the_command_it_stopped_with(tmp_path) -> None:
    produce(tmp_path, *['{"x":1}'] * 9)
    app_of(tmp_path).run("local", until="caught_up")
    with tg.Log(tmp_path / "log") as log:
        log.delete_topic("clicks")
    produce(tmp_path, *['{"x":1}'] * 3)
    (stopped,) = app_of(tmp_path).run("local", until="caught_up").stopped
    assert cli([*shlex.split(stopped.command)[1:], "--state", str(tmp_path / "state")]) == 0
    produce(tmp_path, *['{"x":1}'] * 2)
    assert app_of(tmp_path).run("local", until="caught_up").stopped == ()


def test_a_replay_from_the_offsets_of_one_partition_leaves_the_state_of_the_others(tmp_path) -> None:
    """Partition 1 went on at its position with empty state: its window of five became one of two."""
    produce(tmp_path, *['{"x":1}'] * 4, partition=0, partitions=2, key="a")
    produce(tmp_path, *['{"x":1}'] * 3, partition=1, key="b")
    app_of(tmp_path).run("local", until="caught_up")
    state = str(tmp_path / "state")
    assert cli(["app", "replay", "counts", "--from-offset", "counts:0=0", "--state", state, "--yes"]) == 0
    produce(tmp_path, *['{"x":1}'] * 2, partition=1, key="b")
    app_of(tmp_path).run("local", until="caught_up")
    assert counted(tmp_path) == {"a": 4, "b": 5}


def test_a_re_keyed_flow_is_replayed_from_offsets_of_all_its_partitions(tmp_path) -> None:
    produce(tmp_path, *['{"x":1}'] * 4, partition=0, partitions=2)
    produce(tmp_path, *['{"x":1}'] * 3, partition=1)
    app_of(tmp_path, rekeyed=True).run("local", until="caught_up")
    backend = open_backend(tmp_path / "state")
    with pytest.raises(InvalidError, match="give offsets for counts:1, too"):
        replay_app(backend, "counts", from_offsets={"counts": {0: 0}})
    replay_app(backend, "counts", from_offsets={"counts": {0: 0, 1: 0}})
    app_of(tmp_path, rekeyed=True).run("local", until="caught_up")
    assert counted(tmp_path, rekeyed=True) == {1: 7}


def test_offsets_that_are_none_are_refused_and_skipped_ones_are_recorded(tmp_path) -> None:
    produce(tmp_path, *['{"x":1}'] * 4)
    app_of(tmp_path).run("local", until="caught_up")
    produce(tmp_path, *['{"x":1}'] * 4)
    backend = open_backend(tmp_path / "state")
    for offsets, said in (({7: 0}, "reads partitions 0 to 0, not 7"), ({0: -1}, "must be 0 or more")):
        with pytest.raises(InvalidError, match=said):
            replay_app(backend, "counts", from_offsets={"counts": offsets})
    replay_app(backend, "counts", from_offsets={"counts": {0: 6}})
    (loss,) = app_status(backend, "counts").losses
    assert (loss.first, loss.end) == (4, 6)
    app_of(tmp_path).run("local", until="caught_up")
    assert counted(tmp_path) == {"a": 2}  # of an empty state


# -- flows that read what others of the app write -------------------------------------------------


def chained(folder: Path, emit: str) -> tg.App:
    """Windows over the app's own windows, and over records that it copied."""
    app = tg.App("chain", data=folder)
    clicks = app.stream("clicks", value=tg.Json(x="int64"))
    clicks.window(tg.Tumbling("1s", grace="1m"), emit=emit).agg(n=tg.count()).to_topic(
        "seconds", value=tg.Json(n="int64")
    )
    clicks.filter("x >= 0").to_topic("copied")
    changes = app.changes("seconds", value=tg.Json(n="int64"), window_size="1s")
    changes.window(tg.Tumbling("1h", grace="1h")).agg(n=tg.sum("n")).to_table("by_changes")
    copied = app.stream("copied", value=tg.Json(x="int64")).key_by("x", shards=2)
    copied.drop_duplicates("x", "1ms", grace="1h").window(tg.Tumbling("1h", grace="1h")).count("n").to_table(
        "by_copies"
    )
    return app


def chain_counts(folder: Path, emit: str) -> tuple[int, int]:
    app, found = chained(folder, emit), []
    for name in ("by_changes", "by_copies"):
        with app.open_table(name) as table:
            found.append(sum(row.value["n"] for row in table.all()))
    return found[0], found[1]


def ran_chain(folder: Path, emit: str, *, size: int = 1000) -> tuple[int, int]:
    app = chained(folder, emit)
    assert app.run("local", until="caught_up", close=emit == "close", round_records=size).stopped == ()
    return chain_counts(folder, emit)


def clicks(folder: Path, first: int, count: int) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("clicks", 2, if_not_exists=True)
        numbers = range(first, first + count)
        rows = {"key": [f"k{x % 5}" for x in numbers], "value": [f'{{"x":{x}}}' for x in numbers]}
        log.writer("clicks").write(pa.table({**rows, "timestamp": [TEN + x * 300 for x in numbers]}))


@pytest.mark.parametrize("emit", ["update", "close"])
@pytest.mark.parametrize("way", ["replay", "reset"])
def test_an_app_that_starts_over_counts_its_own_results_once(tmp_path: Path, way: str, emit: str) -> None:
    """Each replay added the results that were sent before it: 60, 120, 180."""
    clicks(tmp_path, 0, 60)
    assert ran_chain(tmp_path, emit, size=40) == (60, 60)
    for _ in range(2):
        assert cli(["app", way, "chain", "--state", str(tmp_path / "state"), "--yes"]) == 0
        assert ran_chain(tmp_path, emit, size=40) == (60, 60)
    if emit == "update":  # the other one has ended its input
        clicks(tmp_path, 60, 10)
        assert ran_chain(tmp_path, emit) == (70, 70)


@pytest.mark.parametrize("emit", ["update", "close"])
def test_an_app_that_goes_back_to_any_commit_counts_its_own_results_once(tmp_path: Path, emit: str) -> None:
    """Also twice in a row: the second time over what the first one left out and sent again."""
    whole = tmp_path / "whole"
    clicks(whole, 0, 60)
    ran_chain(whole, emit, size=30)
    kept = commits_of(whole)
    assert len(kept) > 5
    for round in kept:
        folder = tmp_path / f"{round}"
        shutil.copytree(whole, folder)
        for to in (round, None):
            first = commits_of(folder)[0]
            replay_app(open_backend(folder / "state"), "chain", to_round=to or first)
            assert ran_chain(folder, emit, size=25) == (60, 60), (round, to or first)


def commits_of(folder: Path) -> list[int]:
    return [each.round for each in app_commits(open_backend(folder / "state"), "chain") if not each.change]


def test_a_flow_that_is_replayed_from_offsets_takes_those_that_read_it_with_it(tmp_path: Path) -> None:
    clicks(tmp_path, 0, 60)
    ran_chain(tmp_path, "close")
    backend = open_backend(tmp_path / "state")
    offsets = {"copied": {0: 0, 1: 0}}
    with pytest.raises(
        InvalidError, match=r"by_copies reads copied, .* give by_copies:0=\d+ or more, too"
    ) as told:
        replay_app(backend, "chain", from_offsets=offsets)
    ends = app_status(backend, "chain").positions["by_copies"]
    replay_app(backend, "chain", from_offsets={**offsets, "by_copies": ends})
    assert ran_chain(tmp_path, "close") == (60, 60)
    typed(told.value, "pipeline.admin._check_offsets: app replay", "--state", str(tmp_path / "state"))
    assert ran_chain(tmp_path, "close") == (60, 60)


def test_a_commit_from_before_the_app_was_started_over_is_not_gone_back_to_blindly(tmp_path: Path) -> None:
    clicks(tmp_path, 0, 60)
    ran_chain(tmp_path, "close", size=30)
    backend, kept = open_backend(tmp_path / "state"), commits_of(tmp_path)
    replay_app(backend, "chain")
    with pytest.raises(InvalidError, match="from before app chain was started over") as told:
        replay_app(backend, "chain", to_round=kept[2])
    typed(told.value, "pipeline.admin._behind_what_was_sent: app replay", "--state", str(tmp_path / "state"))
    assert ran_chain(tmp_path, "close") == (60, 60)


@pytest.mark.parametrize("latest", ["copied", "clicks"])
def test_a_new_app_does_not_count_what_another_one_sent(tmp_path: Path, latest: str) -> None:
    """Running it under a new name is a way out that errors name: it counted 60 records twice."""

    def renamed(**starts: str) -> tg.App:
        app = tg.App("renamed", log=tmp_path / "log", state=tmp_path / "renamed")
        app.stream("clicks", value=tg.Json(x="int64"), start=starts.get("clicks", "earliest")).filter(
            "x >= 0"
        ).to_topic("copied")
        copied = app.stream("copied", value=tg.Json(x="int64"), start=starts.get("copied", "earliest"))
        copied.window(tg.Tumbling("1h")).count("n").to_table("counts")
        return app

    clicks(tmp_path, 0, 60)
    assert ran_chain(tmp_path, "update") == (60, 60)
    with pytest.raises(InvalidError, match=r"copied holds 60 records already.*start='latest'"):
        renamed().run("local", until="caught_up")
    app = renamed(**{latest: "latest"})
    app.run("local", until="caught_up")
    with app.open_table("counts") as table:
        assert sum(row.value["n"] for row in table.all()) == 60
