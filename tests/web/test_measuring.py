"""What `/metrics` of the page costs, what it leaves out, and that it agrees with what a run itself exports."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from served_shop import shop

from tidegate.cli.demo_shop import plant
from tidegate.errors import InvalidError
from tidegate.metrics import Metrics
from tidegate.web import pages
from tidegate.web.endpoints import ENDPOINTS
from tidegate.web.integrity import MOST_CELLS, audits, integrity, measured_first
from tidegate.web.metrics import SiteInstruments, _audit, exposition, measured
from tidegate.web.schemas import CellShown, IntegrityQuestion, ProducerShown
from tidegate.web.site import Site

BY_THE_CLOCK = {"tidegate_lag_seconds", "tidegate_watermark_age_seconds", "tidegate_round_seconds"}


@pytest.fixture
def site(data: Path) -> Iterator[Site]:
    made = Site(data / "log", data / "state")
    yield made
    made.close()


def values(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {(each.name, frozenset(each.labels.items())): each.value for each in metrics.samples()}


def test_a_run_and_the_page_say_the_same_of_an_app(tmp_path: Path) -> None:
    """Of an app that was never stopped: its run counted from the beginning, too."""
    plant(tmp_path / "log")
    of_run = Metrics()
    with shop(tmp_path).start("local", until="caught_up", round_records=20_000, metrics=of_run) as run:
        run.await_termination()
    site = Site(tmp_path / "log", tmp_path / "state")
    shown = values(measured(site))
    site.close()
    app = {key: value for key, value in values(of_run).items() if ("app", "shop") in key[1]}
    compared = {key for key in app if key[0] not in BY_THE_CLOCK}
    assert len({name for name, _ in compared}) >= 9
    assert {key: shown.get(key) for key in compared} == {key: app[key] for key in compared}


def test_asking_for_metrics_opens_no_table_and_begins_no_audit(site: Site) -> None:
    first = values(measured(site))
    assert not site._tables and not audits(site).known()
    assert not [name for name, _ in first if "audit" in name or "late_records" in name]
    integrity(site, "catalogue", IntegrityQuestion(wait_ms=20_000))
    ENDPOINTS["late"].ask(site, {"table": "shop:per-minute"}, {"limit": "1"})
    then = values(measured(site))
    assert then[("tidegate_audit_records", frozenset({("topic", "catalogue")}))] == 1981
    assert then[("tidegate_table_late_records", frozenset({("table", "shop:per-minute")}))] == 41
    assert {key: then[key] for key in first} == first


def test_what_cannot_be_read_is_left_out_and_the_rest_is_there(data: Path, tmp_path: Path) -> None:
    nowhere = Site(tmp_path / "log", tmp_path / "state")
    assert values(measured(nowhere)) == {("tidegate_topics", frozenset()): 0}
    nowhere.close()
    shutil.copytree(data / "state", tmp_path / "state")
    (tmp_path / "state" / "apps" / "shop" / "app").write_bytes(b"no record")
    site = Site(data / "log", tmp_path / "state")
    shown = values(measured(site))
    site.close()
    assert shown[("tidegate_topics", frozenset())] == 5
    assert {dict(labels).get("app") for _, labels in shown} == {None, "strict"}


def test_producers_of_an_audit_are_bounded(site: Site) -> None:
    document = integrity(site, "hostile", IntegrityQuestion(wait_ms=20_000))
    cells = [CellShown(number, 3, 1, 0, number) for number in range(30)]
    many = measured_first([ProducerShown(f"p{number}", 90, 30, 0, cells) for number in range(100)])
    shown = msgspec.structs.replace(document, producers=many, partitions=list(range(30)))
    metrics = Metrics()
    _audit(shown, SiteInstruments(metrics))
    found = [each for each in metrics.samples() if each.name == "tidegate_audit_producer_records"]
    whole = MOST_CELLS // 30
    assert len(found) == whole * 30, "producers with all their cells"
    said = {"path": "/topics/hostile/integrity", "nav": "topics", "api": "/api", "can_leave": False}
    page = pages.document_page("integrity.html", msgspec.json.encode(shown), ask={}, **said).decode()
    named = set(re.findall(r"tidegate_audit_producer_[^}]*producer=[^}]*?(p\d+)", page))
    assert named == {f"p{number}" for number in range(whole)}, "a page names what is there, and no more"


def test_without_prometheus_client_it_says_what_to_install(site: Site, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(InvalidError, match="tidegate"):
        exposition(site)


def test_the_server_itself_loads_nothing_for_it() -> None:
    """An idle server is small: what measures is loaded in the process that reads."""
    heavy = {"pyarrow", "numpy", "numba", "prometheus_client"}
    code = f"import sys, tidegate.web.server; sys.exit(' '.join({heavy!r} & set(sys.modules)) or 0)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_address_answers_scrapers_and_no_one_else_differently(client: httpx.Client) -> None:
    for accept in ("text/plain; version=0.0.4", "text/html"):
        found = client.get("/metrics", headers={"accept": accept})
        assert found.status_code == 200 and found.headers["content-type"].startswith("text/plain; version=")
        assert "# TYPE tidegate_log_bytes gauge" in found.text
    assert client.post("/metrics").status_code == 405
    assert client.get("/metrics?x=1").status_code == 200
