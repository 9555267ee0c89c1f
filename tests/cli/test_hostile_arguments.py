"""Whatever is typed, every command ends with a documented exit code and no traceback, and no signal ends it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forked_cases import told
from tidegate.cli.options import EXIT_CODES

SCRIPT = Path(__file__).parents[1] / "hostile_arguments.py"
DOCUMENTED = {int(code) for code in re.findall(r"(\d+) ", EXIT_CODES)}


def swept(folder: Path, cases: int, seed: int) -> Counter[int]:
    """How often each exit code came."""
    lines = told(SCRIPT, folder, cases, seed)
    assert len(lines) == cases
    for line in lines:
        assert line["ended"] == "exit" and line["code"] in DOCUMENTED, line
        assert "Traceback" not in line["said"] and "a fault in Tidegate" not in line["said"], line
    return Counter(line["code"] for line in lines)


def test_R_31_any_arguments_of_every_command(tmp_path: Path, tally: Any) -> None:
    assert {0, 1, 2, 3, 4, 5, 130} == DOCUMENTED
    codes = swept(tmp_path, 20, seed=4)
    tally(20, detected=20 - codes[0], codes=str(dict(codes)))


@pytest.mark.soak
def test_R_31_hundreds_of_command_lines(tmp_path: Path, tally: Any) -> None:
    codes = swept(tmp_path, 800, seed=5)
    tally(800, detected=800 - codes[0], codes=str(dict(codes)))
