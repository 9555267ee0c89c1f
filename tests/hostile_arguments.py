"""Command lines that nobody should type, for every command there is; run as a process of its own.

    python hostile_arguments.py FOLDER CASES SEED

Each case is a fork with its own copy of a log and a state, so that a signal ends one case and is told. Prints one JSON
line a case: the command line, how it ended, and the last of what it said. A command that would go on for ever gets
SIGINT. Paths lead nowhere outside the folder, addresses nowhere but to this machine; nothing starts Spark.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parent))
import hostile_state
from forked_cases import forked, last_words
from tidegate.cli.main import cli
from tidegate.cli.main import run as run_command

PATIENCE_S = 20.0
FOR_EVER = {("ui",), ("table", "serve"), ("table", "follow")}  # interrupted soon
NEVER = {("completion",)}  # prints what click makes
WORDS = [
    "", " ", "-", "--", "-1", "0", "1", "7", "1e309", "nan", "inf", "-inf", "0x10", "1_000",
    "99999999999999999999", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "2147483648",
    "1.5", "10m", "-10m", "1M", "99999999999d", "1KiB", "99999999999999GiB", "orders", "orders:0", "orders-0",
    "orders:99", "per-minute", "minutes", "sessions", "shop", "users", "users_v1", "nobody", "../..", "..", ".",
    "data", "data/log", "data/state", "data/log/orders-0", "data/log/orders-0/00000000000000000000.log", "shop.py",
    "shop.py:app", "shop:nothing", "hostile_state:define", "./missing", "/proc/self/none", "a/b/../../c", "$(id)",
    "`id`", "%s%n%d", "{0}", "\x1b[31mred\x1b[0m", "\u202eright", "ünïcödé", "日本", "\udcff\udcfe", "\n", "a\nb",
    "\t", "x" * 300, "x" * 5000, "a=b", "=", "a=", "=b", "retention.ms=-5", "retention.ms=x", "segment.bytes=1",
    "cleanup.policy=compact,delete", "{", "{}", "[]", "null", '{"a": 1}', '"', "'", ";", "|", "*", "?", "key",
    "value", "bytes", "json", "Json(amount='double')", "Json(", "long", "string", "json,", "2026-01-01",
    "2026-01-01T10:00Z", "2026-13-45", "1767261600000", "yesterday", "earliest", "latest", "kafka://",
    "kafka://127.0.0.1:1", "kafka://127.0.0.1:99999", "s3://", "ftp://a/b", "file://", "memory://", "://",
    "http://127.0.0.1:1", "localhost:0", ":0", ":99999", ":x", "all", "none", "True",
]  # fmt: skip
SHOP = """\
from pathlib import Path
import hostile_state

app = hostile_state.define(Path("data"))
"""
SPARKS = {"--spark", "--master", "--host"}  # a JVM each; another network


def commands(
    group: click.Group = cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command, with the words that lead to it."""
    with click.Context(group) as context:
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            if isinstance(found, click.Group):
                yield from commands(found, (*path, name))
            elif found is not None and (*path, name) not in NEVER:
                yield (*path, name), found


def spelled(path: tuple[str, ...], command: click.Command, chance: random.Random) -> list[str]:
    """One command line: some of its options, with values that fit now and then."""
    words: list[str] = []
    wild = chance.choice([0.1, 0.4, 0.9])  # how often a value does not fit: those that mostly do come further
    for param in command.params:
        if isinstance(param, click.Argument):
            count = 1 if param.nargs != -1 else chance.randrange(4)
            words += [
                _value(param, chance, wild) for _ in range(count) if param.required or chance.random() < 0.7
            ]
            continue
        if SPARKS & set(param.opts) or chance.random() > (0.8 if param.required else 0.15):
            continue
        option = chance.choice([*param.opts, *param.secondary_opts])
        is_flag = isinstance(param, click.Option) and (param.is_flag or param.count)
        words += [option] if is_flag else [option, _value(param, chance, wild)]
    if chance.random() < 0.15:
        words.insert(
            chance.randrange(len(words) + 1), chance.choice([*WORDS, "--nothing", "-Z", "--log=", "-h"])
        )
    if chance.random() < 0.1:
        chance.shuffle(words)
    if path in {("run",), ("demo",)}:
        words += ["--engine", "local", *(["--once"] if path == ("run",) and chance.random() < 0.9 else [])]
    if path == ("push",):
        words += ["--partitions", chance.choice(["0", "-1", "x"])]
    if path == ("demo",):
        words += ["--folder", chance.choice(["data", "shop.py", "/proc/self/none"])]
    return [*path, *words]


def _value(param: click.Parameter, chance: random.Random, wild: float) -> str:
    if isinstance(param.type, click.Choice) and chance.random() > wild:
        return str(chance.choice(list(param.type.choices)))
    likely = {
        "topic": "orders",
        "table": "minutes",
        "app": "shop",
        "log_url": "data/log",
        "state": "data/state",
        "where": "shop.py",
    }
    if (param.name or "") in likely and chance.random() > wild:
        return likely[param.name or ""]
    return chance.choice(WORDS) if chance.random() < 0.95 else _noise(chance)


def _noise(chance: random.Random) -> str:
    data = bytes(chance.randrange(1, 256) for _ in range(chance.randrange(1, 60)))
    return os.fsdecode(data)


def main(folder: Path, count: int, seed: int) -> None:
    root, case, said = folder / "sound", folder / "deep" / "er" / "case", folder / "said"
    hostile_state.make(root / "data")
    (root / "shop.py").write_text(SHOP)
    case.parent.mkdir(parents=True)
    known = sorted(commands())
    chance = random.Random(seed)
    for number in range(count):
        path, command = known[number % len(known)]
        arguments = spelled(path, command, chance)
        shutil.copytree(root, case)
        patience_s = 3.0 if path in FOR_EVER else PATIENCE_S
        ended, code = forked(partial(run_command, arguments), case, said, patience_s)
        shown = [each.encode("utf-8", "replace").decode() for each in arguments]
        line = {"case": number, "arguments": shown, "ended": ended, "code": code, "said": last_words(said)}
        print(json.dumps(line), flush=True)
        shutil.rmtree(case)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
