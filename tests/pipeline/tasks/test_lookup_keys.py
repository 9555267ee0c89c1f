"""A lookup finds rows whatever the width of its numbers, and is refused where the types can never meet."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.errors import InvalidError

TEN = 1_767_261_600_000
NUMBERS = [0, 1, 5, 127, 255, 40_000, 3_000_000_000, 2**40]
NAMED = tg.Json(name="string")
SERDES: dict[str, Any] = {
    "bytes": tg.Bytes(), "string": tg.String(), "int": tg.Int(), "long": tg.Long(), "double": tg.Double(),
}  # fmt: skip
SQL = {
    "int8": "CAST(n % 100 AS TINYINT)",
    "int16": "CAST(n % 30000 AS SMALLINT)",
    "int32": "CAST(n % 2000000000 AS INTEGER)",
    "int64": "n",
    "uint8": "CAST(n % 200 AS UTINYINT)",
    "uint16": "CAST(n % 60000 AS USMALLINT)",
    "uint32": "CAST(n % 4000000000 AS UINTEGER)",
    "float": "CAST(n AS FLOAT)",
    "double": "CAST(n AS DOUBLE)",
    "string": "CAST(n AS VARCHAR)",
    "binary": "CAST(CAST(n AS VARCHAR) AS BLOB)",
}
OF = {
    "int8": lambda n: n % 100, "int16": lambda n: n % 30000, "int32": lambda n: n % 2_000_000_000,
    "int64": lambda n: n, "uint8": lambda n: n % 200, "uint16": lambda n: n % 60000,
    "uint32": lambda n: n % 4_000_000_000,
    "float": lambda n: struct.unpack("f", struct.pack("f", n))[0], "double": float,
    "string": str, "binary": lambda n: str(n).encode(),
}  # fmt: skip
INTEGERS = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"}
MEETS = {
    "bytes": {"string", "binary"},
    "string": {"string", "binary"},
    "int": INTEGERS,
    "long": INTEGERS,
    "double": {"int8", "int16", "int32", "uint8", "uint16", "uint32", "float", "double"},
}


def table_of(folder: Path, serde: str) -> dict[Any, str]:
    """A table that has a row for every number that its key serde writes; key → name."""
    rows: dict[Any, str] = {}
    for number in NUMBERS:
        key: Any = {"bytes": str(number).encode(), "string": str(number), "double": float(number)}.get(
            serde, number
        )
        if serde != "int" or number < 2**31:
            rows[key] = f"row {number}"
    keys = [SERDES[serde].encode(key) for key in rows]
    with tg.Log(folder / "log") as log:
        log.create_topic("names", 2)
        table = {
            "key": pa.array(keys, pa.binary()),
            "value": [f'{{"name":"{name}"}}' for name in rows.values()],
        }
        log.writer("names").write(pa.table(table))
    with tg.App("reader", data=folder).table("names", key=SERDES[serde], value=NAMED) as built:
        built.catch_up()
    return rows


def write_numbers(folder: Path, keys: list[bytes] | None = None) -> None:
    with tg.Log(folder / "log") as log:
        log.create_topic("events", 1)
        given = keys or [b"k"] * len(NUMBERS)
        columns = {
            "key": pa.array(given, pa.binary()),
            "value": [f'{{"n":{n}}}' for n in NUMBERS[: len(given)]],
            "timestamp": [TEN] * len(given),
        }
        log.writer("events").write(pa.table(columns))


def found(folder: Path, *, stream_key: Any = None, **settings: Any) -> dict[int, str | None]:
    """Which name every number was given."""
    app = tg.App("events", data=folder)
    stream = app.stream("events", key=stream_key or tg.String(), value=tg.Json(n="long"))
    stream.lookup("names", "name", value=NAMED, **settings).to_topic(
        "named", integrity=False, value=tg.Json(n="long", name="string")
    )
    app.run("local", until="caught_up")
    with tg.Log(folder / "log", read_only=True) as log:
        rows = log.reader("named").read_all()["value"].to_pylist()
    return {row["n"]: row["name"] for row in map(json.loads, rows)}


@pytest.mark.parametrize("serde", SERDES)
@pytest.mark.parametrize("kind", SQL)
def test_every_pair_of_types_meets_or_is_refused(tmp_path: Path, serde: str, kind: str) -> None:
    rows = table_of(tmp_path, serde)
    write_numbers(tmp_path)
    if kind not in MEETS[serde]:
        with pytest.raises(InvalidError, match="no row would ever be found"):
            found(tmp_path, key=SQL[kind])
        return
    as_there = {"bytes": lambda v: v if isinstance(v, bytes) else v.encode(), "double": float}.get(serde)
    if serde == "string":
        as_there = lambda v: v.decode() if isinstance(v, bytes) else v  # noqa: E731
    expected = {n: rows.get(as_there(OF[kind](n)) if as_there else OF[kind](n)) for n in NUMBERS}
    assert found(tmp_path, key=SQL[kind]) == expected
    assert any(expected.values())


@pytest.mark.parametrize("serde", SERDES)
@pytest.mark.parametrize("mine", SERDES)
def test_the_streams_own_key_meets_the_tables_or_is_refused(tmp_path: Path, serde: str, mine: str) -> None:
    rows = table_of(tmp_path, serde)
    numbers = [n for n in NUMBERS if mine != "int" or n < 2**31]
    own: list[Any] = [
        {"bytes": str(n).encode(), "string": str(n), "double": float(n)}.get(mine, n) for n in numbers
    ]
    write_numbers(tmp_path, [SERDES[mine].encode(key) for key in own])
    texts, wholes = {"bytes", "string"}, {"int", "long"}
    meets = (
        {mine, serde} <= texts
        or {mine, serde} <= wholes
        or mine == serde
        or (mine, serde) == ("int", "double")
    )
    if not meets and "bytes" not in (mine, serde):
        with pytest.raises(InvalidError, match="no row would ever be found"):
            found(tmp_path, stream_key=SERDES[mine])
        return
    got = found(tmp_path, stream_key=SERDES[mine])
    raw = {SERDES[serde].encode(key): name for key, name in rows.items()}
    names = {f"row {n}" for n in numbers}
    for n, key in zip(numbers, own, strict=True):
        if meets:
            assert got[n] == (f"row {n}" if f"row {n}" in set(rows.values()) else None)
        else:  # bytes are compared as they are
            assert got[n] == raw.get(SERDES[mine].encode(key))
    assert not meets or names & set(got.values())


def test_what_is_no_key_is_refused_when_it_is_said(tmp_path: Path) -> None:
    app = tg.App("events", data=tmp_path)
    stream = app.stream("events", value=tg.Json(n="long", ok="bool"))
    with pytest.raises(InvalidError, match="have no bytes of their own"):
        stream.lookup("names", "name", value=NAMED, key="ok")
