"""Every numbered behaviour of the log has a test that carries its number.

The numbers are the project's list of behaviours a Kafka-compatible log must show, by the part of Kafka they
come from: B batches and records, S log segments, O offset index, T time index, X transaction index, U the
whole log, L loading, P producer state, C compaction, D dump, E leader epochs, V validation of appends,
K checkpoint files.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
COUNTS = {
    "B": 4, "S": 15, "O": 5, "T": 3, "X": 2, "U": 21, "L": 8, "P": 10, "C": 10, "D": 2, "E": 3, "V": 1,
    "K": 1,
}  # fmt: skip
ROWS = [f"LS-{part}{number}" for part, count in COUNTS.items() for number in range(1, count + 1)]
# Rows that cannot apply here, each with its reason.
NOT_APPLICABLE: dict[str, str] = {}


@pytest.fixture(scope="module")
def covered() -> set[str]:
    pattern = re.compile(r"LS-([A-Z])(\d+)")
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        if path != Path(__file__):
            found |= {f"LS-{part}{number}" for part, number in pattern.findall(path.read_text())}
    return found


@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_tested_or_listed_with_its_reason(row: str, covered: set[str]) -> None:
    if row in NOT_APPLICABLE:
        assert row not in covered, f"{row} is listed as not applicable but tested"
        assert NOT_APPLICABLE[row]
    else:
        assert row in covered


def test_no_test_claims_an_unknown_row(covered: set[str]) -> None:
    assert covered <= set(ROWS)
