"""Pushes on two executors that are killed, stall and are overtaken: a version is complete, and holds nothing twice.

Spark's speculation is on, and has two hosts. What an attempt left in the topic that Spark did not count in the end must
be repeats of the very records that it did count.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cluster_kit import answers, run_script

from tidegate.integrity.audit import audit
from tidegate.integrity.columns import read_columns
from tidegate.integrity.verdicts import Verdict
from tidegate.log.log import Log
from tidegate.storage import open_backend
from tidegate.tables.versions.reader import VersionedTable

ROWS = 600
PUSHES = """
import json, os, sys, time
from dataclasses import replace
from pathlib import Path
import tidegate.spark
from cluster_kit import two_hosts
from tidegate.spark.push import driver
from meddling import Meddling

class Disturbing(Meddling):
    # Both jobs of a push, with places to act at. Who stalls does so until another attempt has begun, or for long.
    def sends(self, order, batches):
        from tidegate.spark.push.sending import send_in_task
        self.begin(f"{order.topic}.send")
        def disturbed():
            for number, batch in enumerate(batches):
                self.act("unsent" if number == 0 else "sending" if number == 4 else "no step")
                yield batch
        yield from send_in_task(replace(order, gather_rows=40), disturbed())

    def ingests(self, log, state, client, described, *rest):
        import msgspec
        from functools import partial
        from tidegate.spark.push import driver as there
        from tidegate.tables.versions import ingest as ingesting
        self.begin(f"{msgspec.msgpack.decode(described)['topic']}.ingest")
        ingesting.READ_BYTES = 4096
        there.ingest_partition = partial(ingesting.ingest_partition, told=lambda _: self.act("ingesting"))
        yield from there._ingest_in_task(log, state, client, described, *rest)

    def begin(self, what):
        from pyspark import TaskContext
        context = TaskContext.get()
        self.mine = f"{what}.{context.partitionId()}"
        (self.requests.parent / "begun" / f"{self.mine}.{context.taskAttemptId()}").touch()

    def _do(self, action):
        if action != "stall":
            return super()._do(action)
        deadline = time.monotonic() + self.stall_s
        while len(list((self.requests.parent / "begun").glob(f"{self.mine}.*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)

folder, wanted, rows = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
disturbing = Disturbing(folder / "requests", stall_s=600)
(folder / "begun").mkdir()
driver.send_in_task, driver._ingest_in_task = disturbing.sends, disturbing.ingests
config = {
    "spark.executor.memory": "512m",
    "spark.task.maxFailures": "8",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.5",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.minTaskRuntime": "300ms",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "30",
    "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
}
spark = tidegate.spark.session("push-kills", master=two_hosts(folder / "workers"), config=config)
spark.sparkContext.setLogLevel("OFF")
for number, (step, action) in enumerate(wanted, 1):
    frame = spark.range(0, rows, 1, 2).selectExpr(
        "format_string('key-%05d', id) key", f"concat('v{number}-', cast(id as string)) value"
    )
    disturbing.ask(step, action)
    told = driver.push(frame, table="users", key="key", log=str(folder / "log"), state=str(folder / "state"),
                       partitions=2, swap=True)
    print(json.dumps({"current": told.is_current, "rows": told.version.rows, "verdicts": told.version.verdicts}))
print(json.dumps(disturbing.done))
spark.stop()
"""
DISTURBED = [
    (step, action) for action in ("stall", "worker", "executor") for step in ("sending", "ingesting")
]
DISTURBED.insert(0, ("unsent", "stall"))


class Pushed(NamedTuple):
    """Several pushes in one session, each disturbed once."""

    folder: Path
    told: list[dict[str, Any]]
    done: list[str]

    def attempts(self, number: int, what: str) -> int:
        """The largest number of attempts at one partition."""
        names = [path.name.split(".") for path in (self.folder / "begun").glob(f"users_v{number}.{what}.*")]
        return max(Counter(partition for _, _, partition, _ in names).values())


def pushes(folder: Path, wanted: list[tuple[str, str]], rows: int) -> Pushed:
    said = run_script(PUSHES, folder, folder, json.dumps(wanted), rows)
    lines = answers(said)
    return Pushed(folder, lines[:-1], lines[-1])


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Pushed:
    return pushes(tmp_path_factory.mktemp("push-kills"), DISTURBED, ROWS)


class Record(NamedTuple):
    """What makes a record itself; only the nonce in a control record's key may differ between attempts."""

    key: bytes
    value: bytes
    timestamp: Any
    headers: tuple[tuple[str, bytes], ...]


def records(folder: Path, topic: str, partition: int) -> dict[tuple[int, int, int, int], list[Record]]:
    """All records of a partition by producer, chain and sequence."""
    found: dict[tuple[int, int, int, int], list[Record]] = {}
    with Log(folder / "log", read_only=True) as log:
        for batch in log.reader(topic, [partition], control_records=True):
            columns = read_columns(batch.column("headers"))
            for row, stamp, is_control in zip(
                batch.to_pylist(), columns.rows, columns.is_control.tolist(), strict=True
            ):
                place = tuple(int(stamp[name]) for name in ("guid_high", "guid_low", "chain", "sequence"))
                headers = tuple((each["key"], each["value"]) for each in row["headers"])
                key = row["key"][:-4] if is_control else row["key"]
                found.setdefault(place, []).append(Record(key, row["value"], row["timestamp"], headers))  # type: ignore[arg-type]
    return found


def check(pushed: Pushed, number: int, rows: int) -> int:
    """A version whole and exact, whatever happened on its way; how many records stand in its topic again."""
    folder, topic, repeats = pushed.folder, f"users_v{number}", 0
    told = pushed.told[number - 1]
    assert (told["current"], told["rows"]) == (True, rows)
    backend = open_backend(str(folder / "state"))
    with VersionedTable(backend, "users", number=number) as table:
        held = {row["key"]: row["value"] for batch in table.batches() for row in batch.to_pylist()}
    backend.close()
    assert held == {f"key-{n:05d}": f"v{number}-{n}" for n in range(rows)}
    found = [records(folder, topic, partition) for partition in range(2)]
    for partition in range(2):
        for place, copies in found[partition].items():
            assert len(set(copies)) == 1, f"two different records are {place} of {topic}-{partition}"
            repeats += len(copies) - 1
    report = audit(topic, log=folder / "log").metadata
    assert report is not None and report.faults == 0
    assert sum(each.total.verdicts[Verdict.DUPLICATE] for each in report.partitions) == repeats
    assert told["verdicts"]["ok"] == sum(map(len, found)), "counted once, by whoever"
    assert told["verdicts"].get("duplicate", 0) <= repeats, "some may come when the version is done"
    return repeats


@pytest.mark.timeout(2700)
@pytest.mark.parametrize(
    "number",
    [pytest.param(n, id=f"DIV-41-{step}-{action}") for n, (step, action) in enumerate(DISTURBED, 1)],
)
def test_whatever_attempts_there_were_the_version_is_whole_and_nothing_is_there_twice(
    pushed: Pushed, number: int
) -> None:
    step, action = DISTURBED[number - 1]
    assert [name for name in pushed.done if name.startswith(f"{step}.{action}.")], "it happened"
    repeats = check(pushed, number, ROWS)
    assert pushed.attempts(number, "ingest" if step == "ingesting" else "send") > 1, "and was tried again"
    if (step, action) in (("sending", "worker"), ("sending", "executor")):
        assert repeats > 50, "what the dead attempt had sent stands in front of its repeats"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_disturbed_pushes(tmp_path: Path) -> None:
    wanted = DISTURBED * 8
    found = pushes(tmp_path, wanted, 20_000)
    for number in range(1, len(wanted) + 1):
        check(found, number, 20_000)
