"""No topic name and no link leads out of the log folder, by any way in; watched where Python opens files."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidegate.cli.main import run
from tidegate.errors import TidegateError
from tidegate.log.log import Log

OPENING = {
    "open",
    "os.open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.listdir",
    "os.link",
    "os.symlink",
}
watching: list[list[str]] = []


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if watching and event in OPENING:
        for path in arguments[:2]:
            if isinstance(path, str | bytes | os.PathLike):
                watching[-1].append(os.fsdecode(path))


sys.addaudithook(_hook)  # cannot be taken away again, so it does nothing unless asked


@contextmanager
def opened_files() -> Iterator[list[str]]:
    seen: list[str] = []
    watching.append(seen)
    try:
        yield seen
    finally:
        watching.pop()


def nasty_names() -> list[str]:
    chance = random.Random(11)
    pieces = [
        "..",
        ".",
        "/",
        "\\",
        "a",
        "~",
        "\0",
        "%2e",
        "//",
        "orders",
        "-0",
        "\n",
        " ",
        "ä",
        "$HOME",
        "*",
        "-delete",
    ]
    made = {"".join(chance.choices(pieces, k=chance.randint(1, 6))) for _ in range(400)}
    fixed = {
        "",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        "a/../../b",
        "x" * 250,
        "x" * 5000,
        "orders\0",
        "C:\\x",
        "nul\n",
    }
    legal = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    return sorted(
        name
        for name in made | fixed
        if not (set(name) <= legal and 1 <= len(name) <= 249 and name not in (".", ".."))
    )


def test_no_name_leads_out_of_the_log_folder(tmp_path: Path) -> None:
    root = tmp_path / "log"
    with Log(root) as log:
        log.create_topic("orders")
        ways: list[Callable[[str], object]] = [
            lambda name: log.create_topic(name),
            lambda name: log.describe(name),
            lambda name: log.alter_topic(name, {"retention.ms": "1"}),
            lambda name: log.add_partitions(name, 3),
            lambda name: log.delete_topic(name),
            lambda name: log.partition(name, 0),
            lambda name: log.view(name, 0),
            lambda name: log.reader(name),
            lambda name: log.writer(name),
        ]
        (
            log.reader("orders"),
            log.writer("orders"),
            log.view("orders", 0),
        )  # modules are loaded at their first use
        with opened_files() as seen:
            for name in nasty_names():
                for way in ways:
                    with pytest.raises(TidegateError):
                        way(name)
        assert [path for path in seen if not str(path).startswith(str(root))] == []
        assert log.topics() == ["orders"]
    assert sorted(os.listdir(tmp_path)) == ["log"]


def test_nor_does_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "log"
    with Log(root) as log:
        log.create_topic("orders")
    for name in nasty_names()[::7]:
        for command in (
            ["topic", "create"],
            ["topic", "describe"],
            ["topic", "delete", "--yes"],
            ["consume", "-e"],
        ):
            assert run([*command, "--log", str(root), "--", name]) == 2
    assert sorted(os.listdir(tmp_path)) == ["log"]
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["link", "fifo", "hard link", "folder"])
@pytest.mark.parametrize("victim", ["00000000000000000000.log", "tidegate.watermark", "tidegate.lock"])
def test_a_planted_file_is_refused_and_what_it_points_at_is_untouched(
    tmp_path: Path, kind: str, victim: str
) -> None:
    root, outside = tmp_path / "log", tmp_path / "precious"
    outside.write_bytes(b"do not touch")
    with Log(root) as log:
        log.create_topic("orders")
    path = root / "orders-0" / victim
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "hard link":
        os.link(outside, path)
    else:
        path.mkdir()
    with Log(root, durability="os") as log, pytest.raises(TidegateError):
        import pyarrow as pa

        log.writer("orders").write(pa.table({"value": [b"x"]}))
    assert outside.read_bytes() == b"do not touch"
