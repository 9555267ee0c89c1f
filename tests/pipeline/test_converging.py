"""Once faults stop, all comes right by itself (R-26): what is there is read, nothing stays pinned, no object is left
that no commit names."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend_faults import BackendEffect, WatchedBackend
from pipelines import named_objects, objects_of
from tidegate.clock import ManualClock
from tidegate.errors import UnavailableError
from tidegate.log.log import Log
from tidegate.pipeline.checkpoint import CommitRecord, Records
from tidegate.pipeline.definition.app import App
from tidegate.pipeline.gc import Collector
from tidegate.pipeline.launcher import start_run
from tidegate.pipeline.query import Run
from tidegate.pipeline.settings import RunSettings, WorkerSetup
from tidegate.randomness import SeededRandomness
from tidegate.storage import StorageConfig
from tidegate.storage.backends.base import TEMPORARY
from tidegate.storage.backends.folder import FolderBackend
from tidegate.tables.serdes.base import String
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates.definitions import count
from tidegate.windows.kinds import Tumbling

START = 1_767_225_600_000
ROWS = 240
SMALL = StorageConfig.for_tests(
    max_tasks=8,
    write_buffer={"reserve_bytes": 1024, "soft_max_bytes": 1 << 20},
    base_runs={"reserve_bytes": 1024, "soft_max_bytes": 1 << 20},
    state_cache={"reserve_bytes": 1024, "soft_max_bytes": 1 << 18},
)


class Weather:
    """Calls of the backend fail at random, before or after they happened, until it clears up."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rate = self.chance.choice([0.02, 0.06, 0.15])
        self.is_bad = True
        self.failed = 0

    def __call__(self, effect: BackendEffect) -> None:
        if self.is_bad and self.chance.random() < self.rate:
            self.failed += 1
            raise UnavailableError(f"out of reach: {effect.kind} {effect.name}")


def app_in(folder: Path) -> App:
    """Windows of records some of which cannot be read, and are kept."""
    app = App("shop", data=folder, storage=SMALL)
    stream = app.stream("orders", key=String(), value=Json(n="long"), on_error="keep")
    stream.window(Tumbling("10s", grace="5s")).agg(n=count()).to_topic("per_window")
    return app


def filled(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    with Log(folder / "log", durability="os") as log:
        log.create_topic("orders", 2, if_not_exists=True)
        with log.writer("orders") as writer:
            values = [f'{{"n":{n}}}' if chance.random() < 0.9 else "not json" for n in range(ROWS)]
            keys = [f"k{n % 7}" for n in range(ROWS)]
            times = [START + n * 200 for n in range(ROWS)]
            writer.write(pa.table({"key": keys, "value": values, "timestamp": times}))


def begun(folder: Path, backend: Any, clock: ManualClock, number: int) -> Run:
    app = app_in(folder)
    setup = WorkerSetup(app=app.name, flows=app.flows, log=app.log, state=app.state, storage=app.storage)
    settings = RunSettings(
        until="caught_up", round_records=20, patience_ms=0, attempts=2, collect_every_ms=0, grace_ms=60_000
    )
    return start_run(
        setup, settings=settings, backend=backend, clock=clock, randomness=SeededRandomness(number)
    )


def newest(backend: FolderBackend) -> CommitRecord:
    records = Records(backend, "shop")
    number = records.newest()
    assert number is not None
    return records.read_commit(number)[0]


def converge(folder: Path, seed: int, table: Any) -> int:
    filled(folder, 1)
    clock = ManualClock(START + 3_600_000)
    inner = FolderBackend(folder / "state", clock=clock, randomness=SeededRandomness(seed))
    weather = Weather(seed)
    backend = WatchedBackend(inner, weather)
    for attempt in range(12):
        try:
            begun(folder, backend, clock, attempt).await_termination("60s")
        except UnavailableError:
            pass
        clock.advance(20_000)  # its turn has ended, whoever had it
    weather.is_bad = False
    run = begun(folder, backend, clock, 99)
    summary = run.await_termination("60s")
    assert summary.caught_up and summary.progress.lag_records == 0
    runtime = run._coordinator._engine._worker.runtime  # type: ignore[attr-defined]
    for number in range(2):
        assert not runtime.pins.pinned(f"shop/per_window/{number}")
    # Without a grace, one pass leaves what the commits name, and nothing else.
    Collector(Records(inner, "shop"), clock=clock, grace_ms=0, every_ms=0).run()
    assert objects_of(inner, "shop") == named_objects(inner, "shop"), seed
    assert not list((folder / "state").rglob(f"*{TEMPORARY}"))
    assert (result(folder), newest(inner).totals) == table, seed
    return weather.failed


def result(folder: Path) -> Any:
    """The windows that were sent, and what could not be read, each once."""
    with Log(folder / "log", read_only=True) as log:
        rows = log.reader("per_window").read_all()
    last = {
        key: value
        for key, value in zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True)
        if value
    }
    letters = app_in(folder).dead_letters("per_window").select(["partition", "offset"]).to_pylist()
    return last, letters


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("calm")
    filled(folder, 1)
    backend = FolderBackend(folder / "state")
    begun(folder, backend, ManualClock(START + 3_600_000), 0).await_termination("60s")
    found = result(folder)
    assert len(found[1]) > 10
    return found, newest(backend).totals


@pytest.mark.parametrize("seed", range(6), ids=lambda seed: f"R-26-{seed}")
def test_once_faults_stop_all_is_read_and_nothing_is_left_over(
    tmp_path: Path, seed: int, calm: Any, tally: Any
) -> None:
    failed = converge(tmp_path, seed, calm)
    assert failed > 3
    tally(1, repaired=1, seed=seed, faults=failed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(4), ids=lambda block: f"R-26-soak-{block}")
def test_many_more_faults(tmp_path: Path, block: int, calm: Any, tally: Any) -> None:
    failed = sum(converge(tmp_path / f"{seed}", 1000 * block + seed, calm) for seed in range(100))
    tally(100, repaired=100, seeds=[1000 * block, 1000 * block + 100], faults=failed)
