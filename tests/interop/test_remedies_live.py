"""Remedies that need a cluster: what an error of one names is typed as it is written, and then works."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from kafka_broker import Broker

from remedies import typed
from tidegate.cli.main import run as cli
from tidegate.log.log import open_log
from tidegate.web.site import Site
from tidegate.web.topics import TopicQuestion, topic_document

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]


@pytest.fixture
def orders(broker: Broker) -> str:
    """The address of a cluster with a topic `remedied`."""
    url = f"kafka://{broker.address}"
    with open_log(url) as log:
        if "remedied" not in log.topics():
            log.create_topic("remedied", 1)
            log.writer("remedied").write(pa.table({"key": ["k"] * 5, "value": ["v"] * 5}))
    return url


def test_a_topic_of_a_cluster_is_named_for_an_audit(orders: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["verify", "--log", orders]) == 2
    typed(capsys.readouterr().err, "cli.verify.verify: verify", TOPIC="remedied")


def test_segments_that_a_broker_does_not_show_are_looked_at_in_its_folder(
    orders: str, broker: Broker, tmp_path: Path
) -> None:
    site = Site(orders, tmp_path / "state")
    try:
        told = topic_document(site, "remedied", TopicQuestion()).not_shown
    finally:
        site.close()
    folder = next(broker.data.parent.rglob("remedied-0")).parent
    shown = typed(told, "web.topics.NOT_SHOWN: log lifetime", TOPIC="remedied", FOLDER=str(folder))
    assert "remedied" in shown or "retention" in shown
