"""Every numbered behaviour of integrity validation is a test that carries its number in its id.

`DIV-…`: what sender, validator and receiver must do in a situation. `R-28` to `R-30`: what they promise under damage,
under attack and for any cut. Unlike a look at the sources, this asks pytest which tests it would run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [*(f"DIV-{number}" for number in range(1, 50)), "R-28", "R-29", "R-30"]


@pytest.fixture(scope="module")
def covered() -> set[str]:
    listing = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/integrity", "--collect-only", "-p", "no:xdist"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert listing.returncode == 0, listing.stdout[-2000:]
    return set(re.findall(r"(?<=[\[+-])(?:DIV|R)-\d+(?=[\]+-])", listing.stdout))


@pytest.mark.xdist_group("integrity-rows")
@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_the_id_of_a_test(row: str, covered: set[str]) -> None:
    assert row in covered


@pytest.mark.xdist_group("integrity-rows")
def test_no_test_claims_an_unknown_row(covered: set[str]) -> None:
    assert covered <= set(ROWS)
