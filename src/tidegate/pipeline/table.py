"""Result tables: a flow's committed windows, late records and dead letters, read from state without a copy.

Any process can read while the app runs. Every answer is of one commit, and a scan is of one commit from its first
batch to its last; a later query may see a later commit (`pinned` keeps one for several queries). If a commit is
collected during a scan, the scan raises `CommitGoneError`. Data dropped by retention is not there.

    with app.open_table("orders-per-minute") as table:
        table.fetch("alice", "2026-01-01T10:00Z", "2026-01-01T11:00Z")
        table.to_pandas()

Columns: key, window_start, window_end, the aggregates under their own names, then `timestamp`, the newest event time
in the window. An aggregate with the name of another column is called `value.<name>`. Times are epoch milliseconds.

Opening a commit restores the tasks' operators read-only, which reads metadata; rows are read by queries. Nothing is
written and no lock is taken.

Thread rule: that of `Table`; reading from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import Clock, SystemClock
from tidegate.durations import DurationLike, MomentLike
from tidegate.errors import CorruptError, InvalidError, UnavailableError, UnsupportedError
from tidegate.pipeline.checkpoint import KEPT, CommitRecord, Records, TaskLine
from tidegate.pipeline.dead_letters import read_letters
from tidegate.pipeline.evolution import as_recorded
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.lineage import explain_window
from tidegate.pipeline.messages import storage_task
from tidegate.pipeline.operator_chain import TaskChain, WindowOperators
from tidegate.pipeline.transforms import Around
from tidegate.randomness import SystemRandomness
from tidegate.storage import StorageConfig, WorkerStorageRuntime
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.commits import TRIES, CommitFollower, PinnedCommit
from tidegate.tables.dead_letters import DEAD_LETTER_SCHEMA
from tidegate.tables.export import address_for_spark
from tidegate.tables.queries import KeyEnds
from tidegate.tables.rows import Row, Rows
from tidegate.tables.snapshot import Snapshot
from tidegate.tables.table import Positions, Table
from tidegate.windows.keys import SessionWindow, TimeWindow, partitions_of_inner_keys
from tidegate.windows.kinds import LATEST, Session, Sliding
from tidegate.windows.operators.base import WindowRows
from tidegate.windows.operators.dedupe import DedupeOperator

# -- snapshot -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlowSource:
    """The operators of a flow's tasks, as a source for reading."""

    flow: Flow
    chains: dict[int, TaskChain]

    @cached_property
    def windows(self) -> dict[int, WindowOperators]:
        """Task → the operator that makes its windows."""
        found: dict[int, WindowOperators] = {}
        for number in sorted(self.chains):
            operator = self.chains[number].operators[-1]
            if isinstance(operator, DedupeOperator):
                raise InvalidError(f"flow {self.flow.name} has no windows; read its topic instead")
            found[number] = operator
        return found


FlowSnapshot: TypeAlias = Snapshot[CommitRecord, FlowSource]


class AppCommits:
    """The commits of an app with the state of one flow, for a `CommitFollower`."""

    def __init__(
        self,
        backend: StorageBackend,
        app: str,
        flow: Flow,
        *,
        clock: Clock,
        round: int | None = None,
        storage: StorageConfig | None = None,
        tasks: frozenset[int] | None = None,
    ) -> None:
        """With `round` that commit is served for good; with `tasks`, only the state of these.

        `storage` is the app's storage config: it limits the memory for merging reads.
        """
        self.name = flow.name
        self.records = Records(backend, app)
        self._backend, self._app, self._flow = backend, app, flow
        self._clock, self._storage, self._round = clock, storage, round
        self._only: CommitRecord | None = None
        self._wanted = tasks

    def newest(self) -> CommitRecord:
        if self._only is not None:
            return self._only
        number = self.records.newest() if self._round is None else self._round
        if number is None:
            raise UnavailableError(f"app {self._app} has no commit yet; run it, or wait for its first round")
        commit = self.records.read_commit(number)[0]
        self._only = None if self._round is None else commit
        return commit

    def open(self, commit: CommitRecord) -> FlowSnapshot:
        flow, tokens = self._as_recorded(commit), self._tokens(commit)
        tasks = max(4, len(tokens))
        config = StorageConfig(
            max_tasks=tasks, worker_total_bytes=tasks * (256 << 20), memory_ceiling_bytes=tasks * (512 << 20),
            deleted_by="master",
        )  # fmt: skip
        if self._storage is not None:
            ceiling = config.worker_total_bytes + self._storage.largest_append_bytes
            most = min(config.max_batch_bytes, self._storage.max_batch_bytes)
            config = replace(config, memory_ceiling_bytes=ceiling, max_batch_bytes=most)
        sources = [line.partition for line in commit.sources if line.flow == flow.name]
        around, randomness = Around(self._backend, self._clock), SystemRandomness()

        def attach(runtime: WorkerStorageRuntime) -> FlowSource:
            chains = {}
            for task, number in self._tasks(commit).items():
                partitions = sources if flow.rekey_at is not None else [number]
                chains[number] = TaskChain(runtime, task, flow, partitions, around, randomness=randomness)
            return FlowSource(flow, chains)

        return Snapshot(self._backend, config, commit, tokens, attach, clock=self._clock)

    def fits(self, view: FlowSnapshot, commit: CommitRecord) -> bool:
        return view.commit.definition == commit.definition and self._tasks(view.commit) == self._tasks(commit)

    def show(self, view: FlowSnapshot, commit: CommitRecord) -> None:
        view.show(commit, self._tokens(commit))

    def gone(self, commit: CommitRecord) -> str:
        if commit.round in self.records.rounds():
            return ""
        return (
            f"round {commit.round} of app {self._app} is not kept any more: the app has made more than {KEPT} newer "
            f"ones while table {self.name} was read; read it again"
        )

    def _tasks(self, commit: CommitRecord) -> dict[str, int]:
        """Map each storage task to its number in the flow."""
        return {storage_task(self._app, self.name, line.task): line.task for line in self._lines(commit)}

    def _tokens(self, commit: CommitRecord) -> dict[str, bytes]:
        lines = self._lines(commit)
        if not lines and any(line.flow == self.name for line in commit.sources):
            raise UnavailableError(
                f"app {self._app} has begun with flow {self.name!r} and has no round of it yet; wait for its first"
            )
        if not lines:
            raise InvalidError(
                f"commit {commit.round} of app {self._app} knows no flow {self.name!r}; run the app as it is "
                "defined now once, or read it with the definition it was run with"
            )
        return {storage_task(self._app, self.name, line.task): line.token for line in lines}

    def _lines(self, commit: CommitRecord) -> list[TaskLine]:
        found = [line for line in commit.tasks if line.flow == self.name]
        return [line for line in found if self._wanted is None or line.task in self._wanted]

    def _as_recorded(self, commit: CommitRecord) -> Flow:
        """Return the flow with its stores laid out as they were when the commit was made."""
        line = next((each for each in self.records.flows_of(commit) if each.name == self.name), None)
        return self._flow if line is None else as_recorded(self._flow, line.description)


# -- late -----------------------------------------------------------------------------------------


def late_rows(snapshot: FlowSnapshot) -> pa.Table:
    """Return the late tables of all operators: key, stream_time, event_ts, partition, offset, window_start,
    how_late_ms, reason, values, and which operator set the record aside. `window_start` is -1 where no window was
    concerned."""
    pieces: list[pa.Table] = []
    for number in sorted(snapshot.source.chains):
        chain = snapshot.source.chains[number]
        for operator in chain.operators:
            if operator.late_table is not None:
                found = operator.late_table.read()
                pieces.append(
                    found.append_column("operator", pa.array([operator.name] * found.num_rows, pa.string()))
                )
    if not pieces:
        return pa.table({})
    whole = pa.concat_tables(pieces, promote_options="permissive")
    return whole.sort_by([("partition", "ascending"), ("offset", "ascending")])


def dead_letters(backend: StorageBackend, records: Records, commit: CommitRecord, flow: str) -> pa.Table:
    """Return the unreadable records of all source partitions: offset, partition, reason, key, value."""
    lines = [line for line in commit.sources if line.flow == flow]
    pieces = [read_letters(backend, records.state_of(line)) for line in lines]
    whole = pa.concat_tables([DEAD_LETTER_SCHEMA.empty_table(), *pieces])
    return whole.sort_by([("partition", "ascending"), ("offset", "ascending")])


def late_of(backend: StorageBackend, app: str, flow: Flow) -> pa.Table:
    """Return late and future records as of the app's last commit; empty where the flow keeps none."""
    if not flow.is_stateful:
        raise InvalidError(
            f"flow {flow.name} has neither windows nor deduplication, so nothing is ever late in it"
        )
    commits = AppCommits(backend, app, flow, clock=SystemClock())

    def look(commit: CommitRecord) -> pa.Table:
        with closing(commits.open(commit)) as snapshot:
            return late_rows(snapshot)

    return _newest(commits.records, look)


def dead_letters_of(backend: StorageBackend, app: str, flow: str) -> pa.Table:
    """Return unreadable and corrupt records as of the app's last commit, with the reason."""
    records = Records(backend, app)

    def look(commit: CommitRecord) -> pa.Table:
        if not any(line.flow == flow for line in commit.sources):
            raise InvalidError(f"app {app} was not run with a flow {flow} yet; run it once")
        return dead_letters(backend, records, commit, flow)

    return _newest(records, look)


def _newest(records: Records, look: Callable[[CommitRecord], pa.Table]) -> pa.Table:
    """Read from the last commit, or from a newer one if objects that it needs are collected meanwhile."""
    number = records.newest()
    for _ in range(TRIES):
        if number is None:
            raise UnavailableError(
                f"app {records.app} has no commit yet; run it, or wait for its first round"
            )
        try:
            return look(records.read_commit(number)[0])
        except CorruptError:
            before, number = number, records.newest()
            if number == before:
                raise
    raise UnavailableError(f"app {records.app} commits faster than it can be read; try again")


# -- rows -----------------------------------------------------------------------------------------

OWN = ("key", "window_start", "window_end", "timestamp")


class FlowForm:
    """The tabular form of a flow's windows."""

    order = ("key", "window_start", "window_end")

    def __init__(self, flow: Flow) -> None:
        self.name = flow.name
        self._flow = flow

    @cached_property
    def columns(self) -> list[tuple[str, str]]:
        """The aggregates' names and columns, in order."""
        names = self._flow.result_schema.names
        return [(name, f"value.{name}" if name in OWN else name) for name in names]

    @cached_property
    def stored(self) -> pa.Schema:
        times = pa.int64()
        values = zip(self.columns, self._flow.result_schema, strict=True)
        return pa.schema(
            [
                pa.field("key", self._flow.key_serde.arrow_type),
                pa.field("window_start", times),
                pa.field("window_end", times),
                *[pa.field(column, field.type) for (_, column), field in values],
                pa.field("timestamp", times),
            ]
        )

    def batch(self, rows: WindowRows) -> pa.RecordBatch:
        """Return windows as a batch, with keys as the flow's serde reads them."""
        key = self._flow.key_serde.decode_column(rows.key).require_good()
        starts, ends, times = (pa.array(each) for each in (rows.window_start, rows.window_end, rows.ts))
        columns = [key, starts, ends, *rows.values.columns, times]
        return pa.RecordBatch.from_arrays(columns, schema=self.stored)

    def typed(self, stored: pa.Table) -> pa.Table:
        return stored

    def values(self, stored: pa.Table) -> Iterator[Row]:
        window = self._flow.window
        of = SessionWindow if window is not None and isinstance(window.kind, Session) else TimeWindow
        for row in stored.to_pylist():
            value = {name: row[column] for name, column in self.columns}
            yield Row(row["key"], of(row["window_start"], row["window_end"]), value, row["timestamp"])


class FlowRows:
    """`RowSource` over the operators of a flow's tasks."""

    def __init__(self, snapshot: FlowSnapshot, form: FlowForm, records: Records) -> None:
        self.form = form
        self._snapshot, self._records = snapshot, records
        self._flow = snapshot.source.flow
        window = self._flow.window
        self._kind = None if window is None else window.kind
        self.kind = "session" if isinstance(self._kind, Session) else "window"

    @property
    def commit(self) -> CommitRecord:
        return self._snapshot.commit

    def encoded(self, key: Any) -> bytes | None:
        return self._flow.key_serde.encode(key)

    def find(self, keys: Sequence[bytes], first: int, last: int) -> list[pa.RecordBatch]:
        column = pa.array(keys, pa.binary())
        if len(keys) > 1:
            column = column.unique()
        low, high = self._operators_bounds(first, last)
        found = (each.windows_of(column, low, high) for each in self._owners(column))
        return [self.form.batch(rows) for each in found if len(rows := self._begun(each, last))]

    def scan(
        self, first: int, last: int, *, keys: KeyEnds | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        low, high = self._operators_bounds(first, last)
        for operator in self._snapshot.source.windows.values():
            for piece in operator.scan(low, high):
                found = self._begun(piece, last)
                rows = found if keys is None else found.take(_between(found.key, keys))
                batch = self.form.batch(rows)
                for start in range(0, batch.num_rows, batch_rows):
                    yield batch.slice(start, batch_rows)

    def late(self) -> pa.Table:
        return late_rows(self._snapshot)

    def dead_letters(self) -> pa.Table:
        return dead_letters(self._snapshot.backend, self._records, self.commit, self._flow.name)

    def _owners(self, keys: pa.BinaryArray) -> list[WindowOperators]:
        """Return the operators that may hold these keys: in a re-keyed flow those of their shards.

        Otherwise the producing application decides in which partition, and so in which task, a key is.
        """
        windows, shards = self._snapshot.source.windows, self._flow.shards
        if self._flow.rekey_at is None or shards is None or set(windows) != set(range(shards)):
            return list(windows.values())
        owners = np.maximum(partitions_of_inner_keys(keys, shards), 0)
        return [windows[number] for number in np.unique(owners).tolist()]

    def _operators_bounds(self, first: int, last: int) -> tuple[int, int]:
        """Return bounds as operators take them: sliding windows and sessions are found by their ends."""
        if isinstance(self._kind, Sliding):
            width = self._kind.difference_ms
            return min(first, LATEST - width) + width, min(last, LATEST - width) + width
        return first, LATEST if self.kind == "session" else last

    def _begun(self, rows: WindowRows, last: int) -> WindowRows:
        """Of sessions, which were found by their ends, return those that start at `last` or before."""
        if self.kind != "session" or last == LATEST or not len(rows):
            return rows
        return rows.take(np.flatnonzero(rows.window_start <= last))


def _between(column: pa.BinaryArray, keys: KeyEnds) -> Any:
    chosen = np.ones(len(column), np.bool_)
    if keys.low is not None:
        chosen &= pc.greater_equal(column, pa.scalar(keys.low, pa.binary())).to_numpy(zero_copy_only=False)
    if keys.high is not None:
        chosen &= pc.less_equal(column, pa.scalar(keys.high, pa.binary())).to_numpy(zero_copy_only=False)
    return np.flatnonzero(chosen)


_SMALL_BYTES: Final = 4 << 20  # state small enough to read whenever the table is displayed
_TOO_LARGE: Final = "rows are not read for display: ask with fetch(key), fetch_all(from, to) or sql(query)"


class ResultTable(Table):
    """The windows of one flow as of the app's last commit, or of one given commit."""

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
        """Print the first rows; for a large table, print how to query it."""
        rows = self._few()
        rows.show() if rows is not None else print(f"{self!r}: {_TOO_LARGE}")

    def _few(self) -> Rows | None:
        """Return all rows if the state is small, else None."""
        held = sum(line.backlog_bytes for line in self.commit.tasks if line.flow == self.flow.name)
        return self.all() if held <= _SMALL_BYTES else None

    @contextmanager
    def pinned(self) -> Iterator[ResultTable]:
        """The table fixed at its newest commit until the block ends, for several queries of the same commit."""
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
        """The commit that serves a query now."""
        with self._pinned(None, 0) as rows:
            return rows.commit

    @property
    def round(self) -> int:
        return self.commit.round

    def refresh(self) -> int:
        """Look for a newer commit now, instead of at most ten times a second; return its round."""
        self._check_open()
        self._follower.refresh()
        return self.round

    @property
    def position(self) -> dict[int, int]:
        """The source partitions' positions: partition → the offset after the last record read."""
        return {
            line.partition: line.next_offset for line in self.commit.sources if line.flow == self.flow.name
        }

    def explain(self, key: Any, start: MomentLike | None = None, end: MomentLike | None = None) -> Any:
        """Explain which source records made the window that starts there, and why others did not count."""
        if self._log is None:
            raise UnsupportedError(
                f"table {self.name} was opened without a log, and its windows are explained by the records of "
                f"{self.flow.source.topic}: read it with App.open_table, or call explain_window(table, log, key, start)"
            )
        if start is None or end is not None:
            raise TypeError(f"table {self.name} has windows: explain(key, start) says which")
        return explain_window(self, self._log(), key, start)

    def to_spark(self, spark: Any, *, columns: Sequence[str] = ()) -> Any:
        """Return the windows of the last commit as a Spark DataFrame that executors read."""
        address, commit = address_for_spark(self._backend, self.name), self.commit
        tasks = [line.task for line in commit.tasks if line.flow == self.name]
        frame = import_module("tidegate.spark.table_source").app_table_frame
        return frame(spark, address, self._app, self.flow, commit.round, tasks, columns=columns)

    def as_of(self, round: int) -> ResultTable:
        """Return the table as of another commit; the last ten are kept."""
        self._check_open()
        past = copy(self)
        commits = AppCommits(
            self._backend, self._app, self.flow, clock=self._clock, round=round, storage=self._storage
        )
        past._follower, past._owns_backend = CommitFollower(commits, self._clock), False
        past.refresh()
        return past

    def rounds(self) -> list[int]:
        """The commits that `as_of` can read."""
        self._check_open()
        return list(self._records.rounds())

    def close(self) -> None:
        """Close everything; safe to call twice."""
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
