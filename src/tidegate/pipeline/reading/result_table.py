"""A flow's windows as a table that any process can read while the app goes on: the state itself, without a copy.

What `.table(name)` promises: every answer is of one commit, whole rounds or nothing of them, and a scan is so from its
first batch to its last; a later question may see a later commit (`pinned` keeps one for several questions). A commit
that is collected while a scan reads it ends the scan with `CommitGoneError`. What retention has dropped is not there.

    with app.read("orders-per-minute") as table:
        table.fetch("alice", "2026-01-01T10:00Z", "2026-01-01T11:00Z")
        table.to_pandas()

Bounds are inclusive at both ends: of a window its start counts, and a session is found when it touches them (it ends at
or after the first moment and starts at or before the second, as in Kafka Streams). Moments are epoch milliseconds,
ISO 8601, or a datetime of Python, pandas, numpy or Arrow.

Thread rule: from any thread, many at a time; one of them moves on to a newer commit while the others go on reading.
`close` when nobody asks any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import Clock, SystemClock
from tidegate.durations import MomentLike, moment_ms
from tidegate.errors import CommitGoneError, CorruptError, InvalidError, UnavailableError
from tidegate.pipeline.definition.changes import as_recorded
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.reading.late import dead_letters, late_rows
from tidegate.pipeline.reading.rows import ResultRows, result_schema, typed_rows
from tidegate.pipeline.reading.snapshot import FlowSnapshot
from tidegate.pipeline.rounds.records import KEPT, CommitRecord, Records
from tidegate.pipeline.tasks.chain import WindowOperators
from tidegate.storage.backends.port import StorageBackend
from tidegate.tables.building.sides import Sides
from tidegate.windows.kinds import LATEST, Session, Sliding
from tidegate.windows.operators.dedupe import DedupeOperator
from tidegate.windows.operators.shapes import WindowRows

Answer = TypeVar("Answer")
LOOK_AGAIN_MS: Final = 100
TRIES: Final = 4
_SMALL_BYTES: Final = 4 << 20  # state that can be looked at whenever somebody displays the table
_TOO_LARGE: Final = "rows are not read for display: ask with fetch(key), fetch_all(from, to) or sql(query)"


class ResultTable:
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
    ) -> None:
        if flow.window is None:
            raise InvalidError(f"flow {flow.name} has no windows; read its topic instead")
        self.flow, self._kind = flow, flow.window.kind
        self._backend, self._app, self._round = backend, app, round
        self._records = Records(backend, app)
        self._clock = clock or SystemClock()
        self._owns_backend = owns_backend
        self._moving = threading.Lock()
        self._sides: Sides[FlowSnapshot] = Sides()
        self._view: FlowSnapshot | None = None  # of `pinned`: what all questions are answered from
        self._looked_ms: int | None = None
        self._closed = False

    def __enter__(self) -> ResultTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    def _few(self) -> ResultRows | None:
        """All rows, if the state is so small that looking costs nothing."""
        held = sum(line.backlog_bytes for line in self.commit.tasks if line.flow == self.flow.name)
        return self.all() if held <= _SMALL_BYTES else None

    @contextmanager
    def pinned(self) -> Iterator[ResultTable]:
        """The table at its newest commit, for several questions that belong together; use it with `with`."""
        with self._pinned() as shown:
            at = copy(self)
            at._view, at._owns_backend = shown, False
            yield at

    @property
    def name(self) -> str:
        return self.flow.name

    @property
    def schema(self) -> pa.Schema:
        return result_schema(self.flow)

    @property
    def commit(self) -> CommitRecord:
        """The commit that a question asked now is answered from."""
        return self._read(lambda shown: shown.commit)

    @property
    def round(self) -> int:
        return self.commit.round

    def refresh(self) -> int:
        """Look for a newer commit now, instead of at most ten times a second; the round that is shown then."""
        self._check_open()
        self._look_for_newer(force=True)
        with self._sides.held() as shown:
            return shown.commit.round

    @property
    def position(self) -> dict[int, int]:
        """What has been seen: source partition → the offset after it."""
        return {
            line.partition: line.next_offset for line in self.commit.sources if line.flow == self.flow.name
        }

    # -- questions -------------------------------------------------------------------------------

    def fetch(self, key: Any, start_from: MomentLike = 0, start_to: MomentLike = LATEST) -> ResultRows:
        """One key's windows that start in [from, to]; of sessions those that touch it."""
        return self.fetch_many([key], start_from, start_to)

    def fetch_many(
        self, keys: Sequence[Any], start_from: MomentLike = 0, start_to: MomentLike = LATEST
    ) -> ResultRows:
        """Many keys' windows that start in [from, to], in one go; of sessions those that touch it."""
        encoded = pa.array([self._key(key) for key in keys], pa.binary()).unique()
        first, last = max(0, moment_ms(start_from)), moment_ms(start_to)
        return self._rows(
            first, last, lambda operator, first, last: operator.windows_of(encoded, first, last)
        )

    def get(self, key: Any, start: MomentLike) -> dict[str, Any] | None:
        """The aggregates of the window that starts there; None when there is none."""
        moment = moment_ms(start)
        return next(
            (row.value for row in self.fetch(key, moment, moment) if row.window.start == moment), None
        )

    def fetch_all(self, start_from: MomentLike = 0, start_to: MomentLike = LATEST) -> ResultRows:
        """All keys' windows that start in [from, to]; of sessions those that touch it."""
        first, last = max(0, moment_ms(start_from)), moment_ms(start_to)
        return self._rows(first, last, lambda operator, first, last: operator.windows(first, last))

    def all(self) -> ResultRows:
        """Everything; for large tables `batches` needs less memory."""
        return self.fetch_all()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Everything of one commit as Arrow batches, task by task, in no promised order.

        The commit is the newest when the first batch is taken, and is let go with the iterator.
        """
        for attempt in range(TRIES):
            is_begun = False
            try:
                with self._pinned(is_retry=attempt > 0) as shown:
                    for batch in self._batches(shown):
                        is_begun = True
                        yield batch
                return
            except CommitGoneError:
                if is_begun or attempt == TRIES - 1:
                    raise

    def to_arrow(self) -> pa.Table:
        return self.all().to_arrow()

    def to_pandas(self) -> Any:
        return self.all().to_pandas()

    def to_polars(self) -> Any:
        return self.all().to_polars()

    def to_spark(self, spark: Any) -> Any:
        """A DataFrame of all windows as they are now."""
        return spark.createDataFrame(self.to_arrow())

    def sql(self, query: str) -> pa.Table:
        """Ask in SQL: the rows are the table `rows`, or `this`. Needs DuckDB (the `sql` extra)."""
        from tidegate.tables.queries.sql import ask

        return self._read(lambda shown: ask(query, self.schema, self._batches(shown)))

    def export(self, path: str | Path) -> int:
        """Write all rows into a Parquet file, complete or not at all; how many there were."""
        from tidegate.tables.queries.export import write_parquet

        return self._read(lambda shown: write_parquet(Path(path), self.schema, self._batches(shown)))

    def late(self) -> pa.Table:
        """Records that came too late, or from the future: whole, with which window did not take them and why."""
        return self._read(late_rows)

    def dead_letters(self) -> pa.Table:
        """Records whose value could not be read, or that `validate()` proved corrupt, with the reason."""
        return self._read(
            lambda shown: dead_letters(self._backend, self._records, shown.commit, self.flow.name)
        )

    def as_of(self, round: int) -> ResultTable:
        """The same table as another commit left it; the last ten are kept."""
        self._check_open()
        past = ResultTable(
            self._backend, self._app, self.flow, round=round, clock=self._clock, owns_backend=False
        )
        past._read(lambda shown: shown.commit)
        return past

    def rounds(self) -> list[int]:
        """The commits that `as_of` reaches."""
        self._check_open()
        return list(self._records.rounds())

    def close(self) -> None:
        """Let everything go; fine to call twice."""
        if self._closed:
            return
        self._closed = True
        self._sides.close()
        if self._owns_backend:
            self._backend.close()

    # -- inside ----------------------------------------------------------------------------------

    def _rows(
        self, first: int, last: int, look: Callable[[WindowOperators, int, int], WindowRows]
    ) -> ResultRows:
        if isinstance(self._kind, Sliding):  # the operator counts by ends, which lie a window's width behind
            first, last = (min(bound, LATEST - self._kind.difference_ms) for bound in (first, last))
            first, last = first + self._kind.difference_ms, last + self._kind.difference_ms
        is_session = isinstance(
            self._kind, Session
        )  # the operator goes by ends: which begin in time is seen here
        end_to = LATEST if is_session else last
        found = self._read(
            lambda shown: [look(_windows(shown, number), first, end_to) for number in shown.tasks]
        )
        tables = [typed_rows(rows, self.flow) for rows in found if len(rows)]
        table = pa.concat_tables(tables).combine_chunks() if tables else self.schema.empty_table()
        if is_session and last < LATEST:
            table = table.filter(pc.less_equal(table["window_start"], last))
        if table.num_rows > 1:
            keys = [(name, "ascending") for name in ("key", "window_start", "window_end")]
            table = table.take(pc.sort_indices(table, sort_keys=keys))
        return ResultRows(table, self.flow)

    def _key(self, key: Any) -> bytes:
        raw = self.flow.key_serde.encode(key)
        if raw is None:
            raise TypeError("key must not be None")
        return raw

    def _batches(self, shown: FlowSnapshot) -> Iterator[pa.RecordBatch]:
        for number in shown.tasks:
            found = _windows(shown, number).windows()
            yield from typed_rows(found, self.flow).to_batches(max_chunksize=1 << 16)

    def _read(self, look: Callable[[FlowSnapshot], Answer]) -> Answer:
        """Ask one commit; begin again with the newest where it is collected meanwhile."""
        for attempt in range(TRIES - 1):
            try:
                with self._pinned(is_retry=attempt > 0) as shown:
                    return look(shown)
            except CommitGoneError:
                continue
        with self._pinned(is_retry=True) as shown:
            return look(shown)

    @contextmanager
    def _pinned(self, *, is_retry: bool = False) -> Iterator[FlowSnapshot]:
        """What is read, as it is until the block ends."""
        self._check_open()
        if self._view is not None:
            yield self._view
            return
        self._look_for_newer(force=is_retry)
        with self._sides.held() as shown:
            try:
                yield shown
            except CorruptError as error:
                if shown.commit.round in self._records.rounds():
                    raise  # damage
                raise CommitGoneError(
                    f"round {shown.commit.round} of app {self._app} is not kept any more: the app has gone on by more "
                    f"than {KEPT} rounds while table {self.flow.name} was read; read it again"
                ) from error

    def _look_for_newer(self, *, force: bool) -> None:
        """Show the newest commit; if another thread is about to, and need not be waited for, what is shown will do."""
        if self._sides.shown is not None and (self._round is not None or (not force and self._is_fresh())):
            return
        if not self._moving.acquire(blocking=force or self._sides.shown is None):
            return
        try:
            now_ms, shown = self._clock.monotonic_ms(), self._sides.shown
            number = self._newest() if self._round is None else self._round
            if shown is None or shown.commit.round != number:
                commit = self._records.read_commit(number)[0]
                self._sides.move(lambda: self._opened(commit), lambda each: each.show(commit))
            self._looked_ms = now_ms
        finally:
            self._moving.release()

    def _is_fresh(self) -> bool:
        looked_ms = self._looked_ms
        return looked_ms is not None and self._clock.monotonic_ms() - looked_ms < LOOK_AGAIN_MS

    def _opened(self, commit: CommitRecord) -> FlowSnapshot:
        flow = self._as_recorded(commit)
        return FlowSnapshot(self._backend, self._app, flow, commit, clock=self._clock)

    def _as_recorded(self, commit: CommitRecord) -> Flow:
        """The flow with its stores laid out as they were when the commit was made."""
        found = self._records.load_app()
        lines = () if found is None else found[0].definitions.get(commit.definition, ())
        line = next((each for each in lines if each.name == self.flow.name), None)
        return self.flow if line is None else as_recorded(self.flow, line.description)

    def _newest(self) -> int:
        known = list(self._records.rounds())
        if not known:
            raise UnavailableError(f"app {self._app} has no commit yet; run it, or wait for its first round")
        return known[-1]

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidError(f"table {self.flow.name} is closed; open it again")


def _windows(shown: FlowSnapshot, task: int) -> WindowOperators:
    operator = shown.chain(task).operators[-1]
    if isinstance(operator, DedupeOperator):
        raise InvalidError(f"flow {shown.flow.name} has no windows; read its topic instead")
    return operator
