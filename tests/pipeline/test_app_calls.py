"""`App.start`, `App.run` and `App.admin` as a program calls them."""

from __future__ import annotations

import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.errors import InvalidError
from tidegate.pipeline.progress import Progress
from tidegate.pipeline.query import Tracker
from tidegate.pipeline.settings import RunOptions, RunSettings


def written(folder: Path, values: list[bytes]) -> tg.App:
    """An app over a topic with these values, which counts them for each key and minute."""
    with tg.Log(folder / "log") as log:
        if "orders" not in log.topics():
            log.create_topic("orders", 1)
        with log.writer("orders") as writer:
            times = pa.array([1_767_261_600_000] * len(values))
            writer.write(pa.table({"key": ["a"] * len(values), "value": values, "timestamp": times}))
    app = tg.App("shop", data=folder)
    orders = app.stream("orders", value=tg.Json(amount="double"))
    orders.window(tg.Tumbling("1m")).agg(n=tg.count()).to_table("per-minute")
    return app


def counted(app: tg.App) -> list[int]:
    with app.open_table("per-minute") as table:
        return table.to_arrow()["n"].to_pylist()


def test_a_run_triggered_once_ends_when_the_log_is_processed(tmp_path: Path) -> None:
    app = written(tmp_path, [b'{"amount":1}'] * 3)
    summary = app.start("local", trigger="once").await_termination("60s")
    assert summary.caught_up and counted(app) == [3]


def test_a_progress_report_as_a_dictionary_has_the_times_of_the_round(tmp_path: Path) -> None:
    reports: list[Progress] = []
    written(tmp_path, [b'{"amount":1}'] * 3).run("local", until="caught_up", progress=reports.append)
    told = [asdict(each)["timings_ms"] for each in reports if each.timings_ms]
    assert told and told == [dict(each.timings_ms) for each in reports if each.timings_ms]


def test_the_progress_of_a_run_that_caught_up_has_the_round_that_it_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the progress before that round, if the caller was told before the progress had been made."""
    was_told, after = threading.Event(), Tracker.after

    def slowly(tracker: Tracker, outcome: Any) -> Progress:
        was_told.wait(0.2)  # for a caller that does not wait for the progress
        return after(tracker, outcome)

    monkeypatch.setattr(Tracker, "after", slowly)
    with written(tmp_path, [b'{"amount":1}'] * 3).start("local") as run:
        progress = run.await_caught_up("60s")
        was_told.set()
    assert (progress.records, progress.lag_records, progress.caught_up) == (3, 0, True)


def test_wait_says_its_new_name(tmp_path: Path) -> None:
    with written(tmp_path, [b'{"amount":1}']).start("local") as run, pytest.raises(InvalidError) as refused:
        run.wait()
    assert str(refused.value) == "run.wait(…) is run.await_termination(…) now"


def test_every_setting_of_a_run_is_an_option_of_start() -> None:
    own = {"trigger", "progress", "metrics", "clock"}
    settings = set(RunSettings.__dataclass_fields__) - {"trigger_ms", "idle_after_ms"}
    assert set(RunOptions.__annotations__) == settings | own


@pytest.mark.parametrize("engine", ["lokal", "spork"])
def test_an_unknown_engine_is_refused_with_the_known_ones(tmp_path: Path, engine: str) -> None:
    with pytest.raises(InvalidError, match="give a SparkSession, 'spark' or 'local'"):
        written(tmp_path, [b'{"amount":1}']).start(engine)


def test_admin_reports_a_stopped_partition_and_resumes_it(tmp_path: Path) -> None:
    app = written(tmp_path, [b'{"amount":1}', b"no JSON", b'{"amount":2}'])
    assert app.run("local", until="caught_up").exit_code == 5
    status = app.admin.status()
    assert [(each.partition, each.offset) for each in status.stopped] == [(0, 1)]

    assert app.admin.resume("orders-0", skip_to=2).change == "orders-0 resumed"
    assert app.run("local", until="caught_up").caught_up and counted(app) == [2]
    assert [(each.first, each.end) for each in app.admin.status().losses] == [(1, 2)]

    assert app.admin.replay().positions == {}
    assert app.run("local", until="caught_up").exit_code == 5 and counted(app) == [1]
    rounds = [each.round for each in app.admin.commits()]
    assert rounds == sorted(rounds) and rounds

    app.admin.reset()
    assert app.admin.status().records == 0


def test_admin_changes_nothing_while_the_app_runs(tmp_path: Path) -> None:
    app = written(tmp_path, [b'{"amount":1}'])
    with app.start("local") as run:
        run.await_caught_up("60s")
        with pytest.raises(tg.ConflictError):
            app.admin.reset()
    assert counted(app) == [1]


def test_admin_of_an_app_that_never_ran_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(tg.TidegateError, match="there is no state in"):
        written(tmp_path, [b'{"amount":1}']).admin.status()
