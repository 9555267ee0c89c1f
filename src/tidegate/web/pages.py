"""Documents as pages: templates with autoescape; how numbers are written is `figures`'.

H1  every value goes through autoescape; no template marks anything as safe.
H2  no inline script or style: the policy (`security`, G4) would not run it.

Pure functions over templates that are loaded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any
from urllib.parse import urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from tidegate import __version__
from tidegate.web import charts
from tidegate.web.failures import Failure
from tidegate.web.figures import FILTERS, measured


@cache
def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("tidegate.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters.update(FILTERS)
    made.globals.update(version=__version__, charts=charts, link=link, measured=measured)
    return made


def render(template: str, **values: Any) -> bytes:
    """`named` is filled as the page is written: the metrics it names, in their order."""
    return environment().get_template(template).render(named={}, **values).encode("utf-8", "backslashreplace")


class Said:
    """The parameters of a page by name, to fill its form in again; empty where nothing was said."""

    def __init__(self, ask: Mapping[str, Any]) -> None:
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        return self._ask.get(name, "")


def document_page(template: str, document: bytes, *, ask: Mapping[str, Any], **values: Any) -> bytes:
    """A screen of a document as the reading process gave it."""
    return render(template, doc=msgspec.json.decode(document), ask=Said(ask), **values)


def failure_page(failure: Failure, status: int) -> bytes:
    return render(
        "failure.html", failure=failure, status=status, title="Not shown", nav="", copy=None, api=None
    )


def link(path: str, **ask: Any) -> str:
    """An address with its parameters; those that are None or empty are left out."""
    given = {name.strip("_"): value for name, value in ask.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path
