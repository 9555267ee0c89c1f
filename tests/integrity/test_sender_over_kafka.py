"""A sender over the Kafka client, against librdkafka's own mock cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from receiving import arrived, verdicts
from tidegate.integrity import Sender
from tidegate.integrity.columns import without_control
from tidegate.integrity.sender import ChainLimits
from tidegate.integrity.verdicts import Verdict
from tidegate.log.log import open_log

confluent_kafka = pytest.importorskip("confluent_kafka")


@pytest.fixture(scope="module")
def servers() -> Iterator[str]:
    owner = confluent_kafka.Producer(
        {"test.mock.num.brokers": 1, "bootstrap.servers": "replaced", "log_level": 0}
    )
    broker = next(iter(owner.list_topics(timeout=120).brokers.values()))
    owner.produce("orders", b"unmanaged", partition=0, timestamp=1000)
    owner.flush(20)
    yield f"127.0.0.1:{broker.port}"
    del owner


def test_a_cluster_gets_the_same_records_as_a_folder(servers: str) -> None:
    limits = ChainLimits(max_records=5)
    with open_log(f"kafka://{servers}") as log:
        with log.writer("orders", integrity={"limits": limits}) as sender:
            assert isinstance(sender, Sender)
            for turn in range(4):
                keys = [f"{turn}-{n}" for n in range(6)]
                sender.write(
                    pa.table({"key": keys, "value": [None if n == 3 else f"v{n}" for n in range(6)]})
                )
        seen: dict[int, list[Verdict]] = {}
        values = 0
        for number in range(4):
            batches = list(log.reader("orders", [number], control_records=True))
            seen[number] = verdicts(arrived(batches))
            values += sum(without_control(batch).num_rows for batch in batches)
    assert seen[0][0] is Verdict.UNMANAGED
    assert {verdict for found in seen.values() for verdict in found} == {Verdict.OK, Verdict.UNMANAGED}
    assert values == 1 + 4 * 6
    assert sum(sent.records for sent in sender.sent().values()) == 4 * 6
