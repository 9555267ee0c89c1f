"""One Spark session for all tests that need one. No Java is an error here: set-up brings one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    import tidegate.spark

    folder = tmp_path_factory.mktemp("spark")
    session = tidegate.spark.session(
        "tidegate-tests",
        master="local[2,4]",
        config={
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.local.dir": str(folder / "local"),
            "spark.sql.shuffle.partitions": "2",
        },
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
