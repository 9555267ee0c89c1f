"""`tidegate table`: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from table_records import session_record, window_record, write_records
from tidegate.cli.main import run
from tidegate.log.log import Log
from tidegate.tables.factories import sessioned_table, windowed_table
from tidegate.tables.options import Consumed, Materialized
from tidegate.tables.serdes.base import Long, String


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Log(tmp_path / "log", durability="os") as log:
        counts = [window_record(b"a", n * 10, n.to_bytes(8, "big")) for n in range(3)]
        write_records(log, "counts-changelog", [*counts, window_record(b"b", 0, (9).to_bytes(8, "big"))])
        write_records(log, "sessions", [session_record(b"a", 5, 9, b"one")])
        serdes, name = Consumed(String(), Long()), Materialized("counts")
        state = tmp_path / "state"
        windowed_table(
            log, "counts-changelog", "10ms", state=state, consumed=serdes, materialized=name
        ).close()
        sessioned_table(log, "sessions", state=state).close()
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], folder: Path, *words: str, code: int = 0) -> str:
    assert run(["table", *words, "--state", str(folder / "state")]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def lines(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> list[dict[str, object]]:
    return [
        json.loads(line) for line in said(capsys, folder, *words, "--format", "jsonl").splitlines() if line
    ]


def test_fetch_prints_the_windows_of_a_key(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    found = lines(capsys, folder, "fetch", "counts", "a", "--from", "10")
    assert [(row["window_start"], row["window_end"], row["value"]) for row in found] == [
        (10, 20, 1),
        (20, 30, 2),
    ]
    assert [row["value"] for row in lines(capsys, folder, "fetch", "counts", "a", "--backward")] == [2, 1, 0]
    assert lines(capsys, folder, "fetch", "counts", "nobody") == []
    moments = ("--from", "1970-01-01T00:00:00.010Z", "--to", "1970-01-01T00:00:00.015")
    assert [row["value"] for row in lines(capsys, folder, "fetch", "counts", "a", *moments)] == [1]
    assert "is not a moment" in said(capsys, folder, "fetch", "counts", "a", "--from", "noon", code=2)
    (session,) = lines(capsys, folder, "fetch", "sessions", "a", "--value", "string")
    assert (session["window_start"], session["window_end"], session["value"]) == (5, 9, "one")


def test_scan_prints_all_rows_or_some(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert len(lines(capsys, folder, "scan", "counts")) == 4
    assert len(lines(capsys, folder, "scan", "counts", "-n", "2")) == 2
    for asked, told in (
        ([], "4 rows of counts"),
        (["-n", "2"], "2 rows of counts"),
        (["-n", "9"], "4 rows of counts"),
    ):
        assert run(["table", "scan", "counts", *asked, "--state", str(folder / "state")]) == 0
        assert capsys.readouterr().err == told + "\n"
    assert "WINDOW START" in said(capsys, folder, "scan", "counts", "--format", "table")


def test_info_lists_tables_and_describes_one(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert [row["table"] for row in lines(capsys, folder, "info")] == ["counts", "sessions"]
    facts = json.loads(said(capsys, folder, "info", "counts", "--format", "json"))
    assert facts["topic"] == "counts-changelog"
    assert facts["position"] == "0: 4"
    assert facts["applied"] == 4
    assert facts["builder"] == "none"


def test_explain_says_which_records_made_a_value(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    log = str(folder / "log")
    told = said(capsys, folder, "explain", "counts", "a", "10", "--log", log)
    assert "offset 1" in told
    assert "current" in told
    assert told == said(capsys, folder, "explain", "counts", "a", "1970-01-01T00:00:00.010Z", "--log", log)
    told = said(capsys, folder, "explain", "sessions", "a", "5", "9", "--log", log)
    assert "offset 0" in told
    assert "START and END" in said(capsys, folder, "explain", "sessions", "a", "--log", log, code=2)


def test_wrong_names_and_folders_are_told(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert "there are counts, sessions" in said(capsys, folder, "fetch", "cuonts", "a", code=2)
    assert "is not kept" in said(capsys, folder, "scan", "counts", "--commit", "99", code=2)
    assert run(["table", "info", "--state", str(folder / "nowhere")]) == 2
    assert not (folder / "nowhere").exists()


TEN = 1_767_261_600_000


def shop(folder: Path, name: str, size: str = "1m") -> tg.App:
    app = tg.App(name, log=str(folder / "log"), state=str(folder / "state"))
    clicks = app.stream("clicks", value=tg.Json(x="double"))
    clicks.window(tg.Tumbling(size, grace="1h")).agg(n=tg.count(), total=tg.sum("x")).to_table("per_minute")
    return app


@pytest.fixture
def apps(folder: Path) -> Path:
    """The tables of `folder`, and the app shop with its table per_minute."""
    with Log(folder / "log", durability="os") as log:
        log.create_topic("clicks", 2)
        rows = [(key, TEN + n * 30_000) for n in range(4) for key in ("a", "b")]
        table = {
            "key": [key for key, _ in rows],
            "value": ['{"x":2}'] * 8,
            "timestamp": [at for _, at in rows],
        }
        log.writer("clicks").write(pa.table(table))
    shop(folder, "shop").run("local", until="caught_up")
    return folder


def test_tables_of_apps_are_read_by_name(capsys: pytest.CaptureFixture[str], apps: Path) -> None:
    with shop(apps, "shop").open_table("per_minute") as own:
        expected = own.to_arrow().to_pylist()
    assert len(expected) == 4
    scanned = lines(capsys, apps, "scan", "per_minute")
    assert sorted(scanned, key=str) == sorted(expected, key=str)
    assert lines(capsys, apps, "fetch", "per_minute", "a") == [row for row in expected if row["key"] == "a"]
    assert lines(capsys, apps, "fetch", "shop:per_minute", "a", "--backward", "--from", str(TEN)) == [
        row for row in reversed(expected) if row["key"] == "a"
    ]
    assert len(lines(capsys, apps, "scan", "per_minute", "-n", "1")) == 1
    assert len(lines(capsys, apps, "scan", "per_minute", "--commit", "1")) == 4
    assert "not kept" in said(capsys, apps, "scan", "per_minute", "--commit", "7", code=2)
    listed = {str(row["table"]): row for row in lines(capsys, apps, "info")}
    assert listed["shop:per_minute"]["topic"] == "clicks" and "counts" in listed
    facts = json.loads(said(capsys, apps, "info", "per_minute", "--format", "json"))
    assert (facts["app"], facts["position"]) == ("shop", "0: 8, 1: 0")
    told = said(capsys, apps, "explain", "per_minute", "a", str(TEN), "--log", str(apps / "log"))
    assert told.count(" counted\n") == 2 and '"total": 4.0' in told


def test_a_table_name_that_two_apps_have_must_say_which(
    capsys: pytest.CaptureFixture[str], apps: Path
) -> None:
    shop(apps, "other", "2m").run("local", until="caught_up")
    refused = said(capsys, apps, "scan", "per_minute", code=2)
    assert "other:per_minute" in refused and "shop:per_minute" in refused
    assert len(lines(capsys, apps, "scan", "other:per_minute")) == 2
    assert len(lines(capsys, apps, "scan", "shop:per_minute")) == 4


def test_what_an_app_table_cannot_be_asked_is_said(capsys: pytest.CaptureFixture[str], apps: Path) -> None:
    assert "shop:per_minute" in said(capsys, apps, "scan", "nothing", code=2)
    assert "shop:per_minute" in said(capsys, apps, "scan", "nobody:per_minute", code=2)
    assert "leave --key" in said(capsys, apps, "scan", "per_minute", "--key", "int", code=2)
    assert "give START" in said(
        capsys, apps, "explain", "per_minute", "a", "--log", str(apps / "log"), code=2
    )
    between = ("explain", "per_minute", "a", "2026-01-01T10:00:30Z", "--log", str(apps / "log"))
    refused = said(capsys, apps, *between, code=2)
    assert "none starts at 2026-01-01T10:00:30" in refused and "2026-01-01T10:00:00" in refused
    assert lines(capsys, apps, "scan", "counts"), "a stored table is found before an app's"
