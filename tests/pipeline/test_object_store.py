"""State in an object store, from an app's first round to the page: all that a folder can, over S3's real HTTP.

Every request is counted: what a round, a look and a command cost is said here, and a look never writes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from push_kit import push_here, rows
from served_shop import serving

import tidegate as tg
from s3_server import Place, object_of
from tidegate.cli.main import run
from tidegate.errors import InvalidError
from tidegate.tables.versions.reader import versioned_table

TEN = 1_767_261_600_000  # 2026-01-01T10:00Z
WRITES = {"PUT", "POST", "DELETE"}
Said = Callable[..., Any]


def write(folder: Path, first: int, count: int) -> None:
    """Orders of ten customers, one a second; every hundredth is no JSON, the last of all is an hour late."""
    with tg.Log(folder / "log", durability="os") as log:
        log.create_topic("orders", 2, if_not_exists=True)
        numbers = range(first, first + count)
        values = ["{broken" if each % 100 == 99 else f'{{"amount": {each % 7}.5}}' for each in numbers]
        table = {
            "key": [f"user-{each % 10}" for each in numbers],
            "value": values,
            "timestamp": [TEN + 1000 * each for each in numbers],
        }
        table["timestamp"][-1] -= 3_600_000
        with log.writer("orders", integrity=True) as sender:
            sender.write(pa.table(table))


def shop(folder: Path, state: str) -> tg.App:
    app = tg.App("shop", log=folder / "log", state=state)
    (
        app.stream("orders", value=tg.Json(amount="double"), on_error="keep")
        .validate()
        .window(tg.Tumbling("1m", grace="30s", retention="1d"))
        .agg(orders=tg.count(), revenue=tg.sum("amount"))
        .to_topic("per-minute-changes")
        .to_table("per-minute")
    )
    return app


def answers(app: tg.App) -> dict[str, Any]:
    """What the app's table says, in every way it can be asked."""
    with app.open_table("per-minute") as table:
        return {
            "all": table.all().to_arrow().to_pylist(),
            "fetch": table.fetch("user-3").to_arrow().to_pylist(),
            "batches": sum(batch.num_rows for batch in table.batches()),
            "sql": table.sql("select sum(orders) as n from rows").to_pylist(),
            "late": app.late("per-minute").num_rows,
            "dead": app.dead_letters("per-minute").num_rows,
            "rounds": table.rounds(),
        }


@pytest.fixture
def said(s3: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """What a command prints, with `--state s3://…`."""

    def command(*words: str, code: int = 0) -> Any:
        capsys.readouterr()
        assert run([*words, "--state", s3.url]) == code, capsys.readouterr().err
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return command


def test_an_app_runs_is_read_and_goes_on_as_it_does_in_a_folder(s3: Place, tmp_path: Path) -> None:
    apps = [shop(tmp_path, s3.url), shop(tmp_path / "local", str(tmp_path / "state"))]
    for first in (0, 400):
        for app, folder in zip(apps, (tmp_path, tmp_path / "local"), strict=True):
            write(folder, first, 400)
            app.run("local", until="caught_up", round_records=200)
    with s3.counted() as read:
        remote = answers(apps[0])
    assert remote == answers(apps[1])
    assert remote["sql"] == [{"n": 800 - 8 - remote["late"]}] and remote["dead"] == 8
    assert not WRITES & set(read), read
    with apps[0].open_table("per-minute", round=remote["rounds"][-2]) as before:
        assert before.round == remote["rounds"][-2]


def test_what_a_round_and_a_look_cost(s3: Place, tmp_path: Path) -> None:
    """A run costs what it writes, not what there is: the eighth as much as the third."""
    app = shop(tmp_path, s3.url)
    costs: list[Counter[str]] = []
    for first in range(0, 1600, 200):
        write(tmp_path, first, 200)
        with s3.counted() as cost:
            app.run("local", until="caught_up", round_records=10_000)
        costs.append(cost)
    print("requests of a run of one round:", [dict(each) for each in costs])
    assert sum(costs[-1].values()) <= 1.5 * sum(costs[2].values()) + 8, costs
    write(tmp_path, 1600, 1000)
    with s3.counted() as cost:
        done = app.run("local", until="caught_up", round_records=50)
    print(f"requests of a run of {done.rounds} rounds:", dict(cost))
    assert sum(cost.values()) <= 30 * done.rounds + 60, cost
    with app.open_table("per-minute") as table:
        with s3.counted() as opened:
            table.fetch("user-3")
        with s3.counted() as again:
            table.fetch("user-3")
            table.get("user-4", TEN)
        print("requests of a first and of a second look:", dict(opened), dict(again))
        assert set(again) <= {"GET", "LIST"} and sum(again.values()) <= 4, again


def test_every_command_about_an_app(s3: Place, said: Said, tmp_path: Path) -> None:
    app = shop(tmp_path, s3.url)
    write(tmp_path, 0, 300)
    app.run("local", until="caught_up", round_records=100)
    log = ("--log", str(tmp_path / "log"))
    with s3.counted() as looked:
        (status,) = said("app", "status", "shop", *log, "--format", "jsonl")
        commits = said("app", "checkpoints", "shop", "--format", "jsonl")
    assert not WRITES & set(looked), looked
    assert (status["app"], status["lag"]) == ("shop", 0)
    assert [each["round"] for each in commits] == list(range(status["round"] + 1))
    before = answers(app)
    (certificate,) = said("certificate", "export", "shop", *log)
    assert certificate["subject"]["round"] == status["round"]
    (replayed,) = said("app", "replay", "shop", "--to-round", "1", "--yes")
    assert replayed["round"] == status["round"] + 1
    app.run("local", until="caught_up")
    assert answers(app)["all"] == before["all"]
    said("app", "acknowledge", "shop")
    said("app", "rebase", "shop", *log, "--yes")
    said("app", "reset", "shop", "--yes")
    app.run("local", until="caught_up")
    assert answers(app)["all"] == before["all"]


def test_a_partition_that_stopped_goes_on(s3: Place, said: Said, tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("orders", 1)
        with log.writer("orders") as writer:
            writer.write(
                pa.table({"key": ["a", "a", "b"], "value": ["1", "no number", "3"], "timestamp": [TEN] * 3})
            )
    app = tg.App("strict", log=tmp_path / "log", state=s3.url)
    stream = app.stream("orders", value=tg.Json(amount="double"))
    stream.window(tg.Tumbling("1m")).agg(n=tg.count()).to_table("counts")
    assert app.run("local", until="caught_up").exit_code == 5
    assert run(["app", "status", "strict", "--state", s3.url]) == 5
    said("app", "resume", "strict", "--partition", "orders-0", "--skip-to", "3")
    app.run("local", until="caught_up")
    assert said("app", "status", "strict", "--format", "jsonl")[0]["stopped"] == 0


def test_tables_over_topics_are_built_read_and_taken_over(s3: Place, said: Said, tmp_path: Path) -> None:
    app = shop(tmp_path, s3.url)
    write(tmp_path, 0, 300)
    app.run("local", until="caught_up", close=True)
    with app, app.windowed_table("per-minute-changes", materialized=tg.Materialized("minutes")) as built:
        built.commit()
        with app.windowed_table(
            "per-minute-changes", materialized=tg.Materialized("minutes"), read_only=True
        ) as reader:
            assert (built.role, reader.role) == ("builder", "reader")
            expected = reader.all().to_arrow().to_pylist()
            assert expected == built.all().to_arrow().to_pylist() and len(expected) > 40
    with s3.counted() as looked:
        assert [each["table"] for each in said("table", "info", "--format", "jsonl")] == [
            "minutes",
            "shop:per-minute",
        ]
        scanned = said("table", "scan", "minutes", "--format", "jsonl")
        fetched = said("table", "fetch", "minutes", "user-3", "--format", "jsonl")
    assert not WRITES & set(looked), looked
    assert len(scanned) == len(expected)
    assert fetched == [each for each in scanned if each["key"] == "user-3"]
    start = fetched[0]["window_start"]
    words = ["table", "explain", "minutes", "user-3", str(start), "--log", str(tmp_path / "log")]
    assert run([*words, "--state", s3.url]) == 0


def test_versions_are_pushed_read_compared_swapped_and_deleted(s3: Place, said: Said, tmp_path: Path) -> None:
    assert push_here(tmp_path, rows(300, "old"), state=s3.url).is_current
    with versioned_table("users", state=s3.url) as users:
        assert (users.get("key-00007"), len(users.all())) == ("old-7", 300)
        scan = users.batches(batch_rows=50)
        seen = next(scan).num_rows
        push_here(tmp_path, rows(200, "new"), state=s3.url)
        assert users.refresh().number == 2
        assert (users.get("key-00007"), users.get("key-00250")) == ("new-7", None)
        assert seen + sum(batch.num_rows for batch in scan) == 300  # of the version it began with
    app = shop(tmp_path, s3.url)
    with app, app.versioned_table("users") as users:
        assert users.get("key-00007") == "new-7"
        assert [each.number for each in app.versions("users").list().versions] == [1, 2]
    with s3.counted() as looked:
        assert [each["version"] for each in said("table", "versions", "users", "--format", "jsonl")] == [1, 2]
        (row,) = said("table", "fetch", "users", "key-00007", "--format", "jsonl")
    assert row["value"] == "new-7" and not WRITES & set(looked)
    assert run(["table", "diff", "users_v1", "users_v2", "--exit-code", "--state", s3.url]) == 1
    said("table", "rollback", "users")
    said("table", "swap", "users", "2")
    log = ("--log", str(tmp_path / "log"))
    (certificate,) = said("certificate", "export", "users_v2", *log)
    assert certificate["records"] > 200
    with versioned_table("users", state=s3.url, version=1) as old:
        said("table", "delete-version", "users", "1", *log, "--yes")
        with pytest.raises(InvalidError, match="no version 1; there are 2"):
            old.get("key-00007")
    assert [each["version"] for each in said("table", "versions", "users", "--format", "jsonl")] == [2]


def test_a_hybrid_table_is_served_from_it(s3: Place, said: Said, tmp_path: Path) -> None:
    push_here(tmp_path, rows(20, "pushed"), state=s3.url, partitions=1)
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("updates", 1)
        with log.writer("updates", integrity=True) as live:
            live.write(pa.table({"key": ["key-00003"], "value": ["live"]}), partition=0)
    served = ["table", "serve", "users", "--live", "updates", "--log", str(tmp_path / "log"), "--for", "3s"]
    assert run([*served, "--commit-interval", "200ms", "--state", s3.url]) == 0
    with tg.hybrid_table(str(tmp_path / "log"), "users", live="updates", state=s3.url) as users:
        users.catch_up()
        while users.step():
            pass
        assert (users.get("key-00003"), users.get("key-00004")) == ("live", "pushed-4")
    (facts,) = said("table", "info", "users_v1", "--format", "jsonl")
    assert "replica r0" in facts


def test_the_page_shows_it_and_writes_nothing(s3: Place, tmp_path: Path) -> None:
    app = shop(tmp_path / "data", s3.url)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", 0, 300)
    with (
        serving(tmp_path / "data", "--state", s3.url) as address,
        httpx.Client(base_url=address, timeout=300) as page,
    ):
        with s3.counted() as before:
            assert page.get("/api/apps").json()["apps"] == []
        assert set(before) <= {"GET", "LIST"}, before
        app.run("local", until="caught_up", close=True)
        push_here(tmp_path / "data", rows(50), state=s3.url)
        expected = answers(app)
        with s3.counted() as looked:
            (shown,) = page.get("/api/apps").json()["apps"]
            tables = [each["name"] for each in page.get("/api/tables").json()["tables"]]
            minutes = page.get("/api/tables/shop:per-minute/scan", params={"limit": 1000}).json()
            users = page.get("/api/tables/users/fetch", params={"key": "key-00007"}).json()
            screens = [page.get(path).status_code for path in ("/", "/apps/shop", "/tables/shop:per-minute")]
        assert not WRITES & set(looked), looked
    assert shown["name"] == "shop"
    assert set(tables) >= {"shop:per-minute", "users"}
    assert len(minutes["rows"]) == len(expected["all"])
    assert users["rows"][0]["value"] == {"value": "v-7"}
    assert screens == [200, 200, 200]


@pytest.mark.parametrize(
    "words",
    [
        ("app", "status"),
        ("app", "checkpoints", "shop"),
        ("app", "reset", "shop", "--yes"),
        ("table", "info"),
        ("table", "fetch", "users", "a"),
        ("table", "versions", "users"),
        ("table", "swap", "users", "1"),
        ("certificate", "export", "shop", "--kind", "app"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("kind", ["folder", "objects"])
def test_a_command_at_a_place_without_state_says_so_and_makes_none(
    s3: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, words: tuple[str, ...]
) -> None:
    state = s3.url if kind == "objects" else str(tmp_path / "state")
    assert run([*words, "--state", state]) == 2
    assert "there is no" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()
    left = {object_of(path) for method, path in s3.proxy.requests if method == "PUT"}
    assert all("tidegate-probe-" in each for each in left), left
