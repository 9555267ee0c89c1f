"""A broker killed in the middle of writing: it recovers its folder, we recover a copy, both end equal."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
from comparing import differences, epochs
from damages import SETTINGS, fill_plain, fill_transactional
from kafka_broker import Broker, read_lines
from kafka_home import KafkaHome, until
from kafka_wire import Wire
from our_logs import open_partition
from raw_batches import Row, batch
from workloads import T0

pytestmark = [pytest.mark.interop, pytest.mark.xdist_group("interop")]

QUIET = {"log.initial.task.delay.ms": "600000"}
RECOVERY_POINTS = "recovery-point-offset-checkpoint"


class Writing(threading.Thread):
    """Sends batches as fast as the broker takes them, until it is gone; odd ones have a producer id."""

    def __init__(self, broker: Broker, topic: str, number: int, repeat: int) -> None:
        super().__init__(daemon=True)
        self.sent = 0
        self._records = 0
        self._wire = Wire(broker.address)
        self._topic = topic
        self._producer = 70 + number if number % 2 else -1
        self._repeat = repeat

    def run(self) -> None:
        try:
            with self._wire:
                while True:
                    self._wire.produce(self._topic, self._next())
                    self.sent += 1
        except OSError:
            return

    def _next(self) -> bytes:
        value = b"%d" % self.sent * self._repeat
        rows = [Row(T0 + self.sent, b"k%d" % delta, value) for delta in range(1 + self.sent % 5)]
        if self._producer < 0:
            return batch(rows)
        made = batch(rows, producer_id=self._producer, producer_epoch=0, base_sequence=self._records)
        self._records += len(rows)
        return made


@pytest.fixture
def crashing(kafka: KafkaHome, tmp_path: Path) -> Broker:
    """A broker of one's own that neither retains nor compacts."""
    return Broker(kafka, tmp_path / "crashing", QUIET)


def test_the_same_crash_gives_the_same_recovery(crashing: Broker, tmp_path: Path) -> None:
    compare_crashes(crashing, tmp_path, rounds=2)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_crashes_give_the_same_recovery(crashing: Broker, tmp_path: Path) -> None:
    compare_crashes(crashing, tmp_path, rounds=200)


def compare_crashes(broker: Broker, folder: Path, *, rounds: int) -> None:
    broker.start()
    busy = [f"crash-{number}" for number in range(4)]
    # Room in the index: a broker does not survive recovering a segment that needs more entries than fit.
    larger = {"segment.bytes": "20000", "segment.index.bytes": "4800"}
    settings = {name: {**SETTINGS, **larger} for name in busy}
    settings |= {"plain": SETTINGS, "transactional": SETTINGS}
    broker.create_all(settings)
    with Wire(broker.address) as wire:
        fill_plain(broker, wire, "plain")
        fill_transactional(broker, wire, "transactional")
    for turn in range(rounds):
        write_until_killed(broker, busy, turn)
        crashed = folder / f"round-{turn}"
        shutil.copytree(broker.data, crashed)
        broker.start()
        broker.stop()
        before, after = read_lines(crashed / RECOVERY_POINTS), read_lines(broker.data / RECOVERY_POINTS)
        for name, config in settings.items():
            ours, theirs = crashed / f"{name}-0", broker.partition(name)
            partition = open_partition(ours, config, clean=False, recovery_point=before.get((name, 0), 0))
            log_end = partition.log.log_end_offset
            partition.close()
            assert log_end == after[name, 0]
            assert differences(ours, theirs) == [], f"round {turn}, {name}"
            assert epochs(ours, log_end) == epochs(theirs, log_end)
        shutil.rmtree(crashed)
        broker.start()
    broker.stop()


def write_until_killed(broker: Broker, topics: list[str], turn: int) -> None:
    writers = [Writing(broker, name, 10 * turn + at, 1 + 7 * at) for at, name in enumerate(topics)]
    for writer in writers:
        writer.start()
    until(lambda: all(writer.sent > 60 for writer in writers), "all writers to be under way")
    broker.kill()
    for writer in writers:
        writer.join(300)
