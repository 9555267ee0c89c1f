"""`tidegate push` and the verbs about versions, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tidegate.cli.main import run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.csv").write_text("id,name,score\nann,Ann,1.5\nbob,Bob,2.5\n")
    (tmp_path / "two.csv").write_text("id,name,score\nann,Ann,9.5\ncleo,Cleo,3.5\n")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert run(list(words)) == code
    return capsys.readouterr().out


def test_push_look_compare_swap_and_delete(
    spark: SparkSession, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(
        capsys,
        *("push", "one.csv", "--table", "users", "--key", "id", "--partitions", "2", "--format", "json"),
    )
    report = json.loads(out)
    assert (report["is_current"], report["state"], report["rows"]) == (True, "ready", 2)
    query = ("--sql", "select * from source where score > 3")
    said(capsys, *("push", "two.csv", *query, "--table", "users", "--key", "id", "--no-swap"))
    listed = [json.loads(line) for line in said(capsys, "table", "versions", "users").splitlines()]
    assert [(each["version"], each["state"], each["shown"]) for each in listed] == [
        (1, "ready", "current"),
        (2, "ready", None),
    ]
    row = json.loads(said(capsys, "table", "fetch", "users", "ann"))
    assert row["value"] == {"name": "Ann", "score": 1.5}
    found = json.loads(
        said(capsys, "table", "diff", "users_v1", "users_v2", "--exit-code", "--format", "json", code=1)
    )
    assert (found["gained"], found["lost"], found["changed"]) == (1, 1, 1)
    assert [each["key"] for each in found["examples"]["gained"]] == ["cleo"]
    said(capsys, "table", "swap", "users", "2")
    assert json.loads(said(capsys, "table", "fetch", "users", "ann"))["value"]["score"] == 9.5
    assert json.loads(said(capsys, "table", "fetch", "users_v1", "ann"))["value"]["score"] == 1.5
    said(capsys, "table", "rollback", "users")
    assert json.loads(said(capsys, "table", "info", "users", "--format", "json"))["current"] == 1
    assert [json.loads(line)["table"] for line in said(capsys, "table", "info").splitlines()] == ["users"]
    said(capsys, "table", "delete-version", "users", "1", "--yes", code=2)  # the one that is shown
    said(capsys, "table", "delete-version", "users", "2", "--dry-run")
    assert len(said(capsys, "table", "versions", "users").splitlines()) == 2
    said(capsys, "table", "delete-version", "users", "2", "--yes")
    assert len(said(capsys, "table", "versions", "users").splitlines()) == 1
    said(capsys, "table", "rollback", "users", code=4)  # nothing to go back to any more


def test_what_cannot_be_pushed_is_refused_in_one_line(
    spark: SparkSession, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (
        ("push", "one.csv", "--table", "users", "--key", "nobody"),
        ("push", "one.what", "--table", "users", "--key", "id"),
        ("push", "one.csv", "--table", "no/table", "--key", "id"),
        ("push", "--table", "users", "--key", "id"),
        ("table", "versions", "users", "--state", "nowhere"),
    ):
        assert run(list(words)) == 2
        assert capsys.readouterr().err.count("error:") == 1
