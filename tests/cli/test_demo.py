"""`tidegate demo`: faults are planted and found, and the pipeline's table does not change when it is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tidegate.cli.main import run


class Played(NamedTuple):
    printed: str
    folder: Path


def play(folder: Path, engine: str) -> Played:
    done = subprocess.run(
        [sys.executable, "-m", "tidegate.cli.main", "demo", "--folder", str(folder), "--engine", engine],
        capture_output=True, text=True, timeout=1100, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return Played(done.stdout, folder)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return play(tmp_path_factory.mktemp("demo") / "here", "local")


def test_every_planted_fault_is_shown_and_found(local: Played) -> None:
    planted = [
        "3 records lost on the way",
        "has one bit flipped",
        "is stored twice",
        "clock was a day ahead",
        "25 records never arrived",
        "1,000 orders are sent again",
        "40 orders come two hours late, 1 is dated ten years ahead",
    ]
    for line in planted:
        assert line in local.printed
    found = re.findall(r"^ +(fault|notice): (\w+) at (\w+)-(\d) ", local.printed, re.MULTILINE)
    assert sorted(found) == [
        ("fault", "corrupt", "orders", "0"),
        ("fault", "corrupt", "orders", "1"),
        ("fault", "missing", "catalogue", "0"),
        ("fault", "missing", "orders", "0"),
        ("notice", "duplicate", "orders", "0"),
    ]
    assert re.search(r"no fault in prices; [1-9]\d* gaps are compaction's", local.printed)


def test_every_record_is_accounted_for(local: Played) -> None:
    numbers = {
        name.strip(): int(number.replace(",", ""))
        for name, number in re.findall(r"^   ([a-z][a-z, ]+?)  +([\d,]+)$", local.printed, re.MULTILINE)
    }
    whole = numbers.pop("records in the log")
    assert sum(numbers.values()) == whole == 101_010
    assert numbers["counted in windows"] == 99_955
    assert numbers["corrupt, set aside"] == 1
    assert numbers["orders sent again, dropped"] == 1_000
    assert numbers["records stored twice, dropped"] == 1
    assert numbers["late, kept apart"] == 40
    assert numbers["from the future, kept apart"] == 1


def test_the_corrupt_record_is_set_aside_and_the_sum_is_that_of_the_others(local: Played) -> None:
    assert "that of every order that arrived as it was sent" in local.printed
    assert re.search(r"orders-1 offset \d+: CORRUPT \(D1\) at orders-1", local.printed)
    assert "faults: 1 missing, 2 corrupt (1 set aside as dead letters)" in local.printed


def test_the_table_is_read_by_another_process(local: Played) -> None:
    rows = re.findall(r"customer-7  (10:0\d)  (\d+) orders +([\d.]+)", local.printed)
    assert [minute for minute, *_ in rows] == sorted(minute for minute, *_ in rows)
    assert rows
    assert "41 records kept apart" in local.printed


def test_kills_change_nothing(local: Played) -> None:
    killed = re.findall(r"killed after round (\d+) was committed", local.printed)
    assert len(killed) == 2 and int(killed[0]) < int(killed[1])
    assert "the same as in the undisturbed run, to the last bit" in local.printed
    assert run(["verify", "-q", "orders-per-minute", "--log", str(local.folder / "again" / "log")]) == 0


def test_it_is_plain_text_with_commands_to_type_and_names_its_folder(local: Played) -> None:
    assert "\x1b" not in local.printed
    assert local.printed.count("   $ ") >= 10
    last_words = " ".join(local.printed.split())
    assert last_words.endswith(f"Everything of this demo is in {local.folder}; delete it when you like.")


def test_a_folder_with_something_in_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("precious")
    assert run(["demo", "--folder", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.spark
def test_it_plays_on_spark(tmp_path: Path) -> None:
    played = play(tmp_path / "here", "spark")
    assert played.printed.count("(spark); caught up") == 2
    assert "to the last bit" in played.printed
