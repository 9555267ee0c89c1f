"""The page that describes the HTTP API is the one that the questions make."""

from __future__ import annotations

from pathlib import Path

from tidegate.web.reference import PAGE, page


def test_the_reference_of_the_http_api_is_up_to_date() -> None:
    kept = (Path(__file__).parents[2] / PAGE).read_text(encoding="utf-8")
    assert kept == page(), "run: .venv/bin/python -m tidegate.web.reference --write"
