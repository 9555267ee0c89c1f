"""Records that wait for other partitions: told, kept over restarts, worked on when their turn has come, never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run
from tidegate.clock import ManualClock
from tidegate.errors import OverloadError, UnavailableError
from tidegate.metrics import Metrics
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.rounds.ways_out import app_status, resume_partition
from tidegate.storage import StorageConfig, open_backend

TEN = 1_767_261_600_000
Click = tuple[int, int, str]  # partition, second, id


def write(folder: Path, clicks: list[Click], *, partitions: int = 2, value: str | None = None) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("clicks", partitions, if_not_exists=True)
        for partition, second, name in clicks:
            text = f'{{"id":"{name}","user":"ann"}}' if value is None else value
            table = {"key": [f"k{partition}"], "value": [text], "timestamp": [TEN + second * 1000]}
            log.writer("clicks").write(pa.table(table), partition=partition)


def app_of(folder: Path, idle_after: str | None = None, **settings: Any) -> tg.App:
    app = tg.App("clicks", data=folder, idle_after=idle_after, **settings)
    stream = app.stream("clicks", value=tg.Json(id="string", user="string"))
    stream.key_by("user", shards=1).drop_duplicates("id", within="1h").to_topic("unique", integrity=False)
    return app


def sent(folder: Path) -> list[str]:
    with tg.Log(folder / "log", read_only=True) as log:
        rows = log.reader("unique").read_all().to_pylist()
    return [row["value"].decode()[7:].partition('"')[0] for row in rows]


def test_what_waits_is_told_and_comes_when_the_others_have_come_as_far(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path, [(0, 1, "a"), (1, 5, "e"), (1, 9, "f"), (0, 3, "b")])
    app, metrics = app_of(tmp_path), Metrics()
    summary = app.run("local", until="caught_up", metrics=metrics)
    assert sent(tmp_path) == ["a", "b"]
    assert (summary.caught_up, summary.progress.held) == (True, 2)
    (waits,) = summary.progress.waiting_for
    assert waits.startswith("clicks-0, which has no more records: 2 records of unique are held back")
    assert "2 records held back, waiting for clicks-0" in str(summary)
    assert "held back" in summary._repr_html_()
    status = app_status(open_backend(app.state), "clicks")
    assert (status.held["unique"].events, status.held["unique"].waits_for[:2]) == (2, (TEN + 3000, 0))
    assert run(["app", "status", "--state", app.state]) == 0
    assert (
        "held back: 2 records of unique, until clicks-0 has come as far as they are"
        in capsys.readouterr().err
    )
    assert metrics.gauge("tidegate_held_records", "", ("app", "flow")).value(app="clicks", flow="unique") == 2
    write(tmp_path, [(0, 7, "c"), (0, 9, "d")])
    assert app_of(tmp_path).run("local", until="caught_up").progress.held == 1
    assert sent(tmp_path) == ["a", "b", "e", "c", "d"]  # 9 s of partition 0 is before 9 s of partition 1
    app_of(tmp_path).run("local", until="caught_up", close=True)
    assert sent(tmp_path) == ["a", "b", "e", "c", "d", "f"]


def test_a_run_to_the_end_gives_all_there_is_unless_told_to_wait(tmp_path: Path) -> None:
    write(tmp_path, [(0, 1, "a"), (1, 5, "e"), (1, 9, "f"), (0, 3, "b")], partitions=3)
    summary = app_of(tmp_path, "30s").run("local", until="caught_up", round_records=1)
    assert sent(tmp_path) == ["a", "b", "e", "f"]
    assert (summary.progress.held, summary.progress.waiting_for) == (0, ())
    assert "held back" not in str(summary)


def test_the_end_of_a_run_is_not_taken_for_the_end_of_a_partition(tmp_path: Path) -> None:
    write(tmp_path, [(0, 1, "a"), (1, 5, "e"), (1, 9, "f"), (0, 3, "b")])
    later = [(0, 7, "c"), (0, 10, "d")]

    def grow(_: Any) -> None:
        while later:
            write(tmp_path, [later.pop(0)])

    summary = app_of(tmp_path, "30s").run("local", until="caught_up", round_records=1, progress=grow)
    assert summary.records == 4, "the run reads what was there when it began"
    assert sent(tmp_path) == ["a", "b"]
    assert "clicks-0, which goes on behind what this run reads: 2 records" in summary.progress.waiting_for[0]
    app_of(tmp_path, "30s").run("local", until="caught_up")
    assert sent(tmp_path) == ["a", "b", "e", "c", "f", "d"]


def test_a_partition_without_any_record_holds_all_others_back(tmp_path: Path) -> None:
    write(tmp_path, [(0, 1, "a"), (1, 5, "e")], partitions=3)
    summary = app_of(tmp_path).run("local", until="caught_up")
    assert sent(tmp_path) == [] and summary.progress.held == 2
    assert "clicks-2, which has no more records" in summary.progress.waiting_for[0]
    write(tmp_path, [(2, 20, "z")])
    app_of(tmp_path).run("local", until="caught_up")
    assert sent(tmp_path) == ["a"]


def test_a_stopped_partition_is_waited_for_until_it_goes_on(tmp_path: Path) -> None:
    write(tmp_path, [(0, 1, "a"), (1, 2, "b")])
    write(tmp_path, [(0, 3, "")], value="{")
    write(tmp_path, [(0, 4, "c"), (1, 6, "f"), (0, 8, "h"), (1, 9, "i")])
    summary = app_of(tmp_path, "30s").run("local", until="caught_up")
    assert sent(tmp_path) == ["a"]  # it stopped at 1 s
    assert summary.exit_code != 0 and summary.progress.held == 3
    assert any("clicks-0, which is stopped" in each for each in summary.progress.waiting_for)
    app = app_of(tmp_path, "30s")
    resume_partition(open_backend(app.state), "clicks", "unique:0", skip_to=2)
    app.run("local", until="caught_up")
    assert sent(tmp_path) == ["a", "b", "c", "f", "h", "i"]


def test_who_waits_for_what_is_there_waits_for_what_is_held_back_too(tmp_path: Path) -> None:
    write(tmp_path, [(0, 1, "a"), (1, 5, "e")])
    with app_of(tmp_path).start("local", trigger="10ms") as running:
        with pytest.raises(UnavailableError, match="1 records held back, waiting for clicks-0"):
            running.await_caught_up("1s")
        write(tmp_path, [(0, 9, "i")])
        with pytest.raises(UnavailableError, match="waiting for clicks-1"):
            running.await_caught_up("2s")
        assert sent(tmp_path) == ["a", "e"]
    with app_of(tmp_path, "10ms").start("local", trigger="10ms") as running:
        running.await_caught_up("60s")
        assert sent(tmp_path) == ["a", "e", "i"]


def test_a_silent_partition_that_comes_back_is_waited_for_again(tmp_path: Path) -> None:
    clock = ManualClock(TEN + 3_600_000)
    write(tmp_path, [(0, 1, "a"), (1, 5, "e")])
    app = app_of(tmp_path, "30s")
    running = app.start("local", clock=clock, trigger="1s")
    try:
        while running.progress.held != 1:
            running.join("10ms")
        assert sent(tmp_path) == ["a"]
        clock.advance(31_000)
        while running.progress.held:
            clock.advance(1_000)
            running.join("10ms")
        assert sent(tmp_path) == ["a", "e"]
        write(tmp_path, [(0, 2, "b"), (1, 9, "i")])
        while running.progress.held != 1:
            clock.advance(1_000)
            running.join("10ms")
        assert sent(tmp_path) == ["a", "e", "b"]
    finally:
        running.stop()
        while running.is_running:
            clock.advance(1_000)
            running.join("10ms")


def test_state_from_before_there_was_an_order_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path, [(1, 9, "f"), (0, 1, "a")])
    with monkeypatch.context() as before:
        before.setattr(Flow, "is_ordered", False)
        app_of(tmp_path).run("local", until="caught_up")
    assert sorted(sent(tmp_path)) == ["a", "f"]
    write(tmp_path, [(1, 12, "x"), (0, 10, "f"), (0, 11, "c"), (0, 15, "d")])
    app_of(tmp_path).run("local", until="caught_up")
    assert sorted(sent(tmp_path)) == ["a", "c", "f", "x"] and sent(tmp_path)[2:] == ["c", "x"]


def test_held_back_records_count_as_backlog_and_overload_names_who_is_waited_for(tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log") as log:
        log.create_topic("clicks", 2)
        rows = 4000
        log.writer("clicks").write(
            pa.table(
                {
                    "value": [f'{{"id":"{number:0100}","user":"ann"}}' for number in range(rows)],
                    "timestamp": [TEN + number for number in range(rows)],
                }
            ),
            partition=1,
        )
    storage = StorageConfig.of({"backlog_limit_bytes": 400_000})
    app = app_of(tmp_path, storage=storage)
    with pytest.raises(OverloadError, match="it waits for clicks-0, which has no more records"):
        app.run("local", until="caught_up", round_records=500)
    write(tmp_path, [(0, 0, "first"), (0, 60, "last")])
    app_of(tmp_path, storage=StorageConfig.of({"backlog_limit_bytes": 4_000_000})).run(
        "local", until="caught_up", round_records=500
    )
    assert len(sent(tmp_path)) == rows + 1
    app_of(tmp_path).run("local", until="caught_up", close=True)
    assert len(sent(tmp_path)) == rows + 2


def test_a_record_from_the_future_stays_one_while_it_is_held_back(tmp_path: Path) -> None:
    """It moved no clock where it was read; that time has come meanwhile must not let it move one later."""
    now = TEN + 60_000
    write(tmp_path, [(0, 1, "a"), (1, 50, "b"), (1, 1000, "ahead"), (1, 51, "c")])

    def app() -> tg.App:
        made = tg.App("clicks", data=tmp_path, idle_after=None)
        stream = made.stream("clicks", value=tg.Json(id="string", user="string")).key_by("user", shards=1)
        stream.window(tg.Session("5s", grace="0s", retention="1d")).agg(n=tg.count()).to_table("visits")
        return made

    app().run("local", until="caught_up", clock=ManualClock(now))
    write(tmp_path, [(0, 52, "d"), (1, 53, "e"), (0, 54, "f")])
    app().run("local", until="caught_up", clock=ManualClock(now + 3_600_000), close=True)
    with app().open_table("visits") as table:
        assert [(row.window.start - TEN, row.value["n"]) for row in table.all()] == [(1_000, 1), (50_000, 5)]
        assert [row["reason"] for row in table.late().to_pylist()] == ["future"]


def test_a_table_can_be_read_while_records_are_held_back(tmp_path: Path) -> None:
    write(tmp_path, [(0, 1, "a"), (1, 5, "e"), (0, 3, "b")])
    app = tg.App("clicks", data=tmp_path, idle_after=None)
    stream = app.stream("clicks", value=tg.Json(id="string", user="string")).key_by("user", shards=1)
    stream.window(tg.Session("1m")).agg(n=tg.count()).to_table("visits")
    assert app.run("local", until="caught_up").progress.held == 1
    with app.open_table("visits") as table:
        assert [row.value for row in table.all()] == [{"n": 2}]
