"""`tidegate topic`: what people type, what they see, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.cli.main import run
from tidegate.log.log import Log


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEGATE_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def printed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_records_below_an_offset_are_deleted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(path, durability="os") as log:
        log.create_topic("orders", 2)
        for number in range(2):
            log.writer("orders").write(pa.table({"value": [b"%d" % n for n in range(10)]}), partition=number)
    call = ["topic", "delete-records", "orders", "--before", "4"]
    assert run([*call, "--dry-run"]) == 0
    assert "would delete the records below offset 4 of orders-0, orders-1" in capsys.readouterr().err
    assert run(call) == 2, "nobody can be asked"
    assert run([*call, "--partition", "1", "--yes"]) == 0
    assert "orders-1 now starts at offset 4" in capsys.readouterr().err
    with Log(path, read_only=True) as log:
        assert log.reader("orders", [0]).read_all().column("offset").to_pylist() == list(range(10))
        assert log.reader("orders", [1]).read_all().column("offset").to_pylist() == list(range(4, 10))
    assert run([*call[:-1], "-1", "--yes"]) == 0
    with Log(path, read_only=True) as log:
        assert log.reader("orders").read_all().num_rows == 0
    capsys.readouterr()
    assert run([*call[:-1], "11", "--yes"]) == 2, "beyond the end"
    assert run([*call, "--partition", "2", "--yes"]) == 2
    assert run([*call, "--log", "kafka://localhost:1", "--yes"]) != 0


def test_create_list_describe_alter_delete(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topic", "create", "orders", "--partitions", "4", "-X", "segment.bytes=16384"]) == 0
    assert "created topic orders with 4 partitions" in capsys.readouterr().err
    assert sorted(folder.name for folder in path.iterdir() if folder.is_dir()) == [
        f"orders-{n}" for n in range(4)
    ]
    assert run(["topic", "list"]) == 0
    assert printed(capsys) == [{"name": "orders", "partitions": 4}]
    assert run(["topic", "describe", "orders"]) == 0
    described = printed(capsys)[0]
    config = {entry["key"]: entry for entry in described["config"]}  # type: ignore[attr-defined]
    assert config["segment.bytes"] == {
        "key": "segment.bytes",
        "value": "16384",
        "source": "DYNAMIC_TOPIC_CONFIG",
        "meaning": "16 KiB",
    }
    assert config["retention.ms"]["source"] == "DEFAULT_CONFIG"
    assert described["partitions"][0] == {  # type: ignore[index]
        "partition": 0,
        "log_start": 0,
        "high_watermark": 0,
        "segments": 0,
        "bytes": 0,
    }
    assert run(["topic", "alter", "orders", "-X", "retention=10m", "--delete-config", "segment.bytes"]) == 0
    told = capsys.readouterr().err
    assert "set retention.ms=600000 (was 604800000)" in told
    assert "set segment.bytes=1073741824 (was 16384)" in told
    assert run(["topic", "alter", "orders", "--partitions", "6"]) == 0
    assert "raised partitions from 4 to 6" in capsys.readouterr().err
    assert run(["topic", "delete", "orders", "--yes"]) == 0
    assert run(["topic", "list"]) == 0
    assert printed(capsys) == []


def test_settings_show_where_they_come_from(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.mkdir()
    (path / "server.properties").write_text("log.retention.hours=2\n")
    assert run(["topic", "create", "orders", "-X", "segment.bytes=32KiB"]) == 0
    capsys.readouterr()
    assert run(["topic", "describe", "orders", "-c", "--overrides", "--format", "table"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["KEY", "VALUE", "SOURCE", "MEANING"],
        ["segment.bytes", "32768", "DYNAMIC_TOPIC_CONFIG", "32", "KiB"],
        ["retention.ms", "7200000", "STATIC_BROKER_CONFIG", "2h"],
    ]


@pytest.mark.parametrize("format", ["table", "json", "jsonl", "csv"])
@pytest.mark.parametrize("command", [["topic", "list"], ["topic", "describe", "orders"]])
def test_every_format_prints(format: str, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run(["topic", "create", "orders"])
    capsys.readouterr()
    assert run([*command, "--format", format]) == 0
    out = capsys.readouterr().out
    assert "orders" in out or "segment.bytes" in out
    if format == "json":
        json.loads(out)


def test_describe_shows_offsets_and_sizes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(path, durability="os") as log:
        log.create_topic("orders", 2, {"segment.bytes": "1KiB"})
        log.writer("orders", batch_records=1).write(pa.table({"value": [b"x" * 100] * 20}), partition=1)
        log.partition("orders", 1).delete_records_before(7)
    assert run(["topic", "describe", "orders", "--partitions-only", "--format", "table"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["PARTITION", "LOG", "START", "HIGH", "WATERMARK", "SEGMENTS", "BYTES"]
    assert lines[1] == ["0", "0", "0", "0", "0"]
    assert lines[2][:3] == ["1", "7", "20"]
    assert int(lines[2][4]) > 1000


def test_a_foreign_folder_is_described_as_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kafka" / "events-0").mkdir(parents=True)
    monkeypatch.setenv("TIDEGATE_LOG", str(tmp_path / "kafka"))
    assert run(["topic", "describe", "events", "--format", "table"]) == 0
    captured = capsys.readouterr()
    assert "ASSUMED" in captured.out
    assert "assumed" in captured.err
    assert run(["topic", "alter", "events", "-X", "retention=1h"]) == 4
    assert run(["topic", "create", "more"]) == 4
    assert list((tmp_path / "kafka").iterdir()) == [tmp_path / "kafka" / "events-0"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["create", "orders"], 4, "exists already"),
        (["create", "../evil"], 2, "not allowed"),
        (["create", "x" * 250], 2, "not allowed"),
        (["create", "new", "-X", "retention.msec=1"], 2, "did you mean retention.ms"),
        (["create", "new", "-X", "segment.bytes=3"], 2, "valid is 14 or more"),
        (["create", "new", "--partitions", "0"], 2, "--partitions"),
        (["create", "new", "--replication-factor", "2"], 2, "kafka://"),
        (["describe", "order"], 2, "did you mean orders"),
        (["alter", "orders"], 2, "nothing to change"),
        (
            ["alter", "orders", "-X", "min.compaction.lag.ms=5", "-X", "max.compaction.lag.ms=4"],
            2,
            "lower the first",
        ),
        (["alter", "orders", "--partitions", "1"], 2, "only get more"),
        (["delete", "nothing", "--yes"], 2, "does not exist"),
        (["delete", "orders"], 2, "--yes"),
        (["list", "--command-property", "a=b"], 2, "is a folder"),
    ],
)
def test_mistakes_are_told_with_the_way_out(
    arguments: list[str], code: int, says: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["topic", "create", "orders"])
    before = (path / "tidegate.topics").read_bytes()
    capsys.readouterr()
    assert run(["topic", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert (path / "tidegate.topics").read_bytes() == before


def test_dry_runs_change_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topic", "create", "orders", "--dry-run"]) == 0
    assert not path.exists()
    run(["topic", "create", "orders"])
    before = (path / "tidegate.topics").read_bytes()
    assert run(["topic", "alter", "orders", "-X", "retention=1h", "--dry-run"]) == 0
    assert run(["topic", "delete", "orders", "--dry-run"]) == 0
    assert run(["topic", "create", "new", "-X", "segment.bytes=1", "--dry-run"]) == 2
    assert run(["topic", "create", "orders", "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "would create" in told
    assert "would set retention.ms=3600000" in told
    assert "would delete topic orders" in told
    assert (path / "tidegate.topics").read_bytes() == before


def test_being_content_with_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topic", "create", "orders", "more", "--partitions", "2"]) == 0
    assert run(["topic", "create", "orders", "--partitions", "5", "--if-not-exists"]) == 0
    assert "exists already" in capsys.readouterr().err
    assert run(["topic", "delete", "nothing", "--if-exists", "--yes"]) == 0


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topic", "create", "orders", "-q"]) == 0
    assert run(["-q", "topic", "create", "more"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_log_that_is_not_there_is_an_error_and_stays_away(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["topic", "list"]) == 2
    assert f"there is no log at {path}" in capsys.readouterr().err
    assert not path.exists()
    path.mkdir()
    assert run(["topic", "list"]) == 0
    assert "no topics in" in capsys.readouterr().err


def test_a_setting_that_does_nothing_here_is_warned_of(tmp_path, capsys):
    log = ["--log", str(tmp_path / "log")]
    assert run(["topic", "create", "orders", "-X", "min.insync.replicas=2", "-X", "retention=1h", *log]) == 0
    told = capsys.readouterr().err
    assert (
        "warning: min.insync.replicas: kept for a broker" in told
        and "retention" not in told.split("created")[0]
    )
    assert run(["topic", "alter", "orders", "-X", "local.retention.ms=5", *log]) == 0
    assert "warning: local.retention.ms: kept for a broker" in capsys.readouterr().err
