"""A writer that dies, a disk that fails: after each, no acknowledged record is lost and no torn one is served.

One scripted life of a log (topics made, records written and acknowledged, log segments rolled, aged out and
compacted, a clean close, a second life) is run with a fault at every file effect in turn:

- the process dies just before the effect, or half-way into a write (R-1, R-4);
- a sync fails, once or from then on (R-3): nothing is acknowledged after it;
- the disk is full (R-12): nothing is lost, and the log goes on once there is room.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import TidegateError, UnavailableError
from tidegate.files import Files
from tidegate.log.log import Log
from tidegate.log.maintenance import Housekeeping
from tidegate.log.topic_config import BrokerConfig
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.testing.faults import CrashAt, EffectCounter, FailAt, FailSync, count_effects, dying_process

START_MS = 1_700_000_000_000
EVENTS = {
    "segment.bytes": 700,
    "retention.ms": 60_000,
    "file.delete.delay.ms": 1000,
    "index.interval.bytes": 150,
    "segment.index.bytes": 240,
}
TABLE = EVENTS | {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": 0.01,
    "delete.retention.ms": 0,
}


@dataclass
class Story:
    """What was asked of the log, and what it promised."""

    attempted: dict[str, list[bytes]] = field(default_factory=lambda: {"events": [], "table": []})
    promised: dict[str, int] = field(default_factory=lambda: {"events": 0, "table": 0})
    may_age_out: int = 0
    compacted: bool = False
    closed: bool = False


@dataclass
class Stage:
    """One process's view of the log folder, on a clock that all processes share."""

    path: Path
    files: Files
    clock: ManualClock

    @contextlib.contextmanager
    def log(self) -> Iterator[tuple[Log, ManualScheduler]]:
        scheduler = ManualScheduler(self.clock)
        log = Log(
            self.path, files=self.files, clock=self.clock, randomness=SeededRandomness(7), scheduler=scheduler
        )
        try:
            yield log, scheduler
        finally:
            log.close()


def rows(topic: str, first: int, count: int, now_ms: int) -> tuple[list[bytes], pa.Table]:
    values = [b"%s-%d" % (topic.encode(), first + n) for n in range(count)]
    keys = [b"key-%d" % ((first + n) % 3) for n in range(count)]
    stamps = pa.array([now_ms] * count, pa.int64()).cast(pa.timestamp("ms", "UTC"))
    return values, pa.table({"key": keys, "value": values, "timestamp": stamps})


def write(log: Log, story: Story, topic: str, count: int, clock: ManualClock) -> None:
    values, table = rows(topic, len(story.attempted[topic]), count, clock.now_ms())
    story.attempted[topic] += values
    log.writer(topic, batch_records=2).write(table)
    story.promised[topic] = len(story.attempted[topic])


def live(stage: Stage, story: Story) -> None:
    """The script."""
    with stage.log() as (log, scheduler):
        log.create_topic("events", config=EVENTS, if_not_exists=True)
        log.create_topic("table", config=TABLE, if_not_exists=True)
        for _ in range(3):
            write(log, story, "events", 6, stage.clock)
            write(log, story, "table", 6, stage.clock)
            scheduler.run_due()
        stage.clock.advance("2m")
        write(log, story, "events", 2, stage.clock)
        story.may_age_out = len(story.attempted["events"])
        story.compacted = True
        Housekeeping(
            log, broker=BrokerConfig(), files=stage.files, clock=stage.clock, randomness=SeededRandomness(3)
        ).clean_once()
        stage.clock.advance("2s")
        scheduler.run_due()
        write(log, story, "table", 4, stage.clock)
    story.closed = True
    with stage.log() as (log, _):
        write(log, story, "events", 3, stage.clock)
        write(log, story, "table", 3, stage.clock)


def stored(log: Log, topic: str) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for batch in log.reader(topic, stop="latest"):
        found.update(zip(batch.column("offset").to_pylist(), batch.column("value").to_pylist(), strict=True))
    return found


def check(path: Path, clock: ManualClock, story: Story) -> None:
    """Reopen as anybody would, and hold the log to its promises."""
    with Stage(path, Files(), clock).log() as (log, _):
        topics = log.topics()
        for topic in ("events", "table"):
            if topic not in topics:
                assert story.promised[topic] == 0, f"{topic} is gone"
                continue
            attempted, promised = story.attempted[topic], story.promised[topic]
            unowned: dict[int, bytes] = {}
            with contextlib.suppress(
                UnavailableError
            ):  # a swap stopped half-way: only an owner can finish it
                unowned = stored(log, topic)
            log.partition(topic, 0)
            found = stored(log, topic)
            assert story.compacted or set(unowned) <= set(found)
            assert all(attempted[offset] == value for offset, value in found.items()), "a record changed"
            if topic == "events":
                first = min(found, default=promised)
                assert first <= story.may_age_out, "aged out too early"
                assert sorted(found) == list(range(first, first + len(found))), "a hole"
                assert max(found, default=first - 1) >= promised - 1, "an acknowledged record is lost"
            else:
                latest = {offset % 3: offset for offset in range(promised)}
                kept = {offset % 3: offset for offset in sorted(found)}
                assert all(kept.get(key, -1) >= offset for key, offset in latest.items()), "a key is lost"
                if not story.compacted:
                    assert set(range(promised)) <= set(found), "an acknowledged record is lost"
            before = len(found)
            log.writer(topic).write(pa.table({"key": [b"key-0"], "value": [b"after"]}))
            after = stored(log, topic)
            assert len(after) == before + 1
            assert after[max(after)] == b"after"


def effects(tmp_path: Path, kinds: frozenset[str] | None = None) -> int:
    return count_effects(
        lambda files: live(Stage(tmp_path / "counted", files, ManualClock(START_MS)), Story()), kinds
    )


def die_at(path: Path, n: int, torn_bytes: int = 0) -> None:
    clock, story, killer = ManualClock(START_MS), Story(), CrashAt(n, torn_bytes=torn_bytes)
    with dying_process(killer) as files:
        live(Stage(path, files, clock), story)
    try:
        check(path, clock, story)
    except (AssertionError, TidegateError) as error:
        raise AssertionError(f"death at effect {n} ({killer.died_at}): {error!r}") from error


STRIDE = 7  # of torn writes and full disks every commit takes every seventh; the soak tears all writes


@pytest.mark.parametrize("quarter", range(4))
def test_a_writer_may_die_at_any_file_effect(tmp_path: Path, quarter: int) -> None:
    """Every effect, one after the other; in quarters, so that two workers share them."""
    total = effects(tmp_path)
    assert total > 300
    for n in range(1 + quarter, total + 1, 4):
        die_at(tmp_path / f"at-{n}", n)


def test_a_writer_may_die_in_the_middle_of_any_write(tmp_path: Path) -> None:
    counter = EffectCounter()
    live(Stage(tmp_path / "counted", Files(watch=counter), ManualClock(START_MS)), Story())
    writes = [n for n, name in enumerate(counter.names, 1) if name.startswith("write")]
    for order, n in enumerate(writes[::STRIDE]):
        die_at(tmp_path / f"at-{n}", n, torn_bytes=(1, 20, 61, 100)[order % 4])


@pytest.mark.soak
def test_a_writer_may_die_at_every_single_file_effect(tmp_path: Path) -> None:
    for torn_bytes in (0, 1, 17, 61, 100):
        for n in range(1, effects(tmp_path) + 1):
            die_at(tmp_path / f"at-{n}-{torn_bytes}", n, torn_bytes)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_failed_sync_acknowledges_nothing_and_loses_nothing(tmp_path: Path, persistent: bool) -> None:
    total = effects(tmp_path, frozenset({"sync", "sync_folder"}))
    for n in range(1, total + 1, 5):
        path, clock, story = tmp_path / f"sync-{n}-{persistent}", ManualClock(START_MS), Story()
        fault = FailSync(n, persistent=persistent)
        with contextlib.suppress(TidegateError):
            live(Stage(path, Files(watch=fault), clock), story)
        assert fault.fired
        check(path, clock, story)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_full_disk_loses_nothing_and_the_log_goes_on_when_there_is_room(
    tmp_path: Path, persistent: bool
) -> None:
    kinds = frozenset({"write", "create", "rename", "mkdir"})
    total = effects(tmp_path, kinds)
    for n in range(1, total + 1, STRIDE):
        path, clock, story = tmp_path / f"full-{n}-{persistent}", ManualClock(START_MS), Story()
        fault = FailAt(n, errno.ENOSPC, persistent=persistent, kinds=kinds, torn_bytes=10)
        with contextlib.suppress(TidegateError):
            live(Stage(path, Files(watch=fault), clock), story)
        assert fault.fired
        check(path, clock, story)
