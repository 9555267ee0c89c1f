"""`tidegate produce`: lines, JSON lines, JSON, CSV and Parquet into a topic."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tidegate.cli import records as produce_module
from tidegate.cli.main import run
from tidegate.cli.output import Progress
from tidegate.clock import ManualClock
from tidegate.errors import InvalidError
from tidegate.log.format.batch import iter_headers
from tidegate.log.log import Log


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


def test_the_timestamp_zero_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Kafka's client takes it for "now" (`tests/interop/test_cli_live.py`)."""
    assert produce(monkeypatch, '{"value":"v","timestamp":0}', "t", "--format", "jsonl") == 0
    assert [row["timestamp"] for row in records(path)] == [0]


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
        ('{"value": 1}', ["--format", "jsonl", "-k", "ann"], "--key: only for --format lines"),
        ("value\n1\n", ["--format", "csv", "-K", ":", "-Z", "-H", "a=b"], "--null-empty, --header: only for"),
        ("x\n{}", ["--format", "jsonl"], "standard input: line 1"),
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


@pytest.mark.parametrize("topic", ["t", "many"])
def test_integrity_numbers_and_checks_what_is_written(
    path: Path, topic: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert produce(monkeypatch, "a:1\nb:2\nc:3\n", topic, "-K", ":", "--integrity") == 0
    assert f"wrote 3 records to {topic}" in capsys.readouterr().err, "its own records are not counted"
    assert sorted(pairs(path, topic)) == [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")]
    assert run(["verify", topic, "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)["integrity"]
    assert report["share"] == 1.0 and set(report["verdicts"]) == {"ok"}
    with Log(path, read_only=True) as log:
        whole = log.reader(topic, control_records=True).read_all()
    said = [
        json.loads(header["value"])
        for headers in whole.column("headers").to_pylist()
        for header in headers
        if header["key"] == "divo"
    ]
    assert said and all(
        each == {"host": socket.gethostname(), "pid": os.getpid(), "app": "tidegate-produce"} for each in said
    )


def test_integrity_is_not_an_idempotent_producers_numbering(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert produce(monkeypatch, "a\n", "t", "--integrity", "--producer-id", "7") == 2
    assert "leave --producer-id out" in capsys.readouterr().err


def test_an_interrupted_numbered_write_certifies_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = '{"value": "one"}\n' * 10 + "{broken\n"
    assert produce(monkeypatch, text, "t", "--format", "jsonl", "--integrity") == 2
    capsys.readouterr()
    assert run(["verify", "t", "--format", "json"]) == 0
    partitions = json.loads(capsys.readouterr().out).get("integrity", {}).get("partitions", [])
    assert all(each["verdicts"].keys() <= {"ok"} for each in partitions)


@pytest.mark.parametrize("format", ["lines", "jsonl", "csv", "parquet"])
def test_progress_over_files_knows_percent_and_time_left(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that were read add up to those of the files, and never go back."""
    files = [tmp_path / f"{number}.in" for number in range(2)]
    for file in files:
        if format == "parquet":
            table = pa.table({"value": [f"{number}" for number in range(5000)]})
            parquet.write_table(table, file, row_group_size=1000)
        elif format == "csv":
            file.write_text("value\n" + "\n".join(str(number) for number in range(5000)))
        else:
            line = '{{"value": "{}"}}\n' if format == "jsonl" else "{}\n"
            file.write_text("".join(line.format(number) for number in range(5000)))
    told: list[tuple[int, int]] = []
    real = produce_module.Progress.advance

    def advance(progress: Any, done: int, **counts: int) -> None:
        real(progress, done, **counts)
        told.append((progress.done, progress.total))

    monkeypatch.setattr(produce_module.Progress, "advance", advance)
    assert run(["produce", "t", "--format", format, *map(str, files), "--durability", "os"]) == 0
    total = sum(file.stat().st_size for file in files)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert all(each == total for _, each in told)
    assert told[0][0] > 0 and told[-1][0] <= total
    if format in ("lines", "jsonl"):
        assert told[-1][0] == total


def test_the_line_and_the_heartbeat_say_percent_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock()
    progress = Progress("writing t", total=1 << 20, unit="bytes", clock=clock)
    clock.advance(10_000)
    progress.advance(1 << 18, records=500)
    beat = json.loads(capsys.readouterr().err)
    assert (beat["percent"], beat["left_ms"], beat["records"]) == (25, 30_000, 500)
    assert progress._line() == "writing t: 256 KiB of 1 MiB (25%), 25.6 KiB/s, 30s left, 500 records"
    assert Progress("writing t", clock=clock)._line() == "writing t: 0, 0/s"


def piped(content: bytes, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`produce` in a process of its own, which could be ended by a signal."""
    command = [sys.executable, "-m", "tidegate.cli.main", "produce", "t", "--durability", "os", *arguments]
    done = subprocess.run(command, input=content, capture_output=True, timeout=300, env={**os.environ})
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def test_a_csv_field_of_four_mebibytes_is_refused_in_one_line_and_taken_when_asked(path: Path) -> None:
    content = b"key,value\na,1\n" + b"".join(b"b,%s\n" % (b"x" * (4 << 20)) for _ in range(3))
    refused = piped(content, "--format", "csv")
    assert refused.returncode == 2, refused.stderr
    (error,) = [line for line in refused.stderr.splitlines() if not line.startswith("wrote ")]
    assert "standard input: the record that begins in line 3 is longer than 1048576 bytes" in error
    assert pairs(path) == [(b"a", b"1")]  # what was in front of it is written, and told
    assert "wrote 1 record to t" in refused.stderr
    with Log(path) as log:
        log.alter_topic("t", {"max.message.bytes": str(8 << 20)})
    taken = piped(content, "--format", "csv", "--max-line-bytes", "8MiB")
    assert taken.returncode == 0, taken.stderr
    assert [len(value or b"") for _, value in pairs(path)] == [1, 1, 4 << 20, 4 << 20, 4 << 20]


def test_csv_values_may_hold_newlines_quotes_and_commas(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a chunk ends inside a quoted field."""
    import csv

    from tidegate.cli import record_formats

    values = ['{"a": "x,y"}', "two\nlines", 'a ""quoted"" word', "", "plain", '5" disk', "end\n"] * 40
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([("key", "value"), *((f"k{number}", value) for number, value in enumerate(values))])
    for chunk in (7, 64, 1 << 20):
        monkeypatch.setattr(record_formats, "_CHUNK_BYTES", chunk)
        assert produce(monkeypatch, text.getvalue(), "t", "--format", "csv") == 0
        assert [value for _, value in pairs(path)][-len(values) :] == [
            each.encode() or None for each in values
        ]


@pytest.mark.parametrize(
    ("format", "content", "said"),
    [
        (
            "jsonl",
            b'{"value":"a","timestamp":99999999999999999999999}\n',
            "line 1: timestamp 99999999999999999999999",
        ),
        ("json", b'[{"value":"a","timestamp":-99999999999999999999999}]', "record 0: timestamp -9999999"),
        ("jsonl", b'{"value":"a"}\n{"value":"' + b"x" * (3 << 20), "standard input: line 2 is longer than"),
        ("jsonl", b'{"value":"a"}\n{"value":"b', "line 2: Input data was truncated"),
        (
            "csv",
            b"key,value,timestamp\na,1,99999999999999999999999\n",
            "invalid value '99999999999999999999999'",
        ),
        (
            "csv",
            b'key,value\na,1\nb,"' + b"x" * (3 << 20),
            "standard input: the record that begins in line 3 is longer than",
        ),
        ("csv", b"key,value\na,\xff\xfe\n", "invalid UTF8"),
        (
            "csv",
            b'key,value\na,1\nb,"2\nc,3\nd,4\n',
            "the record that begins in line 3 has a quote that is not closed",
        ),
        ("csv", b'key,value\na,"1""', "line 2 has a quote that is not closed"),
        ("csv", b"", "it is empty"),
        ("csv", b"key,value\na\n", "Expected 2 columns, got 1"),
        ("csv", b"key,key,value\na,b,1\n", "columns twice: key"),
        ("parquet", b"PAR1" + bytes(100), "not a Parquet file"),
        ("parquet", b"", "not a Parquet file"),
    ],
)
def test_bad_input_is_refused_in_one_line_with_the_usage_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    format: str,
    content: bytes,
    said: str,
) -> None:
    assert produce(monkeypatch, content, "t", "--format", format) == 2
    told = capsys.readouterr()
    (error,) = [line for line in told.err.splitlines() if not line.startswith("wrote ")]
    assert said in error and "fault in Tidegate" not in error


def test_seconds_that_are_too_many_for_milliseconds_are_refused(path: Path) -> None:
    """They came round the other end of 64 bits, as another moment."""
    times = pa.array([1, 37_000_000_000_000_000], pa.timestamp("s"))
    with Log(path) as log, pytest.raises(InvalidError, match="column 'timestamp'"):
        log.writer("t").write(pa.table({"value": ["a", "b"], "timestamp": times}))
    assert records(path) == []
