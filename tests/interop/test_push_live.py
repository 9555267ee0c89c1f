"""A push over a real broker: the version's topic is Kafka's, and a record that goes missing there is missed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka_broker import Broker

from tidegate.integrity import Sender
from tidegate.log.log import open_log
from tidegate.log.writer import partition_of_key

pytestmark = [
    pytest.mark.interop,
    pytest.mark.spark,
    pytest.mark.xdist_group("spark"),
]


@pytest.fixture
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    import tidegate.spark

    running = SparkSession.getActiveSession()
    session = tidegate.spark.session("tidegate-live", master="local[2,4]")
    session.sparkContext.setLogLevel("OFF")
    yield session
    if running is None:
        session.stop()


def test_a_push_over_a_broker_is_shown_and_one_with_foreign_records_is_not(
    spark: Any, broker: Broker, tmp_path: Path
) -> None:
    from tidegate.spark.push.driver import push
    from tidegate.tables.versions.catalog import PushFailedError
    from tidegate.tables.versions.reader import versioned_table

    url, state = f"kafka://{broker.address}", str(tmp_path / "state")
    frame = spark.range(0, 300).selectExpr("concat('user-', id) as key", "concat('v', id) as value")
    report = push(frame, table="pushed", key="key", log=url, state=state, partitions=2)
    assert report.is_current and report.version.rows == 300
    with open_log(url) as log:
        for partition in range(2):
            keys = [
                key
                for batch in log.reader("pushed_v1", [partition], control_records=True)
                for key in batch.column("key").to_pylist()
                if not key.startswith(b"\0DIV")
            ]
            assert keys == sorted(keys) and {partition_of_key(key, 2) for key in keys} == {partition}

    def intrude(step: str) -> None:
        if step == "sent":
            with open_log(url) as log, Sender(log.writer("pushed_v2"), partitions=2) as stranger:
                stranger.write(pa.table({"key": [b"x"], "value": [b"y"]}), partition=1)

    with pytest.raises(PushFailedError, match="did not send"):
        push(frame.limit(10), table="pushed", key="key", log=url, state=state, watch=intrude)
    with versioned_table("pushed", state=state) as table:
        assert (table.version.number, table.get("user-7")) == (1, "v7")
