"""Audits, comparisons and certificates on Spark say what this process alone says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from tidegate.errors import InvalidError
from tidegate.integrity.audit import Cutting, audit
from tidegate.integrity.certificates import certify_topic
from tidegate.integrity.compare import compare_topics
from tidegate.integrity.digests import TopicAt
from tidegate.integrity.fault_injection import DamageKind, break_topic
from tidegate.integrity.sender import ChainLimits
from tidegate.log.log import Log
from tidegate.spark.audit import SparkRunner

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = 1_800_000_000_000


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A sound topic, one with a record dropped, one with a bit flipped in its file."""
    folder = tmp_path_factory.mktemp("audit")
    with Log(folder / "sound", durability="os") as log:
        log.create_topic("orders", 2, {"segment.bytes": 60_000})
        with log.writer("orders", integrity={"limits": ChainLimits(max_records=700)}) as sender:
            for start in range(0, 4000, 500):
                keys = [b"k%d" % n for n in range(start, start + 500)]
                sender.write(pa.table({"key": keys, "value": keys}))
        for name in ("dropped", "flipped"):
            break_topic(log, "orders", DamageKind.DROP, into=folder / name, seed=4)
    path = sorted((folder / "flipped" / "orders-0").glob("*.log"))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    return folder / "sound", folder / "dropped", folder / "flipped"


def test_reports_are_the_serial_ones(spark: SparkSession, logs: tuple[Path, Path, Path]) -> None:
    runner = SparkRunner(spark)
    for log, faults in zip(logs, (False, True, True), strict=True):
        serial = audit("orders", log=log, now_ms=NOW)
        seen: list[int] = []
        parallel = audit(
            "orders",
            log=log,
            now_ms=NOW,
            runner=runner,
            cutting=Cutting(2, smallest=20_000),
            progress=lambda size, _records, _faults, seen=seen: seen.append(size),
        )
        assert parallel.native == serial.native and parallel.metadata == serial.metadata
        assert (parallel.native.all_findings().faults > 0) == faults
        assert len(seen) > 4, "many ranges, told one by one"


KAFKAS = Path(__file__).parents[1] / "fixtures" / "kafka-3.9" / "folders"
"""What a real broker left: idempotent and transactional producers, all codecs, full indexes."""


def test_a_brokers_data_folder_is_audited_by_its_native_sequences(spark: SparkSession) -> None:
    given: dict[str, Any] = {"log": KAFKAS, "now_ms": NOW}
    serial = audit(str(KAFKAS), **given)
    parallel = audit(str(KAFKAS), runner=SparkRunner(spark), cutting=Cutting(2, smallest=4000), **given)
    assert parallel.native == serial.native and parallel.metadata == serial.metadata
    assert len(serial.native.partitions) > 10 and serial.native.records > 500


def test_the_command_says_the_same_with_spark(tmp_path: Path) -> None:
    command = [Path(sys.executable).with_name("tidegate"), "verify", str(KAFKAS), "--format", "json"]
    alone, spread = (
        subprocess.run([*command, *more], capture_output=True, text=True, timeout=600, cwd=tmp_path)
        for more in ([], ["--spark", "--master", "local[2]"])
    )
    assert (alone.returncode, spread.returncode) == (1, 1), spread.stderr[
        -2000:
    ]  # one topic is faulty on purpose
    assert json.loads(spread.stdout) == json.loads(alone.stdout)


def test_comparisons_and_certificates_are_the_same(
    spark: SparkSession, logs: tuple[Path, Path, Path]
) -> None:
    runner = SparkRunner(spark)
    one, other = (TopicAt(str(log), "orders") for log in logs[:2])
    found = compare_topics(one, other, runner=runner, smallest=300)
    assert found.as_dict() == compare_topics(one, other).as_dict() and not found.is_equal
    assert certify_topic(str(logs[0]), "orders", now_ms=NOW, runner=runner) == certify_topic(
        str(logs[0]), "orders", now_ms=NOW
    )


def _late_if_odd(mark: Path, number: int) -> int:
    """Odd ones wait until somebody has seen an even one's answer, so that all answers at the end would never come."""
    deadline = time.monotonic() + 300
    while number % 2 and not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return number if mark.exists() or number % 2 == 0 else -1


def test_answers_come_one_by_one(spark: SparkSession, tmp_path: Path) -> None:
    came = SparkRunner(spark).run(partial(_late_if_odd, tmp_path / "seen"), [0, 1, 2, 3])
    assert next(came) == 0
    (tmp_path / "seen").touch()
    assert sorted(came) == [1, 2, 3]


def _dies_once(folder: Path, number: int) -> int:
    with suppress(FileExistsError):
        (folder / f"died-{number}").touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_range_whose_worker_died_is_read_by_another_and_answers_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    assert sorted(SparkRunner(spark).run(partial(_dies_once, tmp_path), [1, 2, 3])) == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 3


def _marks(folder: Path, number: int) -> int:
    (folder / str(number)).touch()
    time.sleep(0.2)
    return number


def test_whoever_stops_listening_ends_the_job(spark: SparkSession, tmp_path: Path) -> None:
    came = SparkRunner(spark).run(partial(_marks, tmp_path), list(range(200)))
    next(came)
    came.close()  # type: ignore[attr-defined]
    begun = len(list(tmp_path.iterdir()))
    assert begun < 100 and not spark.sparkContext.statusTracker().getActiveJobsIds()


def _refuses(_item: int) -> None:
    raise InvalidError("this one is refused")


def test_an_error_of_ours_comes_back_as_it_was(spark: SparkSession) -> None:
    with pytest.raises(InvalidError, match="refused"):
        list(SparkRunner(spark).run(_refuses, [1, 2]))
