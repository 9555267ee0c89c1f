"""What the page is told about topics, records, integrity, tables and apps: held against the data itself."""

from __future__ import annotations

import io
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from push_kit import push_here
from push_kit import rows as pushed_rows
from served_shop import WINDOW_MS, shop, strict

import tidegate as tg
from tidegate.errors import CommitGoneError, InvalidError
from tidegate.pipeline.lineage import explain_window
from tidegate.pipeline.table_catalog import open_recorded, recorded_flow, recorded_tables
from tidegate.storage import open_backend
from tidegate.web import apps, integrity, overview, records, schemas, tables, topics
from tidegate.web.charts import heat, part, span
from tidegate.web.failures import NotThereError
from tidegate.web.open_tables import Opened, asked
from tidegate.web.records import RecordsQuestion, Search
from tidegate.web.schemas import (
    DiffQuestion,
    FetchQuestion,
    RowShown,
    ScanQuestion,
    TableQuestion,
    text_of,
    visible,
    window_of,
)
from tidegate.web.schemas import KeyFormat as Shown
from tidegate.web.settings import Limits
from tidegate.web.site import Site


@pytest.fixture(scope="module")
def site(data: Path) -> Iterator[Site]:
    made = Site(data / "log", data / "state")
    yield made
    made.close()


# -- records -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["newest", "oldest"])
@pytest.mark.parametrize(
    "asked",
    [{}, {"value": "o-99"}, {"key": "customer-7"}, {"at": "2026-01-01T10:30Z", "until": "2026-01-01T10:31Z"}],
)
def test_pages_together_are_every_record_once(site: Site, order: str, asked: dict[str, str]) -> None:
    """Forwards and backwards, filtered or not: the pages of `catalogue`-sized pieces add up to a plain filter."""
    with site.log.reader("orders") as reader:
        rows = reader.read_all().to_pylist()

    def wanted(row: dict[str, object]) -> bool:
        time = int(row["timestamp"].timestamp() * 1000)  # type: ignore[attr-defined]
        return (
            asked.get("value", "").encode() in (row["value"] or b"")  # type: ignore[operator]
            and asked.get("key", "").encode() in (row["key"] or b"")  # type: ignore[operator]
            and ("at" not in asked or WINDOW_MS + 1_800_000 <= time <= WINDOW_MS + 1_860_000)
        )

    expected = sorted((row["partition"], row["offset"]) for row in rows if wanted(row))
    found: list[tuple[int, int]] = []
    after = ""
    for _ in range(60):
        search = Search(site, "orders", RecordsQuestion(order=order, limit=5000, after=after, **asked))  # type: ignore[arg-type]
        for table in search.run():
            found += zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True)
        if search.following is None:
            break
        after = search.following
    assert sorted(found) == expected and len(set(found)) == len(found)


def test_the_newest_page_has_every_partition(site: Site) -> None:
    page = records.records(site, "orders", RecordsQuestion(limit=20))
    assert {row.partition for row in page.records} == {0, 1}


def test_headers_are_found_by_name_and_by_part(tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("t", 1)
        headers = [
            [{"key": "trace", "value": b"abc"}],
            [],
            [{"key": "trace", "value": b"xyz"}],
            [{"key": "x", "value": None}],
        ]
        log.writer("t").write(pa.table({"value": ["a", "b", "c", "d"], "headers": headers}))
    site = Site(tmp_path / "log", tmp_path / "state")
    for header, wanted in (("trace", [0, 2]), ("trace=yz", [2]), ("x", [3]), ("none", []), ("x=a", [])):
        page = records.records(site, "t", RecordsQuestion(header=header, order="oldest"))
        assert [row.offset for row in page.records] == wanted, header
    site.close()


def test_a_record_has_its_stamp_its_window_and_its_lifetime(site: Site) -> None:
    found = records.record(site, "orders", 1, 37306)
    assert found.record.stamp is not None and found.record.stamp.kind == "put"
    assert found.lifetime is not None and "retention" in found.lifetime.because
    changed = records.records(site, "orders-per-minute", RecordsQuestion(limit=5))
    assert changed.key_format == "changelog"
    assert all(
        row.window is not None and row.window.start_ms % 60_000 == 0
        for row in changed.records
        if row.stamp and not row.stamp.is_control
    )
    with pytest.raises(NotThereError, match="it holds 0 to"):
        records.record(site, "orders", 0, 10**9)


def test_exports_hold_the_records_of_the_page(client: httpx.Client) -> None:
    asked = {"key": "customer-7", "limit": 500, "order": "oldest"}
    shown = client.get("/api/topics/orders/records", params=asked).json()["records"]
    lines = client.get("/api/topics/orders/export", params={**asked, "format": "jsonl"}).text.splitlines()
    table = pq.read_table(
        io.BytesIO(client.get("/api/topics/orders/export", params={**asked, "format": "parquet"}).content)
    )
    places = sorted((row["partition"], row["offset"]) for row in shown)
    assert sorted((row["partition"], row["offset"]) for row in map(json.loads, lines)) == places
    assert sorted(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True)) == places


def test_damage_is_stepped_over_and_said(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "log", tmp_path / "log")
    broken = sorted((tmp_path / "log" / "orders-0").glob("*.log"))[0]
    content = bytearray(broken.read_bytes())
    content[len(content) // 2] ^= 0xFF
    broken.write_bytes(bytes(content))
    site = Site(tmp_path / "log", tmp_path / "state")
    question, damage, seen = RecordsQuestion(order="oldest", limit=10_000, partition=0), list[str](), 0
    for _ in range(20):
        page = records.records(site, "orders", question)
        damage += page.damage
        seen += len(page.records)
        if page.next is None:
            break
        question = RecordsQuestion(order="oldest", limit=10_000, partition=0, after=page.next)
    assert damage and "reading went on at" in damage[0]
    assert 30_000 < seen < 49_476
    site.close()


def test_a_log_that_is_deleted_under_the_page_is_explained(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data / "log", tmp_path / "log")
    site = Site(tmp_path / "log", tmp_path / "state")
    assert records.records(site, "orders", RecordsQuestion()).records
    with tg.Log(tmp_path / "log") as log:
        log.delete_topic("orders")
    with pytest.raises(NotThereError, match="no topic orders"):
        records.records(site, "orders", RecordsQuestion())
    shutil.rmtree(tmp_path / "log")
    assert overview.overview(site).sentence == "There is no topic here yet."
    site.close()


def test_a_tail_begins_at_the_end_and_tells_what_comes(tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("t", 2)
        writer = log.writer("t")
        writer.write(pa.table({"value": ["old"]}), partition=0)
        site = Site(tmp_path / "log", tmp_path / "state")
        first = records.tail(site, "t", records.TailQuestion())
        assert first.records == []
        writer.write(pa.table({"value": ["new", "other"]}), partition=1)
        second = records.tail(site, "t", records.TailQuestion(value="new", after=first.next or ""))
        assert [(row.partition, row.value.text) for row in second.records] == [(1, "new")]
        assert records.tail(site, "t", records.TailQuestion(after=second.next or "")).records == []
        site.close()


# -- texts -------------------------------------------------------------------------------------------


@given(st.binary(max_size=300))
def test_R39_no_bytes_become_something_that_cannot_be_seen(raw: bytes) -> None:
    shown = text_of(raw, 60)
    assert all(letter.isprintable() or letter in "\n\t" for letter in shown.text)
    assert shown.size == len(raw)
    if shown.kind == "bytes" and not shown.cut:
        assert bytes.fromhex(shown.text) == raw
    if shown.kind in ("text", "json") and not shown.cut and raw.decode().isprintable():
        assert shown.text == raw.decode()


@given(st.text(max_size=100))
def test_visible_text_keeps_what_can_be_seen(text: str) -> None:
    if text.isprintable():
        assert visible(text) == text
    assert "\x1b" not in visible(text) and "\u202e" not in visible(text)


@given(st.binary(min_size=1, max_size=20), st.integers(700_000_000_000, 4_000_000_000_000))
def test_windowed_keys_are_read_back(inner: bytes, start: int) -> None:
    from tidegate.windows.keys import KeyFormat, SessionWindow, TimeWindow, encode_key

    for format, window in (
        ("changelog", TimeWindow(start, start + 1000)), ("topic", TimeWindow(start, start + 1000)),
        ("session", SessionWindow(start, start + 5)),
    ):  # fmt: skip
        found = window_of(encode_key(inner, window, KeyFormat(format)), Shown(format))
        assert found is not None and found.start_ms == start and found.key == text_of(inner, 200)


def test_pictures_stay_in_their_box() -> None:
    assert (part(5, 0), part(1, 4), part(9, 3)) == (0, 25, 100)
    assert [heat(value, 8) for value in (0, 1, 4, 8)] == [0, 1, 2, 4]
    assert span(5, 5, 0, 10, 100) == (50, 3)


# -- topics, integrity, apps -----------------------------------------------------------------------------


def test_a_topic_tells_its_partitions_settings_and_lifetimes(site: Site) -> None:
    found = topics.topic_document(site, "orders", topics.TopicQuestion(partition=1))
    assert [row.partition for row in found.partitions] == [0, 1]
    assert sum(row.share for row in found.partitions) == pytest.approx(1)
    assert found.records == 101_010 and 1 <= found.skew < 1.1
    assert {row.partition for row in found.segments} == {1} and found.segments[-1].active
    assert {"retention.ms", "cleanup.policy"} <= {row.key for row in found.settings}
    assert found.checked_every_ms is None and found.segments[0].rule == "unattended"


def test_an_audit_finds_what_was_planted_and_nothing_else(site: Site) -> None:
    found = integrity.integrity(site, "orders", integrity.IntegrityQuestion(wait_ms=20_000))
    assert found.state == "done" and found.records == 101_010
    assert {(each.kind, each.partition, each.offset) for each in found.faults} == {
        ("missing", 0, 27566), ("corrupt", 1, 37306), ("corrupt", 0, 49474), ("duplicate", 0, 6006),
    }  # fmt: skip
    missing = next(each for each in found.faults if each.kind == "missing")
    assert "3 records of this producer are missing before this one" in missing.message
    assert len(found.producers) == 3 and sum(each.faults for each in found.producers) == 3
    prices = integrity.integrity(site, "prices", integrity.IntegrityQuestion(wait_ms=20_000))
    assert prices.faults_total == 0 and prices.gaps and "compact" in prices.gaps[0].reason


def test_apps_tell_where_they_stand_and_how_to_go_on(site: Site) -> None:
    found = apps.app_document(site, "shop", apps.AppQuestion())
    assert (found.state, found.lag_records, found.records) == ("idle", 0, 101_010)
    assert [each.round for each in found.rounds] == list(range(found.round + 1))[-len(found.rounds) :]
    assert sum(each.memory_bytes for each in found.tenants) == found.memory_bytes
    stopped = apps.app_document(site, "strict", apps.AppQuestion())
    assert stopped.state == "stopped"
    assert all(
        each.ways[0].command.startswith("tidegate app resume strict --partition") for each in stopped.stopped
    )
    assert overview.overview(site).health == "bad"
    with pytest.raises(NotThereError, match="there are: shop, strict"):
        apps.app_document(site, "none", apps.AppQuestion())


# -- tables ------------------------------------------------------------------------------------------


def test_a_recorded_table_equals_the_programs_own(data: Path) -> None:
    backend = open_backend(str(data / "state"))
    for app in (shop(data), strict(data)):
        (known,) = recorded_tables(backend, app.name)
        with app.open_table(known.name) as own, open_recorded(backend, app.name, known.name) as found:
            assert found.schema == own.schema and found.flow == own.flow
            assert found.to_arrow().equals(own.to_arrow())
            assert found.late().equals(own.late())
    with pytest.raises(InvalidError, match="has no table"):
        open_recorded(backend, "shop", "none")
    backend.close()


def _amount(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.select(["amount"])


def test_a_flow_that_calls_functions_is_rebuilt_or_refused_never_guessed() -> None:
    app = tg.App("a", data="/nowhere")
    value = tg.Json(id="string", amount="double", at="timestamp", price="decimal(18,2)")

    streams = [
        app.stream("t", value=value).filter("amount > 1"),
        app.stream("t", value=value).map(_amount, pa.schema([("amount", pa.float64())])),
        app.stream("t", value=value).select("amount", half="amount / 2"),
        app.stream("t", value=value).key_by("id"),
    ]
    for number, stream in enumerate(streams):
        made = stream.window(tg.Hopping("1m", "30s", grace="5s")).agg(n=tg.count(), top=tg.top_k("amount", 3))
        made.to_table(f"t{number}")
    for said in app.flows:
        found = recorded_flow(said.description)
        assert found.result_schema == said.result_schema and found.key_serde.name == said.key_serde.name
        assert found.document["layouts"] == said.document["layouts"]
    refused = tg.App("b", data="/nowhere")
    refused.stream("t", value=value).select(twice=lambda batch: batch.column("amount")).window(
        tg.Tumbling("1m")
    ).agg(n=tg.count()).to_table("per-minute")
    with pytest.raises(InvalidError, match=r"App\.open_table"):
        recorded_flow(refused.flows[0].description)


def test_explanations_agree_with_the_values_they_explain(data: Path) -> None:
    """Every window of some customers: as many records are counted as the window says."""
    with shop(data).open_table("per-minute") as table, tg.Log(data / "log", read_only=True) as log:
        seen = set()
        for key in ("customer-7", "customer-0", "customer-104"):
            for row in list(table.fetch(key))[::9]:
                found = explain_window(table, log, key, row.window.start)
                assert found.counted == row.value["orders"], (key, row)
                assert sum(
                    json.loads(each.value)["amount"]
                    for each in found.contributions
                    if each.outcome == "counted"
                ) == pytest.approx(row.value["revenue"])
                seen |= {each.outcome for each in found.contributions}
        assert {"counted", "duplicate"} <= seen
        late = table.late().to_pylist()[0]
        found = explain_window(table, log, late["key"].decode(), late["event_ts"] // 60_000 * 60_000)
        assert "late" in {each.outcome for each in found.contributions}


def test_tables_are_fetched_scanned_and_compared(site: Site, data: Path) -> None:
    with shop(data).open_table("per-minute") as own:
        everything = own.to_arrow()
    rows, after = list[RowShown](), ""
    while True:
        page = tables.scan(site, "shop:per-minute", ScanQuestion(limit=5000, after=after))
        rows += page.rows
        if page.next is None:
            break
        after = page.next
    assert len(rows) == everything.num_rows
    assert sum(row.value["orders"] for row in rows) == sum(everything["orders"].to_pylist())
    kept = tables.fetch(site, "counts", FetchQuestion(key="customer-7"))
    own_rows = tables.fetch(site, "shop:per-minute", FetchQuestion(key="customer-7"))
    assert [row.value for row in kept.rows] == [row.value for row in own_rows.rows]
    newest = own_rows.commit
    changed = tables.diff(
        site, "shop:per-minute", DiffQuestion(before=newest - 1, after=newest, key="customer-7")
    )
    before = tables.fetch(site, "shop:per-minute", FetchQuestion(key="customer-7", as_of=newest - 1))
    assert changed.gained + len(before.rows) == len(own_rows.rows) and changed.lost == 0
    assert tables.diff(site, "shop:per-minute", DiffQuestion(before=newest, after=newest)).rows == []
    with pytest.raises(NotThereError, match="is not kept"):
        tables.fetch(site, "shop:per-minute", FetchQuestion(key="k", as_of=10**6))


def test_a_kept_table_is_followed_while_it_is_asked_for(tmp_path: Path) -> None:
    """Commits come while questions are asked by several threads: each answer is of one commit, none goes back."""
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("counts", 1, {"cleanup.policy": "compact"})
        writer = log.writer("counts")

        def table() -> Any:
            return tg.table(
                log, "counts", state=tmp_path / "state", consumed=tg.Consumed(tg.String(), tg.Json()),
                materialized=tg.Materialized("latest"),
            )  # fmt: skip

        def commit(number: int) -> None:
            values = [f'{{"n":{number}}}'] * 2
            writer.write(
                pa.table({"key": ["a", "b"], "value": values, "timestamp": [WINDOW_MS + number] * 2})
            )
            with table() as built:
                built.catch_up()
                built.commit()

        commit(0)
        site, wrong, ended = Site(tmp_path / "log", tmp_path / "state"), list[object](), threading.Event()

        def ask() -> None:
            last = (-1, -1)
            while not ended.is_set():
                found = tables.scan(site, "latest", schemas.ScanQuestion())
                seen = {row.value["n"] for row in found.rows}
                if len(seen) != 1 or (found.commit, *seen) < last:
                    wrong.append((found.commit, seen, last))
                last = (found.commit, *seen)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for each in threads:
            each.start()
        for number in range(1, 12):
            commit(number)
        deadline = time.monotonic() + 300
        while tables.fetch(site, "latest", schemas.FetchQuestion("a")).rows[0].value != {"n": 11}:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ended.set()
        for each in threads:
            each.join(300)
        site.close()
    assert not wrong


def test_what_a_builder_lets_go_while_it_is_read_is_read_from_its_newest_commit(tmp_path: Path) -> None:
    with tg.Log(tmp_path / "log", durability="os") as log:
        log.create_topic("counts", 1)
        said = {"consumed": tg.Consumed(tg.String(), tg.Json()), "materialized": tg.Materialized("latest")}
        with (
            log.writer("counts") as writer,
            tg.table(log, "counts", state=tmp_path / "state", **said) as built,
        ):

            def commit(number: int) -> None:
                one = {"key": ["a"], "value": [f'{{"n":{number}}}'], "timestamp": [WINDOW_MS + number]}
                writer.write(pa.table(one))
                built.catch_up()
                built.commit()
                built._builder.source.runtime.maintain("latest", 10_000)  # type: ignore[union-attr]

            looked = list[int]()

            def look(table: Opened) -> object:
                looked.append(table.number)
                if len(looked) == 1:  # nothing of this commit was read yet when it is let go
                    for number in range(1, 60):
                        commit(number)
                return table.fetch("a", 0, tables.LATEST)[0].value["n"]

            commit(0)
            site = Site(tmp_path / "log", tmp_path / "state")
            try:
                assert asked(site, "latest", None, look) == 59
                assert looked[1:] == [built.commits()[-1].number] > looked[:1]
                looked.clear()
                with pytest.raises(
                    CommitGoneError, match="not kept"
                ):  # whoever asks for a commit gets no other
                    asked(site, "latest", built.commits()[-1].number, look)
            finally:
                site.close()


def test_versions_of_a_pushed_table_are_its_commits(tmp_path: Path) -> None:
    push_here(tmp_path, pushed_rows(40))
    push_here(tmp_path, [*pushed_rows(38), (b"key-00038", b"other"), (b"key-00099", b"new")])
    site = Site(tmp_path / "log", tmp_path / "state")
    try:
        assert [(each.name, each.kind, each.commit) for each in tables.table_list(site).tables] == [
            ("users", "key", 2)
        ]
        shown = tables.table_document(site, "users", TableQuestion(key="key-00038"))
        assert shown.is_versioned and [each.number for each in shown.commits] == [1, 2]
        assert [row.value for row in shown.rows] == [{"value": "other"}]
        before = tables.fetch(site, "users", FetchQuestion(key="key-00038", as_of=1))
        assert [row.value for row in before.rows] == [{"value": "v-38"}]
        found = tables.diff(site, "users", DiffQuestion(before=1, after=2))
        assert (found.gained, found.lost, found.changed) == (1, 1, 1)
        assert "tidegate table diff users_v1 users_v2" in found.by_hand.cli
        with pytest.raises(NotThereError, match="can be read: 1, 2"):
            tables.fetch(site, "users", FetchQuestion(key="k", as_of=3))
    finally:
        site.close()


def test_as_of_an_earlier_commit_is_what_was_true_then(site: Site) -> None:
    document = tables.table_document(site, "shop:per-minute", TableQuestion(key="customer-7"))
    past = tables.table_document(
        site, "shop:per-minute", TableQuestion(key="customer-7", as_of=document.commits[1].number)
    )
    assert past.rows_total < document.rows_total and document.late_total == 41


def test_limits_are_documents_too() -> None:
    assert Limits().page_rows == 10_000
