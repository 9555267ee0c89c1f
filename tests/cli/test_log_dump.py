"""`tidegate log dump` as people call it: files both ways, formats, pipes, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tidegate.cli.main import run
from tidegate.testing.batches import Rec, build_batch, canary_batch

NAME = "00000000000000000000.log"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / NAME
    path.write_bytes(b"".join(canary_batch(i) for i in range(109)))
    return path


def test_files_can_be_listed_with_commas_or_named(log, tmp_path, capsys):
    other = tmp_path / "00000000000000000109.log"
    other.write_bytes(canary_batch(109))
    assert run(["log", "dump", "--files", f"{log},{other}"]) == 0
    listed = capsys.readouterr().out
    assert run(["log", "dump", str(log), str(other)]) == 0
    assert capsys.readouterr().out == listed
    assert listed.count("Dumping ") == 2
    assert listed.count("baseOffset") == 110


def test_a_pipe_gets_kafkas_text_and_json_only_when_asked(log, capsys):
    assert run(["log", "dump", str(log)]) == 0
    assert capsys.readouterr().out.startswith(f"Dumping {log}\nLog starting offset: 0\nbaseOffset: 0 ")
    assert run(["log", "dump", "--format", "json", "--print-data-log", str(log)]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 1 + 2 * 109
    assert rows[2]["value"].startswith('{"producerId":"strimzi-canary-client"')


def test_the_seed_profile_is_chosen_by_name(log, capsys):
    assert run(["log", "dump", "--format-profile", "seed", "--deep-iteration", "--files", str(log)]) == 0
    out = capsys.readouterr().out
    assert "Starting offset: 0\n" in out
    assert "compresscodec: NONE" in out


def test_decoders_may_come_without_a_value_and_imply_contents(tmp_path, capsys):
    path = tmp_path / NAME
    path.write_bytes(build_batch([Rec(b"\0\0\0\7", b"v")]))
    assert run(["log", "dump", "--files", str(path), "--key-decoder-class", "IntegerDecoder"]) == 0
    assert capsys.readouterr().out.endswith(" key: 7 payload: v\n")
    assert run(["log", "dump", str(path), "--value-decoder-class"]) == 0
    assert capsys.readouterr().out.endswith("payload: v\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param([], 2, "no files", id="no-files"),
        pytest.param(["--files", "/nowhere/00000000000000000000.log"], 3, "does not exist", id="missing"),
        pytest.param(["--files", "x.log", "--cluster-metadata-decoder"], 2, "not offered", id="not-offered"),
        pytest.param(["--files", "x.log", "--key-decoder-class", "Mine"], 2, "StringDecoder", id="decoder"),
        pytest.param(["--files", "x.log", "--max-bytes", "-1"], 2, "max-bytes", id="range"),
    ],
)
def test_wrong_calls_end_with_one_line_and_the_documented_code(arguments, code, said, capsys):
    assert run(["log", "dump", *arguments]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_findings_leave_the_exit_code_alone_and_corrupt_files_do_not(tmp_path, capsys):
    gap = tmp_path / NAME
    gap.write_bytes(build_batch([Rec()]) + build_batch([Rec()], base_offset=9))
    assert run(["log", "dump", "--deep-iteration", str(gap)]) == 0
    assert "0 is followed by 9" in capsys.readouterr().err
    gap.write_bytes(build_batch([Rec()]) + bytes(100))
    assert run(["log", "dump", str(gap)]) == 5
    captured = capsys.readouterr()
    assert captured.out.count("baseOffset") == 1
    assert captured.err.count("error: ") == 1


def test_a_closed_pipe_ends_the_dump_quietly(tmp_path):
    path = tmp_path / NAME
    path.write_bytes(b"".join(build_batch([Rec(None, b"v" * 200)], base_offset=i) for i in range(3000)))
    shell = f"{sys.executable} -m tidegate.cli.main log dump --print-data-log {path} | head -2"
    ended = subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True, timeout=600
    )
    assert ended.stdout.splitlines() == [f"Dumping {path}", "Log starting offset: 0"]
    assert ended.stderr == ""
