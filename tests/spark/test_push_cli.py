"""`tidegate push` and the verbs about versions, as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("few.csv", "id,name,score\nann,Ann,1\nbob\n"),
        ("many.csv", "id,name,score\nann,Ann,1\nbob,Bob,2,3\n"),
        ("cut.json", '{"id":"ann","score":1}\n{"id":"bob","score":'),
        ("all-cut.json", '{"id":"ann","score":'),
    ],
)
def test_a_source_with_a_malformed_row_is_refused_and_nothing_of_it_is_shown(
    spark: SparkSession, here: Path, capsys: pytest.CaptureFixture[str], name: str, content: str
) -> None:
    """Spark by itself fills such rows with nulls, and leaves out what is too much."""
    (here / name).write_text(content)
    assert run(["push", name, "--table", "users", "--key", "id"]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "a malformed row" in error and "-X mode=PERMISSIVE" in error
    assert run(["table", "scan", "users"]) != 0
    if name != "all-cut.json":
        lenient = ["--table", "users", "--key", "id", "--without-key", "skip", "-X", "mode=PERMISSIVE"]
        assert run(["push", name, *lenient]) == 0


@pytest.mark.soak
def test_of_a_push_that_fails_a_person_sees_one_line_and_no_log_of_sparks_attempts(here: Path) -> None:
    (here / "bad.csv").write_text("id,score\nann,1.5\nbob,NaN\n")
    words = [sys.executable, "-m", "tidegate.cli.main", "push", "bad.csv", "--table", "users", "--key", "id"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    assert "a row cannot be pushed" in ended.stderr.splitlines()[-1]
    assert " ERROR " not in ended.stderr and "org.apache.spark.api.python.PythonException" not in ended.stderr
