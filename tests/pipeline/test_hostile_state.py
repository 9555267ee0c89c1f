"""R-9 where a user stands: an app whose state was damaged or forged ends in rows or in one typed error.

A flipped bit never changes a row. A pack that somebody forged, checksums and all, may hold other values than were
written, but never ends the process or raises anything without a type. Where state is signed, no forgery of any of its
files is ever a row.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forked_cases import told
from hostile_state import KEY

CHILD = Path(__file__).parents[1] / "hostile_state.py"


def swept(folder: Path, mode: str, cases: int, seed: int) -> Counter[str]:
    """How the cases ended, in a process of their own: a signal ends that one and is told here."""
    folder.mkdir()
    lines = told(CHILD, folder, mode, cases, seed)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = list(zip(lines[::2], lines[1::2], strict=True))
    bad = [pair for pair in pairs if pair[1]["ended"] not in allowed(mode)]
    assert not bad, bad[0]
    assert KEY.hex() not in str(lines)
    return Counter(ended["ended"] for _, ended in pairs)


def allowed(mode: str) -> set[str]:
    return {"same", "detected"} | ({"different"} if mode == "forged" else set())


@pytest.mark.parametrize(
    ("mode", "cases"), [("flips", 16), ("forged", 16), ("signed-forged", 16), ("log-flips", 16)]
)
def test_R_9_damaged_and_forged_state_is_read_or_refused(
    mode: str, cases: int, tmp_path: Path, tally: Any
) -> None:
    ended = swept(tmp_path / "sweep", mode, cases, seed=17)
    assert mode == "log-flips" or ended["detected"] >= cases // 4, "most bytes matter"
    tally(cases, detected=ended["detected"], other_values=ended["different"])


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["flips", "forged", "signed-flips", "signed-forged", "log-flips"])
def test_R_9_thousands_of_damaged_and_forged_files(mode: str, tmp_path: Path, tally: Any) -> None:
    total: Counter[str] = Counter()
    for seed in range(4):
        total += swept(tmp_path / str(seed), mode, 1000, seed)
    tally(4000, detected=total["detected"], other_values=total["different"])
