"""A death at every file effect of a compaction: the audit calls nothing damaged, before and after reopening."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.files import Files
from tidegate.log.log import Log
from tidegate.log.maintenance import Housekeeping
from tidegate.log.verify.verify import verify
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.testing.faults import CrashAt, EffectCounter, dying_process

CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": "500",
    "min.cleanable.dirty.ratio": "0.0",
    "index.interval.bytes": "100",
}
VALUES = {b"k%d" % (number % 4): b"%d" % number for number in range(36)}


def opened(path: Path, files: Files | None = None) -> Log:
    clock = ManualClock(10_000_000)
    return Log(
        path,
        durability="os",
        files=files,
        clock=clock,
        scheduler=ManualScheduler(clock),
        randomness=SeededRandomness(1),
    )


@pytest.fixture(scope="module")
def dirty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dirty") / "log"
    with opened(path) as log:
        log.create_topic("t", config=CONFIG)
        writer = log.writer("t", batch_records=3)
        for first in range(0, 36, 6):
            numbers = range(first, first + 6)
            keys = [b"k%d" % (number % 4) for number in numbers]
            writer.write(pa.table({"key": keys, "value": [b"%d" % number for number in numbers]}))
    return path


def compact(path: Path, files: Files | None = None) -> None:
    log = opened(path, files)
    keeper = Housekeeping(
        log, broker=log.contents.broker_config(), files=log.files, clock=log.clock, randomness=log.randomness
    )
    keeper.clean_once()
    log.close()


def faults(path: Path) -> list[str]:
    """What an audit calls damaged; the last log segment of a dead writer may be torn, which is a warning."""
    found = verify("t", log=path).all_findings()
    return [
        f"{finding.path.name}: {finding.message}"
        for finding in found.kept
        if finding.severity.value == "fault"
    ]


def last_values(path: Path) -> dict[bytes, bytes]:
    with opened(path) as log:
        log.partition("t", 0)
        table = log.reader("t").read_all()
    return dict(zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True))


def deaths(path: Path, work: Path) -> Iterator[tuple[int, Path]]:
    """(effect, a copy of the folder after dying there) for every change of files that a compaction makes."""
    counter = EffectCounter()
    shutil.copytree(path, work)
    with dying_process(counter) as files:
        compact(work, files)
    for number in range(1, counter.count + 1):
        shutil.rmtree(work)
        shutil.copytree(path, work)
        with dying_process(CrashAt(number)) as files:
            compact(work, files)
        yield number, work


def test_a_compaction_that_died_anywhere_leaves_no_fault(dirty: Path, tmp_path: Path) -> None:
    compacted = 0
    for number, path in deaths(dirty, tmp_path / "log"):
        compacted += any((path / "t-0").glob("*.swap"))
        assert faults(path) == [], number
        assert last_values(path) == VALUES, number
        assert faults(path) == [], number
    assert compacted > 3


def test_finishing_an_interrupted_compaction_may_die_anywhere_too(dirty: Path, tmp_path: Path) -> None:
    swapped = tmp_path / "swapped"
    for _, path in deaths(dirty, tmp_path / "log"):
        names = {file.name for file in (path / "t-0").iterdir()}
        if any(name.endswith(".log.swap") for name in names) and not any(
            ".cleaned" in name for name in names
        ):
            shutil.copytree(path, swapped)
            break
    again = tmp_path / "again"
    number, is_over = 0, False
    while not is_over:
        number += 1
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(swapped, again)
        with dying_process(CrashAt(number)) as files:
            log = opened(again, files)
            log.partition("t", 0)
            is_over = True
            log.close()
        assert faults(again) == [], number
        assert last_values(again) == VALUES, number
        assert faults(again) == [], number
