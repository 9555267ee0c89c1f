"""Every numbered behaviour has a test that carries its number.

The numbers are the project's lists of behaviours. `LS-…`: what a Kafka-compatible log must show, by the part of
Kafka they come from: B batches and records, S log segments, O offset index, T time index, X transaction index,
U the whole log, L loading, P producer state, C compaction, D dump, E leader epochs, V validation of appends,
K checkpoint files. `WS-T…`: what the worker storage must do in a situation; `WS-INV-…`: what holds of it at all
times. `WIN-7.…`: windows and tables: 1 bytes of keys and values, 2 time segments, 3 segmented stores, 4 window stores,
5 session stores, 6 windows and aggregation, 7 tables and deduplication.
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
LOG_ROWS = [f"LS-{part}{number}" for part, count in COUNTS.items() for number in range(1, count + 1)]
STORAGE_ROWS = [f"WS-T{number}" for number in range(1, 100)]
INVARIANTS = [f"WS-INV-{number}" for number in range(1, 26)]
WINDOW_COUNTS = {1: 6, 2: 7, 3: 9, 4: 13, 5: 8, 6: 11, 7: 10}
WINDOW_ROWS = [
    f"WIN-7.{part}-{number:02}" for part, count in WINDOW_COUNTS.items() for number in range(1, count + 1)
]
ROWS = [*LOG_ROWS, *STORAGE_ROWS, *INVARIANTS, *WINDOW_ROWS]

# Rows without a test, each with its reason.
FRAMES = "SQL window frames per row and request mode are not built; windows are by key and time"
TILES = "there are no tiles: they were measured and were slower (docs/decisions/0017)"
NOT_APPLICABLE: dict[str, str] = {
    **{f"WS-T{number}": FRAMES for number in (*range(70, 85), 90, 92, 94)},
    **{f"WS-T{number}": TILES for number in range(85, 89)},
}


@pytest.fixture(scope="module")
def covered() -> set[str]:
    log, storage = re.compile(r"LS-([A-Z])(\d+)"), re.compile(r"WS-(INV-|T)(\d+)")
    windows = re.compile(r"WIN-7\.\d+-\d+")
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        if path != Path(__file__):
            text = path.read_text()
            found |= {f"LS-{part}{number}" for part, number in log.findall(text)}
            found |= {f"WS-{part}{number}" for part, number in storage.findall(text)}
            found |= set(windows.findall(text))
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
