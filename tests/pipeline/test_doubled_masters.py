"""Two masters of one app on real tasks, state and topics, both sure to be the one: byte for byte one result (R-20)."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import FencedError
from tidegate.log.log import Log
from tidegate.metrics import Metrics
from tidegate.pipeline.checkpoint import Records
from tidegate.pipeline.coordinator import Coordinator
from tidegate.pipeline.definition.app import App
from tidegate.pipeline.lease import AppLease
from tidegate.pipeline.local_engine import LocalEngine
from tidegate.pipeline.recovery import open_app
from tidegate.pipeline.settings import RunSettings, WorkerSetup
from tidegate.randomness import SeededRandomness
from tidegate.storage import StorageConfig
from tidegate.storage.backends.folder import FolderBackend
from tidegate.tables.serdes.base import String
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates.definitions import count
from tidegate.windows.kinds import Tumbling

START = 1_700_000_000_000
HERE = threading.local()


class Turns:
    """A master on a thread of its own; it goes from one record to the next when it is told to."""

    def __init__(self, body: Callable[[], None]) -> None:
        self.outcome: BaseException | None = None
        self.is_done = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._body = body
        threading.Thread(target=self._main, daemon=True).start()

    def resume(self) -> None:
        self._go.release()
        assert self._stopped.acquire(timeout=300)

    def point(self) -> None:
        self._stopped.release()
        self._go.acquire()

    def _main(self) -> None:
        HERE.turns = self
        self._go.acquire()
        try:
            self._body()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.outcome = error
        self.is_done = True
        self._stopped.release()


class TurnsBackend(FolderBackend):
    """Every record that a master writes is a turn."""

    def publish(self, name: str, data: bytes, *, expected: str | None) -> str:
        turns = getattr(HERE, "turns", None)
        if turns is not None:
            turns.point()
        version = super().publish(name, data, expected=expected)
        if turns is not None:
            turns.point()
        return version


def setup_of(folder: Path) -> WorkerSetup:
    app = App("shop", data=folder)
    stream = app.stream("orders", key=String(), value=Json(order_id="string")).validate()
    stream.drop_duplicates("order_id", within="1m").window(Tumbling("10s", grace="1m")).agg(
        n=count()
    ).to_topic("out")
    storage = StorageConfig.for_tests(max_tasks=4)
    return WorkerSetup(app=app.name, flows=app.flows, log=app.log, state=app.state, storage=storage)


def run_of(folder: Path, log: Log, seed: int, late_ms: int, rounds: int = 50) -> Callable[[], None]:
    def body() -> None:
        setup = setup_of(folder)
        clock, randomness = ManualClock(START + 3_600_000), SeededRandomness(seed)
        backend = TurnsBackend(folder / "state", clock=clock, randomness=randomness)
        records = Records(backend, "shop")
        # Only the lease's clock differs: to each of them, its own turn has not ended yet.
        lease_clock = ManualClock(START + late_ms)
        generation = AppLease(records, clock=lease_clock, randomness=randomness, lease_ms=1000)
        opened = open_app(setup, log, records, generation, clock=clock, randomness=randomness)
        engine = LocalEngine(
            opened.setup, slots=2, log=log, backend=backend, clock=clock, randomness=randomness
        )
        try:
            coordinator = Coordinator(
                opened,
                engine,
                engine.deliver,
                clock=clock,
                randomness=randomness,
                metrics=Metrics(),
                settings=RunSettings(round_records=100),
            )
            for _ in range(rounds):
                if coordinator.step().kind == "rest":
                    break
        finally:
            engine.close()

    return body


def result_of(folder: Path) -> Any:
    with Log(folder / "log", read_only=True) as log:
        table = log.reader("out").read_all()
    rows = table.sort_by([("partition", "ascending"), ("offset", "ascending")]).to_pydict()
    records = Records(FolderBackend(folder / "state"), "shop")
    number = records.newest()
    assert number is not None
    commit = records.read_commit(number)[0]
    return rows, commit.totals, commit.ends, [(each.next_offset, each.state) for each in commit.sources]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An app with one round done, so that all copies have the same life."""
    folder: Path = tmp_path_factory.mktemp("template")
    chance = random.Random(3)
    numbers = [max(0, number - chance.choice([0, 0, 0, 7])) for number in range(500)]
    with Log(folder / "log") as log:
        log.create_topic("orders", 2)
        with log.writer("orders", integrity=True) as writer:
            writer.write(
                pa.table(
                    {
                        "key": [f"k{number % 5}" for number in numbers],
                        "value": [f'{{"order_id":"o{number}"}}' for number in numbers],
                        "timestamp": [START + number * 100 for number in numbers],
                    }
                )
            )
        run_of(folder, log, seed=1, late_ms=0, rounds=1)()
    return folder


@pytest.fixture(scope="module")
def alone(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("alone") / "data"
    shutil.copytree(template, folder)
    with Log(folder / "log") as log:
        run_of(folder, log, seed=2, late_ms=10_000)()
    return result_of(folder)


@pytest.mark.parametrize("seed", range(8), ids=lambda seed: f"R-20-{seed}")
def test_two_masters_on_real_tasks_end_as_one(seed: int, template: Path, alone: Any, tmp_path: Path) -> None:
    folder, chance = tmp_path / "data", random.Random(seed)
    shutil.copytree(template, folder)
    with Log(folder / "log") as log:
        both = [Turns(run_of(folder, log, 10 + number, (number + 1) * 10_000)) for number in range(2)]
        for _ in range(3):
            both[0].resume()  # it has the lease by now, and the other one takes it from it
        while alive := [each for each in both if not each.is_done]:
            each = chance.choice(alive)
            for _ in range(chance.choice((1, 2, 3, 8))):
                if not each.is_done:
                    each.resume()
        for each in both:
            assert each.outcome is None or isinstance(each.outcome, FencedError), each.outcome
        run_of(folder, log, 30, 100_000)()
    assert result_of(folder) == alone
