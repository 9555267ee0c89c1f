"""Certificates of committed rounds: what each read, tied to its commit, checkable while the log holds it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run
from tidegate.errors import InvalidError, OffsetOutOfRangeError
from tidegate.integrity.certificates import check_certificate, parse_certificate
from tidegate.pipeline.reading.certificates import certify_round
from tidegate.storage import open_backend

TEN = 1_767_261_600_000


def write(folder: Path, rows: int) -> None:
    with tg.Log(folder / "log", durability="os") as log:
        log.create_topic("clicks", 2, if_not_exists=True)
        with log.writer("clicks", integrity=True) as sender:
            for number in range(2):
                table = pa.table(
                    {"key": ["k"] * rows, "value": ['{"x":1}'] * rows, "timestamp": [TEN] * rows}
                )
                sender.write(table, partition=number)


def run_once(folder: Path) -> None:
    app = tg.App("clicks", data=folder)
    stream = app.stream("clicks", value=tg.Json(x="double")).validate()
    stream.window(tg.Tumbling("1m")).agg(clicks=tg.count()).to_table("per-minute")
    app.run("local", until="caught_up")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("app")
    for rows in (40, 25):
        write(made, rows)
        run_once(made)
    return made


def test_every_committed_round_can_be_certified_and_proven(folder: Path) -> None:
    log = str(folder / "log")
    backend = open_backend(str(folder / "state"))
    last = certify_round(backend, "clicks", None, log, now_ms=TEN)
    numbers = range(1, last["subject"]["round"] + 1)
    made = [certify_round(backend, "clicks", number, log, now_ms=TEN) for number in numbers]
    read = [(each["partition"], each["first"], each["next"]) for one in made for each in one["ranges"]]
    for partition in range(2):
        edges = [
            (first, following)
            for number, first, following in read
            if number == partition and first < following
        ]
        assert edges[0][0] == 0 and all(one[1] == two[0] for one, two in itertools.pairwise(edges))
    assert sum(one["records"] for one in made) == 2 * (40 + 25 + 4)
    assert made[-1]["base"] == made[-2]["subject"]["commit"], "a chain of commits"
    for one in made:
        parsed = parse_certificate(json.dumps(one))
        assert {each.verdict for each in check_certificate(parsed, log)} == {"proven"}
    backend.close()


def test_what_is_not_there_is_refused(folder: Path, tmp_path: Path) -> None:
    backend = open_backend(str(folder / "state"))
    with pytest.raises(InvalidError, match="no app nosuch"):
        certify_round(backend, "nosuch", None, str(folder / "log"), now_ms=TEN)
    with pytest.raises(InvalidError, match="commit 99"):
        certify_round(backend, "clicks", 99, str(folder / "log"), now_ms=TEN)
    with tg.Log(tmp_path / "empty", durability="os") as log:
        log.create_topic("clicks", 2)
    with pytest.raises(OffsetOutOfRangeError, match="aged out"):
        certify_round(backend, "clicks", 1, str(tmp_path / "empty"), now_ms=TEN)
    backend.close()


def test_the_command_takes_an_app_for_an_app(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "round.json"
    where = ["--log", str(folder / "log"), "--state", str(folder / "state")]
    assert run(["certificate", "export", "clicks", "--round", "1", "-o", str(file), *where]) == 0
    assert json.loads(file.read_text())["subject"]["kind"] == "round"
    assert run(["certificate", "check", str(file), "--log", str(folder / "log")]) == 0
    assert run(["certificate", "export", "clicks", "--kind", "topic", "-o", str(file), *where]) == 0
    assert json.loads(file.read_text())["subject"]["kind"] == "topic"
    assert run(["certificate", "export", "clicks", "--kind", "topic", "--round", "1", *where]) == 2
