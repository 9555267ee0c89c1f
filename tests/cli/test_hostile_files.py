"""Whatever a file holds, a command that meets it ends with a documented exit code, and prints no record or row that
the sound files do not hold."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forked_cases import told
from tidegate.cli.options import EXIT_CODES

SCRIPT = Path(__file__).parents[1] / "hostile_files.py"
DOCUMENTED = {int(code) for code in re.findall(r"(\d+) ", EXIT_CODES)}


def swept(folder: Path, cases: int, seed: int) -> Counter[int]:
    """How often each exit code came."""
    folder.mkdir()
    lines = told(SCRIPT, folder, cases, seed)
    assert len(lines) == cases
    for line in lines:
        assert line["ended"] == "exit" and line["code"] in DOCUMENTED, line
        assert "Traceback" not in line["said"] and "a fault in Tidegate" not in line["said"], line
        assert line["strangers"] == [], line
    return Counter(line["code"] for line in lines)


def test_R_31_commands_given_damaged_files(tmp_path: Path, tally: Any) -> None:
    codes = swept(tmp_path / "few", 16, seed=6)
    tally(16, detected=16 - codes[0], codes=str(dict(codes)))


@pytest.mark.soak
def test_R_31_hundreds_of_damaged_files(tmp_path: Path, tally: Any) -> None:
    codes = swept(tmp_path / "many", 600, seed=7)
    tally(600, detected=600 - codes[0], codes=str(dict(codes)))
