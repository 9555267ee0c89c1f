"""Tables of every kind whose every commit gives all keys one value, behind a backend that can be made to wait."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from push_kit import push_here

import tidegate as tg
from table_records import Said, session_record, window_record, write_records
from tidegate.log.log import Log
from tidegate.pipeline.reading.result_table import ResultTable
from tidegate.storage.backends.folder import FolderBackend
from tidegate.tables.factories import sessioned_table, windowed_table
from tidegate.tables.factories import table as key_table
from tidegate.tables.options import Consumed
from tidegate.tables.serdes.base import Long, String
from tidegate.tables.versions.reader import VersionedTable

KEYS, PARTITIONS = 40, 2
SLOW = "slow-reader"
BOUND_S = 300


class Gate(FolderBackend):
    """A folder that keeps the thread of that name waiting in every call, once it is shut."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_shut = False
        self.stuck, self.go_on = threading.Event(), threading.Event()

    def _pass(self) -> None:
        if self.is_shut and threading.current_thread().name == SLOW:
            self.stuck.set()
            assert self.go_on.wait(BOUND_S)

    def read(self, name: str) -> pa.Buffer:
        self._pass()
        return super().read(name)

    def read_published(self, name: str) -> tuple[bytes, str] | None:
        self._pass()
        return super().read_published(name)

    def list(self, prefix: str) -> Iterator[Any]:
        self._pass()
        return super().list(prefix)


class Stage(ABC):
    """A table of some kind whose every commit gives all keys one value: a mixture of commits shows in a total."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gate = Gate(folder / "state")
        self.commit(1)
        self.table = self.opened()

    @abstractmethod
    def commit(self, value: int) -> None: ...

    @abstractmethod
    def opened(self) -> Any: ...

    def values(self) -> set[int]:
        """All values that a scan finds; each key must be there once."""
        return self.of(list(self.table.batches()))

    @staticmethod
    def of(batches: list[pa.RecordBatch]) -> set[int]:
        found = pa.Table.from_batches(batches)
        name = "total" if "total" in found.column_names else "value"
        assert sorted(found["key"].to_pylist()) == [f"k{number:03}" for number in range(KEYS)]
        return {int(each) for each in pc.unique(found[name]).to_pylist()}

    def get(self) -> Any:
        return self.table.get("k007")

    def close(self) -> None:
        self.table.close()


class Stored(Stage):
    """A table over a topic, read while another builds it."""

    def commit(self, value: int) -> None:
        with Log(self.folder / "log", durability="os") as log:
            for partition in range(PARTITIONS):
                data = value.to_bytes(8, "big")
                said = [self.said(b"k%03d" % key, data) for key in range(partition, KEYS, PARTITIONS)]
                write_records(log, "t", said, partition=partition, partitions=PARTITIONS)
            with self._open(log, FolderBackend(self.folder / "state")) as built:
                built.catch_up()

    def opened(self) -> Any:
        log = Log(self.folder / "log", durability="os", read_only=True)
        return self._open(log, self.gate, read_only=True)

    def said(self, key: bytes, data: bytes) -> Said:
        return Said(key, data, 0)

    def _open(self, log: Log, state: Any, **settings: Any) -> Any:
        return key_table(log, "t", state=state, consumed=Consumed(String(), Long()), **settings)


class Windowed(Stored):
    def said(self, key: bytes, data: bytes) -> Said:
        return window_record(key, 1000, data)

    def _open(self, log: Log, state: Any, **settings: Any) -> Any:
        return windowed_table(log, "t", "1s", state=state, consumed=Consumed(String(), Long()), **settings)

    def get(self) -> Any:
        return self.table.get("k007", 1000)


class Sessioned(Stored):
    def said(self, key: bytes, data: bytes) -> Said:
        return session_record(key, 1000, 2000, data)

    def _open(self, log: Log, state: Any, **settings: Any) -> Any:
        return sessioned_table(log, "t", state=state, consumed=Consumed(String(), Long()), **settings)

    def get(self) -> Any:
        return self.table.get("k007", 1000)


class Versioned(Stage):
    """A table that is pushed: a commit is a version."""

    def commit(self, value: int) -> None:
        rows = [(b"k%03d" % key, value.to_bytes(8, "big")) for key in range(KEYS)]
        push_here(self.folder, rows, table="t", partitions=PARTITIONS, serdes=("String()", "Long()"))

    def opened(self) -> Any:
        return VersionedTable(self.gate, "t")


class Results(Stage):
    """A table of an app; a window's total is the value that was written last, less what was there before."""

    _last = 0

    def commit(self, value: int) -> None:
        with tg.Log(self.folder / "log", durability="os") as log:
            log.create_topic("t", PARTITIONS, if_not_exists=True)
            with log.writer("t") as writer:
                keys = [f"k{key:03}" for key in range(KEYS)]
                added = [f'{{"n": {value - self._last}}}'] * KEYS
                writer.write(pa.table({"key": keys, "value": added, "timestamp": [1000] * KEYS}))
        self._last = value
        self.app().run("local", until="caught_up")

    def app(self) -> tg.App:
        app = tg.App("a", data=self.folder)
        stream = app.stream("t", value=tg.Json(n="long"))
        stream.window(tg.Tumbling("1s", grace="1h")).agg(total=tg.sum("n")).to_table("totals")
        return app

    def opened(self) -> Any:
        return ResultTable(self.gate, "a", self.app().flow("totals"))

    def get(self) -> Any:
        return self.table.get("k007", 1000)["total"]


KINDS: tuple[type[Stage], ...] = (Results, Stored, Windowed, Sessioned, Versioned)
