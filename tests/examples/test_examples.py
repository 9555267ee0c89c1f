"""Each example runs as its first lines say, from a clean copy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
EXPECTED = {
    "orders_per_minute": [
        "alice  minute 0  {'orders': 2, 'revenue': 24.75}",
        "bob    minute 1  {'orders': 1, 'revenue': 30.0}",
    ],
    "user_sessions": ["ann: 3 clicks in 9 minutes", "ben: 1 clicks in 0 minutes"],
    "kafka_streams_changelog": ["alice, minute 0: 3", "4 windows in all"],
}


def play(folder: Path, name: str, *options: str) -> str:
    shutil.copy(EXAMPLES / f"{name}.py", folder)
    done = subprocess.run(
        [sys.executable, f"{name}.py", *options], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", EXPECTED)
def test_it_prints_what_it_is_about(tmp_path: Path, name: str) -> None:
    printed = play(tmp_path, name)
    for line in EXPECTED[name]:
        assert line in printed
    again = play(tmp_path, name)  # nothing new: the same table
    assert again.splitlines()[-1] == printed.splitlines()[-1]


@pytest.mark.spark
@pytest.mark.parametrize("name", ["orders_per_minute", "user_sessions"])
def test_it_prints_the_same_on_spark(tmp_path: Path, name: str) -> None:
    printed = play(tmp_path, name, "--spark")
    for line in EXPECTED[name]:
        assert line in printed
    assert "(spark)" in printed


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(EXPECTED)
