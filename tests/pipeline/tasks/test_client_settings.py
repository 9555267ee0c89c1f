"""Settings of the Kafka client given to an app: they reach every client of its master and workers, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.log.log import open_log
from tidegate.pipeline.rounds.local import LocalEngine
from tidegate.pipeline.tasks.setup import WorkerSetup
from tidegate.storage import StorageConfig

confluent_kafka = pytest.importorskip("confluent_kafka")

START = 1_767_225_600_000
CANARY = "canary-51c0-of-a-password"
CLIENT = {
    "sasl.mechanism": "PLAIN",
    "sasl.username": "tidegate",
    "sasl.password": CANARY,
    "ssl.key.password": CANARY,
    "client.id": "shop-pipeline",
}


@pytest.fixture
def url() -> Iterator[str]:
    """A mock cluster with topics `events` and `results`; it asks nobody for a password."""
    owner = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "replaced", "log_level": 0}
    )
    broker = next(iter(owner.list_topics(timeout=120).brokers.values()))
    for topic in ("events", "results"):
        owner.list_topics(topic, timeout=20)  # asking for it makes it
    yield f"kafka://127.0.0.1:{broker.port}"
    del owner


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Every client that is made from now on: its kind and settings."""
    from confluent_kafka import admin

    from tidegate.log.kafka.client import Library

    seen: list[tuple[str, dict[str, Any]]] = []
    begin, client = admin.AdminClient.__init__, Library._client

    def noting_admin(self: Any, settings: dict[str, Any], **more: Any) -> None:
        seen.append(("AdminClient", dict(settings)))
        begin(self, settings, **more)

    def noting_client(self: Library, kind: int, name: str, settings: dict[str, Any]) -> int:
        seen.append((name, dict(settings)))
        return client(self, kind, name, settings)

    monkeypatch.setattr(Library, "_client", noting_client)
    monkeypatch.setattr(admin.AdminClient, "__init__", noting_admin)
    return seen


def write(url: str) -> None:
    values = [json.dumps({"n": number}).encode() for number in range(40)]
    times = [START + 100 * number for number in range(40)]
    with open_log(url) as log, log.writer("events") as writer:
        writer.write(pa.table({"key": ["a"] * 40, "value": values, "timestamp": times}), partition=2)


def shop(url: str, folder: Path) -> tg.App:
    app = tg.App("shop", log=url, state=folder / "state", client=CLIENT)
    app.stream("events", value=tg.Json(n="int64")).window(tg.Tumbling("1s")).count().to_topic("results")
    return app


def test_every_client_of_a_run_has_them_and_nothing_shows_them(
    url: str,
    made: list[tuple[str, dict[str, Any]]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(url)
    made.clear()
    app = shop(url, tmp_path)
    engines: list[LocalEngine] = []

    def apart(setup: WorkerSetup) -> LocalEngine:
        """An engine whose worker opens the log itself, from the setup alone, as those of Spark do."""
        engines.append(LocalEngine(setup))
        return engines[-1]

    summary = app.run(apart, until="caught_up", close=True)
    assert summary.records == 40
    assert {name for name, _ in made} == {"consumer", "producer", "AdminClient"}
    for name, settings in made:
        assert {key: settings.get(key) for key in CLIENT} == CLIENT, name
    assert sum(name == "AdminClient" for name, _ in made) >= 2, "the master's and the worker's"
    setup = WorkerSetup("shop", app.flows, url, app.state, StorageConfig(), client=CLIENT)
    said = [repr(app), repr(setup), str(setup), repr(summary), app.explain(sample=False), caplog.text]
    with pytest.raises(tg.InvalidError) as refused:
        tg.App("shop", data=tmp_path, client=CLIENT)
    said += [str(refused.value), *capfd.readouterr()]
    assert [each for each in said if CANARY in each] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []


def test_a_setting_the_client_does_not_know_is_named_without_its_value(url: str, tmp_path: Path) -> None:
    app = tg.App("shop", log=url, state=tmp_path, client={"sasl.pasword": CANARY})
    app.stream("events").to_topic("results")
    with pytest.raises(tg.InvalidError, match=r"sasl\.pasword") as refused:
        app.run("local", until="caught_up")
    assert CANARY not in str(refused.value)
