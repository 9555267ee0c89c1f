"""`tidegate produce`: lines, JSON lines, JSON, CSV and Parquet into a topic."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tidegate.cli.main import run
from tidegate.log.access.embedded import Log
from tidegate.log.batches.batch import iter_headers


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEGATE_LOG", str(tmp_path / "log"))
    with Log(tmp_path / "log") as log:
        log.create_topic("t")
        log.create_topic("many", 3)
    return tmp_path / "log"


def produce(monkeypatch: pytest.MonkeyPatch, text: str | bytes, *arguments: str) -> int:
    content = text.encode() if isinstance(text, str) else text
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    return run(["produce", *arguments, "--durability", "os"])


def records(path: Path, topic: str = "t") -> list[dict[str, Any]]:
    with Log(path, read_only=True) as log:
        table = log.reader(topic).read_all()
        table = table.set_column(3, "timestamp", table.column("timestamp").cast(pa.int64()))
        return table.to_pylist()


def pairs(path: Path, topic: str = "t") -> list[tuple[bytes | None, bytes | None]]:
    return [(row["key"], row["value"]) for row in records(path, topic)]


def test_lines_are_values(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert produce(monkeypatch, "one\n\nthree\r\nlast without newline", "t") == 0
    assert [value for _, value in pairs(path)] == [b"one", b"", b"three", b"last without newline"]
    told = capsys.readouterr()
    assert told.out == ""
    assert "wrote 4 records to t" in told.err
    assert "0: 0–3" in told.err


def test_lines_with_keys_and_headers_and_nulls(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert produce(monkeypatch, "a:1\nb:2:3\nnone\n:\nc:", "t", "-K", ":", "-Z", "-H", "h=x", "-H", "n") == 0
    assert pairs(path) == [(b"a", b"1"), (b"b", b"2:3"), (None, b"none"), (None, None), (b"c", None)]
    assert records(path)[0]["headers"] == [{"key": "h", "value": b"x"}, {"key": "n", "value": None}]
    assert produce(monkeypatch, "x\n", "t", "-k", "fixed") == 0
    assert pairs(path)[-1] == (b"fixed", b"x")


def test_json_lines_as_the_shell_contract_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        {"key": "k", "value": "wörld", "timestamp": 1000, "partition": 0, "headers": {"h": "x", "n": None}},
        {"value": {"base64": "AAH/"}},
        {"key": None, "value": None},
        {"value": {"id": 7, "tags": ["a", "b"]}},
        {"value": 12.50},
        {"value": True},
        {"value": [1, 2]},
        {"value": 'quo"te\n\u00e9'},
        {"headers": [{"key": "a", "value": "1"}, {"key": "a", "value": {"base64": "AA=="}}]},
        {},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + "\n\n"
    assert produce(monkeypatch, text, "t", "--format", "jsonl") == 0
    stored = records(path)
    assert [row["value"] for row in stored] == [
        "wörld".encode(),
        b"\x00\x01\xff",
        None,
        b'{"id":7,"tags":["a","b"]}',
        b"12.5",
        b"true",
        b"[1,2]",
        'quo"te\né'.encode(),
        None,
        None,
    ]
    assert stored[0]["key"] == b"k"
    assert stored[0]["timestamp"] == 1000
    assert stored[0]["headers"] == [{"key": "h", "value": b"x"}, {"key": "n", "value": None}]
    assert stored[8]["headers"] == [{"key": "a", "value": b"1"}, {"key": "a", "value": b"\x00"}]


def test_partitions_come_from_lines_options_or_keys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert produce(monkeypatch, '{"value": "a", "partition": 2}\n', "many", "--format", "jsonl") == 0
    assert produce(monkeypatch, "b\n", "many", "-p", "1") == 0
    placed = {row["value"]: row["partition"] for row in records(path, "many")}
    assert placed == {b"a": 2, b"b": 1}
    assert produce(monkeypatch, '{"value": "a", "partition": 9}\n', "many", "--format", "jsonl") == 2
    assert (
        produce(monkeypatch, '{"value": "c", "partition": 9}\n', "many", "--format", "jsonl", "--repartition")
        == 0
    )


def test_one_record_a_batch_numbered_by_a_producer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--batch-records", "1", "--producer-id", "7", "--producer-epoch", "2")
    assert produce(monkeypatch, "a\nb\n", "t", *options) == 0
    assert produce(monkeypatch, "c\n", "t", *options) == 0
    content = (path / "t-0" / "00000000000000000000.log").read_bytes()
    headers = [header for _, header in iter_headers(content)]
    assert [(h.count, h.producer_id, h.producer_epoch, h.base_sequence) for h in headers] == [
        (1, 7, 2, 0),
        (1, 7, 2, 1),
        (1, 7, 2, 2),
    ]


def test_a_repeated_producer_is_recognised(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ("t", "-p", "0", "--producer-id", "7", "--first-sequence", "0")
    assert produce(monkeypatch, "a\nb\n", *again) == 0
    assert produce(monkeypatch, "a\nb\n", *again) == 0
    assert "2 duplicates that were there already" in capsys.readouterr().err
    assert len(records(path)) == 2
    assert produce(monkeypatch, "a\n", "t", "--producer-id", "7", "--first-sequence", "0") == 2
    assert produce(monkeypatch, "a\n", "t", "-p", "0", "--producer-id", "7", "--first-sequence", "9") == 2
    assert "OUT_OF_ORDER_SEQUENCE_NUMBER" in capsys.readouterr().err


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_compression(path: Path, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    assert produce(monkeypatch, "a\n" * 100, "t", "-z", codec) == 0
    content = (path / "t-0" / "00000000000000000000.log").read_bytes()
    assert next(iter(iter_headers(content)))[1].codec.label == codec
    assert len(records(path)) == 100


def test_other_formats(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (
        produce(monkeypatch, json.dumps([{"value": "a"}, {"value": {"b": 1}}]), "t", "--format", "json") == 0
    )
    text = 'key,value,timestamp,partition\nk,v,5,0\n,"x,y",,\n'
    assert produce(monkeypatch, text, "t", "--format", "csv") == 0
    table = pa.table({"key": ["p"], "value": [b"\xff"], "timestamp": [9]})
    parquet.write_table(table, tmp_path / "x.parquet")
    assert (
        run(["produce", "t", str(tmp_path / "x.parquet"), "--format", "parquet", "--durability", "os"]) == 0
    )
    assert pairs(path) == [
        (None, b"a"),
        (None, b'{"b":1}'),
        (b"k", b"v"),
        (None, b"x,y"),
        (b"p", b"\xff"),
    ]
    assert records(path)[2]["timestamp"] == 5


def test_several_files(path: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name}1\n{name}2\n")
    assert run(["produce", "t", str(tmp_path / "a"), str(tmp_path / "b"), "--durability", "os"]) == 0
    assert [value for _, value in pairs(path)] == [b"a1", b"a2", b"b1", b"b2"]


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        ('{"value": 1}\n{"vlaue": 1}\n', ["--format", "jsonl"], "line 2: Object contains unknown field"),
        ('{"value": 1}\n\n{"value": \n', ["--format", "jsonl"], "line 3"),
        ('{"value": NaN}', ["--format", "jsonl"], "line 1"),
        (b'{"value": "\xff"}', ["--format", "jsonl"], "line 1: not UTF-8"),
        ('{"value": "\\ud800"}', ["--format", "jsonl"], "line 1"),
        ("[1]", ["--format", "jsonl"], "line 1: Expected `object`"),
        ('{"timestamp": 1.5}', ["--format", "jsonl"], "line 1"),
        ('{"timestamp": "yesterday"}', ["--format", "jsonl"], "is not a moment"),
        ('{"timestamp": -5}', ["--format", "jsonl"], "before 1970"),
        ('{"partition": -1}', ["--format", "jsonl"], "line 1"),
        ('{"headers": {"a": 1}, "headers2": 3}', ["--format", "jsonl"], "headers2"),
        ('{"headers": 3}', ["--format", "jsonl"], "an object or a list"),
        ('{"value": {"base64": "!!"}}', ["--format", "jsonl"], "bad base64"),
        ("x" * 3000 + "\n", ["--max-line-bytes", "2KiB"], "longer than 2048"),
        ('{"value": "' + "x" * 3000 + '"}\n', ["--format", "jsonl", "--max-line-bytes", "2KiB"], "line 1"),
        ('{"not": "an array"}', ["--format", "json"], "not a JSON array"),
        ("a,b\n1,2\n", ["--format", "csv"], "expected some of key, value"),
        ("not parquet", ["--format", "parquet"], "not a Parquet file"),
        ("x\n", ["-X", "acks=all"], "is a folder"),
        ("x\n", ["-H", "=x"], "NAME=VALUE"),
    ],
)
def test_bad_input_is_named_by_its_line_and_nothing_of_it_is_written(
    text: str | bytes,
    arguments: list[str],
    says: str,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert produce(monkeypatch, text, "t", *arguments) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert says in errors[0]
    assert records(path) == []


@pytest.mark.parametrize("depth", [64, 65, 100_000])
def test_nesting_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    line = '{"value":' + "[" * depth + "]" * depth + "}"
    assert produce(monkeypatch, line, "t", "--format", "jsonl") == (0 if depth <= 64 else 2)
    assert len(records(path)) == (1 if depth <= 64 else 0)


def test_a_missing_topic_is_said_or_made(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert produce(monkeypatch, "x\n", "new") == 2
    assert "tidegate topic create new" in capsys.readouterr().err
    assert produce(monkeypatch, "x\n", "new", "--create-topic") == 0
    assert pairs(path, "new") == [(None, b"x")]


def test_a_topic_somebody_else_writes_is_a_conflict(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Log(path) as log:
        log.partition("t", 0)
        assert produce(monkeypatch, "x\n", "t") == 4
    assert "is being written by" in capsys.readouterr().err


def test_a_live_pipe_is_written_as_it_grows(path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tidegate.cli.main", "produce", "t", "-v"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    ) as child:
        assert child.stdin is not None and child.stderr is not None
        for number in range(3):
            child.stdin.write(f"{number}\n")
            child.stdin.flush()
            assert f"offsets {number}–{number}" in child.stderr.readline()
            assert len(records(path)) == number + 1
        child.stdin.close()
        assert "wrote 3 records" in child.stderr.read()
        assert child.wait(60) == 0
