"""`tidegate verify` and integrity metadata: the second pass in its exit code, table and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.cli.main import run
from tidegate.log.log import Log

COLUMNS = ("key", "value", "headers", "timestamp")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log with a clean topic `orders`, and copies: `holed`, `changed`, `repeated`; `plain` has no metadata."""
    folder = tmp_path / "log"
    with Log(folder, durability="os") as log:
        for topic in ("orders", "holed", "changed", "repeated", "plain"):
            log.create_topic(topic, 1)
        rows = pa.table({"key": [b"k%d" % n for n in range(50)], "value": [b"v%d" % n for n in range(50)]})
        with log.writer("orders", integrity=True) as sender:
            sender.write(rows)
        with log.writer("plain") as writer:
            writer.write(rows)
        sent = log.reader("orders", control_records=True).read_all().select(COLUMNS)
        changed = sent.to_pylist()
        changed[7]["value"] = b"other"
        copies = {
            "holed": pa.concat_tables([sent[:9], sent[10:]]),
            "changed": pa.Table.from_pylist(changed, sent.schema),
            "repeated": pa.concat_tables([sent[:9], sent[8:]]),
        }
        for topic, copy in copies.items():
            with log.writer(topic) as writer:
                writer.write(copy)
    return folder


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["verify", *arguments, "--format", "json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("topic", "code", "kind", "offset"),
    [
        ("orders", 0, None, None),
        ("holed", 1, "missing", 9),
        ("changed", 1, "corrupt", 7),
        ("repeated", 0, "duplicate", 9),
        ("plain", 0, None, None),
    ],
)
def test_the_exit_code_follows_the_metadata(
    topic: str, code: int, kind: str | None, offset: int | None, folder: Path, capsys: Any
) -> None:
    ended, report = verified(capsys, topic, "--log", str(folder))
    assert ended == code
    assert [(found["kind"], found["offset"]) for found in report["findings"]][:1] == (
        [(kind, offset)] if kind else []
    )
    assert (report["faults"] > 0) == (code == 1)


def test_json_has_the_share_the_producers_and_the_first_offsets(folder: Path, capsys: Any) -> None:
    _, report = verified(capsys, "changed", "--log", str(folder))
    integrity = report["integrity"]
    assert (integrity["records"], integrity["records_with_metadata"], integrity["share"]) == (52, 52, 1.0)
    assert integrity["evidence"] == "100 % of records carry integrity metadata; all checked"
    (partition,) = integrity["partitions"]
    (producer,) = partition["producers"]
    assert producer["first_offsets"]["corrupt"][0] == 7
    assert producer["verdicts"]["corrupt"] == integrity["verdicts"]["corrupt"]
    assert report["counts"]["corrupt"] == integrity["verdicts"]["corrupt"]


def test_fail_on_honours_what_the_metadata_says(folder: Path, capsys: Any) -> None:
    for topic, kinds, code in (
        ("repeated", "duplicate", 1),
        ("holed", "corrupt", 0),
        ("holed", "gap", 1),
        ("changed", "none", 0),
        ("changed", "unregistered,after-end,unsupported", 0),
    ):
        assert verified(capsys, topic, "--log", str(folder), "--fail-on", kinds)[0] == code, (topic, kinds)


def test_the_table_shows_producers_only_where_there_are_some(folder: Path, capsys: Any) -> None:
    assert run(["verify", "holed", "--log", str(folder), "--format", "table"]) == 1
    shown = capsys.readouterr().out
    assert "fault: missing: holed-0/00000000000000000000.log offset 9 producer " in shown
    assert "100 % of records carry integrity metadata; all checked" in shown
    assert "first_fault" in shown or "first fault" in shown.lower()
    assert run(["verify", "plain", "--log", str(folder), "--format", "table"]) == 0
    assert "integrity" not in capsys.readouterr().out


def test_a_shallow_run_reads_no_metadata_and_says_null(folder: Path, capsys: Any) -> None:
    code, report = verified(capsys, "changed", "--log", str(folder), "--shallow")
    assert (code, report["integrity"]) == (0, None)


def test_a_partition_folder_and_a_backup_under_another_name(
    folder: Path, capsys: Any, tmp_path: Path
) -> None:
    code, report = verified(capsys, str(folder / "changed-0"))
    assert (code, report["integrity"]["records"]) == (1, 52)
    (folder / "changed-0").rename(tmp_path / "backup")
    code, report = verified(capsys, str(tmp_path / "backup"))
    assert report["integrity"]["partitions"][0]["unread"]
    assert "not read" in report["integrity"]["evidence"]


def test_damage_below_the_metadata_is_told_once_by_each_evidence(folder: Path, capsys: Any) -> None:
    path = next((folder / "orders-0").glob("*.log"))
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    code, report = verified(capsys, "orders", "--log", str(folder))
    assert code == 1
    assert report["integrity"]["partitions"][0]["skipped_damage"]


def test_a_changed_header_shows_at_its_chains_end_and_the_advice_says_so(folder: Path, capsys: Any) -> None:
    copy = str(folder.with_name("copy"))
    assert run(["break", "orders", "--log", str(folder), "--into", copy, "--kind", "future-clock"]) == 0
    capsys.readouterr()
    _, told = verified(capsys, "orders", "--log", copy)
    (finding,) = told["findings"]
    assert finding["kind"] == "corrupt"
    assert finding["remedy"].startswith("a record of the chain that ends here, or its header, was changed")
