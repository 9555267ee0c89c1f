"""Rows of integrity validation that Spark must meet, by the tests that ask for a Spark and carry the row in their id.

A test counts here when it has a session (the fixture `spark`, by whatever way), or runs a cluster of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [f"DIV-{number}" for number in (*range(10, 17), *range(20, 34), *range(37, 50))]
CLUSTERS = frozenset({"test_push_kills.py"})
"""Modules whose Spark is in a process of its own."""
LISTING = """
import re, sys, pytest

class Listing:
    def pytest_collection_finish(self, session):
        for item in session.items:
            if "spark" in item.fixturenames or item.path.name in sys.argv[1].split():
                print(*re.findall(r"(?<=[\\[+-])DIV-\\d+(?=[\\]+-])", item.name))

pytest.main(["tests/spark", "--collect-only", "--capture=no", "-p", "no:xdist"], plugins=[Listing()])
"""


@pytest.fixture(scope="module")
def met() -> set[str]:
    listing = subprocess.run(
        [sys.executable, "-c", LISTING, " ".join(CLUSTERS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert listing.returncode == 0, listing.stderr[-2000:]
    return set(listing.stdout.split())


@pytest.mark.xdist_group("integrity-rows")
@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_met_by_spark(row: str, met: set[str]) -> None:
    assert row in met
