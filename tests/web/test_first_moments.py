"""The page looks while an app makes its first steps and a table waits for its first commit: lists are whole at every
moment, and who asks for one thing is told that it is not there yet, never that the question was wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from msgspec.structs import replace
from served_shop import WINDOW_MS, shop

import tidegate as tg
from backend_faults import BackendEffect, WatchedBackend
from tidegate.errors import TidegateError, UnavailableError
from tidegate.pipeline.launcher import start_run
from tidegate.pipeline.settings import RunSettings, WorkerSetup
from tidegate.storage import open_backend
from tidegate.tables.commits import Commits
from tidegate.web import overview, tables
from tidegate.web.endpoints import ENDPOINTS
from tidegate.web.failures import failure_of
from tidegate.web.site import Site

LISTS = ("overview", "topics", "tables", "apps")
TABLE, APP = {"table": "shop:per-minute"}, {"app": "shop"}
SINGLE = {
    "app": (APP, {}),
    "table": (TABLE, {}),
    "fetch": (TABLE, {"key": "customer-1"}),
    "scan": (TABLE, {}),
    "late": (TABLE, {}),
    "explain": (TABLE, {"key": "customer-1", "start": str(WINDOW_MS)}),
}


@contextmanager
def looking(data: Path) -> Iterator[Site]:
    site = Site(data / "log", data / "state")
    try:
        yield site
    finally:
        site.close()


def ordered(data: Path) -> None:
    with tg.Log(data / "log", durability="os") as log:
        log.create_topic("orders", 2)
        values = [f'{{"order_id":"o-{n}","amount":1.5}}' for n in range(300)]
        keys = [f"customer-{n % 5}" for n in range(300)]
        times = [WINDOW_MS + n * 1000 for n in range(300)]
        log.writer("orders").write(pa.table({"key": keys, "value": values, "timestamp": times}))


def test_at_every_moment_of_an_apps_start_lists_answer_and_the_rest_says_not_yet(tmp_path: Path) -> None:
    ordered(tmp_path)
    app, answers, wrong = shop(tmp_path), Counter[int](), list[object]()

    def ask(site: Site, name: str, words: dict[str, str], given: dict[str, str]) -> None:
        try:
            ENDPOINTS[name].ask(site, words, given)
            answers[200] += 1
        except TidegateError as error:
            status = failure_of(error)[0]
            answers[status] += 1
            if name in LISTS or status not in (404, 409):
                wrong.append((name, error))

    def look(effect: BackendEffect) -> None:
        if effect.moment == "after":
            with looking(tmp_path) as site:
                for name in LISTS:
                    ask(site, name, {}, {})
                for name, (words, given) in SINGLE.items():
                    ask(site, name, words, given)

    backend = WatchedBackend(open_backend(str(tmp_path / "state")), look)
    setup = WorkerSetup(app=app.name, flows=app.flows, log=app.log, state=app.state, storage=app.storage)
    start_run(
        setup, settings=RunSettings(until="caught_up", round_records=100), backend=backend
    ).await_termination("60s")
    assert not wrong, wrong[:5]
    assert set(answers) == {200, 404, 409}, "all of them were met"


def test_an_app_that_has_not_committed_yet_is_starting_and_not_broken(tmp_path: Path) -> None:
    ordered(tmp_path)
    app, seen = shop(tmp_path), list[tuple[str, str]]()

    def look(effect: BackendEffect) -> None:
        with looking(tmp_path) as site:
            found = overview.overview(site)
            seen.extend((each.state, found.health) for each in found.apps)

    backend = WatchedBackend(open_backend(str(tmp_path / "state")), look)
    setup = WorkerSetup(app=app.name, flows=app.flows, log=app.log, state=app.state, storage=app.storage)
    start_run(setup, settings=RunSettings(until="caught_up"), backend=backend).await_termination("60s")
    assert list(dict.fromkeys(seen)) == [("starting", "watch"), ("running", "good"), ("idle", "good")]


def test_a_state_folder_that_is_empty_stays_empty(tmp_path: Path) -> None:
    ordered(tmp_path)
    (tmp_path / "state").mkdir()
    with looking(tmp_path) as site:
        for name in LISTS:
            ENDPOINTS[name].ask(site, {}, {})
        assert not list((tmp_path / "state").iterdir()), "looking leaves no trace"
        shop(tmp_path).run("local", until="caught_up")
        assert [each.name for each in tables.table_list(site).tables] == ["shop:per-minute"]


def test_a_table_without_a_commit_is_in_the_list_beside_the_others(tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("counts", 1)
        log.writer("counts").write(pa.table({"key": ["a"], "value": ["1"]}))
        with tg.table(
            log, "counts", state=tmp_path / "state", materialized=tg.Materialized("ready")
        ) as ready:
            ready.catch_up()
            ready.commit()
    backend = open_backend(str(tmp_path / "state"))
    Commits(backend, replace(ready.rules.shape, name="waiting"), 1, "").take_over()  # a builder's first step
    with looking(tmp_path) as site:
        lines = {each.name: each for each in tables.table_list(site).tables}
        assert (lines["ready"].kind, lines["ready"].unreadable) == ("key", None)
        assert "has no commit yet" in str(lines["waiting"].unreadable)
        with pytest.raises(UnavailableError, match="has no commit yet"):
            ENDPOINTS["table"].ask(site, {"table": "waiting"}, {})
