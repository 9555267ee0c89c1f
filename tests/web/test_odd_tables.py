"""Tables of every kind of window behind other steps, and of every type of key: shown, explained, copied, compared."""

from __future__ import annotations

import random
import shlex
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run
from tidegate.errors import InvalidError
from tidegate.pipeline.lineage import explain_window
from tidegate.pipeline.table_catalog import open_recorded
from tidegate.storage import open_backend
from tidegate.web import pages
from tidegate.web.endpoints import ENDPOINTS
from tidegate.web.site import Site

T = 1_767_261_600_000
EVENT = {"id": "string", "n": "int64", "at": "timestamp"}
KINDS: dict[str, Any] = {
    "tumbling": tg.Tumbling("1m", grace="1m", retention="9d"),
    "hopping": tg.Hopping("2m", "30s", grace="1m", retention="9d"),
    "sliding": tg.Sliding("1m", grace="1m", retention="9d"),
    "session": tg.Session("20s", grace="1m", retention="9d"),
    "unlimited": tg.Unlimited(),
}
KEYS: dict[str, tuple[Any, list[bytes]]] = {
    "json": (tg.Json(a="int64", b="string"), [b'{"a":%d,"b":"x"}' % each for each in range(3)]),
    "long": (tg.Long(), [struct.pack(">q", each) for each in (-3, 0, 9)]),
    "bytes": (tg.Bytes(), [b"\xff\xfe\x00", b"\\xff", b"-x", b"--help", "ü€".encode(), b"a\nb"]),
    "double": (tg.Double(), [struct.pack(">d", each) for each in (-1.5, float("inf"), float("nan"), 1e300)]),
    "string": (tg.String(), [b"-k", b"two words", b"'quoted'", b"\\x41"]),
}


def events() -> pa.Table:
    """Event times jump, some by more than the grace; ids come again; two keys."""
    chance = random.Random(3)
    values = []
    for number in range(120):
        jump = chance.choice([0, 0, 0, -3, -90]) * 1000
        values.append(
            {"id": f"i{chance.randrange(90)}", "n": chance.randrange(100), "at": T + number * 3000 + jump}
        )
    keys, times = [f"k{number % 2}" for number in range(120)], [T + number * 1000 for number in range(120)]
    return pa.table(
        {"key": keys, "value": [msgspec.json.encode(each) for each in values], "timestamp": times}
    )


def halved(batch: pa.RecordBatch) -> pa.RecordBatch:
    import pyarrow.compute as pc

    half = pc.divide(batch.column("n"), pa.scalar(2, pa.int64()))
    return pa.record_batch({"id": batch.column("id"), "half": half})


def apps(data: Path) -> dict[str, tg.App]:
    """Each kind of window by the records' time and by a column, behind a filter, one of them behind a function, too."""
    made: dict[str, tg.App] = {}
    for kind, windows in KINDS.items():
        for by in ("record", "column"):
            made[f"{kind}-{by}"] = app = tg.App(f"{kind}-{by}", data=data)
            stream = app.stream("events", value=tg.Json(**EVENT), timestamp="at" if by == "column" else None)
            kept = stream.filter("n > 20").drop_duplicates("id", within="1h", grace="2h")
            kept.window(windows).agg(count=tg.count(), total=tg.sum("n")).to_table("t")
    made["function"] = app = tg.App("function", data=data)
    stream = app.stream("events", value=tg.Json(**EVENT), timestamp="at").filter("n > 20")
    mapped = stream.map(halved, pa.schema([("id", pa.string()), ("half", pa.int64())])).filter("half > 20")
    mapped.window(KINDS["tumbling"]).agg(count=tg.count()).to_table("t")
    for name, (serde, _) in KEYS.items():
        made[name] = app = tg.App(name, data=data)
        counted = app.stream(f"keys-{name}", key=serde, value=tg.Json(n="int64")).window(KINDS["tumbling"])
        counted.agg(count=tg.count()).to_table("t")
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd") / "data"
    with tg.Log(folder / "log", durability="os") as log:
        log.create_topic("events", 2)
        log.writer("events").write(events())
        for name, (_, keys) in KEYS.items():
            log.create_topic(f"keys-{name}", 1)
            values = [b'{"n": 1}'] * len(keys)
            rows = {"key": pa.array(keys, pa.binary()), "value": values, "timestamp": [T] * len(keys)}
            log.writer(f"keys-{name}").write(pa.table(rows))
    for app in apps(folder).values():
        app.run("local", until="caught_up", round_records=37)
    return folder


@pytest.fixture
def site(data: Path) -> Iterator[Site]:
    made = Site(data / "log", data / "state")
    yield made
    made.close()


def ask(site: Site, name: str, table: str, **question: str) -> Any:
    """The document, after its page was written."""
    asked = ENDPOINTS[name]
    found = asked.ask(site, {"table": table}, question)
    if asked.screen is not None:
        around = {"path": "/x", "nav": asked.tag, "api": None, "can_leave": False}
        pages.document_page(asked.screen, msgspec.json.encode(found), ask=question, **around)
    return found


@pytest.mark.parametrize("opened", ["by the program", "as recorded"])
@pytest.mark.parametrize("by", ["record", "column"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_behind_steps_is_explained_by_the_records_that_it_counts(
    data: Path, kind: str, by: str, opened: str
) -> None:
    name, outcomes = f"{kind}-{by}", set[str]()
    backend = open_backend(str(data / "state"), read_only=True)
    own = opened == "by the program"
    with (
        tg.Log(data / "log", read_only=True) as log,
        apps(data)[name].open_table("t") if own else open_recorded(backend, name, "t") as table,
    ):
        rows = list(table.all())
        assert len(rows) >= 2
        for row in rows[:: max(1, len(rows) // 40)]:
            found = explain_window(table, log, row.key, row.window.start)
            mine = [
                msgspec.json.decode(each.value)["n"]
                for each in found.contributions
                if each.outcome == "counted"
            ]
            assert (len(mine), sum(mine)) == (row.value["count"], row.value["total"]), (row, found.notes)
            outcomes |= {each.outcome for each in found.contributions}
            left = [each.reason for each in found.contributions if each.outcome == "left out"]
            assert set(left) <= {"filter n > 20"}
    assert {"counted", "left out", "duplicate"} <= outcomes
    assert by == "record" or kind == "unlimited" or "late" in outcomes


def test_what_a_function_of_the_program_leaves_out_is_known_to_the_program_alone(
    data: Path, site: Site
) -> None:
    with tg.Log(data / "log", read_only=True) as log, apps(data)["function"].open_table("t") as table:
        row = next(iter(table.all()))
        found = explain_window(table, log, row.key, row.window.start)
        assert found.counted == row.value["count"] and "they agree" in found.notes[0]
    shown = ask(site, "explain", "function:t", key=row.key, start=str(row.window.start))
    assert any(note.startswith("map ") and "is not applied here" in note for note in shown.notes)


def test_windows_over_another_tables_changes_are_not_explained_by_records(data: Path, tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("events", 1)
        log.writer("events").write(events())
    app = tg.App("again", data=tmp_path)
    stream = app.stream("events", value=tg.Json(**EVENT))
    stream.window(KINDS["tumbling"]).agg(n=tg.count()).to_topic("minutes", value=tg.Json(n="int64"))
    changes = app.changes("minutes", window_size="1m", value=tg.Json(n="int64"))
    changes.window(tg.Tumbling("1h", retention="1d")).agg(minutes=tg.count()).to_table("hours")
    app.run("local", until="caught_up")
    with app.open_table("hours") as table, tg.Log(tmp_path / "log", read_only=True) as log:
        row = next(iter(table.all()))
        with pytest.raises(InvalidError, match="counts the rows of the table that is kept in topic minutes"):
            explain_window(table, log, row.key, row.window.start)


@pytest.mark.parametrize("name", KEYS)
def test_a_key_of_any_type_is_offered_found_explained_and_copied(
    site: Site, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    document = ask(site, "table", f"{name}:t")
    assert len(document.some_keys) == len(KEYS[name][1]) == len(set(document.some_keys))
    for key in document.some_keys:
        (row,) = ask(site, "table", f"{name}:t", key=key).rows
        assert row.value["count"] == 1
        explained = ask(site, "explain", f"{name}:t", key=key, start=str(row.window_start_ms))
        assert [each.outcome for each in explained.parts] == ["counted"]
        for document in (ask(site, "table", f"{name}:t", key=key), explained):
            assert run(shlex.split(document.by_hand.cli)[1:]) == 0, document.by_hand.cli
            assert capfd.readouterr().out.strip(), document.by_hand.cli
            exec(compile(document.by_hand.python, "copied", "exec"), {})
            assert capfd.readouterr().out.strip()
    assert len(ask(site, "scan", f"{name}:t").rows) == len(KEYS[name][1])


@pytest.mark.parametrize("name", ["json", "bytes", "tumbling-column"])
def test_only_commits_that_have_the_table_are_offered_and_compared(site: Site, name: str) -> None:
    """An app's first commit, before its first round, has no state to read."""
    commits = [each.number for each in ask(site, "table", f"{name}:t").commits]
    assert commits[0] == 1
    for number in commits:
        ask(site, "table", f"{name}:t", as_of=str(number))
    whole = ask(site, "diff", f"{name}:t", before=str(commits[0]), after=str(commits[-1]))
    assert whole.is_complete and (whole.gained > 0) == (len(commits) > 1)
    with pytest.raises(InvalidError, match=rf"commit 0 of {name}:t is not kept; there are \[1"):
        ask(site, "table", f"{name}:t", as_of="0")
