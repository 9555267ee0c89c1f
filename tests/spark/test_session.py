"""The Spark session Tidegate makes: its settings, and what is said when something is missing."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

import tidegate.spark
from tidegate.errors import UnavailableError
from tidegate.spark.session import check_session, settings


def test_every_setting_is_set_once_and_has_a_reason() -> None:
    made = list(settings(sockets=Path("/tmp/somewhere")))
    assert len({setting.key for setting in made}) == len(made) > 8
    assert all(setting.key.startswith("spark.") and len(setting.reason) > 20 for setting in made)


def test_the_guide_for_clusters_names_every_setting() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "run-on-a-spark-cluster.md").read_text()
    missing = [each.key for each in settings(sockets=Path("/tmp/x")) if f"`{each.key}`" not in page]
    assert missing == []


def test_nothing_listens_beyond_this_machine_unless_asked() -> None:
    plain = {setting.key: setting.value for setting in settings()}
    assert plain["spark.driver.bindAddress"] == plain["spark.driver.host"] == "127.0.0.1"
    assert plain["spark.ui.enabled"] == "false"
    assert {s.key: s.value for s in settings(ui=True)}["spark.ui.enabled"] == "true"


def test_unix_sockets_are_used_only_with_a_folder_of_their_own() -> None:
    assert not any("socket" in setting.key for setting in settings())
    with_folder = {setting.key: setting.value for setting in settings(sockets=Path("/tmp/x"))}
    assert with_folder["spark.python.unix.domain.socket.dir"] == "/tmp/x"


def test_importing_the_package_loads_neither_pyspark_nor_arrow() -> None:
    import subprocess

    code = "import sys, tidegate.spark, tidegate.spark.session; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert {"pyspark", "pyarrow", "numba"} & set(loaded.split()) == set()


def test_a_missing_pyspark_is_a_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyspark", "pyspark.sql"):  # another test may have loaded it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnavailableError, match=r"pip install 'tidegate\[spark\]'"):
        tidegate.spark.session()


class PlainSession:
    """As much of a user's session as advice looks at."""

    def __init__(self, **settings: str) -> None:
        self.conf = {key.replace("_", "."): value for key, value in settings.items()}


@pytest.mark.parametrize(
    ("master", "better"), [("local", "local[1,4]"), ("local[*]", "local[*,4]"), ("local[3]", "local[3,4]")]
)
def test_a_master_that_never_tries_again_is_told(master: str, better: str) -> None:
    told = {each.key: each for each in check_session(PlainSession(spark_master=master))}  # type: ignore[arg-type]
    assert told["spark.master"].better == better
    assert "spark.python.unix.domain.socket.enabled" in told and told["spark.master"].at_start


def test_a_cluster_keeps_its_own_checkpoint_manager_and_master() -> None:
    told = {each.key for each in check_session(PlainSession(spark_master="yarn"))}  # type: ignore[arg-type]
    assert not told & {"spark.master", "PYSPARK_PYTHON", "spark.sql.streaming.checkpointFileManagerClass"}
    assert "spark.sql.python.filterPushdown.enabled" in told


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
class TestRunning:
    def test_the_settings_arrive_and_the_callers_win(self, spark: Any) -> None:
        assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
        assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
        assert spark.conf.get("spark.sql.streaming.checkpoint.fileChecksum.enabled") == "false"

    def test_a_running_session_is_returned_as_it_is(self, spark: Any) -> None:
        assert tidegate.spark.session("another name") is spark

    def test_a_session_of_ours_needs_no_advice_and_another_gets_a_sentence(self, spark: Any) -> None:
        assert tidegate.spark.check_session(spark) == []
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
        try:
            (advice,) = tidegate.spark.check_session(spark)
        finally:
            spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
        assert str(advice).startswith(
            "spark.sql.python.filterPushdown.enabled is false; set true at any time: "
        )

    def test_workers_run_this_python(self, spark: Any) -> None:
        found = spark.sparkContext.parallelize([0], 1).map(lambda _: sys.executable).collect()
        assert os.path.realpath(found[0]) == os.path.realpath(sys.executable)

    def test_the_data_source_is_registered(self, spark: Any, tmp_path: Path) -> None:
        with pytest.raises(Exception, match="option log is missing"):
            spark.read.format("tidegate").load().count()


def test_what_the_doctor_says_of_spark_starts_it(capsys: pytest.CaptureFixture[str]) -> None:
    from remedies import typed
    from tidegate.cli.main import run

    run(["doctor", "--format", "json"])
    (found,) = [each for each in json.loads(capsys.readouterr().out)["checks"] if each["check"] == "spark"]
    assert "not started" in found["found"]
    assert "not started" not in typed(found["remedy"], "cli.doctor._spark: doctor")
