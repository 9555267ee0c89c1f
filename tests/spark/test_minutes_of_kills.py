"""An app on a cluster while drivers, executors and workers are killed, disks fail and fill up, and the clock jumps.

Records are written all the while. At the end the app runs undisturbed to the end of its log; its tables must be those
of a run that nobody disturbed, record by record, and after a collection nothing may be left that no commit names.
Beside it, replicas copy a live topic, and whoever leads them is killed, too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kill_kit import Failing

import replica_processes
import tidegate as tg
from pipelines import NOON, TEN, every_kind, named_objects, objects_of, run_all
from tidegate.clock import ManualClock, SystemClock
from tidegate.pipeline.checkpoint import Records
from tidegate.pipeline.gc import Collector
from tidegate.storage.backends.folder import FolderBackend

APP = "every-kind"
WINDOWED = ("tumbling", "hopping", "sliding", "by-shop")
DRIVER = """
import os, sys
from pathlib import Path
import tidegate.spark
from cluster_kit import two_hosts
from kill_kit import ASKED, Failing, JumpingClock
from pipelines import every_kind

folder = Path(sys.argv[1])
failing = Failing(folder / "faults")
failing.install()
config = {
    "spark.executor.memory": "512m", "spark.task.maxFailures": "8",
    "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"], "spark.executorEnv." + ASKED: "yes",
}
spark = tidegate.spark.session("kills", master=two_hosts(folder / "workers"), config=config)
spark.sparkContext.setLogLevel("OFF")
run = every_kind(folder, failing).start(
    spark, round_records=5000, clock=JumpingClock(folder / "jump"), lease_ms=3000
)
while run.is_running:
    run.join("200ms")
    (folder / "progress").write_text(str(run.progress.records))
print(repr(run.error), flush=True)
"""


class Replicas:
    """Three replicas of a hybrid table, each a process, and who writes their live topic."""

    def __init__(self, folder: Path, seed: int) -> None:
        folder.mkdir(parents=True)
        self.stage = replica_processes.Stage(folder, seed)
        self._nursery = replica_processes.Nursery(folder)
        for name in replica_processes.NAMES:
            self._nursery.start(name)

    def kill_leader(self) -> bool:
        """Kill the process that leads a partition and start it again; whether there was one."""
        until, name = time.monotonic() + 20, None
        while name is None and time.monotonic() < until:
            name = self.stage.leader_of(self.stage.random.randrange(2), self._nursery)
        if name is not None:
            self._nursery.send(name, signal.SIGKILL)
            self._nursery.start(name)
        return name is not None

    def end(self) -> None:
        self._nursery.__exit__()


class Stage:
    """The app's folder, a writer of its topic, the process that drives it, and what happened to it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.chance = folder, random.Random(seed)
        self.happened: dict[str, int] = {}
        self.planned: list[str] = []
        self.peak_bytes = 0
        self.replicas = Replicas(folder.parent / "replicas", seed)
        with tg.Log(folder / "log", durability="os") as log:
            log.create_topic("orders", 2)
        every_kind(folder, Failing(folder / "faults")).run(
            "local", until="caught_up", clock=ManualClock(NOON)
        )
        self.log = tg.Log(folder / "log", durability="os")
        self.sender = self.log.writer("orders", integrity=True)
        self.written, self.driver = 0, None
        self._script = folder / "driver.py"
        self._script.write_text(DRIVER)

    def write(self, rows: int) -> None:
        """Orders of one second for each fifty, some twice."""
        numbers = [
            n - self.chance.randrange(40) * (self.chance.random() < 0.1)
            for n in range(self.written, self.written + rows)
        ]
        values = [f'{{"order":{max(0, n)},"shop":"s{n % 7}","amount":{n % 97}.25}}' for n in numbers]
        times = [TEN + (self.written + n) * 20 for n in range(rows)]
        keys = [f"customer-{max(0, n) % 20}" for n in numbers]
        self.sender.write(pa.table({"key": keys, "value": values, "timestamp": times}))
        self.written += rows

    def start(self) -> None:
        self.started_at = time.time()
        kit = str(Path(__file__).parent)
        environment = os.environ | {
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_WORKER_DIR": str(self.folder / "workers"),
        }
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [kit, os.environ.get("PYTHONPATH")]))
        self.driver = subprocess.Popen(
            [sys.executable, str(self._script), str(self.folder)],
            env=environment, stdout=(self.folder / "out").open("ab"), stderr=(self.folder / "err").open("ab"),
            start_new_session=True,
        )  # fmt: skip

    def below(self) -> dict[str, list[int]]:
        """The processes of the session by what they are."""
        found: dict[str, list[int]] = {"driver": [], "jvm": [], "executor": [], "worker": []}
        if self.driver is None or self.driver.poll() is not None:
            return found
        children: dict[int, list[int]] = {}
        commands: dict[int, str] = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError, IndexError):
                stat = (path / "stat").read_text().rsplit(")", 1)[1].split()
                children.setdefault(int(stat[1]), []).append(int(path.name))
                commands[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
        line = [self.driver.pid]
        while line:
            pid = line.pop()
            line += children.get(pid, [])
            command = commands.get(pid, "")
            if pid == self.driver.pid:
                found["driver"].append(pid)
            elif "CoarseGrainedExecutorBackend" in command:
                found["executor"].append(pid)
            elif "pyspark.daemon" in command or "pyspark/daemon" in command:
                found["worker"].append(pid)
        return found

    def _executing(self) -> list[int]:
        """Executors and their Python processes: they work in folders below this one."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.readlink(path / "cwd").startswith(str(self.folder)):
                    found.append(int(path.name))
        return found

    def measure(self) -> None:
        for pid in self.below()["worker"] + self.below()["driver"]:
            with suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                anonymous = next(line for line in lines if line.startswith("RssAnon"))
                self.peak_bytes = max(self.peak_bytes, int(anonymous.split()[1]) << 10)

    def disturb(self) -> None:
        """One thing that happens to machines."""
        if not self.planned:  # every kind comes as often as the others
            self.planned = [
                "driver",
                "executor",
                "worker",
                "worker",
                "leader",
                "EIO",
                "ENOSPC",
                "forward",
                "back",
            ]
            self.chance.shuffle(self.planned)
        what = self.planned.pop()
        if what in ("EIO", "ENOSPC"):
            before, until = self.failed(), time.monotonic() + 15
            (self.folder / "faults").write_text(f"{what} {0.2 if what == 'EIO' else 1}")
            time.sleep(self.chance.uniform(0.5, 3))
            while self.failed() == before and time.monotonic() < until:
                self.write(100)
                time.sleep(0.2)
            (self.folder / "faults").unlink()
            if self.failed() == before:
                return  # nothing was written meanwhile
        elif what in ("forward", "back"):
            (self.folder / "jump").write_text(
                str(self.chance.randrange(3_600_000) * (1 if what == "forward" else -1))
            )
        elif what == "leader":
            if not self.replicas.kill_leader():
                return
        else:
            victims = self.below()[what]
            if not victims:
                return
            victim = self.chance.choice(victims)
            if what == "driver":
                os.killpg(victim, signal.SIGKILL)
            else:
                os.kill(victim, signal.SIGKILL)
        self.happened[what] = self.happened.get(what, 0) + 1

    def failed(self) -> int:
        """How many errors were injected so far."""
        path = self.folder / "failed"
        return path.stat().st_size if path.exists() else 0

    def is_working(self) -> bool:
        """Whether the process that runs now has begun rounds: one that is killed before did not do anything."""
        progress = self.folder / "progress"
        return progress.exists() and progress.stat().st_mtime > self.started_at

    def keep_running(self) -> None:
        if self.driver is None or self.driver.poll() is not None:
            self.start()

    def end(self) -> None:
        """Kill everything, also executors that lost their driver, and wait until it is gone."""
        if self.driver is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.driver.pid, signal.SIGKILL)
            self.driver.wait()
        deadline = time.monotonic() + 300
        while left := self._executing():
            assert time.monotonic() < deadline, left
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        self.sender.close()
        self.log.close()
        self.replicas.end()


def tables(folder: Path) -> dict[str, list[Any]]:
    """Everything that the app tells others: its windowed topics, its sessions, and the table that is no topic."""
    found: dict[str, list[Any]] = {}
    with every_kind(folder, Failing(folder / "faults")) as app:
        for name in WINDOWED:
            with app.windowed_table(name) as table:
                found[name] = sorted(
                    (repr(row.key), row.window.start, repr(row.value)) for row in table.all()
                )
        for name in ("tumbling", "by-shop", "session", "shops"):
            with app.open_table(name) as table:
                found[f"read {name}"] = sorted(map(repr, table.to_arrow().to_pylist()))
    with tg.Log(folder / "log", read_only=True) as log:
        passed = log.reader("passed").read_all()
    found["passed"] = sorted(value for value in passed.column("value").to_pylist() if value)
    return found


def left_no_trace(folder: Path, twin: Path) -> None:
    """Run the app and a twin that nobody disturbed to the end of the log: they tell the same, and nothing is left."""
    shutil.copytree(folder / "log", twin / "log")
    with tg.Log(twin / "log") as log:
        for name in set(log.topics()) - {"orders"}:
            log.delete_topic(name)
    later = ManualClock(NOON + 365 * 86_400_000)  # no record is from the future
    run_all(every_kind(twin, Failing(twin / "faults")), "local", clock=later, round_records=50_000)
    summary = run_all(
        every_kind(folder, Failing(folder / "faults")), "local", clock=later, round_records=50_000
    )
    assert summary.exit_code == 0 and not summary.stopped, str(summary)
    ours, theirs = tables(folder), tables(twin)
    assert {name: len(rows) for name, rows in ours.items()} == {
        name: len(rows) for name, rows in theirs.items()
    }
    assert ours == theirs
    backend = FolderBackend(folder / "state")
    Collector(Records(backend, APP), clock=SystemClock(), grace_ms=0, every_ms=0).run()
    assert objects_of(backend, APP) == named_objects(backend, APP) != set()


def minutes_of_kills(folder: Path, seconds: float, seed: int, tally: Any) -> None:
    twin, stage = folder / "twin", Stage(folder / "app", seed)
    until, next_at = time.monotonic() + seconds, time.monotonic() + 15
    try:
        while time.monotonic() < until:
            stage.keep_running()
            stage.write(500)
            stage.replicas.stage.write_live()
            stage.measure()
            if time.monotonic() >= next_at and stage.is_working():
                stage.disturb()
                next_at = time.monotonic() + stage.chance.uniform(*((10, 20) if seconds > 120 else (4, 8)))
            time.sleep(0.25)
    finally:
        stage.end()
    left_no_trace(stage.folder, twin)
    epochs = stage.replicas.stage.check(replica_processes.NAMES)
    ceiling = every_kind(stage.folder, Failing(stage.folder / "faults")).storage.memory_ceiling_bytes
    assert stage.peak_bytes < ceiling
    kills = sum(stage.happened.values())
    figures = {
        "records": stage.written, "leader_epochs": epochs, "injected_errors": stage.failed(),
        "peak_mib": stage.peak_bytes >> 20,
        "ceiling_mib": ceiling >> 20, **stage.happened,
    }  # fmt: skip
    print(json.dumps(figures))
    tally(kills, repaired=kills, **figures)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [pytest.param(16, id="R-18-minutes")])
def test_ten_minutes_of_kills_faults_and_clock_jumps_leave_no_trace(
    tmp_path: Path, seed: int, tally: Any
) -> None:
    minutes_of_kills(tmp_path, float(os.environ.get("TIDEGATE_KILL_SECONDS", "600")), seed, tally)
