"""The page over a real broker: topics, records, integrity, tables; what a broker cannot show; a broker that goes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from kafka_broker import Broker
from served_shop import serving

import tidegate as tg
from tidegate.log.log import open_log

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]
NOW = 1_767_261_600_000
KEPT = {"retention.ms": -1}
PAGE = {"accept": "text/html"}
KEPT_RECORDS = r'tidegate_log_records\{partition="(\d+)",topic="paged"\} (\S+)'


def fill(url: str) -> None:
    """`paged`: 900 numbered records, of which the copy into `paged-short` lost one; `hostile`: one that tries."""
    with open_log(url) as cluster:
        cluster.create_topic("paged", 3, KEPT)
        keys = [f"customer-{number % 30}" for number in range(900)]
        values = [f'{{"order_id":"o-{number}","amount":{number % 7}}}' for number in range(900)]
        times = [NOW + 1000 * number for number in range(900)]
        with cluster.writer("paged", integrity=True) as sender:
            sender.write(pa.table({"key": keys, "value": values, "timestamp": times}))
        cluster.create_topic("paged-short", 1, KEPT)
        with cluster.reader("paged", [1], control_records=True) as reader:
            whole = pa.Table.from_batches(list(reader)).select(["key", "value", "timestamp", "headers"])
        with cluster.writer("paged-short") as writer:
            writer.write(pa.concat_tables([whole.slice(0, 50), whole.slice(51)]))
        cluster.create_topic("paged-hostile", 1, KEPT)
        with cluster.writer("paged-hostile") as writer:
            writer.write(pa.table({"key": ["<b>k</b>"], "value": ["<script>x()</script>\x1b[31m"]}))


def build(url: str, data: Path) -> None:
    """An app and a table kept over the cluster's topics."""
    app = tg.App("paging", log=url, state=str(data / "state"))
    (
        app.stream("paged", value=tg.Json(order_id="string", amount="double"))
        .window(tg.Tumbling("1m", grace="1h", retention="2d"))
        .agg(orders=tg.count(), amount=tg.sum("amount"))
        .to_table("per-minute")
    )
    app.run("local", until="caught_up")


@pytest.fixture(scope="module")
def at(module_broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    url, data = f"kafka://{module_broker.address}", tmp_path_factory.mktemp("page") / "data"
    data.mkdir()
    fill(url)
    build(url, data)
    with serving(data, "--log", url) as address, httpx.Client(base_url=address, timeout=300) as client:
        yield client


def test_topics_and_their_partitions_are_a_clusters(at: httpx.Client) -> None:
    lines = {each["name"]: each for each in at.get("/api/topics").json()["topics"]}
    assert (lines["paged"]["partitions"], lines["paged"]["bytes"], lines["paged"]["segments"]) == (
        3,
        None,
        None,
    )
    topic = at.get("/api/topics/paged").json()
    assert sum(each["records"] for each in topic["partitions"]) == topic["records"] >= 900
    assert abs(sum(each["share"] for each in topic["partitions"]) - 1) < 1e-9
    assert topic["segments"] == [] and "does not show its log segments" in topic["not_shown"]
    settings = {each["key"]: each for each in topic["settings"]}
    assert settings["retention.ms"]["value"] == "-1"
    assert settings["retention.ms"]["source"] == "DYNAMIC_TOPIC_CONFIG"
    page = at.get("/topics/paged", headers=PAGE)
    assert page.status_code == 200 and "does not show its log segments" in page.text
    assert "Nobody runs retention" not in page.text
    overview = at.get("/", headers=PAGE).text
    assert "topics of kafka://" in overview and "paged" in overview


def test_its_metrics_have_what_a_broker_shows(at: httpx.Client) -> None:
    text = at.get("/metrics").text
    kept = {int(number): float(value) for number, value in re.findall(KEPT_RECORDS, text)}
    partitions = at.get("/api/topics/paged").json()["partitions"]
    assert kept == {each["partition"]: each["records"] for each in partitions}
    assert "tidegate_log_bytes{" not in text and "tidegate_log_segments{" not in text
    assert 'tidegate_app_records_total{app="paging"} ' in text


def test_records_are_found_paged_opened_followed_and_exported(at: httpx.Client) -> None:
    found = at.get("/api/topics/paged/records", params={"key": "customer-7", "value": '"o-7"'}).json()
    assert found["is_complete"] and len(found["records"]) == 1 and found["looked_at"] >= 900
    (row,) = found["records"]
    assert row["stamp"] is not None and '"order_id":"o-7"' in row["value"]["text"]
    place = f"{row['partition']}/{row['offset']}"
    one = at.get(f"/api/topics/paged/records/{place}").json()
    assert one["record"]["offset"] == row["offset"] and one["lifetime"] is None
    assert "lifetime" not in one["by_hand"]["cli"] and "open_log('kafka://" in one["by_hand"]["python"]
    assert at.get(f"/topics/paged/records/{place}", headers=PAGE).status_code == 200
    shown = paged(at)
    assert len(shown) == 900
    ends = {each["partition"]: each for each in at.get("/api/topics/paged").json()["partitions"]}
    everything = paged(at, control_records=True)
    assert len(everything) == sum(each["records"] for each in ends.values()) > 900
    assert shown < everything
    since = at.get("/api/topics/paged/records", params={"at": "2026-01-01T10:10Z", "limit": 1000}).json()
    assert min(each["timestamp_ms"] for each in since["records"]) == NOW + 600_000
    exported = at.get("/api/topics/paged/export", params={"limit": 10, "format": "parquet"})
    assert exported.content[:4] == b"PAR1"
    assert at.get("/api/topics/paged/records/0/99999999").status_code == 404
    assert at.get("/api/topics/none/records").status_code == 404
    hostile = at.get("/topics/paged-hostile/records", headers=PAGE).text
    assert "<script>x" not in hostile and "&lt;script&gt;x()" in hostile and "\x1b" not in hostile


def paged(at: httpx.Client, **asked: Any) -> set[tuple[int, int]]:
    """The partition and offset of every record of `paged`, page by page."""
    seen, after = set[tuple[int, int]](), ""
    while True:
        page = at.get(
            "/api/topics/paged/records", params={"limit": 200, "order": "oldest", "after": after, **asked}
        ).json()
        seen |= {(each["partition"], each["offset"]) for each in page["records"]}
        after = page["next"]
        if not after:
            return seen


def test_integrity_is_judged_and_what_a_broker_hides_is_said(at: httpx.Client) -> None:
    found = at.get("/api/topics/paged/integrity", params={"wait_ms": 20_000}).json()
    assert found["state"] == "done" and found["faults_total"] == 0 and found["records_with_metadata"] >= 900
    assert any("a broker does not show its files" in note for note in found["notes"])
    compile(found["by_hand"]["python"], "shown", "exec")
    short = at.get("/api/topics/paged-short/integrity", params={"wait_ms": 20_000}).json()
    assert [(each["kind"], each["offset"]) for each in short["faults"]] == [("missing", 50)]
    assert "missing" in at.get("/topics/paged-short/integrity", headers=PAGE).text


def test_tables_over_a_broker_are_read_and_explained(at: httpx.Client) -> None:
    rows = at.get("/api/tables/paging:per-minute/fetch", params={"key": "customer-7"}).json()["rows"]
    assert sum(row["value"]["orders"] for row in rows) == 30
    app = at.get("/api/apps/paging").json()
    assert app["lag_records"] == 0 and {each["topic"] for each in app["sources"]} == {"paged"}
    start = rows[0]["window_start_ms"]
    why = at.get("/api/tables/paging:per-minute/explain", params={"key": "customer-7", "start": start}).json()
    assert len([each for each in why["parts"] if each["outcome"] == "counted"]) == rows[0]["value"]["orders"]
    assert at.get("/tables/paging:per-minute", headers=PAGE).status_code == 200


def test_a_broker_that_goes_is_explained_and_comes_back(at: httpx.Client, broker: Broker) -> None:
    """Every screen in a bounded time, in words; what is no broker's goes on; and nothing has to be started anew."""
    broker.kill()
    try:
        for path in ("/topics", "/topics/paged/records", "/topics/paged/integrity"):
            page = at.get(path, headers=PAGE)  # the client waits for a bounded time
            assert page.status_code in (409, 503), path
            assert "What to do" in page.text and "Traceback" not in page.text
            assert broker.address in page.text or "too long" in page.text
        assert at.get("/health").status_code == 200
        kept: Any = at.get("/api/tables/paging:per-minute/fetch", params={"key": "customer-7"}).json()
        assert sum(row["value"]["orders"] for row in kept["rows"]) == 30
    finally:
        broker.start(same_ports=True)
    deadline = time.monotonic() + 300
    while at.get("/api/topics/paged").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.5)
