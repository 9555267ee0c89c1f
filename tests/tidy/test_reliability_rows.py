"""Every promise of the pipeline is a test that carries its number in its id, at the places where it must hold.

`R-17` to `R-27`: what is promised when processes die, rounds are repeated, clocks jump, keys are uneven, two run at
once. `WS-T…`: situations of storage that need a whole job, which Spark must show, too. Asks pytest which tests it
would run, so that a row cannot vanish by a renamed file or a marker.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCAL = {f"R-{number}" for number in range(17, 28) if number != 18}
SPARK = {"R-17", "R-18", "R-19", "R-20", "WS-T68", "WS-T69", "WS-T89", "WS-T97", "WS-T98", "WS-T99"}
SOAK = {"R-17", "R-18", "R-20", "R-21", "R-22", "R-24", "R-26"}
REQUIRED = sorted(
    [("tests/pipeline", row) for row in LOCAL]
    + [("tests/spark", row) for row in SPARK]
    + [("soak", row) for row in SOAK]
)


def listed(*arguments: str) -> str:
    listing = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert listing.returncode == 0, listing.stdout[-2000:]
    return listing.stdout


@pytest.fixture(scope="module")
def covered() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"tests/pipeline": set(), "tests/spark": set(), "soak": set()}
    every = listed("tests/pipeline", "tests/spark", "-m", "soak or not soak")
    for line in every.splitlines():
        rows = set(re.findall(r"(?<=[\[+-])(?:WS-T|R-)\d+(?=[\]+-])", line))
        place = "soak" if "-soak-" in line else "/".join(line.split("/")[:2])
        if rows and place in found:
            found[place] |= rows
    return found


@pytest.mark.xdist_group("reliability-rows")
@pytest.mark.parametrize(("place", "row"), REQUIRED, ids=[f"{row} in {place}" for place, row in REQUIRED])
def test_each_row_is_the_id_of_a_test(place: str, row: str, covered: dict[str, set[str]]) -> None:
    assert row in covered[place]
