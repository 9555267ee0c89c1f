"""Every number on a page is also a field of its document and, where it is measured, a metric of the same value.

Three ways to be wrong, and a test for each: a number that is only on the page; a measured one that does not say its
metric, or says another than its field; a metric that is not exported, or not with that value.
"""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from page_numbers import Leaf, Piece, Read, is_number, leaves, own_words, renderings, tokens
from prometheus_client.parser import text_string_to_metric_families
from test_copies import ASKS, WORDS

from tidegate.web import endpoints, pages
from tidegate.web.endpoints import ADDRESSED, Endpoint
from tidegate.web.schemas import KINDS

ROOT = Path(__file__).parents[2]
SCREENS = {each.name: each for each in ADDRESSED if each.page}
STANDS = [
    *((name, {}, {}) for name in SCREENS),
    ("topic", {}, {"partition": "1"}), ("topic", {"topic": "prices"}, {}), ("topic", {"topic": "hostile"}, {}),
    ("integrity", {"topic": "prices"}, {}), ("integrity", {"topic": "hostile"}, {}),
    ("integrity", {"topic": "catalogue"}, {}), ("integrity", {"topic": "orders-per-minute"}, {}),
    ("records", {"topic": "hostile"}, {}), ("records", {"topic": "orders-per-minute"}, {}),
    ("table", {"table": "counts"}, {}), ("table", {}, {"as_of": "4"}), ("explain", {"table": "counts"}, {}),
    ("diff", {}, {"key": ""}), ("app", {"app": "strict"}, {}),
]  # fmt: skip
IDS = ["-".join(filter(None, [name, *words.values(), *ask.values()])) for name, words, ask in STANDS]


def schema_of(asked: Endpoint) -> dict[str, Any]:
    assert asked.answer is not None
    return {"$ref": f"#/components/schemas/{asked.answer.__name__}"}


Stand = tuple[str, dict[str, str], dict[str, str]]


def met(client: httpx.Client, stand: Stand) -> tuple[Endpoint, Any, Read]:
    """A screen, its document, and what can be read of the page that is made of it."""
    name, words, ask = stand
    asked, params = SCREENS[name], ASKS.get(name, {}) | ask
    found = client.get(f"/api{asked.path.format(**WORDS | words)}", params=params)
    assert found.status_code == 200, found.text
    return asked, found.json(), Read(drawn(asked, stand, found.content))


def drawn(asked: Endpoint, stand: Stand, document: bytes) -> str:
    """A document as the server would show it."""
    said = {name: value for name, value in (ASKS.get(stand[0], {}) | stand[2]).items() if value}
    path = str(asked.page).format(**WORDS | stand[1])
    page = pages.document_page(
        str(asked.screen), document, ask=said, path=path, nav=asked.tag, api="/", can_leave=False
    )
    return page.decode()


@pytest.mark.parametrize("stand", STANDS, ids=IDS)
def test_the_server_shows_nothing_but_the_document(client: httpx.Client, stand: Stand) -> None:
    """So what is said below of pages that are made of a document is true of the server's; time goes on meanwhile."""
    asked, _, read = met(client, stand)
    params = ASKS.get(stand[0], {}) | stand[2]
    page = client.get(
        str(asked.page).format(**WORDS | stand[1]), params=params, headers={"accept": "text/html"}
    )
    moving = re.compile(r"\d{4}-\d\d-\d\d[ T][\d:.]+Z|(?:\d+(?:ms|d|h|m|s))+")
    assert [moving.sub("", each.text) for each in Read(page.text).pieces] == [
        moving.sub("", each.text) for each in read.pieces
    ]


def exported(client: httpx.Client) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The metrics of the server as a scraper reads them: name → series with their labels."""
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain"), answer.text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def chosen(selector: str) -> tuple[str, dict[str, str], float | None]:
    """The name, the labels and the moment of `name{label="value"} @ seconds`."""
    match = re.fullmatch(r"(\w+)(?:\{(.*)\})?(?: @ ([\d.]+))?", selector)
    assert match is not None, selector
    labels = {
        name: value.replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\")
        for name, value in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or "")
    }
    return match[1], labels, None if match[3] is None else float(match[3])


# -- a number that is only on the page ---------------------------------------------------------------


def strangers(read: Read, document: Any, schema: dict[str, Any]) -> list[str]:
    """Numbers of a page that no field of the document, and the length of none of its lists, looks like."""
    known = {shown for leaf in leaves(document, schema) for shown in renderings(leaf)}
    words = own_words(document, schema)
    return [
        f"{token} in {piece.text!r}"
        for piece in read.pieces
        for token in tokens(piece.text, words)
        if token not in known
    ]


@pytest.mark.parametrize("stand", STANDS, ids=IDS)
def test_every_number_on_a_page_is_in_its_document(client: httpx.Client, stand: Any) -> None:
    asked, document, read = met(client, stand)
    assert strangers(read, document, schema_of(asked)) == []


def test_a_number_that_is_only_on_the_page_is_found(client: httpx.Client) -> None:
    asked, document, read = met(client, ("topics", {}, {}))
    for added in ("3,141 of them", "9.7 MiB", "2031-01-01 00:00:00Z", "17d4h", "23 percent"):
        read.pieces.append(Piece(added))
        assert len(strangers(read, document, schema_of(asked))) == 1, added
        read.pieces.pop()


# -- a measured number that does not say so ----------------------------------------------------------


def traced(document: Any, schema: dict[str, Any]) -> dict[float, Leaf]:
    """Give every measured number of a document one that nothing else has; by that, the field it came from."""
    found: dict[float, Leaf] = {}
    for leaf in list(leaves(document, schema)):
        if not leaf.metric or not is_number(leaf.value):
            continue
        place = len(found)
        value: float
        if leaf.metric.endswith("_bytes"):
            value = (2000 + place) * (1 << 20) // 10  # unique as a size, too
        elif leaf.metric.endswith("_seconds") and isinstance(leaf.value, int):
            value = 1_900_000_000_000 + place * 1_000_000
        else:
            value = 700_000 + place * 11 + (0.25 if isinstance(leaf.value, float) else 0)
        target = document
        for step in leaf.path[:-1]:
            target = target[step]
        target[leaf.path[-1]] = value
        base = value / 1000 if str(leaf.path[-1]).endswith("_ms") else value
        found[base] = leaf._replace(value=value)
    return found


def untold(read: Read, found: dict[float, Leaf], words: re.Pattern[str]) -> list[str]:
    """Measured numbers that stand on a page without a metric, or with another one than their field's."""
    looks = {shown: leaf for leaf in found.values() for shown in renderings(leaf)}
    wrong = []
    for piece in read.pieces:
        if piece.metric:
            leaf = found.get(piece.value or 0.0)
            if leaf is None or chosen(piece.metric)[0] != leaf.metric:
                wrong.append(f"{piece} is {leaf}")
        elif not piece.aside:
            wrong += [f"{looks[t].path} in {piece.text!r}" for t in tokens(piece.text, words) if t in looks]
    return wrong


@pytest.mark.parametrize("stand", STANDS, ids=IDS)
def test_every_measured_number_names_the_metric_of_its_field(client: httpx.Client, stand: Any) -> None:
    """The real document with every measured number changed to one of its own: so each is known wherever it shows up."""
    asked, document, _ = met(client, stand)
    schema = schema_of(asked)
    shown = 0
    for variant in variants(document):
        found = traced(variant, schema)
        read = Read(drawn(asked, stand, msgspec.json.encode(variant)))
        assert untold(read, found, own_words(variant, schema)) == []
        shown += len(read.measured)
    assert bool(shown) == (stand[0] not in ("records", "record", "diff", "explain"))


def variants(document: Any) -> list[Any]:
    """A document as it is, while an audit is under way, and as it would be of a cluster, which shows no bytes."""
    found = [document]
    if "faults_total" in document:
        found.append(deepcopy(document) | {"state": "running"})
    if "segments_total" in document:
        rows = [{**row, "bytes": None, "segments": None} for row in document["partitions"]]
        found.append(
            deepcopy(document) | {"bytes": None, "partitions": rows, "not_shown": "a broker does not"}
        )
    if "topics_total" in document:
        found.append(deepcopy(document) | {"bytes": None})
    return found


def test_a_measured_number_that_does_not_say_so_is_found(client: httpx.Client) -> None:
    asked, document, _ = met(client, ("topics", {}, {}))
    schema = schema_of(asked)
    found = traced(document, schema)
    page = drawn(asked, ("topics", {}, {}), msgspec.json.encode(document))
    words = own_words(document, schema)
    assert untold(Read(page), found, words) == []
    assert len(untold(Read(page.replace("<data ", "<span ", 1)), found, words)) == 1
    assert (
        len(
            untold(
                Read(page.replace("metric tidegate_log_bytes", "metric tidegate_log_records", 1)),
                found,
                words,
            )
        )
        == 1
    )


@pytest.mark.parametrize("stand", STANDS, ids=IDS)
def test_a_measured_number_in_a_sentence_says_its_metric_or_repeats_one_that_does(
    client: httpx.Client, stand: Stand
) -> None:
    asked, document, read = met(client, stand)
    schema = schema_of(asked)
    words = own_words(document, schema)
    all_leaves = list(leaves(document, schema))
    plain = {shown for leaf in all_leaves if not leaf.metric for shown in renderings(leaf)}
    told = {token for piece in read.measured for token in tokens(piece.text, words)}
    for piece in read.pieces:
        if not piece.metric and not piece.aside:
            assert {*tokens(piece.text, words)} <= plain | told, piece


def test_every_number_of_every_document_says_what_it_is() -> None:
    wrong = []

    def walk(schema: Any, path: str) -> None:
        if isinstance(schema, list):
            for each in schema:
                walk(each, path)
        elif isinstance(schema, dict):
            if schema.get("type") in ("integer", "number"):
                said = [schema.get("x-metric"), schema.get("x-number")]
                if said.count(None) != 1 or said[1] not in {None, *KINDS}:
                    wrong.append(path)
            for name, each in schema.items():
                walk(each, f"{path}.{name}")

    walk(endpoints.openapi_document()["components"]["schemas"], "")
    assert wrong == []


# -- a metric that is not there ----------------------------------------------------------------------


@pytest.mark.parametrize("stand", STANDS, ids=IDS)
def test_every_metric_on_a_page_is_exported_with_that_value(client: httpx.Client, stand: Any) -> None:
    """Series that a selector chooses make the number together; of one that is past, the newest is compared."""
    _, document, read = met(client, stand)
    series = exported(client)
    reference = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    newest = document.get("committed_ms", 0) / 1000
    compared = 0
    for piece in read.measured:
        name, labels, at = chosen(piece.metric)
        assert f"`{name}`" in reference and name in series, name
        assert set(labels) <= set(series[name][0][0]), piece
        if at is not None and (at != newest or stand[2].get("as_of")):
            continue
        values = [value for has, value in series[name] if labels.items() <= has.items()]
        assert sum(values) == pytest.approx(piece.value, rel=1e-9), piece
        compared += 1
    assert bool(compared) == bool(read.measured) or stand[2].get("as_of")


@pytest.mark.parametrize("stand", STANDS, ids=IDS)
def test_the_foot_of_a_page_lists_its_metrics_and_each_is_there(client: httpx.Client, stand: Stand) -> None:
    """For whoever cannot point at a number."""
    _, _, read = met(client, stand)
    series = exported(client)
    assert {each.metric.partition(" @ ")[0] for each in read.measured} <= {*read.listed}
    for selector in read.listed:
        name, labels, _ = chosen(selector)
        assert [value for has, value in series[name] if labels.items() <= has.items()], selector


def test_every_chart_of_an_app_names_what_it_draws(client: httpx.Client) -> None:
    page = client.get("/apps/shop", headers={"accept": "text/html"}).text
    captions = re.findall(r"<figcaption(?: title=\"metric (.*?)\")?>", page)
    assert len(captions) == 5 and all(captions)
    listed, series = Read(page).listed, exported(client)
    for selector in ", ".join(captions).replace("&#34;", '"').split(", "):
        assert selector in listed and chosen(selector)[0] in series


def test_an_app_that_found_faults_is_not_marked_as_good(client: httpx.Client) -> None:
    page = client.get("/apps/shop", headers={"accept": "text/html"}).text
    assert (
        '<p class="sentence bad">' in page and '<p class="sentence good">' not in page
    )  # nobody acknowledged them
    assert 'href="/apps/shop/faults"' in page and "corrupt ones are not in its results" in page
    assert (
        client.get("/api/apps/shop").json()["faults"] == 3
    )  # a gap, a flipped bit, a clock that was a day ahead


def test_every_metric_of_a_field_is_exported(client: httpx.Client) -> None:
    """Of all documents, whether a page shows the field or not."""
    client.get("/api/topics/prices/integrity", params={"wait_ms": 20_000})
    client.get("/api/tables/shop:per-minute")
    named = set(re.findall(r"'x-metric': '(\w+)'", str(endpoints.openapi_document())))
    helped = set(re.findall(r"^# HELP (\w+) ", client.get("/metrics").text, re.MULTILINE))
    assert len(named) > 25 and named <= helped | {f"{each}_total" for each in helped}
