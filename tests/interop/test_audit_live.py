"""Audits of a real cluster: metadata through a consumer, what a broker cannot show said, a mirror compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from kafka_broker import Broker

from tidegate.integrity.audit import NOT_SHOWN, audit, audit_broker
from tidegate.integrity.certificates import certify_topic, check_certificate
from tidegate.integrity.compare import compare_topics
from tidegate.integrity.digests import TopicAt
from tidegate.integrity.sender import ChainLimits
from tidegate.log.log import Log, open_log
from tidegate.spark.audit import SCHEDULES_ONLY, SparkRunner
from tidegate.spark.session import session

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]
NOW = 1_800_000_000_000


class InTurn:
    """Several workers, one after the other."""

    workers = 3

    def run(self, work, items):  # type: ignore[no-untyped-def]
        return map(work, items)


@pytest.fixture
def on_spark() -> Iterator[SparkRunner]:
    spark = session("audit-live", master="local[2]", config=SCHEDULES_ONLY)
    spark.sparkContext.setLogLevel("OFF")
    yield SparkRunner(spark)
    spark.stop()


def test_a_cluster_is_audited_compared_and_certified(
    broker: Broker, on_spark: SparkRunner, tmp_path: Path
) -> None:
    url = f"kafka://{broker.address}"
    keys = [b"k%d" % n for n in range(300)]
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("audited", 1)
        with log.writer("audited", integrity={"limits": ChainLimits(max_records=70)}) as sender:
            sender.write(pa.table({"key": keys, "value": keys, "timestamp": [NOW] * 300}))
        copied = (
            log.reader("audited", control_records=True)
            .read_all()
            .select(["key", "value", "timestamp", "headers"])
        )
    with open_log(url) as cluster:
        cluster.create_topic("audited", 1)
        cluster.create_topic("audited-short", 1)
        with cluster.writer("audited") as writer:
            writer.write(copied)
        with cluster.writer("audited-short") as writer:
            writer.write(pa.concat_tables([copied.slice(0, 150), copied.slice(151)]))
    folder = audit("audited", log=tmp_path / "log", now_ms=NOW)
    serial = audit_broker(url, "audited", now_ms=NOW)
    for runner in (InTurn(), on_spark):
        parallel = audit_broker(url, "audited", now_ms=NOW, runner=runner, smallest=40)
        assert serial.native == parallel.native and serial.metadata == parallel.metadata
    assert serial.metadata is not None and folder.metadata is not None
    assert serial.metadata.partitions[0].total == folder.metadata.partitions[0].total
    assert serial.native.evidence == NOT_SHOWN
    short = audit_broker(url, "audited-short", now_ms=NOW, runner=on_spark, smallest=40)
    assert short.metadata == audit_broker(url, "audited-short", now_ms=NOW).metadata
    assert short.metadata is not None and short.metadata.faults == 1
    ours, theirs = TopicAt(str(tmp_path / "log"), "audited"), TopicAt(url, "audited")
    assert compare_topics(ours, theirs).is_equal
    found = compare_topics(ours, TopicAt(url, "audited-short"))
    assert {kind.value: count for kind, count in found.counts.items()} == {"missing": 1}
    made = certify_topic(str(tmp_path / "log"), "audited", now_ms=NOW)
    assert [each.verdict for each in check_certificate(made, url)] == ["proven"]
