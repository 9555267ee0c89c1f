"""Hooks of `make docs`: pages are written for people and for the tests; what only the tests need is taken out."""

from __future__ import annotations

import re
from typing import Any

_FLAGS = re.compile(r"^```(python|sh)(?: (?:skip|spark))+$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Code blocks without the flags `skip` and `spark`, which say how the tests run them."""
    return _FLAGS.sub(r"```\1", markdown)
