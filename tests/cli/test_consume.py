"""`tidegate consume`: kcat and rpk habits, every format, Ctrl-C, and back into `produce`."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

import tidegate as tg
from tidegate.cli.main import run
from tidegate.log.format.records import RECORD_SCHEMA
from tidegate.log.log import Log

START = 1_767_225_600_000


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEGATE_LOG", str(tmp_path / "log"))
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("t", 2)
        log.writer("t", batch_records=3).write(
            pa.table(
                {
                    "key": [b"k%d" % number for number in range(10)],
                    "value": [b"%d" % number for number in range(10)],
                    "timestamp": [START + 1000 * number for number in range(10)],
                }
            ),
            partition=0,
        )
        log.create_topic("odd")
        log.writer("odd").write(
            pa.table(
                {
                    "key": pa.array([None, b"\x00\xff", "schlüssel".encode()], pa.binary()),
                    "value": pa.array([b"", None, b'{"a": 1}'], pa.binary()),
                    "timestamp": [1, 2, 3],
                    "headers": pa.array(
                        [[], [("h", b"1"), ("h", None)], [("b", b"\xfe"), ("c", b"text")]],
                        pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
                    ),
                }
            )
        )
    return tmp_path / "log"


def consumed(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[int]:
    """The values printed as JSON lines."""
    assert run(["consume", "t", *arguments, "-J"]) == 0
    return [int(json.loads(line)["value"]) for line in capfd.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-e"], range(10)),
        (["-e", "--from-beginning"], range(10)),
        (["-e", "-o", "start"], range(10)),
        (["-e", "-o", "end"], range(0)),
        (["-e", "-o", "7", "-p", "0"], range(7, 10)),
        (["-e", "-o", "-3", "-p", "0"], range(7, 10)),
        (["-o", "2:5", "-p", "0"], range(2, 5)),
        (["-n", "4"], range(4)),
        (["-n", "4", "-o", "5", "-p", "0"], range(5, 9)),
        (["-n", "100", "-e"], range(10)),
        (["-e", "-o", f"@{START + 6000}"], range(6, 10)),
        (["-o", f"@{START + 6000}:{START + 8000}"], range(6, 8)),
        (["-e", "-o", "@2026-01-01T00:00:08Z"], range(8, 10)),
        (["-e", "-p", "1"], range(0)),
        (["-e", "-p", "0", "-p", "1"], range(10)),
        (["-e", "--isolation", "read_committed"], range(10)),
    ],
)
def test_where_to_start_and_stop(
    arguments: list[str], expected: range, capfd: pytest.CaptureFixture[str]
) -> None:
    assert consumed(capfd, *arguments) == list(expected)


def test_json_lines_keep_every_byte(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["consume", "odd", "-e", "-J", "-q"]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert lines == [
        {
            "topic": "odd",
            "partition": 0,
            "offset": 0,
            "timestamp": 1,
            "key": None,
            "value": "",
            "headers": {},
        },
        {
            "topic": "odd",
            "partition": 0,
            "offset": 1,
            "timestamp": 2,
            "key": {"base64": "AP8="},
            "value": None,
            "headers": [{"key": "h", "value": "1"}, {"key": "h", "value": None}],
        },
        {
            "topic": "odd",
            "partition": 0,
            "offset": 2,
            "timestamp": 3,
            "key": "schlüssel",
            "value": '{"a": 1}',
            "headers": {"b": {"base64": "/g=="}, "c": "text"},
        },
    ]


def test_what_is_consumed_can_be_produced_again(
    path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["consume", "odd", "-e", "-J", "-q"]) == 0
    lines = capfd.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    run(["topic", "create", "copy"])
    assert run(["produce", "copy", "--format", "jsonl", "--durability", "os"]) == 0
    with Log(path, read_only=True) as log:
        original = log.reader("odd").read_all().drop_columns("topic")
        assert log.reader("copy").read_all().drop_columns("topic").equals(original)


def test_the_other_formats(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["consume", "t", "-e", "-q", "--format", "json"]) == 0
    assert [int(record["value"]) for record in json.loads(capfd.readouterr().out)] == list(range(10))
    assert run(["consume", "t", "-e", "-q", "--format", "json", "-o", "end"]) == 0
    assert json.loads(capfd.readouterr().out) == []
    assert run(["consume", "t", "-e", "-q", "--format", "lines"]) == 0
    assert capfd.readouterr().out.split() == [str(number) for number in range(10)]
    assert run(["consume", "odd", "-e", "-q", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capfd.readouterr().out)))
    assert rows[2]["key"] == "schlüssel"
    assert rows[2]["value"] == '{"a": 1}'
    assert json.loads(rows[1]["headers"]) == [{"key": "h", "value": "1"}, {"key": "h", "value": None}]
    target = tmp_path / "out.parquet"
    assert run(["consume", "t", "-e", "-q", "--format", "parquet", "--output", str(target)]) == 0
    table = parquet.read_table(target)
    assert table.schema.names == RECORD_SCHEMA.names
    assert table.column("value").to_pylist() == [b"%d" % number for number in range(10)]


def test_a_table_escapes_what_could_drive_the_terminal(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Log(path, durability="os") as log:
        log.writer("odd").write(pa.table({"value": [b"\x1b[31mred\x07\n"]}))
    assert run(["consume", "odd", "-e", "-q", "--format", "table"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split() == ["PARTITION", "OFFSET", "TIMESTAMP", "KEY", "VALUE"]
    assert lines[1].split() == ["0", "0", "1970-01-01T00:00:00.001Z", "-"]
    assert lines[4].endswith("\\x1b[31mred\\x07\\n")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (r"%t[%p]@%o %k %s\n", b"t[0]@0 k0 0\nt[0]@1 k1 1\n"),
        (r"%T,%K,%S\n", b"1767225600000,2,1\n1767225601000,2,1\n"),
        (r"100%%\t%s\x00", b"100%\t0\x00100%\t1\x00"),
        ("%s", b"01"),
    ],
)
def test_templates_as_kcats(
    template: str, expected: bytes, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["consume", "t", "-n", "2", "-q", "-f", template]) == 0
    assert capfdbinary.readouterr().out == expected


def test_a_template_prints_nulls_and_headers(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(["consume", "odd", "-e", "-q", "-f", r"%K/%S/%h\n"]) == 0
    assert capfdbinary.readouterr().out == b"-1/0/\n2/-1/h=1,h=NULL\n10/8/b=\xfe,c=text\n"


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["t", "-f", "%x"], 2, "%x is not a field"),
        (["t", "-f", "\\q"], 2, "cannot be read"),
        (["t", "-J", "-f", "%s"], 2, "keep one"),
        (["t", "--from-beginning", "-o", "5"], 2, "keep one"),
        (["t", "-o", "soon"], 2, "not a position"),
        (["t", "-o", "11", "-p", "0"], 2, "OFFSET_OUT_OF_RANGE"),
        (["t", "-p", "7"], 2, "has no partition 7"),
        (["nothing"], 2, "does not exist"),
        (["t", "-e", "--key", "long"], 2, "the keys of t have no windows"),
        (["t", "-e", "--output", "/nowhere/at/all"], 2, "the folder /nowhere/at does not exist"),
        (["t", "--log", "/nowhere/at/all"], 2, "there is no log at"),
    ],
)
def test_mistakes(arguments: list[str], code: int, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["consume", *arguments]) == code
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert says in errors[0]


def test_damage_ends_with_5_after_the_sound_records(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    segment = path / "t-0" / "00000000000000000000.log"
    content = bytearray(segment.read_bytes())
    content[-3] ^= 1
    segment.write_bytes(content)
    assert run(["consume", "t", "-e", "-J"]) == 5
    captured = capfd.readouterr()
    assert [int(json.loads(line)["value"]) for line in captured.out.splitlines()] == list(range(9))
    assert "damaged at offset 9" in captured.err


def test_a_summary_says_where_to_go_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["consume", "t", "-n", "4", "-J"]) == 0
    assert "read 4 records of t; next offsets (partition: offset) 0: 4, 1: 0" in capfd.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_the_summary_counts_only_what_was_written() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tidegate.cli.main", "consume", "t", "-e"],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 3
    assert "read 0 records of t; next offsets (partition: offset) 0: 0, 1: 0" in done.stderr


def test_following_prints_as_records_come_and_ctrl_c_ends_with_130_and_a_summary(path: Path) -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-m", "tidegate.cli.main", "consume", "t", "-o", "end", "-J"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ},
        ) as child,
        Log(path, durability="os") as log,
    ):
        assert child.stdout is not None and child.stderr is not None
        writer = log.writer("t")
        line = ""
        for _ in range(200):  # the reader may still be starting: write until it shows one
            writer.write(pa.table({"value": [b"new"]}), partition=1)
            if child.poll() is None and _readable(child.stdout):
                line = child.stdout.readline()
                break
        assert json.loads(line)["value"] == "new"
        child.send_signal(signal.SIGINT)
        told = child.stderr.read()
        assert child.wait(60) == 130
    assert re.search(r"read \d+ records? of t; next offsets", told)
    assert "Traceback" not in told


def _readable(stream: object) -> bool:
    import select

    return bool(select.select([stream], [], [], 0.1)[0])


@pytest.fixture
def counted(path: Path) -> Path:
    """Topics of results with windowed keys: minutes of strings, sessions, and keys that are numbers."""
    app = tg.App("counts", log=str(path), state=str(path.parent / "state"))
    clicks = app.stream("t", value=tg.String())
    clicks.window(tg.Tumbling("5s", grace="1h")).count().to_topic("minutes")
    clicks.window(tg.Session("1s", grace="1h")).count().to_topic("sessions")
    clicks.key_by(lambda batch: pa.array([7] * batch.num_rows, pa.int64()), serde=tg.Long()).window(
        tg.Hopping("10s", advance="5s", grace="1h")
    ).count().to_topic("numbers")
    app.run("local", until="caught_up", close=True)
    return path


def windows_of(capfd: pytest.CaptureFixture[str], topic: str, *more: str) -> list[dict[str, object]]:
    capfd.readouterr()
    assert run(["consume", topic, "-e", "-J", *more]) == 0
    return [json.loads(line)["window"] for line in capfd.readouterr().out.splitlines()]


def test_windowed_keys_are_taken_apart(counted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def window(key: object, start_s: int, size_s: int) -> dict[str, object]:
        return {"key": key, "start": START + 1000 * start_s, "end": START + 1000 * (start_s + size_s)}

    minutes = windows_of(capfd, "minutes")
    assert sorted(minutes, key=str) == sorted(
        (window(f"k{number}", number // 5 * 5, 5) for number in range(10)), key=str
    )
    assert sorted(windows_of(capfd, "sessions"), key=str) == sorted(
        (window(f"k{number}", number, 0) for number in range(10)), key=str
    )
    assert {str(each) for each in windows_of(capfd, "numbers")} == {
        str(window(7, start, 10)) for start in (-5, 0, 5)
    }
    by_hand = windows_of(capfd, "minutes", "--key-format", "changelog", "--window-size", "5s")
    assert by_hand == minutes
    as_bytes = windows_of(
        capfd, "numbers", "--key-format", "changelog", "--window-size", "10s", "--key", "long"
    )
    assert {each["key"] for each in as_bytes} == {7}


def test_windowed_keys_in_every_format(
    counted: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert run(["consume", "minutes", "-e", "--format", "table", "-n", "1"]) == 0
    head, row = capfd.readouterr().out.splitlines()
    assert "WINDOW" in head and "2026-01-01T00:00:00.000Z/2026-01-01T00:00:05.000Z" in row
    assert run(["consume", "minutes", "-e", "-f", r"%k %w\n"]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines[0] == f"k0 {START}/{START + 5000}" and len(lines) == 10
    assert run(["consume", "minutes", "-e", "--format", "csv"]) == 0
    (row, *_) = csv.DictReader(io.StringIO(capfd.readouterr().out))
    assert json.loads(row["window"])["start"] in (START, START + 5000)
    stored = tmp_path / "minutes.parquet"
    assert run(["consume", "minutes", "-e", "--format", "parquet", "--output", str(stored)]) == 0
    assert parquet.read_table(stored).column("window").to_pylist()[0]["end"] % 5000 == 0
    assert run(["consume", "minutes", "-e", "--key-format", "raw", "-J"]) == 0
    assert all("window" not in json.loads(line) for line in capfd.readouterr().out.splitlines())


@pytest.mark.parametrize("format", ["jsonl", "json", "parquet"])
def test_what_is_shown_with_windows_can_be_produced_again(
    counted: Path, tmp_path: Path, format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    stored = str(tmp_path / "copy")
    assert run(["consume", "minutes", "-e", "--format", format, "--output", stored]) == 0
    assert run(["produce", "copy", "--create-topic", "--repartition", "--format", format, stored]) == 0
    with Log(counted, read_only=True) as log:
        tables = [log.reader(topic).read_all().select(["key", "value"]) for topic in ("minutes", "copy")]
    pairs = [sorted((row["key"], row["value"]) for row in table.to_pylist()) for table in tables]
    assert pairs[0] == pairs[1] and len(pairs[0]) == 10


def test_keys_without_windows_are_shown_as_they_are(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert windows_of(capfd, "t", "--key-format", "topic", "--window-size", "1m") == [None] * 10
    assert run(["consume", "t", "-e", "--key-format", "topic"]) == 2
    assert run(["consume", "t", "-e", "--key-format", "session", "--window-size", "1m"]) == 2
    assert run(["consume", "t", "-e", "--window-size", "1m"]) == 2
