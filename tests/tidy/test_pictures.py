"""The handbook's pictures are what the same runs would draw now, and small; the notebook shows what it says."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest
from pages import DOCS, ROOT
from warm import Warm

PICTURES = runpy.run_path(str(ROOT / "scripts" / "pictures"))


@pytest.mark.parametrize("picture", [*PICTURES["DRAWINGS"], *PICTURES["TERMINALS"]])
def test_a_picture_is_of_todays_run(picture: str, warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PICTURES_BIN", str(warm.bin))
    assert PICTURES["is_current"](picture), f"run: .venv/bin/python scripts/pictures --write {picture}"


@pytest.mark.parametrize("path", sorted(DOCS.glob("images/*.svg")), ids=lambda path: path.name)
def test_a_picture_is_small_and_needs_nothing_from_elsewhere(path) -> None:  # type: ignore[no-untyped-def]
    text = path.read_text(encoding="utf-8")
    assert len(text) < 60_000
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_the_cells_of_the_tour_show_what_is_stored_in_it() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "tour")], capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
