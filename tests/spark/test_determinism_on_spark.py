"""The determinism matrix on Spark: what the local engine comes to, in other processes and through a shuffle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from determinism import Way, chains, differing, lines, ran

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOME: tuple[tuple[str, ...], ...] = (
    ("re-keyed", "dedupe"),
    ("re-keyed", "dedupe", "hopping-close-mergeable"),
    ("re-keyed", "filter", "session-update-mergeable"),
    ("re-keyed", "tumbling-update-ordered"),
    ("co-partitioned", "dedupe", "session-close-mergeable"),
)
MATRIX = list(chains(full=False))
GROUP = 40


def test_flows_that_depend_on_order_come_to_what_the_local_engine_makes(
    spark: SparkSession, tmp_path: Path
) -> None:
    log = lines(11, 3, 40)
    expected = ran(tmp_path / "local", SOME, log, 3, Way(1000), "local")
    for number, way in enumerate((Way(1000), Way(17), Way(25, stops=1))):
        found = ran(tmp_path / str(number), SOME, log, 3, way, spark)
        assert differing(found, expected) == [], way
    ended = ran(tmp_path / "ended", SOME, log, 3, Way(1000, closes=True), "local")
    found = ran(tmp_path / "grown", SOME, log, 3, Way(20, pieces=2, closes=True), spark)
    assert differing(found, ended) == []


@pytest.mark.soak
@pytest.mark.parametrize("partitions", [1, 3, 5])
@pytest.mark.parametrize("group", range(0, len(MATRIX), GROUP))
def test_every_step_and_pair_of_steps_comes_to_what_the_local_engine_makes(
    spark: SparkSession, tmp_path: Path, group: int, partitions: int
) -> None:
    flows, log = MATRIX[group : group + GROUP], lines(group, partitions, 60)
    expected = ran(tmp_path / "local", flows, log, partitions, Way(1000), "local")
    cases = 0
    for number, way in enumerate((Way(1000), Way(60), Way(30), Way(16), Way(9), Way(25, stops=1))):
        found = ran(tmp_path / str(number), flows, log, partitions, way, spark)
        assert differing(found, expected) == [], way
        cases += len(found)
    print(f"determinism on Spark: {cases} cases of {len(flows)} chains, {partitions} partitions")
