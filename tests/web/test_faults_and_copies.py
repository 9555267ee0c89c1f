"""What the page knows it says: faults and their records, ways to go on, limits, tables of all kinds, windowed keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.cli.main import run
from tidegate.log.format.batch import iter_headers
from tidegate.pipeline.admin import acknowledge_faults, app_status
from tidegate.pipeline.lineage import explain_window
from tidegate.storage import open_backend
from tidegate.web import pages
from tidegate.web.endpoints import ENDPOINTS
from tidegate.web.site import Site

T = 1_767_261_600_000  # 2026-01-01T10:00Z
EVENT = {"id": "string", "n": "int64", "at": "timestamp"}
COUNT = 90


def largest(states: pa.Array, groups: Any, count: int) -> pa.Array:
    found = np.full(count, -1, np.int64)
    np.maximum.at(found, groups, states.to_numpy())
    return pa.array(found)


def events() -> pa.Table:
    """Three keys; the event time lies an hour before the record's own, and jumps; every id twice."""
    numbers = range(COUNT)
    values = [
        msgspec.json.encode({"id": f"i{n % 45}", "n": n, "at": T - 3_600_000 + (n * 7 % COUNT) * 2000})
        for n in numbers
    ]
    keys = [f"k{n % 3}" for n in numbers]
    return pa.table({"key": keys, "value": values, "timestamp": [T + n * 1000 for n in numbers]})


def make(data: Path) -> None:
    with tg.Log(data / "log", durability="os") as log:
        log.create_topic("texts", 2)
        log.writer("texts").write(
            pa.table({"key": [f"k{n}" for n in range(20)], "value": ["no json"] * 20, "timestamp": [T] * 20})
        )
        log.create_topic("mixed", 1)
        values = ['{"n": 1}', '{"n": 2}', "no json", '{"n": 3}']
        log.writer("mixed").write(pa.table({"key": ["k"] * 4, "value": values, "timestamp": [T] * 4}))
        log.create_topic("events", 2)
        log.writer("events").write(events())
        log.create_topic("towns", 1)
        log.writer("towns").write(
            pa.table({"key": ["k0", "k1"], "value": ['{"town": "a"}', '{"town": "b"}'], "timestamp": [T] * 2})
        )
        log.create_topic("numbered", 1)
        raw = [(7).to_bytes(8, "big"), (8).to_bytes(8, "big")]
        log.writer("numbered").write(
            pa.table({"key": pa.array(raw, pa.binary()), "value": ['{"n": 1}'] * 2, "timestamp": [T] * 2})
        )
        with tg.table(
            log, "towns", state=data / "state", materialized=tg.Materialized("towns"),
            consumed=tg.Consumed(tg.String(), tg.Json(town="string")),
        ) as table:  # fmt: skip
            table.catch_up()
            table.commit()
    for app in apps(data).values():
        app.run("local", until="caught_up", round_records=1 if app.name == "numbers" else 50)


def apps(data: Path) -> dict[str, tg.App]:
    def app(name: str, **settings: Any) -> tg.App:
        made[name] = tg.App(name, data=data, **settings)
        return made[name]

    made: dict[str, tg.App] = {}
    minutes = tg.Tumbling("1m", grace="2h", retention="9d")
    for name, topic, on_error in (
        ("allfail", "texts", "fail"), ("allkept", "texts", "keep"), ("onefails", "mixed", "fail"),
        ("onekept", "mixed", "keep"),
    ):  # fmt: skip
        stream = app(name).stream(topic, value=tg.Json(n="int64"), on_error=on_error)
        stream.window(minutes).agg(records=tg.count()).to_table("t")
    limits = {"backlog_limit_bytes": "300MiB", "worker_total_bytes": "700MiB"}
    stream = app("bytime", storage=limits).stream("events", value=tg.Json(**EVENT), timestamp="at")
    kept = stream.drop_duplicates("id", within="1h", grace="2h").window(minutes)
    kept.agg(records=tg.count(), total=tg.sum("n")).to_topic("by-time").to_table("t")
    stream = app("reduced").stream("events", value=tg.Json(**EVENT))
    reduced = stream.window(minutes).agg(
        records=tg.count(), most=tg.reduce("n", largest, state=pa.int64()), total=tg.sum("n")
    )
    reduced.to_table("t")
    stream = app("looked").stream("events", value=tg.Json(**EVENT))
    found = stream.lookup("towns", "town", value=tg.Json(town="string")).window(minutes)
    found.agg(records=tg.count(), towns=tg.count_distinct("town")).to_topic(
        "looked-up", key_format="topic"
    ).to_table("t")
    stream = app("numbers").stream("numbered", key=tg.Long(), value=tg.Json(n="int64"))
    stream.window(tg.Session("1m", grace="1h", retention="9d")).agg(records=tg.count()).to_topic(
        "visits"
    ).to_table("t")
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("known") / "data"
    make(folder)
    return folder


@pytest.fixture
def site(data: Path) -> Iterator[Site]:
    made = Site(data / "log", data / "state")
    yield made
    made.close()


def ask(site: Site, name: str, words: dict[str, str] | None = None, **question: str) -> Any:
    return ENDPOINTS[name].ask(site, words or {}, question)


def page(site: Site, name: str, words: dict[str, str] | None = None, **question: str) -> str:
    """The screen as a person reads it: text, without markup."""
    asked = ENDPOINTS[name]
    document = msgspec.json.encode(asked.ask(site, words or {}, question))
    around = {"path": "/x", "nav": asked.tag, "api": None, "can_leave": False}
    return pages.document_page(str(asked.screen), document, ask=question, **around).decode()


def text(shown: str) -> str:
    return unescape(re.sub(r"\s+", " ", re.sub("<[^>]+>", "", shown)))


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_damaged_batch_is_a_fault_of_its_topic(tmp_path: Path, place: str) -> None:
    """Behind the last readable record nothing else shows that records are lost."""
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("orders", 1)
        sender = log.writer("orders", integrity=True)
        for number in range(3):
            sender.write(pa.table({"key": ["a"] * 2, "value": [str(number)] * 2}))
        sender.close(graceful=False)
    path = next((tmp_path / "log" / "orders-0").glob("*.log"))
    content = bytearray(path.read_bytes())
    starts = [start for start, _ in iter_headers(bytes(content))]
    content[starts[0 if place == "first" else -1] + 70] ^= 1
    path.write_bytes(content)
    site = Site(tmp_path / "log", tmp_path / "state")
    found = ask(site, "integrity", {"topic": "orders"}, wait_ms="20000")
    offset, end = (0, "offset 2") if place == "first" else (5, "the end")
    message = f"The log is damaged: no record from offset {offset} to {end} can be read."
    assert (offset, message) in [(each.offset, each.message) for each in found.faults if each.is_fault]
    assert "nothing is missing" not in found.sentence and found.faults_total >= 1
    assert ask(site, "overview").health == "bad"
    assert message in text(page(site, "integrity", {"topic": "orders"}))
    assert run(["verify", "orders", "--log", str(tmp_path / "log")]) == 1


@pytest.mark.parametrize(
    ("app", "health", "faults"),
    [
        ("allfail", "bad", 2),
        ("allkept", "bad", 20),
        ("onefails", "bad", 1),
        ("onekept", "watch", 1),
        ("bytime", "good", 0),
    ],
)
def test_an_app_with_faults_is_never_green(site: Site, app: str, health: str, faults: int) -> None:
    """Records that were set aside and partitions that stopped are faults, as those are that validation found."""
    found = ask(site, "app", {"app": app})
    assert (found.health, found.faults) == (health, faults)
    assert f'class="sentence {health}"' in page(site, "app", {"app": app})
    line = next(each for each in ask(site, "overview").apps if each.name == app)
    assert (line.health, line.faults) == (health, faults)


def test_the_overview_is_red_and_counts_all_faults(site: Site) -> None:
    found = ask(site, "overview")
    assert (found.health, found.faults) == ("bad", 24)
    assert "App allfail is stopped by a fault" in found.sentence
    for app in ("allfail", "allkept"):
        assert any(
            each.sentence == f"{app}: no record of t could be used: change its definition"
            for each in found.steps
        )


def test_a_topic_that_was_checked_and_has_faults_is_not_green(tmp_path: Path) -> None:
    """Without an app: what the page itself found is on its first screen."""
    from tidegate.cli.demo_shop import plant

    plant(tmp_path / "log")
    site = Site(tmp_path / "log", tmp_path / "state")
    assert ask(site, "overview").health == "good"  # nobody looked yet
    assert ask(site, "integrity", {"topic": "orders"}, wait_ms="20000").faults_total == 3
    found = ask(site, "overview")
    assert (found.health, found.sentence) == ("bad", "Topic orders has 3 faults: see which records.")
    site.close()


@pytest.mark.parametrize(
    ("app", "kinds"),
    [("allfail", {"stopped": 2}), ("allkept", {"unreadable": 20}), ("onekept", {"unreadable": 1})],
)
def test_faults_are_a_list_with_links_to_their_records(site: Site, app: str, kinds: dict[str, int]) -> None:
    found = ask(site, "faults", {"app": app})
    assert found.faults_total == len(found.faults)
    assert {kind: sum(each.kind == kind for each in found.faults) for kind in kinds} == kinds
    shown = page(site, "faults", {"app": app})
    for each in found.faults:
        href = f"/topics/{each.topic}/records/{each.partition}/{each.offset}"
        assert f'href="{href}"' in shown
        words = {"topic": each.topic, "partition": str(each.partition), "offset": str(each.offset)}
        assert ask(site, "record", words).record.value.text == "no json"
    assert f'href="/apps/{app}/faults"' in page(site, "app", {"app": app})
    assert f'href="/apps/{app}/faults"' in page(site, "overview")


def test_what_validation_found_is_listed_with_its_records(tmp_path: Path) -> None:
    """It counts only, so the topic is checked again; faults behind where the app has read are not its own."""
    from tidegate.cli.demo_shop import plant

    plant(tmp_path / "log")
    app = tg.App("shop", data=tmp_path)
    stream = app.stream("orders", value=tg.Json(order_id="string", amount="double")).validate()
    stream.window(tg.Tumbling("1m", grace="30s", retention="1d")).agg(n=tg.count()).to_table("t")
    app.run("local", until="caught_up")
    site = Site(tmp_path / "log", tmp_path / "state")
    found = ask(site, "faults", {"app": "shop"}, wait_ms="20000")
    assert {(each.kind, each.partition, each.offset) for each in found.faults} == {
        ("missing", 0, 27566), ("corrupt", 1, 37306), ("corrupt", 0, 49474)
    }  # fmt: skip
    assert found.faults_total == 3 and not found.checking and not found.is_acknowledged
    assert 'class="sentence bad"' in page(site, "overview")
    for each in found.faults:  # C6 is told by the check alone, D1 by the record itself
        words = {"topic": "orders", "partition": str(each.partition), "offset": str(each.offset)}
        shown = page(site, "record", words)
        assert 'class="note fault"' in shown
    assert "This record is corrupt: it is not what its producer sent" in page(
        site, "record", {"topic": "orders", "partition": "1", "offset": "37306"}
    )
    acknowledge_faults(open_backend(str(tmp_path / "state")), "shop")
    assert ask(site, "overview").health == "watch"
    assert ask(site, "faults", {"app": "shop"}).is_acknowledged
    site.close()
    anew = Site(tmp_path / "log", tmp_path / "state")  # nothing was checked here
    corrupt = ask(anew, "record", {"topic": "orders", "partition": "1", "offset": "37306"})
    assert "corrupt" in (corrupt.fault or "")
    sound = ask(anew, "record", {"topic": "orders", "partition": "1", "offset": "37305"})
    assert sound.fault is None
    control = ask(anew, "record", {"topic": "orders", "partition": "1", "offset": "0"})
    assert control.record.stamp.is_control and control.fault is None
    anew.close()


# -- ways to go on --------------------------------------------------------------------------------


def test_the_way_without_loss_comes_first_and_runs_as_it_is(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    shutil.copytree(data, tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    site = Site(Path("data/log"), Path("data/state"))
    (stop,) = ask(site, "app", {"app": "onefails"}).stopped
    assert [bool("--skip-to" in each.command) for each in stop.ways] == [False, True]
    assert "without loss" in stop.ways[0].sentence
    monkeypatch.chdir("/")
    for way, skipped in zip(stop.ways, (0, 1), strict=True):
        assert run(shlex.split(way.command)[1:]) == 0
        backend = open_backend(str(tmp_path / "data" / "state"))
        status = app_status(backend, "onefails")
        assert not status.stopped and len(status.losses) == skipped
        if not skipped:
            apps(tmp_path / "data")["onefails"].run("local", until="caught_up")  # as before: it stops again
            assert app_status(backend, "onefails").stopped
    site.close()


def test_where_every_record_fails_the_definition_is_to_be_changed(site: Site) -> None:
    found = ask(site, "app", {"app": "allfail"})
    assert found.all_fail == ["t"]
    for stop in found.stopped:
        (way,) = stop.ways
        assert "change the app's definition" in way.sentence and "--skip-to" not in way.command
    assert "--skip-to" not in page(site, "app", {"app": "allfail"})
    assert ask(site, "app", {"app": "onefails"}).all_fail == []


# -- explain --------------------------------------------------------------------------------------


def test_a_window_by_a_column_of_time_is_explained(data: Path, site: Site) -> None:
    """Against a plain reading of the same records."""
    seen: dict[tuple[str, int], list[int]] = {}
    ids: dict[tuple[str, str], int] = {}
    for row in events().to_pylist():
        said = msgspec.json.decode(row["value"])
        if ids.setdefault((row["key"], said["id"]), said["n"]) == said["n"]:
            seen.setdefault((row["key"], said["at"] // 60_000 * 60_000), []).append(said["n"])
    counted = 0
    with tg.Log(data / "log", read_only=True) as log, apps(data)["bytime"].open_table("t") as table:
        for row in table.all():
            found = explain_window(table, log, row.key, row.window.start)
            mine = [
                msgspec.json.decode(each.value)["n"]
                for each in found.contributions
                if each.outcome == "counted"
            ]
            assert sorted(mine) == sorted(seen[row.key, row.window.start])
            assert len(mine) == row.value["records"] and sum(mine) == row.value["total"]
            assert any("they agree" in note for note in found.notes)
            counted += len(mine)
    assert counted == 45
    key, start = next(iter(seen))
    shown = page(site, "explain", {"table": "bytime:t"}, key=key, start=str(start))
    assert "they agree" in text(shown) and text(shown).count("counted") >= len(seen[key, start])


# -- tables, limits, keys -------------------------------------------------------------------------


@pytest.mark.parametrize("app", ["reduced", "looked"])
def test_a_table_with_a_lookup_or_a_reduce_is_shown(data: Path, site: Site, app: str) -> None:
    lines = {each.name: each for each in ask(site, "tables").tables}
    assert lines[f"{app}:t"].unreadable is None
    found = ask(site, "table", {"table": f"{app}:t"}, key="k1")
    with apps(data)[app].open_table("t") as table:
        wanted = table.fetch("k1").to_arrow().to_pylist()
    assert len(found.rows) == len(wanted) > 0
    for shown, row in zip(found.rows, wanted, strict=True):
        for name, value in shown.value.items():
            assert value == (None if name == "most" else row[name])
    assert found.unread_columns == (["most"] if app == "reduced" else [])
    assert (
        "most: made by functions of the app's program" in text(page(site, "table", {"table": f"{app}:t"}))
    ) == (app == "reduced")


def test_limits_are_those_of_the_app(site: Site) -> None:
    found = ask(site, "app", {"app": "bytime"})
    assert (found.backlog_limit_bytes, found.memory_limit_bytes) == (300 << 20, 700 << 20)
    assert "of 300 MiB" in text(page(site, "app", {"app": "bytime"}))
    others = ask(site, "app", {"app": "reduced"})
    whole = ask(site, "overview")
    assert whole.backlog_limit_bytes == (300 << 20) + (len(whole.apps) - 1) * others.backlog_limit_bytes
    assert whole.memory_limit_bytes == (700 << 20) + (len(whole.apps) - 1) * others.memory_limit_bytes


@pytest.mark.parametrize(
    ("topic", "format", "width"),
    [("by-time", "changelog", 60_000), ("looked-up", "topic", 60_000), ("visits", "session", 0)],
)
def test_windowed_keys_are_shown_as_key_and_window(site: Site, topic: str, format: str, width: int) -> None:
    """As the app says that writes the topic; the last page, an older one and a record's own."""
    found = ask(site, "records", {"topic": topic}, limit="5")
    assert found.key_format == format and found.records
    for each in found.records:
        assert each.window is not None and each.window.end_ms == each.window.start_ms + width
        keys = ("\x00" * 7 + "\x07", "\x00" * 7 + "\x08") if topic == "visits" else ("k0", "k1", "k2")
        from tidegate.web.schemas import text_of

        assert each.shown_key.text in {text_of(key.encode()).text for key in keys}
    first = found.records[0]
    words = {"topic": topic, "partition": str(first.partition), "offset": str(first.offset)}
    assert ask(site, "record", words).record.window == first.window
    shown = text(page(site, "records", {"topic": topic}, limit="5"))
    assert re.search(r"2026-01-01 \d\d:\d\d:\d\dZ to 2026-01-01 \d\d:\d\d:\d\dZ", shown)


# -- copies ---------------------------------------------------------------------------------------

COPIED = [
    ("overview", {}, {}), ("apps", {}, {}), ("tables", {}, {}), ("topics", {}, {}),
    *(("app", {"app": each}, {}) for each in ("allfail", "bytime", "numbers")),
    *(("faults", {"app": each}, {}) for each in ("allfail", "onekept", "bytime")),
    *(("table", {"table": f"{each}:t"}, {}) for each in ("allkept", "bytime", "reduced", "looked", "numbers")),
    ("table", {"table": "towns"}, {}), ("table", {"table": "towns"}, {"key": "k1"}),
    ("table", {"table": "numbers:t"}, {"key": "7"}),
    ("explain", {"table": "bytime:t"}, {"key": "k1", "start": str(T - 3_600_000)}),
    ("explain", {"table": "numbers:t"}, {"key": "7", "start": str(T)}),
    ("diff", {"table": "bytime:t"}, {"before": "0", "after": "1", "key": "k1"}),
    ("diff", {"table": "numbers:t"}, {"before": "0", "after": "1"}),
    ("records", {"topic": "visits"}, {}), ("record", {"topic": "visits", "partition": "0", "offset": "1"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "words", "question"), COPIED, ids=lambda each: str(each)[:40])
def test_what_is_copied_runs_in_any_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any,
    name: str, words: dict[str, str], question: dict[str, str],
) -> None:  # fmt: skip
    """The page was started in one folder, with relative paths; what is copied from it runs in another."""
    monkeypatch.chdir(data.parent)
    site = Site(Path("data/log"), Path("data/state"))
    if "before" in question:
        rounds = [each.number for each in ask(site, "table", {"table": words["table"]}).commits][-2:]
        question = question | {"before": str(rounds[0]), "after": str(rounds[-1])}
    copy = ask(site, name, words, **question).by_hand
    site.close()
    monkeypatch.chdir(tmp_path)
    for line in copy.cli.splitlines():
        if "acknowledge" in line:
            continue  # it changes what other tests look at
        ended = run(shlex.split(line)[1:])
        said = capfd.readouterr()
        assert ended in ((0, 1, 5) if line.startswith("tidegate app status") else (0,)), (line, said.err)
        assert said.out.strip() or said.err.startswith("0 rows of "), line
    exec(compile(copy.python, "copied", "exec"), {})
    assert capfd.readouterr().out.strip(), copy.python
