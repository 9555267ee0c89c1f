"""`tidegate table`: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidegate.cli.main import run
from tidegate.log.access.embedded import Log
from tidegate.tables.building.consumed import Consumed
from tidegate.tables.building.materialized import Materialized
from tidegate.tables.serdes.plain import Long, String
from tidegate.tables.sessioned_table import sessioned_table
from tidegate.tables.windowed_table import windowed_table
from tidegate.testing.tables import session_record, window_record, write_records


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
