"""`tidegate demo --canary`: the play runs from start to end and shows what it says."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.cli.demo import Stage
from tidegate.cli.main import run


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a piped demo printed, and its folder."""
    folder = tmp_path_factory.mktemp("demo") / "here"
    done = subprocess.run(
        [sys.executable, "-m", "tidegate.cli.main", "demo", "--canary", "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "JAVA_HOME": "/nonexistent"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert done.stderr == ""
    return done.stdout, folder


def test_files_grow_roll_are_marked_and_removed(played: tuple[str, Path]) -> None:
    printed = played[0]
    scenes = [
        "3,573  00000000000000000000.log",
        "16,164  00000000000000000000.log",
        "16,314  00000000000000000000.log",
        "150  00000000000000000109.log",
        "Readers start at offset 109",
        "16,314  00000000000000000000.log.deleted",
    ]
    places = [printed.index(scene) for scene in scenes]
    assert places == sorted(places)
    assert "00000000000000000000.log" not in printed[printed.index("off the disk") :].split("\n\n")[0]


def test_the_dump_is_kafkas(played: tuple[str, Path]) -> None:
    assert "Log starting offset: 109" in played[0]
    assert "baseOffset: 109 lastOffset: 109 count: 1" in played[0]
    assert 'payload: {"producerId":' in played[0]


def test_the_lifetime_is_ten_to_twenty_five_minutes(played: tuple[str, Path]) -> None:
    printed, folder = played
    assert "kept for 10m at least" in printed
    assert "readable for up to 24m and on disk for up to 25m" in printed
    assert "19m" in printed
    assert (folder / "lifetime.html").exists()
    assert str(folder / "lifetime.html") in printed


def test_all_records_are_checked_by_their_producers_sequence(played: tuple[str, Path]) -> None:
    assert "checked 100 % of records by producer sequence" in played[0]


def test_the_damage_is_found_in_the_copy_and_only_there(played: tuple[str, Path]) -> None:
    printed, folder = played
    assert "One bit flips" in printed
    assert run(["verify", "-q", str(folder / "log")]) == 0
    assert run(["verify", "-q", str(folder / "damaged")]) == 1


def test_it_is_plain_text_with_commands_to_type_and_names_its_folder(
    played: tuple[str, Path],
) -> None:
    printed, folder = played
    assert "\x1b" not in printed
    assert printed.count("   $ tidegate ") >= 10
    last_words = " ".join(printed.split())  # however the lines were broken
    assert last_words.endswith(f"Everything of this demo is in {folder}; delete it when you like.")


def test_every_command_it_shows_can_be_typed(played: tuple[str, Path]) -> None:
    """The ones about this log, at least: they end as the demo said they would."""
    printed, folder = played
    shown = [line.strip()[2:] for line in printed.splitlines() if line.startswith("   $ tidegate ")]
    for line in shown:
        words = shlex.split(line, comments=True)[1:]
        if words[0] == "doctor" or "/var/lib/kafka/data" in words:
            continue
        expected = 4 if words[:2] == ["topic", "create"] else 1 if str(folder / "damaged") in words else 0
        assert run(words) == expected, line


def test_on_a_terminal_the_same_is_said_in_colour(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stage = Stage()
    stage.title("A play")
    stage.step("An act.", "A sentence [not markup].")
    stage.command("tidegate topic list [x]")
    stage.answer("one\ntwo\nthree", most=1)
    stage.listing({"a.log": 1234, "b.log.deleted": 5}, ["a.log"], "a note")
    printed = capsys.readouterr().out
    assert "\x1b[" in printed
    for part in ("A play", "1. An act.", "[not markup]", "$ tidegate topic list [x]", "one", "1,234  a.log"):
        assert part in printed
    assert "… 2 more lines" in printed and "two" not in printed
