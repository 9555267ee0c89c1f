"""What things show of themselves in a notebook: escaped, ten rows at most, and nothing read for it."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.integrity import audit_topic
from tidegate.log.log import LOOKED_AT
from tidegate.log.verify.verify import verify
from tidegate.pipeline.reading import result_table
from tidegate.pipeline.reading.result_table import ResultTable
from tidegate.pipeline.rounds.run import Summary

HOSTILE = "<script>alert(1)</script>"
TEN = 1_767_261_600_000


def rows_in(html: str) -> int:
    return len(re.findall(r"<tr><td>(?!<i>)", html))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    with tg.Log(folder / "log") as log:
        log.create_topic("orders", config={"retention.ms": -1})
        with log.writer("orders", integrity=True) as sender:
            sender.write(
                pa.table(
                    {
                        "key": [f"{HOSTILE}{number}" for number in range(30)],
                        "value": [f'{{"note":"{HOSTILE}"}}'] * 30,
                        "timestamp": [TEN + number for number in range(30)],
                    }
                )
            )
    return folder


@pytest.fixture(scope="module")
def app(place: Path) -> tg.App:
    app = tg.App("shop", data=place)
    stream = app.stream("orders", value=tg.Json(note="string"))
    stream.window(tg.Tumbling("1m", retention="1d")).agg(notes=tg.last("note")).to_table("notes")
    return app


@pytest.fixture(scope="module")
def summary(app: tg.App) -> Summary:
    return app.run("local", until="caught_up")


def test_a_log_and_a_topic_tell_offsets_and_settings(place: Path) -> None:
    with tg.Log(place / "log", read_only=True) as log:
        shown = log._repr_html_()
        assert (
            "<td>orders</td><td>1</td><td>32</td>" in shown
        )  # with the start and the end of the sender's chain
        described = log.describe("orders")._repr_html_()
    assert described.index("DYNAMIC_TOPIC_CONFIG") < described.index("DEFAULT_CONFIG")
    assert rows_in(described) == 10 and "more settings" in described


def test_a_log_looks_at_no_more_than_some_partitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tg.Log(tmp_path, durability="os") as log:
        log.create_topic("a-wide", LOOKED_AT + 1)
        for number in range(12):
            log.create_topic(f"topic-{number:02}")
        looked: list[str] = []
        ours = log.partition_rows
        monkeypatch.setattr(log, "partition_rows", lambda topic: (looked.append(topic), ours(topic))[1])
        shown = log._repr_html_()
    assert looked == [] and rows_in(shown) == 10 and "… 3 more topics" in shown


def test_a_topic_that_goes_meanwhile_does_not_fail_the_display(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_topic: str) -> None:
        raise FileNotFoundError("it is gone")

    with tg.Log(place / "log", read_only=True) as log:
        monkeypatch.setattr(log, "partition_rows", gone)
        assert "it is gone" in log._repr_html_()


def test_reports_tell_what_they_prove(place: Path) -> None:
    with tg.Log(place / "log", read_only=True) as log:
        audit = audit_topic(log, "orders")._repr_html_()
    assert "100 % of records carry integrity metadata" in audit and rows_in(audit) == 1
    report = verify("orders", log=place / "log")._repr_html_()
    assert "all batches by CRC" in report and "faults: 0" in report


def test_a_run_tells_how_far_it_is(summary: Summary) -> None:
    shown = summary._repr_html_()
    assert "caught up" in shown and "records: 32" in shown and "2026-01-01T10:00:00.029Z" in shown


def test_rows_are_escaped_and_few(app: tg.App, summary: Summary, capsys: pytest.CaptureFixture[str]) -> None:
    with app.open_table("notes") as table:
        for shown in (table._repr_html_(), table.all()._repr_html_()):
            assert "<script>" not in shown and "&lt;script&gt;" in shown
            assert rows_in(shown) == 10 and "… 20 more rows" in shown
        table.show()
    assert "… 20 more rows" in capsys.readouterr().out


def test_a_large_table_is_not_read_for_display(
    app: tg.App, summary: Summary, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(result_table, "_SMALL_BYTES", 0)
    monkeypatch.setattr(ResultTable, "fetch_all", lambda *_: pytest.fail("it was read"))
    with app.open_table("notes") as table:
        shown = table._repr_html_()
        assert rows_in(shown) == 0 and "notes" in shown and "fetch(key)" in shown
        table.show()
    assert "fetch(key)" in capsys.readouterr().out
