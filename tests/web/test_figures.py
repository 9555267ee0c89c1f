"""Numbers as text, and what names their metrics: whatever a topic is called, it stays text and can be asked for."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup
from prometheus_client.parser import text_string_to_metric_families

from tidegate.metrics import Metrics, prometheus_text
from tidegate.web import pages


def shown(source: str, **values: object) -> str:
    return pages.environment().from_string(source).render(named={}, **values)


def test_a_number_keeps_its_value_in_base_units() -> None:
    assert (pages.size(10_599_738), pages.size(10_599_738).value) == ("10.1 MiB", 10_599_738)
    assert (pages.moment(1500), pages.moment(1500).value) == ("1970-01-01 00:00:01Z", 1.5)
    assert (pages.duration(93_784_000), pages.duration(93_784_000).value) == ("1d2h", 93_784)
    assert (pages.lag(0), pages.lag(7)) == ("all read", "lag 7")
    assert (pages.age(3_923), pages.age(3_923).value, pages.age(41)) == ("3s", 3.923, "41ms")
    assert [pages.seconds(each) for each in (0.0414, 3.94, None)] == ["0.041 s", "3.9 s", "–"]
    assert (pages.percent(0.514), pages.decimals(1.0249, 2)) == ("51", "1.02")


def test_where_there_is_no_number_there_is_no_metric() -> None:
    for written in ("none|number", "none|size", "none|moment", "none|decimals(1)"):
        assert "data" not in shown("{{ " + written + '|metric("tidegate_x") }}')


@given(st.text(max_size=40))
def test_a_label_stays_text_and_names_the_series_it_means(name: str) -> None:
    """The attribute gives back what was put in, and its label is the one that a scraper reads for that topic."""
    page = shown('{{ 7|number|metric("tidegate_log_bytes", topic=name) }}', name=name)
    read: list[str] = []

    class Titles(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            read.append(str(dict(attributes)["title"]))

    Titles().feed(page)
    assert re.sub(r"<[^<>]*>", "", page) == "7" and len(read) == 1
    metrics = Metrics()
    metrics.gauge("tidegate_log_bytes", "x", ("topic",)).set(7, topic=name)
    text, _ = prometheus_text(metrics)
    (line,) = [each for each in text.decode().split("\n") if each.startswith("tidegate_")]
    if name.isprintable():  # an attribute turns other line ends and NUL into what HTML has for them
        assert read[0].removeprefix("metric ") == line.rpartition(" ")[0]
        families = text_string_to_metric_families(text.decode())
        assert [sample.labels for each in families for sample in each.samples] == [{"topic": name}]


@given(st.text(max_size=60), st.lists(st.integers(0, 2000), max_size=4))
def test_a_sentence_reads_the_same_when_its_numbers_have_metrics(words: str, numbers: list[int]) -> None:
    sentence = " ".join([words, *(f"{each:,} of them" for each in numbers)])
    pieces = [Markup(f'<data value="{each}">{each:,}</data>') for each in numbers]
    made = pages.naming(sentence, *pieces)
    assert re.sub(r'</?data(?: value="\d+")?>', "", made) == Markup.escape(sentence)


@pytest.mark.parametrize(
    ("sentence", "marked"),
    [
        ("3 faults in 1,003", "[3 faults] in 1,003"),
        ("33 faults", "33 faults"),
        ("orders-3 faults", "orders-3 faults"),
        ("3 faults, 3 faults", "[3 faults], 3 faults"),
        ("<b>3 faults</b>", "&lt;b&gt;[3 faults]&lt;/b&gt;"),
    ],
)
def test_a_number_is_named_where_it_stands_alone_and_once(sentence: str, marked: str) -> None:
    made = pages.naming(sentence, Markup("<data>3 faults</data>"), pages.Figure("–", None))
    assert made.replace("<data>", "[").replace("</data>", "]") == marked
