"""The log and the state that are served, opened for reading, with a cache of open tables.

Open tables are kept in an LRU of `OPEN_TABLES`, so that a fetch costs a look-up and not an opening. `TableRefresher`
brings those that were asked for lately to their newest commit in the background.

Thread rule: any thread; a table in use is never closed by another request, and opening one blocks only requests for
the same table.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tidegate.clock import Clock, SystemClock
from tidegate.errors import InvalidError, TidegateError
from tidegate.web.failures import NotThereError, ReadingEndedError
from tidegate.web.settings import Limits

if TYPE_CHECKING:
    from tidegate.log.catalog import TopicDescription
    from tidegate.log.kafka.log import KafkaLog
    from tidegate.log.log import Log
    from tidegate.storage.backends.base import StorageBackend


EVERY_SECONDS: Final = 0.05


class TableRefresher:
    """Calls `refresh` again and again from the first `wake` on, until it says that nobody asks any more."""

    def __init__(self, refresh: Callable[[], bool]) -> None:
        self._refresh = refresh
        self._asked, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def wake(self) -> None:
        if self._asked.is_set():
            return
        self._asked.set()
        with self._starting:
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="keeping-new", daemon=True)
                self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._asked.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _run(self) -> None:
        while not self._ended.is_set():
            self._asked.wait()
            while not self._ended.wait(EVERY_SECONDS):
                if not self._refresh():
                    self._asked.clear()
                    break


OPEN_TABLES: Final = 16
KEPT_NEW_MS: Final = 5000
"""For how long after a question its table is kept at the newest commit."""
_given_up: ContextVar[threading.Event | None] = ContextVar("given_up", default=None)


def answering(given_up: threading.Event) -> None:
    """Say which event tells that the question which this thread answers from now on is given up."""
    _given_up.set(given_up)


def is_given_up() -> bool:
    """Whether nobody waits any more for the answer that this thread looks for."""
    told = _given_up.get()
    return told is not None and told.is_set()


def check_wanted() -> None:
    """Raise `ReadingEndedError` when nobody waits any more; what reads much asks this between batches."""
    if is_given_up():
        raise ReadingEndedError("nobody waits for this answer any more; ask again")


@dataclass(slots=True)
class _Open:
    opening: threading.Lock = field(default_factory=threading.Lock)
    table: Any = None
    users: int = 0
    asked_ms: int = 0
    is_dropped: bool = False


@dataclass(slots=True)
class Budget:
    """How much one question may read; `is_spent` when it is over."""

    clock: Clock
    records: int
    until_ms: int
    read: int = 0

    def take(self, records: int) -> None:
        self.read += records

    @property
    def is_spent(self) -> bool:
        return self.read >= self.records or self.clock.monotonic_ms() >= self.until_ms or is_given_up()


@dataclass(slots=True)
class Site:
    """Log and state, and what is open of them.

    `log_path` is a folder, or `kafka://HOST:PORT`; `state_path` a folder, or the address of an object store.
    """

    log_path: Path | str
    state_path: Path | str
    limits: Limits = field(default_factory=Limits)
    client: Mapping[str, str] = field(default_factory=dict, repr=False)
    clock: Clock = field(default_factory=SystemClock)
    _log: Log | KafkaLog | None = None
    _backend: StorageBackend | None = None
    _tables: OrderedDict[tuple[str, object], _Open] = field(default_factory=OrderedDict)
    _kept: dict[str, Any] = field(default_factory=dict)
    _guard: threading.RLock = field(default_factory=threading.RLock)
    _keeping: TableRefresher = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.log_path, Path):  # what is copied from a screen is run in any folder
            self.log_path = self.log_path.absolute()
        if isinstance(self.state_path, Path):
            self.state_path = self.state_path.absolute()
        self._keeping = TableRefresher(self.refresh_asked)

    @property
    def log(self) -> Log | KafkaLog:
        from tidegate.log.log import Log, open_log

        with self._guard:
            if self._log is None:
                if isinstance(self.log_path, str):
                    self._log = open_log(self.log_path, client=self.client)
                else:
                    self._log = Log(self.log_path, read_only=True, clock=self.clock)
            return self._log

    @property
    def cluster(self) -> KafkaLog | None:
        """The log, if it is a cluster: of one there are no files to look at."""
        from tidegate.log.kafka.log import KafkaLog

        return self.log if isinstance(self.log, KafkaLog) else None

    @property
    def files(self) -> Log:
        """The log, if it is a folder."""
        from tidegate.log.log import Log

        log = self.log
        if not isinstance(log, Log):
            raise InvalidError(f"{self.log_path} is a cluster; a broker does not show its files")
        return log

    @property
    def backend(self) -> StorageBackend | None:
        """Where apps and tables keep what they know, opened to be read; None: there is no state yet."""
        from tidegate.storage import open_backend
        from tidegate.storage.backends.base import NoStateError

        with self._guard:
            if self._backend is None:
                try:
                    self._backend = open_backend(self.state_path, read_only=True)
                except NoStateError:
                    return None
            return self._backend

    def require_backend(self) -> StorageBackend:
        backend = self.backend
        if backend is None:
            raise NotThereError(
                f"there is no state in {self.state_path}; run an app, or name the place where it keeps its state"
            )
        return backend

    def kept(self, name: str, make: Callable[[], Any]) -> Any:
        """Something a subject keeps between questions, made when first asked for."""
        with self._guard:
            if name not in self._kept:
                self._kept[name] = make()
            return self._kept[name]

    def topics(self) -> list[str]:
        return self.log.topics() if isinstance(self.log_path, str) or self.log_path.is_dir() else []

    def bounds(self, topic: str) -> dict[int, tuple[int, int]]:
        """Partition → its first offset, and the one after its last."""
        cluster = self.cluster
        if cluster is not None:
            return cluster.bounds(topic, cluster.describe(topic).partition_numbers)
        return {
            row["partition"]: (row["log_start"], row["high_watermark"])
            for row in self.log.partition_rows(topic)
        }

    def describe(self, topic: str) -> TopicDescription:
        """The topic, or that it is not there; a wrong name is a wrong question."""
        from tidegate.log.catalog import check_topic_name

        check_topic_name(topic)
        if topic not in self.topics():
            raise NotThereError(f"there is no topic {topic} in this log; look at what there is: /api/topics")
        return self.log.describe(topic)

    def numbers(self, topic: str, partition: int | None) -> tuple[int, ...]:
        """The partitions asked for."""
        numbers = self.describe(topic).partition_numbers
        if partition is None:
            return numbers
        if partition not in numbers:
            raise NotThereError(
                f"topic {topic} has no partition {partition}; it has {numbers[0]} to {numbers[-1]}"
            )
        return (partition,)

    def budget(self, records: int | None = None) -> Budget:
        limits = self.limits
        until_ms = self.clock.monotonic_ms() + int(limits.scan_seconds * 1000)
        return Budget(self.clock, min(records or limits.scan_records, limits.scan_records), until_ms)

    @contextmanager
    def table(self, name: str, version: object, open_it: Callable[[], Any]) -> Iterator[Any]:
        """An open table, opened when it is not; `version` tells commits apart, None is the newest."""
        with self._guard:
            found = self._tables.setdefault((name, version), _Open())
            self._tables.move_to_end((name, version))
            found.asked_ms = self.clock.monotonic_ms()
            found.users += 1
        try:
            with found.opening:
                if found.table is None:
                    found.table = open_it()
            if version is None:
                self._keeping.wake()
            yield found.table
        finally:
            self._give_back((name, version), found)

    def _give_back(self, key: tuple[str, object], found: _Open) -> None:
        with self._guard:
            found.users -= 1
            if found.table is None and not found.users:  # could not be opened
                self._tables.pop(key, None)
            gone = [found] if found.is_dropped and not found.users else []
            while len(self._tables) > OPEN_TABLES:
                _, oldest = self._tables.popitem(last=False)
                oldest.is_dropped = True
                if not oldest.users:
                    gone.append(oldest)
        for each in gone:
            if each.table is not None:
                each.table.close()

    def refresh_asked(self) -> bool:
        """Bring tables that were asked for lately to their newest commit; False when none was."""
        since = self.clock.monotonic_ms() - KEPT_NEW_MS
        with self._guard:
            asked = [(key, each) for key, each in self._tables.items()
                     if key[1] is None and each.table is not None and each.asked_ms >= since]  # fmt: skip
            for _, each in asked:
                each.users += 1
        for key, each in asked:
            try:
                each.table.refresh()
            except TidegateError:
                pass  # the next question looks itself, and says what is wrong
            finally:
                self._give_back(key, each)
        return bool(asked)

    def close(self) -> None:
        self._keeping.close()
        with self._guard:
            for each in self._tables.values():
                if each.table is not None:
                    each.table.close()
            self._tables.clear()
            if self._log is not None:
                self._log.close()
            if self._backend is not None:
                self._backend.close()


def positions_of(written: str, numbers: tuple[int, ...]) -> dict[int, int]:
    """`0:120,1:77` as partition → offset; partitions that are not named are left out."""
    found: dict[int, int] = {}
    for part in filter(None, written.split(",")):
        number, colon, offset = part.partition(":")
        if not colon or not (number + offset).isascii() or not (number.isdigit() and offset.isdigit()):
            raise InvalidError(f"{written[:60]!r} is no list of positions; write it like 0:120,1:77")
        if len(number) > 10 or len(offset) > 18 or int(number) not in numbers:
            raise NotThereError(f"there is no partition {part[:60]}; there are {numbers[0]} to {numbers[-1]}")
        found[int(number)] = int(offset)
    return found


def written_positions(positions: dict[int, int]) -> str:
    return ",".join(f"{number}:{offset}" for number, offset in sorted(positions.items()))
