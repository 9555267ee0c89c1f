"""Topics written with `integrity=True`: every way to read one leaves Tidegate's own records out, unless asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

import tidegate as tg
from tidegate.cli.main import run
from tidegate.integrity import read_columns
from tidegate.web.records import RecordsQuestion, record, records
from tidegate.web.site import Site


def written(folder: Path) -> None:
    """Two senders, one after the other: start, data, end, start, data, end."""
    with tg.Log(folder) as log:
        log.create_topic("orders", 1)
        for number in range(2):
            with log.writer("orders", integrity=True) as sender:
                sender.write(pa.table({"key": ["a", "b"], "value": [f"{number}", f"{number}"]}))


def consumed(capsys: Any, folder: Path, *more: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["consume", "orders", "-e", "-J", "--log", str(folder), *more]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_readers_give_the_data_and_positions_count_everything(tmp_path: Path) -> None:
    written(tmp_path)
    with tg.Log(tmp_path, read_only=True) as log:
        with log.reader("orders") as reader:
            data = reader.read_all()
            assert reader.positions() == {0: 8} and reader.lag() == 0
        assert data.column("value").to_pylist() == [b"0", b"0", b"1", b"1"]
        assert data.column("offset").to_pylist() == [1, 2, 5, 6]
        everything = log.reader("orders", control_records=True).read_all()
        assert read_columns(everything.column("headers").combine_chunks()).is_control.sum() == 4
        with log.reader("orders", start={0: 7}) as behind:
            assert behind.poll() is None and behind.positions() == {0: 8}, "an end of chain alone is nothing"
        with log.reader("orders", max_bytes=1) as small:  # a batch at a time
            assert sum(batch.num_rows for batch in small) == 4


def test_consume_gives_the_data_and_the_rest_where_asked(tmp_path: Path, capsys: Any) -> None:
    written(tmp_path)
    assert [each["offset"] for each in consumed(capsys, tmp_path)] == [1, 2, 5, 6]
    assert len(consumed(capsys, tmp_path, "--control-records")) == 8
    assert [each["offset"] for each in consumed(capsys, tmp_path, "-n", "3")] == [1, 2, 5]


def test_the_page_shows_the_data_and_the_rest_where_asked(tmp_path: Path) -> None:
    written(tmp_path)
    site = Site(tmp_path, tmp_path / "state")
    assert [each.offset for each in records(site, "orders", RecordsQuestion()).records] == [6, 5, 2, 1]
    assert len(records(site, "orders", RecordsQuestion(control_records=True)).records) == 8
    shown = record(site, "orders", 0, 0)
    assert shown.record.stamp is not None and shown.record.stamp.is_control
    assert "--control-records" in str(shown.by_hand)
