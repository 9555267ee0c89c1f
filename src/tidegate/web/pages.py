"""HTML pages from documents: Jinja templates, and the filters that write numbers.

A `Figure` is text that keeps its number, in the base unit of its metric (records, bytes, seconds). A template names the
metric of a number, which the page shows as a title, and lists at its foot:

    {{ topic.bytes|size|metric("tidegate_log_bytes", topic=topic.name) }}
    <data value="10599738" title="metric tidegate_log_bytes{topic=&#34;orders&#34;}">10.1 MiB</data>

The name is a Prometheus selector; a number that several series make is their sum.

H1  every value goes through autoescape; no template marks anything as safe, and `metric` escapes each part of its
    markup.
H2  no inline script or style: the content security policy (`security`, G4) blocks both.

Pure functions, apart from the metric names that a page collects while it is rendered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any
from urllib.parse import urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

from tidegate import __version__
from tidegate.durations import counted, format_duration, format_moment, format_size
from tidegate.web import charts
from tidegate.web.failures import Failure

# -- filters ---------------------------------------------------------------------------------------


class Figure(str):
    """A number as it is read; `value` is None where there was none to read."""

    value: float | None

    def __new__(cls, text: str, value: float | None) -> Figure:
        made = super().__new__(cls, text)
        made.value = value
        return made


def moment(epoch_ms: int | None, nothing: str = "never") -> Figure:
    """To the second; the rest of an ISO moment says nothing to a person."""
    if epoch_ms is None or epoch_ms < 0:
        return Figure(nothing, None)
    return Figure(format_moment(epoch_ms)[:19].replace("T", " ") + "Z", epoch_ms / 1000)


def clock(epoch_ms: int | None) -> str:
    """The time of day alone."""
    try:
        return "" if epoch_ms is None else datetime.fromtimestamp(epoch_ms / 1000, UTC).strftime("%H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return str(epoch_ms)


_SMALLEST = ((86_400_000, 3_600_000), (3_600_000, 60_000), (10_000, 1000))
"""From which duration on, in milliseconds, which smaller unit is the last that is said."""


def duration(milliseconds: float | None) -> Figure:
    """With two units at most: 93784000 → 1d2h."""
    if milliseconds is None:
        return Figure("for ever", None)
    whole = int(milliseconds)
    kept = next((below for least, below in _SMALLEST if whole >= least), 1)
    return Figure(format_duration(whole - whole % kept), milliseconds / 1000)


def age(milliseconds: int) -> Figure:
    """How long ago: nobody wants to know the milliseconds beside the seconds."""
    told = milliseconds if milliseconds < 1000 else milliseconds // 1000 * 1000
    return Figure(duration(told), milliseconds / 1000)


def seconds(value: float | None) -> Figure:
    """As many digits as can be of interest: 0.041 s, 12.3 s."""
    return decimals(value, 3 if value is not None and abs(value) < 1 else 1, " s")


def size(count: int | None) -> Figure:
    return Figure("–" if count is None else format_size(count), count)


def number(value: int | float | None) -> Figure:
    if value is None:
        return Figure("–", None)
    return Figure(f"{value:,.2f}" if isinstance(value, float) else f"{value:,}", value)


def decimals(value: float | None, digits: int, unit: str = "") -> Figure:
    """With so many digits, and what it is counted in."""
    return Figure("–" if value is None else f"{value:,.{digits}f}{unit}", value)


def percent(share: float) -> Figure:
    """A share of 1 as whole percents."""
    return Figure(f"{100 * share:.0f}", share)


def plural(count: int, noun: str) -> Figure:
    return Figure(counted(count, noun), count)


def lag(records: int) -> Figure:
    """How much is left to read; none is said in words."""
    return Figure(f"lag {records:,}" if records else "all read", records)


def short(text: str, most: int = 12) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


@pass_context
def metric(context: Context, figure: Figure, name: str, at_ms: int | None = None, **labels: Any) -> str:
    """A number with the metric that says the same; `at_ms`: that said it then."""
    if figure.value is None:
        return figure
    name_metric(context, name, **labels)
    said = selector(name, labels, at_ms)
    return Markup('<data value="{}" title="metric {}">{}</data>').format(
        repr(figure.value), said, str(figure)
    )


@pass_context
def name_metric(context: Context, name: str, **labels: Any) -> str:
    """The selector of a metric, which the page names from now on; for what is drawn and not written."""
    said = selector(name, labels)
    context["named"][said] = True
    return said


def naming(sentence: str, *figures: str) -> Markup:
    """A sentence in which these numbers, each with its metric, stand where they stand in it as text."""
    left = [(str(Markup(each).striptags()), each) for each in figures if isinstance(each, Markup)]
    words = sorted({text for text, _ in left}, key=len, reverse=True)
    if not words:
        return escape(sentence)
    pieces = re.split(rf"(?<![\w,.-])({'|'.join(map(re.escape, words))})(?![\w]|[,.]\d)", sentence)
    for place in range(1, len(pieces), 2):
        found = next((each for each in left if each[0] == pieces[place]), None)
        if found is not None:
            left.remove(found)
            pieces[place] = found[1]
    return Markup("").join(pieces)


def selector(name: str, labels: dict[str, Any], at_ms: int | None = None) -> str:
    """What Prometheus takes: `name{label="value"} @ seconds`."""
    chosen = ",".join(f'{label}="{_quoted(str(value))}"' for label, value in labels.items())
    then = "" if at_ms is None else f" @ {at_ms / 1000:.3f}"
    return f"{name}{{{chosen}}}{then}" if chosen else f"{name}{then}"


def _quoted(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# -- pages -----------------------------------------------------------------------------------------


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
    filters = (moment, clock, duration, age, seconds, size, number, decimals, percent, plural, lag, short)
    made.filters.update({each.__name__: each for each in (*filters, metric, naming)})
    made.globals.update(version=__version__, charts=charts, link=link, measured=name_metric)
    return made


def render(template: str, **values: Any) -> bytes:
    """`named` is filled as the page is written: the metrics it names, in their order."""
    return environment().get_template(template).render(named={}, **values).encode("utf-8", "backslashreplace")


class QueryValues:
    """The parameters of a page by name, to fill its form in again; empty where nothing was said."""

    def __init__(self, ask: Mapping[str, Any]) -> None:
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        return self._ask.get(name, "")


def document_page(template: str, document: bytes, *, ask: Mapping[str, Any], **values: Any) -> bytes:
    """A screen of a document as the reading process gave it."""
    return render(template, doc=msgspec.json.decode(document), ask=QueryValues(ask), **values)


def failure_page(failure: Failure, status: int) -> bytes:
    return render(
        "failure.html", failure=failure, status=status, title="Not shown", nav="", copy=None, api=None
    )


def link(path: str, **ask: Any) -> str:
    """An address with its parameters; those that are None or empty are left out."""
    given = {name.strip("_"): value for name, value in ask.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path
