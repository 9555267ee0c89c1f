"""`tidegate verify`: exit codes, formats, what it calls a failure, topics and folders."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from tidegate.cli.main import run
from tidegate.log.log import Log
from tidegate.testing.batches import Rec, build_batch


@pytest.fixture
def log(tmp_path):
    folder = tmp_path / "log"
    with Log(folder, durability="os") as log:
        log.create_topic("orders", partitions=2, config={"segment.bytes": "4096"})
        with log.writer("orders", batch_records=5) as writer:
            table = pa.table({"key": [b"k%d" % i for i in range(200)], "value": [b"v" * 40] * 200})
            writer.write(table)
    return folder


def foreign(tmp_path, *batches):
    folder = tmp_path / "kafka" / "t-0"
    folder.mkdir(parents=True)
    (folder / "00000000000000000000.log").write_bytes(b"".join(batches))
    (folder / "00000000000000000000.index").write_bytes(b"")
    (folder / "00000000000000000000.timeindex").write_bytes(b"")
    return folder


def sent(offset, sequence):
    return build_batch(
        [Rec(None, b"v", 10)], base_offset=offset, producer_id=1, producer_epoch=0, base_sequence=sequence
    )


def test_a_clean_log_ends_with_zero_by_topic_by_folder_and_as_a_whole(log, capsys):
    for arguments in (["orders", "--log", str(log)], [str(log / "orders-0")], ["--log", str(log)]):
        assert run(["verify", *arguments, "--format", "json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["findings"] == []
    assert report["records"] == 200


def test_damage_ends_with_one_and_names_the_place(log, capsys):
    path = sorted((log / "orders-1").glob("*.log"))[0]
    content = bytearray(path.read_bytes())
    content[80] ^= 1
    path.write_bytes(content)
    assert run(["verify", "orders", "--log", str(log), "--format", "json"]) == 1
    report = json.loads(capsys.readouterr().out)
    corrupt = next(f for f in report["findings"] if f["kind"] == "corrupt")
    assert (corrupt["path"], corrupt["position"], corrupt["offset"]) == (str(path), 0, 0)
    assert corrupt["remedy"]


def test_fail_on_decides_what_counts(tmp_path, capsys):
    folder = foreign(tmp_path, sent(0, 0), sent(1, 1), sent(2, 1))
    assert run(["verify", str(folder), "--format", "json"]) == 0, "duplicates are no failure"
    assert json.loads(capsys.readouterr().out)["counts"] == {"duplicate": 1}
    assert run(["verify", str(folder), "--fail-on", "duplicate,gap", "--format", "json"]) == 1
    gap = foreign(tmp_path / "two", sent(0, 0), sent(1, 5))
    assert run(["verify", str(gap), "--format", "json"]) == 1
    assert run(["verify", str(gap), "--fail-on", "corrupt", "--format", "json"]) == 0
    assert run(["verify", str(gap), "--fail-on", "none", "--format", "json"]) == 0
    capsys.readouterr()
    assert run(["verify", str(gap), "--fail-on", "typo"]) == 2
    assert "missing" in capsys.readouterr().err


def test_the_table_is_for_people_and_lines_for_programs(tmp_path, capsys):
    folder = foreign(tmp_path, sent(0, 0), sent(1, 5))
    assert run(["verify", str(folder), "--format", "table"]) == 1
    shown = capsys.readouterr()
    assert "fault: missing: t-0/00000000000000000000.log position 69 offset 1 producer 1/0" in shown.out
    assert "→ " in shown.out
    assert "checked 100 % of records by producer sequence; all batches by CRC" in shown.out
    assert "1 findings" in shown.err
    assert run(["verify", str(folder), "--format", "jsonl"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["type"] for line in lines] == ["finding", "summary"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--log", "kafka://x:1"], "needs a topic"),
        (["orders", "--log", "kafka://x:1", "--shallow"], "does not show"),
        (["orders", "--spark", "--jobs", "2"], "keep one"),
        (["orders", "--master", "local[1]"], "add --spark"),
        (["no/such/folder"], "not a folder"),
        (
            ["--log", "nowhere"],
            "there is no log at nowhere: give --log URL or set TIDEGATE_LOG, or name a folder",
        ),
        (["nosuchtopic", "--log", "{log}"], "nosuchtopic"),
    ],
)
def test_wrong_calls_end_with_two(arguments, said, log, capsys):
    assert run(["verify", *(argument.format(log=log) for argument in arguments)]) == 2
    assert said in capsys.readouterr().err


def test_a_live_log_can_be_verified_while_it_is_written(log, capsys):
    with Log(log, durability="os") as other, other.writer("orders") as writer:
        writer.write(pa.table({"value": [b"more"] * 10}))
        assert run(["verify", "orders", "--log", str(log), "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["records"] == 210
