"""Tables of apps for Spark: one Spark task reads the windows of one task of the app, on an executor.

A1  all tasks of one read use one commit: the plan carries its round.
A2  columns are those of the table's own queries, with times as timestamps; a time that Spark cannot represent is
    null.
A3  memory: the windows of a few time buckets of one task at a time.

Does not import pyspark. Thread rule: pure functions over a snapshot of one's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.durations import format_moment
from tidegate.errors import CommitGoneError, InvalidError
from tidegate.pipeline.checkpoint import CommitRecord, Records
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.table import AppCommits, FlowForm, FlowRows
from tidegate.pipeline.table_catalog import RecordedTable, find_recorded, recorded_flow, recorded_line
from tidegate.spark.options import TableOptions
from tidegate.spark.table_source import LATEST, TIMES, TIMESTAMP, check_columns, sparks_column, sparks_type
from tidegate.storage.backends.base import MissingObjectError, StorageBackend
from tidegate.tables.commits import stored_tables


@dataclass(frozen=True)
class AppTableRead:
    """One commit of an app's table, as Spark's processes open it."""

    app: str
    flow: Flow | bytes  # the flow, or its recorded definition
    round: int
    tasks: tuple[int, ...]

    @property
    def known_flow(self) -> Flow:
        return recorded_flow(self.flow) if isinstance(self.flow, bytes) else self.flow


def planned_read(backend: StorageBackend, options: TableOptions) -> AppTableRead | None:
    """Return the requested commit of an app's table; None if the name is that of a stored table."""
    found = _named(backend, options)
    if found is None:
        return None
    if options.key is not None or options.value is not None:
        raise InvalidError(
            f"table {found.name} is of app {found.app}, which says how keys and values are read; leave the options key "
            "and value out"
        )
    line = recorded_line(backend, found)
    commit = _chosen(Records(backend, found.app), options, found)
    tasks = tuple(each.task for each in commit.tasks if each.flow == line.name)
    return AppTableRead(found.app, line.description, commit.round, tasks)


def _named(backend: StorageBackend, options: TableOptions) -> RecordedTable | None:
    known = stored_tables(backend)
    if options.table is None:
        return None if known else find_recorded(backend, None)
    return None if options.table in known else find_recorded(backend, options.table)


def _chosen(records: Records, options: TableOptions, table: RecordedTable) -> CommitRecord:
    rounds = records.rounds()
    if options.version is not None or options.moment_ms is None:
        number = options.version if options.version is not None else rounds[-1]
        return records.read_commit(number)[0]
    for number in reversed(rounds):
        commit = records.read_commit(number)[0]
        if commit.committed_ms <= options.moment_ms:
            return commit
    raise InvalidError(
        f"table {table.name} of app {table.app} keeps no commit as old as {format_moment(options.moment_ms)}; there "
        f"are rounds {rounds[0]} to {rounds[-1]}"
    )


def app_schema(flow: Flow, columns: Sequence[str] = ()) -> pa.Schema:
    """Return the columns of an app's table in Spark's types: the requested ones, in that order."""
    known = {
        each.name: TIMESTAMP if each.name in TIMES else sparks_type(each.type)
        for each in FlowForm(flow).stored
    }
    check_columns(columns, tuple(known), flow.name)
    return pa.schema([(name, known[name]) for name in columns or known])


def read_task(
    options: TableOptions, read: AppTableRead, task: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the windows of one task, in exactly `schema`."""
    flow = read.known_flow
    with options.opened() as backend:
        commits = AppCommits(
            backend, read.app, flow, clock=SystemClock(), round=read.round, tasks=frozenset([task])
        )
        try:
            with closing(commits.open(commits.newest())) as snapshot:
                rows = FlowRows(snapshot, FlowForm(flow), commits.records)
                for batch in rows.scan(0, LATEST, batch_rows=options.batch_rows):
                    arrays = [sparks_column(batch.column(field.name), field) for field in schema]
                    yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        except MissingObjectError as error:
            raise CommitGoneError(
                f"round {read.round} of app {read.app} is no longer there: the app has made several newer ones while "
                f"Spark read this one ({error.name} is gone); read the table again"
            ) from error
