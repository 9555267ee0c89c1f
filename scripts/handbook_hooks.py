"""Hooks of `make docs`: pages are written for people and for the tests; what only the tests need is taken out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_FLAGS = re.compile(r"^```(python|sh)(?: (?:skip|spark|install))+$", re.MULTILINE)
_OUTPUT = re.compile(r"^```text output$", re.MULTILINE)
_INCLUDE = re.compile(r"^<!-- include ([\w.]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Code blocks without the flags that say how the tests run them, outputs with a class of their own; a file of the
    repository where one is asked for."""
    return _OUTPUT.sub("``` { .text .output }", _FLAGS.sub(r"```\1", _INCLUDE.sub(_included, markdown)))


def _included(asked: re.Match[str]) -> str:
    """A file's text without its title; its links lead out of the handbook and become plain words."""
    text = (Path(__file__).parents[1] / asked[1]).read_text(encoding="utf-8")
    return re.sub(r"\[([^\]]*)\]\((?!http)[^)]*\)", r"\1", text.partition("\n\n")[2])
