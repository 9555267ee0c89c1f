"""Replicas of a hybrid table as real processes, and what they must hold whatever happened to them.

`Nursery` starts and kills the processes. `Stage` writes the live topic that they copy, and in the end compares every
replica with what the topics say.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from simulated_replicas import counting, leaders, led, undisturbed
from tidegate.integrity import Manifest, Push
from tidegate.integrity.replica import Role
from tidegate.integrity.sender import SCHEMA
from tidegate.log.log import Log
from tidegate.storage import open_backend
from tidegate.tables.hybrid.status import ReplicaStatus, read_statuses
from tidegate.tables.hybrid.table import HybridTable, hybrid_table

VERSION, LIVE, KEYS = "users_v1", "user-updates", 40
NAMES = ("a", "b", "c")
WAIT_SECONDS = 300

NURSERY = """
import os, signal, sys, threading, time
from contextlib import contextmanager
from tidegate.tables.hybrid.table import hybrid_table
from tidegate.tables.hybrid import leader as outgoing
from tidegate.log.log import Log
from tidegate.tables.hybrid.table import hybrid_table

plain, plain_turn, turns = outgoing.Outgoing.copy, outgoing.Outgoing._turn, threading.Lock()

def stops_when_told(self, records):
    # Between the decision to append and the append itself: the worst moment to be paused in. Not while the process
    # writes its other partition, though: who stops then keeps that partition's lock, and nobody else could lead it.
    trigger = sys.argv[2] + "/stop-" + str(os.getpid())
    with turns:
        if os.path.exists(trigger):
            os.unlink(trigger)
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.5)  # the call may return before the process stands still
    plain(self, records)

@contextmanager
def one_at_a_time(self):
    with turns, plain_turn(self):
        yield

outgoing.Outgoing.copy, outgoing.Outgoing._turn = stops_when_told, one_at_a_time

def serve(name):
    ends = []
    signal.signal(signal.SIGTERM, lambda *_: ends.append(1))
    log = Log(sys.argv[1], durability="os")
    table = hybrid_table(log, "users_v1", live="user-updates", state=sys.argv[2] + "/state", replica=name, follow=True,
                         lease_ttl="700ms", commit_interval="100ms", heartbeat="100ms", hold=0, state_bytes=20_000)
    os.write(1, b"%d\\n" % os.getpid())
    while not ends:
        signal.sigtimedwait([], 0.05)
    table.close()
    log.close()
    os._exit(0)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.write(1, b"ready\\n")
for line in sys.stdin:
    if os.fork() == 0:
        try:
            serve(line.strip())
        except BaseException as error:
            os.write(2, repr(error).encode() + b"\\n")
            os.write(1, b"0\\n")
            os._exit(1)
"""


class Nursery:
    """Replica processes, forked from one that has loaded everything, so that a life is short."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", textwrap.dedent(NURSERY), str(folder / "log"), str(folder)]
        self._parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.living: dict[str, int] = {}
        assert self._line() == "ready"

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.living):
            self.send(name, signal.SIGKILL)
        self._parent.kill()
        self._parent.communicate()

    def start(self, name: str) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.write(f"{name}\n")
        self._parent.stdin.flush()
        pid = int(self._line())
        assert pid, f"replica {name} did not start"
        self.living[name] = pid

    def send(self, name: str, number: int) -> None:
        """A signal; after a deadly one, wait until the process is gone."""
        pid = self.living[name]
        os.kill(pid, number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            del self.living[name]
            until(lambda: not Path(f"/proc/{pid}").exists(), f"process {pid} ends")

    def is_stopped(self, name: str) -> bool:
        return Path(f"/proc/{self.living[name]}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def _line(self) -> str:
        assert self._parent.stdout is not None
        return self._parent.stdout.readline().strip()


class Stage:
    """A pushed version, its live topic, and somebody who writes it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.log = Log(folder / "log", durability="os")
        for topic in (VERSION, LIVE):
            self.log.create_topic(topic, 2)
        self.numbers = iter(range(1, 1 << 30))
        self.sender = self.log.writer(LIVE, integrity=True)
        self.pushed: list[dict[bytes, bytes]] = [{}, {}]
        self._push()
        self.backend = open_backend(folder / "state")

    def _push(self) -> None:
        driver = self.log.writer(VERSION, integrity=True)
        push = Push(driver)
        push.start()
        with self.log.writer(VERSION, integrity=True) as task:
            keys = [b"key-%d" % number for number in range(KEYS)]
            task.write(pa.table({"key": keys, "value": [b"pushed"] * KEYS}))
        push.end({number: Manifest.of([sent]) for number, sent in task.sent().items()})
        driver.close()
        for number in (0, 1):
            self.log.release(VERSION, number)
            for record in self.rows(VERSION, number):
                if record["value"]:
                    self.pushed[number][record["key"]] = record["value"]

    def write_live(self, count: int = 20) -> None:
        """New values and deletions; now and then all of it arrives twice."""
        ends = self.log.partition_rows(LIVE)
        numbers = [next(self.numbers) for _ in range(count)]
        keys = [b"key-%d" % self.random.randrange(KEYS) for _ in numbers]
        values = [None if number % 9 == 0 else b"%d" % number for number in numbers]
        self.sender.write(
            pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
        )
        if self.random.random() < 0.2:
            self._repeat({row["partition"]: row["high_watermark"] for row in ends})

    def _repeat(self, since: dict[int, int]) -> None:
        with (
            self.log.reader(LIVE, start=since, control_records=True) as reader,
            self.log.writer(LIVE) as plain,
        ):
            for batch in list(reader):
                again = pa.RecordBatch.from_arrays(
                    [batch.column(name) for name in SCHEMA.names], schema=SCHEMA
                )
                plain.write(again, partition=batch.column("partition")[0].as_py())

    def rows(self, topic: str, partition: int) -> list[dict[str, Any]]:
        with self.log.reader(topic, [partition], control_records=True) as reader:
            return [row for batch in reader for row in batch.to_pylist()]

    def statuses(self) -> dict[str, ReplicaStatus]:
        return {status.replica: status for status in read_statuses(self.backend, VERSION)}

    def leader_of(self, partition: int, among: Nursery) -> str | None:
        """Who said last that it leads, of those that live, with the latest epoch."""
        found = [
            (status.partitions[partition].epoch, name)
            for name, status in self.statuses().items()
            if partition in status.leads and among.living.get(name) == status.pid
        ]
        return max(found)[1] if found else None

    def opened(self, name: str, **settings: Any) -> HybridTable:
        return hybrid_table(
            self.log,
            VERSION,
            live=LIVE,
            state=self.backend,
            replica=name,
            lease_ttl="2s",
            heartbeat="10s",
            hold=0,
            **settings,
        )

    def check(self, names: tuple[str, ...]) -> int:
        """Let every replica drain everything, led by one of them, and hold them against the topics; epochs seen."""
        tables = [self.opened(name, commit_interval="1h") for name in (*names, "fresh")]
        try:
            until(lambda: self._is_level(tables), "all is copied and drained")
            expected: dict[bytes, bytes] = {}
            epochs = 0
            for number in (0, 1):
                rows, copied = undisturbed(self.pushed[number], self.rows(LIVE, number), 0)
                expected |= rows
                version = self.rows(VERSION, number)
                assert counting(version) == copied, f"partition {number}: a record is lost, or there twice"
                epochs += len({epoch for epoch, _, _ in led(version)})
                claims = leaders(version)
                assert all(len(each) == 1 for each in claims.values()), "two had one epoch"
                writers = [guid for each in claims.values() for guid in each]
                assert len(writers) == len(set(writers)), "an epoch is a sender of its own"
                for table in tables:
                    assert table.serving.leading[number].following.upstream.copied == len(copied)
            for table in tables:
                found = {row["key"]: row["value"] for batch in table.batches() for row in batch.to_pylist()}
                assert found == expected, f"replica {table.replica} holds another table"
            return epochs
        finally:
            for table in tables:
                table.close()

    def _is_level(self, tables: list[HybridTable]) -> bool:
        for table in tables:
            table.step()
        statuses = [table.status() for table in tables]
        lags = [each.lag + abs(each.live_lag) for status in statuses for each in status.partitions]
        leaders = [role for table in tables for role in table.roles.values() if role is Role.LEADER]
        return not any(lags) and len(leaders) == 2

    def close(self) -> None:
        self.backend.close()
        self.log.close()


def until(is_so: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"not within {WAIT_SECONDS} s: {what}"
        time.sleep(0.01)
