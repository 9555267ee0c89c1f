"""A table that Spark pushed goes on with a live topic, and the next push starts it anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.integrity.replica import Role
from tidegate.log.log import Log
from tidegate.spark.push.driver import push
from tidegate.tables.hybrid.status import freshest_replica
from tidegate.tables.hybrid.table import HybridTable, hybrid_table
from tidegate.tables.options import Consumed
from tidegate.tables.serdes.base import String
from tidegate.tables.versions.reader import VersionedTable

pytestmark = pytest.mark.xdist_group("spark")


def pushed(spark: Any, folder: Path, **rows: str) -> None:
    frame = spark.createDataFrame(sorted(rows.items()), "key string, value string")
    push(frame, table="users", key="key", log=str(folder / "log"), state=str(folder / "state"), partitions=2)


def settle(log: Log, *tables: HybridTable) -> None:
    """Step until everything that there is is copied and drained, led by somebody."""
    for _ in range(600):
        moved = [table.step() for table in tables]
        partitions = [each for table in tables for each in table.status().partitions]
        leads = sum(role is Role.LEADER for table in tables for role in table.roles.values())
        if not any(moved) and leads == 2 and not any(each.lag or each.live_lag for each in partitions):
            return
        log.clock.sleep_ms(5)
    raise AssertionError("the replicas do not come to rest")


def rows(table: Any) -> dict[str, str]:
    return {row["key"]: row["value"] for batch in table.batches() for row in batch.to_pylist()}


@pytest.mark.parametrize("row", ["DIV-20+DIV-26+DIV-29+DIV-30+DIV-33+DIV-47"])
def test_a_spark_push_goes_on_live_through_two_leaders_and_the_next_push_rewinds(
    row: str, spark: Any, tmp_path: Path
) -> None:
    with Log(tmp_path / "log", durability="os") as log:
        log.create_topic("updates", 2)
        with log.writer("updates", integrity=True) as live:
            live.write(pa.table({"key": ["bob"], "value": ["rewound"]}))
            pushed(spark, tmp_path, ann="pushed", bob="pushed", cid="pushed")

            def replica(name: str) -> HybridTable:
                return hybrid_table(
                    log, "users", live="updates", rewind="1h", state=tmp_path / "state", replica=name,
                    consumed=Consumed(String(), String()), lease_ttl="1m", hold=0,
                )  # fmt: skip

            left, right = replica("left"), replica("right")
            settle(log, left, right)
            assert rows(left) == rows(right) == {"ann": "pushed", "bob": "rewound", "cid": "pushed"}
            left.close()
            live.write(pa.table({"key": ["ann", "dan"], "value": ["live", "live"]}))
            settle(log, right)
            expected = {"ann": "live", "bob": "rewound", "cid": "pushed", "dan": "live"}
            assert rows(right) == expected
            assert all(
                each.epoch == 2 and each.faults == each.live_faults == 0 for each in right.status().partitions
            )
            right.commit()
            assert freshest_replica(right._backend, "users") == "users_v1.right"
            right.close()
            live.write(pa.table({"key": ["cid"], "value": ["newest"]}))
            pushed(spark, tmp_path, ann="again", eve="again")
            with replica("left") as left:
                assert left.version == "users_v2"
                settle(log, left)
                assert rows(left) == {
                    "ann": "live", "bob": "rewound", "cid": "newest", "dan": "live", "eve": "again",
                }  # fmt: skip
                with VersionedTable(left._backend, "users") as batch:
                    assert rows(batch) == {"ann": "again", "eve": "again"}, "the push alone"
