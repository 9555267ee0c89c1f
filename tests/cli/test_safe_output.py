"""What the command line prints and makes is safe: no record drives a terminal, no password is shown, no folder is
open to others."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.output import visible
from tidegate.errors import InvalidError, without_credentials
from tidegate.files import Files
from tidegate.pipeline.progress import given_state

HOSTILE = (
    "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b2J", "\x7f\x08\x08", "over\rwritten", "\u202etxt.exe", "\u2028line",
    "\x1bP$q\x1b\\", "\x00\x01", "\U000e0041tag", "two\nlines", "plain, \"quoted\" ✓",
)  # fmt: skip
UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    with tg.Log(folder / "log", durability="os") as log:
        log.create_topic("hostile", 1)
        raw = [each.encode() for each in HOSTILE] + [b"\xff\xfe\x1b[1m"]
        headers = pa.array([[("h", each)] for each in raw], pa.map_(pa.string(), pa.binary()))
        keys = pa.array(raw, pa.binary())
        with log.writer("hostile", integrity=True) as writer:
            writer.write(pa.table({"key": keys, "value": keys, "headers": headers}))
    app = tg.App("seen", data=folder)
    (
        app.stream("hostile", key=tg.String(), value=tg.Bytes(), on_error="keep")
        .window(tg.Tumbling("1d", grace="0s", retention="9d"))
        .agg(records=tg.count(), last=tg.last("value"))
        .to_table("per-day")
    )
    app.run("local", until="caught_up")
    with tg.Log(folder / "log") as log, tg.table(
        log, "hostile", state=folder / "state", materialized=tg.Materialized("kept"),
        consumed=tg.Consumed(tg.Bytes(), tg.Bytes()),
    ) as table:  # fmt: skip
        table.catch_up()
        table.commit()
    return folder


def at_a_terminal(*words: str, cwd: Path) -> str:
    """What a command writes to a terminal, on stdout and stderr."""
    mine, theirs = pty.openpty()
    command = [sys.executable, "-m", "tidegate.cli.main", *words]
    env = {**os.environ, "NO_COLOR": "1", "TERM": "xterm"}
    done = subprocess.Popen(command, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(mine, 65536)
        except OSError:  # Linux says so at the end of a terminal
            break
        if not piece:
            break
        said += piece
    done.wait(60)
    os.close(mine)
    text = re.sub("\r+\n", "\n", said.decode("utf-8", "backslashreplace"))
    return text.replace("\r\x1b[K", "")  # our own: an empty line before each message


LOG = ("--log", "log")
SHOWN = [
    *(
        ("consume", "hostile", "-e", "--format", each, *LOG)
        for each in ("table", "json", "jsonl", "csv", "lines")
    ),
    ("consume", "hostile", "-e", "-f", "%k %s %h\\n", *LOG),
    ("consume", "hostile", "-e", *LOG),
    *(
        ("table", "scan", "kept", "--state", "state", "--format", each)
        for each in ("table", "json", "jsonl", "csv")
    ),
    ("log", "dump", "--print-data-log", "log/hostile-0/00000000000000000000.log"),
    ("log", "dump", "--print-data-log", "--format", "jsonl", "log/hostile-0/00000000000000000000.log"),
    ("verify", "hostile", *LOG),
]


@pytest.mark.parametrize("words", SHOWN, ids=lambda words: " ".join(words[:5]))
def test_no_record_drives_a_terminal_in_any_format(data: Path, words: tuple[str, ...]) -> None:
    said = at_a_terminal(*words, cwd=data)
    assert "✓" in said or words[0] == "verify", said
    found = UNSAFE.search(said)
    assert found is None, (words, said[max(0, found.start() - 40) : found.end() + 20])


def test_a_pipe_gets_the_bytes_as_they_are(data: Path) -> None:
    for words, wanted in (
        (("consume", "hostile", "-e", "--format", "lines", *LOG), b"\xff\xfe\x1b[1m"),
        (("consume", "hostile", "-e", "-f", "%s", *LOG), b"\x1b[31mred\x1b[0m"),
    ):
        command = [sys.executable, "-m", "tidegate.cli.main", *words]
        assert wanted in subprocess.run(command, cwd=data, capture_output=True, check=True).stdout


def test_a_misspelt_name_with_terminal_codes_is_shown_as_text(data: Path) -> None:
    for words in (("consume", "a\x1b[2Jb", *LOG), ("app", "status", "a\x1b[2Jb", "--state", "state"),
                  ("topic", "list", "--lo\x1b[2J")):  # fmt: skip
        said = at_a_terminal(*words, cwd=data)
        assert UNSAFE.search(said) is None and said.strip(), (words, said)


def test_json_is_the_same_with_and_without_escapes() -> None:
    import json

    for each in HOSTILE:
        assert json.loads(visible(json.dumps(each, ensure_ascii=False))) == each
        assert UNSAFE.search(visible(each)) is None


# -- credentials ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("kafka://me:s3cr3t@host:9092", "kafka://***@host:9092"),
        ("kafka://me:s3cr3t@a:1,me:s3cr3t@b:2", "kafka://***@b:2"),
        ("kafka://me:p@s3cr3t@host", "kafka://***@host"),
        ("s3://KEY:s3/cr3t@bucket/x", "s3://***@bucket/x"),
        ("https://s3cr3t@registry/x", "https://***@registry/x"),
        ("see s3://bucket/a@b and me@example.org", "see s3://bucket/a@b and me@example.org"),
        ("http://localhost:8081/a@b", "http://localhost:8081/a@b"),
        ("'s3://K:s3cr3t@b/x' and 'file:///a'", "'s3://***@b/x' and 'file:///a'"),
    ],
)
def test_a_url_is_shown_without_its_credentials(url: str, shown: str) -> None:
    assert without_credentials(url) == shown
    assert str(InvalidError(url)) == shown


KAFKA, S3 = "kafka://me:s3cr3t@127.0.0.1:9", "s3://KEY:s3cr3t@bucket/state"
REFUSED = [
    ("topic", "list", "--log", KAFKA),
    ("consume", "orders", "--log", KAFKA),
    ("produce", "orders", "--log", KAFKA),
    ("verify", "orders", "--log", KAFKA),
    ("ui", "--log", KAFKA),
    ("log", "clean", "--log", KAFKA),
    ("app", "status", "--state", S3),
    ("app", "status", "--log", KAFKA),
    ("table", "info", "--state", S3),
    ("topic", "list", "--log", "http://me:s3cr3t@host/x"),
    ("push", "file.parquet", "--table", "t", "--state", S3, "--log", KAFKA),
]


def test_a_command_that_is_told_names_a_state_only_where_its_address_is_no_secret() -> None:
    assert given_state("s3://bucket/a b") == " --state 's3://bucket/a b'"
    for address in ("s3://user:secret@bucket/x", None, str(Path("data/state").absolute())):
        assert given_state(address) == ""


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: " ".join(words[:2]))
def test_no_command_prints_the_credentials_of_a_url(tmp_path: Path, words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "tidegate.cli.main", *words]
    env = {**os.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, input="", env=env, timeout=300, check=False
    )
    assert done.returncode in (1, 2, 3), done.stderr
    assert "s3cr3t" not in done.stdout + done.stderr, done.stdout + done.stderr
    assert done.stderr.strip()


# -- folders -------------------------------------------------------------------------------------


def test_nothing_that_is_made_is_open_to_others_whatever_the_umask(tmp_path: Path) -> None:
    program = """
import os, sys
os.umask(0)
import pyarrow as pa, tidegate as tg
with tg.Log("new/data/log") as log:
    log.create_topic("orders", 2)
    log.writer("orders").write(pa.table({"key": ["k"], "value": ['{"amount": 1}'], "timestamp": [1]}))
app = tg.App("shop", data="new/data")
(app.stream("orders", value=tg.Json(amount="double")).window(tg.Tumbling("1m"))
 .agg(n=tg.count()).to_topic("out").to_table("per-minute"))
app.run("local", until="caught_up")
with tg.Log("new/data/log") as log:
    with tg.table(log, "orders", state="new/data/state", materialized=tg.Materialized("kept")) as table:
        table.catch_up()
        table.commit()
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=500)
    made = [tmp_path / "new", *(tmp_path / "new").rglob("*")]
    assert len(made) > 20
    wrong = {str(each.relative_to(tmp_path)): oct(each.stat().st_mode & 0o777) for each in made
             if each.stat().st_mode & 0o022}  # fmt: skip
    assert not wrong
    assert {each.stat().st_mode & 0o777 for each in made if each.is_dir()} == {0o755}


def test_a_private_folder_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0)
    try:
        Files().mkdir(tmp_path / "a" / "b", private=True)
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    Files().mkdir(tmp_path / "a" / "b", private=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidError, match="belongs to another user"):
        Files().mkdir(tmp_path / "a" / "b", private=True)
