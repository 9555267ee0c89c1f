"""Commands and pages given a damaged file: of the log, the state, a certificate, or input; run as a process of its own.

    python hostile_files.py FOLDER CASES SEED

In each case one file is changed (a bit, a cut, zeros, other bytes), then a command that meets the file runs in a fork,
or a question that the page answers (`page NAME …`, in process). Prints one JSON line a case: how it ended, what was
said, and as `strangers` the records and rows that were printed though the sound files do not hold them. What `produce`
took from a changed file is compared with a plain reading of that file.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import random
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parent))
import hostile_state
from forked_cases import forked
from tidegate.cli.main import run as run_command
from tidegate.errors import InternalError, TidegateError
from tidegate.web.endpoints import ENDPOINTS
from tidegate.web.schemas import RawAnswer
from tidegate.web.site import Site

PATIENCE_S = 30.0
INPUT = [
    {"key": f"k{n % 7}", "value": f'{{"n": {n}, "who": "wé {n % 13}"}}', "timestamp": hostile_state.TEN + n}
    for n in range(60)
]
WORDS = ["--log", "data/log", "--state", "data/state"]


PAGES = ["overview", "topics", "tables", "apps", "app", "faults", "metrics"]


class Case(NamedTuple):
    """A file of the folder, and the command or question that meets it."""

    file: str
    words: Sequence[str]
    prints_rows: bool


def make(root: Path) -> None:
    hostile_state.make(root / "data")
    (root / "in.csv").write_text(_csv_of(INPUT))
    (root / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in INPUT))
    (root / "in.json").write_text(json.dumps(INPUT))
    pq.write_table(pa.Table.from_pylist(INPUT), root / "in.parquet")
    (root / "in.lines").write_text("".join(f"{each['key']}\t{each['value']}\n" for each in INPUT))
    (root / "client.properties").write_text("# settings\nsocket.timeout.ms=1000\nclient.id = \\u0061b\n")


def cases(root: Path) -> list[Case]:
    log, state = ["--log", "data/log"], ["--state", "data/state"]
    found: list[Case] = []
    for path in sorted(each for each in (root / "data" / "log").rglob("*") if each.is_file()):
        name = str(path.relative_to(root))
        holds_records = path.suffix in (".log", ".seal", ".index", ".timeindex")
        topic = path.parent.name.rpartition("-")[0]
        topic = topic if topic in hostile_state.TOPICS else "orders"
        found += [
            Case(name, ["verify", "data/log", "--format", "json"], False),
            *[Case(name, ["consume", topic, "-e", "-J", *log], True)] * (20 if holds_records else 1),
            Case(name, ["topic", "describe", topic, "--format", "json", *log], False),
            Case(name, ["topic", "list", "--format", "json", *log], False),
            Case(name, ["log", "dump", name], False),
            Case(name, ["log", "lifetime", topic, *log], False),
            Case(name, ["certificate", "check", "orders.json", *log], False),
            Case(name, ["log", "clean", *log], False),
        ]
    for path in sorted(each for each in (root / "data" / "state").rglob("*") if each.is_file()):
        name = str(path.relative_to(root))
        table = next((each for each in ("sessions", "per-minute", "users") if each in name), "minutes")
        found += [
            *[Case(name, ["table", "scan", table, "-n", "1000", "--format", "jsonl", *state], True)] * 3,
            Case(name, ["table", "fetch", table, "c5", "--format", "jsonl", *state], True),
            Case(name, ["table", "info", *state, "--format", "json"], False),
            Case(name, ["table", "versions", "users", *state, "--format", "json"], False),
            Case(name, ["app", "status", "shop", *state, *log], False),
            Case(name, ["app", "checkpoints", "shop", *state], False),
        ]
    for name in dict.fromkeys(each.file for each in found):
        topic = next((each for each in hostile_state.TOPICS if each in name), "orders")
        table = "per-minute" if "per-minute" in name else "shop:minutes"
        found += [Case(name, ["page", page], False) for page in PAGES]
        found += [Case(name, ["page", page, topic], False) for page in ("topic", "integrity")]
        found += [Case(name, ["page", page, topic], True) for page in ("records", "export")]
        found += [Case(name, ["page", page, table], True) for page in ("scan", "fetch", "late")]
        found += [Case(name, ["page", page, table], False) for page in ("table", "diff", "explain")]
    for kind in ("csv", "jsonl", "json", "parquet", "lines"):
        words = ["produce", "in", f"in.{kind}", "--format", kind, *log]
        found += [Case(f"in.{kind}", [*words, *(["-K", "\t"] if kind == "lines" else [])], False)] * 40
    found += [Case("orders.json", ["certificate", "check", "orders.json", *log], False)] * 20
    connect = ["topic", "list", "--log", "kafka://127.0.0.1:1", "--command-config", "client.properties"]
    found += [Case("client.properties", connect, False)] * 3
    return found


def asked(name: str, what: str = "shop") -> int:
    """Ask as the page does; rows and records are printed, one JSON line each."""
    site = Site(Path("data/log"), Path("data/state"))
    query = {
        "fetch": {"key": "c5"},
        "explain": {"key": "c5", "start": str(hostile_state.TEN)},
        "diff": {"before": 0, "after": 1},
        "integrity": {"wait_ms": 5000},
        "records": {"limit": 1000},
        "export": {"limit": 1000},
    }.get(name, {})
    try:
        found = ENDPOINTS[name].ask(site, dict.fromkeys(ENDPOINTS[name].path_params, what), query)
    except InternalError:
        raise
    except TidegateError as error:
        print(f"{type(error).__name__}: {error}")
        return int(error.exit_code)
    finally:
        site.close()
    if isinstance(found, RawAnswer):
        print(found.body.decode())
    elif name in ("records", "scan", "fetch", "late"):
        for each in found.records if name == "records" else found.rows:
            print(msgspec.json.encode(each).decode())
    return 0


def ran(words: Sequence[str]) -> int:
    return asked(*words[1:]) if words[0] == "page" else run_command(list(words))


def damage(path: Path, chance: random.Random) -> str:
    """Change the file; how."""
    content = bytearray(path.read_bytes())
    how = chance.choice(["bit", "bit", "bit", "cut", "zeros", "bytes", "insert"]) if content else "insert"
    at = chance.randrange(len(content)) if content else 0
    if how == "bit":
        content[at] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del content[at:]
    elif how == "zeros":
        end = min(len(content), at + chance.choice([1, 8, 4096]))
        content[at:end] = bytes(end - at)
    elif how == "bytes":
        end = min(len(content), at + chance.choice([1, 4, 64]))
        content[at:end] = chance.randbytes(end - at)
    else:
        some = [b"\0", b'"', b"\n", b"\r", b",", b"\xff", b"{", b"\x1b[2J", b"\\u12", chance.randbytes(16)]
        content[at:at] = chance.choice(some)
    path.write_bytes(content)
    return how


def read_plainly(path: Path, kind: str) -> list[tuple[bytes | None, bytes | None]] | None:
    """Keys and values by the slow, obvious reading; None where it cannot read the file either."""
    try:
        if kind == "parquet":
            rows = pq.read_table(path).to_pylist()
        elif kind == "csv":
            rows = list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline=""), strict=True))
        elif kind == "lines":
            lines = [line.removesuffix(b"\r") for line in path.read_bytes().removesuffix(b"\n").split(b"\n")]
            pairs = [line.partition(b"\t") for line in lines]
            return [(key or None, value or None) if tab else (None, key or None) for key, tab, value in pairs]
        elif kind == "json":
            rows = json.loads(path.read_bytes())
        else:
            rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
        return [(_bytes(row.get("key")), _bytes(row.get("value"))) for row in rows]
    except (ValueError, csv.Error, pa.ArrowException, OSError, AttributeError):
        return None


def _csv_of(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["key", "value", "timestamp"])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _bytes(value: Any) -> bytes | None:
    if isinstance(value, dict):
        value = base64.b64decode(value["base64"])
    return (value.encode() if isinstance(value, str) else value) or None


def printed(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("{")]


def produced(folder: Path) -> list[tuple[bytes | None, bytes | None]]:
    import tidegate as tg

    with tg.Log(folder / "data" / "log", read_only=True) as log:
        rows = log.reader("in").read_all().to_pylist()
    return [(row["key"] or None, row["value"] or None) for row in rows]


def main(folder: Path, count: int, seed: int) -> None:
    root, case, said = folder / "sound", folder / "case", folder / "said"
    root.mkdir(parents=True)
    make(root)
    for words in (
        ["topic", "create", "in", "--partitions", "1", *WORDS[:2]],
        ["certificate", "export", "orders", "-o", "orders.json", *WORDS[:2]],
    ):
        ended = forked(partial(ran, words), root, said, PATIENCE_S)
        assert ended == ("exit", 0), (words, ended, said.read_text())
    chance = random.Random(seed)
    known = cases(root)
    chance.shuffle(known)
    sound: dict[tuple[str, ...], set[str]] = {}
    for number in range(count):
        file, words, prints_rows = known[number % len(known)]
        shutil.copytree(root, case)
        if prints_rows and tuple(words) not in sound:
            forked(partial(ran, words), case, said, PATIENCE_S)
            sound[tuple(words)] = set(printed(said.read_text(errors="replace")))
        how = damage(case / file, chance)
        ended, code = forked(partial(ran, words), case, said, PATIENCE_S)
        text = said.read_text(errors="replace")
        line: dict[str, Any] = {"case": number, "file": file, "how": how, "words": list(words)}
        line |= {"ended": ended, "code": code}
        strangers: list[str] = []
        if prints_rows:
            strangers = [each for each in printed(text) if each not in sound[tuple(words)]]
        elif words[0] == "produce" and code == 0:
            took, plain = produced(case), read_plainly(case / file, file.rpartition(".")[2])
            if plain is not None and took != plain:
                strangers = [repr(pair) for pair in took if pair not in plain] or [f"{len(took)} records"]
        line |= {"strangers": strangers[:2], "said": text[-1500:]}
        print(json.dumps(line), flush=True)
        shutil.rmtree(case)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]), int(sys.argv[3]))
