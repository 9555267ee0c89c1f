"""The process that builds a table dies: at every file effect, in the middle of writes, and for real at random.

After each death the table is opened again and must be the one an undisturbed life would have built; what a commit
promised is there before anything is read again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from table_records import Said, window_record, windows_in, write_records
from tidegate.clock import ManualClock, SystemClock
from tidegate.files import Files
from tidegate.log.log import Log
from tidegate.randomness import SeededRandomness
from tidegate.scheduling import ManualScheduler
from tidegate.tables.factories import WindowedTable, windowed_table
from tidegate.tables.ingest.materializer import Cadence
from tidegate.testing.faults import CrashAt, EffectCounter, count_effects, dying_process
from window_oracles import ms

TOPIC = "windows-changelog"
ROUNDS, ROUND = 3, 12
MINUTE = 60_000


def records(first: int, count: int) -> list[Said]:
    """Updates, deletions and windows that expire, the same for the same numbers."""
    said = []
    for n in range(first, first + count):
        value = None if n % 5 == 4 else b"%d" % n
        said.append(window_record(b"key-%d" % (n % 4), n // 6 * MINUTE, value, n * 1000))
    return said


def answer(count: int, retention: int = 3 * MINUTE) -> dict[Any, Any]:
    """What a table over the first records holds, built record by record."""
    rows: dict[Any, Any] = {}
    observed = -1
    for n in range(count):
        start = n // 6 * MINUTE
        observed = max(observed, start)
        rows[b"key-%d" % (n % 4), start, start + MINUTE] = None if n % 5 == 4 else (b"%d" % n, n * 1000)
    return {key: row for key, row in rows.items() if row is not None and key[1] > observed - retention}


@contextmanager
def stage(log_path: Path, clock: ManualClock) -> Iterator[Log]:
    with Log(log_path, durability="os", clock=clock, read_only=True, scheduler=ManualScheduler(clock)) as log:
        yield log


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The topic as it is after each round: the table's deaths must not be the log's."""
    folders = []
    for rounds in range(1, ROUNDS + 1):
        folder = tmp_path_factory.mktemp("log") / "log"
        with Log(
            folder, durability="os", randomness=SeededRandomness(1)
        ) as log:  # one topic, so one topic id
            write_records(log, TOPIC, records(0, rounds * ROUND), batch_records=4)
        folders.append(folder)
    return folders


def opened(log: Log, state: Path, files: Files | None, clock: ManualClock, seed: int) -> WindowedTable:
    return windowed_table(
        log,
        TOPIC,
        ms(MINUTE),
        state=state,
        retention=ms(3 * MINUTE),
        files=files,
        clock=clock,
        randomness=SeededRandomness(seed),
        scheduler=ManualScheduler(clock),
        cadence=Cadence(commit_bytes=1, read_bytes=512),
    )


def live(logs: list[Path], state: Path, files: Files, clock: ManualClock, promised: list[int]) -> None:
    """The script: each round the table is opened, reads a little more, commits, is looked after, and closes."""
    for number, folder in enumerate(logs):
        with stage(folder, clock) as log:
            table = opened(log, state, files, clock, seed=number)
            promised.append((number + 1) * ROUND)  # catch_up has committed
            assert table._builder is not None
            table._builder.source.runtime.maintain(table.name, 10_000)
            table.close()
            clock.advance("1h")


def check(logs: list[Path], state: Path, clock: ManualClock, promised: list[int]) -> None:
    clock.advance("1m")  # the dead one's lease ends
    with stage(logs[-1], clock) as log:
        bare = windowed_table(
            log, TOPIC, ms(MINUTE), state=state, retention=ms(3 * MINUTE), clock=clock, bootstrap=False
        )
        position = bare.position[0]
        assert position >= max(promised, default=0), "a commit is lost"
        assert windows_in(bare) == answer(position), "a commit holds what it does not say"
        assert bare.counts.applied + bare.counts.deleted + bare.counts.expired == position
        bare.catch_up()
        assert windows_in(bare) == answer(ROUNDS * ROUND)
        for commit in bare.commits():
            with bare.as_of(commit) as past:
                assert windows_in(past) == answer(commit.positions[0])
        bare.close()


def die_at(logs: list[Path], state: Path, n: int, torn_bytes: int = 0) -> None:
    clock, promised, killer = ManualClock(), [], CrashAt(n, torn_bytes=torn_bytes)  # type: ignore[var-annotated]
    with dying_process(killer) as files:
        live(logs, state, files, clock, promised)
    try:
        check(logs, state, clock, promised)
    except Exception as error:
        raise AssertionError(f"death at effect {n} ({killer.died_at}): {error!r}") from error


def effects(logs: list[Path], state: Path) -> int:
    return count_effects(lambda files: live(logs, state, files, ManualClock(), []))


def test_an_undisturbed_life_gives_the_answer(logs: list[Path], tmp_path: Path) -> None:
    clock, promised = ManualClock(), []  # type: ignore[var-annotated]
    live(logs, tmp_path / "state", Files(), clock, promised)
    assert promised[-1] == ROUNDS * ROUND
    check(logs, tmp_path / "state", clock, promised)


@pytest.mark.parametrize("part", range(4))
def test_the_builder_may_die_at_any_file_effect(logs: list[Path], tmp_path: Path, part: int) -> None:
    """Every effect, one after the other; in parts, so that two workers share them."""
    total = effects(logs, tmp_path / "counted")
    assert total > 100
    for n in range(1 + part, total + 1, 4):
        die_at(logs, tmp_path / f"at-{n}", n)


def test_the_builder_may_die_in_the_middle_of_a_write(logs: list[Path], tmp_path: Path) -> None:
    counter = EffectCounter()
    live(logs, tmp_path / "counted", Files(watch=counter), ManualClock(), [])
    writes = [n for n, name in enumerate(counter.names, 1) if name.startswith("write")]
    for order, n in enumerate(writes[::5]):
        die_at(logs, tmp_path / f"at-{n}", n, torn_bytes=(1, 20, 61, 100)[order % 4])


BUILDER = """
import sys
from tidegate.tables.ingest.materializer import Cadence
from tidegate.tables.factories import windowed_table
from tidegate.log.log import Log
from tidegate.tables.ingest.materializer import Cadence
from tidegate.tables.factories import windowed_table
with Log(sys.argv[1], read_only=True) as log:
    table = windowed_table(log, "windows-changelog", "1m", state=sys.argv[2], retention="3m", bootstrap=False,
                           follow=True, cadence=Cadence(commit_interval_ms=20, read_bytes=2048))
    print(table.role, flush=True)
    while True:
        table.catch_up("60s")
        print(table.position[0], flush=True)
        table.commit()
"""


def start_builder(log: Path, state: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(BUILDER), str(log), str(state)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def test_a_table_is_read_while_another_process_builds_it(tmp_path: Path) -> None:
    total = 2000
    with Log(tmp_path / "log", durability="os") as log:
        write_records(log, TOPIC, records(0, 100))
        process = start_builder(tmp_path / "log", tmp_path / "state")
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip() == "builder"
            with windowed_table(
                log, TOPIC, ms(MINUTE), state=tmp_path / "state", retention=ms(3 * MINUTE)
            ) as reader:
                assert reader.role == "reader"
                seen = []
                for first in range(100, total, 100):
                    write_records(log, TOPIC, records(first, 100))
                    reader.catch_up("60s")
                    position = reader.position[0]
                    assert position == first + 100
                    assert windows_in(reader) == answer(position)
                    seen.append(position)
                assert process.poll() is None, "the builder goes on"
        finally:
            kill(process)
        # It was killed: the next one that opens builds on, at once, because the dead one's process is gone.
        with windowed_table(
            log, TOPIC, ms(MINUTE), state=tmp_path / "state", retention=ms(3 * MINUTE)
        ) as table:
            assert table.role == "builder"
            assert windows_in(table) == answer(total)


NURSERY = """
import os, signal, sys
from tidegate.tables.ingest.materializer import Cadence
from tidegate.tables.factories import windowed_table
from tidegate.log.log import Log
from tidegate.tables.ingest.materializer import Cadence
from tidegate.tables.factories import windowed_table
from window_oracles import ms

def build():
    with Log(sys.argv[1], read_only=True) as log:
        table = windowed_table(log, "windows-changelog", "1m", state=sys.argv[2], retention="3m",
                               bootstrap=False, follow=True, cadence=Cadence(commit_interval_ms=5, read_bytes=2048))
        os.write(1, b"%d %s\\n" % (os.getpid(), table.role.encode()))
        while True:
            signal.pause()

signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not kept as zombies: a lease sees that they are gone
os.write(1, b"ready\\n")
while sys.stdin.readline():
    if os.fork() == 0:
        build()
"""


class Nursery:
    """Processes that build a table, one at a time; forked from one that has loaded everything, so a life is short."""

    def __init__(self, log: Path, state: Path) -> None:
        command = [sys.executable, "-c", textwrap.dedent(NURSERY), str(log), str(state)]
        self._parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._living: int | None = None
        assert self._line() == "ready"

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._parent.kill()
        self._parent.communicate()

    def start(self) -> None:
        """The next builder, once it builds."""
        assert self._parent.stdin is not None
        self._parent.stdin.write("go\n")
        self._parent.stdin.flush()
        pid, role = self._line().split()
        self._living = int(pid)
        assert role == "builder"

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self._living is not None:
            os.kill(self._living, signal.SIGKILL)
            while Path(f"/proc/{self._living}").exists():
                SystemClock().sleep_ms(1)
            self._living = None

    def _line(self) -> str:
        assert self._parent.stdout is not None
        return self._parent.stdout.readline().strip()


def killed_at_random(tmp_path: Path, deaths: int, seed: int) -> None:
    """One table, built by processes that are killed one after the other, while the topic grows."""
    generator = np.random.default_rng(seed)
    clock, written, begun = SystemClock(), 0, 0
    with (
        Log(tmp_path / "log", durability="os") as log,
        Nursery(tmp_path / "log", tmp_path / "state") as nursery,
    ):
        log.create_topic(TOPIC)
        for death in range(deaths):
            nursery.start()
            for _ in range(int(generator.integers(1, 4))):
                write_records(log, TOPIC, records(written, 100), batch_records=20)
                written += 100
                clock.sleep_ms(int(generator.integers(0, 20)))
            nursery.kill()
            if death % 5 == 4 or death == deaths - 1:
                with windowed_table(
                    log,
                    TOPIC,
                    ms(MINUTE),
                    state=tmp_path / "state",
                    retention=ms(3 * MINUTE),
                    bootstrap=False,
                ) as table:
                    assert table.role == "builder", "a dead process holds no lease"
                    position = table.position[0]
                    begun += position < written
                    assert windows_in(table) == answer(position), f"seed {seed}, death {death}"
                    table.catch_up()
                    assert windows_in(table) == answer(written)
    assert begun > 0, "no death came in the middle of anything"


def test_the_builder_may_be_killed_at_fifty_random_instants(tmp_path: Path) -> None:
    killed_at_random(tmp_path, deaths=50, seed=11)


@pytest.mark.soak
def test_the_builder_may_be_killed_at_a_thousand_random_instants(tmp_path: Path) -> None:
    killed_at_random(tmp_path, deaths=1000, seed=12)
