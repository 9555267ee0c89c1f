"""Documents as pages: templates with autoescape, and the few words numbers need to be read.

H1  every value goes through autoescape; no template marks anything as safe.
H2  no inline script or style: the policy (`security`, G4) would not run it.

Pure functions over templates that are loaded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any
from urllib.parse import urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from tidegate import __version__
from tidegate.durations import format_duration, format_moment, format_size
from tidegate.web import charts
from tidegate.web.failures import Failure


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
    made.filters.update(
        moment=moment,
        clock=clock,
        duration=rounded_duration,
        size=size,
        number=number,
        short=short,
        plural=plural,
    )
    made.globals.update(version=__version__, charts=charts, link=link)
    return made


def render(template: str, **values: Any) -> bytes:
    return environment().get_template(template).render(**values).encode("utf-8", "backslashreplace")


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


def moment(epoch_ms: int | None, nothing: str = "never") -> str:
    """To the second; the rest of an ISO moment says nothing to a person."""
    return (
        nothing if epoch_ms is None or epoch_ms < 0 else format_moment(epoch_ms)[:19].replace("T", " ") + "Z"
    )


def clock(epoch_ms: int | None) -> str:
    """The time of day alone."""
    try:
        return "" if epoch_ms is None else datetime.fromtimestamp(epoch_ms / 1000, UTC).strftime("%H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return str(epoch_ms)


def rounded_duration(milliseconds: float | None) -> str:
    """With two units at most: 93784000 → 1d2h."""
    if milliseconds is None:
        return "for ever"
    whole = int(milliseconds)
    for unit, below in (
        (86_400_000, 3_600_000),
        (3_600_000, 60_000),
        (60_000, 1000),
        (10_000, 1000),
        (1000, 1),
    ):
        if abs(whole) >= unit:
            return format_duration(whole - whole % below if whole >= 0 else whole)
    return format_duration(whole)


def size(count: int | None) -> str:
    return "–" if count is None else format_size(count)


def number(value: int | float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def short(text: str, most: int = 12) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def link(path: str, **ask: Any) -> str:
    """An address with its parameters; those that are None or empty are left out."""
    given = {name.strip("_"): value for name, value in ask.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path
