"""Signed state on Spark: executors have the key from their environment, or are refused; Spark's page never shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pipelines
from pipelines import every_kind, run_all
from tidegate.errors import InvalidError
from tidegate.spark.options import TableOptions
from tidegate.spark.push import _ingest_in_task
from tidegate.storage import state_key_id
from tidegate.storage.backends.folder import OWN_FILES
from tidegate.tables.versions.catalog import TableVersion

KEY = bytes((13 * i + 5) % 256 for i in range(32)).hex()
ONLY = ("tumbling", "shops")
# A session of its own: Spark's processes have the environment that they were started with.
CHILD = """
import sys, urllib.request
from pathlib import Path
import tidegate.spark
from tidegate.spark.session import check_session
from pipelines import every_kind, run_all
folder, key = Path(sys.argv[1]), sys.argv[2]
in_config = {"spark.executorEnv.TIDEGATE_STATE_KEY": key}
spark = tidegate.spark.session("signed", master="local[2,2]", ui=True, config=in_config)
spark.sparkContext.setLogLevel("OFF")
run_all(every_kind(folder, only=("tumbling", "shops")), spark)
context = spark.sparkContext
for address in ("environment/", f"api/v1/applications/{context.applicationId}/environment"):
    with urllib.request.urlopen(f"{context.uiWebUrl}/{address}") as answer:
        page = answer.read().decode()
    assert key not in page
assert "spark.executorEnv.TIDEGATE_STATE_KEY" in page
assert any("TIDEGATE_STATE_KEY_FILE instead" in str(each) for each in check_session(spark))
with every_kind(folder, only=("tumbling", "shops")) as app, app.open_table("shops") as table:
    rows = table.to_arrow().num_rows
    assert rows and table.to_spark(spark).count() == rows
named = spark.read.format("tidegate.table").options(state=str(folder / "state"), table="shops").load()
assert named.count() == rows
print("done")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pipelines.create(tmp_path, only=ONLY)
    pipelines.write_orders(tmp_path, 400)
    return tmp_path


def signed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidegate.cli.main import run

    monkeypatch.setenv("TIDEGATE_STATE_KEY", KEY)
    assert run(["state", "sign", "--state", str(folder / "state")]) == 0


def test_executors_without_the_drivers_key_are_refused(
    spark: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark.range(2).rdd.count()  # its processes are there, and have no key
    signed(folder, monkeypatch)
    with pytest.raises(InvalidError, match=r"this process with no key: .*spark\.executorEnv") as told:
        run_all(every_kind(folder, only=ONLY), spark)
    assert KEY not in str(told.value)


def test_tasks_that_read_or_ingest_tables_need_the_drivers_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed(folder, monkeypatch)
    options = TableOptions.parse({"state": str(folder / "state")})
    with options.opened() as backend:
        assert backend.kind == "folder"
    key_id = state_key_id()
    monkeypatch.delenv("TIDEGATE_STATE_KEY")  # as in an executor
    with pytest.raises(InvalidError, match="this process with no key"), options.opened():
        pass
    version = TableVersion(1, "users_v1", "push", "pushing", 1, "String()", "String()")
    described = msgspec.msgpack.encode(version)
    ingesting = _ingest_in_task(
        str(folder / "log"), str(folder / "state"), {}, described, 0, key_id, iter([0])
    )
    with pytest.raises(InvalidError, match="this process with no key"):
        next(ingesting)


def test_rounds_on_spark_are_signed_and_the_page_does_not_show_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed(folder, monkeypatch)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), KEY],
        env={**os.environ, "TIDEGATE_STATE_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]
    assert KEY not in done.stderr
    files = [each for each in (folder / "state").rglob("*") if each.is_file() and each.name not in OWN_FILES]
    assert len(files) > 5
    assert [each.name for each in files if b"TG-SIGN\n" not in each.read_bytes()[:300]] == []
    with every_kind(folder, only=ONLY) as app, app.open_table("shops") as table:
        assert table.to_arrow().num_rows
