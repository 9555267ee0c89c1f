"""A flow's windows as a table that any process can read while the app runs: the state itself, without a copy.

What `.to_table(name)` promises: every answer is of one commit, whole rounds or nothing of them, and a scan is so from
its first batch to its last; a later question may see a later commit (`pinned` keeps one for several questions). A
commit that is collected while a scan reads it ends the scan with `CommitGoneError`. What retention has dropped is not
there.

    with app.open_table("orders-per-minute") as table:
        table.fetch("alice", "2026-01-01T10:00Z", "2026-01-01T11:00Z")
        table.to_pandas()

Thread rule: that of `Table`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from importlib import import_module
from typing import Any, Final

import pyarrow as pa

from tidegate.clock import Clock, SystemClock
from tidegate.durations import DurationLike, MomentLike
from tidegate.errors import InvalidError, UnsupportedError
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.reading.rows import FlowForm, FlowRows
from tidegate.pipeline.reading.snapshot import AppCommits, FlowSnapshot
from tidegate.pipeline.rounds.records import CommitRecord
from tidegate.storage import StorageConfig
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.commits import CommitFollower, PinnedCommit
from tidegate.tables.export import address_for_spark
from tidegate.tables.rows import Rows
from tidegate.tables.table import Positions, Table

_SMALL_BYTES: Final = 4 << 20  # state that can be looked at whenever somebody displays the table
_TOO_LARGE: Final = "rows are not read for display: ask with fetch(key), fetch_all(from, to) or sql(query)"


class ResultTable(Table):
    """The windows of one flow, as the app's last commit has them, or one certain commit."""

    def __init__(
        self,
        backend: StorageBackend,
        app: str,
        flow: Flow,
        *,
        round: int | None = None,
        clock: Clock | None = None,
        owns_backend: bool = True,
        storage: StorageConfig | None = None,
        log: Callable[[], Any] | None = None,
    ) -> None:
        """`log` opens the log of the source, which `explain` reads."""
        if flow.window is None:
            raise InvalidError(f"flow {flow.name} has no windows; read its topic instead")
        self.flow, self._kind = flow, flow.window.kind
        self._backend, self._app, self._log = backend, app, log
        self._clock = clock or SystemClock()
        self._owns_backend, self._storage, self._form = owns_backend, storage, FlowForm(flow)
        commits = AppCommits(backend, app, flow, clock=self._clock, round=round, storage=storage)
        self._records = commits.records
        self._follower: CommitFollower[CommitRecord, FlowSnapshot] | PinnedCommit[FlowSnapshot]
        self._follower = CommitFollower(commits, self._clock)
        self._closed = False

    def __repr__(self) -> str:
        return f"ResultTable({self.flow.name!r} of app {self._app!r})"

    def _repr_html_(self) -> str:
        from tidegate.notebook import cell, facts_html, grid_html

        schema = self.schema
        positions = ", ".join(f"{number}: {offset}" for number, offset in self.position.items())
        facts = {
            "app": self._app,
            "round": self.round,
            "windows": self._kind,
            "read up to (partition: offset)": positions,
        }
        shown = facts_html(f"table {self.flow.name}", facts)
        if (rows := self._few()) is not None:
            return shown + rows._repr_html_()
        names = grid_html(schema.names, [], total=0, types=[str(field.type) for field in schema])
        return f"{shown}{names}<p>{cell(_TOO_LARGE)}</p>"

    def show(self) -> None:
        """Print the first rows; of a large table, how to ask for some."""
        rows = self._few()
        rows.show() if rows is not None else print(f"{self!r}: {_TOO_LARGE}")

    def _few(self) -> Rows | None:
        """All rows, if the state is so small that looking costs nothing."""
        held = sum(line.backlog_bytes for line in self.commit.tasks if line.flow == self.flow.name)
        return self.all() if held <= _SMALL_BYTES else None

    @contextmanager
    def pinned(self) -> Iterator[ResultTable]:
        """The table at its newest commit, for several questions that belong together; use it with `with`."""
        self._check_open()
        with self._follower.pinned() as shown:
            at = copy(self)
            at._follower, at._owns_backend = PinnedCommit(shown), False
            yield at

    @property
    def name(self) -> str:
        return self.flow.name

    @property
    def schema(self) -> pa.Schema:
        return self._form.stored

    @property
    def commit(self) -> CommitRecord:
        """The commit that a question asked now is answered from."""
        with self._pinned(None, 0) as rows:
            return rows.commit

    @property
    def round(self) -> int:
        return self.commit.round

    def refresh(self) -> int:
        """Look for a newer commit now, instead of at most ten times a second; the round that is shown then."""
        self._check_open()
        self._follower.refresh()
        return self.round

    @property
    def position(self) -> dict[int, int]:
        """What has been seen: source partition → the offset after it."""
        return {
            line.partition: line.next_offset for line in self.commit.sources if line.flow == self.flow.name
        }

    def explain(self, key: Any, start: MomentLike | None = None, end: MomentLike | None = None) -> Any:
        """Which records of the source made the window that starts there, and why others did not."""
        from tidegate.pipeline.reading.explaining import explain_window

        if self._log is None:
            raise UnsupportedError(
                f"table {self.name} was opened without a log, and its windows are explained by the records of "
                f"{self.flow.source.topic}: read it with App.read, or call explain_window(table, log, key, start)"
            )
        if start is None or end is not None:
            raise TypeError(f"table {self.name} has windows: explain(key, start) says which")
        return explain_window(self, self._log(), key, start)

    def to_spark(self, spark: Any, *, columns: Sequence[str] = ()) -> Any:
        """The windows as the last commit has them now, as a Spark DataFrame that executors read."""
        address, commit = address_for_spark(self._backend, self.name), self.commit
        tasks = [line.task for line in commit.tasks if line.flow == self.name]
        frame = import_module("tidegate.spark.tables.source").app_table_frame
        return frame(spark, address, self._app, self.flow, commit.round, tasks, columns=columns)

    def as_of(self, round: int) -> ResultTable:
        """The same table as another commit left it; the last ten are kept."""
        self._check_open()
        past = ResultTable(
            self._backend,
            self._app,
            self.flow,
            round=round,
            clock=self._clock,
            owns_backend=False,
            storage=self._storage,
            log=self._log,
        )
        past.refresh()
        return past

    def rounds(self) -> list[int]:
        """The commits that `as_of` reaches."""
        self._check_open()
        return list(self._records.rounds())

    def close(self) -> None:
        """Close everything; fine to call twice."""
        if self._closed:
            return
        self._closed = True
        self._follower.close()
        if self._owns_backend:
            self._backend.close()

    @contextmanager
    def _pinned(
        self, at_least: Positions, timeout: int | DurationLike, *, is_retry: bool = False
    ) -> Iterator[FlowRows]:
        self._check_open()
        if at_least:
            raise UnsupportedError(
                f"table {self.name} is kept by app {self._app}, which commits by rounds; at_least is for tables over a "
                "topic. Wait until `position` is there"
            )
        with self._follower.pinned(refresh=is_retry) as shown:
            yield FlowRows(shown, self._form, self._records)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidError(f"table {self.flow.name} is closed; open it again")
