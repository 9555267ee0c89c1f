"""Runs that are short, many, and fail: what an app keeps on its disk is bounded, and what is left over is told."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend_faults import CHANGES, BackendEffect, WatchedBackend
from pipelines import named_objects, objects_of
from tidegate.cli.main import run
from tidegate.clock import SystemClock
from tidegate.errors import UnavailableError
from tidegate.log.log import Log
from tidegate.pipeline.admin import app_status
from tidegate.pipeline.checkpoint import KEPT, Records
from tidegate.pipeline.definition.app import App
from tidegate.pipeline.launcher import start_run
from tidegate.pipeline.settings import RunSettings, WorkerSetup
from tidegate.storage import open_backend
from tidegate.storage.backends.base import StorageBackend
from tidegate.storage.backends.memory import MemoryBackend
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates.definitions import count
from tidegate.windows.kinds import Tumbling

START = 1_700_000_000_000


def shop(folder: Path) -> App:
    app = App("shop", data=folder)
    stream = app.stream("orders", value=Json(n="int64"), on_error="keep").drop_duplicates("n", within="10m")
    stream.window(Tumbling("10s", grace="1m")).agg(n=count()).to_topic("per_window")
    return app


def write(folder: Path, turn: int) -> None:
    with Log(folder / "log") as log:
        log.create_topic("orders", 2, if_not_exists=True)
        numbers = range(20 * turn, 20 * turn + 20)
        log.writer("orders").write(
            pa.table(
                {
                    "key": [f"k{number % 7}" for number in numbers],
                    "value": [json.dumps({"n": number}) if number % 20 else "bad" for number in numbers],
                    "timestamp": [START + 1000 * number for number in numbers],
                }
            )
        )


def ran(app: App, backend: StorageBackend, **settings: Any) -> Any:
    setup = WorkerSetup(app=app.name, flows=app.flows, log=app.log, state=app.state, storage=app.storage)
    settings = {"until": "caught_up", **settings}
    return start_run(setup, settings=RunSettings(**settings), backend=backend).await_termination("300s")


def stored(backend: StorageBackend) -> set[str]:
    """All objects that a commit would name if it needed them."""
    return objects_of(backend, "shop") - {"apps/shop/collected"}


def aged(folder: Path) -> None:
    """Make all objects an hour older."""
    for path in sorted((folder / "state").rglob("*")):
        if path.is_file():
            then = path.stat().st_mtime - 3600
            os.utime(path, (then, then))


def test_many_short_runs_leave_no_more_than_one_long_one(tmp_path: Path) -> None:
    """Each run is far shorter than the time between two passes of collection."""
    app = shop(tmp_path)
    needed, orphans = [], []
    for turn in range(4 * KEPT):
        write(tmp_path, turn)
        assert app.run("local", until="caught_up").records == 20
        backend = open_backend(app.state)
        assert len(Records(backend, "shop").rounds()) <= KEPT
        assert len(Records(backend, "shop").numbers("plans")) <= KEPT + 1
        named = {name for name in named_objects(backend, "shop") if "/letters/" not in name}
        status = app_status(backend, "shop", orphans=True)
        assert status.orphans == len(stored(backend) - named_objects(backend, "shop"))
        needed.append(len(named))
        orphans.append(status.orphans)
    assert max(needed[2 * KEPT :]) <= 2 * max(needed[KEPT : 2 * KEPT]), needed
    aged(tmp_path)
    app.run("local", until="caught_up")
    assert stored(backend) == named_objects(backend, "shop")
    after = app_status(open_backend(app.state), "shop", orphans=True)
    assert (after.orphans, after.orphan_bytes) == (0, 0), orphans


def test_runs_that_fail_again_and_again_are_cleaned_up_after(tmp_path: Path) -> None:
    """No run ever comes to a good end: what it left is removed by the ones after it, by its age."""
    app = shop(tmp_path)
    write(tmp_path, 0)
    inner = open_backend(app.state)
    ran(app, inner)
    for turn in range(1, 6):
        write(tmp_path, turn)
        with pytest.raises(UnavailableError):
            ran(app, WatchedBackend(inner, no_commits), attempts=1, patience_ms=0)
        left = stored(inner) - named_objects(inner, "shop")
        assert left, "it had written something when it failed"
        assert len(left) < 40, turn  # what one run leaves, not all that came before
        aged(tmp_path)
    ran(app, inner)
    assert not left & stored(inner)


def no_commits(effect: BackendEffect) -> None:
    if "/commits/" in effect.name and effect.kind in CHANGES:
        raise UnavailableError(f"could not {effect.kind} {effect.name}: refused on purpose; retry later")


def test_a_collection_that_cannot_reach_its_store_does_not_fail_a_run(tmp_path: Path) -> None:
    app, inner, refused = shop(tmp_path), MemoryBackend(), list[str]()

    def no_deletes(effect: BackendEffect) -> None:
        if effect.kind == "delete":
            refused.append(effect.name)
            raise UnavailableError(f"could not delete {effect.name}: refused on purpose; retry later")

    for turn in range(KEPT + 3):
        write(tmp_path, turn)
        assert ran(app, WatchedBackend(inner, no_deletes), patience_ms=0).caught_up
    assert any("/commits/" in name for name in refused)
    ran(app, inner)
    assert len(Records(inner, "shop").rounds()) <= KEPT


def test_a_damaged_commit_holds_collection_up_until_it_is_out_of_the_kept_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows what it needs, so nothing goes; a run does not fail for it, also not a long one."""
    app = shop(tmp_path)
    backend = open_backend(app.state)
    records = Records(backend, "shop")
    for turn in range(4):
        write(tmp_path, turn)
        app.run("local", until="caught_up")
    damaged = records.rounds()[-2]
    path = tmp_path / "state" / records.commit_name(damaged)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    before = stored(backend)
    aged(tmp_path)
    app.run("local", until="caught_up", collect_every_ms=0)
    assert "kept for now" in caplog.text and before <= stored(backend)
    assert app_status(backend, "shop", orphans=True).orphans is None, "it cannot be said"
    for turn in range(4, 6 + KEPT):
        write(tmp_path, turn)
        app.run("local", until="caught_up")
    assert damaged not in records.rounds() and len(records.rounds()) <= KEPT
    aged(tmp_path)
    app.run("local", until="caught_up")
    assert stored(backend) == named_objects(backend, "shop")


def test_status_tells_of_what_no_commit_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = shop(tmp_path)
    write(tmp_path, 0)
    app.run("local", until="caught_up")
    before = app_status(open_backend(app.state), "shop", orphans=True)
    assert before.orphans is not None and before.orphan_bytes is not None
    stray = tmp_path / "state" / "apps" / "shop" / "sources" / "left-behind"
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"x" * 1000)
    after = app_status(open_backend(app.state), "shop", orphans=True)
    assert after.orphans == before.orphans + 1
    assert after.orphan_bytes == before.orphan_bytes + 1000
    assert run(["app", "status", "shop", "--state", str(tmp_path / "state")]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["orphans"] == after.orphans
    assert f"orphans: {after.orphans} objects" in told.err and "no commit needs" in told.err
    assert app_status(open_backend(app.state), "shop", clock=SystemClock()).orphans is None, "nobody asked"
