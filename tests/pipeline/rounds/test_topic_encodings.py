"""A topic holds records of one encoding: it is recorded with the topic, and another one is refused."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run as cli
from tidegate.pipeline.rounds.ways_out import has_app
from tidegate.storage import open_backend
from tidegate.tables.topic_encoding import TopicEncoding, read_encoding

TEN = 1_767_261_600_000
ORDER = tg.Json(order_id="string", amount="double")


def produce(folder, rows: int = 3) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("orders", 1, if_not_exists=True)
        values = [json.dumps({"order_id": f"o{number}", "amount": 1.5}) for number in range(rows)]
        times = [TEN + number * 1000 for number in range(rows)]
        log.writer("orders").write(pa.table({"key": ["ann"] * rows, "value": values, "timestamp": times}))


def windows(app: tg.App, kind=None, **settings):
    stream = app.stream("orders", value=ORDER).window(tg.Tumbling("1m") if kind is None else kind, **settings)
    return stream.agg(n=tg.count(), revenue=tg.sum("amount"))


def run(folder, define, name: str = "shop") -> None:
    app = tg.App(name, data=folder)
    define(app)
    app.run("local", until="caught_up")


def encoding(folder, topic: str) -> TopicEncoding | None:
    backend = open_backend(folder / "state")
    with tg.Log(folder / "log", read_only=True) as log:
        return read_encoding(log, backend, topic)


FIRST = {
    "json": lambda app: windows(app).to_topic("results"),
    "passed": lambda app: app.stream("orders", value=ORDER).to_topic("results"),
}
OTHERS = {
    "another serde": (
        "json",
        lambda app: app.stream("orders", value=ORDER).window(tg.Tumbling("1m")).count().to_topic("results"),
        "its value was",
    ),
    "another size": ("json", lambda app: windows(app, tg.Tumbling("5m")).to_topic("results"), "its window was"),
    "another kind": ("json", lambda app: windows(app, tg.Session("1m")).to_topic("results"), "its window was"),
    "another emit": ("json", lambda app: windows(app, emit="close").to_topic("results"), "its emit was update and"),
    "another format of keys": (
        "json", lambda app: windows(app).to_topic("results", key_format="topic"), "its key_format was",
    ),
    "plain records": ("json", lambda app: app.stream("orders", value=ORDER).to_topic("results"), "its window was"),
    "another key": (
        "passed", lambda app: app.stream("orders", key=tg.Bytes(), value=ORDER).to_topic("results"), "its key was",
    ),
    "another type of a field": (
        "passed",
        lambda app: app.stream("orders", value=ORDER).select(amount="CAST(amount AS VARCHAR)").to_topic("results"),
        "its value was",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_an_end_that_is_renamed_and_renamed_back_may_not_bring_another_encoding(tmp_path, case) -> None:
    first, other, said = OTHERS[case]
    produce(tmp_path)
    run(tmp_path, FIRST[first])
    run(tmp_path, lambda app: windows(app).to_topic("elsewhere"))
    with tg.Log(tmp_path / "log", read_only=True) as log:
        before = log.reader("results").read_all().to_pylist()
    with pytest.raises(tg.errors.InvalidError, match=said) as caught:
        run(tmp_path, other)
    assert "Send the results to another topic" in str(caught.value)
    with tg.Log(tmp_path / "log", read_only=True) as log:
        assert log.reader("results").read_all().to_pylist() == before
    run(tmp_path, FIRST[first])  # as it was is fine


@pytest.mark.parametrize("case", OTHERS)
def test_another_app_may_not_bring_another_encoding(tmp_path, case) -> None:
    first, other, said = OTHERS[case]
    produce(tmp_path)
    run(tmp_path, FIRST[first])
    with pytest.raises(tg.errors.InvalidError, match=said):
        run(tmp_path, other, name="stranger")
    assert not has_app(open_backend(tmp_path / "state"), "stranger")  # nothing of it is left behind


def test_a_value_that_changes_in_place_is_refused_while_there_are_records_of_before(tmp_path) -> None:
    produce(tmp_path, rows=0)
    text = tg.Json(amount="double")
    run(tmp_path, lambda app: app.stream("orders", value=ORDER).select("amount").to_topic("results"))

    def number(app: tg.App) -> None:
        app.stream("orders", value=ORDER).select("amount").to_topic("results", value=tg.Double())

    run(tmp_path, number)  # the topic is empty
    produce(tmp_path)
    run(tmp_path, number)
    with pytest.raises(tg.errors.InvalidError, match="its value was double and would be"):
        run(
            tmp_path,
            lambda app: app.stream("orders", value=ORDER).select("amount").to_topic("results", value=text),
        )


def test_json_may_have_other_fields_but_each_keeps_its_type_for_good(tmp_path) -> None:
    produce(tmp_path)

    def chosen(**columns: str):
        return lambda app: app.stream("orders", value=ORDER).select(**columns).to_topic("results")

    run(tmp_path, chosen(a="amount", b="order_id"))
    run(tmp_path, chosen(c="amount"))
    assert encoding(tmp_path, "results") == TopicEncoding(
        "string", {"json": [["a", "double"], ["b", "string"], ["c", "double"]]}
    )
    with pytest.raises(tg.errors.InvalidError, match="its value was"):
        run(tmp_path, chosen(b="amount"))


def test_the_record_says_what_readers_need(tmp_path) -> None:
    produce(tmp_path)
    run(tmp_path, lambda app: windows(app).to_topic("results"))
    run(tmp_path, lambda app: windows(app, tg.Session("1m"), emit="close").to_topic("visits"), name="visits")
    found = encoding(tmp_path, "results")
    assert found is not None
    assert (found.window_size_ms, found.is_update_changelog, found.is_sessions) == (60_000, True, False)
    visits = encoding(tmp_path, "visits")
    assert visits is not None
    assert (visits.window_size_ms, visits.is_update_changelog, visits.is_sessions) == (None, False, True)
    assert encoding(tmp_path, "orders") is None


def test_both_remedies_help(tmp_path) -> None:
    produce(tmp_path)
    run(tmp_path, FIRST["json"])
    with pytest.raises(tg.errors.InvalidError):
        run(tmp_path, OTHERS["another size"][1], name="stranger")
    run(tmp_path, lambda app: windows(app, tg.Tumbling("5m")).to_topic("elsewhere"), name="stranger")
    log, state = str(tmp_path / "log"), str(tmp_path / "state")
    assert cli(["topic", "delete", "results", "--log", log, "--yes"]) == 0
    assert cli(["app", "reset", "shop", "--state", state, "--yes"]) == 0
    run(tmp_path, OTHERS["another size"][1])
    found = encoding(tmp_path, "results")
    assert found is not None
    assert found.window_size_ms == 300_000


def test_a_topic_of_an_older_release_is_recorded_when_its_app_goes_on(tmp_path) -> None:
    produce(tmp_path)
    run(tmp_path, FIRST["json"])
    catalog = tmp_path / "log" / "tidegate.topics"
    with tg.Log(tmp_path / "log") as log:
        entry = log.contents.read().topics["results"]
        log.contents.write(
            log.contents.read().with_topic(
                "results", type(entry)(entry.topic_id, entry.partitions, entry.config)
            )
        )
    assert b"encoding" not in catalog.read_bytes()
    run(tmp_path, FIRST["json"])
    assert encoding(tmp_path, "results") is not None
