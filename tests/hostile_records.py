"""Records of any bytes: written, run through an app, read back; run as a process of its own.

    python hostile_records.py FOLDER CASES SEED

A case is some records with keys, values and headers that nobody should send, among good ones. They are written by a
writer or by `tidegate produce`, read back, and counted by an app that keeps what it cannot read. Checked, in a fork:
every record is in the log as it was written; every one that is no JSON object is a dead letter and every good one is
none; the windows are those of a plain loop over the others; `tidegate consume` shows them all. One JSON line a case.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent))
import tidegate as tg
from forked_cases import forked, last_words
from tidegate.cli.main import run as run_command
from tidegate.errors import InternalError, TidegateError

TEN, MINUTE = 1_767_261_600_000, 60_000
RECORDS = 60
REFUSED, WRONG = 10, 11
TEXTS = [
    b"", b"{", b"{}", b"[]", b"null", b"true", b"1", b'"x"', b'{"amount": 1', b'{"amount": 1e999}', b'{"amount": "x"}',
    b'{"amount": null}', b'{"amount": 1, "amount": 2}', b'{"amount": 1} x', b"\xff\xfe{}", b"\xef\xbb\xbf{}",
    b"\x00" * 9,
    b"[" * 5000, b'{"a":' * 2000, b'{"amount": 99999999999999999999999999}', b'{"who": "\\ud800", "amount": 1}',
    b'{"who": "\xed\xa0\x80", "amount": 1}', b'{"who": "\\u0000", "amount": 1}', b"x" * 70_000, b'{"amount": -0.0}',
    b"-----", b'{"who": ["deep", {"er": [1]}], "amount": 3}', b"\r\n", b"key\tvalue", b"\x1b[2J", b"<script>", b"NaN",
]  # fmt: skip
Row = tuple[bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]


def rows(chance: random.Random) -> list[Row]:
    return [
        (_key(chance), _value(chance), TEN + chance.randrange(30 * MINUTE), _headers(chance))
        for _ in range(RECORDS)
    ]


def _key(chance: random.Random) -> bytes | None:
    return chance.choice(
        [None, b"", b"k1", b"k2", b"\x00", b"\xff\xff", "ü".encode(), _bytes(chance, 300), b"k" * 5000]
    )


def _value(chance: random.Random) -> bytes | None:
    kind = chance.randrange(5)
    good = json.dumps({"amount": chance.randrange(100), "who": chance.choice(["a", "ü", "x" * 200])}).encode()
    if kind < 2:
        return good
    if kind == 2:
        return chance.choice([None, *TEXTS])
    if kind == 3:
        return _bytes(chance, 200)
    changed = bytearray(good)
    changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _bytes(chance: random.Random, most: int) -> bytes:
    return chance.randbytes(chance.randrange(most))


def _headers(chance: random.Random) -> list[tuple[str, bytes | None]]:
    names = ["", "h", "ü", "x" * 300, "_tidegate", "div", "divc", "a\nb"]
    return [
        (chance.choice(names), chance.choice([None, b"", _bytes(chance, 50)]))
        for _ in range(chance.choice([0, 0, 1, 4]))
    ]


def is_json_object(value: bytes | None) -> bool | None:
    """Whether a value is an object with an amount that fits; None where readers may differ."""
    try:
        found = json.loads((value or b"").decode("utf-8"), parse_constant=lambda name: {}[name])
    except (ValueError, KeyError, RecursionError):
        return False if value is not None and not value.startswith((b"[" * 99, b'{"a":' * 9)) else None
    if not isinstance(found, dict):
        return False
    amount, who = found.get("amount"), found.get("who")
    is_plain = type(amount) is int and abs(amount) < 2**31 and isinstance(who, str) and who.isprintable()
    return True if is_plain and len(found) == 2 else None


def define(folder: Path) -> tg.App:
    app = tg.App("any", data=str(folder))
    stream = app.stream("any", key=tg.Bytes(), value=tg.Json(amount="double", who="string"), on_error="keep")
    stream.window(tg.Tumbling("1m", grace="1d", retention="7d")).agg(
        n=tg.count(), total=tg.sum("amount")
    ).to_table("counts")
    return app


def case(seed: int) -> int:
    """One case in the present folder; its exit code."""
    chance = random.Random(seed)
    written = rows(chance)
    by_command = chance.random() < 0.4
    with tg.Log("log", durability="os") as log:
        log.create_topic("any", 1)
        if not by_command:
            write(log, written)
    if by_command:
        written = produced(chance, written)
    with tg.Log("log", read_only=True) as log:
        found = log.reader("any").read_all().to_pylist()
    if not by_command:
        stored = [(row["key"], row["value"], _headers_of(row)) for row in found]
        require(
            stored == [(key, value, headers) for key, value, _, headers in written],
            "the log has other records",
        )
    if not found:  # one line was refused, and with it all that would have been written with it
        return REFUSED
    counted(found)
    shown(len(found))
    return 0


def write(log: Any, written: list[Row]) -> None:
    keys, values, times, headers = zip(*written, strict=True)
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    made = [[{"key": name, "value": value} for name, value in each] for each in headers]
    columns = {
        "key": pa.array(keys, pa.binary()),
        "value": pa.array(values, pa.binary()),
        "timestamp": pa.array(times, pa.int64()),
        "headers": pa.array(made, kind),
    }
    with log.writer("any") as writer:
        writer.write(pa.table(columns))


def produced(chance: random.Random, written: list[Row]) -> list[Row]:
    """What `tidegate produce` makes of a file that holds the values, in one of its formats: any bytes at all."""
    form = chance.choice(["lines", "jsonl", "csv"])
    text = b"\n".join(value or b"" for _, value, _, _ in written)
    if form == "jsonl":
        text = b"\n".join(
            json.dumps({"key": "k", "value": {"amount": 1, "who": "a"}, "timestamp": at}).encode()
            if chance.random() < 0.9
            else value or b""
            for _, value, at, _ in written
        )
    Path("input").write_bytes(text)
    keyed = ["--key", "k1"] if form == "lines" else []
    code = run_command(["produce", "any", "input", "--format", form, "--log", "log", *keyed])
    require(code in (0, 2, 5), f"produce --format {form} ended with {code}")
    return []


def _headers_of(row: dict[str, Any]) -> list[tuple[str, bytes | None]]:
    return [(each["key"], each["value"]) for each in row["headers"] or []]


def counted(found: list[dict[str, Any]]) -> None:
    """Run the app; its windows and letters are those of a plain loop."""
    app = define(Path("."))
    summary = app.run("local", until="caught_up")
    require(not summary.stopped, f"the app stopped: {summary}")
    with app.open_table("counts") as table:
        windows = table.to_arrow().to_pylist()
        letters = {row["offset"] for row in table.dead_letters().to_pylist()}
        late = table.late().num_rows
    require(late == 0, f"{late} are late")
    expected: Counter[tuple[bytes, int]] = Counter()
    for row in found:
        verdict = is_json_object(row["value"])
        require(verdict is None or verdict is (row["offset"] not in letters), f"{row} is judged otherwise")
        at = (
            row["timestamp"]
            if isinstance(row["timestamp"], int)
            else int(row["timestamp"].timestamp() * 1000)
        )
        if row["offset"] not in letters and row["key"] is not None and row["value"] is not None:
            expected[row["key"], at // MINUTE * MINUTE] += 1
    seen = {(row["key"], _ms(row["window_start"])): row["n"] for row in windows}
    require(seen == dict(expected), f"windows are {seen}, and should be {dict(expected)}")


def _ms(moment: Any) -> int:
    return moment if isinstance(moment, int) else round(moment.timestamp() * 1000)


def shown(count: int) -> None:
    for form in ("jsonl", "csv", "table"):
        code = run_command(["consume", "any", "-e", "--format", form, "--log", "log", "-o", "earliest"])
        require(code == 0, f"consume --format {form} of {count} records ended with {code}")


def require(holds: bool, why: str) -> None:
    if not holds:
        print("WRONG:", why[:2000])
        raise SystemExit(WRONG)


def guarded(seed: int) -> int:
    try:
        return case(seed)
    except InternalError:
        raise
    except TidegateError as error:
        print(f"REFUSED: {type(error).__name__}: {error}")
        return REFUSED


def main(folder: Path, count: int, seed: int) -> None:
    place, said = folder / "case", folder / "said"
    warm = folder / "warm"
    warm.mkdir()
    forked(partial(guarded, 0), warm, said, 600.0)  # compiles what is not compiled yet
    for number in range(count):
        place.mkdir()
        ended, code = forked(partial(guarded, seed * 1_000_000 + number), place, said, 120.0)
        line = {
            "case": number,
            "seed": seed * 1_000_000 + number,
            "ended": ended,
            "code": code,
            "said": last_words(said),
        }
        print(json.dumps(line), flush=True)
        shutil.rmtree(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
