"""A page's numbers as a person meets them, and a document's numbers as its schema says them.

`Read` takes what can be read of a page: its text, and the words of `title` and `aria-label`. Commands and records'
contents (`code`, `pre`) are no numbers of the page's own, nor is the foot with its copies.

`leaves` walks a document beside its schema, so that every number comes with what it is (`web/schemas`). What
a number may look like follows from that alone: bytes as a size, a moment as a moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import unescape
from html.parser import HTMLParser
from typing import Any, NamedTuple

from tidegate.durations import format_moment
from tidegate.web import endpoints, pages

SILENT = {"code", "pre", "script", "style", "head", "footer"}
SAID = {"sentence", "waits_for", "evidence", "notes", "faults.message"}
"""Sentences that the page puts together around numbers: those must be fields, too. Any other text stands for itself."""
CONSTANTS = {"CRC-32"}
TOKEN = re.compile(
    r"\d{4,}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:\.\d+)?Z|\d\d:\d\d:\d\d|(?:\d+(?:ms|d|h|m|s)(?![a-z]))+"
    r"|\d[\d,]*(?:\.\d+)? (?:[KMGT]i)?B\b|\d+ (?:percent|%)|\d[\d,]*(?:\.\d+)? s\b|\d(?:[\d,]*\d)?(?:\.\d+)?"
)


class Piece(NamedTuple):
    """Words that stand together; `metric` and `value` where they are a measured number.

    Those `aside` are met by pointing, or by listening to a picture: no element can stand in them.
    """

    text: str
    metric: str = ""
    value: float | None = None
    aside: bool = False


class Read(HTMLParser):
    """All that can be read of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self._page = page
        self._silent: list[str] = []
        self._aside = False
        self._data: tuple[str, float] | None = None
        self.feed(page)
        self.close()

    @property
    def listed(self) -> list[str]:
        """The metrics that the foot of the page lists."""
        (foot,) = re.findall(r"Numbers as metrics.*?<pre>(.*?)</pre>", self._page, re.DOTALL) or [""]
        return unescape(foot).split("\n") if foot else []

    @property
    def measured(self) -> list[Piece]:
        return [each for each in self.pieces if each.metric]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if tag in SILENT:
            self._silent.append(tag)
        if self._silent:
            return
        self._aside = tag == "title"
        if tag == "data":
            self._data = given["title"].removeprefix("metric "), float(given["value"])
            return
        self.pieces += [Piece(given[name], aside=True) for name in ("title", "aria-label") if given.get(name)]

    def handle_endtag(self, tag: str) -> None:
        if self._silent and tag == self._silent[-1]:
            self._silent.pop()
        self._aside = False
        if tag == "data":
            self._data = None

    def handle_data(self, data: str) -> None:
        if not self._silent and data.strip():
            metric, value = self._data or ("", None)
            self.pieces.append(Piece(data.strip(), metric, value, self._aside))


class Leaf(NamedTuple):
    """One value of a document: where it is, and what its schema says it is."""

    path: tuple[str | int, ...]
    value: Any
    metric: str = ""
    kind: str = ""


def leaves(value: Any, schema: Mapping[str, Any], path: tuple[str | int, ...] = ()) -> Iterator[Leaf]:
    """Every value that is no object, and every list (for its length)."""
    schema = _resolved(schema, value)
    if isinstance(value, dict):
        for name, each in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            yield from leaves(each, inner if isinstance(inner, dict) else {}, (*path, name))
        return
    if isinstance(value, list):
        for place, each in enumerate(value):
            yield from leaves(each, schema.get("items", {}), (*path, place))
    yield Leaf(path, value, schema.get("x-metric", ""), schema.get("x-number", ""))


def _resolved(schema: Mapping[str, Any], value: Any) -> Mapping[str, Any]:
    """The schema of a value that is there: references followed, the part of a choice that is not null."""
    while "$ref" in schema or "anyOf" in schema:
        if "$ref" in schema:
            schema = endpoints.openapi_document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        else:
            schema = next(each for each in schema["anyOf"] if (each.get("type") == "null") == (value is None))
    return schema


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def renderings(leaf: Leaf) -> set[str]:
    """What the number may look like on a page, by what it is; of a list, how long it is."""
    value = leaf.value
    if isinstance(value, list):
        return {f"{len(value):,}", str(len(value))}
    if not is_number(value):
        return set()
    if leaf.kind in ("name", "offset", "answer"):
        return {str(value), f"{value:,}"}
    if leaf.kind == "share":
        shown = pages.percent(value)
        return {f"{each} {sign}" for each in (shown, 1, 99) for sign in ("%", "percent")}
    if leaf.kind in ("moment", "age"):
        return _times(value)
    if leaf.kind in ("setting", "detail"):
        return {str(value), f"{value:,}", pages.size(value), pages.duration(value)}
    if leaf.metric.endswith("_bytes"):
        return {pages.size(value)}
    if leaf.metric.endswith("_seconds"):
        return _times(value) if isinstance(value, int) else {pages.seconds(value)}
    return {str(value), pages.number(value), *(pages.decimals(value, digits) for digits in range(3))}


def _times(value: int) -> set[str]:
    return {
        pages.moment(value),
        pages.clock(value),
        pages.duration(value),
        pages.age(value),
        format_moment(value),
    }


def own_words(document: Any, schema: Mapping[str, Any]) -> re.Pattern[str]:
    """Texts of a document that hold digits and stand for themselves: names, keys, reasons, settings."""
    texts = {
        leaf.value
        for leaf in leaves(document, schema)
        if isinstance(leaf.value, str) and not _is_said(leaf.path) and re.search(r"\d", leaf.value)
    }
    names = {leaf.path[-1] for leaf in leaves(document, schema) if isinstance(leaf.path[-1], str)}
    found = sorted((texts | names | CONSTANTS) - {""}, key=len, reverse=True)
    return re.compile(rf"(?<![\w.,])(?:{'|'.join(map(re.escape, found))})(?!\w|[.,]\d)")


def _is_said(path: tuple[str | int, ...]) -> bool:
    names = [each for each in path if isinstance(each, str)]
    return bool(SAID & {*names, ".".join(names)})


def tokens(text: str, words: re.Pattern[str]) -> list[str]:
    """The numbers that are left of a text when its names are taken out."""
    return TOKEN.findall(words.sub("", text))
